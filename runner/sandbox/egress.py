"""The network allowlist: a proxy in the runner, the only way out of a command's own network.

Invariants: a name is resolved here, once, and the connection goes to that very address; what is not on the list is
denied, and so is an address of this machine or of a private network unless a rule names it; every decision is reported
before a byte goes out. A redirect is a new request, so it is decided anew. Speaks HTTP CONNECT and plain HTTP
with absolute addresses. Reports ``sandbox/egress`` through ``decided``; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import threading
import time
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from runner import diagnostics
from runner.errors import ConfigError, RunnerError
from runner.record import record
from runner.sandbox.base import PROXY_PORT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Address = ipaddress.IPv4Address | ipaddress.IPv6Address

ALLOWED = "allowed"
DENIED = "denied"

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_HEAD_BYTES = 65_536
_CHUNK = 65_536
_CONNECT_SECONDS = 30.0
_HEAD_SECONDS = 30.0
_IDLE_SECONDS = 600.0
_CLOSE_SECONDS = 1.0
_CONNECTIONS = 128
_HOP_HEADERS = frozenset({"host", "connection", "proxy-connection", "proxy-authorization", "keep-alive"})
_NAT64 = ipaddress.ip_network("64:ff9b::/96")


@record
class Endpoint:
    """A host, lower case and without a dot at its end, and a port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_endpoint(text: str, *, port: int | None = None) -> Endpoint:
    """``host:port``, an IPv6 address in brackets.

    Args:
        text: The text.
        port: Port of a text without one; None demands one.

    Raises:
        ConfigError: CONFIG_INVALID, it is not one.
    """
    hint = "write host:port, as in pypi.org:443"
    try:
        parts = urlsplit(f"//{text}")
        found = parts.port or port
        host = (parts.hostname or "").rstrip(".")
    except ValueError as error:
        raise ConfigError(f"{text!r} is no host and port: {error}", hint=hint) from error
    plain = bool(host) and not any(each.isspace() or each in "*/?#@%\\" for each in text)
    if not plain or found is None:
        raise ConfigError(f"{text!r} is no host and port", hint=hint)
    literal = _address(host)
    return Endpoint(host.lower() if literal is None else str(literal), found)


_STATUS = {400: "Bad Request", 403: "Forbidden", 502: "Bad Gateway"}


class Refused(Exception):  # noqa: N818  # a decision, not an error
    """A request is not served; the text says why, ``status`` is the HTTP status the command gets."""

    def __init__(self, reason: str, *, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status

    def answer(self) -> bytes:
        """The response for the command."""
        body = f"nightshift: {self}\n".encode("utf-8", "backslashreplace")
        head = (
            f"HTTP/1.1 {self.status} {_STATUS[self.status]}",
            "Content-Type: text/plain; charset=utf-8",
            "Proxy-Status: nightshift; error=http_request_denied",
            f"Content-Length: {len(body)}",
            "Connection: close",
        )
        return "\r\n".join([*head, "", ""]).encode("ascii") + body


def _address(text: str) -> Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_public(address: Address) -> bool:
    """Whether an address, and one that it carries inside, is neither this machine's nor a private network's."""
    if isinstance(address, ipaddress.IPv6Address):
        carried = address.ipv4_mapped or address.sixtofour
        if carried is not None:
            return _is_public(carried)
        if address in _NAT64 or address.teredo is not None:
            return False
    return address.is_global and not address.is_multicast


def decide(rules: Sequence[Endpoint], wanted: Endpoint, resolve: Callable[[str], Sequence[str]]) -> list[str]:
    """The addresses a connection may go to, in the resolver's order.

    Args:
        rules: What is allowed.
        wanted: What the command asks for.
        resolve: Addresses of a name; OSError if there are none.

    Raises:
        Refused: Not allowed.
    """
    if wanted not in rules:
        raise Refused(f"{wanted} is not in sandbox.network.allow")
    if _address(wanted.host) is not None:
        return [wanted.host]
    try:
        found = list(dict.fromkeys(resolve(wanted.host)))
    except OSError as error:
        raise Refused(f"{wanted.host} has no address: {error.strerror or error}") from error
    usable = []
    for text in found:
        address = _address(text.partition("%")[0])
        if address is None:
            continue
        if _is_public(address) or (wanted.host == "localhost" and address.is_loopback):
            usable.append(text)
    if not usable:
        raise Refused(f"{wanted.host} is {', '.join(found)}, which is no public address; a rule must name the address")
    return usable


def resolve_name(host: str) -> list[str]:
    """The addresses of a name, as the machine resolves it."""
    try:
        answers = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"not a name: {error}") from error
    return [str(answer[4][0]) for answer in answers]


def proxy_environment(rules: Sequence[Endpoint]) -> dict[str, str]:
    """Variables by which programs find the proxy.

    What a rule names must go through it; the rest of this machine's names mean the command's own network.
    """
    address = f"http://127.0.0.1:{PROXY_PORT}"
    named = {rule.host for rule in rules}
    own = ",".join(name for name in _LOCAL_NAMES if name not in named)
    upper = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), address) | {"NO_PROXY": own}
    return {**upper, **{name.lower(): value for name, value in upper.items()}}


class Door:
    """How one command reaches the proxy: it sends its listening socket through ``inside``.

    Call ``close`` when it has ended.

    Attributes:
        inside: The command's end, a descriptor.
        listener: The command's listening socket, None before it has come.
    """

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy
        self._outside, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._outside.setblocking(False)
        self.listener: socket.socket | None = None
        self.inside = self._theirs.fileno()

    @property
    def waits_for(self) -> socket.socket:
        """The socket on which the next thing comes."""
        return self.listener or self._outside

    def accept(self) -> socket.socket | None:
        """Take what came: the listening socket (None), or a connection to it.

        Raises:
            OSError: Nothing will come any more.
        """
        try:
            if self.listener is not None:
                return self.listener.accept()[0]
            _, descriptors, _, _ = socket.recv_fds(self._outside, 1, 1)
        except BlockingIOError:
            return None
        if not descriptors:
            raise OSError("the command ended before it had a listener")
        self.listener = socket.socket(fileno=descriptors[0])
        self.listener.setblocking(False)
        return None

    def was_opened(self) -> bool:
        """Whether the command has opened it, or did so and is through."""
        return self._proxy.has_listener(self)

    def shut(self) -> None:
        """Let go of both ends. May be called twice."""
        for each in (self._outside, self._theirs, self.listener):
            if each is not None:
                each.close()

    def close(self) -> None:
        """The command is gone: nobody comes through any more."""
        self._proxy.forget(self)


class Proxy:
    """The proxy of one session. Its threads start with the first door and end with ``close``.

    Args:
        rules: What is allowed.
        decided: Told of every decision before anything goes out: host, port, and ``allowed`` or ``denied``. Called
            from several threads, never after ``close``. What it raises denies.
        resolve: Addresses of a name.

    Attributes:
        environment: Variables by which programs find it.
    """

    def __init__(
        self,
        rules: Sequence[Endpoint],
        *,
        decided: Callable[[str, int, str], object],
        resolve: Callable[[str], Sequence[str]] = resolve_name,
    ) -> None:
        self.rules = tuple(rules)
        self.environment = proxy_environment(self.rules)
        self._decided = decided
        self._resolve = resolve
        self._lock = threading.Lock()
        self._doors: set[Door] = set()
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._wake: tuple[int, int] | None = None
        self._closed = False

    def door(self) -> Door:
        """A way in for one command."""
        door = Door(self)
        with self._lock:
            self._doors.add(door)
            if self._wake is None:
                self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
                self._start(self._watch)
            self._notify()
        return door

    def has_listener(self, door: Door) -> bool:
        """Whether the command behind a door has opened it; takes in what was not seen yet."""
        with self._lock:
            if door in self._doors and door.listener is None:
                with contextlib.suppress(OSError):
                    door.accept()
                self._notify()
            return door.listener is not None

    def forget(self, door: Door) -> None:
        """Close a door; connections that came through it end with the command."""
        with self._lock:
            self._doors.discard(door)
            door.shut()
            self._notify()

    def close(self) -> None:
        """End all connections, at once. May be called twice."""
        with self._lock:
            self._closed = True
            for door in self._doors:
                door.shut()
            self._doors.clear()
            for each in self._sockets:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
            self._notify()
            threads = list(self._threads)
        until = time.monotonic() + _CLOSE_SECONDS
        for thread in threads:  # one that waits for a resolver may stay: it opens nothing any more
            thread.join(max(0.0, until - time.monotonic()))
        with self._lock:
            if self._wake is not None and not any(thread.is_alive() for thread in threads):
                for descriptor in self._wake:
                    os.close(descriptor)
                self._wake = None

    def _start(self, work: Callable[[], None]) -> None:
        """Run in a thread of the proxy. Under the lock."""

        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="egress", daemon=True)
        self._threads.add(thread)
        thread.start()

    def _notify(self) -> None:
        """Wake the thread that watches the doors. Under the lock."""
        if self._wake is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake[1], b"w")

    # --- doors ----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Take in listening sockets of commands, and connections to them."""
        while True:
            poll = select.poll()
            with self._lock:
                if self._closed or self._wake is None:
                    return
                wake = self._wake[0]
                poll.register(wake, select.POLLIN)
                if len(self._threads) <= _CONNECTIONS:
                    for door in self._doors:
                        poll.register(door.waits_for, select.POLLIN)
            ready = {descriptor for descriptor, _ in poll.poll()}
            with self._lock:
                if wake in ready:
                    with contextlib.suppress(BlockingIOError):
                        os.read(wake, 4_096)
                for door in [each for each in self._doors if each.waits_for.fileno() in ready]:
                    self._attend(door)

    def _attend(self, door: Door) -> None:
        """Something came through a door. Under the lock."""
        try:
            connection = door.accept()
        except OSError:
            self._doors.discard(door)
            door.shut()
            return
        if connection is not None:
            self._sockets.add(connection)
            self._start(lambda: self._serve(connection))

    # --- connections ----------------------------------------------------------------------------

    def _serve(self, client: socket.socket) -> None:
        """Answer one connection."""
        with contextlib.ExitStack() as opened:
            opened.callback(self._drop, client)
            try:
                client.settimeout(_HEAD_SECONDS)
                request = _Request(*_read_head(client))
                upstream = self._open(request.wanted)
                opened.callback(self._drop, upstream)
                if request.method == "CONNECT":
                    client.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                upstream.sendall(request.forwarded)
                _relay(client, upstream)
            except Refused as refused:
                with contextlib.suppress(OSError):
                    client.sendall(refused.answer())
            except OSError:
                pass  # one of the two hung up
            except RunnerError as error:
                diagnostics.warning("a connection was not allowed, since that could not be logged", error=error.message)

    def _drop(self, each: socket.socket) -> None:
        with self._lock:
            self._sockets.discard(each)
            each.close()
            self._notify()

    def _open(self, wanted: Endpoint) -> socket.socket:
        """Decide on an endpoint, report that, and connect to it."""
        try:
            addresses = decide(self.rules, wanted, self._resolve)
        except Refused:
            self._report(wanted, DENIED)
            raise
        self._report(wanted, ALLOWED)
        try:
            upstream = _connect(addresses, wanted.port)
        except OSError as error:
            raise Refused(f"{wanted} does not answer: {error.strerror or error}", status=502) from error
        with self._lock:
            if self._closed:
                upstream.close()
                raise Refused("the run ends")
            self._sockets.add(upstream)
        return upstream

    def _report(self, wanted: Endpoint, decision: str) -> None:
        with self._lock:
            if self._closed:
                raise Refused("the run ends")
            self._decided(wanted.host, wanted.port, decision)


def _read_head(client: socket.socket) -> tuple[bytes, bytes]:
    """The head of a request, and what came behind it."""
    data = b""
    while b"\r\n\r\n" not in data:
        if len(data) > _HEAD_BYTES:
            raise Refused("the head of the request is too long", status=400)
        more = client.recv(_CHUNK)
        if not more:
            raise ConnectionResetError("the command hung up")
        data += more
    head, _, rest = data.partition(b"\r\n\r\n")
    return head, rest


class _Request:
    """A request to the proxy.

    Attributes:
        method: Its method.
        wanted: Where it goes.
        forwarded: What the other side gets first: all of a plain request so far, and of CONNECT what came too early.

    Raises:
        Refused: It is no request to a proxy.
    """

    def __init__(self, head: bytes, rest: bytes) -> None:
        first, *lines = head.decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            raise Refused("this is no HTTP/1 request", status=400)
        self.method, target, version = words
        try:
            if self.method == "CONNECT":
                self.wanted, self.forwarded = parse_endpoint(target), rest
                return
            address = urlsplit(target)
            if address.scheme != "http":
                raise Refused("a plain request begins with http://; https needs CONNECT", status=400)
            place = address.netloc.rpartition("@")[2]
            self.wanted = parse_endpoint(place, port=80)
        except (ConfigError, ValueError) as error:
            raise Refused(error.message if isinstance(error, ConfigError) else str(error), status=400) from error
        path = (address.path or "/") + (f"?{address.query}" if address.query else "")
        kept = [line for line in lines if line.partition(":")[0].lower() not in _HOP_HEADERS]
        fields = [f"{self.method} {path} {version}", f"Host: {place}", *kept, "Connection: close", "", ""]
        self.forwarded = "\r\n".join(fields).encode("latin-1") + rest


def _connect(addresses: Sequence[str], port: int) -> socket.socket:
    """A connection to the first address that answers."""
    failure: OSError = OSError("no address")
    for address in addresses:
        try:
            return socket.create_connection((address, port), timeout=_CONNECT_SECONDS)
        except OSError as error:
            failure = error
    raise failure


def _relay(client: socket.socket, upstream: socket.socket) -> None:
    """Pass bytes both ways until both sides have ended, or nothing came for long."""
    ways = {client.fileno(): (client, upstream), upstream.fileno(): (upstream, client)}
    poll = select.poll()
    for descriptor, (source, _) in ways.items():
        source.settimeout(_IDLE_SECONDS)
        poll.register(descriptor, select.POLLIN)
    while ways:
        ready = poll.poll(_IDLE_SECONDS * 1000)
        if not ready:
            return
        for descriptor, _ in ready:
            source, target = ways[descriptor]
            data = source.recv(_CHUNK)
            if data:
                target.sendall(data)
                continue
            with contextlib.suppress(OSError):
                target.shutdown(socket.SHUT_WR)
            poll.unregister(descriptor)
            del ways[descriptor]
