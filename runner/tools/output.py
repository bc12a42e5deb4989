"""Bytes and ids from outside as text that is safe to keep, to show and to name files by."""

from __future__ import annotations

import codecs
import hashlib
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
# A run is matched once and whole: no place inside of it is tried, so long runs cost no more than short ones.
_BEFORE_BYTE = re.compile("\\\\(?<!\\\\\\\\)\\\\*+(?=x[0-9a-f]{2}|[\0\udc80-\udcff])")


def decode_output(data: bytes) -> tuple[str, bool]:
    r"""Text of what a program wrote, and whether something in it is escaped.

    UTF-8 stays as it is. If bytes are no UTF-8, or NUL, each of those stands as ``\xNN``; then a
    run of backslashes before such an escape, or before what only looks like one, is doubled, so
    that nothing is lost: an odd run means a byte, an even one is text.
    """
    if b"\0" not in data:
        try:
            return data.decode("utf-8"), False
        except UnicodeDecodeError:
            pass  # escaped below
    return "".join(escape_chunks([data])), True


def escape_chunks(chunks: Iterable[bytes]) -> Iterator[str]:
    """The escaped form of ``decode_output``, piece by piece; no piece ends inside a code point."""
    decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    held = ""
    for chunk in chunks:
        text = held + decoder.decode(chunk)
        # A backslash, or what follows it, may go on in the next piece.
        start = max(0, len(text) - 4)
        at = text.find("\\", start)
        cut = len(text) if at < 0 else len(text[:at].rstrip("\\"))
        held = text[cut:]
        yield _escape(text[:cut])
    yield _escape(held + decoder.decode(b"", final=True))


def _escape(text: str) -> str:
    if "\\" in text:
        text = _BEFORE_BYTE.sub(lambda run: run[0] * 2, text)
    # The encoder writes a byte that is no UTF-8 as \udcNN, many times faster than a table would. NUL joins these,
    # and then stands for what is \udc in the text itself.
    data = text.replace("\0", "\udc00").replace("\\udc", "\\\0").encode("utf-8", "backslashreplace")
    return data.replace(b"\\udc", b"\\x").replace(b"\0", b"udc").decode("utf-8")


def is_clean(chunks: Iterable[bytes]) -> bool:
    """Whether all of it is UTF-8 without NUL, so that nothing needs an escape."""
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    try:
        for chunk in chunks:
            if b"\0" in chunk:
                return False
            decoder.decode(chunk)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def file_stem(call_id: str) -> str:
    """A file name for a call id, which models choose: letters, digits, ``._-``, at most 80 of them.

    Ids that need a change get a digest behind them, so that different ids stay different.
    """
    stem = _UNSAFE.sub("_", call_id)[:64]
    if stem == call_id and stem[:1] not in ("", ".", "-"):
        return stem
    digest = hashlib.sha256(call_id.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{stem.lstrip('.-') or 'call'}-{digest}"
