"""The outcome of a run: a pure fold of its events.

The first terminal cause in the log wins, later ones are secondary. What is found together at the
end (causes handed in, checks, outputs, calls) is ranked by ``PRECEDENCE`` behind what was logged.
COMPLETED needs positive evidence: a finished turn, every declared check passed at its last
attempt, declared outputs present, and a call that worked if any was made.

``session/end-seed`` starts the fold anew (what a fork took over is its parent's), ``run/resume``
forgets causes and evidence but keeps the counts. Reads events only, writes none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.errors import SIGNAL_EXIT_CODES, SOFT_FAIL_CLASSES, ConfigError, ErrorCode
from runner.figures import amount, counted
from runner.record import field, record, replace
from runner.session import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from runner.errors import RunnerError
    from runner.messages import JsonObject

DENIED_CODES = frozenset({"INVALID_ARGS", "UNKNOWN_TOOL", "TOOL_MASKED", "POLICY_DENIED", "GUARD_DENIED"})
"""Error codes of a call that was refused before it ran."""

AUTHORITY_CODES = frozenset({"TOOL_MASKED", "POLICY_DENIED", "GUARD_DENIED"})
"""Refusals by the run's authority; the other two are mistakes of the model."""

PRECEDENCE = (
    ErrorCode.INTERNAL,
    ErrorCode.STORAGE_FAILED,
    ErrorCode.SANDBOX_UNAVAILABLE,
    ErrorCode.LOG_INVALID,
    ErrorCode.CANCELLED,
    ErrorCode.PROVIDER_AUTH,
    ErrorCode.PROVIDER_QUOTA,
    ErrorCode.PROVIDER_FAILED,
    ErrorCode.CONTEXT_EXHAUSTED,
    ErrorCode.BUDGET_EXHAUSTED,
    ErrorCode.LIMIT_REACHED,
    ErrorCode.POLICY_DENIED,
    ErrorCode.SETUP_FAILED,
    ErrorCode.OUTPUT_INVALID,
    ErrorCode.NO_CHANGES,
    ErrorCode.TASK_FAILED,
    ErrorCode.CONFIG_INVALID,
    ErrorCode.BATCH_PARTIAL,
)
"""Which of several causes found together wins, strongest first."""

_ABORT_CODES = {
    "limit": ErrorCode.LIMIT_REACHED,
    "budget": ErrorCode.BUDGET_EXHAUSTED,
    "policy": ErrorCode.POLICY_DENIED,
    "signal": ErrorCode.CANCELLED,
}

_HINTS = {
    ErrorCode.LIMIT_REACHED: "raise the limit in the profile, or make the task smaller",
    ErrorCode.BUDGET_EXHAUSTED: "raise the budget in the profile, or make the task smaller",
    ErrorCode.POLICY_DENIED: (
        "the denied calls and their rules are in summary.md; widen tools.allow or the policy if they were right"
    ),
}

_BUDGETS = frozenset({"cost", "tokens", "input_tokens", "output_tokens"})


def limit_code(name: str) -> ErrorCode:
    """The code a run ends with when the limit of that name is reached: money and tokens are a budget."""
    return ErrorCode.BUDGET_EXHAUSTED if name in _BUDGETS else ErrorCode.LIMIT_REACHED


@record
class Cause:
    """One reason why a run is not completed.

    Attributes:
        code: A code with an exit code of its own, never COMPLETED.
        message: What happened, one sentence.
        hint: What to do about it.
        signal: For CANCELLED the name of the signal, if it is known.
    """

    code: ErrorCode
    message: str
    hint: str | None = None
    signal: str | None = None

    @property
    def exit_code(self) -> int:
        """Exit code; for CANCELLED the one of the signal."""
        return SIGNAL_EXIT_CODES.get(self.signal or "", self.code.exit_code)


@record
class Evidence:
    """One thing a completed run must show, whether it holds, and in words what was seen."""

    name: str
    holds: bool
    detail: str


@record
class CheckOutcome:
    """One check over all its attempts; ``duration_ms`` sums up, the rest is that of the last one.

    ``output`` is the end of what it printed if it failed, ``exit_code`` how it ended; None if it did not by itself.
    """

    name: str
    passed: bool
    attempts: int
    duration_ms: int
    output: str | None = None
    exit_code: int | None = None


@record
class CallCounts:
    """Tool calls: ``failed`` ran or were due and gave an error, ``denied`` were refused before."""

    total: int = 0
    failed: int = 0
    denied: int = 0


@record
class ApprovalCounts:
    """Calls put to the policy and what it said."""

    asked: int = 0
    allowed: int = 0
    denied: int = 0


@record
class Outcome:
    """How a run ended.

    Attributes:
        outcome: ``completed``, ``failed`` or ``cancelled``.
        code: The deciding code.
        exit_code: The number of the exit code table.
        failure_class: Class of the code, None for COMPLETED.
        cause: The deciding cause, None for COMPLETED.
        secondary: Other causes, in order.
        evidence: What was looked at.
        final_message: Text of the last answer that has any, None when the last one is empty.
        turns: Turns with at least one ended step.
        steps: Ended steps.
        calls: Tool calls.
        approvals: Decisions of the policy.
        checks: Checks in the order of their first attempt.
    """

    outcome: str
    code: ErrorCode
    exit_code: int
    failure_class: str | None
    cause: Cause | None
    secondary: tuple[Cause, ...] = ()
    evidence: tuple[Evidence, ...] = ()
    final_message: str | None = None
    turns: int = 0
    steps: int = 0
    calls: CallCounts = field(default_factory=CallCounts)
    approvals: ApprovalCounts = field(default_factory=ApprovalCounts)
    checks: tuple[CheckOutcome, ...] = ()

    def error(self) -> JsonObject | None:
        """``{code, message, hint}`` of the deciding cause, None for COMPLETED."""
        if self.cause is None:
            return None
        return {"code": self.code.name, "message": self.cause.message, "hint": self.cause.hint}

    def run_end(self) -> ev.RunEnd:
        """The ``run/end`` event of this outcome."""
        error = None if self.cause is None else {"code": self.code.name, "message": self.cause.message}
        return ev.RunEnd(
            outcome=self.outcome,
            code=self.code.name,
            failure_class=self.failure_class,
            exit_code=self.exit_code,
            error=error,
            turns=self.turns,
            steps=self.steps,
        )


class StepCount:
    """Counts turns and steps the one way every report does.

    Steps are ``step/end`` events, turns are turns with at least one of them.
    """

    def __init__(self) -> None:
        self.steps = 0
        self._turns: set[int] = set()

    @property
    def turns(self) -> int:
        """Turns with at least one ended step."""
        return len(self._turns)

    def apply(self, event: ev.StepEnd) -> None:
        """Count one ended step."""
        self.steps += 1
        self._turns.add(event.turn)


def is_new_result(event: ev.ToolResult) -> bool:
    """Whether the event is the result of a call, not a pruned copy that replaces one."""
    return not isinstance(event.surface_op, dict)


def result_code(event: ev.ToolResult) -> str | None:
    """Error code of a result: None on success, empty when it failed without one."""
    if event.error is not None:
        code = event.error.get("code")
        return code if isinstance(code, str) else ""
    failed = any(block.get("isError") for block in _blocks(event.message))
    return "" if failed else None


def result_state(event: ev.ToolResult) -> str:
    """``ok``, ``failed`` or ``denied`` (refused before it ran)."""
    code = result_code(event)
    if code is None:
        return "ok"
    return "denied" if code in DENIED_CODES else "failed"


def result_call_id(event: ev.ToolResult) -> str:
    """Id of the call a result answers, empty if the message does not say."""
    message: Mapping[str, object] = event.message
    source = message.get("source")
    return str(source.get("callId", "")) if isinstance(source, dict) else ""


def answer_text(event: ev.AssistantMessage) -> str:
    """The text blocks of an answer, joined by newlines."""
    texts = [block.get("text") for block in _blocks(event.message) if block.get("type") == "text"]
    return "\n".join(text for text in texts if isinstance(text, str))


def _blocks(message: Mapping[str, object]) -> list[JsonObject]:
    """The content blocks of a message; logs of others are read too, so nothing is taken for granted."""
    content = message.get("content")
    return [block for block in content if isinstance(block, dict)] if isinstance(content, list) else []


def declared_checks(config: Mapping[str, object]) -> tuple[str, ...]:
    """Names of the checks the task in a ``run/start`` configuration declares."""
    task = config.get("task")
    checks = task.get("checks") if isinstance(task, dict) else None
    if not isinstance(checks, list):
        return ()
    return tuple(str(check["name"]) for check in checks if isinstance(check, dict) and "name" in check)


def terminal_code(name: object, otherwise: ErrorCode) -> ErrorCode:
    """The code that ends a run for a code name of a log; ``otherwise`` for names that end none."""
    code = ErrorCode.__members__.get(name) if isinstance(name, str) else None
    if code is None or code.outcome.value.exit_code is None or code is ErrorCode.COMPLETED:
        return otherwise
    return code.outcome


def cause_of(error: RunnerError) -> Cause:
    """The cause an exception of ours stands for; a code that ends no run is INTERNAL."""
    return Cause(terminal_code(error.code.name, ErrorCode.INTERNAL), error.message, error.hint)


def cancelled_by(signal: str) -> Cause:
    """The cause of a run that a signal (``SIGTERM``) ended."""
    return Cause(ErrorCode.CANCELLED, f"cancelled by {signal}", signal=signal)


def cause_of_end(event: ev.RunEnd) -> Cause | None:
    """Why a run ended as its ``run/end`` says, None for a completed one."""
    if event.code == ErrorCode.COMPLETED.name:
        return None
    code = terminal_code(event.code, ErrorCode.INTERNAL)
    message = (event.error or {}).get("message")
    signal = {number: name for name, number in SIGNAL_EXIT_CODES.items()}.get(event.exit_code)
    return Cause(code, message if isinstance(message, str) else code.meaning, signal=signal)


class OutcomeFold:
    """Folds events one by one; ``outcome`` may be asked at any point and changes nothing."""

    def __init__(self) -> None:
        self._rules: dict[type[ev.Event], Callable[..., None]] = {
            ev.RunStart: self._run_start,
            ev.TurnStart: self._turn_start,
            ev.TurnEnd: self._turn_end,
            ev.StepEnd: self._step_end,
            ev.AssistantMessage: self._assistant_message,
            ev.ToolCall: self._tool_call,
            ev.ToolResult: self._tool_result,
            ev.ApprovalAsked: self._approval_asked,
            ev.ApprovalDecided: self._approval_decided,
            ev.CheckEnd: self._check_end,
            ev.SetupEnd: self._setup_end,
            ev.LimitReached: self._limit_reached,
            ev.RunEnd: self._run_end,
            ev.RunResume: self._run_resume,
            ev.SessionEndSeed: self._end_seed,
        }
        self._reset()

    def _reset(self) -> None:
        self._count = StepCount()
        self._calls = CallCounts()
        self._authority_denied = 0
        self._pending: dict[tuple[int, int, str], str] = {}
        self._last_denied = ""
        self._approvals = ApprovalCounts()
        self._final_message: str | None = None
        self._declared: tuple[str, ...] = ()
        self._forget_evidence()

    def _forget_evidence(self) -> None:
        self._causes: list[Cause] = []
        self._checks: dict[str, CheckOutcome] = {}
        self._turn_state = "none"
        self._setup_lost: list[int] = []

    def apply(self, event: ev.Event) -> None:
        """Take one event into account; types that say nothing about the outcome are skipped."""
        rule = self._rules.get(type(event))
        if rule is not None:
            rule(event)

    # --- rules --------------------------------------------------------------------------------

    def _run_start(self, event: ev.RunStart) -> None:
        self._declared = declared_checks(event.config)

    def _turn_start(self, _: ev.TurnStart) -> None:
        self._turn_state = "open"

    def _turn_end(self, event: ev.TurnEnd) -> None:
        kind = event.reason.get("kind")
        self._turn_state = kind if isinstance(kind, str) else "unknown"
        if kind == "aborted":
            self._aborted(event.reason.get("reason"))
        elif kind == "error":
            error = event.reason.get("error")
            self._failed(error if isinstance(error, dict) else {})
        elif kind == "max-tokens":
            message = "the model's answer was cut at the output limit"
            self._log(Cause(ErrorCode.TASK_FAILED, message, "raise model.max_output_tokens"))
        elif kind == "blocked":
            why = event.reason.get("message")
            message = f"a hook ended the turn: {why}" if why else "a hook ended the turn"
            self._log(Cause(ErrorCode.POLICY_DENIED, message))

    def _aborted(self, reason: object) -> None:
        if not isinstance(reason, dict):
            self._log(Cause(ErrorCode.CANCELLED, "the turn was aborted"))
            return
        kind, name = reason.get("kind"), reason.get("code")
        otherwise = _ABORT_CODES.get(kind, ErrorCode.CANCELLED) if isinstance(kind, str) else ErrorCode.CANCELLED
        code = terminal_code(name, otherwise)
        if code is ErrorCode.CANCELLED and isinstance(name, str) and name in SIGNAL_EXIT_CODES:
            self._log(cancelled_by(name))
        elif code in (ErrorCode.LIMIT_REACHED, ErrorCode.BUDGET_EXHAUSTED):
            if not any(cause.code is code for cause in self._causes):
                what = f"the limit {reason['name']} was reached" if "name" in reason else "a limit was reached"
                self._log(Cause(code, what, _HINTS[code]))
        elif code is ErrorCode.POLICY_DENIED:
            what = f"a call of {self._last_denied}" if self._last_denied else "a call"
            self._log(Cause(code, f"{what} was denied and the profile says on_denied: abort", _HINTS[code]))
        else:
            self._log(Cause(code, f"the turn was aborted ({kind})"))

    def _failed(self, error: JsonObject) -> None:
        # A code we do not know is another harness's, and its turns fail by the model request.
        name, message, hint = error.get("code"), error.get("message"), error.get("hint")
        known = isinstance(name, str) and name in ErrorCode.__members__
        code = terminal_code(name, ErrorCode.INTERNAL if known else ErrorCode.PROVIDER_FAILED)
        self._log(
            Cause(
                code,
                message if isinstance(message, str) and message else "the turn ended with an error",
                hint if isinstance(hint, str) else None,
            )
        )

    def _step_end(self, event: ev.StepEnd) -> None:
        self._count.apply(event)

    def _assistant_message(self, event: ev.AssistantMessage) -> None:
        text = answer_text(event)
        # An empty answer that ends a turn is the final one; what was said before it is no answer.
        calls = any(block.get("type") == "tool-call" for block in _blocks(event.message))
        if text.strip() or not calls:
            self._final_message = text if text.strip() else None

    def _tool_call(self, event: ev.ToolCall) -> None:
        self._pending[event.turn, event.step, event.call_id] = event.name
        self._calls = replace(self._calls, total=self._calls.total + 1)

    def _tool_result(self, event: ev.ToolResult) -> None:
        if not is_new_result(event):
            return
        key = (event.turn, event.step, result_call_id(event))
        calls, name = self._calls, self._pending.pop(key, None)
        if name is None:
            calls = replace(calls, total=calls.total + 1)
        state = result_state(event)
        if state == "failed":
            calls = replace(calls, failed=calls.failed + 1)
        elif state == "denied":
            calls = replace(calls, denied=calls.denied + 1)
            self._authority_denied += result_code(event) in AUTHORITY_CODES
            self._last_denied = name or ""
        self._calls = calls

    def _approval_asked(self, _: ev.ApprovalAsked) -> None:
        self._approvals = replace(self._approvals, asked=self._approvals.asked + 1)

    def _approval_decided(self, event: ev.ApprovalDecided) -> None:
        counts = self._approvals
        if event.outcome == "allowed-once":
            self._approvals = replace(counts, allowed=counts.allowed + 1)
        elif event.outcome in ("rejected", "unavailable"):
            self._approvals = replace(counts, denied=counts.denied + 1)

    def _check_end(self, event: ev.CheckEnd) -> None:
        before = self._checks.get(event.name)
        self._checks[event.name] = CheckOutcome(
            event.name,
            event.passed,
            before.attempts + 1 if before else 1,
            event.duration_ms + (before.duration_ms if before else 0),
            event.output,
            None if event.passed else event.exit_code,
        )

    def _setup_end(self, event: ev.SetupEnd) -> None:
        if event.exit_code is None:
            # Killed: by its timeout, or by the cancellation of the run, which then is the cause.
            self._setup_lost.append(event.index)
        elif event.exit_code != 0:
            message = f"setup command {event.index} exited with {event.exit_code}"
            self._log(Cause(ErrorCode.SETUP_FAILED, message))

    def _limit_reached(self, event: ev.LimitReached) -> None:
        if event.percent < 100:
            return
        code = limit_code(event.name)
        if event.needed is None:
            message = f"the limit {event.name} was reached: {amount(event.used)} of {amount(event.max)}"
        else:
            message = (
                f"the limit {event.name} was reached: {amount(event.used)} of {amount(event.max)} are used, "
                f"and the next request may need {amount(event.needed)} more"
            )
        self._log(Cause(code, message, _HINTS[code]))

    def _run_end(self, event: ev.RunEnd) -> None:
        # What decided may stand nowhere else in the log (storage, sandbox, a missing output).
        ended = cause_of_end(event)
        if ended is not None and not any(cause.code is ended.code for cause in self._causes):
            self._log(ended)

    def _run_resume(self, _: ev.RunResume) -> None:
        self._forget_evidence()

    def _end_seed(self, _: ev.SessionEndSeed) -> None:
        self._reset()

    def _log(self, cause: Cause) -> None:
        self._causes.append(cause)

    # --- result -------------------------------------------------------------------------------

    @property
    def turns(self) -> int:
        """Turns with at least one ended step."""
        return self._count.turns

    @property
    def steps(self) -> int:
        """Ended steps."""
        return self._count.steps

    def _all_calls_failed(self) -> Cause | None:
        calls = self._calls
        if calls.total == 0 or calls.failed + calls.denied < calls.total:
            return None
        if calls.denied == calls.total and self._authority_denied:
            message = "the one call was denied" if calls.total == 1 else f"all {calls.total:,} calls were denied"
            return Cause(ErrorCode.POLICY_DENIED, message, _HINTS[ErrorCode.POLICY_DENIED])
        message = "the one call failed" if calls.total == 1 else f"all {calls.total} calls failed"
        return Cause(ErrorCode.TASK_FAILED, message, "see the results of the calls in the log")

    def _found(
        self, missing_outputs: Sequence[str], patch_missing: bool, declared: Iterable[str], *, quiet: bool
    ) -> tuple[list[Cause], list[Evidence]]:
        """What the end of the run shows. ``quiet``: something ended it, so absences follow from that."""
        causes: list[Cause] = []
        finished = self._turn_state == "completed"
        evidence = [Evidence("turn", finished, _TURN_WORDS.get(self._turn_state, "the last turn did not complete"))]
        if not finished and not quiet:
            causes.append(_unfinished(self._turn_state))
        causes += [Cause(ErrorCode.SETUP_FAILED, f"setup command {index} was killed") for index in self._setup_lost]
        for name in dict.fromkeys([*declared, *self._checks]):
            check = self._checks.get(name)
            if check is None:
                evidence.append(Evidence(f"check {name}", False, "it never ran"))
                if not quiet:
                    causes.append(Cause(ErrorCode.TASK_FAILED, f"the check {name} never ran"))
                continue
            tries = counted(check.attempts, "attempt")
            evidence.append(Evidence(f"check {name}", check.passed, f"{tries}, the last decides"))
            if not check.passed and not (quiet and check.exit_code is None):
                causes.append(_failed_check(check, tries))
        for path in missing_outputs:
            evidence.append(Evidence(f"output {path}", False, "it is missing"))
            causes.append(Cause(ErrorCode.TASK_FAILED, f"the declared output {path} is missing"))
        if patch_missing:
            evidence.append(Evidence("patch", False, "nothing was changed"))
            causes.append(Cause(ErrorCode.NO_CHANGES, "a patch is required and nothing was changed"))
        failed = self._all_calls_failed()
        if self._calls.total:
            worked = self._calls.total - self._calls.failed - self._calls.denied
            evidence.append(Evidence("calls", failed is None, f"{worked} of {self._calls.total} calls worked"))
        if failed is not None and not quiet:
            causes.append(failed)
        return causes, evidence

    def outcome(
        self,
        *,
        missing_outputs: Sequence[str] = (),
        patch_missing: bool = False,
        causes: Sequence[Cause] = (),
        checks: Sequence[str] | None = None,
    ) -> Outcome:
        """The outcome of the events so far.

        Args:
            missing_outputs: Declared outputs that are not there.
            patch_missing: A patch is required and there is none.
            causes: What ended the run and is not in the log.
            checks: Names of the declared checks; None takes them from ``run/start``.
        """
        logged = _merge_signal(self._causes, causes)
        if any(cause.code is ErrorCode.INTERNAL for cause in logged):
            # The loop logs our bug and lets it through, so what was caught above is the same one.
            causes = [cause for cause in causes if cause.code is not ErrorCode.INTERNAL]
        declared = self._declared if checks is None else tuple(checks)
        found, evidence = self._found(missing_outputs, patch_missing, declared, quiet=bool(logged or causes))
        ranked = sorted([*causes, *found], key=lambda cause: PRECEDENCE.index(cause.code))
        ordered = _distinct([*logged, *ranked])
        first = ordered[0] if ordered else None
        code = first.code if first else ErrorCode.COMPLETED
        name = {ErrorCode.COMPLETED: "completed", ErrorCode.CANCELLED: "cancelled"}.get(code, "failed")
        return Outcome(
            outcome=name,
            code=code,
            exit_code=first.exit_code if first else 0,
            failure_class=code.failure_class,
            cause=first,
            secondary=tuple(ordered[1:]),
            evidence=tuple(evidence),
            final_message=self._final_message,
            turns=self.turns,
            steps=self.steps,
            calls=self._calls,
            approvals=self._approvals,
            checks=tuple(self._checks.values()),
        )


_TURN_WORDS = {
    "completed": "the last turn completed",
    "none": "no turn began",
    "open": "the log ends inside a turn",
    "interrupted": "the last turn was interrupted",
}


_SHELL_HINTS = {
    126: "its command was found and cannot be run: is it executable inside the sandbox?",
    127: "its command was not found: is it on PATH inside the sandbox?",
}
"""What a shell means by an exit status of its own."""


def _failed_check(check: CheckOutcome, tries: str) -> Cause:
    how = "it did not end by itself" if check.exit_code is None else f"exit status {check.exit_code}"
    hint = _SHELL_HINTS.get(check.exit_code or 0)
    if hint is None and check.output:
        hint = "the end of what it printed is in summary.md"
    return Cause(ErrorCode.TASK_FAILED, f"the check {check.name} failed: {how} ({tries})", hint)


def _unfinished(state: str) -> Cause:
    """Why a run without any cause has no finished turn: the runner died, and nobody else to blame."""
    return Cause(
        ErrorCode.INTERNAL,
        f"{_TURN_WORDS.get(state, 'the last turn did not complete')} and nothing says why",
        "the runner was killed or crashed; run the task again, or resume the session",
    )


def _merge_signal(logged: Sequence[Cause], given: Sequence[Cause]) -> list[Cause]:
    """Logged causes, a cancellation without its signal completed from what was handed in."""
    signal = next((cause for cause in given if cause.signal), None)
    return [
        signal if cause.code is ErrorCode.CANCELLED and cause.signal is None and signal is not None else cause
        for cause in logged
    ]


def _distinct(causes: Iterable[Cause]) -> list[Cause]:
    """Causes without repetitions; a repetition may still bring the hint (``run/end`` has none)."""
    kept: dict[tuple[ErrorCode, str], Cause] = {}
    for cause in causes:
        key = (cause.code, cause.message)
        before = kept.get(key)
        kept[key] = cause if before is None else replace(before, hint=before.hint or cause.hint)
    return list(kept.values())


def derive_outcome(
    events: Iterable[ev.Event],
    *,
    missing_outputs: Sequence[str] = (),
    patch_missing: bool = False,
    causes: Sequence[Cause] = (),
    checks: Sequence[str] | None = None,
) -> Outcome:
    """The outcome of a whole log; arguments as in ``OutcomeFold.outcome``. ``run/end`` is not needed."""
    fold = OutcomeFold()
    for event in events:
        fold.apply(event)
    return fold.outcome(missing_outputs=missing_outputs, patch_missing=patch_missing, causes=causes, checks=checks)


def exit_status(outcome: Outcome, soft_fail: Sequence[str]) -> tuple[int, bool]:
    """Process exit code under ``--soft-fail`` and whether that turned a failure into 0.

    Raises:
        ConfigError: CONFIG_INVALID, a class that does not exist or may not be softened.
    """
    for name in soft_fail:
        if name not in SOFT_FAIL_CLASSES:
            raise ConfigError(
                f"--soft-fail {name}: no class that may be softened", hint="one of " + ", ".join(SOFT_FAIL_CLASSES)
            )
    softened = outcome.failure_class is not None and outcome.failure_class in soft_fail
    return (0, True) if softened else (outcome.exit_code, False)
