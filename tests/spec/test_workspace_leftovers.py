"""Private folders of runs that were killed are removed by a later run, and nothing else is."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from runner.workspace import leftovers
from runner.workspace.leftovers import Claim, remove_leftovers

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_OWNER = """
import os, sys
from pathlib import Path
from runner.workspace.leftovers import Claim
folder = Path(sys.argv[1])
folder.mkdir(mode=0o700)
claim = Claim(folder)
closed = folder / "workspace" / "closed"
closed.mkdir(parents=True)
(closed / "file").write_text("what the agent left")
closed.chmod(0)
(folder / "workspace.json").write_text("{}")
print("ready", flush=True)
sys.stdin.read()
os._exit(0)
"""


def start_owner(folder: Path) -> subprocess.Popen[str]:
    """A process that has a private folder and does not clear it up."""
    command = [sys.executable, "-c", _OWNER, str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.fixture
def abandoned(tmp_path: Path) -> Path:
    """The folder of a run that was killed."""
    folder = tmp_path / "nightshift-abandoned"
    process = start_owner(folder)
    process.kill()
    process.communicate()
    return folder


@pytest.fixture
def alive(tmp_path: Path) -> Iterator[Path]:
    """The folder of a run that is at work."""
    folder = tmp_path / "nightshift-alive"
    process = start_owner(folder)
    yield folder
    process.kill()
    process.communicate()


def test_what_a_killed_run_left_is_removed(abandoned: Path, tmp_path: Path) -> None:
    """Folders in it that nobody may enter are no obstacle."""
    remove_leftovers(tmp_path, older_than=0)

    assert not abandoned.exists()


def test_what_somebody_may_want_to_go_on_with_stays(abandoned: Path, tmp_path: Path) -> None:
    """The age counts from the claim."""
    remove_leftovers(tmp_path, older_than=60)
    assert (abandoned / "workspace.json").exists()

    os.utime(abandoned / leftovers.OWNER, (0, 0))
    remove_leftovers(tmp_path, older_than=60)
    assert not abandoned.exists()


def test_a_folder_that_was_taken_over_stays(abandoned: Path, tmp_path: Path) -> None:
    """Whoever goes on in it claims it anew, and gets a new age with that."""
    os.utime(abandoned / leftovers.OWNER, (0, 0))
    claim = Claim(abandoned)

    remove_leftovers(tmp_path, older_than=0)
    claim.release()
    remove_leftovers(tmp_path, older_than=60)

    assert (abandoned / "workspace.json").exists()


def test_the_folder_of_a_live_run_stays(alive: Path, tmp_path: Path) -> None:
    """Its lock is held."""
    remove_leftovers(tmp_path, older_than=0)

    assert (alive / "workspace.json").exists()


def test_a_folder_that_was_kept_stays(tmp_path: Path) -> None:
    """A workspace whose patch could not be made is the only place of the agent's work."""
    folder = tmp_path / "nightshift-kept"
    folder.mkdir()
    (folder / "file").touch()
    Claim(folder).release(keep=True)

    remove_leftovers(tmp_path, older_than=0)

    assert (folder / "file").exists()


def test_folders_that_are_not_claimed_stay(tmp_path: Path) -> None:
    """Another name, no lock, or a lock that is no file of its own."""
    other, bare, linked, piped = (tmp_path / name for name in ("other", "nightshift-a", "nightshift-b", "nightshift-c"))
    for folder in (other, bare, linked, piped):
        folder.mkdir()
        (folder / "file").touch()
    (other / leftovers.OWNER).touch()
    (linked / leftovers.OWNER).symlink_to(other / leftovers.OWNER)
    os.mkfifo(piped / leftovers.OWNER)
    (tmp_path / "nightshift-file").touch()

    remove_leftovers(tmp_path, older_than=0)

    assert [folder for folder in (other, bare, linked, piped) if not (folder / "file").exists()] == []


def test_no_link_is_followed(abandoned: Path, tmp_path: Path) -> None:
    """Neither one with the name of a private folder, nor one inside."""
    target, inside = tmp_path / "target", tmp_path / "inside"
    for folder in (target, inside):
        folder.mkdir()
        (folder / "file").touch()
    (target / leftovers.OWNER).touch()
    (tmp_path / "nightshift-link").symlink_to(target)
    (abandoned / "out").symlink_to(inside)

    remove_leftovers(tmp_path, older_than=0)

    assert not abandoned.exists()
    assert (target / "file").exists()
    assert (inside / "file").exists()


def test_folders_of_another_user_stay(abandoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root would be able to remove them."""
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    remove_leftovers(tmp_path, older_than=0)

    assert abandoned.exists()


def test_a_start_does_not_wait_for_a_long_removal(
    abandoned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be removed in time is found again by the next run."""
    monkeypatch.setattr(leftovers, "PATIENCE", 0.1)
    monkeypatch.setattr(leftovers, "remove_tree", lambda _: time.sleep(0.5))
    began = time.monotonic()

    remove_leftovers(tmp_path, older_than=0)

    assert time.monotonic() - began < 0.4
    time.sleep(0.7)
    assert (abandoned / "workspace").exists()
    monkeypatch.undo()
    remove_leftovers(tmp_path, older_than=0)
    assert not abandoned.exists()


def test_a_claim_is_given_up_once(tmp_path: Path) -> None:
    """A second time changes nothing, not even a descriptor that somebody else got meanwhile."""
    claim = Claim(tmp_path)
    claim.release()
    descriptor = os.open(tmp_path, os.O_RDONLY)

    claim.release(keep=True)

    os.fstat(descriptor)
    os.close(descriptor)
    assert (tmp_path / leftovers.OWNER).exists()
