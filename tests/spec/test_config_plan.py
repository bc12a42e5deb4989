"""``nightshift plan`` and ``nightshift schema``, as the installed command."""

from __future__ import annotations

import json
import subprocess
from typing import TYPE_CHECKING

import jsonschema_rs
import pytest

from runner.config.plan import SCHEMA

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Finished, Nightshift

POLICY = """\
version: 1
default: deny
rules:
  - {id: look, tool: [read_file, grep], decision: allow}
  - {id: tests, tool: shell, command: [[pytest, "**"]], mode: read-only, decision: allow}
  - {id: edit, tool: write_file, paths: {write: ["src/**"], except: ["src/gen/**"]}, decision: allow}
  - {id: no-push, tool: shell, command: [[git, push, "**"]], decision: deny, reason: not here}
  - {id: wide, tool: shell, command: [[make, "**"]], escalate: [danger-full-access], decision: allow}
  - {id: others, tool: todo, trust: [untrusted], decision: allow}
"""
PROFILE = """\
version: 1
model: {provider: openai, model: gpt-5-mini, api_key_env: MY_KEY}
approvals: p.policy.yaml
permission_mode: workspace-write
tools: {deny: [write_file]}
"""
TASK = """\
version: 1
prompt: Fix ${inputs.title}.
profile: ./p.profile.yaml
inputs: {title: {env: TITLE, trust: untrusted}}
limits: {steps: 9}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a task and what it needs."""
    home = tmp_path / "files"
    (home / "ws").mkdir(parents=True)
    for name, text in (("t.task.yaml", TASK), ("p.profile.yaml", PROFILE), ("p.policy.yaml", POLICY)):
        (home / name).write_text(text)
    return home


def plan(run_nightshift: Nightshift, folder: Path, *arguments: str, **variables: str | None) -> Finished:
    """Plan the task of ``folder``."""
    environment = {"TITLE": "a title", **variables}
    return run_nightshift("plan", "t.task.yaml", "--workspace", "ws", *arguments, cwd=folder, env=environment)


def test_a_plan_shows_values_with_origins_and_what_the_policy_allows(folder: Path, run_nightshift: Nightshift) -> None:
    """On stdout, without the key; stderr is silent and nothing is created."""
    before = sorted(folder.rglob("*"))

    done = plan(run_nightshift, folder, "--set", "limits.wall=5m")

    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert (done.exit_code, done.stderr) == (0, "")
    assert "trigger trusted: no event file: started from the command line" in lines
    assert "steps 9 t.task.yaml:5" in lines
    assert "wall 300.0 --set" in lines
    assert "turns 8 default" in lines
    assert 'model "gpt-5-mini" p.profile.yaml:2' in lines
    assert "allow look: grep, read_file" in lines
    assert "allow tests: shell: pytest ** (in read-only) (opaque: what it runs is bounded by the sandbox only)" in lines
    assert "allow edit: write_file: write src/**; except src/gen/**" in lines
    assert "deny no-push: shell: git push **" in lines
    opaque = "(opaque: what it runs is bounded by the sandbox only)"
    assert f"allow wide: shell: make ** (asking for danger-full-access) {opaque}" in lines
    assert "allow others: todo (untrusted only) (not in this run)" in lines
    assert "MY_KEY: not set" in lines
    assert "p.policy.yaml" in done.stdout
    assert sorted(folder.rglob("*")) == before


def test_a_plan_as_json_keeps_to_its_schema(folder: Path, run_nightshift: Nightshift) -> None:
    """With the prompt as the model would get it, and whether the key is there, never the key."""
    done = plan(run_nightshift, folder, "--json", MY_KEY="the-key")

    report = json.loads(done.stdout)
    jsonschema_rs.validator_for(SCHEMA).validate(report)
    assert report["values"]["profile.limits.steps"] == {"value": 9, "origin": "t.task.yaml:5"}
    assert report["secrets"] == [{"name": "MY_KEY", "set": True}]
    assert [rule["opaque"] for rule in report["policy"]] == [False, True, False, False, True, False]
    tools = {tool["tool"]: tool for tool in report["tools"]}
    assert tools["shell"] == {
        "tool": "shell",
        "offered": True,
        "outcome": "some",
        "allows": [{"rule": "tests", "mode": "read-only"}],
        "denies": ["no-push"],
        "escalated": ["wide"],
        "opaque": ["tests"],
    }
    assert (tools["write_file"]["offered"], tools["write_file"]["outcome"]) == (False, "some")
    assert (tools["todo"]["outcome"], tools["todo"]["allows"]) == ("deny", [])
    assert "<<< " in report["prompt"]
    assert "the-key" not in done.stdout


def test_a_plan_says_what_becomes_of_the_calls_of_each_tool(folder: Path, run_nightshift: Nightshift) -> None:
    """Under this run's mode and trust: by which rules, in which mode, and what bounds what runs."""
    trusted = plan(run_nightshift, folder).stdout
    untrusted = plan(run_nightshift, folder, "--trust", "untrusted").stdout

    def section(text: str) -> list[str]:
        return [" ".join(line.split()) for line in text.partition("what the task may do\n")[2].splitlines()]

    assert section(trusted)[:11] == [
        "shell some by tests in read-only; never what matches no-push; with escalation by wide",
        "read_file allow by look",
        "glob deny",
        "grep allow by look",
        "edit_file deny",
        "apply_patch deny",
        "todo deny",
        "report_finding deny",
        "not offered, each call denied: write_file, fetch_url",
        "opaque: what it runs is bounded by the sandbox only: tests",
        "sandbox: workspace-write, nothing is written outside the workspace, sandbox.writable and a temporary folder",
    ]
    assert "todo allow by others" in section(untrusted)


def test_a_long_rule_is_shown_line_by_line(folder: Path, run_nightshift: Nightshift) -> None:
    """What it looks at stands below it."""
    text = POLICY.replace(
        '[[pytest, "**"]]', f'[[pytest, "**"], [{"x" * 100}, "**"], {{argv: [git, log], refuse_flags: [-O]}}]'
    )
    (folder / "p.policy.yaml").write_text(text)

    lines = [line.strip() for line in plan(run_nightshift, folder).stdout.splitlines()]

    at = lines.index("allow tests: shell (in read-only) (opaque: what it runs is bounded by the sandbox only)")
    assert lines[at + 1 : at + 4] == ["pytest **", f"{'x' * 100} **", "git log without -O"]


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_what_a_value_holds_does_nothing_in_a_terminal_or_a_ci_log(
    folder: Path, run_nightshift: Nightshift, arguments: list[str]
) -> None:
    """Escape sequences, workflow commands, line ends, text direction."""
    done = plan(run_nightshift, folder, *arguments, TITLE="\x1b[31m ##[error]x\n::error::x \u202e")

    assert done.exit_code == 0
    for active in ("\x1b", "##[", "\n::error::"):
        assert active not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--set", "model.model=x"],
            "error CONFIG_INVALID: --set model.model: the profile does not let this key be set",
        ),
        (["--set", "limits.steps=500"], "error CONFIG_INVALID: --set limits.steps: loosens the profile's 200"),
        (["--input", "titel=x"], "error CONFIG_INVALID: --input titel: the task has no such input"),
        (["--profile", "revew"], "error CONFIG_INVALID: no shipped profile is called 'revew'"),
        (["--artifacts", "ws/out"], "error CONFIG_INVALID: --artifacts"),
        (["--event", "absent.json"], "error CONFIG_INVALID: --event absent.json: the event file cannot be read"),
        (["--prompt", "x"], "error CONFIG_INVALID: a task file and --prompt exclude each other"),
        (["--trust", "trusted"], "error CONFIG_INVALID: Invalid value for '--trust'"),
    ],
)
def test_a_wrong_option_exits_2_with_one_message(
    folder: Path, run_nightshift: Nightshift, arguments: list[str], message: str
) -> None:
    """On stderr, with a hint, without a traceback."""
    done = plan(run_nightshift, folder, *arguments)

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith(message)
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_file_with_problems_exits_2_with_all_of_them(folder: Path, run_nightshift: Nightshift) -> None:
    """One line each, file, line and column first."""
    (folder / "p.policy.yaml").write_text(
        POLICY.replace("[pytest,", "[pytset, pytest, 1,").replace("decision", "dcision", 1)
    )

    done = plan(run_nightshift, folder)

    assert done.exit_code == 2
    lines = done.stderr.splitlines()
    assert lines[0] == "error CONFIG_INVALID: p.policy.yaml: 3 problems"
    assert all(line.startswith("p.policy.yaml:") for line in lines[1:4])


def test_a_failing_self_test_of_the_policy_is_found_by_the_plan(folder: Path, run_nightshift: Nightshift) -> None:
    """Before any money is spent."""
    text = POLICY.replace("mode: read-only,", "examples: {match: ['rm -rf x']}, mode: read-only,")
    (folder / "p.policy.yaml").write_text(text)

    done = plan(run_nightshift, folder)

    assert done.exit_code == 2
    assert "p.policy.yaml:5:" in done.stderr
    assert "rm -rf x" in done.stderr


def test_a_prompt_is_read_from_stdin_only_when_asked(folder: Path, run_nightshift: Nightshift) -> None:
    """``--prompt -``; with a closed stdin it is empty, which is an error."""
    arguments = ("plan", "--prompt", "-", "--profile", "p.profile.yaml", "--workspace", "ws", "--json")
    running = run_nightshift.start(*arguments, cwd=folder, stdin=subprocess.PIPE)
    stdout, _ = running.process.communicate("from stdin", timeout=30)
    assert json.loads(stdout)["prompt"] == "from stdin"

    done = run_nightshift(*arguments, cwd=folder)
    assert done.exit_code == 2
    assert "--prompt: the text is empty" in done.stderr


@pytest.mark.parametrize("name", ["task", "profile", "policy", "script", "plan", "policy-check", "policy-test"])
def test_a_schema_is_printed_by_name(run_nightshift: Nightshift, name: str) -> None:
    """As it lies in the installation."""
    done = run_nightshift("schema", name)

    assert done.exit_code == 0
    jsonschema_rs.meta.validate(json.loads(done.stdout))


def test_an_unknown_schema_name_is_refused_with_the_nearest(run_nightshift: Nightshift) -> None:
    """Exit code 2, as for every usage error."""
    done = run_nightshift("schema", "profle")

    assert done.exit_code == 2
    assert "did you mean 'profile'?" in done.stderr
