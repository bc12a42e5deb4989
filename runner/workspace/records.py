"""What a run notes for whoever goes on with it, should it be killed: one private file a run, gone when it ends.

It says where the session and its state directory are and what the command line was. A session never says so
itself: it is data that anybody may have written. The file lies where no agent can write, and holds a lock while
its run lives. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Self

from runner.errors import ConfigError, StorageError
from runner.record import record
from runner.workspace.removal import remove_tree

if TYPE_CHECKING:
    from runner.messages import JsonObject

KEEP_SECONDS = 7 * 24 * 3600.0
"""How long what a killed run left is kept for ``recover`` and ``resume``."""

_FOLDER = ".runs"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MOST = 200


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


class RecordKeeper:
    """The record of a run that lives: made and locked by ``keep``, removed or released at its end.

    Args:
        root: Folder in which sessions lie by default.
    """

    def __init__(self, root: Path) -> None:
        self._folder = root / _FOLDER
        self._path: Path | None = None
        self._descriptor = -1

    def __enter__(self) -> Self:
        """Nothing is noted yet."""
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def keep(self, noted: RunRecord) -> None:
        """Write the record, in place of one that is there, and lock it.

        Raises:
            ConfigError: CONFIG_INVALID, another process runs this session.
            StorageError: STORAGE_FAILED, it cannot be written.
        """
        path = self._folder / f"{noted.session}.json"
        value = {"version": 1, "artifacts": noted.artifacts, "state": noted.state, "command": noted.command}
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._descriptor = os.open(path, flags, 0o600)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.write(self._descriptor, json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogateescape"))
        except BlockingIOError:
            raise ConfigError(
                f"the session {noted.session} is run by another process", hint="wait for its end"
            ) from None
        except OSError as error:
            raise StorageError(
                f"{path} cannot be written: {error.strerror}", hint="make its folder writable, or set XDG_STATE_HOME"
            ) from error
        self._path = path

    def remove(self) -> None:
        """The run ended by itself: nobody needs the record."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
            self._path = None


def read_record(root: Path, session: str) -> RunRecord | None:
    """The record of a session, None if there is none that can be read."""
    if not _NAME.fullmatch(session):
        return None
    return _read(root / _FOLDER / f"{session}.json")


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


def remove_leftovers(root: Path, *, now: float | None = None) -> list[str]:
    """Remove the state directories of runs that were killed long ago, and their records.

    Returns:
        The state directories that were removed.
    """
    before = (time.time() if now is None else now) - KEEP_SECONDS
    removed = []
    with contextlib.suppress(OSError):
        for path in sorted((root / _FOLDER).glob("*.json"))[:_MOST]:
            if path.lstat().st_mtime < before and _is_free(path):
                found = _read(path)
                state = None if found is None else Path(found.state)
                if state is not None and _is_ours(state):
                    remove_tree(state)
                    removed.append(str(state))
                path.unlink(missing_ok=True)
    return removed


def _is_free(path: Path) -> bool:
    """Whether no run holds the record."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def _is_ours(state: Path) -> bool:
    """Whether a path is a state directory that a run of this user made."""
    with contextlib.suppress(OSError):
        status = state.lstat()
        return status.st_uid == os.geteuid() and state.name.startswith("nightshift-") and state.is_dir()
    return False
