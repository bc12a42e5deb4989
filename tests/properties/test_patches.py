"""A patch that git writes does here what it does there."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from runner.sandbox.files import patches
from runner.sandbox.files.places import Refusal
from runner.tools.patches import PatchError, parse_patch

if TYPE_CHECKING:
    from collections.abc import Iterator

SOME = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
NAMES = st.sampled_from(["a", "b c", "d/e", "d/f", "é", "g\th", 'i"j', "k\\l", "-m", "d/n/o"])
TEXTS = st.one_of(
    st.lists(st.sampled_from(["one", "two", "", "- x", "+ y", "-- z", "\\ w", "é", "\x0cq"]), max_size=12).map(
        "\n".join
    ),
    st.lists(st.sampled_from(["one", "two", "three"]), max_size=12).map("\n".join),
).flatmap(lambda text: st.sampled_from([text, text + "\n", text.replace("\n", "\r\n")]))
FILES = st.dictionaries(NAMES, st.tuples(TEXTS, st.booleans()), max_size=4)


def _git(root: Path, *arguments: str, data: bytes | None = None) -> bytes:
    environment = {"PATH": os.environ["PATH"], "HOME": str(root), "GIT_CONFIG_NOSYSTEM": "1"}
    options = ["-c", "core.autocrlf=false", "-c", "core.excludesFile=", "-c", "core.safecrlf=false"]
    return subprocess.run(
        ["git", *options, *arguments], cwd=root, env=environment, input=data, check=True, capture_output=True
    ).stdout


def _write(root: Path, files: dict[str, tuple[str, bool]]) -> None:
    for name, (text, executable) in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(text.encode())
        (root / name).chmod(0o755 if executable else 0o644)


def _tree(root: Path) -> dict[str, tuple[str, bool]]:
    return {
        path.relative_to(root).as_posix(): (path.read_bytes().decode(), bool(path.stat().st_mode & 0o100))
        for path in sorted(root.rglob("*"))
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }


def _apply(root: Path, text: str) -> list[list[dict[str, Any]]]:
    base = os.path.realpath(root)
    changes = [
        {
            "old": None if file.old is None else f"{base}/{file.old}",
            "new": None if file.new is None else f"{base}/{file.new}",
            "executable": file.executable,
            "hunks": [hunk.as_json() for hunk in file.hunks],
        }
        for file in parse_patch(text)
    ]
    answer: list[list[dict[str, Any]]] = patches.patch({"changes": changes})["files"]
    return answer


@pytest.fixture(scope="module")
def empty_repository() -> Iterator[Path]:
    """A control folder to copy: making one takes git longer than the rest of an example."""
    with tempfile.TemporaryDirectory() as directory:
        _git(Path(directory), "init", "--quiet")
        yield Path(directory) / ".git"


@SOME
@given(before=FILES, after=FILES, renames=st.booleans(), context=st.integers(min_value=0, max_value=4))
def test_what_git_diff_writes_makes_the_one_tree_the_other(
    empty_repository: Path,
    before: dict[str, tuple[str, bool]],
    after: dict[str, tuple[str, bool]],
    renames: bool,
    context: int,
) -> None:
    """Texts, modes, names that need quotes, files that come, go and get a new name, with and without context."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        shutil.copytree(empty_repository, root / ".git")
        _write(root, before)
        _git(root, "add", "--all", "--force")
        tree = _git(root, "write-tree").decode().strip()
        for name in before:
            (root / name).unlink()
        _write(root, after)
        _git(root, "add", "--all", "--force")
        options = ["--find-renames=40%"] if renames else ["--no-renames"]
        diff = _git(root, "diff", "--cached", f"-U{context}", *options, tree).decode()
        assume("@@" in diff or "rename" in diff)
        for name in after:
            (root / name).unlink()
        _write(root, before)

        _apply(root, diff)

        assert _tree(root) == after
        assert not list(root.rglob(".nightshift*"))


@SOME
@given(
    text=st.lists(st.sampled_from(["one", "two", "three"]), min_size=1, max_size=14),
    moved=st.integers(min_value=0, max_value=6),
    change=st.integers(min_value=0, max_value=13),
)
def test_a_hunk_is_put_where_its_lines_stand_or_nowhere(
    empty_repository: Path, text: list[str], moved: int, change: int
) -> None:
    """Where lines were added above it: at the only place that fits, else it is refused and nothing changes."""
    changed = [*text]
    changed[change % len(text)] = "new"
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        shutil.copytree(empty_repository, root / ".git")
        _write(root, {"a": ("\n".join([*text, ""]), False)})
        _git(root, "add", "a")
        _write(root, {"a": ("\n".join([*changed, ""]), False)})
        diff = _git(root, "diff", "-U2").decode()
        whole = "\n".join([*["above"] * moved, *text, ""])
        _write(root, {"a": (whole, False)})

        try:
            ((place,),) = _apply(root, diff)
        except Refusal as refusal:
            place = {"refused": refusal.code}
        if "refused" in place:
            assert (place["refused"], (root / "a").read_text()) == ("AMBIGUOUS", whole)
            return
        wanted = "\n".join([*["above"] * moved, *changed, ""])
        # A place that the patch names is taken even if the lines stand elsewhere too.
        assert (root / "a").read_text() == wanted or place["shift"] == 0


@settings(SOME, max_examples=200)
@given(
    lines=st.lists(
        st.sampled_from(
            ["--- a/x", "+++ b/x", "--- /dev/null", "+++ /dev/null", "@@ -1 +1 @@", "@@ -1,2 +1,2 @@", "@@ -0,0 +1 @@",
             "-a", "+b", " c", "", "\\ No newline at end of file", "diff --git a/x b/x", "new file mode 100644", "@@",
             "rename from x", "rename to y", "deleted file mode 100644", "old mode 100644", "new mode 100755", "text"]
        ),
        max_size=12,
    )
)  # fmt: skip
@pytest.mark.filterwarnings("error")
def test_any_text_is_a_patch_or_refused(lines: list[str]) -> None:
    """Nothing but a refusal comes of what is no patch; what is one fits its own counts."""
    try:
        files = parse_patch("\n".join(lines))
    except PatchError:
        return
    for file in files:
        assert file.names
        assert all(line[0] in " -+" for hunk in file.hunks for line in hunk.lines)
