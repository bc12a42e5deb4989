"""A long job in a small window, against a server that counts for itself and refuses what is too long."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, RecordedRequest, Reply, chat_reply, json_reply

if TYPE_CHECKING:
    from conftest import MakeRepo, Nightshift, ScriptedTask

WINDOW = 32_000
STEPS = 300
SIZES = (10, 300, 4_000, 20_000, 9_000, 60_000, 1_200, 50, 15_000, 700)


def counted(value: Any) -> int:
    """What the server takes a request for: two tokens for seven ASCII characters, and overhead."""
    if isinstance(value, str):
        ascii_only = sum(character < "\x80" for character in value)
        return ascii_only * 2 // 7 + (len(value) - ascii_only)
    if isinstance(value, dict):
        return sum(counted(each) for each in value.values()) + 3
    return sum(counted(each) for each in value) + 2 if isinstance(value, list) else 1


class Model:
    """Asks for one thing after the other, some of it large, some Chinese; at the end it says the word it was told."""

    def __init__(self) -> None:
        self.steps = 0
        self.summaries = 0
        self.overflows: list[int] = []
        self.counts: list[int] = []

    def __call__(self, request: RecordedRequest) -> Reply:
        body = request.json()
        tokens = counted(body["messages"]) + counted(body["tools"])
        if tokens + body["max_tokens"] > WINDOW:
            self.overflows.append(self.steps)
            error = {
                "message": f"This model's maximum context length is {WINDOW} tokens",
                "code": "context_length_exceeded",
            }
            return json_reply(400, {"error": error})
        self.counts.append(tokens)
        usage = {"prompt_tokens": tokens, "completion_tokens": 60}
        if body.get("tool_choice") == "none":
            self.summaries += 1
            return chat_reply(f"Up to step {self.steps} I counted lines.", usage=usage)
        self.steps += 1
        if self.steps > STEPS:
            said = re.search(r"The word is (\w+)", json.dumps(body["messages"], ensure_ascii=False))
            return chat_reply(f"The word was {said[1] if said else 'forgotten'}.", usage=usage)
        return chat_reply(calls=[self._call()], usage=usage)

    def _call(self) -> tuple[str, str, str]:
        number = self.steps
        size = SIZES[number % len(SIZES)]
        arguments: dict[str, Any]
        if number % 97 == 50:
            name, arguments = "shell", {"command": f"yes line-{number} | head -c 5000000"}
        elif number % 7 == 3:
            name, arguments = "shell", {"command": f"head -c {size} cjk.txt"}
        else:
            name, arguments = "read_file", {"path": "ascii.txt", "offset": number, "limit": 1 + size // 80}
        return f"call_{number}", name, json.dumps(arguments)


@pytest.mark.slow
def test_three_hundred_steps_in_a_small_window_lose_nothing(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """It ends well, is never too long by the server's count but once, and still knows what it was told first."""
    workspace = make_repo(
        {
            "ascii.txt": "".join(f"{n:05} {'lorem ipsum ' * 6}\n" for n in range(2_000)),
            "cjk.txt": "数える文字列\n" * 4_000,
        }
    )
    model = Model()
    with ModelServer(model) as server:
        settings = {"provider": "openai", "model": "m", "base_url": server.url, "context_window": WINDOW}
        limits = {"steps": STEPS + 10, "wall": "5m", "output_bytes": "1G"}
        task = scripted_task(
            [], profile={"model": settings, "limits": limits}, prompt="The word is Paradiesvogel. Count."
        )
        finished = run_nightshift("run", task, "--workspace", workspace, timeout=240)
        raw = [request.body for request in server.requests]
        bodies = [json.loads(body) for body in raw]

    assert finished.exit_code == 0, finished.stderr
    assert finished.stdout == "The word was Paradiesvogel.\n"
    assert len(model.overflows) <= 1, model.overflows
    assert model.summaries >= 2
    assert max(model.counts) < WINDOW
    assert [data["step"] for data in finished.data_of("step/start")] == list(range(1, STEPS + 2))
    assert len(finished.data_of("tool/call")) == STEPS
    results = [
        data
        for event, data in ((e, e["data"]) for e in finished.events_of("tool/result"))
        if event["surfaceOp"] == "append"
    ]
    assert [each["message"]["source"]["callId"] for each in results] == [f"call_{n}" for n in range(1, STEPS + 1)]
    assert max(each["meta"]["bytes"] for each in results) == 5_000_000
    verified = run_nightshift("session", "verify", "--json", finished.artifacts)
    assert verified.exit_code == 0, verified.stderr
    main = [data for data in finished.data_of("request/sent") if data["purpose"] == "main"]
    assert json.loads(verified.stdout)["requests"]["checked"] == len(main)
    # The mode and the limits were told once, before the prompt, and are there to the end.
    for body in bodies:
        texts = [message["content"] for message in body["messages"] if message["role"] == "user"]
        assert sum("Permission mode:" in text for text in texts) == 1
    # Beside compactions each body begins as the one before.
    assert [data["reason"] for data in finished.data_of("request/header")] == ["initial"]
    sent = [body for body in raw if b'"tool_choice":"none"' not in body[:20_000]]
    moved = sum(not after.startswith(before[: -len(b"]}")]) for before, after in itertools.pairwise(sent))
    compacted = len(finished.data_of("compaction/end")) + len(finished.data_of("compaction/prune"))
    assert 0 < moved <= compacted
