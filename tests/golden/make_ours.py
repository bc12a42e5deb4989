"""Makes the golden logs of ours again: ``python tests/golden/make_ours.py [NAME...]``.

Each is a real run of the installed command, against a script or against the model server on loopback. Ids,
times and what a machine's sandbox says differ from time to time, so the logs are made once and kept; a new
one is needed when the format gets something that the old ones do not have.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.testing.model_server import ModelServer, chat_reply, json_reply

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

OURS = Path(__file__).resolve().parent / "ours"
PLACE = Path("/tmp/nightshift-golden")
"""Where workspaces lie: the path stands in the logs, so it is the same on every machine."""

DONE = {"text": "Done."}
ALLOW_ALL = [{"id": "all", "tool": "*", "command": "any", "decision": "allow"}]
ENVIRONMENT = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
    "HOME": str(PLACE / "home"),
    "TMPDIR": str(PLACE / "tmp"),
    "LANG": "C.UTF-8",
    "GOLDEN_KEY": "a-key-for-loopback",
}
COMMIT = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "golden"),
        ("EMAIL", "golden@example.invalid"),
        ("DATE", "2026-01-01T00:00:00Z"),
    )
}


def call(tool: str, call_id: str | None = None, **args: Any) -> dict[str, Any]:
    """One call of a scripted answer."""
    return {"tool": tool, "args": args, **({"id": call_id} if call_id else {})}


def calls(*each: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A scripted answer with calls."""
    return {"calls": list(each), **more}


def prepare(
    name: str,
    responses: Sequence[Mapping[str, Any]],
    *,
    files: Mapping[str, str],
    task: Mapping[str, Any] | None = None,
    profile: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    rules: Sequence[Mapping[str, Any]] | None = None,
) -> list[str]:
    """Write workspace and task of a run below ``PLACE``; returns the command."""
    folder = PLACE / name
    workspace = folder / "workspace"
    for path, content in files.items():
        (workspace / path).parent.mkdir(parents=True, exist_ok=True)
        (workspace / path).write_text(content)
    for arguments in (["init", "-q", "-b", "main"], ["add", "-A"], ["commit", "-qm", "The state to start from"]):
        subprocess.run(["git", *arguments], cwd=workspace, check=True, env={**ENVIRONMENT, **COMMIT})
    scripted = {"provider": "scripted", "model": "scripted", "script": "script.yaml"}
    contents: dict[str, Mapping[str, Any]] = {
        "script": {"version": 1, "responses": list(responses)},
        "policy": {"version": 1, "default": "deny", "rules": list(rules or ALLOW_ALL)},
        "profile": {
            "version": 1,
            "model": {**({} if "provider" in (model or {}) else scripted), **(model or {})},
            "permission_mode": "workspace-write",
            "approvals": "policy.yaml",
            **(profile or {}),
        },
        "task": {"version": 1, "name": name, "prompt": "Do the work.", "profile": "profile.yaml", **(task or {})},
    }
    for kind, section in contents.items():
        (folder / f"{kind}.yaml").write_text(json.dumps(section, indent=2))
    command = str(Path(sys.executable).with_name("nightshift"))
    return [command, "run", str(folder / "task.yaml"), "--workspace", str(workspace), "--artifacts", str(OURS / name)]


def run(command: Sequence[str], *, code: int) -> None:
    """Run to the end; anything but ``code`` stops the script."""
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode != code:
        sys.exit(f"{' '.join(command)}\nexit code {done.returncode}, expected {code}\n{done.stderr}")


def turns() -> None:
    """Three turns: a to-do list, parallel calls, a denied call, an edit, a check, a patch, an empty answer."""
    rules: list[dict[str, Any]] = [
        {"id": "look", "tool": "shell", "command": [["cat", "**"]], "decision": "allow"},
        {"id": "files", "tool": ["todo", "read_file", "edit_file", "write_file"], "decision": "allow"},
        {"id": "push", "tool": "shell", "command": [["git", "push", "**"]], "decision": "deny", "reason": "People do."},
    ]
    responses = [
        calls(call("todo", todos=[{"content": "Read", "status": "in_progress"}]), reasoning="First I look around."),
        calls(*(call("read_file", path=f"src/{name}.py") for name in ("a", "b", "c")), text="Three at once."),
        {"text": "Both add. Größe: 3 files, naïve."},
        calls(call("edit_file", path="src/a.py", edits=[{"old": "x + y", "new": "y + x"}])),
        calls(call("shell", command="git push origin main"), call("shell", command="cat src/a.py")),
        calls(call("write_file", path="notes/new.txt", content="one\ntwo\n")),
        {"text": "Changed."},
        {"text": "All is said."},
    ]
    files = {f"src/{name}.py": f"def {name}(x, y):\n    return x + y\n" for name in "abc"}
    command = prepare(
        "turns",
        responses,
        files=files,
        rules=rules,
        task={
            "prompt": "Read the three files.",
            "turns": ["Change one of them.", "Anything else?"],
            "outputs": {"patch": {"required": True}},
            "checks": [{"name": "changed", "run": "grep -q 'y + x' src/a.py"}],
        },
    )
    run(command, code=0)


def compaction() -> None:
    """A small window: results are pruned, then a summary replaces what is old; one result spills."""
    files = {f"f{n}.txt": (f"{n}" * 79 + "\n") * 48 for n in range(7)}
    read = [calls(call("read_file", path=f"f{n}.txt")) for n in range(7)]
    responses = [calls(call("shell", command="seq 1 3000")), *read, {"text": "I was asked to read, and I read."}, DONE]
    command = prepare(
        "compaction",
        responses,
        files=files,
        task={"prompt": "Read them all."},
        model={"context_window": 10_000, "max_output_tokens": 500},
        profile={
            "compaction": {
                "min_output": 200,
                "summary_at": 0.55,
                "prune_over": 3_000,
                "prune_head": 2_000,
                "prune_tail": 400,
                "spill_head": 1_000,
                "spill_tail": 400,
            }
        },
    )
    run(command, code=0)


def openai() -> None:
    """The OpenAI dialect over HTTP: a rate limit and a fault that are tried again, parallel calls, two turns."""
    usage = {"prompt_tokens": 900, "completion_tokens": 40, "prompt_tokens_details": {"cached_tokens": 256}}
    both = [(f"call_{name}", "read_file", json.dumps({"path": f"{name}.txt"})) for name in ("one", "two")]
    write = ("call_write", "write_file", json.dumps({"path": "sum.txt", "content": "3\n"}))
    replies = [
        json_reply(429, {"error": {"message": "slow down"}}, {"retry-after": "0"}),
        chat_reply("I read both.", reasoning="Both are short.", calls=both, usage=usage),
        json_reply(500, {"error": {"message": "broken"}}),
        chat_reply(calls=[write], usage=usage),
        chat_reply("The sum is 3.", usage=usage),
        chat_reply("Yes.", usage=usage),
    ]
    with ModelServer(replies) as server:
        model = {
            "provider": "openai",
            "model": "mock",
            "base_url": server.url,
            "api_key_env": "GOLDEN_KEY",
            "context_window": 50_000,
            "prices": {"input": 0.3, "cache_read": 0.03, "output": 1.2},
        }
        command = prepare(
            "openai",
            [],
            files={"one.txt": "1\n", "two.txt": "2\n"},
            task={"prompt": "Add the numbers.", "turns": ["Are you sure?"]},
            model=model,
        )
        run(command, code=0)


def cancelled() -> None:
    """SIGTERM while a command runs: its result says so, the call behind it is not started."""
    responses = [
        calls(call("shell", command="echo begun > begun.txt")),
        calls(call("shell", command="touch running; sleep 60"), call("shell", command="echo never")),
    ]
    command = prepare("cancelled", responses, files={"README.md": "# A repository\n"})
    with subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 60
        while not (PLACE / "cancelled" / "workspace" / "running").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=60)
    if process.returncode != 143:
        sys.exit(f"exit code {process.returncode}, expected 143\n{errors}")


def forked() -> None:
    """The log of ``turns`` up to its second turn, as a new session."""
    command = [str(Path(sys.executable).with_name("nightshift")), "session", "fork", str(OURS / "turns")]
    run([*command, "--turn", "2", "--output", str(OURS / "forked")], code=0)


def resumed() -> None:
    """A fork of ``turns`` behind its first turn that was gone on with, under a changed script."""
    workspace = PLACE / "turns" / "workspace"
    if not workspace.exists():
        main(["turns", "forked"])
    script = {"version": 1, "responses": [{"text": ""}] * 3 + [calls(call("read_file", path="src/b.py")), *[DONE] * 4]}
    (PLACE / "turns" / "script.yaml").write_text(json.dumps(script))
    command = str(Path(sys.executable).with_name("nightshift"))
    target = str(OURS / "resumed")
    run([command, "session", "fork", str(OURS / "turns"), "--turn", "1", "--output", target], code=0)
    options = ["--workspace", str(workspace), "--accept-config-change", "--set", "limits.steps=60"]
    run([command, "resume", target, str(PLACE / "turns" / "task.yaml"), *options], code=0)


LOGS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (turns, compaction, openai, cancelled, forked, resumed)
}


def main(names: Sequence[str]) -> None:
    """Make the named logs, all if none is named."""
    for name in names or LOGS:
        for folder in (OURS / name, PLACE / name):
            shutil.rmtree(folder, ignore_errors=True)
        for kept in ("home", "tmp"):
            (PLACE / kept).mkdir(parents=True, exist_ok=True)
        LOGS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
