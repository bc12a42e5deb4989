"""``usage.json``: tokens, cost, time and context of a session, folded from its events.

Buckets are disjoint (uncached input, cache reads, cache writes, output; reasoning is inside output).
The usage of an ``assistant/message`` replaces the usage chunks of its step; summaries count too. What a
fork took over from its parent does not count. Unknown is null, never 0. Works on logs of dsh. Memory
grows by one row a request and one number a message. Reads events only; no effect on the prefix cache.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from runner.artifacts.schema import SCHEMA_VERSION, Field, ordered
from runner.messages import add_usage
from runner.outcome import StepCount, is_new_result, result_call_id, result_state
from runner.session import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from runner.messages import JsonObject, Usage
    from runner.providers.base import Prices

_BUCKETS = (
    ("input", "inputTokens", "Uncached input tokens."),
    ("cacheRead", "cacheReadTokens", "Input tokens read from the provider's cache."),
    ("cacheWrite", "cacheWriteTokens", "Input tokens written to the provider's cache."),
    ("output", "outputTokens", "Output tokens, reasoning among them."),
    ("reasoning", "reasoningTokens", "Reasoning tokens, a part of the output."),
)

BUCKETS = {name: logged for name, logged, _ in _BUCKETS}
"""Name in ``usage.json`` → name in the log."""

INPUT_BUCKETS = ("input", "cacheRead", "cacheWrite")
"""The buckets that make up what was sent."""

SUMMED_BUCKETS = (*INPUT_BUCKETS, "output")
"""The buckets that add up to all tokens."""

_BUCKET_FIELDS = tuple(Field(name, "integer", meaning, nullable=True) for name, _, meaning in _BUCKETS)

USAGE_TOTAL_FIELDS = (
    *_BUCKET_FIELDS,
    Field(
        "cacheHitRate", "number", "Cache reads / (uncached input + cache reads + cache writes), 0 to 1.", nullable=True
    ),
)

_COST = Field("costUsd", "number", "Cost in US dollars; null when a price or the usage is not known.", nullable=True)

USAGE_FIELDS = (
    Field("schemaVersion", "integer", "Version of this format."),
    Field("sessionId", "string", "Id of the session.", nullable=True),
    Field("turns", "integer", "Turns with at least one ended step."),
    Field("steps", "integer", "Ended steps."),
    Field("requests", "integer", "HTTP attempts, retries and summaries among them."),
    Field("usage", "object", "Tokens of all answers.", fields=USAGE_TOTAL_FIELDS),
    _COST,
    Field("currency", "string", "Currency of the prices."),
    Field("estimated", "boolean", "Whether some of the numbers are estimates, since the provider gave none."),
    Field(
        "context",
        "object",
        "How full the context window is.",
        fields=(
            Field("window", "integer", "Context window in tokens.", nullable=True),
            Field("next", "integer", "Tokens the next request would hold: the last answer's, and an estimate since."),
            Field("peak", "integer", "Most input tokens of one request.", nullable=True),
        ),
    ),
    Field(
        "perStep",
        "array",
        "One row for each model request with its retries.",
        fields=(
            Field("turn", "integer", "The turn, from 1."),
            Field("step", "integer", "The step of the session, from 1."),
            Field("purpose", "string", "main, repair, or summary."),
            Field("model", "string", "The model that answered.", nullable=True),
            Field("attempts", "integer", "HTTP attempts."),
            *_BUCKET_FIELDS,
            _COST,
            Field("durationMs", "integer", "From the start of the step to its end, tools included.", nullable=True),
            Field("occupancy", "integer", "Input tokens of the request, cached ones too.", nullable=True),
        ),
    ),
    Field(
        "perModel",
        "array",
        "Sums by model.",
        fields=(
            Field("provider", "string", "Provider.", nullable=True),
            Field("model", "string", "Model.", nullable=True),
            Field("requests", "integer", "HTTP attempts."),
            *_BUCKET_FIELDS,
            _COST,
        ),
    ),
    Field(
        "tools",
        "array",
        "Sums by tool, in the order of first use.",
        fields=(
            Field("name", "string", "Tool."),
            Field("calls", "integer", "Calls."),
            Field("failed", "integer", "Calls that gave an error."),
            Field("denied", "integer", "Calls that were refused before they ran."),
            Field("durationMs", "integer", "Time of the calls in all.", nullable=True),
        ),
    ),
    Field("compactions", "integer", "Summaries that replaced a part of the history."),
    Field(
        "subagents",
        "array",
        "Children whose usage stands in sessions of their own.",
        fields=(
            Field("sessionId", "string", "Id of the child's session.", nullable=True),
            Field("label", "string", "What it was started as.", nullable=True),
            Field("outcome", "string", "How it ended.", nullable=True),
        ),
    ),
)
"""The field table of ``usage.json``."""

_FREE_PROVIDERS = ("scripted", "replay")


class _Declared(NamedTuple):
    """Prices of a configuration, which are for its model alone."""

    model: str | None
    prices: Prices


class _Row:
    """One model request with its retries; ``declared`` and ``given`` are the prices that held when it was made."""

    __slots__ = (
        "answered",
        "attempts",
        "chunk_usage",
        "declared",
        "duration",
        "given",
        "model",
        "provider",
        "purpose",
        "retries",
        "started",
        "step",
        "turn",
        "usage",
    )

    def __init__(
        self, turn: int, step: int, purpose: str, started: int, *, declared: _Declared | None, given: Prices | None
    ) -> None:
        self.declared = declared
        self.given = given
        self.turn = turn
        self.step = step
        self.purpose = purpose
        self.started = started
        self.attempts = 0
        self.retries = 0
        self.answered = False
        self.duration: int | None = None
        self.model: str | None = None
        self.provider: str | None = None
        self.usage: JsonObject | None = None
        self.chunk_usage: JsonObject | None = None

    def counted(self) -> JsonObject:
        """The usage that counts for the row, empty when nothing is known."""
        return self.usage or self.chunk_usage or {}

    def bucket(self, name: str) -> int | None:
        value = self.counted().get(BUCKETS[name])
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def occupancy(self) -> int | None:
        parts = [self.bucket(name) for name in INPUT_BUCKETS]
        return None if parts[0] is None else sum(part or 0 for part in parts)

    def cost(self, prices: Prices | None) -> float | None:
        from runner.providers.prices import cost_of

        usage = self.counted()
        if prices is None or prices.currency != "USD" or self.bucket("input") is None or self.bucket("output") is None:
            return None
        return cost_of(usage, prices)  # type: ignore[arg-type]  # the two required buckets are there

    def is_empty(self) -> bool:
        """Whether no request was made for it."""
        return not (self.attempts or self.retries or self.answered or self.counted())


class _Tool:
    __slots__ = ("calls", "denied", "duration", "failed")

    def __init__(self) -> None:
        self.calls = self.failed = self.denied = 0
        self.duration: int | None = None


class _Context:
    """Tokens of the next request: the last answer's real usage plus an estimate of what changed."""

    def __init__(self) -> None:
        self._nodes: dict[int, int] = {}
        self._sum = 0
        self._header = 0
        self._anchor: int | None = None

    def header(self, header: Mapping[str, Any]) -> None:
        from runner.session.tokens import estimate_system, estimate_tools

        size = estimate_system(str(header.get("system") or "")) + estimate_tools(header.get("tools") or [])
        if size != self._header:
            self._header, self._anchor = size, None

    def surface(self, event: ev.Event, content: Any, usage: JsonObject | None) -> None:
        from runner.session.tokens import OVERHEAD, estimate_content, reported

        try:
            size = estimate_content(content) + OVERHEAD
        except (KeyError, TypeError, AttributeError):  # blocks of a shape we do not know
            size = reported(json.dumps(content, ensure_ascii=False, default=str)) + OVERHEAD
        if isinstance(event.surface_op, dict):
            for seq in event.source_event_seqs or ():
                self._sum -= self._nodes.pop(seq, 0)
        self._nodes[event.seq] = size
        self._sum += size
        if usage is not None:
            total = sum(usage.get(BUCKETS[name]) or 0 for name in SUMMED_BUCKETS)
            self._anchor = total - self._sum

    def next(self) -> int:
        if self._anchor is None:
            return self._header + self._sum
        return max(0, self._anchor + self._sum)


def _declared_prices(config: JsonObject) -> _Declared | None:
    from runner.providers.base import Prices

    profile = config.get("profile")
    model = profile.get("model") if isinstance(profile, dict) else config.get("model")
    prices = model.get("prices") if isinstance(model, dict) else None
    if not isinstance(model, dict) or not isinstance(prices, dict):
        return None
    known = {name: float(price) for name, price in prices.items() if isinstance(price, (int, float))}
    return _Declared(
        model.get("model"),
        Prices(
            input=known.get("input"),
            cache_read=known.get("cache_read"),
            cache_write=known.get("cache_write"),
            output=known.get("output"),
            currency=str(prices.get("currency") or "USD"),
        ),
    )


class UsageFold:
    """Folds events one by one; ``usage`` may be asked at any point and changes nothing.

    An answer costs what the configuration in force declares: that of ``run/start``, or of the ``run/resume`` since.

    Args:
        header: Header of the log: gives the id, and ``seedLength`` of a fork.
        prices: Prices of the answers under a configuration that declares none, the last one of the log; what is
            declared is for its model alone. None takes those of the list of known models.
    """

    def __init__(self, *, header: JsonObject | None = None, prices: Prices | None = None) -> None:
        self._session_id = (header or {}).get("id")
        self._seed = (header or {}).get("seedLength") or 0
        self._given = prices
        self._configured: _Declared | None = None
        self._window: int | None = None
        self._provider: str | None = None
        self._model: str | None = None
        self._context = _Context()
        self._rules: dict[type[ev.Event], Callable[..., None]] = {
            ev.StepStart: self._step_start,
            ev.StepEnd: self._step_end,
            ev.RequestSent: self._request_sent,
            ev.LlmRetryStarted: self._retry_started,
            ev.AssistantChunk: self._chunk,
            ev.AssistantMessage: self._answer,
            ev.CompactionStart: self._compaction_start,
            ev.CompactionSummary: self._compaction_summary,
            ev.CompactionEnd: self._compaction_end,
            ev.ToolCall: self._tool_call,
            ev.ToolResult: self._tool_result,
            ev.WorkflowAgentStart: self._agent_start,
            ev.WorkflowAgentEnd: self._agent_end,
            ev.SessionEndSeed: self._end_seed,
        }
        self._reset()

    def _reset(self) -> None:
        self._count = StepCount()
        self._rows: list[_Row] = []
        self._step: _Row | None = None
        self._summary: _Row | None = None
        self._sent = 0
        self._calls: dict[tuple[int, int, str], tuple[str, int]] = {}
        self._tools: dict[str, _Tool] = {}
        self._compactions = 0
        self._agents: dict[tuple[str, Any], JsonObject] = {}

    def apply(self, event: ev.Event) -> None:
        """Take one event into account."""
        if event.SURFACE:
            self._surface(event)
        elif isinstance(event, ev.RequestHeaderEvent):
            self._request_header(event)
        elif isinstance(event, ev.RequestContext):
            self._window, self._provider, self._model = event.context_window, event.provider, event.model
        elif isinstance(event, ev.RunStart):
            self._configured = _declared_prices(event.config)
        elif isinstance(event, ev.RunResume) and event.config is not None:
            self._reconfigure(event.config)
        rule = self._rules.get(type(event))
        if rule is not None and not 0 <= event.seq < self._seed:
            rule(event)

    # --- what a fork takes over ---------------------------------------------------------------

    def _surface(self, event: ev.Event) -> None:
        usage: JsonObject | None = None
        if isinstance(event, ev.UserMessage):
            content: Any = event.content
        elif isinstance(event, (ev.AssistantMessage, ev.ToolResult)):
            content = event.message.get("content")
            if isinstance(event, ev.AssistantMessage) and event.usage is not None:
                usage = dict(event.usage)
        else:
            return
        self._context.surface(event, content, usage)

    def _request_header(self, event: ev.RequestHeaderEvent) -> None:
        self._context.header(event.header)
        config = event.header.get("config") or {}
        self._provider = config.get("provider") or self._provider
        self._model = config.get("model") or self._model

    def _reconfigure(self, config: JsonObject) -> None:
        """A run goes on with other settings: its prices are not those of the answers before."""
        for row in self._rows:
            row.given = None
        self._configured = _declared_prices(config)

    # --- requests -----------------------------------------------------------------------------

    def _row(self, turn: int, step: int, time: int) -> _Row:
        """The row of the step's own request; a log that starts in the middle gets one on the way."""
        row = self._step
        if row is None or (row.turn, row.step) != (turn, step):
            row = self._step = self._new_row(turn, step, "main", time)
            self._rows.append(row)
        return row

    def _new_row(self, turn: int, step: int, purpose: str, time: int) -> _Row:
        return _Row(turn, step, purpose, time, declared=self._configured, given=self._given)

    def _step_start(self, event: ev.StepStart) -> None:
        self._row(event.turn, event.step, event.time)

    def _step_end(self, event: ev.StepEnd) -> None:
        self._count.apply(event)
        row = self._row(event.turn, event.step, event.time)
        row.duration = round(event.time - row.started)

    def _request_sent(self, event: ev.RequestSent) -> None:
        self._sent += 1
        if event.purpose == "summary":
            row = self._summary_row(event.turn, event.time)
        else:
            row = self._row(event.turn, event.step, event.time)
            row.purpose = "repair" if event.purpose == "repair" else row.purpose
        row.attempts += 1

    def _retry_started(self, event: ev.LlmRetryStarted) -> None:
        row = self._summary or self._row(event.turn, event.step, event.time)
        row.retries += 1

    def _chunk(self, event: ev.AssistantChunk) -> None:
        if event.chunk.get("type") == "usage":
            usage = event.chunk.get("usage")
            row = self._row(event.turn, event.step, event.time)
            row.chunk_usage = usage if isinstance(usage, dict) else None

    def _answer(self, event: ev.AssistantMessage) -> None:
        if isinstance(event.surface_op, dict):
            return
        row = self._row(event.turn, event.step, event.time)
        message: Mapping[str, Any] = event.message
        source = message.get("source")
        source = source if isinstance(source, dict) else {}
        row.answered = True
        row.usage = dict(event.usage) if event.usage is not None else row.chunk_usage
        row.model = source.get("model") or self._model
        row.provider = source.get("provider") or self._provider

    # --- compaction ---------------------------------------------------------------------------

    def _summary_row(self, turn: int, time: int) -> _Row:
        if self._summary is None:
            self._summary = self._new_row(turn, self._step.step if self._step else 0, "summary", time)
            self._rows.append(self._summary)
        return self._summary

    def _compaction_start(self, event: ev.CompactionStart) -> None:
        self._summary = None
        self._summary_row(event.turn, event.time)

    def _compaction_summary(self, event: ev.CompactionSummary) -> None:
        row = self._summary_row(self._step.turn if self._step else 0, event.time)
        row.answered = True
        row.usage = dict(event.usage) if event.usage is not None else None
        row.model, row.provider = event.model or self._model, event.provider or self._provider

    def _compaction_end(self, event: ev.CompactionEnd) -> None:
        row, self._summary = self._summary_row(event.turn, event.time), None
        row.duration = round(event.time - row.started)
        if event.refused_usage is not None:
            total = add_usage(cast("Usage | None", row.usage), event.refused_usage)
            row.answered, row.usage = True, dict(total or {})
            row.model, row.provider = row.model or self._model, row.provider or self._provider
        self._compactions += event.error is None

    # --- tools and children -------------------------------------------------------------------

    def _tool_call(self, event: ev.ToolCall) -> None:
        self._tools.setdefault(event.name, _Tool()).calls += 1
        self._calls[event.turn, event.step, event.call_id] = (event.name, event.time)

    def _tool_result(self, event: ev.ToolResult) -> None:
        if not is_new_result(event):
            return
        found = self._calls.pop((event.turn, event.step, result_call_id(event)), None)
        if found is None:
            return
        name, started = found
        tool, state = self._tools[name], result_state(event)
        tool.failed += state == "failed"
        tool.denied += state == "denied"
        measured = (event.meta or {}).get("durationMs")
        duration = measured if isinstance(measured, (int, float)) else event.time - started
        tool.duration = (tool.duration or 0) + round(duration)

    def _agent_start(self, event: ev.WorkflowAgentStart) -> None:
        extra = event.extra or {}
        key = (event.run_id, extra.get("seq") if isinstance(extra.get("seq"), int) else len(self._agents))
        self._agents[key] = {"sessionId": extra.get("childId"), "label": extra.get("label"), "outcome": None}

    def _agent_end(self, event: ev.WorkflowAgentEnd) -> None:
        extra = event.extra or {}
        agent = self._agents.get((event.run_id, extra.get("seq") if isinstance(extra.get("seq"), int) else -1))
        if agent is not None:
            agent["outcome"] = extra.get("outcome")

    def _end_seed(self, _: ev.SessionEndSeed) -> None:
        self._reset()

    # --- result -------------------------------------------------------------------------------

    def _prices(self, row: _Row) -> Prices | None:
        from runner.providers.prices import FREE, lookup

        if row.declared is not None and row.model in (None, row.declared.model):
            return row.declared.prices
        if row.provider in _FREE_PROVIDERS:
            return FREE
        if row.declared is None and row.given is not None:
            return row.given
        return lookup(row.model) if row.model else None

    @property
    def turns(self) -> int:
        """Turns with at least one ended step."""
        return self._count.turns

    @property
    def steps(self) -> int:
        """Ended steps."""
        return self._count.steps

    def usage(self) -> JsonObject:
        """The content of ``usage.json``."""
        rows = [row for row in self._rows if row.purpose != "summary" or not row.is_empty()]
        costs = [row.cost(self._prices(row)) for row in rows]
        total = {name: _total(rows, name) for name in BUCKETS}
        peaks = [occupancy for row in rows if (occupancy := row.occupancy()) is not None]
        attempts = {id(row): row.attempts if self._sent or row.is_empty() else 1 + row.retries for row in rows}
        declared = self._configured.prices if self._configured else self._given
        values = {
            "schemaVersion": SCHEMA_VERSION,
            "sessionId": self._session_id,
            "turns": self.turns,
            "steps": self.steps,
            "requests": self._sent or sum(attempts.values()),
            "usage": {**total, "cacheHitRate": cache_hit_rate(total)},
            "costUsd": _total_cost(rows, costs),
            "currency": declared.currency if declared else "USD",
            "estimated": any(row.counted().get("estimated") is True for row in rows),
            "context": {"window": self._window, "next": self._context.next(), "peak": max(peaks, default=None)},
            "perStep": [
                {
                    "turn": row.turn,
                    "step": row.step,
                    "purpose": row.purpose,
                    "model": row.model,
                    "attempts": attempts[id(row)],
                    **{name: row.bucket(name) for name in BUCKETS},
                    "costUsd": None if cost is None else round(cost, 9),
                    "durationMs": row.duration,
                    "occupancy": row.occupancy(),
                }
                for row, cost in zip(rows, costs, strict=True)
            ],
            "perModel": self._per_model(rows, costs, attempts),
            "tools": [
                {
                    "name": name,
                    "calls": tool.calls,
                    "failed": tool.failed,
                    "denied": tool.denied,
                    "durationMs": tool.duration,
                }
                for name, tool in self._tools.items()
            ],
            "compactions": self._compactions,
            "subagents": [dict(agent) for agent in self._agents.values()],
        }
        return ordered(USAGE_FIELDS, values)

    def _per_model(self, rows: list[_Row], costs: list[float | None], attempts: dict[int, int]) -> list[JsonObject]:
        groups: dict[tuple[str | None, str | None], list[tuple[_Row, float | None]]] = {}
        for row, cost in zip(rows, costs, strict=True):
            key = (row.provider or self._provider, row.model or self._model)
            groups.setdefault(key, []).append((row, cost))
        return [
            {
                "provider": provider,
                "model": model,
                "requests": sum(attempts[id(row)] for row, _ in group),
                **{name: _total([row for row, _ in group], name) for name in BUCKETS},
                "costUsd": _total_cost([row for row, _ in group], [cost for _, cost in group]),
            }
            for (provider, model), group in groups.items()
        ]


def _total(rows: Sequence[_Row], name: str) -> int | None:
    """Sum of what is known; null when requests were made and nothing is known."""
    known = [value for row in rows if (value := row.bucket(name)) is not None]
    return sum(known) if known or all(row.is_empty() for row in rows) else None


def _total_cost(rows: Sequence[_Row], costs: Sequence[float | None]) -> float | None:
    """Sum of the costs; null when the cost of an answer is not known, or that of every request."""
    for row, cost in zip(rows, costs, strict=True):
        if cost is None and (row.answered or row.counted()):
            return None
    known = [cost for cost in costs if cost is not None]
    return round(sum(known), 9) if known or all(row.is_empty() for row in rows) else None


def cache_hit_rate(total: Mapping[str, int | None]) -> float | None:
    """Cache reads / (uncached input + cache reads + cache writes); null when reads are not known or all is 0."""
    reads = total["cacheRead"]
    whole = sum(total[name] or 0 for name in INPUT_BUCKETS)
    return None if reads is None or whole == 0 else round(reads / whole, 6)


def derive_usage(
    events: Iterable[ev.Event], *, header: JsonObject | None = None, prices: Prices | None = None
) -> JsonObject:
    """The content of ``usage.json`` for a whole log; arguments as for ``UsageFold``."""
    fold = UsageFold(header=header, prices=prices)
    for event in events:
        fold.apply(event)
    return fold.usage()
