"""Unified diffs are read strictly: what is not understood is refused with what to do."""

from __future__ import annotations

import pytest

from runner.tools.patches import FilePatch, Hunk, PatchError, parse_patch

CHANGE = "--- a/src/x.py\n+++ b/src/x.py\n@@ -1,2 +1,2 @@\n one\n-two\n+three\n"


def test_a_plain_diff_is_one_file_with_its_hunks() -> None:
    """With the prefixes git writes, or without any."""
    expected = [FilePatch("src/x.py", "src/x.py", None, (Hunk(1, (" one", "-two", "+three")),))]

    assert parse_patch(CHANGE) == expected
    assert parse_patch(CHANGE.replace("a/", "").replace("b/", "")) == expected
    assert parse_patch(CHANGE.replace("x.py\n", "x.py\t2026-01-01 00:00:00\n")) == expected
    assert parse_patch(CHANGE.replace("\n", "\r\n")) == expected
    assert parse_patch(f"Here is the patch.\n\n{CHANGE}\n-- \n2.43.0\n") == expected


def test_only_a_pair_of_prefixes_is_taken_off() -> None:
    """A folder may be called a, or b."""
    assert parse_patch(CHANGE.replace("+++ b/", "+++ a/"))[0].new == "a/src/x.py"
    assert parse_patch("--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+1\n")[0].names == ("x",)
    assert parse_patch("--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-1\n")[0] == FilePatch(
        "x", None, None, (Hunk(1, ("-1",)),)
    )


def test_git_headers_make_delete_rename_and_change_modes() -> None:
    """Each in its own section; names with quotes and blanks are whole."""
    text = (
        "diff --git a/new b/new\nnew file mode 100755\nindex 000..111\n--- /dev/null\n+++ b/new\n@@ -0,0 +1 @@\n+1\n"
        "diff --git a/empty b/empty\nnew file mode 100644\nindex 000..e69\n"
        "diff --git a/gone b/gone\ndeleted file mode 100644\nindex e69..000\n"
        'diff --git "a/\\303\\251 \\t" b/to\nsimilarity index 100%\nrename from "\\303\\251 \\t"\nrename to to\n'
        "diff --git a/run me b/run me\nold mode 100644\nnew mode 100755\n"
    )

    assert parse_patch(text) == [
        FilePatch(None, "new", True, (Hunk(0, ("+1",)),)),
        FilePatch(None, "empty", False),
        FilePatch("gone", None),
        FilePatch("é \t", "to"),
        FilePatch("run me", "run me", True),
    ]


def test_a_missing_newline_counts_for_the_side_it_stands_behind() -> None:
    """Behind an old line, a new one, or one that is both."""
    mark = "\\ No newline at end of file\n"
    old = parse_patch(f"--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n{mark}+1\n")[0].hunks[0]
    both = parse_patch(f"--- a/x\n+++ b/x\n@@ -1,2 +1,1 @@\n-0\n 1\n{mark}")[0].hunks[0]

    assert (old.old_open, old.new_open) == (True, False)
    assert (both.old_open, both.new_open) == (True, True)


def test_an_empty_line_is_an_empty_line_of_context() -> None:
    """Editors and models cut the blank off."""
    assert parse_patch("--- a/x\n+++ b/x\n@@ -1,2 +1,3 @@\n a\n\n+b\n")[0].hunks[0].lines == (" a", " ", "+b")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "names no file"),
        ("*** Begin Patch\n*** Update File: x\n@@\n-a\n+b\n*** End Patch\n", "names no file"),
        ("@@ -1 +1 @@\n-a\n+b\n", "before the names of its file"),
        (CHANGE.replace("-1,2", "-1,3"), "src/x.py, hunk 1: its head counts 3 old and 2 new lines, and 2 old and"),
        (CHANGE.replace("+1,2", "+1,1"), "line 6: '+three' belongs to no hunk; correct the counts"),
        (CHANGE + "+four\n", "line 7: '+four' belongs to no hunk"),
        (CHANGE + " four\n" + CHANGE.replace("x.py", "y.py"), "belongs to no hunk"),
        (CHANGE.replace("@@ -1,2 +1,2 @@", "@@ ... @@"), "it is @@ -START,COUNT +START,COUNT @@"),
        (CHANGE.replace("+++ b/src/x.py", "+++ b/src/y.py"), "a rename needs 'rename from' and 'rename to'"),
        (CHANGE + CHANGE, "src/x.py stands in it twice"),
        (CHANGE.replace("src/x.py", "../x.py"), "holds '..'"),
        (CHANGE.replace("src/x.py", ".git/config"), "lies in .git"),
        (CHANGE.replace("src/x.py", "sub/.GIT/hooks/x"), "lies in .git"),
        ("--- /dev/null\n+++ /dev/null\n@@ -0,0 +1 @@\n+x\n", "/dev/null before and after"),
        ("--- a/x\n+++ b/x\n", "has no hunk"),
        ("diff --git a/x b/x\nindex 1..2 100644\nBinary files a/x and b/x differ\n", "binary files cannot be patched"),
        ("diff --git a/x b/x\nGIT binary patch\nliteral 1\n", "binary files cannot be patched"),
        ("diff --git a/x b/y\ncopy from x\ncopy to y\n", "copies are not made"),
        ("diff --git a/x b/x\nnew file mode 120000\n--- /dev/null\n+++ b/x\n@@ -0,0 +1 @@\n+/etc\n", "a symbolic link"),
        ("diff --git a/x b/x\ndeleted file mode 160000\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-S\n", "a submodule"),
        ("diff --git a/x b/y\nrename from x\n", "needs both"),
        ("diff --git a/x b/y\nrename from x\nrename to y\n--- a/z\n+++ b/y\n@@ -1 +1 @@\n-a\n+b\n", "renamed from x"),
        ("diff --git a/x b/y\nrename from x\nrename to y\n--- /dev/null\n+++ b/z\n@@ -0,0 +1 @@\n+b\n",
         "from x to y, and is changed from /dev/null to z at line 4; begin another file with its own 'diff --git'"),
        ("diff --git a/x b/x\nnew file mode 100644\n--- a/x\n+++ b/x\n@@ -1 +1 @@\n-a\n+b\n", "by its mode line"),
        ("diff --git one two\nold mode 100644\nnew mode 100755\n", "cannot be told"),
        ("--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n-1\n\\ No newline at end of file\n-2\n+3\n+4\n", "its head counts"),
        ("--- a/\n+++ b/\n@@ -1 +1 @@\n-a\n+b\n", "an empty name"),
    ],
)  # fmt: skip
def test_what_cannot_be_applied_is_refused(text: str, says: str) -> None:
    """The message says where and what, and what to do where that is known."""
    with pytest.raises(PatchError) as raised:
        parse_patch(text)

    assert says in str(raised.value)
