"""Text files: their encoding, their bytes as text and back.

Standard library only.
"""

from __future__ import annotations

import os

from .places import Refusal, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import BinaryIO


SNIFF = 8_192
"""Bytes that decide whether a file is text."""

WHOLE = 32_000_000
"""Bytes of the largest file that is held in memory (edit, write in place, UTF-16)."""


def encoding_of(start: bytes, path: str) -> str:
    """The encoding a file's first bytes declare; ``utf-8`` without a mark."""
    for mark, name in ((b"\xef\xbb\xbf", "utf-8-sig"), (b"\xff\xfe", "utf-16-le"), (b"\xfe\xff", "utf-16-be")):
        if start.startswith(mark) and not start.startswith(b"\xff\xfe\0\0"):
            return name
    if b"\0" in start:
        raise Refusal("NOT_TEXT", f"{shown(path)} is a binary file")
    return "utf-8"


MARKS = {"utf-8-sig": b"\xef\xbb\xbf", "utf-16-le": b"\xff\xfe", "utf-16-be": b"\xfe\xff"}


def decode(data: bytes, encoding: str, path: str) -> tuple[str, str]:
    """Text without byte order mark, and the encoding that gave it (``latin-1`` when UTF-8 fails)."""
    body = data.removeprefix(MARKS.get(encoding, b""))
    if encoding.startswith("utf-16"):
        try:
            return body.decode(encoding), encoding
        except UnicodeDecodeError:
            raise Refusal("NOT_TEXT", f"{shown(path)} is neither UTF-8 nor UTF-16 text") from None
    if b"\0" in body:
        raise Refusal("NOT_TEXT", f"{shown(path)} is a binary file")
    try:
        return body.decode("utf-8"), encoding
    except UnicodeDecodeError:
        return data.decode("latin-1"), "latin-1"


def encode_text(text: str, encoding: str) -> bytes:
    """The bytes of a text in an encoding that ``decode`` gave, mark included."""
    try:
        return MARKS.get(encoding, b"") + text.encode("utf-8" if encoding == "utf-8-sig" else encoding)
    except UnicodeEncodeError as error:
        character = text[error.start]
        raise Refusal("INVALID", f"the file is {encoding} text and cannot hold {character!a}") from None


def load(file: BinaryIO, path: str) -> bytes:
    """The whole file, if it is not too large."""
    size = os.fstat(file.fileno()).st_size
    data = file.read(WHOLE + 1) if size <= WHOLE else b""
    if size > WHOLE or len(data) > WHOLE:
        raise Refusal("TOO_LARGE", f"{shown(path)} has {size} bytes, more than the {WHOLE} this can hold")
    return data
