"""The confined file worker: a program of its own that reads, writes, edits and searches files.

Started through the sandbox as ``python -I -S -E worker.py``; one JSON request a line on
descriptor 0, one JSON answer a line on descriptor 1. Standard library only, and little of it,
since every session pays for its start. It never imports the product.

Invariants: paths come resolved, and no component of them is followed when it is a symbolic link,
so that the path that was decided on is the path that is used. Memory and answers are bounded by
the limits in the request. An operation that takes too long is ended by killing the worker.
Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import stat

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

    Arguments = dict[str, Any]
    Value = dict[str, Any]

SNIFF = 8_192
"""Bytes that decide whether a file is text."""

WHOLE = 32_000_000
"""Bytes of the largest file that is held in memory (edit, write in place, UTF-16)."""

COUNT = 256_000_000
"""Bytes of the largest file whose lines are counted to the end."""

LINE = 1_000_000
"""Bytes of one line that are looked at; what is longer is cut."""

VISITS = 500_000
"""Folder entries one search looks at."""

DEPTH = 150
"""Nested folders one search goes down."""

RIPGREP = "/usr/bin/rg"
"""Asked to narrow a large search down, when it is there and only root can change it."""

MANY = 300
"""Files after which a search is a large one."""

_PATH_ONLY = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAY_NOT_CREATE = (errno.EACCES, errno.EPERM, errno.EROFS)
_MAY_NOT_RENAME = (*_MAY_NOT_CREATE, errno.EBUSY, errno.EXDEV)


class Refusal(Exception):  # noqa: N818  # a value for the caller, not an error of the program
    """The operation is not done; ``code`` and message go into the answer."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code


def _encode(name: str) -> bytes:
    """A name for the kernel: names are UTF-8, whatever the locale says."""
    return name.encode("utf-8", "surrogateescape")


def _shown(name: str) -> str:
    r"""A name for people: bytes that are not UTF-8 and control characters as ``\xNN``."""
    if name.isprintable():
        return name
    readable = _encode(name).decode("utf-8", "backslashreplace")
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in readable)


def _is_link(folder: int, name: str) -> bool:
    try:
        return stat.S_ISLNK(os.lstat(_encode(name), dir_fd=folder).st_mode)
    except OSError:
        return False


def _link(path: str) -> Refusal:
    return Refusal("DENIED", f"{_shown(path)} is a symbolic link, and links are not followed here")


def _enter(folder: int, name: str, path: str, *, create: bool) -> int:
    """Open the folder ``name`` in ``folder``; ``path`` is for messages."""
    try:
        return os.open(_encode(name), _PATH_ONLY, dir_fd=folder)
    except FileNotFoundError:
        if not create:
            raise Refusal("NOT_FOUND", f"{_shown(path)} does not exist") from None
        with contextlib.suppress(FileExistsError):  # made by somebody else in between is as good
            os.mkdir(_encode(name), 0o777, dir_fd=folder)
        return os.open(_encode(name), _PATH_ONLY, dir_fd=folder)
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        if _is_link(folder, name):
            raise _link(path) from None
        raise Refusal("NOT_FOUND", f"{_shown(path)} is not a folder") from None


def _open_folder(path: str, *, create: bool = False) -> int:
    """Open a folder by its absolute path, component by component and following no link."""
    names = [name for name in path.split("/") if name not in ("", ".")]
    if not path.startswith("/") or "\0" in path or ".." in names:
        raise Refusal("INVALID", "the path is not absolute and resolved")
    folder = os.open(b"/", _PATH_ONLY)
    walked = ""
    for name in names:
        walked += "/" + name
        try:
            following = _enter(folder, name, walked, create=create)
        finally:
            os.close(folder)
        folder = following
    return folder


def _split(path: str) -> tuple[str, str]:
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
    return f" (did you mean {' or '.join(_shown(each) for each in near)}?)" if near else ""


def _names(folder: int) -> list[str]:
    readable = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        return [os.fsencode(name).decode("utf-8", "surrogateescape") for name in os.listdir(readable)]
    finally:
        os.close(readable)


def _open_file(folder: int, name: str, path: str) -> BinaryIO:
    """Open a regular file for reading; nothing else is opened, devices and pipes may have effects."""
    try:
        found = os.lstat(_encode(name), dir_fd=folder)
    except FileNotFoundError:
        raise Refusal("NOT_FOUND", f"{_shown(path)} does not exist{_near(folder, name)}") from None
    _require_regular(found, path)
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(_encode(name), flags, dir_fd=folder)
    file = os.fdopen(descriptor, "rb")
    try:
        _require_regular(os.fstat(descriptor), path)
    except Refusal:
        file.close()
        raise
    return file


def _require_regular(found: os.stat_result, path: str) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise _link(path)
    if stat.S_ISDIR(found.st_mode):
        raise Refusal("IS_DIRECTORY", f"{_shown(path)} is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise Refusal("INVALID", f"{_shown(path)} is neither a file nor a folder")


def _encoding(start: bytes, path: str) -> str:
    """The encoding a file's first bytes declare; ``utf-8`` without a mark."""
    for mark, name in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if start.startswith(mark) and not start.startswith(b"\xff\xfe\0\0"):
            return name
    if b"\0" in start:
        raise Refusal("NOT_TEXT", f"{_shown(path)} is a binary file")
    return "utf-8"


_MARKS = {"utf-8-sig": b"\xef\xbb\xbf", "utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}


def _decode(data: bytes, encoding: str, path: str) -> tuple[str, str]:
    """Text without byte order mark, and the encoding that gave it (``latin-1`` when UTF-8 fails)."""
    body = data.removeprefix(_MARKS.get(encoding, b""))
    if encoding.startswith("utf-16"):
        try:
            return body.decode(encoding), encoding
        except UnicodeDecodeError:
            raise Refusal("NOT_TEXT", f"{_shown(path)} is neither UTF-8 nor UTF-16 text") from None
    if b"\0" in body:
        raise Refusal("NOT_TEXT", f"{_shown(path)} is a binary file")
    try:
        return body.decode("utf-8"), encoding
    except UnicodeDecodeError:
        return data.decode("latin-1"), "latin-1"


def _encode_text(text: str, encoding: str) -> bytes:
    try:
        return _MARKS.get(encoding, b"") + text.encode("utf-8" if encoding == "utf-8-sig" else encoding)
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise Refusal("INVALID", f"the file is {encoding} text and cannot hold {character!a}") from None


def _load(file: BinaryIO, path: str) -> bytes:
    """The whole file, if it is not too large."""
    size = os.fstat(file.fileno()).st_size
    data = file.read(WHOLE + 1) if size <= WHOLE else b""
    if size > WHOLE or len(data) > WHOLE:
        raise Refusal("TOO_LARGE", f"{_shown(path)} has {size} bytes, more than the {WHOLE} this can hold")
    return data


def _whole_lines(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        end = data.find(b"\n", start) + 1 or len(data)
        yield data[start:end]
        start = end


def _cut(line: bytes, room: int) -> bytes:
    """At most ``room`` bytes from the start, not cut inside a UTF-8 sequence."""
    if len(line) <= room:
        return line
    while room > 0 and line[room] & 0xC0 == 0x80:
        room -= 1
    return line[:room]


class _Page:
    """Lines from ``offset`` on, until ``limit`` lines or ``room`` bytes (under ``LINE``) are taken."""

    def __init__(self, offset: int, limit: int, room: int) -> None:
        self.offset = offset
        self.limit = limit
        self.room = room
        self.taken: list[bytes] = []
        self.length = 0
        self.full = False
        self._ended = 0
        self._inside = False

    @property
    def lines(self) -> int:
        """Lines seen so far."""
        return self._ended + self._inside

    def add(self, piece: bytes) -> None:
        """See the next line, or the next piece of a very long one."""
        continued, self._inside = self._inside, not piece.endswith(b"\n")
        self._ended += not self._inside
        number = self._ended + self._inside
        if continued:
            if number == self.offset + len(self.taken) - 1:
                self.length += len(piece)
        elif number >= self.offset and not self.full:
            if len(self.taken) == self.limit or (self.taken and len(piece) > self.room):
                self.full = True
                return
            kept = _cut(piece, self.room)
            self.taken.append(kept)
            # Behind a line that is cut nothing may follow, so that only the last line of a page can be.
            self.room = self.room - len(kept) if len(kept) == len(piece) else 0
            self.length = len(piece)

    def count(self, file: BinaryIO) -> None:
        """Count the lines of the rest of the file."""
        while block := file.read(1_000_000):
            self._ended += block.count(b"\n")
            self._inside = not block.endswith(b"\n")


def read(arguments: Arguments) -> Value:
    """Lines ``offset`` (from 1) to at most ``offset + limit - 1``, at most ``max_bytes`` of them."""
    path = arguments["path"]
    parent, name = _split(path)
    folder = _open_folder(parent)
    try:
        file = _open_file(folder, name, path)
    finally:
        os.close(folder)
    page = _Page(arguments["offset"], arguments["limit"], arguments["max_bytes"])
    with file:
        size = os.fstat(file.fileno()).st_size
        encoding = _encoding(file.read(SNIFF), path)
        file.seek(0)
        if encoding.startswith("utf-16"):
            text, _ = _decode(_load(file, path), encoding, path)
            for line in _whole_lines(text.encode("utf-8")):
                page.add(line)
        else:
            file.seek(len(_MARKS.get(encoding, b"")))
            while not page.full and (piece := file.readline(LINE)):
                page.add(piece)
            if size <= COUNT:
                page.count(file)
    return _page_value(page, size, encoding, path)


def _page_value(page: _Page, size: int, encoding: str, path: str) -> Value:
    if not page.taken and page.lines:
        raise Refusal("INVALID", f"offset {page.offset} is past the end: {_shown(path)} has {page.lines} lines")
    raw = b"".join(page.taken)
    text, found = _decode(raw, "utf-8", path)
    crlf = raw.count(b"\r\n") == raw.count(b"\n") > 0
    last = page.offset + len(page.taken) - 1
    return {
        "text": text.replace("\r\n", "\n") if crlf else text,
        "first": page.offset,
        "last": last,
        "total": page.lines if size <= COUNT else None,
        "more": page.lines > last,
        "size": size,
        "encoding": found if encoding == "utf-8" else encoding,
        "crlf": crlf,
        "cut": page.length if page.taken and page.length > len(page.taken[-1]) else None,
    }


_UMASK = os.umask(0o077)
os.umask(_UMASK)


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _find_target(folder: int, name: str, path: str) -> os.stat_result | None:
    """What stands at the target, None if nothing does. Links and everything but files are refused."""
    try:
        found = os.lstat(_encode(name), dir_fd=folder)
    except FileNotFoundError:
        return None
    _require_regular(found, path)
    return found


def _store(folder: int, name: str, path: str, data: bytes) -> bool:
    """Give the file this content; whether that was atomic. Its mode and owner stay."""
    old = _find_target(folder, name, path)
    target = -1
    if old is not None:
        # Opened although a rename would not need it: a file that may not be written stays as it is.
        target = os.open(_encode(name), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    try:
        if old is not None:
            _require_regular(os.fstat(target), path)
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
            _write_all(descriptor, data)
            if old is not None and (old.st_uid, old.st_gid) != (os.geteuid(), os.getegid()):
                with contextlib.suppress(OSError):  # only root may give a file away; else the new file is ours
                    os.fchown(descriptor, old.st_uid, old.st_gid)
            os.fchmod(descriptor, 0o666 & ~_UMASK if old is None else stat.S_IMODE(old.st_mode))
        finally:
            os.close(descriptor)
        os.replace(temporary, _encode(name), src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):  # the first failure is the one to report
            os.unlink(temporary, dir_fd=folder)
        raise


def _store_in_place(target: int, path: str, data: bytes) -> None:
    """Overwrite an open file; when that fails half-way, put the old bytes back."""
    if os.fstat(target).st_size > WHOLE:
        raise Refusal("TOO_LARGE", f"{_shown(path)} is too large to be written in place")
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
                "IO", f"{_shown(path)}: {error.strerror}; the old content could not be put back either"
            ) from error
        raise


def _overwrite(target: int, data: bytes) -> None:
    os.lseek(target, 0, os.SEEK_SET)
    _write_all(target, data)
    os.ftruncate(target, len(data))


def write(arguments: Arguments) -> Value:
    """Give ``path`` the text ``content``; missing folders are made."""
    path = arguments["path"]
    data = arguments["content"].encode("utf-8")
    parent, name = _split(path)
    folder = _open_folder(parent, create=True)
    try:
        created = _find_target(folder, name, path) is None
        atomic = _store(folder, name, path, data)
    finally:
        os.close(folder)
    return {"created": created, "bytes": len(data), "atomic": atomic}


def edit(arguments: Arguments) -> Value:
    """Replace text exactly, one edit after the other, all of them or none."""
    path = arguments["path"]
    parent, name = _split(path)
    folder = _open_folder(parent)
    try:
        with _open_file(folder, name, path) as file:
            data = _load(file, path)
        text, encoding = _decode(data, _encoding(data[:SNIFF], path), path)
        crlf = text.count("\r\n") == text.count("\n") > 0
        if crlf:
            text = text.replace("\r\n", "\n")
        lines = []
        edits = arguments["edits"]
        for number, each in enumerate(edits, 1):
            where = f"edit {number} of {len(edits)}: " if len(edits) > 1 else ""
            text, line = _replace_once(text, each["old"], each["new"], where, unix=crlf)
            lines.append(line)
        atomic = _store(folder, name, path, _encode_text(text.replace("\n", "\r\n") if crlf else text, encoding))
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
        raise Refusal("NO_MATCH", f"{where}old is not in the file{_nearest(text, old)}")
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


def _nearest(text: str, old: str) -> str:
    """The lines of the file that look most like ``old``, as the end of a message."""
    import difflib

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
    candidates = [line[:200] for line in stripped[:5_000] if line]
    near = difflib.get_close_matches(wanted[first][:200], candidates, n=1, cutoff=0.6)
    if not near:
        return "; no line of it looks like the first line of old"
    at = next(index for index, line in enumerate(stripped) if line[:200] == near[0])
    return "; nearest lines:" + _numbered(lines, max(0, at - first), span)


def _numbered(lines: list[str], start: int, span: int) -> str:
    shown = lines[start : start + min(span, 8)]
    return "".join(f"\n{number}: {line[:300]}" for number, line in enumerate(shown, start + 1))


_ANY_DEPTH = None
"""Stands for ``**`` in a parsed pattern."""


def _expand_braces(pattern: str) -> list[str]:
    """Every pattern that ``{a,b}`` stands for; a brace without a comma is a plain character."""
    done: list[str] = []
    todo = [pattern]
    while todo:
        current = todo.pop()
        found = re.search(r"\{([^{}]*,[^{}]*)\}", current)
        if found is None:
            done.append(current)
        else:
            todo += [current[: found.start()] + each + current[found.end() :] for each in found[1].split(",")]
        if len(todo) + len(done) > 100:
            raise Refusal("INVALID", "the braces of the pattern stand for more than 100 patterns")
    return sorted(done)


def _component(part: str) -> re.Pattern[str]:
    """One pattern component (no slash) as a regular expression for a whole name."""
    out: list[str] = []
    index = 0
    while index < len(part):
        character = part[index]
        index += 1
        if character == "*":
            out.append("" if out and out[-1] == ".*" else ".*")
        elif character == "?":
            out.append(".")
        elif character == "[" and (end := part.find("]", index + 1 + (part[index : index + 1] in ("!", "^")))) > 0:
            negated = part[index] in "!^"
            inner = re.sub(r"[\\\[\]&~|^]", r"\\\g<0>", part[index + negated : end])
            out.append(f"[{'^' if negated else ''}{inner}]")
            index = end + 1
        else:
            out.append(re.escape(character))
    return re.compile("(?s:" + "".join(out) + r")\Z")


def _parse_glob(pattern: str) -> list[list[re.Pattern[str] | None]]:
    """Alternatives, each a list of components."""
    alternatives = []
    for each in _expand_braces(pattern):
        parts = [part for part in each.split("/") if part not in ("", ".")]
        if ".." in parts or not parts or each.startswith("/"):
            raise Refusal("INVALID", f"the pattern {pattern!r} is not relative to the folder that is searched")
        try:
            alternatives.append([_ANY_DEPTH if part == "**" else _component(part) for part in parts])
        except re.error as error:
            raise Refusal("INVALID", f"the pattern {pattern!r}: {error.msg}") from None
    return alternatives


class _Glob:
    """How far each alternative of a pattern has matched on the way down."""

    def __init__(self, alternatives: list[list[re.Pattern[str] | None]], states: list[set[int]] | None = None) -> None:
        self._alternatives = alternatives
        self._states = states or [self._closed(parts, {0}) for parts in alternatives]

    @staticmethod
    def _closed(parts: list[re.Pattern[str] | None], states: set[int]) -> set[int]:
        for state in sorted(states):
            following = state
            while following < len(parts) and parts[following] is _ANY_DEPTH:
                following += 1
                states.add(following)
        return states

    def enter(self, name: str) -> _Glob | None:
        """The state below the entry ``name``, None when nothing can match there."""
        moved = []
        for parts, states in zip(self._alternatives, self._states, strict=True):
            following = set()
            for state in states:
                if state == len(parts):
                    continue
                part = parts[state]
                if part is _ANY_DEPTH:
                    following.add(state)
                elif part.match(name):
                    following.add(state + 1)
            moved.append(self._closed(parts, following))
        return _Glob(self._alternatives, moved) if any(moved) else None

    @property
    def matched(self) -> bool:
        """Whether the whole path so far matches."""
        return any(len(parts) in states for parts, states in zip(self._alternatives, self._states, strict=True))


class _Walk:
    """Files below a folder in order of their paths. Links are not followed, ``.git`` is left out."""

    def __init__(self) -> None:
        self.visited = 0
        self.unreadable = 0
        self.incomplete = False

    def files(self, folder: int, glob: _Glob, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, int, str]]:
        """Yield path, open folder and name of every file that matches. Closes ``folder``."""
        try:
            try:
                entries = self._entries(folder)
            except PermissionError:
                self.unreadable += 1
                return
            for key, is_folder in entries:
                name = key.rstrip("/")
                following = glob.enter(name)
                if following is None:
                    continue
                if not is_folder:
                    if following.matched:
                        yield prefix + name, folder, name
                elif depth >= DEPTH:
                    self.incomplete = True
                else:
                    try:
                        below = os.open(_encode(name), _PATH_ONLY, dir_fd=folder)
                    except OSError:  # gone, or became a link, since it was listed
                        self.unreadable += 1
                        continue
                    yield from self.files(below, following, prefix + key, depth + 1)
        finally:
            os.close(folder)

    def _entries(self, folder: int) -> list[tuple[str, bool]]:
        """Names, folders with a slash behind so that sorting them sorts whole paths."""
        readable = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        entries = []
        try:
            with os.scandir(readable) as listing:
                for entry in listing:
                    self.visited += 1
                    if self.visited > VISITS:
                        self.incomplete = True
                        break
                    name = os.fsencode(entry.name).decode("utf-8", "surrogateescape")
                    is_folder = entry.is_dir(follow_symlinks=False)
                    if name != ".git":
                        entries.append((name + "/" if is_folder else name, is_folder))
        finally:
            os.close(readable)
        entries.sort()
        return entries

    def notes(self) -> Value:
        """What the search did not see."""
        return {"unreadable": self.unreadable, "incomplete": self.incomplete}


def glob(arguments: Arguments) -> Value:
    """Paths below ``path`` that match ``pattern``, with ``label`` in front, at most ``limit``."""
    alternatives = _parse_glob(arguments["pattern"])
    folder = _open_folder(arguments["path"])
    walk = _Walk()
    paths: list[str] = []
    more = False
    files = walk.files(folder, _Glob(alternatives))
    for path, _, _ in files:
        if len(paths) == arguments["limit"]:
            more = True
            break
        paths.append(arguments["label"] + _shown(path))
    files.close()  # type: ignore[attr-defined]  # it is a generator; this frees its descriptors now
    return {"paths": paths, "more": more, **walk.notes()}


def _required(pattern: str) -> bytes:
    """A text that every match of ``pattern`` holds, or nothing when that is not plain to see.

    A file without it needs no look line by line. Groups, classes, alternatives and counts make
    the answer hard; then there is none.
    """
    if not pattern.isascii() or "\n" in pattern:
        return b""
    runs = [""]
    index = 0
    while index < len(pattern):
        character = pattern[index]
        following = pattern[index + 1 : index + 2]
        if character in "|([{" or (character == "\\" and following.isalnum() and following not in "bBdDsSwWAZ"):
            return b""
        if character == "\\":
            runs.append("")
            index += 2
            continue
        if character in "*?+":
            runs[-1] = runs[-1][:-1] if character != "+" else runs[-1]
            runs.append("")
        elif character in ".^$":
            runs.append("")
        else:
            runs[-1] += character
        index += 1
    return max(runs, key=len).encode("ascii")


def _files_with(path: str, text: bytes) -> set[str] | None:
    """Files below ``path`` that hold ``text``, found by ripgrep; None when it cannot be asked.

    Only a filter: what it names is still searched here, so results are the same without it.
    """
    try:
        program = os.lstat(RIPGREP)
        if not stat.S_ISREG(program.st_mode) or program.st_uid != 0 or program.st_mode & 0o022:
            return None
        reading, writing = os.pipe()
    except OSError:
        return None
    options = ["--no-config", "--no-messages", "--no-ignore", "--hidden", "--text", "--fixed-strings", "--glob=!.git"]
    command = [RIPGREP, *options, "--files-with-matches", "--null", "-e", text.decode("ascii"), "--", path]
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, writing, 1),
        (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
    ]
    with os.fdopen(reading, "rb") as output:
        try:
            child = os.posix_spawn(RIPGREP, [_encode(part) for part in command], dict(os.environ), file_actions=actions)
        except OSError:
            return None
        finally:
            os.close(writing)
        names = output.read(WHOLE)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        return None
    start = len(_encode(path.rstrip("/"))) + 1
    return {name[start:].decode("utf-8", "surrogateescape") for name in names.split(b"\0")}


class _Matches:
    """What a search found, within its limits."""

    def __init__(self, arguments: Arguments) -> None:
        self.lines: list[str] = []
        self.more = False
        self.binary = 0
        self._limit: int = arguments["limit"]
        self._room: int = arguments["max_bytes"]
        self._width: int = arguments["line_chars"]

    def add(self, path: str, number: int, line: str, match: re.Match[str]) -> bool:
        """Keep one match; False when there is no room for more."""
        shown = line.rstrip("\r")
        if len(shown) > self._width:
            start = max(0, min(match.start() - self._width // 3, len(shown) - self._width))
            shown = ("..." if start else "") + shown[start : start + self._width] + "..."
        text = f"{path}:{number}:{shown}"
        size = len(text.encode("utf-8", "replace")) + 1
        if len(self.lines) == self._limit or size > self._room:
            self.more = True
            return False
        self._room -= size
        self.lines.append(text)
        return True


def _search(file: BinaryIO, path: str, expression: re.Pattern[str], required: bytes, found: _Matches) -> bool:
    """Search one file; False when there is no room for more matches."""
    start = file.read(SNIFF)
    try:
        encoding = _encoding(start, path)
    except Refusal:
        found.binary += 1
        return True
    if os.fstat(file.fileno()).st_size > WHOLE:
        file.seek(len(_MARKS.get(encoding, b"")))
        return _search_lines(_long_lines(file, encoding), path, expression, found)
    data = start + file.read(WHOLE)
    if required not in data and not encoding.startswith("utf-16"):
        return True
    try:
        text, _ = _decode(data, encoding, path)
    except Refusal:
        found.binary += 1
        return True
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    return _search_lines(lines, path, expression, found)


def _long_lines(file: BinaryIO, encoding: str) -> Iterator[str]:
    """Lines of a file too large to hold; of a very long one only the start."""
    code = "latin-1" if encoding.startswith("utf-16") else "utf-8"
    while piece := file.readline(LINE):
        yield piece.rstrip(b"\n").decode(code, "replace")
        while not piece.endswith(b"\n") and (piece := file.readline(LINE)):
            pass


def _search_lines(lines: list[str] | Iterator[str], path: str, expression: re.Pattern[str], found: _Matches) -> bool:
    search = expression.search
    for number, line in enumerate(lines, 1):
        match = search(line)
        if match is not None and not found.add(path, number, line, match):
            return False
    return True


def grep(arguments: Arguments) -> Value:
    """Lines that match ``pattern`` in the file or below the folder ``path``, as ``path:line:text``."""
    try:
        expression = re.compile(arguments["pattern"])
    except (re.error, OverflowError, RecursionError) as error:
        raise Refusal("INVALID", f"the pattern is no regular expression: {error}") from None
    required = _required(arguments["pattern"])
    path: str = arguments["path"]
    label: str = arguments["label"]
    only: str = arguments.get("glob") or "**"
    found = _Matches(arguments)
    walk = _Walk()
    if path != "/" and (file := _single_file(path)) is not None:
        with file:
            _search(file, label.rstrip("/"), expression, required, found)
        return {"lines": found.lines, "more": found.more, "binary": found.binary, **walk.notes()}
    alternatives = _parse_glob(only if "/" in only else "**/" + only)
    files = walk.files(_open_folder(path), _Glob(alternatives))
    candidates = None
    for number, (relative, folder, name) in enumerate(files):
        if number == MANY and len(required) >= 3:
            candidates = _files_with(path, required)
        if candidates is not None and relative not in candidates:
            continue
        try:
            file = _open_file(folder, name, relative)
        except Refusal:  # a link, a device, or gone since it was listed
            continue
        except OSError:
            walk.unreadable += 1
            continue
        with file:
            if not _search(file, label + _shown(relative), expression, required, found):
                break
    files.close()  # type: ignore[attr-defined]  # it is a generator; this frees its descriptors now
    return {"lines": found.lines, "more": found.more, "binary": found.binary, **walk.notes()}


def _single_file(path: str) -> BinaryIO | None:
    """The file at ``path`` open for reading, None when a folder stands there."""
    parent, name = _split(path)
    folder = _open_folder(parent)
    try:
        return _open_file(folder, name, path)
    except Refusal as refusal:
        if refusal.code == "IS_DIRECTORY":
            return None
        raise
    finally:
        os.close(folder)


def hello(arguments: Arguments) -> Value:
    """Show that the workspace and the temporary folder are there."""
    for name in ("workspace", "tmp"):
        os.close(_open_folder(arguments[name]))
    return {"pid": os.getpid()}


OPERATIONS: dict[str, Callable[[Arguments], Value]] = {
    "hello": hello,
    "read": read,
    "write": write,
    "edit": edit,
    "glob": glob,
    "grep": grep,
}

_ERRNO_CODES = {
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


def answer(line: bytes) -> Value:
    """The answer to one request line. Never raises for what a request holds."""
    number = None
    subject = ""
    try:
        request = json.loads(line)
        number = request["id"]
        subject = str(request["args"].get("path", ""))
        return {"id": number, "ok": True, "value": OPERATIONS[request["op"]](request["args"])}
    except Refusal as refusal:
        code, message = refusal.code, str(refusal)
    except OSError as error:
        code = _ERRNO_CODES.get(error.errno or 0, "IO")
        message = f"{_shown(subject)}: {error.strerror or error}"
    except MemoryError:
        code, message = "TOO_LARGE", f"{_shown(subject)} does not fit into memory"
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        code, message = "INVALID", f"the request cannot be understood: {type(error).__name__}: {error}"
    return {"id": number, "ok": False, "code": code, "message": message}


def main() -> None:
    """Answer requests until the other side closes."""
    with open(0, "rb", closefd=False) as requests:
        for line in requests:
            _write_all(1, json.dumps(answer(line), separators=(",", ":")).encode("ascii") + b"\n")


if __name__ == "__main__":
    main()
