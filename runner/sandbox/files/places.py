"""Folders and files opened by a resolved path, no component of which may be a symbolic link.

So the path that was decided on is the path that is used. Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


_CODES = {
    errno.ENOENT: "NOT_FOUND",
    errno.ENOTDIR: "NOT_FOUND",
    errno.EISDIR: "IS_DIRECTORY",
    errno.EACCES: "DENIED",
    errno.EPERM: "DENIED",
    errno.EROFS: "DENIED",
    errno.EXDEV: "DENIED",
    errno.ELOOP: "DENIED",
    errno.ENAMETOOLONG: "INVALID",
    errno.EFBIG: "TOO_LARGE",
}


class Refusal(Exception):  # noqa: N818  # a value for the caller, not an error of the program
    """The operation is not done; ``code`` and message go into the answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def refusal_of(error: OSError, path: str) -> Refusal:
    """What the kernel refused at ``path``, as a refusal."""
    return Refusal(_CODES.get(error.errno or 0, "IO"), f"{shown(path)}: {error.strerror or error}")


def encode_name(name: str) -> bytes:
    """A name for the kernel: names are UTF-8, whatever the locale says."""
    return name.encode("utf-8", "surrogateescape")


def shown(name: str) -> str:
    r"""A name for people: bytes that are not UTF-8 and control characters as ``\xNN``."""
    if name.isprintable():
        return name
    readable = encode_name(name).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in readable)


def _link(folder: int, name: str, path: str) -> Refusal | None:
    """The refusal of a symbolic link, which says where it leads; None if ``name`` is none."""
    try:
        target = os.readlink(encode_name(name), dir_fd=folder).decode("utf-8", "surrogateescape")
    except OSError:
        return None
    try:
        os.stat(encode_name(name), dir_fd=folder)
    except OSError as error:
        if error.errno == errno.ELOOP:
            return Refusal("INVALID", f"{shown(path)} is a symbolic link to {shown(target)}, which leads back to it")
    return Refusal("LINK", f"{shown(path)} is a symbolic link to {shown(target)}, and links are not followed here")


def _enter(folder: int, name: str, path: str, *, create: bool) -> int:
    """Open the folder ``name`` in ``folder``; ``path`` is for messages."""
    try:
        return os.open(encode_name(name), PATH_ONLY, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise Refusal("NOT_FOUND", f"{shown(path)} does not exist") from None
        with contextlib.suppress(FileExistsError):  # made by somebody else in between is as good
            os.mkdir(encode_name(name), 0o777, dir_fd=folder)
        return os.open(encode_name(name), PATH_ONLY, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        if link := _link(folder, name, path):
            raise link from None
        raise Refusal("NOT_FOUND", f"{shown(path)} is not a folder") from None


def open_folder(path: str, *, create: bool = False) -> int:
    """Open a folder by its absolute path, component by component and following no link."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    if not path.startswith("/") or "\0" in path or ".." in names:
        raise Refusal("INVALID", "the path is not absolute and resolved")
    folder = os.open(b"/", PATH_ONLY)
    walked = ""
    for name in names:
        walked += "/" + name
        try:
            following = _enter(folder, name, walked, create=create)
        finally:
            os.close(folder)
        folder = following
    return folder


def split(path: str) -> tuple[str, str]:
    """Folder and name of the file at an absolute path."""
    parent, _, name = path.rstrip("/").rpartition("/")
    if name in ("", ".", "..") or "\0" in path:
        raise Refusal("INVALID", "the path names no file")
    return parent or "/", name


def _near(folder: int, name: str) -> str:
    """`` (did you mean ...)`` for a name that is not there, or nothing."""
    import difflib

    try:
        there = _names(folder)
    except OSError:
        return ""
    near = difflib.get_close_matches(name, there[:1_000], n=2, cutoff=0.7)
    return f" (did you mean {' or '.join(shown(each) for each in near)}?)" if near else ""


def _names(folder: int) -> list[str]:
    readable = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return [os.fsencode(name).decode("utf-8", "surrogateescape") for name in os.listdir(readable)]
    finally:
        os.close(readable)


def open_file(folder: int, name: str, path: str) -> BinaryIO:
    """Open a regular file for reading; nothing else is opened, devices and pipes may have effects."""
    try:
        found = os.lstat(encode_name(name), dir_fd=folder)
    except FileNotFoundError:
        raise Refusal("NOT_FOUND", f"{shown(path)} does not exist{_near(folder, name)}") from None
    if stat.S_ISLNK(found.st_mode) and (link := _link(folder, name, path)):
        raise link
    require_regular(found, path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(encode_name(name), flags, dir_fd=folder)
    file = os.fdopen(descriptor, "rb")
    try:
        require_regular(os.fstat(descriptor), path)
    except Refusal:
        file.close()
        raise
    return file


def require_regular(found: os.stat_result, path: str) -> None:
    """Refuse everything but a regular file."""
    if stat.S_ISDIR(found.st_mode):
        raise Refusal("IS_DIRECTORY", f"{shown(path)} is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise Refusal("INVALID", f"{shown(path)} is neither a file nor a folder")


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, however many the kernel takes at a time."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def find_target(folder: int, name: str, path: str) -> os.stat_result | None:
    """What stands at the target, None if nothing does. Links and everything but files are refused."""
    try:
        found = os.lstat(encode_name(name), dir_fd=folder)
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(found.st_mode) and (link := _link(folder, name, path)):
        raise link
    require_regular(found, path)
    return found
