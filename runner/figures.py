"""Numbers for people: ``1 step``, ``2,000 steps``, and small amounts that are not 0. Pure."""

from __future__ import annotations


def counted(number: int, noun: str, many: str = "") -> str:
    """``number`` and the noun that goes with it.

    Args:
        number: How many.
        noun: What one is called.
        many: What several are called, if not the same with an s.
    """
    return f"{number:,} {noun if number == 1 else many or f'{noun}s'}"


def amount(value: float) -> str:
    """A whole number as such, any other with two decimal places or what it needs."""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:,.0f}" if value.is_integer() else decimals(value, 2)


def decimals(value: float, places: int) -> str:
    """``value`` with ``places`` decimal places, below 1 with as many more as three digits need."""
    if not 0 < abs(value) < 1:
        return f"{value:,.{places}f}"
    import math

    wanted = max(places, 2 - math.floor(math.log10(abs(value))))
    whole, _, rest = f"{value:.{wanted}f}".partition(".")
    return f"{whole}.{rest[:places]}{rest[places:].rstrip('0')}"
