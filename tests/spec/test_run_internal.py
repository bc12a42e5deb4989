"""A bug of ours ends a run with INTERNAL, and the artifacts are complete nevertheless."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.agent.hook import Hook
from runner.cancellation import Cancellation
from runner.config.resolve import load_run
from runner.run import FinishedRun, RunOptions, run_task

if TYPE_CHECKING:
    from conftest import MakeRepo, ScriptedTask

    from runner.agent.hook import RequestAccess, StepStarting, TurnOver
    from runner.messages import Message
    from runner.session.events import Event
    from runner.tools.base import ToolOutcome
    from runner.tools.pipeline import Denial, PreparedCall

CALL = {"calls": [{"tool": "shell", "args": {"command": "echo ran > ran.txt"}}]}


class BrokenError(Exception):
    """What the hooks of these tests raise."""


class BeforeStep(Hook):
    """Throws before a step."""

    def before_step(self, starting: StepStarting) -> None:
        raise BrokenError


class BeforeRequest(Hook):
    """Throws before a request."""

    def before_request(self, access: RequestAccess, *, overflow: bool) -> bool:
        raise BrokenError


class AfterTool(Hook):
    """Throws behind a tool."""

    def after_tool(self, call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
        raise BrokenError


class AfterTurn(Hook):
    """Throws behind a turn."""

    def after_turn(self, over: TurnOver) -> list[Message]:
        raise BrokenError


class Guard(Hook):
    """Throws as a guard."""

    def guard(self, call: PreparedCall) -> Denial | None:
        raise BrokenError


class Observe(Hook):
    """Throws at every event."""

    def observe(self, event: Event) -> None:
        raise BrokenError


def run_with(hook: Hook, task: Path, workspace: Path, artifacts: Path) -> FinishedRun:
    """Run a task in this process with one more hook."""
    spec = load_run(task=task, prompt=None, profile=None, workspace=str(workspace), environ=os.environ, cwd=Path("/"))
    cancellation = Cancellation()
    try:
        options = RunOptions(artifacts=artifacts, hooks=[hook])
        return run_task(spec, options, environ=os.environ, cancellation=cancellation)
    finally:
        cancellation.close()


@pytest.mark.backend("bubblewrap")
@pytest.mark.parametrize(
    "hook", [BeforeStep(), BeforeRequest(), AfterTool(), AfterTurn()], ids=lambda h: type(h).__name__
)
def test_a_hook_that_throws_ends_the_run_with_70(
    hook: Hook, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """INTERNAL, with a whole log and every artifact."""
    artifacts = tmp_path / "artifacts"

    finished = run_with(hook, scripted_task([CALL, {"text": "Done."}]), make_repo(), artifacts)

    assert finished.exit_code == 70
    assert finished.result["code"] == "INTERNAL"
    assert "BrokenError" in finished.result["error"]["message"]
    assert json.loads((artifacts / "result.json").read_text()) == finished.result
    assert {"session.jsonl.zst", "session.zip", "summary.md", "usage.json"} <= {p.name for p in artifacts.iterdir()}
    assert "internal error" in capsys.readouterr().err


@pytest.mark.backend("bubblewrap")
def test_a_guard_that_throws_denies(scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path) -> None:
    """The call does not run, and the model is told GUARD_DENIED."""
    workspace = make_repo()

    finished = run_with(Guard(), scripted_task([CALL, {"text": "Done."}]), workspace, tmp_path / "artifacts")

    assert finished.result["code"] == "POLICY_DENIED"
    assert finished.result["toolCalls"] == {"total": 1, "failed": 0, "denied": 1}
    assert not (workspace / "ran.txt").exists()


@pytest.mark.backend("bubblewrap")
def test_an_observer_that_throws_changes_nothing(
    scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """The run goes on."""
    workspace = make_repo()

    finished = run_with(Observe(), scripted_task([CALL, {"text": "Done."}]), workspace, tmp_path / "artifacts")

    assert finished.exit_code == 0
    assert (workspace / "ran.txt").read_text() == "ran\n"


@pytest.mark.backend("bubblewrap")
def test_a_report_that_cannot_be_made_is_a_result_too(
    scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INTERNAL in result.json, which is written all the same."""

    def broken(*_: object, **__: object) -> str:
        raise BrokenError

    monkeypatch.setattr("runner.artifacts.publish.render_summary", broken)

    finished = run_with(Hook(), scripted_task([CALL, {"text": "Done."}]), make_repo(), tmp_path / "artifacts")

    assert (finished.exit_code, finished.result["code"]) == (70, "INTERNAL")
    assert json.loads((tmp_path / "artifacts/result.json").read_text()) == finished.result
