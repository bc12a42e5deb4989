"""A secret that comes in pieces is not shown piece by piece."""

from __future__ import annotations

import base64

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.redaction import Redactor

SECRET = "sk-0123456789"  # a made-up key
REDACTOR = Redactor({"K": SECRET})


def streamed(pieces: list[str], redactor: Redactor = REDACTOR) -> tuple[list[str], int]:
    """What is shown after each piece, and at the end; and how many secrets were replaced."""
    stream = redactor.stream()
    shown = [stream.feed(piece) for piece in pieces]
    return [*shown, stream.finish()], stream.count


def test_a_secret_cut_in_two_is_held_back_until_it_is_whole() -> None:
    """Neither half is ever shown."""
    shown, count = streamed(["the key is sk-01234", "56789 so"])

    assert shown == ["the key is ", "[redacted K] so", ""]
    assert count == 1


def test_what_only_looked_like_a_beginning_is_shown_with_what_follows() -> None:
    """Nothing is lost."""
    assert streamed(["a sk-0", "1 b", " sk"])[0] == ["a ", "sk-01 b", " ", "sk"]


def test_text_without_any_beginning_passes_at_once() -> None:
    """Also where there is no secret at all."""
    assert streamed(["one ", "two"])[0] == ["one ", "two", ""]
    assert streamed(["sk-0123456789"], Redactor({})) == (["sk-0123456789", ""], 0)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(st.sampled_from([SECRET, SECRET[:5], "x", "sk-", " "]), max_size=8),
    cuts=st.lists(st.integers(0, 60), max_size=8),
)
def test_pieces_give_the_same_text_as_the_whole(parts: list[str], cuts: list[int]) -> None:
    """However they are cut; and no piece alone holds the secret."""
    whole = "".join(parts)
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {len(whole)})
    pieces = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    shown, count = streamed(pieces)

    assert ("".join(shown), count) == REDACTOR.text(whole)


KEY = "-----BEGIN KEY-----\nMIIEvQIBADANBgkqhkiG\nAASCBKcwggSjAgEAAoIB\nshort\n-----END KEY-----"
LONG = Redactor({"K": SECRET, "PEM": KEY})
WRAPPED = "\n".join(base64.encodebytes(b"ab" + SECRET.encode() * 2).decode()[at : at + 9] for at in range(0, 40, 9))


PARTS = [SECRET, KEY, KEY[:60], KEY[20:45], WRAPPED, WRAPPED[3:], SECRET.encode().hex(), "\n", "\\", "\\n", "\r", "x"]


@pytest.mark.parametrize("size", [1, 5, 20, 21, 42])
def test_the_last_line_of_a_long_secret_waits_with_the_others(size: int) -> None:
    """A line that is a secret of its own may be the beginning of the whole one, which ends in a short line."""
    text = f"key: {KEY}\ndone"
    shown, count = streamed([text[at : at + size] for at in range(0, len(text), size)], LONG)

    assert "".join(shown) == "key: [redacted PEM]\ndone"
    assert count == 1


def test_a_line_of_a_long_secret_alone_is_replaced_when_no_more_of_it_comes() -> None:
    """Also at the end of the text."""
    redactor = Redactor({"TWO": "MIIEvQIBADANBgkqhkiG\nshort"})

    assert streamed(["MIIEvQIBADANBgkqhkiG", "\n", "other"], redactor) == (["", "", "[redacted TWO]\nother", ""], 1)
    assert streamed(["MIIEvQIBADANBgkqhkiG"], redactor) == (["", "[redacted TWO]"], 1)


@settings(max_examples=300, deadline=None)
@given(
    parts=st.lists(
        st.sampled_from(
            [
                SECRET,
                KEY,
                KEY[:60],
                KEY[20:45],
                WRAPPED,
                WRAPPED[3:],
                SECRET.encode().hex(),
                "\n",
                "\\",
                "\\n",
                "\r",
                "x",
            ]
        ),
        max_size=5,
    ),
    cuts=st.lists(st.integers(0, 200), max_size=8),
)
def test_pieces_of_long_and_wrapped_secrets_give_the_same_text_as_the_whole(parts: list[str], cuts: list[int]) -> None:
    """However they are cut."""
    whole = "".join(parts)
    ends = sorted({min(cut, len(whole)) for cut in cuts} | {len(whole)})
    pieces = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    shown, count = streamed(pieces, LONG)

    assert ("".join(shown), count) == LONG.text(whole)
