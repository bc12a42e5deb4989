"""``apply_patch`` does all of a patch or nothing, under every sandbox backend."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.errors import ErrorCode
from runner.messages import text_of
from runner.permission import Mode
from runner.testing.tools import BACKENDS, Bench

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    """The tools under one backend, over some files."""
    made = Bench(request.param, Path(os.path.realpath(tmp_path)))
    (made.root / "src").mkdir()
    (made.root / "src" / "a.py").write_text("".join(f"line {n}\n" for n in range(1, 31)))
    (made.root / "src" / "b.py").write_text("one\ntwo\nthree\n")
    (made.root / "src" / "b.py").chmod(0o640)
    yield made
    made.close()


def _tree(bench: Bench) -> dict[str, bytes]:
    return {
        path.relative_to(bench.root).as_posix(): path.read_bytes()
        for path in sorted(bench.root.rglob("*"))
        if path.is_file()
    }


SEVERAL = """\
--- a/src/a.py
+++ b/src/a.py
@@ -2,2 +2,3 @@
 line 2
-line 3
+line three
+line three and a half
@@ -21 +22 @@ of some function
-line 20
+line twenty
diff --git a/src/new/c.sh b/src/new/c.sh
new file mode 100755
--- /dev/null
+++ b/src/new/c.sh
@@ -0,0 +1,2 @@
+#!/bin/sh
+true
diff --git a/src/b.py b/src/moved.py
rename from src/b.py
rename to src/moved.py
--- a/src/b.py
+++ b/src/moved.py
@@ -1,3 +1,3 @@
 one
-two
+2
 three
"""


def test_a_patch_of_several_files_is_applied_and_told(bench: Bench) -> None:
    """Changed, made and renamed; each touched path was decided on; line numbers that were off are said."""
    root = str(bench.root)

    text = bench.good("apply_patch", patch=SEVERAL)

    assert text.splitlines() == [
        "changed src/a.py at lines 2, 21 (1 line above where the patch says) (+3 -2)",
        "made src/new/c.sh (+2, executable)",
        "renamed src/b.py to src/moved.py at line 1 (+1 -1)",
    ]
    lines = (bench.root / "src/a.py").read_text().splitlines()
    assert (lines[1:5], lines[20]) == (["line 2", "line three", "line three and a half", "line 4"], "line twenty")
    assert (bench.root / "src/new/c.sh").stat().st_mode & 0o777 == 0o755
    assert (bench.root / "src/moved.py").read_text() == "one\n2\nthree\n"
    assert (bench.root / "src/moved.py").stat().st_mode & 0o777 == 0o640
    assert not (bench.root / "src/b.py").exists()
    assert bench.facts[-1].write == tuple(f"{root}/src/{name}" for name in ("a.py", "new/c.sh", "b.py", "moved.py"))
    assert bench.facts[-1].read == (f"{root}/src/a.py", f"{root}/src/b.py")


def test_a_file_is_deleted_only_with_all_of_its_lines(bench: Bench) -> None:
    """Nothing goes that the patch did not see."""
    patch = "--- a/src/b.py\n+++ /dev/null\n@@ -1,3 +0,0 @@\n-one\n-two\n-three\n"
    some = "--- a/src/b.py\n+++ /dev/null\n@@ -1,2 +0,0 @@\n-one\n-two\n"

    error, text = bench.bad("apply_patch", patch=some)
    assert (error, (bench.root / "src/b.py").exists()) == (ErrorCode.TOOL_FAILED, True)
    assert "not all of its lines are removed" in text
    assert bench.good("apply_patch", patch=patch) == "deleted src/b.py (-3)"
    assert list(bench.root.rglob("b.py")) == list(bench.root.rglob(".nightshift*")) == []


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ("--- a/src/b.py\n+++ b/src/b.py\n@@ -1,2 +1,2 @@\n one\n-tow\n+2\n", "nearest lines:\n1: one\n2: two"),
        ("--- a/src/b.py\n+++ b/src/b.py\n@@ -1,2 +1,2 @@\n @@@@\n-two\n+2\n", "to line 2 of the hunk's old lines"),
        ("--- a/src/gone.py\n+++ b/src/gone.py\n@@ -1 +1 @@\n-x\n+y\n", "src/gone.py does not exist"),
        ("--- /dev/null\n+++ b/src/b.py\n@@ -0,0 +1 @@\n+x\n", "src/b.py is to be made and is there already"),
        ("--- /dev/null\n+++ b/src/b.py/x\n@@ -0,0 +1 @@\n+x\n", "src/b.py is not a folder"),
        ("--- a/src/b.py\n+++ b/src/b.py\n@@ -9,0 +9 @@\n+x\n", "it has 3 lines"),
        ("--- a/src/b.py\n+++ b/src/b.py\n@@ -3 +3 @@\n-three\n+3\n\\ No newline at end of file\n", ""),
        ("--- a/src/b.py\n+++ b/src/b.py\n@@ -3 +3 @@\n-three\n\\ No newline at end of file\n+3\n", "not in the file"),
        ("--- a/src\n+++ b/src\n@@ -1 +1 @@\n-x\n+y\n", "src is a folder"),
        ("--- a/src/binary\n+++ b/src/binary\n@@ -1 +1 @@\n-x\n+y\n", "src/binary is a binary file"),
        ("--- a/src/link\n+++ b/src/link\n@@ -1 +1 @@\n-one\n+y\n", "src/link is a symbolic link"),
        ("diff --git a/src/b.py b/src/link\nrename from src/b.py\nrename to src/link\n", "src/link is a symbolic link"),
        ("--- a/src/twice\n+++ b/src/twice\n@@ -9 +9 @@\n-same\n+other\n", "at lines 1, 3; give more context"),
        ("--- a/src/open\n+++ b/src/open\n@@ -1 +1,2 @@\n last\n+more\n", "'\\ No newline at end of file'"),
    ],
)  # fmt: skip
def test_one_hunk_that_does_not_fit_leaves_every_file_alone(tmp_path: Path, second: str, says: str) -> None:
    """All hunks are checked before the first write; the message names the file and what stands there."""
    bench = Bench("none", Path(os.path.realpath(tmp_path)))
    (bench.root / "src").mkdir()
    for name, text in (("a.py", "x\n"), ("b.py", "one\ntwo\nthree\n"), ("twice", "same\n-\nsame\n"), ("open", "last")):
        (bench.root / "src" / name).write_text(text)
    (bench.root / "src" / "binary").write_bytes(b"x\n\0")
    (bench.root / "src" / "link").symlink_to("b.py")
    before = _tree(bench)

    result = bench.run("apply_patch", patch=f"--- a/src/a.py\n+++ b/src/a.py\n@@ -1 +1 @@\n-x\n+y\n{second}")
    bench.close()

    if not says:
        assert (result.error, (bench.root / "src/b.py").read_bytes()) == (None, b"one\ntwo\n3")
        return
    assert result.error in (ErrorCode.TOOL_FAILED, ErrorCode.SANDBOX_DENIED)
    assert says in text_of(list(result.content))
    assert _tree(bench) == before


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_a_step_that_fails_half_way_takes_back_those_before_it(tmp_path: Path, backend: str) -> None:
    """Changed, renamed, made and deleted files are as they were, and so are folders and modes."""
    bench = Bench(backend, Path(os.path.realpath(tmp_path)))
    (bench.root / ".git").mkdir()
    (bench.root / "src").mkdir()
    for name in ("a", "b", "c"):
        (bench.root / "src" / name).write_text(f"{name}\n")
    (bench.root / "src" / "b").chmod(0o600)
    inode = (bench.root / "src" / "c").stat().st_ino
    # The sandbox does not let anything be made in a folder that only root may write.
    closed = bench.root / "src" / "closed"
    closed.mkdir()
    (closed / "d").write_text("d\n")
    closed.chmod(0o555)
    patch = (
        "diff --git a/src/a b/src/a\nold mode 100644\nnew mode 100755\n--- a/src/a\n+++ b/src/a\n@@ -1 +1 @@\n-a\n+A\n"
        "--- /dev/null\n+++ b/src/deep/er/new\n@@ -0,0 +1 @@\n+new\n"
        "diff --git a/src/b b/src/renamed\nrename from src/b\nrename to src/renamed\n"
        "diff --git a/src/c b/src/c\ndeleted file mode 100644\n--- a/src/c\n+++ /dev/null\n@@ -1 +0,0 @@\n-c\n"
        "--- /dev/null\n+++ b/src/closed/new\n@@ -0,0 +1 @@\n+x\n"
    )
    before = _tree(bench)

    error, text = bench.bad("apply_patch", patch=patch)
    bench.close()

    closed.chmod(0o755)
    assert error is ErrorCode.SANDBOX_DENIED
    assert "src/closed/new: Permission denied; nothing is changed (mode workspace-write)" in text
    assert _tree(bench) == before
    assert not (bench.root / "src" / "deep").exists()
    assert [(bench.root / "src" / name).stat().st_mode & 0o777 for name in ("a", "b")] == [0o644, 0o600]
    assert (bench.root / "src" / "c").stat().st_ino == inode
    assert not list(bench.root.rglob(".nightshift*"))


def test_encoding_line_ends_and_mark_are_kept(bench: Bench) -> None:
    """A patch without carriage returns gets those of the file, one with them means them."""
    (bench.root / "src" / "dos").write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n")
    (bench.root / "src" / "wide").write_bytes("é\ntwo\n".encode("utf-16"))
    (bench.root / "src" / "latin").write_bytes(b"caf\xe9\ntwo\n")
    hunk = "@@ -2 +2 @@\n-two\n+zwei\n"
    for name in ("dos", "wide", "latin"):
        bench.good("apply_patch", patch=f"--- a/src/{name}\n+++ b/src/{name}\n{hunk}")

    assert (bench.root / "src" / "dos").read_bytes() == b"\xef\xbb\xbfone\r\nzwei\r\n"
    assert (bench.root / "src" / "wide").read_bytes() == "é\nzwei\n".encode("utf-16")
    assert (bench.root / "src" / "latin").read_bytes() == b"caf\xe9\nzwei\n"
    bench.good("apply_patch", patch="--- a/src/dos\n+++ b/src/dos\n@@ -2 +2 @@\n-zwei\r\n+2\n")
    assert (bench.root / "src" / "dos").read_bytes() == b"\xef\xbb\xbfone\r\n2\n"
    error, text = bench.bad("apply_patch", patch="--- a/src/latin\n+++ b/src/latin\n@@ -2 +2 @@\n-zwei\n+\u65e5\n")
    assert "cannot hold" in text
    assert error is ErrorCode.TOOL_FAILED


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("../x", "holds '..'"),
        ("/etc/hosts", "lies outside the workspace"),
        ("sub/.git/config", "lies in .git"),
        ("~/x", "~"),
        ("out/x", "leads through a symbolic link"),
        ("within/x", "leads through a symbolic link"),
    ],
)
def test_a_path_that_leads_out_is_refused_before_the_policy(tmp_path: Path, name: str, says: str) -> None:
    """The policy is not asked, nothing runs."""
    bench = Bench("none", Path(os.path.realpath(tmp_path)))
    (bench.root / "src").mkdir()
    (bench.root / "out").symlink_to("/tmp")  # a folder that is not the workspace's
    (bench.root / "within").symlink_to("src")

    error, text = bench.bad("apply_patch", patch=f"--- /dev/null\n+++ {name}\n@@ -0,0 +1 @@\n+x\n")
    bench.close()

    assert error is ErrorCode.INVALID_ARGS
    assert says in text
    assert bench.events == []


def test_an_absolute_path_in_the_workspace_is_a_path_of_it(bench: Bench) -> None:
    """And the same file under two names is refused."""
    path = f"{bench.root}/src/b.py"
    hunk = "@@ -1 +1 @@\n-one\n+1\n"

    bench.good("apply_patch", patch=f"--- {path}\n+++ {path}\n{hunk}")
    error, text = bench.bad("apply_patch", patch=f"--- {path}\n+++ {path}\n{hunk}--- src/b.py\n+++ src/b.py\n{hunk}")

    assert (bench.root / "src/b.py").read_text() == "1\ntwo\nthree\n"
    assert error is ErrorCode.INVALID_ARGS
    assert "under two names" in text


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_a_patch_where_nothing_may_be_written_changes_nothing(tmp_path: Path, backend: str) -> None:
    """The kernel has the last word."""
    bench = Bench(backend, Path(os.path.realpath(tmp_path)), mode=Mode.READ_ONLY)
    (bench.root / "b").write_text("one\n")

    error, text = bench.bad("apply_patch", patch="--- a/b\n+++ b/b\n@@ -1 +1 @@\n-one\n+1\n")
    bench.close()

    assert error is ErrorCode.SANDBOX_DENIED
    assert "(mode read-only)" in text
    assert (bench.root / "b").read_text() == "one\n"


def test_a_patch_that_runs_out_of_time_says_that_something_may_be_written(tmp_path: Path) -> None:
    """Only then; what was refused in time changed nothing."""
    bench = Bench("none", Path(os.path.realpath(tmp_path)))
    (bench.root / "b").write_text("one\n")
    patch = "--- a/b\n+++ b/b\n@@ -1 +1 @@\n-{}\n+1\n"
    folders = {"workspace": str(bench.root), "tmp": bench.executor.tmp}
    worker = bench.executor.worker(bench.mode)
    answer = worker.call("hello", folders, timeout=20, cancellation=bench.cancellation)
    os.kill(answer["value"]["pid"], signal.SIGSTOP)
    bench.timeout = 0.5

    late, text = bench.bad("apply_patch", patch=patch.format("one"))
    bench.timeout = 20.0
    _, refused = bench.bad("apply_patch", patch=patch.format("two"))
    bench.close()

    assert late is ErrorCode.TOOL_TIMEOUT
    assert "what it had written until then stays" in text
    assert "until then" not in refused
