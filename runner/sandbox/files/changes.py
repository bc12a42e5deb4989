"""Writes and edits files, each whole or not at all.

Standard library only.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat

from .places import Refusal, encode_name, find_target, open_file, open_folder, require_regular, shown, split, write_all
from .texts import SNIFF, WHOLE, decode, encode_text, encoding_of, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Arguments = dict[str, Any]
    Value = dict[str, Any]


_MAY_NOT_CREATE = (errno.EACCES, errno.EPERM, errno.EROFS)
_MAY_NOT_RENAME = (*_MAY_NOT_CREATE, errno.EBUSY, errno.EXDEV)


_WIDTH = 200
"""Characters of a line that are compared with those of another."""

_COMPARED = 8
"""Lines of a text that are looked for one by one; each can take a tenth of a second."""

UMASK = os.umask(0o077)
os.umask(UMASK)


def store(folder: int, name: str, path: str, data: bytes) -> bool:
    """Give the file this content; whether that was atomic. Its mode and owner stay."""
    old = find_target(folder, name, path)
    target = -1
    if old is not None:
        # Opened although a rename would not need it: a file that may not be written stays as it is.
        target = os.open(encode_name(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if old is not None:
            require_regular(os.fstat(target), path)
        try:
            _store_by_rename(folder, name, data, old)
        except OSError as error:
            if old is None or error.errno not in _MAY_NOT_RENAME:
                raise
            _store_in_place(target, path, data)
            return False
        return True
    finally:
        if target >= 0:
            os.close(target)


def _store_by_rename(folder: int, name: str, data: bytes, old: os.stat_result | None) -> None:
    temporary = f".nightshift-{os.getpid()}-{os.urandom(4).hex()}.tmp".encode("ascii")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(temporary, flags, 0o600, dir_fd=folder)
    try:
        try:
            write_all(descriptor, data)
            if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(OSError):  # only root may give a file away; else the new file is ours
                    os.fchown(descriptor, old.st_uid, old.st_gid)
            os.fchmod(descriptor, 0o666 & ~UMASK if old is None else stat.S_IMODE(old.st_mode))
        finally:
            os.close(descriptor)
        os.replace(temporary, encode_name(name), src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):  # the first failure is the one to report
            os.unlink(temporary, dir_fd=folder)
        raise


def _store_in_place(target: int, path: str, data: bytes) -> None:
    """Overwrite an open file; when that fails half-way, put the old bytes back."""
    if os.fstat(target).st_size > WHOLE:
        raise Refusal("TOO_LARGE", f"{shown(path)} is too large to be written in place")
    old = b""
    while block := os.read(target, 1_000_000):
        old += block
    try:
        _overwrite(target, data)
    except OSError as error:
        try:
            _overwrite(target, old)
        except OSError:
            raise Refusal(
                "IO", f"{shown(path)}: {error.strerror}; the old content could not be put back either"
            ) from error
        raise


def _overwrite(target: int, data: bytes) -> None:
    os.lseek(target, 0, os.SEEK_SET)
    write_all(target, data)
    os.ftruncate(target, len(data))


def write(arguments: Arguments) -> Value:
    """Give ``path`` the text ``content``; missing folders are made."""
    path = arguments["path"]
    data = arguments["content"].encode("utf-8")
    parent, name = split(path)
    folder = open_folder(parent, create=True)
    try:
        created = find_target(folder, name, path) is None
        atomic = store(folder, name, path, data)
    finally:
        os.close(folder)
    return {"created": created, "bytes": len(data), "atomic": atomic}


def edit(arguments: Arguments) -> Value:
    """Replace text exactly, one edit after the other, all of them or none."""
    path = arguments["path"]
    parent, name = split(path)
    folder = open_folder(parent)
    try:
        with open_file(folder, name, path) as file:
            data = load(file, path)
        text, encoding = decode(data, encoding_of(data[:SNIFF], path), path)
        crlf = text.count("\r\n") == text.count("\n") > 0
        if crlf:
            text = text.replace("\r\n", "\n")
        lines = []
        edits = arguments["edits"]
        for number, each in enumerate(edits, 1):
            where = f"edit {number} of {len(edits)}: " if len(edits) > 1 else ""
            text, line = _replace_once(text, each["old"], each["new"], where, unix=crlf)
            lines.append(line)
        atomic = store(folder, name, path, encode_text(text.replace("\n", "\r\n") if crlf else text, encoding))
    finally:
        os.close(folder)
    return {"lines": lines, "encoding": encoding, "crlf": crlf, "atomic": atomic}


def _replace_once(text: str, old: str, new: str, where: str, *, unix: bool) -> tuple[str, int]:
    """``text`` with its only ``old`` replaced, and the line that stood at."""
    if unix:
        old, new = old.replace("\r\n", "\n"), new.replace("\r\n", "\n")
    if not old:
        raise Refusal("INVALID", f"{where}old is empty; write_file makes or replaces a whole file")
    if old == new:
        raise Refusal("INVALID", f"{where}old and new are the same")
    at = text.find(old)
    if at < 0 and "\n" in old and "\r" not in old and "\r\n" in text:
        # A file with both kinds of line ends: the text may stand in a part that has the other kind.
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
        at = text.find(old)
    if at < 0:
        raise Refusal("NO_MATCH", f"{where}old is not in the file{nearest(text, old, 'old')}")
    matches = [at]
    while len(matches) <= 10 and (following := text.find(old, matches[-1] + 1)) >= 0:
        matches.append(following)
    if len(matches) > 1:
        numbers = [text.count("\n", 0, match) + 1 for match in matches]
        listed = ", ".join(str(number) for number in numbers[:10]) + (", ..." if len(numbers) > 10 else "")
        raise Refusal(
            "AMBIGUOUS", f"{where}old is in the file more than once, at lines {listed}; give more lines around it"
        )
    return text[:at] + new + text[at + len(old) :], text.count("\n", 0, at) + 1


def nearest(text: str, old: str, whole: str) -> str:
    """The lines of the file that look most like ``old``, called ``whole``, as the end of a message."""
    wanted = [line.strip() for line in old.split("\n")]
    first = next((index for index, line in enumerate(wanted) if line), None)
    if first is None:
        return ""
    lines = text.split("\n")[:50_000]
    stripped = [line.strip() for line in lines]
    span = len(wanted)
    for start in range(len(lines) - span + 1):
        if stripped[start : start + span] == wanted:
            return ", but for blanks at line starts or ends it is this:" + _numbered(lines, start, span)
    chosen, near = first, _closest(wanted[first], stripped)
    if near is None:
        later = [index for index in range(first + 1, span) if any(c.isalnum() for c in wanted[index])]
        there = set(stripped)
        exact = next((index for index in later if wanted[index] in there), None)
        if exact is not None:
            chosen, near = exact, (1.0, wanted[exact][:_WIDTH])
        for index in later[:_COMPARED] if exact is None else ():
            found = _closest(wanted[index], stripped)
            if found is not None and (near is None or found[0] > near[0]):
                chosen, near = index, found
        if near is None:
            return f"; no line of it looks like any line of {whole}"
    at = next(index for index, line in enumerate(stripped) if line[:_WIDTH] == near[1])
    named = "" if chosen == first else f" to line {chosen + 1} of {whole}, whose line {first + 1} is like none"
    return f"; nearest lines{named}:" + _numbered(lines, max(0, at - chosen), span)


def _closest(text: str, lines: list[str]) -> tuple[float, str] | None:
    """How alike the line that is most like a text is, from 0 to 1, and its start; None if none is like it."""
    import difflib

    wanted = text[:_WIDTH]
    candidates = _most_alike(wanted, [line[:_WIDTH] for line in lines[:5_000] if line])
    near = difflib.get_close_matches(wanted, candidates, n=1, cutoff=0.6)
    return (difflib.SequenceMatcher(None, near[0], wanted).ratio(), near[0]) if near else None


def _most_alike(text: str, lines: list[str]) -> list[str]:
    """The few lines that share the most pairs of characters with a text: comparing all in full can take a minute."""

    def pairs(line: str) -> set[str]:
        return {line[at : at + 2] for at in range(len(line))}

    wanted = pairs(text)

    def alike(line: str) -> float:
        found = pairs(line)
        return len(wanted & found) / len(wanted | found)

    # Lines that are the same count once, the first of those that are equally alike comes first.
    return sorted(dict.fromkeys(lines), key=alike, reverse=True)[:20]


def _numbered(lines: list[str], start: int, span: int) -> str:
    shown = lines[start : start + min(span, 8)]
    return "".join(f"\n{number}: {line[:300]}" for number, line in enumerate(shown, start + 1))
