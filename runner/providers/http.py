"""HTTP for the model APIs: one POST, one answer, its events. The only module that imports httpx.

httpx gives requests, responses and URLs, httpcore the protocol. The transport is ours because httpx's
own takes no network backend, and without one there is neither a deadline to the first event nor a
cancellation of name lookup, connecting and sending (``sockets.py``). httpx's client is left out: cookies,
redirects and authentication flows, which must not happen here, are a third of a request's CPU.

Nothing of the environment is read, nothing is retried: a failed request is one ``ProviderError``, and the
loop decides. No effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError, ProviderError

# Two imports that are of no use here and cost much, barred in the way Python has for it; both are optional.
# httpx imports its own command line wherever rich and pygments happen to be installed; httpcore imports anyio.
_BARRED = [name for name in ("httpx._main", "anyio") if name not in sys.modules]
sys.modules |= dict.fromkeys(_BARRED)  # type: ignore[arg-type]  # None is how Python spells "not to be imported"

import httpcore  # noqa: E402  # below the bar above
import httpx  # noqa: E402  # below the bar above
import httpx_sse  # noqa: E402  # imports httpx

from runner.providers.sockets import Backend, CancelledRequestError, Exchange, reason_of  # noqa: E402  # imports httpcore

for _name in _BARRED:
    del sys.modules[_name]

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from runner.cancellation import Cancellation

__all__ = ["Answer", "CancelledRequestError", "HttpClient"]

KEEP_SECONDS = 60.0
"""An idle connection older than this is not used again: its path may be gone without a word."""

RAW_BYTES = 268_435_456
"""Longest stream in bytes of the wire. Framing is many times the content, which the adapter caps."""

EVENT_BYTES = 8_388_608
"""Longest single event of a stream."""


class _Line(httpx.BaseTransport):
    """One connection at a time to one origin; used by one request at a time."""

    current: Exchange

    def __init__(self, pool_for: Callable[[_Line], httpcore.ConnectionPool]) -> None:
        self._pool = pool_for(self)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        """Send ``request``; returns when the head of the answer is there."""
        answer = self._pool.handle_request(
            httpcore.Request(
                method=request.method,
                url=httpcore.URL(
                    scheme=request.url.raw_scheme,
                    host=request.url.raw_host,
                    port=request.url.port,
                    target=request.url.raw_path,
                ),
                headers=request.headers.raw,
                content=request.stream,
            )
        )
        return httpx.Response(answer.status, headers=answer.headers, stream=_Body(answer))

    def close(self) -> None:
        """Close the connection."""
        self._pool.close()


class _Body(httpx.SyncByteStream):
    def __init__(self, answer: httpcore.Response) -> None:
        self._answer = answer

    def __iter__(self) -> Iterator[bytes]:
        return self._answer.iter_stream()

    def close(self) -> None:
        self._answer.close()


class _Pieces(httpx.SyncByteStream):
    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces


class Answer:
    """The head of one answer, and its body while it comes.

    Attributes:
        status: HTTP status.
        headers: By lower-case name.
    """

    def __init__(self, client: HttpClient, line: _Line, response: httpx.Response) -> None:
        self._client = client
        self._line = line
        self._response = response
        self._pieces = iter(response.stream)  # type: ignore[arg-type]  # a synchronous one, from _Line
        self._open = True
        self._begun = False
        self._since_event = 0
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers

    @property
    def content_type(self) -> str:
        """The media type alone, lower case."""
        return self.headers.get("content-type", "").partition(";")[0].strip().lower()

    def events(self) -> Iterator[str]:
        """The data of each server-sent event that has any.

        Raises:
            ProviderError: ``first-token-timeout``, ``idle-timeout``, ``stream-broken``, ``too-large``.
            CancelledRequestError: The cancellation went up.
        """
        exchange = self._line.current
        # The parser asks for the media type; whether this is a stream is decided by who calls.
        stream = httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=_Pieces(self._checked()))
        for event in httpx_sse.EventSource(stream).iter_sse():
            if event.data:
                if not self._begun:
                    self._begun = True
                    exchange.streaming()
                self._since_event = 0
                yield event.data

    def _checked(self) -> Iterator[bytes]:
        exchange = self._line.current
        size = 0
        for piece in self._read():
            size += len(piece)
            self._since_event += len(piece)
            if size > RAW_BYTES or self._since_event > EVENT_BYTES + len(piece):
                raise ProviderError(f"the model's answer has no end: {size:,} bytes read", kind="too-large")
            if not self._begun:
                exchange.check()  # comments alone do not put the first event off
            yield piece

    def body(self, limit: int, *, cut: bool = False) -> bytes:
        """The whole body, at most ``limit`` bytes; longer ones are cut, or else an error.

        Raises:
            ProviderError: As for ``events``.
            CancelledRequestError: The cancellation went up.
        """
        found = bytearray()
        for piece in self._read():
            found += piece
            if len(found) > limit:
                if cut:
                    break
                raise ProviderError(f"the model's answer is longer than {limit:,} bytes", kind="too-large")
        return bytes(found[:limit])

    def drain(self) -> None:
        """Read the rest of a body whose content is known, so that the connection can be used again."""
        self._line.current.draining()
        with contextlib.suppress(ProviderError, CancelledRequestError):
            for _ in self._read():
                pass

    def close(self) -> None:
        """Give the connection back; one whose answer was not read to its end is closed."""
        if self._open:
            self._open = False
            try:
                self._response.stream.close()  # type: ignore[union-attr]  # a synchronous one, from _Line
            finally:
                self._client.give_back(self._line)

    def _read(self) -> Iterator[bytes]:
        try:
            for piece in self._pieces:  # noqa: UP028  # yield from would close the body when a reader stops early
                yield piece
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException) as error:
            self._line.current.check_cancelled()
            raise _broken(error) from error


class HttpClient:
    """Sends requests to one model API. May be used from several threads at once.

    Args:
        base_url: Address of the API, without the path of a call.
        proxy: ``http://[user:password@]host:port`` or None.
        first_token: Seconds from sending a request to its first event.
        idle: Seconds without a byte.
        authorities: File or directory with certificate authorities instead of the usual ones.

    Raises:
        ConfigError: ``base_url`` or ``proxy`` is no address. Whether it is one for a model is the caller's business.
    """

    def __init__(
        self,
        base_url: str,
        *,
        proxy: str | None = None,
        first_token: float = 60.0,
        idle: float = 120.0,
        authorities: str | None = None,
    ) -> None:
        self._base = _parse(base_url, "model.base_url")
        self._proxy = _parse(proxy, "model.proxy") if proxy else None
        self._first_token = first_token
        self._idle = idle
        self._authorities = authorities
        self._context: ssl.SSLContext | None = None
        self._addresses: dict[str, httpx.URL] = {}
        self._idle_lines: list[_Line] = []
        self._closed = False
        self.origin = f"{self._base.scheme}://{self._base.netloc.decode('ascii')}"

    def post(self, path: str, body: bytes, headers: Sequence[tuple[str, str]], *, cancellation: Cancellation) -> Answer:
        """Send ``body`` to ``base_url`` + ``path``; returns when the head of the answer is there.

        Args:
            path: Begins with a slash.
            body: Sent as it is, with its length.
            headers: Beside host, content-length, accept-encoding and user-agent.
            cancellation: Ends the request wherever it is.

        Raises:
            ProviderError: ``connect``, ``tls``, ``proxy``, ``first-token-timeout``, ``stream-broken``.
            CancelledRequestError: The cancellation went up.
        """
        if cancellation.cancelled:
            raise CancelledRequestError
        try:
            line = self._idle_lines.pop()
        except IndexError:
            line = _Line(self._pool)
        line.current = Exchange(cancellation, first_token=self._first_token, idle=self._idle)
        request = httpx.Request(
            "POST",
            self._address(path),
            headers=[("user-agent", "nightshift"), ("accept-encoding", "identity"), *headers],
            content=body,
        )
        try:
            response = line.handle_request(request)
        except BaseException as error:
            self.give_back(line)
            if cancellation.cancelled:
                raise CancelledRequestError from error
            if isinstance(error, httpcore.ConnectError | httpcore.ConnectTimeout):
                raise self._unreachable(error) from error
            if isinstance(error, httpcore.ProxyError):
                raise self._proxy_failed(error) from error
            if isinstance(error, httpcore.NetworkError | httpcore.ProtocolError | httpcore.TimeoutException):
                raise _broken(error) from error
            raise
        return Answer(self, line, response)

    def close(self) -> None:
        """Close idle connections; those in use close when their answers do."""
        self._closed = True
        while self._idle_lines:
            self._idle_lines.pop().close()

    def give_back(self, line: _Line) -> None:
        """Keep ``line`` for the next request."""
        if self._closed:
            line.close()
        else:
            self._idle_lines.append(line)

    def _address(self, path: str) -> httpx.URL:
        """Kept, because building one costs as much as parsing an answer's head."""
        address = self._addresses.get(path)
        if address is None:
            whole = self._base.raw_path.rstrip(b"/") + path.encode("ascii")
            address = self._addresses[path] = self._base.copy_with(raw_path=whole)
        return address

    def _pool(self, line: _Line) -> httpcore.ConnectionPool:
        settings: dict[str, Any] = {
            "ssl_context": self._tls(),
            "max_connections": 1,
            "max_keepalive_connections": 1,
            "keepalive_expiry": KEEP_SECONDS,
            "network_backend": Backend(line),
        }
        if self._proxy is None:
            return httpcore.ConnectionPool(**settings)
        credentials = httpx.Proxy(self._proxy).raw_auth
        return httpcore.HTTPProxy(
            proxy_url=httpcore.URL(
                scheme=self._proxy.raw_scheme, host=self._proxy.raw_host, port=self._proxy.port, target=b"/"
            ),
            proxy_auth=credentials,
            **settings,
        )

    def _tls(self) -> ssl.SSLContext | None:
        """None where no TLS is spoken: loading the certificate authorities takes 20 ms."""
        if self._context is None and self._base.scheme == "https":
            try:
                self._context = _certificates(self._authorities)
            except OSError as error:
                raise ConfigError(
                    f"cannot load certificates from {self._authorities}: {reason_of(error)}",
                    hint="check SSL_CERT_FILE or SSL_CERT_DIR",
                ) from error
        return self._context

    def _unreachable(self, error: Exception) -> ProviderError:
        through, keys = "", "is model.base_url"
        if self._proxy is not None:
            through, keys = f" through the proxy {self._proxy.host}", "are model.base_url and model.proxy"
        return ProviderError(
            f"cannot connect to {self.origin}{through}: {reason_of(error)}",
            kind="connect",
            retryable=True,
            hint=f"is the server running, and {keys} right?",
        )

    def _proxy_failed(self, error: Exception) -> ProviderError:
        return ProviderError(
            f"the proxy refused the connection to {self.origin}: {reason_of(error)}",
            kind="proxy",
            retryable=str(error).startswith("5"),
            hint="check model.proxy",
        )


def _certificates(authorities: str | None) -> ssl.SSLContext:
    if authorities is None:
        return httpx.create_ssl_context(trust_env=False)
    import ssl

    if os.path.isdir(authorities):  # noqa: PTH112  # a path from the environment, used once
        return ssl.create_default_context(capath=authorities)
    return ssl.create_default_context(cafile=authorities)


def _parse(address: str, key: str) -> httpx.URL:
    try:
        return httpx.URL(address)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{key}: not an address: {error}", hint="for example http://127.0.0.1:8000/v1") from error


def _broken(error: Exception) -> ProviderError:
    return ProviderError(f"the connection to the model broke: {reason_of(error)}", kind="stream-broken", retryable=True)
