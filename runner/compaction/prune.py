"""Prune: older tool results are cut to their head and tail when the window fills.

Invariants: a cut result is shorter than it was; of all sets of cuts that free enough, one of the fewest is taken.
Writes ``compaction/prune`` and the replacing ``tool/result``.
Prefix cache: moves the prefix from the first pruned result on, hence few cuts and no more than needed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from runner.session.events import CompactionPrune, ToolResult
from runner.session.tokens import cautious, estimate_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from runner.messages import Block, ImageBlock, Message, TextBlock
    from runner.session.events import Event


class Cut(NamedTuple):
    """A result that may be cut: its event, the message that would stand for it, the tokens that frees."""

    event: ToolResult
    message: Message
    saved: int


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


def possible_cuts(nodes: Sequence[Event], cut: Callable[[str], str], *, over: int, before_step: int) -> Iterator[Cut]:
    """Cuts of results over ``over`` code points of steps before ``before_step`` that free something, oldest first."""
    for node in nodes:
        if isinstance(node, ToolResult) and node.step < before_step and _text_length(node) > over:
            message = _rewritten(node, cut)
            saved = estimate_message(node.message, cautious) - estimate_message(message, cautious)
            if saved > 0:
                yield Cut(node, message, saved)


def fewest(cuts: Sequence[Cut], needed: int) -> list[Cut]:
    """The fewest of ``cuts`` that free ``needed`` tokens, all of them if that is not enough; in their own order.

    The last one taken is the smallest that will do, and of equal ones the older is taken.
    """
    left = sorted(cuts, key=lambda each: (-each.saved, each.event.seq))
    taken: list[Cut] = []
    while left and needed > 0:
        last = [each for each in left if each.saved >= needed]
        best = min(last, key=lambda each: (each.saved, each.event.seq)) if last else left[0]
        left.remove(best)
        taken.append(best)
        needed -= best.saved
    return sorted(taken, key=lambda each: each.event.seq)


def apply_cut(cut: Cut, append: Callable[[Event], object]) -> None:
    """Put the cut form in place of the result."""
    event = cut.event
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
            message=cut.message,
            error=event.error,
            meta=event.meta,
            source_event_seqs=[event.seq],
            surface_op={"op": "replace", **span},
        )
    )


def _text_length(event: ToolResult) -> int:
    return sum(
        len(inner["text"])
        for block in event.message["content"]
        if block["type"] == "tool-result"
        for inner in block["content"]
        if inner["type"] == "text"
    )


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
