"""What every provider promises, one body of tests for all of them."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import ErrorCode, ProviderError
from runner.providers.assemble import ResponseAssembler
from runner.providers.base import ModelSpec
from runner.providers.registry import build_provider, dialects
from runner.testing.model_server import End, ModelServer, Reply, chat_reply, json_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runner.messages import Chunk
    from runner.providers.base import Provider

HEADER: Any = {
    "config": {"provider": "x", "model": "m", "maxTokens": 100},
    "system": "You work.",
    "tools": [{"name": "shell", "description": "Runs.", "parameters": {"type": "object"}}],
}
PROMPT: Any = {"role": "user", "content": [{"type": "text", "text": "Go."}], "source": {"kind": "user"}, "id": "u"}


@dataclass(frozen=True)
class Said:
    """An answer, independent of the provider."""

    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, str, str], ...] = ()
    usage: tuple[int, int, int] | None = None
    finish: str | None = None
    status: int | None = None
    slow: bool = False


def as_reply(said: Said) -> Reply:
    """What a Chat Completions server would send."""
    if said.status is not None:
        return json_reply(said.status, {"error": {"message": "scripted"}}, {"retry-after": "2"})
    if said.slow:
        return (End.HANG,)
    usage = None
    if said.usage is not None:
        fresh, cached, output = said.usage
        usage = {
            "prompt_tokens": fresh + cached,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
    finish = {"filter": "content_filter"}.get(said.finish or "", said.finish)
    return chat_reply(said.text, reasoning=said.reasoning, calls=said.calls, finish=finish, usage=usage)


def as_response(said: Said) -> dict[str, Any]:
    """What a script would hold."""
    if said.status is not None:
        return {"error": {"status": said.status, "retryAfter": 2}}
    usage = None
    if said.usage is not None:
        usage = dict(zip(("input", "cacheRead", "output"), said.usage, strict=True))
    calls = [{"tool": name, "args": arguments, "id": call_id} for call_id, name, arguments in said.calls]
    return {
        "text": said.text,
        "reasoning": said.reasoning,
        "calls": calls,
        "usage": usage,
        "finish": said.finish,
        "delay": 60 if said.slow else 0,
    }


@pytest.fixture(params=["openai", "scripted"])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[list[Said]], Provider]]:
    """Builds the provider under test from the answers it is to give."""
    opened = ExitStack()

    def build(answers: list[Said]) -> Provider:
        if request.param == "scripted":
            spec = ModelSpec("scripted", "m")
            return build_provider(spec, environ={}, script=[as_response(said) for said in answers])
        server = opened.enter_context(ModelServer([as_reply(said) for said in answers]))
        spec = ModelSpec("openai", "m", base_url=server.url, first_token=10, idle=10)
        provider = build_provider(spec, environ={})
        opened.callback(provider.close)
        return provider

    with opened:
        yield build


def chunks_of(provider: Provider, cancellation: Cancellation | None = None) -> list[Chunk]:
    """One answer."""
    body = provider.dialect.whole(HEADER, [PROMPT])
    return list(provider.stream(body, cancellation=cancellation or Cancellation()))


def test_a_whole_answer_has_content_usage_and_a_finish_at_its_end(make: Callable[[list[Said]], Provider]) -> None:
    """Reasoning, text, calls: blocks in order, each opened, filled and closed."""
    said = Said("I look.", "Hm.", (("a", "shell", '{"command":"ls"}'), ("b", "shell", "{}")), (40, 60, 7))
    chunks = chunks_of(make([said]))
    answer = ResponseAssembler()
    for chunk in chunks:
        answer.add(chunk)

    assert answer.content() == [
        {"type": "reasoning", "text": "Hm."},
        {"type": "text", "text": "I look."},
        {"type": "tool-call", "id": "a", "name": "shell", "arguments": '{"command":"ls"}'},
        {"type": "tool-call", "id": "b", "name": "shell", "arguments": "{}"},
    ]
    assert answer.usage == {"inputTokens": 40, "cacheReadTokens": 60, "outputTokens": 7}
    assert answer.finish == "tool-calls"
    assert [chunk["type"] for chunk in chunks].count("finish") == 1
    assert chunks[-1]["type"] == "finish"


def test_deltas_add_up_to_the_block_that_closes_them(make: Callable[[list[Said]], Provider]) -> None:
    """A reader may use either."""
    said = Said("Some words that are long enough for several pieces.", "Likewise.", (("a", "shell", '{"x":"yyy"}'),))
    joined: dict[int, str] = {}
    for chunk in chunks_of(make([said])):
        if chunk["type"] == "block-start":
            joined[chunk["index"]] = ""
        elif chunk["type"].endswith("-delta"):
            joined[chunk["index"]] += chunk["text"] if "text" in chunk else chunk["argumentsDelta"]
        elif chunk["type"] == "block-end":
            block = chunk["block"]
            assert joined.pop(chunk["index"]) == block.get("text", block.get("arguments"))

    assert joined == {}


@pytest.mark.parametrize("finish", ["stop", "length", "filter"])
def test_the_way_an_answer_ends_is_one_of_four_words(make: Callable[[list[Said]], Provider], finish: str) -> None:
    """The fourth is tool-calls."""
    assert chunks_of(make([Said("x", finish=finish)]))[-1] == {"type": "finish", "reason": {"kind": finish}}


def test_an_empty_answer_is_an_answer(make: Callable[[list[Said]], Provider]) -> None:
    """No blocks, but a finish."""
    chunks = chunks_of(make([Said()]))

    assert [chunk["type"] for chunk in chunks if chunk["type"] != "usage"] == ["finish"]


@pytest.mark.parametrize(
    ("status", "code", "retryable"),
    [
        (401, ErrorCode.PROVIDER_AUTH, False),
        (402, ErrorCode.PROVIDER_QUOTA, False),
        (429, ErrorCode.PROVIDER_QUOTA, True),
        (500, ErrorCode.PROVIDER_FAILED, True),
        (404, ErrorCode.PROVIDER_FAILED, False),
    ],
)
def test_a_failure_is_a_provider_error_and_the_next_request_is_a_new_one(
    make: Callable[[list[Said]], Provider], status: int, code: ErrorCode, retryable: bool
) -> None:
    """Nothing is retried by the provider itself."""
    provider = make([Said(status=status), Said("x")])
    with pytest.raises(ProviderError) as caught:
        chunks_of(provider)

    assert (caught.value.code, caught.value.retryable, caught.value.status) == (code, retryable, status)
    assert caught.value.retry_after == (2.0 if retryable else None) or not retryable
    assert chunks_of(provider)[-1]["type"] == "finish"


def test_a_cancellation_ends_the_answer_early_without_finish_and_error(make: Callable[[list[Said]], Provider]) -> None:
    """At once, wherever the provider waits."""
    cancellation = Cancellation()
    timer = threading.Timer(0.2, cancellation.cancel, ["test"])
    timer.start()
    began = time.monotonic()

    assert chunks_of(make([Said("x", slow=True)]), cancellation) == []
    assert time.monotonic() - began < 5
    timer.join()


def test_the_dialect_is_one_that_a_log_can_name(make: Callable[[list[Said]], Provider]) -> None:
    """The same bytes come out of the one found by its name."""
    provider = make([])
    found = dialects()[provider.dialect.name]

    assert found.whole(HEADER, [PROMPT]) == provider.dialect.whole(HEADER, [PROMPT])


def test_closing_may_be_repeated(make: Callable[[list[Said]], Provider]) -> None:
    """Also after an answer."""
    provider = make([Said("x")])
    chunks_of(provider)
    provider.close()
    provider.close()
