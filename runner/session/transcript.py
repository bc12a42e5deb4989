"""A plain, readable transcript of a session.

Pure: events in, lines out, one at a time. Invariants: nothing in a log can move the reader's cursor,
change colours, reorder text or command a CI system, since all that is shown as escapes; long content is
cut with a note. Reads all event types; no effect on the prefix cache.
"""

from __future__ import annotations

import functools
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import orjson

from runner.neutral import neutral_line, neutral_text
from runner.session import events as ev
from runner.session.codec import ChunkRow

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from runner.messages import JsonObject, Usage
    from runner.session.events import Event

CUT = 2000
"""Characters of one content that are shown unless all are asked for."""

_SUMMARY_CUT = 200
_MARGIN = " " * 8 + "| "
_NEXT_LINE = "\n" + _MARGIN


def transcript(header: JsonObject, events: Iterable[Event | ChunkRow], *, full: bool = False) -> Iterator[str]:
    """Yield the lines of the transcript, without newlines; the arguments are those of ``transcript_parts``."""
    for part in transcript_parts(header, events, full=full):
        yield from part.split("\n")


def transcript_parts(header: JsonObject, events: Iterable[Event | ChunkRow], *, full: bool = False) -> Iterator[str]:
    """Yield the transcript in parts of whole lines, without the newline behind the last.

    Args:
        header: The header of the log.
        events: The events, packed or not; runs of ``assistant/chunk`` become one line.
        full: Show long content whole.
    """
    yield neutral_line(_heading(header))
    first, count = 0, 0  # of the chunks that were not shown yet
    for event in events:
        if isinstance(event, (ChunkRow, ev.AssistantChunk)):
            first = first if count else event.seq
            count += event.count if isinstance(event, ChunkRow) else 1
            continue
        if count:
            yield _chunk_line(first, count)
            count = 0
        yield _part_of(event, full=full)
    if count:
        yield _chunk_line(first, count)


def _heading(header: JsonObject) -> str:
    parts = [f"session {header['id']}"]
    if isinstance(header.get("createdAt"), (int, float)):
        parts.append(_moment(header["createdAt"], "%Y-%m-%d %H:%M:%S UTC"))
    if header.get("cwd"):
        parts.append(header["cwd"])
    if header.get("parentSession"):
        parts.append(f"child of {header['parentSession']}")
    return ", ".join(parts)


def _moment(milliseconds: float, form: str) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).strftime(form)
    except (ValueError, OverflowError, OSError):
        return str(milliseconds)


def _clock(milliseconds: float) -> str:
    return _clock_of_second(milliseconds // 1000) or str(milliseconds)


@functools.lru_cache(maxsize=64)
def _clock_of_second(second: float) -> str | None:
    shown = _moment(second * 1000, "%H:%M:%S")
    return shown if ":" in shown else None


def _chunk_line(first: int, count: int) -> str:
    return f"{first:>7}  {'assistant/chunk':<20}  {count} chunks"


def _part_of(event: Event, *, full: bool) -> str:
    summary, content = _describe(event)
    name = event.record()["type"] if isinstance(event, (ev.UnknownEvent, ev.TeamEvent)) else event.TYPE
    shown = neutral_line(f"{event.seq:>7}  {name:<20}  {_clock(event.time)}  {_cut(summary, full=full)}".rstrip())
    for text in content:
        rest = 0 if full else len(text) - CUT
        shown += _NEXT_LINE + neutral_text(text[:CUT] if rest > 0 else text).replace("\n", _NEXT_LINE)
        if rest > 0:
            shown += f"{_NEXT_LINE}[{rest} more characters; --full shows them]"
    return shown


def _cut(text: str, *, full: bool) -> str:
    return text if full or len(text) <= _SUMMARY_CUT else f"{text[:_SUMMARY_CUT]} [...]"


def _describe(event: Event) -> tuple[str, list[str]]:
    """What stands on the event's own line, and the content below it."""
    describe = _DESCRIBE.get(type(event))
    if describe is not None:
        return describe(event)
    data = event.data()
    return (orjson.dumps(data).decode() if data else ""), []


def _user(event: ev.UserMessage) -> tuple[str, list[str]]:
    source = event.source.get("plugin") or event.source.get("kind")
    return f"{source}{_replaced(event)}", _contents(event.content)


def _assistant(event: ev.AssistantMessage) -> tuple[str, list[str]]:
    parts = [f"step {event.step}"]
    if event.usage is not None:
        parts.append(_usage(event.usage))
    if event.interrupted:
        parts.append("interrupted")
    return ", ".join(parts), _contents(event.message["content"])


def _result(event: ev.ToolResult) -> tuple[str, list[str]]:
    block: Any = next((block for block in event.message["content"] if block["type"] == "tool-result"), {})
    parts = [str(block.get("toolCallId")), "error" if block.get("isError") else "ok"]
    if event.error:
        parts.append(str(event.error.get("code")))
    meta = event.meta or {}
    if meta.get("exitCode") is not None:
        parts.append(f"exit {meta['exitCode']}")
    if meta.get("durationMs") is not None:
        parts.append(f"{meta['durationMs']} ms")
    return ", ".join(parts) + _replaced(event), _contents(event.message["content"])


def _replaced(event: Event) -> str:
    span = event.surface_op
    return f", replaces {span.get('start')} to {span.get('end')}" if isinstance(span, dict) else ""


def _usage(usage: Usage) -> str:
    names = {
        "inputTokens": "in",
        "cacheReadTokens": "cached",
        "cacheWriteTokens": "cache write",
        "outputTokens": "out",
    }
    values: Any = usage
    return ", ".join(f"{values[name]} {short}" for name, short in names.items() if values.get(name))


def _contents(blocks: list[Any]) -> list[str]:
    texts = []
    for block in blocks:
        if block["type"] == "text":
            texts.append(block["text"])
        elif block["type"] == "reasoning":
            texts.append(f"(reasoning) {block['text']}")
        elif block["type"] == "tool-call":
            texts.append(f"{block['name']} {block['arguments']} [{block['id']}]")
        elif block["type"] == "tool-result":
            texts += _contents(block["content"])
        else:
            texts.append(orjson.dumps(block).decode())
    return texts


def _call(event: ev.ToolCall) -> tuple[str, list[str]]:
    return f"{event.name} {event.arguments} [{event.call_id}]", []


def _request_header(event: ev.RequestHeaderEvent) -> tuple[str, list[str]]:
    config = _object(event.header.get("config"))
    tools: Any = event.header.get("tools")
    names = ", ".join(str(_object(tool).get("name")) for tool in (tools if isinstance(tools, list) else []))
    return f"{event.reason}: {config.get('provider')}/{config.get('model')}, tools: {names}", []


def _object(value: object) -> JsonObject:
    """A value of a field that is not checked on reading, as an object."""
    return value if isinstance(value, dict) else {}


def _inbox(event: ev.InboxSpliced) -> tuple[str, list[str]]:
    return f"{event.target}: {len(event.inserted)} in, {event.removed_count or 0} out", []


def _asked(event: ev.ApprovalAsked) -> tuple[str, list[str]]:
    wants = event.command or event.reason or ""
    return f"{event.tool_name} [{event.call_id}] {wants}", []


def _decided(event: ev.ApprovalDecided) -> tuple[str, list[str]]:
    return event.outcome + (f" by rule {event.rule}" if event.rule else ""), []


def _summary(event: ev.CompactionSummary) -> tuple[str, list[str]]:
    usage = f", {_usage(event.usage)}" if event.usage else ""
    texts = [block.get("text") if isinstance(block, dict) else block for block in event.summary]
    return f"for {len(event.shadowed_seqs)} messages{usage}", [str(text) for text in texts]


_DESCRIBE: dict[type[Event], Callable[[Any], tuple[str, list[str]]]] = {
    ev.UserMessage: _user,
    ev.AssistantMessage: _assistant,
    ev.ToolResult: _result,
    ev.ToolCall: _call,
    ev.RequestHeaderEvent: _request_header,
    ev.InboxSpliced: _inbox,
    ev.ApprovalAsked: _asked,
    ev.ApprovalDecided: _decided,
    ev.CompactionSummary: _summary,
}
