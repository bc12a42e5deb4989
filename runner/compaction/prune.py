"""Prune: older tool results are cut to their head and tail when the window fills.

Moves the cached prefix from the first pruned result on, so it prunes just enough, oldest first.
Writes ``compaction/prune`` and the replacing ``tool/result``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.session.events import CompactionPrune, ToolResult
from runner.session.tokens import cautious, estimate_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runner.messages import Block, ImageBlock, Message, TextBlock
    from runner.session.events import Event


def _text_length(event: ToolResult) -> int:
    return sum(
        len(inner["text"])
        for block in event.message["content"]
        if block["type"] == "tool-result"
        for inner in block["content"]
        if inner["type"] == "text"
    )


def cut_text(text: str, head: int, tail: int) -> str:
    """``text`` with everything but ``head`` and ``tail`` code points replaced by a line that says so."""
    left_out = len(text) - head - tail
    if left_out <= 0:
        return text
    end = text[len(text) - tail :] if tail else ""
    return f"{text[:head]}\n[{left_out} characters pruned to save context]\n{end}"


def first_line(text: str) -> str:
    """Only the first line of ``text``, with a note when there was more."""
    line, newline, rest = text.partition("\n")
    return cut_text(line, 200, 0) if not newline else f"{line[:200]}\n[{len(rest)} characters pruned to save context]"


def _rewritten(event: ToolResult, cut: Callable[[str], str]) -> Message:
    """The message of ``event`` with all text of its result joined and cut."""
    content: list[Block] = []
    for block in event.message["content"]:
        if block["type"] != "tool-result":
            content.append(block)
            continue
        text = "\n".join(inner["text"] for inner in block["content"] if inner["type"] == "text")
        kept: list[TextBlock | ImageBlock] = [{"type": "text", "text": cut(text)}]
        kept += [inner for inner in block["content"] if inner["type"] != "text"]
        content.append(
            {"type": "tool-result", "toolCallId": block["toolCallId"], "content": kept, "isError": block["isError"]}
        )
    return {**event.message, "content": content}


def prune_candidates(nodes: Sequence[Event], *, over: int, before_step: int) -> Iterator[ToolResult]:
    """Tool results over ``over`` code points of steps before ``before_step``, oldest first."""
    for node in nodes:
        if isinstance(node, ToolResult) and node.step < before_step and _text_length(node) > over:
            yield node


def prune_result(event: ToolResult, cut: Callable[[str], str], append: Callable[[Event], object]) -> int:
    """Replace one result by its cut form; returns the estimated tokens that are saved.

    Nothing is written when the cut form is not shorter.
    """
    message = _rewritten(event, cut)
    saved = estimate_message(event.message, cautious) - estimate_message(message, cautious)
    if saved <= 0:
        return 0
    span = {"start": event.seq, "end": event.seq}
    append(
        CompactionPrune(
            shadowed_range=span,
            shadowed_seqs=[event.seq],
            shadowed_token_count=estimate_message(event.message, cautious),
        )
    )
    append(
        ToolResult(
            turn=event.turn,
            step=event.step,
            message=message,
            error=event.error,
            meta=event.meta,
            source_event_seqs=[event.seq],
            surface_op={"op": "replace", **span},
        )
    )
    return saved
