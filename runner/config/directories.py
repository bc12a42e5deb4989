"""Directories that a run may work in or write to: which are refused, and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.trust import is_inside
from runner.errors import ConfigError, StorageError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


def check_directory(text: str, start: str | Path, environ: Mapping[str, str]) -> tuple[str, str | None]:
    """Check a directory that an agent may write in.

    Args:
        text: The path as given.
        start: Where a relative path starts.
        environ: For HOME.

    Returns:
        The canonical path, and what is wrong with it and what to do; None if nothing is.
    """
    if "\0" in text:
        return text, "holds a NUL byte: write a path"
    path = os.path.abspath(os.path.join(start, text))  # noqa: PTH100, PTH118  # texts, and `..` is taken lexically
    real = os.path.realpath(path)
    if not os.path.lexists(path):
        return real, f"no such directory: {path}: create it, or name another"
    if os.path.islink(path):  # noqa: PTH114  # a text
        return real, f"is a link: name the directory itself, {real}"
    if not os.path.isdir(real):  # noqa: PTH112  # a text
        return real, "is no directory: name one"
    if real == "/":
        return real, "is the root of the file system: name a directory for this work alone"
    if real in _homes(environ):
        return real, "is the home directory: name a directory for this work alone"
    if not os.access(real, os.R_OK | os.X_OK):
        return real, "cannot be read: check its permissions"
    return real, None


def _homes(environ: Mapping[str, str]) -> set[str]:
    import pwd

    homes = [environ.get("HOME")]
    try:
        homes.append(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        # A container may run under a uid without an entry; then HOME alone says where home is.
        homes.append(None)
    return {os.path.realpath(home) for home in homes if home}


def check_artifacts_dir(path: str | Path, workspace: str, writable: Sequence[str] = ()) -> None:
    """Check where the artifacts of a run shall go; makes nothing.

    Args:
        path: Where they shall be; absent or an empty directory.
        workspace: Canonical path of the workspace.
        writable: Canonical paths of further writable directories.

    Raises:
        ConfigError: CONFIG_INVALID, it is a link, no directory, not empty, lies where the agent may write, or
            holds the workspace.
    """
    path = Path(path).absolute()
    try:
        linked, real = path.is_symlink(), os.path.realpath(path)
    except OSError as error:
        raise ConfigError(
            f"--artifacts {path}: cannot be reached: {error.strerror}", hint="name another directory with --artifacts"
        ) from None
    if linked:
        raise ConfigError(f"--artifacts {path}: is a link", hint=f"name the directory itself: {real}")
    for root in (workspace, *writable):
        if is_inside(real, root):
            what = "the workspace" if root == workspace else f"the writable directory {root}"
            raise ConfigError(
                f"--artifacts {path}: lies in {what}, where the agent could change it",
                hint="name a directory outside, or leave --artifacts out",
            )
    if is_inside(workspace, real):
        raise ConfigError(
            f"--artifacts {path}: holds the workspace {workspace}",
            hint="name a directory outside, or leave --artifacts out",
        )
    try:
        with os.scandir(real) as entries:
            taken = next(entries, None) is not None
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise ConfigError(f"--artifacts {path}: is no directory", hint="name one that is empty or absent") from None
    except OSError as error:
        raise ConfigError(
            f"--artifacts {path}: cannot be read: {error.strerror}", hint="check its permissions"
        ) from None
    if taken:
        raise ConfigError(f"--artifacts {path}: is not empty", hint="name a directory that is empty or absent")


def prepare_artifacts_dir(path: Path, *, workspace: str, writable: Sequence[str] = ()) -> Path:
    """Make the artifacts directory, 0700, or take an empty one; returns its canonical path.

    Folders above it that are missing are made 0700 too, whatever the umask.

    Raises:
        ConfigError: CONFIG_INVALID, see ``check_artifacts_dir``.
        StorageError: STORAGE_FAILED, it cannot be made.
    """
    check_artifacts_dir(path, workspace, writable)
    try:
        for missing in (*(each for each in reversed(path.parents) if not each.exists()), path):
            missing.mkdir(mode=0o700, exist_ok=True)
        path.chmod(0o700)
    except OSError as error:
        raise StorageError(
            f"the artifacts directory {path} cannot be made: {error.strerror}",
            hint="make it writable, free space there, or name another directory with --artifacts",
        ) from error
    return path.resolve()
