"""The repository's control files stay what they are, in every form that .git can have."""

from __future__ import annotations

import shutil
import subprocess
from typing import TYPE_CHECKING

import pytest

from runner.permission import Mode

if TYPE_CHECKING:
    from pathlib import Path

    from runner.testing.sandbox import Box

ATTACKS = """
    echo evil > .git/hooks/pre-commit; echo evil >> .git/config; echo evil > .git/new; rm -rf .git/objects
    mv .git moved; mv .git src/moved; rm -rf .git; ln -sfn src .git; mkdir -p src/evil && mv -T src/evil .git
    git config core.fsmonitor /bin/evil; git commit -q --allow-empty -m evil; chmod 777 .git/config 2>/dev/null
"""


def contents(folder: Path) -> dict[str, bytes | None]:
    """Every path below a folder, with the bytes of regular files."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def git(folder: Path, *arguments: str) -> None:
    """Run git as the test itself."""
    identity = ("-c", "user.name=t", "-c", "user.email=t@example.invalid", "-c", "protocol.file.allow=always")
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


def test_no_command_changes_the_repository(box: Box) -> None:
    """Hooks, configuration, objects and the folder itself survive every attack; reading goes on working."""
    before = contents(box.workspace / ".git")
    box.run(ATTACKS)
    result = box.run("git status --porcelain -uno && git log --format=%s")

    assert contents(box.workspace / ".git") == before
    assert result.output == b"one\n"


def test_with_unprotected_git_the_repository_can_be_changed(box: Box) -> None:
    """The positive twin: the profile opted out, and the backend says so."""
    result = box.run("git -c user.name=a -c user.email=a@b commit -q --allow-empty -m two", unprotected_git=True)

    assert result.exit_code == 0, result.output
    assert "git_protect" in box.executor(unprotected_git=True).not_enforced(Mode.WORKSPACE_WRITE)
    assert "git_protect" not in box.executor().not_enforced(Mode.WORKSPACE_WRITE)


def test_a_worktree_and_the_repository_behind_it_are_protected(box: Box) -> None:
    """``.git`` is a file: it, its own folder and the main repository stay unchanged, even if they are in a root."""
    main = box.base / "main"
    shutil.move(box.workspace, main)
    git(main, "worktree", "add", "-q", str(box.workspace))
    before = contents(main / ".git"), (box.workspace / ".git").read_bytes()
    attack = """
        echo evil > .git; rm -f .git; mv .git moved; mv "$1"/.git "$1"/moved; echo evil > "$1"/.git/hooks/evil
        echo evil > "$1"/.git/worktrees/workspace/gitdir; echo evil > "$1"/.git/config; rm -rf "$1"/.git
        echo fine > "$1"/src/new; git status --porcelain -uno && echo status
    """
    result = box.run(attack, main, writable=(str(main),))

    assert (contents(main / ".git"), (box.workspace / ".git").read_bytes()) == before
    assert (main / "src" / "new").read_text() == "fine\n"
    assert result.output.endswith(b"status\n")


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_linked_git_folder_is_protected(box: Box, where: str) -> None:
    """``.git`` is a symbolic link: neither the link nor what it leads to can be replaced."""
    parent = box.base if where == "outside" else box.workspace / "src"
    target = parent / "repository"
    shutil.move(box.workspace / ".git", target)
    (box.workspace / ".git").symlink_to(target)
    before = contents(target)
    box.run(ATTACKS + 'rm -rf "$1"; mv "$1" "$1-moved"; echo x > "$1/new"; mv src src-moved', target)
    box.run("echo fine > src/main.py; echo fine > README")

    assert (box.workspace / ".git").readlink() == target
    assert contents(target) == before
    assert (box.workspace / "src" / "main.py").read_text() == "fine\n"
    assert (box.workspace / "README").read_text() == "fine\n"


def test_a_dangling_link_stays(box: Box) -> None:
    """A link that leads nowhere cannot be replaced by a repository of the command's own."""
    shutil.rmtree(box.workspace / ".git")
    (box.workspace / ".git").symlink_to("nowhere")
    box.run("rm -f .git; mkdir .git; mv src .git; ln -sfn src .git; git init -q .; mkdir nowhere")

    assert str((box.workspace / ".git").readlink()) == "nowhere"
    assert not (box.workspace / "nowhere").exists()


def test_a_repository_made_by_a_command_is_protected_from_the_next_command_on(box: Box) -> None:
    """Without ``.git`` one can be made; once it is there, it is like any other."""
    shutil.rmtree(box.workspace / ".git")
    made = box.run("git init -q . && echo made")
    assert made.output == b"made\n"
    before = contents(box.workspace / ".git")
    box.run(ATTACKS)

    assert contents(box.workspace / ".git") == before


def test_the_repository_above_the_workspace_is_outside(box: Box) -> None:
    """A workspace below the repository's top folder reaches its .git for reading only."""
    below = box.workspace / "src"
    before = contents(box.workspace / ".git")
    executor = box.executor(workspace=below)
    result = executor.run(
        ["/bin/bash", "-c", "echo evil > ../.git/hooks/pre-commit; echo x > new; git status --porcelain"],
        mode=Mode.WORKSPACE_WRITE,
        timeout=20,
        cancellation=box.cancellation,
    )

    assert contents(box.workspace / ".git") == before
    assert b"?? src/new" in result.output
