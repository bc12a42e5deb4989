"""The incremental projection and the whole fold agree, whatever is appended and replaced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.providers.scripted import ScriptedDialect
from runner.session import events as ev
from runner.session.projection import Projection, derive_messages
from runner.session.store import open_session

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"
HEADER: Any = {"config": {"model": "m"}, "system": "s", "tools": []}


def user(seq: int, **envelope: Any) -> ev.UserMessage:
    """A user message named by its seq."""
    content = [{"type": "text", "text": f"message {seq}"}]
    return ev.UserMessage(content=content, source={"kind": "user"}, role="user", id=f"u{seq}", seq=seq, **envelope)


@st.composite
def histories(draw: st.DrawFn) -> list[ev.Event]:
    """Messages, replaces of any span on the surface, and events that are no message."""
    events: list[ev.Event] = []
    surface: list[int] = []
    for seq in range(draw(st.integers(1, 25))):
        kind = draw(st.sampled_from(["append", "append", "replace", "other"]))
        if kind == "other":
            events.append(ev.TurnStart(turn=1, seq=seq))
        elif kind == "replace" and surface:
            start = draw(st.integers(0, len(surface) - 1))
            end = draw(st.integers(start, len(surface) - 1))
            named = surface[start : end + 1]
            operation = {"op": "replace", "start": named[0], "end": named[-1]}
            events.append(user(seq, surface_op=operation, source_event_seqs=named))
            surface[start : end + 1] = [seq]
        else:
            events.append(user(seq))
            surface.append(seq)
    return events


@settings(deadline=None)
@given(histories())
def test_the_projection_equals_the_whole_fold_after_every_event(events: list[ev.Event]) -> None:
    """Messages, nodes and generation, event by event."""
    projection = Projection()
    generation = 0
    for count, event in enumerate(events, 1):
        before = list(projection.messages)
        projection.apply(event)

        assert projection.messages == derive_messages(events[:count])
        assert [node.seq for node in projection.nodes] == [int(message["id"][1:]) for message in projection.messages]
        generation += isinstance(event.surface_op, dict)
        assert projection.generation == generation
        if not isinstance(event.surface_op, dict):
            assert projection.messages[: len(before)] == before
        if not event.SURFACE:
            assert projection.messages == before


@settings(deadline=None)
@given(histories())
def test_without_a_replace_each_body_begins_with_the_one_before(events: list[ev.Event]) -> None:
    """Body N without its closing brackets is a byte prefix of body N+1."""
    dialect, projection = ScriptedDialect(), Projection()
    last = dialect.whole(HEADER, [])
    for event in events:
        generation = projection.generation
        projection.apply(event)
        body = dialect.whole(HEADER, projection.messages)
        if projection.generation == generation:
            assert body.startswith(last.removesuffix(dialect.close))
        last = body


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.suffix != ".md"))
def test_real_logs_project_the_same_both_ways(name: str) -> None:
    """After every event of every golden log."""
    events = list(open_session(str(GOLDEN / name)).events())
    projection = Projection()
    for count, event in enumerate(events, 1):
        projection.apply(event)
        if event.SURFACE:
            assert projection.messages == derive_messages(events[:count])
    assert projection.messages
