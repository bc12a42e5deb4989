"""Lines, packed rows and zstd frames."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
import zstandard

from runner.errors import InternalError, LogError
from runner.session import codec
from runner.session.codec import HeldChunk


def text_chunk(seq: int, text: str, *, index: int = 0, step: int = 1, time: int = 100) -> HeldChunk:
    """One text delta."""
    return HeldChunk(seq, time, 1, step, {"type": "text-delta", "index": index, "text": text})


def call_chunk(seq: int, arguments: str, *, call_id: str = "c") -> HeldChunk:
    """One tool-call delta."""
    chunk = {"type": "tool-call-delta", "index": 0, "id": call_id, "name": "shell", "argumentsDelta": arguments}
    return HeldChunk(seq, 100, 1, 1, chunk)


def lines_of(data: bytes) -> list[bytes]:
    """The whole lines of plain data."""
    return list(codec.read_lines(io.BytesIO(data)))


def decoded(data: bytes) -> tuple[bytes, bool]:
    """What a zstd stream decodes to, and whether its last frame is unfinished."""
    chunks = codec.ZstdChunks(io.BytesIO(data))
    return b"".join(chunks), chunks.unfinished


def test_a_line_is_compact_json_in_the_order_it_was_built() -> None:
    """No spaces, keys as given, UTF-8 unescaped, one newline."""
    line = codec.encode_line({"b": "é€", "a": [1, None, True]})

    assert line == '{"b":"é€","a":[1,null,true]}\n'.encode()


@pytest.mark.parametrize("broken", ["\ud800", "a\udfffb", "\udc80\udc81"])
def test_what_cannot_be_utf8_becomes_a_replacement_character(broken: str) -> None:
    """A lone surrogate, in a value, a key or deep inside, never stops the log."""
    line = codec.encode_line({"text": broken, "list": [{broken: broken}]})

    text = line.decode("utf-8")
    assert "\ufffd" in text
    assert codec.decode_line(line) == codec.clean({"text": broken, "list": [{broken: broken}]})


def test_a_surrogate_pair_stays_one_character() -> None:
    """Text beyond the basic plane is written as it is."""
    assert codec.decode_line(codec.encode_line({"text": "\U0001f600"})) == {"text": "\U0001f600"}


def test_an_integer_too_large_for_readers_becomes_a_float() -> None:
    """Numbers beyond 64 bits keep their size, not their last digits; beyond a float they are unknown."""
    assert codec.decode_line(codec.encode_line({"n": 10**30, "m": 10**400})) == {"n": 1e30, "m": None}


def test_a_value_that_is_no_json_is_our_bug() -> None:
    """An object that cannot be serialised is reported as INTERNAL."""
    with pytest.raises(InternalError, match="cannot be written"):
        codec.encode_line({"value": object()})


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"{",
        b"[1]",
        b"3",
        b"null",
        b"\x00",
        b"{}\x00",
        b'{"a":"\xff"}',
        b'{"a":NaN}',
        b"[" * 5000,
        b"\xef\xbb\xbf{}",
    ],
)
def test_a_line_that_is_no_json_object_is_refused(line: bytes) -> None:
    """Truncated, binary, badly encoded and nested lines give a LogError."""
    with pytest.raises(LogError, match=r"not valid JSON|not a JSON object"):
        codec.decode_line(line)


def test_lines_are_split_at_newlines_only() -> None:
    """Other line separators belong to a line, and a rest without newline is counted as torn."""
    lines = codec.read_lines(io.BytesIO(b"a\r\x0b\n\nb\x85c\nrest"))

    assert list(lines) == [b"a\r\x0b", b"", b"b\x85c"]
    assert (lines.number, lines.torn) == (3, 4)


def test_lines_longer_than_a_piece_are_put_together() -> None:
    """The size of the pieces a stream comes in does not show."""
    long = b"x" * (600 * 1024)

    assert lines_of(long + b"\n" + b"y\n" + long + b"\n") == [long, b"y", long]


def test_a_line_over_the_limit_stops_the_reader() -> None:
    """Readers take 16 MiB and refuse one byte more, with the number of the line."""
    longest = b"x" * codec.MAX_READ_LINE

    assert lines_of(longest + b"\n") == [longest]
    with pytest.raises(LogError, match="line 2 is longer than 16 MiB"):
        lines_of(b"{}\n" + longest + b"x\n")
    with pytest.raises(LogError, match="line 1 is longer than 16 MiB"):
        lines_of(longest + b"x")


def test_reading_goes_on_after_a_frame() -> None:
    """Frames, a skippable one among them, decode as one stream."""
    compressor = zstandard.ZstdCompressor()
    skippable = b"\x50\x2a\x4d\x18\x03\x00\x00\x00abc"

    data = compressor.compress(b"one\n") + compressor.compress(b"two\n") + skippable + compressor.compress(b"three\n")

    assert decoded(data) == (b"one\ntwo\nthree\n", False)


def test_a_truncated_frame_gives_what_was_flushed_before() -> None:
    """Every prefix decodes, loses nothing that was flushed whole, and says that it is unfinished."""
    encoder = zstandard.ZstdCompressor().compressobj()
    first = encoder.compress(b"one\n") + encoder.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    second = encoder.compress(b"two\n") + encoder.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK)
    whole = first + second + encoder.flush()

    for cut in range(1, len(whole)):
        content, unfinished = decoded(whole[:cut])
        assert content.count(b"\n") >= (cut >= len(first)) + (cut >= len(first) + len(second))
        assert b"one\ntwo\n".startswith(content)
        assert unfinished
    assert decoded(whole) == (b"one\ntwo\n", False)


def test_damaged_frames_are_refused() -> None:
    """A changed byte inside a frame, and garbage behind one, are damage and not a torn end."""
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(b"some text that is compressed\n" * 50)

    with pytest.raises(LogError, match="damaged zstd data"):
        decoded(frame + b"garbage")
    with pytest.raises(LogError, match="damaged zstd data"):
        decoded(frame[:-1] + bytes([frame[-1] ^ 1]))


def test_a_frame_that_wants_a_huge_window_is_refused() -> None:
    """Memory for decoding is bounded whatever a frame's header says."""
    huge = zstandard.ZstdCompressionParameters.from_level(1, window_log=27, write_content_size=0)
    encoder = zstandard.ZstdCompressor(compression_params=huge).compressobj()

    with pytest.raises(LogError, match="damaged zstd data"):
        decoded(encoder.compress(b"x") + encoder.flush())


def test_three_deltas_of_one_block_become_a_row() -> None:
    """The row has the first seq and time, the differences of the times, and the texts."""
    run = [text_chunk(5, "a", time=100), text_chunk(6, "b", time=103), text_chunk(7, "", time=103)]

    assert list(codec.pack(run)) == [
        {
            "type": "text-chunks",
            "seq0": 5,
            "time0": 100,
            "data": {"turn": 1, "step": 1, "index": 0, "dt": [3, 0], "texts": ["a", "b", ""]},
        }
    ]


def test_a_row_of_call_deltas_names_the_call_once() -> None:
    """``id`` and ``name`` stand before ``args``, as dsh writes them."""
    (row,) = codec.pack([call_chunk(seq, part) for seq, part in enumerate(["", '{"a"', ":1}"])])

    assert row["type"] == "tool-call-chunks"
    assert list(row["data"]) == ["turn", "step", "index", "dt", "id", "name", "args"]
    assert row["data"]["args"] == ["", '{"a"', ":1}"]


def test_fewer_than_three_deltas_stay_single() -> None:
    """Two deltas in a row are two lines."""
    records = list(codec.pack([text_chunk(0, "a"), text_chunk(1, "b")]))

    assert [record["type"] for record in records] == ["assistant/chunk", "assistant/chunk"]


@pytest.mark.parametrize(
    "other",
    [
        text_chunk(2, "c", index=1),
        text_chunk(2, "c", step=2),
        HeldChunk(2, 100, 1, 1, {"type": "reasoning-delta", "index": 0, "text": "c"}),
        HeldChunk(2, 100, 1, 1, {"type": "text-delta", "index": 0, "text": "c", "extra": 1}),
        HeldChunk(2, 100, 1, 1, {"type": "text-delta", "index": 0, "text": None}),
        HeldChunk(2, 100, 1, 1, {"type": "block-start", "index": 0, "blockType": "text"}),
    ],
)
def test_only_deltas_of_one_block_are_packed_together(other: HeldChunk) -> None:
    """Another block, step, kind or shape ends a run, and nothing of it is lost."""
    run = [text_chunk(0, "a"), text_chunk(1, "b"), other, text_chunk(3, "d"), text_chunk(4, "e")]

    records = list(codec.pack(run))

    assert [record["type"] for record in records] == ["assistant/chunk"] * 5
    assert [held.event().record() for held in run] == records


def test_a_row_expands_to_the_events_it_stands_for() -> None:
    """Seqs count on and times are the running sum."""
    row: dict[str, Any] = {
        "type": "reasoning-chunks",
        "seq0": 9,
        "time0": 50,
        "data": {"turn": 2, "step": 3, "index": 1, "dt": [5, -1], "texts": ["x", "y", "z"]},
    }

    events = list(codec.events_of(row, first=row["seq0"]))

    assert [(event.seq, event.time) for event in events] == [(9, 50), (10, 55), (11, 54)]
    assert events[1].record()["data"] == {
        "turn": 2,
        "step": 3,
        "chunk": {"type": "reasoning-delta", "index": 1, "text": "y"},
    }


ROW: dict[str, Any] = {
    "type": "tool-call-chunks",
    "seq0": 1,
    "time0": 1,
    "data": {"turn": 1, "step": 1, "index": 0, "dt": [0], "id": "c", "name": "n", "args": ["a", "b"]},
}


@pytest.mark.parametrize(
    "change",
    [
        {"seq0": None},
        {"seq0": True},
        {"time0": "1"},
        {"data": []},
        {"turn": None},
        {"index": 1.5},
        {"dt": [0, 0]},
        {"dt": "0"},
        {"dt": ["0"]},
        {"args": []},
        {"args": ["a", 1]},
        {"args": None},
        {"id": None},
        {"name": 3},
    ],
)
def test_a_malformed_row_is_refused(change: dict[str, Any]) -> None:
    """Each wrong field of a packed row gives a LogError."""
    top = {key: value for key, value in change.items() if key in ROW}
    inner = {key: value for key, value in change.items() if key not in ROW}
    row = json.loads(json.dumps({**ROW, "data": {**ROW["data"], **inner}, **top}))

    with pytest.raises(LogError):
        list(codec.events_of(row, first=row["seq0"]))
