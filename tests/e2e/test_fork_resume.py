"""A fork goes on: from the end of a turn, with another task's words, counting its own work only."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import MakeRepo, Nightshift, ScriptedTask


def call(tool: str, **args: Any) -> dict[str, Any]:
    """A response with one call."""
    return {"calls": [{"tool": tool, "args": args}]}


def test_a_forked_session_is_resumed_and_counts_its_own_work(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """The parent's spilled result can be read in it; its log is whole in the end, every request rebuilt."""
    workspace = make_repo({"src/a.txt": "a\n"})
    responses = [
        call("shell", command="seq 1 40000"),
        call("shell", command="git push"),
        {"text": "Counted."},
        {"text": "Nothing more."},
    ]
    rules: list[dict[str, Any]] = [
        {"id": "push", "tool": "shell", "command": [["git", "push"]], "decision": "deny"},
        {"id": "count", "tool": "shell", "command": [["seq", "**"]], "decision": "allow"},
        {"id": "files", "tool": ["read_file", "write_file"], "decision": "allow"},
    ]
    task = scripted_task(responses, rules=rules, task={"turns": ["Go on."]})
    parent = run_nightshift("run", task, "--workspace", workspace)
    assert parent.exit_code == 0, parent.stderr
    before = {path: path.read_bytes() for path in parent.artifacts.rglob("*") if path.is_file()}
    child = tmp_path / "child"

    forked = run_nightshift("session", "fork", parent.artifacts, "--turn", "1", "--output", child, "--json")
    assert forked.exit_code == 0, forked.stderr
    assert json.loads(forked.stdout)["files"] == ["spill/call_1_0.txt"]
    again = [
        *responses[:3],
        {
            **call("read_file", path="spill:call_1_0", offset=20_000, limit=1),
        },
        {**call("write_file", path="src/b.txt", content="b\n"), "expect": {"lastToolResultContains": "20000"}},
        {"text": "Another end."},
    ]
    other = scripted_task(again, rules=rules, task={"turns": ["Go on."]})
    refused = run_nightshift("resume", child, other, "--workspace", workspace, artifacts=child)
    assert refused.exit_code == 2
    assert "profile.model.script_sha256 changed" in refused.stderr
    options = ["--workspace", str(workspace), "--accept-config-change"]
    resumed = run_nightshift("resume", child, other, *options, artifacts=child)

    assert resumed.exit_code == 0, resumed.stderr
    assert {path: path.read_bytes() for path in parent.artifacts.rglob("*") if path.is_file()} == before
    assert resumed.result["sessionId"] == json.loads(forked.stdout)["session"] != parent.result["sessionId"]
    assert (resumed.result["finalMessage"], parent.result["finalMessage"]) == ("Another end.", "Nothing more.")
    assert (resumed.result["turns"], resumed.result["steps"]) == (1, 3)
    assert resumed.result["toolCalls"] == {"total": 2, "failed": 0, "denied": 0}
    assert resumed.result["approvals"] == {"asked": 2, "allowed": 2, "denied": 0}
    assert parent.result["toolCalls"]["denied"] == 1
    output = next(limit for limit in resumed.result["limits"] if limit["name"] == "output_bytes")
    assert output["used"] < 1_000
    assert 0 < resumed.result["durationMs"] < 60_000
    assert [data["turn"] for data in resumed.data_of("turn/start")] == [1, 2]
    verified = run_nightshift("session", "verify", child, "--json")
    assert verified.exit_code == 0, verified.stderr
    facts = json.loads(verified.stdout)
    assert (facts["state"], facts["requests"]) == ("whole", {"checked": 6, "notChecked": 0})
    assert facts["totals"]["checked"] == ["usage.json", "result.json"]
    for step, sent in enumerate(resumed.data_of("request/sent"), 1):
        body = run_nightshift("session", "request", child, "--step", str(step))
        assert hashlib.sha256(body.stdout.encode()).hexdigest() == sent["sha256"]
