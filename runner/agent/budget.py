"""Limits of a run as one tree: what a child uses counts for its parents too.

Reserve before a model call, settle after it. At 90 % of a limit there is one notice, at 100 %
the run ends. Writes no events; the loop logs ``limit/reached``.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from runner.errors import ErrorCode
from runner.figures import amount
from runner.record import record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from runner.agent.settings import Limits

NOTICE_SHARE = 0.9
"""Share of a limit at which the model is told, once."""

_BUDGETS = ("cost", "tokens")


@record
class LimitState:
    """One limit: its name, what is used of it and where it ends (units of ``Limits``).

    ``needed`` is what was asked for and did not fit, None when the limit is used up.
    """

    name: str
    used: float
    max: float
    needed: float | None = None

    @property
    def code(self) -> ErrorCode:
        """The code a run ends with when this limit is reached."""
        return ErrorCode.BUDGET_EXHAUSTED if self.name in _BUDGETS else ErrorCode.LIMIT_REACHED

    @property
    def kind(self) -> str:
        """``budget`` for money and tokens, else ``limit``; stands in ``turn/end``."""
        return "budget" if self.name in _BUDGETS else "limit"


class LimitExceeded(Exception):  # noqa: N818  # control flow of the loop, not an error of the program
    """A limit ends the run."""

    def __init__(self, state: LimitState) -> None:
        super().__init__(f"limit {state.name}: {amount(state.used)} of {amount(state.max)}")
        self.state = state


class Budget:
    """What a run may use and has used.

    Args:
        limits: Maxima; None is no limit.
        clock: Monotonic seconds; the wall limit counts from construction.
        parent: The budget this one draws from.
        used: What an earlier part of the same session used already.
    """

    COUNTED = ("steps", "turns", "cost", "tokens", "output_bytes")

    def __init__(
        self,
        limits: Limits,
        *,
        clock: Callable[[], float],
        parent: Budget | None = None,
        used: dict[str, float] | None = None,
    ) -> None:
        self.limits = limits
        self.parent = parent
        self._clock = clock
        self._started = clock()
        self._used: dict[str, float] = dict.fromkeys(self.COUNTED, 0)
        self._used.update(used or {})
        self._noticed: set[str] = set()
        self._lock: threading.Lock = parent._lock if parent else threading.Lock()  # noqa: SLF001  # same class

    def used(self, name: str) -> float:
        """What is used of one limit, the elapsed seconds for ``wall``."""
        if name == "wall":
            return self._used.get("wall", 0) + self._clock() - self._started
        return self._used[name]

    def limit(self, name: str) -> float | None:
        """The maximum of one limit, None without."""
        return getattr(self.limits, name)  # type: ignore[no-any-return]  # a field of Limits by name

    def states(self) -> list[LimitState]:
        """Every limit that is set, with what is used of it."""
        result = []
        for name in (*self.COUNTED, "wall"):
            maximum = self.limit(name)
            if maximum is not None:
                result.append(LimitState(name, self.used(name), maximum))
        return result

    def wall_left(self) -> float | None:
        """Seconds until the wall limit of this budget or a parent, None without."""
        left = [] if self.limits.wall is None else [self.limits.wall - self.used("wall")]
        above = self.parent.wall_left() if self.parent else None
        left += [] if above is None else [above]
        return min(left) if left else None

    def room(self, name: str) -> float | None:
        """What is left of a counted limit here and in every parent, None without a limit."""
        left: list[float] = []
        budget: Budget | None = self
        while budget is not None:
            maximum = budget.limit(name)
            if maximum is not None:
                left.append(maximum - budget.used(name))
            budget = budget.parent
        return min(left) if left else None

    def require(self, name: str, amount: float) -> None:
        """Check that ``amount`` more of a counted limit fits, here and in every parent.

        Raises:
            LimitExceeded: It does not fit.
        """
        budget: Budget | None = self
        while budget is not None:
            maximum = budget.limit(name)
            if maximum is not None and budget.used(name) + amount > maximum:
                raise LimitExceeded(LimitState(name, budget.used(name), maximum, amount if name in _BUDGETS else None))
            budget = budget.parent

    def charge(self, name: str, amount: float) -> None:
        """Count ``amount`` of a counted limit, here and in every parent. Never refuses."""
        with self._lock:
            budget: Budget | None = self
            while budget is not None:
                budget._used[name] += amount  # noqa: SLF001  # same class
                budget = budget.parent

    def check(self) -> None:
        """Check limits that grow by themselves or were overrun by what was charged.

        Raises:
            LimitExceeded: The first limit that is over.
        """
        budget: Budget | None = self
        while budget is not None:
            for state in budget.states():
                over = state.used >= state.max if state.name == "wall" else state.used > state.max
                if over:
                    raise LimitExceeded(state)
            budget = budget.parent

    def notices(self, reserved: Mapping[str, float]) -> list[LimitState]:
        """Limits whose end the model should know of; each is given once.

        Those of which 90 % are used once what is ``reserved`` for the next request is, and those
        that a second request of that size would pass.
        """
        new = [state for state in self.states() if state.name not in self._noticed and state.max > 0]
        new = [state for state in new if self._is_near(state, reserved.get(state.name, 0))]
        self._noticed.update(state.name for state in new)
        return new

    @staticmethod
    def _is_near(state: LimitState, reserved: float) -> bool:
        return state.used + reserved >= NOTICE_SHARE * state.max or state.used + 2 * reserved > state.max
