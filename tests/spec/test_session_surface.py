"""The surface and the projection: which messages the model sees, and which events may say so."""

from __future__ import annotations

from typing import Any

import pytest

from runner.errors import LogError
from runner.session import events as ev
from runner.session.projection import Projection, derive_messages, message_of
from runner.session.surface import Surface


def user(seq: int, text: str = "hello", **envelope: Any) -> ev.UserMessage:
    """A user message."""
    content = [{"type": "text", "text": text}]
    return ev.UserMessage(content=content, source={"kind": "user"}, role="user", id=f"u{seq}", seq=seq, **envelope)


def assistant(seq: int, *, sources: Any = (), calls: tuple[str, ...] = ()) -> ev.AssistantMessage:
    """An answer with calls."""
    content: list[Any] = [{"type": "tool-call", "id": call, "name": "shell", "arguments": "{}"} for call in calls]
    message: Any = {"role": "assistant", "content": content, "source": {"kind": "model"}, "id": f"a{seq}"}
    return ev.AssistantMessage(turn=1, step=1, message=message, seq=seq, source_event_seqs=list(sources))


def result(seq: int, call: str = "c", *, text: str = "out", error: bool = False, **envelope: Any) -> ev.ToolResult:
    """A tool result."""
    block = {"type": "tool-result", "toolCallId": call, "content": [{"type": "text", "text": text}], "isError": error}
    message: Any = {"role": "user", "content": [block], "source": {"kind": "tool", "callId": call}, "id": "r"}
    envelope.setdefault("source_event_seqs", [seq - 1])
    return ev.ToolResult(turn=1, step=1, message=message, seq=seq, **envelope)


def replace(start: int, end: int) -> dict[str, Any]:
    """A replace of the span from one node to another."""
    return {"op": "replace", "start": start, "end": end}


def applied(*events: ev.Event) -> Surface:
    """The surface after ``events``."""
    surface = Surface()
    for event in events:
        surface.apply(event)
    return surface


def test_messages_are_appended_in_order() -> None:
    """Each surface event is a node, named by its seq."""
    surface = applied(user(0), assistant(1, calls=("c",)), result(3))

    assert [node.seq for node in surface.nodes] == [0, 1, 3]


def test_a_replace_stands_where_its_span_stood() -> None:
    """Start and end are positions: after a replace the start may be numerically larger than the end."""
    surface = applied(user(0), user(1), user(2), user(3))

    assert surface.apply(user(4, surface_op=replace(1, 1), source_event_seqs=[1])) == (1, 2)
    assert [node.seq for node in surface.nodes] == [0, 4, 2, 3]
    assert surface.apply(user(5, surface_op=replace(4, 2), source_event_seqs=[4, 2, 0])) == (1, 3)
    assert [node.seq for node in surface.nodes] == [0, 5, 3]


def test_other_events_change_nothing() -> None:
    """Events that are no message leave the surface alone."""
    surface = applied(user(0), ev.TurnStart(turn=1, seq=1), ev.LimitReached(name="steps", used=1, max=2, percent=90))

    assert [node.seq for node in surface.nodes] == [0]


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (user(5, surface_op=None, source_event_seqs=[0]), "neither append nor a replace"),
        (user(5, surface_op="insert", source_event_seqs=[0]), "neither append nor a replace"),
        (user(5, source_event_seqs=[0]), "not allowed on an appended user message"),
        (user(5, surface_op=replace(0, 1)), "sourceEventSeqs is missing"),
        (user(5, surface_op=replace(0, 1), source_event_seqs=[0]), "does not name the replaced node 1"),
        (user(5, surface_op=replace(1, 0), source_event_seqs=[0, 1]), "not on the surface"),
        (user(5, surface_op=replace(0, 9), source_event_seqs=[0, 1]), "not on the surface"),
        (user(5, surface_op=replace(0, 0), source_event_seqs=[0, 5]), "not earlier"),
        (user(5, surface_op=replace(0, 0), source_event_seqs=[0, -1]), "not earlier"),
        (user(5, surface_op=replace(0, 0), source_event_seqs=[0, 2, 0]), "twice"),
        (user(5, surface_op=replace(0, 0), source_event_seqs=[0, "1"]), "no list of integers"),
        (user(5, surface_op=replace(0, 0), source_event_seqs=[0, True]), "no list of integers"),
        (user(5, surface_op=replace(0, 0), source_event_seqs=[]), "is empty"),
        (result(5, source_event_seqs=None), "sourceEventSeqs is missing"),
        (result(5, source_event_seqs=[]), "is empty"),
        (result(5, surface_op=replace(0, 0), source_event_seqs=[0]), "one tool result"),
        (result(5, surface_op=replace(1, 2), source_event_seqs=[1, 2]), "one tool result"),
        (result(5, "other", surface_op=replace(2, 2), source_event_seqs=[2]), "only its content"),
        (result(5, error=True, surface_op=replace(2, 2), source_event_seqs=[2]), "only its content"),
        (ev.TurnStart(turn=1, seq=5, surface_op="append"), "only a message"),
        (ev.TurnStart(turn=1, seq=5, source_event_seqs=[0]), "only a message"),
    ],
)
def test_a_broken_surface_event_is_refused_and_changes_nothing(event: ev.Event, reason: str) -> None:
    """Each rule about surfaceOp and sourceEventSeqs is checked."""
    surface = applied(user(0), assistant(1, calls=("c",)), result(2))

    with pytest.raises(LogError, match=reason):
        surface.apply(event)

    assert [node.seq for node in surface.nodes] == [0, 1, 2]


def test_a_tool_result_may_be_replaced_by_one_with_other_content() -> None:
    """Pruning changes the text and nothing else."""
    surface = applied(user(0), assistant(1, calls=("c",)), result(2, text="long " * 100))

    surface.apply(result(4, text="long", surface_op=replace(2, 2), source_event_seqs=[2]))

    assert [node.seq for node in surface.nodes] == [0, 1, 4]


@pytest.mark.parametrize(
    "change",
    [
        {"content": None},
        {"content": "text"},
        {"content": [None]},
        {"content": [{"text": "no type"}]},
        {"content": [{"type": "text"}]},
        {"content": [{"type": "text", "text": 1}]},
        {"content": [{"type": "tool-call", "id": "c", "name": "n"}]},
        {"content": [{"type": "tool-result", "toolCallId": "c"}]},
        {"content": [{"type": "tool-result", "toolCallId": "c", "content": [{"type": "text"}]}]},
        {"role": "system"},
        {"role": None},
        {"source": None},
    ],
)
def test_a_malformed_message_is_refused(change: dict[str, Any]) -> None:
    """A message without role, content or source of the right shape cannot enter a log, nor leave one."""
    event = assistant(1, calls=("c",))
    event.message = {**event.message, **change}  # type: ignore[typeddict-item]  # malformed on purpose

    with pytest.raises(LogError):
        Surface().apply(event)


def test_a_message_event_projects_to_its_message() -> None:
    """There is one projection a node, and none for other events."""
    answer = assistant(1)

    assert message_of(answer) is answer.message
    assert message_of(user(0, "hi")) == {
        "role": "user",
        "content": [{"type": "text", "text": "hi"}],
        "source": {"kind": "user"},
        "id": "u0",
    }
    assert message_of(ev.TurnStart(turn=1)) is None


def test_the_generation_rises_with_each_replace_only() -> None:
    """While it stays, messages only grow, so a caller can take what is new."""
    projection = Projection()
    for event in (user(0), user(1), user(2)):
        projection.apply(event)
    before = list(projection.messages)
    assert projection.generation == 0

    projection.apply(user(3, "sum", surface_op=replace(0, 1), source_event_seqs=[0, 1]))

    assert projection.generation == 1
    assert [message["id"] for message in projection.messages] == ["u3", "u2"]
    assert [node.seq for node in projection.nodes] == [3, 2]
    assert [message["id"] for message in before] == ["u0", "u1", "u2"]


def test_the_whole_fold_refuses_a_span_that_is_not_there() -> None:
    """``derive_messages`` finds the defect by itself."""
    broken = user(1, surface_op=replace(0, 7), source_event_seqs=[0, 7])

    with pytest.raises(LogError, match="not on the surface"):
        derive_messages([user(0), broken])
    with pytest.raises(LogError, match="not on the surface"):
        derive_messages([user(0), user(1, surface_op=None)])
