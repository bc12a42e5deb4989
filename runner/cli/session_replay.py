"""``nightshift session replay``: run the recorded answers again and report the first difference."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from runner.cli.output import put, put_json, say, say_error
from runner.errors import ConfigError
from runner.figures import counted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runner.messages import JsonObject
    from runner.replay import Replayed


@click.command("replay")
@click.argument("session", metavar="SESSION")
@click.option("--profile", required=True, metavar="NAME|FILE", help="Shipped profile or file; its model is not asked.")
@click.option("--workspace", metavar="DIR", help="Where the recorded base is; the current directory if not given.")
@click.option("--set", "sets", metavar="KEY=VALUE", multiple=True, help="Change a key of the profile.")
@click.option(
    "--artifacts", metavar="DIR", help="Directory for the artifacts; a new one where sessions lie if not given."
)
@click.option("--normalise", metavar="REGEX", multiple=True, help="What this matches may differ.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    session: str,
    *,
    profile: str,
    workspace: str | None,
    sets: Sequence[str],
    artifacts: str | None,
    normalise: Sequence[str],
    as_json: bool,
) -> int:
    """Run SESSION again with its recorded answers, in a fresh copy of its base, and report the first difference.

    Tools and sandbox are real, the network is off. Policy and everything else that gives authority come from the
    profile, nothing from the session.
    """
    from runner.cancellation import Cancellation
    from runner.providers.recording import read_recording
    from runner.replay import load_replay, run_replay
    from runner.sandbox.process import harden_self
    from runner.session.store import open_session
    from runner.signals import CancelOnSignal

    try:
        cwd = Path.cwd()
    except OSError as error:
        raise ConfigError(f"the current directory cannot be used: {error.strerror}", hint="change to another") from None
    recording = read_recording(open_session(session))
    spec = load_replay(
        recording, profile=profile, workspace=workspace, sets=sets, normalise=normalise, environ=os.environ, cwd=cwd
    )
    if recording.asked:
        say(f"note: the session was recorded with {', '.join(recording.asked)}; the profile decides, not the log")
    harden_self()
    cancellation = Cancellation()
    with CancelOnSignal(cancellation, say=say):
        replayed = run_replay(
            spec,
            recording,
            artifacts=None if artifacts is None else Path(artifacts),
            environ=os.environ,
            cancellation=cancellation,
        )
    if as_json:
        put_json(json.dumps(replayed.as_json(), indent=2, ensure_ascii=False))
    else:
        put("\n".join(_lines(replayed)))
    say(f"artifacts: {replayed.directory}")
    if replayed.error is not None:
        say_error(replayed.error["code"], replayed.error["message"], replayed.error.get("hint"))
    elif replayed.divergence is not None:
        from runner.hooks.replay import divergence_error

        left = divergence_error(replayed.divergence)
        say_error(left.code.name, left.message, left.hint)
    return replayed.exit_code


def _lines(replayed: Replayed) -> Iterator[str]:
    requests = replayed.requests
    made = requests["same"] + requests["different"]
    word = "identical" if replayed.identical else "not identical"
    yield (
        f"{word}: {counted(replayed.steps, 'step')}, {counted(replayed.results, 'result')}, "
        f"{requests['same']} of {counted(made, 'request')} byte for byte ({requests['alike']} apart from paths and ids)"
    )
    if replayed.ends is not None:
        yield f"the recording ends early: {replayed.ends}; it was replayed up to there"
    if replayed.divergence is not None:
        yield from _divergence_lines(replayed.divergence)


def _divergence_lines(divergence: JsonObject) -> Iterator[str]:
    call = "" if divergence["callId"] is None else f", call {divergence['callId']} ({divergence['tool']})"
    yield f"first divergence: turn {divergence['turn']}, step {divergence['step']}{call}: {divergence['what']}"
    for side, name in (("expected", "recorded"), ("actual", "now")):
        error = divergence[f"{side}Error"]
        yield f"  {name:<8}  sha256 {divergence[side]}{f', {error}' if error else ''}"
        yield f"  {'':<8}  {divergence[f'{side}Text']}"
