"""The private repository that holds what a workspace was before the agent began.

It lies below the session's state directory and borrows the objects of the user's repository by
alternates, so one small folder serves workspaces with and without git. Its configuration is ours:
no filter, textconv or hook of the user's repository can run. The copy of the user's index keeps
the file stamps, so an unchanged tree is not read again; its private marks (assume-unchanged) are
taken off, since they would hide changes.

Invariant: git never looks into a submodule. ``git add`` would start a ``git status`` in each, with
that repository's configuration, and so the programs it names. In every index here the submodules'
entries are marked assume-unchanged; what became of them is found out by reading their files.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import ConfigError, ErrorCode, RunnerError, StorageError
from runner.record import as_dict, record, replace
from runner.workspace.git import base_environment, git, git_path, head_commit, output_text, read_submodule

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.messages import JsonObject
    from runner.sandbox.base import ProcessResult
    from runner.workspace.git import Repository, RunGit

EMPTY_TREES = {
    "sha1": "4b825dc642cb6eb9a060e54bf8d69288fbee4904",
    "sha256": "6ef19b41225c5369f1c104d45d8d85efa9b057b53b14b4b9b939dd74decc5321",
}
"""The tree without entries, by hash algorithm; git knows it without an object."""

_CARRIED = ("core.filemode", "core.symlinks", "core.ignorecase", "core.precomposeunicode", "core.autocrlf", "core.eol")
"""Settings of the user's repository that decide what the content of a file is."""

_GITLINK, _FOLDER = 0o160000, 0o040000
_ASSUME_VALID, _EXTENDED, _SKIP_WORKTREE = 0x8000, 0x4000, 0x4000


@record
class Base:
    """What the agent began with.

    Attributes:
        commit: The commit below it, None without one.
        tree: Tree of the whole content, uncommitted changes included.
        dirty: Whether ``tree`` is not the commit's tree.
    """

    commit: str | None
    tree: str
    dirty: bool

    def as_json(self) -> JsonObject:
        """``base`` of ``run/start`` and ``result.json``."""
        return {"commit": self.commit, "tree": self.tree, "dirty": self.dirty}


@record
class Snapshot:
    """A recorded base, ready for a patch.

    Attributes:
        directory: The private git directory.
        scratch: Sibling directory that later git processes may write; nothing else they may.
        work_tree: Top of the tree that is recorded.
        prefix: Only this directory of it is, empty for all.
        base: What was recorded.
        sparse: The work tree is a sparse checkout.
        nested: Snapshots of the checked out submodules, which a patch cannot carry.
        gitlinks: Path and commit of each submodule, checked out or not.
    """

    directory: str
    scratch: str
    work_tree: str
    prefix: str
    base: Base
    sparse: bool = False
    nested: tuple[Snapshot, ...] = ()
    gitlinks: tuple[tuple[str, str], ...] = ()

    def environment(self, *, index: str, objects: str | None = None) -> dict[str, str]:
        """Whole environment of a git process on this snapshot.

        Args:
            index: Index file to use.
            objects: Object directory for what is new, None for the snapshot's own.
        """
        environment = base_environment(_sparse_settings(self.sparse))
        environment |= {"GIT_DIR": self.directory, "GIT_WORK_TREE": self.work_tree, "GIT_INDEX_FILE": index}
        if objects is not None:
            environment["GIT_OBJECT_DIRECTORY"] = objects
            environment["GIT_ALTERNATE_OBJECT_DIRECTORIES"] = quoted_path(f"{self.directory}/objects")
        return environment

    @property
    def index(self) -> str:
        """The index file of the base."""
        return f"{self.directory}/index"

    def as_json(self) -> JsonObject:
        """The whole record, for the session's state directory."""
        return {**as_dict(self), "nested": [inner.as_json() for inner in self.nested]}

    @classmethod
    def from_json(cls, value: JsonObject) -> Snapshot:
        """Inverse of ``as_json``."""
        nested = tuple(cls.from_json(inner) for inner in value["nested"])
        gitlinks = tuple((path, commit) for path, commit in value["gitlinks"])
        return cls(**{**value, "base": Base(**value["base"]), "nested": nested, "gitlinks": gitlinks})


def quoted_path(path: str) -> str:
    """A path for a list of alternates: in quotes, with what would end it escaped."""
    escaped = path.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'


def _sparse_settings(sparse: bool) -> dict[str, str]:
    return {"core.sparseCheckout": "true" if sparse else "false"}


# --- the index of the user's repository --------------------------------------------------------


@record
class IndexCopy:
    """An index file with the private marks off, and what it holds.

    Attributes:
        data: The file, with submodules marked assume-unchanged and other entries not.
        gitlinks: Path and commit of each submodule.
        sparse: Entries are left out of the work tree.
        folded: Some entries are folders that stand for all in them (a sparse index).
    """

    data: bytes
    gitlinks: tuple[tuple[bytes, str], ...]
    sparse: bool
    folded: bool


def read_index(data: bytes, *, hash_name: str = "sha1", kept: Sequence[str] = ()) -> IndexCopy | None:
    """Read an index file (versions 2 to 4); clear its assume-unchanged marks and set those of submodules.

    The format is git's ``index-format``: a header of signature, version and count, then the
    entries sorted by path, then extensions and a checksum.

    Args:
        data: The file.
        hash_name: Hash algorithm of the repository.
        kept: Files, and folders with all in them, that are marked as well.

    Returns:
        None when the file is of a kind that cannot be copied alone (a split index) or unknown.
    """
    hash_size = hashlib.new(hash_name).digest_size
    if len(data) < 12 + hash_size or data[:4] != b"DIRC":
        return None
    version, count = struct.unpack_from(">II", data, 4)
    if version not in (2, 3, 4):
        return None
    changed = bytearray(data)
    marked_names = {os.fsencode(path) for path in kept}
    marked_folders = tuple(name + b"/" for name in marked_names)
    gitlinks: dict[bytes, str] = {}
    sparse = folded = marked = False
    position, path = 12, b""
    flags_at = 40 + hash_size
    try:
        for _ in range(count):
            start = position
            (flags,) = struct.unpack_from(">H", data, start + flags_at)
            position = start + flags_at + 2
            if flags & _EXTENDED:
                (more,) = struct.unpack_from(">H", data, position)
                sparse = sparse or bool(more & _SKIP_WORKTREE)
                position += 2
            if version == 4:
                strip, position = _offset_varint(data, position)
                end = data.index(b"\0", position)
                path = path[: len(path) - strip] + data[position:end]
                position = end + 1
            else:
                end = data.index(b"\0", position)
                path = data[position:end]
                position = start + ((end - start + 8) & ~7)
            (mode,) = struct.unpack_from(">I", data, start + 24)
            if mode == _GITLINK:
                gitlinks.setdefault(path, data[start + 40 : start + flags_at].hex())
            folded = folded or mode == _FOLDER
            keep = mode == _GITLINK or (kept and (path in marked_names or path.startswith(marked_folders)))
            wanted = flags | _ASSUME_VALID if keep else flags & ~_ASSUME_VALID
            if wanted != flags:
                struct.pack_into(">H", changed, start + flags_at, wanted)
                marked = True
        while position < len(data) - hash_size:
            signature, size = struct.unpack_from(">4sI", data, position)
            if signature == b"link":
                return None
            position += 8 + size
    except (struct.error, ValueError, IndexError):
        return None
    if marked:
        changed[-hash_size:] = hashlib.new(hash_name, changed[:-hash_size]).digest()
    return IndexCopy(bytes(changed), tuple(gitlinks.items()), sparse, folded)


def _offset_varint(data: bytes, position: int) -> tuple[int, int]:
    """The variable-length number of an offset (each further byte adds one), and where it ends."""
    byte = data[position]
    value = byte & 0x7F
    while byte & 0x80:
        position += 1
        byte = data[position]
        value = ((value + 1) << 7) | (byte & 0x7F)
    return value, position + 1


# --- making one --------------------------------------------------------------------------------


def object_format_of(repository: Repository | None) -> str:
    """Hash algorithm of a repository's object names."""
    return (repository.setting("extensions.objectformat") if repository else None) or "sha1"


def private_config(repository: Repository | None) -> str:
    """Configuration file of a repository of ours: what decides on content, and nothing else."""
    object_format = object_format_of(repository)
    lines = ["[core]", f"\trepositoryformatversion = {0 if object_format == 'sha1' else 1}", "\tbare = false"]
    for key in _CARRIED if repository else ():
        value = repository.setting(key) if repository else None
        if value is not None and re.fullmatch(r"[A-Za-z0-9]+", value):
            lines.append(f"\t{key.removeprefix('core.')} = {value}")
    if object_format != "sha1":
        lines += ["[extensions]", f"\tobjectFormat = {object_format}"]
    return "\n".join(lines) + "\n"


def write_private_directory(directory: Path, repository: Repository | None) -> str:
    """Make the private git directory; returns the name of its object format."""
    try:
        directory.mkdir(mode=0o700)
        for name in ("objects/info", "refs", "info"):
            (directory / name).mkdir(parents=True)
        (directory / "config").write_text(private_config(repository), encoding="utf-8")
        head = repository.commit if repository and repository.commit else "ref: refs/heads/base"
        (directory / "HEAD").write_text(head + "\n", encoding="utf-8")
        if repository is not None:
            alternates = quoted_path(f"{repository.common_dir}/objects") + "\n"
            (directory / "objects/info/alternates").write_bytes(os.fsencode(alternates))
            for name in ("exclude", "attributes"):
                source = Path(repository.common_dir, "info", name)
                if source.is_file() and not (repository.foreign and source.is_symlink()):
                    shutil.copyfile(source, directory / "info" / name)
            shallow = Path(repository.common_dir, "shallow")
            if shallow.is_file() and not (repository.foreign and shallow.is_symlink()):
                shutil.copyfile(shallow, directory / "shallow")
    except OSError as error:
        raise StorageError(f"{directory} cannot be written: {error.strerror}") from error
    return object_format_of(repository)


def _write_index(target: Path, copy: IndexCopy, status: os.stat_result) -> None:
    try:
        target.write_bytes(copy.data)
        # The stamp tells git which entries are too young to be trusted without reading the file.
        os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}") from error


def _copy_index(directory: Path, repository: Repository, hash_name: str) -> IndexCopy | None:
    source = Path(repository.git_dir, "index")
    # Nothing but a file: a submodule's git directory may hold anything.
    if not source.is_file():
        return None
    try:
        data, status = source.read_bytes(), source.stat()
    except OSError as error:
        raise ConfigError(f"{source} cannot be read: {error.strerror}") from error
    copy = read_index(data, hash_name=hash_name)
    if copy is not None:
        _write_index(directory / "index", copy, status)
    return copy


def mark_index(snapshot: Snapshot, *, kept: Sequence[str] = ()) -> IndexCopy | None:
    """Mark the submodules in the snapshot's own index, so that git does not look into them.

    Args:
        snapshot: The snapshot; only its private index is written.
        kept: Paths from the top of the work tree whose recorded content stands, whatever git finds there.

    Returns:
        None when there is no index yet.

    Raises:
        ConfigError: CONFIG_INVALID, the index is of an unknown kind; git must not be run on it.
    """
    index = Path(snapshot.index)
    try:
        data, status = index.read_bytes(), index.stat()
    except FileNotFoundError:
        return None
    hash_name = next(name for name, tree in EMPTY_TREES.items() if len(tree) == len(snapshot.base.tree))
    copy = read_index(data, hash_name=hash_name, kept=kept)
    if copy is None or copy.folded:
        raise ConfigError(f"git wrote an index of an unknown kind for {snapshot.work_tree}", hint="use another git")
    if copy.data != data:
        _write_index(index, copy, status)
    return copy


def take_snapshot(
    work_tree: str, repository: Repository | None, *, state: Path, name: str, whole: bool = False
) -> Snapshot:
    """Record the content of a work tree: tracked files and untracked ones that are not ignored.

    A clean repository costs one git process, another tree two, a change of submodules one or two more.

    Args:
        work_tree: The workspace when ``repository`` is None; else unused for the content.
        repository: The repository the workspace belongs to.
        state: Existing private directory.
        name: Name of the snapshot's folders in ``state``.
        whole: Record the whole work tree, not only the workspace's directory in it.

    Raises:
        ConfigError: CONFIG_INVALID, git cannot record the tree.
        StorageError: STORAGE_FAILED.
    """
    directory, scratch = state / f"{name}.git", state / name
    object_format = write_private_directory(directory, repository)
    scratch.mkdir(mode=0o700)
    top = repository.work_tree if repository else work_tree
    prefix = repository.prefix if repository and not whole else ""
    copy = _copy_index(directory, repository, object_format) if repository else None
    sparse = copy is not None and copy.sparse
    commit = repository.commit if repository else None
    nothing = Base(commit, EMPTY_TREES[object_format], dirty=False)
    snapshot = Snapshot(str(directory), str(scratch), top, prefix, nothing, sparse)
    if copy is not None and copy.folded:
        # Submodules in a folded folder have no entry to mark. Without `index.sparse` git unfolds what it
        # reads, and this command only writes it again: no file of the work tree is compared.
        _on(snapshot, ["update-index", "--force-write-index"])
        copy = mark_index(snapshot)
    if commit is not None and (copy is None or prefix):
        # What is staged elsewhere in the repository is not this workspace's. Compares the index with a
        # tree; without `-u` the work tree is not looked at.
        _on(snapshot, ["read-tree", "--reset", commit])
        copy = mark_index(snapshot)
    links = _links_in(prefix, copy)
    gone, moved = _changed_links(top, links)
    head_tree = tree = (repository.tree if repository else None) or nothing.tree
    if commit is None or gone or moved or changed_paths(snapshot):
        tree, links = _record_changes(snapshot, gone, moved)
    base = Base(commit, tree, dirty=repository is not None and tree != head_tree)
    nested = _nested_snapshots(top, links, state=state, name=name, object_format=object_format)
    return Snapshot(str(directory), str(scratch), top, prefix, base, sparse, nested, links)


def apply_patch(snapshot: Snapshot, patch: Path) -> None:
    """Apply a patch of ours to the work tree, which is the base.

    git refuses paths that leave the tree, lie behind a link or in ``.git``; no filter or hook of the tree runs.

    Raises:
        ConfigError: CONFIG_INVALID, it does not apply; nothing was changed.
    """
    try:
        _on(snapshot, ["apply", "--whitespace=nowarn", str(patch)])
    except ConfigError as error:
        raise ConfigError(
            f"{patch.name} cannot be applied to {snapshot.work_tree}: {error.message}", hint="bring the session's own"
        ) from None


def rebased(snapshot: Snapshot, base: Base, patch: Path | None) -> Snapshot | None:
    """The snapshot of an earlier base in the same work tree, whose content is that base with changes.

    Args:
        snapshot: A fresh one of the work tree as it is now; its index is changed.
        base: The earlier base.
        patch: The changes, None if there are none.

    Returns:
        None when neither taking the changes back nor the commit gives that tree.
    """
    ways = [["apply", "--cached", "--reverse", "--whitespace=nowarn", str(patch)]] if patch is not None else []
    ways += [["read-tree", "--reset", base.commit]] if base.commit is not None else []
    for way in ways:
        try:
            _on(snapshot, way)
            found = _on(snapshot, ["write-tree"]).output.decode("ascii").strip()
        except ConfigError:
            continue
        if found == base.tree:
            return replace(snapshot, base=base, gitlinks=_links_in(snapshot.prefix, mark_index(snapshot)))
    return None


def _record_changes(
    snapshot: Snapshot, gone: Sequence[str], moved: Sequence[tuple[str, str]]
) -> tuple[str, tuple[tuple[str, str], ...]]:
    """Bring the snapshot's index up to the work tree; returns its tree and its submodules."""
    if gone:
        _on(snapshot, ["update-index", "--force-remove", "--", *gone])
    # The submodules of the index are marked, and one that is new is only asked for its HEAD, as files.
    _on(snapshot, [*ADD, *_pathspec(snapshot)])
    if moved:
        # After `add`, since these entries bear no mark. Takes the commit as it is given.
        entries = (("--cacheinfo", f"{_GITLINK:o},{commit},{path}") for path, commit in moved)
        _on(snapshot, ["update-index", "--add", *(argument for entry in entries for argument in entry)])
    tree = _on(snapshot, ["write-tree"]).output.decode("ascii").strip()
    return tree, _links_in(snapshot.prefix, mark_index(snapshot))


ADD = ("add", "--all", "--sparse", "--no-warn-embedded-repo")
"""Records the work tree in an index, in which every submodule must be marked."""


def _links_in(prefix: str, copy: IndexCopy | None) -> tuple[tuple[str, str], ...]:
    """Path and commit of the submodules in the workspace."""
    links = ((os.fsdecode(path), commit) for path, commit in (copy.gitlinks if copy else ()))
    return tuple((path, commit) for path, commit in links if not prefix or f"{path}/".startswith(f"{prefix}/"))


def _changed_links(top: str, links: Sequence[tuple[str, str]]) -> tuple[list[str], list[tuple[str, str]]]:
    """Which submodules are no folder any more, and which have another commit checked out, with that commit.

    One that is not checked out is what was recorded, as for git.
    """
    gone, moved = [], []
    for path, commit in links:
        if not _is_folder_of(top, path):
            gone.append(path)
            continue
        now = head_commit(Path(top, path), digits=len(commit))
        if now not in (None, commit):
            moved.append((path, str(now)))
    return gone, moved


def _is_folder_of(top: str, path: str) -> bool:
    """Whether ``path`` is a folder, and no link on the way leads elsewhere (for git it is not there then)."""
    folder = Path(top, path)
    return folder.is_dir() and Path(os.path.realpath(folder)) == Path(os.path.realpath(top), path)


def changed_links(snapshot: Snapshot) -> tuple[list[str], list[str]]:
    """Submodules of the base that are gone, and those that have another commit checked out, by path.

    Only reads their files, which an agent may have written.
    """
    gone, moved = _changed_links(snapshot.work_tree, snapshot.gitlinks)
    return gone, [path for path, _ in moved]


def changed_paths(snapshot: Snapshot) -> list[str]:
    """Paths that differ from HEAD or are untracked, as git status names them; of submodules only what is staged."""
    # Filters, hooks and fsmonitor are off in the private repository; the option, stronger than `.gitmodules`,
    # keeps git out of submodules, beside their marks.
    command = ["status", "--porcelain=v1", "-z", "--no-renames", "--untracked-files=normal"]
    result = _on(snapshot, [*command, "--ignore-submodules=dirty", *_pathspec(snapshot)])
    return [entry[3:] for entry in os.fsdecode(result.output).split("\0") if entry]


def _pathspec(snapshot: Snapshot) -> list[str]:
    return ["--", snapshot.prefix or "."]


def _on(snapshot: Snapshot, arguments: Sequence[str]) -> ProcessResult:
    result = git(
        arguments,
        cwd=snapshot.work_tree,
        environment={
            "GIT_DIR": snapshot.directory,
            "GIT_WORK_TREE": snapshot.work_tree,
            "GIT_INDEX_FILE": snapshot.index,
        },
        settings=_sparse_settings(snapshot.sparse),
    )
    if result.exit_code != 0:
        raise ConfigError(
            f"git cannot record {snapshot.work_tree}: {output_text(result)}",
            hint="remove or ignore what is named; a nested repository needs a commit, or an entry in .gitignore",
        )
    return result


def _nested_snapshots(
    top: str, links: Sequence[tuple[str, str]], *, state: Path, name: str, object_format: str
) -> tuple[Snapshot, ...]:
    nested = []
    for number, (path, _) in enumerate(links):
        repository = read_submodule(Path(top, path), object_format=object_format)
        if repository is not None:
            nested.append(take_snapshot(repository.work_tree, repository, state=state, name=f"{name}-{number}"))
    return tuple(nested)


def changed_nested(snapshot: Snapshot, run_git: RunGit) -> list[str]:
    """Submodules of the base whose content is not what it was, by path.

    Raises:
        RunnerError: TASK_FAILED, git cannot read one of them.
    """
    changed = []
    for inner in snapshot.nested:
        path = os.path.relpath(inner.work_tree, snapshot.work_tree)
        if (
            not _is_folder_of(snapshot.work_tree, path)
            or any(changed_links(inner))
            or record_now(inner, run_git) != inner.base.tree
            or changed_nested(inner, run_git)
        ):
            changed.append(path)
    return changed


def record_now(snapshot: Snapshot, run_git: RunGit) -> str:
    """The tree of the work tree as it is now; what is new goes to the scratch directory."""
    index, objects = f"{snapshot.scratch}/now.index", f"{snapshot.scratch}/now.objects"
    prepare_scratch(snapshot, index, objects)
    environment = snapshot.environment(index=index, objects=objects)
    word = os.urandom(8).hex()
    script = '"$0" add --all --sparse --no-warn-embedded-repo -- "$1" && printf "%s " "$2" && exec "$0" write-tree'
    argv = ["/bin/sh", "-c", script, git_path(), snapshot.prefix or ".", word]
    result = run_git(argv, environment=environment, writable=(snapshot.scratch,), cwd=snapshot.work_tree)
    found = re.search(rf"^{word} ([0-9a-f]{{40,64}})$", result.output.decode("ascii", "replace"), re.MULTILINE)
    if result.exit_code != 0 or found is None:
        raise RunnerError(f"git cannot record {snapshot.work_tree}: {output_text(result)}", code=ErrorCode.TASK_FAILED)
    return found[1]


def prepare_scratch(snapshot: Snapshot, index: str, *objects: str) -> None:
    """Fresh object directories and a copy of the base's index in the scratch directory."""
    try:
        for directory in objects:
            shutil.rmtree(directory, ignore_errors=True)
            Path(directory).mkdir(mode=0o700)
        shutil.copy2(snapshot.index, index)
    except OSError as error:
        raise StorageError(f"{snapshot.scratch} cannot be written: {error.strerror}") from error
