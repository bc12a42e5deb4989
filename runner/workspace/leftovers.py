"""Private folders of runs that were killed: found by their lock, and removed by a later run.

A run holds a lock on a file in its folder for as long as it lives; the kernel takes the lock away with the
process. Invariants: only folders with such a file go, of the same user, and none whose lock is held or that
is younger than asked for; no link is followed; a start waits for the removal ``PATIENCE`` seconds at most.
Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from runner.workspace.removal import remove_tree

if TYPE_CHECKING:
    from collections.abc import Iterator

PREFIX = "nightshift-"
"""How the names of private folders begin."""

OWNER = "owner.lock"
"""File in a private folder that its run holds a lock on. Without it nobody removes the folder."""

KEEP_SECONDS = 7 * 24 * 3600.0
"""How long what a killed run left is kept for whoever goes on with it."""

PATIENCE = 2.0
"""Seconds a start spends on what others left."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class Claim:
    """A private folder that is in use. It stays claimed until ``release``, or until the process ends.

    Args:
        folder: The folder, new or taken over from a run that is gone.

    Raises:
        OSError: The lock cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / OWNER
        fresh = folder / f"{OWNER}.new"
        self._descriptor = os.open(fresh, _FILE | os.O_CREAT, 0o600)
        try:
            # Under its name only with the lock on it, or another run could find it free.
            fcntl.flock(self._descriptor, fcntl.LOCK_EX)
            fresh.replace(self._path)
        except OSError:
            os.close(self._descriptor)
            raise

    def release(self, *, keep: bool = False) -> None:
        """Give the folder up; may be called more than once.

        Args:
            keep: Let it lie, whoever comes.
        """
        if self._descriptor < 0:
            return
        if keep:
            with contextlib.suppress(OSError):  # the folder may be gone, which keeps nothing
                self._path.unlink()
        os.close(self._descriptor)
        self._descriptor = -1


def remove_leftovers(folder: Path, *, older_than: float) -> None:
    """Remove the private folders in ``folder`` whose owner is gone.

    What takes longer than ``PATIENCE`` goes on beside the caller, and ends with the process at the latest.

    Args:
        folder: The folder for temporary files.
        older_than: Seconds since the claim. What a killed run left is of use to whoever goes on with it.
    """
    deadline = time.monotonic() + PATIENCE
    before = time.time() - older_than
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:  # a folder that others own may be unreadable
        for entry in entries:
            if entry.name.startswith(PREFIX) and (lock := _take_abandoned(entry.path, before)) is not None:
                found.append((Path(entry.path), lock))
            if time.monotonic() > deadline:
                break
    if found:
        thread = threading.Thread(target=_remove_all, args=[found], name="leftovers", daemon=True)
        thread.start()
        thread.join(max(0.0, deadline - time.monotonic()))


def _take_abandoned(path: str, before: float) -> int | None:
    """The lock of a folder that was left behind, now ours; None if the folder is none, too young, or in use."""
    with contextlib.suppress(OSError), _opened(path) as folder:
        lock = os.open(OWNER, _FILE, dir_fd=folder)
        try:
            status = os.fstat(lock)
            is_own = status.st_uid == os.fstat(folder).st_uid == os.geteuid()
            if is_own and stat.S_ISREG(status.st_mode) and status.st_mtime <= before:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return lock
        except BlockingIOError:
            pass  # its owner lives
        os.close(lock)
    return None


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    descriptor = os.open(path, _FOLDER)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _remove_all(found: list[tuple[Path, int]]) -> None:
    for path, lock in found:
        with contextlib.suppress(OSError):
            for entry in path.iterdir():
                if entry.name == OWNER:
                    continue
                if entry.is_dir() and not entry.is_symlink():
                    remove_tree(entry)
                else:
                    entry.unlink()
            # The lock file last: a folder whose removal was cut off is found again.
            if [entry.name for entry in path.iterdir()] == [OWNER]:
                (path / OWNER).unlink()
                path.rmdir()
        os.close(lock)
