"""Where the path of a redirection leads, and whether that is the same for every process.

bash opens ``/proc/self/cwd/x``, ``/dev/fd/3`` or ``/dev/tcp/HOST/PORT`` in its own place, so nobody else can say
which file that is. Links are followed one component at a time, since only so one that leads through such a place
is seen. Reads links when it is given a reader, else looks at names only. Writes no events.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

OWN_PLACE = "a redirection to /proc or /dev depends on the process that opens it"
"""Why a text with such a redirection is not analysed."""

_DEVICES = frozenset({"/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"})
_SHARED = "/dev/shm"  # noqa: S108  # compared, never opened
_MOST_LINKS = 40
_GONE = frozenset({errno.EINVAL, errno.ENOENT, errno.ENOTDIR})
"""Not a link, or not there: the name stays as it is."""


def is_own(path: str) -> bool:
    """Whether an absolute path, ``..`` and links resolved, means something else in each process.

    The devices that are the same everywhere do not, nor do the files of ``/dev/shm``, a folder like any other.
    """
    if path == "/proc" or path.startswith("/proc/"):
        return True
    shared = path == _SHARED or path.startswith(f"{_SHARED}/")
    return path.startswith("/dev/") and path not in _DEVICES and not shared


def follow(path: str, readlink: Callable[[str], str] | None = None) -> str:
    """Where an absolute path leads.

    Args:
        path: The path; ``..`` is taken where it stands, behind what a link before it leads to.
        readlink: Gives the target of a link, or raises like ``os.readlink``. Without it there are no links.

    Returns:
        The path without links, ``.`` and ``..``. On the way into a place for which ``is_own`` holds: that place,
        with what would follow if that is plain.

    Raises:
        OSError: A component cannot be looked at, or there are too many links.
        ValueError: The path can name no file.
    """
    left = path.split("/")[::-1]
    at = ""
    links = 0
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            at = at.rpartition("/")[0]
            continue
        at = f"{at}/{name}"
        if is_own(at):
            rest = [each for each in reversed(left) if each not in ("", ".")]
            return at if ".." in rest else "/".join([at, *rest])
        target = _target(at, readlink) if readlink is not None else None
        if target is None:
            continue
        links += 1
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, "too many links", path)
        at = "" if target.startswith("/") else at.rpartition("/")[0]
        left += target.split("/")[::-1]
    return at or "/"


def _target(path: str, readlink: Callable[[str], str]) -> str | None:
    try:
        return readlink(path)
    except OSError as error:
        if error.errno in _GONE:
            return None
        raise
