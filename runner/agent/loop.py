"""The loop: turns, steps, requests and tool calls of one agent.

The only writer of ``turn/*``, ``step/*``, ``request/*``, ``assistant/*`` and the only caller of the
tool scheduler. Every boundary that was opened is closed, whatever happened in between. History
is append-only here; only compaction, through ``before_request``, may replace a part of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from runner import diagnostics
from runner.agent.budget import LimitExceeded, LimitState
from runner.agent.hook import Hook, RequestFailed, StepStarting, TurnOver
from runner.agent.prompt import user_message
from runner.agent.request import Body, RequestBody, check_rebuild
from runner.errors import ErrorCode, InternalError, ProviderError, RunnerError, StorageError
from runner.figures import amount
from runner.messages import tool_calls_of, total_tokens
from runner.providers.assemble import ResponseAssembler
from runner.session import events as ev
from runner.session import tokens

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.agent.budget import Budget
    from runner.agent.inbox import Inbox
    from runner.agent.past import Past
    from runner.cancellation import Cancellation
    from runner.messages import Block, JsonObject, Message, RequestHeader, ToolCallBlock, ToolSchema, Usage
    from runner.providers.base import Provider
    from runner.session.log import SessionLog

_TOKEN_STEP = 2_000
"""``maxTokens`` is lowered in steps of this size, so that the header changes rarely."""

_REFUSED_AUTHORITY = (ErrorCode.POLICY_DENIED.name, ErrorCode.GUARD_DENIED.name, ErrorCode.TOOL_MASKED.name)


class Stop(Exception):  # noqa: N818  # control flow of the loop, not an error of the program
    """The run ends in an orderly way; ``reason`` is what ``turn/end`` says."""

    def __init__(self, kind: str, code: str, **more: object) -> None:
        super().__init__(f"{kind} {code}")
        self.reason: JsonObject = {"kind": "aborted", "reason": {"kind": kind, "code": code, **more}}


class CallRunner(Protocol):
    """Runs the tool calls of one reply and appends their calls and results in model order."""

    def run(self, calls: Sequence[ToolCallBlock], *, turn: int, step: int) -> CallReport:
        """Run the calls; returns when all are committed."""
        ...

    def end_turn(self) -> list[str]:
        """Stop background processes of the turn; returns what was stopped, for the model."""
        ...


class CallReport(Protocol):
    """What the loop needs to know of the calls it had run."""

    output_bytes: int


class Loop:
    """One agent at work on one session.

    Args:
        log: Where every event goes first.
        provider: The model.
        config: ``provider``, ``model`` and further fixed parts of the call configuration.
        system: System prompt.
        tools: The tools offered, in a fixed order.
        window: Context window in tokens.
        max_output: Most output tokens of one request.
        min_output: A request with less room for output is not sent.
        budget: Limits.
        past: The session so far.
        calls: Runs tool calls.
        hooks: In the order they are asked.
        cancellation: Goes up on a signal or at the wall limit.
        clock: Monotonic seconds.
        new_id: Gives message and retry ids.
        cost_of: Money for a usage, None when unknown.
        attempts: Most attempts of one request, as the retry hook knows it; for the log.
        paranoid: Compare every request with its rebuild.
        abort_on_denied: End the run at the first denied call.
    """

    def __init__(
        self,
        *,
        log: SessionLog,
        provider: Provider,
        config: JsonObject,
        system: str,
        tools: list[ToolSchema],
        window: int,
        max_output: int,
        min_output: int,
        budget: Budget,
        past: Past,
        inbox: Inbox,
        calls: CallRunner,
        hooks: Sequence[Hook],
        cancellation: Cancellation,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        cost_of: Callable[[Usage], float | None],
        attempts: int = 1,
        paranoid: bool = False,
        abort_on_denied: bool = False,
    ) -> None:
        self.inbox = inbox
        self.projection = past.projection
        self.turn = past.turn
        self.step = past.step
        self.first_of_turn = True
        self._log = log
        self._provider = provider
        self._config = config
        self._system = system
        self._tools = tools
        self._window = window
        self._max_output = max_output
        self._min_output = min_output
        self._budget = budget
        self._calls = calls
        self._hooks = hooks
        self._cancellation = cancellation
        self._clock = clock
        self._new_id = new_id
        self._cost_of = cost_of
        self._attempts = attempts
        self._paranoid = paranoid
        self._abort_on_denied = abort_on_denied
        self._body = RequestBody(provider.dialect)
        self._header: RequestHeader | None = None
        self._first_header = "initial" if past.header is None else "resume"
        self._surface_events = past.surface
        self._occupancy = past.occupancy
        self._checked_generation = -1
        self._denied = False
        self._limited = False
        self._rebuild_due = True
        log.observers.append(self._observe)

    # --- events -------------------------------------------------------------------------------

    def append(self, event: ev.Event) -> ev.Event:
        """Write one event; projection and observers see it once it is written."""
        return self._log.append(event)

    def _observe(self, event: ev.Event) -> None:
        if event.SURFACE:
            self._surface_events.append(event)
            self.projection.apply(event)
            if isinstance(event, ev.ToolResult) and event.error and event.error.get("code") in _REFUSED_AUTHORITY:
                self._denied = True
        if isinstance(event, ev.ToolResult):
            meta = event.meta or {}
            diagnostics.debug(
                "tool result",
                callId=event.message["source"].get("callId"),
                error=(event.error or {}).get("code"),
                ms=meta.get("durationMs"),
            )
        for hook in self._hooks:
            try:
                hook.observe(event)
            except Exception as error:  # noqa: BLE001  # an observer may never stop the run
                diagnostics.warning("observer failed", hook=type(hook).__name__, error=str(error))

    # --- turns --------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until nothing asks for a turn, or the run is stopped.

        Raises:
            RunnerError: Infrastructure broke, after the open turn was closed in the log.
        """
        while self.inbox.wakes and not self._cancellation.cancelled:
            try:
                self._budget.require("turns", 1)
            except LimitExceeded as limit:
                self._log_limit(limit.state)
                return
            if not self._run_turn():
                return
        if self._cancellation.reason == "wall" and not self._limited:
            self._log_limit(self._wall_state())

    def _run_turn(self) -> bool:
        """One turn; returns whether another may follow."""
        self.turn += 1
        self._budget.charge("turns", 1)
        diagnostics.bind(turn=self.turn)
        self.append(ev.TurnStart(turn=self.turn))
        reason: JsonObject = {"kind": "interrupted"}
        try:
            reason = self._run_steps(self.inbox.claim_turn())
        except Stop as stop:
            reason = stop.reason
        except LimitExceeded as limit:
            self._log_limit(limit.state)
            reason = Stop(limit.state.kind, limit.state.code.name, name=limit.state.name).reason
        except ProviderError as error:
            reason = {"kind": "error", "error": _error_data(error)}
        except RunnerError as error:
            reason = {"kind": "error", "error": _error_data(error)}
            raise
        except Exception as error:
            reason = {"kind": "error", "error": {"code": ErrorCode.INTERNAL.name, "message": repr(error)}}
            raise
        finally:
            self._close_turn(reason)
        if reason["kind"] != "completed":
            return False
        over = TurnOver(turn=self.turn, reason=reason["kind"], more=self.inbox.queued_turns)
        for hook in self._hooks:
            for message in hook.after_turn(over):
                self.inbox.followup(message)
        return True

    def _close_turn(self, reason: JsonObject) -> None:
        try:
            stopped = self._calls.end_turn()
            self.append(ev.TurnEnd(turn=self.turn, reason=reason))
        except StorageError as error:
            diagnostics.warning("the turn could not be closed in the log", error=error.message)
            return
        if stopped and self.inbox.queued_turns:
            text = "Background processes ended with the turn: " + ", ".join(stopped)
            self.inbox.inject(user_message(text, message_id=self._new_id(), kind="plugin", plugin="background"))

    def _run_steps(self, entering: list[Message]) -> JsonObject:
        """The steps of one turn; returns why it ended."""
        self.first_of_turn = True
        while True:
            starting = StepStarting(turn=self.turn, step=self.step + 1, messages=entering + self.inbox.claim_step())
            for hook in self._hooks:
                hook.before_step(starting)
            if starting.end_turn is not None:
                return {"kind": "blocked", "message": starting.end_turn}
            self._stop_if_cancelled()
            self._budget.check()
            self._budget.require("steps", 1)
            reserved = self._reserve(starting.messages)
            ended = self._run_step(starting.messages, reserved)
            if ended is not None:
                return ended
            self._stop_if_cancelled()
            entering = []
            self.first_of_turn = False

    def _run_step(self, messages: Sequence[Message], reserved: dict[str, float]) -> JsonObject | None:
        """One step; returns why the turn ended, None when it goes on."""
        self.step += 1
        diagnostics.bind(step=self.step)
        self.append(ev.StepStart(turn=self.turn, step=self.step))
        try:
            self._budget.charge("steps", 1)
            notices = self._limit_notices(reserved)
            self._log.append_many(
                ev.UserMessage(
                    content=list(message["content"]), source=message["source"], role=message["role"], id=message["id"]
                )
                for message in (*messages, *notices)
            )
            answer, finish = self._request_answer()
            if finish == "length":
                return {"kind": "max-tokens"}
            if finish == "filter":
                message_text = "the model refused, or a filter stopped its answer"
                return {"kind": "error", "error": {"code": ErrorCode.TASK_FAILED.name, "message": message_text}}
            calls = tool_calls_of(answer)
            if not calls:
                return None if self.inbox.wakes and not self.inbox.queued_turns else {"kind": "completed"}
            self._run_calls(calls)
            return None
        finally:
            self._end_step()

    def _run_calls(self, calls: Sequence[ToolCallBlock]) -> None:
        report = self._calls.run(calls, turn=self.turn, step=self.step)
        self._budget.charge("output_bytes", report.output_bytes)
        if self.halt_reason() is not None:
            raise Stop("policy", ErrorCode.POLICY_DENIED.name)

    def halt_reason(self) -> str | None:
        """Why no further call of this run may start, None while calls may."""
        return (
            "a call was denied, and the profile says on_denied: abort"
            if self._denied and self._abort_on_denied
            else None
        )

    def _end_step(self) -> None:
        try:
            self._log.seal(ev.StepEnd(turn=self.turn, step=self.step))
            self._log.schedule_sync()
        except StorageError as error:
            diagnostics.warning("the step could not be closed in the log", error=error.message)

    # --- limits and cancellation --------------------------------------------------------------

    def _stop_if_cancelled(self) -> None:
        reason = self._cancellation.reason
        if reason is None:
            return
        if reason == "wall":
            raise LimitExceeded(self._wall_state())
        raise Stop("signal", reason)

    def _wall_state(self) -> LimitState:
        return LimitState("wall", self._budget.used("wall"), self._budget.limit("wall") or 0)

    def _log_limit(self, state: LimitState) -> None:
        self._limited = True
        self.append(ev.LimitReached(name=state.name, used=state.used, max=state.max, percent=100, needed=state.needed))

    def _limit_notices(self, reserved: dict[str, float]) -> list[Message]:
        messages = []
        for state in self._budget.notices(reserved):
            self.append(ev.LimitReached(name=state.name, used=state.used, max=state.max, percent=90))
            text = (
                f"The limit {state.name} is nearly used up ({amount(state.used)} of {amount(state.max)}). "
                "Finish what matters most and give your answer."
            )
            messages.append(user_message(text, message_id=self._new_id(), kind="plugin", plugin="limits"))
        return messages

    # --- requests -----------------------------------------------------------------------------

    @property
    def window(self) -> int:
        """The context window in tokens."""
        return self._window

    def occupancy(self) -> int:
        """Tokens the next request will hold before its answer: the anchor plus what changed since."""
        return self._occupancy.of(self._current_header(), self.projection)

    def _current_header(self) -> RequestHeader:
        return self._header or self._build_header(self._max_output)

    def _build_header(self, max_tokens: int) -> RequestHeader:
        return {"config": {**self._config, "maxTokens": max_tokens}, "system": self._system, "tools": self._tools}

    def _request_answer(self) -> tuple[Message, str]:
        """Make the step's request, compacting first and once more if the provider says too long."""
        compacted = [hook.before_request(self, overflow=False) for hook in self._hooks]
        overflowed = False
        while True:
            header = self._fitting_header()
            if header is None:
                error = ProviderError(
                    f"the next request holds about {self.occupancy()} tokens and the window is {self._window}",
                    code=ErrorCode.CONTEXT_EXHAUSTED,
                    hint="raise model.context_window, or lower compaction.summary_at",
                )
            else:
                self._use_header(header)
                try:
                    return self._answer()
                except ProviderError as failure:
                    if failure.code is not ErrorCode.CONTEXT_EXHAUSTED:
                        raise
                    error = failure
            if overflowed:
                raise error
            overflowed = True
            compacted = [hook.before_request(self, overflow=True) for hook in self._hooks]
            if not any(compacted):
                raise error

    def _reserve(self, messages: Sequence[Message]) -> dict[str, float]:
        """Check, before a step begins, that its request fits into the budget; returns what it may take.

        Raises:
            LimitExceeded: Not even the least answer would fit.
        """
        entering = sum(tokens.estimate_message(message, tokens.cautious) for message in messages)
        return self._require(min(self.occupancy() + entering, self._window))

    def _require(self, occupancy: int) -> dict[str, float]:
        """What a request of that many tokens with the least answer takes, once it is known to fit."""
        least = min(self._min_output, self._max_output)
        taken: dict[str, float] = {"tokens": occupancy + least}
        cost = self._cost_of({"inputTokens": occupancy, "outputTokens": least})
        if cost is not None:
            taken["cost"] = cost
        for name, needed in taken.items():
            self._budget.require(name, needed)
        return taken

    def _fitting_header(self) -> RequestHeader | None:
        """The header with ``maxTokens`` lowered to what window and budget leave, None if too little."""
        occupancy = self.occupancy()
        room = self._window - occupancy
        least = min(self._min_output, self._max_output)
        if room < least:
            return None
        self._require(occupancy)
        tokens_left = self._budget.room("tokens")
        if tokens_left is not None:
            room = min(room, int(tokens_left) - occupancy)
        room = min(room, self._affordable_output(occupancy))
        allowed = self._max_output
        if room < allowed:
            allowed = max(least, room // _TOKEN_STEP * _TOKEN_STEP)
        if self._header is not None and self._header["config"]["maxTokens"] == allowed:
            return self._header
        return self._build_header(allowed)

    def _affordable_output(self, occupancy: int) -> int:
        """Output tokens that what is left of the money pays for."""
        left = self._budget.room("cost")
        if left is None:
            return self._max_output
        base = self._cost_of({"inputTokens": occupancy, "outputTokens": 0}) or 0.0
        million = (self._cost_of({"inputTokens": occupancy, "outputTokens": 1_000_000}) or 0.0) - base
        if million <= 0:
            return self._max_output
        return int((left - base) / million * 1_000_000)

    def _use_header(self, header: RequestHeader) -> None:
        if header is self._header:
            return
        reason = self._first_header if self._header is None else "change"
        if self._header is None:
            self.append(
                ev.RequestContext(
                    provider=self._config["provider"], model=self._config["model"], context_window=self._window
                )
            )
        self._header = header
        self._rebuild_due = True
        self.append(ev.RequestHeaderEvent(header=header, reason=reason))

    def _answer(self) -> tuple[Message, str]:
        """One main request with its retries; the anchor event is appended."""
        header = self._current_header()
        occupancy = self.occupancy()
        body = self._body.update(header, self.projection)
        due = self._rebuild_due or self._paranoid or self.step & (self.step - 1) == 0
        if due or self.projection.generation != self._checked_generation:
            check_rebuild(body, self._provider.dialect, header, self._surface_events)
            self._rebuild_due, self._checked_generation = False, self.projection.generation
        assembler, chunk_seqs = self._call_model("main", body)
        message: Message = {
            "role": "assistant",
            "content": assembler.content(),
            "source": {"kind": "model", "provider": self._config["provider"], "model": self._config["model"]},
            "id": self._new_id(),
        }
        interrupted = assembler.finish is None
        if interrupted:
            message["content"] = assembler.partial_content()
        usage = assembler.usage
        self.append(
            ev.AssistantMessage(
                turn=self.turn,
                step=self.step,
                message=message,
                usage=usage,
                interrupted=True if interrupted else None,
                source_event_seqs=chunk_seqs,
            )
        )
        if usage is not None:
            self._occupancy.anchor(usage, header, self.projection)
        self._settle(usage, occupancy, message["content"])
        if interrupted:
            self._stop_if_cancelled()
            raise InternalError("a stream ended without a finish and without a cancellation")
        return message, assembler.finish or "stop"

    def _settle(self, usage: Usage | None, occupancy: int, content: Sequence[JsonObject | Block]) -> None:
        """Charge what a call used; without a report of the provider what it is estimated to have used."""
        if usage is None:
            usage = {"inputTokens": occupancy, "outputTokens": tokens.estimate_content(content, tokens.cautious)}
        self._budget.charge("tokens", total_tokens(usage))
        self._budget.charge("cost", self._cost_of(usage) or 0.0)

    def _call_model(self, purpose: str, body: Body) -> tuple[ResponseAssembler, list[int]]:
        """Send one body, repeating failed attempts as the hooks decide.

        Returns:
            The assembled answer (``finish`` None when it was cut by cancellation) and the seqs of
            its chunks.

        Raises:
            ProviderError: No attempt succeeded.
            LimitExceeded: Nothing came for the idle limit.
        """
        started, attempt, retry_id = self._clock(), 0, ""
        while True:
            attempt += 1
            self._stop_if_cancelled()
            self.append(
                ev.RequestSent(
                    turn=self.turn,
                    step=self.step,
                    attempt=attempt,
                    purpose=purpose,
                    provider=self._provider.name,
                    dialect=self._provider.dialect.name,
                    bytes=len(body.data),
                    sha256=body.sha256,
                )
            )
            diagnostics.debug("request sent", purpose=purpose, attempt=attempt, bytes=len(body.data))
            try:
                return self._read_stream(purpose, body)
            except ProviderError as error:
                self._stop_if_cancelled()
                idle = self._budget.limits.idle
                if error.kind == "idle-timeout" and idle is not None:
                    raise LimitExceeded(LimitState("idle", idle, idle)) from error
                delay = self._retry_delay(RequestFailed(error, attempt, self._clock() - started))
                if delay is None:
                    raise
                retry_id = retry_id or self._new_id()
                self._wait_for_retry(error, retry_id, attempt, delay)

    def _read_stream(self, purpose: str, body: Body) -> tuple[ResponseAssembler, list[int]]:
        assembler, seqs = ResponseAssembler(), []
        for chunk in self._provider.stream(body.data, cancellation=self._cancellation):
            if purpose == "main":
                seqs.append(self._log.append_chunk(self.turn, self.step, chunk))
            assembler.add(chunk)
        return assembler, seqs

    def _retry_delay(self, failed: RequestFailed) -> float | None:
        delays = [hook.on_response(failed) for hook in self._hooks]
        return next((delay for delay in delays if delay is not None), None)

    def _wait_for_retry(self, error: ProviderError, retry_id: str, attempt: int, delay: float) -> None:
        self.append(
            ev.LlmRetry(
                retry_id=retry_id,
                turn=self.turn,
                step=self.step,
                retry=attempt,
                max_retries=self._attempts - 1,
                delay_ms=round(delay * 1000),
                failure={"message": error.message, "code": error.code.name, "status": error.status, "kind": error.kind},
            )
        )
        self._cancellation.wait(delay)
        self._stop_if_cancelled()
        self.append(ev.LlmRetryStarted(retry_id=retry_id, turn=self.turn, step=self.step, retry=attempt))

    def summarise(
        self, messages: Sequence[Message], *, max_tokens: int, model: str | None
    ) -> tuple[list[JsonObject], Usage | None]:
        """Make a summary request over ``messages`` with the same tools and none to be called.

        Returns:
            Content of the answer (empty when the model asked for a call) and its usage.
        """
        header = self._current_header()
        config = {**header["config"], "maxTokens": max_tokens, "toolChoice": "none"}
        if model is not None:
            config["model"] = model
        data = self._provider.dialect.whole({**header, "config": config}, messages)
        self._budget.check()
        assembler, _ = self._call_model("summary", Body.of(data))
        self._stop_if_cancelled()
        content = assembler.content()
        self._settle(assembler.usage, sum(tokens.estimate_message(each, tokens.cautious) for each in messages), content)
        called = any(block["type"] == "tool-call" for block in content)
        text: list[JsonObject] = [
            {"type": "text", "text": block["text"]} for block in content if block["type"] == "text"
        ]
        return ([] if called else text), assembler.usage


def _error_data(error: RunnerError) -> JsonObject:
    data: JsonObject = {"code": error.code.name, "message": error.message}
    if error.hint:
        data["hint"] = error.hint
    return data
