"""What an agent leaves behind goes away with the run, however it was left."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.workspace.removal import remove_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that an ordinary user can enter."""
    folder = Path(tempfile.mkdtemp(prefix="nightshift-removal-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def ordinary_user() -> Iterator[None]:
    """Root may do anything, so it is somebody else for a while."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_folders_without_permission_go_away(place: Path) -> None:
    """For an ordinary user, who cannot even list them; a link's target stays."""
    target, outside = place / "target", place / "outside"
    outside.mkdir()
    (outside / "file").write_text("kept")
    with ordinary_user():
        (target / "closed" / "inner" / "deep").mkdir(parents=True)
        (target / "closed" / "inner" / "deep" / "file").touch()
        (target / "full" / "sub" / "one").mkdir(parents=True)
        (target / "full" / "link").symlink_to(outside)
        (target / "full" / "sub" / "link").symlink_to(outside / "file")
        os.mkfifo(target / "full" / "pipe")
        modes = {"closed/inner/deep": 0, "closed/inner": 0o100, "closed": 0, "full/sub/one": 0o500, "full/sub": 0o400}
        for name, mode in {**modes, ".": 0}.items():
            (target / name).chmod(mode)
        with pytest.raises(PermissionError):
            list(target.iterdir())
        remove_tree(target)

    assert not target.exists()
    assert (outside / "file").read_text() == "kept"
    assert outside.stat().st_mode & 0o777 == 0o755


def test_a_very_deep_tree_goes_away(place: Path) -> None:
    """Deeper than any path can be long and any program recurses."""
    top = place / "deep"
    top.mkdir()
    folder = os.open(top, os.O_RDONLY)
    for _ in range(1_200):
        os.mkdir("d" * 20, dir_fd=folder)
        following = os.open("d" * 20, os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = following
    os.close(folder)
    remove_tree(top)

    assert not top.exists()


def test_a_link_in_place_of_the_directory_is_not_followed(place: Path) -> None:
    """Nor is a missing one a failure."""
    (place / "kept").mkdir()
    (place / "kept" / "file").write_text("kept")
    (place / "link").symlink_to(place / "kept")
    remove_tree(place / "link")
    remove_tree(place / "missing")

    assert (place / "kept" / "file").read_text() == "kept"
