"""Whatever is reserved and settled in whatever order, no limit of the tree is passed by what was reserved."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from runner.agent.budget import Budget, LimitExceeded
from runner.agent.settings import ChildLimits, Limits
from runner.record import fields

if TYPE_CHECKING:
    from runner.agent.budget import Reservation

NAMES = ("tokens", "output_bytes", "steps")
NONE: dict[str, Any] = {each.name: None for each in fields(Limits) if each.name != "tool"}

_limits = st.fixed_dictionaries({}, optional={name: st.integers(min_value=0, max_value=40) for name in NAMES})
_amounts = st.fixed_dictionaries({}, optional={name: st.integers(min_value=0, max_value=25) for name in NAMES})
_few = st.none() | st.integers(min_value=0, max_value=4)
_children = st.builds(ChildLimits, children=_few, parallel=_few, depth=_few)


class Node:
    """A budget beside a plain account of what should stand in it."""

    def __init__(self, budget: Budget, limits: dict[str, int], children: ChildLimits, parent: Node | None) -> None:
        self.budget = budget
        self.limits = limits
        self.children = children
        self.parent = parent
        self.depth: int = 0 if parent is None else parent.depth + 1
        self.used = dict.fromkeys(NAMES, 0)
        self.held = dict.fromkeys(NAMES, 0)
        self.born = self.alive = 0
        self.open = True

    def chain(self) -> list[Node]:
        return [self, *(self.parent.chain() if self.parent else [])]

    def fits(self, amounts: dict[str, int]) -> bool:
        return all(
            value == 0 or name not in node.limits or node.used[name] + node.held[name] + value <= node.limits[name]
            for node in self.chain()
            for name, value in amounts.items()
        )


class Tree(RuleBasedStateMachine):
    """Random trees, reservations, use and children, held against the plain account."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[Node] = []
        self.holding: list[tuple[Node, dict[str, int], Reservation]] = []

    @initialize(limits=_limits, children=_children)
    def root(self, limits: dict[str, int], children: ChildLimits) -> None:
        budget = Budget(Limits(**{**NONE, **limits}), clock=lambda: 0.0, children=children)
        self.nodes.append(Node(budget, limits, children, None))

    def pick(self, number: int) -> Node:
        return self.nodes[number % len(self.nodes)]

    @rule(number=st.integers(0, 20), limits=_limits, children=_children)
    def open_child(self, number: int, limits: dict[str, int], children: ChildLimits) -> None:
        parent = self.pick(number)
        allowed = all(
            (node.children.depth is None or parent.depth + 1 - node.depth <= node.children.depth)
            and (node.children.children is None or node.born < node.children.children)
            and (node.children.parallel is None or node.alive < node.children.parallel)
            for node in parent.chain()
        )
        try:
            budget = parent.budget.open_child(Limits(**{**NONE, **limits}), children=children)
        except LimitExceeded:
            assert not allowed
            return
        assert allowed
        for node in parent.chain():
            node.born += 1
            node.alive += 1
        self.nodes.append(Node(budget, limits, children, parent))

    @rule(number=st.integers(0, 20))
    def close_child(self, number: int) -> None:
        node = self.pick(number)
        node.budget.close()
        if node.open and node.parent is not None:
            for above in node.parent.chain():
                above.alive -= 1
        node.open = False

    @rule(number=st.integers(0, 20), amounts=_amounts)
    def reserve(self, number: int, amounts: dict[str, int]) -> None:
        node = self.pick(number)
        try:
            held = node.budget.reserve(amounts)
        except LimitExceeded:
            assert not node.fits(amounts)
            return
        assert node.fits(amounts)
        for above in node.chain():
            for name, value in amounts.items():
                above.held[name] += value
        self.holding.append((node, amounts, held))

    @rule(number=st.integers(0, 20), fixed=st.integers(0, 10), least=st.integers(0, 5), more=st.integers(0, 30))
    def reserve_what_there_is(self, number: int, fixed: int, least: int, more: int) -> None:
        node = self.pick(number)
        try:
            held = node.budget.reserve({"tokens": fixed}, {"tokens": 1}, least=least, most=least + more)
        except LimitExceeded:
            assert not node.fits({"tokens": fixed + least})
            return
        granted = int(held.granted)
        assert least <= granted <= least + more
        assert granted == least + more or not node.fits({"tokens": fixed + granted + 1})
        for above in node.chain():
            above.held["tokens"] += fixed + granted
        self.holding.append((node, {"tokens": fixed + granted}, held))

    @rule(number=st.integers(0, 20), share=st.floats(0, 1))
    def settle(self, number: int, share: float) -> None:
        if not self.holding:
            return
        node, amounts, held = self.holding.pop(number % len(self.holding))
        used = {name: int(value * share) for name, value in amounts.items()}
        held.settle(used)
        for above in node.chain():
            for name, value in amounts.items():
                above.held[name] -= value
                above.used[name] += used[name]

    @invariant()
    def holds_what_the_account_says(self) -> None:
        for node in self.nodes:
            for name in NAMES:
                assert node.budget.used(name) == node.used[name]
                assert node.used[name] + node.held[name] <= node.limits.get(name, 10**9)
                left = [
                    each.limits[name] - each.used[name] - each.held[name]
                    for each in node.chain()
                    if name in each.limits
                ]
                assert node.budget.room(name) == min(left, default=None)
            assert node.budget.over() is None


Tree.TestCase.settings = settings(max_examples=80, stateful_step_count=25, deadline=None)
TestTree = Tree.TestCase
