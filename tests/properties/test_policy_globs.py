"""Globs match what a plain reference says, in time that no word or path can stretch."""

from __future__ import annotations

import fnmatch
import time
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from runner.approvals.lexer import Token
from runner.approvals.patterns import PathPattern, Word

if TYPE_CHECKING:
    from collections.abc import Sequence

word_globs = st.lists(st.sampled_from(["a", "b", ".", "*", "?", "[ab]", "[!a]", "[a-c]", "-"]), max_size=6).map("".join)
segments = st.lists(st.sampled_from(["a", "b", "*", "**", "a*", "?", "*b", "[ab]*"]), min_size=1, max_size=6)
folders = st.lists(st.sampled_from(["a", "b", "ab", "ba", ".a", "c"]), min_size=1, max_size=6)


def fits(pattern: Sequence[str], path: Sequence[str]) -> bool:
    """The meaning of a path glob, segment by segment."""
    if not pattern:
        return not path
    if pattern[0] == "**":
        if len(pattern) == 1:
            return bool(path)
        return any(fits(pattern[1:], path[start:]) for start in range(len(path) + 1))
    return bool(path) and fnmatch.fnmatchcase(path[0], pattern[0]) and fits(pattern[1:], path[1:])


@given(word_globs.filter(bool), st.text("abc.-/", max_size=8))
def test_globs_in_words_are_those_of_the_shell(glob: str, text: str) -> None:
    """A star takes any characters, slashes and leading dots too."""
    assert Word.of([glob]).matches(Token(text)) == fnmatch.fnmatchcase(text, glob)


@given(segments, folders)
def test_path_globs_are_matched_segment_by_segment(pattern: list[str], path: list[str]) -> None:
    """``**`` stands for any number of whole segments, at the end for at least one."""
    compiled = PathPattern.of("/".join(pattern))

    assert compiled.matches("/w/" + "/".join(path), "/w", folder=False) == fits(pattern, path)


@given(segments, folders, folders)
def test_what_a_glob_covers_it_matches(pattern: list[str], path: list[str], below: list[str]) -> None:
    """And what it matches below a folder, it may match below that folder."""
    compiled = PathPattern.of("/".join(pattern))
    folder, inside = "/w/" + "/".join(path), "/w/" + "/".join([*path, *below])

    if compiled.covers(folder, "/w"):
        assert compiled.matches(inside, "/w")
    if compiled.matches(inside, "/w"):
        assert compiled.may_match_below(folder, "/w")
        assert compiled.may_match_below("/w", "/w")
        assert compiled.may_match_below("/", "/w")


def test_no_word_or_path_makes_a_glob_slow() -> None:
    """Stars that almost match are not tried in every combination."""
    start = time.thread_time()

    assert not Word.of(["*a*b*c*d*e*f"]).matches(Token("abcde" * 3_000))
    assert not PathPattern.of("**/a/**/b/**/c/**/d").matches("/w/" + "a/b/c/" * 900, "/w")
    assert not PathPattern.of("**/*a*b*c*d/x").matches("/w/" + "abc" * 1_000 + "/y", "/w")
    assert time.thread_time() - start < 1
