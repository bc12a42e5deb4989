"""Images that a model can be shown: known by their first bytes, and whole by their last ones.

Standard library only.
"""

from __future__ import annotations

_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png"),
    (b"\xff\xd8\xff", "image/jpeg"),
    (b"GIF87a", "image/gif"),
    (b"GIF89a", "image/gif"),
)
_ENDS = {"image/png": b"IEND", "image/jpeg": b"\xff\xd9", "image/gif": b";"}


def kind_of(start: bytes) -> str | None:
    """The media type of an image by the first bytes of its file, None if it is none that is known here."""
    for begins, kind in _STARTS:
        if start.startswith(begins):
            return kind
    return "image/webp" if start[:4] == b"RIFF" and start[8:12] == b"WEBP" else None


def is_whole(data: bytes, kind: str) -> bool:
    """Whether an image has its end. One that was cut off would be refused by the model, again in every request."""
    if kind == "image/webp":
        return len(data) >= int.from_bytes(data[4:8], "little") + 8
    return data.rfind(_ENDS[kind]) > 0
