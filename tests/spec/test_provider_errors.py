"""What an answer that is no success becomes: code, whether to try again, when, and what to change."""

from __future__ import annotations

import re
from email.utils import formatdate
from typing import Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import ErrorCode, ProviderError
from runner.providers.base import ModelSpec
from runner.providers.openai_chat import OpenAIChatProvider
from runner.testing.model_server import ModelServer, Reply, http_reply, json_reply

NOW = 1_800_000_000.0
KEY = "sk-very-secret"


def refused(reply: Reply, *, path: str = "") -> ProviderError:
    """The error that ``reply`` leads to; ``path`` stands at the end of the address."""
    with ModelServer([reply]) as server:
        spec = ModelSpec("openai", "mock", base_url=server.url + path, api_key_env="MY_KEY", first_token=10, idle=10)
        provider = OpenAIChatProvider(spec, api_key=KEY, new_id=str, now=lambda: NOW)
        try:
            with pytest.raises(ProviderError) as caught:
                list(provider.stream(b"{}", cancellation=Cancellation()))
        finally:
            provider.close()
        return caught.value


def said(message: str, *, kind: str | None = None, code: Any = None) -> dict[str, Any]:
    """An error body of the usual shape."""
    return {"error": {"message": message, "type": kind, "code": code}}


@pytest.mark.parametrize(
    ("status", "body", "code", "retryable"),
    [
        (400, said("bad"), ErrorCode.PROVIDER_FAILED, False),
        (401, said("who?"), ErrorCode.PROVIDER_AUTH, False),
        (402, said("Insufficient Balance"), ErrorCode.PROVIDER_QUOTA, False),
        (403, said("not you"), ErrorCode.PROVIDER_AUTH, False),
        (404, said("no such model", code="model_not_found"), ErrorCode.PROVIDER_FAILED, False),
        (408, said("slow"), ErrorCode.PROVIDER_FAILED, True),
        (409, said("conflict"), ErrorCode.PROVIDER_FAILED, True),
        (413, said("large"), ErrorCode.PROVIDER_FAILED, False),
        (422, said("odd"), ErrorCode.PROVIDER_FAILED, False),
        (429, said("slow down", code="rate_limit_exceeded"), ErrorCode.PROVIDER_QUOTA, True),
        (429, said("no money", code="insufficient_quota"), ErrorCode.PROVIDER_QUOTA, False),
        (429, said("no money", kind="insufficient_quota"), ErrorCode.PROVIDER_QUOTA, False),
        (500, said("oops"), ErrorCode.PROVIDER_FAILED, True),
        (502, said("gateway"), ErrorCode.PROVIDER_FAILED, True),
        (503, said("Loading model"), ErrorCode.PROVIDER_FAILED, True),
        (529, said("overloaded"), ErrorCode.PROVIDER_FAILED, True),
        (400, said("long", code="context_length_exceeded"), ErrorCode.CONTEXT_EXHAUSTED, False),
        (400, said("long", kind="exceed_context_size_error", code=400), ErrorCode.CONTEXT_EXHAUSTED, False),
        (
            400,
            {
                "object": "error",
                "message": "This model's maximum context length is 4096 tokens. However, you requested 5000 tokens.",
                "type": "BadRequestError",
                "code": 400,
            },
            ErrorCode.CONTEXT_EXHAUSTED,
            False,
        ),
        (413, said("Prompt is too long"), ErrorCode.CONTEXT_EXHAUSTED, False),
        (500, said("the context window is exceeded"), ErrorCode.PROVIDER_FAILED, True),
    ],
)
def test_a_status_and_what_the_server_says_decide_the_code(
    status: int, body: Any, code: ErrorCode, retryable: bool
) -> None:
    """Never again for keys, money, length and bad requests; again for rate limits and the server's own faults."""
    found = refused(json_reply(status, body))

    assert (found.code, found.retryable, found.status) == (code, retryable, status)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (json_reply(400, {"error": "plain words"}), "plain words"),
        (json_reply(400, {"detail": "of FastAPI"}), "of FastAPI"),
        (json_reply(400, {"detail": [{"loc": ["body"], "msg": "field required"}]}), "field required"),
        (json_reply(400, [{"error": {"message": "in a list"}}]), "in a list"),
        (json_reply(400, {"message": "at the top"}), "at the top"),
        (json_reply(400, {}), "no reason given"),
        (http_reply(500, b"Internal Server Error", "text/plain"), "Internal Server Error"),
        (http_reply(502, b"<html><h1>Bad gateway</h1></html>", "text/html"), "a web page"),
        (http_reply(500, b"", "text/plain"), "no reason given"),
        (http_reply(500, b"\xff\xfe broken", "text/plain"), "broken"),
    ],
)
def test_the_message_says_what_the_server_said_in_whatever_shape(reply: Reply, text: str) -> None:
    """The shapes differ from server to server."""
    assert text in refused(reply).message


def test_a_long_reason_is_cut_and_stands_on_one_line() -> None:
    """A server cannot fill a log, or a step's log with lines of its own."""
    found = refused(json_reply(500, said("a\n::error::b\n" * 1000)))

    assert "\n" not in found.message
    assert len(found.message) < 700


def test_an_endless_error_answer_is_read_to_a_limit_only() -> None:
    """64 KiB are enough for a reason."""
    found = refused(http_reply(500, b"x" * 3_000_000, "text/plain"))

    assert (found.status, found.retryable) == (500, True)


def test_a_key_that_the_server_repeats_is_not_shown() -> None:
    """OpenAI's 401 quotes the key."""
    found = refused(json_reply(401, said(f"Incorrect API key provided: {KEY}.")))

    assert KEY not in str(found)
    assert "[redacted]" in found.message


def test_the_hint_names_the_setting_to_change() -> None:
    """The variable of the key, the address, the model."""
    assert "model.api_key_env (MY_KEY)" in str(refused(json_reply(401, said("no"))).hint)
    assert "model.base_url" in str(refused(json_reply(404, said("no"))).hint)
    assert "balance" in str(refused(json_reply(402, said("no"))).hint)


@pytest.mark.parametrize(
    "reply",
    [
        json_reply(404, said("no")),
        json_reply(405, said("no")),
        http_reply(307, b"", "text/plain", {"location": "/v1/chat/completions/"}),
        http_reply(200, b"<html></html>", "text/html"),
        json_reply(200, {}),
    ],
)
def test_an_address_that_already_has_the_path_of_the_call_is_said_to(reply: Reply) -> None:
    """Vendors' pages show the whole address of the call."""
    found = refused(reply, path="/chat/completions/")

    assert re.fullmatch(
        r"model\.base_url ends before /chat/completions: set it to http://127\.0\.0\.1:\d+/v1", str(found.hint)
    )


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.5"}, 0.5),
        ({"retry-after-ms": "250", "retry-after": "9"}, 0.25),
        ({"retry-after": formatdate(NOW + 30, usegmt=True)}, 30.0),
        ({"retry-after": formatdate(NOW - 30, usegmt=True)}, 0.0),
        ({"retry-after": "soon"}, None),
        ({"retry-after": "-3"}, None),
        ({"retry-after": "inf"}, None),
        ({"retry-after-ms": "x", "retry-after": "2"}, 2.0),
        ({}, None),
    ],
)
def test_the_wait_a_server_asks_for_is_reported_in_seconds(headers: dict[str, str], seconds: float | None) -> None:
    """Milliseconds before seconds, seconds or a date; nonsense is no wish."""
    assert refused(json_reply(429, said("slow down"), headers)).retry_after == seconds


@pytest.mark.parametrize(
    ("status", "wish", "retryable"),
    [
        (500, "false", False),
        (429, "false", False),
        (405, "true", True),
        (500, "maybe", True),
        (400, "true", False),
        (401, "true", False),
        (402, "true", False),
    ],
)
def test_x_should_retry_decides_except_where_another_attempt_is_useless(
    status: int, wish: str, retryable: bool
) -> None:
    """Keys, money and bad requests are never retried."""
    assert refused(json_reply(status, said("x"), {"x-should-retry": wish})).retryable is retryable


def test_a_redirect_is_not_followed() -> None:
    """The key goes nowhere but to the address in the profile."""
    with ModelServer([json_reply(200, {})]) as other:
        found = refused(http_reply(307, b"", "text/plain", {"location": f"{other.url}/chat/completions"}))

        assert (found.status, found.retryable, found.code) == (307, False, ErrorCode.PROVIDER_FAILED)
        assert str(found.hint).endswith(f"set model.base_url to the final address ({other.url})")
        assert other.requests == []
