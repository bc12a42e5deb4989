"""Loading of a script file: the answers of the ``scripted`` provider as plain values.

The provider gets them from above, so that it needs neither yaml nor this package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.config.load import config_error, load_yaml
from runner.config.shape import demand
from runner.config.values import parse_duration

if TYPE_CHECKING:
    from pathlib import Path

    from runner.config.load import Document, Location
    from runner.messages import JsonObject


def load_script(path: Path, *, name: str | None = None) -> tuple[JsonObject, ...]:
    """Load a script file.

    Args:
        path: The file.
        name: How errors call it; the path if omitted.

    Returns:
        The responses in order. Keys as in the file (``text, reasoning, calls, usage, delay, finish,
        expect, error``), null ones left out; ``delay`` and ``retryAfter`` in seconds; ``args`` always there.

    Raises:
        ConfigError: The file cannot be read or is no script; all problems at once.
    """
    return parse_script(load_yaml(path, name=name))


def parse_script(document: Document) -> tuple[JsonObject, ...]:
    """Like ``load_script``, from a loaded document."""
    demand("script", document)
    problems = []
    responses = []
    for index, raw in enumerate(document.value["responses"]):
        location: Location = ("responses", index)
        response = _without_null(raw)
        if "error" in response and response.keys() - {"error", "delay", "expect"}:
            problems.append(document.problem(location, "an error stands alone: remove the other keys"))
        if not response.keys() & {"error", "text", "reasoning", "calls"}:
            problems.append(document.problem(location, "says nothing: add `text`, `calls` or `error`"))
        for holder, key in ((response, "delay"), (response.get("error", {}), "retryAfter")):
            if key in holder:
                try:
                    holder[key] = parse_duration(holder[key], zero=True)
                except ValueError as error:
                    problems.append(
                        document.problem((*location, *(() if key == "delay" else ("error",)), key), str(error))
                    )
        for section in ("usage", "expect", "error"):
            if section in response:
                response[section] = _without_null(response[section])
        # A null inside the arguments is a value of the call, not an absent key.
        if "calls" in response:
            response["calls"] = [{**_without_null(call), "args": call.get("args") or {}} for call in response["calls"]]
        responses.append(response)
    if problems:
        raise config_error(document.source, problems)
    return tuple(responses)


def _without_null(mapping: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if value is not None}
