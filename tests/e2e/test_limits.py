"""Every limit, by the installed command: the model is told, the run ends with the limit's code, the log is whole."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, chat_reply

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "Done."}
USAGE = {"input": 600, "cacheRead": 200, "cacheWrite": 100, "output": 100}


def shell(*commands: str) -> dict[str, Any]:
    """A response with shell calls, 900 tokens read and 100 written."""
    calls = [{"tool": "shell", "args": {"command": command}} for command in commands]
    return {"text": "I run a command.", "calls": calls, "usage": USAGE}


STEPS = [shell(f": {number}") for number in range(20)]


class Limited:
    """Runs a scripted task with limits and looks at how it ended."""

    def __init__(self, run_nightshift: Nightshift, scripted_task: ScriptedTask, workspace: Path) -> None:
        self.run_nightshift = run_nightshift
        self._task = scripted_task
        self.workspace = workspace

    def task(self, responses: Sequence[Any], limits: Any, *, task: Any = None, prices: Any = None) -> Path:
        """A task whose requests need room for 500 tokens of an answer."""
        model = {"provider": "scripted", "model": "scripted", "script": "task.script.yaml"}
        profile = {"limits": limits, "compaction": {"min_output": 500}, "model": model | {"prices": prices or {}}}
        return self._task(responses, profile=profile, task=task)

    def run(self, responses: Sequence[Any], limits: Any, **more: Any) -> Finished:
        """Run it to its end."""
        return self.run_nightshift("run", self.task(responses, limits, **more), "--workspace", self.workspace)

    def assert_whole(self, finished: Finished) -> None:
        """The artifacts are complete and the log is sealed and verifies."""
        names = {path.name for path in finished.artifacts.iterdir()}
        assert {"session.jsonl.zst", "result.json", "usage.json", "summary.md", "session.zip"} <= names
        assert finished.events[-1]["type"] == "log/seal"
        verified = self.run_nightshift("session", "verify", finished.artifacts)
        assert verified.exit_code == 0, verified.stdout + verified.stderr

    def assert_ended(self, finished: Finished, name: str, *, noticed: bool = True) -> dict[str, Any]:
        """The run ended by one limit, with its code; returns what result.json says of it."""
        budget = name in ("cost", "tokens", "input_tokens", "output_tokens")
        assert finished.exit_code == (6 if budget else 5), finished.stderr
        assert finished.result["code"] == ("BUDGET_EXHAUSTED" if budget else "LIMIT_REACHED")
        assert finished.result["failureClass"] == ("budget" if budget else "limit")
        assert f"the limit {name} was reached" in finished.result["error"]["message"]
        reached = [(data["name"], data["percent"]) for data in finished.data_of("limit/reached")]
        assert reached == [*([(name, 90)] if noticed else []), (name, 100)]
        self.assert_whole(finished)
        if noticed:
            self._assert_told_once(finished, name)
        entry: dict[str, Any]
        [entry] = [limit for limit in finished.result["limits"] if limit["name"] == name]
        return entry

    def _assert_told_once(self, finished: Finished, name: str) -> None:
        """The notice stands in the body of the next request and in none before it."""
        told, step = [], 0
        for event in finished.events:
            step = event["data"]["step"] if event["type"] == "step/start" else step
            if event["type"] == "user/message" and event["data"]["source"].get("plugin") == "limits":
                told.append(step)
        assert len(told) == 1
        for number, times in ((told[0] - 1, 0), (told[0], 1)):
            if number:
                body = self.run_nightshift("session", "request", finished.artifacts, "--step", str(number)).stdout
                notice = rf"The limit {name} (is nearly used up|has room for about one more request) \("
                assert len(re.findall(notice, body)) == times


@pytest.fixture
def limited(run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo) -> Limited:
    """A small workspace."""
    return Limited(run_nightshift, scripted_task, make_repo({"src/a.txt": "one\n"}))


def stopped(finished: Finished) -> dict[str, Any]:
    """Why the last turn ended."""
    reason: dict[str, Any] = finished.data_of("turn/end")[-1]["reason"]
    return reason


def test_steps(limited: Limited) -> None:
    """The step that would be one too many is not opened."""
    finished = limited.run(STEPS, {"steps": 3})

    assert limited.assert_ended(finished, "steps") == {"name": "steps", "used": 3, "max": 3}
    assert len(finished.data_of("step/start")) == 3
    assert stopped(finished) == {
        "kind": "aborted",
        "reason": {"kind": "limit", "code": "LIMIT_REACHED", "name": "steps"},
    }


def test_turns(limited: Limited) -> None:
    """A further prompt that would begin a turn too many ends the run."""
    finished = limited.run([DONE, DONE, DONE], {"turns": 2}, task={"turns": ["And now?", "And then?"]})

    assert limited.assert_ended(finished, "turns") == {"name": "turns", "used": 2, "max": 2}
    assert len(finished.data_of("turn/start")) == 2


@pytest.mark.parametrize(
    ("name", "maximum", "prices", "step"),
    [
        pytest.param("input_tokens", 5_000, {}, 900, id="input tokens, cached ones too"),
        pytest.param("output_tokens", 1_200, {}, 100, id="output tokens"),
        pytest.param("tokens", 8_000, {}, 1_000, id="tokens"),
        pytest.param("cost", 0.1, {"input": 10, "cache_read": 1, "cache_write": 12, "output": 20}, 0.0094, id="cost"),
    ],
)
def test_tokens_and_money(limited: Limited, name: str, maximum: float, prices: Any, step: float) -> None:
    """Before the request that no longer fits: no step is opened for it, and the cap is never passed."""
    finished = limited.run(STEPS, {name: maximum}, prices=prices)

    entry = limited.assert_ended(finished, name)
    steps = len(finished.data_of("step/start"))
    assert steps >= 3
    assert entry["used"] == pytest.approx(steps * step)
    assert entry["used"] <= entry["max"] == maximum
    reached = finished.data_of("limit/reached")[-1]
    assert reached["used"] == pytest.approx(entry["used"])
    assert reached["used"] + reached["needed"] > maximum
    assert stopped(finished)["reason"] == {"kind": "budget", "code": "BUDGET_EXHAUSTED", "name": name}


def test_an_answer_gets_no_more_room_than_the_budget_leaves(limited: Limited) -> None:
    """``maxTokens`` is what is left of the output tokens, in steps, so that not even the longest answer passes them."""
    finished = limited.run([shell("true"), DONE], {"output_tokens": 9_000})

    assert finished.exit_code == 0, finished.stderr
    assert [data["header"]["config"]["maxTokens"] for data in finished.data_of("request/header")] == [8_000]


@pytest.mark.parametrize("limit", [{"tokens": 9_000}, {"cost": 0.05}], ids=["tokens", "cost"])
def test_a_provider_that_reports_no_usage_is_charged_an_estimate(
    limit: dict[str, Any], limited: Limited, scripted_task: ScriptedTask
) -> None:
    """The budget holds; the reports say that nothing is known."""
    calls = [chat_reply("x" * 800, calls=[(f"c{n}", "shell", json.dumps({"command": f": {n}"}))]) for n in range(50)]
    with ModelServer(calls) as server:
        model = {
            "provider": "openai", "model": "some-model", "base_url": server.url, "api_key_env": "SOME_KEY",
            "context_window": 100_000, "prices": {"input": 2, "output": 8}, "max_output_tokens": 1_000,
        }  # fmt: skip
        task = scripted_task([DONE], profile={"model": model, "limits": {"steps": 50, **limit}})

        finished = limited.run_nightshift(
            "run", task, "--workspace", limited.workspace, env={"SOME_KEY": "sk-test-123456"}
        )

    [name] = limit
    assert limited.assert_ended(finished, name)["used"] is None
    assert 2 <= len(server.requests) <= 20
    assert len(finished.events_of("step/start")) == len(server.requests)
    assert finished.result["usage"]["output"] is None


def test_a_summary_draws_from_the_same_budget(limited: Limited) -> None:
    """Reserved before it is asked for: what is left for a small step is not enough for it."""
    responses = [shell("seq 300"), {"text": "One.", "usage": USAGE}, DONE, DONE]
    more = {"turns": ["And now?"], "compact_at": [2]}
    finished = limited.run(responses, {"output_tokens": 650}, task=more)

    assert finished.exit_code == 6, finished.stderr
    assert [data["purpose"] for data in finished.data_of("request/sent")] == ["main", "main"]
    limited.assert_whole(finished)


def test_wall(limited: Limited) -> None:
    """In the middle of a call, which is ended; the model was told in the last tenth."""
    finished = limited.run([shell("sleep 0.1") for _ in range(80)], {"wall": "5s"})

    entry = limited.assert_ended(finished, "wall")
    assert entry["max"] == 5
    assert 5 <= entry["used"] < 8
    assert stopped(finished)["reason"] == {"kind": "limit", "code": "LIMIT_REACHED", "name": "wall"}


def test_the_wall_limit_ends_a_check_too(limited: Limited) -> None:
    """It is the limit that ended the run, not the check that failed."""
    finished = limited.run([DONE], {"wall": "2s"}, task={"checks": [{"name": "slow", "run": "sleep 30"}]})

    limited.assert_ended(finished, "wall", noticed=False)


def test_idle(limited: Limited) -> None:
    """Silence of the model; nobody is left to be told."""
    finished = limited.run([{"text": "slow", "delay": 20}], {"idle": "1s"})

    assert limited.assert_ended(finished, "idle", noticed=False) == {"name": "idle", "used": 1, "max": 1}
    assert stopped(finished)["reason"] == {"kind": "limit", "code": "LIMIT_REACHED", "name": "idle"}


def test_a_call_that_takes_long_is_no_silence(limited: Limited) -> None:
    """``idle`` counts while the model is to say something, not while a tool or a check runs."""
    task = {"checks": [{"name": "slow", "run": "sleep 1.5"}]}
    finished = limited.run([shell("sleep 1.5"), DONE], {"idle": "1s"}, task=task)

    assert finished.exit_code == 0, finished.stderr


def test_tool(limited: Limited) -> None:
    """The limit of one call ends that call, and the run goes on."""
    began = time.monotonic()
    finished = limited.run([shell("sleep 60"), shell("true"), DONE], {"tool": "1s"})

    assert finished.exit_code == 0, finished.stderr
    assert time.monotonic() - began < 30
    first, second = finished.data_of("tool/result")
    assert first["error"]["code"] == "TOOL_TIMEOUT"
    assert first["meta"]["timedOut"] is True
    assert 1_000 <= first["meta"]["durationMs"] < 10_000
    assert "error" not in second
    body = limited.run_nightshift("session", "request", finished.artifacts, "--step", "2").stdout
    assert "timed out after 1 s" in body
    assert finished.data_of("limit/reached") == []
    limited.assert_whole(finished)


def test_tool_time(limited: Limited) -> None:
    """A call gets what is left for all of them; what stands behind it in the same reply is not started."""
    finished = limited.run([shell("sleep 3.65"), shell("sleep 60", "touch never.txt"), DONE], {"tool_time": "4s"})

    entry = limited.assert_ended(finished, "tool_time")
    assert entry["max"] == 4
    assert 4 <= entry["used"] < 6
    last, behind = finished.data_of("tool/result")[1:]
    assert last["error"]["code"] == "TOOL_TIMEOUT"
    assert behind["error"]["code"] == "ABORTED_BEFORE_DISPATCH"
    assert "the limit tool_time is reached" in json.dumps(behind["message"])
    assert not (limited.workspace / "never.txt").exists()
    assert stopped(finished)["reason"] == {"kind": "limit", "code": "LIMIT_REACHED", "name": "tool_time"}


def test_output_bytes(limited: Limited) -> None:
    """The call that passes it is the last one; what stands behind it in the same reply is not started."""
    responses = [shell("printf %09200d 0"), shell("printf %05000d 0", "touch never.txt"), DONE]
    finished = limited.run(responses, {"output_bytes": 10_000})

    entry = limited.assert_ended(finished, "output_bytes")
    assert 14_200 <= entry["used"] < 14_400
    assert finished.data_of("tool/result")[-1]["error"]["code"] == "ABORTED_BEFORE_DISPATCH"
    assert not (limited.workspace / "never.txt").exists()


def test_what_was_used_before_a_resume_counts(limited: Limited) -> None:
    """Output tokens of both parts together stay under the limit, as those of one run would."""
    marker = limited.workspace / "src" / "now.txt"
    responses = [shell("true"), shell(f"echo > {marker}; sleep 600"), *STEPS]
    where = {"workspace": {"path": str(limited.workspace)}}
    running = limited.run_nightshift.start("run", limited.task(responses, {"output_tokens": 1_200}, task=where))
    deadline = time.monotonic() + 30
    while not marker.exists():
        assert time.monotonic() < deadline, "the second call never ran"
        time.sleep(0.02)
    os.killpg(running.process.pid, signal.SIGKILL)
    running.process.communicate(timeout=30)

    finished = limited.run_nightshift("resume", running.artifacts, artifacts=running.artifacts)

    assert finished.exit_code == 6, finished.stderr
    reached = finished.data_of("limit/reached")[-1]
    assert (reached["name"], reached["used"], reached["needed"]) == ("output_tokens", 800, 500)
    [entry] = [limit for limit in finished.result["limits"] if limit["name"] == "output_tokens"]
    assert entry == {"name": "output_tokens", "used": 800, "max": 1_200}
    limited.assert_whole(finished)


@pytest.mark.parametrize("name", ["input_tokens", "output_tokens", "tool_time"])
def test_a_task_may_only_tighten_a_limit(limited: Limited, name: str) -> None:
    """More is an error that names the place; less holds; ``--set`` is bound alike."""
    more = limited.run([DONE], {name: 500_000}, task={"limits": {name: 600_000}})
    less = limited.run([DONE], {name: 500_000}, task={"limits": {name: 400_000}})
    task = limited.task([DONE], {name: 500_000})
    looser = limited.run_nightshift("run", task, "--workspace", limited.workspace, "--set", f"limits.{name}=1000000")

    assert more.exit_code == looser.exit_code == 2
    assert f"limits.{name}: is more than the profile's 500000" in more.stderr
    assert "task.task.yaml:" in more.stderr
    assert "may only be tightened" in looser.stderr
    assert less.exit_code == 0, less.stderr
    assert {limit["name"]: limit["max"] for limit in less.result["limits"]}[name] == 400_000


@pytest.mark.parametrize("value", [0, -1, "soon", True], ids=str)
def test_a_limit_that_is_none_is_refused(limited: Limited, value: Any) -> None:
    """CONFIG_INVALID, before anything is created."""
    finished = limited.run([DONE], {"tool_time": value})

    assert finished.exit_code == 2
    assert "limits.tool_time" in finished.stderr
    assert not finished.artifacts.exists()
