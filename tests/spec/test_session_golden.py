"""Golden logs of ours: logs that were written once can be read, verified and rebuilt for good."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.cli.main import run_cli
from runner.providers.registry import dialects
from runner.session import events as ev
from runner.session.header import LOG_NAME
from runner.session.projection import derive_messages
from runner.session.rebuild import request_body
from runner.session.repair import closing_events
from runner.session.store import SessionSource, open_session
from runner.session.verify import verify_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.messages import JsonObject

OURS = Path(__file__).resolve().parents[1] / "golden" / "ours"
GOLDEN = sorted(
    path for path in OURS.iterdir() if (path / LOG_NAME).is_file() or path.suffix in (".jsonl", ".zst", ".zip")
)
PROMISED = {"turns", "compaction", "openai", "cancelled", "forked"}


each_log = pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)


@pytest.fixture
def session(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., tuple[int, bytes, str]]:
    """A function that runs ``nightshift session ...``: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, bytes, str]:
        code = run_cli(["session", *map(str, arguments)])
        captured = capfdbinary.readouterr()
        return code, captured.out, captured.err.decode()

    return run


def has_ended(source: SessionSource) -> bool:
    """Whether a run of ours ended in this log; a fresh fork has none of its own yet."""
    return any(isinstance(event, ev.RunEnd) for event in source.events())


def test_the_golden_logs_hold_what_they_are_for() -> None:
    """All kinds of requests, calls, replaces and ends that a log can have stand in one of them."""
    assert {path.name for path in GOLDEN} >= PROMISED
    events = [event for path in GOLDEN for event in open_session(str(path)).events()]
    kinds = {type(event) for event in events}
    sent = [event for event in events if isinstance(event, ev.RequestSent)]
    results = [event for event in events if isinstance(event, ev.ToolResult)]

    assert kinds >= {
        ev.CompactionPrune,
        ev.CompactionSummary,
        ev.LlmRetryStarted,
        ev.CheckEnd,
        ev.TodoWrite,
        ev.SessionEndSeed,
    }
    assert {event.dialect for event in sent} >= {"scripted", "openai-chat"}
    assert {event.purpose for event in sent} >= {"main", "summary"}
    assert max(event.attempt for event in sent) > 1
    assert {(event.error or {}).get("code") for event in results} >= {"POLICY_DENIED", "CANCELLED", None}
    assert any((event.meta or {}).get("spill") for event in results)
    assert any(isinstance(event.surface_op, dict) for event in results)
    calls = [event for event in events if isinstance(event, ev.AssistantMessage)]
    assert any(sum(block["type"] == "tool-call" for block in event.message["content"]) > 2 for event in calls)


@each_log
def test_every_request_is_rebuilt_byte_for_byte(path: Path, session: Callable[..., tuple[int, bytes, str]]) -> None:
    """``session request --step N`` prints a body whose SHA-256 and size are those of request/sent, each attempt."""
    attempts: dict[int, list[ev.RequestSent]] = {}
    steps = 0
    for event in open_session(str(path)).events():
        steps += isinstance(event, ev.StepStart)
        if isinstance(event, ev.RequestSent) and event.purpose == "main":
            attempts.setdefault(steps, []).append(event)
    assert sorted(attempts) == list(range(1, steps + 1))

    for step, each in attempts.items():
        code, out, err = session("request", path, "--step", step)
        assert (code, err) == (0, "")
        assert (hashlib.sha256(out).hexdigest(), len(out)) == (each[-1].sha256, each[-1].bytes)
        for sent in each:
            code, out, _ = session("request", path, "--step", step, "--attempt", sent.attempt)
            assert (hashlib.sha256(out).hexdigest(), len(out)) == (sent.sha256, sent.bytes)


@each_log
def test_every_request_extends_the_one_before_or_says_why_not(path: Path) -> None:
    """Without its closing brackets a body is a byte prefix of the next, unless a replace or a header stands between."""
    source = open_session(str(path))
    events = list(source.events())
    sent = [event for event in events if isinstance(event, ev.RequestSent) and event.purpose == "main"]
    bodies = [
        request_body(events, step=number, attempt=None, dialects=dialects()).data
        for number in range(1, sum(isinstance(event, ev.StepStart) for event in events) + 1)
    ]
    last = {event.step: event for event in sent}
    marks = [event.seq for event in events if isinstance(event.surface_op, dict) or event.TYPE == "request/header"]

    for (before, body), (after, longer) in zip(
        list(zip(last.values(), bodies, strict=True))[:-1],
        list(zip(last.values(), bodies, strict=True))[1:],
        strict=True,
    ):
        if any(before.seq < seq < after.seq for seq in marks):
            continue
        close = dialects()[before.dialect].close
        assert body.endswith(close)
        assert longer.startswith(body.removesuffix(close))


@each_log
def test_every_golden_log_verifies(path: Path, session: Callable[..., tuple[int, bytes, str]]) -> None:
    """Whole where its run ended, with all of its artifacts and totals; every main request is rebuilt."""
    source = open_session(str(path))
    ended = has_ended(source)

    code, out, err = session("verify", path, "--json", *([] if ended else ["--allow-open"]))

    assert (code, err) == (0, "")
    result = json.loads(out)
    sent = [event for event in source.events() if isinstance(event, ev.RequestSent)]
    main = sum(event.purpose == "main" for event in sent)
    assert result["requests"] == {"checked": main, "notChecked": len(sent) - main}
    assert result["lastSealLine"] == result["lines"]
    assert result["dropped"] is None
    assert result["state"] == ("whole" if ended else "open")
    if ended and source.directory is not None:
        assert result["totals"] == {"checked": ["usage.json", "result.json"], "notChecked": []}
        assert result["artifacts"]["notChecked"] == []
        told = json.loads((path / "result.json").read_text())
        assert told["logDigest"] == result["digest"]
        assert session("verify", path, "--expect", told["logDigest"])[0] == 0


@each_log
def test_every_golden_log_is_shown_and_counted(path: Path, session: Callable[..., tuple[int, bytes, str]]) -> None:
    """``show`` has every event; ``stats`` is the usage.json that its run wrote."""
    source = open_session(str(path))
    code, out, err = session("show", path, "--json")
    assert (code, err) == (0, "")
    shown = json.loads(out)
    assert [event["seq"] for event in shown["events"]] == list(range(len(list(source.events()))))
    assert session("show", path)[0] == 0

    code, out, err = session("stats", path, "--json")
    assert (code, err) == (0, "")
    stats: JsonObject = json.loads(out)
    if has_ended(source) and source.directory is not None:
        assert stats == json.loads((path / "usage.json").read_text())
    elif "seedLength" in source.header:
        assert stats["steps"] == 0


@each_log
def test_every_golden_log_is_exported(
    path: Path, tmp_path: Path, session: Callable[..., tuple[int, bytes, str]]
) -> None:
    """The same ZIP twice; what it holds verifies, spilled results included, and gives the same messages."""
    source = open_session(str(path))
    for name in ("a.zip", "b.zip"):
        assert session("export", path, "--output", tmp_path / name)[0] == 0
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()

    exported = open_session(str(tmp_path / "a.zip"))
    result = verify_session(exported, dialects=dialects(), allow_open=not has_ended(source))
    assert (result.manifest, result.digest) == ("ok", verify_session(source, allow_open=True).digest)
    assert derive_messages(exported.events()) == derive_messages(source.events())
    with exported.files() as files:
        assert set(files.paths()) >= {
            event.meta["spill"]["path"]
            for event in source.events()
            if isinstance(event, ev.ToolResult) and event.meta and "spill" in event.meta
        }


@each_log
def test_no_golden_log_needs_repair(path: Path) -> None:
    """Cancelled ones too: the run itself closed what was open."""
    assert closing_events(open_session(str(path)).events()) == []


@each_log
def test_every_turn_of_a_golden_log_can_be_forked(
    path: Path, tmp_path: Path, session: Callable[..., tuple[int, bytes, str]]
) -> None:
    """The child verifies, rebuilds the same requests, and counts nothing of its parent."""
    turns = [event.turn for event in open_session(str(path)).events() if isinstance(event, ev.TurnEnd)]
    assert turns

    for turn in turns:
        target = tmp_path / str(turn)
        code, out, err = session("fork", path, "--turn", turn, "--output", target, "--json")
        assert (code, err) == (0, "")
        made: Any = json.loads(out)
        code, out, _ = session("verify", target, "--allow-open", "--json")
        assert code == 0
        assert json.loads(out)["digest"] == made["digest"]
        events = list(open_session(str(target)).events())
        sent = [event for event in events if isinstance(event, ev.RequestSent) and event.purpose == "main"]
        steps = sum(isinstance(event, ev.StepStart) for event in events)
        for step in range(1, steps + 1):
            assert request_body(events, step=step, attempt=None, dialects=dialects()).event in sent
        assert json.loads(session("stats", target, "--json")[1])["steps"] == 0
