"""The runner's own git inside the sandbox, for a tree that an agent wrote.

The network is off, only the scratch directory of the snapshot is writable, and the tree itself
is read-only, whatever the profile allows the agent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.permission import Mode
from runner.record import replace
from runner.sandbox.executor import Executor

if TYPE_CHECKING:
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
        timeout: Seconds for one command.

    Raises:
        ConfigError: CONFIG_INVALID, the scratch directory cannot be confined.
    """
    private = state / "git-sandbox"
    private.mkdir(mode=0o700, exist_ok=True)
    snapshot = workspace.snapshot
    executor = Executor(
        backend,
        replace(spec, network=False, unix_sockets=False, writable=(), hidden=()),
        mode=Mode.WORKSPACE_WRITE,
        workspace=snapshot.scratch,
        state=str(private),
        hidden=(),
        environment={},
        readable=(snapshot.work_tree, *_directories(snapshot), *workspace.readable),
    )

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


def _directories(snapshot: Snapshot) -> list[str]:
    """The private git directories of a snapshot and of its submodules."""
    return [snapshot.directory, *(path for inner in snapshot.nested for path in _directories(inner))]
