"""A model server on loopback that says exactly what a test tells it to, byte for byte.

Real sockets, one thread a connection, requests recorded as they came. A reply is a row of steps, so a test
can cut a stream anywhere, wait in the middle, or hang up::

    with ModelServer([chat_reply(text="Hello")]) as server:
        ...  # point model.base_url at server.url
    assert server.requests[0].json()["model"] == "mock"
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType


class End(Enum):
    """Steps that end a connection."""

    CLOSE = "close"
    """The server closes it in an orderly way."""

    RESET = "reset"
    """The server drops it: the client sees a reset."""

    HANG = "hang"
    """Nothing more comes; the connection stays open until the client or the test ends it."""


Step = bytes | float | threading.Event | End
"""Bytes to send, seconds to wait, an event to wait for, or an end."""

Reply = tuple[Step, ...]
"""What the server does with one request. Without an ``End`` the connection is kept for the next one."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """One request as it came.

    Attributes:
        target: Request target, an absolute address when the server is used as a proxy.
        headers: By lower-case name.
        body: As sent.
        connection: Number of the connection, from 1.
        at: ``time.monotonic()`` when it had come in whole.
    """

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes
    connection: int
    at: float

    def json(self) -> Any:
        """The body, decoded."""
        return json.loads(self.body)


class ModelServer:
    """Serves replies in order, one a request; or what a function makes of each request.

    Args:
        replies: The replies, or the function.
        context: Makes the server speak TLS.
        host: Address to listen on.

    Attributes:
        requests: Every request, in order.
        url: For ``model.base_url``.
    """

    def __init__(
        self,
        replies: Iterable[Reply] | Callable[[RecordedRequest], Reply] = (),
        *,
        context: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.requests: list[RecordedRequest] = []
        self._replies = replies if callable(replies) else iter(replies)
        self._context = context
        self._listener = socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=64
        )
        self.port: int = self._listener.getsockname()[1]
        name = f"[{host}]" if ":" in host else host
        self.url = f"{'https' if context else 'http'}://{name}:{self.port}/v1"
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._connections = 0
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="model-server", daemon=True)

    def __enter__(self) -> Self:
        """Start to listen."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close every connection."""
        self._stopped.set()
        # A listener that another thread waits on is woken by shutting it down.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        with self._lock:
            for connection in self._open:
                _quietly(lambda held=connection: held.shutdown(socket.SHUT_RDWR))  # type: ignore[misc]  # bound now

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._open.append(connection)
                self._connections += 1
                number = self._connections
            threading.Thread(target=self._serve, args=(connection, number), daemon=True).start()

    def _serve(self, connection: socket.socket, number: int) -> None:
        wire = connection
        try:
            if self._context is not None:
                wire = self._context.wrap_socket(connection, server_side=True)
            with wire.makefile("rb") as reader:
                while (request := _read_request(reader, number)) is not None:
                    if not self._answer(wire, request):
                        break
        except OSError:
            pass  # the client is gone, or the test is over
        finally:
            with self._lock:
                self._open.remove(connection)
            _quietly(wire.close)
            _quietly(connection.close)

    def _answer(self, wire: socket.socket, request: RecordedRequest) -> bool:
        """Play one reply; returns whether the connection goes on."""
        with self._lock:
            self.requests.append(request)
            if callable(self._replies):
                reply = self._replies(request)
            else:
                reply = next(self._replies, json_reply(500, {"error": {"message": "the test has no more replies"}}))
        for step in reply:
            match step:
                case bytes():
                    wire.sendall(step)
                case threading.Event():
                    step.wait(60)
                case End.CLOSE:
                    return False
                case End.RESET:
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    return False
                case End.HANG:
                    while not self._stopped.wait(0.05) and not _gone(wire):
                        pass
                    return False
                case _:
                    self._stopped.wait(step)
        return True


def _read_request(reader: Any, number: int) -> RecordedRequest | None:
    words = reader.readline(65536).decode("latin-1").split(" ")
    if len(words) != 3:
        return None  # the end, or something that is no HTTP
    method, target, _ = words
    headers: dict[str, str] = {}
    while (line := reader.readline(65536)).strip():
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    body = reader.read(int(headers.get("content-length", 0)))
    return RecordedRequest(method, target, headers, body, number, time.monotonic())


def _gone(wire: socket.socket) -> bool:
    import select

    poll = select.poll()
    poll.register(wire.fileno(), select.POLLRDHUP)
    return bool(poll.poll(0))


def _quietly(action: Callable[[], object]) -> None:
    with contextlib.suppress(OSError):  # already closed by the other side
        action()


# --- bytes of answers ------------------------------------------------------------------------------


def http_reply(status: int, body: bytes, content_type: str, headers: Mapping[str, str] | None = None) -> Reply:
    """A whole answer with its length."""
    lines = [f"HTTP/1.1 {status} X", f"content-type: {content_type}", f"content-length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
    return ("\r\n".join([*lines, "", ""]).encode("latin-1") + body,)


def json_reply(status: int, value: Any, headers: Mapping[str, str] | None = None) -> Reply:
    """A whole answer in JSON."""
    return http_reply(status, json.dumps(value).encode(), "application/json", headers)


STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
"""Head of a streamed answer; its body is made of ``chunked`` pieces."""

STREAM_END = b"0\r\n\r\n"
"""End of a chunked body."""


def chunked(data: bytes) -> bytes:
    """``data`` as one piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(value: Any, *, newline: bytes = b"\n") -> bytes:
    """One server-sent event; a string stands for itself, anything else is written as JSON."""
    data = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return b"data: " + data.encode("utf-8", "surrogatepass") + newline * 2


def stream_reply(events: Iterable[Any], *, done: bool = True, newline: bytes = b"\n") -> Reply:
    """A streamed answer, each event a chunk of its own."""
    pieces = [chunked(event(value, newline=newline)) for value in events]
    if done:
        pieces.append(chunked(event("[DONE]", newline=newline)))
    return (STREAM_HEAD + b"".join(pieces) + STREAM_END,)


def chat_events(
    text: str = "",
    *,
    reasoning: str = "",
    calls: Sequence[tuple[str, str, str]] = (),
    finish: str | None = None,
    usage: Mapping[str, Any] | None = None,
    model: str = "mock",
) -> list[dict[str, Any]]:
    """Events of one Chat Completions answer.

    Args:
        text: What the model says.
        reasoning: Its reasoning, as ``reasoning_content``.
        calls: ``(id, name, arguments)`` each.
        finish: ``finish_reason``; None derives it from the calls.
        usage: The usage object of a trailing event; None leaves it out.
        model: Name of the model.
    """
    base = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": model}

    def choice(delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {**base, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]}

    events = [choice({"role": "assistant", "content": None})]
    events += [choice({"reasoning_content": piece}) for piece in _halves(reasoning)]
    events += [choice({"content": piece}) for piece in _halves(text)]
    for index, (call_id, name, arguments) in enumerate(calls):
        first = {"index": index, "id": call_id, "type": "function", "function": {"name": name, "arguments": ""}}
        events.append(choice({"tool_calls": [first]}))
        events += [
            choice({"tool_calls": [{"index": index, "function": {"arguments": piece}}]}) for piece in _halves(arguments)
        ]
    events.append(choice({}, finish or ("tool_calls" if calls else "stop")))
    if usage is not None:
        events.append({**base, "choices": [], "usage": dict(usage)})
    return events


def chat_reply(
    text: str = "",
    *,
    reasoning: str = "",
    calls: Sequence[tuple[str, str, str]] = (),
    finish: str | None = None,
    usage: Mapping[str, Any] | None = None,
    model: str = "mock",
) -> Reply:
    """One streamed Chat Completions answer; arguments as for ``chat_events``."""
    return stream_reply(chat_events(text, reasoning=reasoning, calls=calls, finish=finish, usage=usage, model=model))


def recorded_reply(path: Path) -> Reply:
    """A recorded answer: status line, headers and body as they came on the wire, then the end."""
    return (path.read_bytes(), End.CLOSE)


def _halves(text: str) -> list[str]:
    middle = len(text) // 2
    return [piece for piece in (text[:middle], text[middle:]) if piece]
