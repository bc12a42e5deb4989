"""What a session that goes on knows of itself: a fold of its log."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runner.agent.budget import COUNTED
from runner.agent.inbox import Inbox
from runner.agent.past import Past
from runner.session import events as ev
from runner.session.projection import derive_messages

if TYPE_CHECKING:
    from runner.messages import Message, RequestHeader, Usage

HEADER: RequestHeader = {"config": {"provider": "p", "model": "m", "maxTokens": 9}, "system": "s", "tools": []}


def message(identity: str, text: str = "Do it.", kind: str = "user") -> Message:
    """A user message."""
    return {"role": "user", "id": identity, "content": [{"type": "text", "text": text}], "source": {"kind": kind}}


class Session:
    """Events with seqs and times, one second apart, and the fold of them."""

    def __init__(self, **options: Any) -> None:
        self.past = Past(**options)
        self.events: list[ev.Event] = []

    def add(self, *events: ev.Event) -> None:
        """Number and fold events."""
        for event in events:
            event.seq, event.time = len(self.events), 1000 * len(self.events)
            self.events.append(event)
            self.past.apply(event)

    def enter(self, entering: Message) -> None:
        """A message enters the history."""
        content: list[Any] = list(entering["content"])
        self.add(ev.UserMessage(content=content, source=entering["source"], role="user", id=entering["id"]))

    def answer(self, usage: Usage | None, *, interrupted: bool = False) -> None:
        """A request and its answer."""
        self.add(
            ev.RequestSent(turn=1, step=1, attempt=1, purpose="main", provider="p", dialect="d", bytes=1, sha256="0"),
            ev.AssistantMessage(
                turn=1,
                step=1,
                message={"role": "assistant", "id": "a", "content": [], "source": {"kind": "model"}},
                usage=usage,
                interrupted=True if interrupted else None,
                source_event_seqs=[],
            ),
        )


def test_history_numbers_and_used_limits_are_those_of_the_log() -> None:
    """Turns, steps, tokens, money, bytes of results, seconds of calls and in all."""
    session = Session(cost_of=lambda usage: usage["outputTokens"] / 10)
    session.add(
        ev.RequestHeaderEvent(header=HEADER, reason="initial"), ev.TurnStart(turn=1), ev.StepStart(turn=1, step=1)
    )
    session.enter(message("1"))
    session.answer({"inputTokens": 100, "outputTokens": 20, "cacheReadTokens": 3})
    session.add(
        ev.ToolResult(
            turn=1,
            step=1,
            message={
                "role": "user",
                "id": "r",
                "content": [{"type": "tool-result", "toolCallId": "c", "content": [], "isError": False}],
                "source": {"kind": "tool", "callId": "c"},
            },
            meta={"bytes": 77, "durationMs": 1500},
            source_event_seqs=[0],
        ),
        ev.StepEnd(turn=1, step=1),
        ev.TurnEnd(turn=1, reason={"kind": "completed"}),
    )

    past = session.past
    assert past.projection.messages == derive_messages(session.events)
    assert (past.turn, past.step, past.completed, past.answered) == (1, 1, True, 1)
    assert past.used == {
        "turns": 1, "steps": 1, "tokens": 123, "input_tokens": 103, "output_tokens": 20, "cost": 2.0,
        "output_bytes": 77, "tool_time": 1.5, "wall": len(session.events) - 1,
    }  # fmt: skip
    assert past.occupancy.of(HEADER, past.projection) > 123


def test_an_answer_without_usage_is_estimated() -> None:
    """As the loop does, so that a budget cannot be stretched by killing the run."""
    session = Session()
    session.add(ev.RequestHeaderEvent(header=HEADER, reason="initial"))
    session.enter(message("1", "x" * 400))
    session.answer(None)

    assert session.past.used["tokens"] > 100


def test_what_the_parent_of_a_fork_used_does_not_count() -> None:
    """The seed's events are the parent's."""
    session = Session(seed=6)
    session.add(ev.TurnStart(turn=1), ev.StepStart(turn=1, step=1))
    session.answer({"inputTokens": 5, "outputTokens": 5})
    session.add(ev.TurnEnd(turn=1, reason={"kind": "completed"}), ev.SessionEndSeed(), ev.TurnStart(turn=2))

    assert session.past.used == dict.fromkeys((*COUNTED, "wall"), 0)
    assert session.past.forked
    assert session.past.turn == 2


def test_time_between_the_parts_of_a_session_does_not_count() -> None:
    """A night between kill and resume is no work."""
    session = Session()
    session.add(ev.TurnStart(turn=1), ev.TurnEnd(turn=1, reason={"kind": "interrupted"}))
    later = ev.RunResume(previous_seal=None, changes=[], seq=2, time=90_000_000)
    session.past.apply(later)
    session.past.apply(ev.TurnStart(turn=2, seq=3, time=90_002_000))

    assert session.past.used["wall"] == 3


@pytest.mark.parametrize("lost", [False, True])
def test_what_waits_is_what_the_inbox_had(lost: bool) -> None:
    """Queues as the splices leave them; a prompt that was claimed and never entered is lost, not gone."""
    session = Session()
    inbox = Inbox(session.add)
    for number in range(3):
        inbox.followup(message(str(number)))
    inbox.inject(message("state", kind="plugin"))
    claimed = inbox.claim_turn()
    for each in claimed[: 1 if lost else 2]:
        session.enter(each)

    past = session.past
    assert [each["id"] for each in past.queues["next-turn"]] == ["1", "2"]
    assert past.queues["next-step"] == []
    assert [(target, each["id"]) for target, each in past.lost] == ([("next-turn", "0")] if lost else [])
    assert past.prompts == {"0", "1", "2"}


def test_requests_without_an_answer_are_asked_again() -> None:
    """Those that the run went on behind count: answered, repeated, or failed for good."""
    session = Session()
    session.add(ev.TurnStart(turn=1))
    session.answer(None)
    session.answer(None, interrupted=True)

    assert session.past.answered == 1

    session.add(ev.TurnEnd(turn=1, reason={"kind": "error", "error": {}}))

    assert session.past.answered == 2


def test_a_turn_that_was_cut_off_is_counted_by_the_one_that_goes_on_with_it() -> None:
    """Kills use up no turns."""
    session = Session()
    session.add(ev.TurnStart(turn=1), ev.TurnEnd(turn=1, reason={"kind": "completed"}), ev.TurnStart(turn=2))

    assert session.past.used["turns"] == 1
    session.add(ev.TurnEnd(turn=2, reason={"kind": "interrupted"}))
    assert session.past.used["turns"] == 1


@pytest.mark.parametrize("kind", ["completed", "interrupted"])
def test_a_compaction_by_hand_is_no_turn_and_completes_none(kind: str) -> None:
    """The turn before it is what a session goes on with; the next one has a number of its own."""
    session = Session()
    session.add(ev.TurnStart(turn=1), ev.StepStart(turn=1, step=1), ev.StepEnd(turn=1, step=1))
    session.add(ev.TurnEnd(turn=1, reason={"kind": kind}))
    before = (session.past.used["turns"], session.past.completed)

    session.add(
        ev.TurnStart(turn=2),
        ev.CompactionStart(compaction_id="c", turn=2),
        ev.CompactionEnd(compaction_id="c", turn=2),
        ev.TurnEnd(turn=2, reason={"kind": "completed"}),
    )

    assert (session.past.used["turns"], session.past.completed) == before
    assert session.past.turn == 2


def test_what_a_recovery_writes_long_after_is_no_work() -> None:
    """The night between kill and recover does not count either."""
    session = Session()
    session.add(ev.TurnStart(turn=1), ev.TurnEnd(turn=1, reason={"kind": "interrupted"}))
    later: dict[str, Any] = {"seq": 2, "time": 90_000_000}
    session.past.apply(ev.ArtifactWritten(name="a", path="a", bytes=1, sha256="0", **later))
    session.past.apply(
        ev.RunEnd(
            outcome="failed", code="INTERNAL", failure_class=None, exit_code=70, error=None, turns=1, steps=0, **later
        )
    )
    session.past.apply(ev.LogSeal(lines=3, sha256="0", **later))

    assert session.past.used["wall"] == 1
    assert session.past.time == 90_000_000
