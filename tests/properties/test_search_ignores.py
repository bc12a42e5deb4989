"""The search tools leave out what git ignores, and find the same with ripgrep and without."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from runner.sandbox.files import ignores, searches, walks

if TYPE_CHECKING:
    from collections.abc import Iterator

SOME = settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))

NAMES = st.text("ab.é!#[] ", min_size=1, max_size=3).filter(lambda name: name not in (".", "..") and name.strip(" "))
PATHS = st.lists(NAMES, min_size=1, max_size=4).map("/".join)
PIECES = st.sampled_from(
    ["a", "b", "/", "/", "*", "**", "**/", "?", ".", "é", "\\", "\\a", "[ab]", "[!a]", "[^b]", "[a-c]", "[]a]", "[",
     "]", "[[:alpha:]]", "[[:punct:]x]", "[[:nope:]]", "[a", "!", "#", " ", "\\ ", "-", "[a\\]b]", "[\\a-b]", "[/a]"]
)  # fmt: skip
LINES = st.lists(PIECES, max_size=6).map("".join)
RULES = st.lists(st.one_of(LINES, PATHS, PATHS.map("/{}".format), PATHS.map("!{}".format)), max_size=5)


def _git(root: Path, *arguments: str) -> bytes:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(root),
        "XDG_CONFIG_HOME": str(root),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    return subprocess.run(
        ["git", "-c", "core.excludesFile=", *arguments], cwd=root, env=environment, check=True, capture_output=True
    ).stdout


@pytest.fixture(scope="module")
def empty_repository() -> Iterator[Path]:
    """A control folder to copy: making one takes git longer than the rest of an example."""
    with tempfile.TemporaryDirectory() as directory:
        _git(Path(directory), "init", "--quiet")
        yield Path(directory) / ".git"


def _make(root: Path, paths: list[str]) -> None:
    for path in paths:
        target = root / path
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(f"one\n{path} two\n")
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue  # a path below or above an earlier one


def _globbed(root: Path, folder: str = "", pattern: str = "**/*") -> list[str]:
    base = os.path.realpath(root)
    found = walks.glob(
        {
            "path": f"{base}/{folder}".rstrip("/"),
            "root": base,
            "pattern": pattern,
            "label": f"{folder}/" if folder else "",
            "limit": 9_999,
        }
    )
    assert not found["more"]
    assert not found["incomplete"]
    return sorted(found["paths"])


@SOME
@given(
    paths=st.lists(PATHS, min_size=1, max_size=9),
    rules=st.dictionaries(st.sampled_from(["", "a/", "b/", "a/b/", "é/"]), RULES, max_size=3),
    exclude=RULES,
    forced=st.integers(min_value=0, max_value=3),
    end=st.sampled_from(["\n", "\r\n"]),
)
@example(paths=["a/b", "aa/b", "a.b/b"], rules={"": ["a**/b"]}, exclude=[], forced=0, end="\n")
@example(paths=["a/b/a", "a/a"], rules={"": ["a/**", "!a/b/"]}, exclude=[], forced=1, end="\n")
@example(paths=["a ", "b", "a\\"], rules={"": ["a\\ ", "\\b", "\\\\ "]}, exclude=["!b"], forced=0, end="\r\n")
def test_what_is_listed_is_what_git_would_list(
    empty_repository: Path,
    paths: list[str],
    rules: dict[str, list[str]],
    exclude: list[str],
    forced: int,
    end: str,
) -> None:
    """Random trees and rules, nested and excluded, some files tracked against the rules."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        shutil.copytree(empty_repository, root / ".git")
        _make(root, [*paths, *(f"{folder}.gitignore" for folder in rules)])
        for folder, lines in rules.items():
            if (root / folder).is_dir():
                (root / folder / ".gitignore").write_bytes(end.join([*lines, ""]).encode())
        (root / ".git/info/exclude").write_text("\n".join(exclude), encoding="utf-8")
        files = [path for path in paths if (root / path).is_file()]
        if files[:forced]:
            _git(root, "add", "--force", "--", *(f":(literal){path}" for path in files[:forced]))

        listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--deduplicate")
        expected = sorted(name for name in listed.decode().split("\0") if name)

        assert _globbed(root) == expected
        for folder in {path.rpartition("/")[0] for path in files} - {""}:
            inside = set(_globbed(root, folder))
            assert inside >= {path for path in expected if path.startswith(f"{folder}/")}


@settings(SOME, max_examples=100)
@given(lines=st.lists(LINES, min_size=1, max_size=6), paths=st.lists(PATHS, min_size=1, max_size=30))
@example(lines=["a**/b"], paths=["a/b", "aa/b", "a.b/b", "a/a/b", "b/a/b"])
@example(lines=["/a/**b", "b**"], paths=["a/b", "a/a/b", "a/ab", "b/b", "a/a/bb"])
@example(lines=["[[:alpha:]b", "[]a]", "[!]a]"], paths=["a", "b", "]", "#", "[", "é"])
@example(lines=["?**/b"], paths=["a/a/b", "aa/b", "ab", "a/b"])
@example(lines=["[-b]", "[a-[:alpha:]-c]!"], paths=["a/a/b", "aa/b", "a", "b", "-", "-!", "b!"])
@example(
    lines=["*a*b*", "**/a/**/b/**/a", "a/*b*a*/**", "**/*a*/**\\/b"],
    paths=["ab", "a/b/a", "a/a/b/b/a", "a/bba/x", "b/a/b"],
)
@example(lines=["a/", "!a", "*/b/", "!*"], paths=["a/b", "b/b/a", "a", "b"])
def test_a_rule_means_what_it_means_to_git(empty_repository: Path, lines: list[str], paths: list[str]) -> None:
    """Any rules against any paths, in one file of rules."""
    root = empty_repository.parent
    data = "\n".join(lines).encode()
    (root / ".gitignore").write_bytes(data)
    asked = "\0".join(dict.fromkeys(paths))
    shown = subprocess.run(
        ["git", "-c", "core.excludesFile=", "check-ignore", "--no-index", "--stdin", "-z", "-v", "-n"],
        cwd=root,
        input=asked.encode(),
        capture_output=True,
        check=False,
    ).stdout.split(b"\0")
    expected = {
        path.decode(): bool(source) and not rule.startswith(b"!")
        for source, _, rule, path in zip(*(iter(shown),) * 4, strict=False)
    }

    rules = ignores.RuleFile(b"", data)

    def decide(path: str) -> bool:
        steps = path.split("/")
        for depth in range(1, len(steps) + 1):
            name = "/".join(steps[:depth]).encode()
            if rules.decide(name, name.rpartition(b"/")[2], is_folder=depth < len(steps)):
                return True
        return False

    assert {path: decide(path) for path in expected} == expected
    assert len(expected) == len(set(paths))


CONTENTS = st.lists(
    st.sampled_from(
        [
            b"needle",
            b"Needle",
            b"need",
            b"\n",
            b"\n",
            b"\r\n",
            b" ",
            b"\0",
            b"\xff",
            "é".encode(),
            b"x" * 400,
            b"needles",
            b"needle\r\n",
            b"\r",
        ]
    ),
    max_size=8,
).map(b"".join)
WIDE = st.sampled_from(["needle\n", "é needle", "none"]).map(lambda text: text.encode("utf-16"))
MARKED = CONTENTS.map(lambda data: b"\xef\xbb\xbf" + data)


@pytest.mark.skipif(not os.path.lexists(searches.RIPGREP), reason=f"needs {searches.RIPGREP}")
@settings(SOME, max_examples=20)
@given(
    tree=st.dictionaries(PATHS, st.one_of(CONTENTS, WIDE, MARKED), min_size=1, max_size=8),
    rules=RULES,
    pattern=st.sampled_from(
        ["needle", "need(le)?s", "^needle$", "needle|x", "(?i)needle", "need.e", "nee", r"needle\b", "needle$", "s$"]
    ),
    glob=st.sampled_from([None, "*.a", "a*", "**/b/*", "{a,b}", "é"]),
    limit=st.sampled_from([2, 100]),
)
def test_ripgrep_changes_no_result(
    empty_repository: Path, tree: dict[str, bytes], rules: list[str], pattern: str, glob: str | None, limit: int
) -> None:
    """Hidden, ignored and binary files, encodings, long lines, order and limits: the answer is the same."""
    answers = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        shutil.copytree(empty_repository, root / ".git")
        _make(root, list(tree))
        for path, data in tree.items():
            if (root / path).is_file():
                (root / path).write_bytes(data)
        (root / ".gitignore").write_text("\n".join(rules), encoding="utf-8")
        base = os.path.realpath(root)
        arguments: dict[str, Any] = {
            "path": base,
            "root": base,
            "pattern": pattern,
            "glob": glob,
            "label": "",
            "limit": limit,
            "max_bytes": 50_000,
            "line_chars": 60,
        }
        for program, many in (("/nowhere", 300), (searches.RIPGREP, 0), (searches.RIPGREP, 1)):
            with patch.multiple(searches, RIPGREP=program, MANY=many, BATCH=2):
                answers.append(searches.grep(dict(arguments)))
        patterns = ["**/" + (glob or "*")] if "/" not in (glob or "") else [glob or ""]
        listed = {path for each in patterns for path in _globbed(root, "", each)}

    assert answers[0] == answers[1] == answers[2]
    assert {line.split(":")[0] for line in answers[0]["lines"]} <= listed
