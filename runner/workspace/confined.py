"""The runner's own git inside the sandbox, for a tree that an agent wrote.

The network is off, only the scratch directory of the snapshot is writable, the tree itself is
read-only, and what the session hides stays hidden, whatever the profile allows the agent.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from runner.permission import Mode
from runner.record import replace
from runner.sandbox.executor import Executor, session_policy
from runner.workspace.snapshot import mark_index

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from runner.cancellation import Cancellation
    from runner.sandbox.base import Backend, ProcessResult, SandboxSpec
    from runner.workspace.git import RunGit
    from runner.workspace.isolation import Workspace
    from runner.workspace.snapshot import Snapshot

GIT_TIMEOUT = 300.0
"""Seconds one command of the runner's own git may take."""


def confined_git(
    backend: Backend,
    spec: SandboxSpec,
    workspace: Workspace,
    *,
    state: Path,
    cancellation: Cancellation,
    hidden: Sequence[str] = (),
    timeout: float = GIT_TIMEOUT,
) -> RunGit:
    """A ``RunGit`` for the workspace's snapshot that goes through ``backend``.

    Args:
        backend: The sandbox the agent's commands ran in.
        spec: The run's sandbox settings; network, sockets and writable roots are taken away.
        workspace: Of its snapshot the scratch directory may be written.
        state: Private directory in which ``git-sandbox/`` is made.
        cancellation: Ends a command early. A run that is being cancelled passes a fresh one, so
            that the patch is still made.
        hidden: What the agent's commands must not see. Such paths in the work tree keep their recorded
            content: git finds nothing there, and the agent cannot have changed them.
        timeout: Seconds for one command.

    Raises:
        ConfigError: CONFIG_INVALID, the scratch directory cannot be confined.
    """
    private = state / "git-sandbox"
    private.mkdir(mode=0o700, exist_ok=True)
    snapshot = workspace.snapshot
    _keep(snapshot, hidden)
    policy = session_policy(
        replace(spec, network=False, unix_sockets=False, writable=()),
        mode=Mode.WORKSPACE_WRITE,
        workspace=snapshot.scratch,
        state=str(private),
        hidden=hidden,
        environment={},
        readable=(snapshot.work_tree, *_directories(snapshot), *workspace.readable),
    )
    executor = Executor(backend, policy)

    def run(argv: list[str], *, environment: dict[str, str], writable: tuple[str, ...], cwd: str) -> ProcessResult:
        return executor.run(
            argv,
            mode=Mode.WORKSPACE_WRITE,
            timeout=timeout,
            cancellation=cancellation,
            cwd=cwd,
            writable=[path for path in writable if path != snapshot.scratch],
            environment=environment,
        )

    return run


def _keep(snapshot: Snapshot, hidden: Sequence[str]) -> None:
    """Let the recorded content of hidden paths stand, in the work tree and in its submodules."""
    top = os.path.realpath(snapshot.work_tree) + "/"
    kept = [path.removeprefix(top) for path in map(os.path.realpath, hidden) if path.startswith(top)]
    if kept:
        mark_index(snapshot, kept=kept)
    for inner in snapshot.nested:
        _keep(inner, hidden)


def _directories(snapshot: Snapshot) -> list[str]:
    """The private git directories of a snapshot and of its submodules."""
    return [snapshot.directory, *(path for inner in snapshot.nested for path in _directories(inner))]
