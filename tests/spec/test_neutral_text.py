"""What a model wrote can be read, but neither a terminal nor a CI system acts on it."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.neutral import neutral_json, neutral_line, neutral_text

PIECES = ["::", ":", "##", "#", "[", "]", "vso[", "error", "\n", "\r", "\r\n", "\t", " ", "\x1b]0;t\x07", "\u202e", "x"]


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("::add-mask::a\n \t::stop-commands::x", ":\\:add-mask::a\n \t:\\:stop-commands::x"),
        ("a ::b:: c", "a ::b:: c"),
        ("a ##[error]b ##vso[task.x]", "a #\\#[error]b #\\#vso[task.x]"),
        ("## Title", "## Title"),
        ("\x1b]0;t\x07\x9b31m\x7f", "\\x1b]0;t\\x07\\x9b31m\\x7f"),
        ("\u202eevil\u2066\u061c\u2028", "\\u202eevil\\u2066\\u061c\\u2028"),
        ("a\r\nb\r::c::", "a\nb\\x0d::c::"),
        ("tab\tline\nsnow ☃ \U0001f468\u200d\U0001f469", "tab\tline\nsnow ☃ \U0001f468\u200d\U0001f469"),
        ("half \ud800", "half \\ud800"),
    ],
)
def test_only_what_would_act_is_broken_up(text: str, shown: str) -> None:
    """Newlines, tabs and everything that is only shown stay."""
    assert neutral_text(text) == shown


@given(text=st.lists(st.sampled_from(PIECES), max_size=12).map("".join))
def test_nothing_that_acts_is_left(text: str) -> None:
    """In any combination; a line is one line; doing it twice changes nothing."""
    shown = neutral_text(text)

    assert not any(character in shown for character in "\r\x1b\x07\u202e")
    assert not any(line.strip().startswith("::") for line in shown.split("\n"))
    assert "##[" not in shown
    assert "##vso[" not in shown
    assert neutral_text(shown) == shown
    assert "\n" not in neutral_line(text)
    assert "\t" not in neutral_line(text)


@given(text=st.lists(st.sampled_from([*PIECES, "\\", '"', "é", "\x85"]), max_size=12).map("".join))
def test_json_keeps_its_value(text: str) -> None:
    """Keys and strings, written in either way."""
    value = {text: [text]}
    for ascii_only in (True, False):
        shown = neutral_json(json.dumps(value, ensure_ascii=ascii_only, indent=1))
        assert json.loads(shown) == value
        assert "##[" not in shown
        assert "##vso[" not in shown
        assert not any(character in shown for character in "\u202e\x85")


@pytest.mark.parametrize("piece", ["\n", " ", "#", ":", "##a"])
def test_long_runs_cost_no_more_than_short_ones(piece: str) -> None:
    """An answer of a megabyte is shown at once, whatever it is made of."""
    started = time.process_time()
    neutral_text(piece * 1_000_000)

    assert time.process_time() - started < 5
