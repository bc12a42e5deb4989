"""``nightshift session``: show, measure, verify, export, fork and compact session logs; print a request.

Reads only, apart from what ``export``, ``fork`` and ``compact`` are told to write. SESSION is an id, an artifacts
directory, a ``.jsonl``, a ``.jsonl.zst`` or ``.zstd``, or an exported ZIP, of ours or of dsh.
"""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from runner.cli import session_compact, session_replay
from runner.cli.output import say
from runner.figures import counted
from runner.neutral import neutral_json, neutral_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from runner.messages import JsonObject
    from runner.session.rebuild import BodyDialect
    from runner.session.store import SessionSource
    from runner.session.verify import Verification

_SESSION = click.argument("session", metavar="SESSION")
_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_BATCH = 64 * 1024


@click.group()
def command() -> None:
    """Show, measure, verify, export, fork, compact and replay session logs.

    SESSION is an id, an artifacts directory, a .jsonl, a .jsonl.zst or .zstd, or an exported ZIP.
    """


command.add_command(session_compact.command)
command.add_command(session_replay.command)


@command.command()
@_SESSION
@click.option("--full", is_flag=True, help="Show long content whole.")
@click.option(
    "--context",
    "step",
    type=click.IntRange(min=1),
    metavar="STEP",
    help="Show what filled the context window at a step of the session, from 1.",
)
@_JSON
def show(session: str, *, full: bool, step: int | None, as_json: bool) -> None:
    """Print a session as a readable transcript, or its events as JSON; or what filled the window at one step."""
    from runner.session.store import open_session
    from runner.session.transcript import transcript_parts

    source = open_session(session)
    if step is not None:
        if full:
            raise click.UsageError("--full and --context exclude each other")
        _show_context(source, step, as_json=as_json)
        return
    parts = _json_document(source) if as_json else transcript_parts(source.header, source.packed_events(), full=full)
    _print_lines(parts)
    if source.dropped:
        say(f"note: {source.dropped}")


@command.command()
@_SESSION
@_JSON
def stats(session: str, *, as_json: bool) -> None:
    """Print turns, steps, tokens, cost and calls of a session."""
    from runner.artifacts.usage import derive_usage
    from runner.errors import LogError
    from runner.session.store import open_session

    source = open_session(session)
    try:
        usage = derive_usage(source.whole_events(), header=source.header)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise LogError(f"{source.name}: an event holds a value that cannot be counted: {error!r}") from error
    if as_json:
        _print_json(usage)
    else:
        _print_lines(_usage_lines(usage))


@command.command()
@_SESSION
@click.option("--expect", metavar="DIGEST", help="SHA-256 that the whole decoded log must have.")
@click.option("--allow-open", is_flag=True, help="Accept a log that does not end as a finished run does.")
@_JSON
def verify(session: str, *, expect: str | None, allow_open: bool, as_json: bool) -> None:
    """Check that a log is as it was written and holds together, and what lies beside it.

    Artifacts are compared with their digests, usage.json and result.json with the events. What is not beside the
    log is listed as not checked.
    """
    from runner.artifacts.totals import TotalsCheck
    from runner.errors import RunnerError
    from runner.session.store import open_session
    from runner.session.verify import verify_session

    try:
        source = open_session(session)
        result = verify_session(source, expect=expect, allow_open=allow_open, dialects=_dialects(), totals=TotalsCheck)
    except RunnerError as error:
        if as_json:
            _print_json({"ok": False, "error": _error(error)})
        raise
    if as_json:
        _print_json({"ok": True, **result.as_json()})
    else:
        _print_lines(_verification_lines(result))


@command.command()
@_SESSION
@click.option("--output", required=True, type=click.Path(dir_okay=False, path_type=Path), help="The ZIP to write.")
@_JSON
def export(session: str, *, output: Path, as_json: bool) -> None:
    """Write a session, its files and its subagents into one ZIP with a manifest."""
    from runner.session.export import export_session
    from runner.session.store import open_session

    written = export_session(open_session(session), output)
    if as_json:
        facts = {"path": str(written.path), "bytes": written.bytes, "sha256": written.sha256}
        _print_json({**facts, "manifest": written.manifest})
    else:
        repaired = ", repaired" if written.manifest["repaired"] else ""
        size = f"{counted(len(written.manifest['members']), 'member')}, {counted(written.bytes, 'byte')}"
        _print_lines(iter([f"{written.path}: {size}{repaired}, sha256 {written.sha256}"]))


@command.command()
@_SESSION
@click.option("--step", required=True, type=click.IntRange(min=1), help="Which step of the session, from 1.")
@click.option("--attempt", type=click.IntRange(min=1), help="Which attempt of the step, the last if not given.")
@_JSON
def request(session: str, *, step: int, attempt: int | None, as_json: bool) -> None:
    """Print the body of the model request of a step, byte for byte as it was sent."""
    import orjson

    from runner.session.media import media_of
    from runner.session.rebuild import request_body
    from runner.session.store import open_session

    source = open_session(session)
    with source.files() as files:
        sent = request_body(
            source.whole_events(), step=step, attempt=attempt, dialects=_dialects(), media=media_of(files)
        )
    if as_json:
        _print_json({**sent.event.data(), "body": orjson.loads(sent.data)})
    else:
        sys.stdout.buffer.write(sent.data)


@command.command()
@_SESSION
@click.option(
    "--turn", required=True, type=click.IntRange(min=1), help="The last turn to take over; it must have ended."
)
@click.option(
    "--output",
    required=True,
    type=click.Path(path_type=Path),
    help="The artifacts directory of the new session, absent or empty.",
)
@_JSON
def fork(session: str, *, turn: int, output: Path, as_json: bool) -> None:
    """Make a new session that begins with this one up to the end of a turn.

    The new log holds the events as they are, with seals of its own, and names its parent. Spilled results and
    media come along, subagents stay with the parent. What the parent used does not count in it.
    """
    import time
    import uuid

    from runner.session.fork import fork_session
    from runner.session.store import open_session

    with _clearing_up():
        made = fork_session(
            open_session(session),
            output.absolute(),
            turn=turn,
            session_id=f"session-{uuid.uuid4()}",
            clock=lambda: time.time_ns() // 1_000_000,
        )
    if as_json:
        _print_json(made.as_json())
    else:
        events, files = counted(made.seed_length, "event"), counted(len(made.files), "file")
        text = f"{made.directory}: {made.session}, {events} of {made.parent} up to turn {turn}, {files}"
        _print_lines(iter([neutral_line(text)]))
    if made.missing:
        say(neutral_line(f"note: not beside the log, so not taken over: {', '.join(made.missing)}"))


def _show_context(source: SessionSource, step: int, *, as_json: bool) -> None:
    from runner.artifacts.context import context_lines, derive_context
    from runner.errors import LogError

    try:
        context = derive_context(source.whole_events(), step=step, session_id=source.header.get("id"))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise LogError(f"{source.name}: an event holds a value that cannot be counted: {error!r}") from error
    if as_json:
        _print_json(context)
    else:
        _print_lines(neutral_line(line) for line in context_lines(context))


@contextmanager
def _clearing_up() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end what is inside as an error does, so that it clears up, and then the process."""
    received: list[int] = []

    def interrupt(number: int, _: object) -> None:
        received.append(number)
        raise KeyboardInterrupt

    wanted = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) != signal.SIG_IGN]
    previous = {number: signal.signal(number, interrupt) for number in wanted}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        for caught in received:
            os.kill(os.getpid(), caught)


def _dialects() -> Mapping[str, BodyDialect]:
    from runner.providers.registry import dialects

    return dialects()


def _json_document(source: SessionSource) -> Iterator[str]:
    """One JSON document, made line by line."""
    import orjson

    from runner.session.codec import ChunkRow

    yield neutral_json(f'{{"schemaVersion":1,"header":{orjson.dumps(source.header).decode()},"events":[')
    separator = ""
    for event in source.packed_events():
        records = event.records() if isinstance(event, ChunkRow) else [event.record()]
        yield separator + neutral_json(b"\n,".join(map(orjson.dumps, records)).decode())
        separator = ","
    yield f'],"dropped":{orjson.dumps(source.dropped).decode()}}}'


def _verification_lines(result: Verification, name: str = "session") -> Iterator[str]:
    yield neutral_line(f"{name} {result.session}")
    yield f"  chain: {result.chain}, manifest: {result.manifest}, {result.state}"
    yield f"  digest: {result.digest}"
    counts = {name: getattr(result, f"{name}s") for name in ("line", "event", "turn", "step", "seal")}
    yield f"  {', '.join(counted(number, name) for name, number in counts.items())}"
    yield f"  requests: {result.requests_checked} rebuilt and equal, {result.requests_not_checked} not checked"
    if result.artifacts_checked:
        yield neutral_line(f"  artifacts checked: {', '.join(result.artifacts_checked)}")
    if result.artifacts_not_checked:
        yield neutral_line(f"  artifacts not checked, not beside the log: {', '.join(result.artifacts_not_checked)}")
    if result.totals_checked:
        yield f"  totals equal to those of the events: {', '.join(result.totals_checked)}"
    if result.totals_not_checked and result.chain != "none":
        why = "not beside the log" if result.state == "whole" else "the log has not ended"
        yield f"  totals not checked, {why}: {', '.join(result.totals_not_checked)}"
    if result.dropped:
        yield f"  {result.dropped}"
    for child in result.children:
        yield from _verification_lines(child, "subagent")


def _usage_lines(usage: JsonObject) -> Iterator[str]:
    for name, value in usage.items():
        if isinstance(value, dict):
            inner = ", ".join(f"{key} {_unknown(item)}" for key, item in value.items())
            yield neutral_line(f"{name}: {inner}")
        elif isinstance(value, list):
            yield f"{name}: {len(value)}"
            for row in value:
                cells = row.items() if isinstance(row, dict) else [("", row)]
                yield neutral_line("  " + ", ".join(f"{key} {_unknown(item)}".strip() for key, item in cells))
        else:
            yield neutral_line(f"{name}: {_unknown(value)}")


def _unknown(value: object) -> object:
    return "unknown" if value is None else value


def _error(error: Any) -> JsonObject:
    return {"code": str(error.code), "message": error.message, "hint": error.hint, "line": error.details.get("line")}


def _print_json(value: object) -> None:
    import orjson

    text = orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode()
    sys.stdout.buffer.write(neutral_json(text).encode())


def _print_lines(lines: Iterator[str]) -> None:
    """Write lines, or parts of several, as UTF-8 whatever the locale, without holding them all."""
    stream = sys.stdout.buffer
    held: list[str] = []
    size = 0
    for line in lines:
        held.append(line)
        size += len(line)
        if size >= _BATCH:
            stream.write(("\n".join(held) + "\n").encode())
            held, size = [], 0
    if held:
        stream.write(("\n".join(held) + "\n").encode())
    stream.flush()
