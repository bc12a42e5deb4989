"""Nothing is lost on the way from bytes to the model and from an edit to a file."""

from __future__ import annotations

import os
import re
import tempfile
from itertools import pairwise
from pathlib import Path

from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from runner.agent.settings import CompactionSpec
from runner.compaction.spill import Spill, SpillStore
from runner.messages import text_of
from runner.redaction import Redactor
from runner.sandbox.files import changes, pages, places, walks
from runner.tools.output import decode_output, escape_chunks

BOUNDED = settings(max_examples=150, deadline=None)

_bytes = st.binary(max_size=60) | st.lists(
    st.sampled_from([b"\\", b"x", b"41", b"ff", b"\xff", b"\0", b"\n", "é".encode(), b"\xc3", b"a"]), max_size=16
).map(b"".join)
_lines = st.lists(st.text("ab c\té€", max_size=6), max_size=12).map("\n".join)


def _bytes_of(text: str) -> bytes:
    """The bytes an escaped output stands for, by the rule its documentation gives."""

    def original(match: re.Match[str]) -> bytes:
        slashes, digits = len(match[1]), match[2]
        if slashes % 2:
            return b"\\" * (slashes // 2) + bytes([int(digits, 16)])
        return b"\\" * (slashes // 2) + b"x" + digits.encode()

    out, at = b"", 0
    for match in re.finditer(r"(\\+)x([0-9a-f]{2})", text):
        out += text[at : match.start()].encode() + original(match)
        at = match.end()
    return out + text[at:].encode()


@BOUNDED
@given(data=_bytes, cuts=st.lists(st.integers(min_value=0, max_value=60), max_size=4))
def test_output_can_be_turned_back_into_its_bytes(data: bytes, cuts: list[int]) -> None:
    """Clean output is itself, escaped output says each byte; cutting it into pieces changes nothing."""
    text, escaped = decode_output(data)
    edges = sorted({0, len(data), *[cut for cut in cuts if cut < len(data)]})
    pieces = [data[start:end] for start, end in pairwise(edges)]

    assert (_bytes_of(text) if escaped else text.encode()) == data
    assert not escaped or "".join(escape_chunks(pieces)) == text
    assert "\0" not in text


@BOUNDED
@example(text="aé€€\n\n", limit=2, room=8)
@given(text=_lines, limit=st.integers(min_value=1, max_value=5), room=st.integers(min_value=8, max_value=40))
def test_the_pages_of_a_file_are_the_file(text: str, limit: int, room: int) -> None:
    """Reading on where each page says gives every line once; only a line longer than a page is cut."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(os.path.realpath(directory)) / "f"
        path.write_text(text)
        seen, offset, cut = "", 1, False
        while True:
            page = pages.read({"path": str(path), "offset": offset, "limit": limit, "max_bytes": room})
            seen += page["text"]
            cut |= page["cut"] is not None
            assert len(page["text"].encode()) <= room
            if not page["more"]:
                break
            offset = page["last"] + 1

    assert cut or seen == text
    assert cut is any(len(line.encode()) > room for line in text.splitlines(keepends=True))


@BOUNDED
@given(text=_lines, data=st.data(), end=st.sampled_from(["\n", "\r\n"]), mark=st.sampled_from([b"", b"\xef\xbb\xbf"]))
def test_an_edit_replaces_one_place_and_nothing_else(text: str, data: st.DataObject, end: str, mark: bytes) -> None:
    """For a piece of the file that stands in it once the result is that of a plain replacement."""
    assume(text)
    start = data.draw(st.integers(min_value=0, max_value=len(text) - 1))
    old = text[start : data.draw(st.integers(min_value=start + 1, max_value=len(text)))]
    new = data.draw(_lines)
    count = sum(text.startswith(old, at) for at in range(len(text)))
    assume(old != new)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(os.path.realpath(directory)) / "f"
        before = mark + text.replace("\n", end).encode()
        path.write_bytes(before)
        try:
            changes.edit({"path": str(path), "edits": [{"old": old, "new": new}]})
            code = ""
        except places.Refusal as refusal:
            code = refusal.code
        after = path.read_bytes()

    if count == 1:
        # A file without a line break has no line ends to keep, so new ones are plain.
        kept = end if "\n" in text else "\n"
        assert (code, after) == ("", mark + text.replace(old, new).replace("\n", kept).encode())
    else:
        assert (code, after) == ("AMBIGUOUS", before)


@BOUNDED
@given(
    name=st.text("ab.", min_size=1, max_size=5),
    pattern=st.text("ab.*?", min_size=1, max_size=6).filter(lambda text: "**" not in text and text not in (".", "..")),
)
def test_a_component_of_a_pattern_means_what_it_means_in_a_shell(name: str, pattern: str) -> None:
    """Stars and question marks, against a plain reference."""

    def matches(rest: str, parts: str) -> bool:
        if not parts:
            return not rest
        if parts[0] == "*":
            return any(matches(rest[at:], parts[1:]) for at in range(len(rest) + 1))
        return bool(rest) and parts[0] in ("?", rest[0]) and matches(rest[1:], parts[1:])

    assume(name not in (".", ".."))
    with tempfile.TemporaryDirectory() as directory:
        root = os.path.realpath(directory)
        (Path(root) / name).write_text("")
        found = walks.glob({"path": root, "root": root, "pattern": pattern, "label": "", "limit": 9})["paths"]

    assert found == ([name] if matches(name, pattern) else [])


@BOUNDED
@given(
    text=st.text("a\néz🧀", max_size=400),
    head=st.integers(min_value=0, max_value=60),
    tail=st.integers(min_value=0, max_value=60),
)
def test_a_spilled_result_keeps_its_ends_and_all_of_it_in_the_file(text: str, head: int, tail: int) -> None:
    """Head and tail are pieces of the text, within their sizes, and what is left out is counted right."""
    text += "x" * 700
    spec = CompactionSpec(spill_bytes=650, spill_head=head, spill_tail=tail)
    with tempfile.TemporaryDirectory() as directory:
        spill = Spill(SpillStore(f"{directory}/spill"), spec=spec, window=1_000_000, redactor=Redactor({}))
        final = spill.finalize("c", [{"type": "text", "text": text}], None)
        assert final.spill is not None
        kept = (Path(directory) / final.spill["path"]).read_text()

    shown = text_of(list(final.content))
    first, _, last = re.split(r"(\[\d+ of \d+ bytes [^\]]*\]\n)", shown, maxsplit=1)
    left_out = int(shown[len(first) + 1 :].split(" ")[0])
    assert kept == text
    assert text.endswith(last)
    assert len(last.encode()) <= tail
    begin = first if text.startswith(first) and len(first.encode()) <= head else first.removesuffix("\n")
    assert text.startswith(begin)
    assert len(begin.encode()) <= head
    assert left_out == len(text.encode()) - len(begin.encode()) - len(last.encode())
