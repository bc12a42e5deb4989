"""What signals leave: a second one, one that cannot be caught, and those that come after a run is over."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import MakeRepo, Nightshift, Running, ScriptedTask


def wait_for(path: Path, running: Running) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} never came"
        assert running.process.poll() is None, running.finish().stderr
        time.sleep(0.02)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_second_signal_says_what_is_lost_and_removes_half_written_files(
    log_format: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """One line names the log that may not be sealed; it can still be read, and no file of ours is half there."""
    workspace = make_repo({"d/a.txt": ""})
    call = {"tool": "shell", "args": {"command": "touch d/begun; sleep 60"}}
    running = run_nightshift.start(
        "run", scripted_task([{"calls": [call]}]), "--workspace", workspace, "--log-format", log_format
    )
    wait_for(workspace / "d" / "begun", running)
    # A step's moment between writing and renaming is too short to be met.
    half = [running.artifacts / name for name in (".session.zip.new", "changes.patch.part")]
    theirs = running.artifacts / "files" / "theirs.part"
    theirs.parent.mkdir()
    for path in (*half, theirs):
        path.touch()

    running.send_signal(signal.SIGINT)
    running.send_signal(signal.SIGTERM)
    finished = running.finish(timeout=5)

    assert finished.exit_code in (130, 143)  # the kernel does not say which of two came first
    second = "SIGINT" if finished.exit_code == 130 else "SIGTERM"
    (line,) = finished.stderr.splitlines()
    said = json.loads(line)["event"] if log_format == "json" else line
    log = running.artifacts / "session.jsonl.zst"
    assert said == f"ended at once by a second signal, {second}: the log may not be sealed: {log}"
    assert [path for path in half if path.exists()] == []
    assert theirs.exists()
    assert run_nightshift("session", "show", running.artifacts).exit_code == 0


def test_signals_behind_the_end_of_a_run_change_nothing(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The output comes whole, the exit code is that of the result, and there is no traceback."""
    answer = "word " * 100_000
    running = run_nightshift.start("run", scripted_task([{"text": answer}]), "--workspace", make_repo())
    # The answer is more than a pipe holds, so the process waits for its reader.
    wait_for(running.artifacts / "result.json", running)
    time.sleep(0.5)

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        running.send_signal(number)
        time.sleep(0.05)
    finished = running.finish()

    assert finished.exit_code == 0, finished.stderr
    assert finished.stdout.strip() == answer.strip()
    assert "Traceback" not in finished.stderr
    assert "COMPLETED" in finished.stderr


def test_a_signal_while_another_command_waits_for_its_reader_gives_no_traceback(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Ctrl-C ends a command that only reads, with 130."""
    finished = run_nightshift("run", scripted_task([{"text": "word " * 100_000}]), "--workspace", make_repo())
    showing = run_nightshift.start("session", "show", finished.artifacts, "--full")
    time.sleep(1)

    showing.send_signal(signal.SIGINT)
    shown = showing.finish()

    assert shown.exit_code == 130, shown.stderr
    assert "Traceback" not in shown.stderr


def test_the_private_folder_of_a_run_killed_long_ago_goes_with_a_later_run(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """Nobody clears up behind SIGKILL. For a week it stays for resume; a run that is at work keeps its own."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary)}
    workspaces = {name: make_repo({"d/a.txt": ""}, name=name) for name in ("killed", "alive", "later")}
    sleeping = [{"calls": [{"tool": "shell", "args": {"command": "touch d/begun; sleep 60"}}]}]
    running = {}
    for name in ("killed", "alive"):
        task = scripted_task(sleeping, name=name)
        running[name] = run_nightshift.start(
            "run", task, "--workspace", workspaces[name], env=environment, measured=False
        )
        wait_for(workspaces[name] / "d" / "begun", running[name])
    running["killed"].send_signal(signal.SIGKILL)
    running["killed"].finish()
    later = scripted_task([{"text": "Done."}])

    assert run_nightshift("run", later, "--workspace", workspaces["later"], env=environment).exit_code == 0
    assert len(list(temporary.iterdir())) == 2
    for lock in temporary.glob("nightshift-*/owner.lock"):
        os.utime(lock, (0, 0))
    assert run_nightshift("run", later, "--workspace", workspaces["later"], env=environment).exit_code == 0
    assert len(list(temporary.iterdir())) == 1
    running["alive"].send_signal(signal.SIGTERM)
    assert running["alive"].finish().exit_code == 143
    assert list(temporary.iterdir()) == []
