"""``changes.patch``: what the agent changed, as a patch that is known to give exactly its tree.

One confined command records the tree as it is now and writes the patch against the base. The patch
is copied to where no command can write. A second command, which sees nothing of the first one's
files and of the work tree, applies this copy to the base; the trees must be the same. The copy is
what is published. Pure git plumbing with every option pinned; git never looks into a submodule, see
``runner.workspace.snapshot``. Writes no events, no effect on the prefix cache.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import ErrorCode, InternalError, RunnerError, SandboxError, StorageError
from runner.record import record
from runner.workspace.git import git_path, output_text, plain_git
from runner.workspace.snapshot import changed_links, changed_nested, prepare_scratch

if TYPE_CHECKING:
    from runner.messages import JsonObject
    from runner.sandbox.base import ProcessResult
    from runner.workspace.git import RunGit
    from runner.workspace.snapshot import Snapshot

PATCH_NAME = "changes.patch"

_STAGES = {
    81: "record the workspace",
    82: "write the tree of the workspace",
    83: "list the changes",
    84: "write the patch",
    85: "read the base again",
    86: "apply the patch to the base",
    87: "write the tree of the patched base",
}

_RECORD = """\
git=$0 base=$1 pathspec=$2 scratch=$3 word=$4
shift 4
[ $# -eq 0 ] || "$git" update-index --force-remove -- "$@" || exit 81
"$git" add --all --sparse --no-warn-embedded-repo -- "$pathspec" || exit 81
tree=$("$git" write-tree) || exit 82
printf '%s tree %s\\n' "$word" "$tree"
[ "$tree" = "$base" ] && exit 0
"$git" diff-tree -r -p --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames --no-relative \\
  --src-prefix=a/ --dst-prefix=b/ --unified=3 --inter-hunk-context=0 --diff-algorithm=myers --indent-heuristic \\
  --submodule=short -O/dev/null --output="$scratch/patch" "$base" "$tree" || exit 84
"""

_VERIFY = """\
git=$0 base=$1 patch=$2 word=$3
"$git" read-tree "$base" || exit 85
"$git" apply --cached --whitespace=nowarn "$patch" || exit 86
tree=$("$git" write-tree) || exit 87
"$git" diff-tree -r --raw --numstat --no-renames --no-ext-diff --no-textconv --no-color --abbrev=64 \\
  --output=changes "$base" "$tree" || exit 83
printf '%s tree %s\\n' "$word" "$tree"
"""


@record
class PatchInfo:
    """What a patch holds: files, lines added and taken away (text files only), and the tree it gives.

    ``paths`` are the changed paths as git quotes them, in the patch's order.
    """

    files: int
    insertions: int
    deletions: int
    tree: str
    paths: tuple[str, ...] = ()

    def as_json(self) -> JsonObject:
        """``patch`` of ``result.json``."""
        return {"files": self.files, "insertions": self.insertions, "deletions": self.deletions, "tree": self.tree}


def make_patch(snapshot: Snapshot, target: Path, *, run_git: RunGit = plain_git) -> PatchInfo | None:
    """Write the patch from the snapshot's base to the work tree as it is now.

    Args:
        snapshot: The base.
        target: File to write, 0600. Empty when nothing was changed.
        run_git: Runs the command, confined if an agent wrote to the tree.

    Returns:
        None when nothing was changed.

    Raises:
        RunnerError: TASK_FAILED, the tree cannot be recorded, or holds a repository made during the run.
        SandboxError: SANDBOX_UNAVAILABLE, the wrapper of the command broke.
        InternalError: INTERNAL, the patch does not give the tree.
        StorageError: STORAGE_FAILED.
    """
    if not Path(snapshot.work_tree, snapshot.prefix).is_dir():
        raise RunnerError(f"the workspace {snapshot.work_tree} is gone", code=ErrorCode.TASK_FAILED)
    changed = changed_nested(snapshot, run_git)
    if changed:
        raise RunnerError(
            f"files of the submodule {changed[0]!r} were changed, and a patch of this repository cannot carry them",
            code=ErrorCode.TASK_FAILED,
            hint="make the submodule the workspace of a task of its own",
        )
    gone, moved = changed_links(snapshot)
    if moved:
        raise _nested_error(moved)
    tree = _record(snapshot, gone, run_git)
    copy = Path(snapshot.directory, PATCH_NAME)
    try:
        if tree == snapshot.base.tree:
            _write_private(target, None)
            return None
        _copy_out(Path(snapshot.scratch, "patch"), copy)
    except OSError as error:
        raise StorageError(f"the patch cannot be written to {target}: {error.strerror}") from error
    info = _verify(snapshot, copy, run_git)
    if info.tree != tree:
        raise InternalError(
            f"the patch gives the tree {info.tree} and the workspace is {tree}",
            hint="the workspace is untouched; report this with the file names involved",
        )
    try:
        _write_private(target, copy)
        copy.unlink()
    except OSError as error:
        raise StorageError(f"the patch cannot be written to {target}: {error.strerror}") from error
    return info


def _record(snapshot: Snapshot, gone: list[str], run_git: RunGit) -> str:
    """Record the work tree and write the patch, both in the scratch directory; returns the tree."""
    scratch = snapshot.scratch
    index, objects = f"{scratch}/now.index", f"{scratch}/now.objects"
    prepare_scratch(snapshot, index, objects)
    # Warnings of git with names out of the tree stand in the same output: a random word tells ours apart.
    word = os.urandom(8).hex()
    argv = ["/bin/sh", "-c", _RECORD, git_path(), snapshot.base.tree, snapshot.prefix or ".", scratch, word, *gone]
    environment = snapshot.environment(index=index, objects=objects)
    result = run_git(argv, environment=environment, writable=(scratch,), cwd=snapshot.work_tree)
    return _tree_of(snapshot, result, word)


def _verify(snapshot: Snapshot, patch: Path, run_git: RunGit) -> PatchInfo:
    """Apply a patch to the base and count what it changes, in a directory that no other command could write."""
    fresh = Path(f"{snapshot.scratch}-verify")
    try:
        shutil.rmtree(fresh, ignore_errors=True)
        (fresh / "objects").mkdir(mode=0o700, parents=True)
        word = os.urandom(8).hex()
        argv = ["/bin/sh", "-c", _VERIFY, git_path(), snapshot.base.tree, str(patch), word]
        environment = snapshot.environment(index=f"{fresh}/index", objects=f"{fresh}/objects")
        environment["GIT_WORK_TREE"] = str(fresh)
        result = run_git(argv, environment=environment, writable=(str(fresh),), cwd=str(fresh))
        tree = _tree_of(snapshot, result, word)
        changes = (fresh / "changes").read_text(encoding="ascii")
    except OSError as error:
        raise StorageError(f"the patch cannot be verified in {fresh}: {error.strerror}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    _refuse_nested(changes)
    return _patch_info(changes, tree)


def _tree_of(snapshot: Snapshot, result: ProcessResult, word: str) -> str:
    """The tree a command printed behind its word; raises if it did not come to its end."""
    if result.wrapper_failed:
        raise SandboxError(f"the sandbox could not run git: {output_text(result)}")
    found = re.search(rf"^{word} tree ([0-9a-f]{{40,64}})$", result.output.decode("ascii", "replace"), re.MULTILINE)
    if result.exit_code == 0 and found is not None:
        return found[1]
    nested = find_nested(snapshot) if result.exit_code == 81 else []
    if nested:
        raise _nested_error(nested)
    if result.cancelled:
        raise RunnerError("making the patch was cancelled", code=ErrorCode.CANCELLED)
    if result.timed_out:
        raise RunnerError("making the patch took too long", code=ErrorCode.TASK_FAILED)
    if b"No space left on device" in result.output:
        raise StorageError(f"the patch cannot be made in {snapshot.scratch}: no space left")
    what = _STAGES.get(result.exit_code or 0, "make the patch")
    raise RunnerError(
        f"git cannot {what} of {snapshot.work_tree}: {output_text(result)}",
        code=ErrorCode.INTERNAL if (result.exit_code or 0) > 81 else ErrorCode.TASK_FAILED,
        hint="look at the workspace; names git refuses and unreadable files cannot be in a patch",
    )


def _refuse_nested(changes: str) -> None:
    """Refuse a patch with a new or changed gitlink: what is inside the repository would be lost."""
    raw = re.findall(r"^:(\d+) 160000 [0-9a-f]+ [0-9a-f]+ \w\t(.+)$", changes, re.MULTILINE)
    if raw:
        raise _nested_error([name for _, name in raw])


def _nested_error(names: list[str]) -> RunnerError:
    return RunnerError(
        f"the run made or moved a nested repository at {', '.join(names[:3])}, and a patch cannot carry its files",
        code=ErrorCode.TASK_FAILED,
        hint="nested repositories belong into an ignored folder, or the agent must not run git init or git clone there",
    )


def find_nested(snapshot: Snapshot) -> list[str]:
    """Directories below the top of the work tree that hold a ``.git`` and were no submodule before."""
    known = {inner.work_tree for inner in snapshot.nested}
    found = []
    for directory, folders, files in os.walk(Path(snapshot.work_tree, snapshot.prefix)):
        if directory != snapshot.work_tree and directory not in known and ".git" in (*folders, *files):
            found.append(os.path.relpath(directory, snapshot.work_tree))
        folders[:] = [name for name in folders if name != ".git"]
    return sorted(found)


def _patch_info(changes: str, tree: str) -> PatchInfo:
    """Count the lines of ``--numstat``; binary files have dashes instead of numbers."""
    insertions = deletions = 0
    paths = []
    for added, removed, path in re.findall(r"^(\d+|-)\t(\d+|-)\t(.+)$", changes, re.MULTILINE):
        insertions += int(added) if added != "-" else 0
        deletions += int(removed) if removed != "-" else 0
        paths.append(path)
    return PatchInfo(len(paths), insertions, deletions, tree, tuple(paths))


def _copy_out(source: Path, target: Path) -> None:
    """Copy a file from where a confined command may write; a link or a pipe that lies there is refused."""
    descriptor = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as content:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise InternalError(f"{source} is no file")
        target.unlink(missing_ok=True)
        with target.open("xb") as file:
            shutil.copyfileobj(content, file)


def _write_private(target: Path, source: Path | None) -> None:
    """Write a file of ours by rename, 0600."""
    temporary = target.with_name(target.name + ".part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        if source is not None:
            with source.open("rb") as content:
                shutil.copyfileobj(content, file)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(target)
