"""Chunks fold into the content of a message."""

from __future__ import annotations

from typing import Any

import pytest

from runner.errors import InternalError
from runner.providers.assemble import ResponseAssembler


def start(index: int, kind: str) -> Any:
    """A block-start."""
    return {"type": "block-start", "index": index, "blockType": kind}


def text(index: int, value: str, kind: str = "text") -> Any:
    """A delta of text or reasoning."""
    return {"type": f"{kind}-delta", "index": index, "text": value}


def arguments(index: int, value: str) -> Any:
    """A delta of a call."""
    return {"type": "tool-call-delta", "index": index, "id": "a", "name": "shell", "argumentsDelta": value}


def folded(*chunks: Any) -> ResponseAssembler:
    """All chunks taken."""
    answer = ResponseAssembler()
    for chunk in chunks:
        answer.add(chunk)
    return answer


def test_blocks_stand_in_the_order_of_their_indexes_whatever_came_first() -> None:
    """Deltas of several open blocks may mix."""
    answer = folded(
        start(1, "tool-call"),
        start(0, "text"),
        arguments(1, '{"a"'),
        text(0, "He"),
        arguments(1, ":1}"),
        text(0, "llo"),
    )

    assert answer.content() == [
        {"type": "text", "text": "Hello"},
        {"type": "tool-call", "id": "a", "name": "shell", "arguments": '{"a":1}'},
    ]


def test_the_block_of_a_block_end_is_the_block() -> None:
    """It may hold more than its deltas, a signature for example."""
    block = {"type": "reasoning", "text": "Hm.", "signature": "s"}
    answer = folded(
        start(0, "reasoning"), text(0, "Hm.", "reasoning"), {"type": "block-end", "index": 0, "block": block}
    )

    assert answer.content() == [block]


def test_an_answer_is_whole_when_its_finish_has_come() -> None:
    """Usage and finish are kept; before that they are unknown."""
    answer = folded(start(0, "text"), text(0, "Hi"))
    assert (answer.usage, answer.finish) == (None, None)

    answer.add({"type": "usage", "usage": {"inputTokens": 1, "outputTokens": 2}})
    answer.add({"type": "usage", "usage": {"inputTokens": 1, "outputTokens": 3}})
    answer.add({"type": "finish", "reason": {"kind": "stop"}})
    assert (answer.usage, answer.finish) == ({"inputTokens": 1, "outputTokens": 3}, "stop")


def test_of_an_answer_cut_in_the_middle_text_and_reasoning_stay_and_calls_go() -> None:
    """A call that was not dispatched never happened; empty blocks say nothing."""
    answer = folded(
        start(0, "reasoning"),
        text(0, "I think", "reasoning"),
        start(1, "text"),
        start(2, "text"),
        text(2, "Half a sen"),
        start(3, "tool-call"),
        arguments(3, '{"command": "rm'),
    )

    assert answer.partial_content() == [
        {"type": "reasoning", "text": "I think"},
        {"type": "text", "text": "Half a sen"},
    ]


@pytest.mark.parametrize(
    "chunks",
    [
        [text(0, "no block")],
        [start(0, "text"), text(0, "wrong kind", "reasoning")],
        [start(0, "text"), start(0, "text")],
        [start(0, "text"), {"type": "block-end", "index": 0, "block": {"type": "text", "text": ""}}, text(0, "late")],
        [{"type": "surprise"}],
    ],
)
def test_chunks_that_make_no_answer_are_our_bug(chunks: list[Any]) -> None:
    """Adapters deliver well-formed chunks."""
    with pytest.raises(InternalError):
        folded(*chunks)
