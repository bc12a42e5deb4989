"""The layers of compaction over a history in memory: what is cut, what a summary replaces, what always stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.agent.budget import LimitExceeded, LimitState
from runner.agent.occupancy import Occupancy
from runner.agent.settings import CompactionSpec
from runner.compaction.policy import MARGIN, CompactionHook
from runner.compaction.prune import Cut, cut_text, fewest, first_line
from runner.compaction.summary import cut_index, older_part, opening_length
from runner.errors import ErrorCode, ProviderError
from runner.messages import text_of
from runner.record import replace
from runner.session import events as ev
from runner.session.projection import Projection, derive_messages, message_of
from runner.session.tokens import cautious, estimate_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.messages import Message, Usage

HEADER: Any = {"config": {}, "system": "s" * 400, "tools": []}
WINDOW = 10_000
SPEC = CompactionSpec(prune_over=2_000, prune_head=800, prune_tail=200, summary_max_tokens=500)


class History:
    """A session of a loop that only holds its history, and a model that says what it is told to."""

    def __init__(self, window: int = WINDOW) -> None:
        self.turn, self.step, self.first_of_turn = 1, 0, False
        self.window = window
        self.projection = Projection()
        self.events: list[Any] = []
        self.asked: list[Sequence[Message]] = []
        self.answers: list[Any] = []
        self.header = HEADER
        self._occupancy = Occupancy()

    def append(self, event: ev.Event) -> ev.Event:
        event.seq = len(self.events)
        self.events.append(event)
        self.projection.apply(event)
        return event

    def occupancy(self) -> int:
        return self._occupancy.of(self.header, self.projection)

    def anchor(self, usage: Usage) -> None:
        self._occupancy.anchor(usage, self.header, self.projection)

    def summarise(
        self, messages: Sequence[Message], *, max_tokens: int, model: str | None
    ) -> tuple[list[Any], Usage | None]:
        assert (max_tokens, model) == (500, None)
        self.asked.append(list(messages))
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return ([{"type": "text", "text": answer}] if answer else []), {"inputTokens": 7, "outputTokens": 3}

    # --- what enters --------------------------------------------------------------------------

    def user(self, text: str, kind: str = "user", **source: Any) -> None:
        message = {"kind": kind, **source}
        self.append(
            ev.UserMessage(
                content=[{"type": "text", "text": text}], source=message, role="user", id=f"u{len(self.events)}"
            )
        )

    def work(self, *results: str, text: str = "") -> None:
        """A step: an answer with calls and their results."""
        self.step += 1
        ids = [f"c{self.step}_{number}" for number in range(len(results))]
        content: list[Any] = [{"type": "text", "text": text}] if text else []
        content += [{"type": "tool-call", "id": each, "name": "t", "arguments": "{}"} for each in ids]
        message: Any = {"role": "assistant", "content": content, "source": {"kind": "model"}, "id": f"a{self.step}"}
        self.append(ev.AssistantMessage(turn=self.turn, step=self.step, message=message, source_event_seqs=[]))
        for each, result in zip(ids, results, strict=True):
            block = {
                "type": "tool-result",
                "toolCallId": each,
                "content": [{"type": "text", "text": result}],
                "isError": False,
            }
            answer: Any = {
                "role": "user",
                "content": [block],
                "source": {"kind": "tool", "callId": each},
                "id": f"r{each}",
            }
            call = len(self.events) - 1
            self.append(ev.ToolResult(turn=self.turn, step=self.step, message=answer, source_event_seqs=[call]))

    def begin(self) -> None:
        """The opening of every session."""
        self.user("where it works", "plugin", plugin="runtime")
        self.user("The word is Paradiesvogel.")

    # --- what came of it ----------------------------------------------------------------------

    def compact(self, *, overflow: bool = False, spec: CompactionSpec = SPEC, compact_at: tuple[int, ...] = ()) -> bool:
        self.step += 1
        hook = CompactionHook(
            spec, provider="p", model="m", compact_at=compact_at, new_id=lambda: f"n{len(self.events)}"
        )
        changed = hook.before_request(self, overflow=overflow)
        assert derive_messages(self.events) == self.projection.messages
        return changed

    def pruned_steps(self) -> list[int]:
        return [
            event.step
            for event in self.events
            if isinstance(event, ev.ToolResult) and isinstance(event.surface_op, dict)
        ]

    def types(self) -> list[str]:
        return [event.TYPE for event in self.events if event.TYPE.startswith("compaction/")]

    def text(self) -> str:
        blocks: list[Any] = [block for message in self.projection.messages for block in message["content"]]
        return "\n".join(text_of(block.get("content") or [block]) for block in blocks)


def filled(*sizes: int, window: int = WINDOW) -> History:
    """A session with a step for each size, whose one result has so many characters."""
    history = History(window)
    history.begin()
    for number, size in enumerate(sizes):
        history.work(f"first line {number}\n" + f"{number % 10}" * (size - 13))
    return history


# --- pruning -----------------------------------------------------------------------------------


def test_nothing_happens_below_the_threshold() -> None:
    """However long the results are."""
    history = filled(9_000, 9_000, 9_000)

    assert history.occupancy() < int(0.8 * WINDOW)
    assert not history.compact()


def test_pruning_makes_room_in_the_fewest_cuts() -> None:
    """One large result rather than several small ones before it; nothing is summarised."""
    history = filled(3_000, 3_000, 15_000, 3_000, 4_000, 4_000)

    assert history.compact()

    assert history.pruned_steps() == [3]
    assert history.occupancy() < int(0.8 * WINDOW)
    assert history.types() == ["compaction/prune"]


def test_results_of_the_last_two_steps_are_never_pruned() -> None:
    """Though they are the largest."""
    history = filled(6_000, 3_000, 12_000, 12_000)
    history.answers = ["short"]

    history.compact()

    assert not {3, 4} & set(history.pruned_steps())
    assert "2" * 11_000 in history.text()


def test_where_pruning_is_not_enough_nothing_is_pruned_and_the_prefix_stays_for_the_summary() -> None:
    """The summary request begins with the messages as they were sent before."""
    history = filled(2_100, 2_100, 1_900, 1_900, 13_000, 13_000)
    before = list(history.projection.messages)
    history.answers = ["short"]

    assert history.compact()

    assert history.types() == ["compaction/start", "compaction/summary", "compaction/end"]
    [asked] = history.asked
    assert list(asked[:-1]) == before[: len(asked) - 1]


def test_more_is_freed_than_must_be_so_that_the_next_step_finds_room() -> None:
    """About what a few steps add."""
    history = filled(*[6_000] * 6)
    while history.occupancy() < int(0.8 * WINDOW):
        history.work("x" * 100)
    history.compact()

    assert history.occupancy() < int(0.8 * WINDOW) - WINDOW // MARGIN


@pytest.mark.parametrize(("over", "pruned"), [(2_999, 1), (3_000, 0)])
def test_a_result_is_old_and_long_or_it_is_left_alone(over: int, pruned: int) -> None:
    """``prune_over`` is in code points, and the result must be over it."""
    history = filled(3_000, 15_000, 15_000)
    history.answers = ["short"]

    history.compact(spec=replace(SPEC, prune_over=over))

    assert len(history.pruned_steps()) == pruned


@given(st.lists(st.integers(1, 1_000), max_size=12), st.integers(1, 6_000))
def test_of_all_sets_of_cuts_that_free_enough_one_of_the_fewest_is_taken(sizes: list[int], needed: int) -> None:
    """All of them if none is enough; never one that is not needed."""
    cuts = [Cut(ev.ToolResult(turn=1, step=1, message={}, seq=n), {}, size) for n, size in enumerate(sizes)]  # type: ignore[typeddict-item]  # only sizes count

    taken = [each.saved for each in fewest(cuts, needed)]

    largest = sorted(sizes, reverse=True)
    enough = next((n for n in range(len(sizes) + 1) if sum(largest[:n]) >= needed), len(sizes))
    assert len(taken) == enough
    if sum(sizes) >= needed:
        assert sum(taken) >= needed
        assert sum(taken) - min(taken) < needed


@given(st.text(max_size=300), st.integers(0, 100), st.integers(0, 100))
def test_a_cut_text_keeps_its_ends_and_says_how_much_is_gone(text: str, head: int, tail: int) -> None:
    """In code points; a text that is short enough stays."""
    cut = cut_text(text, head, tail)

    if len(text) <= head + tail:
        assert cut == text
    else:
        assert cut.startswith(text[:head])
        assert cut.endswith(text[len(text) - tail :])
        assert f"[{len(text) - head - tail} characters pruned" in cut


def test_a_first_line_is_bounded_too() -> None:
    """Some results are one line."""
    assert first_line("one\ntwo\nthree") == "one\n[9 characters pruned to save context]"
    assert len(first_line("x" * 10_000)) < 260
    assert len(first_line("x" * 10_000 + "\ny")) < 260
    assert first_line("short") == "short"


# --- the summary -------------------------------------------------------------------------------


def test_a_summary_keeps_the_opening_and_the_tail_verbatim() -> None:
    """The first prompt, and about ``keep`` of the window."""
    history = filled(*[1_900] * 16)
    before = list(history.projection.messages)
    history.answers = ["what was done"]

    assert history.compact()

    after = history.projection.messages
    assert after[:2] == before[:2]
    assert "what was done" in text_of(after[2]["content"])
    tail = after[3:]
    assert tail == before[len(before) - len(tail) :]
    size = sum(estimate_message(message, cautious) for message in tail)
    assert 0.1 * WINDOW < size <= 0.16 * WINDOW


@pytest.mark.parametrize("keep", [0.05, 0.16, 0.4])
def test_how_much_stays_is_what_keep_says(keep: float) -> None:
    """Of small messages, so that it can be met closely."""
    history = filled(*[400] * 70)
    history.answers = ["short"]
    history.compact(spec=replace(SPEC, keep=keep))

    size = sum(estimate_message(message, cautious) for message in history.projection.messages[3:])
    assert keep * WINDOW - 150 < size <= keep * WINDOW


@pytest.mark.parametrize(("share", "compacted"), [(0.6, True), (0.9, False)])
def test_when_a_summary_is_made_is_what_summary_at_says(share: float, compacted: bool) -> None:
    """Both ways, with the same history."""
    history = filled(*[1_900] * 14)
    assert 0.6 * WINDOW < history.occupancy() < 0.9 * WINDOW
    history.answers = ["short"]

    assert history.compact(spec=replace(SPEC, summary_at=share)) is compacted


def test_what_has_just_come_stays_even_if_it_is_larger_than_the_tail() -> None:
    """The last step's results would be lost before the model saw them."""
    history = filled(*[1_900] * 12)
    history.work("a" * 9_000, "b" * 900)
    history.user("a limit is near", "plugin", plugin="limits")
    history.answers = ["short"]

    assert history.compact()

    assert "a" * 9_000 in history.text()
    assert "a limit is near" in history.text()


def test_a_second_summary_replaces_the_first() -> None:
    """The history does not fill with summaries, and the first prompt stays where it is."""
    history = filled(*[1_900] * 16)
    history.answers = ["one summary", "another summary"]
    history.compact()
    for _ in range(14):
        history.work("z" * 1_900)

    history.compact()

    assert "one summary" not in history.text()
    assert history.text().count("another summary") == 1
    assert "Paradiesvogel" in history.text()


def test_a_run_time_state_that_a_summary_swallows_is_told_again() -> None:
    """It is how the model knows its mode and limits, also behind a second summary."""
    history = filled(*[1_900] * 5)
    history.user("now it works elsewhere", "plugin", plugin="runtime")
    history.answers = ["one", "two"]
    for _ in range(2):
        for _ in range(14):
            history.work("z" * 1_900)
        history.compact()
        assert history.text().count("now it works elsewhere") == 1
    assert history.text().count("where it works") == 1


@pytest.mark.parametrize(
    ("answers", "folded"),
    [
        (["", "good"], True),  # a reply with calls gives nothing
        (["x" * 60_000, "good"], True),
        (["", ""], False),
        (["x" * 60_000, "x" * 60_000], False),
        ([ProviderError("refused", code=ErrorCode.PROVIDER_QUOTA)], False),
    ],
)
def test_a_summary_is_tried_twice_and_then_the_oldest_results_go(answers: list[Any], folded: bool) -> None:
    """What a refused try cost stands in ``compaction/end``; without a summary results keep their first line."""
    history = filled(*[1_900] * 17)
    history.answers = list(answers)

    assert history.compact()

    end = next(event for event in history.events if isinstance(event, ev.CompactionEnd))
    assert (end.error is None) is folded
    assert len(history.asked) == len(answers)
    refused = sum(isinstance(answer, str) for answer in answers) - folded
    assert (0 if end.refused_usage is None else end.refused_usage["outputTokens"]) == 3 * refused
    if folded:
        assert history.pruned_steps() == []
    else:
        steps = history.pruned_steps()
        assert steps == list(range(1, len(steps) + 1))
        assert history.occupancy() < int(0.8 * WINDOW)
        assert "first line 0\n[" in history.text()


def test_a_limit_in_the_middle_of_a_compaction_leaves_no_open_one() -> None:
    """Its end is written before the run stops."""
    history = filled(*[1_900] * 17)
    history.answers = [LimitExceeded(LimitState("tokens", 1, 1))]

    with pytest.raises(LimitExceeded):
        history.compact()

    assert history.types() == ["compaction/start", "compaction/end"]
    assert history.events[-1].error["code"] == "CONTEXT_EXHAUSTED"


def test_a_turn_that_is_to_be_compacted_is_and_others_are_not() -> None:
    """``compact_at`` counts at the first step of a turn only."""
    for turn, first, expected in ((2, True, True), (2, False, False), (3, True, False)):
        history = filled(900, 900)
        history.work(text="Read.")
        history.turn, history.first_of_turn = turn, first
        history.user("And now?")
        history.answers = ["short"]

        assert history.compact(compact_at=(2, 5), spec=replace(SPEC, keep=0.001)) is expected
        assert "And now?" in history.text()


def test_nothing_to_compact_writes_nothing() -> None:
    """An opening alone, or an opening and what stays."""
    for history in (filled(), filled(100)):
        history.first_of_turn = True
        before = len(history.events)

        assert not history.compact(compact_at=(1,))
        assert len(history.events) == before


_STEP = st.one_of(
    st.tuples(st.just("user"), st.integers(1, 3_000)),
    st.tuples(st.just("work"), st.lists(st.integers(1, 4_000), max_size=4)),
)


def _build(steps: Sequence[tuple[str, Any]]) -> History:
    history = History()
    history.begin()
    for kind, size in steps:
        if kind == "user":
            history.user("u" * size)
        else:
            history.work(*("r" * each for each in size), text="t")
    return history


@settings(max_examples=60)
@given(st.lists(_STEP, max_size=25), st.floats(0.0, 0.5))
def test_a_cut_never_parts_a_call_from_its_result(steps: list[tuple[str, Any]], keep: float) -> None:
    """Of any history: the opening stays, both parts are whole, and the tail is no longer than it may be."""
    nodes = _build(steps).projection.nodes
    start = opening_length(nodes)

    cut = cut_index(nodes, start=start, keep_tokens=int(keep * WINDOW))

    assert start == 2 <= cut <= len(nodes)

    def ids(part: Sequence[Any], kind: str, key: str) -> set[str]:
        messages = [message for node in part if (message := message_of(node))]
        return {block[key] for message in messages for block in message["content"] if block["type"] == kind}  # type: ignore[literal-required]  # by kind

    for part in (nodes[:cut], nodes[cut:]):
        assert ids(part, "tool-call", "id") == ids(part, "tool-result", "toolCallId")
    older = older_part(nodes, keep_tokens=int(keep * WINDOW))
    assert older is None or older == (start, cut)


@settings(max_examples=60)
@given(st.lists(_STEP, min_size=1, max_size=40), st.sampled_from(["short", "", "x" * 50_000]), st.booleans())
def test_a_compaction_never_makes_the_history_longer_and_keeps_the_first_prompt(
    steps: list[tuple[str, Any]], answer: str, overflow: bool
) -> None:
    """Whatever the model says; and what is said to have changed has."""
    history = _build(steps)
    history.answers = [answer] * 2
    before, messages = history.occupancy(), list(history.projection.messages)

    changed = history.compact(overflow=overflow)

    assert history.occupancy() <= before
    assert changed is (history.projection.messages != messages)
    assert history.projection.messages[:2] == messages[:2]
    assert history.types().count("compaction/start") == history.types().count("compaction/end")


# --- occupancy ---------------------------------------------------------------------------------


def test_only_what_changed_since_the_last_count_is_estimated() -> None:
    """More and less: what was cut is taken off."""
    history = filled(8_000, 400, 400)
    history.anchor({"inputTokens": 5_000, "outputTokens": 100, "cacheReadTokens": 900, "cacheWriteTokens": 50})
    assert history.occupancy() == 6_050

    history.user("x" * 400)
    assert history.occupancy() == 6_050 + 100 + 8

    history.header = {**HEADER, "system": "s" * 800}
    assert history.occupancy() == 6_050 + 108 + 100

    history.header = HEADER
    history.compact(overflow=True, spec=replace(SPEC, keep=0.9))
    assert history.occupancy() < 6_158 - 1_500


def test_an_estimate_of_ours_is_no_count() -> None:
    """It would make CJK text look a quarter of its size for ever."""
    history = History()
    history.begin()
    history.work("数" * 1_000)
    estimated = history.occupancy()
    assert estimated > 1_100

    history.anchor({"inputTokens": 300, "outputTokens": 5, "estimated": True})
    assert history.occupancy() == estimated

    history.anchor({"inputTokens": 300, "outputTokens": 5})
    assert history.occupancy() == 305


def test_a_step_costs_what_is_new_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages are estimated once each, however often the occupancy is asked for."""
    import runner.session.tokens as tokens_module

    count = 0
    real: Callable[..., int] = tokens_module.estimate_message

    def counting(*arguments: Any) -> int:
        nonlocal count
        count += 1
        return real(*arguments)

    monkeypatch.setattr(tokens_module, "estimate_message", counting)
    history = History()
    history.begin()
    for _ in range(50):
        history.work("x")
        history.occupancy()
        history.occupancy()

    assert count == 102
