"""Green needs positive evidence: a turn, checks, outputs, calls that worked."""

from __future__ import annotations

from typing import Any

from runner.errors import ErrorCode
from runner.outcome import CheckOutcome, derive_outcome
from runner.session import events as ev


def completed(*inner: ev.Event, number: int = 1) -> list[ev.Event]:
    """A completed turn with one step around ``inner``."""
    return [
        ev.TurnStart(turn=number),
        ev.StepStart(turn=number, step=number),
        *inner,
        ev.StepEnd(turn=number, step=number),
        ev.TurnEnd(turn=number, reason={"kind": "completed"}),
    ]


def call(call_id: str, code: str | None = None, *, name: str = "shell") -> list[ev.Event]:
    """A call and its result, with an error code if it failed."""
    message: Any = {
        "role": "user",
        "id": f"r-{call_id}",
        "source": {"kind": "tool", "callId": call_id},
        "content": [{"type": "tool-result", "toolCallId": call_id, "content": [], "isError": code is not None}],
    }
    error = None if code is None else {"name": "E", "code": code}
    return [
        ev.ToolCall(turn=1, step=1, call_id=call_id, name=name, arguments="{}"),
        ev.ToolResult(turn=1, step=1, message=message, error=error, source_event_seqs=[0]),
    ]


def check(name: str, *, passed: bool, attempt: int = 1, ms: int = 10) -> list[ev.Event]:
    """One attempt of a check."""
    return [
        ev.CheckStart(name=name, attempt=attempt),
        ev.CheckEnd(name=name, attempt=attempt, passed=passed, exit_code=0 if passed else 1, duration_ms=ms),
    ]


def answer(text: str) -> ev.AssistantMessage:
    """An answer of the model."""
    content: Any = [{"type": "text", "text": text}] if text else []
    message: Any = {"role": "assistant", "content": content, "source": {"kind": "model"}, "id": "a"}
    return ev.AssistantMessage(turn=1, step=1, message=message, source_event_seqs=[])


def run_start(*checks: str) -> ev.RunStart:
    """The start of a run whose task declares ``checks``."""
    return ev.RunStart(
        task_digest="",
        profile_digest="",
        policy_digest="",
        tools_digest="",
        versions={},
        base={"commit": None, "tree": "", "dirty": False},
        sandbox={"backend": "bubblewrap", "mode": "workspace-write", "network": "off", "notEnforced": []},
        trust="trusted",
        config={"task": {"checks": [{"name": name, "run": "true"} for name in checks]}},
    )


def test_the_last_attempt_of_a_check_decides() -> None:
    """Two failures and a pass are a pass of three attempts."""
    events = [
        *completed(),
        *check("tests", passed=False),
        *check("tests", passed=False, attempt=2),
        *completed(number=2),
        *check("tests", passed=True, attempt=3, ms=5),
    ]
    outcome = derive_outcome(events)

    assert outcome.code is ErrorCode.COMPLETED
    assert outcome.checks == (CheckOutcome("tests", passed=True, attempts=3, duration_ms=25),)


def test_a_check_that_ends_failing_fails_the_task() -> None:
    """An earlier pass does not count."""
    outcome = derive_outcome([*completed(), *check("tests", passed=True), *check("tests", passed=False, attempt=2)])

    assert outcome.code is ErrorCode.TASK_FAILED
    assert outcome.cause is not None
    assert "tests" in outcome.cause.message


def test_a_declared_check_that_never_ran_fails_the_task() -> None:
    """The declaration is read from the start of the run, or handed in."""
    from_log = derive_outcome([run_start("lint"), *completed()])
    given = derive_outcome([run_start(), *completed()], checks=["lint"])
    ran = derive_outcome([run_start("lint"), *completed(), *check("lint", passed=True)])

    assert from_log.code is given.code is ErrorCode.TASK_FAILED
    assert ran.code is ErrorCode.COMPLETED


def test_a_missing_output_fails_the_task() -> None:
    """Each one is named."""
    outcome = derive_outcome(completed(), missing_outputs=["a.md", "b.md"])

    assert outcome.exit_code == 1
    assert ["a.md" in str(outcome.cause), "b.md" in str(outcome.secondary)] == [True, True]


def test_a_missing_patch_is_its_own_code_and_beats_a_failed_check() -> None:
    """14 stands before 1 when both are found at the end."""
    outcome = derive_outcome([*completed(), *check("tests", passed=False)], patch_missing=True)

    assert outcome.exit_code == 14
    assert [cause.code for cause in outcome.secondary] == [ErrorCode.TASK_FAILED]


def test_a_run_whose_every_call_failed_is_not_green() -> None:
    """Nought of two worked."""
    outcome = derive_outcome(completed(*call("a", "TOOL_FAILED"), *call("b", "TOOL_TIMEOUT")))

    assert outcome.code is ErrorCode.TASK_FAILED
    assert (outcome.calls.total, outcome.calls.failed, outcome.calls.denied) == (2, 2, 0)


def test_one_call_that_worked_is_enough() -> None:
    """Failures on the way are normal."""
    outcome = derive_outcome(completed(*call("a", "TOOL_FAILED"), *call("b", "POLICY_DENIED"), *call("c")))

    assert outcome.code is ErrorCode.COMPLETED
    assert (outcome.calls.total, outcome.calls.failed, outcome.calls.denied) == (3, 1, 1)


def test_a_run_whose_every_call_was_denied_is_a_policy_failure() -> None:
    """Policy, guards and masks are authority."""
    calls = [*call("a", "POLICY_DENIED"), *call("b", "GUARD_DENIED"), *call("c", "INVALID_ARGS")]
    outcome = derive_outcome(completed(*calls))

    assert outcome.code is ErrorCode.POLICY_DENIED


def test_denied_and_failed_calls_together_are_a_task_failure() -> None:
    """Some were tried, none worked."""
    outcome = derive_outcome(completed(*call("a", "POLICY_DENIED"), *call("b", "SANDBOX_DENIED")))

    assert outcome.code is ErrorCode.TASK_FAILED


def test_calls_that_only_had_wrong_arguments_are_a_task_failure() -> None:
    """The model's mistake is not the policy's decision."""
    outcome = derive_outcome(completed(*call("a", "INVALID_ARGS"), *call("b", "UNKNOWN_TOOL")))

    assert outcome.code is ErrorCode.TASK_FAILED
    assert outcome.calls.denied == 2


def test_a_failed_result_without_a_code_counts_as_failed() -> None:
    """Other harnesses write only the flag."""
    events = call("a", "x")
    assert isinstance(events[1], ev.ToolResult)
    events[1].error = None

    assert derive_outcome(completed(*events)).calls.failed == 1


def test_a_pruned_copy_of_a_result_is_not_a_second_result() -> None:
    """Replacing the content of a result changes no count."""
    first = call("a", "TOOL_FAILED")
    assert isinstance(first[1], ev.ToolResult)
    copy = ev.ToolResult(
        turn=1,
        step=1,
        message=first[1].message,
        error=first[1].error,
        source_event_seqs=[1],
        surface_op={"op": "replace", "start": 1, "end": 1},
    )
    outcome = derive_outcome(completed(*first, copy, *call("b")))

    assert (outcome.calls.total, outcome.calls.failed) == (2, 1)


def test_a_call_that_repair_closed_counts_once() -> None:
    """TOOL_NOT_STARTED has a result and no call event."""
    outcome = derive_outcome(completed(*call("a", "TOOL_NOT_STARTED")[1:], *call("b")))

    assert (outcome.calls.total, outcome.calls.failed) == (2, 1)


def test_the_same_call_id_in_two_steps_is_two_calls() -> None:
    """Some providers count their ids anew in each answer."""
    outcome = derive_outcome([*completed(*call("a")), *completed(*call("a"), number=2)])

    assert outcome.calls.total == 2


def test_the_denied_call_that_aborts_a_run_is_named() -> None:
    """on_denied: abort says which tool."""
    events = completed(*call("a", "POLICY_DENIED", name="write_file"))
    events[-1] = ev.TurnEnd(turn=1, reason={"kind": "aborted", "reason": {"kind": "policy", "code": "POLICY_DENIED"}})
    outcome = derive_outcome(events)

    assert outcome.exit_code == 4
    assert outcome.cause is not None
    assert "write_file" in outcome.cause.message


def test_approvals_are_counted_by_decision() -> None:
    """A cancelled decision is neither allowed nor denied."""
    decided = ["allowed-once", "rejected", "rejected", "cancelled", "unavailable"]
    events: list[ev.Event] = []
    for index, what in enumerate(decided):
        events.append(ev.ApprovalAsked(id=str(index), call_id=str(index), tool_name="shell"))
        events.append(ev.ApprovalDecided(id=str(index), outcome=what, rule="r"))
    approvals = derive_outcome(completed(*events)).approvals

    assert (approvals.asked, approvals.allowed, approvals.denied) == (5, 1, 3)


def test_the_final_message_is_what_the_last_answer_says() -> None:
    """What was said beside a call stands until an answer comes; an empty answer says nothing."""
    assert derive_outcome(completed(answer("first"), answer("done"))).final_message == "done"
    assert derive_outcome(completed(answer("I look."), answer(""))).final_message is None
    assert derive_outcome(completed()).final_message is None


def test_steps_are_ended_steps_and_turns_have_at_least_one() -> None:
    """A turn that a hook ended before its first step is not counted."""
    empty = [ev.TurnStart(turn=1), ev.TurnEnd(turn=1, reason={"kind": "completed"})]
    events = [*empty, *completed(ev.StepEnd(turn=2, step=9), number=2)]

    counted = derive_outcome(events)
    assert (counted.turns, counted.steps) == (1, 2)
    outcome = derive_outcome(events)
    assert (outcome.turns, outcome.steps) == (1, 2)


def test_the_evidence_says_what_was_looked_at() -> None:
    """Reports show it line by line."""
    outcome = derive_outcome([*completed(*call("a")), *check("tests", passed=False)], missing_outputs=["x"])
    holds = {item.name: item.holds for item in outcome.evidence}

    assert holds == {"turn": True, "check tests": False, "output x": False, "calls": True}


def test_checks_that_a_stopped_run_never_reached_are_not_blamed() -> None:
    """The limit is the cause; the absent check is evidence only."""
    events = [run_start("tests"), *completed()[:-1]]
    reason = {"kind": "aborted", "reason": {"kind": "limit", "code": "LIMIT_REACHED", "name": "steps"}}
    outcome = derive_outcome([*events, ev.TurnEnd(turn=1, reason=reason)])

    assert (outcome.code, outcome.secondary) == (ErrorCode.LIMIT_REACHED, ())
    assert [item.name for item in outcome.evidence if not item.holds] == ["turn", "check tests"]
