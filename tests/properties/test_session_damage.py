"""No damage to a whole log goes unnoticed: bits, bytes and lines, anywhere."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import LogError
from runner.session.store import open_session
from runner.session.verify import verify_session
from runner.testing.sessions import SampleSession


@functools.cache
def whole_log() -> tuple[bytes, ...]:
    """The lines of a finished session, with their newlines."""
    with tempfile.TemporaryDirectory() as folder:
        with SampleSession(Path(folder)) as session:
            session.turn(steps=3)
            session.turn(steps=1)
            session.end()
        return tuple(line + b"\n" for line in open_session(folder).raw_lines())


def is_found(data: bytes) -> bool:
    """Whether opening or verifying a log of these bytes fails with LOG_INVALID."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(data)
        file.flush()
        try:
            verify_session(open_session(file.name))
        except LogError as error:
            return error.code.exit_code == 13
    return False


lines = st.integers(0, 10**6).map(lambda number: number % len(whole_log()))


def test_the_log_is_whole_before_it_is_damaged() -> None:
    """The other tests of this file prove something."""
    assert not is_found(b"".join(whole_log()))
    assert len(whole_log()) > 60


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.integers(0, 7))
def test_any_flipped_bit_is_found(place: int, bit: int) -> None:
    """In any line, the header, a seal and a newline among them."""
    data = bytearray(b"".join(whole_log()))
    data[place % len(data)] ^= 1 << bit

    assert is_found(bytes(data))


@settings(max_examples=40, deadline=None)
@given(lines)
def test_any_dropped_line_is_found(at: int) -> None:
    """The last one too."""
    every = whole_log()

    assert is_found(b"".join(every[:at] + every[at + 1 :]))


@settings(max_examples=40, deadline=None)
@given(lines, lines)
def test_any_repeated_line_is_found(at: int, to: int) -> None:
    """A line written again, anywhere."""
    every = list(whole_log())
    every.insert(to, every[at])

    assert is_found(b"".join(every))


@settings(max_examples=40, deadline=None)
@given(lines, lines)
def test_any_two_swapped_lines_are_found(one: int, other: int) -> None:
    """Neighbours and others."""
    every = list(whole_log())
    every[one], every[other] = every[other], every[one]

    assert is_found(b"".join(every)) is (one != other)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 10**9))
def test_any_lost_end_is_found(left: int) -> None:
    """A log cut anywhere does not pass for a whole one."""
    data = b"".join(whole_log())

    assert is_found(data[: left % len(data)])


@settings(max_examples=40, deadline=None)
@given(st.binary(min_size=1, max_size=40), st.integers(0, 10**9))
def test_any_inserted_bytes_are_found(noise: bytes, place: int) -> None:
    """Anything that was not written, wherever it stands."""
    data = b"".join(whole_log())
    at = place % (len(data) + 1)

    assert is_found(data[:at] + noise + data[at:])
