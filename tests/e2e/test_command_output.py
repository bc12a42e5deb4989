"""What stands on stdout and stderr, and that the surroundings of a CI job do not matter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, chat_reply

if TYPE_CHECKING:
    from conftest import MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "All done here."}
CALL: dict[str, Any] = {"text": "I look.", "calls": [{"tool": "shell", "args": {"command": "echo seen"}}]}


def test_text_output_is_the_final_message_alone(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """On stdout is the answer; outcome, cost line and the report's place are on stderr."""
    finished = run_nightshift("run", scripted_task([CALL, DONE]), "--workspace", make_repo())

    assert finished.stdout == "All done here.\n"
    assert "COMPLETED" in finished.stderr
    assert "tokens in" in finished.stderr
    assert str(finished.artifacts / "summary.md") in finished.stderr


def test_json_output_is_the_result(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The same value as result.json."""
    finished = run_nightshift("run", scripted_task([CALL, DONE]), "--workspace", make_repo(), "--output-format", "json")

    assert json.loads(finished.stdout) == finished.result


def test_stream_json_is_a_line_an_event_that_consumers_parse(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """system, assistant, user, assistant, result, all of one session."""
    task = scripted_task([CALL, DONE])

    finished = run_nightshift("run", task, "--workspace", make_repo(), "--output-format", "stream-json")

    lines = [json.loads(line) for line in finished.stdout.splitlines()]
    assert [line["type"] for line in lines] == ["system", "assistant", "user", "assistant", "result"]
    assert {line["session_id"] for line in lines} == {finished.result["sessionId"]}
    assert lines[0]["permissionMode"] == "workspace-write"
    assert lines[1]["message"]["content"][1]["input"] == {"command": "echo seen"}
    assert lines[2]["message"]["content"][0]["content"] == "seen\n"
    assert (lines[-1]["subtype"], lines[-1]["is_error"], lines[-1]["num_turns"]) == ("success", False, 2)


def test_json_diagnostics_name_the_session_on_each_line(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Every diagnostic of a run is one JSON object with the session id, turn and step where there are any."""
    finished = run_nightshift(
        "run", scripted_task([CALL, DONE]), "--workspace", make_repo(), "--log-format", "json", "--log-level", "debug"
    )

    lines = [json.loads(line) for line in finished.stderr.splitlines()]
    assert len(lines) >= 5
    assert {line["session"] for line in lines} == {finished.result["sessionId"]}
    assert any(line.get("step") == 1 for line in lines)
    assert any(line.get("exitCode") == 0 for line in lines)


def test_errors_are_json_too(run_nightshift: Nightshift) -> None:
    """Code, message and hint as fields."""
    finished = run_nightshift("plan", "/no/such/task.yaml", "--log-format", "json")

    [line] = [json.loads(line) for line in finished.stderr.splitlines()]
    assert (finished.exit_code, line["code"], line["level"]) == (2, "CONFIG_INVALID", "error")
    assert "/no/such/task.yaml" in line["event"]


@pytest.mark.parametrize(
    "env",
    [
        pytest.param({"LANG": "C", "LC_ALL": "C"}, id="ASCII locale"),
        pytest.param({"HOME": None, "XDG_STATE_HOME": None}, id="no HOME"),
        pytest.param({"HOME": "/proc/nowhere"}, id="HOME that is not there"),
        pytest.param({"PYTHONPATH": ".", "PYTHONSTARTUP": "x"}, id="PYTHONPATH"),
    ],
)
def test_a_run_does_not_depend_on_its_surroundings(
    env: dict[str, str | None], run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Locale, HOME, PYTHONPATH of a CI job; a workspace with a package called runner and a sitecustomize."""
    trap = "raise SystemExit('imported from the workspace')\n"
    workspace = make_repo({"runner/__init__.py": trap, "sitecustomize.py": trap, "ä/ö.txt": "ü\n"})
    task = scripted_task([{"calls": [{"tool": "glob", "args": {"pattern": "**/*.txt"}}]}, {"text": "fertig: ä"}])

    finished = run_nightshift("run", task, "--workspace", workspace, cwd=workspace, env=env)

    assert finished.exit_code == 0, finished.stderr
    assert "ä/ö.txt" in json.dumps(finished.data_of("tool/result"), ensure_ascii=False)


@pytest.mark.parametrize("closed", ["0", "1", "0 1 2"])
def test_closed_streams_do_not_stop_a_run(
    closed: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """No stdin, no stdout, none at all: the artifacts are written."""
    task, workspace, artifacts = scripted_task([CALL, DONE]), make_repo(), tmp_path / "artifacts"
    command = Path(sys.executable).with_name("nightshift")
    redirections = " ".join(f"{descriptor}>&-" for descriptor in closed.split())

    done = subprocess.run(
        [
            *("/bin/sh", "-c", f'exec "$@" {redirections}', "sh", command, "run", task),
            *("--workspace", workspace, "--artifacts", artifacts),
        ],
        env=run_nightshift.environment(),
        cwd=tmp_path,
        check=False,
        capture_output=True,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads((artifacts / "result.json").read_text())["code"] == "COMPLETED"


@pytest.mark.parametrize("output_format", ["text", "json", "stream-json"])
@pytest.mark.parametrize(
    ("sink", "is_lost"), [("| true", False), ("2> /dev/full", False), ("> /dev/full", True), ("> /dev/full 2>&1", True)]
)
@pytest.mark.parametrize(("steps", "exit_code", "code"), [(9, 0, "COMPLETED"), (1, 5, "LIMIT_REACHED")])
def test_an_output_nobody_takes_does_not_change_the_run(
    output_format: str,
    sink: str,
    is_lost: bool,
    steps: int,
    exit_code: int,
    code: str,
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
    tmp_path: Path,
) -> None:
    """A reader that went away knows it; a script whose file is empty since the disk is full learns it."""
    task = scripted_task([CALL, DONE], profile={"limits": {"steps": steps}})
    script = f'set -o pipefail; "$0" "$@" {sink}'

    done = subprocess.run(
        [
            *("/bin/bash", "-c", script, Path(sys.executable).with_name("nightshift"), "run", task),
            *("--workspace", make_repo(), "--artifacts", tmp_path / "artifacts", "--output-format", output_format),
        ],
        env=run_nightshift.environment(),
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )

    # A failed run keeps its own code, and in text the run of one step has no message that could be lost.
    is_lost = is_lost and (output_format != "text" or code == "COMPLETED")
    assert done.returncode == (15 if is_lost and exit_code == 0 else exit_code), done.stderr
    assert json.loads((tmp_path / "artifacts/result.json").read_text())["code"] == code
    assert "Traceback" not in done.stderr
    if is_lost and "2>&1" not in sink:
        assert "error STORAGE_FAILED: the output cannot be written: No space left on device" in done.stderr


@pytest.mark.parametrize("command", [["schema", "task"], ["plan", "--prompt", "x", "--profile", "quickstart"], ["-h"]])
def test_data_that_a_full_disk_does_not_take_is_an_error(
    command: list[str], run_nightshift: Nightshift, tmp_path: Path
) -> None:
    """For every command that prints some."""
    with open("/dev/full", "w") as full:  # noqa: PTH123  # a device
        done = subprocess.run(
            [Path(sys.executable).with_name("nightshift"), *command],
            env=run_nightshift.environment(),
            cwd=tmp_path,
            check=False,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )

    assert done.returncode == 15, done.stderr
    assert done.stderr.startswith("error STORAGE_FAILED: the output cannot be written")


def test_a_reader_that_goes_away_is_no_error(run_nightshift: Nightshift, tmp_path: Path) -> None:
    """``nightshift schema profile | head -1`` is quiet."""
    command = Path(sys.executable).with_name("nightshift")

    done = subprocess.run(
        ["/bin/sh", "-c", f"'{command}' schema profile | head -1"],
        env=run_nightshift.environment(),
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.stderr == ""
    assert done.stdout == "{\n"


def test_the_default_place_of_artifacts_is_private(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Below the state home, a folder a session, 0700; any command finds the session by its id."""
    nightshift = Path(sys.executable).with_name("nightshift")
    command: list[str | Path] = [nightshift, "run", scripted_task([DONE]), "--workspace", make_repo()]

    done = subprocess.run(
        [*command, "--output-format", "json"],
        env=run_nightshift.environment(),
        cwd="/",
        check=False,
        capture_output=True,
        text=True,
    )

    result = json.loads(done.stdout)
    directory = Path(run_nightshift.environment()["XDG_STATE_HOME"]) / "nightshift" / result["sessionId"]
    assert oct(directory.stat().st_mode & 0o777) == "0o700"
    assert {oct(path.stat().st_mode & 0o777) for path in directory.iterdir() if path.is_file()} == {"0o600"}
    shown = run_nightshift("session", "show", result["sessionId"])
    assert "All done here." in shown.stdout


def test_the_key_is_in_no_artifact(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """A key in the runner's environment is not in the command's, and what prints it anyway is redacted."""
    key = "sk-" + os.urandom(12).hex()
    workspace = make_repo({"leaked.txt": f"the key is {key}\n"})
    calls = [
        ("shell", {"command": "env; cat leaked.txt"}),
        ("read_file", {"path": "leaked.txt"}),
        ("shell", {"command": f"echo {key}"}),
    ]
    replies = [
        chat_reply(f"I use {key}.", calls=[(f"call_{number}", name, json.dumps(arguments))])
        for number, (name, arguments) in enumerate(calls)
    ]
    with ModelServer([*replies, chat_reply("All done here.")]) as server:
        model = {
            "provider": "openai",
            "model": "m",
            "base_url": server.url,
            "api_key_env": "SOME_KEY",
            "context_window": 100_000,
        }
        finished = run_nightshift(
            "run", scripted_task([], profile={"model": model}), "--workspace", workspace, env={"SOME_KEY": key}
        )

    assert finished.exit_code == 0, finished.stderr
    results = finished.data_of("tool/result")
    assert "[redacted SOME_KEY]" in json.dumps(results[0])
    assert "SOME_KEY=" not in json.dumps(results[0])
    assert results[2]["error"]["code"] == "INVALID_ARGS"
    everything = finished.stdout + finished.stderr + json.dumps(finished.lines)
    everything += "".join((finished.artifacts / name).read_text() for name in ("summary.md", "result.json"))
    assert key not in everything
