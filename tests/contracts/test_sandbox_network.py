"""With the network off nothing leaves, by no family and no type; Unix sockets reach nobody."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

import pytest

from runner.permission import Mode
from runner.sandbox.launch import interpreter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from runner.testing.sandbox import Box


def received(listener: socket.socket) -> bool:
    """Whether anybody connected, or sent a datagram."""
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        if listener.type == socket.SOCK_DGRAM:
            return bool(listener.recv(100))
        listener.accept()[0].close()
        return True
    return False


@pytest.fixture
def listeners() -> Iterator[dict[str, socket.socket]]:
    """Sockets of the host on loopback: TCP and UDP, both families."""
    made = {}
    for name, family, kind, address in (
        ("tcp", socket.AF_INET, socket.SOCK_STREAM, "127.0.0.1"),
        ("udp", socket.AF_INET, socket.SOCK_DGRAM, "127.0.0.1"),
        ("tcp6", socket.AF_INET6, socket.SOCK_STREAM, "::1"),
    ):
        one = socket.socket(family, kind)
        one.bind((address, 0))
        if kind == socket.SOCK_STREAM:
            one.listen()
        made[name] = one
    yield made
    for one in made.values():
        one.close()


CONNECT = """
import socket, sys
tcp, udp, tcp6 = map(int, sys.argv[1:])
for family, kind, address in (
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", tcp)),
    (socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", udp)),
    (socket.AF_INET6, socket.SOCK_STREAM, ("::1", tcp6)),
):
    try:
        one = socket.socket(family, kind)
        one.settimeout(2)
        one.connect(address)
        one.send(b"hello")
        print("sent", address)
    except OSError as error:
        print(error)
"""


def test_with_the_network_off_the_host_cannot_be_reached(box: Box, listeners: dict[str, socket.socket]) -> None:
    """Not by TCP, not by UDP, not on loopback either."""
    result = box.python(CONNECT, *(one.getsockname()[1] for one in listeners.values()))

    assert {name: received(one) for name, one in listeners.items()} == dict.fromkeys(listeners, False)
    assert result.output.count(b"\n") == 3, result.output


def test_with_the_network_on_it_can(box: Box, listeners: dict[str, socket.socket]) -> None:
    """The positive twin."""
    result = box.python(CONNECT, *(one.getsockname()[1] for one in listeners.values()), network=True)

    assert {name: received(one) for name, one in listeners.items()} == dict.fromkeys(listeners, True), result.output


FAMILIES = """
import socket
for family in range(46):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET):
        for protocol in (0, 1, 6, 15, 17, 255):
            try:
                socket.socket(family, kind, protocol).close()
                print("opened", family, kind, protocol)
            except OSError:
                pass
try:
    print("resolved", socket.getaddrinfo("localhost.example.invalid", 80))
except OSError:
    pass
"""


def test_with_the_network_off_no_family_opens_that_could_leave(box: Box) -> None:
    """All 46 families and every type: at most loopback inside a network of the command's own."""
    result = box.python(FAMILIES)
    opened = {tuple(map(int, line.split()[1:3])) for line in result.output.splitlines() if line.startswith(b"opened")}

    assert b"resolved" not in result.output
    allowed = {socket.AF_INET, socket.AF_INET6} if box.backend == "bubblewrap" else set()
    assert {family for family, _ in opened} == allowed
    assert not any(kind == socket.SOCK_RAW for _, kind in opened)


def test_a_server_inside_is_not_reachable_from_the_host(box: Box) -> None:
    """With the network off listening fails, or happens in a network of the command's own."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    code = """
import socket, sys, time
try:
    server = socket.create_server(("0.0.0.0", int(sys.argv[1])))
    own = socket.create_connection(("127.0.0.1", int(sys.argv[1])), 2)
    print("served", flush=True)
except OSError as error:
    print(error, flush=True)
time.sleep(1.5)
"""
    executor = box.executor()
    output = box.base / "server.out"
    executor.start_background(
        [*interpreter(), "-c", code, str(port)], mode=Mode.WORKSPACE_WRITE, output=str(output), call_id="1"
    )
    for _ in range(200):
        if output.read_bytes():
            break
        box.cancellation.wait(0.01)
    with socket.socket() as client:
        assert client.connect_ex(("127.0.0.1", port)) != 0
    assert output.read_bytes().startswith(b"served" if box.backend == "bubblewrap" else b"[Errno 1]")


UNIX = """
import os, socket, sys
folder, abstract = sys.argv[1:]
os.chdir(folder)
for kind, name in ((socket.SOCK_STREAM, "stream"), (socket.SOCK_DGRAM, "datagram")):
    for address in (name, "\\0" + abstract + name):
        try:
            one = socket.socket(socket.AF_UNIX, kind)
            one.connect(address)
            one.send(b"hello")
            print("reached", name)
        except OSError as error:
            print(error)
for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
    try:
        one, other = socket.socketpair(socket.AF_UNIX, kind)
        one.sendto(b"hello", "datagram")
        print("reached by pair")
    except OSError as error:
        print(error)
for kind in (socket.SOCK_STREAM, socket.SOCK_SEQPACKET):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    for address in ("stream", "\\0" + abstract + "stream"):
        try:
            one.connect(address)
            print("reached by pair")
        except OSError as error:
            pass
    one.send(b"pair works")
    print(other.recv(100).decode())
"""


@pytest.fixture
def unix_listeners(place: Path) -> Iterator[tuple[str, list[socket.socket]]]:
    """Path and abstract sockets of the host, as docker.sock and a session bus are."""
    folder = place / "s"
    folder.mkdir()
    abstract = f"nightshift-test-{os.getpid()}-"
    made = []
    for kind, name in ((socket.SOCK_STREAM, "stream"), (socket.SOCK_DGRAM, "datagram")):
        for address in (str(folder / name), "\0" + abstract + name):
            one = socket.socket(socket.AF_UNIX, kind)
            one.bind(address)
            if kind == socket.SOCK_STREAM:
                one.listen()
            made.append(one)
    yield abstract, made
    for one in made:
        one.close()


@pytest.mark.parametrize("network", [False, True])
def test_no_unix_socket_of_the_host_can_be_reached(
    box: Box, unix_listeners: tuple[str, list[socket.socket]], network: bool
) -> None:
    """Neither by path nor abstract, with the network on or off; connected pairs work all the same."""
    abstract, made = unix_listeners
    result = box.python(UNIX, box.base / "s", abstract, network=network)

    assert [received(one) for one in made] == [False] * 4
    assert b"reached" not in result.output
    assert result.output.count(b"pair works") == 2, result.output


def test_with_unix_sockets_on_a_path_can_be_reached(box: Box, unix_listeners: tuple[str, list[socket.socket]]) -> None:
    """The positive twin: the profile asked for it. Abstract sockets stay out of reach without the network."""
    abstract, made = unix_listeners
    result = box.python(UNIX, box.base / "s", abstract, unix_sockets=True)

    assert [received(one) for one in made] == [True, False, True, False], result.output
