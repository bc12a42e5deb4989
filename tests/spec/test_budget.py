"""Limits are one tree: what is reserved fits, what is used counts above, and the last of something goes to one."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest

from runner.agent.budget import COUNTED, Budget, LimitExceeded, LimitState, amounts_of
from runner.agent.settings import ChildLimits, Limits
from runner.errors import ErrorCode
from runner.record import fields

if TYPE_CHECKING:
    from collections.abc import Callable

NONE: dict[str, Any] = {each.name: None for each in fields(Limits) if each.name != "tool"}


class Clock:
    """Seconds that a test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def budget(clock: Clock | None = None, *, children: ChildLimits | None = None, **limits: float) -> Budget:
    """A budget with these limits and no others."""
    return Budget(Limits(**{**NONE, **limits}), clock=clock or Clock(), children=children)


def refusal(action: Callable[[], object]) -> LimitState:
    """The limit that refuses an action."""
    with pytest.raises(LimitExceeded) as caught:
        action()
    return caught.value.state


@pytest.mark.parametrize("name", COUNTED)
def test_what_is_reserved_is_not_there_for_others_until_it_is_settled(name: str) -> None:
    """Held in full, counted as it was used, the rest given back; the limit itself may be reached but not passed."""
    tree = Budget(Limits(**{**NONE, name: 10}), clock=Clock())

    held = tree.reserve({name: 8})
    state = refusal(lambda: tree.reserve({name: 3}))
    room = tree.room(name)
    held.settle({name: 5})
    tree.reserve({name: 5}).release()
    tree.take(**{name: 5})

    assert (state.name, state.used, state.max) == (name, 8, 10)
    assert (room, tree.room(name), tree.used(name)) == (2, 0, 10)
    assert tree.over() is None or name == "tool_time"


@pytest.mark.parametrize(
    ("name", "code", "kind"),
    [
        *((name, ErrorCode.BUDGET_EXHAUSTED, "budget") for name in ("cost", "tokens", "input_tokens", "output_tokens")),
        *((name, ErrorCode.LIMIT_REACHED, "limit") for name in ("steps", "turns", "tool_time", "output_bytes")),
        *((name, ErrorCode.LIMIT_REACHED, "limit") for name in ("wall", "idle", "children", "depth", "parallel")),
    ],
)
def test_money_and_tokens_are_a_budget_and_the_rest_are_limits(name: str, code: ErrorCode, kind: str) -> None:
    """The code a run ends with follows from the name of the limit."""
    assert (LimitState(name, 1, 1).code, LimitState(name, 1, 1).kind) == (code, kind)


def test_a_refused_reservation_leaves_nothing_behind() -> None:
    """All of it or nothing: what would have fitted is not held either."""
    tree = budget(tokens=100, cost=1)

    state = refusal(lambda: tree.reserve({"tokens": 60, "cost": 2}))

    assert (state.name, state.needed) == ("cost", 2)
    assert (tree.room("tokens"), tree.room("cost")) == (100, 1)
    assert str(LimitExceeded(state)) == "limit cost: 0 of 1"


def test_a_reservation_is_given_back_once() -> None:
    """Whoever leaves its block gives back what was not settled; what is given back twice is given back once."""
    tree = budget(tokens=100)

    with pytest.raises(ZeroDivisionError), tree.reserve({"tokens": 40}):
        raise ZeroDivisionError
    with tree.reserve({"tokens": 40}) as held:
        held.settle({"tokens": 30})
    held.release()

    assert (tree.used("tokens"), tree.room("tokens")) == (30, 70)


def test_a_call_whose_size_may_be_chosen_gets_what_there_is_room_for() -> None:
    """The scarcest limit decides, here or above; what it gets is held in every one."""
    tree = budget(tokens=1_000, cost=10)
    child = tree.open_child(Limits(**{**NONE, "output_tokens": 700}))
    each = {"tokens": 1, "output_tokens": 1, "cost": 0.02}

    first = child.reserve({"tokens": 300, "cost": 1}, each, least=100, most=5_000)
    second = refusal(lambda: tree.reserve({"tokens": 300, "cost": 1}, each, least=100, most=5_000))
    first.settle({"tokens": 310, "output_tokens": 10, "cost": 1.2})
    third = tree.reserve({"tokens": 300, "cost": 1}, each, least=100, most=5_000)

    assert first.granted == pytest.approx(450)  # (10 - 1) / 0.02
    assert second.name == "cost"
    assert second.used == pytest.approx(10)
    assert third.granted == pytest.approx(390)  # 1,000 - 310 - 300
    assert tree.room("tokens") == pytest.approx(0)


def test_without_limits_a_call_gets_all_it_would_like() -> None:
    """And what was used is known nevertheless."""
    tree = budget()

    held = tree.reserve({"tokens": 5}, {"tokens": 1}, least=1, most=32_000)
    held.settle({"tokens": 7})

    assert (held.granted, tree.used("tokens"), tree.room("tokens"), tree.states()) == (32_000, 7, None, [])


def test_use_that_no_reservation_foresaw_counts_and_ends_the_run() -> None:
    """A provider may use more than it was asked for; it counts here and above."""
    tree = budget(tokens=100)
    child = tree.open_child(Limits(**NONE))

    child.reserve({"tokens": 50}).settle({"tokens": 101})
    child.charge(output_bytes=3)

    assert (tree.used("tokens"), tree.used("output_bytes")) == (101, 3)
    assert refusal(child.check) == LimitState("tokens", 101, 100)
    assert refusal(lambda: child.require({"tokens": 1})).needed == 1
    child.require({"tokens": 0})


def test_limits_on_time_are_reached_when_nothing_is_left() -> None:
    """The others when more is used than there is: what fits exactly is allowed."""
    clock = Clock()
    tree = budget(clock, wall=60, tool_time=5, output_bytes=10)

    tree.charge(tool_time=4.9, output_bytes=10)
    tree.check()
    tree.charge(tool_time=0.1)

    assert refusal(tree.check) == LimitState("tool_time", 5, 5)
    assert tree.over("output_bytes", "wall") is None
    clock.now += 60
    assert tree.over("wall") == LimitState("wall", 60, 60)
    assert tree.wall_left() == 0


def test_the_wall_of_a_child_counts_from_its_own_beginning_and_the_parents_holds_too() -> None:
    """What is left is the least of them."""
    clock = Clock()
    tree = budget(clock, wall=100)
    clock.now += 70
    child = tree.open_child(Limits(**{**NONE, "wall": 50}))

    assert (child.used("wall"), child.wall_left()) == (0, 30)
    assert budget(clock).wall_left() is None


def test_what_an_earlier_part_of_the_session_used_counts() -> None:
    """Seconds too."""
    clock = Clock()
    used = {"steps": 3, "wall": 55.0}
    tree = Budget(Limits(**{**NONE, "steps": 4, "wall": 60}), clock=clock, used=used)

    tree.take(steps=1)

    assert refusal(lambda: tree.take(steps=1)).name == "steps"
    assert tree.wall_left() == 5


def test_the_model_is_told_once_at_90_percent_or_when_a_second_request_would_not_fit() -> None:
    """Of limits above it too, each for itself."""
    tree = budget(tokens=1_000, steps=10)
    child = tree.open_child(Limits(**{**NONE, "tokens": 600}))

    child.charge(tokens=200, steps=8)
    early = child.notices({"tokens": 150})
    second = child.notices({"tokens": 250})
    child.charge(tokens=300, steps=1)
    late = child.notices({"tokens": 260})
    again = child.notices({"tokens": 260})

    assert early == []
    assert second == [LimitState("tokens", 200, 600)]
    assert late == [LimitState("steps", 9, 10), LimitState("tokens", 500, 1_000)]
    assert again == []
    assert [state.name for state in tree.notices({})] == ["steps"]


def test_calls_share_the_time_that_is_left_for_all_of_them() -> None:
    """Ten at once get a part each, so that all of them together cannot pass the limit; one alone gets what there is."""
    tree = budget(tool_time=100)

    alone = tree.hold_time(60, 1)
    alone.settle({"tool_time": 20})
    shares = [tree.hold_time(60, 10) for _ in range(10)]
    granted = [share.granted for share in shares]

    assert alone.granted == 60
    assert granted[0] == 8
    assert min(granted) > 0
    assert sum(granted) <= 80
    for share in shares:
        share.settle({"tool_time": 1})
    assert tree.hold_time(60, 1).granted == 60
    assert budget().hold_time(60, 10).granted == 60


def test_a_call_when_no_time_is_left_holds_nothing() -> None:
    """Whether it may start is the question of ``over``."""
    tree = budget(tool_time=1)
    tree.charge(tool_time=3)

    assert tree.hold_time(60, 1).granted == 0


def test_children_are_limited_in_number_in_depth_and_at_the_same_time() -> None:
    """A closed child counts for ever as one of the number, and its place is free."""
    tree = budget(children=ChildLimits(children=3, parallel=2, depth=2))
    limits = Limits(**NONE)

    first, second = tree.open_child(limits), tree.open_child(limits)
    parallel = refusal(lambda: tree.open_child(limits))
    first.close()
    first.close()
    with second:
        grandchild = second.open_child(limits)
        depth = refusal(lambda: grandchild.open_child(limits))
        grandchild.close()
    number = refusal(lambda: tree.open_child(limits))

    assert parallel == LimitState("parallel", 2, 2)
    assert depth == LimitState("depth", 2, 2)
    assert number == LimitState("children", 3, 3)
    assert (tree.used("children"), second.used("children"), tree.used("parallel")) == (3, 1, 0)


def test_a_child_may_be_given_less_than_its_parents() -> None:
    """Its own limits on children hold below it, and those above go on holding."""
    tree = budget(children=ChildLimits(children=5, depth=3))
    child = tree.open_child(Limits(**NONE), children=ChildLimits(depth=0))

    assert refusal(lambda: child.open_child(Limits(**NONE))) == LimitState("depth", 0, 0)
    assert tree.used("children") == 0
    assert tree.room("children") == 4


def test_the_last_of_something_goes_to_one_child() -> None:
    """Two that reserve at the same time cannot both pass."""
    for _ in range(200):
        tree = budget(tokens=100)
        children = [tree.open_child(Limits(**NONE)) for _ in range(2)]
        start = threading.Barrier(2)
        passed: list[Budget] = []

        def reserve(child: Budget, start: threading.Barrier = start, passed: list[Budget] = passed) -> None:
            start.wait(10)
            try:
                child.reserve({"tokens": 60})
            except LimitExceeded:
                return
            passed.append(child)

        threads = [threading.Thread(target=reserve, args=[child]) for child in children]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

        assert len(passed) == 1
        assert tree.room("tokens") == 40


def test_no_update_of_parallel_children_is_lost() -> None:
    """Eight threads on two levels: everything that was used is counted above, and nothing stays held."""
    tree = budget(tokens=1_000_000, children=ChildLimits(parallel=8))
    below = tree.open_child(Limits(**NONE))
    worst = []

    def work(number: int) -> None:
        child = (below if number % 2 else tree).open_child(Limits(**NONE))
        for _ in range(500):
            with child.reserve({"tokens": 7}, {"tokens": 1}, least=1, most=3) as held:
                worst.append(tree.room("tokens") or 0)
                held.settle({"tokens": 3, "steps": 1})
        child.close()

    threads = [threading.Thread(target=work, args=[number]) for number in range(7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert (tree.used("tokens"), tree.used("steps")) == (7 * 500 * 3, 7 * 500)
    assert below.used("steps") == 3 * 500
    assert tree.room("tokens") == 1_000_000 - 7 * 500 * 3
    assert min(worst) >= 0


def test_what_a_response_takes_is_all_input_and_all_output() -> None:
    """Cached input is input; an unknown price counts nothing."""
    usage: Any = {"inputTokens": 10, "cacheReadTokens": 20, "cacheWriteTokens": 30, "outputTokens": 5}

    assert amounts_of(usage, None) == {"input_tokens": 60, "output_tokens": 5, "tokens": 65, "cost": 0.0}
    assert amounts_of({"inputTokens": 1, "outputTokens": 0}, 0.5)["cost"] == 0.5
