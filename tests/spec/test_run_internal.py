"""A bug of ours ends a run with INTERNAL, and the artifacts are complete nevertheless."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.cancellation import Cancellation
from runner.config.resolve import load_run
from runner.run import FinishedRun, RunOptions, run_task

if TYPE_CHECKING:
    from conftest import MakeRepo, ScriptedTask


class BrokenError(Exception):
    """What breaks in these tests."""


def run(task: Path, workspace: Path, artifacts: Path) -> FinishedRun:
    """Run a task in this process."""
    spec = load_run(task=task, prompt=None, profile=None, workspace=str(workspace), environ=os.environ, cwd=Path("/"))
    cancellation = Cancellation()
    try:
        options = RunOptions(artifacts=artifacts)
        return run_task(spec, options, environ=os.environ, cancellation=cancellation)
    finally:
        cancellation.close()


@pytest.mark.backend("bubblewrap")
def test_a_report_that_cannot_be_made_is_a_result_too(
    scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """INTERNAL in result.json, which is written all the same."""

    def broken(*_: object, **__: object) -> str:
        raise BrokenError

    monkeypatch.setattr("runner.artifacts.publish.render_summary", broken)

    finished = run(scripted_task([{"text": "Done."}]), make_repo(), tmp_path / "artifacts")

    assert (finished.exit_code, finished.result["code"]) == (70, "INTERNAL")
    assert json.loads((tmp_path / "artifacts/result.json").read_text()) == finished.result


@pytest.mark.backend("bubblewrap")
def test_a_network_allowlist_that_cannot_work_stops_the_run_before_the_first_request(
    scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe of the backend does not see the proxy's door, so it is tried on its own: SANDBOX_UNAVAILABLE."""
    monkeypatch.setattr("runner.sandbox.bubblewrap.PROXY_PORT", 70_000)
    task = scripted_task([{"text": "Done."}], profile={"sandbox": {"network": {"allow": ["127.0.0.1:1"]}}})

    finished = run(task, make_repo(), tmp_path / "artifacts")

    assert (finished.exit_code, finished.result["code"]) == (3, "SANDBOX_UNAVAILABLE")
    assert finished.result["steps"] == 0
