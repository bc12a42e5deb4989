"""Value types of the YAML files that are more than a JSON type: durations and sizes."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any, Final

from runner.config.load import describe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

DURATION_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?(ms|s|m|h)$"
SIZE_PATTERN: Final = r"^[0-9]+(\.[0-9]+)?[kKmMgG]?$"

_SECONDS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
_FACTORS: Final = {"": 1, "k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
_MAX_SECONDS: Final = 10 * 365 * 86_400
_MAX_SIZE: Final = 10**15

LEAST_MEMORY: Final = 16_000_000
"""Fewest bytes of memory for a command: about twice what an interpreter takes to start."""


def parse_duration(value: Any, *, zero: bool = False) -> float:
    """Seconds of ``90``, ``"90s"``, ``"5m"``, ``"1.5h"`` or ``"250ms"``.

    Args:
        value: A YAML value.
        zero: Whether zero is allowed.

    Raises:
        ValueError: It is none of these, negative, or over ten years.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        seconds = _as_float(value)
    elif isinstance(value, str) and re.fullmatch(DURATION_PATTERN, value):
        number = value.rstrip("msh")
        seconds = float(number) * _SECONDS[value[len(number) :]]
    else:
        raise ValueError(f"{describe(value)} is no duration: write seconds, or a text like 90s, 5m, 1.5h")
    seconds = round(seconds, 6) if math.isfinite(seconds) else -1.0
    if not 0 <= seconds <= _MAX_SECONDS or (seconds == 0 and not zero):
        least = "zero" if zero else "above zero"
        raise ValueError(f"{describe(value)} is out of range: write a duration from {least} to ten years")
    return seconds


def parse_size(value: Any) -> int:
    """The whole number of ``4000000``, ``"4g"``, ``"100M"`` or ``"1.5k"``: k, M, G are powers of 1,000.

    Raises:
        ValueError: It is none of these, no whole number, or out of range.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        size = _as_float(value)
    elif isinstance(value, str) and re.fullmatch(SIZE_PATTERN, value):
        number = value.rstrip("kKmMgG")
        size = float(number) * _FACTORS[value[len(number) :].lower()]
    else:
        raise ValueError(f"{describe(value)} is no size: write a number, or a text like 500k, 100M, 4g")
    if not math.isfinite(size) or not 1 <= size <= _MAX_SIZE or round(size, 3) % 1:
        raise ValueError(f"{describe(value)} is out of range: write a whole number from 1 to 1000000g")
    return round(size)


def parse_memory(value: Any) -> int:
    """``parse_size`` for the memory of a command.

    Raises:
        ValueError: As there; or file tools, which are a Python program, could not start.
    """
    size = parse_size(value)
    if size < LEAST_MEMORY:
        raise ValueError(f"{describe(value)} is out of range: write at least 16M, file tools do not start with less")
    return size


LIMIT_VALUES: Final[Mapping[str, Callable[[Any], float]]] = {
    **dict.fromkeys(("wall", "idle", "tool", "tool_time"), parse_duration),
    **dict.fromkeys(("tokens", "input_tokens", "output_tokens", "output_bytes"), parse_size),
}
"""Limit → how its value in YAML becomes a number; the others are numbers in YAML."""


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf
