"""The log's writer: what is on disk when, in which form, and who may write."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from runner.errors import ConfigError, InternalError, StorageError
from runner.session import events as ev
from runner.session.header import LOG_NAME
from runner.session.log import HOLD_MS, SessionLog
from runner.session.projection import message_of
from runner.session.store import open_session
from runner.testing.sessions import SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


class Clock:
    """A clock that stands until it is told to go."""

    def __init__(self) -> None:
        self.now = 1000

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    """The log's clock."""
    return Clock()


@pytest.fixture
def log(tmp_path: Path, clock: Clock) -> Iterator[SessionLog]:
    """A fresh log."""
    with SessionLog.create(tmp_path, header={"id": "session-1", "cwd": "/w"}, clock=clock) as log:
        yield log


def on_disk(log: SessionLog) -> bytes:
    """What another process can decode of the file right now."""
    decoder = zstandard.ZstdDecompressor().decompressobj(read_across_frames=True)
    return decoder.decompress(log.path.read_bytes())


def records(log: SessionLog) -> list[dict[str, Any]]:
    """The lines on disk behind the header."""
    return [json.loads(line) for line in on_disk(log).splitlines()][1:]


def user(text: str = "hello", **values: Any) -> ev.UserMessage:
    """A user message."""
    content = [{"type": "text", "text": text}]
    return ev.UserMessage(content=content, source={"kind": "user"}, role="user", id="u", **values)


def delta(text: str) -> dict[str, Any]:
    """A text delta."""
    return {"type": "text-delta", "index": 0, "text": text}


def test_the_first_line_is_the_header(log: SessionLog) -> None:
    """Fields and their order are the format's."""
    header = json.loads(on_disk(log).splitlines()[0])

    assert list(header) == ["type", "version", "id", "createdAt", "cwd", "delegationDepth", "writer"]
    assert header["version"] == 0
    assert header["createdAt"] == 1000
    assert header["delegationDepth"] == 0
    assert header["writer"].keys() == {"name", "version", "format", "chain"}
    assert (header["writer"]["name"], header["writer"]["format"], header["writer"]["chain"]) == (
        "nightshift",
        1,
        "sha256",
    )


def test_a_header_without_an_id_or_with_unknown_fields_is_our_bug(tmp_path: Path, clock: Clock) -> None:
    """A mistake in the program is reported before a file is made."""
    for header in ({"cwd": "/w"}, {"id": "session-1", "colour": "red"}):
        with pytest.raises(InternalError):
            SessionLog.create(tmp_path, header=header, clock=clock)

    assert not list(tmp_path.iterdir())


def test_an_event_is_on_disk_when_append_returns(log: SessionLog, clock: Clock) -> None:
    """Each event can be decoded by another process at once, with its seq and time set."""
    for number in range(5):
        clock.now += 10
        event = log.append(ev.TurnStart(turn=number))

        assert (event.seq, event.time) == (number, clock.now)
        assert records(log)[-1] == {"type": "turn/start", "seq": number, "time": clock.now, "data": {"turn": number}}
    assert log.next_seq == 5


def test_keys_of_a_line_stand_in_the_order_of_the_format(log: SessionLog) -> None:
    """type, seq, time, ignorable, data, sourceEventSeqs, surfaceOp."""
    log.append(user())
    log.append(ev.LimitReached(name="steps", used=1, max=2, percent=90))
    log.append(user(source_event_seqs=[0], surface_op={"op": "replace", "start": 0, "end": 0}))

    orders = [list(record) for record in records(log)]

    assert orders == [
        ["type", "seq", "time", "data", "surfaceOp"],
        ["type", "seq", "time", "ignorable", "data"],
        ["type", "seq", "time", "data", "sourceEventSeqs", "surfaceOp"],
    ]


def test_a_time_that_is_set_stays(log: SessionLog) -> None:
    """Closing events of a repair keep the time they repeat."""
    log.append(ev.TurnStart(turn=1, seq=0, time=77))

    assert records(log)[0]["time"] == 77


def test_an_event_with_another_seq_is_our_bug(log: SessionLog) -> None:
    """An event cannot be written at a place that is not its own."""
    with pytest.raises(InternalError, match="seq 3"):
        log.append(ev.TurnStart(turn=1, seq=3))

    assert records(log) == []


def test_a_broken_surface_event_is_not_written(log: SessionLog) -> None:
    """The rules are checked before anything is written; the event and the log stay as they were."""
    log.append(user())
    broken = user(source_event_seqs=[0], surface_op={"op": "replace", "start": 9, "end": 9})

    with pytest.raises(InternalError, match="not on the surface"):
        log.append(broken)

    assert (broken.seq, broken.time, log.next_seq, len(records(log))) == (-1, -1, 1, 1)
    assert log.append(user()).seq == 1


def test_a_line_over_eight_mebibytes_is_refused(log: SessionLog) -> None:
    """Larger content spills; the log goes on without the event."""
    with pytest.raises(StorageError, match="more than the session log takes") as caught:
        log.append(user("x" * (8 * 1024 * 1024)))

    assert caught.value.hint
    assert log.append(user("y" * (7 * 1024 * 1024))).seq == 0


def test_text_that_is_no_utf8_is_replaced_in_the_log_and_in_memory(log: SessionLog) -> None:
    """What the program goes on with is what a reader of the log gets."""
    event = log.append(user("broken \ud83d end"))

    (read,) = open_session(str(log.path)).events()
    assert message_of(event) == message_of(read)
    assert event.data()["content"][0]["text"] == "broken \ufffd end"


def test_chunks_that_are_no_utf8_are_written_replaced(log: SessionLog) -> None:
    """A stream may be cut inside a character."""
    log.append_chunk(1, 1, delta("cut \ud83d"))
    log.barrier()

    assert records(log)[0]["data"]["chunk"] == delta("cut \ufffd")


def test_chunks_wait_until_their_block_ends_and_are_written_packed(log: SessionLog) -> None:
    """Deltas reach the disk as one row, with the block's end, in order."""
    seqs = [log.append_chunk(1, 1, delta(text)) for text in ("a", "b", "c")]
    assert records(log) == []

    seqs.append(log.append_chunk(1, 1, {"type": "block-end", "index": 0, "block": {"type": "text", "text": "abc"}}))

    assert seqs == [0, 1, 2, 3]
    assert [record["type"] for record in records(log)] == ["text-chunks", "assistant/chunk"]
    assert records(log)[0]["data"]["texts"] == ["a", "b", "c"]


def test_chunks_are_written_before_any_other_event(log: SessionLog) -> None:
    """An event appended after chunks never stands before them."""
    log.append_chunk(1, 1, delta("a"))
    log.append(ev.StepEnd(turn=1, step=1))
    log.append_chunk(1, 1, delta("b"))
    log.seal()
    log.append_chunk(1, 1, delta("c"))
    log.barrier()

    assert [record["seq"] for record in records(log)] == [0, 1, 2, 3, 4]


def test_chunks_of_a_slow_stream_are_written_after_200_ms(log: SessionLog, clock: Clock) -> None:
    """By the log's clock, no chunk waits longer."""
    log.append_chunk(1, 1, delta("a"))
    clock.now += HOLD_MS - 1
    log.append_chunk(1, 1, delta("b"))
    assert records(log) == []
    clock.now += 1
    log.append_chunk(1, 1, delta("c"))

    assert records(log)[0]["data"] == {"turn": 1, "step": 1, "index": 0, "dt": [199, 1], "texts": ["a", "b", "c"]}


def test_chunks_of_a_stalled_stream_are_written_by_the_committer(log: SessionLog) -> None:
    """When nothing more comes, what came is on disk within 200 ms all the same."""
    log.append_chunk(1, 1, delta("a"))

    deadline = time.monotonic() + 5
    while not records(log) and time.monotonic() < deadline:
        time.sleep(0.02)

    assert [record["data"]["chunk"] for record in records(log)] == [delta("a")]
    assert log.append(ev.StepEnd(turn=1, step=1)).seq == 1


def test_a_flood_of_chunks_is_written_in_bounded_lines(log: SessionLog) -> None:
    """A huge block that comes at once makes several rows, none near the limit of a line."""
    for _ in range(40):
        log.append_chunk(1, 1, delta("\x01" * 100_000))
    log.barrier()

    lines = on_disk(log).splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) < 8 * 1024 * 1024


def test_observers_see_every_event_once_and_in_order(log: SessionLog) -> None:
    """Single events, groups, seals and chunks, except for the pieces of a block; each with its seq."""
    seen: list[tuple[int, str]] = []
    log.observers.append(lambda event: seen.append((event.seq, event.TYPE)))

    log.append_chunk(1, 1, {"type": "block-end", "index": 0, "block": {"type": "text", "text": "a"}})
    log.append_chunk(1, 1, delta("a"))
    log.append(ev.StepEnd(turn=1, step=1))
    log.append_many([ev.TurnEnd(turn=1, reason={"kind": "completed"}), ev.TurnStart(turn=2)])
    log.seal()

    assert seen == [(0, "assistant/chunk"), (2, "step/end"), (3, "turn/end"), (4, "turn/start"), (5, "log/seal")]


def test_a_group_is_written_up_to_the_event_that_is_refused(log: SessionLog) -> None:
    """``append_many`` keeps what was right before the mistake."""
    with pytest.raises(InternalError):
        log.append_many([ev.TurnStart(turn=1), user(surface_op="insert"), ev.TurnStart(turn=2)])

    assert [record["type"] for record in records(log)] == ["turn/start"]
    assert log.append(ev.TurnStart(turn=3)).seq == 1


def test_a_seal_is_the_digest_of_every_byte_before_its_value(log: SessionLog) -> None:
    """SHA-256 over the file up to and including the opening quote, the number of lines, a fixed end."""
    log.append(user("é"))
    log.append_chunk(1, 1, delta("x"))
    first = log.seal()
    log.append(ev.TurnStart(turn=1))
    second = log.seal()

    data = on_disk(log)
    for seal, lines in ((first, 3), (second, 5)):
        end = data.index(seal.sha256.encode())
        assert hashlib.sha256(data[:end]).hexdigest() == seal.sha256
        assert data[end + 64 :].startswith(b'"}}\n')
        assert seal.lines == lines == data[:end].count(b"\n")
    last = data.splitlines(keepends=True)[-1]
    start = b'{"type":"log/seal","seq":4,"time":1000,"ignorable":true,"data":{"lines":5,"sha256":"'
    assert last == start + second.sha256.encode() + b'"}}\n'


def test_the_digest_is_that_of_the_decoded_log(log: SessionLog) -> None:
    """What ``--expect`` takes can be computed with nothing but zstd and sha256sum."""
    log.append(user())
    log.seal()

    assert log.digest == hashlib.sha256(on_disk(log)).hexdigest()


def test_a_closed_log_is_a_finished_frame(log: SessionLog, decoded_frames: Callable[[Path], bytes]) -> None:
    """``zstd -dc`` exits 0 on it and gives the same bytes as before."""
    log.append(user())
    log.append_chunk(1, 1, delta("held"))
    log.close()
    log.close()

    done = decoded_frames(log.path)

    assert hashlib.sha256(done).hexdigest() == log.digest
    assert done.count(b"\n") == 3
    with pytest.raises(InternalError, match="closed"):
        log.append(user())


def test_nothing_but_the_log_is_left_in_the_directory(tmp_path: Path) -> None:
    """Packing and locking leave no other file, and the log can be read by its owner only."""
    with SampleSession(tmp_path) as session:
        session.turn(steps=60)

    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]
    assert (tmp_path / LOG_NAME).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("steps", [50, 130, 300])
def test_the_file_is_at_most_1_3_times_one_frame(tmp_path: Path, steps: int) -> None:
    """While it is written, each event flushed alone, and tighter than one frame once it is closed."""
    session = SampleSession(tmp_path, bodies=False)
    session.begin()
    session.start_turn()
    for _ in range(steps):
        session.step()
    data = on_disk(session.log)
    one_frame = len(zstandard.ZstdCompressor(level=3).compress(data))

    assert session.log.path.stat().st_size <= 1.3 * one_frame
    session.log.close()
    assert on_disk(session.log) == data
    assert session.log.path.stat().st_size <= one_frame


def test_a_long_log_is_packed_while_it_is_written(tmp_path: Path) -> None:
    """The packed file takes the old one's name, is locked like it, and goes on in a new frame."""
    session = SampleSession(tmp_path, bodies=False)
    session.begin()
    session.start_turn()
    first = session.log.path.stat().st_ino
    while session.log.path.stat().st_ino == first:
        session.step()
        assert session.steps < 200
    session.step()
    session.end_turn()

    digest = session.log.digest
    assert hashlib.sha256(on_disk(session.log)).hexdigest() == digest
    with pytest.raises(ConfigError, match="lock held"):
        SessionLog.create(tmp_path, header={"id": "session-2"}, clock=int)
    session.log.barrier()
    session.log.close()
    assert hashlib.sha256(on_disk(session.log)).hexdigest() == digest


def test_the_cost_of_an_append_does_not_grow(tmp_path: Path) -> None:
    """CPU time for the last thousands of 8,000 small events is that of the first ones, and small."""
    with SessionLog.create(tmp_path, header={"id": "session-1"}, clock=int) as log:
        costs = []
        for _ in range(8):
            before = time.thread_time()
            for number in range(1000):
                log.append(ev.LimitReached(name="steps", used=number, max=1000, percent=90))
            costs.append((time.thread_time() - before) / 1000)

    assert min(costs) < 300e-6  # measured 15 to 25 µs; a tracer may slow it down
    assert min(costs[4:]) < 2 * min(costs[:4])


def test_a_second_writer_in_this_process_is_refused(tmp_path: Path, log: SessionLog) -> None:
    """The lock is not the process's own to share."""
    with pytest.raises(ConfigError, match="lock held"):
        SessionLog.create(tmp_path, header={"id": "session-2"}, clock=int)
    with pytest.raises(ConfigError, match="lock held"):
        SessionLog.reopen(tmp_path, clock=int, fold=print)

    log.append(user())
    assert len(records(log)) == 1


def test_a_second_process_is_refused_and_the_first_goes_on(tmp_path: Path, log: SessionLog) -> None:
    """Another process gets CONFIG_INVALID, exit code 2, and changes nothing."""
    program = """
import sys
from pathlib import Path
from runner.errors import RunnerError
from runner.session.log import SessionLog
for take in (lambda: SessionLog.create(Path(sys.argv[1]), header={"id": "session-2"}, clock=int),
             lambda: SessionLog.reopen(Path(sys.argv[1]), clock=int, fold=print)):
    try:
        take()
    except RunnerError as error:
        print(error.code, error.code.exit_code, error.message.split(":")[0])
"""
    log.append(user())
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, check=True, text=True, timeout=30
    )

    assert done.stdout == "CONFIG_INVALID 2 lock held\n" * 2
    log.append(user())
    assert len(records(log)) == 2


def test_a_directory_that_holds_a_finished_log_is_not_written_over(tmp_path: Path, log: SessionLog) -> None:
    """A new run needs a directory of its own."""
    log.close()
    before = log.path.read_bytes()

    with pytest.raises(ConfigError, match="holds a session log already") as caught:
        SessionLog.create(tmp_path, header={"id": "session-2"}, clock=int)

    assert caught.value.hint
    assert log.path.read_bytes() == before


def test_missing_directories_are_made_private(tmp_path: Path) -> None:
    """The artifacts directory is for its owner only."""
    SessionLog.create(tmp_path / "a" / "b", header={"id": "session-1"}, clock=int).close()

    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_reopened_log_goes_on_where_it_ended(tmp_path: Path, decoded_frames: Callable[[Path], bytes]) -> None:
    """Its events are given, seqs and seals go on, and the whole chain still holds."""
    session = SampleSession(tmp_path)
    session.turn(steps=2)
    session.log.close()
    before = on_disk(session.log)

    events: list[ev.Event] = []
    log, dropped = SessionLog.reopen(tmp_path, clock=int, fold=events.append)
    with log:
        assert dropped is None
        assert [event.seq for event in events] == list(range(session.log.next_seq))
        assert log.append(ev.RunResume(changes=[])).seq == len(events)
        seal = log.seal()

    data = on_disk(log)
    assert data.startswith(before)
    assert hashlib.sha256(data[: data.index(seal.sha256.encode())]).hexdigest() == seal.sha256
    decoded_frames(log.path)
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]


def test_a_torn_log_is_reopened_without_its_torn_record(
    tmp_path: Path, decoded_frames: Callable[[Path], bytes]
) -> None:
    """Nothing is appended behind an unfinished frame: whole events are written anew, the rest is reported."""
    session = SampleSession(tmp_path)
    session.turn(steps=2)
    torn = session.log.path.read_bytes()[:-3]
    session.log.close()
    session.log.path.write_bytes(torn)

    events: list[ev.Event] = []
    log, dropped = SessionLog.reopen(tmp_path, clock=int, fold=events.append)
    with log:
        assert dropped is not None
        assert log.append(ev.RunResume(changes=[])).seq == len(events) < session.log.next_seq

    decoded_frames(log.path)
    assert len(list(open_session(str(tmp_path)).events())) == len(events) + 1


def test_reopening_needs_a_log_of_ours(tmp_path: Path) -> None:
    """No log, an empty one, garbage and a log of another harness are refused and left alone."""
    with pytest.raises(ConfigError, match="holds no session log"):
        SessionLog.reopen(tmp_path, clock=int, fold=print)
    foreign = b'{"type":"session","version":0,"id":"session-1","createdAt":1}\n'
    for content in (b"", b"garbage", zstandard.compress(foreign), zstandard.compress(b'{"type":')):
        (tmp_path / LOG_NAME).write_bytes(content)
        with pytest.raises(Exception, match=r"empty|damaged|only a log of nightshift"):
            SessionLog.reopen(tmp_path, clock=int, fold=print)
        assert (tmp_path / LOG_NAME).read_bytes() == content
        assert len(list(tmp_path.iterdir())) == 1


@pytest.fixture
def syncs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, str]]:
    """Every real sync of a file: its descriptor and the thread that made it."""
    made: list[tuple[int, str]] = []
    from runner.session import log as module

    real: Callable[[int], None] = module._sync_data

    def sync(descriptor: int) -> None:
        real(descriptor)
        made.append((descriptor, threading.current_thread().name))

    monkeypatch.setattr(module, "_sync_data", sync)
    return made


def test_a_barrier_syncs_once_and_only_what_is_new(log: SessionLog, syncs: list[tuple[int, str]]) -> None:
    """Without anything new there is nothing to wait for."""
    log.append(user())
    assert syncs == []
    log.barrier()
    log.barrier()
    assert len(syncs) == 1
    log.append(user())
    log.barrier()
    assert len(syncs) == 2


def test_a_scheduled_sync_is_made_by_one_thread_for_all_logs(tmp_path: Path, syncs: list[tuple[int, str]]) -> None:
    """Step ends do not wait for the disk, and a process has one committer however many sessions it runs."""
    logs = [SessionLog.create(tmp_path / str(n), header={"id": f"session-{n}"}, clock=int) for n in range(5)]
    for log in logs:
        log.append(user())
        log.schedule_sync()
    deadline = time.monotonic() + 10
    while len(syncs) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)

    assert {name for _, name in syncs} == {"session-log-committer"}
    assert len(syncs) == 5
    assert [thread.name for thread in threading.enumerate()].count("session-log-committer") == 1
    for log in logs:
        log.barrier()
        log.close()


def test_several_threads_may_append(log: SessionLog) -> None:
    """Seqs stay contiguous and each line whole."""

    def work() -> None:
        for _ in range(100):
            log.append(ev.TurnStart(turn=1))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert [record["seq"] for record in records(log)] == list(range(400))
