"""The pydantic model of a task file (``*.task.yaml``)."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field

from runner.config.profile import Limits
from runner.config.section import (
    Count,
    Duration,
    Name,
    RelativePath,
    Scalar,
    Section,
    Text,
    Variable,
    Version,
    in_words,
)

_INPUT: Final = r"^[A-Za-z_][A-Za-z0-9_-]*$"
InputName = Annotated[
    str,
    Field(pattern=_INPUT),
    in_words(_INPUT, "is no name of an input: write letters, digits, '_' and '-', a letter or '_' first"),
]
_REVISION: Final = r"^[^-\s\x00][^\s\x00]*$"
Revision = Annotated[
    str,
    Field(pattern=_REVISION),
    in_words(_REVISION, "is no revision: write the name of a branch or tag, or a commit, without spaces or '-' first"),
]


class Input(Section):
    """One template input: at most one of ``env``, ``file`` and ``value``. Without any, ``--input`` must give it."""

    env: Variable | None = None
    """Environment variable that holds the value."""

    file: Text | None = None
    """File that holds the value, relative to the task file. At most 1 MiB of UTF-8."""

    value: Scalar | None = None
    """The value itself."""

    trust: Literal["trusted", "untrusted"] | None = None
    """Whether the value may be read as instructions. Absent: the trust of whoever started the run."""


class Workspace(Section):
    """Where the agent works."""

    path: Text | None = None
    """Directory, relative to the task file. Absent: the current directory. `--workspace` goes before it."""

    isolation: Literal["in-place", "copy", "worktree"] | None = None
    """Whether the agent works in the directory itself, in a copy of it, or in a git worktree of `base`."""

    base: Revision | None = None
    """The git revision that the patch is made against."""

    dirty: Literal["include", "refuse"] | None = None
    """What becomes of changes that are not committed: part of the start, or an error."""


class Patch(Section):
    """What is asked of the changes."""

    required: bool | None = None
    """Whether a run that changes nothing fails with NO_CHANGES."""


class Outputs(Section):
    """What the run must leave behind."""

    files: list[RelativePath] | None = None
    """Files in the workspace that must exist at the end; they are copied to the artifacts."""

    patch: Patch | None = None
    """What is asked of the changes."""


class Check(Section):
    """A command that decides whether the task is done. It runs in the sandbox, in the workspace."""

    name: Name
    """Name in reports; unique in the task."""

    run: Text
    """Shell text. Inputs are not filled in here."""

    timeout: Duration | None = None
    """Seconds after which it counts as failed."""

    retries: Annotated[int, Field(ge=0, le=100)] | None = None
    """How often a failure goes back to the agent as a message before it is final."""


class TaskLimits(Limits):
    """Limits of this task. They tighten the profile's; they raise one only where `overridable` lists it."""


class TaskModel(Section):
    """A task: what is to be done, where, and how it is known to be done."""

    version: Version
    """Version of the format."""

    name: Name | None = None
    """Name in reports. Absent: the name of the file."""

    prompt: Text | None = None
    """The task in words. `${inputs.NAME}` is an input, `$$` is a dollar sign. This or `prompt_file`."""

    prompt_file: Text | None = None
    """File with the task in words, relative to the task file."""

    inputs: dict[InputName, Input] | None = None
    """Values for the templates in `prompt` and `turns`, by name."""

    workspace: Workspace | None = None
    """Where the agent works."""

    profile: Text | None = None
    """Shipped profile, or file relative to the task file. `--profile` goes before it."""

    context: list[RelativePath] | None = None
    """Files of the workspace whose text the model gets before the prompt."""

    outputs: Outputs | None = None
    """What the run must leave behind."""

    checks: list[Check] | None = None
    """Commands that decide whether the task is done."""

    limits: TaskLimits | None = None
    """Tighter limits than the profile's."""

    turns: list[Text] | None = None
    """Further prompts, one turn each; templates as in `prompt`."""

    compact_at: list[Count] | None = None
    """Turns, counted from 1, before whose first request the history is compacted."""
