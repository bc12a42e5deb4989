"""When the log cannot be written: one clear failure, nothing more written, the log so far readable."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.errors import ErrorCode, StorageError
from runner.session import events as ev
from runner.session.header import LOG_NAME
from runner.session.log import SessionLog
from runner.session.store import open_session

if TYPE_CHECKING:
    from collections.abc import Callable

# Appends until the log fails, then tries every way to write again, and tells what happened.
FILL = """
import random, sys
from pathlib import Path
from runner.errors import StorageError
from runner.session import events as ev
from runner.session.log import SessionLog

log = SessionLog.create(Path(sys.argv[1]), header={"id": "session-1"}, clock=int)
noise, written = random.Random(1), 0
try:
    while True:
        log.append(ev.TodoWrite(todos=[noise.randbytes(400).hex()]))
        written += 1
        if written == 100_000:
            sys.exit("the disk never filled")
except StorageError as error:
    size = log.path.stat().st_size
    print(written, error.code, error.message.split(": ")[-1], "|", error.hint)
again = 0
for write in (lambda: log.append(ev.TurnStart(turn=1)), lambda: log.append_chunk(1, 1, {"type": "finish"}),
              log.seal, log.barrier, log.schedule_sync):
    try:
        write()
    except StorageError:
        again += 1
log.close()
print(again, log.path.stat().st_size == size)
"""


def fill(directory: Path, *, prepare: str = "") -> tuple[int, str, str]:
    """Fill a log in another process; returns the events it wrote, the error line, and what came after."""
    program = textwrap.dedent(prepare) + FILL
    command = [sys.executable, "-c", program, str(directory)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=50)
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    return int(first.split()[0]), first, second


def test_a_full_disk_is_reported_once_and_for_all(tmp_path: Path) -> None:
    """With a limit on the file's size: STORAGE_FAILED with a hint, later writes fail too, all before is there."""
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (65536, 65536))"

    written, error, after = fill(tmp_path, prepare=limit)

    assert "STORAGE_FAILED File too large | raise the file size limit" in error
    assert after == "5 True"
    source = open_session(str(tmp_path))
    assert len(list(source.events())) == written > 50
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]


@pytest.mark.slow
def test_a_full_file_system_is_reported_once_and_for_all(tmp_path: Path) -> None:
    """The same on a real small file system that is full."""
    command = ["mount", "-t", "tmpfs", "-o", "size=64k", "nightshift-test", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True)  # needs root, as where the slow tests run
    try:
        written, error, after = fill(tmp_path / "artifacts")

        assert "STORAGE_FAILED No space left on device | make room" in error
        assert after == "5 True"
        assert len(list(open_session(str(tmp_path / "artifacts")).events())) == written > 50
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.mark.slow
def test_a_file_that_may_not_be_written_any_more_is_reported(tmp_path: Path) -> None:
    """Permission lost in the middle: the file is made immutable under the writer."""
    with SessionLog.create(tmp_path, header={"id": "session-1"}, clock=int) as log:
        log.append(ev.TurnStart(turn=1))
        set_immutable(log.path, value=True)
        try:
            with pytest.raises(StorageError, match="Operation not permitted"):
                log.append(ev.TurnStart(turn=2))
        finally:
            set_immutable(log.path, value=False)
        with pytest.raises(StorageError):
            log.append(ev.TurnStart(turn=3))

    assert len(list(open_session(str(tmp_path)).events())) == 1


def set_immutable(path: Path, *, value: bool) -> None:
    """Set or clear the immutable flag of a file (Linux, root)."""
    get, put, flag = 0x80086601, 0x40086602, 0x10
    with path.open("rb") as file:
        (flags,) = struct.unpack("l", fcntl.ioctl(file, get, struct.pack("l", 0)))
        fcntl.ioctl(file, put, struct.pack("l", flags | flag if value else flags & ~flag))


def test_a_removed_file_is_noticed_and_put_back(tmp_path: Path) -> None:
    """The run stops with STORAGE_FAILED, and what was written can be read under the old name."""
    log = SessionLog.create(tmp_path, header={"id": "session-1"}, clock=int)
    log.append(ev.TurnStart(turn=1))
    log.path.unlink()

    with pytest.raises(StorageError, match="was removed while it was written") as caught:
        log.append(ev.StepStart(turn=1, step=1))
    with pytest.raises(StorageError):
        log.append(ev.StepStart(turn=1, step=1))
    log.close()

    assert caught.value.code is ErrorCode.STORAGE_FAILED
    assert [event.TYPE for event in open_session(str(tmp_path)).events()] == ["turn/start", "step/start"]


def test_a_file_put_in_the_place_of_a_removed_one_is_not_touched(tmp_path: Path) -> None:
    """Whatever took the name belongs to somebody else."""
    log = SessionLog.create(tmp_path, header={"id": "session-1"}, clock=int)
    log.path.unlink()
    log.path.write_text("somebody else's")

    with pytest.raises(StorageError, match="removed"):
        log.append(ev.TurnStart(turn=1))
    log.close()

    assert log.path.read_text() == "somebody else's"


def test_a_removed_directory_is_noticed(tmp_path: Path) -> None:
    """There is no place to put it back to; the failure says so all the same."""
    log = SessionLog.create(tmp_path / "run", header={"id": "session-1"}, clock=int)
    log.path.unlink()
    log.path.parent.rmdir()

    with pytest.raises(StorageError, match="removed"):
        log.append(ev.TurnStart(turn=1))
    log.close()


def test_a_directory_that_cannot_be_made_or_written_is_reported(tmp_path: Path) -> None:
    """A file in the way, and a device, are STORAGE_FAILED before a run begins."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/self")):
        with pytest.raises(StorageError, match="cannot write the session log"):
            SessionLog.create(place, header={"id": "session-1"}, clock=int)


def test_a_log_that_cannot_be_taken_up_again_stays_as_it_is(tmp_path: Path) -> None:
    """Without room for the new file the old one is not touched, and its lock is free again."""
    with SessionLog.create(tmp_path, header={"id": "session-1"}, clock=int) as log:
        log.append(ev.TurnStart(turn=1))
    before = log.path.read_bytes()
    (tmp_path / f".{LOG_NAME}.new").mkdir()

    with pytest.raises(StorageError, match="cannot write the session log"):
        SessionLog.reopen(tmp_path, clock=int, fold=print)
    assert log.path.read_bytes() == before

    (tmp_path / f".{LOG_NAME}.new").rmdir()
    events: list[ev.Event] = []
    again, _ = SessionLog.reopen(tmp_path, clock=int, fold=events.append)
    again.close()
    assert len(events) == 1


def failing_sync(code: int) -> Callable[[int], None]:
    """A sync that fails, as on a broken disk."""

    def sync(_: int) -> None:
        raise OSError(code, os.strerror(code))

    return sync


def test_a_failed_sync_is_never_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a failure to reach stable storage the barrier and every later write fail."""
    with SessionLog.create(tmp_path, header={"id": "session-1"}, clock=int) as log:
        log.append(ev.TurnStart(turn=1))
        with monkeypatch.context() as patch:
            patch.setattr("runner.session.log._sync_data", failing_sync(errno.EIO))
            with pytest.raises(StorageError, match="Input/output error"):
                log.barrier()
        with pytest.raises(StorageError):
            log.barrier()
        with pytest.raises(StorageError):
            log.append(ev.TurnStart(turn=2))

    assert len(list(open_session(str(tmp_path)).events())) == 1


def test_a_failed_background_sync_shows_at_a_later_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The committer cannot raise; the next barrier does."""
    monkeypatch.setattr("runner.session.log._sync_data", failing_sync(errno.ENOSPC))
    with SessionLog.create(tmp_path, header={"id": "session-1"}, clock=int) as log:
        log.append(ev.TurnStart(turn=1))
        log.schedule_sync()
        with pytest.raises(StorageError, match="No space left"):
            log.barrier()


def test_a_log_that_cannot_be_packed_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, decoded_frames: Callable[[Path], bytes]
) -> None:
    """Packing is a matter of size only: without room for it the finished file stays, whole and valid."""
    log = SessionLog.create(tmp_path, header={"id": "session-1"}, clock=int)
    log.append(ev.TurnStart(turn=1))
    monkeypatch.setattr("runner.session.log._sync_data", failing_sync(errno.ENOSPC))

    log.close()

    decoded_frames(log.path)
    assert [path.name for path in tmp_path.iterdir()] == [LOG_NAME]
