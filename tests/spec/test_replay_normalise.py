"""Texts of two runs are compared without what is known, or declared, to differ."""

from __future__ import annotations

import time

import pytest

from runner.errors import ConfigError
from runner.hooks.normalise import MAX_PATTERN, SECONDS, Normaliser, Places, check_patterns, pattern_problem

STATE = "Workspace: {0}/site\nTemporary folder: {0}/state/tmp ($TMPDIR). What is put elsewhere\nNetwork: off."


def places(root: str, workspace: str = "") -> Places:
    """The places of a run below ``root``."""
    found = Places(workspace)
    found.learn(STATE.format(root))
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("/r/site", "<workspace>"),
        ("cd /r/site/src && ls", "cd <workspace>/src && ls"),
        ("in /r/site.", "in <workspace>."),
        ("'/r/site':/r/site", "'<workspace>':<workspace>"),
        ("TMPDIR=/r/state/tmp/x HOME=/r/state/home", "TMPDIR=<tmp>/x HOME=<home>"),
        ("\x1b[31m/r/site/a\x1b[0m", "\x1b[31m<workspace>/a\x1b[0m"),
        ('{"command": "ls\\n/r/site/a"}', '{"command": "ls\\n<workspace>/a"}'),
        ("/r/siteshop /r/site-2 /r/site.bak", "/r/siteshop /r/site-2 /r/site.bak"),
        ("/usr/r/site and x/r/site", "/usr/r/site and x/r/site"),
        ("", ""),
    ],
)
def test_paths_of_a_run_become_placeholders(text: str, expected: str) -> None:
    """Whole paths only."""
    assert Normaliser().text(text, places("/r")) == expected


def test_the_workspace_of_the_header_counts_before_anything_is_said() -> None:
    """And a later one beside it, as after a resume."""
    found = places("/new", "/old/site")

    assert Normaliser().text("/old/site/a /new/site/a", found) == "<workspace>/a <workspace>/a"


@pytest.mark.parametrize("path", ["", "/", "relative", "/" + "x" * 5_000])
def test_what_is_no_usable_path_changes_nothing(path: str) -> None:
    """A log may say anything."""
    found = Places(path)
    found.learn(f"Workspace: {path}\nTemporary folder: ")

    assert Normaliser().text("a / b relative /c", found) == "a / b relative /c"


def test_paths_move_from_one_run_to_another() -> None:
    """Inside of JSON they are escaped; what the other has not stays."""
    recorded, now = places("/r"), places('/n "q"')

    assert recorded.moved("cat /r/site/a /r/other", now) == 'cat /n "q"/site/a /r/other'
    assert recorded.moved('{"path": "/r/site/a"}', now, in_json=True) == '{"path": "/n \\"q\\"/site/a"}'
    assert Places().moved("/r/site", now) == "/r/site"
    assert recorded.moved("/r/site", Places()) == "/r/site"


def test_ids_of_sessions_and_background_processes_are_not_compared() -> None:
    """They are new in each run."""
    text = "session-01234567-89ab-cdef-0123-456789abcdef: Started in the background as process 4711. Its output"

    assert Normaliser().text(text, Places()) == "<session>: Started in the background as process <process>. Its output"


def test_declared_patterns_are_replaced_in_order() -> None:
    """Every match, over lines; flags can stand in the pattern."""
    normaliser = Normaliser([r"in \d+\.\d+s", r"(?m)^\d\d:\d\d", "volatile"])
    try:
        assert normaliser.text("12:30 5 passed in 0.12s\n12:31 end", Places()) == (
            "<<volatile>> 5 passed <<volatile>>\n<<volatile>> end"
        )
        assert normaliser.text("é 😀 in 1.00s \x00\ud800", Places()) == "é 😀 <<volatile>> \x00\ud800"
    finally:
        normaliser.close()
        normaliser.close()


def test_a_pattern_that_takes_too_long_is_ended() -> None:
    """Its process is; the caller gets a mistake of configuration soon."""
    normaliser = Normaliser(["(x+x+)+y"])
    started = time.monotonic()

    with pytest.raises(ConfigError, match="take over 3 s on one text"):
        normaliser.text("x" * 64, Places())

    assert time.monotonic() - started < SECONDS + 5
    normaliser.close()


def test_patterns_are_tried_on_recorded_texts_beforehand() -> None:
    """None need be tried without patterns."""
    check_patterns([], iter(lambda: pytest.fail("read"), None))
    check_patterns([r"\d+"], ["1", "2"])
    with pytest.raises(ConfigError, match="take over"):
        check_patterns(["(x+x+)+y"], ["a", "x" * 64])


@pytest.mark.parametrize(
    ("pattern", "problem"),
    [
        ("(", "is no regular expression"),
        ("a{99999999999}", "is no regular expression"),
        ("x" * (MAX_PATTERN + 1), "is longer than 1,000 characters"),
        ("a*", "matches the empty text"),
        ("[[a]", None),
        (r"in \d+\.\d\ds", None),
    ],
)
def test_what_is_wrong_with_a_pattern(pattern: str, problem: str | None) -> None:
    """Found when it is loaded."""
    found = pattern_problem(pattern)

    assert found is None if problem is None else found is not None and found.startswith(problem)
