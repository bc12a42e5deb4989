"""The pydantic model of a script file (``*.script.yaml``): the answers of the ``scripted`` provider."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from runner.config.section import Delay, Section, Text, Version

Tokens = Annotated[int, Field(ge=0)]


class Call(Section):
    """A tool call of the scripted model."""

    tool: Text
    """Name of the tool."""

    args: dict[str, Any] | None = None
    """Arguments, as the tool's schema wants them; they are not checked here, so that a script can be wrong."""

    id: Text | None = None
    """Id of the call. Absent: `call_<n>_<i>`, responses counted from 1 and calls from 0."""


class ScriptedUsage(Section):
    """Tokens that the response reports."""

    input: Tokens | None = None
    """Uncached input."""

    cacheRead: Tokens | None = None  # noqa: N815 - the name on disk, shared with usage.json
    """Input read from the cache."""

    cacheWrite: Tokens | None = None  # noqa: N815 - the name on disk, shared with usage.json
    """Input written to the cache."""

    output: Tokens | None = None
    """Output."""


class Expectation(Section):
    """What the request must hold, else the run ends with PROVIDER_FAILED naming the response."""

    lastToolResultContains: Text | None = None  # noqa: N815 - the name on disk
    """Text that the last tool result must contain."""


class ScriptedError(Section):
    """A failure in place of an answer."""

    status: Annotated[int, Field(ge=400, le=599)]
    """HTTP status."""

    code: Text | None = None
    """The provider's own error code."""

    message: Text | None = None
    """The provider's message."""

    retryAfter: Delay | None = None  # noqa: N815 - the name on disk
    """Seconds that the server asks to wait."""


class Response(Section):
    """One answer: `text`, `calls` or both; or an `error` alone."""

    text: str | None = None
    """What the model says."""

    reasoning: str | None = None
    """What the model thinks first."""

    calls: list[Call] | None = None
    """Tool calls that the model asks for."""

    usage: ScriptedUsage | None = None
    """Tokens that the response reports. Absent: an estimate."""

    delay: Delay | None = None
    """Time before the answer starts."""

    finish: Literal["stop", "tool-calls", "length", "filter"] | None = None
    """Why the answer ends. Absent: `tool-calls` with calls, else `stop`."""

    expect: Expectation | None = None
    """What the request must hold."""

    error: ScriptedError | None = None
    """A failure in place of an answer."""


class ScriptModel(Section):
    """A script: the answers of the `scripted` provider."""

    version: Version
    """Version of the format."""

    responses: list[Response]
    """One a model request, in order."""
