"""A run with a network allowlist, by the installed command: what is reached, what the log and the report say."""

from __future__ import annotations

import http.server
import threading
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import MakeRepo, Nightshift, ScriptedTask

FETCH = (
    "python3 -c 'import urllib.request as r; print(r.urlopen(\"http://127.0.0.1:{port}/README\", timeout=9).status)'"
)


@pytest.fixture
def port() -> Iterator[int]:
    """Port of an HTTP server outside the sandbox."""
    serving = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    yield serving.server_address[1]
    serving.shutdown()
    thread.join()
    serving.server_close()


def responses(*ports: int) -> list[dict[str, Any]]:
    """A script that asks for a page at each port."""
    calls = [{"tool": "shell", "args": {"command": FETCH.format(port=port)}} for port in ports]
    return [{"text": "I look.", "calls": calls}, {"text": "Done."}]


@pytest.mark.backend("bubblewrap")
def test_every_connection_is_decided_and_stands_in_log_and_report(
    port: int, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The place on the list is reached (it answers 501), the other is not; the model is told of the list."""
    profile = {"sandbox": {"network": {"allow": [f"127.0.0.1:{port}"]}}}
    finished = run_nightshift(
        "run", scripted_task(responses(port, port + 1), profile=profile), "--workspace", make_repo()
    )

    assert finished.exit_code == 0, finished.stderr
    assert finished.data_of("sandbox/egress") == [
        {"host": "127.0.0.1", "port": port, "decision": "allowed"},
        {"host": "127.0.0.1", "port": port + 1, "decision": "denied"},
    ]
    assert finished.data_of("run/start")[0]["sandbox"]["network"] == {"allow": [f"127.0.0.1:{port}"]}
    results = [data["message"]["content"][0]["content"][0]["text"] for data in finished.data_of("tool/result")]
    assert "HTTP Error 501" in results[0]
    assert "HTTP Error 403" in results[1]
    report = (finished.artifacts / "summary.md").read_text()
    assert f"- network: `only 127.0.0.1:{port}`" in report
    assert f"- connections denied: `127.0.0.1:{port + 1}` (1 time)" in report
    assert f"Network: only 127.0.0.1:{port}, through the proxy" in str(finished.data_of("user/message"))
    assert run_nightshift("session", "verify", finished.artifacts).exit_code == 0


def test_without_network_namespaces_a_run_with_an_allowlist_does_not_start(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """SANDBOX_UNAVAILABLE before the first request, with the reason and what to do."""
    task = scripted_task(responses(1), profile={"sandbox": {"network": {"allow": ["127.0.0.1:1"]}}})
    finished = run_nightshift(
        "run", task, "--workspace", make_repo(), env={"NIGHTSHIFT_DISABLE_BACKENDS": "bubblewrap"}
    )

    assert finished.exit_code == 3
    assert "landlock" in finished.stderr
    assert "no network of its own" in finished.stderr
    assert finished.data_of("request/sent") == []


@pytest.mark.backend("bubblewrap")
def test_a_page_is_fetched_through_the_same_list(
    port: int, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """``fetch_url`` is offered since the profile names it; a place off the list is a denial by the sandbox."""
    calls: list[dict[str, Any]] = [
        {"tool": "fetch_url", "args": {"url": f"http://127.0.0.1:{each}/"}} for each in (port, port + 1)
    ]
    profile = {"sandbox": {"network": {"allow": [f"127.0.0.1:{port}"]}}, "tools": {"allow": ["fetch_url", "todo"]}}
    calls.append({"tool": "todo", "args": {"todos": []}})
    task = scripted_task([{"text": "I look.", "calls": calls}, {"text": "Done."}], profile=profile)
    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 0, finished.stderr
    there, away, _ = finished.data_of("tool/result")
    assert there["message"]["content"][0]["content"][0]["text"].startswith("501 Unsupported method")
    assert away["error"]["code"] == "SANDBOX_DENIED"
    assert [(data["port"], data["decision"]) for data in finished.data_of("sandbox/egress")] == [
        (port, "allowed"),
        (port + 1, "denied"),
    ]
