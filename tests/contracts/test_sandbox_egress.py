"""The network allowlist: commands reach what it names, through the proxy, and nothing else.

Real network namespaces, a real proxy, and real servers on the loopback address of this machine, which
is outside the commands' network.
"""

from __future__ import annotations

import http.server
import json
import socket
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.errors import SandboxError
from runner.permission import Mode
from runner.sandbox.base import PROXY_PORT
from runner.sandbox.egress import Endpoint, Proxy
from runner.sandbox.executor import Executor

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.sandbox.base import ProcessResult
    from runner.testing.sandbox import Box


class _Handler(http.server.BaseHTTPRequestHandler):
    """Answers with what it was asked; ``/elsewhere?URL`` redirects there."""

    def do_GET(self) -> None:
        if self.path.startswith("/elsewhere?"):
            self.send_response(302)
            self.send_header("Location", self.path.partition("?")[2])
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        length = int(self.headers.get("Content-Length", 0))
        seen = {"path": self.path, "host": self.headers["Host"], "body": self.rfile.read(length).decode()}
        body = json.dumps(seen).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def server() -> Iterator[int]:
    """Port of an HTTP server on this machine's loopback address."""
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield serving.server_address[1]
    serving.shutdown()
    thread.join()
    serving.server_close()


@pytest.fixture
def other() -> Iterator[int]:
    """Port of another one, which no rule names."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


class Network:
    """An executor with an allowlist, and what the proxy decided."""

    def __init__(self, box: Box, *rules: Endpoint, **options: Any) -> None:
        self.box = box
        self.decisions: list[tuple[str, int, str]] = []
        self.proxy = Proxy(rules, decided=lambda *decision: self.decisions.append(decision), **options)
        plain = box.executor(egress=rules)
        self.executor = Executor(plain._backend, plain._policy, proxy=self.proxy)  # a test of the two
        box.started.append(self.executor)

    def run(self, script: str, *arguments: object, timeout: float = 30) -> ProcessResult:
        """Run a bash script with ``$1`` and so on."""
        argv = ["/bin/bash", "-c", script, "bash", *map(str, arguments)]
        return self.executor.run(argv, mode=Mode.WORKSPACE_WRITE, timeout=timeout, cancellation=self.box.cancellation)

    def python(self, code: str, *arguments: object) -> ProcessResult:
        """Run a Python program with ``sys.argv[1:]``."""
        return self.run('exec /usr/bin/env python3 -c "$@"', code, *arguments)


FETCH = """
import sys, urllib.request, urllib.error
try:
    with urllib.request.urlopen(sys.argv[1], timeout=10) as response:
        print(response.status, response.read().decode())
except urllib.error.HTTPError as error:
    print(error.code, error.read().decode())
except OSError as error:
    print("failed", error)
"""

TUNNEL = """
import socket, sys
target = sys.argv[1]
with socket.create_connection(("127.0.0.1", int(sys.argv[2]))) as proxy:
    proxy.sendall(f"CONNECT {target} HTTP/1.1\\r\\nHost: {target}\\r\\n\\r\\n".encode())
    answer = proxy.recv(4096).decode()
    print(answer.splitlines()[0])
    if " 200 " in answer:
        proxy.sendall(b"GET /through HTTP/1.0\\r\\nHost: inside\\r\\n\\r\\n")
        while data := proxy.recv(4096):
            print(data.decode())
"""

only_bubblewrap = pytest.mark.parametrize("backend", ["bubblewrap"])


@only_bubblewrap
def test_what_the_list_names_is_reached(box: Box, server: int) -> None:
    """By plain HTTP, by CONNECT, and by a program that looks at the variables only."""
    network = Network(box, Endpoint("127.0.0.1", server))
    plain = network.python(FETCH, f"http://127.0.0.1:{server}/a/b?c=d")
    tunnel = network.python(TUNNEL, f"127.0.0.1:{server}", PROXY_PORT)

    seen = json.loads(plain.output.decode().split(" ", 1)[1])
    assert seen == {"path": "/a/b?c=d", "host": f"127.0.0.1:{server}", "body": ""}
    assert tunnel.output.startswith(b"HTTP/1.1 200 ")
    assert b'"path": "/through"' in tunnel.output
    assert network.decisions == [("127.0.0.1", server, "allowed")] * 2


@only_bubblewrap
def test_what_the_list_does_not_name_is_not_reached(box: Box, server: int, other: int) -> None:
    """Another port, another name for the same machine, a direct connection: denied, and the command is told why."""
    network = Network(box, Endpoint("127.0.0.1", server))
    port = network.python(FETCH, f"http://127.0.0.1:{other}/")
    name = network.python(FETCH, f"http://somewhere.example:{server}/")
    tunnel = network.python(TUNNEL, f"127.0.0.1:{other}", PROXY_PORT)
    direct = network.run('unset ${!http*} ${!HTTP*}; exec 3<>"/dev/tcp/127.0.0.1/$1" && echo reached', server)

    assert port.output.startswith(b"403 nightshift: 127.0.0.1:")
    assert b"is not in sandbox.network.allow" in port.output
    assert name.output.startswith(b"403 ")
    assert tunnel.output.startswith(b"HTTP/1.1 403 ")
    assert b"reached" not in direct.output
    assert network.decisions == [
        ("127.0.0.1", other, "denied"),
        ("somewhere.example", server, "denied"),
        ("127.0.0.1", other, "denied"),
    ]


@only_bubblewrap
def test_a_redirect_is_decided_anew(box: Box, server: int, other: int) -> None:
    """An allowed server cannot send the command elsewhere; to itself it can."""
    network = Network(box, Endpoint("127.0.0.1", server))
    away = network.python(FETCH, f"http://127.0.0.1:{server}/elsewhere?http://127.0.0.1:{other}/")
    back = network.python(FETCH, f"http://127.0.0.1:{server}/elsewhere?http://127.0.0.1:{server}/back")

    assert away.output.startswith(b"403 ")
    assert back.output.startswith(b"200 ")
    assert ("127.0.0.1", other, "denied") in network.decisions


@only_bubblewrap
def test_a_name_is_resolved_by_the_proxy_and_must_be_public(box: Box, server: int) -> None:
    """An allowed name that means a private address reaches nothing; one that a rule gives as localhost does."""
    names = {"inside.example": ["10.0.0.1", "169.254.169.254", "::1", "::ffff:127.0.0.1"], "localhost": ["127.0.0.1"]}
    rules = (Endpoint("inside.example", server), Endpoint("localhost", server))
    network = Network(box, *rules, resolve=lambda name: names[name])
    inside = network.python(FETCH, f"http://inside.example:{server}/")
    local = network.python(FETCH, f"http://localhost:{server}/")

    assert inside.output.startswith(b"403 ")
    assert b"which is no public address" in inside.output
    assert local.output.startswith(b"200 ")


@only_bubblewrap
def test_the_commands_own_servers_are_no_matter_of_the_proxy(box: Box) -> None:
    """What a test suite starts on localhost is reached directly, and only inside."""
    network = Network(box, Endpoint("pypi.org", 443))
    code = """
import http.server, threading, urllib.request
serving = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=serving.serve_forever, daemon=True).start()
print(urllib.request.urlopen(f"http://localhost:{serving.server_address[1]}/README").status)
"""
    result = network.python(code)

    assert b"200" in result.output.splitlines()
    assert network.decisions == []


@only_bubblewrap
def test_each_command_has_a_door_of_its_own_and_none_stays(box: Box, server: int) -> None:
    """Side by side and one after another; at the end no descriptor and no thread is left."""
    network = Network(box, Endpoint("127.0.0.1", server))
    network.run("true")
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    results: list[ProcessResult] = []

    def fetch() -> None:
        results.append(network.python(FETCH, f"http://127.0.0.1:{server}/"))

    threads = [threading.Thread(target=fetch) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [result.output[:4] for result in results] == [b"200 "] * 6
    deadline = time.monotonic() + 10
    while len(list(Path("/proc/self/fd").iterdir())) > descriptors:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    network.executor.close()
    assert [thread.name for thread in threading.enumerate() if thread.name == "egress"] == []


@only_bubblewrap
def test_the_end_of_the_session_ends_connections(box: Box, other: int) -> None:
    """One that says nothing and hears nothing does not hold up the end, which takes no second."""
    network = Network(box, Endpoint("127.0.0.1", other))
    output = box.base / "output"
    code = TUNNEL.replace("GET /through", "X")
    argv = ["/usr/bin/env", "python3", "-c", code, f"127.0.0.1:{other}", str(PROXY_PORT)]
    network.executor.start_background(argv, mode=Mode.WORKSPACE_WRITE, output=str(output), call_id="1")
    deadline = time.monotonic() + 20
    while not network.decisions:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    network.executor.close()

    assert [thread.name for thread in threading.enumerate() if thread.name == "egress"] == []
    assert network.decisions == [("127.0.0.1", other, "allowed")]


@only_bubblewrap
def test_what_cannot_be_reported_is_denied(box: Box, server: int) -> None:
    """No byte goes out that the log does not know of."""
    network = Network(box, Endpoint("127.0.0.1", server))

    def broken(*_: object) -> None:
        raise SandboxError("the log is full", hint="")

    network.proxy._decided = broken  # stands for a log that cannot be written
    result = network.python(FETCH, f"http://127.0.0.1:{server}/")

    assert result.output.startswith(b"failed")


@only_bubblewrap
def test_a_command_that_could_not_open_its_door_is_a_broken_sandbox(
    box: Box, server: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Never a command without the network it was promised."""
    network = Network(box, Endpoint("127.0.0.1", server))
    monkeypatch.setattr("runner.sandbox.bubblewrap.PROXY_PORT", 70_000)
    with pytest.raises(SandboxError, match="bubblewrap sandbox could not start a command"):
        network.run("echo ran")


@pytest.mark.parametrize("backend", ["landlock"])
def test_without_a_network_of_its_own_a_command_gets_no_allowlist(box: Box) -> None:
    """Landlock refuses, whoever asks; the probe says the same before anything runs."""
    from runner.sandbox.probe import probe

    executor = box.executor(egress=(Endpoint("127.0.0.1", 1),))
    report = probe("landlock", executor._policy, cancellation=box.cancellation, environ={})

    assert not report.ok
    assert "no network of its own" in str(report.reason)
    assert "bubblewrap" in str(report.fix)
    with pytest.raises(SandboxError, match="no network of its own"):
        executor.run(["/bin/true"], mode=Mode.WORKSPACE_WRITE, timeout=5, cancellation=box.cancellation)
