"""What filled the context window at one step: ``session show --context``, folded from a session's events.

Parts are estimates by the formulas for reports; what the provider counted stands beside them and is never mixed in.
Works on logs of dsh. Memory grows by a few numbers a message. Reads events only; no effect on the prefix cache.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from runner.artifacts.schema import SCHEMA_VERSION, Field, ordered
from runner.artifacts.usage import BUCKETS, INPUT_BUCKETS
from runner.errors import ConfigError
from runner.figures import counted
from runner.session import events as ev
from runner.session.tokens import OVERHEAD, estimate_block, estimate_system, estimate_tools, reported

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from runner.messages import JsonObject

_TOKENS = Field("tokens", "integer", "Tokens, estimated.")

CONTEXT_FIELDS = (
    Field("schemaVersion", "integer", "Version of this format."),
    Field("sessionId", "string", "Id of the session.", nullable=True),
    Field("turn", "integer", "The turn, from 1."),
    Field("step", "integer", "The step of the session, from 1."),
    Field("model", "string", "The model that was asked.", nullable=True),
    Field("window", "integer", "Context window in tokens.", nullable=True),
    Field("occupancy", "integer", "Tokens of the request as the provider counted them.", nullable=True),
    Field("estimate", "integer", "The same, estimated: the sum of all parts."),
    Field("reserved", "integer", "Tokens kept free for the answer.", nullable=True),
    Field("system", "object", "The system prompt.", fields=(_TOKENS,)),
    Field(
        "tools", "object", "The tool table.", fields=(Field("count", "integer", "Tools that were offered."), _TOKENS)
    ),
    Field(
        "messages",
        "array",
        "The messages by kind, in the order of the table in the documentation; kinds that are not there are left out.",
        fields=(
            Field(
                "kind",
                "string",
                "prompts, state, context, summaries, notices, answers, reasoning, calls, results, or images.",
            ),
            Field("count", "integer", "How many."),
            _TOKENS,
        ),
    ),
    Field(
        "spilled",
        "object",
        "Results of which only the ends are in the window.",
        fields=(
            Field("count", "integer", "How many."),
            Field("tokens", "integer", "Tokens that they take in the window, estimated; part of the results."),
            Field("bytes", "integer", "Bytes of their whole texts, which are kept in files."),
        ),
    ),
    Field(
        "pruned",
        "object",
        "Results that were cut since they came.",
        fields=(
            Field("count", "integer", "How many."),
            Field("tokens", "integer", "Tokens that they take in the window, estimated; part of the results."),
            Field("freed", "integer", "Tokens that the cuts freed, estimated."),
        ),
    ),
    Field("folded", "integer", "Messages that summaries stand for, summaries of summaries taken apart."),
)
"""The field table of ``session show --context``."""

COMPACT_FIELDS = (
    Field("schemaVersion", "integer", "Version of this format."),
    Field("sessionId", "string", "Id of the session."),
    Field("folded", "integer", "Messages that the summary stands for; 0: there was nothing to compact."),
    Field("before", "integer", "Tokens that the next request would have held."),
    Field("after", "integer", "Tokens that it holds now."),
    Field("window", "integer", "Context window in tokens."),
)
"""The field table of ``session compact``."""

KINDS = (
    "prompts",
    "state",
    "context",
    "summaries",
    "notices",
    "answers",
    "reasoning",
    "calls",
    "results",
    "images",
)
"""Kinds of what stands in messages, in the order in which they are told."""

_USER_KINDS = {"runtime": "state", "context": "context", "compact": "summaries"}
_BLOCK_KINDS = {"reasoning": "reasoning", "tool-call": "calls", "image": "images"}


class _Node:
    """What one message takes of the window."""

    __slots__ = ("folded", "original", "parts", "pruned", "spilled")

    def __init__(self, parts: dict[str, tuple[int, int]], spilled: int | None) -> None:
        self.parts = parts
        self.spilled = spilled
        self.original = self.tokens
        self.pruned = False
        self.folded = 1

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens in self.parts.values())


def derive_context(events: Iterable[ev.Event], *, step: int, session_id: str | None = None) -> JsonObject:
    """What filled the window when the main request of a step was sent, as ``CONTEXT_FIELDS`` describes it.

    Args:
        events: The events of the session; deltas may be left out.
        step: Which ``step/start`` of the session, from 1.
        session_id: Id of the session.

    Raises:
        ConfigError: CONFIG_INVALID, the session has no such step, or it got no answer and sent no request.
    """
    fold = _Fold()
    steps = 0
    found: JsonObject | None = None
    for event in events:
        if isinstance(event, ev.StepStart):
            steps += 1
            if steps > step:
                break
            fold.turn, fold.step = event.turn, event.step
        if steps == step:
            if isinstance(event, ev.RequestSent) and event.purpose == "main":
                found = fold.context()
            elif isinstance(event, ev.AssistantMessage) and event.surface_op == "append":
                # Some logs do not say when a request was sent: everything before its answer was in it.
                found = found or fold.context()
                found["occupancy"] = _input_of(event.usage)
                break
        fold.apply(event)
    if found is None:
        hint = f"it has {counted(steps, 'step')}" if steps < step else "the step ended before a request was made"
        raise ConfigError(f"the session has no main request for step {step}", hint=hint)
    return ordered(CONTEXT_FIELDS, {"schemaVersion": SCHEMA_VERSION, "sessionId": session_id, **found})


class _Fold:
    """The window after the events applied so far."""

    def __init__(self) -> None:
        self.turn = 0
        self.step = 0
        self._nodes: dict[int, _Node] = {}
        self._header: JsonObject = {}
        self._window: int | None = None
        self._model: str | None = None

    def apply(self, event: ev.Event) -> None:
        if isinstance(event, ev.RequestHeaderEvent):
            self._header = dict(event.header)
        elif isinstance(event, ev.RequestContext):
            self._window, self._model = event.context_window, event.model
        elif event.SURFACE:
            self._surface(event)

    def _surface(self, event: ev.Event) -> None:
        node = _Node(_parts_of(event), _spilled(event))
        if isinstance(event.surface_op, dict):
            shadowed = [self._nodes.pop(seq) for seq in event.source_event_seqs or () if seq in self._nodes]
            if isinstance(event, ev.ToolResult) and shadowed:
                node.original, node.pruned = shadowed[0].original, True
            else:
                node.folded = sum(each.folded for each in shadowed)
        self._nodes[event.seq] = node

    def context(self) -> JsonObject:
        config = self._header.get("config") or {}
        tools = self._header.get("tools") or []
        system = estimate_system(str(self._header.get("system") or ""))
        table = estimate_tools(tools)
        rows: dict[str, tuple[int, int]] = {}
        for node in self._nodes.values():
            for kind, (count, tokens) in node.parts.items():
                known = rows.get(kind, (0, 0))
                rows[kind] = (known[0] + count, known[1] + tokens)
        spilled = [node for node in self._nodes.values() if node.spilled is not None]
        pruned = [node for node in self._nodes.values() if node.pruned]
        return {
            "turn": self.turn,
            "step": self.step,
            "model": config.get("model") or self._model,
            "window": self._window,
            "occupancy": None,
            "estimate": system + table + sum(tokens for _, tokens in rows.values()),
            "reserved": config.get("maxTokens"),
            "system": {"tokens": system},
            "tools": {"count": len(tools), "tokens": table},
            "messages": [
                {"kind": kind, "count": rows[kind][0], "tokens": rows[kind][1]} for kind in KINDS if kind in rows
            ],
            "spilled": {
                "count": len(spilled),
                "tokens": sum(node.tokens for node in spilled),
                "bytes": sum(node.spilled or 0 for node in spilled),
            },
            "pruned": {
                "count": len(pruned),
                "tokens": sum(node.tokens for node in pruned),
                "freed": sum(node.original - node.tokens for node in pruned),
            },
            "folded": sum(node.folded for node in self._nodes.values() if "summaries" in node.parts),
        }


def _parts_of(event: ev.Event) -> dict[str, tuple[int, int]]:
    """Kind → number and tokens of what a message holds; its own overhead belongs to its first kind."""
    parts: dict[str, tuple[int, int]] = {}

    def add(kind: str, count: int, tokens: int) -> None:
        known = parts.get(kind, (0, 0))
        parts[kind] = (known[0] + count, known[1] + tokens)

    if isinstance(event, ev.UserMessage):
        source, content = event.source, event.content
        kind = "prompts" if source.get("kind") == "user" else _USER_KINDS.get(str(source.get("plugin")), "notices")
    elif isinstance(event, ev.AssistantMessage):
        content, kind = event.message.get("content") or [], "answers"
    elif isinstance(event, ev.ToolResult):
        content, kind = event.message.get("content") or [], "results"
    else:
        return parts
    add(kind, 1, OVERHEAD)
    for block in content:
        own = _BLOCK_KINDS.get(str(block.get("type")))
        if own is None:
            add(kind, 0, _tokens(block))
        else:
            add(own, 1, _tokens(block))
    return parts


def _tokens(block: Any) -> int:
    try:
        return estimate_block(block)
    except (KeyError, TypeError, AttributeError):  # a block of a shape we do not know
        return reported(json.dumps(block, ensure_ascii=False, default=str)) + OVERHEAD


def _spilled(event: ev.Event) -> int | None:
    """Bytes of the whole text of a result that was spilled, None for one that was not."""
    spill = (event.meta or {}).get("spill") if isinstance(event, ev.ToolResult) else None
    size = spill.get("bytes") if isinstance(spill, dict) else None
    return size if isinstance(size, int) else None


def _input_of(usage: Any) -> int | None:
    if not isinstance(usage, dict) or usage.get("estimated") is True:
        return None
    parts = [usage.get(BUCKETS[name]) for name in INPUT_BUCKETS]
    return None if parts[0] is None else sum(part or 0 for part in parts)


def context_lines(context: JsonObject) -> Iterator[str]:
    """The same for people: what it adds up to, then a row for each part."""
    window, occupancy, reserved = context["window"], context["occupancy"], context["reserved"]
    used = occupancy if occupancy is not None else context["estimate"]
    full = f"{used} of {window} tokens ({used / window:.0%})" if window else f"{used} tokens"
    counted_by = "as the provider counted them" if occupancy is not None else "estimated"
    yield f"step {context['step']}, turn {context['turn']}, model {context['model'] or 'unknown'}"
    yield f"  {full}, {counted_by}; {'nothing' if reserved is None else reserved} reserved for the answer"
    rows = [
        ("system", "", context["system"]["tokens"]),
        ("tools", context["tools"]["count"], context["tools"]["tokens"]),
    ]
    rows += [(row["kind"], row["count"], row["tokens"]) for row in context["messages"]]
    rows.append(("together", "", context["estimate"]))
    yield "  part            number    tokens, estimated"
    for name, count, tokens in rows:
        yield f"  {name:<12}{count:>10}{tokens:>10}"
    spilled, pruned = context["spilled"], context["pruned"]
    yield (
        f"  spilled: {counted(spilled['count'], 'result')}, {spilled['tokens']} tokens here, "
        f"{counted(spilled['bytes'], 'byte')} in files"
    )
    yield f"  pruned: {counted(pruned['count'], 'result')}, {pruned['tokens']} tokens here, {pruned['freed']} freed"
    yield f"  folded into summaries: {counted(context['folded'], 'message')}"
