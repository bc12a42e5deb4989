"""What is in the binary parts of a git patch, where it stands compressed and in base 85. Pure, streaming."""

from __future__ import annotations

import base64
import re
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import IO

_LINE = 65_536
_PIECE = 1 << 20
_GATHER = 1 << 16
_PART = re.compile(rb"(?:literal|delta) \d+\n")


def binary_contents(patch: IO[bytes]) -> Iterator[bytes]:
    """The files' bytes that a patch carries as such, in pieces; of a delta its instructions with what they insert.

    Lines of text content begin with a mark, so none of them is taken for the beginning of a binary part.
    """
    binary = False
    inflate = None
    held = bytearray()
    whole = True  # whether the piece before ended a line, so that this one begins one
    while line := patch.readline(_LINE):
        begins, whole = whole, line.endswith(b"\n")
        if not begins:
            continue
        if inflate is not None and line != b"\n":
            held += _decoded(line)
            if len(held) >= _GATHER:
                yield from _inflated(inflate, bytes(held))
                held.clear()
            continue
        if inflate is not None:
            yield from _inflated(inflate, bytes(held))
            held.clear()
        if line == b"GIT binary patch\n":
            binary = True
        elif binary and _PART.fullmatch(line):
            inflate = zlib.decompressobj()
        else:
            binary = binary and line == b"\n"
            inflate = None
    if inflate is not None:
        yield from _inflated(inflate, bytes(held))


def _decoded(line: bytes) -> bytes:
    """A line: a letter for its number of bytes, A to Z for 1 to 26 and a to z on to 52, then base 85."""
    first = line[0]
    length = first - 64 if first < 97 else first - 70
    try:
        return base64.b85decode(line[1:].rstrip(b"\n"))[:length]
    except ValueError:
        return b""


def _inflated(inflate: zlib._Decompress, data: bytes) -> Iterator[bytes]:
    try:
        while data:
            yield inflate.decompress(data, _PIECE)
            data = inflate.unconsumed_tail
    except zlib.error:
        return  # no content of git's
