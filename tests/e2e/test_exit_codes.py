"""Every exit code but those of limits (``test_limits``), by the installed command on real parts."""

from __future__ import annotations

import json
import resource
import signal
import time
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, json_reply

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "Done."}


def shell(command: str, **more: Any) -> dict[str, Any]:
    """A response with one shell call."""
    return {"text": "I run a command.", "calls": [{"tool": "shell", "args": {"command": command, **more}}]}


def write(path: str, content: str) -> dict[str, Any]:
    """A response with one write_file call."""
    return {"calls": [{"tool": "write_file", "args": {"path": path, "content": content}}]}


def assert_whole(finished: Finished, run_nightshift: Nightshift) -> None:
    """The artifacts are complete and the log is whole."""
    names = {path.name for path in finished.artifacts.iterdir()}
    assert {"session.jsonl.zst", "result.json", "usage.json", "summary.md", "session.zip"} <= names
    verified = run_nightshift("session", "verify", finished.artifacts)
    assert verified.exit_code == 0, verified.stdout + verified.stderr
    assert [event["type"] for event in finished.events[-1:]] == ["log/seal"]


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_a_task_whose_check_passes_exits_0(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """COMPLETED on both backends: the file is written, the check sees it, the patch holds it."""
    workspace = make_repo({"src/a.txt": "one\n"})
    task = scripted_task(
        [write("src/a.txt", "two\n"), DONE],
        task={"checks": [{"name": "two", "run": "grep -q two src/a.txt"}], "outputs": {"patch": {"required": True}}},
        profile={"sandbox": {"backend": backend}},
    )

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    assert finished.result["code"] == "COMPLETED"
    assert finished.result["sandbox"]["backend"] == backend
    assert finished.result["checks"][0]["passed"] is True
    assert finished.result["patch"]["files"] == 1
    assert "+two" in (finished.artifacts / "changes.patch").read_text()
    assert_whole(finished, run_nightshift)


def test_a_failing_check_exits_1(run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo) -> None:
    """TASK_FAILED; the failing check stands in the result, what it printed in the report."""
    task = scripted_task(
        [shell("true"), DONE], task={"checks": [{"name": "never", "run": "echo 2 of 3 failed; exit 3"}]}
    )

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 1, finished.stderr
    assert finished.result["code"] == "TASK_FAILED"
    assert "2 of 3 failed" in (finished.artifacts / "summary.md").read_text()
    assert [check["passed"] for check in finished.result["checks"]] == [False]
    assert_whole(finished, run_nightshift)


def test_a_failing_check_goes_back_to_the_agent_while_retries_are_left(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The second turn sees the check's output and mends the file."""
    workspace = make_repo({"src/a.txt": "one\n"})
    task = scripted_task(
        [
            {"text": "Nothing to do."},
            {**write("src/a.txt", "two\n"), "expect": {}},
            DONE,
        ],
        task={
            "checks": [
                {"name": "two", "run": "grep two src/a.txt || echo it is not two; grep -q two src/a.txt", "retries": 1}
            ]
        },
    )

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    assert finished.result["turns"] == 2
    assert finished.result["checks"][0]["attempts"] == 2
    prompts = [json.dumps(data) for data in finished.data_of("user/message")]
    assert any("it is not two" in prompt for prompt in prompts)


@pytest.mark.parametrize(
    "responses",
    [
        pytest.param([{"text": "and so", "finish": "length"}], id="max-tokens"),
        pytest.param([{"text": "", "finish": "filter"}], id="refusal"),
        pytest.param(
            [{"calls": [{"tool": "read_file", "args": {"path": "absent.txt"}}]}, DONE], id="every call failed"
        ),
    ],
)
def test_an_answer_that_is_no_success_exits_1(
    responses: list[dict[str, Any]], run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """TASK_FAILED without any check."""
    finished = run_nightshift("run", scripted_task(responses), "--workspace", make_repo())

    assert finished.exit_code == 1, finished.stderr
    assert finished.result["code"] == "TASK_FAILED"


def test_a_bad_task_exits_2_and_creates_nothing(run_nightshift: Nightshift, scripted_task: ScriptedTask) -> None:
    """CONFIG_INVALID names the place; no artifacts folder comes into being."""
    task = scripted_task([DONE], task={"promt": "oops"})

    finished = run_nightshift("run", task)

    assert finished.exit_code == 2
    assert "CONFIG_INVALID" in finished.stderr
    assert "task.task.yaml:" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert not finished.artifacts.exists()


def test_a_wrong_option_exits_2(run_nightshift: Nightshift) -> None:
    """A usage error is CONFIG_INVALID."""
    finished = run_nightshift("doctor", "--no-such-option")

    assert finished.exit_code == 2
    assert "CONFIG_INVALID" in finished.stderr


@pytest.mark.parametrize("mode", ["read-only", "workspace-write"])
def test_without_a_sandbox_the_run_exits_3_before_the_first_request(
    mode: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """SANDBOX_UNAVAILABLE: no request was sent, nothing was written, the folder is complete."""
    workspace = make_repo()
    task = scripted_task([write("new.txt", "x"), DONE], profile={"permission_mode": mode})

    finished = run_nightshift(
        "run", task, "--workspace", workspace, env={"NIGHTSHIFT_DISABLE_BACKENDS": "bubblewrap,landlock"}
    )

    assert finished.exit_code == 3, finished.stderr
    assert finished.result["code"] == "SANDBOX_UNAVAILABLE"
    assert finished.result["sandbox"]["backend"] is None
    assert "no command ran" in (finished.artifacts / "summary.md").read_text()
    assert "bubblewrap" in finished.stderr
    assert "landlock" in finished.stderr
    assert finished.events_of("request/sent", "step/start") == []
    assert sorted(path.name for path in workspace.iterdir()) == [".git", "README.md"]
    assert_whole(finished, run_nightshift)


def test_a_denied_call_exits_4_when_the_profile_says_abort(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """POLICY_DENIED after the first denied call; the rest of the script is not asked for."""
    rules = [{"id": "look", "tool": "read_file", "decision": "allow"}]
    task = scripted_task([shell("true"), DONE], rules=rules, profile={"on_denied": "abort"})

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 4, finished.stderr
    assert finished.result["approvals"] == {"asked": 1, "allowed": 0, "denied": 1}
    assert len(finished.events_of("request/sent")) == 1
    assert_whole(finished, run_nightshift)


def test_a_run_whose_calls_were_all_denied_exits_4(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """0 of N calls allowed is no success, whatever the model says at the end."""
    rules: list[dict[str, Any]] = [
        {"id": "look", "tool": "read_file", "decision": "allow"},
        {"id": "no-net", "tool": "shell", "command": [["curl", "**"]], "decision": "deny", "reason": "no network here"},
    ]
    task = scripted_task([shell("curl x"), {**DONE, "expect": {"lastToolResultContains": "no-net"}}], rules=rules)

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 4, finished.stderr
    [decided] = finished.data_of("approval/decided")
    assert (decided["outcome"], decided["rule"], decided["by"]) == ("rejected", "no-net", "policy")
    [result] = finished.data_of("tool/result")
    assert result["error"]["code"] == "POLICY_DENIED"
    assert "no network here" in json.dumps(result["message"])


def openai_profile(server: ModelServer) -> dict[str, Any]:
    """A profile that asks ``server``."""
    return {
        "model": {
            "provider": "openai",
            "model": "some-model",
            "base_url": server.url,
            "api_key_env": "SOME_KEY",
            "context_window": 100_000,
        }
    }


def test_a_refused_key_exits_7(run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo) -> None:
    """PROVIDER_AUTH, after one request and no retry."""
    refusal = {"error": {"message": "bad key", "type": "invalid_request_error", "code": "invalid_api_key"}}
    with ModelServer([json_reply(401, refusal)]) as server:
        task = scripted_task([DONE], profile=openai_profile(server))

        finished = run_nightshift("run", task, "--workspace", make_repo(), env={"SOME_KEY": "sk-test-123456"})

    assert finished.exit_code == 7, finished.stderr
    assert finished.result["code"] == "PROVIDER_AUTH"
    assert len(finished.events_of("request/sent")) == 1


def test_a_script_without_answers_left_exits_9(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """PROVIDER_FAILED names the step."""
    finished = run_nightshift("run", scripted_task([shell("true")]), "--workspace", make_repo())

    assert finished.exit_code == 9, finished.stderr
    assert "2" in finished.result["error"]["message"]
    assert_whole(finished, run_nightshift)


def test_an_unreachable_endpoint_exits_9(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """PROVIDER_FAILED after the retry budget, each attempt in the log."""
    with ModelServer() as server:
        profile = openai_profile(server)
    task = scripted_task([DONE], profile={**profile, "retry": {"attempts": 2, "seconds": 30}})

    finished = run_nightshift("run", task, "--workspace", make_repo(), env={"SOME_KEY": "sk-test-123456"})

    assert finished.exit_code == 9, finished.stderr
    assert len(finished.events_of("request/sent")) == 2
    assert len(finished.events_of("llm/retry")) == 1
    assert server.url.removesuffix("/v1") in finished.stderr
    assert "(given up after 2 attempts in" in finished.stderr


def test_a_damaged_log_exits_13(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """LOG_INVALID from verify when one byte of a whole log was changed."""
    finished = run_nightshift("run", scripted_task([DONE]), "--workspace", make_repo())
    assert finished.exit_code == 0, finished.stderr
    lines = [json.dumps(line, separators=(",", ":"), ensure_ascii=False) for line in finished.lines]
    damaged = tmp_path / "damaged.jsonl"
    damaged.write_text("\n".join(lines).replace("Done.", "Dane.") + "\n", encoding="utf-8")

    verified = run_nightshift("session", "verify", damaged)

    assert verified.exit_code == 13
    assert "LOG_INVALID" in verified.stderr + verified.stdout


def test_a_required_patch_that_was_not_made_exits_14(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """NO_CHANGES."""
    task = scripted_task([shell("true"), DONE], task={"outputs": {"patch": {"required": True}}})

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 14, finished.stderr
    assert finished.result["patch"] is None
    assert_whole(finished, run_nightshift)


@pytest.mark.parametrize(
    ("run", "status", "hint"),
    [
        ("exit 3", 3, None),
        ("echo red; false", 1, "the end of what it printed is in summary.md"),
        ("no-such-program -q", 127, "its command was not found: is it on PATH inside the sandbox?"),
        ("/etc/passwd", 126, "its command was found and cannot be run: is it executable inside the sandbox?"),
    ],
)
def test_a_failing_check_is_said_with_its_exit_status(
    run: str,
    status: int,
    hint: str | None,
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
) -> None:
    """In the last lines on stderr, with what to do where the status tells."""
    task = scripted_task([DONE], task={"checks": [{"name": "tests", "run": run}]})

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 1, finished.stderr
    said = f"the check tests failed: exit status {status} (1 attempt)"
    last = [f"error TASK_FAILED: {said}", *([f"hint: {hint}"] if hint else [])]
    assert finished.stderr.splitlines()[-len(last) :] == last
    assert finished.result["error"] == {"code": "TASK_FAILED", "message": said, "hint": hint}
    assert ", 1 step\n" in finished.stderr


@pytest.mark.parametrize("works", [False, True], ids=["an idle agent", "an agent that works"])
def test_what_a_check_writes_is_not_the_agents_change(
    works: bool, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """NO_CHANGES for an idle agent; else the patch holds the agent's files and nothing of the check's."""
    responses = [write("src/a.txt", "two\n"), DONE] if works else [DONE]
    task = scripted_task(
        responses,
        task={
            "outputs": {"patch": {"required": True}},
            "checks": [{"name": "junk", "run": "echo junk > src/junk.txt"}],
        },
    )

    finished = run_nightshift("run", task, "--workspace", make_repo({"src/a.txt": "one\n"}))

    assert finished.exit_code == (0 if works else 14), finished.stderr
    patch = (finished.artifacts / "changes.patch").read_text()
    assert "junk" not in patch
    assert ("+two" in patch) is works
    assert_whole(finished, run_nightshift)


def test_a_log_that_cannot_be_written_exits_15(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """STORAGE_FAILED when the disk takes no more; what was written so far can be read."""
    responses = [shell("sleep 2"), *(shell(f"head -c 20000 /dev/urandom | base64 -w0 # {n}") for n in range(8)), DONE]
    # Once without the limit: Python would leave compiled files that are cut at it.
    workspace = make_repo()
    warm = scripted_task([shell("head -c 60000 /dev/zero"), DONE], name="warm")
    assert run_nightshift("run", warm, "--workspace", workspace).exit_code == 0
    running = run_nightshift.start("run", scripted_task(responses), "--workspace", workspace, measured=False)
    log = running.artifacts / "session.jsonl.zst"
    deadline = time.monotonic() + 20
    while not log.exists() or log.stat().st_size < 2000:
        assert time.monotonic() < deadline, "the log was never begun"
        time.sleep(0.02)
    limit = log.stat().st_size + 20_000
    resource.prlimit(running.process.pid, resource.RLIMIT_FSIZE, (limit, limit))

    finished = running.finish()

    assert finished.exit_code == 15, finished.stderr
    assert "STORAGE_FAILED" in finished.stderr
    assert "Traceback" not in finished.stderr
    shown = run_nightshift("session", "show", finished.artifacts)
    assert shown.exit_code == 0, shown.stderr


@pytest.mark.parametrize(("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_in_the_middle_of_a_tool_seals_and_exports(
    number: signal.Signals,
    exit_code: int,
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
) -> None:
    """CANCELLED: the tree is gone, the log whole, all artifacts there, within 5 seconds."""
    workspace = make_repo({"src/a.txt": "one\n"})
    marker = "31415.92"
    task = scripted_task([write("src/a.txt", "two\n"), shell(f"sleep {marker}"), DONE])
    running = run_nightshift.start("run", task, "--workspace", workspace)
    deadline = time.monotonic() + 20
    while not _commands_with(marker):
        assert time.monotonic() < deadline, "the tool was never started"
        time.sleep(0.02)

    sent = time.monotonic()
    running.send_signal(number)
    finished = running.finish()
    took = time.monotonic() - sent

    assert finished.exit_code == exit_code, finished.stderr
    assert took < 5
    assert _commands_with(marker) == []
    assert finished.result["outcome"] == "cancelled"
    assert finished.result["secondary"] == []
    assert finished.result["patch"]["files"] == 1
    assert_whole(finished, run_nightshift)


def _commands_with(marker: str) -> list[str]:
    """Command lines of running processes whose argument is ``marker``."""
    from pathlib import Path

    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = entry.read_bytes().split(b"\0")
        except OSError:
            continue  # it ended meanwhile
        if arguments[:2] == [b"sleep", marker.encode()]:
            found.append(entry.parent.name)
    return found


@pytest.mark.parametrize(
    ("soft", "exit_code", "softened"), [("task", 0, True), ("limit", 1, False)], ids=["its class", "another class"]
)
def test_soft_fail_softens_its_class_only(
    soft: str,
    exit_code: int,
    softened: bool,
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
) -> None:
    """The process exits 0, the result keeps the table's number and says so."""
    task = scripted_task([DONE], task={"checks": [{"name": "never", "run": "false"}]})

    finished = run_nightshift("run", task, "--workspace", make_repo(), "--soft-fail", soft)

    assert finished.exit_code == exit_code, finished.stderr
    assert finished.result["exitCode"] == 1
    assert finished.result.get("softFailed", False) is softened
    if softened:
        assert "soft" in finished.stderr


def test_soft_fail_is_refused_for_classes_that_must_fail(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Not for config, sandbox, log, storage, internal, cancelled."""
    for name in ("config", "sandbox", "log", "storage", "internal", "cancelled", "nonsense"):
        finished = run_nightshift(
            "run", scripted_task([DONE]), "--workspace", make_repo(name=name), "--soft-fail", name
        )

        assert finished.exit_code == 2, name
