"""No damage to a whole log goes unnoticed: bits, bytes and lines, anywhere."""

from __future__ import annotations

import functools
import itertools
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.errors import LogError
from runner.session.store import open_session
from runner.session.verify import verify_session
from runner.testing.sessions import SampleSession

OURS = Path(__file__).resolve().parents[1] / "golden" / "ours"
REAL = ["turns", "compaction", "openai", "cancelled"]


@functools.cache
def whole_log() -> tuple[bytes, ...]:
    """The lines of a finished session, with their newlines."""
    with tempfile.TemporaryDirectory() as folder:
        with SampleSession(Path(folder)) as session:
            session.turn(steps=3)
            session.turn(steps=1)
            session.end()
        return tuple(line + b"\n" for line in open_session(folder).raw_lines())


def golden(name: str) -> tuple[bytes, ...]:
    """The lines of a real log of ours."""
    return tuple(line + b"\n" for line in open_session(str(OURS / name)).raw_lines())


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


# --- every line of real logs -------------------------------------------------------------------

each_log = pytest.mark.parametrize("name", REAL)


@each_log
def test_every_dropped_line_of_a_real_log_is_found(name: str) -> None:
    """Each of them, header and last seal too."""
    every = golden(name)
    assert not is_found(b"".join(every))

    assert [at for at in range(len(every)) if not is_found(b"".join(every[:at] + every[at + 1 :]))] == []


@each_log
def test_every_repeated_line_of_a_real_log_is_found(name: str) -> None:
    """Each, right behind itself."""
    every = golden(name)

    assert [at for at in range(len(every)) if not is_found(b"".join(every[: at + 1] + every[at:]))] == []


@each_log
def test_every_pair_of_neighbours_swapped_in_a_real_log_is_found(name: str) -> None:
    """Each line and the next, which are never the same."""
    every = golden(name)

    missed = []
    for at in range(len(every) - 1):
        swapped = [*every[:at], every[at + 1], every[at], *every[at + 2 :]]
        if not is_found(b"".join(swapped)):
            missed.append(at)
    assert missed == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cancelled"])
def test_any_two_lines_swapped_in_a_real_log_are_found(name: str) -> None:
    """All pairs."""
    every = golden(name)

    missed = []
    for one, other in itertools.combinations(range(len(every)), 2):
        swapped = list(every)
        swapped[one], swapped[other] = swapped[other], swapped[one]
        if not is_found(b"".join(swapped)):
            missed.append((one, other))
    assert missed == []


@each_log
@pytest.mark.parametrize("count", [60, pytest.param(1_500, marks=pytest.mark.slow)])
def test_flipped_bits_anywhere_in_a_real_log_are_found(name: str, count: int) -> None:
    """Some in every line: one in each, in turn, until there are enough."""
    every = golden(name)
    data = b"".join(every)
    starts = list(itertools.accumulate((len(line) for line in every), initial=0))
    rand = random.Random(count)

    missed = []
    for number in range(count):
        at = number * 7 % len(every)
        place, bit = rand.randrange(starts[at], starts[at + 1]), rand.randrange(8)
        changed = bytearray(data)
        changed[place] ^= 1 << bit
        if not is_found(bytes(changed)):
            missed.append((place, bit))
    assert missed == []


@each_log
def test_every_bit_of_the_last_seal_is_found(name: str) -> None:
    """Nothing stands behind it that could tell."""
    every = golden(name)
    before, last = b"".join(every[:-1]), every[-1]

    missed = []
    for place in range(0, len(last), 3):
        changed = bytearray(last)
        changed[place] ^= 1 << place % 8
        if not is_found(before + bytes(changed)):
            missed.append(place)
    assert missed == []
    assert is_found(before + last.replace(b"\n", b"\r\n"))
    assert is_found(before + last + b"\n")


@pytest.mark.parametrize("number", range(0, 60, 7))
def test_the_first_bad_line_is_said(number: int) -> None:
    """A dropped line shows at the next, by its seq; a changed text at the first seal behind it."""
    every = list(golden("cancelled"))
    at = number % (len(every) - 2) + 1
    seals = [line for line, text in enumerate(every, 1) if b'"type":"log/seal"' in text]

    assert first_bad_line([*every[:at], *every[at + 1 :]]) == at + 1
    if at + 1 not in seals:
        changed = every[at].replace(b'"time":', b'"time":1', 1).replace(b'"time0":', b'"time0":1', 1)
        assert changed != every[at]
        seal = next(line for line in seals if line > at + 1)
        assert first_bad_line([*every[:at], changed, *every[at + 1 :]]) == seal


def first_bad_line(changed: list[bytes]) -> int:
    """The line that verification names."""
    with tempfile.NamedTemporaryFile(suffix=".jsonl") as file:
        file.write(b"".join(changed))
        file.flush()
        with pytest.raises(LogError) as caught:
            verify_session(open_session(file.name))
    line: int = caught.value.details["line"]
    assert f": line {line}: " in caught.value.message
    return line
