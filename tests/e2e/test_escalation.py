"""In which mode a call runs: asked for once with a reason, or tightened by a rule; and what a denied call ends."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "Done."}
BACKENDS = pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
WIDER = {"sandbox_permissions": "danger-full-access", "justification": "The report goes outside."}


def calls(*given: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    """A response with calls."""
    return {"calls": [{"tool": tool, "args": arguments} for tool, arguments in given]}


def shell(command: str, **more: Any) -> dict[str, Any]:
    """A response with one shell call."""
    return calls(("shell", {"command": command, **more}))


def text(result: dict[str, Any]) -> str:
    """What the model was told."""
    return "\n".join(block["text"] for block in result["message"]["content"][0]["content"])


def codes(finished: Finished) -> list[str | None]:
    """Error code of each result, in order."""
    return [(data.get("error") or {}).get("code") for data in finished.data_of("tool/result")]


def assert_verifies(finished: Finished, run_nightshift: Nightshift) -> None:
    """The log is sealed and whole."""
    assert finished.events[-1]["type"] == "log/seal"
    verified = run_nightshift("session", "verify", finished.artifacts)
    assert verified.exit_code == 0, verified.stdout + verified.stderr


# --- escalation ----------------------------------------------------------------------------------


@BACKENDS
def test_what_is_approved_once_is_not_approved_twice(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """Each call is asked anew; only the calls that asked could write outside, and their results say in which mode."""
    outside = tmp_path / "outside"
    outside.mkdir()
    rules: list[dict[str, Any]] = [
        {"id": "wide", "tool": "shell", "command": "any", "escalate": ["danger-full-access"], "decision": "allow"},
        {"id": "rest", "tool": "shell", "command": "any", "decision": "allow"},
    ]
    task = scripted_task(
        [
            shell(f"touch {outside}/plain"),
            shell(f"touch {outside}/asked", **WIDER),
            shell(f"touch {outside}/asked", **WIDER),
            shell(f"touch {outside}/later"),
            DONE,
        ],
        rules=rules,
        profile={"sandbox": {"backend": backend}},
    )

    finished = run_nightshift("run", task, "--workspace", make_repo({"src/a.txt": "a\n"}))

    assert finished.exit_code == 0, finished.stderr
    assert [path.name for path in outside.iterdir()] == ["asked"]
    metas = [data["meta"] for data in finished.data_of("tool/result")]
    full = ("danger-full-access", "none", True)
    tight = ("workspace-write", backend, False)
    assert [(meta["mode"], meta["backend"], meta["exitCode"] == 0) for meta in metas] == [tight, full, full, tight]
    asked, decided = finished.data_of("approval/asked"), finished.data_of("approval/decided")
    assert len({data["id"] for data in asked}) == len(asked) == len(decided) == 4
    why = {"mode": "danger-full-access", "justification": "The report goes outside."}
    assert [data["escalation"] for data in asked] == [None, why, why, None]
    assert [data["reason"] for data in asked[1:3]] == [why["justification"]] * 2
    assert [(data["outcome"], data["rule"]) for data in decided] == [
        ("allowed-once", rule) for rule in ("rest", "wide", "wide", "rest")
    ]
    report = (finished.artifacts / "summary.md").read_text()
    assert report.count("- **ran in `danger-full-access`**, by the rule `wide`: `shell` `touch ") == 2
    plan = run_nightshift("plan", task, "--workspace", finished.lines[0]["cwd"]).stdout
    assert "but a call may ask for a wider mode for itself alone, by the rules wide" in plan
    assert_verifies(finished, run_nightshift)


@BACKENDS
def test_an_escalation_from_read_only_may_write_the_workspace_and_nothing_else(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """The mode that was asked for is the one that holds, by the kernel."""
    (tmp_path / "outside").mkdir()
    workspace = make_repo({"src/a.txt": "a\n"})
    rule = {"id": "w", "tool": "shell", "command": "any", "escalate": ["workspace-write"], "decision": "allow"}
    wider = {"sandbox_permissions": "workspace-write", "justification": "The fix is a new file."}
    task = scripted_task(
        [shell(f"touch src/b.txt; touch {tmp_path}/outside/x", **wider), DONE],
        rules=[rule],
        profile={"permission_mode": "read-only", "sandbox": {"backend": backend}},
    )

    finished = run_nightshift("run", task, "--workspace", workspace)

    [result] = finished.data_of("tool/result")
    assert result["meta"]["mode"] == "workspace-write"
    assert result["meta"]["exitCode"] != 0
    assert (workspace / "src" / "b.txt").exists()
    assert list((tmp_path / "outside").iterdir()) == []


def test_an_escalation_without_a_reason_is_a_malformed_call(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """It is not put to the policy, whatever that allows; the model is told what is missing."""
    workspace = make_repo({"src/a.txt": "a\n"})
    rule = {"id": "w", "tool": "shell", "command": "any", "escalate": ["danger-full-access"], "decision": "allow"}
    task = scripted_task(
        [
            shell("touch src/b.txt", sandbox_permissions="danger-full-access"),
            shell("touch src/b.txt", sandbox_permissions="danger-full-access", justification="   "),
            DONE,
        ],
        rules=[rule],
    )

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert codes(finished) == ["INVALID_ARGS", "INVALID_ARGS"]
    for result in finished.data_of("tool/result"):
        assert "justification: required with sandbox_permissions" in text(result)
    assert finished.data_of("approval/asked") == []
    assert not (workspace / "src" / "b.txt").exists()


@pytest.mark.parametrize(
    ("rules", "says"),
    [
        pytest.param(
            [{"id": "rest", "tool": "shell", "command": "any", "decision": "allow"}],
            ["stage policy", "rule default", "danger-full-access", "Escalation may not be asked"],
            id="no rule considers it",
        ),
        pytest.param(
            [
                {
                    "id": "never",
                    "tool": "shell",
                    "escalate": ["danger-full-access"],
                    "decision": "deny",
                    "reason": "nothing leaves the sandbox at night",
                },
                {"id": "rest", "tool": "shell", "command": "any", "decision": "allow"},
            ],
            ["stage policy", "rule never", "nothing leaves the sandbox at night"],
            id="a rule denies it",
        ),
    ],
)
def test_a_denied_escalation_says_why(
    rules: list[dict[str, Any]],
    says: list[str],
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
) -> None:
    """Stage, rule and reason; the call does not run in the smaller mode instead."""
    workspace = make_repo({"src/a.txt": "a\n"})
    task = scripted_task([shell("touch src/b.txt", **WIDER), shell("true"), DONE], rules=rules)

    finished = run_nightshift("run", task, "--workspace", workspace)

    denied = finished.data_of("tool/result")[0]
    assert denied["error"]["code"] == "POLICY_DENIED"
    for part in says:
        assert part in text(denied)
    assert finished.data_of("approval/decided")[0]["outcome"] == "rejected"
    assert not (workspace / "src" / "b.txt").exists()


def test_asking_for_the_mode_the_run_has_is_no_escalation(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """It is decided as any other call."""
    workspace = make_repo({"src/a.txt": "a\n"})
    same = {"sandbox_permissions": "workspace-write", "justification": "To be sure."}
    rules = [{"id": "rest", "tool": "shell", "command": "any", "decision": "allow"}]

    finished = run_nightshift(
        "run", scripted_task([shell("touch src/b.txt", **same), DONE], rules=rules), "--workspace", workspace
    )

    assert finished.exit_code == 0, finished.stderr
    [asked] = finished.data_of("approval/asked")
    assert asked["escalation"] is None
    assert (workspace / "src" / "b.txt").exists()


# --- a rule's tighter mode -----------------------------------------------------------------------


@BACKENDS
def test_a_rules_tighter_mode_holds_for_its_call(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The kernel refuses the write of that call, for commands and file tools alike; the call beside it may write."""
    workspace = make_repo({"src/a.txt": "a\n"})
    rules: list[dict[str, Any]] = [
        {"id": "look", "tool": "shell", "command": [["touch", "**"]], "mode": "read-only", "decision": "allow"},
        {"id": "make", "tool": "shell", "command": [["mkdir", "**"]], "decision": "allow"},
        {"id": "tight", "tool": "write_file", "paths": {"write": ["src/**"]}, "mode": "read-only", "decision": "allow"},
    ]
    task = scripted_task(
        [
            shell("touch src/b.txt"),
            calls(("write_file", {"path": "src/c.txt", "content": "c"})),
            shell("mkdir src/d"),
            DONE,
        ],
        rules=rules,
        profile={"sandbox": {"backend": backend}},
    )

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    first, second, third = finished.data_of("tool/result")
    assert [each["meta"]["mode"] for each in (first, second, third)] == ["read-only", "read-only", "workspace-write"]
    assert first["meta"]["exitCode"] != 0
    assert "Read-only file system" in text(first) or "Permission denied" in text(first)
    assert second["error"]["code"] == "SANDBOX_DENIED"
    assert sorted(path.name for path in (workspace / "src").iterdir()) == ["a.txt", "d"]
    assert [data["rule"] for data in finished.data_of("approval/decided")] == ["look", "tight", "make"]


def test_a_rules_tighter_mode_needs_a_sandbox_even_in_a_bare_run(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Nothing is silently wider than declared: without a backend the run ends before the first request."""
    workspace = make_repo({"src/a.txt": "a\n"})
    rules = [{"id": "look", "tool": "shell", "command": "any", "mode": "read-only", "decision": "allow"}]
    profile = {"permission_mode": "danger-full-access", "accept_unconfined": True}
    task = scripted_task([shell("touch src/b.txt"), DONE], rules=rules, profile=profile)

    finished = run_nightshift("run", task, "--workspace", workspace)
    without = run_nightshift(
        "run", task, "--workspace", workspace, env={"NIGHTSHIFT_DISABLE_BACKENDS": "bubblewrap,landlock"}
    )

    assert finished.data_of("tool/result")[0]["meta"]["mode"] == "read-only"
    assert not (workspace / "src" / "b.txt").exists()
    assert without.exit_code == 3
    assert without.data_of("request/sent") == []


# --- on_denied -----------------------------------------------------------------------------------

READS: list[dict[str, Any]] = [
    {"id": "look", "tool": "read_file", "paths": {"read": ["**"], "except": ["src/secret.txt"]}, "decision": "allow"},
    {"id": "make", "tool": "shell", "command": [["mkdir", "**"]], "decision": "allow"},
]
FILES = {"src/a.txt": "a\n", "src/b.txt": "b\n", "src/secret.txt": "s\n"}


@pytest.mark.parametrize("on_denied", ["continue", "abort"])
@pytest.mark.parametrize("kind", ["side by side", "one by one"])
def test_a_denied_call_ends_the_run_or_not_as_the_profile_says(
    on_denied: str, kind: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """What stands before it runs; with abort nothing behind it is asked for or started, and the log is closed."""
    workspace = make_repo(FILES)
    if kind == "side by side":
        names = ("src/a.txt", "src/secret.txt", "src/b.txt", "src/a.txt")
        reply = calls(*(("read_file", {"path": name}) for name in names))
    else:
        commands = ("mkdir src/one", "rm -r src", "mkdir src/two", "mkdir src/three")
        reply = calls(*(("shell", {"command": command}) for command in commands))
    task = scripted_task([reply, DONE], rules=READS, profile={"on_denied": on_denied})

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert_verifies(finished, run_nightshift)
    assert len(finished.data_of("tool/call")) == len(finished.data_of("tool/result")) == 4
    assert (workspace / "src" / "one").exists() is (kind == "one by one")
    if on_denied == "continue":
        assert finished.exit_code == 0, finished.stderr
        assert codes(finished) == [None, "POLICY_DENIED", None, None]
        assert len(finished.data_of("approval/asked")) == 4
        return
    assert (finished.exit_code, finished.result["code"]) == (4, "POLICY_DENIED")
    assert codes(finished) == [None, "POLICY_DENIED", "ABORTED_BEFORE_DISPATCH", "ABORTED_BEFORE_DISPATCH"]
    assert "on_denied: abort" in text(finished.data_of("tool/result")[2])
    assert len(finished.data_of("approval/asked")) == len(finished.data_of("approval/decided")) == 2
    assert not (workspace / "src" / "two").exists()
    assert finished.data_of("turn/end") == [
        {"turn": 1, "reason": {"kind": "aborted", "reason": {"kind": "policy", "code": "POLICY_DENIED"}}}
    ]
    assert len(finished.data_of("step/end")) == len(finished.data_of("request/sent")) == 1
    assert finished.result["approvals"] == {"asked": 2, "allowed": 1, "denied": 1}


def test_a_malformed_call_is_no_denial_that_ends_the_run(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """A mistake of the model is told to it; the call behind it runs."""
    reply = calls(("read_file", {"pth": "src/a.txt"}), ("no_such_tool", {}), ("read_file", {"path": "src/a.txt"}))
    task = scripted_task([reply, DONE], rules=READS, profile={"on_denied": "abort"})

    finished = run_nightshift("run", task, "--workspace", make_repo(FILES))

    assert finished.exit_code == 0, finished.stderr
    assert codes(finished) == ["INVALID_ARGS", "UNKNOWN_TOOL", None]


# --- masks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "offered"),
    [
        pytest.param({"allow": ["read_file", "glob"]}, ["read_file", "glob"], id="allow"),
        pytest.param({"deny": ["shell", "todo", "grep"]}, ["read_file", "write_file", "edit_file", "glob"], id="deny"),
        pytest.param({"allow": ["shell", "glob"], "deny": ["shell"]}, ["glob"], id="both"),
        pytest.param({"allow": []}, [], id="nothing"),
    ],
)
def test_a_tool_that_is_not_allowed_is_not_offered_and_a_call_of_it_is_denied(
    tools: dict[str, Any],
    offered: list[str],
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
) -> None:
    """The policy is not asked, whatever it allows; nothing runs, the model is told, and the run goes on."""
    workspace = make_repo({"src/a.txt": "a\n"})
    task = scripted_task([shell("touch src/b.txt"), DONE], profile={"tools": tools})

    finished = run_nightshift("run", task, "--workspace", workspace)

    shown = run_nightshift("session", "request", finished.artifacts, "--step", "1").stdout
    names = [
        tool["function"]["name"] if "function" in tool else tool["name"] for tool in json.loads(shown).get("tools", [])
    ]
    known = {"shell", "read_file", "write_file", "edit_file", "glob", "grep", "todo"}
    assert [name for name in names if name in known] == offered
    assert set(names) <= set(offered) if "allow" in tools else not set(names) & set(tools["deny"])
    assert codes(finished) == ["TOOL_MASKED"]
    assert "may not be used in this run" in text(finished.data_of("tool/result")[0])
    assert finished.data_of("approval/asked") == []
    assert not (workspace / "src" / "b.txt").exists()
    assert len(finished.data_of("request/sent")) == 2
    assert (finished.exit_code, finished.result["toolCalls"]["denied"]) == (4, 1)


@pytest.mark.parametrize("key", ["allow", "deny"])
def test_an_unknown_name_in_a_mask_is_refused(
    key: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """CONFIG_INVALID with the name that was meant, before anything is created."""
    task = scripted_task([DONE], profile={"tools": {key: ["read_flie"]}})

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 2
    assert "read_flie" in finished.stderr
    assert "read_file" in finished.stderr
    assert not finished.artifacts.exists()
