"""Files that define the run stay what they are, wherever in a writable folder they lie. Judged by the host."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.permission import Mode
from runner.sandbox.base import SandboxPolicy, SandboxSpec
from runner.sandbox.environment import child_environment
from runner.sandbox.layout import trail
from runner.sandbox.probe import probe
from runner.testing.sandbox import make_box

if TYPE_CHECKING:
    from runner.testing.sandbox import Box

TASK = "prompt: the user's own\n"

ATTACKS = {
    "append": 'echo evil >> "$1"',
    "overwrite": 'echo evil > "$1"',
    "truncate": 'truncate -s 0 "$1"',
    "unlink": 'rm -f "$1"',
    "rename away": 'mv "$1" src/taken',
    "rename away and replace": 'mv "$1" "$1.old" && echo evil > "$1"',
    "rename over": 'echo evil > src/evil; mv -f src/evil "$1"',
    "exchange by link": 'ln -sfn /etc/hostname "$1"',
    "hard link, then write": 'ln "$1" src/alias && echo evil >> src/alias',
    "move the folder": 'd=$(dirname "$1"); mv "$d" src/d; mkdir -p "$d" && echo evil > "$1"',
    "move the folder above": "mv ci src/ci; mv ci ci2; mkdir -p ci/deep && echo evil > ci/deep/task.yaml",
    "remove the folder": 'd=$(dirname "$1"); test "$d" = . || rm -rf "$d"; mkdir -p "$d"; echo evil > "$1"',
    "patch": 'sed -i s/own/evil/ "$1"',
    "git": "git checkout -q --orphan x; git rm -qrf --cached .; git clean -fdxq",
}


def place_task(box: Box, where: str) -> Path:
    """A run-defining file in the workspace, with an ordinary neighbour."""
    task = box.workspace / where
    task.parent.mkdir(parents=True, exist_ok=True)
    task.write_text(TASK)
    (task.parent / "neighbour").write_text("old\n")
    return task


@pytest.mark.parametrize("unprotected_git", [False, True])
@pytest.mark.parametrize("where", ["task.yaml", "ci/deep/task.yaml"])
def test_no_command_changes_a_file_that_defines_the_run(box: Box, where: str, *, unprotected_git: bool) -> None:
    """Each way to change, remove, move or replace it fails; it can be read, and its neighbour changed."""
    task = place_task(box, where)
    before = task.stat()
    for attack in ATTACKS.values():
        box.run(attack, where, protected=(task,), unprotected_git=unprotected_git)
        assert task.read_text() == TASK, attack
        assert (task.stat().st_ino, task.stat().st_nlink) == (before.st_ino, 1), attack
    # The attacks may take the neighbour away, which is theirs; on the host it comes back.
    (task.parent / "neighbour").write_text("old\n")
    result = box.run(f'cat "{where}" && echo new > "$1/neighbour"', task.parent, protected=(task,))

    assert result.output.decode() == TASK
    assert (task.parent / "neighbour").read_text() == "new\n"


@pytest.mark.parametrize("name", [name for name in ATTACKS if name not in ("move the folder above", "git")])
def test_the_same_attacks_work_on_any_other_file(box: Box, name: str) -> None:
    """The positive twin: without protection each of them changes the file, its name, or its folder."""
    task = place_task(box, "ci/deep/task.yaml")
    # Without .git nothing keeps Landlock from granting the whole workspace.
    box.run(ATTACKS[name], "ci/deep/task.yaml", unprotected_git=True)

    changed = not task.exists() or task.read_text() != TASK or task.is_symlink()
    assert changed


def test_a_further_writable_folder_protects_as_well(box: Box) -> None:
    """The file lies in a folder of ``sandbox.writable``."""
    shared = box.base / "shared"
    shared.mkdir()
    profile = shared / "profile.yaml"
    profile.write_text(TASK)
    (shared / "notes").write_text("old\n")
    options: dict[str, Any] = {"protected": (profile,), "writable": (str(shared),)}
    box.run('echo evil > "$1"; rm -f "$1"; mv "$1" "$1.old"; echo evil > "$1"', profile, **options)
    box.run('echo new > "$1"', shared / "notes", **options)

    assert profile.read_text() == TASK
    assert (shared / "notes").read_text() == "new\n"


@pytest.mark.parametrize("link", ["task.yaml", "ci/task.yaml", "ci"])
def test_a_link_on_the_way_stays_too(box: Box, link: str) -> None:
    """Neither the link nor the file behind it can be exchanged, at the top, in a folder, or as a folder."""
    real = place_task(box, "src/real/task.yaml")
    at = box.workspace / link
    at.parent.mkdir(exist_ok=True)
    at.symlink_to(real if link.endswith("yaml") else real.parent)
    (at.parent / "other").mkdir(exist_ok=True)
    given = at if link.endswith("yaml") else at / "task.yaml"
    target = at.readlink()
    attack = """
        rm -f "$1"; mv "$1" src/taken; ln -sfn /etc/hostname "$1"; echo evil > "$1"; mv "$(dirname "$1")" src/moved
        echo evil > "$2"; rm -f "$2"; mv src/real src/moved; mv src moved; mkdir -p src/real; echo evil > "$2"
        rm -rf ci; mkdir ci; echo evil > ci/task.yaml
    """
    box.run(attack, at, real, protected=(given,))
    result = box.run('cat "$1"; echo fine > "$2/file"', given, at.parent / "other", protected=(given,))

    assert at.is_symlink()
    assert at.readlink() == target
    assert real.read_text() == TASK
    assert not (box.workspace / "moved").exists()
    assert result.output.decode() == TASK
    assert (at.parent / "other" / "file").read_text() == "fine\n"


def test_a_link_without_protection_can_be_exchanged(box: Box) -> None:
    """The positive twin."""
    (box.workspace / "src" / "task.yaml").symlink_to("main.py")
    box.run("ln -sfn /etc/hostname src/task.yaml")

    assert str((box.workspace / "src" / "task.yaml").readlink()) == "/etc/hostname"


def test_a_protected_file_in_a_protected_or_hidden_folder_opens_nothing(box: Box) -> None:
    """What keeps a file in place must not make the folders around it writable or visible again."""
    for folder in (".git/tasks/deep", "private/tasks/deep"):
        (box.workspace / folder).mkdir(parents=True)
        (box.workspace / folder / "task.yaml").write_text(TASK)
        (box.workspace / folder / "secret").write_text("secret\n")
        (box.workspace / folder / "link.yaml").symlink_to("task.yaml")
    files = [box.workspace / ".git/tasks/deep/task.yaml", box.workspace / "private/tasks/deep/task.yaml"]
    attack = """
        echo evil > .git/tasks/deep/new; echo evil > .git/tasks/new; echo evil > .git/tasks/deep/task.yaml
        echo evil > .git/tasks/deep/secret; echo evil > private/tasks/deep/new; echo evil > private/tasks/deep/secret
        cat private/tasks/deep/secret private/tasks/deep/task.yaml; true
    """
    links = [file.with_name("link.yaml") for file in files]
    result = box.run(attack, protected=[*files, *links], hidden=(box.workspace / "private",))

    assert b"secret\n" not in result.output
    assert TASK.encode() not in result.output
    for file in files:
        assert file.read_text() == TASK
        assert sorted(path.name for path in file.parent.iterdir()) == ["link.yaml", "secret", "task.yaml"]
        assert file.with_name("secret").read_text() == "secret\n"
    assert not (box.workspace / ".git/tasks/new").exists()


def test_the_folder_of_worktrees_in_a_protected_repository_stays_closed(box: Box) -> None:
    """A linked worktree's own folder lies in the main repository; nothing can be put beside it."""
    main = box.base / "main"
    box.workspace.rename(main)
    subprocess.run(["git", "worktree", "add", "-q", str(box.workspace)], cwd=main, check=True, capture_output=True)
    box.run('mkdir "$1/.git/worktrees/evil"; echo x > "$1/src/new"', main, writable=(str(main),))

    assert [path.name for path in (main / ".git" / "worktrees").iterdir()] == ["workspace"]
    assert (main / "src" / "new").exists()


def test_what_new_files_cost_is_listed(box: Box) -> None:
    """Landlock cannot add files beside a protected one and says so; bubblewrap can, where no link has to stay."""
    task = place_task(box, "ci/task.yaml")
    result = box.run("echo x > ci/new; echo x > src/new; echo x > new; true", protected=(task,), unprotected_git=True)
    executor = box.executor(protected=(task,), unprotected_git=True)
    listed = {"new_top_level_files", "new_files_beside_protected"} & set(executor.not_enforced(Mode.WORKSPACE_WRITE))
    can = box.backend == "bubblewrap"

    assert (box.workspace / "src" / "new").exists()
    assert (box.workspace / "ci" / "new").exists() == can, result.output
    assert (box.workspace / "new").exists() == can
    assert listed == (set() if can else {"new_top_level_files", "new_files_beside_protected"})
    link = box.workspace / "ci" / "link.yaml"
    link.symlink_to("task.yaml")
    frozen = box.executor(protected=(link,), unprotected_git=True).not_enforced(Mode.WORKSPACE_WRITE)
    box.run("echo x > ci/newer", protected=(link,), unprotected_git=True)
    assert not (box.workspace / "ci" / "newer").exists()
    assert "new_files_beside_protected" in frozen
    outside = box.executor(protected=(box.canary,), unprotected_git=True).not_enforced(Mode.WORKSPACE_WRITE)
    assert not {"new_top_level_files", "new_files_beside_protected"} & set(outside)


def test_a_protected_file_that_is_not_there_changes_nothing(box: Box) -> None:
    """A file of the base revision that the work tree lacks: commands run as ever."""
    missing = box.workspace / "ci" / "task.yaml"
    result = box.run("echo x > src/new && echo done", protected=(missing,))

    assert result.output == b"done\n"
    assert (box.workspace / "src" / "new").exists()


def test_the_probe_tries_the_protected_file(box: Box) -> None:
    """A workspace that holds nothing but the file passes, and the file is not touched."""
    only = box.base / "only"
    (only / "ci").mkdir(parents=True)
    task = only / "ci" / "task.yaml"
    task.write_text(TASK)
    before = task.stat()
    executor = box.executor(workspace=only, protected=(task,))
    policy = SandboxPolicy(
        mode=Mode.WORKSPACE_WRITE,
        workspace=str(only),
        tmp=executor.tmp,
        home=executor.home,
        environment=child_environment({}, SandboxSpec(), home=executor.home, tmp=executor.tmp, secrets={}),
        protected=(str(task),),
    )
    report = probe(box.backend, policy, cancellation=box.cancellation, environ={})

    assert report.ok, report.reason
    assert report.checks["protected"].startswith("denied")
    assert task.stat() == before


def test_git_sees_no_change_in_a_protected_file(box: Box) -> None:
    """A protected file is the same file for git, inside as outside."""
    result = box.run("git status --porcelain", protected=(box.workspace / "README", box.workspace / "src" / "main.py"))

    assert result.exit_code == 0
    assert result.output == b""


def test_a_trail_names_each_link_and_the_end(tmp_path: Path) -> None:
    """Relative and absolute links, ``..``, and a loop, which ends."""
    root = Path(os.path.realpath(tmp_path))
    (root / "a" / "b").mkdir(parents=True)
    (root / "a" / "file").write_text("")
    (root / "a" / "up").symlink_to("../a/file")
    (root / "link").symlink_to(root / "a")
    (root / "loop").symlink_to("loop")

    assert trail(f"{root}/link/b/../up") == ([f"{root}/link", f"{root}/a/up"], f"{root}/a/file")
    assert trail(f"{root}/a/none/x") == ([], f"{root}/a/none/x")
    assert set(trail(f"{root}/loop/x")[0]) == {f"{root}/loop"}


def test_a_protected_file_below_tmp_stays_too(tmp_path: Path, backend: str) -> None:
    """A workspace below /tmp, where bubblewrap puts a private folder."""
    box = make_box(Path(os.path.realpath(tmp_path)) / "below", backend)
    task = place_task(box, "ci/deep/task.yaml")
    for attack in ATTACKS.values():
        box.run(attack, "ci/deep/task.yaml", protected=(task,))
        assert task.read_text() == TASK, attack
    box.close()


def test_a_hidden_path_in_a_protected_or_hidden_folder_opens_nothing(box: Box) -> None:
    """Hiding it leaves the folders around it as closed as they were, and shows no name of it."""
    inner = box.workspace / ".git" / "private" / "deep" / "key"
    inner.parent.mkdir(parents=True)
    inner.write_text("secret\n")
    folder = box.outside / "folder"
    (folder / "session").mkdir()
    result = box.run(
        'echo evil > .git/private/new; echo evil > .git/private/deep/new; cat .git/private/deep/key; ls "$1"',
        folder,
        hidden=(inner, folder, folder / "session"),
    )

    assert [path.name for path in inner.parent.iterdir()] == ["key"]
    assert [path.name for path in inner.parent.parent.iterdir()] == ["deep"]
    assert b"secret" not in result.output
    if box.backend == "bubblewrap":
        assert b"session" not in result.output


def test_a_workspace_in_a_hidden_folder_of_a_writable_one_shows_only_itself(box: Box) -> None:
    """The deeper path decides: what keeps its files in place does not uncover the folder between."""
    shared = box.base / "shared"
    between = shared / "hidden" / "between"
    between.mkdir(parents=True)
    (between / "secret").write_text("secret\n")
    workspace = between / "workspace"
    (workspace / "ci").mkdir(parents=True)
    task = workspace / "ci" / "task.yaml"
    task.write_text(TASK)
    executor = box.executor(
        workspace=workspace, protected=(task,), hidden=(shared / "hidden",), writable=(str(shared),)
    )
    script = "cat ../secret; echo evil > ../new; echo evil > ci/task.yaml; rm -f ci/task.yaml; cat ci/task.yaml"
    result = executor.run(
        ["/bin/bash", "-c", script], mode=Mode.WORKSPACE_WRITE, timeout=20, cancellation=box.cancellation
    )

    assert b"secret\n" not in result.output
    assert result.output.endswith(TASK.encode())
    assert task.read_text() == TASK
    assert sorted(path.name for path in between.iterdir()) == ["secret", "workspace"]
