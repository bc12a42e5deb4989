"""Finding and reading sessions: artifacts directories, plain and compressed logs, ZIP exports, ids.

Invariants: what a file is, its content says, not its name; reading is a stream in bounded memory; a log
is data and nothing in it names a file outside its own directory or archive. Every defect is a LogError
that names the line. Reads all event types; no effect on the prefix cache.
"""

from __future__ import annotations

import os
import re
import stat
import struct
import zlib
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import ConfigError, LogError
from runner.session import codec
from runner.session.header import LOG_NAME, SESSION_ID, check_header, is_chained
from runner.session.surface import check_message

if TYPE_CHECKING:
    import zipfile
    from collections.abc import Iterator, Mapping
    from typing import BinaryIO

    from runner.messages import JsonObject
    from runner.session.events import Event

    Line = tuple[int, bytes, JsonObject]
    """One whole line: its number from 1, its bytes without the newline, its JSON object."""

MANIFEST_NAME = "manifest.json"
EXPORTED_LOG = "session.jsonl"

_LOG_NAMES = (LOG_NAME, "session.jsonl.zstd", EXPORTED_LOG)
_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_ZIP_MAGIC = b"PK\x03\x04"
_EMPTY_ZIP_MAGIC = b"PK\x05\x06"
_ZIP_TAIL = 65_536 + 22 + 20 + 56
_MAX_DIRECTORY = 16 * 1024 * 1024
_MAX_MEMBERS = 100_000
_BOMB_RATIO = 200
_BOMB_BYTES = 1024 * 1024 * 1024


class Files:
    """The files that belong to a session, by their paths relative to it. This one has none."""

    def paths(self) -> Iterator[str]:
        """Yield the paths of what an export takes, or of an archive's members."""
        yield from ()

    def size(self, path: str) -> int | None:
        """Bytes of a file, None if it is not there."""
        del path
        return None

    @contextmanager
    def open(self, path: str) -> Iterator[codec.Readable]:
        """Open one file.

        Raises:
            LogError: LOG_INVALID, there is no such regular file inside the session.
        """
        raise LogError(f"{path!r} is no file of the session")
        yield  # the context manager's form


class _DirectoryFiles(Files):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def paths(self) -> Iterator[str]:
        for folder in ("media", "spill"):
            for root, folders, names in os.walk(self._directory / folder):
                folders.sort()
                for name in sorted(names):
                    path = Path(root) / name
                    if stat.S_ISREG(path.lstat().st_mode):
                        yield path.relative_to(self._directory).as_posix()

    def size(self, path: str) -> int | None:
        found = self._directory / path
        return found.lstat().st_size if is_inside(path) and os.path.lexists(found) else None

    @contextmanager
    def open(self, path: str) -> Iterator[codec.Readable]:
        if not is_inside(path):
            raise LogError(f"{path!r} is no file of the session")
        with _open_beneath(self._directory, path) as stream:
            yield _Reader(stream, path)


class _ArchiveFiles(Files):
    def __init__(self, archive: zipfile.ZipFile, folder: str) -> None:
        self._archive = archive
        self._folder = folder

    def paths(self) -> Iterator[str]:
        for info in self._archive.infolist():
            if info.filename.startswith(self._folder) and not info.is_dir():
                yield info.filename.removeprefix(self._folder)

    def size(self, path: str) -> int | None:
        info = self._archive.NameToInfo.get(self._folder + path)
        return None if info is None or info.is_dir() else info.file_size

    @contextmanager
    def open(self, path: str) -> Iterator[codec.Readable]:
        with _open_in(self._archive, self._folder + path) as stream:
            yield stream


class _Layers(Files):
    """Two places, the first of which wins; what an export takes is that of the first alone."""

    def __init__(self, first: Files, second: Files) -> None:
        self._first = first
        self._second = second

    def paths(self) -> Iterator[str]:
        return self._first.paths()

    def size(self, path: str) -> int | None:
        size = self._first.size(path)
        return self._second.size(path) if size is None else size

    @contextmanager
    def open(self, path: str) -> Iterator[codec.Readable]:
        there = self._first if self._first.size(path) is not None else self._second
        with there.open(path) as stream:
            yield stream


class SessionSource:
    """One session that can be read, as often as wanted.

    ``directory`` is the artifacts directory, if that is what was named. ``dropped`` says what was left out
    at the torn end of the log; it is set when the log has been read to its end.
    """

    def __init__(self, path: Path, *, member: str | None = None, directory: Path | None = None) -> None:
        self.path = path
        self.directory = directory
        self.dropped: str | None = None
        self._member = member
        for _, _, header in self.lines():
            self.header = header
            return
        raise LogError(f"{self.name}: empty, or cut off inside its header")

    @property
    def name(self) -> str:
        """What messages call it."""
        return str(self.path) if self._member is None or self.is_export else f"{self.path}:{self._member}"

    # --- the log ------------------------------------------------------------------------------

    def raw_lines(self) -> Iterator[bytes]:
        """Yield the whole lines as bytes, without their newlines.

        Raises:
            LogError: LOG_INVALID, the data is damaged or a line is longer than 16 MiB.
        """
        try:
            with self._open() as stream:
                chunks = _decoded(stream)
                lines = codec.Lines(chunks)
                yield from lines
                self.dropped = codec.torn_note(lines, chunks)
        except LogError as error:
            raise self.located(error, None) from None

    def lines(self) -> Iterator[Line]:
        """Yield the whole lines, decoded, the header first.

        Raises:
            LogError: LOG_INVALID, the message begins with the path and names the line.
        """
        number = 0
        try:
            for number, data in enumerate(self.raw_lines(), 1):
                record = codec.decode_line(data)
                if number == 1:
                    check_header(record)
                yield number, data, record
        except LogError as error:
            raise self.located(error, number) from None

    def events(self) -> Iterator[Event]:
        """Yield the events, packed rows expanded.

        Raises:
            LogError: LOG_INVALID or LOG_UNKNOWN_EVENT, as ``lines``; seqs must count from 0 without gaps,
                and messages must have the shape of one.
        """
        for event in self.packed_events():
            if isinstance(event, codec.ChunkRow):
                yield from event.events()
            else:
                yield event

    def packed_events(self) -> Iterator[Event | codec.ChunkRow]:
        """Yield the events, packed rows as they are: for readers that need not look into each piece of an answer.

        Raises:
            LogError: As ``events``.
        """
        number, seq = 0, 0
        try:
            for number, _, record in self.lines():
                if number == 1:
                    continue
                event = codec.read_record(record, first=seq)
                if isinstance(event, codec.ChunkRow):
                    seq += event.count
                else:
                    seq += 1
                    if event.SURFACE:
                        check_message(event)
                yield event
        except LogError as error:
            raise self.located(error, number) from None

    def whole_events(self) -> Iterator[Event]:
        """Yield all events but the deltas that stand in packed rows, which are checked and left out.

        Raises:
            LogError: As ``events``.
        """
        for event in self.packed_events():
            if not isinstance(event, codec.ChunkRow):
                yield event

    def located(self, error: LogError, number: int | None) -> LogError:
        """``error`` with the path and the line in front, unless it has them."""
        if "path" in error.details:
            return error
        where = self.name if number is None else f"{self.name}: line {number}"
        details = {**error.details, "path": str(self.path), "line": number}
        return LogError(f"{where}: {error.message}", code=error.code, hint=error.hint, details=details)

    # --- what lies beside it ------------------------------------------------------------------

    @property
    def is_export(self) -> bool:
        """Whether it is the main session of a ZIP export."""
        return self._member == EXPORTED_LOG

    @contextmanager
    def files(self) -> Iterator[Files]:
        """Open what belongs to the log: the archive's members, the directory's files, or nothing."""
        if self._member is not None:
            with _archive(self.path) as archive:
                yield _ArchiveFiles(archive, self._member.removesuffix(EXPORTED_LOG))
        elif self.directory is not None:
            yield _DirectoryFiles(self.directory)
        else:
            yield Files()

    @contextmanager
    def beside(self) -> Iterator[Files]:
        """Open ``files`` and, where an artifacts directory holds its log only in the archive, that directory's too."""
        with self.files() as files:
            if self._member is not None and self.directory is not None:
                yield _Layers(files, _DirectoryFiles(self.directory))
            else:
                yield files

    def children(self) -> Iterator[tuple[str, SessionSource]]:
        """Yield the subagents' sessions by the names of their folders, sorted."""
        if self.is_export:
            with self.files() as files:
                names = sorted(files.paths())
            for name in names:
                parts = name.split("/")
                if len(parts) == 3 and parts[0] == "subagents" and parts[2] == EXPORTED_LOG:
                    yield parts[1], SessionSource(self.path, member=name)
        elif self.directory is not None:
            for folder in sorted((self.directory / "subagents").glob("*/")):
                if (log := _log_in(folder)) is not None:
                    yield folder.name, SessionSource(log, directory=folder)

    @contextmanager
    def _open(self) -> Iterator[codec.Readable]:
        if self._member is None:
            with _open_regular(self.path) as plain:
                yield _Reader(plain, str(self.path))
            return
        with _archive(self.path) as archive, _open_in(archive, self._member) as stream:
            yield stream


def open_session(reference: str, *, environ: Mapping[str, str] | None = None) -> SessionSource:
    """Open a session by artifacts directory, log, ZIP or id.

    Args:
        reference: A path, or the id of a session under ``default_root``.
        environ: Environment variables, the process's own if not given.

    Raises:
        ConfigError: CONFIG_INVALID, there is nothing of that name.
        LogError: LOG_INVALID, what is there is no session that can be read.
    """
    path = Path(reference)
    if not os.path.lexists(reference):
        root = default_root(os.environ if environ is None else environ)
        if not SESSION_ID.fullmatch(reference) or not os.path.isdir(root / reference):  # noqa: PTH112  # never raises
            raise ConfigError(
                f"there is no session {reference!r}: neither a path nor an id under {root}",
                hint="name an artifacts directory, a .jsonl, a .jsonl.zst or .zstd, or an exported ZIP",
            )
        path = root / reference
    if path.is_dir():
        log = _log_in(path)
        if log is not None:
            return SessionSource(log, directory=path)
        if (path / "session.zip").is_file():
            return open_file(path / "session.zip", directory=path)
        raise LogError(f"{path} holds no session log", hint=f"an artifacts directory has a file {LOG_NAME}")
    return open_file(path)


def session_directory(reference: str) -> tuple[Path, JsonObject]:
    """Artifacts directory and header of a session of ours that can go on.

    Raises:
        ConfigError: CONFIG_INVALID, there is nothing of that name, or it is no artifacts directory with a log of ours.
        LogError: LOG_INVALID, its log cannot be read.
    """
    source = open_session(reference)
    if source.directory is None or source.path.name != LOG_NAME or not is_chained(source.header):
        raise ConfigError(
            f"{source.path} is no artifacts directory of nightshift, so nothing can go on there",
            hint=f"name the directory that holds {LOG_NAME}",
        )
    return source.directory.resolve(), source.header


def open_file(path: Path, *, directory: Path | None = None) -> SessionSource:
    """Open a log or a ZIP export by its file; an export may lie in a ``directory`` of artifacts that has no log.

    Raises:
        LogError: LOG_INVALID, the file is no session that can be read.
    """
    with _open_regular(path) as stream:
        magic = stream.read(4)
    if magic == _EMPTY_ZIP_MAGIC:
        raise LogError(f"{path}: an empty ZIP archive, no session")
    if magic != _ZIP_MAGIC:
        return SessionSource(path)
    with _archive(path) as archive:
        if EXPORTED_LOG not in archive.namelist():
            raise LogError(f"{path}: the ZIP archive holds no {EXPORTED_LOG}, so it is no exported session")
    return SessionSource(path, member=EXPORTED_LOG, directory=directory)


def default_root(environ: Mapping[str, str]) -> Path:
    """Where sessions lie when no directory was asked for: one folder a session, named by its id.

    Raises:
        ConfigError: CONFIG_INVALID, neither the environment nor the user database names a folder.
    """
    for variable in ("RUNNER_TEMP", "XDG_STATE_HOME"):
        root = Path(environ.get(variable, ""))
        if root.is_absolute():
            return root / "nightshift"
    home = Path(environ.get("HOME", ""))
    if not home.is_absolute():
        import pwd

        try:
            home = Path(pwd.getpwuid(os.getuid()).pw_dir)
        except KeyError:  # an id without an entry, as in many containers
            raise ConfigError(
                "there is no folder for sessions: HOME is no absolute path and this user has no home directory",
                hint="set HOME or XDG_STATE_HOME to an absolute path",
            ) from None
    return home / ".local" / "state" / "nightshift"


def is_inside(path: str) -> bool:
    """Whether a relative path from a log or an archive stays inside its folder, in plain spelling."""
    parts = path.split("/")
    return bool(path) and "\\" not in path and "\0" not in path and not any(part in ("", ".", "..") for part in parts)


# --- files -------------------------------------------------------------------------------------


def _log_in(directory: Path) -> Path | None:
    return next((directory / name for name in _LOG_NAMES if (directory / name).is_file()), None)


@contextmanager
def _open_regular(path: Path) -> Iterator[BinaryIO]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise LogError(f"{path} cannot be read: {error.strerror}") from error
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise LogError(f"{path} is no regular file")
        yield stream


@contextmanager
def _open_beneath(directory: Path, path: str) -> Iterator[BinaryIO]:
    """Open a regular file below ``directory`` without following a link on the way."""
    *folders, name = path.split("/")
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            for folder in folders:
                inner = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=held)
                os.close(held)
                held = inner
            descriptor = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW, dir_fd=held)
        except OSError as error:
            raise LogError(f"{path} cannot be read: {error.strerror}") from error
        with os.fdopen(descriptor, "rb") as stream:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise LogError(f"{path} is no regular file")
            yield stream
    finally:
        os.close(held)


def _decoded(stream: codec.Readable) -> codec.ZstdChunks | Iterator[bytes]:
    magic = stream.read(4)
    again = _Reader(stream, "", prefix=magic)
    if magic == codec.ZSTD_MAGIC or _SKIPPABLE.fullmatch(magic) or (magic and codec.ZSTD_MAGIC.startswith(magic)):
        return codec.ZstdChunks(again)
    return codec.plain_chunks(again)


class _Reader:
    """A stream that raises LogError for what reading a damaged file or archive member raises."""

    def __init__(self, stream: codec.Readable, name: str, *, prefix: bytes = b"") -> None:
        self._stream = stream
        self._name = name
        self._prefix = prefix

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most ``size``; ``prefix`` comes first."""
        if self._prefix:
            prefix, self._prefix = self._prefix, b""
            return prefix
        try:
            return self._stream.read(size)
        except _unreadable() as error:
            raise LogError(f"{self._name} cannot be read: {error}") from error


def _unreadable() -> tuple[type[Exception], ...]:
    """What reading a damaged or hostile archive can raise."""
    import zipfile

    return (
        OSError,
        EOFError,
        zipfile.BadZipFile,
        zlib.error,
        struct.error,
        NotImplementedError,
        RuntimeError,
        ValueError,
    )


# --- archives ----------------------------------------------------------------------------------


@contextmanager
def _archive(path: Path) -> Iterator[zipfile.ZipFile]:
    """Open a ZIP whose member list is safe to work with."""
    import zipfile

    with _open_regular(path) as stream:
        _check_directory_size(path, stream)
        try:
            archive = zipfile.ZipFile(stream)
        except _unreadable() as error:
            raise LogError(f"{path}: not a readable ZIP archive: {error}") from error
        with archive:
            _check_members(path, archive)
            yield archive


@contextmanager
def _open_in(archive: zipfile.ZipFile, name: str) -> Iterator[codec.Readable]:
    try:
        stream = archive.open(name)
    except KeyError as error:
        raise LogError(f"the archive has no member {name!r}") from error
    except _unreadable() as error:
        raise LogError(f"{name} cannot be read: {error}") from error
    with stream:
        yield _Reader(stream, name)


def _check_directory_size(path: Path, stream: BinaryIO) -> None:
    """Refuse a member list that is too large to hold; ``zipfile`` would read it as a whole."""
    size = stream.seek(0, os.SEEK_END)
    start = stream.seek(max(0, size - _ZIP_TAIL))
    tail = stream.read(_ZIP_TAIL)
    at = tail.rfind(_EMPTY_ZIP_MAGIC)
    if at < 0 or len(tail) < at + 22:
        raise LogError(f"{path}: not a readable ZIP archive: it has no end record")
    (listed,) = struct.unpack_from("<L", tail, at + 12)
    if at >= 20 and tail[at - 20 : at - 16] == b"PK\x06\x07":
        (record,) = struct.unpack_from("<Q", tail, at - 12)
        stream.seek(min(record, start + at))
        wide = stream.read(56)
        listed = struct.unpack_from("<Q", wide, 40)[0] if len(wide) == 56 else size
    stream.seek(0)
    if listed > _MAX_DIRECTORY:
        raise LogError(f"{path}: the archive's member list is larger than {_MAX_DIRECTORY // 1024 // 1024} MiB")


def _check_members(path: Path, archive: zipfile.ZipFile) -> None:
    infos = archive.infolist()
    if len(infos) > _MAX_MEMBERS:
        raise LogError(f"{path}: the archive has {len(infos)} members, more than {_MAX_MEMBERS}")
    seen: set[str] = set()
    expanded = 0
    for info in infos:
        name = info.filename.rstrip("/") if info.is_dir() else info.filename
        if not is_inside(name) or info.orig_filename != info.filename:
            raise LogError(f"{path}: the archive has a member with an unsafe path: {info.orig_filename!r}")
        if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise LogError(f"{path}: the archive's member {name!r} is a link or a special file")
        if name in seen:
            raise LogError(f"{path}: the archive has two members named {name!r}")
        if info.flag_bits & 1:
            raise LogError(f"{path}: the archive's member {name!r} is encrypted")
        seen.add(name)
        if info.file_size > _BOMB_RATIO * max(1, info.compress_size):
            expanded += info.file_size
    if expanded > _BOMB_BYTES:
        raise LogError(f"{path}: the archive expands beyond all measure ({expanded} bytes), it is not read")
