"""``usage.json``: every token once, unknown is null, sums equal the log."""

from __future__ import annotations

from typing import Any

import jsonschema_rs
import pytest

from runner.artifacts.schema import build_schemas
from runner.artifacts.usage import UsageFold, derive_usage
from runner.outcome import derive_outcome
from runner.providers.base import Prices
from runner.session import events as ev

PRICES = Prices(input=1.0, cache_read=0.1, cache_write=2.0, output=10.0)
APPEND = "append"


class Log:
    """Builds events with seqs and times, 100 ms apart."""

    def __init__(self) -> None:
        self.events: list[ev.Event] = []

    def add(self, event: ev.Event) -> ev.Event:
        """Append one event."""
        event.seq = len(self.events)
        event.time = 1_000 + 100 * event.seq
        self.events.append(event)
        return event

    def start(self, turn: int, step: int, *, sent: int = 1, purpose: str = "main") -> None:
        """A step begins and makes ``sent`` attempts."""
        self.add(ev.StepStart(turn=turn, step=step))
        for attempt in range(1, sent + 1):
            self.sent(turn, step, attempt, purpose)

    def sent(self, turn: int, step: int, attempt: int = 1, purpose: str = "main") -> None:
        """One HTTP attempt."""
        self.add(
            ev.RequestSent(
                turn=turn,
                step=step,
                attempt=attempt,
                purpose=purpose,
                provider="p",
                dialect="d",
                bytes=1,
                sha256="",
            )
        )

    def chunk(self, turn: int, step: int, usage: dict[str, Any]) -> None:
        """A usage chunk."""
        self.add(ev.AssistantChunk(turn=turn, step=step, chunk={"type": "usage", "usage": usage}))

    def answer(self, turn: int, step: int, usage: Any, text: str = "ok", model: str = "m", **more: Any) -> ev.Event:
        """The answer of one call."""
        message: Any = {
            "role": "assistant",
            "content": [{"type": "text", "text": text}],
            "source": {"kind": "model", "provider": "p", "model": model},
            "id": "a",
        }
        values: Any = {"source_event_seqs": [], **more}
        return self.add(ev.AssistantMessage(turn=turn, step=step, message=message, usage=usage, **values))

    def end(self, turn: int, step: int) -> None:
        """The step is over."""
        self.add(ev.StepEnd(turn=turn, step=step))

    def user(self, text: str, **more: Any) -> ev.Event:
        """A user message."""
        return self.add(
            ev.UserMessage(
                content=[{"type": "text", "text": text}], source={"kind": "user"}, role="user", id="u", **more
            )
        )

    def usage(self, **more: Any) -> dict[str, Any]:
        """The usage, checked against its schema."""
        usage = derive_usage(self.events, header={"id": "session-1"}, **more)
        jsonschema_rs.validator_for(build_schemas()["usage.schema.json"]).validate(usage)
        return usage


def tokens(input_: int, output: int, **more: Any) -> Any:
    """A usage as providers report it."""
    return {"inputTokens": input_, "outputTokens": output, **more}


def call(log: Log, name: str, code: str | None = None, **meta: Any) -> None:
    """One call and its result."""
    log.add(ev.ToolCall(turn=1, step=1, call_id="c", name=name, arguments="{}"))
    message: Any = {
        "role": "user",
        "id": "r",
        "source": {"kind": "tool", "callId": "c"},
        "content": [{"type": "tool-result", "toolCallId": "c", "content": [], "isError": code is not None}],
    }
    error = None if code is None else {"name": "E", "code": code}
    log.add(ev.ToolResult(turn=1, step=1, message=message, error=error, meta=meta or None, source_event_seqs=[0]))


def test_buckets_are_summed_and_the_hit_rate_is_their_ratio() -> None:
    """Reads / (input + reads + writes)."""
    log = Log()
    for step in (1, 2):
        log.start(1, step)
        log.answer(1, step, tokens(100, 10, cacheReadTokens=300, cacheWriteTokens=100, reasoningTokens=4))
        log.end(1, step)
    usage = log.usage(prices=PRICES)

    assert usage["usage"] == {
        "input": 200,
        "cacheRead": 600,
        "cacheWrite": 200,
        "output": 20,
        "reasoning": 8,
        "cacheHitRate": 0.6,
    }
    assert usage["costUsd"] == pytest.approx(2 * (100 * 1 + 300 * 0.1 + 100 * 2 + 10 * 10) / 1e6)
    assert (usage["turns"], usage["steps"], usage["requests"]) == (1, 2, 2)


def test_a_bucket_the_provider_never_reports_is_null() -> None:
    """Not 0; the hit rate needs reads only."""
    log = Log()
    log.start(1, 1)
    log.answer(1, 1, tokens(100, 10))
    usage = log.usage()

    assert usage["usage"]["cacheRead"] is None
    assert usage["usage"]["cacheHitRate"] is None
    assert usage["perStep"][0]["cacheWrite"] is None
    assert usage["costUsd"] is None


def test_the_usage_of_a_message_replaces_that_of_its_chunks() -> None:
    """A step is counted once."""
    log = Log()
    log.start(1, 1)
    log.chunk(1, 1, tokens(7, 1))
    log.chunk(1, 1, tokens(100, 10))
    log.answer(1, 1, tokens(100, 10))
    log.end(1, 1)

    assert log.usage()["usage"]["input"] == 100


def test_a_message_without_usage_takes_that_of_its_chunks() -> None:
    """What was streamed counts."""
    log = Log()
    log.start(1, 1)
    log.chunk(1, 1, tokens(100, 10))
    log.answer(1, 1, None)

    assert log.usage()["usage"]["output"] == 10


def test_a_step_that_was_cut_counts_what_its_chunks_said() -> None:
    """No message came, but tokens were used."""
    log = Log()
    log.start(1, 1)
    log.chunk(1, 1, tokens(100, 10))
    log.end(1, 1)

    assert log.usage(prices=PRICES)["costUsd"] == pytest.approx(200 / 1e6)


def test_requests_that_were_all_refused_have_unknown_usage() -> None:
    """Unknown is null, not 0; the attempts are counted."""
    log = Log()
    log.start(1, 1, sent=3)
    log.end(1, 1)
    usage = log.usage(prices=PRICES)

    assert (usage["requests"], usage["perStep"][0]["attempts"]) == (3, 3)
    assert usage["usage"]["input"] is None
    assert usage["costUsd"] is None


def test_a_run_without_a_request_used_nothing() -> None:
    """Nothing was sent, so 0 is known."""
    usage = Log().usage()

    assert (usage["usage"]["input"], usage["costUsd"], usage["requests"]) == (0, 0, 0)
    assert usage["perStep"] == []


def test_one_answer_without_a_known_cost_makes_the_sum_unknown() -> None:
    """A sum that leaves something out would be a lie."""
    log = Log()
    log.start(1, 1)
    log.answer(1, 1, tokens(100, 10))
    log.start(1, 2)
    log.answer(1, 2, None)
    usage = log.usage(prices=PRICES)

    assert usage["perStep"][0]["costUsd"] is not None
    assert usage["costUsd"] is None
    assert usage["usage"]["input"] == 100


def test_a_failed_step_does_not_hide_the_cost_of_the_others() -> None:
    """It got no answer, so nothing is known to be missing."""
    log = Log()
    log.start(1, 1)
    log.answer(1, 1, tokens(100, 10))
    log.start(1, 2)
    log.end(1, 2)

    assert log.usage(prices=PRICES)["costUsd"] == pytest.approx(200 / 1e6)


def test_a_summary_is_counted_with_a_row_of_its_own() -> None:
    """Its usage stands in the compaction."""
    log = Log()
    log.start(1, 1, sent=0)
    log.add(ev.CompactionStart(compaction_id="k", turn=1))
    log.sent(1, 1, purpose="summary")
    log.sent(1, 1, 2, purpose="summary")
    span = {"start": 0, "end": 0}
    log.add(
        ev.CompactionSummary(
            compaction_id="k",
            summary=[],
            shadowed_range=span,
            shadowed_seqs=[0],
            model="s",
            provider="p",
            usage=tokens(50, 5),
        )
    )
    log.add(ev.CompactionEnd(compaction_id="k", turn=1))
    log.sent(1, 1)
    log.answer(1, 1, tokens(10, 1))
    log.end(1, 1)
    usage = log.usage(prices=PRICES)
    main, summary = usage["perStep"]

    assert (main["purpose"], main["attempts"], main["input"]) == ("main", 1, 10)
    assert (summary["purpose"], summary["attempts"], summary["input"], summary["model"]) == ("summary", 2, 50, "s")
    assert summary["durationMs"] == 400
    assert (usage["compactions"], usage["usage"]["input"], usage["requests"]) == (1, 60, 3)
    assert [row["model"] for row in usage["perModel"]] == ["m", "s"]


def test_a_compaction_that_changed_nothing_is_not_counted() -> None:
    """Its attempt is."""
    log = Log()
    log.start(1, 1)
    log.add(ev.CompactionStart(compaction_id="k", turn=1))
    log.sent(1, 1, purpose="summary")
    log.add(ev.CompactionEnd(compaction_id="k", turn=1, error={"message": "no"}))
    usage = log.usage()

    assert (usage["compactions"], usage["requests"]) == (0, 2)
    assert [row["purpose"] for row in usage["perStep"]] == ["main", "summary"]


def test_a_fork_counts_only_what_is_its_own() -> None:
    """By the header's length, or by the end of the seed; the parent's messages still fill the context."""
    log = Log()
    log.user("x" * 400)
    log.start(1, 1)
    log.answer(1, 1, tokens(100, 10))
    log.end(1, 1)
    call(log, "shell")
    log.add(ev.SessionEndSeed())
    seed = len(log.events)
    log.start(2, 2)
    log.answer(2, 2, tokens(7, 3))
    log.end(2, 2)
    with_header = derive_usage(log.events, header={"id": "f", "seedLength": seed})
    without = derive_usage(log.events)

    for usage in (with_header, without):
        assert (usage["usage"]["input"], usage["steps"], usage["requests"], usage["tools"]) == (7, 1, 1, [])
    assert (with_header["sessionId"], without["sessionId"]) == ("f", None)
    assert with_header["context"] == without["context"]


def test_the_prices_of_the_profile_are_read_from_the_log() -> None:
    """Only for the model they were declared for."""
    log = Log()
    model = {"provider": "openai", "model": "m", "prices": {"input": 3, "output": 6, "cache_read": None}}
    log.add(
        ev.RunStart(
            task_digest="",
            profile_digest="",
            policy_digest="",
            tools_digest="",
            versions={},
            base={},
            sandbox={},
            trust="trusted",
            config={"profile": {"model": model}},
        )
    )
    log.start(1, 1)
    log.answer(1, 1, tokens(1_000_000, 0))
    log.start(1, 2)
    log.answer(1, 2, tokens(1_000_000, 0), model="gpt-4o")
    log.start(1, 3)
    log.answer(1, 3, tokens(1_000_000, 0), model="nobody-knows")
    costs = [row["costUsd"] for row in log.usage()["perStep"]]

    assert costs == [3.0, 2.5, None]


@pytest.mark.parametrize("given", [None, Prices(input=100.0, output=100.0)])
def test_an_answer_costs_what_the_configuration_declared_when_it_was_given(given: Prices | None) -> None:
    """Behind run/resume that of run/resume, if it holds one; a row keeps its price, whatever comes later."""

    def configuration(price: float | None, model: str = "m") -> dict[str, Any]:
        prices = {} if price is None else {"prices": {"input": price, "output": 0}}
        return {"profile": {"model": {"provider": "openai", "model": model, **prices}}}

    def step(number: int, model: str = "m") -> None:
        log.start(number, number)
        log.answer(number, number, tokens(1_000_000, 0), model=model)
        log.end(number, number)

    log = Log()
    digests: dict[str, Any] = dict.fromkeys(("task_digest", "profile_digest", "policy_digest", "tools_digest"), "")
    log.add(ev.RunStart(**digests, versions={}, base={}, sandbox={}, trust="trusted", config=configuration(3)))
    step(1)
    log.add(ev.RunResume(changes=["profile.model.prices.input"], config=configuration(7)))
    step(2)
    log.add(ev.RunResume(changes=["profile.model.prices.input"]))
    step(3)
    log.add(ev.RunResume(changes=[], config=configuration(11, model="n")))
    step(4, model="n")
    log.add(ev.RunResume(changes=[], config=configuration(None, model="gpt-4o")))
    step(5, model="gpt-4o")

    usage = log.usage(prices=given)

    last = 2.5 if given is None else 100.0
    assert [row["costUsd"] for row in usage["perStep"]] == [3.0, 7.0, 7.0, 11.0, last]
    assert usage["costUsd"] == 28 + last


def test_scripted_answers_cost_nothing() -> None:
    """They are known to be free."""
    log = Log()
    log.start(1, 1)
    answer = log.answer(1, 1, tokens(1_000, 1))
    assert isinstance(answer, ev.AssistantMessage)
    answer.message["source"]["provider"] = "scripted"

    assert log.usage()["costUsd"] == 0


def test_prices_in_another_currency_give_no_dollars() -> None:
    """No rate of exchange is known."""
    log = Log()
    log.start(1, 1)
    log.answer(1, 1, tokens(1_000, 1))
    usage = log.usage(prices=Prices(input=1, output=1, currency="EUR"))

    assert (usage["costUsd"], usage["currency"]) == (None, "EUR")


def test_estimates_are_marked() -> None:
    """One estimated answer marks the whole."""
    log = Log()
    log.start(1, 1)
    log.answer(1, 1, tokens(10, 1, estimated=True))

    assert log.usage()["estimated"] is True


def test_the_context_is_the_last_answer_and_an_estimate_of_what_came_since() -> None:
    """Real usage is the baseline; a replaced part is taken off again."""
    log = Log()
    log.add(ev.RequestContext(provider="p", model="m", context_window=1_000))
    first = log.user("x" * 400)
    log.start(1, 1)
    log.answer(1, 1, tokens(100, 10, cacheReadTokens=50))
    anchored = log.usage()["context"]
    second = log.user("y" * 40)
    grown = log.usage()["context"]
    span = {"op": "replace", "start": first.seq, "end": first.seq}
    log.user("z" * 4, surface_op=span, source_event_seqs=[first.seq])
    cut = log.usage()["context"]

    assert second.seq > first.seq
    assert anchored == {"window": 1_000, "next": 160, "peak": 150}
    assert grown["next"] == 160 + 10 + 4 + 4
    assert cut["next"] == grown["next"] - 100 + 1


def test_a_new_header_makes_the_estimate_start_anew() -> None:
    """The last answer was made under another one."""
    log = Log()
    header: Any = {"config": {"provider": "p", "model": "m"}, "system": "s" * 40, "tools": []}
    log.add(ev.RequestHeaderEvent(header=header, reason="initial"))
    log.user("x" * 40)
    assert log.usage()["context"]["next"] == 14 + 18
    log.start(1, 1)
    log.answer(1, 1, tokens(500, 0), text="")
    assert log.usage()["context"]["next"] == 500
    changed: Any = {**header, "system": "s" * 80}
    log.add(ev.RequestHeaderEvent(header=changed, reason="change"))
    assert log.usage()["context"]["next"] == 24 + 18 + 8


def test_tools_are_summed_by_name() -> None:
    """Failed and denied apart; the measured time, or that between call and result."""
    log = Log()
    log.start(1, 1)
    call(log, "shell", durationMs=1_500)
    call(log, "shell", "TOOL_FAILED", durationMs=500)
    call(log, "edit_file", "POLICY_DENIED")
    usage = log.usage()

    assert usage["tools"] == [
        {"name": "shell", "calls": 2, "failed": 1, "denied": 0, "durationMs": 2_000},
        {"name": "edit_file", "calls": 1, "failed": 0, "denied": 1, "durationMs": 100},
    ]


def test_a_step_takes_from_its_start_to_its_end() -> None:
    """Tools included; unknown while it is open."""
    log = Log()
    log.start(1, 1)
    log.answer(1, 1, tokens(1, 1))
    assert log.usage()["perStep"][0]["durationMs"] is None
    log.end(1, 1)
    assert log.usage()["perStep"][0]["durationMs"] == 300


def test_attempts_of_other_harnesses_come_from_their_retries() -> None:
    """They log no sent requests."""
    log = Log()
    log.add(ev.StepStart(turn=1, step=1))
    for retry in (1, 2):
        log.add(ev.LlmRetryStarted(retry_id="r", turn=1, step=1, retry=retry))
    log.answer(1, 1, tokens(1, 1))
    usage = log.usage()

    assert (usage["requests"], usage["perStep"][0]["attempts"]) == (3, 3)


def test_children_of_a_workflow_are_listed() -> None:
    """Their usage stands in their own sessions."""
    log = Log()
    log.add(ev.WorkflowAgentStart(run_id="w", extra={"seq": 1, "label": "one", "childId": "c1"}))
    log.add(ev.WorkflowAgentEnd(run_id="w", extra={"seq": 1, "outcome": "completed"}))

    assert log.usage()["subagents"] == [{"sessionId": "c1", "label": "one", "outcome": "completed"}]


def test_usage_and_outcome_count_turns_and_steps_alike() -> None:
    """One function counts both."""
    log = Log()
    log.add(ev.TurnStart(turn=1))
    log.add(ev.TurnEnd(turn=1, reason={"kind": "completed"}))
    log.start(2, 1)
    log.end(2, 1)
    usage, outcome = log.usage(), derive_outcome(log.events)

    assert (usage["turns"], usage["steps"]) == (outcome.turns, outcome.steps) == (1, 1)


def test_blocks_of_an_unknown_shape_do_not_stop_the_count() -> None:
    """Logs of others hold what we do not know."""
    log = Log()
    log.add(ev.UserMessage(content=["text", {"type": "text"}, {"x": 1}], source={"kind": "user"}, role="user", id="u"))

    assert log.usage()["context"]["next"] > 0


def test_the_fold_may_be_asked_on_the_way() -> None:
    """Asking changes nothing."""
    log = Log()
    log.start(1, 1)
    log.answer(1, 1, tokens(100, 10))
    log.end(1, 1)
    fold = UsageFold(header={"id": "session-1"})
    for event in log.events:
        fold.apply(event)
        fold.usage()

    assert fold.usage() == log.usage()
