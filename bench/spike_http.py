"""The spike behind decision record 0002: CPU of one streamed request through five ways of sending it.

Each sends the same 100 KB bodies to the scripted model server and reads the answer's events to their
end, one connection for all. The server runs in its own process and is not counted.

usage: spike_http.py [--requests N] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import re
import ssl
import statistics
import subprocess
import sys
import time
from http.client import HTTPConnection
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import httpcore
import httpx
import httpx_sse

from runner.cancellation import Cancellation
from runner.providers.http import HttpClient

if TYPE_CHECKING:
    from collections.abc import Callable

HEADERS = {"content-type": "application/json", "authorization": "Bearer x"}
BODY = json.dumps({"model": "mock", "stream": True, "messages": [{"role": "user", "content": "x" * 100_000}]}).encode()


def by_client(url: str, count: int) -> None:
    """The documented way, httpx.Client and httpx-sse, as their documentation shows."""
    with httpx.Client(trust_env=False, timeout=60, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)) as client:
        for _ in range(count):
            with client.stream("POST", url, content=BODY, headers=HEADERS) as response:
                for event in httpx_sse.EventSource(response).iter_sse():
                    assert event.data


def by_transport(url: str, count: int) -> None:
    """Without the client: httpx.HTTPTransport and httpx-sse."""
    transport = httpx.HTTPTransport(trust_env=False, verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
    address, headers = httpx.URL(url), httpx.Headers({**HEADERS, "host": "x"})
    for _ in range(count):
        response = transport.handle_request(httpx.Request("POST", address, content=BODY, headers=headers))
        for event in httpx_sse.EventSource(response).iter_sse():
            assert event.data
        response.close()
    transport.close()


def by_us(url: str, count: int) -> None:
    """``runner.providers.http``: httpx, httpx-sse, our sockets with deadlines and cancellation."""
    client, cancellation = HttpClient(url), Cancellation()
    for _ in range(count):
        answer = client.post("", BODY, list(HEADERS.items()), cancellation=cancellation)
        for data in answer.events():
            assert data
        answer.close()
    client.close()
    cancellation.close()


def by_core(url: str, count: int) -> None:
    """The protocol alone, httpcore; the events are not parsed."""
    address = httpcore.URL(url)
    headers = [("host", "x"), *HEADERS.items(), ("content-length", str(len(BODY)))]
    with httpcore.ConnectionPool() as pool:
        for _ in range(count):
            with pool.stream("POST", address, content=BODY, headers=headers) as response:
                for _piece in response.iter_stream():
                    pass


def by_library(url: str, count: int) -> None:
    """The standard library alone; the events are not parsed."""
    parts = urlsplit(url)
    connection = HTTPConnection(str(parts.hostname), parts.port)
    for _ in range(count):
        connection.request("POST", parts.path, BODY, HEADERS)
        response = connection.getresponse()
        while response.read1(65536):
            pass
    connection.close()


def main() -> None:
    """Print one Markdown table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--requests", type=int, default=300)
    options.add_argument("--rounds", type=int, default=15)
    given = options.parse_args()
    mock = subprocess.Popen(
        [sys.executable, str(Path(__file__).parent / "peers" / "mock_model.py"), "--port", "0"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert mock.stdout is not None
        found = re.search(r"http://\S+", mock.stdout.readline())
        assert found is not None
        url = f"{found[0]}/v1/chat/completions"
        ways: dict[str, Callable[[str, int], None]] = {
            "httpx.Client, httpx-sse": by_client,
            "httpx.HTTPTransport, httpx-sse": by_transport,
            "runner.providers.http": by_us,
            "httpcore, events not parsed": by_core,
            "http.client, events not parsed": by_library,
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(given.rounds):
            for name, send in ways.items():
                begun = time.process_time()
                send(url, given.requests)
                taken[name].append((time.process_time() - begun) / given.requests * 1e3)
    finally:
        mock.terminate()
        mock.wait()
    print("| | ms CPU a request |\n|---|---|")
    for name, values in taken.items():
        print(f"| {name} | {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f}) |")


if __name__ == "__main__":
    main()
