"""The runner's own git works in every sandbox, and can write nothing but its scratch directory."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.artifacts.patch import make_patch
from runner.cancellation import Cancellation
from runner.errors import RunnerError
from runner.permission import Mode
from runner.sandbox.base import SandboxSpec
from runner.sandbox.executor import Executor, session_policy
from runner.sandbox.probe import build_backend
from runner.workspace import RunGit, Workspace, prepare_workspace
from runner.workspace.confined import confined_git

if TYPE_CHECKING:
    from collections.abc import Sequence


def confined(workspace: Workspace, state: Path, backend: str, hidden: Sequence[str] = ()) -> RunGit:
    """Git through the named backend, with a profile that would allow the agent a lot."""
    extra = state.parent / "extra"
    extra.mkdir(exist_ok=True)
    spec = SandboxSpec(backend=backend, network=True, unix_sockets=True, writable=(str(extra),))
    return confined_git(
        build_backend(backend), spec, workspace, state=state, cancellation=Cancellation(), hidden=hidden
    )


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with one commit, below a name with a space and a quote."""
    directory = tmp_path / "re po'"
    directory.mkdir()
    (directory / "a.txt").write_text("one\n")
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "first"]):
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments], cwd=directory, check=True
        )
    return directory


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("isolation", ["in-place", "copy", "worktree"])
def test_the_patch_is_made_inside_the_sandbox(repo: Path, tmp_path: Path, backend: str, isolation: str) -> None:
    """The same patch as without a sandbox."""
    state = tmp_path / "state"
    with prepare_workspace(str(repo), state=state, isolation=isolation) as workspace:
        Path(workspace.path, "new.txt").write_text("new\n")
        Path(workspace.path, "a.txt").unlink()
        run_git = confined(workspace, state, backend)
        inside = make_patch(workspace.snapshot, tmp_path / "inside.patch", run_git=run_git)
        outside = make_patch(workspace.snapshot, tmp_path / "outside.patch")

    assert inside == outside
    assert inside is not None
    assert (tmp_path / "inside.patch").read_bytes() == (tmp_path / "outside.patch").read_bytes()


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_the_runners_git_can_write_only_its_scratch_directory(repo: Path, tmp_path: Path, backend: str) -> None:
    """Not the workspace, not the recorded base, not what the profile lets the agent write."""
    state = tmp_path / "state"
    workspace = prepare_workspace(str(repo), state=state)
    run_git = confined(workspace, state, backend)
    places = {
        "workspace": repo / "made",
        "base": state / "base.git" / "made",
        "profile": tmp_path / "extra" / "made",
        "scratch": state / "base" / "made",
    }
    for path in places.values():
        argv = ["/bin/sh", "-c", 'echo x > "$0"', str(path)]
        run_git(argv, environment={}, writable=(workspace.snapshot.scratch,), cwd=workspace.path)

    assert {name for name, path in places.items() if path.exists()} == {"scratch"}


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("isolation", ["copy", "worktree"])
def test_the_agents_git_sees_the_history_of_an_isolated_workspace(
    repo: Path, tmp_path: Path, backend: str, isolation: str
) -> None:
    """The folders its repository borrows from stay readable, and read-only."""
    with prepare_workspace(str(repo), state=tmp_path / "state", isolation=isolation) as workspace:
        policy = session_policy(
            SandboxSpec(backend=backend),
            mode=Mode.WORKSPACE_WRITE,
            workspace=workspace.path,
            state=str(tmp_path / "state"),
            hidden=(),
            environment={"PATH": "/usr/bin:/bin"},
            readable=workspace.readable,
        )
        executor = Executor(build_backend(backend), policy)
        script = f"git log --format=%s && git status --porcelain; echo x > {shlex.quote(str(repo))}/.git/made"
        result = executor.run(
            ["/bin/sh", "-c", script], mode=Mode.WORKSPACE_WRITE, timeout=20, cancellation=Cancellation()
        )
        executor.close()

    assert result.output.decode().splitlines()[0] == "first"
    assert not (repo / ".git" / "made").exists()


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_submodules_are_compared_inside_the_sandbox(repo: Path, tmp_path: Path, backend: str) -> None:
    """A change in one is found there too."""
    inner = tmp_path / "inner"
    inner.mkdir()
    options = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always"]
    (inner / "x").write_text("x\n")
    for directory, arguments in (
        (inner, ["init", "-q"]),
        (inner, ["add", "-A"]),
        (inner, ["commit", "-qm", "inner"]),
        (repo, ["submodule", "--quiet", "add", str(inner), "module"]),
        (repo, ["commit", "-qm", "module"]),
    ):
        subprocess.run(["git", *options, *arguments], cwd=directory, check=True, capture_output=True)
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    run_git = confined(workspace, tmp_path / "state", backend)

    assert make_patch(workspace.snapshot, tmp_path / "changes.patch", run_git=run_git) is None
    (repo / "module" / "x").write_text("changed\n")
    with pytest.raises(RunnerError, match="submodule 'module'"):
        make_patch(workspace.snapshot, tmp_path / "changes.patch", run_git=run_git)


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_the_runners_git_cannot_read_what_the_session_hides(repo: Path, tmp_path: Path, backend: str) -> None:
    """A program that came to run there all the same would find nothing to put into the patch."""
    secret = repo / "secret"
    secret.mkdir()
    (secret / "key").write_text("the secret\n")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    argv = ["/bin/sh", "-c", 'cat "$0"; true', str(secret / "key")]
    seen = []
    for hidden in ([], [str(secret)]):
        run_git = confined(workspace, tmp_path / "state", backend, hidden)
        result = run_git(argv, environment={}, writable=(workspace.snapshot.scratch,), cwd=workspace.path)
        seen.append(b"the secret" in result.output)

    assert seen == [True, False]


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
@pytest.mark.parametrize("tracked", [False, True])
def test_hidden_files_of_the_workspace_are_no_deleted_ones(
    repo: Path, tmp_path: Path, backend: str, tracked: bool
) -> None:
    """Git finds nothing there, and the patch says nothing of them; other changes are carried."""
    (repo / "keys" / "deep").mkdir(parents=True)
    for name in ("keys/a", "keys/deep/b", ".env", ".env.example"):
        (repo / name).write_text("of the user\n")
    if tracked:
        for arguments in (["add", "-A"], ["commit", "-qm", "keys"]):
            subprocess.run(
                ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", *arguments], cwd=repo, check=True
            )
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    run_git = confined(workspace, tmp_path / "state", backend, [str(repo / "keys"), str(repo / ".env")])
    target = tmp_path / "changes.patch"

    assert make_patch(workspace.snapshot, target, run_git=run_git) is None
    (repo / ".env.example").write_text("changed\n")
    (repo / "a.txt").write_text("changed\n")
    info = make_patch(workspace.snapshot, target, run_git=run_git)
    assert info is not None
    assert info.paths == (".env.example", "a.txt")


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_the_scratch_directory_of_the_first_command_is_not_that_of_the_second(
    repo: Path, tmp_path: Path, backend: str
) -> None:
    """What a program left there cannot reach the command that verifies, nor the copy that is published."""
    state = tmp_path / "state"
    workspace = prepare_workspace(str(repo), state=state)
    run_git = confined(workspace, state, backend)
    fresh = Path(f"{workspace.snapshot.scratch}-verify")
    fresh.mkdir()
    script = 'echo x > "$0/made"; echo x > "$1/made"; echo x > "$2/changes.patch"'
    places = [workspace.snapshot.scratch, str(fresh), workspace.snapshot.directory]
    argv = ["/bin/sh", "-c", script, *places]
    run_git(argv, environment={}, writable=(workspace.snapshot.scratch,), cwd=workspace.path)

    assert Path(places[0], "made").exists()
    assert not (fresh / "made").exists()
    assert not Path(places[2], "changes.patch").exists()
