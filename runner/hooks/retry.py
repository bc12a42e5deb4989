"""Retries of model requests: the one layer that repeats them.

Delay: what the server asked for, up to a cap, else min(0.5 * 2^n, 8) seconds less up to 25 %
jitter. The budget is a number of attempts and seconds in all. History is unchanged by a retry,
so the cached prefix is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.agent.hook import Hook
from runner.figures import counted

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.agent.hook import RequestEnded
    from runner.agent.settings import RetrySpec

FIRST_DELAY = 0.5
LONGEST_DELAY = 8.0
LONGEST_RETRY_AFTER = 120.0
JITTER = 0.25


class RetryHook(Hook):
    """Decides whether and when a failed attempt is repeated.

    Args:
        spec: ``attempts`` counts all attempts of one request, ``seconds`` their time together.
        random: Numbers from 0 to 1 for the jitter.
    """

    def __init__(self, spec: RetrySpec, *, random: Callable[[], float]) -> None:
        self._spec = spec
        self._random = random

    def on_response(self, ended: RequestEnded) -> float | None:
        """Seconds to wait, None when the failure is final or the budget is used up.

        A failure that could have passed says then how often it was tried, and what ended that.
        """
        error = ended.error
        if error is None or not error.retryable:
            return None
        asked = error.retry_after
        delay: float
        if asked is None:
            delay = min(FIRST_DELAY * 2 ** (ended.attempt - 1), LONGEST_DELAY)
            delay *= 1 - JITTER * self._random()
        else:
            delay = max(0.0, asked)
        if ended.attempt >= self._spec.attempts:
            why = ""
        elif asked is not None and asked > LONGEST_RETRY_AFTER:
            why = f", since the server asks to wait {asked:,.0f} s, more than {LONGEST_RETRY_AFTER:.0f}"
        elif ended.waited + delay > self._spec.seconds:
            why = f", since retry.seconds is {self._spec.seconds:g}"
        else:
            return delay
        times = counted(ended.attempt, "attempt") + ("" if ended.attempt == 1 else f" in {ended.waited:.0f} s")
        error.message += f" (given up after {times}{why})"
        error.hint = error.hint or "run it again later, or raise retry.attempts and retry.seconds"
        return None
