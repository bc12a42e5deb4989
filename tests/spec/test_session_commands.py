"""``nightshift session``: what its commands print, in text and as JSON, and how they fail."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.cli.main import run_cli
from runner.neutral import neutral_text
from runner.session import events as ev
from runner.session.store import open_session
from runner.session.transcript import CUT, transcript
from runner.testing.sessions import SAMPLE_ID, SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"
DSH = sorted(path.name for path in GOLDEN.iterdir() if path.suffix != ".md")


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A finished session."""
    with SampleSession(tmp_path / "artifacts") as session:
        session.turn(steps=3)
        session.end()
    return tmp_path / "artifacts"


class Printed:
    """What one command printed and how it ended."""

    def __init__(self, code: int, out: bytes, err: bytes) -> None:
        self.code = code
        self.out = out
        self.text = out.decode()
        self.err = err.decode()

    @property
    def json(self) -> Any:
        """Its output as JSON."""
        return json.loads(self.out)


@pytest.fixture
def session(capfdbinary: pytest.CaptureFixture[bytes]) -> Callable[..., Printed]:
    """A function that runs ``nightshift session ...``."""

    def run(*arguments: object) -> Printed:
        code = run_cli(["session", *map(str, arguments)])
        captured = capfdbinary.readouterr()
        return Printed(code, captured.out, captured.err)

    return run


def test_show_prints_one_block_an_event(sample: Path, session: Callable[..., Printed]) -> None:
    """Seq, type, time and what matters; contents below; chunks as one line."""
    printed = session("show", sample)

    lines = printed.text.splitlines()
    assert printed.code == 0
    assert lines[0].startswith(f"session {SAMPLE_ID}, 2026-")
    assert lines[0].endswith(", /workspace")
    numbered = [line.split()[:2] for line in lines[1:] if not line.startswith("        | ")]
    seqs = [int(seq) for seq, _ in numbered]
    assert seqs == sorted(set(seqs))
    assert "        | Make the tests pass." in lines
    assert any("chunks" in line for line in lines)
    assert any(
        line.split()[1] == "tool/call" and "shell {" in line for line in lines if line[:1] == " " and "|" not in line
    )


@pytest.mark.parametrize("name", DSH)
def test_every_command_works_on_every_log_of_dsh(name: str, tmp_path: Path, session: Callable[..., Printed]) -> None:
    """show, verify and export in both forms; each exits 0 and says what it read."""
    path = GOLDEN / name
    source = open_session(str(path))

    assert source.header["id"] in session("show", path).text
    shown = session("show", path, "--json").json
    assert shown["header"] == source.header
    assert [event["seq"] for event in shown["events"]] == list(range(len(shown["events"])))
    verified = session("verify", path)
    assert verified.code == 0
    state = "open" if name == "killed-open-turn.zip" else "closed"
    assert f"chain: none, manifest: none, {state}" in verified.text
    exported = session("export", path, "--output", tmp_path / "x.zip", "--json")
    assert exported.json["sha256"] == hashlib.sha256((tmp_path / "x.zip").read_bytes()).hexdigest()
    assert session("verify", tmp_path / "x.zip", "--json").json["manifest"] == "ok"


@pytest.mark.parametrize("name", DSH)
def test_stats_count_a_log_of_dsh(name: str, session: Callable[..., Printed]) -> None:
    """Steps are the number of step/end, turns those with at least one; every answer's usage once."""
    events = list(open_session(str(GOLDEN / name)).events())

    usage = session("stats", GOLDEN / name, "--json").json

    ended = [event for event in events if isinstance(event, ev.StepEnd)]
    answers = [event for event in events if isinstance(event, ev.AssistantMessage) and event.usage]
    assert usage["steps"] == len(ended)
    assert usage["turns"] == len({event.turn for event in ended})
    assert usage["sessionId"] == open_session(str(GOLDEN / name)).header["id"]
    summaries = [event.usage for event in events if isinstance(event, ev.CompactionSummary) and event.usage]
    spent = [event.usage for event in answers if event.usage] + summaries
    assert usage["usage"]["output"] == (sum(one["outputTokens"] for one in spent) if spent else None)
    text = session("stats", GOLDEN / name)
    assert text.code == 0
    assert f"steps: {len(ended)}" in text.text


def test_stats_of_a_fork_leave_out_what_the_parent_used(tmp_path: Path, session: Callable[..., Printed]) -> None:
    """Events before ``seedLength`` belong to the parent."""
    header = {"type": "session", "version": 0, "id": "child", "createdAt": 1, "seedLength": 6, "delegationDepth": 0}
    usage = {"inputTokens": 5, "outputTokens": 7}
    message = {"role": "assistant", "content": [], "source": {"kind": "model"}, "id": "a"}
    records: list[dict[str, Any]] = [
        {"type": "turn/start", "data": {"turn": 1}},
        {"type": "step/start", "data": {"turn": 1, "step": 1}},
        {
            "type": "assistant/message",
            "data": {"turn": 1, "step": 1, "message": message, "usage": usage},
            "sourceEventSeqs": [],
            "surfaceOp": "append",
        },
        {"type": "step/end", "data": {"turn": 1, "step": 1}},
        {"type": "turn/end", "data": {"turn": 1, "reason": {"kind": "completed"}}},
    ]
    later = [{**record, "data": {**record["data"], "turn": 2}} for record in records]
    every = [*records, {"type": "session/end-seed", "data": {}}, *later]
    lines = [header, *({"seq": seq, "time": 1, **record} for seq, record in enumerate(every))]
    path = tmp_path / "fork.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    stats = session("stats", path, "--json").json

    assert (stats["steps"], stats["turns"], stats["usage"]["output"]) == (1, 1, 7)


def test_verify_prints_what_it_proved(sample: Path, session: Callable[..., Printed]) -> None:
    """Chain, digest, counts, requests and artifacts, as text and as JSON."""
    printed = session("verify", sample)
    as_json = session("verify", sample, "--json").json

    assert printed.code == 0
    assert "chain: sha256, manifest: none, whole" in printed.text
    assert f"digest: {as_json['digest']}" in printed.text
    assert as_json["ok"] is True
    assert as_json["requests"] == {"checked": 3, "notChecked": 0}
    assert as_json["artifacts"] == {"checked": ["summary.md"], "notChecked": []}
    assert session("verify", sample, "--expect", as_json["digest"]).code == 0
    assert session("verify", sample, "--expect", "0" * 64).code == 13


def test_verify_fails_with_13_and_the_line(sample: Path, tmp_path: Path, session: Callable[..., Printed]) -> None:
    """One message on stderr; with --json the same as data on stdout."""
    lines = list(open_session(str(sample)).raw_lines())
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in [*lines[:9], *lines[10:]]))

    printed = session("verify", path)
    as_json = session("verify", path, "--json")

    assert printed.code == as_json.code == 13
    assert printed.out == b""
    assert printed.err.startswith(f"error LOG_INVALID: {path}: line 10: ")
    assert as_json.json["ok"] is False
    assert as_json.json["error"]["code"] == "LOG_INVALID"
    assert as_json.json["error"]["line"] == 10


def test_verify_of_an_open_log_says_how_far_it_got(tmp_path: Path, session: Callable[..., Printed]) -> None:
    """And --allow-open accepts it."""
    log = SampleSession(tmp_path)
    log.turn(steps=1)
    log.log.barrier()

    printed = session("verify", tmp_path)

    assert printed.code == 13
    assert f"open, {log.log.next_seq} events, last seal at line " in printed.err
    assert "--allow-open" in printed.err
    assert session("verify", tmp_path, "--allow-open").code == 0
    log.log.close()


def test_request_prints_the_body_byte_for_byte(sample: Path, session: Callable[..., Printed]) -> None:
    """Its SHA-256 and size are those the log recorded when it was sent."""
    sent = [event for event in open_session(str(sample)).events() if isinstance(event, ev.RequestSent)]

    for step, event in enumerate(sent, 1):
        printed = session("request", sample, "--step", step)
        assert hashlib.sha256(printed.out).hexdigest() == event.sha256
        assert len(printed.out) == event.bytes
    as_json = session("request", sample, "--step", 2, "--attempt", 1, "--json").json
    assert as_json["sha256"] == sent[1].sha256
    assert as_json["body"]["messages"][1]["content"][0]["text"] == "Make the tests pass."


@pytest.mark.parametrize("arguments", [("--step", "9"), ("--step", "1", "--attempt", "2")])
def test_a_request_that_was_not_made_is_a_usage_error(
    sample: Path, session: Callable[..., Printed], arguments: tuple[str, ...]
) -> None:
    """With what there is instead."""
    printed = session("request", sample, *arguments)

    assert printed.code == 2
    assert "has no main request for" in printed.err


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b'"dialect":"scripted"', b'"dialect":"other"', "no dialect 'other'"),
        (b'"system":"You work alone."', b'"system":"You work."', "is not the one that was sent"),
        (b'"system":', b'"sustem":', "cannot be rebuilt"),
    ],
)
def test_a_request_that_does_not_fit_the_log_is_not_printed(
    sample: Path, tmp_path: Path, session: Callable[..., Printed], old: bytes, new: bytes, message: str
) -> None:
    """What is printed was sent; anything else is LOG_INVALID."""
    lines = [line.replace(old, new) for line in open_session(str(sample)).raw_lines()]
    (tmp_path / "changed.jsonl").write_bytes(b"".join(line + b"\n" for line in lines))

    printed = session("request", tmp_path / "changed.jsonl", "--step", 1)

    assert (printed.code, printed.out) == (13, b"")
    assert message in printed.err


def test_a_request_of_another_harness_is_said_to_be_unknown(session: Callable[..., Printed]) -> None:
    """Logs of dsh do not record what was sent."""
    printed = session("request", GOLDEN / "three-steps.jsonl", "--step", 1)

    assert printed.code == 2
    assert "request" in printed.err


@pytest.mark.parametrize("command", ["show", "stats", "verify"])
def test_bad_input_is_one_message(command: str, tmp_path: Path, session: Callable[..., Printed]) -> None:
    """Nothing of the name is 2, a file that is no log 13; never a traceback."""
    (tmp_path / "garbage").write_bytes(b"\x00\xff" * 100)

    missing, garbage = session(command, tmp_path / "missing"), session(command, tmp_path / "garbage")

    assert (missing.code, garbage.code) == (2, 13)
    for printed in (missing, garbage):
        assert printed.err.startswith("error ")
        assert "Traceback" not in printed.err
        assert printed.out == b""


def test_export_needs_a_place_that_can_be_written(
    sample: Path, tmp_path: Path, session: Callable[..., Printed]
) -> None:
    """A missing option or a folder is 2, a missing parent folder 15."""
    assert session("export", sample).code == 2
    assert session("export", sample, "--output", tmp_path).code == 2
    assert session("export", sample, "--output", tmp_path / "no" / "x.zip").code == 15


def test_a_torn_end_is_said_on_stderr(tmp_path: Path, session: Callable[..., Printed]) -> None:
    """Standard output holds the transcript only."""
    path = tmp_path / "torn.jsonl"
    path.write_bytes((GOLDEN / "three-steps.jsonl").read_bytes()[:-5])

    printed = session("show", path)

    assert printed.code == 0
    assert "torn last record" in printed.err
    assert "torn" not in printed.text


# --- the transcript ----------------------------------------------------------------------------


def user(text: str, seq: int = 0) -> ev.UserMessage:
    """A user message."""
    return ev.UserMessage(
        content=[{"type": "text", "text": text}], source={"kind": "user"}, role="user", id="u", seq=seq, time=0
    )


def test_terminal_escapes_and_direction_marks_are_shown_not_sent() -> None:
    """Colours, cursor moves, titles, backspaces, C1 controls and reordering never reach the terminal."""
    hostile = "\x1b[31mred\x1b]0;title\x07\r\b\x9b2J\u202egnp.exe\u2066\u200f\x00 tab\tand\nline"

    assert neutral_text(hostile) == (
        "\\x1b[31mred\\x1b]0;title\\x07\\x0d\\x08\\x9b2J\\u202egnp.exe\\u2066\\u200f\\x00 tab\tand\nline"
    )


def test_no_field_of_a_log_reaches_the_terminal_raw() -> None:
    """Header, names, ids, arguments, sources and contents alike."""
    evil = "\x1b[2J\u202e"
    block = {"type": "tool-result", "toolCallId": evil, "content": [{"type": "text", "text": evil}], "isError": True}
    result: Any = {"role": "user", "content": [block], "source": {"kind": "tool", "callId": evil}, "id": evil}
    unknown = ev.UnknownEvent(seq=7, time=0, extra={evil: evil})
    unknown.type_name = evil
    events: list[ev.Event] = [
        user(evil),
        ev.ToolCall(turn=1, step=1, call_id=evil, name=evil, arguments=evil, seq=1, time=0),
        ev.ToolResult(turn=1, step=1, message=result, error={"code": evil}, source_event_seqs=[1], seq=2, time=0),
        ev.ApprovalAsked(id=evil, call_id=evil, tool_name=evil, command=evil, seq=3, time=0),
        ev.ApprovalDecided(id=evil, outcome=evil, rule=evil, seq=4, time=0),
        ev.SessionTitle(title=evil, seq=5, time=0),
        ev.TurnEnd(turn=1, reason={evil: evil}, seq=6, time=0),
        unknown,
    ]

    shown = list(transcript({"id": evil, "cwd": evil, "parentSession": evil, "createdAt": 1e300}, events, full=True))

    assert not [line for line in shown if "\x1b" in line or "\u202e" in line or "\n" in line]
    assert sum("[2J" in line for line in shown) >= 9


def test_long_content_is_cut_with_a_note_unless_all_is_asked_for() -> None:
    """The note counts what is left out and names the option."""
    event = user("x" * (CUT + 123))

    cut = list(transcript({"id": "s"}, [event]))
    full = list(transcript({"id": "s"}, [event], full=True))

    assert cut[-2:] == ["        | " + "x" * CUT, "        | [123 more characters; --full shows them]"]
    assert full[-1] == "        | " + "x" * (CUT + 123)


def test_every_event_type_can_be_shown() -> None:
    """None is left without a line, whatever its fields hold."""
    examples: dict[str, Any] = {"integer": 1, "number": 1.5, "string": "s", "boolean": True, "array": [], "any": None}
    for name, cls in ev.EVENT_TYPES.items():
        message = {"content": [], "source": {}, "role": "user"}
        values = {field.attribute: examples.get(field.kind, message) for field in cls.FIELDS}
        event = cls(seq=3, time=0, **values)

        lines = list(transcript({"id": "s"}, [event]))

        assert len(lines) >= 2, name
        assert lines[1].split()[:1] == ["3"], name
