"""The demo as a newcomer runs it: everything but the model's answers is real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

DEMO = Path(__file__).parents[2] / "configs/demo/run.py"


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_the_demo_fixes_the_repository(
    backend: str, tmp_path: Path, session_log_reader: Callable[[Path], list[dict[str, Any]]]
) -> None:
    """The suite fails before and passes after; one call is denied, and the model reads why."""
    other = {"bubblewrap": "landlock", "landlock": "bubblewrap"}[backend]

    done = subprocess.run(
        [sys.executable, DEMO, "quick", tmp_path],
        env={**os.environ, "NIGHTSHIFT_DISABLE_BACKENDS": other},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    artifacts, workspace = tmp_path / "artifacts", tmp_path / "workspace"
    result = json.loads((artifacts / "result.json").read_text())
    assert result["sandbox"]["backend"] == backend
    assert [(check["name"], check["passed"]) for check in result["checks"]] == [("tests", True)]
    assert result["patch"]["files"] == 1
    said = done.stdout + done.stderr
    for expected in ("COMPLETED", "summary.md", "tokens"):
        assert expected in said
    top = {path.name for path in workspace.iterdir()}
    assert top == {".git", ".gitignore", "README.md", "basket", "pyproject.toml", "tests"}

    events = session_log_reader(artifacts / "session.jsonl.zst")[1:]
    [decided] = [e for e in events if e["type"] == "approval/decided" and e["data"]["outcome"] == "rejected"]
    asked = [e["data"]["id"] for e in events if e["type"] == "approval/asked"]
    assert decided["data"]["id"] in asked
    assert decided["data"]["rule"] == "no-push"
    [denied] = [e for e in events if e["type"] == "tool/result" and e["data"].get("error")]
    assert denied["data"]["error"]["code"] == "POLICY_DENIED"
    text = json.dumps(denied["data"]["message"])
    assert "no-push" in text
    assert "publishing is not the agent's job" in text
