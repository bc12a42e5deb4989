"""Reads pages of files.

Standard library only.
"""

from __future__ import annotations

import os
from binascii import b2a_base64

from .images import is_whole, kind_of
from .places import Refusal, open_file, open_folder, shown, split
from .texts import MARKS, SNIFF, decode, encoding_of, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any, BinaryIO

    Arguments = dict[str, Any]
    Value = dict[str, Any]


COUNT = 256_000_000
"""Bytes of the largest file whose lines are counted to the end."""

LINE = 1_000_000
"""Bytes of one line that are looked at; what is longer is cut."""


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
    """Lines ``offset`` (from 1) to at most ``offset + limit - 1``, at most ``max_bytes`` of them.

    With ``max_image`` an image of at most that many bytes is given whole, as ``image`` and base64 ``data``.
    """
    path = arguments["path"]
    parent, name = split(path)
    folder = open_folder(parent)
    try:
        file = open_file(folder, name, path)
    finally:
        os.close(folder)
    page = _Page(arguments["offset"], arguments["limit"], arguments["max_bytes"])
    with file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(SNIFF)
        file.seek(0)
        if "max_image" in arguments and (kind := kind_of(start)) is not None:
            return _image(file, kind, arguments["max_image"], path)
        encoding = encoding_of(start, path)
        if encoding.startswith("utf-16"):
            text, _ = decode(load(file, path), encoding, path)
            for line in _whole_lines(text.encode("utf-8")):
                page.add(line)
        else:
            file.seek(len(MARKS.get(encoding, b"")))
            while not page.full and (piece := file.readline(LINE)):
                page.add(piece)
            if size <= COUNT:
                page.count(file)
    return _page_value(page, size, encoding, path)


def _image(file: BinaryIO, kind: str, most: int, path: str) -> Value:
    size = os.fstat(file.fileno()).st_size
    data = file.read(most + 1) if size <= most else b""
    if size > most or len(data) > most:
        raise Refusal("TOO_LARGE", f"{shown(path)} is an image of {size} bytes, more than the {most} that can be shown")
    if not is_whole(data, kind):
        raise Refusal("NOT_TEXT", f"{shown(path)} begins like an image ({kind}) and has no end; it is damaged")
    return {"image": kind, "data": b2a_base64(data, newline=False).decode("ascii")}


def _page_value(page: _Page, size: int, encoding: str, path: str) -> Value:
    if not page.taken and page.lines:
        noun = "line" if page.lines == 1 else "lines"
        raise Refusal("INVALID", f"offset {page.offset} is past the end: {shown(path)} has {page.lines} {noun}")
    raw = b"".join(page.taken)
    text, found = decode(raw, "utf-8", path)
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
