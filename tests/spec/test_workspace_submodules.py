"""Submodules: git is never started in one, since an agent may have written what it would then run."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import runner.workspace.git
from runner.artifacts.patch import make_patch
from runner.errors import ConfigError, ErrorCode, RunnerError
from runner.workspace import load_workspace, plain_git, prepare_workspace
from runner.workspace.git import head_commit
from runner.workspace.snapshot import read_index

if TYPE_CHECKING:
    from runner.sandbox.base import ProcessResult


def git(directory: Path, *arguments: str) -> str:
    """Run the user's git; returns what it printed."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    settings = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "protocol.file.allow=always"]
    done = subprocess.run(
        ["git", *settings, *arguments], cwd=directory, env=environment, check=True, capture_output=True
    )
    return done.stdout.decode("utf-8", "surrogateescape").strip()


def committed(directory: Path, *init: str) -> Path:
    """A repository with one commit of one file."""
    directory.mkdir(parents=True)
    git(directory, "init", "-q", "-b", "main", *init)
    (directory / "file.c").write_text("int x;\n")
    git(directory, "add", "-A")
    git(directory, "commit", "-qm", "first")
    return directory


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    """A repository with the submodule ``module``, checked out."""
    directory = committed(tmp_path / "repo")
    git(directory, "submodule", "--quiet", "add", str(committed(tmp_path / "inner")), "module")
    git(directory, "commit", "-qm", "submodule")
    return directory


def marker(tmp_path: Path) -> Path:
    """What the agent's program would leave behind."""
    return tmp_path / "ran"


def poison(folder: Path, own: Path, tmp_path: Path) -> None:
    """Do what an agent can: give a repository another git directory, which runs a program for a changed stamp.

    Args:
        folder: The work tree.
        own: A git directory to take it from.
        tmp_path: Where the program writes.
    """
    shutil.copytree(own, folder / "evil")
    if (folder / ".git").is_dir():
        shutil.rmtree(folder / ".git")
    (folder / ".git").write_text("gitdir: evil\n")
    (folder / "evil" / "config").write_text(
        "[core]\n\trepositoryformatversion = 0\n\tworktree = ..\n"
        f'\tfsmonitor = "touch {marker(tmp_path)}-fsmonitor"\n'
        f'[filter "e"]\n\tclean = "touch {marker(tmp_path)}; cat"\n\trequired = true\n'
    )
    (folder / "evil" / "info").mkdir(exist_ok=True)
    (folder / "evil" / "info" / "exclude").write_text("/evil\n")
    (folder / "evil" / "info" / "attributes").write_text("* filter=e\n")
    os.utime(folder / "file.c", (1_000_000_000, 1_000_000_000))


def ran(tmp_path: Path) -> list[str]:
    """Marks the agent's programs left."""
    return sorted(path.name for path in tmp_path.glob("ran*"))


def test_the_poison_works_on_an_ordinary_git(repo: Path, tmp_path: Path) -> None:
    """Otherwise the tests below would prove nothing."""
    poison(repo / "module", repo / ".git" / "modules" / "module", tmp_path)
    git(repo, "-c", "core.fsmonitor=false", "add", "--all")

    assert "ran" in ran(tmp_path)


@pytest.mark.parametrize("isolation", ["in-place", "copy", "worktree"])
@pytest.mark.parametrize("dirty", [False, True])
def test_no_program_of_a_submodule_runs_when_the_base_is_recorded(
    repo: Path, tmp_path: Path, isolation: str, dirty: bool
) -> None:
    """What an agent left in a submodule does not come to life with the next run; the submodule is the same."""
    poison(repo / "module", repo / ".git" / "modules" / "module", tmp_path)
    if dirty:
        (repo / "file.c").write_text("int y;\n")
    with prepare_workspace(str(repo), state=tmp_path / "state", isolation=isolation) as workspace:
        base = workspace.base

    assert ran(tmp_path) == []
    assert base.dirty == dirty
    git(repo, "add", "file.c")
    assert base.tree == git(repo, "write-tree")


def test_no_program_of_a_submodule_runs_when_the_repository_has_a_prefix(repo: Path, tmp_path: Path) -> None:
    """A workspace that is a directory of the repository, with a submodule in it."""
    (repo / "dir").mkdir()
    git(repo, "mv", "module", "dir/module")
    git(repo, "commit", "-qm", "moved")
    poison(repo / "dir" / "module", repo / ".git" / "modules" / "module", tmp_path)
    (repo / "dir" / "new").write_text("new\n")
    workspace = prepare_workspace(str(repo / "dir"), state=tmp_path / "state")

    assert ran(tmp_path) == []
    assert workspace.git_links == (f"{repo}/dir/module/.git",)


def test_no_program_of_an_untracked_repository_runs(repo: Path, tmp_path: Path) -> None:
    """Nor of one that is not in the index, neither in this run nor in the next."""
    nested = committed(repo / "nested")
    poison(nested, nested / ".git", tmp_path)
    prepare_workspace(str(repo), state=tmp_path / "one")
    git(repo, "-c", "core.fsmonitor=false", "-c", "advice.addEmbeddedRepo=false", "update-index", "--refresh")
    prepare_workspace(str(repo), state=tmp_path / "two")

    assert ran(tmp_path) == []


def test_no_program_of_a_submodule_outside_a_sparse_checkout_runs(repo: Path, tmp_path: Path) -> None:
    """The agent may write where nothing was checked out; git looks at what is there then."""
    (repo / "out").mkdir()
    (repo / "in").mkdir()
    (repo / "in" / "a").write_text("a\n")
    git(repo, "mv", "module", "out/module")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "moved")
    own = tmp_path / "own"
    shutil.copytree(repo / ".git" / "modules" / "module", own)
    git(repo, "submodule", "--quiet", "deinit", "--all")
    git(repo, "sparse-checkout", "set", "--cone", "--sparse-index", "in")
    (repo / "out" / "module").mkdir(parents=True, exist_ok=True)
    (repo / "out" / "module" / "file.c").write_text("int x;\n")
    poison(repo / "out" / "module", own, tmp_path)
    (repo / "in" / "a").write_text("changed\n")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")

    assert ran(tmp_path) == []
    assert [path for path, _ in workspace.snapshot.gitlinks] == ["out/module"]
    assert workspace.base.dirty


def test_a_folded_index_of_a_clean_repository_is_clean(repo: Path, tmp_path: Path) -> None:
    """Folders that are left out are no deleted ones."""
    for name in ("in", "out"):
        (repo / name).mkdir()
        (repo / name / "a").write_text("a\n")
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "folders")
    git(repo, "sparse-checkout", "set", "--cone", "--sparse-index", "in")
    copied = read_index((repo / ".git" / "index").read_bytes())
    base = prepare_workspace(str(repo), state=tmp_path / "state").base

    assert copied is not None
    assert copied.folded
    assert not (repo / "out").exists()
    assert (base.dirty, base.tree) == (False, git(repo, "rev-parse", "HEAD^{tree}"))


def lack_objects(git_dir: Path, tmp_path: Path) -> None:
    """Make a repository a partial clone without its HEAD, which names a program as the way to get it."""
    with (git_dir / "config").open("a") as file:
        file.write(
            "[core]\n\trepositoryformatversion = 1\n[extensions]\n\tpartialClone = evil\n"
            f'[remote "evil"]\n\tpromisor = true\n\turl = "ext::touch {marker(tmp_path)}"\n'
            '[protocol "ext"]\n\tallow = always\n'
        )
    (git_dir / "HEAD").write_text("1" * 40 + "\n")


def test_no_program_runs_to_fetch_what_a_submodule_lacks(repo: Path, tmp_path: Path) -> None:
    """Its HEAD is recorded as it is written there, as git does."""
    lack_objects(repo / ".git" / "modules" / "module", tmp_path)
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")

    assert ran(tmp_path) == []
    assert workspace.snapshot.gitlinks == (("module", "1" * 40),)


@pytest.mark.parametrize("left_out", ["GIT_NO_LAZY_FETCH", "GIT_ALLOW_PROTOCOL"])
def test_no_program_runs_to_fetch_what_a_workspace_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: str
) -> None:
    """Older gits know only one of the two variables that forbid it, so either has to be enough."""
    repo = committed(tmp_path / "repo")
    lack_objects(repo / ".git", tmp_path)
    whole = runner.workspace.git.base_environment
    monkeypatch.setattr(
        runner.workspace.git,
        "base_environment",
        lambda settings=None: {name: value for name, value in whole(settings).items() if name != left_out},
    )
    with pytest.raises(ConfigError, match="cannot be read"):
        prepare_workspace(str(repo), state=tmp_path / "state")

    assert ran(tmp_path) == []


def test_no_program_of_a_submodule_runs_when_the_patch_is_made(repo: Path, tmp_path: Path) -> None:
    """The agent may poison it during the run; here git is not confined, so that it would be seen."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    own = repo / ".git" / "modules" / "module"
    shutil.move(own, tmp_path / "own")
    shutil.copytree(tmp_path / "own", own)
    poison(repo / "module", own, tmp_path)
    shutil.rmtree(repo / "module" / "evil")
    (repo / "module" / ".git").write_text("gitdir: ../evil\n")
    poisoned = repo / "evil"
    shutil.copytree(own, poisoned)
    (poisoned / "config").write_text(
        f'[core]\n\tworktree = ../module\n[filter "e"]\n\tclean = "touch {marker(tmp_path)}; cat"\n'
    )
    (poisoned / "info" / "attributes").write_text("* filter=e\n")
    (repo / "file.c").write_text("int y;\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert ran(tmp_path) == []
    assert info is not None
    assert "file.c" in info.paths
    assert "module" not in info.paths


def test_a_moved_submodule_is_part_of_the_base(repo: Path, tmp_path: Path) -> None:
    """The commit that is checked out is recorded, as git would; nothing of it is a change of the agent."""
    git(repo / "module", "commit", "-q", "--allow-empty", "-m", "second")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    patch = make_patch(workspace.snapshot, tmp_path / "changes.patch")
    git(repo, "add", "--all")

    assert workspace.base.dirty
    assert workspace.base.tree == git(repo, "write-tree")
    assert patch is None


def test_a_staged_submodule_is_part_of_the_base(repo: Path, tmp_path: Path) -> None:
    """A new commit of it in the index alone is a change too."""
    git(repo / "module", "commit", "-q", "--allow-empty", "-m", "second")
    git(repo, "add", "module")
    base = prepare_workspace(str(repo), state=tmp_path / "state").base

    assert base.dirty
    assert base.tree == git(repo, "write-tree")


def remove(path: Path) -> None:
    """The folder is gone."""
    shutil.rmtree(path)


def become_a_file(path: Path) -> None:
    """A file stands there."""
    shutil.rmtree(path)
    path.write_text("a file\n")


def become_a_link(path: Path) -> None:
    """A link stands there."""
    shutil.rmtree(path)
    path.symlink_to("nowhere")


def lose_its_git(path: Path) -> None:
    """It is not checked out any more, but its folder is there."""
    shutil.rmtree(path)
    path.mkdir()


@pytest.mark.parametrize("change", [remove, become_a_file, become_a_link, lose_its_git])
def test_what_became_of_a_submodule_before_the_run_is_recorded_as_git_would(
    repo: Path, tmp_path: Path, change: object
) -> None:
    """Deleted, replaced, or emptied, which is no change."""
    assert callable(change)
    change(repo / "module")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    patch = make_patch(workspace.snapshot, tmp_path / "changes.patch")
    git(repo, "add", "--all")

    assert workspace.base.tree == git(repo, "write-tree")
    assert workspace.base.dirty == (change is not lose_its_git)
    assert workspace.git_links == ()
    assert patch is None


@pytest.mark.parametrize("change", [remove, become_a_file, become_a_link, lose_its_git])
def test_what_became_of_a_submodule_in_the_run_is_an_error(repo: Path, tmp_path: Path, change: object) -> None:
    """Its files were there before, and a patch cannot say that they are gone."""
    assert callable(change)
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    change(repo / "module")
    with pytest.raises(RunnerError, match="submodule 'module'") as caught:
        make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert caught.value.code is ErrorCode.TASK_FAILED


def test_a_submodule_that_is_moved_in_the_run_is_an_error(repo: Path, tmp_path: Path) -> None:
    """The commit exists nowhere else."""
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    git(repo / "module", "commit", "-q", "--allow-empty", "-m", "second")
    with pytest.raises(RunnerError, match="moved a nested repository at module") as caught:
        make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert caught.value.code is ErrorCode.TASK_FAILED


def test_a_submodule_that_is_not_checked_out_disturbs_nothing(repo: Path, tmp_path: Path) -> None:
    """It is an empty folder, before and after."""
    git(repo, "submodule", "--quiet", "deinit", "--all")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "file.c").write_text("int y;\n")
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")

    assert not workspace.base.dirty
    assert info is not None
    assert info.paths == ("file.c",)


def test_a_folder_of_a_submodule_that_is_removed_is_in_the_patch(repo: Path, tmp_path: Path) -> None:
    """One without files: the entry alone is gone, and the patch says so."""
    git(repo, "submodule", "--quiet", "deinit", "--all")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "module").rmdir()
    info = make_patch(workspace.snapshot, tmp_path / "changes.patch")
    git(repo, "add", "--all")

    assert info is not None
    assert info.paths == ("module",)
    assert info.tree == git(repo, "write-tree")


def test_submodules_in_submodules_are_looked_at(repo: Path, tmp_path: Path) -> None:
    """At any depth; the record of them survives the process."""
    git(repo / "module", "submodule", "--quiet", "add", str(committed(tmp_path / "deep")), "deep")
    git(repo / "module", "commit", "-qm", "deep")
    git(repo, "commit", "-qam", "deep")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")

    assert not workspace.base.dirty
    assert workspace.git_links == (f"{repo}/module/.git", f"{repo}/module/deep/.git")
    assert load_workspace(tmp_path / "state").snapshot == workspace.snapshot
    assert make_patch(workspace.snapshot, tmp_path / "changes.patch") is None
    (repo / "module" / "deep" / "file.c").write_text("changed\n")
    with pytest.raises(RunnerError, match="submodule 'module'"):
        make_patch(workspace.snapshot, tmp_path / "changes.patch")


def test_a_submodule_with_converted_line_endings_is_unchanged(repo: Path, tmp_path: Path) -> None:
    """Its own settings on content count, so a file with another stamp is the same file."""
    git(repo / "module", "config", "core.autocrlf", "true")
    (repo / "module" / "file.c").unlink()
    git(repo / "module", "checkout", "--", "file.c")
    assert (repo / "module" / "file.c").read_bytes() == b"int x;\r\n"
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    os.utime(repo / "module" / "file.c", (1_000_000_000, 1_000_000_000))

    assert make_patch(workspace.snapshot, tmp_path / "changes.patch") is None


def test_submodules_of_a_repository_with_sha256_names_work(tmp_path: Path) -> None:
    """Longer names in the index and in HEAD."""
    repo = committed(tmp_path / "repo", "--object-format=sha256")
    inner = committed(repo / "module", "--object-format=sha256")
    git(repo, "add", "--all")
    git(repo, "commit", "-qm", "module")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")

    assert not workspace.base.dirty
    assert workspace.snapshot.gitlinks == (("module", git(inner, "rev-parse", "HEAD")),)
    git(inner, "commit", "-q", "--allow-empty", "-m", "second")
    assert prepare_workspace(str(repo), state=tmp_path / "moved").base.dirty


@pytest.mark.parametrize("form", ["loose", "packed", "detached"])
def test_the_head_of_a_submodule_is_what_git_says(repo: Path, form: str) -> None:
    """Read from files in each of the forms git writes."""
    module = repo / "module"
    if form == "packed":
        git(module, "pack-refs", "--all")
    elif form == "detached":
        git(module, "checkout", "-q", "--detach")

    assert head_commit(module, digits=40) == git(module, "rev-parse", "HEAD")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "ref: refs/heads/unborn\n",
        "ref: HEAD\n",
        "ref: refs/../../../secret\n",
        "ref: /etc/passwd",
        "1" * 39,
        "a\0b",
    ],
)
def test_a_head_that_leads_to_no_commit_is_none(repo: Path, text: str) -> None:
    """Nothing outside the repository's references is read."""
    (repo / ".git" / "modules" / "secret").write_text("1" * 40)
    (repo / ".git" / "modules" / "module" / "HEAD").write_text(text)

    assert head_commit(repo / "module", digits=40) is None


def test_references_in_a_circle_and_pipes_end(repo: Path) -> None:
    """What an agent may write there never makes the runner wait."""
    own = repo / ".git" / "modules" / "module"
    (own / "HEAD").write_text("ref: refs/heads/a\n")
    (own / "refs" / "heads" / "a").write_text("ref: refs/heads/a\n")
    assert head_commit(repo / "module", digits=40) is None
    (own / "refs" / "heads" / "a").unlink()
    os.mkfifo(own / "refs" / "heads" / "a")
    assert head_commit(repo / "module", digits=40) is None


def test_a_submodule_whose_git_leads_nowhere_is_an_error(repo: Path, tmp_path: Path) -> None:
    """Its files could not be compared; the message names it."""
    (repo / "module" / ".git").write_text("gitdir: /nowhere/at/all\n")
    with pytest.raises(ConfigError, match=r"module/\.git names /nowhere"):
        prepare_workspace(str(repo), state=tmp_path / "state")


def test_a_link_in_a_submodules_git_directory_is_not_followed(repo: Path, tmp_path: Path) -> None:
    """Else the runner would copy for the agent what it must not see."""
    (tmp_path / "secret").write_text("secret\n")
    own = repo / ".git" / "modules" / "module"
    for name in ("info/exclude", "info/attributes", "shallow"):
        (own / name).unlink(missing_ok=True)
        (own / name).symlink_to(tmp_path / "secret")
    prepare_workspace(str(repo), state=tmp_path / "state")

    copies = [path for path in (tmp_path / "state").rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert copies == []


def test_a_record_without_submodules_is_refused(repo: Path, tmp_path: Path) -> None:
    """A damaged record is told apart, not read as one without submodules."""
    prepare_workspace(str(repo), state=tmp_path / "state")
    path = tmp_path / "state" / "workspace.json"
    value = json.loads(path.read_text())
    del value["snapshot"]["gitlinks"]
    path.write_text(json.dumps(value))
    with pytest.raises(RunnerError, match="no record"):
        load_workspace(tmp_path / "state")


def between(first_ended: object) -> object:
    """A git runner that does something behind the command that writes the patch."""
    calls: list[str] = []

    def run(argv: list[str], *, environment: dict[str, str], writable: tuple[str, ...], cwd: str) -> ProcessResult:
        result = plain_git(argv, environment=environment, writable=writable, cwd=cwd)
        calls.append(cwd)
        assert callable(first_ended)
        if len(calls) == 1:
            first_ended()
        return result

    return run


def test_a_patch_that_is_exchanged_before_it_is_verified_is_refused(tmp_path: Path) -> None:
    """Other bytes give another tree."""
    repo = committed(tmp_path / "repo")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "file.c").write_text("int y;\n")
    patch = Path(workspace.snapshot.scratch, "patch")

    def exchange() -> None:
        patch.write_bytes(patch.read_bytes().replace(b"+int y", b"+int z"))

    with pytest.raises(RunnerError):
        make_patch(workspace.snapshot, tmp_path / "changes.patch", run_git=between(exchange))  # type: ignore[arg-type]  # a function with the shape
    assert not (tmp_path / "changes.patch").exists()


def test_the_bytes_that_are_verified_are_the_bytes_that_are_published(tmp_path: Path) -> None:
    """Whoever still writes to the scratch directory changes nothing; text behind the patch would apply as well."""
    repo = committed(tmp_path / "repo")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "file.c").write_text("int y;\n")
    scratch = Path(workspace.snapshot.scratch)
    scripts: list[list[str]] = []

    def run(argv: list[str], *, environment: dict[str, str], writable: tuple[str, ...], cwd: str) -> ProcessResult:
        if scripts:
            with (scratch / "patch").open("ab") as file:
                file.write(b"\nforged\n")
        scripts.append(argv)
        assert (str(scratch) in writable) == (len(scripts) == 1)
        assert not any(path.startswith(f"{scratch}/") for path in argv) or len(scripts) == 1
        return plain_git(argv, environment=environment, writable=writable, cwd=cwd)

    info = make_patch(workspace.snapshot, tmp_path / "changes.patch", run_git=run)

    assert info is not None
    assert b"forged" in (scratch / "patch").read_bytes()
    assert b"forged" not in (tmp_path / "changes.patch").read_bytes()
    assert len(scripts) == 2


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_patch_that_is_no_file_is_refused(tmp_path: Path, kind: str) -> None:
    """A link would publish what it leads to, a pipe would never end."""
    repo = committed(tmp_path / "repo")
    (tmp_path / "secret").write_text("secret\n")
    workspace = prepare_workspace(str(repo), state=tmp_path / "state")
    (repo / "file.c").write_text("int y;\n")
    patch = Path(workspace.snapshot.scratch, "patch")

    def exchange() -> None:
        patch.unlink()
        if kind == "link":
            patch.symlink_to(tmp_path / "secret")
        else:
            os.mkfifo(patch)

    with pytest.raises(RunnerError):
        make_patch(workspace.snapshot, tmp_path / "changes.patch", run_git=between(exchange))  # type: ignore[arg-type]  # a function with the shape
    assert not (tmp_path / "changes.patch").exists()
