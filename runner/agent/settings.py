"""Resolved settings of the loop: limits, retries, compaction thresholds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runner.record import record

if TYPE_CHECKING:
    from collections.abc import Mapping


@record
class Limits:
    """Limits of one run; None is no limit. Times in seconds, sizes in bytes, cost in currency."""

    steps: int | None = 200
    turns: int | None = 8
    wall: float | None = 1800.0
    idle: float | None = 120.0
    tool: float = 600.0
    cost: float | None = None
    tokens: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None
    tool_time: float | None = None
    output_bytes: int | None = 100_000_000


@record
class ChildLimits:
    """Limits on what an agent delegates; None is no limit.

    ``children`` below it in all, ``parallel`` of them at the same time, ``depth`` of the tree below it.
    """

    children: int | None = None
    parallel: int | None = None
    depth: int | None = None


@record
class RetrySpec:
    """Budget of retries for one model request: a number of attempts and seconds in all."""

    attempts: int = 5
    seconds: float = 300.0


@record
class CompactionSpec:
    """Thresholds of the three layers.

    ``spill_*`` in UTF-8 bytes, ``prune_*`` in code points, ``summary_at`` and ``keep`` as shares of
    the window, ``summary_max_tokens`` and ``min_output`` in tokens. ``summary_model`` None is the
    run's own model.
    """

    spill_bytes: int = 50_000
    spill_head: int = 6_000
    spill_tail: int = 2_000
    prune_over: int = 8_192
    prune_head: int = 4_096
    prune_tail: int = 1_024
    summary_at: float = 0.8
    keep: float = 0.16
    summary_max_tokens: int = 8_192
    summary_model: str | None = None
    min_output: int = 2_000

    def threshold(self, window: int) -> int:
        """Tokens at which a request is too full."""
        return math.floor(self.summary_at * window)

    def steady_output(self, window: int) -> int:
        """Tokens that there are for an answer while a request is below the threshold, in spite of wrong estimates."""
        return window - self.threshold(window) - window // 24


def compaction_for(spec: CompactionSpec, overrides: Mapping[str, CompactionSpec], model: str) -> CompactionSpec:
    """The thresholds for ``model``: its override where there is one."""
    return overrides.get(model, spec)
