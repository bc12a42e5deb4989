"""A check runs in the sandbox of the run, whatever the backend."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from runner.agent.hook import TurnOver
from runner.cancellation import Cancellation
from runner.hooks.checks import ChecksHook
from runner.permission import Mode
from runner.sandbox.base import SandboxSpec
from runner.sandbox.executor import Executor, session_policy
from runner.sandbox.probe import build_backend
from runner.session import events as ev

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Check:
    """A declared check."""

    name: str
    run: str
    timeout: float = 20.0
    retries: int = 0


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("mode", [Mode.READ_ONLY, Mode.WORKSPACE_WRITE])
def test_a_check_can_write_only_what_the_agent_can(tmp_path: Path, backend: str, mode: Mode) -> None:
    """Not outside the workspace; in read-only mode not inside it either."""
    workspace, state = tmp_path / "workspace", tmp_path / "state"
    (workspace / "sub").mkdir(parents=True)
    state.mkdir()
    policy = session_policy(
        SandboxSpec(backend=backend),
        mode=mode,
        workspace=str(workspace.resolve()),
        state=str(state),
        hidden=(),
        environment={"PATH": "/usr/bin:/bin"},
    )
    executor = Executor(build_backend(backend), policy)
    events: list[ev.Event] = []
    hook = ChecksHook(
        [Check("writes", f"touch sub/inside; touch {shlex.quote(str(tmp_path))}/outside; exit 4")],
        executor=executor,
        mode=mode,
        cancellation=Cancellation(),
        append=events.append,
        redact=str,
        new_id=str,
    )
    hook.after_turn(TurnOver(turn=1, reason="completed", more=0))
    executor.close()

    assert not (tmp_path / "outside").exists()
    assert (workspace / "sub" / "inside").exists() == (mode is Mode.WORKSPACE_WRITE)
    assert [event.exit_code for event in events if isinstance(event, ev.CheckEnd)] == [4]
