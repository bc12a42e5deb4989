"""Bytes of programs become text without loss, and call ids become safe file names."""

from __future__ import annotations

import random
import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runner.tools.output import decode_output, escape_chunks, file_stem, is_clean


@pytest.mark.parametrize(
    ("data", "text", "escaped"),
    [
        (b"", "", False),
        (b"plain \\x41 \\\\", "plain \\x41 \\\\", False),
        ("käse \U0001f9c0".encode(), "käse \U0001f9c0", False),
        (b"a\xffb", "a\\xffb", True),
        (b"a\0b", "a\\x00b", True),
        (b"cut \xf0\x9f\xa7", "cut \\xf0\\x9f\\xa7", True),
        (b"\\x41\xff", "\\\\x41\\xff", True),
        (b"\\\xff", "\\\\\\xff", True),
        (b"\\\n\xff", "\\\n\\xff", True),
        (b"\xff\\", "\\xff\\", True),
        (b"\xff C:\\new", "\\xff C:\\new", True),
        (b"surrogate \xed\xa0\x80", "surrogate \\xed\\xa0\\x80", True),
    ],
)
def test_only_what_is_no_text_is_escaped(data: bytes, text: str, escaped: bool) -> None:
    """Clean output stays as it is; otherwise an odd run of backslashes before xNN means a byte."""
    assert decode_output(data) == (text, escaped)
    assert is_clean([data]) is not escaped


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_pieces_give_what_the_whole_gives(size: int) -> None:
    """However a long output is cut, its text is the same."""
    data = b"\\\\x41\\x4g \\\xff\\x4" + "ü\\x41€".encode() + b"\0\\\\\\xfe\xfe end\\"
    pieces = [data[at : at + size] for at in range(0, len(data), size)]

    assert "".join(escape_chunks(pieces)) == decode_output(data)[0]
    assert is_clean([piece.replace(b"\0", b"") for piece in pieces]) is False


@pytest.mark.parametrize("call_id", ["call_1_1", "toolu_01A-b.c", "x" * 64])
def test_an_ordinary_call_id_is_its_own_file_name(call_id: str) -> None:
    """Ids of all known providers stay readable."""
    assert file_stem(call_id) == call_id


@pytest.mark.parametrize(
    "call_id",
    ["", ".", "..", "../../etc/passwd", "a/b", "a\0b", "x" * 65, "käse", ".hidden", "\ud800", "a b", "con:", "-rf"],
)
def test_a_hostile_call_id_gives_a_harmless_name_of_its_own(call_id: str) -> None:
    """No separator, no leading dot, bounded, and different ids stay different."""
    stem = file_stem(call_id)

    assert stem
    assert stem[0] not in ".-"
    assert len(stem) <= 80
    assert all(character.isascii() and (character.isalnum() or character in "._-") for character in stem)
    assert stem != call_id
    assert stem != file_stem(call_id + "x")


def _plain_escape(data: bytes) -> str:
    """The rule, written down one character after the other."""
    text = data.decode("utf-8", "surrogateescape")
    done: list[str] = []
    for at, character in enumerate(text):
        behind = text[at:].lstrip("\\")
        if character == "\0" or "\udc80" <= character <= "\udcff":
            done.append(f"\\x{ord(character) & 0xFF:02x}")
        elif character == "\\" and re.match("x[0-9a-f]{2}|[\0\udc80-\udcff]", behind):
            done.append("\\\\")
        else:
            done.append(character)
    return "".join(done)


@given(
    parts=st.lists(
        st.sampled_from([b"\\", b"x41", b"x4", b"udc80", b"\xff", b"\0", b"\xc3\xa9", b"\xc3", b"a", b"\\udc"])
    )
)
def test_every_mixture_of_bytes_and_backslashes_follows_the_rule(parts: list[bytes]) -> None:
    """Text that looks like an escape of Python's among them."""
    data = b"".join(parts)

    assert "".join(escape_chunks([data])) == _plain_escape(data)


@pytest.mark.parametrize(
    "data",
    [random.Random(1).randbytes(4_000_000), b"\xff" + b"\\" * 4_000_000, b"\0" * 4_000_000],
    ids=["random", "backslashes", "NUL"],
)
def test_bytes_that_are_no_text_cost_little(data: bytes) -> None:
    """Some 50 ms a megabyte at most: nothing else of the run happens meanwhile."""
    started = time.process_time()
    decode_output(data)

    assert time.process_time() - started < 2
