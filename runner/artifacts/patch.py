"""``changes.patch``: what the agent changed, as a patch that is known to give exactly its tree.

One confined command records the tree as it is now, writes the patch against the base, applies it
to the base in a scratch index whose object store holds nothing of the new tree, and compares.
Pure git plumbing with every option pinned; writes no events, no effect on the prefix cache.
"""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import ErrorCode, InternalError, RunnerError, SandboxError, StorageError
from runner.record import record
from runner.workspace.git import git_path, output_text, plain_git
from runner.workspace.snapshot import changed_nested, prepare_scratch

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

_SCRIPT = """\
git=$0 base=$1 pathspec=$2 scratch=$3 word=$4
"$git" add --all --sparse -- "$pathspec" || exit 81
tree=$("$git" write-tree) || exit 82
printf '%s tree %s\\n' "$word" "$tree"
[ "$tree" = "$base" ] && exit 0
"$git" diff-tree -r --raw --numstat --no-renames --no-ext-diff --no-textconv --no-color --abbrev=64 \\
  --output="$scratch/changes" "$base" "$tree" || exit 83
"$git" diff-tree -r -p --binary --full-index --no-color --no-ext-diff --no-textconv --no-renames --no-relative \\
  --src-prefix=a/ --dst-prefix=b/ --unified=3 --inter-hunk-context=0 --diff-algorithm=myers --indent-heuristic \\
  --submodule=short -O/dev/null --output="$scratch/patch" "$base" "$tree" || exit 84
export GIT_INDEX_FILE="$scratch/again.index" GIT_OBJECT_DIRECTORY="$scratch/again.objects"
"$git" read-tree "$base" || exit 85
"$git" apply --cached --whitespace=nowarn "$scratch/patch" || exit 86
again=$("$git" write-tree) || exit 87
printf '%s again %s\\n' "$word" "$again"
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
    result, trees = _run(snapshot, run_git)
    _require(snapshot, result, trees)
    scratch = Path(snapshot.scratch)
    try:
        if trees["tree"] == snapshot.base.tree:
            _write_private(target, None)
            return None
        info = _patch_info(scratch / "changes", trees["tree"])
        if trees.get("again") != info.tree:
            raise InternalError(
                f"the patch gives the tree {trees.get('again')} and the workspace is {info.tree}",
                hint="the workspace is untouched; report this with the file names involved",
            )
        _write_private(target, scratch / "patch")
    except OSError as error:
        raise StorageError(f"the patch cannot be written to {target}: {error.strerror}") from error
    return info


def _run(snapshot: Snapshot, run_git: RunGit) -> tuple[ProcessResult, dict[str, str]]:
    """Run the command; returns its result and the trees it printed."""
    scratch = snapshot.scratch
    index, objects = f"{scratch}/now.index", f"{scratch}/now.objects"
    prepare_scratch(snapshot, index, objects, f"{scratch}/again.objects")
    # Warnings of git with names out of the tree stand in the same output: a random word tells ours apart.
    word = os.urandom(8).hex()
    argv = ["/bin/sh", "-c", _SCRIPT, git_path(), snapshot.base.tree, snapshot.prefix or ".", scratch, word]
    environment = snapshot.environment(index=index, objects=objects)
    result = run_git(argv, environment=environment, writable=(scratch,), cwd=snapshot.work_tree)
    output = result.output.decode("ascii", "replace")
    return result, dict(re.findall(rf"^{word} (tree|again) ([0-9a-f]{{40,64}})$", output, re.MULTILINE))


def _require(snapshot: Snapshot, result: ProcessResult, trees: dict[str, str]) -> None:
    """Raise if the command did not come to its end."""
    if result.wrapper_failed:
        raise SandboxError(f"the sandbox could not run git: {output_text(result)}")
    if result.exit_code == 0 and "tree" in trees:
        if trees["tree"] != snapshot.base.tree:
            _refuse_nested(Path(snapshot.scratch, "changes"))
        return
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


def _refuse_nested(changes: Path) -> None:
    """Refuse a patch with a new or changed gitlink: what is inside the repository would be lost."""
    raw = re.findall(r"^:(\d+) 160000 [0-9a-f]+ [0-9a-f]+ \w\t(.+)$", changes.read_text(encoding="ascii"), re.MULTILINE)
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


def _patch_info(changes: Path, tree: str) -> PatchInfo:
    """Count the lines of ``--numstat``; binary files have dashes instead of numbers."""
    insertions = deletions = 0
    paths = []
    for added, removed, path in re.findall(
        r"^(\d+|-)\t(\d+|-)\t(.+)$", changes.read_text(encoding="ascii"), re.MULTILINE
    ):
        insertions += int(added) if added != "-" else 0
        deletions += int(removed) if removed != "-" else 0
        paths.append(path)
    return PatchInfo(len(paths), insertions, deletions, tree, tuple(paths))


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
