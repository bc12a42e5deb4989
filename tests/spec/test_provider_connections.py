"""How requests reach a server, and how they end: connections, proxies, TLS, cancellation."""

from __future__ import annotations

import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import ConfigError, ErrorCode, ProviderError
from runner.providers import sockets
from runner.providers.base import ModelSpec
from runner.providers.openai_chat import OpenAIChatProvider
from runner.testing.model_server import (
    STREAM_HEAD,
    End,
    ModelServer,
    Reply,
    chat_events,
    chat_reply,
    chunked,
    event,
    http_reply,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

CERTIFICATES = Path(__file__).parent.parent / "golden" / "tls"


def provider_for(url: str, **settings: Any) -> OpenAIChatProvider:
    """A provider for ``url``; ``authorities`` and ``api_key`` beside the model's settings."""
    own = {name: settings.pop(name, None) for name in ("api_key", "authorities")}
    spec = ModelSpec("openai", "mock", **{"base_url": url, "first_token": 10, "idle": 10, **settings})
    return OpenAIChatProvider(spec, new_id=str, **own)


def ask(provider: OpenAIChatProvider, body: bytes = b"{}") -> list[dict[str, Any]]:
    """The chunks of one answer."""
    return list(provider.stream(body, cancellation=Cancellation()))


def refused(provider: OpenAIChatProvider) -> ProviderError:
    """The error of one request."""
    with pytest.raises(ProviderError) as caught:
        ask(provider)
    provider.close()
    return caught.value


@pytest.fixture
def closed_port() -> int:
    """A port on loopback that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


# --- requests --------------------------------------------------------------------------------------


def test_a_request_carries_the_body_as_it_is_its_length_and_the_key() -> None:
    """Nothing is added to the body, and the head says what the API wants."""
    body = '{"model":"mock","text":"Grüße"}'.encode()
    with ModelServer([chat_reply("Hi")]) as server:
        provider = provider_for(server.url + "/", api_key="sk-test-key")
        ask(provider, body)
        provider.close()

    (request,) = server.requests
    assert (request.method, request.target, request.body) == ("POST", "/v1/chat/completions", body)
    assert request.headers["content-length"] == str(len(body))
    assert request.headers["authorization"] == "Bearer sk-test-key"
    assert request.headers["content-type"] == "application/json"
    assert request.headers["accept-encoding"] == "identity"
    assert "cookie" not in request.headers


def test_without_a_key_no_authorization_is_sent() -> None:
    """A server of one's own wants none."""
    with ModelServer([chat_reply("Hi")]) as server:
        provider = provider_for(server.url)
        ask(provider)
        provider.close()

    assert "authorization" not in server.requests[0].headers


def test_one_connection_serves_request_after_request() -> None:
    """Also when the server sets cookies, which are not sent back."""
    first = chat_reply("one")
    assert isinstance(first[0], bytes)
    cookie = first[0].replace(b"\r\n", b"\r\nset-cookie: a=b\r\n", 1)
    with ModelServer([(cookie,), chat_reply("two"), chat_reply("three")]) as server:
        provider = provider_for(server.url)
        for _ in range(3):
            ask(provider)
        provider.close()

    assert [request.connection for request in server.requests] == [1, 1, 1]
    assert all("cookie" not in request.headers for request in server.requests)


def test_a_connection_the_server_has_closed_is_replaced_without_an_error() -> None:
    """Servers close idle connections after seconds, and a tool may take minutes."""
    with ModelServer([(*chat_reply("one"), End.CLOSE), chat_reply("two")]) as server:
        provider = provider_for(server.url)
        ask(provider)
        time.sleep(0.2)
        ask(provider)
        provider.close()

    assert [request.connection for request in server.requests] == [1, 2]


def test_a_broken_answer_costs_its_connection_only() -> None:
    """The next request goes through a fresh one."""
    with ModelServer([(STREAM_HEAD, End.RESET), chat_reply("two")]) as server:
        provider = provider_for(server.url)
        with pytest.raises(ProviderError):
            ask(provider)
        assert ask(provider)[-1] == {"type": "finish", "reason": {"kind": "stop"}}
        provider.close()


def test_a_server_that_keeps_the_body_open_after_done_does_not_hold_the_answer_up() -> None:
    """The end of the body is waited for only shortly."""
    head = STREAM_HEAD + b"".join(chunked(event(value)) for value in [*chat_events("Hi"), "[DONE]"])
    with ModelServer([(head, End.HANG)]) as server:
        provider = provider_for(server.url)
        began = time.monotonic()
        chunks = ask(provider)
        provider.close()

    assert chunks[-1]["type"] == "finish"
    assert time.monotonic() - began < 2


def test_requests_from_several_threads_do_not_disturb_each_other() -> None:
    """Each has a connection of its own while it runs."""
    both = threading.Barrier(2)

    def reply(_: object) -> Reply:
        return chat_reply("Hi")

    with ModelServer(reply) as server:
        provider = provider_for(server.url)
        found: list[str] = []

        def run() -> None:
            both.wait()
            found.extend(ask(provider)[-1]["type"] for _ in range(20))

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        provider.close()

    assert found == ["finish"] * 40


def test_closing_twice_is_allowed() -> None:
    """And a provider that never asked anything can be closed."""
    provider = provider_for("http://127.0.0.1:9")
    provider.close()
    provider.close()


# --- addresses -------------------------------------------------------------------------------------


def test_an_unreachable_endpoint_is_said_with_its_address_and_may_be_retried(closed_port: int) -> None:
    """Servers are restarted."""
    found = refused(provider_for(f"http://127.0.0.1:{closed_port}/v1"))

    assert (found.code, found.kind, found.retryable) == (ErrorCode.PROVIDER_FAILED, "connect", True)
    assert found.message == f"cannot connect to http://127.0.0.1:{closed_port}: Connection refused"
    assert "model.base_url" in str(found.hint)


def test_a_name_that_does_not_resolve_is_said() -> None:
    """The top-level name is reserved for this."""
    found = refused(provider_for("http://nowhere.invalid/v1"))

    assert (found.kind, found.retryable) == ("connect", True)
    assert "cannot resolve nowhere.invalid" in found.message


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_name_and_a_number_reach_the_same_server(host: str) -> None:
    """Names go through a resolver in a thread."""
    with ModelServer([chat_reply("Hi")]) as server:
        provider = provider_for(f"http://{host}:{server.port}/v1")
        assert ask(provider)[-1]["type"] == "finish"
        provider.close()


def test_ipv6_addresses_work() -> None:
    """In brackets, as in any address."""
    with ModelServer([chat_reply("Hi")], host="::1") as server:
        provider = provider_for(server.url)
        assert ask(provider)[-1]["type"] == "finish"
        provider.close()

    assert server.requests[0].headers["host"] == f"[::1]:{server.port}"


@pytest.mark.parametrize(
    ("url", "part"),
    [
        ("ftp://127.0.0.1/v1", "http://"),
        ("127.0.0.1:8000", "http://"),
        ("http://", "host"),
        ("http://[::1", "address"),
        ("http://127.0.0.1:port/v1", "address"),
        ("http://127.0.0.1:0/v1", "port 0"),
        ("HTTP://127.0.0.1/v1", "write http://127.0.0.1/v1"),
        ("http://127.0.0.1/v 1", "space"),
        ("http://user:pass@127.0.0.1/v1", "credentials"),
        ("http://127.0.0.1/v1?key=1", "query"),
    ],
)
def test_an_address_that_cannot_be_one_is_refused_before_any_request(url: str, part: str) -> None:
    """The message names the key of the profile."""
    with pytest.raises(ConfigError) as caught:
        provider_for(url)

    assert "model.base_url" in caught.value.message
    assert part in caught.value.message
    assert "pass" not in caught.value.message


def test_no_proxy_and_no_password_file_is_taken_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, closed_port: int
) -> None:
    """Variables that other programs obey have no effect here."""
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{closed_port}")
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login x password y\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    with ModelServer([chat_reply("Hi")]) as server:
        provider = provider_for(server.url)
        ask(provider)
        provider.close()

    assert "authorization" not in server.requests[0].headers


# --- proxies ---------------------------------------------------------------------------------------


def test_a_proxy_of_the_profile_gets_the_request_with_its_credentials() -> None:
    """The target is the whole address; the proxy's password goes to the proxy only."""
    with ModelServer([chat_reply("Hi")]) as proxy:
        provider = provider_for("http://model.invalid/v1", proxy=f"http://user:pass%21word@127.0.0.1:{proxy.port}")
        assert ask(provider)[-1]["type"] == "finish"
        provider.close()

    (request,) = proxy.requests
    assert request.target == "http://model.invalid/v1/chat/completions"
    assert request.headers["proxy-authorization"] == "Basic dXNlcjpwYXNzIXdvcmQ="


def test_a_proxy_that_refuses_a_tunnel_is_said() -> None:
    """The address of the API is https, so the proxy is asked for a tunnel first."""
    with ModelServer([http_reply(407, b"", "text/plain")]) as proxy:
        found = refused(provider_for("https://model.invalid/v1", proxy=f"http://127.0.0.1:{proxy.port}"))

    assert proxy.requests[0].method == "CONNECT"
    assert (found.kind, found.retryable) == ("proxy", False)
    assert "model.proxy" in str(found.hint)


def test_an_unreachable_proxy_is_told_from_an_unreachable_server(closed_port: int) -> None:
    """The hint names both keys."""
    found = refused(provider_for("http://model.invalid/v1", proxy=f"http://127.0.0.1:{closed_port}"))

    assert "through the proxy 127.0.0.1" in found.message
    assert "model.proxy" in str(found.hint)


def test_a_proxy_of_another_kind_is_refused() -> None:
    """Only plain HTTP proxies."""
    with pytest.raises(ConfigError, match=r"model\.proxy"):
        provider_for("http://127.0.0.1/v1", proxy="socks5://127.0.0.1:1080")


# --- TLS -------------------------------------------------------------------------------------------


@pytest.fixture
def tls() -> ssl.SSLContext:
    """A server's context with the certificate of the tests, made for localhost and 127.0.0.1."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATES / "server.pem")
    return context


def test_a_certificate_of_a_named_authority_is_trusted(tls: ssl.SSLContext) -> None:
    """The answer comes encrypted, in pieces, over one connection."""
    with ModelServer([chat_reply("Hi" * 40_000), chat_reply("again")], context=tls) as server:
        provider = provider_for(server.url, authorities=str(CERTIFICATES / "authority.pem"))
        assert ask(provider)[-1]["type"] == "finish"
        assert ask(provider)[-1]["type"] == "finish"
        provider.close()

    assert [request.connection for request in server.requests] == [1, 1]


def test_a_certificate_of_an_unknown_authority_is_refused_for_good(tls: ssl.SSLContext) -> None:
    """Another attempt would see the same certificate."""
    with ModelServer([chat_reply("Hi")], context=tls) as server:
        found = refused(provider_for(server.url))

    assert (found.code, found.kind, found.retryable) == (ErrorCode.PROVIDER_FAILED, "tls", False)
    assert "certificate" in found.message
    assert "model.base_url" in str(found.hint)
    assert server.requests == []


def test_tls_spoken_to_a_server_that_has_none_is_a_failed_connection() -> None:
    """An https address of a plain port is the usual mistake."""
    with ModelServer([chat_reply("Hi")]) as server:
        found = refused(provider_for(server.url.replace("http://", "https://")))

    assert found.kind in ("connect", "stream-broken")
    assert "model.base_url" in str(found.hint)


def test_a_missing_certificate_file_is_a_mistake_of_the_configuration() -> None:
    """Found before anything is sent."""
    provider = provider_for("https://127.0.0.1:9/v1", authorities="/no/such/file.pem")
    with pytest.raises(ConfigError, match=r"/no/such/file\.pem"):
        ask(provider)


# --- cancellation ----------------------------------------------------------------------------------


def hanging(at: str) -> tuple[Reply, ...]:
    """A reply that hangs before its head, inside its head, or inside its stream."""
    return {
        "before the head": ((End.HANG,),),
        "in the head": ((b"HTTP/1.1 200 OK\r\ncontent-", End.HANG),),
        "in the stream": ((STREAM_HEAD + chunked(event(chat_events("Hi")[1])), End.HANG),),
    }[at]


@pytest.mark.parametrize("at", ["before the head", "in the head", "in the stream"])
def test_a_cancellation_from_another_thread_ends_a_blocked_read_at_once(at: str) -> None:
    """Early, without a finish and without an error; the next request is not disturbed."""
    with ModelServer([*hanging(at), chat_reply("next")]) as server:
        provider = provider_for(server.url)
        cancellation = Cancellation()
        sent: list[float] = []

        def cancel() -> None:
            sent.append(time.monotonic())
            cancellation.cancel("test")

        timer = threading.Timer(0.3, cancel)
        timer.start()
        chunks = list(provider.stream(b"{}", cancellation=cancellation))
        ended = time.monotonic()
        timer.join()

        assert ended - sent[0] < 0.9
        assert all(chunk["type"] != "finish" for chunk in chunks)
        assert ask(provider)[-1]["type"] == "finish"
        provider.close()
        cancellation.close()


def test_a_cancelled_request_is_not_sent() -> None:
    """A flag that is up already."""
    with ModelServer([chat_reply("Hi")]) as server:
        provider = provider_for(server.url)
        cancellation = Cancellation()
        cancellation.cancel("test")
        assert list(provider.stream(b"{}", cancellation=cancellation)) == []
        provider.close()

    assert server.requests == []


@pytest.fixture
def full_listener() -> Iterator[str]:
    """The address of a server that accepts no more connections, so that connecting takes for ever."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        port = listener.getsockname()[1]
        held = []
        for _ in range(4):
            one = socket.socket()
            one.setblocking(False)
            one.connect_ex(("127.0.0.1", port))
            held.append(one)
        yield f"http://127.0.0.1:{port}/v1"
        for one in held:
            one.close()


def cancelled_after(seconds: float) -> tuple[Cancellation, threading.Timer]:
    """A cancellation that goes up after a while."""
    cancellation = Cancellation()
    timer = threading.Timer(seconds, cancellation.cancel, ["test"])
    timer.start()
    return cancellation, timer


def test_a_cancellation_ends_connecting(full_listener: str) -> None:
    """No answer to the first packet: the system would try for two minutes."""
    provider = provider_for(full_listener)
    cancellation, timer = cancelled_after(0.3)
    began = time.monotonic()

    assert list(provider.stream(b"{}", cancellation=cancellation)) == []
    assert time.monotonic() - began < 2
    timer.join()
    provider.close()


def test_connecting_has_a_time_limit(full_listener: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of its own, shorter than that for the first event."""
    monkeypatch.setattr(sockets, "CONNECT_SECONDS", 0.3)
    found = refused(provider_for(full_listener))

    assert (found.kind, found.retryable) == ("connect", True)


def test_a_cancellation_ends_a_name_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing can interrupt the resolver, so it is left behind."""
    over = threading.Event()
    real = socket.getaddrinfo

    def slow(_: str, *arguments: Any, **options: Any) -> Any:
        if options.get("flags"):
            raise socket.gaierror(socket.EAI_NONAME, "not a number")
        over.wait(10)
        return real("127.0.0.1", *arguments, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    provider = provider_for("http://model.invalid/v1")
    cancellation, timer = cancelled_after(0.3)
    began = time.monotonic()

    assert list(provider.stream(b"{}", cancellation=cancellation)) == []
    assert time.monotonic() - began < 2
    over.set()
    timer.join()
    provider.close()


def test_a_cancellation_ends_sending_to_a_server_that_does_not_read() -> None:
    """The body is larger than what the system takes over."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        provider = provider_for(f"http://127.0.0.1:{listener.getsockname()[1]}/v1")
        cancellation, timer = cancelled_after(0.3)
        began = time.monotonic()

        assert list(provider.stream(b"x" * 50_000_000, cancellation=cancellation)) == []
        assert time.monotonic() - began < 5
        timer.join()
        provider.close()


SIGNALLED = """
import signal, sys, time
from runner.cancellation import Cancellation
from runner.providers.base import ModelSpec
from runner.providers.openai_chat import OpenAIChatProvider

cancellation = Cancellation()
signal.signal(signal.SIGTERM, lambda *_: cancellation.cancel("SIGTERM"))
provider = OpenAIChatProvider(ModelSpec("openai", "mock", base_url=sys.argv[1]), api_key=None, new_id=str)
for chunk in provider.stream(b"{}", cancellation=cancellation):
    print(chunk["type"], flush=True)
print("ended", cancellation.reason, time.monotonic(), flush=True)
"""


def test_a_signal_ends_a_blocked_read_of_the_main_thread() -> None:
    """The handler only raises the flag."""
    with (
        ModelServer(hanging("in the stream")) as server,
        subprocess.Popen([sys.executable, "-c", SIGNALLED, server.url], stdout=subprocess.PIPE, text=True) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "block-start\n"
        assert process.stdout.readline() == "text-delta\n"
        time.sleep(0.2)
        sent = time.monotonic()
        process.send_signal(signal.SIGTERM)
        word, reason, ended = process.stdout.readline().split()

    assert (word, reason) == ("ended", "SIGTERM")
    assert float(ended) - sent < 2
    assert process.returncode == 0


def test_a_reader_that_stops_early_closes_the_connection() -> None:
    """A generator that is dropped leaves nothing open."""
    with ModelServer([hanging("in the stream")[0], chat_reply("next")]) as server:
        provider = provider_for(server.url)
        chunks = provider.stream(b"{}", cancellation=Cancellation())
        assert next(chunks)["type"] == "block-start"
        chunks.close()  # type: ignore[attr-defined]  # a generator
        assert ask(provider)[-1]["type"] == "finish"
        provider.close()

    assert [request.connection for request in server.requests] == [1, 2]
