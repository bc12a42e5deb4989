"""Numbers as people read them."""

from __future__ import annotations

import pytest

from runner.figures import amount, counted, decimals


@pytest.mark.parametrize(("number", "text"), [(0, "0 steps"), (1, "1 step"), (2, "2 steps"), (12345, "12,345 steps")])
def test_a_noun_follows_its_number(number: int, text: str) -> None:
    """One is not many."""
    assert counted(number, "step") == text


def test_a_noun_may_have_a_plural_of_its_own() -> None:
    """An s does not do for all."""
    assert [counted(number, "entry", "entries") for number in (1, 2)] == ["1 entry", "2 entries"]


@pytest.mark.parametrize(
    ("value", "places", "text"),
    [
        (0.0, 4, "0.0000"),
        (0.5, 2, "0.50"),
        (0.015, 2, "0.015"),
        (0.004, 2, "0.004"),
        (0.0000123, 4, "0.0000123"),
        (0.00001, 4, "0.00001"),
        (0.0123456, 4, "0.0123"),
        (1.0, 2, "1.00"),
        (1234.5678, 2, "1,234.57"),
        (-0.004, 2, "-0.004"),
        (float("inf"), 2, "inf"),
        (float("nan"), 2, "nan"),
    ],
)
def test_a_small_amount_is_not_shown_as_none(value: float, places: int, text: str) -> None:
    """Three digits of it stand there, whatever the usual places are."""
    assert decimals(value, places) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(10_000_000, "10,000,000"), (60.0, "60"), (0.05, "0.05"), (0.004, "0.004"), (10**400, "10" + ",000" * 133)],
)
def test_an_amount_is_exact(value: float, text: str) -> None:
    """No exponent, and no digits that are not there."""
    assert amount(value) == text
