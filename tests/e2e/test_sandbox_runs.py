"""What a whole run promises of its sandbox: nothing starts outside of it, and without one nothing starts at all."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, chat_reply

if TYPE_CHECKING:
    from conftest import MakeRepo, Nightshift, ScriptedTask

BOTH = pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
DONE: dict[str, Any] = {"text": "Done."}
WIDER = {"sandbox_permissions": "danger-full-access", "justification": "It is asked for."}


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    """A response with one call."""
    return {"calls": [{"tool": tool, "args": arguments}]}


def text(result: dict[str, Any]) -> str:
    """What the model was told."""
    return "\n".join(block["text"] for block in result["message"]["content"][0]["content"])


# --- nothing runs bare ---------------------------------------------------------------------------

WATCHED = r"""
import json, os, runpy, sys
log = os.open(os.environ.pop("SPAWN_LOG"), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC)
EVENTS = {"subprocess.Popen", "os.exec", "os.posix_spawn", "os.fork", "os.forkpty", "os.system", "pty.spawn"}

def watch(event, arguments):
    if event in EVENTS:
        argv = [os.fsdecode(each) for each in arguments[1]] if event == "subprocess.Popen" else [event]
        os.write(log, json.dumps(argv).encode() + b"\n")

sys.addaudithook(watch)
runpy.run_module("runner", run_name="__main__", alter_sys=True)
"""


def watched(run_nightshift: Nightshift, tmp_path: Path, *arguments: str | Path) -> list[list[str]]:
    """Run the installed command with an interpreter that tells of each process it starts; returns their argvs."""
    installed = Path(sys.executable).with_name("nightshift")
    folder, log = tmp_path / "watched", tmp_path / "spawned"
    folder.mkdir()
    (folder / "watch.py").write_text(WATCHED, encoding="utf-8")
    shutil.copy(installed, folder / "nightshift")
    # The script calls the interpreter beside it with "-E -P -m runner" and its own arguments.
    shim = f"""#!/bin/sh
        test "$1 $2 $3 $4" = "-E -P -m runner" || exit 99
        shift 4
        exec "{sys.executable}" -E -P "{folder}/watch.py" "$@"
    """
    (folder / "python3").write_text(shim, encoding="utf-8")
    (folder / "python3").chmod(0o755)
    environment = {**run_nightshift.environment(), "SPAWN_LOG": str(log)}
    done = subprocess.run(
        [folder / "nightshift", *arguments], env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]


def is_wrapper(argv: list[str], backend: str) -> bool:
    """Whether it is a sandbox's own program, or the server that starts such."""
    if backend == "bubblewrap":
        return argv[:2] == ["/usr/bin/bwrap", "--args"]
    return argv[1:4] == ["-I", "-S", "-E"] and Path(argv[4]).name.startswith("supervisor.")


@BOTH
@pytest.mark.parametrize("isolation", ["in-place", "worktree"])
def test_no_path_of_a_run_starts_anything_outside_the_sandbox(
    backend: str,
    isolation: str,
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
    tmp_path: Path,
) -> None:
    """Commands, background processes, file tools, checks, the patch: nothing but git, before the first of them."""
    responses = [
        call("shell", command="echo x > src/b; cat .git/HEAD"),
        call("shell", command="sleep 60", background=True),
        call("write_file", path="src/c", content="x\n"),
        call("edit_file", path="src/c", edits=[{"old": "x", "new": "y"}]),
        call("grep", pattern="y", path="src"),
        call("glob", pattern="**/*"),
        DONE,
    ]
    task = scripted_task(
        responses,
        profile={"sandbox": {"backend": backend}},
        task={"checks": [{"name": "c", "run": "test -e src/c"}], "workspace": {"isolation": isolation}},
    )
    arguments = ("run", task, "--workspace", make_repo({"src/a": "1\n"}), "--artifacts", tmp_path / "artifacts")
    started = watched(run_nightshift, tmp_path, *arguments)

    first = next(number for number, argv in enumerate(started) if is_wrapper(argv, backend))
    assert {argv[0] for argv in started[:first]} == {"/usr/bin/git"}
    assert [argv for argv in started[first:] if not is_wrapper(argv, backend)] == []
    assert (tmp_path / "artifacts" / "changes.patch").read_text(encoding="utf-8").count("\n+++ b/src/") == 2


@BOTH
def test_a_call_that_escalates_is_the_one_that_runs_bare(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """The positive twin: it alone is started without a wrapper, and the log says which it was and who allowed it."""
    rules: list[dict[str, Any]] = [
        {"id": "wide", "tool": "shell", "command": "any", "escalate": ["danger-full-access"], "decision": "allow"},
        {"id": "rest", "tool": "*", "command": "any", "decision": "allow"},
    ]
    responses = [call("shell", command="echo 1"), call("shell", command="echo 2", **WIDER), DONE]
    task = scripted_task(responses, rules=rules, profile={"sandbox": {"backend": backend}})
    artifacts = tmp_path / "artifacts"
    started = watched(
        run_nightshift, tmp_path, "run", task, "--workspace", make_repo({"src/a": ""}), "--artifacts", artifacts
    )

    bare = [argv for argv in started if not is_wrapper(argv, backend) and argv[0] != "/usr/bin/git"]
    assert [argv[-1] for argv in bare] == ["echo 2"]
    shown = run_nightshift("session", "show", artifacts, "--json")
    assert '"danger-full-access"' in shown.stdout
    assert '"wide"' in shown.stdout


# --- a sandbox that breaks -----------------------------------------------------------------------

BREAK = {
    "bubblewrap": "mount --bind /bin/false /usr/bin/bwrap",
    # The server of the session goes as well, so that the next command needs the interpreter.
    "landlock": """
        for pid in $(cat /proc/$PPID/task/*/children); do
            tr '\\0' ' ' < /proc/$pid/cmdline | grep -q 'supervisor.* serve ' && kill -KILL $pid
        done
        mount --bind /bin/false "$1"
    """,
}


@BOTH
def test_a_wrapper_that_breaks_in_mid_run_ends_the_run(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """Code 3, not a failed call: what would come next is neither run nor asked for."""
    if os.geteuid() != 0:
        pytest.skip("only root can replace the wrapper, in mounts of its own")
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    script = tmp_path / "break.sh"
    script.write_text(BREAK[backend], encoding="utf-8")
    workspace = make_repo({"src/a": ""})
    rules: list[dict[str, Any]] = [
        {"id": "wide", "tool": "*", "command": "any", "escalate": ["danger-full-access"], "decision": "allow"},
        {"id": "rest", "tool": "*", "command": "any", "decision": "allow"},
    ]
    responses = [
        call("shell", command="echo before > src/before"),
        call("shell", command=f"exec /bin/bash {script} {python}", **WIDER),
        call("shell", command="echo after > src/after"),
        call("write_file", path="src/never", content="x"),
        DONE,
    ]
    task = scripted_task(responses, rules=rules, profile={"sandbox": {"backend": backend}})
    artifacts = tmp_path / "artifacts"
    command: list[str | Path] = [Path(sys.executable).with_name("nightshift"), "run", task, "--workspace", workspace]
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", *command, "--artifacts", artifacts],
        env=run_nightshift.environment(),
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )

    assert done.returncode == 3, done.stderr
    assert f"the {backend} s" in done.stderr.lower()  # the sandbox, or its supervisor
    assert "nightshift doctor" in done.stderr
    result = json.loads((artifacts / "result.json").read_text(encoding="utf-8"))
    assert result["code"] == "SANDBOX_UNAVAILABLE"
    assert sorted(path.name for path in (workspace / "src").iterdir()) == ["a", "before"]
    assert run_nightshift("session", "verify", artifacts).exit_code == 0


@BOTH
def test_a_denial_by_the_sandbox_is_a_result_that_names_escalation(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """The run goes on; the command and the file tool both say what stopped them."""
    (tmp_path / "outside").mkdir()
    rules: list[dict[str, Any]] = [
        {"id": "wide", "tool": "*", "command": "any", "escalate": ["danger-full-access"], "decision": "allow"},
        {"id": "rest", "tool": "*", "command": "any", "decision": "allow"},
    ]
    workspace = make_repo({"src/a": ""})
    responses = [
        call("shell", command=f"touch {tmp_path}/outside/x .git/x"),
        call("write_file", path=".git/config", content="x"),
        DONE,
    ]
    task = scripted_task(responses, rules=rules, profile={"sandbox": {"backend": backend}})
    finished = run_nightshift("run", task, "--workspace", workspace)

    shell, write = finished.data_of("tool/result")
    assert finished.exit_code == 0, finished.stderr
    assert "the sandbox (mode workspace-write) may have stopped this; escalation may be asked" in text(shell)
    assert write["error"]["code"] == "SANDBOX_DENIED"
    assert list((tmp_path / "outside").iterdir()) == []
    assert not (workspace / ".git" / "x").exists()


# --- no sandbox ----------------------------------------------------------------------------------


def listing(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Each path below a folder: when it was changed, and its content.

    Not the times in ``.git``: git refreshes those of objects that it would write and finds.
    """
    return {
        str(path): (
            0 if ".git" in path.parts else path.lstat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in (folder, *folder.rglob("*"))
    }


@pytest.mark.parametrize("mode", ["read-only", "workspace-write"])
@pytest.mark.parametrize("backend", ["auto", "bubblewrap", "landlock"])
def test_without_a_backend_no_request_is_made_and_nothing_is_written(
    mode: str, backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Code 3 before the model server hears anything; no tool wrote, and each reason is said."""
    workspace = make_repo({"src/a": "1\n"})
    before = listing(workspace)
    replies = [chat_reply(calls=[("c1", "write_file", '{"path": "src/b", "content": "x"}')]), chat_reply("done")]
    with ModelServer(replies) as server:
        model = {"provider": "openai", "model": "m", "base_url": server.url, "api_key_env": "SOME_KEY"}
        profile = {
            "model": {**model, "context_window": 100_000},
            "permission_mode": mode,
            "sandbox": {"backend": backend},
        }
        disabled = "bubblewrap,landlock" if backend == "auto" else backend
        finished = run_nightshift(
            "run",
            scripted_task([], profile=profile, task={"checks": [{"name": "c", "run": "touch src/c"}]}),
            *("--workspace", workspace),
            env={"SOME_KEY": "sk-some-key-1", "NIGHTSHIFT_DISABLE_BACKENDS": disabled},
        )
        requests = list(server.requests)

    assert (finished.exit_code, finished.result["code"]) == (3, "SANDBOX_UNAVAILABLE")
    assert requests == []
    assert listing(workspace) == before
    assert finished.events_of("tool/call", "request/sent", "check/start") == []
    assert finished.stderr.count("switched off by NIGHTSHIFT_DISABLE_BACKENDS") == disabled.count(",") + 1


@BOTH
def test_with_one_the_same_run_asks_and_writes(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The positive twin, with only the other backend switched off: the log has what was tried and what came of it."""
    workspace = make_repo({"src/a": "1\n"})
    other = {"bubblewrap": "landlock", "landlock": "bubblewrap"}[backend]
    task = scripted_task([call("write_file", path="src/b", content="x"), DONE])
    finished = run_nightshift("run", task, "--workspace", workspace, env={"NIGHTSHIFT_DISABLE_BACKENDS": other})

    assert finished.exit_code == 0, finished.stderr
    assert (workspace / "src" / "b").read_text() == "x"
    [start] = finished.data_of("run/start")
    tried = {each["backend"]: (each["ok"], each["reason"]) for each in start["sandbox"]["probes"]}
    assert tried[backend] == (True, None)
    if other == "bubblewrap":
        assert tried[other] == (False, "switched off by NIGHTSHIFT_DISABLE_BACKENDS")
    assert start["sandbox"]["backend"] == backend
    assert ("pid_isolation" in start["sandbox"]["notEnforced"]) == (backend == "landlock")


# --- the step log --------------------------------------------------------------------------------


@BOTH
def test_what_a_command_prints_is_no_command_to_the_ci_system(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """In a tool's output, a check's and the final message: the log has the words, the step log no line that acts."""
    lines = "::add-mask::x\n  ::stop-commands::x\n##[error]x\n##vso[task.complete]x\n"
    workspace = make_repo({"src/hostile": lines})
    checks = [{"name": "prints", "run": "cat src/hostile; exit 1", "retries": 0}]
    task = scripted_task(
        [call("shell", command="cat src/hostile"), {"text": lines}],
        profile={"sandbox": {"backend": backend}},
        task={"checks": checks},
    )
    finished = run_nightshift("run", task, "--workspace", workspace, "--log-level", "debug")

    shown = finished.stdout + finished.stderr
    assert finished.exit_code == 1
    assert not [line for line in shown.splitlines() if line.lstrip().startswith("::")]
    assert not any(word in shown for word in ("##[", "##vso["))
    assert "add-mask" in finished.stdout
    assert lines.strip() in text(finished.data_of("tool/result")[0])
