"""``changes.patch`` applies to the recorded base and gives the recorded tree."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.artifacts.patch import find_nested, make_patch
from runner.errors import ErrorCode, InternalError, RunnerError, SandboxError, StorageError
from runner.sandbox.base import ProcessResult
from runner.workspace import Workspace, plain_git, prepare_workspace

if TYPE_CHECKING:
    from collections.abc import Callable


def git(directory: Path, *arguments: str, check: bool = True, **more: str) -> str:
    """Run the user's git; returns what it printed."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", **more}
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always"]
    command = ["git", *settings, *arguments]
    done = subprocess.run(command, cwd=directory, env=environment, check=check, capture_output=True)
    return done.stdout.decode("utf-8", "surrogateescape").strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with one commit."""
    directory = tmp_path / "repo"
    (directory / "src").mkdir(parents=True)
    git(directory, "init", "-q", "-b", "main")
    (directory / "a.txt").write_text("one\ntwo\nthree\n")
    (directory / "src" / "run.sh").write_text("#!/bin/sh\n")
    (directory / "bin.dat").write_bytes(bytes(range(256)) * 8)
    (directory / "link").symlink_to("a.txt")
    (directory / "crlf.txt").write_bytes(b"a\r\nb\r\nno newline at the end")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "first")
    return directory


def check_applies(workspace: Workspace, patch: Path, tree: str, clone: Path) -> None:
    """Apply the patch with the user's git to a fresh checkout of the base and compare the tree."""
    git(clone.parent, "clone", "-q", "--no-local", workspace.source, str(clone))
    git(clone, "apply", "--index", "--whitespace=nowarn", str(patch))

    assert git(clone, "write-tree") == tree


def change(workspace: Path) -> None:
    """Everything an agent can do to files."""
    (workspace / "a.txt").write_text("one\n2\nthree\nfour\n")
    (workspace / "bin.dat").write_bytes(bytes(reversed(range(256))))
    (workspace / "crlf.txt").write_bytes(b"a\r\nB\nno newline, still")
    (workspace / "src" / "run.sh").chmod(0o755)
    (workspace / "link").unlink()
    (workspace / "link").symlink_to("elsewhere")
    (workspace / "new-link").symlink_to("../outside")
    (workspace / "empty").write_text("")
    for name in (b"with space", b'quo"te', b"new\nline", b"tab\there", b"caf\xe9", b"-dash", b"back\\slash", b"*.txt"):
        (workspace / os.fsdecode(name)).write_bytes(b"content of " + name + b"\n")
    (workspace / "deep" / "er").mkdir(parents=True)
    (workspace / "deep" / "er" / "file").write_text("x")


def test_every_kind_of_change_is_carried(repo: Path, tmp_path: Path) -> None:
    """Text, binary, CRLF, modes, links, deletions, strange names."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    change(repo)
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    assert info.tree != workspace.base.tree
    check_applies(workspace, tmp_path / "changes.patch", info.tree, tmp_path / "clone")
    assert (tmp_path / "clone" / os.fsdecode(b"caf\xe9")).read_bytes() == b"content of caf\xe9\n"
    assert (tmp_path / "changes.patch").stat().st_mode & 0o777 == 0o600


def test_files_become_folders_and_links_become_files(repo: Path, tmp_path: Path) -> None:
    """Changes of type, in both directions."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "a.txt").unlink()
    (repo / "a.txt").mkdir()
    (repo / "a.txt" / "inside").write_text("x\n")
    (repo / "src" / "run.sh").unlink()
    (repo / "src").rmdir()
    (repo / "src").write_text("a file\n")
    (repo / "link").unlink()
    (repo / "link").write_text("a file\n")
    (repo / "crlf.txt").unlink()
    (repo / "crlf.txt").symlink_to("a.txt")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    check_applies(workspace, tmp_path / "changes.patch", info.tree, tmp_path / "clone")


def test_the_numbers_of_the_patch_are_those_of_git(repo: Path, tmp_path: Path) -> None:
    """Files, insertions, deletions; binary files count no lines."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "a.txt").write_text("one\n2\nthree\nfour\n")
    (repo / "bin.dat").unlink()
    (repo / "näme").write_text("x\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    assert (info.files, info.insertions, info.deletions) == (3, 3, 1)
    assert info.paths == ("a.txt", "bin.dat", '"n\\303\\244me"')
    assert info.as_json() == {"files": 3, "insertions": 3, "deletions": 1, "tree": info.tree}


def test_no_changes_give_no_patch_and_an_empty_file(repo: Path, tmp_path: Path) -> None:
    """Ignored files and empty folders are no changes; touching a file is none either."""
    (repo / ".git" / "info" / "exclude").write_text("*.pyc\n")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "x.pyc").write_text("x")
    (repo / "hollow").mkdir()
    os.utime(repo / "a.txt", (1, 1))

    assert make_patch(workspace.snapshot, tmp_path / "changes.patch") is None
    assert (tmp_path / "changes.patch").read_bytes() == b""


def test_only_what_the_agent_did_is_in_the_patch(repo: Path, tmp_path: Path) -> None:
    """Uncommitted changes of the user are part of the base."""
    (repo / "a.txt").write_text("the user's\n")
    (repo / "user.txt").write_text("the user's\n")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "agent.txt").write_text("the agent's\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    assert info.paths == ("agent.txt",)
    assert "the user's" not in (tmp_path / "changes.patch").read_text()


def test_a_directory_of_a_repository_gives_paths_from_the_top(repo: Path, tmp_path: Path) -> None:
    """What changed outside the workspace is not the agent's."""
    workspace = prepare_workspace(str(repo / "src"), state=tmp_path / "state")
    (repo / "src" / "new").write_text("new\n")
    (repo / "outside").write_text("somebody else\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    assert info.paths == ("src/new",)
    git(tmp_path, "clone", "-q", "--no-local", str(repo), "clone")
    git(tmp_path / "clone", "apply", "--index", str(tmp_path / "changes.patch"))
    assert git(tmp_path / "clone", "write-tree") == info.tree


def test_a_directory_without_git_has_a_patch(tmp_path: Path) -> None:
    """It applies to a tree with the same files; git init by the agent changes nothing."""
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.txt").write_text("one\n")
    workspace = prepare_workspace(str(plain), state=tmp_path / "state")
    (plain / "a.txt").write_text("two\n")
    git(plain, "init", "-q")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")
    twin = tmp_path / "twin"
    twin.mkdir()
    git(twin, "init", "-q")
    (twin / "a.txt").write_text("one\n")
    git(twin, "add", "-A")

    assert git(twin, "write-tree") == workspace.base.tree
    git(twin, "apply", "--index", str(tmp_path / "changes.patch"))
    assert info is not None
    assert git(twin, "write-tree") == info.tree


def test_a_large_binary_file_is_carried(repo: Path, tmp_path: Path) -> None:
    """Two megabytes of noise."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "large").write_bytes(os.urandom(2_000_000))
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    check_applies(workspace, tmp_path / "changes.patch", info.tree, tmp_path / "clone")


def test_the_users_git_is_not_written(repo: Path, tmp_path: Path) -> None:
    """Neither index nor objects; the new content lies in the state directory only."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    before = {path: path.read_bytes() for path in sorted((repo / ".git").rglob("*")) if path.is_file()}
    change(repo)
    make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert {path: path.read_bytes() for path in sorted((repo / ".git").rglob("*")) if path.is_file()} == before


def test_attributes_the_agent_writes_run_nothing_and_hide_nothing(repo: Path, tmp_path: Path) -> None:
    """Filters and textconv have no command, a file marked binary is still carried."""
    for key in ("filter.evil.clean", "diff.evil.textconv", "diff.evil.command"):
        git(repo, "config", key, f"touch {tmp_path}/ran")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / ".gitattributes").write_text("*.txt filter=evil diff=evil\ncrlf.txt -diff\n")
    (repo / "a.txt").write_text("changed\n")
    (repo / "crlf.txt").write_text("changed\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    assert not (tmp_path / "ran").exists()
    assert (info.files, "GIT binary patch" in (tmp_path / "changes.patch").read_text()) == (3, True)


def test_changes_the_agent_marks_as_unchanged_are_carried(repo: Path, tmp_path: Path) -> None:
    """The agent's git index is not the runner's."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    git(repo, "update-index", "--assume-unchanged", "a.txt")
    (repo / "a.txt").write_text("hidden\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    assert info.paths == ("a.txt",)


def nested_with_commit(path: Path) -> None:
    """A repository with one commit."""
    path.mkdir()
    git(path, "init", "-q")
    (path / "lost.txt").write_text("lost\n")
    git(path, "add", "-A")
    git(path, "commit", "-qm", "nested")


def nested_without_commit(path: Path) -> None:
    """A repository that was only initialised."""
    path.mkdir()
    git(path, "init", "-q")
    (path / "lost.txt").write_text("lost\n")


@pytest.mark.parametrize("make", [nested_with_commit, nested_without_commit])
def test_a_nested_repository_made_during_the_run_is_an_error(
    repo: Path, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    """Its files would be lost without a word."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    make(repo / "nested")
    with pytest.raises(RunnerError, match="nested repository at nested") as caught:
        make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert caught.value.code is ErrorCode.TASK_FAILED
    assert caught.value.hint is not None
    assert find_nested(workspace.snapshot) == ["nested"]


def test_a_git_folder_put_into_a_tracked_folder_hides_nothing(repo: Path, tmp_path: Path) -> None:
    """Files that were tracked before are still looked at, new ones beside them too."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    git(repo / "src", "init", "-q")
    (repo / "src" / "run.sh").write_text("changed\n")
    (repo / "src" / "new").write_text("new\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    assert info.paths == ("src/new", "src/run.sh")


def test_a_nested_repository_in_an_ignored_folder_is_fine(repo: Path, tmp_path: Path) -> None:
    """It would not be in the patch anyway."""
    (repo / ".git" / "info" / "exclude").write_text("deps/\n")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "deps").mkdir()
    nested_with_commit(repo / "deps" / "x")
    (repo / "a.txt").write_text("changed\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    assert info.paths == ("a.txt",)


@pytest.fixture
def with_submodule(repo: Path, tmp_path: Path) -> Path:
    """A repository with a submodule that is checked out."""
    nested_with_commit(tmp_path / "inner")
    git(repo, "submodule", "add", "-q", str(tmp_path / "inner"), "module")
    git(repo, "commit", "-qm", "submodule")
    return repo


def test_a_submodule_that_stays_as_it_is_disturbs_nothing(with_submodule: Path, tmp_path: Path) -> None:
    """Changes beside it are carried."""
    workspace = prepare_workspace(str(with_submodule), state=tmp_path / "state")
    (with_submodule / "a.txt").write_text("changed\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert not workspace.base.dirty
    assert info is not None
    assert info.paths == ("a.txt",)


def test_changes_inside_a_submodule_are_an_error(with_submodule: Path, tmp_path: Path) -> None:
    """A patch of the outer repository cannot carry them."""
    workspace = prepare_workspace(str(with_submodule), state=tmp_path / "state")
    (with_submodule / "module" / "lost.txt").write_text("changed\n")
    with pytest.raises(RunnerError, match="submodule 'module'") as caught:
        make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert caught.value.code is ErrorCode.TASK_FAILED


def test_a_sparse_checkout_carries_files_outside_its_cone(repo: Path, tmp_path: Path) -> None:
    """The agent may write where nothing was checked out."""
    git(repo, "sparse-checkout", "set", "--cone", "src")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "other").mkdir()
    (repo / "other" / "new").write_text("new\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert info is not None
    assert info.paths == ("other/new",)


def test_a_workspace_that_is_gone_is_an_error(repo: Path, tmp_path: Path) -> None:
    """The agent removed the directory it worked in."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    repo.rename(tmp_path / "moved")
    with pytest.raises(RunnerError, match="is gone"):
        make_patch(workspace.snapshot, tmp_path / "changes.patch")


def test_a_name_git_refuses_is_an_error_that_says_so(repo: Path, tmp_path: Path) -> None:
    """It could not be applied anywhere."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "git~1").mkdir()
    (repo / "git~1" / "config").write_text("x")
    with pytest.raises(RunnerError, match="invalid path") as caught:
        make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert caught.value.code is ErrorCode.TASK_FAILED


def test_a_target_that_cannot_be_written_is_a_storage_error(repo: Path, tmp_path: Path) -> None:
    """The artifacts directory went away."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    with pytest.raises(StorageError, match="cannot be written"):
        make_patch(workspace.snapshot, tmp_path / "missing" / "changes.patch")


def faulty(result: ProcessResult) -> Callable[..., ProcessResult]:
    """A git runner whose command did not end as it should."""

    def run(argv: list[str], **_: object) -> ProcessResult:
        assert argv
        return result

    return run


def ended(output: bytes = b"", **values: object) -> ProcessResult:
    """The result of a command."""
    fields: dict[str, object] = {"exit_code": 1, "signal": None, "timed_out": False, "cancelled": False}
    fields |= {"output": output, "total_bytes": len(output), "truncated": False, "duration": 0.0, **values}
    return ProcessResult(**fields)  # type: ignore[arg-type]  # the fields of the class


@pytest.mark.parametrize(
    ("result", "kind", "code"),
    [
        (ended(b"cannot mount", wrapper_failed=True), SandboxError, ErrorCode.SANDBOX_UNAVAILABLE),
        (ended(exit_code=None, timed_out=True), RunnerError, ErrorCode.TASK_FAILED),
        (ended(exit_code=None, cancelled=True), RunnerError, ErrorCode.CANCELLED),
        (ended(b"write: No space left on device", exit_code=81), StorageError, ErrorCode.STORAGE_FAILED),
        (ended(b"fatal: odd", exit_code=86), RunnerError, ErrorCode.INTERNAL),
        (ended(exit_code=0), RunnerError, ErrorCode.TASK_FAILED),
    ],
)
def test_a_command_that_breaks_is_told_apart(
    repo: Path, tmp_path: Path, result: ProcessResult, kind: type[RunnerError], code: ErrorCode
) -> None:
    """A broken sandbox, a full disk and a broken patch are not the agent's failures."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    with pytest.raises(kind) as caught:
        make_patch(workspace.snapshot, tmp_path / "changes.patch", run_git=faulty(result))

    assert caught.value.code is code


def test_a_patch_that_does_not_give_the_tree_is_never_published(repo: Path, tmp_path: Path) -> None:
    """The check that the patch reproduces the tree is real: here the applied patch is another one."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "a.txt").write_text("changed\n")

    def tampered(argv: list[str], *, environment: dict[str, str], writable: tuple[str, ...], cwd: str) -> ProcessResult:
        result = plain_git(argv, environment=environment, writable=writable, cwd=cwd)
        written = Path(workspace.snapshot.scratch, "patch")
        written.write_bytes(written.read_bytes().replace(b"+changed", b"+CHANGED").replace(b"\nindex ", b"\nxndex "))
        return result

    with pytest.raises(InternalError, match="the patch gives the tree"):
        make_patch(workspace.snapshot, tmp_path / "changes.patch", run_git=tampered)
    assert not (tmp_path / "changes.patch").exists()


def test_git_is_told_to_write_only_to_scratch_directories(repo: Path, tmp_path: Path) -> None:
    """Two confined commands, each with its own; the base stays read-only for them."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "a.txt").write_text("changed\n")
    calls: list[tuple[str, ...]] = []

    def confined(argv: list[str], *, environment: dict[str, str], writable: tuple[str, ...], cwd: str) -> ProcessResult:
        calls.append(writable)
        return plain_git(argv, environment=environment, writable=writable, cwd=cwd)

    before = {path: path.read_bytes() for path in sorted((tmp_path / "state/base.git").rglob("*")) if path.is_file()}
    make_patch(workspace.snapshot, tmp_path / "changes.patch", run_git=confined)

    assert calls == [(workspace.snapshot.scratch,), (f"{workspace.snapshot.scratch}-verify",)]
    assert {path: path.read_bytes() for path in before} == before
