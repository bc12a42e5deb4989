"""Runs the tool calls of one reply: safe ones side by side, the others one by one.

Invariants: ``tool/call`` and ``tool/result`` are written in model order, on the loop's thread.
Consecutive calls that are safe to overlap form a group and run in a rolling pool; any other call is
a group of its own and a barrier. Whatever happens every call gets a result: after a cancellation, a
halt or a broken sandbox the calls that run drain and the rest are written as not started.
Events: ``tool/call``, ``tool/result``, and those the tools and the pipeline hand over between the
two.
Prefix cache: kept, results are appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.errors import ErrorCode, RunnerError
from runner.record import field, mutable_record
from runner.session.events import ToolCall, ToolResult
from runner.tools.base import ToolOutcome
from runner.tools.pipeline import CallResult, PerformedCall, PreparedCall, abort, error_record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runner.cancellation import Cancellation
    from runner.messages import Message, ToolCallBlock
    from runner.permission import Mode
    from runner.session.events import Event
    from runner.tools.pipeline import ParsedCall, Pipeline

_Begun = tuple[int, PreparedCall | PerformedCall]
"""The seq of ``tool/call``, and the call as ``prepare`` left it."""

_REFUSED_AUTHORITY = (ErrorCode.POLICY_DENIED, ErrorCode.GUARD_DENIED, ErrorCode.TOOL_MASKED)

_DENIED = "a call before it was denied, and the profile says on_denied: abort"


@mutable_record
class CallReport:
    """What the calls of one reply came to.

    Attributes:
        results: One a call, in model order.
        ends_run: Whether a call was refused for want of authority (policy, guard, mask; a malformed one is not) in a
            run that such a call ends.
    """

    results: list[CallResult] = field(default_factory=list)
    ends_run: bool = False


@mutable_record
class _Step:
    """One run of the scheduler: where it is, and why it must stop."""

    turn: int
    step: int
    report: CallReport = field(default_factory=CallReport)
    fault: RunnerError | None = None


class Scheduler:
    """Runs tool calls and writes them down.

    Args:
        pipeline: What every call passes.
        append: Appends an event to the session log and returns it with its seq.
        new_id: Gives message ids.
        mode: The run's permission mode, for the results of calls that were not started.
        cancellation: Goes up when the run is cancelled.
        parallel: Most calls that run at the same time.
        before_side_effects: Called once before the first call of a group that may change something.
        halt: Says why no further call may start (a limit), else None. Asked from any thread.
        abort_on_denied: Whether a denied call ends the run: those behind it are not asked for.
        stop_background: Ends what the turn's calls left running; returns what that was.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        append: Callable[[Event], Event],
        new_id: Callable[[], str],
        mode: Mode,
        cancellation: Cancellation,
        parallel: int,
        before_side_effects: Callable[[], None],
        halt: Callable[[], str | None] = lambda: None,
        abort_on_denied: bool = False,
        stop_background: Callable[[], list[str]] = list,
    ) -> None:
        self._pipeline = pipeline
        self._append = append
        self._new_id = new_id
        self._mode = mode
        self._cancellation = cancellation
        self._parallel = parallel
        self._before_side_effects = before_side_effects
        self._halt = halt
        self._abort_on_denied = abort_on_denied
        self._stop_background = stop_background

    def run(self, calls: Sequence[ToolCallBlock], *, turn: int, step: int) -> CallReport:
        """Run the calls; returns when all are committed.

        Raises:
            RunnerError: Infrastructure broke; the calls have their results nevertheless, unless it
                was the log itself.
        """
        state = _Step(turn, step)
        self._pipeline.begin_step()
        for group in self._groups(calls):
            self._run_group([self._begin(call, state) for call in group], state)
        if state.fault is not None:
            raise state.fault
        return state.report

    def end_turn(self) -> list[str]:
        """Stop what the turn's calls left running in the background; returns what that was."""
        return self._stop_background()

    def _groups(self, calls: Sequence[ToolCallBlock]) -> Iterator[list[ParsedCall]]:
        group: list[ParsedCall] = []
        for call in calls:
            parsed = self._pipeline.parse(call)
            if parsed.safe:
                group.append(parsed)
                continue
            if group:
                yield group
                group = []
            yield [parsed]
        if group:
            yield group

    def _stopped(self, state: _Step) -> str | None:
        """Why no further call may start, None if one may."""
        if self._cancellation.cancelled:
            return "the run was cancelled"
        if state.fault is not None:
            return "the run ends, since another call met a broken sandbox or storage"
        return self._halt()

    def _begin(self, parsed: ParsedCall, state: _Step) -> _Begun:
        """Write the call down and prepare it, unless nothing may start any more."""
        call = parsed.call
        event = self._append(
            ToolCall(
                turn=state.turn, step=state.step, call_id=call["id"], name=call["name"], arguments=call["arguments"]
            )
        )
        stopped = _DENIED if state.report.ends_run else self._stopped(state)
        if stopped is not None:
            return event.seq, abort(call, self._mode, stopped)
        prepared = self._pipeline.prepare(parsed)
        if self._abort_on_denied and isinstance(prepared, PerformedCall):
            state.report.ends_run = prepared.outcome.error in _REFUSED_AUTHORITY
        return event.seq, prepared

    def _run_group(self, group: list[_Begun], state: _Step) -> None:
        runnable = [call for _, call in group if isinstance(call, PreparedCall)]
        if any(call.has_side_effects for call in runnable):
            self._before_side_effects()
        if len(runnable) > 1 and self._parallel > 1:
            self._run_side_by_side(group, min(self._parallel, len(runnable)), state)
            return
        for seq, call in group:
            self._commit_result(seq, self._perform(call, 1, state), state)

    def _run_side_by_side(self, group: list[_Begun], threads: int, state: _Step) -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(threads, thread_name_prefix="tool") as pool:
            futures = [(seq, pool.submit(self._perform, call, threads, state)) for seq, call in group]
            try:
                for seq, future in futures:
                    self._commit_result(seq, future.result(), state)
            except RunnerError as error:  # the log is broken: what is queued must not start
                state.fault = state.fault or error
                raise

    def _perform(self, call: PreparedCall | PerformedCall, together: int, state: _Step) -> PerformedCall:
        """Run a call, at most ``together`` at once, unless it was refused or nothing may start any more.

        On any thread.
        """
        if isinstance(call, PerformedCall):
            return call
        stopped = self._stopped(state)
        if stopped is not None:
            return abort(call.call, self._mode, stopped)
        try:
            return self._pipeline.perform(call, self._cancellation, together=together)
        except RunnerError as error:
            return self._faulted(call.call, error, state)

    def _faulted(self, call: ToolCallBlock, error: RunnerError, state: _Step) -> PerformedCall:
        """Remember the first fault of the infrastructure; it is raised when everything is written."""
        state.fault = state.fault or error
        text = f"The call could not be completed, and the run ends: {error.message}"
        return PerformedCall(call, ToolOutcome([{"type": "text", "text": text}], error=error.code), self._mode)

    def _commit_result(self, call_seq: int, performed: PerformedCall, state: _Step) -> None:
        try:
            result = self._pipeline.finish(performed)
        except RunnerError as error:
            result = self._pipeline.finish(self._faulted(performed.call, error, state))
        for event in result.events:
            self._append(event)
        call = result.call
        message: Message = {
            "role": "user",
            "content": [
                {
                    "type": "tool-result",
                    "toolCallId": call["id"],
                    "content": result.content,
                    "isError": result.is_error,
                }
            ],
            "source": {"kind": "tool", "callId": call["id"]},
            "id": self._new_id(),
        }
        self._append(
            ToolResult(
                turn=state.turn,
                step=state.step,
                message=message,
                error=None if result.error is None else error_record(result.error),
                meta=result.meta,
                source_event_seqs=[call_seq],
            )
        )
        state.report.results.append(result)
