"""What a stream may do wrong, each fault with crafted bytes through a real socket."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import ErrorCode, ProviderError
from runner.providers import openai_chat
from runner.providers.assemble import ResponseAssembler
from runner.providers.base import ModelSpec
from runner.providers.openai_chat import OpenAIChatProvider
from runner.testing.model_server import (
    STREAM_END,
    STREAM_HEAD,
    End,
    ModelServer,
    Reply,
    chat_events,
    chat_reply,
    chunked,
    event,
    http_reply,
    json_reply,
    stream_reply,
)

if TYPE_CHECKING:
    from collections.abc import Iterator


def ask(reply: Reply, *, first_token: float = 10, idle: float = 10) -> ResponseAssembler:
    """One request, answered with ``reply``."""
    with ModelServer([reply]) as server:
        spec = ModelSpec("openai", "mock", base_url=server.url, first_token=first_token, idle=idle)
        provider = OpenAIChatProvider(spec, api_key="sk-secret-key", new_id=numbers().__next__)
        answer = ResponseAssembler()
        try:
            for chunk in provider.stream(b"{}", cancellation=Cancellation()):
                answer.add(chunk)
        finally:
            provider.close()
        return answer


def numbers() -> Iterator[str]:
    """Ids that a test can foresee."""
    count = 0
    while True:
        count += 1
        yield f"new{count}"


def refused(reply: Reply, **limits: float) -> ProviderError:
    """The error that ``reply`` leads to."""
    with pytest.raises(ProviderError) as caught:
        ask(reply, **limits)
    return caught.value


def delta(value: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
    """One event."""
    return {"choices": [{"index": 0, "delta": value, "finish_reason": finish}]}


def call(index: int | None, call_id: str | None, name: str | None, arguments: str | None) -> dict[str, Any]:
    """One fragment of a tool call; None leaves a key out."""
    function = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    part: dict[str, Any] = {"function": function}
    if index is not None:
        part["index"] = index
    if call_id is not None:
        part["id"] = call_id
    return part


TEXT = chat_events("Grüße, Ωmega 🦉 und\u2028mehr")
WHOLE = [{"type": "text", "text": "Grüße, Ωmega 🦉 und\u2028mehr"}]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"], ids=["LF", "CRLF", "CR"])
@pytest.mark.parametrize("size", [1, 2, 5, 10_000])
def test_characters_and_line_ends_may_be_cut_anywhere(newline: bytes, size: int) -> None:
    """Every line end of the format, every cut inside a UTF-8 character; U+2028 is no line end."""
    raw = b"".join(event(value, newline=newline) for value in [*TEXT, "[DONE]"])
    pieces = (chunked(raw[start : start + size]) for start in range(0, len(raw), size))

    assert ask((STREAM_HEAD, b"".join(pieces) + STREAM_END)).content() == WHOLE


def test_an_event_may_have_several_data_lines_and_other_fields() -> None:
    """Lines of one event are joined; id, event, retry and comments mean nothing here."""
    raw = b"".join(event(value) for value in TEXT[:-1])
    last = json.dumps(TEXT[-1]).replace('"choices"', '\n"choices"', 1)
    lines = "\n".join(f"data:{line}" for line in last.split("\n"))
    raw += f": hello\nevent: x\nid: 7\nretry: 10\n{lines}\n\n".encode()

    assert ask((STREAM_HEAD, chunked(raw) + STREAM_END)).content() == WHOLE


def test_a_missing_done_is_no_fault_once_the_answer_has_finished() -> None:
    """Some servers just stop after finish_reason."""
    answer = ask(stream_reply(TEXT, done=False))

    assert answer.content() == WHOLE
    assert answer.finish == "stop"


def test_usage_behind_the_finish_is_waited_for() -> None:
    """The trailing event has no choices."""
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 20,
        "prompt_tokens_details": {"cached_tokens": 60},
        "completion_tokens_details": {"reasoning_tokens": 5},
    }

    assert ask(chat_reply("Hi", usage=usage)).usage == {
        "inputTokens": 40,
        "cacheReadTokens": 60,
        "outputTokens": 20,
        "reasoningTokens": 5,
    }


def test_the_last_usage_counts_where_every_event_carries_one() -> None:
    """Some servers count along."""
    events = chat_events("Hello")
    for count, value in enumerate(events):
        value["usage"] = {"prompt_tokens": 7, "completion_tokens": count}

    assert ask(stream_reply(events)).usage == {"inputTokens": 7, "outputTokens": len(events) - 1}


def test_cached_tokens_under_deepseeks_names_count() -> None:
    """prompt_cache_hit_tokens is the cached part of prompt_tokens."""
    usage = {"prompt_tokens": 50, "completion_tokens": 1, "prompt_cache_hit_tokens": 32, "prompt_cache_miss_tokens": 18}

    assert ask(chat_reply("Hi", usage=usage)).usage == {"inputTokens": 18, "cacheReadTokens": 32, "outputTokens": 1}


def test_an_answer_without_usage_reports_none() -> None:
    """Unknown is not zero."""
    assert ask(chat_reply("Hi")).usage is None


@pytest.mark.parametrize(
    ("error", "code", "retryable", "kind"),
    [
        ({"message": "boom", "type": "server_error"}, ErrorCode.PROVIDER_FAILED, True, "server_error"),
        (
            {"message": "slow down", "code": "rate_limit_exceeded"},
            ErrorCode.PROVIDER_QUOTA,
            True,
            "rate_limit_exceeded",
        ),
        ({"message": "no money", "code": "insufficient_quota"}, ErrorCode.PROVIDER_QUOTA, False, "insufficient_quota"),
        ({"message": "too long", "code": "context_length_exceeded"}, ErrorCode.CONTEXT_EXHAUSTED, False, None),
        ({"message": "what?", "type": "invalid_request_error"}, ErrorCode.PROVIDER_FAILED, False, None),
        ({"message": "busy", "code": 503}, ErrorCode.PROVIDER_FAILED, True, "error"),
        ("it broke", ErrorCode.PROVIDER_FAILED, True, "error"),
    ],
)
def test_an_error_inside_a_stream_that_began_well_is_an_error(
    error: Any, code: ErrorCode, retryable: bool, kind: str | None
) -> None:
    """Status 200 says nothing about how the answer ends."""
    found = refused(stream_reply([*TEXT[:2], {"error": error}]))

    assert (found.code, found.retryable) == (code, retryable)
    assert kind is None or found.kind == kind
    assert (error if isinstance(error, str) else error["message"]) in found.message


@pytest.mark.parametrize("end", [End.CLOSE, End.RESET])
def test_a_dropped_connection_is_a_broken_stream_that_may_be_retried(end: End) -> None:
    """In the middle of an answer, orderly or not."""
    began = threading.Event()
    threading.Timer(0.1, began.set).start()
    found = refused((STREAM_HEAD + chunked(event(TEXT[1])), began, end))

    assert (found.code, found.kind, found.retryable) == (ErrorCode.PROVIDER_FAILED, "stream-broken", True)


def test_a_body_without_length_that_ends_early_is_a_broken_stream() -> None:
    """The end of the connection is the end of the body, and the answer had not finished."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
    found = refused((head + event(TEXT[1]), End.CLOSE))

    assert (found.kind, found.retryable) == ("stream-broken", True)


def test_a_connection_closed_before_any_answer_is_a_broken_stream() -> None:
    """The request went out; nothing came back."""
    found = refused((End.CLOSE,))

    assert (found.kind, found.retryable, found.status) == ("stream-broken", True, None)


def test_an_event_that_is_not_json_is_a_broken_stream() -> None:
    """The message shows a little of it."""
    found = refused(stream_reply(["{not json"]))

    assert (found.kind, found.retryable) == ("stream-broken", True)
    assert "{not json" in found.message


def test_a_stream_without_any_event_is_empty_and_may_be_retried() -> None:
    """Neither content nor finish."""
    for reply in (stream_reply([], done=False), stream_reply([], done=True)):
        found = refused(reply)
        assert (found.code, found.kind, found.retryable) == (ErrorCode.PROVIDER_FAILED, "empty", True)


def test_an_empty_answer_that_finished_is_an_answer() -> None:
    """The model had nothing to say: no blocks, and a finish."""
    answer = ask(chat_reply(""))

    assert answer.content() == []
    assert answer.finish == "stop"


def test_done_without_a_finish_reason_ends_the_answer() -> None:
    """The content decides what kind of end it was."""
    events = chat_events("", calls=[("a", "shell", "{}")])[:-1]

    assert ask(stream_reply(events)).finish == "tool-calls"
    assert ask(stream_reply(TEXT[:-1])).finish == "stop"


@pytest.mark.parametrize(
    ("reason", "kind"),
    [("stop", "stop"), ("length", "length"), ("content_filter", "filter"), ("tool_calls", "stop"), ("eos", "stop")],
)
def test_finish_reasons_become_ours(reason: str, kind: str) -> None:
    """An unknown one is a stop; calls without a call are a stop."""
    assert ask(chat_reply("Hi", finish=reason)).finish == kind


def test_calls_count_more_than_a_finish_reason_of_stop() -> None:
    """Some servers never say tool_calls."""
    assert ask(chat_reply(calls=[("a", "shell", "{}")], finish="stop")).finish == "tool-calls"


def test_a_refusal_is_text_that_ends_in_filter() -> None:
    """The model's reason is kept."""
    answer = ask(stream_reply([delta({"refusal": "I will "}), delta({"refusal": "not."}), delta({}, "stop")]))

    assert answer.content() == [{"type": "text", "text": "I will not."}]
    assert answer.finish == "filter"


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_a_block_of_its_own(key: str) -> None:
    """Under either name, before the text."""
    events = [delta({key: "First "}), delta({key: "think."}), delta({"content": "Done."}), delta({}, "stop")]

    assert ask(stream_reply(events)).content() == [
        {"type": "reasoning", "text": "First think."},
        {"type": "text", "text": "Done."},
    ]


def test_parallel_calls_may_come_interleaved() -> None:
    """Fragments belong to the call of their index."""
    events = [
        delta({"tool_calls": [call(0, "a", "read_file", ""), call(1, "b", "grep", '{"p')]}),
        delta({"tool_calls": [call(1, None, None, 'attern":')]}),
        delta({"tool_calls": [call(0, None, None, '{"path":"x"}')]}),
        delta({"tool_calls": [call(1, None, None, '"y"}')]}),
        delta({}, "tool_calls"),
    ]

    assert ask(stream_reply(events)).content() == [
        {"type": "tool-call", "id": "a", "name": "read_file", "arguments": '{"path":"x"}'},
        {"type": "tool-call", "id": "b", "name": "grep", "arguments": '{"pattern":"y"}'},
    ]


def test_calls_that_all_have_index_0_are_told_apart_by_their_ids() -> None:
    """Seen where a server sends whole calls."""
    events = [
        delta({"tool_calls": [call(0, "a", "shell", '{"n":1}')]}),
        delta({"tool_calls": [call(0, "b", "shell", '{"n":2}')]}),
        delta({}, "tool_calls"),
    ]

    found: Any = ask(stream_reply(events)).content()
    assert [(block["id"], block["arguments"]) for block in found] == [("a", '{"n":1}'), ("b", '{"n":2}')]


def test_fragments_without_an_index_count_by_position() -> None:
    """Two whole calls in one event."""
    events = [
        delta({"tool_calls": [call(None, "a", "shell", "{}"), call(None, "b", "grep", "{}")]}),
        delta({}, "tool_calls"),
    ]

    found: Any = ask(stream_reply(events)).content()
    assert [(block["id"], block["name"]) for block in found] == [("a", "shell"), ("b", "grep")]


def test_a_missing_or_repeated_call_id_is_replaced() -> None:
    """Every call of a provider's life has an id of its own, in later answers too."""
    same = chat_events(calls=[("same", "shell", "{}"), ("same", "shell", "{}"), ("", "shell", "{}")])
    with ModelServer([stream_reply(same), stream_reply(same)]) as server:
        spec = ModelSpec("openai", "mock", base_url=server.url)
        provider = OpenAIChatProvider(spec, api_key=None, new_id=numbers().__next__)
        ids = []
        for _ in range(2):
            answer = ResponseAssembler()
            for chunk in provider.stream(b"{}", cancellation=Cancellation()):
                answer.add(chunk)
            content: Any = answer.content()
            ids += [block["id"] for block in content]
        provider.close()

    assert ids == ["same", "call_new1", "call_new2", "call_new3", "call_new4", "call_new5"]


def test_every_delta_of_a_call_carries_its_id_and_name() -> None:
    """Whoever reads the log needs no earlier chunk, even when the name comes after the arguments began."""
    events = [
        delta({"tool_calls": [call(0, "a", None, '{"x"')]}),
        delta({"tool_calls": [call(0, None, "shell", ":")]}),
        delta({"tool_calls": [call(0, None, None, "1}")]}),
        delta({}, "tool_calls"),
    ]
    with ModelServer([stream_reply(events)]) as server:
        provider = OpenAIChatProvider(ModelSpec("openai", "m", base_url=server.url), api_key=None, new_id=str)
        chunks = list(provider.stream(b"{}", cancellation=Cancellation()))
        provider.close()

    deltas = [chunk for chunk in chunks if chunk["type"] == "tool-call-delta"]
    assert [(chunk["id"], chunk["name"]) for chunk in deltas] == [("a", "shell")] * len(deltas)
    assert "".join(chunk["argumentsDelta"] for chunk in deltas) == '{"x":1}'


def test_a_call_whose_name_never_comes_is_still_a_call() -> None:
    """The pipeline answers it as an unknown tool."""
    events = [delta({"tool_calls": [call(0, "a", None, "{}")]}), delta({}, "tool_calls")]

    assert ask(stream_reply(events)).content() == [{"type": "tool-call", "id": "a", "name": "", "arguments": "{}"}]


def test_arguments_that_are_not_json_stay_as_the_model_wrote_them() -> None:
    """What to make of them is the pipeline's business."""
    found: Any = ask(chat_reply(calls=[("a", "shell", '{"command": "ls')])).content()

    assert found[0]["arguments"] == '{"command": "ls'


def test_arguments_that_come_as_an_object_become_text() -> None:
    """Seen where a server decodes them."""
    part = {"index": 0, "id": "a", "function": {"name": "shell", "arguments": {"command": "ls"}}}
    found: Any = ask(stream_reply([delta({"tool_calls": [part]}), delta({}, "tool_calls")])).content()

    assert json.loads(found[0]["arguments"]) == {"command": "ls"}


def test_text_between_calls_keeps_its_place() -> None:
    """Blocks stand in the order in which they began."""
    events = [
        delta({"content": "A"}),
        delta({"tool_calls": [call(0, "a", "shell", "{}")]}),
        delta({"content": "B"}),
        delta({}, "tool_calls"),
    ]

    assert [block["type"] for block in ask(stream_reply(events)).content()] == ["text", "tool-call", "text"]


def test_a_character_cut_into_two_escapes_is_joined() -> None:
    """Halves of a surrogate pair in two events; a half that stays alone becomes U+FFFD."""
    events = [
        '{"choices":[{"index":0,"delta":{"content":"owl \\ud83e"}}]}',
        '{"choices":[{"index":0,"delta":{"content":"\\udd89 and \\ud83e!"}}]}',
        '{"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}',
    ]

    assert ask(stream_reply(events)).content() == [{"type": "text", "text": "owl 🦉 and \ufffd!"}]


def test_an_endless_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit counts content, not framing; the request is not repeated."""
    monkeypatch.setattr(openai_chat, "CONTENT_BYTES", 1000)

    assert ask(stream_reply([delta({"content": "x" * 100})] * 10 + [delta({}, "stop")])).finish == "stop"
    found = refused(stream_reply([delta({"content": "x" * 100})] * 11))

    assert (found.code, found.kind, found.retryable) == (ErrorCode.PROVIDER_FAILED, "too-large", False)


def test_an_event_without_an_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server that never ends a line does not fill the memory."""
    from runner.providers import http

    monkeypatch.setattr(http, "EVENT_BYTES", 10_000)
    found = refused((STREAM_HEAD + chunked(b"data: "), *[chunked(b"x" * 5000)] * 10, End.HANG))

    assert found.kind == "too-large"


def test_a_whole_answer_in_json_is_taken_although_a_stream_was_asked_for() -> None:
    """Some gateways do not stream."""
    message = {
        "role": "assistant",
        "content": "Hi",
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "shell", "arguments": "{}"}}],
    }
    value = {
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "tool_calls"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 2},
    }
    answer = ask(json_reply(200, value))

    assert [block["type"] for block in answer.content()] == ["text", "tool-call"]
    assert (answer.finish, answer.usage) == ("tool-calls", {"inputTokens": 3, "outputTokens": 2})


@pytest.mark.parametrize(
    "reply", [http_reply(200, b"<html>Hello</html>", "text/html; charset=utf-8"), json_reply(200, {"status": "ok"})]
)
def test_an_answer_that_is_no_completion_names_the_key_to_change(reply: Reply) -> None:
    """A web page, or somebody else's JSON."""
    found = refused(reply)

    assert (found.code, found.retryable) == (ErrorCode.PROVIDER_FAILED, False)
    assert found.hint is not None
    assert "model.base_url" in found.hint


def test_events_of_other_choices_and_of_no_choice_are_left_out() -> None:
    """One answer was asked for; pings may come between."""
    other = {"choices": [{"index": 1, "delta": {"content": "no"}, "finish_reason": "length"}]}

    assert ask(stream_reply([other, {"type": "ping"}, 7, *TEXT])).content() == WHOLE


def test_silence_before_the_first_event_is_a_first_token_timeout() -> None:
    """A server that accepts and never answers."""
    began = time.monotonic()
    found = refused((End.HANG,), first_token=0.3)

    assert (found.kind, found.retryable, found.code) == ("first-token-timeout", True, ErrorCode.PROVIDER_FAILED)
    assert 0.25 <= time.monotonic() - began < 3
    assert found.hint is not None
    assert "model.first_token" in found.hint


def test_comments_do_not_put_the_first_event_off() -> None:
    """The time to the first event is a time, not a silence."""
    comments: list[Any] = []
    for _ in range(40):
        comments += [chunked(b": wait\n\n"), 0.05]

    assert refused((STREAM_HEAD, *comments), first_token=0.4).kind == "first-token-timeout"


def test_silence_inside_a_stream_is_an_idle_timeout() -> None:
    """After the first event only silence counts."""
    began = time.monotonic()
    found = refused((STREAM_HEAD + chunked(event(TEXT[1])), End.HANG), idle=0.3)

    assert (found.kind, found.retryable) == ("idle-timeout", True)
    assert 0.25 <= time.monotonic() - began < 3


def test_comments_and_slow_pieces_are_no_silence() -> None:
    """Any byte counts, and the first-token limit is over once an event has come."""
    steps: list[Any] = [STREAM_HEAD + chunked(event(TEXT[0]))]
    for _ in range(14):
        steps += [0.1, chunked(b": keep-alive\n\n")]
    steps += [b"".join(chunked(event(value)) for value in [*TEXT[1:], "[DONE]"]) + STREAM_END]

    assert ask(tuple(steps), first_token=1, idle=1).content() == WHOLE
