"""Answers from a script, one a request, in order: demos, tests and dry runs without a key.

Prefix cache: none is at work, but bodies keep the shape of real ones (header first, then
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
from runner.session.media import no_media
from runner.session.tokens import estimate_content, estimate_message, estimate_system, estimate_tools

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from runner.cancellation import Cancellation
    from runner.messages import Block, Chunk, JsonObject, Message, RequestHeader, Usage
    from runner.providers.base import Dialect
    from runner.session.media import Media

PIECE_CHARACTERS = 32
"""Length of the deltas a text is cut into."""


class ScriptedDialect:
    """A body is the header and the messages as the session holds them."""

    name = "scripted"
    close = b"]}"

    def open(self, header: RequestHeader) -> bytes:
        """The header; the system prompt stands as the first element of ``messages``, like elsewhere."""
        return orjson.dumps(_settings(header))[:-1] + b',"messages":[' + orjson.dumps(_system(header))

    def fragments(self, messages: Iterable[Message], media: Media = no_media) -> Iterator[bytes]:
        """The messages, unchanged: images stay names."""
        del media
        return map(orjson.dumps, messages)

    def whole(self, header: RequestHeader, messages: Sequence[Message], media: Media = no_media) -> bytes:
        """The body of a request for ``messages``."""
        del media
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
        self._conversation = _Conversation()

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
        if "expect" in response:
            self._expect(response["expect"], number, self._conversation.read(body).last_result)
        content = _content(response, number)
        for index, block in enumerate(content):
            if cancellation.cancelled:
                return
            yield from _chunks(index, block)
        given = response.get("usage")
        usage = self._conversation.read(body).usage(content) if given is None else _usage(given)
        yield {"type": "usage", "usage": usage}
        yield {"type": "finish", "reason": {"kind": _finish(response)}}

    def skip(self, answered: int) -> None:
        """Go on behind the responses that an earlier part of the session used."""
        self._position = answered

    def close(self) -> None:
        """Nothing is held."""

    def _expect(self, expected: JsonObject, number: int, last_result: str | None) -> None:
        wanted = expected.get("lastToolResultContains")
        if wanted is None or (last_result is not None and wanted in last_result):
            return
        found = "there is none" if last_result is None else f"the last one is {_short(last_result)}"
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


class _Conversation:
    """What the last request held. One that begins with the same bytes is read from their end on.

    So a long session costs what is new in each request, as with a server that keeps the prefix.
    """

    def __init__(self) -> None:
        self.last_result: str | None = None
        self._prefix = b""
        self._tokens = 0

    def read(self, body: bytes) -> _Conversation:
        """Read a request's body and return the conversation itself."""
        close = len(ScriptedDialect.close)
        if self._prefix and body.startswith(self._prefix):
            messages = orjson.loads(b"[" + body[len(self._prefix) + 1 : -close] + b"]")
        else:
            request = orjson.loads(body)
            system, *messages = request["messages"]
            self._tokens = estimate_system(system["content"]) + estimate_tools(request["tools"])
            self.last_result = None
        for message in messages:
            self._tokens += estimate_message(message)
            for block in message["content"]:
                if block["type"] == "tool-result":
                    self.last_result = text_of(block["content"])
        self._prefix = body[:-close]
        return self

    def usage(self, content: Sequence[Block]) -> Usage:
        """What an answer would cost, estimated. Nothing is known about the cache."""
        return {"inputTokens": self._tokens, "outputTokens": estimate_content(content), "estimated": True}


def _usage(given: JsonObject) -> Usage:
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
