"""What anybody can check in a log by hand: steps, calls and results, one write under two modes."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "Done."}


def calls(*each: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """A response with calls."""
    return {"calls": [{"tool": tool, "args": args} for tool, args in each]}


def error_of(result: dict[str, Any]) -> str | None:
    """The error code of a ``tool/result``."""
    code: str | None = (result.get("error") or {}).get("code")
    return code


def assert_adds_up(finished: Finished, run_nightshift: Nightshift) -> None:
    """Reported steps and calls are those of the log, which verifies."""
    steps = len(finished.events_of("step/end"))
    usage = json.loads((finished.artifacts / "usage.json").read_text())
    stats = json.loads(run_nightshift("session", "stats", "--json", finished.artifacts).stdout)
    end = finished.data_of("run/end")[-1]
    assert finished.result["steps"] == usage["steps"] == stats["steps"] == end["steps"] == steps
    assert len(finished.events_of("step/start")) == steps

    asked = [(data["turn"], data["step"], data["callId"]) for data in finished.data_of("tool/call")]
    answered = [
        (event["data"]["turn"], event["data"]["step"], event["data"]["message"]["source"]["callId"])
        for event in finished.events_of("tool/result")
        if event["surfaceOp"] == "append"
    ]
    assert Counter(asked) == Counter(answered)
    seqs = {event["seq"]: event["data"] for event in finished.events_of("tool/call")}
    for event in finished.events_of("tool/result"):
        if event["surfaceOp"] == "append":
            [source] = event["sourceEventSeqs"]
            assert seqs[source]["callId"] == event["data"]["message"]["source"]["callId"]
    assert finished.result["toolCalls"]["total"] == sum(tool["calls"] for tool in usage["tools"]) == len(asked)
    verified = run_nightshift("session", "verify", finished.artifacts)
    assert verified.exit_code == 0, verified.stderr


def test_steps_and_calls_add_up(run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo) -> None:
    """Over turns, calls at once, unknown tools, denied and failing calls, and a failed request."""
    rules: list[dict[str, Any]] = [
        {"id": "read", "tool": ["read_file", "todo"], "decision": "allow"},
        {"id": "run", "tool": "shell", "command": [["false"]], "decision": "allow"},
    ]
    read = ("read_file", {"path": "README.md"})
    task = scripted_task(
        [
            {"error": {"status": 500, "retryAfter": 0}},
            calls(read, read, ("no_such_tool", {}), ("shell", {"command": "false"})),
            {"text": "One."},
            calls(("shell", {"command": "rm -rf ."}), ("read_file", {"wrong": 1})),
            DONE,
        ],
        rules=rules,
        task={"turns": ["Go on."]},
    )

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 0, finished.stderr
    assert (finished.result["turns"], finished.result["steps"]) == (2, 4)
    codes = [error_of(data) for data in finished.data_of("tool/result")]
    assert codes[:3] == [None, None, "UNKNOWN_TOOL"]
    assert codes[4:] == ["POLICY_DENIED", "INVALID_ARGS"]
    assert finished.result["toolCalls"]["denied"] == 3
    assert_adds_up(finished, run_nightshift)


def test_steps_add_up_when_a_limit_ends_the_run(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The last step is ended too."""
    task = scripted_task([calls(("todo", {"todos": []}))] * 5, profile={"limits": {"steps": 3}})

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 5, finished.stderr
    assert finished.result["steps"] == 3
    assert_adds_up(finished, run_nightshift)


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_the_same_write_under_two_modes_leaves_two_results(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """One command, allowed to write once, then confined read-only: the second is denied, and the run goes on."""
    rules: list[dict[str, Any]] = [
        {"id": "once", "tool": "shell", "command": "any", "escalate": ["workspace-write"], "decision": "allow"},
        {"id": "rest", "tool": "*", "command": "any", "decision": "allow"},
    ]
    command = {"command": "printf 'text\\n' > src/new.txt"}
    wider = {"sandbox_permissions": "workspace-write", "justification": "The file is the task."}
    task = scripted_task(
        [
            calls(("shell", {**command, **wider})),
            calls(("shell", command)),
            calls(("read_file", {"path": "src/new.txt"})),
            DONE,
        ],
        rules=rules,
        profile={"permission_mode": "read-only", "sandbox": {"backend": backend}},
    )
    workspace = make_repo({"src/a.txt": "a\n"})

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    first, second, third = finished.data_of("tool/result")
    assert (first["meta"]["mode"], first["meta"]["exitCode"]) == ("workspace-write", 0)
    assert (second["meta"]["mode"], error_of(third)) == ("read-only", None)
    assert second["meta"]["exitCode"] != 0
    told = second["message"]["content"][0]["content"][0]["text"]
    assert "Read-only file system" in told or "Permission denied" in told
    assert (workspace / "src" / "new.txt").read_text() == "text\n"
    assert "text" in json.dumps(third["message"]["content"])
    assert finished.result["finalMessage"] == "Done."
    assert_adds_up(finished, run_nightshift)


@pytest.mark.parametrize("mode", ["workspace-write", "read-only"])
def test_a_file_tool_in_either_mode(
    mode: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The same task under both: it writes, or the sandbox denies it in a result of its own, and the run goes on."""
    task = scripted_task(
        [
            calls(("write_file", {"path": "src/new.txt", "content": "x"})),
            calls(("read_file", {"path": "src/a.txt"})),
            DONE,
        ],
        profile={"permission_mode": mode},
    )
    workspace = make_repo({"src/a.txt": "a\n"})

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    codes = [error_of(data) for data in finished.data_of("tool/result")]
    assert codes == ([None, None] if mode == "workspace-write" else ["SANDBOX_DENIED", None])
    assert (workspace / "src" / "new.txt").exists() is (mode == "workspace-write")
    assert_adds_up(finished, run_nightshift)
