"""Gives a run its directory: the user's own, a copy of it, or a git worktree.

A copy holds tracked files and untracked ones that are not ignored, byte for byte, with a small
``.git`` of its own: HEAD, refs and index of the original, its objects borrowed, none of its
configuration, hooks or remotes. A worktree is made under a lock and marked; whoever finds a mark
whose owner is gone removes the worktree. Submodules stay empty folders in both.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pwd
import shutil
import stat
import time
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import ConfigError, StorageError
from runner.record import field, mutable_record, replace
from runner.sandbox.layout import steps_to
from runner.workspace.git import find_repository, git, output_text, refuse_credentials
from runner.workspace.leftovers import KEEP_SECONDS
from runner.workspace.removal import remove_tree
from runner.workspace.snapshot import (
    EMPTY_TREES,
    Base,
    Snapshot,
    apply_patch,
    object_format_of,
    private_config,
    quoted_path,
    rebased,
    take_snapshot,
    write_private_directory,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import Self

    from runner.messages import JsonObject
    from runner.workspace.git import Repository

ISOLATIONS = ("in-place", "copy", "worktree")

RECORD = "workspace.json"
"""File in the state directory by which ``take_up_workspace`` finds what a dead run worked on."""

MARKER = "nightshift.json"
"""File in a worktree's administrative folder; its owner holds a lock on it."""


@mutable_record
class Workspace:
    """A directory an agent may work in.

    Attributes:
        path: Canonical path of the agent's directory.
        source: Canonical path of the user's directory; the same when in place.
        isolation: ``in-place``, ``copy`` or ``worktree``.
        snapshot: What the directory held before the agent began.
        readable: Folders elsewhere that its git needs (objects, a linked worktree's repository).
            They must stay readable in the sandbox.
    """

    path: str
    source: str
    isolation: str
    snapshot: Snapshot
    readable: tuple[str, ...] = ()
    _remove: Callable[[], None] = field(default=lambda: None, repr=False)

    @property
    def base(self) -> Base:
        """Commit, tree and dirtiness the agent began with."""
        return self.snapshot.base

    @property
    def git_links(self) -> tuple[str, ...]:
        """The ``.git`` of every checked out submodule, at any depth: absolute paths that must stay as they are."""
        return tuple(_git_links(self.snapshot))

    def counterparts(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Absolute ``paths``, and where the agent has its own copy of what they lead over in the user's directory."""
        given = tuple(paths)
        if self.path == self.source:
            return given
        prefix = self.source.rstrip("/") + "/"
        copies = [self.path + "/" + path.removeprefix(prefix) for path in steps_to(given) if path.startswith(prefix)]
        return (*given, *copies)

    def as_json(self) -> JsonObject:
        """The whole record, for the session's state directory."""
        snapshot = self.snapshot.as_json()
        return {
            "path": self.path,
            "source": self.source,
            "isolation": self.isolation,
            "snapshot": snapshot,
            "readable": list(self.readable),
        }

    def close(self, *, keep: bool = False) -> None:
        """Remove a copy or worktree; may be called more than once.

        Args:
            keep: Leave the directory, for example when its patch could not be made.
        """
        remove, self._remove = self._remove, lambda: None
        if not keep:
            remove()

    def __enter__(self) -> Self:
        """Nothing more to prepare."""
        return self

    def __exit__(self, *_: object) -> None:
        """Remove what was made."""
        self.close()


def _git_links(snapshot: Snapshot) -> Iterator[str]:
    for inner in snapshot.nested:
        yield f"{inner.work_tree}/.git"
        yield from _git_links(inner)


def resolve_workspace(path: str) -> str:
    """The canonical path of a directory that may be a workspace.

    Raises:
        ConfigError: CONFIG_INVALID, it is missing, no directory, a symbolic link, ``/`` or a home directory.
    """
    given = Path(path)
    real = given.resolve()
    if given.is_symlink():
        raise ConfigError(f"the workspace {path} is a symbolic link", hint=f"name its target {real} instead")
    if not real.exists():
        raise ConfigError(f"the workspace {path} does not exist", hint="create it, or pass --workspace DIR")
    if not real.is_dir():
        raise ConfigError(f"the workspace {path} is not a directory", hint="pass --workspace DIR")
    if real == Path("/") or real in {Path(home).resolve() for home in _homes()}:
        what = "the root of the file system" if real == Path("/") else "a home directory"
        raise ConfigError(f"the workspace {path} is {what}", hint="work in a directory of its own")
    return str(real)


def _homes() -> Iterator[str]:
    if os.environ.get("HOME"):
        yield os.environ["HOME"]
    with contextlib.suppress(KeyError):  # an id without an entry, as in many containers, has no other home
        yield pwd.getpwuid(os.geteuid()).pw_dir


def prepare_workspace(
    path: str, *, state: Path, isolation: str = "in-place", base: str = "HEAD", dirty: str = "include"
) -> Workspace:
    """Make a workspace ready for an agent and record its base.

    Args:
        path: The user's directory.
        state: Private directory of the session, outside the workspace; made if it is missing.
        isolation: ``in-place``, ``copy`` or ``worktree``.
        base: Revision to start from. In place it must be what is checked out; elsewhere another
            revision starts clean, without the uncommitted changes.
        dirty: ``include`` takes uncommitted changes as part of the base, ``refuse`` is an error, and ``ignore``
            leaves them out of a copy or worktree.

    Raises:
        ConfigError: CONFIG_INVALID, the workspace cannot be used as asked.
        StorageError: STORAGE_FAILED, the state directory cannot be written.
    """
    if isolation not in ISOLATIONS:
        raise ConfigError(f"isolation {isolation} is not known", hint="one of " + ", ".join(ISOLATIONS))
    source = resolve_workspace(path)
    if state.resolve().is_relative_to(source):
        raise ConfigError(
            f"the folder for temporary files {state.parent} lies inside the workspace {source}, and a run needs a "
            "private folder there",
            hint="set TMPDIR to a folder outside the workspace, or work in a smaller one",
        )
    repository = find_repository(source)
    if repository is not None:
        refuse_credentials(repository)
    commit = _base_commit(repository, base, isolation)
    try:
        state.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"the state directory {state} cannot be made: {error.strerror}") from error
    workspace = _isolate(source, repository, commit, isolation, dirty, state)
    try:
        (state / RECORD).write_text(json.dumps(workspace.as_json()), encoding="utf-8")
    except OSError as error:
        workspace.close()
        raise StorageError(f"the state directory {state} cannot be written: {error.strerror}") from error
    return workspace


def _isolate(
    source: str, repository: Repository | None, commit: str | None, isolation: str, dirty: str, state: Path
) -> Workspace:
    if isolation == "in-place":
        snapshot = take_snapshot(source, repository, state=state, name="base")
        _refuse_dirty(snapshot, dirty, repository)
        return Workspace(source, source, isolation, snapshot, _needed(repository, source))
    if repository is None:
        if isolation == "worktree":
            raise ConfigError(f"{source} is no git repository, so it has no worktrees", hint="use isolation: copy")
        return _copy_directory(source, state)
    from_head = commit == repository.commit and dirty != "ignore"
    original = take_snapshot(source, repository, state=state, name="source", whole=True) if from_head else None
    if original is not None:
        _refuse_dirty(original, dirty, repository)
    if isolation == "worktree":
        return _add_worktree(source, repository, commit, original, state)
    return _copy_repository(source, repository, commit, original, state)


def _needed(repository: Repository | None, path: str) -> tuple[str, ...]:
    """Folders outside ``path`` that git needs to read the repository there."""
    if repository is None:
        return ()
    found = [repository.git_dir, repository.common_dir]
    with contextlib.suppress(OSError):  # most repositories borrow nothing
        text = Path(repository.common_dir, "objects/info/alternates").read_text(errors="surrogateescape")
        found += [str(Path(repository.common_dir, "objects", line)) for line in text.splitlines() if line]
    real = dict.fromkeys(Path(each).resolve() for each in found)
    return tuple(str(each) for each in real if each.is_dir() and not each.is_relative_to(path))


def load_workspace(state: Path) -> Workspace:
    """The workspace that a run recorded in its state directory; closing it removes nothing.

    Raises:
        StorageError: STORAGE_FAILED, there is no readable record.
    """
    try:
        value = json.loads((state / RECORD).read_text(encoding="utf-8"))
        snapshot = Snapshot.from_json(value.pop("snapshot"))
        return Workspace(snapshot=snapshot, **{**value, "readable": tuple(value["readable"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StorageError(f"{state / RECORD} is no record of a workspace: {error}") from error


def take_up_workspace(state: Path, wanted: str, isolation: str) -> Workspace | None:
    """The workspace that a dead run recorded in its state directory, to go on in.

    Args:
        state: The state directory.
        wanted: The user's directory that the new run is about.
        isolation: Its isolation.

    Returns:
        None when the record or the directory is gone.

    Raises:
        ConfigError: CONFIG_INVALID, the run had another directory or isolation.
    """
    try:
        found = load_workspace(state)
    except StorageError:
        return None
    if (found.source, found.isolation) != (resolve_workspace(wanted), isolation):
        raise ConfigError(
            f"the session has the workspace {found.source} ({found.isolation}), not {wanted} ({isolation})",
            hint="name that workspace, with the same isolation",
        )
    target = Path(found.path)
    if not target.is_dir() or not Path(found.snapshot.directory).is_dir():
        return None
    if isolation == "worktree":
        return replace(found, _remove=_hold_worktree(target))
    return replace(found, _remove=lambda: remove_tree(target)) if isolation == "copy" else found


def restore_workspace(path: str, *, state: Path, isolation: str, base: Base, patch: Path | None) -> Workspace:
    """A workspace as a run left it whose state directory is gone: its base, and its changes on top.

    In place the directory may be the base itself, or the base with the changes in it.

    Args:
        path: The user's directory.
        state: A fresh state directory.
        isolation: As for ``prepare_workspace``.
        base: What the run began with.
        patch: The changes; None if there are none.

    Raises:
        ConfigError: CONFIG_INVALID, the base cannot be had from this directory.
    """
    start = "HEAD" if isolation == "in-place" or base.commit is None else base.commit
    workspace = prepare_workspace(path, state=state, isolation=isolation, base=start)
    try:
        if workspace.base.tree != base.tree:
            workspace.snapshot = _earlier(workspace, base, patch)
        elif patch is not None:
            apply_patch(workspace.snapshot, patch)
    except BaseException:
        workspace.close()
        raise
    return workspace


def _earlier(workspace: Workspace, base: Base, patch: Path | None) -> Snapshot:
    found = rebased(workspace.snapshot, base, patch) if workspace.isolation == "in-place" else None
    if found is None:
        raise ConfigError(
            f"the workspace {workspace.source} is not what the session began with: its tree is "
            f"{workspace.base.tree}, the session's {base.tree}" + (f" on commit {base.commit}" if base.commit else ""),
            hint="check that commit out, without other changes; or start anew",
        )
    return found


def _base_commit(repository: Repository | None, base: str, isolation: str) -> str | None:
    """The commit ``base`` names; None for a workspace without commits."""
    if repository is None or base == "HEAD":
        if base != "HEAD":
            raise ConfigError(f"workspace.base is {base} and the workspace is no git repository", hint="leave it out")
        if isolation == "worktree" and repository is not None and repository.commit is None:
            raise ConfigError(
                "the repository has no commit yet, so it can have no worktree", hint="use isolation: copy"
            )
        return repository.commit if repository else None
    # Reads refs and objects and looks at no work tree; a missing object is not fetched (`base_environment`).
    found = git(
        ["rev-parse", "--quiet", "--verify", "--end-of-options", f"{base}^{{commit}}"],
        cwd="/",
        environment={"GIT_DIR": repository.git_dir},
    )
    lines = found.output.decode("ascii", "replace").split()
    if found.exit_code != 0 or not lines:
        raise ConfigError(
            f"workspace.base {base} is no commit of {repository.work_tree}",
            hint="fetch it first; actions/checkout needs `fetch-depth: 0` for other revisions",
        )
    # With --end-of-options older gits print the option as well.
    commit = lines[-1]
    if isolation == "in-place" and commit != repository.commit:
        raise ConfigError(
            f"workspace.base {base} is not what is checked out in {repository.work_tree}",
            hint="check it out, or use isolation: worktree or copy",
        )
    return commit


def _refuse_dirty(snapshot: Snapshot, dirty: str, repository: Repository | None) -> None:
    if dirty != "refuse" or repository is None or not snapshot.base.dirty:
        return
    # The snapshot's index already holds the changes; HEAD and it differ by exactly them. With `--cached`
    # git looks at no work tree, so neither filters nor submodules come into it.
    listed = git(
        ["diff-index", "--cached", "--name-only", "-z", repository.commit or EMPTY_TREES[object_format_of(repository)]],
        cwd=snapshot.work_tree,
        environment={"GIT_DIR": snapshot.directory, "GIT_INDEX_FILE": snapshot.index},
    )
    names = [repr(name)[1:-1] for name in os.fsdecode(listed.output).split("\0") if name]
    problems = names[:5] + ([f"and {len(names) - 5} more"] if len(names) > 5 else [])
    raise ConfigError(
        f"{snapshot.work_tree} has uncommitted changes and the task says dirty: refuse",
        problems=problems,
        hint="commit or stash them, or set workspace.dirty to include",
    )


# --- copy --------------------------------------------------------------------------------------


def _copy_directory(source: str, state: Path) -> Workspace:
    original = take_snapshot(source, None, state=state, name="source")
    target = state / "workspace"
    _copy_files(original, source, target)
    snapshot = take_snapshot(str(target), None, state=state, name="base")
    return Workspace(str(target), source, "copy", snapshot, (), lambda: remove_tree(target))


def _copy_repository(
    source: str, repository: Repository, commit: str | None, original: Snapshot | None, state: Path
) -> Workspace:
    target = state / "workspace"
    if original is not None:
        _copy_files(original, repository.work_tree, target)
    else:
        target.mkdir(mode=0o700)
    _write_small_git(repository, commit, target, detached=original is None)
    if original is None:
        _check_out(target, commit, {"GIT_DIR": f"{target}/.git"})
    path, snapshot = _isolated_base(target, repository, commit, state)
    return Workspace(path, source, "copy", snapshot, _needed(repository, path), lambda: remove_tree(target))


def _check_out(
    target: Path, commit: str | None, environment: dict[str, str], settings: dict[str, str] | None = None
) -> None:
    """Fill an empty directory with a commit's files.

    ``GIT_DIR`` must be one that we wrote: attributes out of the tree name filters, and without the
    configuration that says what these are none runs. Hooks are off, and submodules become empty folders.
    """
    environment = {**environment, "GIT_WORK_TREE": str(target)}
    arguments = ["read-tree", "--reset", "-u", str(commit)]
    done = git(arguments, cwd=str(target), environment=environment, settings=settings)
    if done.exit_code != 0:
        raise ConfigError(f"git cannot check out {commit}: {output_text(done)}")


def _isolated_base(target: Path, repository: Repository, commit: str | None, state: Path) -> tuple[str, Snapshot]:
    """The agent's directory in a copy or worktree, and its base."""
    path = target / repository.prefix
    if not path.is_dir():
        raise ConfigError(f"{repository.prefix} does not exist in {commit}", hint="choose another workspace.base")
    return str(path), take_snapshot(str(path), find_repository(str(path)), state=state, name="base")


def _copy_files(snapshot: Snapshot, source: str, target: Path) -> None:
    """Copy every file the snapshot's index lists; submodules become empty folders."""
    # Prints the private index, nothing else is read.
    listed = git(
        ["ls-files", "-z"], cwd="/", environment={"GIT_DIR": snapshot.directory, "GIT_INDEX_FILE": snapshot.index}
    )
    if listed.exit_code != 0:
        raise ConfigError(f"git cannot list the files of {source}: {output_text(listed)}")
    target.mkdir(mode=0o700)
    for name in os.fsdecode(listed.output).split("\0"):
        if name:
            _copy_entry(source, str(target), name)


def _copy_entry(source: str, target: str, name: str) -> None:
    """Copy one file or link byte for byte, with its mode and times; a missing one is left out."""
    origin, copy = Path(source, name), Path(target, name)
    try:
        mode = origin.lstat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return  # left out of a sparse checkout
    try:
        copy.parent.mkdir(parents=True, exist_ok=True)
        if stat.S_ISDIR(mode):
            copy.mkdir(exist_ok=True)
        else:
            shutil.copy2(origin, copy, follow_symlinks=False)
    except OSError as error:
        raise StorageError(f"{origin} cannot be copied to {copy}: {error.strerror}") from error


def _write_small_git(repository: Repository, commit: str | None, target: Path, *, detached: bool) -> None:
    """Give a copy a ``.git`` with the history of the original and nothing of its configuration."""
    directory = target / ".git"
    common = Path(repository.common_dir)
    for name in ("objects/info", "refs", "info"):
        (directory / name).mkdir(parents=True)
    (directory / "config").write_text(private_config(repository), encoding="utf-8")
    (directory / "objects/info/alternates").write_bytes(os.fsencode(quoted_path(f"{common}/objects") + "\n"))
    head = Path(repository.git_dir, "HEAD")
    if detached:
        (directory / "HEAD").write_text(f"{commit}\n", encoding="utf-8")
    else:
        shutil.copyfile(head, directory / "HEAD")
        index = Path(repository.git_dir, "index")
        if index.is_file() and not any(Path(repository.git_dir).glob("sharedindex.*")):
            shutil.copyfile(index, directory / "index")
    for name in ("packed-refs", "shallow", "info/exclude", "info/attributes"):
        if (common / name).is_file():
            shutil.copyfile(common / name, directory / name)
    if (common / "refs").is_dir():
        shutil.copytree(common / "refs", directory / "refs", dirs_exist_ok=True)


# --- worktree ----------------------------------------------------------------------------------


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[None]:
    """Hold the lock of a repository's worktree list; a lock on the directory leaves no file behind."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _populate(repository: Repository, commit: str | None, target: Path, admin: Path, state: Path) -> None:
    """Fill a new worktree by a git directory of ours: the repository's configuration is not read for it.

    A filter may be named in a file that only worktrees include, so no list of settings can switch it off.
    """
    private = state / "checkout.git"
    write_private_directory(private, repository)
    settings = {}
    sparse = admin / "info" / "sparse-checkout"
    if sparse.is_file():  # git takes over what the user's own checkout leaves out
        shutil.copyfile(sparse, private / "info" / "sparse-checkout")
        settings["core.sparseCheckout"] = "true"
    _check_out(target, commit, {"GIT_DIR": str(private), "GIT_INDEX_FILE": str(admin / "index")}, settings)
    remove_tree(private)


def _add_worktree(
    source: str, repository: Repository, commit: str | None, original: Snapshot | None, state: Path
) -> Workspace:
    target = state / "workspace"
    with _locked(repository.common_dir):
        _prune(Path(repository.common_dir))
        # Without a checkout it writes only its own few files: no content, so no filters, and hooks are off.
        done = git(
            ["worktree", "add", "--no-checkout", "--detach", "--quiet", str(target), str(commit)],
            cwd="/",
            environment={"GIT_DIR": repository.common_dir},
        )
        if done.exit_code != 0:
            raise ConfigError(f"git cannot make a worktree of {repository.work_tree}: {output_text(done)}")
        pointer = (target / ".git").read_text(encoding="utf-8", errors="surrogateescape")
        admin = Path(pointer.partition("gitdir:")[2].strip())
        marker = os.open(admin / MARKER, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.write(marker, json.dumps({"path": str(target)}).encode())

    remove = _remover(target, admin, marker, repository.common_dir)
    try:
        _populate(repository, commit, target, admin, state)
        if original is not None and original.base.dirty:
            _carry_changes(original, repository, target)
        path, snapshot = _isolated_base(target, repository, commit, state)
    except BaseException:
        remove()
        raise
    return Workspace(path, source, "worktree", snapshot, _needed(repository, path), remove)


def _remover(target: Path, admin: Path, marker: int, common: str) -> Callable[[], None]:
    def remove() -> None:
        with _locked(common):
            remove_tree(target)
            remove_tree(admin)
        os.close(marker)

    return remove


def _hold_worktree(target: Path) -> Callable[[], None]:
    """Take over the worktree of a dead run; returns what removes it.

    Raises:
        ConfigError: CONFIG_INVALID, another run has it, or it is none any more.
    """
    try:
        admin = Path((target / ".git").read_text(encoding="utf-8").partition("gitdir:")[2].strip())
        marker = os.open(admin / MARKER, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, ValueError) as error:
        raise ConfigError(f"the worktree {target} cannot be taken over: {error}", hint="start anew") from error
    return _remover(target, admin, marker, str(admin.parent.parent))


def _carry_changes(original: Snapshot, repository: Repository, target: Path) -> None:
    """Bring what is not committed into a fresh worktree of HEAD."""
    arguments = ["diff-index", "--cached", "--raw", "--no-renames", "-z", str(repository.commit)]
    environment = {"GIT_DIR": original.directory, "GIT_INDEX_FILE": original.index}
    # Compares a tree with the private index; with `--cached` the work tree is not looked at.
    listed = git(arguments, cwd=original.work_tree, environment=environment)
    if listed.exit_code != 0:
        raise ConfigError(f"git cannot list the changes of {original.work_tree}: {output_text(listed)}")
    fields = os.fsdecode(listed.output).split("\0")
    changes = list(zip(fields[0::2], fields[1::2], strict=False))
    for _, name in changes:
        _remove_entry(target / name)
    for what, name in changes:
        if not what.endswith("D"):
            _copy_entry(original.work_tree, str(target), name)


def _remove_entry(path: Path) -> None:
    """Remove a file or folder and the folders that are empty then."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # a file took the place of its folder
            path.unlink()
    with contextlib.suppress(OSError):  # a folder that is not empty stays
        os.removedirs(path.parent)


def _is_kept(noted: Path) -> bool:
    """Whether somebody may still want to go on with what a dead run left."""
    with contextlib.suppress(OSError):
        return time.time() - noted.lstat().st_mtime < KEEP_SECONDS
    return False


def prune_worktrees(workspace: str) -> list[str]:
    """Remove worktrees of a repository whose run died; returns their paths.

    Raises:
        ConfigError: CONFIG_INVALID, a broken repository.
    """
    repository = find_repository(str(Path(workspace).resolve()))
    if repository is None:
        return []
    with _locked(repository.common_dir):
        return _prune(Path(repository.common_dir))


def _prune(common: Path) -> list[str]:
    removed = []
    for marker in sorted((common / "worktrees").glob(f"*/{MARKER}")):
        descriptor = os.open(marker, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            path = _marked_path(marker)
            if path is not None and _is_kept(path.parent / RECORD):
                continue
            if path is not None:
                remove_tree(path)
                removed.append(str(path))
            remove_tree(marker.parent)
        finally:
            os.close(descriptor)
    return removed


def _marked_path(marker: Path) -> Path | None:
    """The worktree a mark names, only if that worktree names the mark's folder in turn."""
    try:
        path = Path(json.loads(marker.read_text(encoding="utf-8"))["path"])
        pointer = (path / ".git").read_text(encoding="utf-8", errors="surrogateescape")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return path if pointer.partition("gitdir:")[2].strip() == str(marker.parent) else None
