"""Checks: commands that decide whether the task is done, run behind the last turn.

A failing check goes back to the agent as a followup while retries are left. When one fails that has
none left, nothing is asked for any more: the outcome is settled. Writes ``check/start`` and
``check/end``, a pair for each attempt.
Prefix cache: kept, a followup is appended at the end of the history.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from runner.agent.hook import Hook
from runner.agent.prompt import user_message
from runner.record import record
from runner.session.events import CheckEnd, CheckStart

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.agent.hook import TurnOver
    from runner.cancellation import Cancellation
    from runner.messages import Message
    from runner.permission import Mode
    from runner.sandbox.base import ProcessResult
    from runner.session.events import Event

OUTPUT_SHOWN = 8_000
"""Code points of a failing check's output that the agent is given: the end of it."""

_CAPTURE = 1_000_000


class Check(Protocol):
    """What a check is: a name, a shell text, seconds it may take, and how often it may fail and be retried."""

    @property
    def name(self) -> str:
        """Name in reports, unique in the task."""
        ...

    @property
    def run(self) -> str:
        """Shell text."""
        ...

    @property
    def timeout(self) -> float:
        """Seconds."""
        ...

    @property
    def retries(self) -> int:
        """How often a failure goes back to the agent."""
        ...


class CommandRunner(Protocol):
    """The part of the sandbox's executor that checks need."""

    def run(
        self, argv: Sequence[str], *, mode: Mode, timeout: float, cancellation: Cancellation, capture: int = ...
    ) -> ProcessResult:
        """Run a command to its end.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, the sandbox could not start it.
        """
        ...


@record
class CheckResult:
    """One attempt of one check.

    Attributes:
        name: The check.
        attempt: Number of the attempt, from 1.
        passed: It exited with 0.
        exit_code: Exit status, None when it was killed.
        duration_ms: Milliseconds.
        output: The end of what it printed, safe for a log and a model.
        reason: In words how it ended.
        retries_left: How often it may fail again and still be retried; negative when this failure is final.
    """

    name: str
    attempt: int
    passed: bool
    exit_code: int | None
    duration_ms: int
    output: str
    reason: str
    retries_left: int


class ChecksHook(Hook):
    """Runs the checks of a task and asks the agent to go on while they fail and may be retried.

    Args:
        checks: The declared checks, in order.
        executor: Runs their commands.
        mode: Permission mode they run in.
        cancellation: Goes up when the run is cancelled; then no further check starts.
        append: Writes an event.
        redact: Takes secrets out of what a check printed, before anybody sees it.
        new_id: Gives message ids.
        before: Called before the checks run, while the workspace is as the agent left it.
        attempts: Attempts an earlier part of the session made, by name: all that failed.
    """

    def __init__(
        self,
        checks: Sequence[Check],
        *,
        executor: CommandRunner,
        mode: Mode,
        cancellation: Cancellation,
        append: Callable[[Event], object],
        redact: Callable[[str], str],
        new_id: Callable[[], str],
        before: Callable[[], object] = lambda: None,
        attempts: Mapping[str, int] | None = None,
    ) -> None:
        self._checks = checks
        self._executor = executor
        self._mode = mode
        self._cancellation = cancellation
        self._append = append
        self._redact = redact
        self._new_id = new_id
        self._before = before
        self._attempts = dict(attempts or {})
        self._failures = dict(attempts or {})

    def after_turn(self, over: TurnOver) -> Sequence[Message]:
        """Run the checks once no prompt waits any more; a followup when all that failed may be retried."""
        if over.more or not self._checks:
            return ()
        results = self.run_all()
        failed = [result for result in results if not result.passed]
        if not failed or self._cancellation.cancelled or any(result.retries_left < 0 for result in failed):
            return ()
        return [user_message(followup_text(failed), message_id=self._new_id(), kind="plugin", plugin="checks")]

    def run_all(self) -> list[CheckResult]:
        """Run every check once, in order; stops early when the run is cancelled.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, the sandbox broke.
        """
        self._before()
        results: list[CheckResult] = []
        for check in self._checks:
            if self._cancellation.cancelled:
                break
            results.append(self._run(check))
        return results

    def _run(self, check: Check) -> CheckResult:
        attempt = self._attempts[check.name] = self._attempts.get(check.name, 0) + 1
        self._append(CheckStart(name=check.name, attempt=attempt))
        result = self._executor.run(
            ["/bin/bash", "--noprofile", "--norc", "-c", check.run],
            mode=self._mode,
            timeout=check.timeout,
            cancellation=self._cancellation,
            capture=_CAPTURE,
        )
        passed = result.exit_code == 0
        duration = round(result.duration * 1000)
        output = self._redact(output_tail(result.output))
        self._append(
            CheckEnd(
                name=check.name,
                attempt=attempt,
                passed=passed,
                exit_code=result.exit_code,
                duration_ms=duration,
                output=None if passed else output,
            )
        )
        if not passed:
            self._failures[check.name] = self._failures.get(check.name, 0) + 1
        return CheckResult(
            name=check.name,
            attempt=attempt,
            passed=passed,
            exit_code=result.exit_code,
            duration_ms=duration,
            output=output,
            reason=_reason(result, check.timeout),
            retries_left=check.retries - self._failures.get(check.name, 0),
        )


def _reason(result: ProcessResult, timeout: float) -> str:
    if result.cancelled:
        return "it was cancelled"
    if result.timed_out:
        return f"it ran longer than {timeout:g} s"
    if result.exit_code is None:
        return f"it was ended by {result.signal or 'a signal'}"
    return f"it exited with {result.exit_code}"


def output_tail(data: bytes, limit: int = OUTPUT_SHOWN) -> str:
    """The end of a command's output as text: bytes that are no UTF-8 and control characters as escapes.

    Args:
        data: Output.
        limit: Code points to keep; what is cut is said in front.
    """
    text = data.decode("utf-8", "backslashreplace").replace("\r\n", "\n")
    text = "".join(char if char in "\n\t" or char.isprintable() else _escape(char) for char in text).strip("\n")
    if len(text) <= limit:
        return text
    return f"[{len(text) - limit} characters before this are left out]\n{text[-limit:]}"


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def followup_text(failed: Sequence[CheckResult]) -> str:
    """What the agent is told about checks that failed: names, how they ended, the end of their output."""
    parts = []
    for result in failed:
        more = result.retries_left
        left = f"{more + 1} attempts left" if more else "the next attempt is the last"
        head = f"The check {result.name!r} failed: {result.reason} ({left})."
        parts.append(
            f"{head}\nEnd of its output:\n{result.output}" if result.output else f"{head}\nIt printed nothing."
        )
    parts.append("Find the cause, fix it, and answer when you are done; the checks run again then.")
    return "\n\n".join(parts)
