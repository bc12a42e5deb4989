"""The loop: turns, steps, requests and tool calls of one agent.

The only writer of ``turn/*``, ``step/*``, ``request/*``, ``assistant/*`` and the only caller of the
tool scheduler. Every boundary that was opened is closed, whatever happened in between. History
is append-only here; only compaction, through ``before_request``, may replace a part of it.
Prefix cache: kept from step to step; a request's header changes only where its answer's room does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from runner import diagnostics
from runner.agent.budget import NOTICE_SHARE, LimitExceeded, LimitState, RunStopped, amounts_of
from runner.agent.hook import RequestEnded, StepStarting, TurnOver, ask, hooks_at, show
from runner.agent.prompt import user_message
from runner.agent.request import Body, RequestBody, check_rebuild
from runner.errors import ErrorCode, InternalError, ProviderError, RunnerError, StorageError
from runner.figures import amount
from runner.messages import tool_calls_of
from runner.providers.assemble import ResponseAssembler
from runner.record import record
from runner.session import events as ev
from runner.session import tokens
from runner.session.media import no_media

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.agent.budget import Budget, Reservation
    from runner.agent.hook import Hook
    from runner.agent.inbox import Inbox
    from runner.agent.past import Past
    from runner.cancellation import Cancellation
    from runner.messages import Block, JsonObject, Message, RequestHeader, ToolCallBlock, ToolSchema, Usage
    from runner.providers.base import Provider
    from runner.session.log import SessionLog
    from runner.session.media import Media

_TOKEN_STEP = 2_000
"""Where there is not even room for ``steady_output``, ``maxTokens`` is lowered in steps of this size."""

Result = TypeVar("Result")

_BY_HOOKS = ("compaction/start", "compaction/summary", "compaction/end", "compaction/prune")
"""Events that ``before_request`` may write beside those that replace a part of the history."""


class Stop(RunStopped):
    """Something other than a limit ends the run; ``reason`` is what ``turn/end`` says."""

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
    """What the loop needs to know of the calls it had run: whether a denied one ends the run."""

    @property
    def ends_run(self) -> bool:
        """Whether one was denied in a run that such a call ends."""
        ...


@record
class _Answered:
    """A request that got its answer.

    Attributes:
        assembler: The answer; ``finish`` None when it was cut by cancellation.
        seqs: Seqs of its chunks.
        attempt: Number of the attempt that got it, from 1.
        waited: Seconds since the first attempt began.
    """

    assembler: ResponseAssembler
    seqs: list[int]
    attempt: int
    waited: float


class _Rates:
    """What requests to one model take of the budget.

    Attributes:
        cost_of: Money for a usage, None when unknown.
        per_output: What each token of an answer takes.
    """

    def __init__(self, cost_of: Callable[[Usage], float | None]) -> None:
        self.cost_of = cost_of
        million = 1_000_000
        read: Usage = {"inputTokens": million, "outputTokens": 0}
        cached: Usage = {"inputTokens": 0, "outputTokens": 0, "cacheWriteTokens": million}
        written: Usage = {"inputTokens": 0, "outputTokens": million}
        self._input_price = max(cost_of(read) or 0.0, cost_of(cached) or 0.0) / million
        output_price = (cost_of(written) or 0.0) / million
        self.per_output = {"input_tokens": 0.0, "output_tokens": 1.0, "tokens": 1.0, "cost": output_price}

    def of_input(self, occupancy: int) -> dict[str, float]:
        """What a request of that many tokens takes before its answer; none of them is known to be cached."""
        cost = occupancy * self._input_price
        return {"input_tokens": occupancy, "output_tokens": 0, "tokens": occupancy, "cost": cost}


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
        steady_output: What is left for an answer as long as compaction has nothing to do. Once ``max_output`` does not
            fit, requests ask for this, so that the header changes once and not with every step.
        budget: Limits.
        past: The session so far.
        calls: Runs tool calls.
        hooks: In the order they are asked.
        cancellation: Goes up on a signal or at the wall limit.
        clock: Monotonic seconds.
        new_id: Gives message and retry ids.
        cost_of: Money for a usage, None when unknown.
        summary_cost_of: The same for summaries, which another model may write.
        attempts: Most attempts of one request, as the retry hook knows it; for the log.
        paranoid: Compare every request with its rebuild.
        media: Gives the bytes of the session's images.
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
        steady_output: int,
        budget: Budget,
        past: Past,
        inbox: Inbox,
        calls: CallRunner,
        hooks: Sequence[Hook],
        cancellation: Cancellation,
        clock: Callable[[], float],
        new_id: Callable[[], str],
        cost_of: Callable[[Usage], float | None],
        summary_cost_of: Callable[[Usage], float | None] | None = None,
        attempts: int = 1,
        paranoid: bool = False,
        media: Media = no_media,
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
        self._least_output = min(min_output, max_output)
        self._steady_output = max(self._least_output, min(steady_output, max_output))
        self._most_output = max_output
        self._budget = budget
        self._calls = calls
        self._before_step = hooks_at(hooks, "before_step")
        self._before_request = hooks_at(hooks, "before_request")
        self._on_response = hooks_at(hooks, "on_response")
        self._after_turn = hooks_at(hooks, "after_turn")
        self._observers = hooks_at(hooks, "observe")
        self._cancellation = cancellation
        self._clock = clock
        self._new_id = new_id
        self._main_rates = _Rates(cost_of)
        self._summary_rates = _Rates(summary_cost_of or cost_of)
        self._attempts = attempts
        self._paranoid = paranoid
        self._media = media
        self._body = RequestBody(provider.dialect, media)
        self._header: RequestHeader | None = None
        self._first_header = "initial" if past.header is None else "resume"
        self._surface_events = past.surface
        self._occupancy = past.occupancy
        self._checked_generation = -1
        self._limited = False
        self._rebuild_due = True
        log.observers.append(self._observe)

    # --- events -------------------------------------------------------------------------------

    def append(self, event: ev.Event) -> ev.Event:
        """Write one event of a compaction; for ``before_request``.

        Raises:
            InternalError: It is another one.
        """
        if event.TYPE not in _BY_HOOKS and (not event.SURFACE or event.surface_op == "append"):
            raise InternalError(f"a hook may not write {event.TYPE} before a request, which is for compaction only")
        return self._append(event)

    def _append(self, event: ev.Event) -> ev.Event:
        """Write one event; projection and observers see it once it is written."""
        return self._log.append(event)

    def _observe(self, event: ev.Event) -> None:
        if event.SURFACE:
            self._surface_events.append(event)
            self.projection.apply(event)
        if isinstance(event, ev.ToolResult):
            meta = event.meta or {}
            if event.surface_op == "append":
                self._budget.charge(output_bytes=meta.get("bytes", 0))
            diagnostics.debug(
                "tool result",
                callId=event.message["source"].get("callId"),
                error=(event.error or {}).get("code"),
                ms=meta.get("durationMs"),
            )
        show(self._observers, event)

    # --- turns --------------------------------------------------------------------------------

    def run(self) -> None:
        """Work until nothing asks for a turn, or the run is stopped.

        Raises:
            RunnerError: Infrastructure broke, after the open turn was closed in the log.
        """
        while self.inbox.wakes and not self._cancellation.cancelled:
            try:
                self._budget.take(turns=1)
            except LimitExceeded as limit:
                self._log_limit(limit.state)
                return
            if not self._run_turn():
                return
        if self._cancellation.reason == "wall" and not self._limited:
            self._log_limit(self._wall_state())

    def compact(self, compaction: Callable[[Loop], Result]) -> Result:
        """A turn without steps, in which nothing happens but ``compaction``; returns what that returns.

        Raises:
            RunnerError: It failed, or a limit does not allow it. The turn is closed.
        """
        self.turn += 1
        self._append(ev.TurnStart(turn=self.turn))
        try:
            return compaction(self)
        except LimitExceeded as limit:
            raise RunnerError(str(limit), code=limit.state.code, hint="raise the limit in the profile") from limit
        except Stop as stop:
            raise RunnerError(f"stopped: {stop}", code=ErrorCode.CANCELLED) from stop
        finally:
            self._append(ev.TurnEnd(turn=self.turn, reason={"kind": "completed"}))

    def _run_turn(self) -> bool:
        """One turn; returns whether another may follow."""
        self.turn += 1
        diagnostics.bind(turn=self.turn)
        self._append(ev.TurnStart(turn=self.turn))
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
        for method in self._after_turn:
            for message in ask([method], over)[0]:
                self.inbox.followup(message)
        return True

    def _close_turn(self, reason: JsonObject) -> None:
        try:
            stopped = self._calls.end_turn()
            self._append(ev.TurnEnd(turn=self.turn, reason=reason))
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
            ask(self._before_step, starting)
            if starting.end_turn is not None:
                return {"kind": "blocked", "message": starting.end_turn}
            self._stop_if_cancelled()
            self._budget.check()
            least = self._least_of_step(starting.messages)
            self._budget.require({"steps": 1, **least})
            self._budget.take(steps=1)
            ended = self._run_step(starting.messages, least)
            if ended is not None:
                return ended
            self._stop_if_cancelled()
            entering = []
            self.first_of_turn = False

    def _run_step(self, messages: Sequence[Message], least: dict[str, float]) -> JsonObject | None:
        """One step, whose request takes ``least``; returns why the turn ended, None when it goes on."""
        self.step += 1
        diagnostics.bind(step=self.step)
        self._append(ev.StepStart(turn=self.turn, step=self.step))
        try:
            notices = self._limit_notices(least)
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
        if self._calls.run(calls, turn=self.turn, step=self.step).ends_run:
            raise Stop("policy", ErrorCode.POLICY_DENIED.name)

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
        return self._budget.over("wall") or LimitState("wall", self._budget.used("wall"), self._budget.limits.wall or 0)

    def _log_limit(self, state: LimitState) -> None:
        self._limited = True
        self._append(ev.LimitReached(name=state.name, used=state.used, max=state.max, percent=100, needed=state.needed))

    def _limit_notices(self, least: dict[str, float]) -> list[Message]:
        messages = []
        for state in self._budget.notices(least):
            self._append(ev.LimitReached(name=state.name, used=state.used, max=state.max, percent=90))
            near = state.used >= NOTICE_SHARE * state.max
            what = "is nearly used up" if near else "has room for about one more request"
            text = (
                f"The limit {state.name} {what} ({amount(state.used)} of {amount(state.max)} are used). "
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
        ask(self._before_request, self, overflow=False)
        overflowed = False
        while True:
            occupancy = self.occupancy()
            if occupancy + self._least_output > self._window:
                error = self._too_long("next", occupancy)
            else:
                try:
                    most = self._output_room(occupancy)
                    with self._reserve(self._main_rates, occupancy, most=most) as reservation:
                        self._use_header(self._header_for(reservation))
                        return self._answer(occupancy, reservation)
                except ProviderError as failure:
                    if failure.code is not ErrorCode.CONTEXT_EXHAUSTED:
                        raise
                    error = failure
            if overflowed:
                raise error
            overflowed = True
            if not any(ask(self._before_request, self, overflow=True)):
                raise error

    def _too_long(self, which: str, occupancy: int) -> ProviderError:
        return ProviderError(
            f"the {which} request holds about {occupancy} tokens, an answer needs {self._least_output} more, "
            f"and the window is {self._window}",
            code=ErrorCode.CONTEXT_EXHAUSTED,
            hint="raise model.context_window, or lower compaction.summary_at",
        )

    def _output_room(self, occupancy: int) -> int:
        """Most tokens of the answer to a request of that many, which may be somewhat longer than it is taken for."""
        left = self._window - occupancy
        left = max(left - self._doubt(), min(left, self._least_output))
        if left < self._most_output:
            self._most_output = self._steady_output
        return min(self._most_output, left)

    def _doubt(self) -> int:
        return self._occupancy.doubt(self._current_header(), self.projection)

    def _least_of_step(self, messages: Sequence[Message]) -> dict[str, float]:
        """What the request of a step with ``messages`` takes with the least answer."""
        entering = sum(tokens.estimate_message(message, tokens.cautious) for message in messages)
        rates = self._main_rates
        fixed = rates.of_input(min(self.occupancy() + entering, self._window))
        return {name: value + rates.per_output[name] * self._least_output for name, value in fixed.items()}

    def _reserve(self, rates: _Rates, occupancy: int, *, most: int) -> Reservation:
        """Hold what a request of that many tokens may take, with an answer of at most ``most`` tokens.

        Raises:
            LimitExceeded: Not even the least answer would fit.
        """
        return self._budget.reserve(
            rates.of_input(occupancy), rates.per_output, least=min(self._least_output, most), most=most
        )

    def _header_for(self, reservation: Reservation) -> RequestHeader:
        """The header with ``maxTokens`` lowered to what window and budget leave."""
        allowed = room = int(reservation.granted)
        if room < self._most_output:
            allowed = max(self._least_output, room // _TOKEN_STEP * _TOKEN_STEP)
        if self._header is not None and self._header["config"]["maxTokens"] == allowed:
            return self._header
        return self._build_header(allowed)

    def _use_header(self, header: RequestHeader) -> None:
        if header is self._header:
            return
        reason = self._first_header if self._header is None else "change"
        if self._header is None:
            self._append(
                ev.RequestContext(
                    provider=self._config["provider"], model=self._config["model"], context_window=self._window
                )
            )
        self._header = header
        self._rebuild_due = True
        self._append(ev.RequestHeaderEvent(header=header, reason=reason))

    def _answer(self, occupancy: int, reservation: Reservation) -> tuple[Message, str]:
        """One main request of ``occupancy`` tokens with its retries; the anchor event is appended."""
        header = self._current_header()
        body = self._body.update(header, self.projection)
        due = self._rebuild_due or self._paranoid or self.step & (self.step - 1) == 0
        if due or self.projection.generation != self._checked_generation:
            check_rebuild(body, self._provider.dialect, header, self._surface_events, self._media)
            self._rebuild_due, self._checked_generation = False, self.projection.generation
        answered = self._call_model("main", body)
        assembler = answered.assembler
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
        self._append(
            ev.AssistantMessage(
                turn=self.turn,
                step=self.step,
                message=message,
                usage=usage,
                interrupted=True if interrupted else None,
                source_event_seqs=answered.seqs,
            )
        )
        if usage is not None:
            self._occupancy.anchor(usage, header, self.projection)
        _settle(reservation, self._main_rates, usage, occupancy, message["content"])
        if interrupted:
            self._stop_if_cancelled()
            raise InternalError("a stream ended without a finish and without a cancellation")
        self._tell_answer("main", answered)
        return message, assembler.finish or "stop"

    def _tell_answer(self, purpose: str, answered: _Answered) -> None:
        ended = RequestEnded(None, answered.attempt, answered.waited, purpose, answered.assembler.usage)
        ask(self._on_response, ended)

    def _call_model(self, purpose: str, body: Body) -> _Answered:
        """Send one body, repeating failed attempts as the hooks decide.

        Raises:
            ProviderError: No attempt succeeded.
            LimitExceeded: Nothing came for the idle limit.
        """
        started, attempt, retry_id = self._clock(), 0, ""
        while True:
            attempt += 1
            self._stop_if_cancelled()
            self._append(
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
                assembler, seqs = self._read_stream(purpose, body)
                return _Answered(assembler, seqs, attempt, self._clock() - started)
            except ProviderError as error:
                self._stop_if_cancelled()
                idle = self._budget.limits.idle
                if error.kind == "idle-timeout" and idle is not None:
                    raise LimitExceeded(LimitState("idle", idle, idle)) from error
                delay = self._retry_delay(RequestEnded(error, attempt, self._clock() - started, purpose))
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

    def _retry_delay(self, failed: RequestEnded) -> float | None:
        return next((delay for delay in ask(self._on_response, failed) if delay is not None), None)

    def _wait_for_retry(self, error: ProviderError, retry_id: str, attempt: int, delay: float) -> None:
        self._append(
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
        self._append(ev.LlmRetryStarted(retry_id=retry_id, turn=self.turn, step=self.step, retry=attempt))

    def summarise(
        self, messages: Sequence[Message], *, max_tokens: int, model: str | None
    ) -> tuple[list[JsonObject], Usage | None]:
        """Make a summary request over ``messages`` with the same tools and none to be called.

        Returns:
            Content of the answer (empty when the model asked for a call) and its usage.

        Raises:
            ProviderError: No answer came; or CONTEXT_EXHAUSTED, the request does not fit and was not sent.
            LimitExceeded: Not even the least answer fits the budget.
        """
        self._budget.check()
        header = self._current_header()
        occupancy = self._occupancy.of_messages(header, self.projection, messages)
        room = self._window - occupancy
        if room < min(max_tokens, self._least_output):
            raise self._too_long("summary", occupancy)
        rates = self._summary_rates
        most = min(max_tokens, max(room - self._doubt(), min(room, self._least_output)))
        with self._reserve(rates, occupancy, most=most) as reservation:
            config = {**header["config"], "maxTokens": int(reservation.granted), "toolChoice": "none"}
            if model is not None:
                config["model"] = model
            body = Body.of(self._provider.dialect.whole({**header, "config": config}, messages, self._media))
            answered = self._call_model("summary", body)
            self._stop_if_cancelled()
            assembler = answered.assembler
            content = assembler.content()
            _settle(reservation, rates, assembler.usage, occupancy, content)
        self._tell_answer("summary", answered)
        called = any(block["type"] == "tool-call" for block in content)
        text: list[JsonObject] = [
            {"type": "text", "text": block["text"]} for block in content if block["type"] == "text"
        ]
        return ([] if called else text), assembler.usage


def _settle(
    reservation: Reservation,
    rates: _Rates,
    usage: Usage | None,
    occupancy: int,
    content: Sequence[JsonObject | Block],
) -> None:
    """Count what a call used; without a report of the provider what it is estimated to have used."""
    if usage is None:
        usage = {"inputTokens": occupancy, "outputTokens": tokens.estimate_content(content, tokens.cautious)}
    reservation.settle(amounts_of(usage, rates.cost_of(usage)))


def _error_data(error: RunnerError) -> JsonObject:
    data: JsonObject = {"code": error.code.name, "message": error.message}
    if error.hint:
        data["hint"] = error.hint
    return data
