"""How the causes in a log become one code, one exit code and one class."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runner.errors import SOFT_FAIL_CLASSES, ConfigError, ErrorCode, ProviderError, RunnerError
from runner.outcome import PRECEDENCE, Cause, cancelled_by, cause_of, derive_outcome, exit_status
from runner.session import events as ev

if TYPE_CHECKING:
    from collections.abc import Sequence


def turn(*inner: ev.Event, number: int = 1, **reason: Any) -> list[ev.Event]:
    """A turn with one step around ``inner`` that ends with ``reason``."""
    return [
        ev.TurnStart(turn=number),
        ev.StepStart(turn=number, step=number),
        *inner,
        ev.StepEnd(turn=number, step=number),
        ev.TurnEnd(turn=number, reason=reason or {"kind": "completed"}),
    ]


def aborted(kind: str, code: str, **more: Any) -> dict[str, Any]:
    """The reason of a turn that the run itself stopped."""
    return {"kind": "aborted", "reason": {"kind": kind, "code": code, **more}}


def failed(code: str, message: str = "it broke") -> dict[str, Any]:
    """The reason of a turn that ended with an error."""
    return {"kind": "error", "error": {"code": code, "message": message}}


def test_a_finished_turn_without_anything_else_is_completed() -> None:
    """The smallest green log."""
    outcome = derive_outcome(turn())

    assert (outcome.outcome, outcome.code, outcome.exit_code) == ("completed", ErrorCode.COMPLETED, 0)
    assert outcome.failure_class is None
    assert outcome.error() is None


@pytest.mark.parametrize(
    ("reason", "code", "exit_code"),
    [
        (aborted("limit", "LIMIT_REACHED", name="steps"), ErrorCode.LIMIT_REACHED, 5),
        (aborted("budget", "BUDGET_EXHAUSTED", name="cost"), ErrorCode.BUDGET_EXHAUSTED, 6),
        (aborted("policy", "POLICY_DENIED"), ErrorCode.POLICY_DENIED, 4),
        (aborted("signal", "SIGHUP"), ErrorCode.CANCELLED, 129),
        (aborted("signal", "SIGINT"), ErrorCode.CANCELLED, 130),
        (aborted("signal", "SIGTERM"), ErrorCode.CANCELLED, 143),
        ({"kind": "aborted", "reason": "user"}, ErrorCode.CANCELLED, 130),
        ({"kind": "max-tokens"}, ErrorCode.TASK_FAILED, 1),
        ({"kind": "blocked"}, ErrorCode.POLICY_DENIED, 4),
        ({"kind": "interrupted"}, ErrorCode.INTERNAL, 70),
        (failed("TASK_FAILED"), ErrorCode.TASK_FAILED, 1),
        (failed("SANDBOX_UNAVAILABLE"), ErrorCode.SANDBOX_UNAVAILABLE, 3),
        (failed("PROVIDER_AUTH"), ErrorCode.PROVIDER_AUTH, 7),
        (failed("PROVIDER_QUOTA"), ErrorCode.PROVIDER_QUOTA, 8),
        (failed("PROVIDER_FAILED"), ErrorCode.PROVIDER_FAILED, 9),
        (failed("CONTEXT_EXHAUSTED"), ErrorCode.CONTEXT_EXHAUSTED, 10),
        (failed("LOG_UNKNOWN_EVENT"), ErrorCode.LOG_INVALID, 13),
        (failed("STORAGE_FAILED"), ErrorCode.STORAGE_FAILED, 15),
        (failed("INTERNAL"), ErrorCode.INTERNAL, 70),
        (failed("SERVER"), ErrorCode.PROVIDER_FAILED, 9),
        (failed("TOOL_FAILED"), ErrorCode.INTERNAL, 70),
        (failed("COMPLETED"), ErrorCode.INTERNAL, 70),
    ],
)
def test_the_reason_of_a_turn_decides(reason: dict[str, Any], code: ErrorCode, exit_code: int) -> None:
    """Every way a turn can end has its code; unknown codes of other harnesses are provider faults."""
    outcome = derive_outcome(turn(**reason))

    assert (outcome.code, outcome.exit_code) == (code, exit_code)
    assert outcome.outcome == ("cancelled" if code is ErrorCode.CANCELLED else "failed")
    assert outcome.failure_class == code.failure_class
    assert outcome.error() is not None


def test_the_first_terminal_cause_in_the_log_wins() -> None:
    """A stronger code that came later is secondary."""
    events = [*turn(**aborted("limit", "LIMIT_REACHED", name="steps")), *turn(number=2, **failed("INTERNAL"))]
    outcome = derive_outcome(events)

    assert outcome.code is ErrorCode.LIMIT_REACHED
    assert [cause.code for cause in outcome.secondary] == [ErrorCode.INTERNAL]


def test_what_is_logged_beats_what_is_handed_in() -> None:
    """Causes that stand nowhere in the log come after those that do, however strong."""
    outcome = derive_outcome(
        turn(**aborted("signal", "SIGTERM")), causes=[Cause(ErrorCode.STORAGE_FAILED, "disk full")]
    )

    assert outcome.exit_code == 143
    assert [cause.code for cause in outcome.secondary] == [ErrorCode.STORAGE_FAILED]


def test_causes_found_together_are_ranked_by_the_table() -> None:
    """The order of the design: 70 > 15 > 3 > 13 > cancelled > 7 > 8 > 9 > 10 > 6 > 5 > 4 > 16 > 11 > 14 > 1."""
    order = [70, 15, 3, 13, 130, 7, 8, 9, 10, 6, 5, 4, 16, 11, 14, 1]
    causes = [Cause(code, f"because of {code}") for code in reversed(PRECEDENCE)]
    outcome = derive_outcome(turn(), causes=causes)
    found = [outcome.cause, *outcome.secondary]

    assert [cause.exit_code for cause in found if cause][: len(order)] == order


def test_every_code_that_ends_a_run_is_ranked() -> None:
    """A new outcome code cannot be forgotten in the precedence."""
    ending = {code for code in ErrorCode if code.value.exit_code is not None}

    assert ending - {ErrorCode.COMPLETED} == set(PRECEDENCE)


def test_a_limit_between_turns_ends_the_run() -> None:
    """The turns limit is logged without a turn of its own."""
    outcome = derive_outcome([*turn(), ev.LimitReached(name="turns", used=1, max=1, percent=100)])

    assert outcome.code is ErrorCode.LIMIT_REACHED
    assert outcome.cause is not None
    assert "turns was reached: 1 of 1" in outcome.cause.message


def test_a_limit_and_the_turn_it_aborts_are_one_cause() -> None:
    """The same stop is not reported twice."""
    limit = ev.LimitReached(name="cost", used=2.5, max=2, percent=100)
    outcome = derive_outcome(turn(limit, **aborted("budget", "BUDGET_EXHAUSTED", name="cost")))

    assert (outcome.exit_code, outcome.secondary) == (6, ())


def test_a_limit_at_90_percent_ends_nothing() -> None:
    """It only warns the model."""
    outcome = derive_outcome(turn(ev.LimitReached(name="steps", used=9, max=10, percent=90)))

    assert outcome.code is ErrorCode.COMPLETED


def test_a_cancellation_between_turns_is_handed_in() -> None:
    """No turn is open while checks run, so the log has no cause of its own."""
    outcome = derive_outcome(turn(), causes=[cancelled_by("SIGTERM")])

    assert (outcome.outcome, outcome.exit_code) == ("cancelled", 143)


def test_a_bug_that_was_logged_and_caught_is_one_cause() -> None:
    """The loop logs it and lets it through."""
    outcome = derive_outcome(
        turn(**failed("INTERNAL", "KeyError('x')")), causes=[Cause(ErrorCode.INTERNAL, "KeyError: x")]
    )

    assert (outcome.exit_code, outcome.secondary) == (70, ())


def test_the_signal_is_taken_from_whoever_knows_it() -> None:
    """A log that only says cancelled keeps its place and gets the signal's exit code."""
    outcome = derive_outcome(turn(**aborted("signal", "CANCELLED")), causes=[cancelled_by("SIGHUP")])

    assert (outcome.exit_code, outcome.secondary) == (129, ())


def test_a_failed_setup_command_has_its_code() -> None:
    """Setup fails before the first turn."""
    outcome = derive_outcome([ev.SetupStart(index=0), ev.SetupEnd(index=0, exit_code=2, duration_ms=5)])

    assert (outcome.code, outcome.exit_code) == (ErrorCode.SETUP_FAILED, 16)


def test_a_setup_command_killed_by_the_cancellation_is_not_the_cause() -> None:
    """The signal is, the setup command is secondary."""
    events = [ev.SetupStart(index=0), ev.SetupEnd(index=0, exit_code=None, duration_ms=5)]
    outcome = derive_outcome(events, causes=[cancelled_by("SIGINT")])

    assert outcome.exit_code == 130
    assert [cause.code for cause in outcome.secondary] == [ErrorCode.SETUP_FAILED]


def test_a_run_that_never_began_a_turn_takes_the_cause_it_is_given() -> None:
    """A broken sandbox before the first model call is not called a crash."""
    outcome = derive_outcome(
        [], causes=[Cause(ErrorCode.SANDBOX_UNAVAILABLE, "no backend works", "install bubblewrap")]
    )

    assert (outcome.exit_code, outcome.secondary) == (3, ())
    assert outcome.error() == {
        "code": "SANDBOX_UNAVAILABLE",
        "message": "no backend works",
        "hint": "install bubblewrap",
    }


@pytest.mark.parametrize("events", [[], turn()[:2], turn()[:3]])
def test_a_log_that_just_stops_is_internal(events: list[ev.Event]) -> None:
    """Without a finished turn and without a cause the runner itself must have died."""
    outcome = derive_outcome(events)

    assert (outcome.code, outcome.exit_code) == (ErrorCode.INTERNAL, 70)


def test_the_recorded_end_keeps_a_cause_that_stands_nowhere_else() -> None:
    """A finished log gives the same outcome without the facts that were handed in."""
    events = turn()
    first = derive_outcome(events, missing_outputs=["report.md"])
    again = derive_outcome([*events, first.run_end()])

    assert first.code is again.code is ErrorCode.TASK_FAILED
    assert again.error() == first.error()
    assert again.secondary == ()


def test_a_recorded_success_is_not_believed_against_the_log() -> None:
    """``run/end`` can add a cause, never take one away."""
    end = ev.RunEnd(outcome="completed", code="COMPLETED", exit_code=0, turns=1, steps=1)
    outcome = derive_outcome([*turn(**failed("PROVIDER_AUTH")), end])

    assert outcome.code is ErrorCode.PROVIDER_AUTH


def test_the_recorded_end_keeps_the_signal() -> None:
    """143 is read back as SIGTERM."""
    first = derive_outcome(turn(), causes=[cancelled_by("SIGTERM")])

    assert derive_outcome([*turn(), first.run_end()]).exit_code == 143


def test_a_resumed_run_forgets_why_the_last_part_ended() -> None:
    """Causes and evidence are those of the last part, counts those of the whole session."""
    before = turn(ev.CheckEnd(name="t", attempt=1, passed=False, duration_ms=1), **aborted("limit", "LIMIT_REACHED"))
    outcome = derive_outcome([*before, ev.RunResume(changes=[]), *turn(number=2)])

    assert outcome.code is ErrorCode.COMPLETED
    assert (outcome.turns, outcome.steps) == (2, 2)


def test_a_fork_answers_only_for_itself() -> None:
    """What stands before the end of the seed is the parent's."""
    outcome = derive_outcome([*turn(**failed("PROVIDER_AUTH")), ev.SessionEndSeed(), *turn(number=2)])

    assert outcome.code is ErrorCode.COMPLETED
    assert (outcome.turns, outcome.steps) == (1, 1)


def test_an_exception_becomes_a_cause() -> None:
    """Code, message and hint are kept; a tool result's code is our bug."""
    auth = ProviderError("the key was refused", code=ErrorCode.PROVIDER_AUTH, hint="check the key")
    lost = RunnerError("odd", code=ErrorCode.TOOL_FAILED)

    assert cause_of(auth) == Cause(ErrorCode.PROVIDER_AUTH, "the key was refused", "check the key")
    assert cause_of(lost).code is ErrorCode.INTERNAL


@pytest.mark.parametrize("code", [code for code in PRECEDENCE if code.failure_class in SOFT_FAIL_CLASSES])
def test_soft_fail_turns_its_class_into_exit_0(code: ErrorCode) -> None:
    """The outcome keeps the table's number; other classes are not touched."""
    outcome = derive_outcome(turn(), causes=[Cause(code, "x")])
    other = [name for name in SOFT_FAIL_CLASSES if name != code.failure_class]

    assert exit_status(outcome, [str(code.failure_class)]) == (0, True)
    assert exit_status(outcome, other) == (code.exit_code, False)
    assert outcome.exit_code == code.exit_code


def test_soft_fail_leaves_a_completed_run_alone() -> None:
    """Nothing was softened, so nothing says so."""
    assert exit_status(derive_outcome(turn()), ["task"]) == (0, False)


@pytest.mark.parametrize("names", [["config"], ["sandbox"], ["log"], ["storage"], ["internal"], ["cancelled"], ["x"]])
def test_soft_fail_refuses_classes_that_must_stay_loud(names: Sequence[str]) -> None:
    """Broken infrastructure and cancellation always show in the exit code."""
    with pytest.raises(ConfigError, match="may be softened"):
        exit_status(derive_outcome(turn()), names)
