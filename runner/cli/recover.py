"""``nightshift recover``: close, seal and publish what a killed run left."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import click

from runner.cli.output import put, put_json, say
from runner.errors import ConfigError
from runner.figures import counted

if TYPE_CHECKING:
    from pathlib import Path

    from runner.config.spec import RunSpec
    from runner.messages import JsonObject


@click.command("recover")
@click.argument("session", metavar="SESSION")
@click.option("--json", "as_json", is_flag=True, help="Print result.json.")
def command(session: str, *, as_json: bool) -> None:
    """Close, seal and publish SESSION (an artifacts directory or an id), whose run was killed.

    Runs nothing of the task. The patch and the declared outputs come from the workspace if the run was started on
    this machine; of a session from elsewhere only the log is known. The run can go on behind it with resume.
    """
    from runner.cancellation import Cancellation
    from runner.resume import recover_session
    from runner.sandbox.process import harden_self
    from runner.session.store import session_directory
    from runner.signals import CancelOnSignal

    directory, header = session_directory(session)
    spec, note = _spec(directory, header)
    harden_self()
    cancellation = Cancellation()
    with CancelOnSignal(cancellation, say=say):
        finished = recover_session(spec, directory, environ=os.environ, cancellation=cancellation)
    if finished is None:
        put_json(json.dumps({"recovered": False})) if as_json else put("nothing to recover: the session is whole")
        return
    if note:
        say(f"note: {note}, so there is no patch and no declared output")
    result = finished.result
    if as_json:
        put_json(json.dumps(result, indent=2, ensure_ascii=False))
        return
    files = "no patch" if result["patch"] is None else f"a patch of {counted(result['patch']['files'], 'file')}"
    put(f"recovered: {result['code']}, {counted(result['steps'], 'step')}, {files}")
    say(f"report: {finished.directory / 'summary.md'}")


def _spec(directory: Path, header: JsonObject) -> tuple[RunSpec | None, str]:
    """The configuration of the run as it was started on this machine; where it is not known None, and why."""
    from runner.cli.options import load_command
    from runner.session.store import default_root
    from runner.workspace.records import read_record

    noted = read_record(default_root(os.environ), header["id"])
    if noted is None or noted.artifacts != str(directory):
        return None, "nothing is known here of how the run was started"
    try:
        return load_command(noted.command, check_credentials=True), ""
    except ConfigError as error:
        return None, f"the run's configuration cannot be loaded ({error.message})"
