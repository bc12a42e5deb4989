"""Images lie beside the log, once, and are read back as what the log says or not at all."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, cast

import pytest

from runner.errors import LogError, StorageError
from runner.session.media import MediaStore, MissingMediaError, find_path, images_of, media_path, no_media
from runner.session.tokens import IMAGE_TOKENS, cautious, estimate_block, reported

if TYPE_CHECKING:
    from pathlib import Path

    from runner.messages import ImageBlock

DATA = b"\x89PNG\r\n\x1a\nrest"


def test_an_image_is_kept_once_under_its_digest(tmp_path: Path) -> None:
    """The block names it; folder and file are private, and nothing else is left there."""
    store = MediaStore(str(tmp_path))

    first, second = store.write(DATA, "image/png"), store.write(DATA, "image/png")

    digest = hashlib.sha256(DATA).hexdigest()
    assert first == second == {"type": "image", "mediaType": "image/png", "sha256": digest, "bytes": len(DATA)}
    assert [path.name for path in (tmp_path / "media").iterdir()] == [f"{digest}.png"]
    assert (tmp_path / "media").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "media" / f"{digest}.png").stat().st_mode & 0o777 == 0o600
    assert store.read(first) == MediaStore(str(tmp_path)).read(first) == DATA


@pytest.mark.parametrize("data", [b"", DATA[:-1], DATA + b"x", DATA.upper()])
def test_other_bytes_are_not_given_out(tmp_path: Path, data: bytes) -> None:
    """Digest and size are both checked."""
    store = MediaStore(str(tmp_path))
    block = store.write(DATA, "image/png")
    (tmp_path / media_path(block)).write_bytes(data)

    with pytest.raises(LogError, match="is not the image that the log names"):
        store.read(block)


def test_a_missing_image_is_told_apart(tmp_path: Path) -> None:
    """So that a log without its media can still be verified as far as it goes."""
    store = MediaStore(str(tmp_path))
    block = store.write(DATA, "image/png")
    path = tmp_path / media_path(block)
    path.unlink()

    with pytest.raises(MissingMediaError):
        store.read(block)
    path.symlink_to("/etc/hostname")
    with pytest.raises(MissingMediaError):
        store.read(block)
    with pytest.raises(MissingMediaError):
        no_media(block)


@pytest.mark.parametrize(
    "change",
    [{"sha256": "../../x"}, {"sha256": None}, {"sha256": "A" * 64}, {"mediaType": "image/x/../y"}, {"bytes": "1"}],
)  # fmt: skip
def test_a_block_that_names_no_file_reaches_none(tmp_path: Path, change: dict[str, Any]) -> None:
    """Whatever a log holds, no path leads out of the folder."""
    block = cast("ImageBlock", {**MediaStore(str(tmp_path)).write(DATA, "image/png"), **change})

    assert find_path(block) is None
    with pytest.raises(LogError, match="names no file"):
        MediaStore(str(tmp_path)).read(block)


def test_an_image_that_cannot_be_kept_is_a_failure_of_the_storage(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "media").write_text("")

    with pytest.raises(StorageError, match="cannot be kept"):
        MediaStore(str(tmp_path)).write(DATA, "image/png")


def test_images_are_found_wherever_they_stand() -> None:
    """In messages and in results, among whatever else a log of another program holds."""
    image = {"type": "image", "mediaType": "image/png", "sha256": "0" * 64, "bytes": 1}
    content = [image, "text", None, {"type": "tool-result", "content": [{"type": "text", "text": "x"}, image]}]

    assert list(images_of(content)) == [image, image]
    assert list(images_of("text")) == list(images_of(None)) == []


def test_an_image_counts_for_what_it_may_cost_only_where_that_decides() -> None:
    """Numbers that are shown follow the formula of the log format."""
    image = {"type": "image", "mediaType": "image/png", "sha256": "0" * 64, "bytes": 1}

    assert estimate_block(image, cautious) == IMAGE_TOKENS
    assert estimate_block(image, reported) < 50
