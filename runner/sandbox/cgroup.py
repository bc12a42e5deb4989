"""A control group for each command, where this process may make one: limits that hold for all its processes together.

Works with cgroup v2 where the runner owns the group it runs in: a unit with ``Delegate=yes``, a container with its own
hierarchy mounted writable, or a machine whose root group holds the runner. Elsewhere there is none, and nothing is
changed. The kernel wants processes in the leaves only, so the runner moves itself, and the shells that wait for it,
into a leaf first. Invariants: never a group outside the runner's own, whose limits stay in force; a group goes with
its command, and what a killed runner left goes with the next run. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import time
from functools import cache
from typing import TYPE_CHECKING

from runner.errors import SandboxError
from runner.record import record
from runner.sandbox.supervisor import parent_and_session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.sandbox.base import SandboxLimits

_CONTROLLERS = ("memory", "pids")
_LEAF = "nightshift-runner"
_COMMAND = "nightshift-command-"
_OPTIONAL = ("memory.swap.max",)  # a kernel without swap has none
_REMOVE_SECONDS = 2.0
_numbers = itertools.count()


@record
class Place:
    """Where a process is in the hierarchy.

    Attributes:
        folder: The folder of its group.
        top: Whether this is the top of what the process can see: of the machine, or of its own namespace.
    """

    folder: str
    top: bool


def find_place(mountinfo: str, cgroup: str) -> Place | None:
    """The place of a process, from the text of its ``mountinfo`` and ``cgroup``; None without cgroup v2."""
    path = next((line[3:] for line in cgroup.splitlines() if line.startswith("0::/")), None)
    if path is None or path.startswith("/.."):  # outside of what its namespace shows
        return None
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        root, point = (_unescaped(each) for each in before.split()[3:5])
        if after.split()[0] == "cgroup2" and (path + "/").startswith(root.rstrip("/") + "/"):
            below = path[len(root.rstrip("/")) :].strip("/")
            return Place(os.path.join(point, below) if below else point, top=path == "/")
    return None


def _unescaped(path: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _words(*path: str) -> list[str]:
    with open(os.path.join(*path), encoding="ascii") as file:
        return file.read().split()


def _write(text: str, *path: str) -> None:
    # Not created: a file of that name is there, or the kernel has no such thing.
    descriptor = os.open(os.path.join(*path), os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode("ascii"))
    finally:
        os.close(descriptor)


def _is_delegated(place: Place) -> bool:
    """Whether the group is this process's to divide."""
    if place.top:
        return True
    for name in ("user.delegate", "trusted.delegate"):  # set by systemd
        with contextlib.suppress(OSError):
            if os.getxattr(place.folder, name) == b"1":
                return True
    return False


def _own_family() -> set[str]:
    """This process and those above it."""
    found: set[str] = set()
    pid = os.getpid()
    while pid > 0 and str(pid) not in found:
        found.add(str(pid))
        pid = (parent_and_session(pid) or (0, 0))[0]
    return found


class Group:
    """The group of one command."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self.members = os.path.join(folder, "cgroup.procs")
        """The file into which a process writes 0 to join."""

    def remove(self) -> None:
        """Kill what is left in it and remove it. A group that cannot be removed goes with the next run."""
        with contextlib.suppress(OSError):
            _write("1", self._folder, "cgroup.kill")
        deadline = time.monotonic() + _REMOVE_SECONDS
        while True:
            try:
                os.rmdir(self._folder)
            except FileNotFoundError:
                return
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.001)
            else:
                return


class Groups:
    """Makes groups for commands in a folder that this process may divide."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        for name in os.listdir(self._base):
            owner = name.removeprefix(_COMMAND).partition("-")[0]
            if name.startswith(_COMMAND) and not os.path.exists(f"/proc/{owner}"):
                with contextlib.suppress(OSError):
                    os.rmdir(os.path.join(self._base, name))

    def make(self, settings: Mapping[str, str]) -> Group:
        """Make a group; ``settings`` are files of the kernel and what is written into them.

        Raises:
            OSError: The kernel refused.
        """
        folder = os.path.join(self._base, f"{_COMMAND}{os.getpid()}-{next(_numbers)}")
        os.mkdir(folder)
        group = Group(folder)
        try:
            for name, value in settings.items():
                with contextlib.suppress(*([FileNotFoundError] if name in _OPTIONAL else [])):
                    _write(value, folder, name)
        except OSError:
            group.remove()
            raise
        return group


def settings_of(limits: SandboxLimits, *, own_processes: int) -> dict[str, str]:
    """The settings of a command's group. ``own_processes`` are those of the wrapper that count with the command's."""
    return {
        "memory.max": str(limits.memory),
        "memory.swap.max": "0",
        "memory.oom.group": "0",  # the largest process goes, not the wrapper with it
        "pids.max": str(limits.processes + own_processes),
    }


def divide(place: Place) -> Groups | None:
    """Prepare a place for groups of commands; None where this process may not, and then nothing was changed.

    A runner in a leaf of its own has come there by an earlier run in the same place.
    """
    above, name = os.path.split(place.folder)
    base = above if name == _LEAF else place.folder
    try:
        if base == place.folder and not _is_delegated(place):
            return None
        if not set(_CONTROLLERS) <= set(_words(base, "cgroup.controllers")):
            return None
        if not all(os.access(os.path.join(base, each), os.W_OK) for each in ("", "cgroup.procs")):
            return None
        missing = [each for each in _CONTROLLERS if each not in _words(base, "cgroup.subtree_control")]
        if missing and not _enable(base, missing):
            return None
        return Groups(base)
    except OSError:
        return None


def _enable(base: str, controllers: list[str]) -> bool:
    """Let groups in ``base`` have these controllers; whether they have."""
    if not os.access(os.path.join(base, "cgroup.subtree_control"), os.W_OK):
        return False
    if os.path.exists(os.path.join(base, "cgroup.type")):  # only the machine's root may hold processes besides
        members = _words(base, "cgroup.procs")
        if not set(members) <= _own_family():
            return False  # not only ours: who put the others there may not want them moved
        leaf = os.path.join(base, _LEAF)
        os.makedirs(leaf, exist_ok=True)
        for member in members:
            _write(member, leaf, "cgroup.procs")
    _write(" ".join(f"+{each}" for each in controllers), base, "cgroup.subtree_control")
    return True


@cache
def command_groups() -> Groups | None:
    """Groups for the commands of this process, None where it may make none."""
    try:
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            mountinfo = file.read()
        with open("/proc/self/cgroup", encoding="utf-8", errors="surrogateescape") as file:
            place = find_place(mountinfo, file.read())
    except OSError:
        return None
    return None if place is None else divide(place)


def new_group(limits: SandboxLimits, *, own_processes: int = 0) -> Group | None:
    """A group for one command, None where there can be none; arguments as for ``settings_of``.

    Raises:
        SandboxError: SANDBOX_UNAVAILABLE, the kernel refused although it had let this process divide its group.
    """
    groups = command_groups()
    if groups is None:
        return None
    try:
        return groups.make(settings_of(limits, own_processes=own_processes))
    except OSError as error:
        raise SandboxError(
            f"no control group can be made for a command: {error}",
            hint="free memory or groups, or run nightshift where its control group cannot be written",
        ) from error
