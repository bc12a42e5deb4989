"""What a command may write, what stays read-only inside that, and what it must not see.

Both backends build on one ``Layout``, so that they keep the same promise. Invariants: every path
is absolute, canonical and exists; the deeper path decides. Reads the file system, changes
nothing, writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from runner.errors import ConfigError, SandboxError
from runner.permission import Mode
from runner.record import record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from runner.sandbox.base import SandboxPolicy

_KERNEL_FOLDERS = ("/dev", "/proc", "/sys")
_GITFILE_LIMIT = 4_096


@record
class Root:
    """A writable folder and what in it is not.

    Attributes:
        path: The folder.
        protected: Paths below it that stay readable and unchanged (the repository's control files).
        frozen: No entry may be added to or taken from the folder itself, since one of its own
            entries is a symbolic link that must stay what it is.
    """

    path: str
    protected: tuple[str, ...] = ()
    frozen: bool = False


@record
class Layout:
    """The file system as one command gets it.

    Attributes:
        workspace: The workspace, whatever the mode.
        roots: Writable folders; the private temporary folder is always among them.
        readable: Folders that must stay readable although what surrounds them is replaced.
        hidden: Paths that must look empty or absent, outermost first.
    """

    workspace: str
    roots: tuple[Root, ...]
    readable: tuple[str, ...]
    hidden: tuple[str, ...]

    def exceptions_in_workspace(self) -> bool:
        """Whether something in the workspace is not as writable as the rest of it."""
        protected = (path for root in self.roots for path in root.protected)
        return any(is_within(path, self.workspace) for path in (*protected, *self.hidden))

    def frozen_workspace(self) -> bool:
        """Whether the workspace's own folder takes no new entries, whatever the backend."""
        return any(root.frozen for root in self.roots if root.path == self.workspace)


def is_within(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or below it. Both canonical."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def depth(path: str) -> int:
    """Number of components; 0 for the root folder."""
    return 0 if path == "/" else path.count("/")


def between(path: str, folder: str) -> list[str]:
    """The folders strictly between ``folder`` and ``path`` below it, outermost first."""
    names = path[len(folder.rstrip("/")) + 1 :].split("/")[:-1]
    result = []
    current = folder.rstrip("/")
    for name in names:
        current += "/" + name
        result.append(current)
    return result


def require_workspace(path: str) -> None:
    """Refuse a workspace that cannot be confined.

    Raises:
        ConfigError: CONFIG_INVALID, not canonical, not a folder, ``/``, or a kernel's folder.
    """
    if os.path.realpath(path) != path:
        raise ConfigError(
            f"the workspace {path} is not a canonical path",
            hint=f"a symbolic link cannot be the workspace; use {os.path.realpath(path)}",
        )
    if not os.path.isdir(path):
        raise ConfigError(f"the workspace {path} is not a folder")
    if path == "/" or any(is_within(path, folder) for folder in _KERNEL_FOLDERS):
        raise ConfigError(f"{path} cannot be a workspace", hint="use a folder of its own for the work")


def _require_canonical(path: str) -> None:
    """A root that is no longer canonical was replaced by something inside the sandbox."""
    if os.path.realpath(path) != path or not os.path.isdir(path):
        raise SandboxError(
            f"the writable folder {path} is gone, or a symbolic link leads to it",
            hint="list the folder itself in sandbox.writable, and nothing that a command may replace",
        )


def _first_line(path: str, prefix: str) -> str | None:
    """The rest of a small control file's first line behind ``prefix``, None if it is no such file."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            return None
        text = os.fsdecode(os.read(descriptor, _GITFILE_LIMIT))
    finally:
        os.close(descriptor)
    line = text.split("\n", 1)[0]
    return line[len(prefix) :].strip() if line.startswith(prefix) else None


def _shared_folder(git_folder: str) -> Iterator[str]:
    """The git folder itself and the one it shares objects and hooks with (a worktree's main one)."""
    yield git_folder
    shared = _first_line(os.path.join(git_folder, "commondir"), "")
    if shared:
        yield os.path.realpath(os.path.join(git_folder, shared))


def git_paths(folder: str) -> tuple[tuple[str, ...], bool]:
    """What makes up the repository at ``folder``, and whether its ``.git`` is a symbolic link.

    The paths are canonical and exist; nothing when there is no ``.git``.
    """
    entry = os.path.join(folder, ".git")
    try:
        mode = os.lstat(entry).st_mode
    except OSError:
        return (), False
    target = os.path.realpath(entry)
    paths = [target]
    if os.path.isdir(target):
        paths = list(_shared_folder(target))
    else:
        named = _first_line(target, "gitdir:")
        if named:
            paths += _shared_folder(os.path.realpath(os.path.join(os.path.dirname(target), named)))
    return tuple(path for path in dict.fromkeys(paths) if os.path.lexists(path)), stat.S_ISLNK(mode)


def _existing(paths: Iterable[str]) -> tuple[str, ...]:
    """Canonical paths of those that exist, outermost first."""
    found = {os.path.realpath(path) for path in paths}
    return tuple(sorted((path for path in found if os.path.lexists(path)), key=lambda path: (depth(path), path)))


def resolve(policy: SandboxPolicy, cwd: str) -> Layout:
    """Work out the layout of one command from its policy, as the file system stands now.

    Args:
        policy: The command's policy.
        cwd: Its working directory, which must be there for it.

    Raises:
        ConfigError: CONFIG_INVALID, the workspace cannot be confined.
        SandboxError: SANDBOX_UNAVAILABLE, a writable folder is gone or was replaced.
    """
    require_workspace(policy.workspace)
    private = [policy.tmp]
    shared: list[str] = []
    readable = [policy.workspace, policy.home, *policy.readable, cwd]
    if policy.mode is not Mode.READ_ONLY:
        private.append(policy.home)
        shared = list(dict.fromkeys((policy.workspace, *policy.writable)))
    for path in (*private, *shared):
        _require_canonical(path)

    git: list[str] = []
    frozen: set[str] = set()
    if not policy.unprotected_git:
        for path in shared:
            parts, is_link = git_paths(path)
            git += parts
            if is_link:
                frozen.add(path)
    hidden = _existing(policy.hidden)
    for path in hidden:
        if path in shared or path == policy.workspace:
            raise ConfigError(f"{path} cannot be hidden: it is the workspace or a writable folder")
    roots = tuple(
        Root(
            path,
            protected=tuple(each for each in dict.fromkeys(git) if is_within(each, path)) if path in shared else (),
            frozen=path in frozen,
        )
        for path in dict.fromkeys((*private, *shared))
    )
    kept = dict.fromkeys(os.path.realpath(path) for path in readable)
    return Layout(
        policy.workspace,
        roots,
        readable=tuple(path for path in kept if not any(is_within(path, root.path) for root in roots)),
        hidden=hidden,
    )
