"""Export: a session as one ZIP that can be read anywhere.

Holds ``session.jsonl`` (decoded), ``media/``, ``spill/``, ``subagents/<id>/...`` and ``manifest.json`` with
the digest of every member. Deterministic: the same session gives the same bytes. Streaming. A log that
ends in an open turn, or torn, is repaired in the copy and the manifest says so; the log itself is only
read. No effect on the prefix cache.
"""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from itertools import chain
from typing import TYPE_CHECKING, NamedTuple

import orjson

from runner.errors import LogError, StorageError
from runner.session import codec
from runner.session.events import Redaction
from runner.session.header import is_chained
from runner.session.repair import close
from runner.session.store import EXPORTED_LOG, MANIFEST_NAME, SessionSource, open_session
from runner.session.structure import Structure
from runner.session.surface import Surface

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterator
    from pathlib import Path
    from typing import IO

    from runner.messages import JsonObject
    from runner.session.store import Line

_FIXED_TIME = (1980, 1, 1, 0, 0, 0)
_LEVEL = 3
_READ = 1024 * 1024
_GATHER = 128 * 1024
_LARGE = 4 * 1024 * 1024
_WORTH = 0.4
_TAKEN = ("media/", "spill/")


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

            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED, compresslevel=_LEVEL) as archive:
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
        self._write(folder + EXPORTED_LOG, self._log(source))
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

    def _write(self, path: str, pieces: Iterator[bytes]) -> None:
        digest, size = hashlib.sha256(), 0
        head, rest = _begun(_gathered(pieces))
        with self._open(path, compressed=not _is_dense(head)) as member:
            for piece in chain(head, rest):
                digest.update(piece)
                size += len(piece)
                member.write(piece)
        self._members.append({"path": path, "bytes": size, "sha256": digest.hexdigest()})

    def _open(self, path: str, *, compressed: bool = True) -> IO[bytes]:
        import zipfile

        info = zipfile.ZipInfo(path, _FIXED_TIME)
        info.compress_type = zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED
        info.create_system = 3  # Unix, whatever the system, so that the bytes are the same
        info.external_attr = 0o100600 << 16
        return self._archive.open(info, "w", force_zip64=True)

    def _log(self, source: SessionSource) -> Iterator[bytes]:
        """The whole lines of a log, and what closes it if it is open."""
        folded = _Folded()
        chained = is_chained(source.header)
        sealed = hashlib.sha256()
        try:
            for line in source.lines():
                folded.take(line)
                data = line.data + b"\n"
                if chained:
                    sealed.update(data)
                yield data
        except LogError as error:
            raise source.located(error, folded.lines) from None
        closing = close(folded.structure, next_seq=folded.events, time=folded.time)
        self._redacted = self._redacted or folded.redacted
        self._repaired = self._repaired or bool(closing) or source.dropped is not None
        for event in closing:
            data = codec.encode_line(event.record())
            sealed.update(data)
            yield data
        if closing and chained:
            seq, lines = folded.events + len(closing), folded.lines + len(closing)
            start = codec.seal_start(seq=seq, time=folded.time, lines=lines)
            sealed.update(start)
            yield start + sealed.hexdigest().encode() + codec.SEAL_END


class _Folded:
    """What has to be known of a log to close it."""

    def __init__(self) -> None:
        self.structure = Structure()
        self.redacted = False
        self.lines = 0
        self.events = 0
        self.time = 0
        self._surface = Surface()

    def take(self, line: Line) -> None:
        """Fold one line."""
        self.lines = line.number
        if line.number == 1:
            return
        for event in codec.events_of(line.record, first=self.events):
            self._surface.apply(event)
            self.structure.apply(event)
            self.events += 1
            self.time = event.time
            self.redacted = self.redacted or isinstance(event, Redaction)


def _begun(pieces: Iterator[bytes]) -> tuple[list[bytes], Iterator[bytes]]:
    """The first ``_LARGE`` bytes, or all if there are fewer, and what follows."""
    head: list[bytes] = []
    size = 0
    for piece in pieces:
        head.append(piece)
        size += len(piece)
        if size >= _LARGE:
            break
    return head, pieces


def _is_dense(head: list[bytes]) -> bool:
    """Whether a member is large and hardly gets smaller, as escaped bytes do: then it is not worth the seconds.

    A cancelled run has five seconds for all of its end, and its output may have hundreds of megabytes.
    """
    import zlib

    if sum(map(len, head)) < _LARGE:
        return False
    return len(zlib.compress(head[0], _LEVEL)) > _WORTH * len(head[0])


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
    yield b"".join(held)


def _measure(descriptor: int) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    os.lseek(descriptor, 0, os.SEEK_SET)
    while piece := os.read(descriptor, _READ):
        digest.update(piece)
        size += len(piece)
    return size, digest.hexdigest()
