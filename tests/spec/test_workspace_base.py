"""What is recorded of a workspace before the agent begins, and that nothing of the user's is touched."""

from __future__ import annotations

import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from runner.errors import ConfigError, StorageError
from runner.workspace import load_workspace, prepare_workspace, resolve_workspace
from runner.workspace.snapshot import read_index

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

EMPTY_TREE = "4b825dc642cb6eb9a060e54bf8d69288fbee4904"


def git(directory: Path, *arguments: str) -> str:
    """Run the user's git; returns what it printed."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_COUNT": "3",
        "GIT_CONFIG_KEY_0": "user.name",
        "GIT_CONFIG_VALUE_0": "a",
        "GIT_CONFIG_KEY_1": "user.email",
        "GIT_CONFIG_VALUE_1": "a@example.org",
        "GIT_CONFIG_KEY_2": "protocol.file.allow",
        "GIT_CONFIG_VALUE_2": "always",
    }
    done = subprocess.run(["git", *arguments], cwd=directory, env=environment, check=True, capture_output=True)
    return done.stdout.decode().strip()


def repository(directory: Path, files: Mapping[str, str] | None = None, *init: str) -> Path:
    """A repository with one commit of ``files``."""
    directory.mkdir(parents=True)
    git(directory, "init", "-q", "-b", "main", *init)
    for name, text in (files or {"a.txt": "one\n", "sub/b.txt": "two\n"}).items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "first")
    return directory


def git_state(directory: Path) -> dict[str, bytes]:
    """Every file below ``.git`` with its content."""
    return {str(path): path.read_bytes() for path in sorted((directory / ".git").rglob("*")) if path.is_file()}


def test_a_clean_repository_has_its_commit_and_its_tree(tmp_path: Path) -> None:
    """Nothing is new, so the base is HEAD."""
    repo = repository(tmp_path / "repo")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")

    assert workspace.path == str(repo.resolve())
    assert workspace.base.commit == git(repo, "rev-parse", "HEAD")
    assert workspace.base.tree == git(repo, "rev-parse", "HEAD^{tree}")
    assert not workspace.base.dirty


def test_a_clean_repository_costs_three_git_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start-up time matters; the processes are counted where they are started."""
    repo = repository(tmp_path / "repo")
    started: list[list[str]] = []
    run = subprocess.run

    def counted(argv: list[str], **more: object) -> object:
        started.append(argv)
        return run(argv, **more)  # type: ignore[call-overload]  # passed on as it came

    monkeypatch.setattr(subprocess, "run", counted)
    prepare_workspace(str(repo), state=tmp_path / "state")

    assert len(started) == 3


def test_uncommitted_changes_are_part_of_the_base(tmp_path: Path) -> None:
    """Changed, deleted and untracked files are in the tree, ignored ones are not."""
    repo = repository(tmp_path / "repo", {"a.txt": "one\n", "gone.txt": "x\n", ".gitignore": "*.log\n"})
    (repo / "a.txt").write_text("changed\n")
    (repo / "gone.txt").unlink()
    (repo / "new.txt").write_text("new\n")
    (repo / "noise.log").write_text("noise\n")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    git(repo, "add", "-A")

    assert workspace.base.dirty
    assert workspace.base.tree == git(repo, "write-tree")


def test_dirty_refuse_names_what_is_not_committed(tmp_path: Path) -> None:
    """The error says which files, and what to do."""
    repo = repository(tmp_path / "repo")
    (repo / "a.txt").write_text("changed\n")
    with pytest.raises(ConfigError, match=r"a\.txt") as caught:
        prepare_workspace(str(repo), state=tmp_path / "state", dirty="refuse")

    assert caught.value.hint is not None
    assert "commit" in caught.value.hint


def test_dirty_refuse_takes_a_clean_repository(tmp_path: Path) -> None:
    """Ignored files are no changes."""
    repo = repository(tmp_path / "repo", {".gitignore": "*.log\n"})
    (repo / "noise.log").write_text("noise\n")

    assert not prepare_workspace(str(repo), state=tmp_path / "state", dirty="refuse").base.dirty


def test_a_repository_without_a_commit_has_a_tree_only(tmp_path: Path) -> None:
    """HEAD is unborn."""
    repo = tmp_path / "repo"
    repo.mkdir()
    git(repo, "init", "-q")
    (repo / "a.txt").write_text("one\n")
    base = prepare_workspace(str(repo), state=tmp_path / "state").base

    assert base.commit is None
    assert base.dirty
    assert base.tree != EMPTY_TREE


def test_a_directory_without_git_has_a_tree_only(tmp_path: Path) -> None:
    """The tree is the one git would make of it, and no .git appears."""
    plain = tmp_path / "plain"
    plain.mkdir()
    (plain / "a.txt").write_text("one\n")
    base = prepare_workspace(str(plain), state=tmp_path / "state").base
    twin = repository(tmp_path / "twin", {"a.txt": "one\n"})

    assert (base.commit, base.dirty) == (None, False)
    assert base.tree == git(twin, "rev-parse", "HEAD^{tree}")
    assert not (plain / ".git").exists()


def test_an_empty_directory_is_a_workspace(tmp_path: Path) -> None:
    """Its tree is the empty one."""
    (tmp_path / "empty").mkdir()

    assert prepare_workspace(str(tmp_path / "empty"), state=tmp_path / "state").base.tree == EMPTY_TREE


def test_a_directory_of_a_repository_is_recorded_inside_the_whole_tree(tmp_path: Path) -> None:
    """Changes elsewhere in the repository, staged ones too, are not the workspace's."""
    repo = repository(tmp_path / "repo")
    (repo / "a.txt").write_text("elsewhere\n")
    git(repo, "add", "a.txt")
    (repo / "other.txt").write_text("elsewhere\n")
    clean = prepare_workspace(str(repo / "sub"), state=tmp_path / "clean").base
    (repo / "sub" / "b.txt").write_text("here\n")
    dirty = prepare_workspace(str(repo / "sub"), state=tmp_path / "dirty").base

    assert clean.tree == git(repo, "rev-parse", "HEAD^{tree}")
    assert not clean.dirty
    assert dirty.dirty
    assert dirty.tree != clean.tree


def test_a_directory_that_head_does_not_know_is_no_part_of_the_repository(tmp_path: Path) -> None:
    """A build folder inside a repository is a workspace without git."""
    repo = repository(tmp_path / "repo", {".gitignore": "build/\n"})
    inner = repo / "build" / "work"
    inner.mkdir(parents=True)
    (inner / "a.txt").write_text("one\n")
    base = prepare_workspace(str(inner), state=tmp_path / "state").base

    assert base.commit is None
    assert base.tree != EMPTY_TREE


def test_a_linked_worktree_is_a_repository(tmp_path: Path) -> None:
    """Its .git is a file."""
    repo = repository(tmp_path / "repo")
    git(repo, "worktree", "add", "-q", "--detach", str(tmp_path / "linked"))
    base = prepare_workspace(str(tmp_path / "linked"), state=tmp_path / "state").base

    assert base.commit == git(repo, "rev-parse", "HEAD")
    assert not base.dirty


def test_nothing_of_the_users_git_is_written(tmp_path: Path) -> None:
    """Index, refs, objects and configuration keep every byte, with a dirty tree too."""
    repo = repository(tmp_path / "repo")
    (repo / "a.txt").write_text("changed\n")
    (repo / "new.txt").write_text("new\n")
    before = git_state(repo)
    prepare_workspace(str(repo), state=tmp_path / "state")

    assert git_state(repo) == before


def test_the_record_survives_the_process(tmp_path: Path) -> None:
    """What recover needs is read back as it was."""
    workspace = prepare_workspace(str(repository(tmp_path / "repo")), state=tmp_path / "state")
    again = load_workspace(tmp_path / "state")

    assert (again.path, again.isolation, again.snapshot) == (workspace.path, "in-place", workspace.snapshot)


def test_a_missing_record_is_a_storage_error(tmp_path: Path) -> None:
    """There is nothing to recover from."""
    with pytest.raises(StorageError, match="no record"):
        load_workspace(tmp_path)


def test_no_command_of_the_repository_runs(tmp_path: Path) -> None:
    """Hooks, fsmonitor, clean and smudge filters, textconv: none of the user's configuration is used."""
    repo = repository(tmp_path / "repo", {"a.txt": "one\n", ".gitattributes": "*.txt filter=evil diff=evil\n"})
    touch = f"touch {tmp_path}/ran-"
    for key in ("filter.evil.clean", "filter.evil.smudge", "filter.evil.process", "diff.evil.textconv"):
        git(repo, "config", key, f"{touch}{key}; cat")
    git(repo, "config", "filter.evil.required", "true")
    hook = tmp_path / "hooks" / "any"
    hook.parent.mkdir()
    hook.write_text(f"#!/bin/sh\n{touch}hook\n")
    hook.chmod(0o755)
    for name in ("post-index-change", "post-checkout", "fsmonitor"):
        (hook.parent / name).symlink_to(hook)
    git(repo, "config", "core.hooksPath", str(hook.parent))
    git(repo, "config", "core.fsmonitor", str(hook))
    (repo / "a.txt").write_text("changed\n")
    for isolation in ("in-place", "copy", "worktree"):
        prepare_workspace(str(repo), state=tmp_path / isolation, isolation=isolation).close()

    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("ran-")] == []


def test_the_users_global_git_configuration_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A global ignore file or variable of the caller changes nothing."""
    repo = repository(tmp_path / "repo")
    home = tmp_path / "home"
    (home / ".config" / "git").mkdir(parents=True)
    (home / ".config" / "git" / "ignore").write_text("*\n")
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    (repo / "new.txt").write_text("new\n")

    assert prepare_workspace(str(repo), state=tmp_path / "state").base.dirty


def test_local_ignore_rules_and_line_endings_of_the_repository_count(tmp_path: Path) -> None:
    """What git itself would call clean is clean."""
    repo = repository(tmp_path / "repo")
    (repo / ".git" / "info" / "exclude").write_text("*.tmp\n")
    (repo / "x.tmp").write_text("x\n")
    git(repo, "config", "core.autocrlf", "true")
    (repo / "a.txt").unlink()
    git(repo, "checkout", "--", "a.txt")

    assert (repo / "a.txt").read_bytes() == b"one\r\n"
    assert git(repo, "status", "--porcelain") == ""
    assert not prepare_workspace(str(repo), state=tmp_path / "state").base.dirty


def test_a_repository_with_sha256_names_works(tmp_path: Path) -> None:
    """The private repository takes the object format over."""
    repo = repository(tmp_path / "repo", None, "--object-format=sha256")
    (repo / "new.txt").write_text("new\n")
    base = prepare_workspace(str(repo), state=tmp_path / "state").base

    assert len(base.tree) == 64
    assert base.dirty


def test_a_sparse_checkout_is_clean(tmp_path: Path) -> None:
    """Files left out of the work tree are not deleted ones."""
    repo = repository(tmp_path / "repo", {"in/a.txt": "a\n", "out/b.txt": "b\n"})
    git(repo, "sparse-checkout", "set", "--cone", "in")
    base = prepare_workspace(str(repo), state=tmp_path / "state").base

    assert not (repo / "out").exists()
    assert not base.dirty


@pytest.mark.parametrize("version", ["2", "3", "4"])
def test_marks_that_hide_changes_are_taken_off_the_copied_index(tmp_path: Path, version: str) -> None:
    """assume-unchanged in any index version; the hidden change is part of the base."""
    repo = repository(tmp_path / "repo")
    git(repo, "update-index", "--index-version", version)
    git(repo, "update-index", "--assume-unchanged", "a.txt")
    (repo / "a.txt").write_text("hidden\n")

    assert git(repo, "status", "--porcelain") == ""
    assert prepare_workspace(str(repo), state=tmp_path / "state").base.dirty


def test_a_split_index_is_rebuilt(tmp_path: Path) -> None:
    """It cannot be copied alone."""
    repo = repository(tmp_path / "repo")
    git(repo, "update-index", "--split-index")
    assert read_index((repo / ".git" / "index").read_bytes()) is None
    clean = prepare_workspace(str(repo), state=tmp_path / "clean").base
    (repo / "new.txt").write_text("new\n")

    assert not clean.dirty
    assert prepare_workspace(str(repo), state=tmp_path / "dirty").base.dirty


@pytest.mark.parametrize("data", [b"", b"DIRC", b"DIRC" + b"\0" * 40, b"DIRC\0\0\0\2\0\0\0\x09" + b"\0" * 30])
def test_a_damaged_index_is_not_copied(data: bytes) -> None:
    """The caller builds a new one from HEAD."""
    copied = read_index(data)

    assert copied is None or copied.gitlinks == ()


def test_a_missing_workspace_is_a_configuration_error(tmp_path: Path) -> None:
    """So are a file, a link, the root and a home directory."""
    (tmp_path / "file").write_text("x")
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "dir")
    for path, words in (("missing", "does not exist"), ("file", "not a directory"), ("link", "symbolic link")):
        with pytest.raises(ConfigError, match=words) as caught:
            resolve_workspace(str(tmp_path / path))
        assert caught.value.hint


def test_root_and_home_are_no_workspaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent in either could reach everything."""
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="root of the file system"):
        resolve_workspace("/")
    with pytest.raises(ConfigError, match="home directory"):
        resolve_workspace(str(tmp_path))


def test_a_workspace_without_a_home_in_the_environment_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers often have none."""
    monkeypatch.delenv("HOME")

    assert resolve_workspace(str(tmp_path)) == str(tmp_path.resolve())


def test_the_state_may_not_lie_inside_the_workspace(tmp_path: Path) -> None:
    """The agent could write it."""
    repo = repository(tmp_path / "repo")
    with pytest.raises(ConfigError, match="inside the workspace"):
        prepare_workspace(str(repo), state=repo / "state")

    assert not (repo / "state").exists()


def test_a_git_file_that_leads_nowhere_is_a_configuration_error(tmp_path: Path) -> None:
    """A worktree whose repository was moved."""
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / ".git").write_text("gitdir: /nowhere/at/all\n")
    with pytest.raises(ConfigError, match="no git directory"):
        prepare_workspace(str(tmp_path / "broken"), state=tmp_path / "state")


def test_a_damaged_head_is_a_configuration_error(tmp_path: Path) -> None:
    """A commit that is not there is not taken for an empty repository."""
    repo = repository(tmp_path / "repo")
    (repo / ".git" / "refs" / "heads" / "main").write_text("1" * 40 + "\n")
    with pytest.raises(ConfigError, match="cannot be read"):
        prepare_workspace(str(repo), state=tmp_path / "state")


def test_a_nested_repository_without_a_commit_is_a_configuration_error(tmp_path: Path) -> None:
    """Git cannot record it, and says so before a model is called."""
    repo = repository(tmp_path / "repo")
    (repo / "nested").mkdir()
    git(repo / "nested", "init", "-q")
    (repo / "nested" / "x").write_text("x")
    with pytest.raises(ConfigError, match="nested") as caught:
        prepare_workspace(str(repo), state=tmp_path / "state")

    assert caught.value.hint is not None


def test_another_base_in_place_is_refused(tmp_path: Path) -> None:
    """What is checked out is the base; a revision that names the same commit is fine."""
    repo = repository(tmp_path / "repo")
    (repo / "a.txt").write_text("second\n")
    git(repo, "commit", "-qam", "second")
    with pytest.raises(ConfigError, match="not what is checked out"):
        prepare_workspace(str(repo), state=tmp_path / "one", base="HEAD~1")
    with pytest.raises(ConfigError, match="no commit of"):
        prepare_workspace(str(repo), state=tmp_path / "two", base="nowhere")

    assert prepare_workspace(str(repo), state=tmp_path / "three", base="main").base.commit


def test_a_base_without_a_repository_is_refused(tmp_path: Path) -> None:
    """There is nothing it could name."""
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match="no git repository"):
        prepare_workspace(str(tmp_path / "plain"), state=tmp_path / "state", base="main")


def test_an_unknown_isolation_is_refused(tmp_path: Path) -> None:
    """The known ones are listed."""
    with pytest.raises(ConfigError, match="snapshot"):
        prepare_workspace(str(tmp_path), state=tmp_path / "state", isolation="snapshot")
