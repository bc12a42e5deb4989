"""``result.json`` holds exactly the fields of its table, and is complete or not there."""

from __future__ import annotations

import json
import stat
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from runner.artifacts.facts import RunFold
from runner.artifacts.patch import PatchInfo
from runner.artifacts.result import build_result, write_file, write_result
from runner.artifacts.schema import build_schemas
from runner.errors import StorageError
from runner.outcome import cancelled_by
from runner.session import events as ev

if TYPE_CHECKING:
    from pathlib import Path

HEADER = {"id": "session-1", "createdAt": 5_000, "cwd": "/w"}


def events() -> list[ev.Event]:
    """A small run, one event every 250 ms from 5,000."""
    message: Any = {
        "role": "assistant",
        "content": [{"type": "text", "text": "done \ud800"}],
        "source": {"kind": "model", "provider": "scripted", "model": "m"},
        "id": "a",
    }
    usage: Any = {"inputTokens": 10, "outputTokens": 2}
    listed: list[ev.Event] = [
        ev.RunStart(
            task_digest="",
            profile_digest="",
            policy_digest="",
            tools_digest="",
            versions={},
            base={"commit": "c", "tree": "t", "dirty": False},
            sandbox={"backend": "bubblewrap", "mode": "workspace-write", "network": "off", "notEnforced": ["x"]},
            trust="trusted",
            config={
                "task": {"name": "fix"},
                "profile": {"limits": {"steps": 60, "turns": 8, "wall": 1800, "cost": 2.5, "tokens": None}},
            },
        ),
        ev.TurnStart(turn=1),
        ev.StepStart(turn=1, step=1),
        ev.AssistantMessage(turn=1, step=1, message=message, usage=usage, source_event_seqs=[]),
        ev.StepEnd(turn=1, step=1),
        ev.TurnEnd(turn=1, reason={"kind": "completed"}),
        ev.CheckEnd(name="tests", attempt=1, passed=True, exit_code=0, duration_ms=40),
    ]
    for seq, event in enumerate(listed):
        event.seq, event.time = seq, 5_000 + 250 * seq
    return listed


def built(fold: RunFold, **more: Any) -> dict[str, Any]:
    """The result of a fold, checked against the schema."""
    result = build_result(fold.outcome.outcome(causes=more.pop("causes", ())), fold.usage.usage(), fold.facts, **more)
    jsonschema_rs.validator_for(build_schemas()["result.schema.json"]).validate(json.loads(json.dumps(result)))
    return result


def test_a_completed_run_has_every_field() -> None:
    """In the order of the table; softFailed only where it says something."""
    artifacts = [{"name": "usage.json", "path": "usage.json", "sha256": "ab", "bytes": 3}]
    result = built(RunFold.of(events(), HEADER), patch=PatchInfo(1, 2, 3, "t2"), log_digest="dd", artifacts=artifacts)

    assert result["outcome"] == "completed"
    assert (result["code"], result["failureClass"], result["exitCode"]) == ("COMPLETED", None, 0)
    assert (result["sessionId"], result["task"]) == ("session-1", "fix")
    assert (result["startedAt"], result["durationMs"]) == (5_000, 1_500)
    assert (result["turns"], result["steps"], result["costUsd"]) == (1, 1, 0)
    assert result["usage"]["input"] == 10
    assert result["checks"] == [{"name": "tests", "passed": True, "attempts": 1, "durationMs": 40}]
    assert result["sandbox"] == {"backend": "bubblewrap", "mode": "workspace-write", "notEnforced": ["x"]}
    assert result["base"] == {"commit": "c", "tree": "t"}
    assert result["patch"] == {"files": 1, "insertions": 2, "deletions": 3, "tree": "t2"}
    assert (result["logDigest"], result["artifacts"], result["error"]) == ("dd", artifacts, None)
    assert "softFailed" not in result


def test_the_limits_are_those_of_the_profile_with_what_was_used() -> None:
    """Those that are not set are left out; the caller may know better."""
    fold = RunFold.of(events(), HEADER)
    given = [{"name": "wall", "used": 1.0, "max": 2.0}]

    assert built(fold)["limits"] == [
        {"name": "steps", "used": 1, "max": 60},
        {"name": "turns", "used": 1, "max": 8},
        {"name": "cost", "used": 0, "max": 2.5},
        {"name": "wall", "used": 1.5, "max": 1800},
    ]
    assert built(fold, limits=given)["limits"] == given


def test_a_softened_failure_keeps_its_number() -> None:
    """And says that it was softened."""
    reason = {"kind": "aborted", "reason": {"kind": "limit", "code": "LIMIT_REACHED", "name": "steps"}}
    ended: list[ev.Event] = [*events(), ev.TurnStart(turn=2), ev.TurnEnd(turn=2, reason=reason)]
    result = built(RunFold.of(ended, HEADER), soft_failed=True)

    assert (result["exitCode"], result["softFailed"], result["failureClass"]) == (5, True, "limit")
    assert result["error"]["code"] == "LIMIT_REACHED"
    assert result["error"]["hint"]


def test_secondary_causes_are_listed() -> None:
    """With code, class and message."""
    failed = [*events(), ev.CheckEnd(name="tests", attempt=2, passed=False, exit_code=1, duration_ms=1)]
    result = built(RunFold.of(failed, HEADER), causes=[cancelled_by("SIGTERM")])

    assert (result["outcome"], result["exitCode"]) == ("cancelled", 143)
    assert [(cause["code"], cause["failureClass"]) for cause in result["secondary"]] == [("TASK_FAILED", "task")]


def test_a_run_that_never_began_has_a_result() -> None:
    """Everything unknown is null."""
    result = built(RunFold.of([], HEADER), causes=[cancelled_by("SIGINT")])

    assert result["sandbox"] == {"backend": None, "mode": None, "notEnforced": []}
    assert (result["base"], result["patch"], result["task"]) == ({"commit": None, "tree": None}, None, None)


def test_the_time_between_an_end_and_its_resume_is_not_work() -> None:
    """Two spans are added up."""
    first = events()
    resumed: list[ev.Event] = [ev.RunResume(changes=[]), ev.TurnStart(turn=2)]
    for seq, event in enumerate(resumed):
        event.seq, event.time = len(first) + seq, 1_000_000 + 100 * seq

    assert built(RunFold.of([*first, *resumed], HEADER))["durationMs"] == 1_500 + 100


def test_the_file_is_private_and_complete(tmp_path: Path) -> None:
    """0600, valid UTF-8 whatever the model wrote, no temporary file left."""
    path = write_result(tmp_path, built(RunFold.of(events(), HEADER)))

    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text(encoding="utf-8"))["finalMessage"] == "done ?"
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]


def test_a_directory_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    """It went away."""
    with pytest.raises(StorageError, match=r"result\.json"):
        write_result(tmp_path / "missing", {})


def test_a_file_replaces_the_old_one_whole(tmp_path: Path) -> None:
    """A link in its place is replaced, not followed."""
    (tmp_path / "victim").write_text("keep")
    (tmp_path / "x").symlink_to(tmp_path / "victim")
    write_file(tmp_path / "x", b"new")

    assert (tmp_path / "victim").read_text() == "keep"
    assert (tmp_path / "x").read_bytes() == b"new"
    assert not (tmp_path / "x").is_symlink()
