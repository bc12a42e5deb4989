"""Fork: a new session that begins with what another one had said and done up to the end of a turn.

The child's log holds the parent's lines byte for byte, packed rows too, under a header of its own; only the
seals are computed anew. ``session/end-seed`` and a seal end what was taken over. Spilled results and media
that it refers to come along, each compared with its digest. The parent is checked on the way and only
read; both logs are streams. Writes ``session/end-seed`` and ``log/seal``. Effect on the prefix cache: none,
the child's first request begins with the messages the parent's had.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.errors import ConfigError, LogError, StorageError
from runner.session.events import AssistantMessage, SessionEndSeed, ToolResult, TurnEnd, UserMessage
from runner.session.header import LOG_NAME, is_chained
from runner.session.log import SessionLog
from runner.session.store import is_inside
from runner.session.verify import Reading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from runner.messages import JsonObject
    from runner.session.events import Event
    from runner.session.store import Files, SessionSource

_READ = 1024 * 1024
_SHA256 = re.compile(r"[0-9a-f]{64}")
_SPILL, _MEDIA = "spill", "media"
_UNFINISHED = ".fork"  # where the child's log is written; beside it lies no log yet
_SHOWN = 20


class Fork(NamedTuple):
    """What was made. ``seed_length`` counts the events taken over and the ``session/end-seed`` behind them.

    ``files`` came along, ``missing`` lie not beside the parent's log. ``digest`` is that of the child's log.
    """

    directory: Path
    session: str
    parent: str
    turn: int
    seed_length: int
    digest: str
    files: tuple[str, ...]
    missing: tuple[str, ...]

    def as_json(self) -> JsonObject:
        """The value that ``session fork --json`` prints."""
        return {
            "path": str(self.directory),
            "session": self.session,
            "parentSession": self.parent,
            "turn": self.turn,
            "seedLength": self.seed_length,
            "digest": self.digest,
            "files": list(self.files),
            "missing": list(self.missing),
        }


class _File(NamedTuple):
    """A file that an event refers to; ``size`` is None where the event does not say it."""

    sha256: str
    size: int | None
    seq: int


def fork_session(
    source: SessionSource, directory: Path, *, turn: int, session_id: str, clock: Callable[[], int]
) -> Fork:
    """Make a session in ``directory`` that goes on behind ``turn`` of another one.

    Args:
        source: The parent, in any form that can be read, ended or not.
        directory: Absent or empty; it is made 0700.
        turn: A turn of the parent that has ended.
        session_id: Id of the child.
        clock: Epoch milliseconds.

    The log comes to its place last, so where a fork was killed there is no session, and the next fork begins anew.

    Raises:
        ConfigError: CONFIG_INVALID, there is no such turn or it is open (the message names those that ended), the
            parent is a log of another harness, or the directory is not empty, a link, inside the parent, or in use.
        LogError: LOG_INVALID, the parent is damaged up to the first seal behind that turn, or a file beside it is.
        StorageError: STORAGE_FAILED, the child cannot be written; nothing is left of it.
    """
    if not is_chained(source.header):
        raise ConfigError(
            f"{source.name}: only a log of nightshift can be forked",
            hint="logs of another harness have no seals and do not record what was sent",
        )
    seed = _find_seed(source, turn)
    made = _prepare(directory, source)
    with _claimed(directory):
        unfinished = directory / _UNFINISHED
        try:
            unfinished.mkdir(mode=0o700)
            files, missing = _copy_files(source, directory, seed.files)
            digest = _write_log(source, unfinished, seed, session_id, clock)
            (unfinished / LOG_NAME).rename(directory / LOG_NAME)
            unfinished.rmdir()
        except BaseException as error:
            _remove(directory, made=made)
            if isinstance(error, OSError):
                raise StorageError(f"the fork cannot be written to {directory}: {error.strerror or error}") from error
            raise
    parent = source.header["id"]
    return Fork(directory, session_id, parent, turn, seed.events + 1, digest, tuple(files), tuple(missing))


# --- what is taken over ------------------------------------------------------------------------


class _Seed:
    """The events up to the end of the wanted turn, as far as they were read. ``events`` counts up to the last turn."""

    def __init__(self, turn: int) -> None:
        self.events = 0
        self.lines = 0
        self.found = False
        self.closed: list[int] = []
        self.files: dict[str, _File] = {}
        self._turn = turn

    def apply(self, event: Event) -> None:
        """Take one event into account; those behind the turn count for nothing."""
        if self.found:
            return
        if isinstance(event, TurnEnd):
            self.events = event.seq + 1
            self.closed.append(event.turn)
            self.found = event.turn == self._turn
        elif isinstance(event, ToolResult):
            self._spilled(event)
            self._images(event, event.message.get("content"))
        elif isinstance(event, UserMessage):
            self._images(event, event.content)
        elif isinstance(event, AssistantMessage):
            self._images(event, event.message.get("content"))

    def _spilled(self, event: ToolResult) -> None:
        match (event.meta or {}).get("spill"):
            case None:
                pass
            case {"path": str(path), "bytes": int(size), "sha256": str(sha256)} if _is_file_of(_SPILL, path):
                self._refer(path, _File(sha256, size, event.seq))
            case _:
                raise LogError(f"event {event.seq} ({event.TYPE}): its spill names no file of the session")

    def _images(self, event: Event, blocks: Any) -> None:
        for block in blocks if isinstance(blocks, list) else ():
            if not isinstance(block, dict):
                continue
            if block.get("type") == "image":
                sha256 = block.get("sha256")
                if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
                    raise LogError(f"event {event.seq} ({event.TYPE}): an image has no digest")
                self._refer(f"{_MEDIA}/{sha256}", _File(sha256, None, event.seq))
            elif block.get("type") == "tool-result":
                self._images(event, block.get("content"))

    def _refer(self, path: str, file: _File) -> None:
        before = self.files.setdefault(path, file)
        if before.sha256 != file.sha256:
            raise LogError(f"events {before.seq} and {file.seq} name two contents for {path}")


def _is_file_of(folder: str, path: str) -> bool:
    return is_inside(path) and path.startswith(f"{folder}/")


def _find_seed(source: SessionSource, turn: int) -> _Seed:
    """Read up to the first seal behind the turn, checking what a seal covers and how events nest.

    Raises:
        ConfigError: There is no such turn, or it has no end.
    """
    seed = _Seed(turn)
    reading = Reading(source, {}, watch=seed.apply, pieces=False)
    seals = None
    for number, _, _ in reading.lines():
        if not seed.found:
            seed.lines = number + 1
        elif seals is None:
            seals = reading.seals
        elif reading.seals > seals:
            break
    if not seed.found:
        open_turn = reading.open_turn == turn
        raise ConfigError(
            f"{source.name}: turn {turn} {'is still open' if open_turn else 'does not exist'}; "
            f"only behind a turn that has ended can a session be forked",
            hint=f"turns that have ended: {_listed(seed.closed)}",
        )
    return seed


def _listed(turns: list[int]) -> str:
    if not turns:
        return "none"
    if len(turns) > _SHOWN:
        return f"{turns[0]} to {turns[-1]}, {len(turns)} in all"
    return ", ".join(map(str, turns))


# --- the child ---------------------------------------------------------------------------------


def _prepare(directory: Path, source: SessionSource) -> bool:
    """Make the directory if it is not there; returns whether it was made.

    Raises:
        ConfigError: It is a link, no directory, or inside the parent's.
        StorageError: It cannot be made.
    """
    real = os.path.realpath(directory)
    if source.directory is not None and f"{real}/".startswith(f"{os.path.realpath(source.directory)}/"):
        raise ConfigError(f"{directory}: lies in the session that is forked", hint="name a directory outside")
    if directory.is_symlink():
        raise ConfigError(f"{directory}: is a link", hint=f"name the directory itself: {real}")
    try:
        if directory.exists():
            if not directory.is_dir():
                raise ConfigError(f"{directory}: is no directory", hint="name one that is empty or absent")
            return False
        for missing in (*(each for each in reversed(directory.parents) if not each.exists()), directory):
            missing.mkdir(mode=0o700)
    except OSError as error:
        raise StorageError(f"{directory} cannot be made: {error.strerror}") from error
    return True


@contextmanager
def _claimed(directory: Path) -> Iterator[None]:
    """Hold a directory for this process alone, empty or with what a killed fork left, which is taken away.

    Raises:
        ConfigError: Another process makes a fork there, or it holds something else.
        StorageError: It cannot be held.
    """
    descriptor = -1
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        there = set(os.listdir(descriptor))  # noqa: PTH208  # of the directory that is held
        if _UNFINISHED in there and there <= {_UNFINISHED, _SPILL, _MEDIA}:
            _remove(directory, made=False)
        elif there:
            raise ConfigError(f"{directory}: is not empty", hint="name a directory that is empty or absent")
        os.fchmod(descriptor, 0o700)
        yield
        os.fsync(descriptor)
    except BlockingIOError as error:
        raise ConfigError(f"{directory}: another fork is being made there", hint="name another directory") from error
    except OSError as error:
        raise StorageError(f"{directory} cannot be taken: {error.strerror}") from error
    finally:
        if descriptor >= 0:
            os.close(descriptor)


def _remove(directory: Path, *, made: bool) -> None:
    """Take away what was written so far."""
    with suppress(OSError):
        (directory / LOG_NAME).unlink(missing_ok=True)
    for folder in (_SPILL, _MEDIA, _UNFINISHED):  # the last one says what the others are
        shutil.rmtree(directory / folder, ignore_errors=True)
    with suppress(OSError):
        if made:
            directory.rmdir()


def _copy_files(source: SessionSource, directory: Path, wanted: dict[str, _File]) -> tuple[list[str], list[str]]:
    """Copy what the events refer to; returns the paths copied, and those that are not there."""
    copied: list[str] = []
    missing: list[str] = []
    with source.files() as files:
        media = {path.partition(".")[0]: path for path in files.paths() if _is_file_of(_MEDIA, path)} if wanted else {}
        for name, file in wanted.items():
            path = media.get(name, name)
            if files.size(path) is None:
                missing.append(path)
            else:
                _copy_file(source, files, path, file, directory / path)
                copied.append(path)
    return copied, missing


def _copy_file(source: SessionSource, files: Files, path: str, file: _File, target: Path) -> None:
    digest, size = hashlib.sha256(), 0
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as copy, files.open(path) as stream:
        while piece := stream.read(_READ):
            digest.update(piece)
            size += len(piece)
            if file.size is not None and size > file.size:
                break
            copy.write(piece)
        copy.flush()
        os.fsync(descriptor)
    if digest.hexdigest() != file.sha256 or size != (size if file.size is None else file.size):
        raise LogError(f"{source.name}: event {file.seq}: the file {path} is not as it was written")


def _write_log(source: SessionSource, directory: Path, seed: _Seed, session_id: str, clock: Callable[[], int]) -> str:
    """Write the child's log; returns its digest."""
    parent = source.header
    header: JsonObject = {"id": session_id, "parentSession": parent["id"], "seedLength": seed.events + 1}
    if "cwd" in parent:
        header["cwd"] = parent["cwd"]
    with SessionLog.create(directory, header=header, clock=clock) as log:
        log.copy(_lines(source, seed.lines))
        log.append(SessionEndSeed())
        log.seal()
        log.barrier()
    return log.digest


def _lines(source: SessionSource, last: int) -> Iterator[bytes]:
    """The lines behind the header, up to line ``last``."""
    for number, line in enumerate(source.raw_lines(), 1):
        if number > 1:
            yield line
        if number == last:
            return
