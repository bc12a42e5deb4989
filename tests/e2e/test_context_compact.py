"""``session compact``: the history of a session that can be resumed is folded by hand, and the session goes on."""

from __future__ import annotations

import json
import signal
import time
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from runner.artifacts.context import COMPACT_FIELDS
from runner.artifacts.schema import object_schema

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Finished, JsonObject, MakeRepo, Nightshift, ScriptedTask

TEXT = {"f0.txt": "0123456 89\n" * 400}
PROFILE = {"compaction": {"keep": 0.001, "summary_max_tokens": 500}}
READ: dict[str, Any] = {"calls": [{"tool": "read_file", "args": {"path": "f0.txt"}}]}
WRITE: dict[str, Any] = {"calls": [{"tool": "write_file", "args": {"path": "new.txt", "content": "kept\n"}}]}
SUMMARY: dict[str, Any] = {"text": "The file was read, new.txt was written."}
DONE: dict[str, Any] = {"text": "Done."}


@pytest.fixture
def ended(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> Callable[..., tuple[Path, Path, Finished]]:
    """A function that runs into the limit of steps: gives task, workspace and the run."""

    def run(*behind: dict[str, Any]) -> tuple[Path, Path, Finished]:
        workspace = make_repo({**TEXT, "sub/keep": ""})
        responses = [WRITE, READ, READ, *behind]
        task = scripted_task(
            responses, profile={**PROFILE, "limits": {"steps": 3}}, prompt="The word is Paradiesvogel."
        )
        finished = run_nightshift("run", task, "--workspace", workspace)
        assert finished.exit_code == 5, finished.stderr
        return task, workspace, finished

    return run


def messages_of(run_nightshift: Nightshift, artifacts: Path, step: int) -> list[JsonObject]:
    """The messages of a step's request."""
    shown = run_nightshift("session", "request", artifacts, "--step", str(step))
    assert shown.exit_code == 0, shown.stderr
    messages: list[JsonObject] = json.loads(shown.stdout)["messages"]
    return messages


def test_a_session_is_compacted_and_goes_on(
    ended: Callable[..., tuple[Path, Path, Finished]],
    run_nightshift: Nightshift,
    session_log_reader: Callable[[Path], list[JsonObject]],
) -> None:
    """It says what was folded and how much that freed; outcome, patch and counts stay; resume goes on with it."""
    task, workspace, finished = ended(SUMMARY, DONE)
    artifacts, last = finished.artifacts, finished.events[-1]["seq"]
    ended_with = finished.result

    compacted = run_nightshift("session", "compact", artifacts, task, "--workspace", workspace, "--json")

    assert compacted.exit_code == 0, compacted.stderr
    said = json.loads(compacted.stdout)
    jsonschema_rs.validator_for(object_schema(COMPACT_FIELDS)).validate(said)
    assert (said["window"], said["folded"]) == (128_000, 5)
    assert 0 < said["after"] < said["before"] - 800
    events = session_log_reader(artifacts / "session.jsonl.zst")[1:]
    added = [event["type"] for event in events if event["seq"] > last]
    begun = added.index("turn/start")
    assert added[:begun] == ["run/resume"]
    assert added[begun:-3] == [
        "turn/start",
        "compaction/start",
        "request/sent",
        "compaction/summary",
        "user/message",
        "compaction/end",
        "turn/end",
        "artifact/written",
        "run/end",
    ]
    result = json.loads((artifacts / "result.json").read_text())
    for key in ("outcome", "code", "exitCode", "failureClass", "turns", "steps", "patch", "toolCalls"):
        assert result[key] == ended_with[key], key
    assert result["patch"]["files"] == 1
    verified = run_nightshift("session", "verify", artifacts, "--json")
    assert verified.exit_code == 0, verified.stdout
    usage = json.loads((artifacts / "usage.json").read_text())
    assert [row["purpose"] for row in usage["perStep"]] == ["main"] * 3 + ["summary"]
    assert usage["compactions"] == 1

    profile = task.with_name("task.profile.yaml")
    profile.write_text(profile.read_text().replace('"steps": 3', '"steps": 9'))
    resumed = run_nightshift("resume", artifacts, task, "--workspace", workspace, "--accept-config-change")
    assert resumed.exit_code == 0, resumed.stderr
    messages = json.dumps(messages_of(run_nightshift, artifacts, 4))
    assert "Paradiesvogel" in messages
    assert SUMMARY["text"] in messages
    assert run_nightshift("session", "verify", artifacts).exit_code == 0


def test_nothing_to_compact_is_said_and_nothing_is_written(
    ended: Callable[..., tuple[Path, Path, Finished]], run_nightshift: Nightshift
) -> None:
    """What the last step added always stays, so a second time there is nothing."""
    task, workspace, finished = ended(SUMMARY, SUMMARY, DONE)
    first = run_nightshift("session", "compact", finished.artifacts, task, "--workspace", workspace)
    assert first.exit_code == 0, first.stderr
    assert first.stdout.startswith("5 messages folded: ")
    before = (finished.artifacts / "session.jsonl.zst").read_bytes()

    again = run_nightshift("session", "compact", finished.artifacts, task, "--workspace", workspace)

    assert again.exit_code == 0, again.stderr
    assert again.stdout.startswith("nothing to compact: ")
    assert (finished.artifacts / "session.jsonl.zst").read_bytes() == before


def test_a_summary_that_cannot_be_had_leaves_a_session_that_can_be_resumed(
    ended: Callable[..., tuple[Path, Path, Finished]], run_nightshift: Nightshift
) -> None:
    """CONTEXT_EXHAUSTED; the log says so, verifies, and the outcome is the old one."""
    task, workspace, finished = ended({"text": "x" * 40_000}, READ, DONE)

    failed = run_nightshift("session", "compact", finished.artifacts, task, "--workspace", workspace)

    assert failed.exit_code == 10
    assert "no summary could be made: no usable summary after 2 tries" in failed.stderr
    assert json.loads((finished.artifacts / "result.json").read_text())["code"] == "LIMIT_REACHED"
    assert run_nightshift("session", "verify", finished.artifacts).exit_code == 0


def test_a_completed_session_and_a_changed_configuration_are_refused(
    ended: Callable[..., tuple[Path, Path, Finished]],
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
) -> None:
    """As by resume; what is no session at all, too."""
    whole = scripted_task([DONE], name="whole", profile=PROFILE)
    completed = run_nightshift("run", whole, "--workspace", make_repo(name="other"))
    refused = run_nightshift("session", "compact", completed.artifacts, whole)
    assert (refused.exit_code, "the session completed" in refused.stderr) == (2, True)

    task, workspace, finished = ended(SUMMARY)
    changed = run_nightshift(
        "session", "compact", finished.artifacts, task, "--workspace", workspace, "--set", "compaction.keep=0.002"
    )
    assert changed.exit_code == 2
    assert "profile.compaction.keep changed" in changed.stderr
    assert run_nightshift("session", "compact", "no-such-session").exit_code == 2
    without = run_nightshift("session", "compact", finished.artifacts)
    assert (without.exit_code, "how the session" in without.stderr) == (2, True)


def test_a_killed_session_is_compacted_and_stays_open(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Here the runner knows how it was started; resume goes on behind the summary."""
    workspace = make_repo({**TEXT, "sub/keep": ""})
    sleep = {"calls": [{"tool": "shell", "args": {"command": "sleep 60"}}]}
    task = scripted_task([READ, READ, READ, sleep, SUMMARY, DONE], profile=PROFILE)
    running = run_nightshift.start("run", task, "--workspace", workspace)
    log = running.artifacts / "session.jsonl.zst"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if log.exists() and run_nightshift("session", "show", running.artifacts).stdout.count("sleep 60"):
            break
        time.sleep(0.2)
    running.send_signal(signal.SIGKILL)
    running.finish()

    compacted = run_nightshift("session", "compact", running.artifacts)

    assert compacted.exit_code == 0, compacted.stderr
    assert "messages folded" in compacted.stdout
    assert run_nightshift("session", "verify", running.artifacts).exit_code == 13
    opened = run_nightshift("session", "verify", running.artifacts, "--allow-open")
    assert opened.exit_code == 0, opened.stderr
    resumed = run_nightshift("resume", running.artifacts)
    assert resumed.exit_code == 0, resumed.stderr
    assert resumed.stdout == "Done.\n"
    assert run_nightshift("session", "verify", running.artifacts).exit_code == 0
    assert json.loads((running.artifacts / "result.json").read_text())["turns"] == 2
