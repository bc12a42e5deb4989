"""What an answer costs: only where every price that matters is known."""

from __future__ import annotations

from typing import Any

import pytest

from runner.providers.base import Prices
from runner.providers.prices import FREE, cost_of, known_window, lookup


def test_a_known_model_has_prices_and_a_window() -> None:
    """Per million tokens, in dollars."""
    prices = lookup("gpt-4.1")

    assert prices == Prices(input=2.0, cache_read=0.5, cache_write=0.0, output=8.0, currency="USD")
    assert known_window("gpt-4.1") == 1_047_576


@pytest.mark.parametrize("model", ["mock", "gpt-4", "gpt-4.1-2025-04-14", "GPT-4.1", ""])
def test_any_other_name_is_unknown(model: str) -> None:
    """Names are compared whole: a similar one may cost ten times as much."""
    assert lookup(model) is None
    assert known_window(model) is None


def test_a_model_whose_price_changes_with_the_hour_has_a_window_only() -> None:
    """A cost cap then needs prices in the profile."""
    assert lookup("deepseek-v4-flash") is None
    assert known_window("deepseek-v4-flash") == 1_000_000


@pytest.mark.parametrize(
    ("usage", "cost"),
    [
        ({"inputTokens": 1_000_000, "outputTokens": 0}, 2.0),
        ({"inputTokens": 1000, "cacheReadTokens": 9000, "cacheWriteTokens": 500, "outputTokens": 100}, 0.01145),
        ({"inputTokens": 0, "outputTokens": 10, "reasoningTokens": 8}, 0.0001),
    ],
)
def test_the_cost_is_the_sum_over_the_buckets(usage: Any, cost: float) -> None:
    """Reasoning is inside the output and not paid twice."""
    prices = Prices(input=2.0, cache_read=0.85, cache_write=1.6, output=10.0)

    assert cost_of(usage, prices) == pytest.approx(cost)


def test_a_bucket_with_tokens_and_without_a_price_makes_the_cost_unknown() -> None:
    """Unknown is not free; an empty bucket needs no price."""
    prices = Prices(input=1.0, output=2.0)

    assert cost_of({"inputTokens": 10, "outputTokens": 10, "cacheReadTokens": 1}, prices) is None
    assert cost_of({"inputTokens": 10, "outputTokens": 10, "cacheReadTokens": 0}, prices) == pytest.approx(0.00003)
    assert cost_of({"inputTokens": 10, "outputTokens": 10}, Prices()) is None


def test_what_calls_nobody_costs_nothing() -> None:
    """A known zero."""
    assert cost_of({"inputTokens": 10, "outputTokens": 10, "cacheReadTokens": 5}, FREE) == 0.0
