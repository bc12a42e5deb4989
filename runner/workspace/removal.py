"""Removes a directory that an agent wrote, whatever the agent left in it.

Invariants: no symbolic link is followed; nothing outside the directory is touched; depth and modes do not
matter, so neither memory, descriptors nor recursion grow with the tree. No process of the agent runs
any more. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove_tree(path: Path) -> None:
    """Remove a directory. Folders without permission are opened first; what cannot be removed is left behind."""
    try:
        shutil.rmtree(path)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        _remove_thoroughly(path)


def _remove_thoroughly(path: Path) -> None:
    """The same for what an ordinary removal fails at; slower, since it moves folders."""
    with contextlib.suppress(OSError):
        top = _open(str(path), None)
        try:
            _empty(top)
        finally:
            os.close(top)
        path.rmdir()


def _open(name: str, parent: int | None) -> int:
    """Open a folder that belongs to us even if its mode forbids that. A link is refused."""
    try:
        return os.open(name, _FOLDER, dir_fd=parent)
    except PermissionError:
        os.chmod(name, 0o700, dir_fd=parent)  # a link would not have been refused for its mode
        return os.open(name, _FOLDER, dir_fd=parent)


def _empty(top: int) -> None:
    """Remove what is in a folder. What lies deeper is moved up first, so every step looks at two levels only."""
    waiting = _take_out(top, top)
    while waiting:
        name = waiting.pop()
        with contextlib.suppress(OSError):
            folder = _open(name, top)
            try:
                waiting += _take_out(folder, top)
            finally:
                os.close(folder)
            os.rmdir(name, dir_fd=top)


def _take_out(folder: int, top: int) -> list[str]:
    """Remove the files of ``folder`` and move its folders into ``top``; returns their names there."""
    with contextlib.suppress(OSError):
        os.fchmod(folder, 0o700)  # a folder may be readable and yet not let go of what is in it
    with os.scandir(folder) as found:
        entries = list(found)
    moved = []
    for entry in entries:
        with contextlib.suppress(OSError):
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.name, dir_fd=folder)
            elif folder == top:
                moved.append(entry.name)
            else:
                name = os.urandom(12).hex()
                _move(entry.name, folder, name, top)
                moved.append(name)
    return moved


def _move(name: str, folder: int, new: str, top: int) -> None:
    try:
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
    except PermissionError:
        # A folder that changes its place is written to: its ``..`` leads elsewhere.
        os.chmod(name, 0o700, dir_fd=folder)
        os.rename(name, new, src_dir_fd=folder, dst_dir_fd=top)
