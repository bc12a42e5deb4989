"""A log that lost its end at any byte, or whose writer was killed, loads, repairs and goes on."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard

from runner.errors import LogError
from runner.session import codec
from runner.session import events as ev
from runner.session.export import export_session
from runner.session.header import LOG_NAME
from runner.session.log import SessionLog
from runner.session.repair import closing_events
from runner.session.store import open_session
from runner.session.verify import verify_session
from runner.testing.sessions import SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = Path(__file__).resolve().parents[1] / "golden" / "ours"


def decodable(data: bytes) -> bytes:
    """What zstd decodes of a prefix, frame after frame."""
    decoder = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
    return decoder.decompress(data)


def check_prefix(folder: Path, data: bytes, repaired: set[int]) -> int:
    """A prefix loads with every whole record that can be decoded, and repairs to a closed log, twice the same.

    Args:
        folder: Where it is written.
        data: The prefix.
        repaired: Numbers of lines whose repair was checked before; the same lines need the same repair.

    Returns:
        The number of lines kept.
    """
    path = folder / "cut.jsonl.zst"
    path.write_bytes(data)
    content = decodable(data)

    source = open_session(str(path))
    lines = [line + b"\n" for line in source.raw_lines()]
    assert b"".join(lines) == content[: content.rindex(b"\n") + 1]
    torn = len(content) - len(b"".join(lines))
    assert (source.dropped or "").startswith(f"dropped {torn} bytes" if torn else "the last zstd frame is unfinished")

    if len(lines) not in repaired:
        repaired.add(len(lines))
        events = list(source.events())
        closing, again = closing_events(events), closing_events(events)
        assert [codec.encode_line(event.record()) for event in closing] == [
            codec.encode_line(event.record()) for event in again
        ]
        assert closing_events([*events, *closing]) == []
        assert [event.seq for event in [*events, *closing]] == list(range(len(events) + len(closing)))
        check_repaired_export(folder, path, lines, closing)
    return len(lines)


def check_repaired_export(folder: Path, path: Path, lines: list[bytes], closing: list[ev.Event]) -> None:
    """The repaired copy is the same twice, holds what was kept and what closes it, and is closed."""
    for name in ("first.zip", "second.zip"):
        export_session(open_session(str(path)), folder / name)
    assert (folder / "first.zip").read_bytes() == (folder / "second.zip").read_bytes()
    exported = open_session(str(folder / "first.zip"))
    repaired = [line + b"\n" for line in exported.raw_lines()]
    assert repaired[: len(lines)] == lines
    assert repaired[len(lines) : len(lines) + len(closing)] == [codec.encode_line(each.record()) for each in closing]
    assert closing_events(exported.events()) == []
    result = verify_session(exported, allow_open=True)
    assert (result.manifest, result.dropped) == ("ok", None)
    assert not closing or result.last_seal_line == result.lines


def written(folder: Path, *, steps: int, closed: bool) -> bytes:
    """The bytes of a log in the middle of a call, as they lie on disk."""
    session = SampleSession(folder / "artifacts")
    session.turn(steps=steps)
    session.start_turn()
    session.start_step("Go on.")
    session.call(*next(iter(session.answer(calls=2).items())))
    data = session.log.path.read_bytes()
    session.log.close()
    return session.log.path.read_bytes() if closed else data


@pytest.mark.parametrize("tail", [400, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("closed", [False, True])
def test_a_log_cut_at_every_byte_of_its_tail_loads(tmp_path: Path, tail: int, *, closed: bool) -> None:
    """As written, each event flushed alone, and as packed at the end."""
    data = written(tmp_path, steps=10, closed=closed)
    assert len(data) > tail + 300
    repaired: set[int] = set()

    for cut in range(len(data) - tail, len(data)):
        check_prefix(tmp_path, data[:cut], repaired)

    assert len(repaired) > (0 if closed else 3)
    assert verify_session(open_session(str(tmp_path / "artifacts")), allow_open=True).dropped is None


@pytest.mark.parametrize("tail", [300, pytest.param(4096, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["turns", "compaction", "openai", "cancelled"])
def test_a_real_log_cut_at_every_byte_of_its_tail_loads(tmp_path: Path, tail: int, name: str) -> None:
    """Logs that the installed command wrote, with reasoning, denials, replaces and retries."""
    data = (OURS / name / LOG_NAME).read_bytes()
    repaired: set[int] = set()

    for cut in range(max(300, len(data) - tail), len(data)):
        check_prefix(tmp_path, data[:cut], repaired)

    assert repaired


@pytest.mark.parametrize("name", ["turns", "compaction", "openai", "cancelled"])
def test_a_log_that_ends_behind_any_line_is_repaired(tmp_path: Path, name: str) -> None:
    """Every state that a killed run can leave: each has one repair, and what is repaired needs none."""
    lines = [line + b"\n" for line in open_session(str(OURS / name)).raw_lines()]
    codes = set()

    for kept in range(1, len(lines)):
        (tmp_path / "cut.jsonl").write_bytes(b"".join(lines[:kept]) + lines[kept][:-1])
        source = open_session(str(tmp_path / "cut.jsonl"))
        events = list(source.events())
        assert source.dropped == f"dropped {len(lines[kept]) - 1} bytes of a torn last record behind line {kept}"
        closing = closing_events(events)
        assert closing_events([*events, *closing]) == []
        assert all(event.time == events[-1].time for event in closing)
        codes |= {event.error["code"] for event in closing if isinstance(event, ev.ToolResult) and event.error}

    assert codes == {"TOOL_NOT_STARTED", "TOOL_OUTCOME_UNKNOWN"}


@pytest.mark.parametrize("offsets", [20, pytest.param(200, marks=pytest.mark.slow)])
def test_a_long_log_cut_anywhere_loads(tmp_path: Path, offsets: int) -> None:
    """Random offsets over a log that was packed on its way."""
    data = written(tmp_path, steps=60, closed=False)
    assert data.count(codec.ZSTD_MAGIC) >= 2
    rand = random.Random(offsets)
    repaired: set[int] = set()

    for _ in range(offsets):
        check_prefix(tmp_path, data[: rand.randrange(300, len(data))], repaired)

    assert len(repaired) > offsets / 3


def test_a_log_cut_inside_its_header_says_so(tmp_path: Path) -> None:
    """Nothing can be done without a header; it is one clear error at every byte."""
    data = written(tmp_path, steps=1, closed=True)
    path = tmp_path / "cut.jsonl.zst"
    first = next(cut for cut in range(1, len(data)) if b"\n" in decodable(data[:cut]))
    assert first < 300

    for cut in range(first):
        path.write_bytes(data[:cut])
        with pytest.raises(LogError, match="empty, or cut off inside its header"):
            open_session(str(path))


def test_a_log_cut_anywhere_is_taken_up_again(tmp_path: Path, decoded_frames: Callable[[Path], bytes]) -> None:
    """Reopened, repaired, gone on with and sealed, from many cuts."""
    data = written(tmp_path, steps=6, closed=False)
    rand = random.Random(6)
    folder = tmp_path / "again"
    folder.mkdir()

    for _ in range(30):
        (folder / LOG_NAME).write_bytes(data[: rand.randrange(300, len(data))])
        events: list[ev.Event] = []
        log, _ = SessionLog.reopen(folder, clock=lambda: 1_796_000_900_000, fold=events.append)
        with log:
            log.append_many(closing_events(events))
            log.seal()
        result = verify_session(open_session(str(folder)), allow_open=True)
        assert result.last_seal_line == result.lines
        assert result.events > len(events)
        decoded_frames(folder / LOG_NAME)


WRITER = """
import itertools, sys
from pathlib import Path
from runner.testing.sessions import SampleSession
session = SampleSession(Path(sys.argv[1]), bodies=False)
print("started", flush=True)
session.begin()
session.start_turn()
for number in itertools.count():
    session.step(calls=2)
    print(session.log.next_seq, flush=True)
"""


@pytest.mark.parametrize("seed", range(5))
def test_a_writer_that_is_killed_leaves_a_log_that_loads(tmp_path: Path, seed: int) -> None:
    """Real SIGKILLs at random times: no event that was reported as written is missing."""
    folder = tmp_path / "artifacts"
    process = subprocess.Popen([sys.executable, "-c", WRITER, folder], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "started\n"
        time.sleep(random.Random(seed).uniform(0.02, 0.4))
        process.send_signal(signal.SIGKILL)
        reported = [int(line) for line in process.stdout.read().splitlines(keepends=True) if line.endswith("\n")]
    assert process.wait(timeout=10) == -signal.SIGKILL

    events = list(open_session(str(folder)).events())
    assert len(events) >= max(reported, default=0)
    assert closing_events([*events, *closing_events(events)]) == []
    assert verify_session(open_session(str(folder)), allow_open=True).state == "open"
    again: list[ev.Event] = []
    log, _ = SessionLog.reopen(folder, clock=int, fold=again.append)
    with log:
        assert len(again) == len(events)
