"""``nightshift resume``: go on with a session whose run was killed, or ended without success."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import click

from runner.cli.options import load_command, read_options, run_options
from runner.cli.output import say
from runner.cli.run import carry_out, check_classes, output_options
from runner.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from pathlib import Path

    from runner.cancellation import Cancellation
    from runner.messages import JsonObject
    from runner.run import FinishedRun, RunOptions


@click.command("resume")
@click.argument("session", metavar="SESSION")
@run_options
@output_options
@click.option(
    "--accept-config-change", "accept_changes", is_flag=True, help="Go on with another configuration; the log says so."
)
def command(session: str, task: str | None, artifacts: str | None, *, accept_changes: bool, **options: Any) -> int:
    """Go on with SESSION (an artifacts directory or an id), with TASK or as its run was started here.

    A session says nothing about what may be run. The task, profile and policy are loaded anew: those of the
    command line that the runner noted for a run on this machine, or those that are named now.
    """
    output = {key: options.pop(key) for key in ("output_format", "soft_fail", "paranoid")}
    check_classes(output["soft_fail"])
    if artifacts is not None:
        raise ConfigError("--artifacts: a session goes on in its own directory", hint="leave it out")

    from runner.resume import resume_task
    from runner.session.store import session_directory

    directory, header = session_directory(session)
    noted = command_of(directory, header["id"], read_options(task=task, **options))
    spec = load_command(noted, check_credentials=True)
    say(f"going on with {header['id']} in {directory}")

    def start(run_options: RunOptions, cancellation: Cancellation) -> FinishedRun:
        return resume_task(
            spec,
            directory,
            run_options,
            environ=os.environ,
            cancellation=cancellation,
            accept_changes=accept_changes,
        )

    return carry_out(start, noted, **output)


def command_of(directory: Path, session: str, given: JsonObject) -> JsonObject:
    """The options of the run: those given now, over those noted when it was started here.

    Raises:
        ConfigError: CONFIG_INVALID, no task is named and none was noted.
    """
    from runner.session.store import default_root
    from runner.workspace.records import read_record

    if given["task"] is not None or given["prompt"] is not None:
        return given
    noted = read_record(default_root(os.environ), session)
    if noted is None or noted.artifacts != str(directory):
        _refuse_completed(directory)
        raise ConfigError(
            f"nothing is known here of how the session {session} was started",
            hint="name the task, with the options of its run: nightshift resume SESSION TASK.yaml --profile P",
        )
    more = {key: given[key] for key in ("profile", "workspace", "trust") if given[key] is not None}
    lists = {key: [*noted.command[key], *given[key]] for key in ("sets", "inputs")}
    return {**noted.command, **more, **lists}


def _refuse_completed(directory: Path) -> None:
    """Say that a session completed, before its task is asked for in vain.

    Raises:
        ConfigError: CONFIG_INVALID, the last run of the session completed.
    """
    from runner.resume import last_end

    end, _ = last_end(directory)
    if end is not None and end.code == ErrorCode.COMPLETED.name:
        raise ConfigError("the session completed, so there is nothing to go on with", hint="run a new task")
