"""What a model or a command writes acts on nobody: not on the terminal, not on the CI system, not on the run's end."""

from __future__ import annotations

import json
import signal
import time
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, chat_reply, http_reply

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

HOSTILE = (
    "\x1b]0;title\x07\x1b[2Jhello\n::add-mask::abc\n  ::stop-commands::x\r::error::cr\n##[error]bad ##vso[task.x]y\n"
    "\u202eevil\u2028::warning::ls\x9b31m\ttab"
)
KEY = "sk-0123456789abcdef"  # a made-up key


def assert_harmless(text: str) -> None:
    """Nothing in it is a command or a control character."""
    assert not [line for line in text.split("\n") if line.strip().startswith("::")]
    assert "##[" not in text
    assert "##vso[" not in text
    assert not set(text) & set("\x1b\x07\r\x9b\u202e\u2028")


@pytest.fixture
def hostile_task(scripted_task: ScriptedTask) -> Path:
    """The model says, calls and names everything it should not."""
    call = {"tool": "shell", "args": {"command": "printf '::error::out\\n##[x]\\033]0;t\\007'"}}
    named = {"tool": f"no\n::error::name ##[x]{HOSTILE}", "args": {}}
    return scripted_task([{"text": HOSTILE, "calls": [call, named]}, {"text": HOSTILE}])


@pytest.mark.parametrize("output_format", ["text", "json", "stream-json"])
def test_no_output_of_a_run_acts(
    output_format: str, run_nightshift: Nightshift, hostile_task: Path, make_repo: MakeRepo
) -> None:
    """In every format, and the answer can still be read."""
    finished = run_nightshift("run", hostile_task, "--workspace", make_repo(), "--output-format", output_format)

    assert finished.exit_code == 0, finished.stderr
    assert_harmless(finished.stdout)
    assert_harmless(finished.stderr)
    assert "hello" in finished.stdout
    if output_format == "text":
        assert "\n:\\:add-mask::abc\n  :\\:stop-commands::x\\x0d::error::cr\n#\\#[error]bad" in finished.stdout
        assert "\ttab\n" in finished.stdout
    elif output_format == "json":
        assert json.loads(finished.stdout)["finalMessage"] == HOSTILE
    else:
        assert json.loads(finished.stdout.splitlines()[-1])["result"] == HOSTILE


def test_no_reading_command_acts(run_nightshift: Nightshift, hostile_task: Path, make_repo: MakeRepo) -> None:
    """The transcript, the numbers and their JSON; a name takes one line."""
    finished = run_nightshift("run", hostile_task, "--workspace", make_repo())
    for command in (["show"], ["show", "--full"], ["show", "--json"], ["stats"], ["stats", "--json"], ["verify"]):
        shown = run_nightshift("session", *command, finished.artifacts)
        assert shown.exit_code == 0, shown.stderr
        assert_harmless(shown.stdout)
    stats = run_nightshift("session", "stats", finished.artifacts).stdout
    [row] = [line for line in stats.split("\n") if "name no" in line]
    assert "name no\\n:\\:error::name #\\#[x]" in row
    assert json.loads(run_nightshift("session", "stats", "--json", finished.artifacts).stdout)


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_no_error_of_an_endpoint_acts(
    log_format: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Messages and hints quote it."""
    body = json.dumps({"error": {"message": "##[error]x \x1b[2J\u202e ::error::y"}}).encode()
    with ModelServer([http_reply(400, body, "application/json")]) as server:
        finished = _asked(server, run_nightshift, scripted_task, make_repo(), "--log-format", log_format)

    assert finished.exit_code == 9
    assert_harmless(finished.stderr)
    assert "[error]x" in finished.stderr


def _asked(
    server: ModelServer,
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    workspace: Path,
    *more: str,
    **task_keys: Any,
) -> Finished:
    """One run against an endpoint, with a key."""
    model = {"provider": "openai", "model": "m", "base_url": server.url, "api_key_env": "SOME_KEY"}
    task = scripted_task([], profile={"model": {**model, "context_window": 100_000}}, task=task_keys)
    return run_nightshift("run", task, "--workspace", workspace, *more, env={"SOME_KEY": KEY})


def assert_nowhere(finished: Finished) -> None:
    """The key is in no stream and no file."""
    assert KEY not in finished.stdout + finished.stderr
    for path in finished.artifacts.rglob("*"):
        assert not path.is_file() or KEY.encode() not in path.read_bytes(), path
    assert KEY not in json.dumps(finished.lines)
    with zipfile.ZipFile(finished.artifacts / "session.zip") as archive:
        assert not any(KEY.encode() in archive.read(name) for name in archive.namelist())


def test_a_key_in_a_redirect_reaches_nothing(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The address it leads to is said without it."""
    with ModelServer([http_reply(307, b"", "text/plain", {"location": f"http://127.0.0.1:9/{KEY}?k={KEY}"})]) as server:
        finished = _asked(server, run_nightshift, scripted_task, make_repo())

    assert finished.exit_code == 9
    assert "hint: redirects are not followed" in finished.stderr
    assert_nowhere(finished)


def test_a_key_in_the_name_of_a_call_reaches_nothing(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Nor one in its id."""
    replies = [chat_reply("", calls=[(f"id-{KEY}", f"tool-{KEY}", "{}")]), chat_reply("done")]
    with ModelServer(replies) as server:
        finished = _asked(server, run_nightshift, scripted_task, make_repo())

    assert "tool-[redacted" in json.dumps(finished.lines)
    assert_nowhere(finished)


def test_a_patch_and_an_output_with_the_key_are_withheld(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """TASK_FAILED, and why; the file stays in the workspace, where its owner can look at it."""
    workspace = make_repo({"d/a.txt": ""})
    (workspace / "make.sh").write_text(
        'k=sk-0123456789\nk="${k}abcdef"\nprintf %s "$k" > "d/$k.txt"\nprintf %s "$k" > d/o\n'
    )
    replies = [chat_reply(calls=[("c1", "shell", '{"command": "sh make.sh"}')]), chat_reply("done")]
    with ModelServer(replies) as server:
        finished = _asked(server, run_nightshift, scripted_task, workspace, outputs={"files": ["d/o"]})

    assert finished.exit_code == 1, finished.stderr
    assert finished.result["code"] == "TASK_FAILED"
    assert (workspace / "d" / f"{KEY}.txt").read_text() == KEY
    assert not (finished.artifacts / "changes.patch").exists()
    assert not (finished.artifacts / "files" / "d" / "o").exists()
    said = (finished.artifacts / "summary.md").read_text()
    assert "changes.patch is withheld: the changes hold the secret" in said
    assert "it is withheld, since it holds the secret" in said
    assert_nowhere(finished)


@pytest.mark.parametrize("wait", [0.5, 2.0])
def test_a_signal_ends_a_run_with_100_mb_of_bytes_in_time(
    wait: float, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Whatever is being done with them, the log is sealed and the export written within 5 seconds."""
    call = {"tool": "shell", "args": {"command": "head -c 100000000 /dev/urandom; touch d/ended"}}
    workspace = make_repo({"d/a.txt": ""})
    task = scripted_task(
        [{"text": "x", "calls": [call]}, {"text": "y", "calls": [{"tool": "shell", "args": {"command": "sleep 60"}}]}],
        profile={"limits": {"output_bytes": 1_000_000_000}},
    )
    running = run_nightshift.start("run", task, "--workspace", workspace)
    deadline = time.monotonic() + 30
    while not (workspace / "d" / "ended").exists():
        assert time.monotonic() < deadline, "the command never ended"
        assert running.process.poll() is None, running.finish().stderr
        time.sleep(0.02)
    time.sleep(wait)

    sent = time.monotonic()
    running.send_signal(signal.SIGTERM)
    finished = running.finish()

    assert time.monotonic() - sent < 5
    assert finished.exit_code == 143, finished.stderr
    assert finished.events[-1]["type"] == "log/seal"
    assert (finished.artifacts / "session.zip").exists()
    assert run_nightshift("session", "verify", finished.artifacts).exit_code == 0
