"""The sockets under a model request: every wait ends with data, a deadline or the cancellation.

httpcore takes a network backend, and this is ours. One wait covers the socket and the descriptor of
the cancellation, so it returns at once when the flag goes up; and within ``POLL_SECONDS`` when the flag
goes up in a signal handler that the wait itself holds up.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import socket
import ssl
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import httpcore

from runner.errors import ProviderError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runner.cancellation import Cancellation

POLL_SECONDS = 1.0
"""Longest single wait: a signal that arrives just before a wait is handled after this long at most."""

CONNECT_SECONDS = 15.0
"""Time for name resolution, connecting and the TLS handshake together."""

DRAIN_SECONDS = 0.25
"""How long the end of an answer may lag behind its last event before the connection is given up."""


class CancelledRequestError(Exception):
    """The cancellation went up while a request was under way. Ends the stream, is no failure."""


class Exchange:
    """The time limits and the cancellation of one request; every wait of its socket goes through it."""

    def __init__(self, cancellation: Cancellation, *, first_token: float, idle: float) -> None:
        self.cancellation = cancellation
        self.first_token = first_token
        self.idle = idle
        self._first_deadline = time.monotonic() + first_token
        self._phase_deadline = math.inf
        self._phase = "first"

    def connecting(self) -> None:
        """From now on: until the connection stands."""
        self._phase = "connect"
        self._phase_deadline = time.monotonic() + CONNECT_SECONDS

    def sending(self) -> None:
        """From now on: until the first event."""
        self._phase = "first"
        self._phase_deadline = math.inf

    def streaming(self) -> None:
        """From now on only silence counts."""
        self._phase = "stream"
        self._first_deadline = self._phase_deadline = math.inf

    def draining(self) -> None:
        """From now on: for the end of a body whose content is known."""
        self._phase = "drain"
        self._first_deadline = math.inf
        self._phase_deadline = time.monotonic() + DRAIN_SECONDS

    def check_cancelled(self) -> None:
        """Raise if the request was cancelled."""
        if self.cancellation.cancelled:
            raise CancelledRequestError

    def check(self) -> None:
        """Raise if the request was cancelled or has used up its time to the first event."""
        self.check_cancelled()
        if time.monotonic() >= min(self._first_deadline, self._phase_deadline):
            self._expire(silence=False)

    def wait(self, descriptor: int, events: int, *, limit: float = math.inf) -> bool:
        """Block until ``descriptor`` is ready; False when ``limit`` seconds have passed first.

        Raises:
            CancelledRequestError: The cancellation went up.
            ProviderError: One of the request's own limits ran out.
        """
        poll = select.poll()
        poll.register(descriptor, events)
        poll.register(self.cancellation.fileno(), select.POLLIN)
        began = time.monotonic()
        silence = began + self.idle
        own = began + limit
        while True:
            self.check_cancelled()
            deadline = min(silence, self._first_deadline, self._phase_deadline, own)
            left = deadline - time.monotonic()
            if left <= 0:
                if deadline == own:
                    return False
                self._expire(silence=deadline == silence)
            for ready, _ in poll.poll(math.ceil(min(left, POLL_SECONDS) * 1000)):
                if ready == descriptor:
                    return True

    def _expire(self, *, silence: bool) -> NoReturn:
        if self._phase == "connect":
            raise httpcore.ConnectTimeout(f"no connection within {min(CONNECT_SECONDS, self.first_token):g} s")
        if self._phase == "drain":
            raise httpcore.ReadTimeout("the end of the answer did not come")
        if silence:
            raise ProviderError(
                f"the model sent nothing for {self.idle:g} s",
                kind="idle-timeout",
                retryable=True,
                hint="raise limits.idle if the model needs longer pauses",
            )
        raise ProviderError(
            f"the model sent no event within {self.first_token:g} s",
            kind="first-token-timeout",
            retryable=True,
            hint="raise model.first_token if the model needs longer to begin",
        )


class Line(Protocol):
    """Whose sockets these are: one request at a time uses them, and ``current`` is that one."""

    current: Exchange


class Stream(httpcore.NetworkStream):
    """A non-blocking socket whose waits belong to the line's present exchange."""

    def __init__(self, sock: socket.socket, line: Line) -> None:
        self._sock = sock
        self._line = line

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:  # noqa: ARG002  # httpcore's interface
        """Bytes as they come, empty at the end."""
        while True:
            try:
                return self._sock.recv(max_bytes)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._line.current.wait(self._sock.fileno(), select.POLLIN)
            except ssl.SSLWantWriteError:
                self._line.current.wait(self._sock.fileno(), select.POLLOUT)
            except OSError as error:
                raise httpcore.ReadError(reason_of(error)) from error

    def write(self, buffer: bytes, timeout: float | None = None) -> None:  # noqa: ARG002  # httpcore's interface
        """Send all of ``buffer``."""
        view = memoryview(buffer)
        while view:
            try:
                view = view[self._sock.send(view) :]
            except (BlockingIOError, ssl.SSLWantWriteError):
                self._line.current.wait(self._sock.fileno(), select.POLLOUT)
            except ssl.SSLWantReadError:
                self._line.current.wait(self._sock.fileno(), select.POLLIN)
            except OSError as error:
                raise httpcore.WriteError(reason_of(error)) from error

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()

    def start_tls(
        self,
        ssl_context: ssl.SSLContext,
        server_hostname: str | None = None,
        timeout: float | None = None,  # noqa: ARG002  # httpcore's interface
    ) -> httpcore.NetworkStream:
        """The same connection, encrypted and its certificate checked."""
        exchange = self._line.current
        exchange.connecting()
        try:
            wrapped = ssl_context.wrap_socket(
                self._sock, server_hostname=server_hostname, do_handshake_on_connect=False
            )
        except (OSError, ValueError) as error:
            self.close()
            raise httpcore.ConnectError(reason_of(error)) from error
        try:
            while True:
                try:
                    wrapped.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    exchange.wait(wrapped.fileno(), select.POLLIN)
                except ssl.SSLWantWriteError:
                    exchange.wait(wrapped.fileno(), select.POLLOUT)
        except ssl.SSLCertVerificationError as error:
            wrapped.close()
            raise ProviderError(
                f"the certificate of {server_hostname} is not trusted: {error.verify_message}",
                kind="tls",
                hint="check model.base_url; set SSL_CERT_FILE for a certificate authority of your own",
            ) from error
        except OSError as error:
            wrapped.close()
            raise httpcore.ConnectError(f"TLS handshake: {reason_of(error)}") from error
        except BaseException:
            wrapped.close()
            raise
        exchange.sending()
        return Stream(wrapped, self._line)

    def get_extra_info(self, info: str) -> Any:
        """``is_readable`` of an idle connection means that the server has closed it."""
        if info == "is_readable":
            poll = select.poll()
            try:
                poll.register(self._sock.fileno(), select.POLLIN)
            except ValueError:
                return True  # closed by us
            return bool(poll.poll(0))
        if info == "socket":
            return self._sock
        if info == "ssl_object" and isinstance(self._sock, ssl.SSLSocket):
            return self._sock
        return None


class Backend(httpcore.NetworkBackend):
    """Makes the sockets of one line."""

    def __init__(self, line: Line) -> None:
        self._line = line

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ARG002  # httpcore's interface
        local_address: str | None = None,  # noqa: ARG002  # likewise
        socket_options: Iterable[Any] | None = None,  # noqa: ARG002  # likewise
    ) -> httpcore.NetworkStream:
        """Try the addresses of ``host`` one after another, each with a fair share of the time left."""
        exchange = self._line.current
        exchange.connecting()
        deadline = time.monotonic() + CONNECT_SECONDS
        addresses = _resolve(host, port, exchange)
        failure: OSError | None = None
        for number, (family, address) in enumerate(addresses):
            share = (deadline - time.monotonic()) / (len(addresses) - number)
            try:
                sock = _connect(family, address, exchange, limit=share)
            except OSError as error:
                failure = error
                continue
            exchange.sending()
            return Stream(sock, self._line)
        raise httpcore.ConnectError(reason_of(failure) if failure else "the name has no address")


def _resolve(host: str, port: int, exchange: Exchange) -> list[tuple[int, Any]]:
    """Addresses of ``host``. A name is looked up in a thread, since nothing can interrupt the resolver."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except socket.gaierror:
        pass
    except UnicodeError:
        raise httpcore.ConnectError(f"cannot resolve {host}: it is no name of a host") from None
    else:
        return [(family, address) for family, *_, address in found]
    reading, writing = os.pipe2(os.O_CLOEXEC)
    answer: list[Any] = []

    def look_up() -> None:
        try:
            answer.append(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            answer.append(error)
        finally:
            os.close(writing)  # makes the other end readable

    threading.Thread(target=look_up, name="resolve", daemon=True).start()
    try:
        exchange.wait(reading, select.POLLIN | select.POLLHUP)
    finally:
        os.close(reading)
    if isinstance(answer[0], OSError):
        raise httpcore.ConnectError(f"cannot resolve {host}: {reason_of(answer[0])}") from answer[0]
    return [(family, address) for family, *_, address in answer[0]]


def _connect(family: int, address: Any, exchange: Exchange, *, limit: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with contextlib.suppress(BlockingIOError):
            sock.connect(address)
        ready = exchange.wait(sock.fileno(), select.POLLOUT, limit=max(limit, 0))
        code = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) if ready else errno.ETIMEDOUT
    except BaseException:
        sock.close()
        raise
    if code:
        sock.close()
        raise OSError(code, os.strerror(code))
    return sock


def reason_of(error: BaseException) -> str:
    """What went wrong, without Python's decoration."""
    if isinstance(error, OSError) and error.strerror:
        return str(error.strerror)
    return str(error) or type(error).__name__
