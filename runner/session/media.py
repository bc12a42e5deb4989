"""Images of a session: their bytes, once each, in ``media/<sha256>.<ext>`` beside the log.

An image block in the log names its bytes by their digest. Invariants: the file is on disk, whole and synced, before
a block can name it; what is read back has the digest and size that the block says. The bytes are not searched for
secrets, as texts are. Writes no events. Effect on the prefix cache: none, the same block gives the same bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from typing import TYPE_CHECKING, Any, cast

from runner.errors import LogError, StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runner.messages import ImageBlock
    from runner.session.store import Files

    Media = Callable[[ImageBlock], bytes]
    """Gives the bytes of an image; raises MissingMediaError or LogError."""

EXTENSIONS = {"image/png": "png", "image/jpeg": "jpg", "image/gif": "gif", "image/webp": "webp"}
"""Kinds of images that are kept, and how their files' names end."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


class MissingMediaError(LogError):
    """The bytes of an image are not beside the log, so that a request with it cannot be built again."""


def find_path(block: ImageBlock) -> str | None:
    """The path of an image's file, relative to the session's folder; None for one of a kind that is not kept here."""
    fields: Any = block  # a log may hold anything
    digest, kind = fields.get("sha256"), fields.get("mediaType")
    named = isinstance(digest, str) and _SHA256.fullmatch(digest) and isinstance(fields.get("bytes"), int)
    return f"media/{digest}.{EXTENSIONS[kind]}" if named and kind in EXTENSIONS else None


def media_path(block: ImageBlock) -> str:
    """The path of an image's file, relative to the session's folder.

    Raises:
        LogError: LOG_INVALID, the block names no file.
    """
    path = find_path(block)
    if path is None:
        raise LogError("an image names no file: its digest, size or media type is not one")
    return path


def no_media(block: ImageBlock) -> bytes:
    """The media of a session without any."""
    raise MissingMediaError(f"the image {media_path(block)} is not beside the log")


def images_of(content: Any) -> Iterator[ImageBlock]:
    """The image blocks of a message's content, those in tool results too. Takes nothing for granted."""
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and block.get("type") == "image":
            yield cast("ImageBlock", block)
        elif isinstance(block, dict) and block.get("type") == "tool-result":
            yield from images_of(block.get("content"))


class MediaStore:
    """The images of one session that is being written.

    Args:
        directory: The session's folder; ``media`` is made in it with the first image.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory

    def write(self, data: bytes, media_type: str) -> ImageBlock:
        """Keep an image and return the block that names it. Thread-safe.

        Raises:
            StorageError: STORAGE_FAILED, it cannot be written.
        """
        digest = hashlib.sha256(data).hexdigest()
        block: ImageBlock = {"type": "image", "mediaType": media_type, "sha256": digest, "bytes": len(data)}
        path = os.path.join(self._directory, media_path(block))  # noqa: PTH118  # pathlib is not loaded for this
        folder = os.path.dirname(path)  # noqa: PTH120  # likewise
        fresh = f"{path}.{os.urandom(4).hex()}.new"
        try:
            os.makedirs(folder, mode=0o700, exist_ok=True)  # noqa: PTH103  # likewise
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            with os.fdopen(os.open(fresh, flags, 0o600), "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(fresh, path)  # noqa: PTH105  # likewise
            _sync(folder)
        except OSError as error:
            with contextlib.suppress(OSError):  # the first failure is the one to report
                os.unlink(fresh)  # noqa: PTH108  # likewise
            raise StorageError(
                f"an image cannot be kept in {folder}: {error.strerror}",
                hint="free space there, or give another --artifacts folder",
            ) from error
        return block

    def read(self, block: ImageBlock) -> bytes:
        """The bytes of an image of this session.

        Raises:
            MissingMediaError: LOG_INVALID, they are not there.
            LogError: LOG_INVALID, they are not what the block says.
        """
        path = os.path.join(self._directory, media_path(block))  # noqa: PTH118  # pathlib is not loaded for this
        try:
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
                data = file.read(block["bytes"] + 1)
        except OSError as error:
            raise MissingMediaError(f"the image {path} cannot be read: {error.strerror}") from error
        return checked(data, block)


def _sync(folder: str) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def media_of(files: Files) -> Media:
    """The images among the files of a session that is read."""

    def read(block: ImageBlock) -> bytes:
        path = media_path(block)
        if files.size(path) is None:
            return no_media(block)
        parts, left = [], block["bytes"] + 1
        with files.open(path) as stream:
            while left > 0 and (piece := stream.read(left)):
                parts.append(piece)
                left -= len(piece)
        return checked(b"".join(parts), block)

    return read


def checked(data: bytes, block: ImageBlock) -> bytes:
    """``data``, if it is what the block says.

    Raises:
        LogError: LOG_INVALID, it is not.
    """
    if len(data) != block["bytes"] or hashlib.sha256(data).hexdigest() != block["sha256"]:
        raise LogError(f"the file {media_path(block)} is not the image that the log names")
    return data
