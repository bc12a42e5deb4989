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
    from collections.abc import Iterable, Iterator, Sequence

    from runner.sandbox.base import SandboxPolicy

_KERNEL_FOLDERS = ("/dev", "/proc", "/sys")
_GITFILE_LIMIT = 4_096
_MOST_LINKS = 40  # as many as the kernel follows


@record
class Root:
    """A writable folder and what in it is not.

    Attributes:
        path: The folder.
        protected: Paths below it that stay readable and unchanged (the repository's control files, the
            files that define the run). None lies in another.
        links: Symbolic links below it that must stay what they are.
    """

    path: str
    protected: tuple[str, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def frozen(self) -> frozenset[str]:
        """Folders that take and lose no entry of their own where a link cannot be protected by itself."""
        return frozenset(os.path.dirname(link) for link in self.links)


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

    def writable(self, path: str) -> bool:
        """Whether ``path`` can be written as far as folders decide: the deepest one around it does."""
        best, result = -1, False
        for root in self.roots:
            for folders, answer in (((root.path,), True), (root.protected, False)):
                for folder in folders:
                    if is_within(path, folder) and depth(folder) >= best:
                        best, result = depth(folder), answer
        return result and not any(is_within(path, folder) and depth(folder) >= best for folder in self.hidden)

    def folders_above_exceptions(self) -> set[str]:
        """Writable folders with something below them that is not as writable as the rest, roots included."""
        found: set[str] = set()
        for root in self.roots:
            hidden = (path for path in self.hidden if is_within(path, root.path) and path != root.path)
            for path in (*root.protected, *root.links, *hidden):
                found.update(folder for folder in (root.path, *between(path, root.path)) if self.writable(folder))
        return found

    def _fixed(self) -> set[str]:
        """Paths inside writable folders that a command with this layout can neither move nor replace."""
        found: set[str] = set()
        for root in self.roots:
            inside = [path for path in (*self.hidden, *(each.path for each in self.roots)) if is_below(path, root.path)]
            for path in (*root.protected, *root.links, *inside):
                found.update((path, *between(path, root.path)))
        return found

    def endangers(self, other: Layout) -> bool:
        """Whether a running command with this layout could move what ``other`` mounts, or what leads there.

        It could where something became protected or hidden only after that command had started.
        """
        fixed = self._fixed()
        points = [*self._others(other), *other.hidden, *other.readable]
        return any(
            step not in fixed
            for root in self.roots
            for path in points
            if is_below(path, root.path)
            for step in (path, *between(path, root.path))
        )

    @staticmethod
    def _others(other: Layout) -> Iterator[str]:
        for root in other.roots:
            yield from (root.path, *root.protected, *root.links)

    def frozen_folders(self) -> set[str]:
        """Folders that take no new entries whatever the backend, since a link in them must stay."""
        return {folder for root in self.roots for folder in root.frozen}

    def closed_to_new_files(self, folders: set[str]) -> tuple[str, ...]:
        """The names in ``not_enforced`` that say that ``folders`` take no new entries."""
        names = ["new_top_level_files"] if self.workspace in folders else []
        return (*names, "new_files_beside_protected") if folders - {self.workspace} else tuple(names)


def is_within(path: str, folder: str) -> bool:
    """Whether ``path`` is ``folder`` or below it. Both canonical."""
    return path == folder or path.startswith(folder.rstrip("/") + "/")


def is_below(path: str, folder: str) -> bool:
    """Whether ``path`` is below ``folder`` and not that itself. Both canonical."""
    return path != folder and is_within(path, folder)


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


def trail(path: str) -> tuple[list[str], str]:
    """Where an absolute path leads: the symbolic links on the way, and the canonical path at its end.

    The folder of each link is canonical. What does not exist is taken as it is written.
    """
    links: list[str] = []
    current = "/"
    left = path.split("/")[::-1]
    while left:
        name = left.pop()
        if name in ("", "."):
            continue
        if name == "..":
            current = os.path.dirname(current)
            continue
        step = os.path.join(current, name)
        try:
            target = os.readlink(step)
        except OSError:
            current = step
            continue
        if len(links) == _MOST_LINKS:
            break
        links.append(step)
        current = "/" if target.startswith("/") else current
        left += target.split("/")[::-1]
    return links, current


def steps_to(paths: Iterable[str]) -> tuple[str, ...]:
    """All that must stay for ``paths`` to mean what they mean: the links on the way and what they lead to."""
    found: list[str] = []
    for path in paths:
        links, end = trail(path)
        found += [*links, end]
    return tuple(dict.fromkeys(found))


def _outermost(paths: Iterable[str], root: str, hidden: Iterable[str]) -> tuple[str, ...]:
    """The existing ones of ``paths`` below ``root`` that lie in no other and in nothing hidden there."""
    below = [path for path in dict.fromkeys(paths) if is_within(path, root) and os.path.lexists(path)]
    covers = [*(path for path in hidden if is_within(path, root)), *below]
    return tuple(path for path in below if not any(is_within(path, cover) and path != cover for cover in covers))


def _root(path: str, protected: Iterable[str], links: Iterable[str], hidden: Sequence[str]) -> Root:
    """A shared root with what in it stays."""
    kept = _outermost(protected, path, hidden)
    # A link inside something protected or hidden is safe with it.
    covers = [*kept, *(each for each in hidden if is_within(each, path))]
    loose = (link for link in dict.fromkeys(links) if is_within(link, path) and os.path.islink(link))
    return Root(path, kept, tuple(link for link in loose if not any(is_within(link, cover) for cover in covers)))


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

    protected: list[str] = []
    links: list[str] = []
    for path in shared if not policy.unprotected_git else ():
        parts, is_link = git_paths(path)
        protected += parts
        if is_link:
            links.append(os.path.join(path, ".git"))
    for path in policy.protected if shared else ():
        met, end = trail(path)
        links += met
        protected.append(end)
    hidden = _existing(policy.hidden)
    for path in hidden:
        if path in shared or path == policy.workspace:
            raise ConfigError(f"{path} cannot be hidden: it is the workspace or a writable folder")
    roots = tuple(
        _root(path, protected, links, hidden) if path in shared else Root(path)
        for path in dict.fromkeys((*private, *shared))
    )
    kept = dict.fromkeys(os.path.realpath(path) for path in readable)
    return Layout(
        policy.workspace,
        roots,
        readable=tuple(path for path in kept if not any(is_within(path, root.path) for root in roots)),
        hidden=hidden,
    )
