"""Runs that were killed or failed: recovered, and gone on with, by the installed command."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from runner.session import codec
from runner.session import events as ev
from runner.session.repair import OUTCOME_UNKNOWN
from runner.session.store import open_session
from runner.testing.sessions import SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "Done."}


def shell(command: str) -> dict[str, Any]:
    """A response with one shell call."""
    return {"calls": [{"tool": "shell", "args": {"command": command}}]}


def until(condition: Callable[[], bool], seconds: float = 20) -> None:
    """Wait for something that a process does."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def kill_when(
    run_nightshift: Nightshift, condition: Callable[[], bool], *arguments: str | Path, **options: Any
) -> Path:
    """Start a command and SIGKILL its process once a condition holds; returns its artifacts directory."""
    running = run_nightshift.start(*arguments, measured=False, **options)
    until(condition)
    running.send_signal(signal.SIGKILL)
    running.process.communicate()
    return running.artifacts


def assert_whole(run_nightshift: Nightshift, artifacts: Path) -> dict[str, Any]:
    """The session verifies as that of a finished run; returns what verify says."""
    names = {path.name for path in artifacts.iterdir()}
    assert {"session.jsonl.zst", "result.json", "usage.json", "summary.md", "session.zip"} <= names
    verified = run_nightshift("session", "verify", artifacts, "--json")
    assert verified.exit_code == 0, verified.stdout + verified.stderr
    said: dict[str, Any] = json.loads(verified.stdout)
    assert said["state"] == "whole"
    return said


def resumed(run_nightshift: Nightshift, artifacts: Path, *arguments: str | Path, **options: Any) -> Finished:
    """``nightshift resume`` on a directory."""
    return run_nightshift("resume", artifacts, *arguments, artifacts=artifacts, **options)


def told(finished: Finished) -> list[str]:
    """What the agent was told of interruptions."""
    messages = finished.data_of("user/message")
    return [each["content"][0]["text"] for each in messages if each["source"].get("plugin") == "resume"]


@pytest.fixture
def killed(run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo) -> Path:
    """Artifacts of a run that was killed in its second step, in the middle of a command."""
    workspace = make_repo({"a.txt": "start\n"})
    task = scripted_task(
        [
            shell("echo one >> a.txt"),
            shell("echo two >> a.txt; sleep 600"),
            shell("echo three >> a.txt; cat a.txt"),
            DONE,
        ],
        task={"workspace": {"path": str(workspace)}},
    )
    return kill_when(run_nightshift, lambda: "two" in (workspace / "a.txt").read_text(), "run", task)


def test_a_killed_run_goes_on(run_nightshift: Nightshift, killed: Path) -> None:
    """The next turn number, reason resume, and the model reads that the outcome of the cut call is unknown."""
    finished = resumed(run_nightshift, killed)

    assert finished.exit_code == 0, finished.stderr
    assert [each["turn"] for each in finished.data_of("turn/start")] == [1, 2]
    assert [each["step"] for each in finished.data_of("step/start")] == [1, 2, 3, 4]
    assert [each["reason"] for each in finished.data_of("request/header")] == ["initial", "resume"]
    assert [each["reason"]["kind"] for each in finished.data_of("turn/end")] == ["interrupted", "completed"]
    assert len(finished.events_of("run/resume")) == 1
    assert finished.data_of("run/resume")[0]["changes"] == []
    assert finished.data_of("run/resume")[0]["previousSeal"] == finished.data_of("log/seal")[0]["sha256"]
    assert told(finished)[0].startswith("The run was killed and goes on now.")
    body = run_nightshift("session", "request", killed, "--step", "3")
    assert OUTCOME_UNKNOWN[:60] in body.stdout
    assert (killed / "changes.patch").read_text().count("\n+") == 4  # three lines and the file's name
    assert finished.result["code"] == "COMPLETED"
    assert (finished.result["turns"], finished.result["steps"]) == (2, 4)
    said = assert_whole(run_nightshift, killed)
    assert said["requests"] == {"checked": 4, "notChecked": 0}


def test_a_killed_run_is_recovered_once_and_goes_on_behind_it(run_nightshift: Nightshift, killed: Path) -> None:
    """``recover`` seals and exports, again it does nothing; ``resume`` knows that the workspace is the same."""
    first = run_nightshift("recover", killed, "--json", artifacts=killed)
    log = (killed / "session.jsonl.zst").read_bytes()
    second = run_nightshift("recover", killed)

    assert first.exit_code == 0, first.stderr
    assert first.result["code"] == "INTERNAL"
    assert "killed or crashed" in first.result["error"]["message"]
    assert "resume" in first.result["error"]["hint"]
    assert first.result["patch"]["insertions"] == 2
    assert (second.exit_code, second.stdout) == (0, "nothing to recover: the session is whole\n")
    assert (killed / "session.jsonl.zst").read_bytes() == log
    assert_whole(run_nightshift, killed)

    finished = resumed(run_nightshift, killed)

    assert finished.exit_code == 0, finished.stderr
    assert "The run had ended (INTERNAL: " in told(finished)[0]
    assert "The workspace is as it was then." in told(finished)[0]
    assert_whole(run_nightshift, killed)


@pytest.mark.parametrize("killed_in", ["nothing yet", "a turn", "no turn", "the end"])
def test_the_time_until_a_recovery_counts_nowhere(killed_in: str, run_nightshift: Nightshift, tmp_path: Path) -> None:
    """Wherever the run was killed: durationMs ends with the last event that it wrote itself."""
    with SampleSession(tmp_path / "session") as session:
        if killed_in != "nothing yet":
            session.turn(steps=2)
        if killed_in == "a turn":
            session.start_turn()
            session.start_step("Go on.")
        elif killed_in == "the end":
            session.log.append(ev.RunEnd(outcome="completed", code="COMPLETED", exit_code=0, turns=1, steps=2))
    source = open_session(str(session.directory))
    last = max([source.header["createdAt"], *(event.time for event in source.events())])

    recovered = run_nightshift("recover", session.directory, "--json", artifacts=session.directory)

    assert recovered.exit_code == 0, recovered.stderr
    assert recovered.result["durationMs"] == last - source.header["createdAt"]
    assert {event["time"] for event in recovered.events[-4:]} == {last}
    assert_whole(run_nightshift, session.directory)


def test_after_a_recovery_a_changed_workspace_is_told(run_nightshift: Nightshift, killed: Path) -> None:
    """Somebody edits a file in between: the agent reads that."""
    assert run_nightshift("recover", killed).exit_code == 0
    workspace = killed.parent.parent / "workspace"
    (workspace / "new.txt").write_text("by somebody\n")

    finished = resumed(run_nightshift, killed)

    assert "The workspace was changed since by somebody else." in told(finished)[0]


@pytest.mark.parametrize("isolation", ["copy", "worktree"])
def test_a_killed_run_in_a_workspace_of_its_own_goes_on_there(
    isolation: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """What the agent wrote is still there; other runs meanwhile leave it alone; at the end it is removed."""
    workspace = make_repo({"a.txt": "start\n"})
    isolated = {"workspace": {"path": str(workspace), "isolation": isolation}}
    flag = tmp_path / "flag"
    flag.mkdir()
    task = scripted_task(
        [shell(f"echo one >> a.txt; touch {flag}/up; sleep 600"), shell("cat a.txt"), DONE],
        task=isolated,
        profile={"sandbox": {"writable": [str(flag)]}},
    )
    artifacts = kill_when(run_nightshift, (flag / "up").exists, "run", task)
    other = scripted_task([DONE], task=isolated, name="other")
    assert run_nightshift("run", other).exit_code == 0

    finished = resumed(run_nightshift, artifacts)

    assert finished.exit_code == 0, finished.stderr
    assert finished.data_of("tool/result")[-1]["message"]["content"][0]["content"][0]["text"] == "start\none\n"
    assert finished.result["patch"]["insertions"] == 1
    assert (workspace / "a.txt").read_text() == "start\n"
    assert not list((workspace / ".git").glob("worktrees/*"))
    records = run_nightshift.directory / "home" / "state" / "nightshift" / ".runs"
    assert list(records.iterdir()) == []


def test_used_limits_count(run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo) -> None:
    """Two of three steps were used before the kill, so one is left."""
    workspace = make_repo({"a.txt": ""})
    task = scripted_task(
        [shell("true"), shell("echo x > a.txt; sleep 600"), shell("true"), shell("true"), DONE],
        task={"workspace": {"path": str(workspace)}},
        profile={"limits": {"steps": 3}},
    )
    artifacts = kill_when(run_nightshift, lambda: "x" in (workspace / "a.txt").read_text(), "run", task)

    finished = resumed(run_nightshift, artifacts)

    assert finished.exit_code == 5, finished.stderr
    assert finished.result["steps"] == 3
    assert finished.data_of("limit/reached")[-1] | {"needed": None} == {
        "name": "steps", "used": 3, "max": 3, "percent": 100, "needed": None,
    }  # fmt: skip
    assert_whole(run_nightshift, artifacts)


def test_another_configuration_is_refused_by_name(run_nightshift: Nightshift, killed: Path) -> None:
    """CONFIG_INVALID with the keys, and the log as it was; accepted, the log says which keys."""
    log = (killed / "session.jsonl.zst").read_bytes()
    change = ["--set", "limits.steps=9", "--set", "limits.wall=5m"]

    refused = resumed(run_nightshift, killed, *change)

    assert refused.exit_code == 2
    assert "profile.limits.steps changed" in refused.stderr
    assert "profile.limits.wall changed" in refused.stderr
    assert "--accept-config-change" in refused.stderr
    assert (killed / "session.jsonl.zst").read_bytes() == log

    accepted = resumed(run_nightshift, killed, *change, "--accept-config-change")

    assert accepted.exit_code == 0, accepted.stderr
    assert accepted.data_of("run/resume")[0]["changes"] == ["profile.limits.steps", "profile.limits.wall"]


def test_other_prices_and_limits_hold_from_the_resume_on(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The log has the new configuration once, each step its own price, the reports the last limits; it all verifies."""
    workspace = make_repo({"a.txt": "start\n"})
    used = {"usage": {"input": 1_000, "output": 0}}
    stuck = [shell(f"echo {mark} >> a.txt; sleep 600") | used for mark in ("first", "second")]
    task = scripted_task(
        [shell("true") | used, *stuck, DONE | used],
        task={"workspace": {"path": str(workspace)}},
    )
    profile = task.with_name("task.profile.yaml")

    def configure(price: float, steps: int) -> None:
        settings = json.loads(profile.read_text())
        settings["model"]["prices"] = {"input": price, "output": 0}
        profile.write_text(json.dumps({**settings, "limits": {"steps": steps}}))

    configure(price=1_000, steps=9)
    artifacts = kill_when(run_nightshift, lambda: "first" in (workspace / "a.txt").read_text(), "run", task)
    configure(price=10_000, steps=5)
    again: list[str | Path] = ["resume", artifacts, task, "--accept-config-change"]
    kill_when(run_nightshift, lambda: "second" in (workspace / "a.txt").read_text(), *again, artifacts=artifacts)

    finished = run_nightshift(*again, artifacts=artifacts)

    assert finished.exit_code == 0, finished.stderr
    assert [row["costUsd"] for row in json.loads((artifacts / "usage.json").read_text())["perStep"]] == [1, 1, 10, 10]
    assert finished.result["costUsd"] == 22
    limits = {limit["name"]: (limit["used"], limit["max"]) for limit in finished.result["limits"]}
    assert limits["steps"] == (4, 5)
    for resume in finished.data_of("run/resume"):
        assert {"profile.limits.steps", "profile.model.prices.input"} <= set(resume["changes"])
    first, second = finished.data_of("run/resume")
    assert first["config"]["profile"]["model"]["prices"]["input"] == 10_000
    assert second.get("config") is None
    assert_whole(run_nightshift, artifacts)


def test_a_changed_policy_file_is_a_changed_configuration(run_nightshift: Nightshift, killed: Path) -> None:
    """The files are read anew, from where the command line said."""
    policy = killed.parent.parent / "tasks" / "task" / "task.policy.yaml"
    policy.write_text(policy.read_text().replace('"id": "all"', '"id": "everything"'))

    refused = resumed(run_nightshift, killed)

    assert refused.exit_code == 2
    assert "policy.rules changed" in refused.stderr


def test_a_completed_session_has_nothing_to_go_on_with(run_nightshift: Nightshift, killed: Path) -> None:
    """CONFIG_INVALID; nothing changes."""
    task = killed.parent.parent / "tasks" / "task" / "task.task.yaml"
    assert resumed(run_nightshift, killed).exit_code == 0
    before = {path.name: path.read_bytes() for path in killed.iterdir() if path.is_file()}

    again = resumed(run_nightshift, killed, task)

    assert again.exit_code == 2
    assert "completed" in again.stderr
    assert {path.name: path.read_bytes() for path in killed.iterdir() if path.is_file()} == before


def test_a_limit_that_was_reached_can_be_raised(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The run ended by itself, in place: it goes on with its changes in the workspace."""
    workspace = make_repo({"a.txt": "start\n"})
    task = scripted_task(
        [shell("echo one >> a.txt"), shell("echo two >> a.txt"), DONE],
        task={"workspace": {"path": str(workspace)}},
        profile={"limits": {"steps": 1}},
    )
    ended = run_nightshift("run", task)
    assert ended.exit_code in (5, 7)

    profile = task.with_name("task.profile.yaml")
    profile.write_text(profile.read_text().replace('"steps": 1', '"steps": 5'))
    finished = resumed(run_nightshift, ended.artifacts, task, "--accept-config-change")

    assert finished.exit_code == 0, finished.stderr
    assert "LIMIT_REACHED" in told(finished)[0]
    assert "The workspace is as it was then." in told(finished)[0]
    assert (workspace / "a.txt").read_text() == "start\none\ntwo\n"
    assert finished.result["patch"]["insertions"] == 2
    assert finished.result["base"]["tree"] == ended.result["base"]["tree"]
    assert_whole(run_nightshift, ended.artifacts)


@pytest.mark.parametrize("dirty", [False, True])
def test_a_downloaded_folder_goes_on_from_base_and_patch(
    dirty: bool, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """On another machine: ``changes.patch`` is applied to the recorded base in a fresh clone."""
    workspace = make_repo({"a.txt": "start\n", "d/b.txt": ""})
    if dirty:
        (workspace / "mine.txt").write_text("not committed\n")
    failed = {"error": {"status": 401, "message": "no"}}
    task = scripted_task([shell("echo one >> a.txt; echo n > d/new.txt"), failed, shell("cat a.txt d/new.txt"), DONE])
    ended = run_nightshift("run", task, "--workspace", workspace)
    assert ended.exit_code in (5, 7)
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(ended.artifacts, elsewhere / "artifacts")
    shutil.copytree(workspace, elsewhere / "clone")
    (elsewhere / "clone" / "a.txt").write_text("start\n")
    (elsewhere / "clone" / "d" / "new.txt").unlink()

    unknown = resumed(run_nightshift, elsewhere / "artifacts")
    finished = resumed(run_nightshift, elsewhere / "artifacts", task, "--workspace", elsewhere / "clone")

    assert unknown.exit_code == 2
    assert "name the task" in unknown.stderr
    assert finished.exit_code == 0, finished.stderr
    assert finished.data_of("tool/result")[-1]["message"]["content"][0]["content"][0]["text"] == "start\none\nn\n"
    assert finished.result["base"] == ended.result["base"]
    assert finished.result["patch"] == ended.result["patch"]
    assert_whole(run_nightshift, elsewhere / "artifacts")


def test_a_folder_whose_patch_was_changed_is_refused(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The patch is applied only as the session wrote it; nothing in the workspace changes."""
    workspace = make_repo({"a.txt": "start\n"})
    task = scripted_task(
        [shell("echo one >> a.txt"), {"error": {"status": 401, "message": "no"}}, DONE],
        task={"workspace": {"path": str(workspace)}},
    )
    ended = run_nightshift("run", task)
    patch = ended.artifacts / "changes.patch"
    patch.write_text(patch.read_text().replace("+one", "+two"))

    refused = resumed(run_nightshift, ended.artifacts, task)

    assert refused.exit_code == 2
    assert "changes.patch is not as the session wrote it" in refused.stderr
    assert (workspace / "a.txt").read_text() == "start\none\n"


def test_a_workspace_with_another_base_is_refused(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Both trees are named."""
    task = scripted_task([shell("echo one >> a.txt"), {"error": {"status": 401, "message": "no"}}, DONE])
    ended = run_nightshift("run", task, "--workspace", make_repo({"a.txt": "start\n"}))

    refused = resumed(
        run_nightshift, ended.artifacts, task, "--workspace", make_repo({"a.txt": "other\n"}, name="another")
    )

    assert refused.exit_code == 2
    assert ended.result["base"]["tree"] in refused.stderr


def test_a_session_that_still_runs_is_left_alone(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """One writer: both commands are refused, and the run ends as it would have."""
    workspace = make_repo({"a.txt": ""})
    task = scripted_task(
        [shell("echo x > a.txt; while [ -s a.txt ]; do sleep 0.1; done"), DONE],
        task={"workspace": {"path": str(workspace)}},
    )
    running = run_nightshift.start("run", task)
    until(lambda: (workspace / "a.txt").read_text() != "")

    refused = [run_nightshift(name, running.artifacts, artifacts=running.artifacts) for name in ("resume", "recover")]
    (workspace / "a.txt").write_text("")

    assert [each.exit_code for each in refused] == [2, 2]
    assert all("another process" in each.stderr for each in refused)
    assert running.finish().exit_code == 0


def test_prompts_that_wait_keep_their_turns(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The cut turn goes on in one of its own, then comes the second prompt."""
    workspace = make_repo({"a.txt": ""})
    task = scripted_task(
        [shell("echo x > a.txt; sleep 600"), {"text": "First."}, shell("true"), {"text": "Second."}],
        task={"workspace": {"path": str(workspace)}, "turns": ["And then this."]},
    )
    artifacts = kill_when(run_nightshift, lambda: "x" in (workspace / "a.txt").read_text(), "run", task)

    finished = resumed(run_nightshift, artifacts)

    assert finished.exit_code == 0, finished.stderr
    entered = [each["content"][0]["text"][:16] for each in finished.data_of("user/message")]
    assert entered[-3:] == ["Do the work.", "The run was kill", "And then this."]
    assert [each["turn"] for each in finished.data_of("turn/start")] == [1, 2, 3]
    assert finished.result["finalMessage"] == "Second."


def test_what_is_no_directory_of_ours_cannot_go_on(run_nightshift: Nightshift, killed: Path, tmp_path: Path) -> None:
    """A ZIP, a bare log, a missing path: one message each, code 2."""
    assert run_nightshift("recover", killed).exit_code == 0
    bare = tmp_path / "bare.jsonl.zst"
    shutil.copy(killed / "session.jsonl.zst", bare)

    for what in (killed / "session.zip", bare, tmp_path / "nowhere"):
        for command in ("resume", "recover"):
            refused = run_nightshift(command, what)
            assert refused.exit_code == 2, refused.stderr
            assert "Traceback" not in refused.stderr


def test_a_session_that_calls_itself_another_is_not_believed(
    run_nightshift: Nightshift, killed: Path, tmp_path: Path
) -> None:
    """A folder with the id of a run of this machine is not that run: its task must be named."""
    copy = tmp_path / "copy"
    shutil.copytree(killed, copy)

    refused = resumed(run_nightshift, copy)
    recovered = run_nightshift("recover", copy, artifacts=copy)

    assert refused.exit_code == 2
    assert "name the task" in refused.stderr
    assert recovered.exit_code == 0
    assert recovered.result["patch"] is None
    assert not (copy / "changes.patch").exists()


def rewritten(artifacts: Path, old: bytes, new: bytes, *, seals: bool = True) -> None:
    """Change a log by somebody who can, and with ``seals`` makes its seals anew."""
    lines = [line + b"\n" for line in open_session(str(artifacts)).raw_lines()]
    changed, digest = [], hashlib.sha256()
    for number, line in enumerate(lines):
        data = line.replace(old, new)
        if seals and data.startswith(b'{"type":"log/seal"'):
            event = json.loads(data)
            start = codec.seal_start(seq=event["seq"], time=event["time"], lines=number)
            sealed = digest.copy()
            sealed.update(start)
            data = start + sealed.hexdigest().encode() + codec.SEAL_END
        digest.update(data)
        changed.append(data)
    (artifacts / "session.jsonl.zst").write_bytes(zstandard.ZstdCompressor().compress(b"".join(changed)))


@pytest.mark.parametrize("identity", ["../../../../victim", "/tmp/victim", "a\\nb", "x" * 200])
def test_an_id_that_leads_elsewhere_is_refused(
    identity: str, run_nightshift: Nightshift, killed: Path, tmp_path: Path
) -> None:
    """LOG_INVALID before anything is written or removed, also where all seals fit."""
    victim = tmp_path / "victim.json"
    victim.write_text("mine")
    own = json.loads(next(open_session(str(killed)).raw_lines()))["id"]
    rewritten(killed, own.encode(), identity.replace("/tmp", str(tmp_path)).encode())

    task = killed.parent.parent / "tasks" / "task" / "task.task.yaml"
    for refused in (run_nightshift("resume", killed, task), run_nightshift("recover", killed)):
        assert refused.exit_code == 13, refused.stderr
        assert "id is not one of ours" in refused.stderr
    assert victim.read_text() == "mine"


def test_a_history_that_was_changed_is_not_gone_on_with(run_nightshift: Nightshift, killed: Path) -> None:
    """The seals are checked before the first request; nothing is written."""
    rewritten(killed, b"echo one", b"echo two", seals=False)
    log = (killed / "session.jsonl.zst").read_bytes()

    for command in ("resume", "recover"):
        refused = run_nightshift(command, killed)
        assert refused.exit_code == 13, refused.stderr
        assert "the seal does not fit" in refused.stderr
    assert sorted(path.name for path in killed.iterdir()) == ["session.jsonl.zst"]
    assert (killed / "session.jsonl.zst").read_bytes() == log


def test_a_refused_resume_changes_nothing(
    run_nightshift: Nightshift, killed: Path, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """Neither a wrong workspace nor a copy of the folder takes the session's note or its workspace away."""
    task = killed.parent.parent / "tasks" / "task" / "task.task.yaml"
    other = make_repo({"b.txt": ""}, name="other")
    copy = tmp_path / "copy"
    shutil.copytree(killed, copy)

    assert resumed(run_nightshift, killed, "--workspace", other).exit_code == 2
    assert resumed(run_nightshift, copy, task, "--workspace", other).exit_code == 2
    finished = resumed(run_nightshift, killed)

    assert finished.exit_code == 0, finished.stderr


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_patch_that_is_no_file_is_refused_at_once(
    kind: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """A folder may be anybody's: nothing is waited for, no link is followed."""
    workspace = make_repo({"a.txt": "start\n"})
    task = scripted_task(
        [shell("echo one >> a.txt"), {"error": {"status": 401, "message": "no"}}, DONE],
        task={"workspace": {"path": str(workspace)}},
    )
    ended = run_nightshift("run", task)
    patch = ended.artifacts / "changes.patch"
    patch.unlink()
    if kind == "pipe":
        os.mkfifo(patch)
    else:
        patch.symlink_to("/dev/zero")

    refused = resumed(run_nightshift, ended.artifacts, task, timeout=20)

    assert refused.exit_code == 2, refused.stderr
    assert "changes.patch" in refused.stderr


def test_a_session_keeps_its_prompts(run_nightshift: Nightshift, killed: Path) -> None:
    """Another prompt is another task, accepted or not."""
    task = killed.parent.parent / "tasks" / "task" / "task.task.yaml"
    task.write_text(task.read_text().replace("Do the work.", "Do something else."))

    refused = resumed(run_nightshift, killed, "--accept-config-change")

    assert refused.exit_code == 2
    assert "task.prompt changed, and a session keeps its prompts" in refused.stderr


def test_a_killed_session_on_another_machine_is_told_that_its_work_is_gone(
    run_nightshift: Nightshift, killed: Path, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """Without a patch there is only the base; the model must not believe its own history."""
    copy = tmp_path / "copy"
    shutil.copytree(killed, copy)
    task = killed.parent.parent / "tasks" / "task" / "task.task.yaml"

    finished = resumed(run_nightshift, copy, task, "--workspace", make_repo({"a.txt": "start\n"}, name="clone"))

    assert finished.exit_code == 0, finished.stderr
    assert "nothing that earlier calls may have written is in it" in told(finished)[0]


def test_a_whole_session_is_only_looked_at(run_nightshift: Nightshift, killed: Path) -> None:
    """A log that was packed another way keeps its bytes, which the result names."""
    assert run_nightshift("recover", killed).exit_code == 0
    log = killed / "session.jsonl.zst"
    decoded = b"".join(line + b"\n" for line in open_session(str(killed)).raw_lines())
    log.write_bytes(zstandard.ZstdCompressor(level=1).compress(decoded))
    before = log.read_bytes()

    again = run_nightshift("recover", killed)

    assert again.stdout == "nothing to recover: the session is whole\n"
    assert log.read_bytes() == before


def kill_and_go_on(
    count: int, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, seed: int
) -> None:
    """SIGKILL runs at random times; each is recovered, whole, and goes on to its end."""
    chosen = random.Random(seed)
    steps = 8
    done = 0
    for number in range(10 * count):
        if done == count:
            return
        workspace = make_repo({"a.txt": ""}, name=f"workspace-{number}")
        responses = [shell(f"echo {step} >> a.txt; sleep 0.15") for step in range(steps)]
        task = scripted_task(
            [*responses, DONE, DONE], task={"workspace": {"path": str(workspace)}}, name=f"task{number}"
        )
        running = run_nightshift.start("run", task, measured=False)
        time.sleep(chosen.uniform(0.4, 2.4))
        running.send_signal(signal.SIGKILL)
        running.process.communicate()
        artifacts = running.artifacts
        if not (artifacts / "session.jsonl.zst").exists():
            continue
        recovered = run_nightshift("recover", artifacts, artifacts=artifacts)
        assert recovered.exit_code == 0, recovered.stderr
        if "nothing to recover" in recovered.stdout:
            continue
        assert_whole(run_nightshift, artifacts)
        if not recovered.events_of("run/start"):
            assert resumed(run_nightshift, artifacts).exit_code == 2
            continue
        if recovered.result["code"] == "COMPLETED":
            continue
        finished = resumed(run_nightshift, artifacts)
        assert finished.exit_code == 0, finished.stderr
        assert finished.result["finalMessage"] == "Done."
        written = {int(line) for line in (workspace / "a.txt").read_text().split()}
        cut = [each for each in finished.data_of("tool/result") if each.get("error")]
        # A script does not ask again for the call that was cut off.
        assert len(set(range(steps)) - written) <= len(cut) <= 1
        turns = [each["turn"] for each in finished.data_of("turn/start")]
        assert turns == list(range(1, len(turns) + 1))
        assert assert_whole(run_nightshift, artifacts)["requests"]["notChecked"] == 0
        done += 1
    pytest.fail(f"only {done} of {count} kills hit a run")


@pytest.mark.timeout(120)
def test_runs_killed_at_random_go_on(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Three real SIGKILLs."""
    kill_and_go_on(3, run_nightshift, scripted_task, make_repo, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_runs_killed_at_random_go_on(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Twenty real SIGKILLs."""
    kill_and_go_on(20, run_nightshift, scripted_task, make_repo, seed=2)
