"""What goes over the wire when the window fills: prefix, summary request, room for the answer, overflow answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, RecordedRequest, Reply, chat_reply, json_reply, recorded_reply

if TYPE_CHECKING:
    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

GOLDEN = Path(__file__).parent.parent / "golden" / "sse"
OVERFLOWS = ["llamacpp-overflow_stream", "litellm-overflow_stream", "litellm-anthropic_overflow", "openai", "anthropic"]
TEXT = ("0123456789" * 7 + "\n") * 60


def overflow(name: str) -> Reply:
    """An answer that says too long: recorded, or in the words of the API's documentation."""
    if name == "openai":
        message = "This model's maximum context length is 8192 tokens. However, your messages resulted in 9001 tokens."
        error = {"message": message, "type": "invalid_request_error", "code": "context_length_exceeded"}
        return json_reply(400, {"error": error})
    if name == "anthropic":
        message = "prompt is too long: 9001 tokens > 8192 maximum"
        return json_reply(400, {"type": "error", "error": {"type": "invalid_request_error", "message": message}})
    return recorded_reply(GOLDEN / f"{name}.http")


def read(number: int) -> Reply:
    """An answer that asks for a part of the file, each time another one."""
    arguments = json.dumps({"path": "f.txt", "limit": number + 40})
    return chat_reply(calls=[(f"call_{number}", "read_file", arguments)])


def usage(tokens: int) -> dict[str, Any]:
    """What the server says it counted."""
    return {"prompt_tokens": tokens, "completion_tokens": 10}


class Wire:
    """Runs tasks against a server that plays replies, and keeps its requests."""

    def __init__(self, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo) -> None:
        self._run = run_nightshift
        self._task = scripted_task
        self._repo = make_repo
        self.requests: list[RecordedRequest] = []

    def __call__(
        self,
        replies: list[Reply],
        *,
        window: int = 50_000,
        compaction: dict[str, Any] | None = None,
        task: dict[str, Any] | None = None,
        model: dict[str, Any] | None = None,
        **profile: Any,
    ) -> Finished:
        with ModelServer(replies) as server:
            wanted = {"provider": "openai", "model": "m", "base_url": server.url, "context_window": window}
            whole = {"model": {**wanted, **(model or {})}, "compaction": compaction or {}, **profile}
            written = self._task([], profile=whole, task=task, prompt="The word is Paradiesvogel.")
            finished = self._run("run", written, "--workspace", self._repo({"f.txt": TEXT}))
            self.requests = list(server.requests)
        if finished.exit_code == 0:
            verified = self._run("session", "verify", finished.artifacts)
            assert verified.exit_code == 0, verified.stderr
        return finished


@pytest.fixture
def wire(run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo) -> Wire:
    """The function that runs."""
    return Wire(run_nightshift, scripted_task, make_repo)


@pytest.mark.parametrize("name", OVERFLOWS)
def test_every_kind_of_overflow_answer_leads_to_one_compaction_in_the_same_step(wire: Wire, name: str) -> None:
    """One summary, one more request; no turn and no step begins again, and nothing is read twice."""
    finished = wire(
        [read(0), read(1), read(2), overflow(name), chat_reply("The file was read."), chat_reply("Done.")],
        compaction={"keep": 0.02},
    )

    assert finished.exit_code == 0, finished.stderr
    assert [(data["turn"], data["step"]) for data in finished.data_of("step/start")] == [(1, n) for n in (1, 2, 3, 4)]
    assert len(finished.data_of("turn/start")) == 1
    sent = [(data["step"], data["purpose"], data["attempt"]) for data in finished.data_of("request/sent")]
    assert sent[3:] == [(4, "main", 1), (4, "summary", 1), (4, "main", 1)]
    assert len(finished.data_of("tool/call")) == 3
    assert len(wire.requests[5].body) < len(wire.requests[3].body)
    assert b"Paradiesvogel" in wire.requests[5].body
    assert finished.data_of("llm/retry") == []


@pytest.mark.parametrize("name", OVERFLOWS)
def test_a_second_overflow_in_a_step_ends_the_run_with_what_the_provider_said(wire: Wire, name: str) -> None:
    """One retry and no more."""
    finished = wire(
        [read(0), read(1), read(2), overflow(name), chat_reply("The file was read."), overflow(name)],
        compaction={"keep": 0.02},
    )

    assert finished.exit_code == 10
    assert finished.result["code"] == "CONTEXT_EXHAUSTED"
    assert "the model API answered 400" in finished.result["error"]["message"]
    assert len(wire.requests) == 6


def test_an_overflow_with_nothing_to_compact_is_not_tried_again(wire: Wire) -> None:
    """The first request of all is too long: the same one again would be, too."""
    finished = wire([overflow("openai")])

    assert finished.exit_code == 10
    assert len(wire.requests) == 1
    assert "maximum context length is 8192 tokens" in finished.result["error"]["message"]


def test_a_summary_request_that_is_too_long_itself_is_made_again_with_pruned_results(wire: Wire) -> None:
    """The second try is another request, or there is none."""
    finished = wire(
        [
            *(read(n) for n in range(4)),
            overflow("openai"),
            overflow("openai"),
            chat_reply("The file was read."),
            chat_reply("Done."),
        ],
        compaction={"keep": 0.02, "prune_over": 1_000, "prune_head": 100, "prune_tail": 50},
    )

    assert finished.exit_code == 0, finished.stderr
    assert [data["purpose"] for data in finished.data_of("request/sent")][4:] == ["main", "summary", "summary", "main"]
    assert len(finished.data_of("compaction/prune")) == 2
    assert len(wire.requests[6].body) < len(wire.requests[5].body)


def test_the_summary_request_repeats_the_cached_prefix_and_allows_no_calls(wire: Wire) -> None:
    """System, tools and messages are those of the request before, byte for byte; then the instruction."""
    finished = wire(
        [read(0), read(1), chat_reply("Read."), chat_reply("Summary."), chat_reply("Done.")],
        task={"turns": ["And now?"], "compact_at": [2]},
        compaction={"keep": 0.001, "summary_max_tokens": 700},
    )

    assert finished.exit_code == 0, finished.stderr
    before, summary = wire.requests[2], wire.requests[3]
    sent = summary.json()
    assert sent["tool_choice"] == "none"
    assert sent["max_tokens"] == 700
    assert sent["tools"] == before.json()["tools"]
    start = b'"messages":['
    old = before.body[before.body.index(start) : -len(b"]}")]
    new = summary.body[summary.body.index(start) :]
    assert new.startswith(old)
    assert [message["role"] for message in sent["messages"][-2:]] == ["tool", "user"]
    assert "replaced by your summary" in sent["messages"][-1]["content"]
    after = wire.requests[4].json()["messages"]
    assert after[: len(before.json()["messages"][:3])] == before.json()["messages"][:3]
    assert "Summary." in after[3]["content"]
    assert [message["content"] for message in after[4:]] == ["Read.", "And now?"]


def test_a_reply_with_calls_is_no_summary_and_runs_nothing(wire: Wire) -> None:
    """It counts as one try; the second one is taken."""
    call = chat_reply("I go on.", calls=[("c", "write_file", json.dumps({"path": "f.txt", "content": "hijacked"}))])
    finished = wire(
        [read(0), chat_reply("Read."), call, chat_reply("Summary."), chat_reply("Done.")],
        task={"turns": ["And now?"], "compact_at": [2]},
        compaction={"keep": 0.001},
    )

    assert finished.exit_code == 0, finished.stderr
    assert [data["name"] for data in finished.data_of("tool/call")] == ["read_file"]
    [end] = finished.data_of("compaction/end")
    assert "error" not in end
    assert finished.data_of("compaction/summary")[0]["summary"] == [{"type": "text", "text": "Summary."}]
    assert "hijacked" not in json.dumps(finished.events)
    assert finished.result["patch"] is None


@pytest.mark.parametrize(("limit", "spent", "summarised"), [(9_000, 3_500, True), (8_080, 0, False)])
def test_what_a_summary_takes_counts_against_the_budget(wire: Wire, limit: int, spent: int, summarised: bool) -> None:
    """It takes what the next request would need; or it is not even sent, and the compaction has its end in the log."""
    call = chat_reply(calls=[("c", "read_file", json.dumps({"path": "f.txt"}))], usage=usage(1_500))
    over = wire(
        [
            call,
            chat_reply("Read.", usage=usage(3_000)),
            chat_reply("Summary.", usage=usage(spent)),
            chat_reply("Done."),
        ],
        task={"turns": ["And now?"], "compact_at": [2]},
        model={"max_output_tokens": 1_000},
        compaction={"keep": 0.001, "summary_max_tokens": 500, "min_output": 500},
        limits={"tokens": limit},
    )

    assert over.exit_code == 6, over.stderr
    assert [data["name"] for data in over.data_of("limit/reached") if data["percent"] == 100] == ["tokens"]
    ends = over.data_of("compaction/end")
    assert [("error" in end) for end in ends] == [not summarised]
    assert len(over.data_of("compaction/summary")) == summarised
    [used] = [each["used"] for each in over.result["limits"] if each["name"] == "tokens"]
    assert used == 4_520 + (spent + 10 if summarised else 0)
    types = [event["type"] for event in over.events]
    assert types.count("compaction/start") == 1


def test_a_request_goes_out_only_with_room_for_its_answer(wire: Wire) -> None:
    """``max_tokens`` is lowered to what fits: once, so that the header does not change with every step."""
    window = 12_000
    replies = [
        chat_reply(
            calls=[(f"c{n}", "read_file", json.dumps({"path": "f.txt", "limit": 14 + n}))], usage=usage(2_000 + 700 * n)
        )
        for n in range(9)
    ]
    finished = wire(
        [*replies, chat_reply("Done.", usage=usage(8_900))],
        window=window,
        model={"max_output_tokens": 9_000},
        compaction={"min_output": 500},
    )

    assert finished.exit_code == 0, finished.stderr
    asked = [request.json()["max_tokens"] for request in wire.requests]
    assert asked[0] == 9_000
    assert asked[-1] == window - int(0.8 * window) - window // 24
    assert sorted(asked, reverse=True) == asked
    assert len(set(asked)) == 2
    for request, tokens in zip(wire.requests[1:], range(2_000, 9_000, 700), strict=False):
        assert request.json()["max_tokens"] + tokens <= window
    assert [data["reason"] for data in finished.data_of("request/header")] == ["initial", "change"]


def test_occupancy_and_what_was_used_in_all_are_different_numbers(wire: Wire) -> None:
    """One is the last request's, the other the sum, in disjoint buckets; a compaction lowers the first."""

    def counted(tokens: int, cached: int) -> dict[str, Any]:
        return {"prompt_tokens": tokens, "completion_tokens": 10, "prompt_tokens_details": {"cached_tokens": cached}}

    finished = wire(
        [
            chat_reply(calls=[("c1", "read_file", json.dumps({"path": "f.txt"}))], usage=counted(1_000, 0)),
            chat_reply("Read.", usage=counted(3_000, 900)),
            chat_reply("Summary.", usage=counted(3_100, 2_900)),
            chat_reply("Done.", usage=counted(1_200, 800)),
        ],
        task={"turns": ["And now?"], "compact_at": [2]},
        compaction={"keep": 0.001},
    )

    assert finished.exit_code == 0, finished.stderr
    stats = json.loads((finished.artifacts / "usage.json").read_text())
    assert [(row["purpose"], row["occupancy"]) for row in stats["perStep"]] == [
        ("main", 1_000),
        ("main", 3_000),
        ("main", 1_200),
        ("summary", 3_100),
    ]
    assert stats["context"] == {"window": 50_000, "next": 1_210, "peak": 3_100}
    total = stats["usage"]
    assert (total["input"], total["cacheRead"], total["output"]) == (8_300 - 4_600, 4_600, 40)
    assert total["cacheHitRate"] == pytest.approx(4_600 / 8_300)
    assert stats["compactions"] == 1
