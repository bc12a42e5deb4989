"""The session log's writer: one file, one writer, flushed as events are written.

Invariants: an event reaches the kernel before ``append`` returns; chunks wait at most 200 ms, or until a
block ends or any other event is written, and are written packed; after a failure nothing more is
written; nothing is ever appended behind an unfinished frame. On disk ``session.jsonl.zst``: a frame
with a block a write, so that every prefix of the file decodes to whole events and a torn rest. When
that frame has doubled the log, and at ``close``, all is packed into one frame in a new file that takes
the name. Writes ``log/seal``. No effect on the prefix cache.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import threading
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Self

from runner.errors import ConfigError, InternalError, LogError, StorageError
from runner.session import codec
from runner.session.committer import Committer
from runner.session.events import LogSeal, event_from_record
from runner.session.header import LOG_NAME, check_header, is_chained, make_header
from runner.session.surface import Surface

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from typing import BinaryIO

    import zstandard

    from runner.messages import Chunk, JsonObject
    from runner.session.events import Event

HOLD_MS = 200
"""Longest time a chunk waits to be written, and a scheduled sync to be done, in milliseconds."""

_HOLD_BYTES = 1024 * 1024  # text of held deltas; escaped it may be six times as long, under the line limit
_PACK_FROM = 128 * 1024  # decoded bytes since the last packing, from which it is worth it
_PACK_LIVE = 16 * 1024 * 1024  # decoded bytes that may be packed in the middle of a run, and thoroughly at its end
_PACK_CLOSED = 128 * 1024 * 1024  # decoded bytes that may be packed at the end
_BLOCK = 4096
_MIDDLING = 1024 * 1024
_WINDOW_LOG = 21
_HINTS = {
    errno.ENOSPC: "make room on that file system, or choose another --artifacts directory",
    errno.EDQUOT: "raise the quota, or choose another --artifacts directory",
    errno.EFBIG: "raise the file size limit (ulimit -f), or choose another --artifacts directory",
    errno.EROFS: "the file system is read-only; choose another --artifacts directory",
}
_sync_data = getattr(os, "fdatasync", os.fsync)


class SessionLog:
    """The writer of one session log. Made by ``create`` or ``reopen``; safe to use from several threads.

    ``observers`` are called with every event once it is written (a chunk: once it has its seq; not with
    the deltas of a block, which comes whole at its end), in order, in the thread that wrote it. What they
    raise goes to the writer.
    """

    def __init__(self, path: Path, descriptor: int, *, clock: Callable[[], int]) -> None:
        self.path = path
        self.observers: list[Callable[[Event], None]] = []
        self._hold_until: float | None = None
        self._sync_at: float | None = None
        self._clock = clock
        self._descriptor = descriptor
        self._lock = threading.RLock()
        self._sync_lock = threading.Lock()  # taken before _lock where both are needed
        self._encoder = _stream_encoder()
        self._pending: list[bytes] = []
        self._hash = hashlib.sha256()
        self._lines = 0
        self._decoded_bytes = 0
        self._packed_bytes = 0
        self._next_seq = 0
        self._surface = Surface()
        self._held: list[codec.HeldChunk] = []
        self._held_bytes = 0
        self._written = 0
        self._synced = 0
        self._directory_synced = False
        self._failure: StorageError | None = None
        self._closed = False

    @classmethod
    def create(cls, directory: Path, *, header: JsonObject, clock: Callable[[], int]) -> SessionLog:
        """Start a new log in ``directory``, which is made if it is missing, and take its lock.

        Args:
            directory: Where ``session.jsonl.zst`` is written.
            header: Fields of the header line, at least ``id``. Missing ones are filled in.
            clock: Epoch milliseconds.

        Raises:
            ConfigError: CONFIG_INVALID, the directory holds a log already, or another process writes it.
            StorageError: STORAGE_FAILED, the file cannot be made.
        """
        path = Path(directory) / LOG_NAME
        first = codec.encode_line(make_header(header, created_at=clock()))
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise _storage_error(path, error) from error
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError as error:
            raise _occupied(path) from error
        except OSError as error:
            raise _storage_error(path, error) from error
        log = cls(path, descriptor, clock=clock)
        try:
            _take_lock(descriptor, path)
            log._put(first)
            log._flush()
        except BaseException:
            log._release()
            raise
        return log

    @classmethod
    def reopen(
        cls,
        directory: Path,
        *,
        clock: Callable[[], int],
        fold: Callable[[Event], None],
        accept: Callable[[], None] = lambda: None,
    ) -> tuple[SessionLog, str | None]:
        """Take up the log of a run that ended, to append to it.

        Its whole lines are written into a fresh frame in a new file, which replaces the old one.

        Args:
            directory: Where the log is.
            clock: Epoch milliseconds.
            fold: Gets every event so far, in order.
            accept: Called behind the last of them; what it raises leaves the old file as it is.

        Returns:
            The log, and what was dropped at its torn end (None if nothing was).

        Raises:
            ConfigError: CONFIG_INVALID, there is no log, or another process writes it.
            LogError: LOG_INVALID, the file is no log of ours or is damaged before its end.
            StorageError: STORAGE_FAILED, the new file cannot be written.
        """
        path = Path(directory) / LOG_NAME
        old = _open_locked(path)
        fresh = path.with_name(f".{LOG_NAME}.new")
        try:
            log = cls(path, _open_fresh(fresh), clock=clock)
            try:
                _take_lock(log._descriptor, path)
                dropped = log._take_over(old, fold)
                accept()
                _sync_data(log._descriptor)
                fresh.replace(path)
            except BaseException:
                log._release()
                fresh.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise _storage_error(path, error) from error
        finally:
            os.close(old)
        return log, dropped

    @property
    def next_seq(self) -> int:
        """The seq of the next event."""
        return self._next_seq

    @property
    def digest(self) -> str:
        """Hex SHA-256 of the decoded bytes written so far; held chunks are not among them."""
        with self._lock:
            return self._hash.hexdigest()

    # --- appending ----------------------------------------------------------------------------

    def append(self, event: Event) -> Event:
        """Write one event and return it; it is in the kernel when this returns.

        ``seq`` and ``time`` are set; a time that is set already stays. Text that cannot be UTF-8 is
        replaced in the event as well, so that memory and log agree.

        Raises:
            InternalError: INTERNAL, the event breaks a surface rule or holds no JSON; nothing was written.
            StorageError: STORAGE_FAILED, the event cannot be written.
        """
        self.append_many((event,))
        return event

    def append_many(self, events: Iterable[Event]) -> None:
        """Write events with one flush. Those before one that is refused are written.

        Raises:
            InternalError: As ``append``.
            StorageError: As ``append``.
        """
        with self._lock:
            self._check_usable()
            done: list[Event] = []
            try:
                for event in events:
                    line = self._line_of(event)
                    self._put_held()
                    self._put(line)
                    self._next_seq += 1
                    done.append(event)
            finally:
                if done:
                    self._flush()
            for event in done:
                self._notify(event)

    def append_chunk(self, turn: int, step: int, chunk: Chunk) -> int:
        """Take one piece of a streamed answer; it is written packed with its neighbours.

        Returns:
            The seq of the ``assistant/chunk``.

        Raises:
            StorageError: STORAGE_FAILED, held chunks cannot be written.
        """
        with self._lock:
            self._check_usable()
            if codec.encode_exact(chunk) is None:
                chunk = codec.clean(chunk)
            held = codec.HeldChunk(self._next_seq, self._clock(), turn, step, chunk)
            self._next_seq += 1
            self._held.append(held)
            self._held_bytes += sum(len(value) for value in chunk.values() if isinstance(value, str))
            late = held.time - self._held[0].time >= HOLD_MS
            if late or self._held_bytes > _HOLD_BYTES or chunk.get("type") == "block-end":
                self._put_held()
                self._flush()
            elif self._hold_until is None:
                self._hold_until = monotonic() + HOLD_MS / 1000
                _committer.watch(self)
            if chunk["type"] not in codec.DELTAS:
                self._notify(held.event())
            return held.seq

    def seal(self, *events: Event) -> LogSeal:
        """Write ``events`` and a seal over everything before it, held chunks included, with one flush.

        Raises:
            InternalError: As ``append``; nothing was written.
            StorageError: STORAGE_FAILED, it cannot be written.
        """
        with self._lock:
            self._check_usable()
            self._put_held()
            for before in events:
                self._put(self._line_of(before))
                self._next_seq += 1
            event = LogSeal(lines=self._lines, sha256="", seq=self._next_seq, time=self._clock())
            self._put(self._seal_line(event))
            self._next_seq += 1
            self._flush()
            grown = self._decoded_bytes - self._packed_bytes
            for before in events:
                self._notify(before)
        if grown >= max(_PACK_FROM, self._packed_bytes) and self._decoded_bytes <= _PACK_LIVE:
            self._pack_live()
        self._notify(event)
        return event

    def copy(self, lines: Iterable[bytes]) -> None:
        """Write lines of another log of ours, without their newlines, as they are; only seals are made anew.

        Observers do not see their events.

        Raises:
            LogError: LOG_INVALID, their events do not follow on those written so far.
            StorageError: STORAGE_FAILED, they cannot be written.
        """
        with self._lock:
            self._check_usable()
            flushed = self._decoded_bytes
            for line in lines:
                read = codec.read_record(codec.decode_line(line), first=self._next_seq)
                if isinstance(read, codec.ChunkRow):
                    self._next_seq += read.count
                else:
                    self._surface.apply(read)
                    self._next_seq += 1
                self._put(self._seal_line(read) if isinstance(read, LogSeal) else line + b"\n")
                if self._decoded_bytes - flushed >= _block_size(self._decoded_bytes):
                    self._flush()
                    flushed = self._decoded_bytes
            self._flush()

    def _seal_line(self, seal: LogSeal) -> bytes:
        """The line of a seal over all that was written; gives it its count and its digest."""
        seal.lines = self._lines
        start = codec.seal_start(seq=seal.seq, time=seal.time, lines=seal.lines)
        sealed = self._hash.copy()
        sealed.update(start)
        seal.sha256 = sealed.hexdigest()
        return start + seal.sha256.encode() + codec.SEAL_END

    def _line_of(self, event: Event) -> bytes:
        """Give the event its seq and time, check it, return its line. A refused event stays as it was."""
        seq, time = event.seq, event.time
        if seq not in (-1, self._next_seq):
            raise InternalError(f"an event with seq {seq} is appended to a log that is at {self._next_seq}")
        event.seq = self._next_seq
        event.time = time if time >= 0 else self._clock()
        record = event.record()
        try:
            line = codec.encode_exact(record)
            if line is None:
                line = codec.encode_line(record)
                _assign(event, event_from_record(codec.decode_line(line)))
            _check_length(line, record["type"])
            self._surface.apply(event)
        except LogError as error:
            event.seq, event.time = seq, time
            raise InternalError(f"an event may not be logged: {error.message}") from error
        except (InternalError, StorageError):
            event.seq, event.time = seq, time
            raise
        return line

    def _notify(self, event: Event) -> None:
        for observer in self.observers:
            observer(event)

    # --- the frame ----------------------------------------------------------------------------

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise InternalError("the session log is closed")

    def _put(self, line: bytes) -> None:
        self._hash.update(line)
        self._lines += 1
        self._decoded_bytes += len(line)
        self._pending.append(self._encoder.compress(line))

    def _put_held(self) -> None:
        if self._held:
            held, self._held, self._held_bytes, self._hold_until = self._held, [], 0, None
            for record in codec.pack(held):
                self._put(codec.encode_line(record))

    def _flush(self) -> None:
        self._pending.append(self._encoder.flush(_FLUSH_BLOCK))
        self._write()

    @property
    def due(self) -> float | None:
        """Monotonic time at which held chunks must be written or a scheduled sync done. For the committer."""
        hold, sync = self._hold_until, self._sync_at
        return hold if sync is None else sync if hold is None else min(hold, sync)

    def serve(self) -> None:
        """Do what is due; a failure shows at the next append. For the committer."""
        now = monotonic()
        with self._lock:
            if self._failure is not None or self._closed:
                self._hold_until = self._sync_at = None
                return
            if self._hold_until is not None and self._hold_until <= now:
                with suppress(StorageError):  # kept in _failure
                    self._put_held()
                    self._flush()
            sync = self._sync_at is not None and self._sync_at <= now
        if sync:
            self.sync()

    def _write(self) -> None:
        data = memoryview(b"".join(self._pending))
        self._pending.clear()
        try:
            while data:
                count = os.write(self._descriptor, data)
                self._written += count
                data = data[count:]
            removed = os.fstat(self._descriptor).st_nlink == 0
        except OSError as error:
            self._failure = _storage_error(self.path, error)
            raise self._failure from error
        if removed:
            self._restore()
            self._failure = StorageError(
                f"the session log {self.path} was removed while it was written",
                hint="nothing but the run may change its artifacts directory; what was written is put back if possible",
            )
            raise self._failure

    def _restore(self) -> None:
        """Put the content of the removed file back in its place, if that is free."""
        with suppress(OSError):
            target = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(target, "wb") as copy, _reading(self._descriptor) as stream:
                copy.writelines(codec.plain_chunks(stream))

    # --- durability ---------------------------------------------------------------------------

    def barrier(self) -> None:
        """Wait until everything appended so far is on stable storage.

        Raises:
            StorageError: STORAGE_FAILED, it cannot be written there.
        """
        with self._lock:
            self._check_usable()
            if self._held:
                self._put_held()
                self._flush()
        self.sync()
        with self._lock:
            self._check_usable()

    def schedule_sync(self) -> None:
        """Bring what is written to stable storage in the background, after ``HOLD_MS`` at the latest.

        A barrier that comes before does it at once. A failure shows at the next append.

        Raises:
            StorageError: STORAGE_FAILED, the log has failed already.
        """
        with self._lock:
            self._check_usable()
            if self._sync_at is None:
                self._sync_at = monotonic() + HOLD_MS / 1000
                _committer.watch(self)

    def sync(self) -> None:
        """Bring what is written to stable storage; a failure shows at the next append."""
        with self._sync_lock:
            with self._lock:
                self._sync_at = None
                written, done = self._written, self._written == self._synced and self._directory_synced
                if done or self._closed or self._failure is not None:
                    return
            try:
                _sync_data(self._descriptor)
                if not self._directory_synced:
                    _sync_directory(self.path.parent)
                    self._directory_synced = True
            except OSError as error:
                with self._lock:
                    self._failure = _storage_error(self.path, error)
            else:
                self._synced = written

    # --- closing and reopening ----------------------------------------------------------------

    def close(self) -> None:
        """Write held chunks, finish the frame, pack the file once more, release the lock.

        May be called more than once. After a failure it only releases the file, which stays readable.

        Raises:
            StorageError: STORAGE_FAILED, the end of the frame cannot be written.
        """
        with self._sync_lock, self._lock:
            if self._closed:
                return
            try:
                if self._failure is None:
                    self._put_held()
                    self._finish_frame()
                    if self._decoded_bytes <= _PACK_CLOSED:
                        self._pack(thorough=self._decoded_bytes <= _PACK_LIVE)
            finally:
                self._release()

    def __enter__(self) -> Self:
        """Return the log itself."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _release(self) -> None:
        self._closed = True
        self._hold_until = self._sync_at = None
        os.close(self._descriptor)

    def _finish_frame(self) -> None:
        self._pending.append(self._encoder.flush())
        self._write()

    def _pack_live(self) -> None:
        """Pack what is written so far and go on behind it in a new frame."""
        with self._sync_lock, self._lock:
            if self._closed or self._failure is not None:
                return
            self._put_held()
            self._finish_frame()
            self._pack(thorough=False)
            self._packed_bytes = self._decoded_bytes
            self._encoder = _stream_encoder()

    def _pack(self, *, thorough: bool) -> None:
        """Write the finished frames as one into a new file and put it in place; on a failure all stays as it is."""
        fresh = self.path.with_name(f".{LOG_NAME}.new")
        encoder, digest = _whole_encoder(thorough=thorough), hashlib.sha256()
        descriptor = -1
        try:
            descriptor = _open_fresh(fresh)
            _take_lock(descriptor, fresh)
            with _reading(self._descriptor) as stream, os.fdopen(os.dup(descriptor), "wb") as target:
                for block in _blocks(codec.ZstdChunks(stream), _block_size(self._decoded_bytes)):
                    digest.update(block)
                    target.write(encoder.compress(block))
                    target.write(encoder.flush(_FLUSH_BLOCK))
                target.write(encoder.flush())
            _sync_data(descriptor)
            same_file = os.path.samestat(os.fstat(self._descriptor), self.path.stat())
            if same_file and digest.digest() == self._hash.digest():
                fresh.replace(self.path)
                self._descriptor, descriptor = descriptor, self._descriptor
                self._synced, self._directory_synced = self._written, False
        except (OSError, LogError, ConfigError, StorageError):
            pass  # the finished frames are whole, only larger
        finally:
            os.lseek(self._descriptor, 0, os.SEEK_END)
            if descriptor >= 0:
                os.close(descriptor)
            with suppress(OSError):
                fresh.unlink(missing_ok=True)

    def _take_over(self, old: int, fold: Callable[[Event], None]) -> str | None:
        """Write the whole lines of another log into this one."""
        flushed = -_block_size(0)  # the header has a block of its own
        with _reading(old) as stream:
            chunks = codec.ZstdChunks(stream)
            lines = codec.Lines(chunks)
            for line in lines:
                try:
                    self._take_line(line, first=lines.number == 1, fold=fold)
                except LogError as error:
                    raise LogError(f"{self.path}: line {lines.number}: {error.message}", code=error.code) from error
                self._put(line + b"\n")
                if self._decoded_bytes - flushed >= _block_size(self._decoded_bytes):
                    self._flush()
                    flushed = self._decoded_bytes
        if not lines.number:
            raise LogError(f"{self.path}: empty, or cut off inside its header")
        self._flush()
        return codec.torn_note(lines, chunks)

    def _take_line(self, line: bytes, *, first: bool, fold: Callable[[Event], None]) -> None:
        record = codec.decode_line(line)
        if first:
            check_header(record)
            if not is_chained(record):
                raise LogError("only a log of nightshift can be taken up again")
            return
        for event in codec.events_of(record, first=self._next_seq):
            if isinstance(event, LogSeal):
                fitting = LogSeal(lines=0, sha256="", seq=event.seq, time=event.time)
                if line + b"\n" != self._seal_line(fitting):
                    raise LogError("the seal does not fit: a line before it is not as it was written")
            self._surface.apply(event)
            self._next_seq += 1
            fold(event)


_committer = Committer()


def _stream_encoder() -> zstandard.ZstdCompressionObj:
    """An encoder for many small flushed blocks: long matches only, small tables that stay in the cache."""
    import zstandard

    parameters = zstandard.ZstdCompressionParameters(
        compression_level=0,
        window_log=_WINDOW_LOG,
        hash_log=16,
        chain_log=16,
        search_log=4,
        min_match=6,
        target_length=32,
        strategy=zstandard.STRATEGY_LAZY2,
        write_content_size=0,
        write_checksum=1,
    )
    return zstandard.ZstdCompressor(compression_params=parameters).compressobj()


def _whole_encoder(*, thorough: bool) -> zstandard.ZstdCompressionObj:
    """An encoder for one frame in one go."""
    import zstandard

    return zstandard.ZstdCompressor(level=9 if thorough else 3, write_checksum=True).compressobj()


def _block_size(decoded: int) -> int:
    """Decoded bytes of a block in a frame that is written in one go.

    A block can only be decoded whole, so short ones keep a file that loses its tail readable nearly to its
    end. In a long log they are longer, since each costs time.
    """
    return _BLOCK if decoded < _MIDDLING else 4 * _BLOCK if decoded < _PACK_LIVE else 16 * _BLOCK


def _blocks(chunks: Iterable[bytes], size: int) -> Iterator[bytes]:
    """The bytes of a log in blocks: the header, then ``size`` bytes each, wherever lines end."""
    held = b""
    header = False
    for chunk in chunks:
        held += chunk
        if not header and (end := held.find(b"\n") + 1):
            header = True
            yield held[:end]
            held = held[end:]
        if header:
            whole = len(held) - len(held) % size
            for start in range(0, whole, size):
                yield held[start : start + size]
            held = held[whole:]
    yield held


_FLUSH_BLOCK = 1  # zstandard.COMPRESSOBJ_FLUSH_BLOCK, without the import


def _open_fresh(path: Path) -> int:
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)


def _reading(descriptor: int) -> BinaryIO:
    """The whole file of a descriptor whose own position is not needed any more."""
    stream = os.fdopen(os.dup(descriptor), "rb")
    stream.seek(0)
    return stream


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise _lock_held(path) from error
    except OSError as error:
        raise _storage_error(path, error) from error


def _open_locked(path: Path) -> int:
    """Open an existing log and take its lock, also when it is replaced meanwhile."""
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise ConfigError(f"{path.parent} holds no session log") from error
        except OSError as error:
            raise _storage_error(path, error) from error
        try:
            _take_lock(descriptor, path)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _occupied(path: Path) -> ConfigError:
    """Why a new log cannot be made where one is."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            _take_lock(descriptor, path)
        except ConfigError as held:
            return held
        finally:
            os.close(descriptor)
    return ConfigError(
        f"{path.parent} holds a session log already", hint="resume that run, or choose another --artifacts directory"
    )


def _lock_held(path: Path) -> ConfigError:
    return ConfigError(f"lock held: another process is writing {path}", hint="wait for that run to end, or stop it")


def _storage_error(path: Path, error: OSError) -> StorageError:
    reason = error.strerror or str(error)
    return StorageError(f"cannot write the session log {path}: {reason}", hint=_HINTS.get(error.errno or 0))


def _check_length(line: bytes, type_name: str) -> None:
    if len(line) > codec.MAX_WRITE_LINE:
        raise StorageError(
            f"an event of type {type_name} makes a line of {len(line)} bytes, more than the session log takes",
            hint="larger content must be spilled before it is logged",
        )


def _assign(event: Event, other: Event) -> None:
    """Give ``event`` the values of another of its type."""
    for name in ("extra", *(field.attribute for field in event.FIELDS)):
        setattr(event, name, getattr(other, name))
