"""The scripted provider in a long session: each request is read from where the last one ended."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from runner.cancellation import Cancellation
from runner.errors import ProviderError
from runner.providers.scripted import ScriptedProvider
from runner.session.tokens import estimate_usage

HEADER: Any = {
    "config": {"provider": "scripted", "model": "m"},
    "system": "You work.",
    "tools": [{"name": "shell", "description": "Runs.", "parameters": {"type": "object"}}],
}


def message(text: str, *, result: bool = False) -> Any:
    """A message with a text, or with a tool result of that text."""
    block: Any = {"type": "text", "text": text}
    if result:
        block = {"type": "tool-result", "toolCallId": "c", "content": [block], "isError": False}
    return {"role": "user", "content": [block], "source": {"kind": "x"}, "id": "i"}


def answer(provider: ScriptedProvider, messages: list[Any]) -> list[Any]:
    """The chunks of one request."""
    body = provider.dialect.whole(HEADER, messages)
    return list(provider.stream(body, cancellation=Cancellation()))


def test_estimates_of_a_growing_conversation_are_those_of_each_whole_request() -> None:
    """Grown by none, one or several messages, cut by a summary, and asked again."""
    provider = ScriptedProvider([{"text": f"answer {number}"} for number in range(7)])
    grown = [message("Go."), message("größer " * 9), message("out", result=True)]
    conversations = [
        grown[:1],
        grown,
        grown,
        [*grown, message("]}, "), message("x")],
        [message("a summary")],
        [message("a summary"), message("y", result=True)],
        [message("a summary, longer")],
    ]

    for messages in conversations:
        chunks = answer(provider, messages)
        usage = next(chunk["usage"] for chunk in chunks if chunk["type"] == "usage")
        block = next(chunk["block"] for chunk in chunks if chunk["type"] == "block-end")
        assert usage == estimate_usage(HEADER, messages, [block])


def test_what_was_read_is_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that goes on from the last one costs what is new in it."""
    provider = ScriptedProvider([{"text": "x"}] * 3)
    history = [message("x" * 100_000)]
    answer(provider, history)
    read: list[bytes] = []
    loads = orjson.loads

    def watched(data: bytes) -> Any:
        read.append(data)
        return loads(data)

    monkeypatch.setattr(orjson, "loads", watched)

    answer(provider, [*history, message("new")])

    assert 0 < sum(map(len, read)) < 500


def test_the_last_tool_result_is_that_of_the_request_at_hand() -> None:
    """Also when nothing was read for a while, and when a summary took the results away."""
    expect = {"lastToolResultContains": "two"}
    responses = [{"text": "a", "usage": {"input": 1}}, {"text": "b", "expect": expect}, {"text": "c", "expect": expect}]
    provider = ScriptedProvider(responses)
    history = [message("Go."), message("one", result=True)]
    answer(provider, history)
    answer(provider, [*history, message("two", result=True), message("and on")])

    with pytest.raises(ProviderError, match="there is none"):
        answer(provider, [message("a summary")])
