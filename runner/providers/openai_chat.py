"""OpenAI Chat Completions, as OpenAI and every compatible server speaks it.

Prefix cache: a body is configuration, tools, system message, then the messages in order,
each serialised alone; a later body repeats an earlier one byte for byte up to its closing brackets.
What servers do differently is data (``Compat``), and the dialect's name says which record wrote a body.
"""

from __future__ import annotations

import base64
import json
import re
import threading
import time
from typing import TYPE_CHECKING, Any

import orjson

from runner.errors import ConfigError, ProviderError
from runner.messages import text_of
from runner.providers.address import address_problem, call_hint, masked
from runner.providers.faults import failure
from runner.record import record
from runner.session.media import no_media

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from runner.cancellation import Cancellation
    from runner.messages import Chunk, ImageBlock, JsonObject, Message, RequestHeader, Usage
    from runner.providers.base import Dialect, ModelSpec
    from runner.providers.http import Answer, HttpClient
    from runner.session.media import Media

OPENAI_URL = "https://api.openai.com/v1"
"""Where requests go when the profile names no ``base_url``."""

_CALL = "/chat/completions"
"""What is added to it."""

CONTENT_BYTES = 4_194_304
"""Longest answer, text, reasoning and arguments together. A model that goes on is not going to stop."""

BODY_BYTES = 16_777_216
"""Longest answer that is not a stream, framing included."""

ERROR_BYTES = 65_536
"""How much of an error answer is read."""

SAID_CHARACTERS = 500
"""How much of what a server says stands in an error message."""


@record
class Compat:
    """What one family of servers does differently.

    Attributes:
        max_tokens: Key of the limit on the answer's length.
        stream_usage: Whether ``stream_options`` may ask for usage.
        reasoning: Keys of a delta that may hold reasoning, the first one present counts.
        images: Whether images are sent; without, they are named in the text.
    """

    max_tokens: str = "max_tokens"
    stream_usage: bool = True
    reasoning: tuple[str, ...] = ("reasoning_content", "reasoning")
    images: bool = False


COMPATS: dict[str, Compat] = {
    "openai-chat": Compat(),
    "openai-chat:openai": Compat(max_tokens="max_completion_tokens"),
    "openai-chat+images": Compat(images=True),
    "openai-chat:openai+images": Compat(max_tokens="max_completion_tokens", images=True),
}
"""By dialect name. The name stands in the log, so that old requests can be written again."""


def dialect_for(base_url: str | None, *, images: bool = False) -> str:
    """Name of the dialect that the server at ``base_url`` speaks, to a model that takes images or does not."""
    host = re.match(r"https?://([^/:]+)", base_url or OPENAI_URL)
    name = "openai-chat:openai" if host is not None and host[1].lower() == "api.openai.com" else "openai-chat"
    return f"{name}+images" if images else name


# --- writing requests ------------------------------------------------------------------------------

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_-]")


class ChatDialect:
    """Writes request bodies."""

    close = b"]}"

    def __init__(self, name: str) -> None:
        self.name = name
        self.compat = COMPATS[name]

    def open(self, header: RequestHeader) -> bytes:
        """Configuration, tools and the system message."""
        settings = orjson.dumps(self._settings(header))
        return settings[:-1] + b',"messages":[' + orjson.dumps(_system(header))

    def fragments(self, messages: Iterable[Message], media: Media = no_media) -> Iterator[bytes]:
        """The messages; results of several calls become one wire message each."""
        return map(orjson.dumps, self._wire(messages, media))

    def whole(self, header: RequestHeader, messages: Sequence[Message], media: Media = no_media) -> bytes:
        """The body of a request for ``messages``."""
        body = self._settings(header)
        body["messages"] = [_system(header), *self._wire(messages, media)]
        return orjson.dumps(body)

    def _wire(self, messages: Iterable[Message], media: Media) -> Iterator[JsonObject]:
        """The messages of the API, images of results behind the last result that stands beside theirs.

        The API takes only text in a result, and nothing else between the results of one answer's calls.
        """
        if not self.compat.images:
            for message in messages:
                yield from _wire(message)
            return
        shown: list[JsonObject] = []
        for message in messages:
            results = [block for block in message["content"] if block["type"] == "tool-result"]
            if shown and not results:
                yield {"role": "user", "content": shown}
                shown = []
            if message["role"] == "assistant":
                yield _assistant(message)
                continue
            for block in results:
                text = _text(block["content"], images="in the message behind the results")
                yield {"role": "tool", "tool_call_id": block["toolCallId"], "content": text}
                for number, image in enumerate(each for each in block["content"] if each["type"] == "image"):
                    title = f"Image {number + 1} of the result of {block['toolCallId']}:"
                    shown += [{"type": "text", "text": title}, _image(image, media)]
            rest: list[Any] = [block for block in message["content"] if block["type"] != "tool-result"]
            if any(block["type"] == "image" for block in rest):
                parts = [
                    _image(block, media) if block["type"] == "image" else {"type": "text", "text": _text([block])}
                    for block in rest
                ]
                yield {"role": "user", "content": parts}
            elif rest:
                yield {"role": "user", "content": _text(rest)}
        if shown:
            yield {"role": "user", "content": shown}

    def _settings(self, header: RequestHeader) -> JsonObject:
        config = header["config"]
        settings: JsonObject = {"model": config["model"], "stream": True}
        if self.compat.stream_usage:
            settings["stream_options"] = {"include_usage": True}
        if config.get("maxTokens") is not None:
            settings[self.compat.max_tokens] = config["maxTokens"]
        if config.get("temperature") is not None:
            settings["temperature"] = config["temperature"]
        if header["tools"]:
            settings["tools"] = [
                {
                    "type": "function",
                    "function": {
                        "name": tool["name"],
                        "description": tool["description"],
                        "parameters": tool["parameters"],
                    },
                }
                for tool in header["tools"]
            ]
            choice = config.get("toolChoice")
            if choice in ("auto", "none", "required"):
                settings["tool_choice"] = choice
            elif choice is not None:
                settings["tool_choice"] = {"type": "function", "function": {"name": choice}}
        return settings


def _system(header: RequestHeader) -> JsonObject:
    return {"role": "system", "content": header["system"]}


def _wire(message: Message) -> Iterator[JsonObject]:
    if message["role"] == "assistant":
        yield _assistant(message)
        return
    rest = []
    for block in message["content"]:
        if block["type"] == "tool-result":
            yield {"role": "tool", "tool_call_id": block["toolCallId"], "content": _text(block["content"])}
        else:
            rest.append(block)
    if rest:
        yield {"role": "user", "content": _text(rest)}


def _assistant(message: Message) -> JsonObject:
    """Reasoning is not sent back: only some servers take it, and those say so in their record."""
    text = text_of(message["content"])
    calls = [
        {
            "id": block["id"],
            "type": "function",
            "function": {"name": _name(block["name"]), "arguments": _arguments(block["arguments"])},
        }
        for block in message["content"]
        if block["type"] == "tool-call"
    ]
    if not calls:
        return {"role": "assistant", "content": text}
    return {"role": "assistant", "content": text or None, "tool_calls": calls}


def _image(block: ImageBlock, media: Media) -> JsonObject:
    data = base64.b64encode(media(block)).decode("ascii")
    return {"type": "image_url", "image_url": {"url": f"data:{block['mediaType']};base64,{data}"}}


def _text(content: Sequence[Any], *, images: str = "not shown") -> str:
    """Text of blocks; an image is named, with where it is, so that the model knows of it."""
    return "\n".join(
        block["text"]
        if block["type"] == "text"
        else f"[{block['type']} {block.get('mediaType', '')} of {block.get('bytes', 0)} bytes, {images}]"
        for block in content
    )


def _name(name: str) -> str:
    """A name the API takes. A model may have called one that no tool has, and the call stays in the history."""
    return _NOT_IN_NAMES.sub("_", name)[:64] or "unnamed"


def _arguments(arguments: str) -> str:
    """Arguments the API takes. Several servers parse them again, and refuse the whole request if they cannot."""
    try:
        if isinstance(orjson.loads(arguments), dict):
            return arguments
    except orjson.JSONDecodeError:
        pass
    return orjson.dumps({"invalid_arguments": arguments}).decode() if arguments.strip() else "{}"


# --- reading answers -------------------------------------------------------------------------------

_FINISH = {
    "stop": "stop",
    "length": "length",
    "max_tokens": "length",
    "tool_calls": "tool-calls",
    "function_call": "tool-calls",
    "content_filter": "filter",
}


class _Call:
    """One tool call of an answer while it comes."""

    __slots__ = ("arguments", "block", "half", "id", "name", "wire_id")

    def __init__(self) -> None:
        self.wire_id: str | None = None
        self.id = ""
        self.name = ""
        self.block: int | None = None
        self.half = ""
        self.arguments: list[str] = []


class AnswerReader:
    """Turns the events of one answer into chunks.

    Args:
        compat: Of the server.
        new_id: Makes an id for a call that has none of its own.
    """

    def __init__(self, compat: Compat, new_id: Callable[[str | None], str]) -> None:
        self._compat = compat
        self._new_id = new_id
        self._next_block = 0
        self._open: tuple[int, str, list[str]] | None = None
        self._half = ""
        self._calls: list[_Call] = []
        self._by_key: dict[Any, _Call] = {}
        self._size = 0
        self._seen = False
        self._refused = False
        self._reason: str | None = None
        self._usage: JsonObject | None = None
        self.model: str | None = None

    def feed(self, event: JsonObject) -> Iterator[Chunk]:
        """Take one event, or a whole answer that was not streamed.

        Raises:
            ProviderError: ``too-large``.
        """
        if isinstance(event.get("model"), str):
            self.model = event["model"]
        if isinstance(event.get("usage"), dict):
            self._usage = event["usage"]
        for choice in event.get("choices") or ():
            if choice.get("index", 0) != 0:
                continue
            self._seen = True
            delta = choice.get("delta") or choice.get("message")
            if delta:
                yield from self._delta(delta)
            if choice.get("finish_reason"):
                self._reason = choice["finish_reason"]

    def end(self, *, said_done: bool) -> Iterator[Chunk]:
        """The answer is over: the chunks that close it.

        Raises:
            ProviderError: ``empty`` or ``stream-broken``: the answer is not whole.
        """
        if self._reason is None and not (said_done and self._seen):
            if self._seen:
                raise ProviderError("the model's answer broke off before its end", kind="stream-broken", retryable=True)
            raise ProviderError("the model's answer holds nothing", kind="empty", retryable=True)
        yield from self._close_open()
        for call in self._calls:
            if call.block is None:  # its name never came
                yield from self._start_call(call)
            block = {"type": "tool-call", "id": call.id, "name": call.name, "arguments": "".join(call.arguments)}
            yield {"type": "block-end", "index": call.block, "block": block}
        if self._usage is not None:
            yield {"type": "usage", "usage": usage_of(self._usage)}
        yield {"type": "finish", "reason": {"kind": self._kind()}}

    def _kind(self) -> str:
        kind = _FINISH.get(self._reason or "stop", "stop")
        if self._refused:
            return "filter"
        if kind in ("stop", "tool-calls"):  # servers mix the two up
            return "tool-calls" if self._calls else "stop"
        return kind

    def _delta(self, delta: JsonObject) -> Iterator[Chunk]:
        for key in self._compat.reasoning:
            if delta.get(key):
                yield from self._grow("reasoning", delta[key])
                break
        if delta.get("content"):
            yield from self._grow("text", delta["content"])
        if delta.get("refusal"):
            self._refused = True
            yield from self._grow("text", delta["refusal"])
        for position, part in enumerate(delta.get("tool_calls") or ()):
            yield from self._call(part, position)

    def _grow(self, kind: str, piece: Any) -> Iterator[Chunk]:
        if isinstance(piece, list):
            piece = "".join(part.get("text") or "" for part in piece if isinstance(part, dict))
        if not isinstance(piece, str):
            raise TypeError(f"a piece of {kind} is no text")
        if self._open is not None and self._open[1] != kind:
            yield from self._close_open()
        text, self._half = whole_characters(self._half + piece)
        if not text:
            return
        self._count(text)
        if self._open is None:
            self._open = (self._take_block(), kind, [])
            yield {"type": "block-start", "index": self._open[0], "blockType": kind}
        index, _, pieces = self._open
        pieces.append(text)
        yield {"type": f"{kind}-delta", "index": index, "text": text}

    def _close_open(self) -> Iterator[Chunk]:
        if self._open is None:
            return
        index, kind, pieces = self._open
        self._open = None
        self._half = ""
        yield {"type": "block-end", "index": index, "block": {"type": kind, "text": "".join(pieces)}}

    def _call(self, part: JsonObject, position: int) -> Iterator[Chunk]:
        function = part.get("function") or {}
        key = part.get("index", position)
        call = self._by_key.get(key)
        wire_id = part.get("id") or None
        # Some servers count every call as number 0 and tell them apart by the id alone.
        if call is None or (wire_id is not None and call.wire_id is not None and wire_id != call.wire_id):
            call = self._by_key[key] = _Call()
            call.wire_id = wire_id
            self._calls.append(call)
        if call.block is None:
            call.wire_id = call.wire_id or wire_id
            call.name += function.get("name") or ""
        arguments = function.get("arguments")
        if isinstance(arguments, dict):
            arguments = orjson.dumps(arguments).decode()
        if arguments:
            arguments, call.half = whole_characters(call.half + arguments)
            self._count(arguments)
            call.arguments.append(arguments)
        if call.block is not None:
            if arguments:
                yield self._call_delta(call, arguments)
        elif call.name:
            yield from self._start_call(call)

    def _start_call(self, call: _Call) -> Iterator[Chunk]:
        yield from self._close_open()
        call.block = self._take_block()
        call.id = self._new_id(call.wire_id)
        yield {"type": "block-start", "index": call.block, "blockType": "tool-call"}
        yield self._call_delta(call, "".join(call.arguments))

    @staticmethod
    def _call_delta(call: _Call, arguments: str) -> Chunk:
        return {
            "type": "tool-call-delta",
            "index": call.block,
            "id": call.id,
            "name": call.name,
            "argumentsDelta": arguments,
        }

    def _take_block(self) -> int:
        self._next_block += 1
        return self._next_block - 1

    def _count(self, text: str) -> None:
        self._size += len(text) if text.isascii() else len(text.encode())
        if self._size > CONTENT_BYTES:
            raise ProviderError(f"the model's answer is longer than {CONTENT_BYTES:,} bytes", kind="too-large")


def whole_characters(text: str) -> tuple[str, str]:
    """``text`` without surrogates, and the half of a character at its end that the next piece completes.

    Servers cut a character outside the basic plane in two escapes, and send them apart. A lone half is
    no text and cannot be written; it becomes U+FFFD.
    """
    if text.isascii():
        return text, ""
    half = text[-1] if "\ud800" <= text[-1] <= "\udbff" else ""
    whole = text[:-1] if half else text
    return whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace"), half


def usage_of(reported: JsonObject) -> Usage:
    """Disjoint buckets from an API's usage, whose ``prompt_tokens`` include the cached ones."""
    prompt = _number(reported.get("prompt_tokens")) or 0
    details = reported.get("prompt_tokens_details") or {}
    cached = _number(details.get("cached_tokens"))
    if cached is None:
        cached = _number(reported.get("prompt_cache_hit_tokens"))
    usage: Usage = {
        "inputTokens": max(prompt - (cached or 0), 0),
        "outputTokens": _number(reported.get("completion_tokens")) or 0,
    }
    if cached is not None:
        usage["cacheReadTokens"] = min(cached, prompt)
    reasoning = _number((reported.get("completion_tokens_details") or {}).get("reasoning_tokens"))
    if reasoning is not None:
        usage["reasoningTokens"] = reasoning
    return usage


def _number(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and value >= 0 else None


# --- errors ----------------------------------------------------------------------------------------

_QUOTA = frozenset({"insufficient_quota", "insufficient_balance", "billing_hard_limit_reached", "billing_not_active"})
_CONTEXT = frozenset({"context_length_exceeded", "exceed_context_size_error"})
# LiteLLM: "ContextWindowExceededError: ... exceeds the available context size", vLLM: "This model's maximum
# context length is 4096 tokens. However, you requested ...".
_CONTEXT_SAID = re.compile(
    r"context.?(length|window|size).{0,40}exceed|exceed.{0,60}context"
    r"|maximum context length|(prompt|input) is too long",
    re.IGNORECASE | re.DOTALL,
)
_STATUS_OF = {
    "authentication_error": 401,
    "invalid_api_key": 401,
    "permission_error": 403,
    "not_found_error": 404,
    "invalid_request_error": 400,
    "context_length_exceeded": 400,
    "exceed_context_size_error": 400,
    "insufficient_quota": 429,
    "rate_limit_error": 429,
    "rate_limit_exceeded": 429,
}


def error_facts(body: Any) -> tuple[str, str, int | None]:
    """Message, code and status that an error body states; the shapes differ from server to server."""
    try:
        return _error_facts(body)
    except (RecursionError, TypeError, ValueError):
        return "a reason that is too deep or too large to show", "error", None


def _error_facts(body: Any) -> tuple[str, str, int | None]:
    if isinstance(body, list) and body:
        body = body[0]
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        return (str(error) if error else "no reason given"), "error", None
    message = error.get("message") or error.get("detail") or error.get("error") or "no reason given"
    kinds = [value for value in (error.get("code"), error.get("type")) if isinstance(value, str)]
    kind = next((value for value in kinds if not value.isdecimal()), "error")
    codes = (str(error.get(key)) for key in ("code", "status"))
    status = next((int(code) for code in codes if code.isdecimal()), None)
    if status is None or not 400 <= status <= 599:
        status = next((_STATUS_OF[value] for value in kinds if value in _STATUS_OF), None)
    return (message if isinstance(message, str) else orjson.dumps(message).decode()), kind, status


def _is_context(status: int | None, kind: str, message: str) -> bool:
    return kind in _CONTEXT or (status in (400, 413, 422) and _CONTEXT_SAID.search(message) is not None)


# --- the provider ----------------------------------------------------------------------------------


def _check_address(address: str, key: str) -> None:
    """Refuse what can be no address. Done before the libraries that would do it are loaded."""
    problem = address_problem(address, proxy=key == "model.proxy")
    if problem is not None:
        raise ConfigError(f"{key}: {masked(address)!r} {problem}")


class OpenAIChatProvider:
    """A model behind an OpenAI-compatible endpoint.

    Args:
        spec: The model's settings.
        api_key: Sent as a bearer token; None for a server that wants none.
        new_id: A fresh random part for the id of a call that came without one of its own.
        now: Seconds since the epoch, to read ``retry-after`` dates.
        authorities: File or directory with certificate authorities instead of the usual ones.

    Attributes:
        answered_model: The model that the last answer names. Servers may ignore the one asked for.

    Raises:
        ConfigError: ``model.base_url`` or ``model.proxy`` is not usable.
    """

    name = "openai"

    def __init__(
        self,
        spec: ModelSpec,
        *,
        api_key: str | None,
        new_id: Callable[[], str],
        now: Callable[[], float] = time.time,
        authorities: str | None = None,
    ) -> None:
        _check_address(spec.base_url or OPENAI_URL, "model.base_url")
        if spec.proxy is not None:
            _check_address(spec.proxy, "model.proxy")
        dialect = ChatDialect(dialect_for(spec.base_url, images=spec.images))
        self.dialect: Dialect = dialect
        self._compat = dialect.compat
        self.answered_model: str | None = None
        self._spec = spec
        self._address = spec.base_url or OPENAI_URL
        self._authorities = authorities
        self._client: HttpClient | None = None
        self._making = threading.Lock()
        self._key = api_key
        self._credential = (
            f"model.api_key_env ({spec.api_key_env})" if spec.api_key_env else "model.api_key_file or model.api_key_env"
        )
        self._headers = [("content-type", "application/json"), ("accept", "text/event-stream")]
        if api_key is not None:
            self._headers.append(("authorization", f"Bearer {api_key}"))
        self._random = new_id
        self._now = now
        self._taken: set[str] = set()

    def stream(self, body: bytes, *, cancellation: Cancellation) -> Iterator[Chunk]:
        """Send one request and yield the chunks of its answer.

        Raises:
            ProviderError: See ``runner.providers.base.Provider``.
        """
        from runner.providers.http import CancelledRequestError

        try:
            answer = self._connect().post(_CALL, body, self._headers, cancellation=cancellation)
            try:
                yield from self._chunks(answer)
            finally:
                answer.close()
        except CancelledRequestError:
            return

    def close(self) -> None:
        """Close idle connections."""
        if self._client is not None:
            self._client.close()

    def _connect(self) -> HttpClient:
        """The client, made for the first request: until then the HTTP libraries can be loaded beside other work."""
        from runner.providers.http import HttpClient

        with self._making:
            if self._client is None:
                self._client = HttpClient(
                    self._address,
                    proxy=self._spec.proxy,
                    first_token=self._spec.first_token,
                    idle=self._spec.idle,
                    authorities=self._authorities,
                )
            return self._client

    def _chunks(self, answer: Answer) -> Iterator[Chunk]:
        if not 200 <= answer.status < 300:
            raise self._refused(answer)
        if answer.content_type == "text/html":
            raise self._no_api("a web page")
        reader = AnswerReader(self._compat, self._call_id)
        if answer.content_type == "application/json":
            event = self._parse(answer.body(BODY_BYTES), answer)
            if "choices" not in event:
                raise self._no_api("JSON that is no chat completion")
            yield from self._read(reader.feed(event))
            said_done = True
        else:
            said_done = False
            for data in answer.events():
                if data == "[DONE]":
                    said_done = True
                    answer.drain()
                    break
                yield from self._read(reader.feed(self._parse(data, answer)))
        self.answered_model = reader.model
        yield from self._read(reader.end(said_done=said_done))

    def _no_api(self, what: str) -> ProviderError:
        hint = call_hint(self._address, _CALL) or "check model.base_url: most servers want /v1 at its end"
        return ProviderError(f"{self._address} answered with {what}", kind="not-an-api", hint=hint)

    @staticmethod
    def _read(chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        """The chunks, unless what they are read from has values of other types or depths than an answer has."""
        try:
            yield from chunks
        except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
            raise ProviderError(
                "the model's answer holds an event of a shape that no chat completion has",
                kind="stream-broken",
                retryable=True,
            ) from error

    def _parse(self, data: str | bytes, answer: Answer) -> JsonObject:
        try:
            event = orjson.loads(data)
        except orjson.JSONDecodeError:
            try:
                event = json.loads(data)  # takes the lone surrogates that orjson refuses
            except (ValueError, RecursionError) as error:
                what = "is too deep" if isinstance(error, RecursionError) else "is not JSON"
                raise ProviderError(
                    f"the model's answer holds an event that {what}: {self._said(str(data))}",
                    kind="stream-broken",
                    retryable=True,
                ) from error
        if not isinstance(event, dict):
            return {}
        if event.get("error"):
            message, kind, status = error_facts(event)
            raise self._failure(status, message, kind, answer.headers)
        return event

    def _refused(self, answer: Answer) -> ProviderError:
        raw = answer.body(ERROR_BYTES, cut=True)
        try:
            message, kind, _ = error_facts(orjson.loads(raw))
        except orjson.JSONDecodeError:
            message, kind = raw.decode("utf-8", "replace"), "error"
            if answer.content_type == "text/html":
                message = "a web page"
        return self._failure(answer.status, message.strip() or "no reason given", kind, answer.headers)

    def _failure(self, status: int | None, message: str, kind: str, headers: Mapping[str, str]) -> ProviderError:
        return failure(
            status,
            self._said(message),
            kind=kind,
            headers=headers,
            now=self._now(),
            quota=kind in _QUOTA,
            context=_is_context(status, kind, message),
            credential=self._credential,
            base_url=self._address,
            call=_CALL,
        )

    def _said(self, text: str) -> str:
        """What a server says, on one line, cut, and without the key that some repeat."""
        if self._key is not None:
            text = text.replace(self._key, "[redacted]")
        text = " ".join(text.split())
        return text if len(text) <= SAID_CHARACTERS else text[:SAID_CHARACTERS] + "..."

    def _call_id(self, wire_id: str | None) -> str:
        """The server's id, or one of ours if it has none or has given the same one before."""
        call_id = wire_id
        while call_id is None or call_id in self._taken:
            call_id = f"call_{self._random()}"
        self._taken.add(call_id)
        return call_id
