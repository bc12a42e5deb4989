"""Options that ``run`` and ``plan`` share, and how they become a ``RunSpec``."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from runner.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.config.spec import RunSpec
    from runner.messages import JsonObject

Function = TypeVar("Function", bound="Callable[..., Any]")

MAX_PROMPT: Final = 1_048_576
"""Most bytes of a prompt on stdin."""

_OPTIONS: Final = (
    click.argument("task", required=False),
    click.option("--prompt", metavar="TEXT", help="The task in words, in place of a file; - reads it from stdin."),
    click.option("--profile", metavar="NAME|FILE", help="Shipped profile or file; goes before the task's own."),
    click.option("--workspace", metavar="DIR", help="Directory to work in; goes before the task's own."),
    click.option("--artifacts", metavar="DIR", help="Directory for the artifacts; must be absent or empty."),
    click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Change a key of the profile."),
    click.option("--input", "inputs", metavar="NAME=VALUE", multiple=True, help="Value of a template input."),
    click.option("--event", metavar="FILE", help="Event that started the run; else $GITHUB_EVENT_PATH."),
    click.option("--trust", type=click.Choice(["untrusted"]), help="Lower the trust of whoever started the run."),
)


def run_options(function: Function) -> Function:
    """Give a command the argument TASK and the options above.

    Parameters: ``task, prompt, profile, workspace, artifacts, sets, inputs, event, trust``.
    """
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def load_options(*, check_credentials: bool, **options: Any) -> RunSpec:
    """Load the run that the options describe, in this process's environment and directory.

    Raises:
        ConfigError: As ``load_run`` and ``read_options``.
    """
    return load_command(read_options(**options), check_credentials=check_credentials)


def read_options(
    *,
    task: str | None,
    prompt: str | None,
    profile: str | None,
    workspace: str | None,
    sets: Sequence[str],
    inputs: Sequence[str],
    event: str | None,
    trust: str | None,
) -> JsonObject:
    """The options as one JSON object that means the same later and elsewhere: with directory, event and prompt.

    Raises:
        ConfigError: The current directory is gone, or stdin holds no prompt.
    """
    try:
        cwd = Path.cwd()
    except OSError as error:
        raise ConfigError(f"the current directory cannot be used: {error.strerror}", hint="change to another") from None
    return {
        "cwd": str(cwd),
        "task": task,
        "prompt": _read_prompt() if prompt == "-" and task is None else prompt,
        "profile": profile,
        "workspace": workspace,
        "sets": list(sets),
        "inputs": list(inputs),
        "event": event or os.environ.get("GITHUB_EVENT_PATH") or None,
        "trust": trust,
    }


def load_command(command: JsonObject, *, check_credentials: bool) -> RunSpec:
    """Load the run that ``read_options`` gave.

    Raises:
        ConfigError: As ``load_run``.
    """
    from runner.config.resolve import load_run

    task = command["task"]
    return load_run(
        task=None if task is None else Path(task),
        prompt=command["prompt"],
        profile=command["profile"],
        workspace=command["workspace"],
        sets=command["sets"],
        inputs=command["inputs"],
        event=command["event"],
        trust=command["trust"],
        environ=os.environ,
        cwd=Path(command["cwd"]),
        check_credentials=check_credentials,
    )


def _read_prompt() -> str:
    """The prompt on stdin; read only because ``-`` asked for it."""
    # With stdin closed at the start there is no object at all.
    data = sys.stdin.buffer.read(MAX_PROMPT + 1) if sys.stdin is not None else b""
    if len(data) > MAX_PROMPT:
        raise ConfigError("--prompt -: the text on stdin is over 1 MiB", hint="shorten it")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError("--prompt -: the text on stdin is not UTF-8", hint="send UTF-8") from None
