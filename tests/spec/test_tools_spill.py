"""A result that is too long goes to a file whole; the model gets its ends and the way to the rest."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.agent.settings import CompactionSpec
from runner.compaction.spill import CANCELLED_BYTES, Spill, SpillStore
from runner.errors import StorageError
from runner.messages import text_of
from runner.redaction import Redactor
from runner.session.tokens import cautious

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.messages import ImageBlock, JsonObject, TextBlock
    from runner.tools.pipeline import Finalized

WIDE = 1_000_000
POINTER = re.compile(
    r"\[(\d+) of (\d+) bytes are left out here, lines (\d+) to (\d+) of (\d+);"
    r" read_file with path (spill:\S+) and offset (\d+) gives them(?:, path (spill:\S+) from a byte on)?\]\n"
)


def _spill(directory: Path, window: int = WIDE, spec: CompactionSpec | None = None) -> Spill:
    store = SpillStore(str(directory / "spill"))
    return Spill(store, spec=spec or CompactionSpec(), window=window, redactor=Redactor({"KEY": "hunter22"}))


def _finalize(spill: Spill, text: str, call_id: str = "c1", overflow: Path | None = None) -> Finalized:
    return spill.finalize(call_id, [{"type": "text", "text": text}], None if overflow is None else str(overflow))


def _text(final: Finalized) -> str:
    return text_of(list(final.content))


def _kept(directory: Path, final: Finalized) -> str:
    assert final.spill is not None
    data: bytes = (directory / final.spill["path"]).read_bytes()
    assert final.spill["bytes"] == len(data)
    assert final.spill["sha256"] == hashlib.sha256(data).hexdigest()
    return data.decode("utf-8")


def _read(directory: Path, reference: str, offset: int = 1, limit: int = 2_000, room: int = 40_000) -> JsonObject:
    page = SpillStore(str(directory / "spill")).read(reference, offset, limit, room)
    assert not isinstance(page, str), page
    return page


def test_a_result_within_the_limit_stays_as_it_is(tmp_path: Path) -> None:
    """50,000 bytes are whole, and nothing is written."""
    final = _finalize(_spill(tmp_path), "x" * 49_999 + "\n")

    assert (_text(final), final.bytes) == ("x" * 49_999 + "\n", 50_000)
    assert (final.truncated, final.spill, final.redactions) == (False, None, 0)
    assert not (tmp_path / "spill").exists()


def test_one_byte_more_spills_with_head_tail_and_a_pointer(tmp_path: Path) -> None:
    """What is between is one call away, and the numbers in the pointer are right."""
    whole = "".join(f"line {n}\n" for n in range(1, 5_501))

    final = _finalize(_spill(tmp_path), whole)

    text = _text(final)
    match = POINTER.search(text)
    assert match is not None
    head, tail = text[: match.start()], text[match.end() :]
    assert whole.startswith(head.removesuffix("\n"))
    assert whole.endswith(tail)
    assert (len(head.encode()), len(tail.encode())) == (6_001, 2_000)
    assert int(match[1]) == len(whole) - 8_000
    assert int(match[2]) == final.bytes == len(whole)
    assert _kept(tmp_path, final) == whole
    assert final.truncated
    first, last = int(match[3]), int(match[4])
    between = _read(tmp_path, match[6].removeprefix("spill:"), offset=first, limit=last - first + 1, room=1_000_000)
    assert whole.endswith(between["text"] + "".join(f"line {n}\n" for n in range(last + 1, 5_501)))
    assert f"line {first}\n" in between["text"]


def test_the_spill_folder_and_file_are_private(tmp_path: Path) -> None:
    """Results may hold what only this run may see."""
    final = _finalize(_spill(tmp_path), "x" * 60_000)

    assert final.spill is not None
    assert (tmp_path / "spill").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / final.spill["path"]).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_cut_never_parts_a_code_point(tmp_path: Path, width: int) -> None:
    """Head and tail are whole characters, at any alignment."""
    character = {1: "a", 2: "é", 3: "€", 4: "🧀"}[width]
    for shift in range(width):
        text = _text(_finalize(_spill(tmp_path), "x" * shift + character * 60_000))
        match = POINTER.search(text)
        assert match is not None
        head, tail = text[: match.start()], text[match.end() :]
        assert set(head) <= {"x", "\n", character}
        assert set(tail) == {character}
        assert len(head.encode()) + len(tail.encode()) + int(match[1]) == int(match[2]) + 1


def test_a_small_window_lowers_the_limit_and_what_is_kept(tmp_path: Path) -> None:
    """An eighth of the window is the limit, a sixteenth what stays of a longer result."""
    window = 16_000
    fits = _finalize(_spill(tmp_path, window), "x" * 8_000)
    spills = _finalize(_spill(tmp_path, window), "x" * 8_004)

    assert not fits.truncated
    assert spills.truncated
    assert cautious(_text(spills)) <= window // 16 + 120


def test_text_that_is_dense_in_tokens_counts_as_such(tmp_path: Path) -> None:
    """A non-ASCII code point is a token, so fewer bytes of it fit."""
    window = 16_000

    final = _finalize(_spill(tmp_path, window), "字" * 2_001)

    assert final.truncated
    assert cautious(_text(final)) <= window // 16 + 120


def test_the_results_of_one_step_share_a_quarter_of_the_window(tmp_path: Path) -> None:
    """Many medium results cannot overflow the window together; the next step begins anew."""
    window = 40_000
    spill = _spill(tmp_path, window)
    spill.begin_step()

    finals = [_finalize(spill, "x" * 16_000, f"c{number}") for number in range(20)]

    assert [final.truncated for final in finals[:3]] == [False, False, True]
    assert sum(cautious(_text(final)) for final in finals) <= window // 4 + 18 * 150
    assert "spill:c19" in _text(finals[19])
    spill.begin_step()
    assert not _finalize(spill, "x" * 16_000, "next").truncated


def test_a_short_result_is_never_cut(tmp_path: Path) -> None:
    """When nothing is left a short text costs less than what would stand for it."""
    spill = _spill(tmp_path, 2_000)
    for number in range(10):
        _finalize(spill, "x" * 3_000, f"c{number}")

    assert _text(_finalize(spill, "[exit 1]")) == "[exit 1]"


def test_secrets_are_taken_out_before_anything_is_kept(tmp_path: Path) -> None:
    """Neither the result nor the file holds one; the number is reported."""
    final = _finalize(_spill(tmp_path), "a hunter22 " + "x" * 60_000 + " hunter22")

    assert final.redactions == 2
    assert "hunter22" not in _text(final)
    assert _kept(tmp_path, final).startswith("a [redacted KEY] x")


def test_an_overflow_file_is_streamed_and_removed(tmp_path: Path) -> None:
    """The whole output is in the file; notes of the tool stay behind the tail."""
    overflow = tmp_path / "out"
    whole = "".join(f"{n}\n" for n in range(400_000))
    overflow.write_text(whole)
    content: list[TextBlock | ImageBlock] = [{"type": "text", "text": "part"}, {"type": "text", "text": "[exit 1]"}]

    final = _spill(tmp_path).finalize("c1", content, str(overflow))

    assert _kept(tmp_path, final) == whole
    assert _text(final).startswith("0\n1\n")
    assert _text(final).endswith("399999\n\n[exit 1]")
    assert "part" not in _text(final)
    assert final.bytes == len(whole)
    assert not overflow.exists()


@pytest.mark.parametrize("at", [999_990, 999_996, 1_000_000, 1_999_995])
def test_a_secret_across_the_blocks_of_an_overflow_file_is_found(tmp_path: Path, at: int) -> None:
    """The file is read in blocks; no secret slips through between two of them."""
    overflow = tmp_path / "out"
    overflow.write_text("x" * at + "hunter22" + "y" * 1_500_000)

    final = _spill(tmp_path).finalize("c1", [{"type": "text", "text": ""}], str(overflow))

    assert final.redactions == 1
    assert _kept(tmp_path, final) == "x" * at + "[redacted KEY]" + "y" * 1_500_000


def test_an_overflow_file_that_is_not_text_is_escaped(tmp_path: Path) -> None:
    """The same escapes as in a short output."""
    overflow = tmp_path / "out"
    overflow.write_bytes(b"\xff\\x41" + b"z" * 1_000_000 + "é".encode() * 500_000)

    final = _spill(tmp_path).finalize("c1", [{"type": "text", "text": ""}], str(overflow))

    assert _kept(tmp_path, final) == "\\xff\\\\x41" + "z" * 1_000_000 + "é" * 500_000


def test_a_missing_overflow_file_is_a_storage_failure(tmp_path: Path) -> None:
    """An output that was lost is not passed off as empty."""
    with pytest.raises(StorageError):
        _spill(tmp_path).finalize("c1", [{"type": "text", "text": ""}], str(tmp_path / "gone"))


def test_a_spill_that_cannot_be_written_is_a_storage_failure(tmp_path: Path) -> None:
    """The message says where."""
    (tmp_path / "spill").write_text("a file where the folder should be")

    with pytest.raises(StorageError) as caught:
        _finalize(_spill(tmp_path), "x" * 60_000)

    assert str(tmp_path / "spill") in caught.value.message


def test_an_id_that_is_used_twice_or_is_hostile_gets_a_file_of_its_own(tmp_path: Path) -> None:
    """No result overwrites another, nothing is written outside the folder, and each can be read."""
    spill = _spill(tmp_path)
    ids = ["c1", "c1", "../../escape", "/etc/passwd", "", "a" * 300, ".."]

    for number, call_id in enumerate(ids):
        final = _finalize(spill, f"{number}: " + "x" * 60_000, call_id)
        match = POINTER.search(_text(final))
        assert match is not None
        assert _read(tmp_path, match[6].removeprefix("spill:"))["text"].startswith(f"{number}: ")

    assert len(list((tmp_path / "spill").iterdir())) == len(ids)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["spill"]


def test_one_endless_line_can_be_read_by_bytes(tmp_path: Path) -> None:
    """Lines do not help there; the pointer names the byte to go on from, and so does each page."""
    whole = "é" * 40_000
    text = _text(_finalize(_spill(tmp_path), whole))
    match = POINTER.search(text)
    assert match is not None
    reference = match[8].removeprefix("spill:")

    seen = text[: match.start()].removesuffix("\n")
    while True:
        page = _read(tmp_path, reference, room=7_001)["text"]
        head, _, body = page.partition("\n")
        seen += body
        further = re.search(r"read on with @(\d+)", head)
        if further is None:
            break
        reference = f"c1@{further[1]}"

    assert len(whole) - 30 <= len(seen) <= len(whole)
    assert set(seen) == {"é"}


@pytest.mark.parametrize(
    "reference", ["", "nothing", "../secret", "c1/../../secret", "c1@", "c1@-1", ".", "c1.txt", "c1@x"]
)
def test_what_this_session_has_not_kept_is_not_read(tmp_path: Path, reference: str) -> None:
    """A reference is a name, never a path."""
    (tmp_path / "secret.txt").write_text("s")
    _finalize(_spill(tmp_path), "x" * 60_000)

    answer = SpillStore(str(tmp_path / "spill")).read(reference, 1, 10, 1_000)

    assert isinstance(answer, str)
    assert "no result spill:" in answer


@pytest.mark.parametrize("reference", ["c1", "c1@60001"])
def test_a_place_past_the_end_says_how_long_the_result_is(tmp_path: Path, reference: str) -> None:
    """The model can correct itself."""
    _finalize(_spill(tmp_path), "x" * 60_000)

    answer = SpillStore(str(tmp_path / "spill")).read(reference, 2, 10, 1_000)

    assert isinstance(answer, str)
    assert "past the end" in answer
    assert str(tmp_path) not in answer


def test_a_link_in_the_place_of_a_kept_result_is_not_followed(tmp_path: Path) -> None:
    """Even if somebody could put it there."""
    _finalize(_spill(tmp_path), "x" * 60_000)
    (tmp_path / "spill" / "c2.txt").symlink_to(Path(os.path.realpath(__file__)))

    assert isinstance(SpillStore(str(tmp_path / "spill")).read("c2", 1, 10, 1_000), str)
    assert isinstance(SpillStore(str(tmp_path / "spill")).read("c2@5", 1, 10, 1_000), str)


def test_images_stay_beside_a_text_that_spills(tmp_path: Path) -> None:
    """Only text is cut."""
    image: ImageBlock = {"type": "image", "mediaType": "image/png", "sha256": "0" * 64, "bytes": 5}

    final = _spill(tmp_path).finalize("c1", [image, {"type": "text", "text": "x" * 60_000}], None)

    assert [block["type"] for block in final.content] == ["text", "image"]


def test_an_image_takes_its_share_of_the_step(tmp_path: Path) -> None:
    """One for which no room is left is named; what it weighs counts as output."""
    image: ImageBlock = {"type": "image", "mediaType": "image/png", "sha256": "0" * 64, "bytes": 5_000}
    spill = _spill(tmp_path, window=16_000)

    finals = [spill.finalize(f"c{n}", [image], None) for n in range(4)]
    spill.begin_step()
    later = spill.finalize("c5", [image], None)

    assert [final.content[0]["type"] for final in (*finals, later)] == ["image", "image", "text", "text", "image"]
    assert "read it in a later one" in str(finals[2].content)
    assert (finals[0].bytes, finals[0].truncated) == (5_000, False)


def test_tools_can_ask_for_pages_that_do_not_spill(tmp_path: Path) -> None:
    """A page of the size that is told fits, in every window."""
    for window in (8_000, 32_000, 128_000, 1_000_000):
        spill = _spill(tmp_path, window)
        assert not _finalize(spill, "[note]\n" + "x" * spill.page_bytes).truncated


def _cancellable(directory: Path, cancelled: Callable[[], bool]) -> Spill:
    store = SpillStore(str(directory / "spill"))
    return Spill(store, spec=CompactionSpec(), window=WIDE, redactor=Redactor({}), cancelled=cancelled)


@pytest.mark.parametrize("piece", [b"line\n", b"\xff\0\n", "ä".encode()], ids=["text", "bytes", "wide"])
def test_a_cancelled_run_keeps_the_beginning_of_a_long_output(tmp_path: Path, piece: bytes) -> None:
    """The rest of the run waits for it; how much is missing is said."""
    overflow = tmp_path / "overflow"
    overflow.write_bytes(piece * (30_000_000 // len(piece)))
    size = overflow.stat().st_size

    final = _finalize(_cancellable(tmp_path, lambda: True), "", overflow=overflow)

    kept = _kept(tmp_path, final)
    [left] = re.findall(r"\[(\d+) more bytes of the output were not kept, since the run was cancelled\]", _text(final))
    assert size - int(left) == CANCELLED_BYTES
    assert len(kept) >= CANCELLED_BYTES // 2
    assert kept.encode().startswith(piece) is (b"\xff" not in piece)
    assert not overflow.exists()


def test_a_cancellation_is_seen_while_a_long_output_is_read(tmp_path: Path) -> None:
    """At its next block, not at its end."""
    overflow = tmp_path / "overflow"
    overflow.write_bytes(b"\xff" * 40_000_000)
    asked: list[int] = []

    def cancelled() -> bool:
        asked.append(1)
        return len(asked) > 10

    final = _finalize(_cancellable(tmp_path, cancelled), "", overflow=overflow)

    assert "26000000 more bytes of the output were not kept" in _text(final)


def test_a_run_that_is_not_cancelled_keeps_all(tmp_path: Path) -> None:
    """To the last byte, and nothing is said."""
    overflow = tmp_path / "overflow"
    overflow.write_bytes(b"line\n" * 2_000_000)

    final = _finalize(_cancellable(tmp_path, lambda: False), "", overflow=overflow)

    assert final.bytes == 10_000_000
    assert "not kept" not in _text(final)
