"""What the other side says, answer or failure, enters the session without secrets; and no shape of it is our bug."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from runner.agent.hook import StepStarting
from runner.artifacts.stream import StreamJson
from runner.cancellation import Cancellation
from runner.errors import ErrorCode, ProviderError
from runner.hooks.repeat import RepeatHook
from runner.providers.base import ModelSpec
from runner.providers.openai_chat import OpenAIChatProvider
from runner.providers.redacting import RedactingProvider
from runner.redaction import Redactor
from runner.session import events as ev
from runner.testing.model_server import ModelServer, Reply, http_reply

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.messages import Chunk

KEY = "sk-0123456789abcdef"  # a made-up key
DEEP = 100_000


class Said:
    """A provider that gives these chunks, then fails if it has an error."""

    name = "said"
    dialect: Any = None

    def __init__(self, *chunks: Chunk, error: ProviderError | None = None) -> None:
        self._chunks = chunks
        self._error = error

    def stream(self, _body: bytes, *, cancellation: Cancellation) -> Iterator[Chunk]:  # the interface
        """The chunks."""
        yield from self._chunks
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Nothing to close."""


def heard(provider: Any) -> list[Chunk]:
    """What comes through."""
    redacting = RedactingProvider(provider, Redactor({"KEY": KEY}), report=lambda _: None)
    return list(redacting.stream(b"{}", cancellation=Cancellation()))


def ask(reply: Reply) -> list[Chunk]:
    """One request to a real endpoint, through the redactor."""
    with ModelServer([reply]) as server:
        spec = ModelSpec("openai", "mock", base_url=server.url, api_key_env="MY_KEY", first_token=10, idle=10)
        provider = OpenAIChatProvider(spec, api_key=KEY, new_id=str)
        try:
            return heard(provider)
        finally:
            provider.close()


def test_ids_and_names_of_calls_hold_no_secret() -> None:
    """In the pieces of a call as in the whole one."""
    call = {"type": "tool-call", "id": f"i-{KEY}", "name": f"n-{KEY}", "arguments": "{}"}
    chunks = heard(
        Said(
            {"type": "block-start", "index": 0, "blockType": "tool-call"},
            {"type": "tool-call-delta", "index": 0, "id": call["id"], "name": call["name"], "argumentsDelta": ""},
            {"type": "tool-call-delta", "index": 0, "id": call["id"], "name": call["name"], "argumentsDelta": "{}"},
            {"type": "block-end", "index": 0, "block": call},
            {"type": "finish", "reason": {"kind": KEY}},
        )
    )

    assert len(chunks) == 5
    assert KEY not in json.dumps(chunks)
    assert [chunk["name"] for chunk in chunks[1:3]] == ["n-[redacted KEY]"] * 2


def test_nothing_of_an_error_holds_a_secret() -> None:
    """Message, hint and kind; what decides about retries stays."""
    encoded = KEY.encode().hex()
    error = ProviderError(f"no {KEY}", hint=f"try {encoded}", kind=KEY, retryable=True, status=503, retry_after=2.5)
    with pytest.raises(ProviderError) as caught:
        heard(Said(error=error))

    got = caught.value
    assert (got.message, got.hint, got.kind) == ("no [redacted KEY]", "try [redacted KEY]", "[redacted KEY]")
    assert (got.code, got.retryable, got.status, got.retry_after) == (ErrorCode.PROVIDER_FAILED, True, 503, 2.5)
    assert got.details == {"status": 503, "kind": "[redacted KEY]"}


@pytest.mark.parametrize(
    ("location", "hint"),
    [
        (f"http://h.example/{KEY}/x?key={KEY}", " (http://h.example/[redacted KEY]/x)"),
        (f"https://u:{KEY}@h.example/v1#{KEY}", " (https://h.example/v1)"),
        (f"/{KEY}", ""),
        ("http://[", ""),
        ("http://h/" + "x" * 10_000, ""),
    ],
)
def test_where_a_redirect_leads_is_said_without_what_was_sent(location: str, hint: str) -> None:
    """Neither credentials nor the query, and no key in the path."""
    with pytest.raises(ProviderError) as caught:
        ask(http_reply(307, b"", "text/plain", {"location": location}))

    assert caught.value.hint == "redirects are not followed: set model.base_url to the final address" + hint


def nested(depth: int) -> str:
    """JSON of this depth."""
    return '{"a":' * depth + "1" + "}" * depth


def answer(message: str, *, more: str = "") -> bytes:
    """A whole answer."""
    return f'{{"choices":[{{"index":0,"message":{message},"finish_reason":"stop"}}]{more}}}'.encode()


@pytest.mark.parametrize(
    "body",
    [
        answer(nested(DEEP)),
        answer(f'{{"content":{nested(1000)}}}'),
        answer(f'{{"tool_calls":[{{"id":"a","function":{{"name":"x","arguments":{nested(500)}}}}}]}}'),
        answer('{"tool_calls":[7]}'),
        b'{"choices":["x"]}',
        answer('{"content":"x"}', more=',"usage":{"prompt_tokens_details":"x"}'),
        answer('{"content":"x"}', more=',"usage":{"prompt_tokens":Infinity}'),
        f'{{"error":{{"message":{nested(500)}}}}}'.encode(),
        f'{{"error":{{"message":"x","code":"{"9" * 10_000}"}}}}'.encode(),
    ],
    ids=[
        "too deep",
        "deep content",
        "deep arguments",
        "no call",
        "no choice",
        "odd usage",
        "infinite",
        "error",
        "code",
    ],
)
def test_an_answer_of_another_shape_is_a_failure_of_the_provider(body: bytes) -> None:
    """PROVIDER_FAILED, whatever the endpoint sends."""
    with pytest.raises(ProviderError) as caught:
        ask(http_reply(200, body, "application/json"))

    assert caught.value.code is ErrorCode.PROVIDER_FAILED


def test_arguments_too_deep_for_a_parser_are_compared_as_text() -> None:
    """The third call in a row is remarked on all the same."""
    hook = RepeatHook(new_id=lambda: "m1")
    for _ in range(3):
        hook.observe(ev.ToolCall(turn=1, step=1, call_id="c", name="shell", arguments=nested(DEEP)))
    starting = StepStarting(turn=1, step=2, messages=[])
    hook.before_step(starting)

    assert len(starting.messages) == 1


@pytest.mark.parametrize(
    "arguments", [nested(DEEP), nested(900), '{"a": NaN}', "no"], ids=["deeper", "deep", "NaN", "text"]
)
def test_the_stream_shows_arguments_it_cannot_write_as_text(arguments: str) -> None:
    """Too deep, or no JSON: every line is JSON nevertheless."""
    lines: list[str] = []
    message: Any = {
        "role": "assistant",
        "id": "m",
        "source": {},
        "content": [{"type": "tool-call", "id": "c", "name": "shell", "arguments": arguments}],
    }
    StreamJson(session_id="s", cwd="/w", write=lines.append).observe(
        ev.AssistantMessage(turn=1, step=1, message=message, usage=None)
    )

    [line] = [json.loads(line) for line in lines]
    assert line["message"]["content"][0]["input"] == {"arguments": arguments}
