"""The network proxy itself: which addresses it takes, which requests it understands, how many at a time.

A door is opened here in the place of a sandboxed command: the listening socket is one of this machine's loopback
address. Everything else is real.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import pytest

from runner.errors import ConfigError
from runner.sandbox import egress
from runner.sandbox.egress import Endpoint, Proxy, Refused, decide, parse_endpoint, proxy_environment

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PLACE = Endpoint("a.example", 443)


# --- addresses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "address",
    [
        "127.0.0.1",
        "0.0.0.0",  # an address that is looked at
        "10.0.0.1",
        "100.64.0.1",
        "169.254.169.254",
        "172.16.0.1",
        "192.168.1.1",
        "224.0.0.251",
        "239.1.2.3",
        "255.255.255.255",
        "::",
        "::1",
        "fe80::1",
        "fe80::1%lo",
        "fc00::1",
        "ff0e::1",
        "::ffff:127.0.0.1",
        "::ffff:10.0.0.1",
        "2002:0a00:0001::1",
        "2002:7f00:0001::1",
        "64:ff9b::a00:1",
        "64:ff9b::7f00:1",
        "2001:0:4136:e378:8000:63bf:3fff:fdd2",
        "no address",
    ],
)
def test_a_name_that_means_no_public_address_is_refused(address: str) -> None:
    """Of this machine, of a private network, of many, or such a one inside another."""
    with pytest.raises(Refused, match="no public address; a rule must name the address"):
        decide([PLACE], PLACE, lambda _: [address])


@pytest.mark.parametrize(
    ("found", "usable"),
    [
        (["93.184.216.34"], ["93.184.216.34"]),
        (["2606:2800:220:1::1"], ["2606:2800:220:1::1"]),
        (["::ffff:93.184.216.34"], ["::ffff:93.184.216.34"]),
        (["10.0.0.1", "93.184.216.34", "10.0.0.1", "93.184.216.34"], ["93.184.216.34"]),
        (["2606:2800:220:1::1", "93.184.216.34"], ["2606:2800:220:1::1", "93.184.216.34"]),
    ],
)
def test_public_addresses_of_a_name_are_used_in_their_order(found: Sequence[str], usable: Sequence[str]) -> None:
    """Each once; those that are not public are left out."""
    assert decide([PLACE], PLACE, lambda _: found) == usable


def test_an_address_that_a_rule_names_needs_no_resolver() -> None:
    """Whatever it is; and localhost is this machine, but nothing else of a private network."""

    def never(_: str) -> list[str]:
        raise AssertionError

    private = Endpoint("10.0.0.1", 5432)
    local = Endpoint("localhost", 80)

    assert decide([private], private, never) == ["10.0.0.1"]
    assert decide([local], local, lambda _: ["127.0.0.1", "::1", "10.0.0.1"]) == ["127.0.0.1", "::1"]


def test_what_has_no_address_or_is_not_named_is_refused() -> None:
    """Another port, another name, a name below; and a resolver that fails."""
    for other in (Endpoint("a.example", 80), Endpoint("b.example", 443), Endpoint("x.a.example", 443)):
        with pytest.raises(Refused, match=r"is not in sandbox\.network\.allow"):
            decide([PLACE], other, lambda _: ["93.184.216.34"])

    def fails(_: str) -> list[str]:
        raise OSError(2, "no such name")

    with pytest.raises(Refused, match=r"a\.example has no address: no such name"):
        decide([PLACE], PLACE, fails)


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":1",
        "a",
        "a:",
        "a:b",
        "a:0",
        "a:65536",
        "[::1",
        "::1:1:x",
        "a b:1",
        "a/b:1",
        "a?b:1",
        "u@a:1",
        "*:1",
        "a%:1",
    ],
)
def test_what_is_no_place_is_refused(text: str) -> None:
    """With how a place is written."""
    with pytest.raises(ConfigError) as caught:
        parse_endpoint(text)

    assert "write host:port" in str(caught.value.hint)


def test_programs_go_through_the_proxy_but_for_their_own_servers() -> None:
    """Unless a rule names this machine: then it means that one, and must be asked for."""
    plain = proxy_environment([PLACE])
    named = proxy_environment([PLACE, Endpoint("127.0.0.1", 80)])

    assert plain["no_proxy"] == plain["NO_PROXY"] == "localhost,127.0.0.1,::1"
    assert named["no_proxy"] == "localhost,::1"
    assert {plain[name] for name in ("http_proxy", "HTTPS_PROXY", "all_proxy")} == {"http://127.0.0.1:3128"}


# --- requests ------------------------------------------------------------------------------------


class Server:
    """A server that keeps what it gets until the other side has nothing more to say, and answers ``bye``."""

    def __init__(self) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self.listener.getsockname()[1]
        self.got: list[bytes] = []
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.listener.accept()
                with connection, connection.makefile("rb") as stream:
                    self.got.append(stream.read())
                    connection.sendall(b"bye")

    def close(self) -> None:
        """End it."""
        with contextlib.suppress(OSError):
            self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()


class Client:
    """Talks to a proxy as a command does."""

    def __init__(self, proxy: Proxy) -> None:
        self.door = proxy.door()
        with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
            self.address = listener.getsockname()
            with socket.socket(fileno=socket.dup(self.door.inside)) as inside:
                socket.send_fds(inside, [b"d"], [listener.fileno()])

    def connect(self) -> socket.socket:
        """A connection to the proxy."""
        return socket.create_connection(self.address, timeout=20)

    def ask(self, data: bytes) -> bytes:
        """Send everything, then read everything."""
        with self.connect() as connection:
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            with connection.makefile("rb") as stream:
                return stream.read()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server outside."""
    made = Server()
    yield made
    made.close()


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    """A client of a proxy that lets through to the server."""
    proxy = Proxy([Endpoint("127.0.0.1", server.port)], decided=lambda *_: None)
    yield Client(proxy)
    proxy.close()


@pytest.mark.parametrize(
    ("line", "first"),
    [
        ("GET http://127.0.0.1:{port}/a/b?c=d#e HTTP/1.1", b"GET /a/b?c=d HTTP/1.1"),
        ("GET http://127.0.0.1:{port} HTTP/1.0", b"GET / HTTP/1.0"),
        ("GET http://127.0.0.1:{port}?c HTTP/1.1", b"GET /?c HTTP/1.1"),
        ("POST HTTP://user:word@127.0.0.1:{port}/a HTTP/1.1", b"POST /a HTTP/1.1"),
    ],
)
def test_a_plain_request_is_sent_on_as_a_server_expects_it(
    server: Server, client: Client, line: str, first: bytes
) -> None:
    """Path alone, its own Host, nothing that was meant for the proxy; the body as it is."""
    head = [line.format(port=server.port), "Host: other", "Proxy-Authorization: x", "Connection: keep-alive", "X-A: 1"]
    answer = client.ask("\r\n".join([*head, "", "body"]).encode())

    place = b"127.0.0.1:%d" % server.port
    assert answer == b"bye"
    assert server.got == [first + b"\r\nHost: " + place + b"\r\nX-A: 1\r\nConnection: close\r\n\r\nbody"]


def test_a_tunnel_passes_every_byte(server: Server, client: Client) -> None:
    """What comes together with the request as well."""
    data = bytes(range(256)) * 2_000
    answer = client.ask(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\nHost: x\r\n\r\n" % server.port + data)

    assert answer == b"HTTP/1.1 200 Connection established\r\n\r\nbye"
    assert server.got == [data]


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (b"nonsense", b"this is no HTTP/1 request"),
        (b"GET / HTTP/1.1", b"a plain request begins with http://"),
        (b"GET https://127.0.0.1:1/ HTTP/1.1", b"https needs CONNECT"),
        (b"GET http://127.0.0.1:1/ HTTP/2", b"this is no HTTP/1 request"),
        (b"CONNECT 127.0.0.1 HTTP/1.1", b"is no host and port"),
        (b"GET http://127.0.0.1:x/ HTTP/1.1", b"400 Bad Request"),
        (b"GET http://[::1/ HTTP/1.1", b"400 Bad Request"),
        (b"X: " + b"x" * 200_000, b"the head of the request is too long"),
    ],
)
def test_what_is_no_request_to_a_proxy_is_answered(server: Server, client: Client, head: bytes, reason: bytes) -> None:
    """400 and why, never a connection that just ends; nothing reaches the server."""
    answer = b""
    with client.connect() as connection, contextlib.suppress(ConnectionError):
        connection.sendall(head + b"\r\n\r\n")
        while data := connection.recv(4_096):
            answer += data

    assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
    assert reason in answer
    assert server.got == []


def test_a_server_that_does_not_answer_is_502(server: Server, client: Client) -> None:
    """The command learns that it was allowed, and what failed."""
    server.close()

    answer = client.ask(b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % server.port)

    assert answer.startswith(b"HTTP/1.1 502 Bad Gateway\r\n")
    assert b"does not answer" in answer


def test_so_many_connections_at_a_time_and_then_the_next(
    server: Server, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that comes when all are taken waits until one ends."""
    monkeypatch.setattr(egress, "_CONNECTIONS", 2)
    request = b"CONNECT 127.0.0.1:%d HTTP/1.1\r\n\r\n" % server.port
    idle = [client.connect() for _ in range(3)]
    waiting = client.connect()
    waiting.sendall(request)
    waiting.settimeout(0.4)
    with pytest.raises(TimeoutError):
        waiting.recv(10)
    for each in idle:
        each.close()
    waiting.settimeout(20)

    assert waiting.recv(12) == b"HTTP/1.1 200"
    waiting.close()
