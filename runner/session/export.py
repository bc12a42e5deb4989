"""Export: a session as one ZIP that can be read anywhere.

Holds ``session.jsonl`` (decoded), ``media/``, ``spill/``, ``subagents/<id>/...`` and ``manifest.json`` with
the digest of every member. Deterministic: the same session gives the same bytes. Streaming; compressed by
isal, which takes a quarter of zlib's time (decision record 0010). A log that
ends in an open turn, or torn, is repaired in the copy and the manifest says so; the log itself is only
read. Lines under a seal that fits are as they were written and are copied without a look into each; all
others are checked one by one. No effect on the prefix cache.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import orjson

from runner.errors import LogError, StorageError
from runner.session import codec
from runner.session.events import (
    CompactionEnd,
    CompactionStart,
    Event,
    LogSeal,
    Redaction,
    StepEnd,
    StepStart,
    TurnEnd,
    TurnStart,
    event_from_record,
)
from runner.session.header import check_header, is_chained
from runner.session.repair import close
from runner.session.store import EXPORTED_LOG, MANIFEST_NAME, SessionSource, open_session
from runner.session.structure import Structure
from runner.session.surface import Surface, check_message

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterable, Iterator
    from pathlib import Path
    from typing import IO

    from runner.messages import JsonObject

_FIXED_TIME = (1980, 1, 1, 0, 0, 0)
_LEVEL = 2  # of isal's 0 to 3; the last one takes twice the time
_READ = 1024 * 1024
_GATHER = 128 * 1024
_TAKEN = ("media/", "spill/")
_WAITING = 1024 * 1024
_LINE_COST = 64  # what a line takes beside its bytes; an archive may hold millions of empty ones
_TYPE = b'{"type":"'
_SEAL = b'{"type":"log/seal"'
_OUTLINE = frozenset(
    kind.TYPE.encode()
    for kind in (
        TurnStart,
        TurnEnd,
        StepStart,
        StepEnd,
        CompactionStart,
        CompactionEnd,
        Redaction,
    )
)
_BEGINNING = 5
_BEGINNINGS = frozenset(kind[:_BEGINNING] for kind in _OUTLINE)


class Export(NamedTuple):
    """What was written: path, size and digest of the ZIP, and its manifest."""

    path: Path
    bytes: int
    sha256: str
    manifest: JsonObject


def export_zip(directory: Path, target: Path) -> Export:
    """Export the session of an artifacts directory to ``target``.

    Raises:
        LogError: LOG_INVALID, the log is damaged before its end.
        StorageError: STORAGE_FAILED, the ZIP cannot be written; nothing is left of it.
    """
    return export_session(open_session(str(directory)), target)


def export_session(source: SessionSource, target: Path) -> Export:
    """Export a session of any kind to ``target``, which is replaced when the ZIP is complete.

    Raises:
        LogError: LOG_INVALID, the log is damaged before its end.
        StorageError: STORAGE_FAILED, the ZIP cannot be written; nothing is left of it.
    """
    fresh = target.with_name(f".{target.name}.new")
    try:
        with os.fdopen(os.open(fresh, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600), "w+b") as stream:
            import zipfile

            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
                writing = _Writing(archive)
                writing.session(source, folder="")
                manifest = writing.manifest(source.header["id"])
            stream.flush()
            size, sha256 = _measure(stream.fileno())
        fresh.replace(target)
    except OSError as error:
        raise StorageError(f"cannot write {target}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            fresh.unlink(missing_ok=True)
    return Export(target, size, sha256, manifest)


class _Writing:
    """The members written so far, and what the manifest says of them."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._members: list[JsonObject] = []
        self._repaired = False
        self._redacted = False

    def session(self, source: SessionSource, *, folder: str) -> None:
        """Write a log, what lies beside it, and its subagents."""
        copy = _Copy(chained=is_chained(source.header))
        self._write(folder + EXPORTED_LOG, self._log(source, copy), digest=copy.digest)
        with source.files() as files:
            for path in sorted(files.paths()):
                if path.startswith(_TAKEN):
                    with files.open(path) as stream:
                        self._write(folder + path, codec.plain_chunks(stream))
        for name, child in source.children():
            self.session(child, folder=f"{folder}subagents/{name}/")

    def manifest(self, session: str) -> JsonObject:
        """Write the manifest, the last member, and return it."""
        manifest: JsonObject = {
            "schemaVersion": 1,
            "session": session,
            "repaired": self._repaired,
            "redacted": self._redacted,
            "members": self._members,
        }
        data = orjson.dumps(manifest, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
        with self._open(MANIFEST_NAME) as member:
            member.write(data)
        return manifest

    def _write(self, path: str, pieces: Iterator[bytes], *, digest: hashlib._Hash | None = None) -> None:
        """Write a member; a ``digest`` that is given is kept by whoever makes the pieces."""
        whole, size = digest or hashlib.sha256(), 0
        with self._open(path) as member:
            for piece in _gathered(pieces):
                if digest is None:
                    whole.update(piece)
                size += len(piece)
                member.write(piece)
        self._members.append({"path": path, "bytes": size, "sha256": whole.hexdigest()})

    def _open(self, path: str) -> IO[bytes]:
        import zipfile

        from isal import isal_zlib

        info = zipfile.ZipInfo(path, _FIXED_TIME)
        info.compress_type = zipfile.ZIP_DEFLATED
        info.create_system = 3  # Unix, whatever the system, so that the bytes are the same
        info.external_attr = 0o100600 << 16
        member = self._archive.open(info, "w", force_zip64=True)
        # zipfile has no other way to another compressor; should the name change, zlib writes the same content.
        member._compressor = isal_zlib.compressobj(_LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)  # type: ignore[attr-defined]  # noqa: SLF001  # see above
        return member

    def _log(self, source: SessionSource, copy: _Copy) -> Iterator[bytes]:
        """The whole lines of a log, and what closes it if it is open."""
        try:
            yield from copy.lines(source.raw_lines())
        except LogError as error:
            raise source.located(error, copy.line) from None
        closing = close(copy.structure, next_seq=copy.events, time=copy.time)
        self._redacted = self._redacted or copy.redacted
        self._repaired = self._repaired or bool(closing) or source.dropped is not None
        for event in closing:
            yield copy.add(codec.encode_line(event.record()))
        if closing and copy.chained:
            seq, lines = copy.events + len(closing), copy.line + len(closing)
            yield copy.add(codec.seal_start(seq=seq, time=copy.time, lines=lines))
            yield copy.add(copy.digest.hexdigest().encode() + codec.SEAL_END)


class _Copy:
    """The lines of a log on their way into a copy, and what has to be known of them to close it.

    Lines of ours wait for their seal. If it fits, only those are read that open or close something. ``line`` is the
    number of the line last looked at, ``digest`` that of the bytes given.
    """

    def __init__(self, *, chained: bool) -> None:
        self.chained = chained
        self.digest = hashlib.sha256()
        self.structure = Structure()
        self.redacted = False
        self.line = 0
        self.events = 0
        self.time = 0
        self._seal_line = 0
        self._surface: Surface | None = Surface()

    def add(self, data: bytes) -> bytes:
        """Take bytes into the digest and return them."""
        self.digest.update(data)
        return data

    def lines(self, lines: Iterator[bytes]) -> Iterator[bytes]:
        """Yield the same lines in pieces, with their newlines.

        Raises:
            LogError: LOG_INVALID, a line is not as it was written or cannot stand where it stands.
        """
        held: list[bytes] = []
        size = 0
        reading = not self.chained
        for data in lines:
            if self.line == 0:
                self.line = 1
                check_header(codec.decode_line(data))
                yield self.add(data + b"\n")
            elif self.chained and data.startswith(_SEAL):
                yield self.add(_joined(held))
                self._seal(data, held if not reading else None)
                yield self.add(data + b"\n")
                held, size, reading = [], 0, False
            else:
                if reading:
                    self._read(data)
                held.append(data)
                size += len(data) + _LINE_COST
                if size >= _WAITING:
                    if not reading:
                        self._read_all(held)
                    yield self.add(_joined(held))
                    held, size, reading = [], 0, True
        if not reading:
            self._read_all(held)
        yield self.add(_joined(held))

    def _read_all(self, lines: Iterable[bytes]) -> None:
        for data in lines:
            self._read(data)

    def _read(self, data: bytes) -> None:
        """Fold one line."""
        self.line += 1
        event = codec.read_record(codec.decode_line(data), first=self.events)
        if isinstance(event, codec.ChunkRow):
            self.events += event.count
        else:
            self.events += 1
            if self._surface is not None:
                self._surface.apply(event)
            else:
                check_message(event)  # the messages it may replace were not read
        self.structure.apply(event)
        self.time = event.time
        self.redacted = self.redacted or isinstance(event, Redaction)

    def _seal(self, data: bytes, before: list[bytes] | None) -> None:
        """Fold a seal and the lines before it, as far as they were not read yet; the digest is that before the seal."""
        first = self._seal_line + 1
        lines = self.line + len(before or ())
        seal = self._fitting(data, lines)
        if before is not None and (seal is None or not self._outline(before)):
            self._read_all(before)  # which names the first bad line if it can
            before = None
        self.line = self._seal_line = lines + 1
        if seal is None:
            raise LogError(f"the seal does not fit: a line from {first} to {self.line} is not as it was written")
        if before is None and seal.seq != self.events:
            raise LogError(f"seq is {seal.seq}, expected {self.events}")
        self.events, self.time = seal.seq + 1, seal.time

    def _fitting(self, data: bytes, lines: int) -> LogSeal | None:
        """The seal of a line, None if it is not the seal over the digest."""
        try:
            seal = event_from_record(codec.decode_line(data))
        except LogError:
            return None
        if not isinstance(seal, LogSeal):
            return None
        start = codec.seal_start(seq=seal.seq, time=seal.time, lines=lines)
        whole = self.digest.copy()
        whole.update(start)
        return seal if data + b"\n" == start + whole.hexdigest().encode() + codec.SEAL_END else None

    def _outline(self, lines: list[bytes]) -> bool:
        """Fold what opens and closes in sealed lines; False, and nothing is folded, if they have to be read."""
        events: list[tuple[int, Event]] = []
        for number, data in enumerate(lines, self.line + 1):
            if not data.startswith(_TYPE):
                return False
            begins = data[len(_TYPE) : len(_TYPE) + _BEGINNING]
            if begins in _BEGINNINGS and data[len(_TYPE) : data.find(b'"', len(_TYPE))] in _OUTLINE:
                self.line, before = number, self.line
                event = event_from_record(codec.decode_line(data))
                self.line = before
                events.append((number, event))
        steps = [isinstance(event, StepStart) for _, event in events if isinstance(event, (StepStart, StepEnd))]
        if steps[-1] if steps else self.structure.step is not None:
            return False  # the calls of an open step count
        for number, event in events:
            self.line = number
            self.structure.apply(event)
            self.redacted = self.redacted or isinstance(event, Redaction)
        self._surface = None
        return True


def _joined(lines: list[bytes]) -> bytes:
    return b"\n".join([*lines, b""]) if lines else b""


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in larger pieces."""
    held: list[bytes] = []
    size = 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= _GATHER:
            yield b"".join(held)
            held, size = [], 0
    if held:
        yield b"".join(held)


def _measure(descriptor: int) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    os.lseek(descriptor, 0, os.SEEK_SET)
    while piece := os.read(descriptor, _READ):
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()
