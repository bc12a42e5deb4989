"""The confined worker finds files by pattern and lines by regular expression, bounded and in order."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import runner.sandbox

WORKER = Path(runner.sandbox.__file__).with_name("worker.py")


def _ask_all(requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    result = subprocess.run(
        [sys.executable, "-I", "-S", "-E", str(WORKER)],
        input="".join(json.dumps(request) + "\n" for request in requests).encode(),
        capture_output=True,
        check=True,
    )
    assert result.stderr == b""
    return [json.loads(line) for line in result.stdout.splitlines()]


def _ask(op: str, path: Path, **arguments: Any) -> dict[str, Any]:
    (answer,) = _ask_all(
        [
            {
                "id": 1,
                "op": op,
                "args": {"path": os.path.realpath(path), "root": os.path.realpath(path), "label": "", **arguments},
            }
        ]
    )
    return answer


def _glob(path: Path, pattern: str, limit: int = 1_000, label: str = "", root: Path | None = None) -> dict[str, Any]:
    workspace = os.path.realpath(root or path)
    answer = _ask("glob", path, pattern=pattern, limit=limit, label=label, root=workspace)
    assert answer["ok"], answer
    value: dict[str, Any] = answer["value"]
    return value


def _grep(path: Path, pattern: str, **more: Any) -> dict[str, Any]:
    answer = _ask("grep", path, **{"pattern": pattern, "limit": 100, "max_bytes": 50_000, "line_chars": 300, **more})
    assert answer["ok"], answer
    value: dict[str, Any] = answer["value"]
    return value


def _tree(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"text of {name}\n")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.py", ["a.py"]),
        ("**/*.py", ["a.py", "src/a.py", "src/deep/b.py", "test/c.py"]),
        ("src/**", ["src/a.py", "src/deep/b.py", "src/deep/b.txt"]),
        ("**", [".hidden/x", "a.py", "src/a.py", "src/deep/b.py", "src/deep/b.txt", "test/c.py"]),
        ("src/*/b.*", ["src/deep/b.py", "src/deep/b.txt"]),
        ("**/deep/**/b.txt", ["src/deep/b.txt"]),
        ("{src,test}/**/*.{py,pyi}", ["src/a.py", "src/deep/b.py", "test/c.py"]),
        ("**/?.py", ["a.py", "src/a.py", "src/deep/b.py", "test/c.py"]),
        ("**/[!a].py", ["src/deep/b.py", "test/c.py"]),
        ("**/[a-b].py", ["a.py", "src/a.py", "src/deep/b.py"]),
        ("./src//a.py", ["src/a.py"]),
        (".hidden/*", [".hidden/x"]),
        ("nowhere/**", []),
        ("[", []),
        ("a{b}", []),
    ],
)
def test_a_pattern_gives_the_paths_it_names_in_order(tmp_path: Path, pattern: str, expected: list[str]) -> None:
    """``*`` stays inside a component, ``**`` is any depth, dot files count, ``.git`` never does."""
    _tree(tmp_path, "a.py", "src/a.py", "src/deep/b.py", "src/deep/b.txt", "test/c.py", ".hidden/x", ".git/config")
    _tree(tmp_path, "src/.git/x.py")

    assert _glob(tmp_path, pattern)["paths"] == expected


@pytest.mark.parametrize(
    "pattern", ["/etc/*", "../*", "a/../../*", "", "/", "[z-a]", "{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}{a,b}"]
)
def test_a_pattern_that_leaves_the_folder_or_makes_no_sense_is_refused(tmp_path: Path, pattern: str) -> None:
    """The folder that was decided on is the only one that is searched."""
    answer = _ask("glob", tmp_path, pattern=pattern, limit=10)

    assert (answer["ok"], answer["code"]) == (False, "INVALID")


def test_an_empty_pattern_is_said_to_be_empty(tmp_path: Path) -> None:
    """It is no matter of folders."""
    assert _ask("glob", tmp_path, pattern="", limit=10)["message"].startswith("the pattern is empty")


def test_a_bracket_or_brace_that_is_not_closed_is_itself(tmp_path: Path) -> None:
    """As in bash; a closed one without a comma too."""
    _tree(tmp_path, "[a", "{a", "{a}", "{b,c", "a", "x[!]")

    for pattern in ("[a", "{a", "{a}", "{b,c", "x[[]!]", "*[!]"):
        assert len(_glob(tmp_path, pattern)["paths"]) == 1
    assert _glob(tmp_path, "?a")["paths"] == ["[a", "{a"]


MANY_STARS = ["*" * 200 + "z", "*a" * 60 + "z", "**/" * 200 + "z", "?*" * 60 + "z"]


@pytest.mark.parametrize("pattern", MANY_STARS)
def test_many_wildcards_take_no_time(tmp_path: Path, pattern: str) -> None:
    """In a glob, the filter of grep and a rule of git."""
    deep = "/".join("a" * 100)
    _tree(tmp_path, "a" * 250, "a" * 249 + "z", f"{deep}/b", f"{deep}/z")
    started = time.monotonic()

    found = _glob(tmp_path, f"{pattern}")["paths"]
    searched = _grep(tmp_path, "text", glob=pattern)["lines"]
    rules = f"{pattern}\n/**/{pattern}\n{'a/**/' * 60}q\n{'**/a/' * 60}q\n{'**/a*/' * 60}q\n"
    (tmp_path / ".gitignore").write_text(rules)
    kept = _glob(tmp_path, "**")["paths"]

    assert time.monotonic() - started < 10
    assert [path[-2:] for path in found if "/" not in path] == (["az"] if not pattern.startswith("**/") else [])
    assert {line.partition(":")[0][-1] for line in searched} == {"z"}
    assert ("a" * 250 in kept, "a" * 249 + "z" in kept, f"{deep}/b" in kept) == (True, pattern.startswith("**/"), True)


def test_links_are_listed_and_not_followed(tmp_path: Path) -> None:
    """A link to a folder outside, or in a circle, is a leaf."""
    _tree(tmp_path, "in/a.py")
    (tmp_path / "in/loop").symlink_to("..")
    (tmp_path / "in/etc").symlink_to("/etc")

    assert _glob(tmp_path, "**")["paths"] == ["in/a.py", "in/etc", "in/loop"]
    assert _grep(tmp_path, ".")["lines"] == ["in/a.py:1:text of in/a.py"]


def test_the_number_of_paths_is_capped_and_said(tmp_path: Path) -> None:
    """The first paths in order come, and a flag that there are more."""
    _tree(tmp_path, *[f"f{n}" for n in range(5)])

    assert _glob(tmp_path, "*", limit=3, label="sub/") == {
        "paths": ["sub/f0", "sub/f1", "sub/f2"],
        "more": True,
        "unreadable": 0,
        "ignored": 0,
        "incomplete": False,
    }
    assert _glob(tmp_path, "*", limit=5)["more"] is False


def test_names_that_are_not_text_are_shown_escaped(tmp_path: Path) -> None:
    """Bytes that are no UTF-8 and line breaks in names cannot break the list."""
    (tmp_path / "two\nlines").write_text("x")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")).write_text("x")

    assert _glob(tmp_path, "*")["paths"] == ["caf\\xe9", "two\\nlines"]
    assert _grep(tmp_path, "x")["lines"] == ["caf\\xe9:1:x", "two\\nlines:1:x"]


def test_a_very_deep_tree_is_searched_to_a_bound_and_that_is_said(tmp_path: Path) -> None:
    """No recursion error, no descriptors run out."""
    deep = tmp_path
    for _ in range(200):
        deep = deep / "d"
    deep.mkdir(parents=True)
    _tree(tmp_path, "a.txt")

    value = _glob(tmp_path, "**")

    assert (value["paths"], value["incomplete"]) == (["a.txt"], True)


def test_grep_gives_path_line_and_text(tmp_path: Path) -> None:
    """One line a match, in path order."""
    (tmp_path / "b.txt").write_text("no\nTODO one\r\nno\nx TODO two\n")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "z.txt").write_text("TODO last")

    value = _grep(tmp_path, "TODO \\w+", label="src/")

    assert value["lines"] == ["src/a/z.txt:1:TODO last", "src/b.txt:2:TODO one", "src/b.txt:4:x TODO two"]
    assert (value["more"], value["binary"]) == (False, 0)


def test_a_line_is_matched_without_its_end(tmp_path: Path) -> None:
    """CRLF is a line end like any other, in a large file too; text, numbers and columns are the same."""
    (tmp_path / "a.txt").write_bytes(b"TODO z\r\nq\r\nz\n")
    large = b"TODO z\r\n" + b"x" * 99 + b"\r\n"
    (tmp_path / "b.txt").write_bytes(large + (b"-" * 998 + b"\r\n") * 60_000)

    assert _grep(tmp_path, "z$")["lines"] == ["a.txt:1:TODO z", "a.txt:3:z", "b.txt:1:TODO z"]
    assert _grep(tmp_path, "^TODO z$")["lines"] == ["a.txt:1:TODO z", "b.txt:1:TODO z"]
    assert _grep(tmp_path, "q$")["lines"] == ["a.txt:2:q"]
    assert _grep(tmp_path, "\r")["lines"] == []


def test_grep_searches_one_file(tmp_path: Path) -> None:
    """The path may name a file; then its name is the label."""
    (tmp_path / "a.txt").write_text("x\ny\n")

    assert _grep(tmp_path / "a.txt", "y", label="a.txt/")["lines"] == ["a.txt:2:y"]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [("*.py", ["a.py", "src/b.py"]), ("src/*", ["src/b.py", "src/c.md"]), ("*.{md,rst}", ["src/c.md"])],
)
def test_grep_takes_only_files_that_a_glob_names(tmp_path: Path, glob: str, expected: list[str]) -> None:
    """A glob without a slash holds at any depth."""
    _tree(tmp_path, "a.py", "src/b.py", "src/c.md")

    lines = _grep(tmp_path, "text", glob=glob)["lines"]

    assert [line.split(":")[0] for line in lines] == expected


def test_grep_skips_binary_files_and_reads_other_encodings(tmp_path: Path) -> None:
    """A match in UTF-16 or Latin-1 text is found, one in an object file is not."""
    (tmp_path / "binary").write_bytes(b"needle\0\0")
    (tmp_path / "latin").write_bytes(b"caf\xe9 needle\n")
    (tmp_path / "wide").write_bytes("\ufeffa needle\n".encode("utf-16-le"))

    value = _grep(tmp_path, "needle")

    assert value["lines"] == ["latin:1:café needle", "wide:1:a needle"]
    assert value["binary"] == 1


@pytest.mark.parametrize("more", [{"limit": 10}, {"max_bytes": 120}], ids=["by number", "by bytes"])
def test_grep_is_capped_and_says_so(tmp_path: Path, more: dict[str, int]) -> None:
    """Neither the number of matches nor their size is open-ended."""
    (tmp_path / "a.txt").write_text("match me\n" * 1_000)

    value = _grep(tmp_path, "match", **more)

    assert value["more"] is True
    assert len(value["lines"]) <= 10
    assert sum(len(line) + 1 for line in value["lines"]) <= more.get("max_bytes", 1_000)


def test_a_long_line_is_cut_around_its_match(tmp_path: Path) -> None:
    """Minified files give the place, not the file."""
    (tmp_path / "a.js").write_text("x" * 100_000 + "needle" + "y" * 100_000)

    (line,) = _grep(tmp_path, "needle")["lines"]

    assert "needle" in line
    assert len(line) < 320


@pytest.mark.parametrize("pattern", ["(", "[a", "*", "a{99999999999}", "(?P<a>x)(?P<a>y)", "\\"])
def test_a_pattern_that_is_no_regular_expression_is_refused(tmp_path: Path, pattern: str) -> None:
    """The message says what is wrong with it."""
    answer = _ask("grep", tmp_path, pattern=pattern, limit=1, max_bytes=1, line_chars=1)

    assert answer["code"] == "INVALID"
    assert "no regular expression" in answer["message"]


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    """Nothing found in nowhere would mislead."""
    assert _ask("grep", tmp_path / "x", pattern="a", limit=1, max_bytes=9, line_chars=9)["code"] == "NOT_FOUND"
    assert _ask("glob", tmp_path / "x", pattern="*", limit=1)["code"] == "NOT_FOUND"


def test_a_pattern_without_end_is_stopped_by_killing_the_worker(tmp_path: Path) -> None:
    """The process that matches can be ended from outside at any time."""
    (tmp_path / "a.txt").write_text("a" * 60 + "!\n")
    arguments = {"path": os.path.realpath(tmp_path), "root": "/", "label": "", "pattern": "(a|a)*$"}
    request = {"id": 1, "op": "grep", "args": {**arguments, "limit": 1, "max_bytes": 99, "line_chars": 99}}
    started = time.monotonic()

    with pytest.raises(subprocess.TimeoutExpired):
        subprocess.run([sys.executable, "-I", str(WORKER)], input=json.dumps(request).encode(), timeout=1, check=True)

    assert time.monotonic() - started < 5


@pytest.mark.parametrize(
    "pattern",
    [
        "needle", "ne+dle", "need*le", "needle?", "n.edle", "^needle$", r"needle\.", r"\bneedle\b", r"\x6eeedle",
        r"\156eedle", "needle|hay", "(?i)NEEDLE", "[n]eedle", "nee{1}dle", "needl(e)", r"\u006eeedle", "hay$",
        r"\Aneedle",
    ],
)  # fmt: skip
def test_skipping_files_early_changes_no_result(tmp_path: Path, pattern: str) -> None:
    """A file is left out unread only when the expression cannot match in it."""
    texts = ["needle", "nedle", "neeeedle", "needl", "neddle", "needle.", "xneedlex", "NEEDLE", "hay", "n\needle", ""]
    for number, text in enumerate(texts):
        (tmp_path / f"{number:02}").write_text(text + "\n")
    expected = [
        f"{number:02}:{at}:{line}"
        for number, text in enumerate(texts)
        for at, line in enumerate(text.split("\n"), 1)
        if re.search(pattern, line)
    ]

    assert _grep(tmp_path, pattern)["lines"] == expected


@pytest.mark.parametrize("pattern", ["needle", r"nee+dle \w", r"needle \(x\)", "^needle", "nothing at all"])
def test_a_large_tree_gives_what_every_file_by_itself_gives(tmp_path: Path, pattern: str) -> None:
    """However a search is narrowed down, hidden, ignored, oddly named and encoded files count."""
    for number in range(320):
        _tree(tmp_path, f"d{number % 7}/{number:03}.txt")
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "d0" / "x.log").write_text("needle a\n")
    (tmp_path / "d1" / ".hidden").write_text("no\nneedle (x)\n")
    (tmp_path / "d2" / "binary").write_bytes(b"\0needle\n")
    (tmp_path / "d3" / "late").write_bytes(b"x" * 9_000 + b"\nneedle b\n\0")
    (tmp_path / "d4" / "wide").write_bytes("\ufeffneedle c\n".encode("utf-16-be"))
    (tmp_path / "d5" / "latin").write_bytes(b"needle \xe9\n")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/d6/caf\xe9")).write_text("needle d\nneeedle e\n")
    bounds = {"pattern": pattern, "limit": 100, "max_bytes": 50_000, "line_chars": 300}
    requests = []
    for shown in _glob(tmp_path, "**")["paths"]:
        path = f"{os.path.realpath(tmp_path)}/{shown}".replace("\\xe9", "\udce9")
        requests.append({"id": 1, "op": "grep", "args": {"path": path, "label": shown + "/", **bounds}})
    expected = [line for answer in _ask_all(requests) for line in answer["value"]["lines"]]

    assert _grep(tmp_path, pattern)["lines"] == expected


def test_the_worker_starts_fast_and_needs_only_the_standard_library() -> None:
    """Neither the product nor a large library is loaded."""
    code = f"import sys\n__file__ = {str(WORKER)!r}\nexec(open(__file__).read())\nprint(*sys.modules)"

    result = subprocess.run(
        [sys.executable, "-I", "-S", "-E", "-c", code],
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    )

    loaded = set(result.stdout.split())
    assert "files.requests" in loaded
    assert not loaded & {
        "runner",
        "files.searches",
        "typing",
        "subprocess",
        "pathlib",
        "difflib",
        "asyncio",
        "logging",
        "threading",
    }


def _repository(root: Path) -> None:
    (root / ".git" / "info").mkdir(parents=True)
    (root / ".git" / "HEAD").write_text("ref: refs/heads/main\n")


def test_what_git_ignores_is_left_out_and_counted(tmp_path: Path) -> None:
    """Rules of the folder and of those above it, of the exclude file, and negations; hidden files are found."""
    _repository(tmp_path)
    _tree(tmp_path, "a.py", ".hidden", "a.log", "keep.log", "build/x.py", "src/build/y.py", "src/z.tmp", "notes/n.txt")
    (tmp_path / ".gitignore").write_text("*.log\n!keep.log\n/build/\n")
    (tmp_path / "src" / ".gitignore").write_text("*.tmp\n")
    (tmp_path / ".git" / "info" / "exclude").write_text("notes\n")

    found = _glob(tmp_path, "**/*")

    assert found["paths"] == [".gitignore", ".hidden", "a.py", "keep.log", "src/.gitignore", "src/build/y.py"]
    assert found["ignored"] == 4
    assert _grep(tmp_path, "text of .*log")["lines"] == ["keep.log:1:text of keep.log"]
    assert _glob(tmp_path, "*.log")["ignored"] == 1


def test_what_is_named_outright_is_found_although_git_ignores_it(tmp_path: Path) -> None:
    """A path without a wildcard, the folder at the start of a pattern, and the folder or file that is searched."""
    _repository(tmp_path)
    _tree(tmp_path, "build/x.py", "build/sub/y.py", "debug.log")
    (tmp_path / ".gitignore").write_text("build/\n*.log\n")

    assert _glob(tmp_path, "debug.log")["paths"] == ["debug.log"]
    assert _glob(tmp_path, "build/**/*.py")["paths"] == ["build/sub/y.py", "build/x.py"]
    assert _glob(tmp_path / "build", "**/*", root=tmp_path)["paths"] == ["sub/y.py", "x.py"]
    assert _glob(tmp_path, "{build,other}/*")["paths"] == ["build/x.py"]
    assert _glob(tmp_path, "b*/*.py") == {
        "paths": [], "more": False, "unreadable": 0, "ignored": 1, "incomplete": False,
    }  # fmt: skip
    assert _grep(tmp_path / "debug.log", "text", label="debug.log")["lines"] == ["debug.log:1:text of debug.log"]


def test_rules_above_the_folder_that_is_searched_hold_in_it(tmp_path: Path) -> None:
    """In a repository from its top on, elsewhere from the workspace on, and not from outside of either."""
    (tmp_path / ".gitignore").write_text("*.a\n")
    root = tmp_path / "root"
    _tree(root, "sub/x.a", "sub/x.b", "sub/x.c", "sub/deep/x.b")
    (root / ".gitignore").write_text("*.b\n/sub/x.c\n")

    assert _glob(root / "sub", "**/*", root=root)["paths"] == ["x.a"]
    assert _glob(root / "sub" / "deep", "**/*", root=root)["paths"] == []
    assert _glob(root / "sub", "**/*")["paths"] == ["deep/x.b", "x.a", "x.b", "x.c"]
    assert _glob(root, "**/x*")["paths"] == ["sub/x.a"]
    _repository(tmp_path)
    assert _glob(root / "sub", "**/*", root=root)["paths"] == []


def test_a_repository_inside_another_has_rules_of_its_own(tmp_path: Path) -> None:
    """And only those; a worktree's control folder lies elsewhere."""
    _repository(tmp_path)
    _repository(tmp_path / "vendored")
    _tree(tmp_path, "x.log", "vendored/x.log", "vendored/x.tmp", "tree/x.log", "tree/x.old")
    (tmp_path / ".gitignore").write_text("*.log\n")
    (tmp_path / "vendored" / ".gitignore").write_text("*.tmp\n")
    control = tmp_path / ".git" / "worktrees" / "tree"
    control.mkdir(parents=True)
    (control / "HEAD").write_text("ref: refs/heads/tree\n")
    (control / "commondir").write_text("../..\n")
    (tmp_path / "tree" / ".git").write_text(f"gitdir: {control}\n")
    (tmp_path / ".git" / "info" / "exclude").write_text("*.old\n")

    assert _glob(tmp_path, "**/x.*")["paths"] == ["tree/x.log", "vendored/x.log"]


@pytest.mark.parametrize("version", ["2", "3", "4"])
@pytest.mark.parametrize("kind", ["sha1", "sha256"])
def test_a_tracked_file_is_found_although_a_rule_names_it(tmp_path: Path, git: Any, version: str, kind: str) -> None:
    """Whatever version the index has, for files in ignored folders too."""
    git(tmp_path, "init", "--quiet", f"--object-format={kind}")
    names = ["build/kept.py", "build/lib/kept.py", "build/lib/other.py", "buildings.py", "x.log"]
    _tree(tmp_path, *names, "build/lost.py", "build/none/lost.py", "y.log")
    (tmp_path / ".gitignore").write_text("build/\n*.log\n")
    git(tmp_path, "add", "--force", "--", *names)
    if version == "3":
        (tmp_path / "new.log").write_text("x")
        git(tmp_path, "add", "--force", "--intent-to-add", "new.log")
        names.append("new.log")
    git(tmp_path, "update-index", f"--index-version={version}")

    assert _glob(tmp_path, "**/*")["paths"] == sorted([".gitignore", *names])
    assert len(_grep(tmp_path, "text of")["lines"]) == 5


@pytest.mark.parametrize("index", [b"", b"DIRC", b"DIRC\0\0\0\2\0\0\0\7short", b"DIRC\0\0\0\4\0\0\1\0" + b"\xff" * 500])
def test_a_damaged_index_tracks_nothing(tmp_path: Path, index: bytes) -> None:
    """The search goes on by the rules alone; a link and a pipe in their places are not followed."""
    _repository(tmp_path)
    _tree(tmp_path, "a.py", "b.log", "sub/c.log")
    (tmp_path / ".git" / "index").write_bytes(index)
    (tmp_path / ".gitignore").write_text("*.log\n")
    os.mkfifo(tmp_path / "sub" / ".gitignore")
    (tmp_path / ".git" / "info" / "exclude").symlink_to(tmp_path / "a.py")

    assert _glob(tmp_path, "**/*")["paths"] == [".gitignore", "a.py", "sub/.gitignore"]
