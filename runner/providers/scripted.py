"""Answers from a script, one a request, in order: demos, tests and dry runs without a key.

Effect on the prefix cache: none is at work, but bodies keep the shape of real ones (header first, then
the messages), so that everything that depends on a stable prefix can be shown with it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import orjson

from runner.errors import ProviderError
from runner.figures import counted
from runner.messages import text_of
from runner.providers.faults import failure
from runner.session.tokens import estimate_usage

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runner.cancellation import Cancellation
    from runner.messages import Block, Chunk, JsonObject, Message, RequestHeader, Usage
    from runner.providers.base import Dialect

PIECE_CHARACTERS = 32
"""Length of the deltas a text is cut into."""


class ScriptedDialect:
    """A body is the header and the messages as the session holds them."""

    name = "scripted"
    close = b"]}"

    def open(self, header: RequestHeader) -> bytes:
        """The header; the system prompt stands as the first element of ``messages``, like elsewhere."""
        return orjson.dumps(_settings(header))[:-1] + b',"messages":[' + orjson.dumps(_system(header))

    def fragment(self, message: Message) -> bytes:
        """One message, unchanged."""
        return orjson.dumps(message)

    def whole(self, header: RequestHeader, messages: Sequence[Message]) -> bytes:
        """The body of a request for ``messages``."""
        return orjson.dumps({**_settings(header), "messages": [_system(header), *messages]})


def _settings(header: RequestHeader) -> JsonObject:
    return {"config": header["config"], "tools": header["tools"]}


def _system(header: RequestHeader) -> JsonObject:
    return {"role": "system", "content": header["system"]}


class ScriptedProvider:
    """Plays the responses of a script.

    Args:
        responses: As in a ``*.script.yaml``: ``text``, ``reasoning``, ``calls [{tool, args, id}]``,
            ``usage {input, cacheRead, cacheWrite, output}``, ``delay`` in seconds, ``finish``,
            ``expect {lastToolResultContains}``, or ``error {status, code, message, retryAfter}``.
            Keys with the value None count as absent.
        source: Name of the script, for messages.
        idle: Seconds without an answer that are taken for silence, as with a real model.

    Raises of ``stream``:
        ProviderError: PROVIDER_FAILED, not retryable, if the script has run out (``script-exhausted``) or the
            last tool result is not the one expected (``script-mismatch``); or the error of the script.
    """

    name = "scripted"

    def __init__(self, responses: Sequence[JsonObject], *, source: str = "the script", idle: float = math.inf) -> None:
        self.dialect: Dialect = ScriptedDialect()
        self._responses = responses
        self._source = source
        self._idle = idle
        self._position = 0

    def stream(self, body: bytes, *, cancellation: Cancellation) -> Iterator[Chunk]:
        """Yield the chunks of the next response."""
        number = self._position + 1
        if number > len(self._responses):
            raise ProviderError(
                f"{self._source} has {counted(len(self._responses), 'response')}, and step {number} asks for another",
                kind="script-exhausted",
                hint="add a response, or let the last one make no calls",
            )
        self._position = number
        response = {key: value for key, value in self._responses[number - 1].items() if value is not None}
        delay = response.get("delay", 0)
        if cancellation.wait(min(delay, self._idle)):
            return
        if delay > self._idle:
            raise ProviderError(f"nothing came for {self._idle:g} s", kind="idle-timeout", retryable=True)
        if "error" in response:
            raise _error(response["error"], self._source, number)
        request = orjson.loads(body)
        if "expect" in response:
            self._expect(response["expect"], request["messages"], number)
        content = _content(response, number)
        for index, block in enumerate(content):
            if cancellation.cancelled:
                return
            yield from _chunks(index, block)
        yield {"type": "usage", "usage": _usage(response, request, content)}
        yield {"type": "finish", "reason": {"kind": _finish(response)}}

    def skip(self, answered: int) -> None:
        """Go on behind the responses that an earlier part of the session used."""
        self._position = answered

    def close(self) -> None:
        """Nothing is held."""

    def _expect(self, expected: JsonObject, messages: Sequence[JsonObject], number: int) -> None:
        wanted = expected.get("lastToolResultContains")
        if wanted is None:
            return
        results = [
            text_of(block["content"])
            for message in messages[1:]
            for block in message["content"]
            if block["type"] == "tool-result"
        ]
        if results and wanted in results[-1]:
            return
        found = f"the last one is {_short(results[-1])}" if results else "there is none"
        raise ProviderError(
            f"step {number} of {self._source} expects a tool result with {_short(wanted)}; {found}",
            kind="script-mismatch",
            hint="the run went another way than the script: read the tool results before this step",
        )


def _content(response: JsonObject, number: int) -> list[Block]:
    content: list[Any] = [
        {"type": kind, "text": response[kind]} for kind in ("reasoning", "text") if response.get(kind)
    ]
    for position, call in enumerate(response.get("calls") or ()):
        arguments = call.get("args")
        content.append(
            {
                "type": "tool-call",
                "id": call.get("id") or f"call_{number}_{position}",
                "name": call["tool"],
                # A string stands for itself, so that a script can hold arguments that are not JSON.
                "arguments": arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode(),
            }
        )
    return content


def _chunks(index: int, block: Any) -> Iterator[Chunk]:
    kind = block["type"]
    yield {"type": "block-start", "index": index, "blockType": kind}
    text = block["arguments"] if kind == "tool-call" else block["text"]
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS]
        if kind == "tool-call":
            yield {
                "type": "tool-call-delta",
                "index": index,
                "id": block["id"],
                "name": block["name"],
                "argumentsDelta": piece,
            }
        else:
            yield {"type": f"{kind}-delta", "index": index, "text": piece}
    yield {"type": "block-end", "index": index, "block": block}


def _usage(response: JsonObject, request: JsonObject, content: Sequence[Block]) -> Usage:
    given = response.get("usage")
    if given is None:
        system, *messages = request["messages"]
        header: RequestHeader = {
            "config": request["config"],
            "system": system["content"],
            "tools": request["tools"],
        }
        return estimate_usage(header, messages, content)
    usage: Usage = {"inputTokens": given.get("input") or 0, "outputTokens": given.get("output") or 0}
    if given.get("cacheRead") is not None:
        usage["cacheReadTokens"] = given["cacheRead"]
    if given.get("cacheWrite") is not None:
        usage["cacheWriteTokens"] = given["cacheWrite"]
    return usage


def _finish(response: JsonObject) -> str:
    finish: str = response.get("finish") or ("tool-calls" if response.get("calls") else "stop")
    return finish


def _error(error: JsonObject, source: str, number: int) -> ProviderError:
    """The error a provider would have made of the same answer."""
    kind = str(error.get("code") or "error")
    wait = error.get("retryAfter")
    return failure(
        error.get("status"),
        f"{error.get('message') or kind} (step {number} of {source})",
        kind=kind,
        headers={} if wait is None else {"retry-after": str(wait)},
        now=0,
        quota=kind == "insufficient_quota",
        context=kind == "context_length_exceeded",
    )


def _short(text: str) -> str:
    return repr(text if len(text) <= 200 else text[:200] + "...")
