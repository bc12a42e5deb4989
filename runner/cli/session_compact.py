"""``nightshift session compact``: fold the older part of a session's history into a summary, by hand."""

from __future__ import annotations

import json
import os
from typing import Any

import click

from runner.cli.options import load_command, read_options, run_options
from runner.cli.output import put, put_json, say
from runner.errors import ConfigError
from runner.figures import counted


@click.command("compact")
@click.argument("session", metavar="SESSION")
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(session: str, task: str | None, artifacts: str | None, *, as_json: bool, **options: Any) -> None:
    """Fold the older messages of SESSION into a summary, so that its next request is smaller.

    SESSION is an artifacts directory or an id of a session that can be resumed; TASK and the options are those of
    resume, and the configuration must be the one that the session began with. The model is asked for the summary,
    and what that takes counts against the limits; no tool is run. The session ends as it had ended, and the first
    prompt stays as it is. Where there is nothing to compact, nothing is written.
    """
    if artifacts is not None:
        raise ConfigError("--artifacts: a session stays in its own directory", hint="leave it out")

    from runner.artifacts.context import COMPACT_FIELDS
    from runner.artifacts.schema import SCHEMA_VERSION, ordered
    from runner.cancellation import Cancellation
    from runner.cli.resume import command_of
    from runner.resume import compact_session
    from runner.sandbox.process import harden_self
    from runner.session.store import session_directory
    from runner.signals import CancelOnSignal

    directory, header = session_directory(session)
    noted = command_of(directory, header["id"], read_options(task=task, **options))
    spec = load_command(noted, check_credentials=True)
    harden_self()
    cancellation = Cancellation()
    with CancelOnSignal(cancellation, say=say):
        done = compact_session(spec, directory, environ=os.environ, cancellation=cancellation)
    if as_json:
        values = {
            "schemaVersion": SCHEMA_VERSION,
            "sessionId": done.session,
            "folded": done.folded,
            "before": done.before,
            "after": done.after,
            "window": done.window,
        }
        put_json(json.dumps(ordered(COMPACT_FIELDS, values), indent=2))
    elif done.folded:
        put(f"{counted(done.folded, 'message')} folded: {done.before} of {done.window} tokens before, {done.after} now")
    else:
        put(f"nothing to compact: {done.before} of {done.window} tokens")
