"""The context never overflows: prune, summary, overflow answers, and turns that ask for compaction."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, chat_reply, json_reply

if TYPE_CHECKING:
    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "Done."}
SUMMARY: dict[str, Any] = {"text": "I was asked to do the work and read the files."}


def read(name: str) -> dict[str, Any]:
    """A response that reads one file."""
    return {"calls": [{"tool": "read_file", "args": {"path": name}}]}


def small_window(window: int = 10_000, **compaction: Any) -> dict[str, Any]:
    """A profile of a model with a small window."""
    model = {"provider": "scripted", "model": "scripted", "script": "task.script.yaml", "context_window": window}
    return {
        "model": {**model, "max_output_tokens": 500},
        "compaction": {"min_output": 200, "summary_at": 0.55, **compaction},
    }


def files(*sizes: int) -> dict[str, str]:
    """Files ``f0.txt``, ``f1.txt``... of so many characters, in lines of 80."""
    return {f"f{n}.txt": (f"{n}" * 79 + "\n") * (size // 80) for n, size in enumerate(sizes)}


def assert_consistent(finished: Finished, run_nightshift: Nightshift) -> None:
    """The log is whole, and every request can be rebuilt from it."""
    verified = run_nightshift("session", "verify", "--json", finished.artifacts)
    assert verified.exit_code == 0, verified.stdout + verified.stderr
    main = [data for data in finished.data_of("request/sent") if data["purpose"] == "main"]
    assert json.loads(verified.stdout)["requests"]["checked"] == len(main)


def shown(events: list[dict[str, Any]]) -> str:
    """The text of some messages."""
    return json.dumps([event["data"] for event in events])


def test_old_results_are_pruned_first_and_just_enough(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Over the threshold the oldest long result is cut to head and tail; the recent two steps stay."""
    workspace = make_repo(files(*[3_900] * 5))
    profile = small_window(summary_at=0.52, prune_over=2_000, prune_head=1_000, prune_tail=200)
    task = scripted_task([*(read(f"f{n}.txt") for n in range(5)), DONE], profile=profile)

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    pruned = finished.data_of("compaction/prune")
    assert len(pruned) == 2  # a third one is old and long enough, and is left alone
    replaced = [event for event in finished.events_of("tool/result") if event["surfaceOp"] != "append"]
    assert [event["data"]["step"] for event in replaced] == [1, 2]
    [block] = replaced[0]["data"]["message"]["content"]
    text = block["content"][0]["text"]
    assert text.startswith("0" * 79)
    assert "characters pruned" in text
    assert 1200 < len(text) < 1300
    assert finished.events_of("compaction/start") == []
    assert_consistent(finished, run_nightshift)


def test_a_summary_replaces_what_is_older_than_the_tail(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """When pruning is not enough: start, summary, the replacing message, end; the first prompt stays verbatim."""
    workspace = make_repo(files(*[3_900] * 5))
    responses = [*(read(f"f{n}.txt") for n in range(5)), SUMMARY, DONE]
    task = scripted_task(responses, prompt="Read them all.", profile=small_window())

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    kinds = [event["type"] for event in finished.events if event["type"].startswith("compaction/")]
    assert kinds == ["compaction/start", "compaction/summary", "compaction/end"]
    [summary] = finished.data_of("compaction/summary")
    assert summary["summary"] == [{"type": "text", "text": SUMMARY["text"]}]
    assert summary["usage"]["outputTokens"] > 0
    purposes = [data["purpose"] for data in finished.data_of("request/sent")]
    assert purposes.count("summary") == 1
    [replacing] = [event for event in finished.events_of("user/message") if event["surfaceOp"] != "append"]
    assert SUMMARY["text"] in shown([replacing])
    [prompt] = [event for event in finished.events_of("user/message") if event["data"]["source"]["kind"] == "user"]
    assert prompt["seq"] not in summary["shadowedSeqs"]
    assert_consistent(finished, run_nightshift)
    # What the summary cost is in the totals.
    usage = json.loads((finished.artifacts / "usage.json").read_text())
    assert [row["purpose"] for row in usage["perStep"]].count("summary") == 1


def test_a_summary_that_does_not_shrink_is_tried_twice_and_then_the_oldest_results_go(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Two tries, compaction/end with an error, then first lines only."""
    workspace = make_repo(files(*[3_900] * 5))
    long: dict[str, Any] = {"text": "x" * 40_000}
    responses: list[dict[str, Any]] = [*(read(f"f{n}.txt") for n in range(5)), long, long, DONE]

    finished = run_nightshift("run", scripted_task(responses, profile=small_window()), "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    [end] = finished.data_of("compaction/end")
    assert end["error"]["code"] == "CONTEXT_EXHAUSTED"
    assert [data["purpose"] for data in finished.data_of("request/sent")].count("summary") == 2
    assert len(finished.data_of("compaction/prune")) >= 1
    # Both tries are paid for, and the totals say so.
    usage = json.loads((finished.artifacts / "usage.json").read_text())
    [row] = [row for row in usage["perStep"] if row["purpose"] == "summary"]
    assert row["output"] == end["refusedUsage"]["outputTokens"] > 20_000
    assert_consistent(finished, run_nightshift)


def test_a_window_that_nothing_fits_into_exits_10(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """CONTEXT_EXHAUSTED before a request goes out that cannot fit."""
    task = scripted_task([DONE], prompt="word " * 8_000, profile=small_window(5_000))

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 10, finished.stderr
    assert finished.events_of("request/sent") == []


def test_turns_of_compact_at_begin_with_a_summary(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """compact_at: [2] compacts before the first request of turn 2, far below any threshold."""
    workspace = make_repo(files(4_000))
    responses = [read("f0.txt"), {"text": "Read."}, SUMMARY, DONE]
    task = scripted_task(
        responses, task={"turns": ["And now?"], "compact_at": [2]}, profile={"compaction": {"keep": 0.001}}
    )

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    [start] = finished.data_of("compaction/start")
    assert start["turn"] == 2
    assert_consistent(finished, run_nightshift)


@pytest.mark.parametrize("recovers", [True, False])
def test_too_long_from_the_provider_compacts_once_in_the_same_step(
    recovers: bool, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """One compaction and one more request; turn and step do not start again."""
    workspace = make_repo(files(4_000))
    error = {
        "error": {"message": "This model's maximum context length is 10 tokens", "code": "context_length_exceeded"}
    }
    calls = [
        chat_reply(calls=[(f"call_{n}", "read_file", json.dumps({"path": "f0.txt", "limit": n + 40}))])
        for n in range(3)
    ]
    last = chat_reply("Done.") if recovers else json_reply(400, error)
    replies = [*calls, json_reply(400, error), chat_reply("The file was read."), last]
    with ModelServer(replies) as server:
        model = {"provider": "openai", "model": "m", "base_url": server.url, "context_window": 50_000}
        compaction = {"keep": 0.02}
        task = scripted_task([], profile={"model": model, "compaction": compaction})
        finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == (0 if recovers else 10), finished.stderr
    assert [data["step"] for data in finished.data_of("step/start")] == [1, 2, 3, 4]
    assert len(finished.data_of("compaction/summary")) == 1
    purposes = [(data["step"], data["purpose"]) for data in finished.data_of("request/sent")]
    assert purposes[-3:] == [(4, "main"), (4, "summary"), (4, "main")]
    if recovers:
        assert_consistent(finished, run_nightshift)


def test_a_long_result_spills_and_can_be_read_again(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Head and tail for the model, the whole text as an artifact, ranges by read_file."""
    responses: list[dict[str, Any]] = [
        {"calls": [{"tool": "shell", "args": {"command": "seq 1 40000"}}]},
        {
            "calls": [{"tool": "read_file", "args": {"path": "spill:call_1_0", "offset": 20000, "limit": 2}}],
            "expect": {"lastToolResultContains": "spill:call_1_0"},
        },
        {**DONE, "expect": {"lastToolResultContains": "20000\n20001"}},
    ]

    finished = run_nightshift("run", scripted_task(responses), "--workspace", make_repo())

    assert finished.exit_code == 0, finished.stderr
    whole = "".join(f"{n}\n" for n in range(1, 40001))
    assert (finished.artifacts / "spill/call_1_0.txt").read_text() == whole
    meta = finished.data_of("tool/result")[0]["meta"]
    assert (meta["truncated"], meta["bytes"], meta["spill"]["bytes"]) == (True, len(whole), len(whole))
    assert "spill/call_1_0.txt" in [artifact["path"] for artifact in finished.result["artifacts"]]
    assert_consistent(finished, run_nightshift)


@pytest.mark.parametrize("known", [True, False])
def test_a_summary_by_another_model_has_that_models_price(
    known: bool, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """An unknown price is null, never the main model's; run, stats and verify agree."""
    usage = {"prompt_tokens": 900, "completion_tokens": 40}
    call = chat_reply(calls=[("call_1", "read_file", json.dumps({"path": "f0.txt"}))], usage=usage)
    replies = [call, *(chat_reply(text, usage=usage) for text in ("Read.", "I read it.", "Done."))]
    with ModelServer(replies) as server:
        model = {"provider": "openai", "model": "m", "base_url": server.url, "context_window": 50_000}
        profile = {
            "model": {**model, "prices": {"input": 1, "output": 2}} if known else model,
            "compaction": {"keep": 0.001, "summary_model": "other" if known else "gpt-4o"},
        }
        task = scripted_task([], profile=profile, task={"turns": ["And now?"], "compact_at": [2]})
        finished = run_nightshift("run", task, "--workspace", make_repo(files(4_000)))

    assert finished.exit_code == 0, finished.stderr
    assert_consistent(finished, run_nightshift)
    stats = json.loads(run_nightshift("session", "stats", "--json", finished.artifacts).stdout)
    assert stats == json.loads((finished.artifacts / "usage.json").read_text())
    costs = {row["purpose"]: row["costUsd"] for row in stats["perStep"]}
    assert (costs["main"] is None, costs["summary"] is None) == (not known, known)
    assert finished.result["costUsd"] is None
