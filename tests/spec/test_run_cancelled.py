"""A run that is cancelled before the agent began."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from runner.cancellation import Cancellation
from runner.config.resolve import load_run
from runner.run import RunOptions, run_task

if TYPE_CHECKING:
    from conftest import MakeRepo, ScriptedTask


def test_a_signal_during_the_probe_is_a_cancellation(
    scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """143, not SANDBOX_UNAVAILABLE: a probe that was cut short says nothing about the sandbox."""
    task = scripted_task([{"text": "Done."}])
    spec = load_run(task=task, prompt=None, profile=None, workspace=str(make_repo()), environ=os.environ, cwd=Path("/"))
    cancellation = Cancellation()
    cancellation.cancel("SIGTERM")
    try:
        finished = run_task(
            spec, RunOptions(artifacts=tmp_path / "artifacts"), environ=os.environ, cancellation=cancellation
        )
    finally:
        cancellation.close()

    assert (finished.exit_code, finished.result["code"], finished.result["secondary"]) == (143, "CANCELLED", [])
    assert (tmp_path / "artifacts/summary.md").exists()
