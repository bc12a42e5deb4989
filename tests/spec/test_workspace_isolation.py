"""A copy and a worktree: the same content elsewhere, the original untouched, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from runner.artifacts.patch import make_patch
from runner.errors import ConfigError
from runner.workspace import Workspace, prepare_workspace, prune_worktrees


def git(directory: Path, *arguments: str, check: bool = True) -> str:
    """Run the user's git; returns what it printed."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always"]
    done = subprocess.run(
        ["git", *settings, *arguments], cwd=directory, env=environment, check=check, capture_output=True
    )
    return done.stdout.decode("utf-8", "surrogateescape").strip()


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with two commits and every kind of file."""
    directory = tmp_path / "repo"
    directory.mkdir()
    git(directory, "init", "-q", "-b", "main")
    (directory / "a.txt").write_text("one\n")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "first")
    (directory / "a.txt").write_text("two\n")
    (directory / "sub").mkdir()
    (directory / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (directory / "sub" / "run.sh").chmod(0o755)
    (directory / "link").symlink_to("a.txt")
    (directory / "crlf.txt").write_bytes(b"a\r\nb\r\n")
    (directory / os.fsdecode(b"caf\xe9")).write_bytes(b"\x00\xff")
    (directory / ".gitignore").write_text("ignored/\n")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "second")
    (directory / "ignored").mkdir()
    (directory / "ignored" / "big").write_text("big")
    return directory


def contents(directory: Path) -> dict[str, tuple[str, bytes]]:
    """Every file and link outside ``.git``: its kind and content."""
    found = {}
    for path in sorted(directory.rglob("*")):
        name = str(path.relative_to(directory))
        if name.split("/", maxsplit=1)[0] == ".git":
            continue
        if path.is_symlink():
            found[name] = ("link", os.fsencode(path.readlink()))
        elif path.is_file():
            found[name] = ("x" if path.stat().st_mode & 0o100 else "-", path.read_bytes())
    return found


def make_dirty(repo: Path) -> None:
    """Change, delete, replace and add."""
    (repo / "a.txt").write_text("dirty\n")
    (repo / "crlf.txt").unlink()
    (repo / "link").unlink()
    (repo / "link").mkdir()
    (repo / "link" / "inside").write_text("a folder now\n")
    (repo / "sub" / "run.sh").unlink()
    (repo / "sub" / "run.sh").parent.rmdir()
    (repo / "sub").write_text("a file now\n")
    (repo / "new file").write_text("new\n")


def wanted(repo: Path) -> dict[str, tuple[str, bytes]]:
    """What an isolated directory of the repository must hold."""
    return {name: value for name, value in contents(repo).items() if not name.startswith("ignored/")}


@pytest.mark.parametrize("isolation", ["copy", "worktree"])
@pytest.mark.parametrize("dirty", [False, True])
def test_the_agent_finds_the_same_files(repo: Path, tmp_path: Path, isolation: str, dirty: bool) -> None:
    """Byte for byte, modes and links too; ignored files stay behind; uncommitted changes come along."""
    if dirty:
        make_dirty(repo)
    with prepare_workspace(str(repo), state=tmp_path / "state", isolation=isolation) as workspace:
        assert contents(Path(workspace.path)) == wanted(repo)
        assert workspace.path != workspace.source == str(repo.resolve())
        assert workspace.base.dirty == dirty
        assert workspace.base.commit == git(repo, "rev-parse", "HEAD")


@pytest.mark.parametrize("isolation", ["copy", "worktree"])
def test_git_shows_the_history_and_the_same_status(repo: Path, tmp_path: Path, isolation: str) -> None:
    """The agent can look at log and diff as in the original."""
    make_dirty(repo)
    with prepare_workspace(str(repo), state=tmp_path / "state", isolation=isolation) as workspace:
        inside = Path(workspace.path)

        assert git(inside, "log", "--format=%s") == "second\nfirst"
        assert git(inside, "status", "--porcelain") == git(repo, "status", "--porcelain")
        assert git(inside, "rev-parse", "main") == git(repo, "rev-parse", "main")


@pytest.mark.parametrize("isolation", ["copy", "worktree"])
def test_the_original_is_not_touched(repo: Path, tmp_path: Path, isolation: str) -> None:
    """Files, index, refs and objects keep every byte while the agent works elsewhere."""
    make_dirty(repo)
    before = {path: path.read_bytes() for path in sorted(repo.rglob("*")) if path.is_file()}
    workspace = prepare_workspace(str(repo), state=tmp_path / "state", isolation=isolation)
    Path(workspace.path, "made.txt").write_text("by the agent\n")
    patch = make_patch(workspace.snapshot, tmp_path / "changes.patch")
    workspace.close()

    assert patch is not None
    assert patch.files == 1
    assert {path: path.read_bytes() for path in sorted(repo.rglob("*")) if path.is_file()} == before


@pytest.mark.parametrize("isolation", ["copy", "worktree"])
def test_closing_leaves_nothing(repo: Path, tmp_path: Path, isolation: str) -> None:
    """Folders the agent closed go too, and a second close is harmless."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state", isolation=isolation)
    closed = Path(workspace.path, "closed")
    closed.mkdir()
    (closed / "x").write_text("x")
    closed.chmod(0)
    workspace.close()
    workspace.close()

    assert not Path(workspace.path).exists()
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1


@pytest.mark.parametrize("isolation", ["copy", "worktree"])
def test_a_workspace_can_be_kept(repo: Path, tmp_path: Path, isolation: str) -> None:
    """When its patch could not be made the work must not be lost."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state", isolation=isolation)
    workspace.close(keep=True)

    assert Path(workspace.path, "a.txt").exists()


@pytest.mark.parametrize("isolation", ["copy", "worktree"])
def test_another_base_starts_clean(repo: Path, tmp_path: Path, isolation: str) -> None:
    """It is exactly that commit, whatever the working tree looks like."""
    make_dirty(repo)
    with prepare_workspace(
        str(repo), state=tmp_path / "state", isolation=isolation, base="HEAD~1", dirty="refuse"
    ) as workspace:
        assert contents(Path(workspace.path)) == {"a.txt": ("-", b"one\n")}
        assert workspace.base.tree == git(repo, "rev-parse", "HEAD~1^{tree}")
        assert git(Path(workspace.path), "status", "--porcelain") == ""


@pytest.mark.parametrize("isolation", ["copy", "worktree"])
def test_a_directory_of_a_repository_keeps_its_place(repo: Path, tmp_path: Path, isolation: str) -> None:
    """The agent works in the same folder of the whole."""
    with prepare_workspace(str(repo / "sub"), state=tmp_path / "state", isolation=isolation) as workspace:
        assert contents(Path(workspace.path)) == {"run.sh": ("x", b"#!/bin/sh\n")}
        Path(workspace.path, "new").write_text("new\n")
        make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert "b/sub/new" in (tmp_path / "changes.patch").read_text()


@pytest.mark.parametrize("isolation", ["copy", "worktree"])
def test_dirty_refuse_looks_at_the_original(repo: Path, tmp_path: Path, isolation: str) -> None:
    """Nothing is left behind when it refuses."""
    make_dirty(repo)
    with pytest.raises(ConfigError, match="uncommitted changes"):
        prepare_workspace(str(repo), state=tmp_path / "state", isolation=isolation, dirty="refuse")

    assert not (tmp_path / "state" / "workspace").exists()
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1


def test_a_copy_takes_no_configuration_and_no_hooks(repo: Path, tmp_path: Path) -> None:
    """What a repository's .git can make git do stays with the original."""
    git(repo, "config", "alias.evil", "!touch /tmp/evil")
    git(repo, "remote", "add", "origin", "https://example.org/a.git")
    with prepare_workspace(str(repo), state=tmp_path / "state", isolation="copy") as workspace:
        inside = Path(workspace.path, ".git")

        assert "evil" not in (inside / "config").read_text()
        assert "remote" not in (inside / "config").read_text()
        assert not (inside / "hooks").exists()


def test_a_copy_of_a_directory_without_git_works(tmp_path: Path) -> None:
    """Ignore rules in it are honoured, and no .git appears."""
    plain = tmp_path / "plain"
    (plain / "skip").mkdir(parents=True)
    (plain / ".gitignore").write_text("skip/\n")
    (plain / "skip" / "x").write_text("x")
    (plain / "a.txt").write_text("one\n")
    with prepare_workspace(str(plain), state=tmp_path / "state", isolation="copy") as workspace:
        assert sorted(path.name for path in Path(workspace.path).iterdir()) == [".gitignore", "a.txt"]
        assert workspace.base.commit is None


def test_a_copy_of_a_repository_without_a_commit_works(tmp_path: Path) -> None:
    """Its files are untracked and come along."""
    (tmp_path / "repo").mkdir()
    git(tmp_path / "repo", "init", "-q")
    (tmp_path / "repo" / "a.txt").write_text("one\n")
    with prepare_workspace(str(tmp_path / "repo"), state=tmp_path / "state", isolation="copy") as workspace:
        assert Path(workspace.path, "a.txt").read_text() == "one\n"
        assert workspace.base.commit is None


def test_a_worktree_needs_a_repository_with_a_commit(tmp_path: Path) -> None:
    """The error names the other way."""
    (tmp_path / "plain").mkdir()
    with pytest.raises(ConfigError, match="no git repository") as caught:
        prepare_workspace(str(tmp_path / "plain"), state=tmp_path / "one", isolation="worktree")
    assert caught.value.hint == "use isolation: copy"
    git(tmp_path / "plain", "init", "-q")
    with pytest.raises(ConfigError, match="no commit yet"):
        prepare_workspace(str(tmp_path / "plain"), state=tmp_path / "two", isolation="worktree")


@pytest.mark.parametrize("base", ["HEAD", "HEAD~1"])
def test_no_filter_that_only_worktrees_include_runs(repo: Path, tmp_path: Path, base: str) -> None:
    """A conditional include is not seen when the repository's configuration is read for the original."""
    for directory in (repo, tmp_path / "state"):
        directory.mkdir(exist_ok=True)
    (repo / ".gitattributes").write_text("* filter=evil\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "third")
    (repo / "a.txt").write_text("four\n")
    git(repo, "commit", "-qam", "fourth")
    included = tmp_path / "included"
    included.write_text(
        f'[filter "evil"]\n\tsmudge = "touch {tmp_path}/ran; cat"\n\tclean = "touch {tmp_path}/ran; cat"\n'
    )
    git(repo, "config", "includeIf.gitdir:**/worktrees/**.path", str(included))
    with prepare_workspace(str(repo), state=tmp_path / "state", isolation="worktree", base=base) as workspace:
        assert not (tmp_path / "ran").exists()
        assert contents(Path(workspace.path))["a.txt"] == ("-", b"four\n" if base == "HEAD" else b"two\n")
        assert workspace.base.tree == git(repo, "rev-parse", f"{base}^{{tree}}")


def test_a_worktree_leaves_out_what_a_sparse_checkout_leaves_out(repo: Path, tmp_path: Path) -> None:
    """The agent's git and the base agree that nothing was deleted."""
    git(repo, "sparse-checkout", "set", "--cone", "sub")
    git(repo, "commit", "-q", "--allow-empty", "-m", "third")
    with prepare_workspace(str(repo), state=tmp_path / "state", isolation="worktree") as workspace:
        assert not workspace.base.dirty
        assert git(Path(workspace.path), "status", "--porcelain") == ""
        assert contents(Path(workspace.path)) == wanted(repo)
        Path(workspace.path, "sub", "new").write_text("new\n")
        patch = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert patch is not None
    assert patch.paths == ("sub/new",)


def test_worktrees_can_be_made_at_the_same_time(repo: Path, tmp_path: Path) -> None:
    """The lock serialises what git does not."""
    made: list[Workspace] = []

    def make(number: int) -> None:
        made.append(prepare_workspace(str(repo), state=tmp_path / f"s{number}", isolation="worktree"))

    threads = [threading.Thread(target=make, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 7
    for workspace in made:
        workspace.close()
    assert len(made) == 6
    assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 1


def test_the_worktree_of_a_run_that_died_a_week_ago_is_removed_by_the_next(repo: Path, tmp_path: Path) -> None:
    """A killed process frees its lock; a live run's worktree is left alone."""
    program = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from runner.workspace import prepare_workspace
        workspace = prepare_workspace(sys.argv[1], state=Path(sys.argv[2]), isolation="worktree")
        print(workspace.path, flush=True)
        time.sleep(60)
    """)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.Popen(
        [sys.executable, "-c", program, str(repo), str(tmp_path / "dead")], stdout=subprocess.PIPE, env=environment
    )
    assert run.stdout is not None
    path = Path(run.stdout.readline().decode().strip())
    with prepare_workspace(str(repo), state=tmp_path / "first", isolation="worktree"):
        assert path.exists()
    run.send_signal(signal.SIGKILL)
    run.wait()
    run.stdout.close()
    with prepare_workspace(str(repo), state=tmp_path / "between", isolation="worktree"):
        assert path.exists()  # somebody may want to go on with it
    os.utime(tmp_path / "dead" / "workspace.json", (1_000_000, 1_000_000))
    with prepare_workspace(str(repo), state=tmp_path / "second", isolation="worktree") as workspace:
        assert not path.exists()
        assert git(repo, "worktree", "list", "--porcelain").count("worktree ") == 2
        assert prune_worktrees(str(repo)) == []
        assert Path(workspace.path).exists()


def test_a_mark_that_names_another_folder_removes_only_itself(repo: Path, tmp_path: Path) -> None:
    """A forged mark cannot make the runner delete a directory."""
    victim = tmp_path / "victim"
    victim.mkdir()
    admin = repo / ".git" / "worktrees" / "forged"
    admin.mkdir(parents=True)
    (admin / "nightshift.json").write_text(f'{{"path": "{victim}"}}')

    assert prune_worktrees(str(repo)) == []
    assert victim.exists()
    assert not admin.exists()


def test_pruning_a_directory_without_git_does_nothing(tmp_path: Path) -> None:
    """There are no worktrees."""
    assert prune_worktrees(str(tmp_path)) == []


@pytest.mark.parametrize("isolation", ["in-place", "copy", "worktree"])
@pytest.mark.parametrize("name", ["with space", "-dash", 'quo"te', "new\nline", "back\\slash", os.fsdecode(b"caf\xe9")])
def test_strange_names_of_the_workspace_itself_work(repo: Path, tmp_path: Path, isolation: str, name: str) -> None:
    """Repository and state directory alike."""
    moved, state = tmp_path / name, tmp_path / f"state {name}"
    repo.rename(moved)
    with prepare_workspace(str(moved), state=state, isolation=isolation) as workspace:
        inside = Path(workspace.path)
        (inside / "made").write_text("x\n")
        patch = make_patch(workspace.snapshot, tmp_path / "changes.patch")

        assert patch is not None
        assert patch.paths == ("made",)
        assert git(inside, "log", "--format=%s") == "second\nfirst"


def test_a_submodule_is_an_empty_folder_in_a_copy(repo: Path, tmp_path: Path) -> None:
    """As in a fresh worktree."""
    inner = tmp_path / "inner"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "x").write_text("x\n")
    git(inner, "add", "-A")
    git(inner, "commit", "-qm", "inner")
    git(repo, "submodule", "add", "-q", str(inner), "module")
    git(repo, "commit", "-qm", "submodule")
    with prepare_workspace(str(repo), state=tmp_path / "state", isolation="copy") as workspace:
        assert list(Path(workspace.path, "module").iterdir()) == []
        assert not workspace.base.dirty
