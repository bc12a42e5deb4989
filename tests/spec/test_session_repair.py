"""Repair: what closes the log of a run that was killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.errors import ErrorCode, LogError
from runner.session import codec
from runner.session import events as ev
from runner.session.repair import NOT_STARTED, OUTCOME_UNKNOWN, closing_events
from runner.session.store import open_session
from runner.testing.sessions import SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"


def numbered(*events: ev.Event) -> list[ev.Event]:
    """Events with seqs from 0 and times."""
    for seq, event in enumerate(events):
        event.seq, event.time = seq, 100 + seq
    return list(events)


def answer(*calls: str, step: int = 1, **values: Any) -> ev.AssistantMessage:
    """An answer that asks for calls."""
    content: list[Any] = [{"type": "tool-call", "id": call, "name": "shell", "arguments": "{}"} for call in calls]
    message: Any = {"role": "assistant", "content": content, "source": {"kind": "model"}, "id": "a"}
    return ev.AssistantMessage(turn=1, step=step, message=message, source_event_seqs=[], **values)


def call(call_id: str, step: int = 1) -> ev.ToolCall:
    """A recorded call."""
    return ev.ToolCall(turn=1, step=step, call_id=call_id, name="shell", arguments="{}")


def result(call_id: str, step: int = 1, **values: Any) -> ev.ToolResult:
    """Its result."""
    block = {"type": "tool-result", "toolCallId": call_id, "content": [], "isError": False}
    message: Any = {"role": "user", "content": [block], "source": {"kind": "tool", "callId": call_id}, "id": "r"}
    values.setdefault("source_event_seqs", [0])
    return ev.ToolResult(turn=1, step=step, message=message, **values)


def turn_start(turn: int = 1) -> ev.TurnStart:
    """``turn/start``."""
    return ev.TurnStart(turn=turn)


def turn_end(turn: int = 1, kind: str = "completed") -> ev.TurnEnd:
    """``turn/end``."""
    return ev.TurnEnd(turn=turn, reason={"kind": kind})


def step_start(step: int = 1, turn: int = 1) -> ev.StepStart:
    """``step/start``."""
    return ev.StepStart(turn=turn, step=step)


def step_end(step: int = 1, turn: int = 1) -> ev.StepEnd:
    """``step/end``."""
    return ev.StepEnd(turn=turn, step=step)


def malformed() -> ev.AssistantMessage:
    """An answer without content."""
    message: Any = {"role": "assistant"}
    return ev.AssistantMessage(turn=1, step=1, message=message, source_event_seqs=[])


def shapes(events: Sequence[ev.Event]) -> list[tuple[str, Any]]:
    """Type and what matters of each event."""
    details: dict[str, Callable[[Any], Any]] = {
        "tool/result": lambda event: (event.error["code"], event.message["source"]["callId"], event.source_event_seqs),
        "step/end": lambda event: event.step,
        "turn/end": lambda event: event.reason,
    }
    return [(event.TYPE, details[event.TYPE](event)) for event in events]


def test_a_closed_log_needs_nothing() -> None:
    """A log that ended between turns, or never began one, is not changed."""
    assert closing_events([]) == []
    assert closing_events(numbered(turn_start(), step_start(), answer(), step_end(), turn_end())) == []


def test_an_open_turn_is_closed_as_interrupted() -> None:
    """A kill before the first step leaves a turn without one."""
    closing = closing_events(numbered(turn_start()))

    assert shapes(closing) == [("turn/end", {"kind": "interrupted"})]
    assert [(event.seq, event.time) for event in closing] == [(1, 100)]


def test_calls_come_first_then_the_step_then_the_turn() -> None:
    """A recorded call has an unknown outcome, one that was not recorded did not start; in the model's order."""
    events = numbered(turn_start(), step_start(), answer("a", "b", "c"), call("a"), result("a"), call("b"))

    closing = closing_events(events)

    assert shapes(closing) == [
        ("tool/result", ("TOOL_OUTCOME_UNKNOWN", "b", [5])),
        ("tool/result", ("TOOL_NOT_STARTED", "c", [2])),
        ("step/end", 1),
        ("turn/end", {"kind": "interrupted"}),
    ]
    assert [event.seq for event in closing] == [6, 7, 8, 9]
    assert {event.time for event in closing} == {events[-1].time}


def test_the_model_reads_what_it_may_and_may_not_do() -> None:
    """The unknown outcome comes with the warning; a call that did not start may be asked for again."""
    unknown, not_started = closing_events(numbered(turn_start(), step_start(), answer("a", "b"), call("a")))[:2]

    for event, text in ((unknown, OUTCOME_UNKNOWN), (not_started, NOT_STARTED)):
        assert isinstance(event, ev.ToolResult)
        (block,) = event.message["content"]
        assert block["type"] == "tool-result"
        assert block["isError"] is True
        assert block["content"] == [{"type": "text", "text": text}]
    for promise in ("idempotent", "verify", "Do not retry it blindly", "external", "stop and report"):
        assert promise in OUTCOME_UNKNOWN
    assert ErrorCode.TOOL_OUTCOME_UNKNOWN.name in ErrorCode.__members__


def test_two_calls_with_one_id_are_both_answered() -> None:
    """A model may use an id twice; each block gets its result."""
    events = numbered(turn_start(), step_start(), answer("a", "a"), call("a"), result("a"), call("a"))

    assert [shape[1][0] for shape in shapes(closing_events(events))[:1]] == ["TOOL_OUTCOME_UNKNOWN"]
    assert closing_events(events[:4])[0].source_event_seqs == [3]


def test_repair_is_idempotent_and_deterministic() -> None:
    """The repaired log needs no repair, and repairing twice gives the same bytes."""
    events = numbered(turn_start(), step_start(), answer("a", "b"), call("a"))

    first, second = closing_events(events), closing_events(list(events))

    assert [codec.encode_line(event.record()) for event in first] == [
        codec.encode_line(event.record()) for event in second
    ]
    assert closing_events([*events, *first]) == []


def test_an_open_question_and_an_open_compaction_are_no_corruption() -> None:
    """What a kill left unanswered beside the calls is harmless once the turn is interrupted."""
    events = numbered(
        turn_start(),
        step_start(),
        answer("a"),
        call("a"),
        ev.ApprovalAsked(id="q", call_id="a", tool_name="shell"),
        ev.CompactionStart(compaction_id="x", turn=1),
    )

    closing = closing_events(events)

    assert [event.TYPE for event in closing] == ["tool/result", "step/end", "turn/end"]
    assert closing_events([*events, *closing]) == []


BROKEN = {
    "a gap": lambda: [*numbered(turn_start())[:1], ev.TurnEnd(turn=1, reason={"kind": "completed"}, seq=2, time=1)],
    "a turn in a turn": lambda: numbered(turn_start(), turn_start(2)),
    "a turn that goes back": lambda: numbered(turn_start(2), turn_end(2), turn_start(1)),
    "an end of another turn": lambda: numbered(turn_start(), turn_end(2)),
    "an end without a start": lambda: numbered(turn_end()),
    "a step outside a turn": lambda: numbered(step_start()),
    "a step in a step": lambda: numbered(turn_start(), step_start(), step_start(2)),
    "a step that goes back": lambda: numbered(turn_start(), step_start(2), step_end(2), step_start(1)),
    "a turn that ends in a step": lambda: numbered(turn_start(), step_start(), turn_end()),
    "an end of another step": lambda: numbered(turn_start(), step_start(), step_end(2)),
    "a call without a result": lambda: numbered(turn_start(), step_start(), answer("a"), call("a"), step_end()),
    "a call nobody asked for": lambda: numbered(turn_start(), step_start(), answer("a"), call("b")),
    "a call that is recorded twice": lambda: numbered(turn_start(), step_start(), answer("a"), call("a"), call("a")),
    "a result nobody asked for": lambda: numbered(turn_start(), step_start(), answer("a"), result("b")),
    "two results of one call": lambda: numbered(
        turn_start(), step_start(), answer("a"), call("a"), result("a"), result("a")
    ),
    "an answer of another step": lambda: numbered(turn_start(), step_start(), answer(step=2)),
    "a completed turn with an unanswered call": lambda: numbered(
        turn_start(), step_start(), answer("a"), step_end(), turn_end()
    ),
    "a decision nobody asked for": lambda: numbered(ev.ApprovalDecided(id="q", outcome="rejected")),
    "a question asked twice": lambda: numbered(
        ev.ApprovalAsked(id="q", call_id="a", tool_name="t"), ev.ApprovalAsked(id="q", call_id="a", tool_name="t")
    ),
    "a completed turn with an open question": lambda: numbered(
        turn_start(), ev.ApprovalAsked(id="q", call_id="a", tool_name="t"), turn_end()
    ),
    "a completed turn with an open compaction": lambda: numbered(
        turn_start(), ev.CompactionStart(compaction_id="x", turn=1), turn_end()
    ),
    "a compaction in a compaction": lambda: numbered(
        turn_start(),
        ev.CompactionStart(compaction_id="x", turn=1),
        ev.CompactionStart(compaction_id="y", turn=1),
    ),
    "the end of another compaction": lambda: numbered(ev.CompactionEnd(compaction_id="x", turn=1)),
    "a summary of another compaction": lambda: numbered(
        ev.CompactionSummary(compaction_id="x", summary=[], shadowed_range={}, shadowed_seqs=[])
    ),
    "a prune without its replace": lambda: numbered(
        ev.CompactionPrune(shadowed_range={"start": 1, "end": 1}, shadowed_seqs=[1]), turn_start()
    ),
    "a malformed message": lambda: numbered(turn_start(), step_start(), malformed()),
}
"""Logs no kill can leave."""


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_defect_before_the_end_is_corruption(case: str) -> None:
    """It is refused and not repaired."""
    with pytest.raises(LogError) as caught:
        closing_events(BROKEN[case]())

    assert caught.value.code is ErrorCode.LOG_INVALID


def test_a_turn_cut_by_max_tokens_may_leave_calls_without_results() -> None:
    """No tools run then, so no result is owed."""
    events = numbered(turn_start(), step_start(), answer("a"), step_end(), turn_end(kind="max-tokens"))

    assert closing_events(events) == []


def test_a_real_killed_session_is_repaired_as_its_own_harness_did() -> None:
    """Our closing events of a killed dsh session equal those dsh wrote when it loaded the session again."""
    killed = list(open_session(str(GOLDEN / "killed-open-turn.zip")).events())
    repaired = list(open_session(str(GOLDEN / "killed-then-repaired.jsonl")).events())

    closing = closing_events(killed)

    assert [event.record() for event in repaired[: len(killed)]] == [event.record() for event in killed]
    assert shapes(closing) == shapes(repaired[len(killed) :])
    assert [(event.seq, event.time) for event in closing] == [
        (event.seq, event.time) for event in repaired[len(killed) :]
    ]


def test_a_repaired_log_can_be_gone_on_with(tmp_path: Path) -> None:
    """Closing events fit the log's own rules: they can be appended, and the result is readable and closed."""
    session = SampleSession(tmp_path)
    session.turn(steps=1)
    session.start_turn()
    session.start_step()
    session.call(*next(iter(session.answer(calls=3).items())))

    closing = closing_events(open_session(str(tmp_path)).events())
    session.log.append_many(closing)
    session.log.close()

    events = list(open_session(str(tmp_path)).events())
    assert len(closing) == 5
    assert closing_events(events) == []
