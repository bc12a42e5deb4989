"""Packed rows and the chunks they stand for are the same, whatever the chunks are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.session import codec
from runner.session.codec import HeldChunk
from runner.session.store import open_session

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"
LOGS = sorted(path.name for path in GOLDEN.iterdir() if path.suffix != ".md")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
indexes = st.integers(0, 1)
deltas = st.one_of(
    st.fixed_dictionaries(
        {"type": st.sampled_from(["text-delta", "reasoning-delta"]), "index": indexes, "text": texts}
    ),
    st.fixed_dictionaries(
        {
            "type": st.just("tool-call-delta"),
            "index": indexes,
            "id": st.sampled_from(["a", "b"]),
            "name": st.just("shell"),
            "argumentsDelta": texts,
        }
    ),
    st.fixed_dictionaries({"type": st.just("text-delta"), "index": indexes, "text": texts, "more": texts}),
    st.fixed_dictionaries({"type": st.sampled_from(["block-start", "block-end", "finish"]), "index": indexes}),
)
streams = st.lists(st.tuples(deltas, st.integers(-3, 900), st.integers(1, 2)), max_size=20)


def held(stream: list[tuple[dict[str, Any], int, int]]) -> list[HeldChunk]:
    """Chunks with seqs and times."""
    time, chunks = 1_796_000_000_000, []
    for seq, (chunk, passed, step) in enumerate(stream, 7):
        time += passed
        chunks.append(HeldChunk(seq, time, 1, step, chunk))
    return chunks


@settings(deadline=None, max_examples=60)
@given(streams)
def test_unpacking_gives_back_every_chunk(stream: list[tuple[dict[str, Any], int, int]]) -> None:
    """Through bytes and back: the same seqs, times, steps and chunks, and no run of three left unpacked."""
    chunks = held(stream)
    lines = [codec.encode_line(record) for record in codec.pack(chunks)]

    seq, events = 7, []
    for line in lines:
        for event in codec.events_of(codec.decode_line(line), first=seq):
            events.append(event)
            seq += 1

    assert [event.record() for event in events] == [chunk.event().record() for chunk in chunks]


@settings(deadline=None, max_examples=60)
@given(streams)
def test_packing_again_changes_nothing(stream: list[tuple[dict[str, Any], int, int]]) -> None:
    """A row expands and packs to the same bytes."""
    for record in codec.pack(held(stream)):
        if record["type"] != "assistant/chunk":
            (again,) = codec.pack(list(codec.expand(record)))
            assert codec.encode_line(again) == codec.encode_line(record)
            assert list(again["data"]) == list(record["data"])


@pytest.mark.parametrize("name", LOGS)
def test_rows_of_real_logs_round_trip_byte_for_byte(name: str) -> None:
    """Each packed row dsh wrote, expanded and packed by us, is the line dsh wrote."""
    source = open_session(str(GOLDEN / name))
    rows = 0
    for _, data, record in source.lines():
        if "seq0" in record:
            (again,) = codec.pack(list(codec.expand(record)))
            assert codec.encode_line(again) == data + b"\n"
            rows += 1

    assert rows > 0 or name == "http500-retries.jsonl"


@pytest.mark.parametrize("name", LOGS)
def test_lines_of_real_logs_round_trip_byte_for_byte(name: str) -> None:
    """A line that stands for one event is written back as it was, unless its optional fields stand elsewhere."""
    source = open_session(str(GOLDEN / name))
    seq = 0
    for number, data, record in source.lines():
        assert codec.encode_line(record) == data + b"\n"
        if number > 1:
            events = list(codec.events_of(record, first=seq))
            seq += len(events)
            if len(events) == 1:
                assert events[0].record() == record
