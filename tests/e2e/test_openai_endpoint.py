"""Any OpenAI-compatible endpoint: streamed answers, tools, usage, for short and long runs."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import MakeRepo, Nightshift

MODEL = Path(__file__).parents[2] / "bench/peers/mock_model.py"


@pytest.fixture
def scripted_server() -> Iterator[str]:
    """The scripted model server of the benchmark, in a process of its own; gives its address."""
    with subprocess.Popen([sys.executable, MODEL, "--port", "0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = re.search(r"http://\S+", process.stdout.readline())
        assert address is not None
        yield address[0]
        process.terminate()


def ask(url: str, *, post: bool = False) -> dict[str, Any]:
    """One control request to the server."""
    request = urllib.request.Request(url, method="POST" if post else "GET", data=b"" if post else None)
    with urllib.request.urlopen(request, timeout=30) as answer:
        parsed: dict[str, Any] = json.load(answer)
        return parsed


@pytest.mark.parametrize("steps", [5, 50, pytest.param(200, marks=pytest.mark.slow)])
@pytest.mark.timeout(240)
def test_a_run_of_many_steps_against_the_scripted_server(
    steps: int, scripted_server: str, run_nightshift: Nightshift, make_repo: MakeRepo
) -> None:
    """Every step's command ran, history only grew, usage is the server's, every body can be rebuilt."""
    workspace = make_repo()
    ask(f"{scripted_server}/__reset?steps={steps}&output_bytes=200", post=True)
    settings = {
        "permission_mode": "danger-full-access",
        "model.provider": "openai",
        "model.base_url": f"{scripted_server}/v1",
        "model.model": "mock",
        "model.api_key_env": "SOME_KEY",
    }
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]

    finished = run_nightshift(
        "run",
        "--prompt",
        "Do the task step by step with the shell, then say that you are done.",
        "--profile",
        "eval",
        "--workspace",
        workspace,
        *options,
        env={"SOME_KEY": "sk-test-123456"},
        timeout=200,
    )

    assert finished.exit_code == 0, finished.stderr
    assert (workspace / "out.txt").read_text().split() == [f"step-{n}" for n in range(1, steps + 1)]
    served = ask(f"{scripted_server}/__stats")
    assert (served["main"], served["side"], served["other"]) == (steps + 1, 0, 0)
    # All of a body but its closing brackets is the start of the next one.
    kept = [request["kept_frac"] * before["bytes"] - before["bytes"] for before, request in pairs(served["requests"])]
    assert all(-4 <= left <= 0 for left in kept)
    assert served["first_bytes"] < 8000
    assert finished.result["steps"] == steps + 1
    assert finished.result["usage"]["output"] == 20 * (steps + 1)
    assert finished.result["usage"]["cacheRead"] > 0
    verified = json.loads(run_nightshift("session", "verify", "--json", finished.artifacts).stdout)
    assert verified["requests"]["checked"] == steps + 1


def pairs(requests: list[dict[str, Any]]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each main request with the one before it."""
    main = [request for request in requests if request["kind"] == "main"]
    return list(itertools.pairwise(main))
