"""``fetch_url`` in the sandbox: what the network lets through, what it does with what comes."""

from __future__ import annotations

import http.server
import threading
from typing import TYPE_CHECKING

import pytest

from runner.errors import ErrorCode, RunnerError
from runner.permission import Mode
from runner.sandbox.egress import Endpoint, Proxy
from runner.sandbox.executor import Executor
from runner.tools.base import Invocation
from runner.tools.builtin.fetch import BYTES, FetchUrl

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.testing.sandbox import Box
    from runner.tools.base import ToolOutcome

PAGES: dict[str, tuple[int, str, bytes]] = {
    "/page": (200, "text/html; charset=utf-8", "<p>Grüße</p>".encode()),
    "/latin": (200, "text/plain; charset=latin-1", "Grüße".encode("latin-1")),
    "/odd": (200, "text/plain; charset=no-such-thing", b"plain"),
    "/json": (200, "application/problem+json", b'{"a": 1}'),
    "/image": (200, "image/png", b"\x89PNG\r\n\x1a\n"),
    "/absent": (404, "text/plain", b"there is nothing"),
    "/huge": (200, "text/plain", b"x" * (BYTES + 5)),
    "/moved": (302, "/page", b""),
    "/file": (302, "file:///etc/passwd", b""),
    "/ftp": (302, "ftp://127.0.0.1/x", b""),
    "/loop": (302, "/loop", b""),
}


class _Handler(http.server.BaseHTTPRequestHandler):
    """Serves the pages above."""

    def do_GET(self) -> None:
        status, kind, body = PAGES[self.path]
        self.send_response(status)
        self.send_header("Location" if status == 302 else "Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    """Port of a server of pages on this machine's loopback address."""
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield serving.server_address[1]
    serving.shutdown()
    thread.join()
    serving.server_close()


def fetch(box: Box, executor: Executor, url: str, mode: Mode = Mode.READ_ONLY) -> ToolOutcome:
    """One call of the tool."""
    tool = FetchUrl(executor)
    arguments = {"url": url}
    return tool.execute(
        Invocation(
            call_id="call",
            arguments=arguments,
            facts=tool.facts(arguments),
            mode=mode,
            timeout=20,
            cancellation=box.cancellation,
            may_escalate=False,
        )
    )


def text_of(outcome: ToolOutcome) -> str:
    """The text of its only block."""
    block = outcome.content[0]
    assert block["type"] == "text"
    return block["text"]


def test_a_page_comes_with_what_it_is(box: Box, port: int) -> None:
    """Status, type, size and redirect first, then the text in its own encoding; in read-only as well."""
    executor = box.executor(Mode.READ_ONLY, network=True)
    base = f"http://127.0.0.1:{port}"
    texts = {
        path: text_of(fetch(box, executor, base + path)) for path in ("/page", "/latin", "/odd", "/json", "/moved")
    }

    assert texts["/page"] == "200 OK, text/html, 14 bytes\n\n<p>Grüße</p>"
    assert texts["/latin"].endswith("\n\nGrüße")
    assert texts["/odd"].endswith("\n\nplain")
    assert texts["/json"].endswith('\n\n{"a": 1}')
    assert texts["/moved"] == f"200 OK, text/html, 14 bytes, redirected to {base}/page\n\n<p>Grüße</p>"


def test_what_is_no_text_or_too_long_is_said(box: Box, port: int) -> None:
    """Bytes of an image are not shown, a page over the limit is cut and says so."""
    executor = box.executor(Mode.READ_ONLY, network=True)
    image = text_of(fetch(box, executor, f"http://127.0.0.1:{port}/image"))
    huge = text_of(fetch(box, executor, f"http://127.0.0.1:{port}/huge"))

    assert image == "200 OK, image/png, 8 bytes\n\n(no text: fetch it with a command)"
    assert "only the first 2,000,000 bytes are shown" in huge.partition("\n")[0]
    assert huge.endswith("x" * 100)


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/absent", "404 Not Found, text/plain, 16 bytes\n\nthere is nothing"),
        ("/file", "Redirection to url 'file:///etc/passwd' is not allowed"),
        ("/ftp", "unknown url type: ftp"),
        ("/loop", "would lead to an infinite loop"),
    ],
)
def test_a_page_that_cannot_be_had_is_a_failed_call(box: Box, port: int, path: str, words: str) -> None:
    """With the page of the error where there is one; no file of this machine comes by way of a redirect."""
    outcome = fetch(box, box.executor(Mode.READ_ONLY, network=True), f"http://127.0.0.1:{port}{path}")

    assert outcome.error is ErrorCode.TOOL_FAILED
    assert words in text_of(outcome)


def test_without_the_network_nothing_is_reached(box: Box, port: int) -> None:
    """The tool has no way out that commands do not have."""
    outcome = fetch(box, box.executor(Mode.READ_ONLY), f"http://127.0.0.1:{port}/page")

    assert outcome.error is ErrorCode.TOOL_FAILED
    assert "cannot be read" in text_of(outcome)


@pytest.mark.parametrize("backend", ["bubblewrap"])
def test_the_allowlist_holds_for_the_tool(box: Box, port: int) -> None:
    """What is on the list comes through the proxy; what is not is a denial that names the list; both are reported."""
    decisions: list[tuple[str, int, str]] = []
    rules = (Endpoint("127.0.0.1", port),)
    proxy = Proxy(rules, decided=lambda *decision: decisions.append(decision))
    plain = box.executor(Mode.READ_ONLY, egress=rules)
    executor = Executor(plain._backend, plain._policy, proxy=proxy)
    box.started.append(executor)
    there = fetch(box, executor, f"http://127.0.0.1:{port}/page")
    plain_away = fetch(box, executor, f"http://127.0.0.1:{port + 1}/page")
    tunnel_away = fetch(box, executor, f"https://127.0.0.1:{port + 1}/page")

    assert text_of(there).startswith("200 OK")
    for away in (plain_away, tunnel_away):
        assert away.error is ErrorCode.SANDBOX_DENIED
        assert "is not in sandbox.network.allow" in text_of(away)
    assert [decision for *_, decision in decisions] == ["allowed", "denied", "denied"]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "ftp://a.example/x",
        "file:///etc/passwd",
        "http://",
        "http:///x",
        "//a.example",
        "http://a.example:99999/",
        "http://a.example:0/",
        "http://[::1/",
        "http://user:word@a.example/",
        "http://a.example/a b",
        "http://a.example/\r\nX: y",
        "http://a.example/ü",
        "http://a.example/" + "x" * 4_000,
    ],
)
@pytest.mark.parametrize("backend", ["bubblewrap"])
def test_what_is_no_address_is_refused_before_it_is_decided_on(box: Box, url: str) -> None:
    """INVALID_ARGS, with what to write."""
    with pytest.raises(RunnerError, match=r"^url: ") as caught:
        FetchUrl(box.executor()).facts({"url": url})

    assert caught.value.code is ErrorCode.INVALID_ARGS
