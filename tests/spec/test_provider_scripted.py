"""The scripted provider: answers from a list, one a request."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import ErrorCode, ProviderError
from runner.providers.assemble import ResponseAssembler
from runner.providers.scripted import ScriptedProvider
from runner.session.tokens import estimate_usage

HEADER: Any = {
    "config": {"provider": "scripted", "model": "m"},
    "system": "You work.",
    "tools": [{"name": "shell", "description": "Runs.", "parameters": {"type": "object"}}],
}


def message(role: str, *blocks: dict[str, Any]) -> Any:
    """One message of the session."""
    return {"role": role, "content": list(blocks), "source": {"kind": "x"}, "id": "i"}


def text(value: str) -> dict[str, Any]:
    """A text block."""
    return {"type": "text", "text": value}


def result(value: str) -> Any:
    """A message with one tool result."""
    block = {"type": "tool-result", "toolCallId": "c", "content": [text(value)], "isError": False}
    return message("user", block)


PROMPT = message("user", text("Go."))


def ask(provider: ScriptedProvider, *messages: Any) -> ResponseAssembler:
    """One request for ``messages`` behind the prompt."""
    answer = ResponseAssembler()
    body = provider.dialect.whole(HEADER, [PROMPT, *messages])
    for chunk in provider.stream(body, cancellation=Cancellation()):
        answer.add(chunk)
    return answer


def refused(provider: ScriptedProvider, *messages: Any) -> ProviderError:
    """The error of one request."""
    with pytest.raises(ProviderError) as caught:
        ask(provider, *messages)
    return caught.value


def test_responses_are_played_in_order() -> None:
    """Text, reasoning and calls; ids are made of the response's and the call's number."""
    provider = ScriptedProvider(
        [
            {"reasoning": "Hm.", "text": "I look first.", "calls": [{"tool": "shell", "args": {"command": "ls"}}]},
            {"calls": [{"tool": "a"}, {"tool": "b", "id": "mine", "args": None}]},
            {"text": "Done."},
        ]
    )
    first, second, third = ask(provider), ask(provider), ask(provider)

    assert first.content() == [
        {"type": "reasoning", "text": "Hm."},
        text("I look first."),
        {"type": "tool-call", "id": "call_1_0", "name": "shell", "arguments": '{"command":"ls"}'},
    ]
    assert second.content() == [
        {"type": "tool-call", "id": "call_2_0", "name": "a", "arguments": "{}"},
        {"type": "tool-call", "id": "mine", "name": "b", "arguments": "{}"},
    ]
    assert third.content() == [text("Done.")]
    assert [answer.finish for answer in (first, second, third)] == ["tool-calls", "tool-calls", "stop"]


def test_long_text_comes_in_pieces_that_join_to_the_whole() -> None:
    """Like a real stream."""
    provider = ScriptedProvider([{"text": "word " * 50}])
    body = provider.dialect.whole(HEADER, [PROMPT])
    chunks = list(provider.stream(body, cancellation=Cancellation()))
    pieces = [chunk["text"] for chunk in chunks if chunk["type"] == "text-delta"]

    assert len(pieces) > 5
    assert "".join(pieces) == "word " * 50
    assert [chunk["type"] for chunk in (chunks[0], *chunks[-3:])] == ["block-start", "block-end", "usage", "finish"]


def test_a_finish_that_is_given_counts() -> None:
    """An answer may end in the middle."""
    assert ask(ScriptedProvider([{"text": "Once upon", "finish": "length"}])).finish == "length"


def test_arguments_given_as_text_are_not_touched() -> None:
    """So that a script can hold a model's mistake."""
    found: Any = ask(ScriptedProvider([{"calls": [{"tool": "shell", "args": '{"comm'}]}])).content()

    assert found[0]["arguments"] == '{"comm'


def test_usage_that_is_given_counts_and_buckets_left_out_stay_unknown() -> None:
    """Zero is a number, absent is not."""
    usage = {"input": 900, "cacheRead": 0, "output": 40}
    answer = ask(ScriptedProvider([{"text": "x", "usage": usage}]))

    assert answer.usage == {"inputTokens": 900, "cacheReadTokens": 0, "outputTokens": 40}


def test_usage_left_out_is_estimated_from_the_request_and_marked() -> None:
    """By the formulas of the log format."""
    answer = ask(ScriptedProvider([{"text": "Hello there."}]), result("1 failed"))

    assert answer.usage == estimate_usage(HEADER, [PROMPT, result("1 failed")], [text("Hello there.")])
    assert answer.usage is not None
    assert answer.usage["estimated"] is True


def test_an_expectation_that_holds_lets_the_answer_through() -> None:
    """Only the last result counts, also behind messages without one."""
    script = [{"text": "x", "expect": {"lastToolResultContains": "1 failed"}}]

    assert ask(ScriptedProvider(script), result("2 failed"), result("now 1 failed"), PROMPT).finish == "stop"


@pytest.mark.parametrize(("history", "part"), [((result("1 failed"), result("ok")), "'ok'"), ((), "there is none")])
def test_an_expectation_that_does_not_hold_names_the_step(history: tuple[Any, ...], part: str) -> None:
    """The run went another way than the script."""
    script: list[dict[str, Any]] = [{"text": "x"}, {"expect": {"lastToolResultContains": "1 failed"}, "text": "y"}]
    provider = ScriptedProvider(script, source="demo.script.yaml")
    ask(provider)
    found = refused(provider, *history)

    assert (found.code, found.retryable, found.kind) == (ErrorCode.PROVIDER_FAILED, False, "script-mismatch")
    assert "step 2 of demo.script.yaml" in found.message
    assert part in found.message


def test_a_script_that_has_run_out_names_the_step() -> None:
    """It does not begin again."""
    provider = ScriptedProvider([{"text": "x"}], source="demo.script.yaml")
    ask(provider)
    found = refused(provider)

    assert (found.code, found.retryable, found.kind) == (ErrorCode.PROVIDER_FAILED, False, "script-exhausted")
    assert "demo.script.yaml has 1 response, and step 2 asks for another" in found.message


@pytest.mark.parametrize(
    ("error", "code", "retryable", "wait"),
    [
        ({"status": 429, "code": "rate_limit", "retryAfter": 1}, ErrorCode.PROVIDER_QUOTA, True, 1.0),
        ({"status": 429, "code": "insufficient_quota"}, ErrorCode.PROVIDER_QUOTA, False, None),
        ({"status": 401}, ErrorCode.PROVIDER_AUTH, False, None),
        ({"status": 400, "code": "context_length_exceeded"}, ErrorCode.CONTEXT_EXHAUSTED, False, None),
        ({"status": 503, "message": "busy", "code": None}, ErrorCode.PROVIDER_FAILED, True, None),
    ],
)
def test_a_scripted_error_is_what_the_same_answer_of_a_server_would_be(
    error: dict[str, Any], code: ErrorCode, retryable: bool, wait: float | None
) -> None:
    """And the next request gets the next response, as after a retry."""
    provider = ScriptedProvider([{"error": error}, {"text": "x"}])
    found = refused(provider)

    assert (found.code, found.retryable, found.retry_after, found.status) == (code, retryable, wait, error["status"])
    assert str(error.get("message") or error.get("code") or "") in found.message
    assert ask(provider).finish == "stop"


def test_keys_without_a_value_count_as_absent() -> None:
    """A parsed script holds None for what is not in the file."""
    keys = ("reasoning", "calls", "usage", "delay", "finish", "expect", "error")

    assert ask(ScriptedProvider([{"text": "x", **dict.fromkeys(keys)}])).content() == [text("x")]


def test_a_delay_passes_before_the_answer_and_a_cancellation_ends_it() -> None:
    """Early, without a finish and without an error."""
    provider = ScriptedProvider([{"text": "x", "delay": 0.2}, {"text": "y", "delay": 30}])
    began = time.monotonic()
    ask(provider)
    assert time.monotonic() - began >= 0.2

    cancellation = Cancellation()
    timer = threading.Timer(0.2, cancellation.cancel, ["test"])
    timer.start()
    began = time.monotonic()
    assert list(provider.stream(b"{}", cancellation=cancellation)) == []
    assert time.monotonic() - began < 5
    timer.join()
