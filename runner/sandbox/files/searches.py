"""Lines of files by regular expression.

Standard library only.
"""

from __future__ import annotations

import os
import re
import stat
from itertools import islice

from .ignores import Scope
from .pages import LINE
from .patterns import Glob, parse_glob
from .places import Refusal, encode_name, open_file, open_folder, shown, split
from .texts import MARKS, SNIFF, WHOLE, decode, encoding_of
from .walks import Walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any, BinaryIO

    Arguments = dict[str, Any]
    Value = dict[str, Any]


RIPGREP = "/usr/bin/rg"
"""Asked to narrow a large search down, when it is there and only root can change it."""

MANY = 300
"""Files after which a search is a large one."""

BATCH = 1_000
"""Files that ripgrep is asked about at a time; their names must fit into a command line."""


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


def _program() -> bool:
    """Whether ripgrep is there, and only root can change it."""
    try:
        found = os.lstat(RIPGREP)
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == 0 and not found.st_mode & 0o022


def _files_with(folder: str, paths: list[str], text: bytes) -> set[str] | None:
    """Those of ``paths`` below ``folder`` that hold ``text``, found by ripgrep; None when it cannot tell.

    Only a filter: what it names is still searched here, so results are the same without it.
    """
    start = folder.rstrip("/") + "/"
    options = ["--no-config", "--no-messages", "--no-ignore", "--hidden", "--text", "--fixed-strings"]
    command = [RIPGREP, *options, "--files-with-matches", "--null", "-e", text.decode("ascii"), "--"]
    try:
        reading, writing = os.pipe()
    except OSError:
        return None
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_DUP2, writing, 1),
        (os.POSIX_SPAWN_OPEN, 2, "/dev/null", os.O_WRONLY, 0),
    ]
    with os.fdopen(reading, "rb") as output:
        try:
            arguments = [encode_name(part) for part in (*command, *(start + path for path in paths))]
            child = os.posix_spawn(RIPGREP, arguments, dict(os.environ), file_actions=actions)
        except OSError:
            return None
        finally:
            os.close(writing)
        names = output.read()
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) not in (0, 1):
        return None
    return {name[len(encode_name(start)) :].decode("utf-8", "surrogateescape") for name in names.split(b"\0")}


def _batches(files: Iterator[tuple[str, int, str]], size: int) -> Iterator[list[str]]:
    batch: list[str] = []
    for path, _, _ in files:
        batch.append(path)
        if len(batch) == size:
            yield batch
            batch = []
    yield batch


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
        encoding = encoding_of(start, path)
    except Refusal:
        file.seek(0)
        found.binary += _holds(file, required)
        return True
    if os.fstat(file.fileno()).st_size > WHOLE:
        file.seek(len(MARKS.get(encoding, b"")))
        return _search_lines(_long_lines(file, encoding), path, expression, found)
    data = start + file.read(WHOLE)
    wide = encoding.startswith("utf-16")
    if required not in data and not wide:
        return True
    try:
        text, _ = decode(data, encoding, path)
    except Refusal:
        found.binary += not (wide and required)
        return True
    # A line is matched without its end, so that $ means the same in a file with CRLF.
    lines = text.replace("\r\n", "\n").split("\n")
    if not lines[-1]:
        lines.pop()
    return _search_lines(lines, path, expression, found)


def _holds(file: BinaryIO, text: bytes) -> bool:
    """Whether a file holds a text, looked for in pieces."""
    before = b""
    while piece := file.read(LINE):
        if text in before + piece:
            return True
        before = piece[-len(text) :]
    return not text


def _long_lines(file: BinaryIO, encoding: str) -> Iterator[str]:
    """Lines of a file too large to hold; of a very long one only the start."""
    code = "latin-1" if encoding.startswith("utf-16") else "utf-8"
    while piece := file.readline(LINE):
        line = piece[:-2] if piece.endswith(b"\r\n") else piece.removesuffix(b"\n")
        yield line.decode(code, "replace")
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
    """Lines that match ``pattern`` in the file or below the folder ``path``, as ``path:line:text``.

    ``root`` is the workspace; see ``Scope.of``. A file that is named is searched even if git ignores it.
    """
    try:
        expression = re.compile(arguments["pattern"])
    except (re.error, OverflowError, RecursionError) as error:
        raise Refusal("INVALID", f"the pattern is no regular expression: {error}") from None
    required = _required(arguments["pattern"])
    path: str = arguments["path"]
    label: str = arguments["label"]
    only: str = arguments.get("glob") or "**"
    found = _Matches(arguments)
    walk = Walk()
    if path != "/" and (file := _single_file(path)) is not None:
        with file:
            _search(file, label.rstrip("/"), expression, required, found)
    else:
        alternatives = parse_glob(only if "/" in only else "**/" + only)
        files = walk.files(open_folder(path), Glob(alternatives), Scope.of(path, arguments.get("root", path)))

        def searched(folder: int, name: str, relative: str) -> bool:
            try:
                file = open_file(folder, name, relative)
            except Refusal:  # a link, a device, or gone since it was listed
                return True
            except OSError:
                walk.unreadable += 1
                return True
            with file:
                return _search(file, label + shown(relative), expression, required, found)

        if all(searched(folder, name, each) for each, folder, name in islice(files, MANY)):
            _search_many(files, path, required, searched)
        files.close()  # type: ignore[attr-defined]  # it is a generator; this frees its descriptors now
    return {"lines": found.lines, "more": found.more, "binary": found.binary, **walk.notes()}


def _search_many(
    files: Iterator[tuple[str, int, str]], path: str, required: bytes, searched: Callable[[int, str, str], bool]
) -> None:
    """Search the files of a large tree, until there is no room for more matches."""
    if len(required) < 3 or not _program():
        all(searched(folder, name, each) for each, folder, name in files)
        return
    for batch in _batches(files, BATCH):
        candidates = _files_with(path, batch, required)
        for each in batch if candidates is None else [each for each in batch if each in candidates]:
            try:
                folder = open_folder(os.path.dirname(f"{path.rstrip('/')}/{each}"))
            except (OSError, Refusal):  # gone, or became a link, since it was listed
                continue
            try:
                if not searched(folder, os.path.basename(each), each):
                    return
            finally:
                os.close(folder)


def _single_file(path: str) -> BinaryIO | None:
    """The file at ``path`` open for reading, None when a folder stands there."""
    parent, name = split(path)
    folder = open_folder(parent)
    try:
        return open_file(folder, name, path)
    except Refusal as refusal:
        if refusal.code == "IS_DIRECTORY":
            return None
        raise
    finally:
        os.close(folder)
