"""The outcome is a total function of the log."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import ErrorCode
from runner.outcome import OutcomeFold, derive_outcome
from runner.session import events as ev

_json: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from(["", "error", "completed", "aborted", "signal"]),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["kind", "reason", "error", "code", "content", "source", "message"]), inner)
    ),
    max_leaves=6,
)
_codes = st.sampled_from([code.name for code in ErrorCode] + ["SERVER", ""])
_objects = st.dictionaries(
    st.sampled_from(["kind", "reason", "error", "code", "content", "source", "message", "task"]), _json
)
_reasons = st.one_of(
    st.sampled_from(["completed", "aborted", "blocked", "error", "max-tokens", "interrupted"]).map(
        lambda kind: {"kind": kind}
    ),
    st.tuples(st.sampled_from(["limit", "budget", "policy", "signal", "x"]), _codes).map(
        lambda pair: {"kind": "aborted", "reason": {"kind": pair[0], "code": pair[1]}}
    ),
    _codes.map(lambda code: {"kind": "error", "error": {"code": code, "message": "m"}}),
    _objects,
)
_by_kind: dict[str, st.SearchStrategy[Any]] = {
    "integer": st.integers(0, 3),
    "number": st.floats(0, 200, allow_nan=False),
    "string": st.sampled_from(["a", "rejected", "allowed-once", "COMPLETED", "INTERNAL", "TOOL_FAILED"]),
    "boolean": st.booleans(),
    "object": _objects,
    "array": st.lists(_json, max_size=2),
    "any": _json,
}


def _event(cls: type[ev.Event]) -> st.SearchStrategy[ev.Event]:
    """Events of one type whose fields have the right JSON type and any value."""
    fields = {
        field.attribute: _reasons if cls is ev.TurnEnd and field.name == "reason" else _by_kind[field.kind]
        for field in cls.FIELDS
    }
    return st.fixed_dictionaries(fields).map(lambda values: cls(**values))


_events = st.lists(st.one_of([_event(cls) for cls in ev.EVENT_TYPES.values()]), max_size=15)


@settings(max_examples=150, deadline=None)
@given(_events)
def test_any_events_have_one_outcome_and_green_needs_a_completed_turn(events: list[ev.Event]) -> None:
    """No sequence raises; COMPLETED never stands without a completed turn; the numbers fit together."""
    outcome = derive_outcome(events)

    assert (outcome.code is ErrorCode.COMPLETED) == (outcome.exit_code == 0) == (outcome.cause is None)
    if outcome.code is ErrorCode.COMPLETED:
        assert any(isinstance(event, ev.TurnEnd) and event.reason.get("kind") == "completed" for event in events)
        assert all(check.passed for check in outcome.checks)
    assert outcome.turns <= outcome.steps
    assert outcome.calls.failed + outcome.calls.denied <= outcome.calls.total


@settings(max_examples=60, deadline=None)
@given(_events)
def test_asking_on_the_way_changes_nothing(events: list[ev.Event]) -> None:
    """The fold may be asked after every event."""
    fold = OutcomeFold()
    for event in events:
        fold.apply(event)
        fold.outcome()

    assert fold.outcome() == derive_outcome(events)


@settings(max_examples=60, deadline=None)
@given(_events)
def test_the_recorded_end_never_makes_a_failure_green(events: list[ev.Event]) -> None:
    """Reading a finished log again gives the deciding code that was recorded."""
    first = derive_outcome(events)
    again = derive_outcome([*events, first.run_end()])

    assert (again.code, again.exit_code) == (first.code, first.exit_code)
