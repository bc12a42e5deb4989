"""Limits of a run as one tree: what a child uses counts for its parents too.

Reserve before a call, settle after it. A reservation is checked and taken in one, in the budget itself and in every
one above it, so that two children can never both get the last of something. At 90 % of a limit there is one notice, at
100 % the run ends. Writes no events; the loop logs ``limit/reached``. No effect on the prefix cache beyond the notice,
which is appended.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Self

from runner.agent.settings import ChildLimits
from runner.errors import ErrorCode
from runner.figures import amount
from runner.messages import input_tokens
from runner.outcome import limit_code
from runner.record import fields, record

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from runner.agent.settings import Limits
    from runner.messages import Usage

NOTICE_SHARE = 0.9
"""Share of a limit at which the model is told, once."""

COUNTED = ("steps", "turns", "cost", "tokens", "input_tokens", "output_tokens", "tool_time", "output_bytes")
"""Limits on what is counted over the whole session, in the units of ``Limits``."""

_CHILDREN = ("children", "parallel")
"""What a child holds of its parents: one of their number for good, one of those at the same time while it is open."""

_TIMES = ("wall", "tool_time")
"""Limits that are reached when nothing is left of them; the others when more is used than there is."""


@record
class LimitState:
    """One limit: its name, what is used of it and where it ends (units of ``Limits``).

    ``used`` includes what calls under way hold. ``needed`` is what was asked for and did not fit, None when the limit
    is used up.
    """

    name: str
    used: float
    max: float
    needed: float | None = None

    @property
    def code(self) -> ErrorCode:
        """The code a run ends with when this limit is reached."""
        return limit_code(self.name)

    @property
    def kind(self) -> str:
        """``budget`` for money and tokens, else ``limit``; stands in ``turn/end``."""
        return "budget" if self.code is ErrorCode.BUDGET_EXHAUSTED else "limit"


class RunStopped(Exception):  # noqa: N818  # control flow of the loop, not an error of the program
    """The run ends in an orderly way."""


class LimitExceeded(RunStopped):
    """A limit ends the run."""

    def __init__(self, state: LimitState) -> None:
        super().__init__(f"limit {state.name}: {amount(state.used)} of {amount(state.max)}")
        self.state = state


def amounts_of(usage: Usage, cost: float | None) -> dict[str, float]:
    """What a response takes of the limits on money and tokens; an unknown cost counts nothing."""
    read, written = input_tokens(usage), usage["outputTokens"]
    return {"input_tokens": read, "output_tokens": written, "tokens": read + written, "cost": cost or 0.0}


def _sum(fixed: Mapping[str, float], each: Mapping[str, float], units: float) -> dict[str, float]:
    """What is fixed and what so many units take."""
    total = dict(fixed)
    for name, price in each.items():
        total[name] = total.get(name, 0) + price * units
    return total


class Reservation:
    """What one call may take at most, held until it is known what it took.

    Attributes:
        granted: The units it was given.
    """

    def __init__(self, budget: Budget, held: Mapping[str, float], granted: float) -> None:
        self._budget = budget
        self._held: Mapping[str, float] = held
        self.granted = granted

    def settle(self, used: Mapping[str, float]) -> None:
        """Count what was used and give the rest back. Use beyond what was held counts as well."""
        held, self._held = self._held, {}
        self._budget.settle(held, used)

    def release(self) -> None:
        """Give everything back that is still held."""
        self.settle({})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class _Account:
    """The numbers of one budget. What may change is changed under the lock of its tree.

    Attributes:
        limits: Its own limits, for ``wall``.
        maxima: Maxima of what is counted, as far as there are any.
        used: What was used, by name.
        held: What calls under way may use, by name.
        level: How deep it stands in the tree; the run's own is at 0.
        deepest: Levels there may be below it, None without a limit.
    """

    def __init__(
        self,
        limits: Limits,
        children: ChildLimits,
        *,
        level: int,
        used: Mapping[str, float],
        clock: Callable[[], float],
    ) -> None:
        names = (*COUNTED, *_CHILDREN)
        declared = {each.name: getattr(limits, each.name) for each in fields(limits)}
        declared |= {each.name: getattr(children, each.name) for each in fields(children)}
        self.limits = limits
        self.maxima: dict[str, float] = {name: declared[name] for name in names if declared[name] is not None}
        self.used: dict[str, float] = {**dict.fromkeys(names, 0), **used}
        self.held: dict[str, float] = dict.fromkeys(names, 0)
        self.level = level
        self.deepest = children.depth
        self._clock = clock
        self._started = clock()

    def elapsed(self) -> float:
        """Seconds that count for ``wall``."""
        return self.used.get("wall", 0) + self._clock() - self._started

    def table(self) -> Iterator[tuple[str, float, float]]:
        """Name, use and maximum of each limit that is set."""
        for name, maximum in self.maxima.items():
            yield name, self.used[name], maximum
        if self.limits.wall is not None:
            yield "wall", self.elapsed(), self.limits.wall

    def taken(self, name: str) -> float:
        """What is used or held of a counted limit."""
        return self.used[name] + self.held[name]


class Budget:
    """What a run may use and has used. Safe to use from several threads.

    Args:
        limits: Maxima; None is no limit.
        clock: Monotonic seconds; the wall limit counts from construction.
        used: What an earlier part of the same session used already.
        children: Maxima for what it may delegate. For the budgets it draws from there is ``open_child``.
    """

    def __init__(
        self,
        limits: Limits,
        *,
        clock: Callable[[], float],
        used: Mapping[str, float] | None = None,
        children: ChildLimits | None = None,
        above: tuple[_Account, ...] = (),
        lock: threading.Lock | None = None,
        place: Reservation | None = None,
    ) -> None:
        self.limits = limits
        self._clock = clock
        self._lock = lock or threading.Lock()
        own = _Account(limits, children or ChildLimits(), level=len(above), used=used or {}, clock=clock)
        self._accounts = (own, *above)
        self._place = place
        self._noticed: set[tuple[int, str]] = set()

    # --- looking --------------------------------------------------------------------------------

    def used(self, name: str) -> float:
        """What is used of one limit, the elapsed seconds for ``wall``."""
        own = self._accounts[0]
        return own.elapsed() if name == "wall" else own.used[name]

    def states(self) -> list[LimitState]:
        """Every counted limit of its own and ``wall``, as far as they are set, with what is used of them."""
        return [LimitState(*row) for row in self._accounts[0].table()]

    def wall_left(self) -> float | None:
        """Seconds until the wall limit of this budget or one above, None without."""
        left = [each.limits.wall - each.elapsed() for each in self._accounts if each.limits.wall is not None]
        return min(left, default=None)

    def room(self, name: str) -> float | None:
        """What is left of a counted limit here and above, without what calls under way hold; None without a limit."""
        left = [each.maxima[name] - each.taken(name) for each in self._accounts if name in each.maxima]
        return min(left, default=None)

    def over(self, *names: str) -> LimitState | None:
        """The first limit, of ``names`` if there are any, that is reached here or above."""
        for account in self._accounts:
            for name, used, maximum in account.table():
                over = used >= maximum if name in _TIMES else used > maximum
                if over and (not names or name in names):
                    return LimitState(name, used, maximum)
        return None

    def check(self) -> None:
        """Check limits that grow by themselves or were overrun by what was counted.

        Raises:
            LimitExceeded: The first limit that is over.
        """
        state = self.over()
        if state is not None:
            raise LimitExceeded(state)

    def notices(self, reserved: Mapping[str, float]) -> list[LimitState]:
        """Limits, here and above, whose end the model should know of; each is given once.

        Those of which 90 % are used once what is ``reserved`` for the next request is, and those
        that a second request of that size would pass.
        """
        new = []
        for account in self._accounts:
            for name, used, maximum in account.table():
                key, asked = (account.level, name), reserved.get(name, 0)
                near = used + asked >= NOTICE_SHARE * maximum or used + 2 * asked > maximum
                if near and name not in _CHILDREN and key not in self._noticed:
                    self._noticed.add(key)
                    new.append(LimitState(name, used, maximum))
        return new

    # --- using ----------------------------------------------------------------------------------

    def require(self, needed: Mapping[str, float]) -> None:
        """Check that it would fit, here and above, without holding it: what counts is a later ``reserve``.

        Raises:
            LimitExceeded: It does not fit.
        """
        with self._lock:
            self._fit(needed)

    def reserve(
        self,
        fixed: Mapping[str, float],
        each: Mapping[str, float] | None = None,
        *,
        least: float = 0,
        most: float = 0,
    ) -> Reservation:
        """Hold what a call may take, here and above, all of it or nothing.

        Args:
            fixed: What the call takes in any case.
            each: What every unit takes besides, of a call whose size may be chosen.
            least: Fewest units the call makes sense with.
            most: Units it would like. It gets as many of them as there is room for.

        Raises:
            LimitExceeded: Not even ``fixed`` and ``least`` units fit.
        """
        held, granted = dict(fixed), most
        with self._lock:
            self._fit(_sum(fixed, each, least) if each and least else fixed)
            if each:
                for account in self._accounts:
                    for name, maximum in account.maxima.items():
                        price = each.get(name, 0)
                        if price > 0:
                            room = maximum - account.taken(name) - fixed.get(name, 0)
                            granted = min(granted, max(least, room / price))
                held = _sum(fixed, each, granted)
            for account in self._accounts:
                for name, value in held.items():
                    account.held[name] += value
        return Reservation(self, held, granted)

    def settle(self, held: Mapping[str, float], used: Mapping[str, float]) -> None:
        """Give back what was held and count what was used, here and above, in one."""
        with self._lock:
            for account in self._accounts:
                for name, value in held.items():
                    account.held[name] -= value
                for name, value in used.items():
                    account.used[name] += value

    def take(self, **used: float) -> None:
        """Use something at once, all of it or nothing.

        Raises:
            LimitExceeded: It does not fit.
        """
        self.reserve(used).settle(used)

    def charge(self, **used: float) -> None:
        """Count what was used without asking. Never refuses."""
        self.settle({}, used)

    def hold_time(self, most: float, sharers: int) -> Reservation:
        """Hold seconds for a tool call: at most ``most``, and its share of what is left of ``tool_time``.

        Args:
            most: Seconds one call may take.
            sharers: Calls that run at the same time, this one included.
        """
        room = self.room("tool_time")
        share = most if room is None else min(most, max(0.0, room) / sharers)
        return self.reserve({}, {"tool_time": 1.0}, most=share)

    def _fit(self, needed: Mapping[str, float]) -> None:
        """Refuse what does not fit. Under the lock."""
        for account in self._accounts:
            for name, maximum in account.maxima.items():
                value = needed.get(name, 0)
                if value > 0 and account.taken(name) + value > maximum:
                    shown = value if limit_code(name) is ErrorCode.BUDGET_EXHAUSTED else None
                    raise LimitExceeded(LimitState(name, account.taken(name), maximum, shown))

    # --- children -------------------------------------------------------------------------------

    def open_child(self, limits: Limits, *, children: ChildLimits | None = None) -> Budget:
        """A budget that draws from this one and all above it; to be closed when the child is done.

        Args:
            limits: The child's own maxima. Wider ones than its parents' are of no use to it.
            children: What the child may delegate itself.

        Raises:
            LimitExceeded: ``depth``, ``children`` or ``parallel`` is reached, here or above.
        """
        level = len(self._accounts)
        for account in self._accounts:
            if account.deepest is not None and level - account.level > account.deepest:
                raise LimitExceeded(LimitState("depth", level - account.level - 1, account.deepest))
        place = self.reserve({"children": 1, "parallel": 1})
        return Budget(limits, clock=self._clock, children=children, above=self._accounts, lock=self._lock, place=place)

    def close(self) -> None:
        """The child is done: it counts as one of its parents' children, and another may run in its place."""
        place, self._place = self._place, None
        if place is not None:
            place.settle({"children": 1})

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
