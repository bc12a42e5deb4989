"""The artifacts directory: made empty, filled as the run goes, complete after any end.

Order at the end: patch and declared outputs, each with its ``artifact/written``; then the caller logs
``run/end``; then the reports out of the log; then the final seal, the ZIP, and ``result.json`` last.
Declared outputs are opened beneath the workspace without following a link. Directory 0700, files 0600.
A patch or an output that holds a known secret is withheld whole: without the secret it would be another file.
Writes ``artifact/written`` through the callable it is given; no effect on the prefix cache.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
from typing import TYPE_CHECKING

from runner.artifacts.patch import PATCH_NAME
from runner.artifacts.report import render_summary
from runner.artifacts.result import build_result, write_file, write_result
from runner.errors import ErrorCode, RunnerError, StorageError
from runner.record import record, replace
from runner.session.events import ArtifactWritten

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import IO

    from runner.artifacts.facts import RunFold
    from runner.artifacts.patch import PatchInfo
    from runner.messages import JsonObject
    from runner.outcome import Outcome
    from runner.redaction import Redactor, SecretScan
    from runner.session.export import Export

LOG_NAME = "session.jsonl.zst"
ZIP_NAME = "session.zip"
USAGE_NAME = "usage.json"
SUMMARY_NAME = "summary.md"

OUTPUT_LIMIT = 100_000_000
"""Bytes one declared output may have."""

_CHUNK = 1 << 20


@record
class Artifact:
    """A finished file of the directory; ``path`` is relative to it."""

    name: str
    path: str
    sha256: str
    bytes: int

    def as_json(self) -> JsonObject:
        """An entry of ``artifacts`` in ``result.json``."""
        return {"name": self.name, "path": self.path, "sha256": self.sha256, "bytes": self.bytes}


@record
class MissingOutput:
    """A declared output that was not copied, and why."""

    path: str
    reason: str

    def __str__(self) -> str:
        return f"{self.path} ({self.reason})"


class ArtifactStore:
    """Writes artifacts and remembers them.

    Args:
        directory: The artifacts directory.
        append: Appends an ``artifact/written`` to the log.
        redactor: Knows the secrets that no artifact may hold.
    """

    def __init__(self, directory: Path, *, append: Callable[[ArtifactWritten], object], redactor: Redactor) -> None:
        self.directory = directory
        self.redactor = redactor
        self.artifacts: list[Artifact] = []
        self._append = append

    def write(self, name: str, data: bytes) -> Artifact:
        """Write one file at the top of the directory, by rename, and log it.

        Raises:
            StorageError: STORAGE_FAILED.
        """
        try:
            write_file(self.directory / name, data)
        except OSError as error:
            raise StorageError(f"{self.directory / name} cannot be written: {error.strerror}") from error
        return self._add(Artifact(name, name, hashlib.sha256(data).hexdigest(), len(data)), logged=True)

    def add(self, path: str, *, name: str | None = None, logged: bool = True) -> Artifact:
        """Take a finished file of the directory in.

        Args:
            path: Path relative to the directory.
            name: What it is called, the path if None.
            logged: False once the log is sealed.

        Raises:
            StorageError: STORAGE_FAILED, it cannot be read.
        """
        try:
            with (self.directory / path).open("rb") as file:
                digest, size = _digest(file.fileno())
        except OSError as error:
            raise StorageError(f"{self.directory / path} cannot be read: {error.strerror}") from error
        return self._add(Artifact(name or path, path, digest, size), logged=logged)

    def add_patch(self) -> Artifact:
        """Take the finished ``changes.patch`` in, unless it holds a secret; then it is removed.

        Raises:
            RunnerError: TASK_FAILED, it holds a secret.
            StorageError: STORAGE_FAILED, it cannot be read.
        """
        target = self.directory / PATCH_NAME
        scan = self.redactor.scan(patch=True)
        try:
            with target.open("rb") as file:
                digest, size = _digest(file.fileno(), scan)
                found = scan.found or self._found_in_binaries(file)
            if found is not None:
                target.unlink()
        except OSError as error:
            raise StorageError(f"{target} cannot be read: {error.strerror}") from error
        if found is not None:
            raise RunnerError(
                f"{PATCH_NAME} is withheld: the changes hold the secret {found}",
                code=ErrorCode.TASK_FAILED,
                hint="the agent wrote the secret into the workspace: take it out there, and revoke it if others saw it",
            )
        return self._add(Artifact(PATCH_NAME, PATCH_NAME, digest, size), logged=True)

    def _found_in_binaries(self, patch: IO[bytes]) -> str | None:
        """The secret that a file in the patch holds which git takes for no text, and compresses."""
        from runner.artifacts.binary import binary_contents

        patch.seek(0)
        scan = self.redactor.scan()
        for piece in binary_contents(patch):
            if scan.feed(piece) is not None:
                break
        return scan.found

    def _add(self, artifact: Artifact, *, logged: bool) -> Artifact:
        if logged:
            self._append(
                ArtifactWritten(name=artifact.name, path=artifact.path, bytes=artifact.bytes, sha256=artifact.sha256)
            )
        self.artifacts.append(artifact)
        return artifact

    def add_folder(self, folder: str) -> None:
        """Take in every regular file below a folder of the directory, not logged: events name them already.

        Raises:
            StorageError: STORAGE_FAILED, one cannot be read.
        """
        for path in sorted((self.directory / folder).rglob("*")):
            if path.is_file() and not path.is_symlink():
                self.add(str(path.relative_to(self.directory)), logged=False)

    def copy_outputs(self, workspace: str, paths: Sequence[str], *, limit: int = OUTPUT_LIMIT) -> list[MissingOutput]:
        """Copy declared outputs to ``files/<path>`` and log each.

        Args:
            workspace: Canonical path of the workspace.
            paths: Paths relative to it.
            limit: Bytes one file may have.

        Returns:
            Those that are missing, are no regular file, lie behind a link, are too large, or hold a secret.

        Raises:
            StorageError: STORAGE_FAILED, a copy cannot be written.
        """
        missing = []
        for path in {os.path.normpath(path): path for path in reversed(paths)}.values():
            reason = self._copy_output(workspace, path, limit)
            if reason is not None:
                missing.append(MissingOutput(path, reason))
        return missing

    def _copy_output(self, workspace: str, path: str, limit: int) -> str | None:
        try:
            source = open_beneath(workspace, path)
        except OSError as error:
            return _reason(error)
        try:
            status = os.fstat(source)
            if not stat.S_ISREG(status.st_mode):
                return "it is no regular file"
            if status.st_size > limit:
                return f"it has {status.st_size} bytes and the limit is {limit}"
            target = self.directory / "files" / os.path.normpath(path)
            scan = self.redactor.scan()
            size = self._copy(source, target, limit, scan)
        finally:
            os.close(source)
        if scan.found is not None:
            target.unlink()
            return f"it is withheld, since it holds the secret {scan.found}"
        if size > limit:
            target.unlink()
            return f"it grew over the limit of {limit} bytes"
        self.add(str(target.relative_to(self.directory)), name=path)
        return None

    def _copy(self, source: int, target: Path, limit: int, scan: SecretScan) -> int:
        """Copy at most one chunk more than ``limit``, and not beyond a secret; returns the bytes copied."""
        size = 0
        try:
            target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                while size <= limit and (data := os.read(source, _CHUNK)) and scan.feed(data) is None:
                    file.write(data)
                    size += len(data)
        except OSError as error:
            raise StorageError(f"{target} cannot be written: {error.strerror}") from error
        return size


def open_beneath(directory: str, path: str) -> int:
    """Open a file below a directory for reading, following no link on the way; returns a descriptor.

    Raises:
        OSError: It is not there, a part of the path is a link (ELOOP or ENOTDIR), or the path leaves the directory.
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or ".." in parts or not parts:
        raise PermissionError(errno.EPERM, "the path leaves the workspace")
    current = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parts[:-1]:
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=current)
            os.close(current)
            current = inner
        # Without O_NONBLOCK the open of a named pipe would wait for a writer for ever.
        return os.open(parts[-1], os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=current)
    finally:
        os.close(current)


def _reason(error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "it does not exist"
    if isinstance(error, PermissionError) and error.errno == errno.EPERM:
        return "its path leaves the workspace"
    if isinstance(error, NotADirectoryError) or error.errno == errno.ELOOP:
        return "a link or a file stands in its path"
    return f"it cannot be read: {error.strerror}"


def _digest(descriptor: int, scan: SecretScan | None = None) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    while data := os.read(descriptor, _CHUNK):
        if scan is not None and scan.feed(data) is not None:
            break
        digest.update(data)
        size += len(data)
    return digest.hexdigest(), size


def publish(
    store: ArtifactStore,
    fold: RunFold,
    outcome: Outcome,
    *,
    seal: Callable[[], str],
    export: Callable[[Path], Export],
    patch: PatchInfo | None = None,
    soft_failed: bool = False,
    reports: bool = True,
    limits: Sequence[JsonObject] | None = None,
    structured_output: object = None,
) -> JsonObject:
    """Carry out the end of a run behind ``run/end``; returns the content of ``result.json``.

    The reports come first, each logged. ``seal`` then writes the final seal, closes the log and returns its
    digest; ``export`` writes the ZIP to the path it is given; ``result.json`` is the last file.

    Args:
        store: With patch and declared outputs already in.
        fold: The fold of the log, ``run/end`` included; it must see what ``store`` appends.
        outcome: The outcome that ``run/end`` carries.
        seal: Ends the log.
        export: Writes ``session.zip``, and says its size and digest.
        patch: The changes, None without.
        soft_failed: Whether ``--soft-fail`` made the process exit 0.
        reports: False when the reports are there already and the log says so.
        limits: ``{name, used, max}``; None takes them from the log.
        structured_output: The answer as JSON.

    Raises:
        StorageError: STORAGE_FAILED.
    """
    if patch is not None:
        patch = replace(patch, paths=tuple(store.redactor.text(path)[0] for path in patch.paths))
    usage = fold.usage.usage()
    if reports:
        store.write(USAGE_NAME, (json.dumps(usage, ensure_ascii=False, indent=2) + "\n").encode("utf-8", "replace"))
        summary, _ = store.redactor.text(render_summary(outcome, usage, fold.facts, patch=patch))
        store.write(SUMMARY_NAME, summary.encode("utf-8"))
    digest = seal()
    store.add(LOG_NAME, logged=False)
    for folder in ("spill", "media"):
        store.add_folder(folder)
    written = export(store.directory / ZIP_NAME)
    store.artifacts.append(Artifact(ZIP_NAME, ZIP_NAME, written.sha256, written.bytes))
    result = build_result(
        outcome,
        usage,
        fold.facts,
        soft_failed=soft_failed,
        patch=patch,
        log_digest=digest,
        artifacts=[artifact.as_json() for artifact in store.artifacts],
        limits=limits,
        structured_output=structured_output,
    )
    write_result(store.directory, result)
    return result


__all__ = [
    "LOG_NAME",
    "OUTPUT_LIMIT",
    "PATCH_NAME",
    "SUMMARY_NAME",
    "USAGE_NAME",
    "ZIP_NAME",
    "Artifact",
    "ArtifactStore",
    "MissingOutput",
    "open_beneath",
    "publish",
]
