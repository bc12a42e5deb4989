"""What the model is told about the place it works in."""

from __future__ import annotations

import pytest

from runner.agent.prompt import runtime_context
from runner.agent.settings import Limits


def context(mode: str) -> str:
    """The run-time state of a session in ``mode``."""
    return runtime_context(
        mode=mode, workspace="/w", tmp="/tmp/s/tmp", network=False, not_enforced=(), policy_summary="", limits=Limits()
    )


@pytest.mark.parametrize("mode", ["read-only", "workspace-write"])
def test_the_model_knows_that_only_its_temporary_folder_lasts(mode: str) -> None:
    """Under either backend a file elsewhere in /tmp would not be there for the next call."""
    line = next(line for line in context(mode).splitlines() if line.startswith("Temporary folder: /tmp/s/tmp "))

    assert "$TMPDIR" in line
    assert "elsewhere in /tmp is gone after the call, or refused" in line


def test_a_bare_session_has_the_machines_tmp() -> None:
    """Nothing is said about it that does not hold there."""
    assert "Temporary folder: /tmp/s/tmp\n" in context("danger-full-access")
