"""What models cost and how much they take, as far as it is known. A small dated table, nothing is looked up.

A model is in the table under its exact name. Prices of the profile come first; a model that has none
anywhere has an unknown cost, which is null in every report and never 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from runner.providers.base import Prices

if TYPE_CHECKING:
    from runner.messages import Usage


class _Model(NamedTuple):
    window: int
    prices: Prices | None = None
    images: bool = False


def _usd(input_: float, cache_read: float, output: float) -> Prices:
    """List prices of an API that writes its cache for nothing."""
    return Prices(input=input_, cache_read=cache_read, cache_write=0.0, output=output)


# Only models with one flat list price have prices here. DeepSeek's change with the hour of the day.
# Where a model takes less input than its whole window holds, the window is what it takes.
_MODELS = {
    "deepseek-v4-flash": _Model(1_000_000),
    "deepseek-v4-pro": _Model(1_000_000),
    "gpt-4.1": _Model(1_047_576, _usd(2.0, 0.5, 8.0), images=True),
    "gpt-4.1-mini": _Model(1_047_576, _usd(0.4, 0.1, 1.6), images=True),
    "gpt-4.1-nano": _Model(1_047_576, _usd(0.1, 0.025, 0.4), images=True),
    "gpt-4o": _Model(128_000, _usd(2.5, 1.25, 10.0), images=True),
    "gpt-4o-mini": _Model(128_000, _usd(0.15, 0.075, 0.6), images=True),
    "gpt-5": _Model(272_000, _usd(1.25, 0.125, 10.0), images=True),
    "gpt-5-mini": _Model(272_000, _usd(0.25, 0.025, 2.0), images=True),
    "gpt-5-nano": _Model(272_000, _usd(0.05, 0.005, 0.4), images=True),
}

FREE = Prices(input=0.0, cache_read=0.0, cache_write=0.0, output=0.0)
"""Prices of the providers that call nobody: ``scripted`` and ``replay``."""


def lookup(model: str) -> Prices | None:
    """List prices of ``model``; None if they are not known."""
    found = _MODELS.get(model)
    return None if found is None else found.prices


def known_window(model: str) -> int | None:
    """Context window of ``model`` in tokens; None if it is not known."""
    found = _MODELS.get(model)
    return None if found is None else found.window


def takes_images(model: str) -> bool:
    """Whether ``model`` is known to take images."""
    found = _MODELS.get(model)
    return found is not None and found.images


def cost_of(usage: Usage, prices: Prices) -> float | None:
    """Cost of one response in ``prices.currency``; None if a bucket with tokens has no price."""
    total = 0.0
    for tokens, price in (
        (usage["inputTokens"], prices.input),
        (usage.get("cacheReadTokens", 0), prices.cache_read),
        (usage.get("cacheWriteTokens", 0), prices.cache_write),
        (usage["outputTokens"], prices.output),
    ):
        if tokens and price is None:
            return None
        total += tokens * (price or 0.0)
    return total / 1_000_000
