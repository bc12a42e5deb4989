"""The surface: the ordered list of message nodes, folded from ``append`` and ``replace``.

Pure. Invariants: a node is named by the seq of its event; a replace takes a contiguous span by
position and stands where the span stood. The same rules are checked when an event is written and
when a log is read. Effect on the prefix cache: an append extends the prefix, a replace moves it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from runner.errors import LogError
from runner.session.events import AssistantMessage, ToolResult, UserMessage

if TYPE_CHECKING:
    from runner.session.events import Event

_BLOCK_FIELDS = {
    "text": ("text",),
    "reasoning": ("text",),
    "tool-call": ("id", "name", "arguments"),
    "tool-result": ("toolCallId",),
}
"""Fields of a block that must be strings."""

_INTEGER = frozenset((int,))


class Node(NamedTuple):
    """One message of the conversation: the seq of its event, its type, a hash of what a replace must keep."""

    seq: int
    type: str
    fixed: int


class Span(NamedTuple):
    """Positions ``start`` to ``end`` (not included) that an event replaced."""

    start: int
    end: int


class Surface:
    """The nodes after the events applied so far."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self._seqs: list[int] = []  # of the nodes; a list of numbers is searched fast

    def apply(self, event: Event) -> Span | None:
        """Fold one event; events that are no message change nothing.

        Returns:
            The span that a replace took, in positions before the change; None otherwise.

        Raises:
            LogError: The event breaks a surface rule. Nothing was changed.
        """
        if not event.SURFACE:
            if event.surface_op is not None or event.source_event_seqs is not None:
                raise _broken(event, "only a message may carry surfaceOp or sourceEventSeqs")
            return None
        check_message(event)
        _check_sources(event)
        node = Node(event.seq, event.TYPE, _fixed(event))
        if event.surface_op == "append":
            self.nodes.append(node)
            self._seqs.append(event.seq)
            return None
        span = self._span(event)
        shadowed = self.nodes[span.start : span.end]
        missing = {old.seq for old in shadowed}.difference(event.source_event_seqs or ())
        if missing:
            raise _broken(event, f"sourceEventSeqs does not name the replaced node {min(missing)}")
        if isinstance(event, ToolResult) and (len(shadowed) != 1 or shadowed[0].fixed != node.fixed):
            raise _broken(event, "a replaced tool result must be one tool result and may change only its content")
        self.nodes[span.start : span.end] = [node]
        self._seqs[span.start : span.end] = [event.seq]
        return span

    def _span(self, event: Event) -> Span:
        operation = event.surface_op
        if not isinstance(operation, dict) or operation.get("op") != "replace":
            raise _broken(event, "surfaceOp is neither append nor a replace")
        start, end = self._position(operation.get("start")), self._position(operation.get("end"))
        if start is None or end is None or start > end:
            raise _broken(event, "the replaced span is not on the surface")
        return Span(start, end + 1)

    def _position(self, seq: object) -> int | None:
        return self._seqs.index(seq) if seq in self._seqs else None


def check_message(event: Event) -> None:
    """Check the shape of a message event's content, so that readers may rely on it.

    Raises:
        LogError: A message has no role, content or source of the right type, or a block is malformed.
    """
    content: Any
    if isinstance(event, UserMessage):
        content, source, role = event.content, event.source, event.role
    elif isinstance(event, (AssistantMessage, ToolResult)):
        message = event.message
        content, source, role = message.get("content"), message.get("source"), message.get("role")
    else:
        return
    if role not in ("user", "assistant") or not isinstance(content, list) or not isinstance(source, dict):
        raise _broken(event, "the message has no valid role, content or source")
    _check_blocks(event, content)


def _check_blocks(event: Event, blocks: list[Any]) -> None:
    for block in blocks:
        if not isinstance(block, dict) or not isinstance(block.get("type"), str):
            raise _broken(event, "a content block is no object with a type")
        for field in _BLOCK_FIELDS.get(block["type"], ()):
            if not isinstance(block.get(field), str):
                raise _broken(event, f"a {block['type']} block has no text in {field}")
        if block["type"] == "tool-result":
            if not isinstance(block.get("content"), list):
                raise _broken(event, "a tool-result block has no content")
            _check_blocks(event, block["content"])


def _check_sources(event: Event) -> None:
    seqs: Any = event.source_event_seqs
    if seqs is None:
        if isinstance(event, UserMessage) and event.surface_op == "append":
            return
        raise _broken(event, "sourceEventSeqs is missing")
    if isinstance(event, UserMessage) and event.surface_op == "append":
        raise _broken(event, "sourceEventSeqs is not allowed on an appended user message")
    if not isinstance(seqs, list) or not _INTEGER.issuperset(map(type, seqs)):
        raise _broken(event, "sourceEventSeqs is no list of integers")
    if not seqs and not isinstance(event, AssistantMessage):
        raise _broken(event, "sourceEventSeqs is empty")
    ordered = sorted(seqs)
    if ordered and (ordered[0] < 0 or ordered[-1] >= event.seq):
        raise _broken(event, "sourceEventSeqs names an event that is not earlier")
    if len(set(seqs)) != len(seqs):
        raise _broken(event, "sourceEventSeqs names an event twice")


def _fixed(event: Event) -> int:
    """A hash of what a replace of a tool result may not change; a long session has many results."""
    if not isinstance(event, ToolResult):
        return 0
    message = event.message
    results = tuple(
        (block["toolCallId"], block.get("isError")) for block in message["content"] if block["type"] == "tool-result"
    )
    kept = event.turn, event.step, message.get("id"), message["source"].get("callId"), results
    try:
        return hash(kept)
    except TypeError:  # a foreign log may hold lists where ours have text
        return hash(repr(kept))


def _broken(event: Event, what: str) -> LogError:
    return LogError(f"event {event.seq} ({event.record()['type']}): {what}")
