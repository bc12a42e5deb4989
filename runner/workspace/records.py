"""What a run notes for whoever goes on with it, should it be killed: one private file a run, gone when it ends.

It says where the session and its state directory are and what the command line was. A session never says so
itself: it is data that anybody may have written. The file lies where no agent can write. Writes no events; no
effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import InternalError, StorageError
from runner.record import record
from runner.session.header import SESSION_ID
from runner.workspace.leftovers import KEEP_SECONDS

if TYPE_CHECKING:
    from runner.messages import JsonObject

_FOLDER = ".runs"


@record
class RunRecord:
    """What is known of a run from outside its session.

    Attributes:
        session: Its id.
        artifacts: Absolute path of its artifacts directory.
        state: Absolute path of its state directory.
        command: Options of the command line, as ``runner.cli.options`` gives them.
    """

    session: str
    artifacts: str
    state: str
    command: JsonObject


def write_record(root: Path, noted: RunRecord) -> None:
    """Write the record of a run that begins, in place of one that is there.

    Args:
        root: Folder in which sessions lie by default.
        noted: What is noted.

    Raises:
        StorageError: STORAGE_FAILED, it cannot be written.
    """
    path = _path(root, noted.session)
    value = {"version": 1, "artifacts": noted.artifacts, "state": noted.state, "command": noted.command}
    fresh = path.with_suffix(".new")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape"))
        fresh.replace(path)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written: {error.strerror}", hint="make its folder writable, or set XDG_STATE_HOME"
        ) from error


def remove_record(root: Path, session: str) -> None:
    """The run has ended by itself, so nobody needs its record."""
    with contextlib.suppress(OSError):
        _path(root, session).unlink()


def read_record(root: Path, session: str) -> RunRecord | None:
    """The record of a session, None if there is none that can be read."""
    return _read(_path(root, session)) if SESSION_ID.fullmatch(session) else None


def _path(root: Path, session: str) -> Path:
    if not SESSION_ID.fullmatch(session):
        raise InternalError(f"{session[:200]!r} is no id of a session")
    return root / _FOLDER / f"{session}.json"


def _read(path: Path) -> RunRecord | None:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if os.fstat(descriptor).st_uid != os.geteuid():
                return None
            value = json.loads(file.read())
        return RunRecord(path.stem, value["artifacts"], value["state"], value["command"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def prune_records(root: Path, *, now: float | None = None) -> None:
    """Remove records that are old and whose state directory is gone."""
    before = (time.time() if now is None else now) - KEEP_SECONDS
    with contextlib.suppress(OSError), os.scandir(root / _FOLDER) as entries:
        for entry in entries:
            if entry.stat(follow_symlinks=False).st_mtime < before:
                found = _read(Path(entry.path))
                if found is None or not Path(found.state).is_dir():
                    Path(entry.path).unlink()
