"""Directories that a run may work in or write to: which are refused, and why."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from runner.config.trust import is_inside
from runner.errors import ConfigError

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


def check_artifacts_dir(path: str | Path, workspace: str, writable: Sequence[str]) -> None:
    """Check a directory for artifacts before a run.

    Args:
        path: Absolute path; it must be absent or an empty directory.
        workspace: Canonical path of the workspace.
        writable: Canonical paths of further writable directories.

    Raises:
        ConfigError: It is a link, no directory, not empty, or lies where the agent may write.
    """
    path = Path(path)
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
