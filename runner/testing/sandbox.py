"""A box for sandbox tests: a workspace, what lies outside it, and commands confined to the first.

Part of the test kit: it needs git and a working backend, and makes nothing up. Writes no events; no
effect on the prefix cache.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from runner.cancellation import Cancellation
from runner.permission import Mode
from runner.sandbox.base import BARE, SandboxSpec
from runner.sandbox.environment import child_environment
from runner.sandbox.executor import Executor, session_policy
from runner.sandbox.forkserver import ForkServer
from runner.sandbox.launch import interpreter
from runner.sandbox.probe import build_backend
from runner.sandbox.supervisor import children_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from runner.sandbox.base import ProcessResult

CANARY = "unchanged\n"

COUNT_FORKS = """
import os, time
children = 0
for _ in range(400):
    try:
        pid = os.fork()
    except OSError:
        break
    if pid == 0:
        time.sleep(3)
        os._exit(0)
    children += 1
print(children)
"""
"""A Python program that prints how many of 400 children it may have at the same time."""


@dataclass
class Box:
    """A workspace that is a repository, a folder outside it with a canary, and commands confined to the first.

    Attributes:
        backend: Name of the backend, ``none`` for bare ones.
        base: Folder that holds everything.
        workspace: The workspace, a repository with one commit.
        outside: Neither workspace nor writable.
        state: Private folder of the session.
        cancellation: Ends the commands of ``run``.
        fork_server: What the executors start supervisors with.
    """

    backend: str
    base: Path
    workspace: Path
    outside: Path
    state: Path
    cancellation: Cancellation = field(default_factory=Cancellation)
    fork_server: ForkServer = field(default_factory=ForkServer)
    started: list[Executor] = field(default_factory=list)

    @property
    def canary(self) -> Path:
        """A file outside; ``assert_untouched`` looks at it."""
        return self.outside / "canary"

    @property
    def tmp(self) -> Path:
        """The session's temporary folder."""
        return self.state / "tmp"

    def executor(
        self,
        mode: Mode = Mode.WORKSPACE_WRITE,
        *,
        hidden: Sequence[Path] = (),
        protected: Sequence[Path] = (),
        workspace: Path | None = None,
        environ: Mapping[str, str] | None = None,
        **spec: Any,
    ) -> Executor:
        """An executor for this box; ``spec`` are fields of the sandbox section."""
        settings = SandboxSpec(**spec)
        home, tmp = str(self.state / "home"), str(self.tmp)
        variables = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"} if environ is None else environ
        policy = session_policy(
            settings,
            mode=mode,
            workspace=str(workspace or self.workspace),
            state=str(self.state),
            hidden=[str(path) for path in hidden],
            protected=[str(path) for path in protected],
            environment=child_environment(variables, settings, home=home, tmp=tmp, secrets={}),
        )
        backend = None if self.backend == BARE else build_backend(self.backend)
        executor = Executor(backend, policy, fork_server=self.fork_server)
        self.started.append(executor)
        return executor

    def run(
        self,
        script: str,
        *arguments: str | Path | int,
        mode: Mode = Mode.WORKSPACE_WRITE,
        timeout: float = 30,
        **options: Any,
    ) -> ProcessResult:
        """Run a bash script with ``$1``, ``$2`` and so on; options as for ``executor``."""
        argv = ["/bin/bash", "-c", script, "bash", *map(str, arguments)]
        return self.executor(mode, **options).run(argv, mode=mode, timeout=timeout, cancellation=self.cancellation)

    def python(
        self,
        code: str,
        *arguments: str | Path | int,
        mode: Mode = Mode.WORKSPACE_WRITE,
        timeout: float = 30,
        **options: Any,
    ) -> ProcessResult:
        """Run a Python program with ``sys.argv[1:]``; options as for ``executor``."""
        argv = [*interpreter(), "-c", code, *map(str, arguments)]
        return self.executor(mode, **options).run(argv, mode=mode, timeout=timeout, cancellation=self.cancellation)

    def close(self) -> None:
        """End everything that runs in the box."""
        for executor in self.started:
            executor.close()
        self.cancellation.close()

    def children(self) -> set[int]:
        """Children of this process, but for the fork server, which outlives commands."""
        return set(children_of(os.getpid())) - {self.fork_server.pid}

    def assert_untouched(self) -> None:
        """The canary has its content and nothing was put beside it."""
        assert self.canary.read_text() == CANARY
        assert sorted(path.name for path in self.outside.iterdir()) == ["canary", "folder"]
        assert list((self.outside / "folder").iterdir()) == []


def make_box(base: Path, backend: str) -> Box:
    """Make the folders of a box below ``base``."""
    box = Box(backend, base, base / "workspace", base / "outside", base / "state")
    for folder in (box.workspace / "src", box.outside / "folder", box.state):
        folder.mkdir(parents=True)
    box.canary.write_text(CANARY)
    (box.workspace / "README").write_text("hello\n")
    (box.workspace / "src" / "main.py").write_text("print('main')\n")
    for arguments in (
        ("init", "-q"),
        ("add", "-A"),
        ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "commit", "-qm", "one"),
    ):
        subprocess.run(["git", *arguments], cwd=box.workspace, check=True, env={"PATH": os.environ["PATH"]})
    return box
