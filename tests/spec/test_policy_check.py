"""``nightshift policy check`` says what a policy allows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest
from click.testing import CliRunner

from runner.approvals.words import KNOWN_TOOLS
from runner.cli.policy import command
from runner.config.policy_report import CHECK_SCHEMA
from runner.config.shape import shipped_directory
from runner.permission import Mode, Trust

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Nightshift

POLICY = """\
version: 1
rules:
  - id: tests
    tool: shell
    command: [[pytest, "**"], [git, "**"]]
    builtin: true
    env: [A]
    mode: read-only
    trust: [trusted]
    decision: allow
    reason: they are bounded
    examples: {match: [pytest -q], no_match: [ls, curl x]}
  - {id: edit, tool: [write_file, edit_file], paths: {write: ["src/**"], except: [src/x]}, decision: allow}
  - {id: plan, tool: todo, decision: allow}
  - {id: hidden, tool: edit_file, paths: {write: ["src/gen/**"]}, decision: allow}
  - {id: no-gen, tool: edit_file, paths: {write: ["src/gen/**"]}, decision: deny}
  - {id: wide, tool: shell, command: [[curl, "**"]], escalate: [danger-full-access], decision: allow}
  - {id: no-push, tool: shell, command: [[git, push, "**"]], decision: deny}
"""


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A policy with something of everything."""
    path = tmp_path / "x.policy.yaml"
    path.write_text(POLICY, encoding="utf-8")
    return path


def checked(path: Path, *options: str) -> str:
    """What the command prints."""
    result = CliRunner().invoke(command, ["check", str(path), *options], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_every_tool_mode_and_trust_has_an_outcome(policy: Path) -> None:
    """With the rules behind it, the mode a call runs in, and what escalation may do."""
    report = json.loads(checked(policy, "--json"))
    cells: dict[tuple[str, str, str], dict[str, Any]] = {
        (cell["tool"], cell["mode"], cell["trust"]): cell for cell in report["table"]
    }

    assert len(cells) == len(report["table"]) == len(KNOWN_TOOLS) * len(Mode) * len(Trust)
    shell = cells["shell", "workspace-write", "trusted"]
    assert shell["outcome"] == "some"
    assert shell["allows"] == [{"rule": "tests", "mode": "read-only"}]
    assert shell["denies"] == ["no-push"]
    assert shell["escalated"] == ["wide"]
    assert cells["shell", "danger-full-access", "trusted"]["escalated"] == []
    assert cells["shell", "workspace-write", "untrusted"]["outcome"] == "deny"
    assert cells["todo", "read-only", "untrusted"]["outcome"] == "allow"
    assert cells["grep", "read-only", "trusted"]["outcome"] == "deny"
    assert cells["edit_file", "read-only", "trusted"]["denies"] == ["no-gen"]


def test_rules_that_deserve_a_look_are_listed(policy: Path) -> None:
    """Unreachable, untested and opaque ones, and what surprises."""
    report = json.loads(checked(policy, "--json"))

    assert report["unreachable"] == ["hidden"]
    assert report["untested"] == ["edit", "plan", "hidden", "no-gen", "wide", "no-push"]
    assert report["opaque"] == ["tests"]
    literal = "list the subcommands, or add refuse_flags"
    assert report["notes"] == [
        f"tests lets an expansion stand where no-push looks for a literal word; {literal}",
        "no-push does not look at calls that wide allows with danger-full-access; add them to its escalate",
    ]
    assert report["rules"][0]["examples"] == {"match": 1, "noMatch": 2}
    assert len(report["digest"]) == 64


def test_the_report_keeps_to_its_schema(policy: Path) -> None:
    """For a small policy and for every shipped one."""
    validator = jsonschema_rs.validator_for(CHECK_SCHEMA)

    for path in [policy, *(shipped_directory() / "policies").glob("*.yaml")]:
        validator.validate(json.loads(checked(path, "--json")))


def test_the_text_says_the_same_for_people(policy: Path) -> None:
    """Rules with what they look at, the table, the lists."""
    lines = checked(policy).splitlines()

    assert "tests: allow shell (in read-only; trusted runs only; opaque; 3 self-tests)" in lines
    assert "hidden: allow edit_file (never decides, no-gen always comes first; no self-tests)" in lines
    assert "    pytest **" in lines
    assert "    with A" in lines
    assert "    write src/**" in lines
    assert "deny by no-push; with escalation by wide" in [
        line.partition("untrusted  ")[2] for line in lines if line.startswith("shell  ")
    ]
    assert "Never decide, a deny always comes first: hidden" in lines
    assert "Opaque, what these run is bounded by the sandbox only: tests" in lines
    assert "grep            every               both       deny" in lines
    assert any(line.startswith("Note: ") for line in lines)


@pytest.mark.parametrize(
    ("allow", "deny", "unreachable"),
    [
        ("tool: todo", "tool: todo", True),
        ("tool: todo", "tool: '*'", True),
        ("tool: '*'", "tool: todo", False),
        ("tool: todo", "tool: todo, trust: [untrusted]", False),
        ("tool: todo, trust: [untrusted]", "tool: todo, trust: [untrusted]", True),
        ("tool: shell, command: [[git, push]]", "tool: shell, command: [[git, '**']]", True),
        ("tool: shell, command: [[git, push]]", "tool: shell, command: [[git, '*']]", True),
        ("tool: shell, command: [[git, push, '**']]", "tool: shell, command: [[git, '*']]", False),
        ("tool: shell, command: [[git, '**']]", "tool: shell, command: [[git, push, '**']]", False),
        ("tool: shell, command: [[[git, hg], push]]", "tool: shell, command: [[git, push]]", False),
        ("tool: shell, command: [[git, pu*]]", "tool: shell, command: [[git, push]]", False),
        ("tool: shell, command: [[git, push], [ls]]", "tool: shell, command: [[git, '**']]", False),
        ("tool: shell, command: [[ls]], builtin: true", "tool: shell, command: [[ls]]", False),
        ("tool: shell, command: [[ls]]", "tool: shell, command: any", True),
        ("tool: shell, command: [[ls]], escalate: [danger-full-access]", "tool: shell", False),
        (
            "tool: shell, command: [[ls]], escalate: [danger-full-access]",
            "tool: shell, escalate: [danger-full-access]",
            True,
        ),
        ("tool: write_file, paths: {write: [a]}", "tool: write_file, paths: {write: ['**']}", True),
        ("tool: write_file, paths: {write: [/a]}", "tool: write_file, paths: {write: ['**']}", False),
        ("tool: write_file, paths: {write: [a]}", "tool: write_file, paths: {write: [b]}", False),
        ("tool: write_file, paths: {write: [a]}", "tool: write_file, paths: {write: ['**'], except: [a]}", False),
        ("tool: write_file", "tool: write_file, paths: {write: ['**']}", False),
        ("tool: '*', command: [[ls]]", "tool: '*', command: any", True),
        ("tool: read_file, paths: {read: [a]}", "tool: read_file, paths: {read: ['**']}", False),
        ("tool: grep, paths: {read: [a]}", "tool: grep, paths: {read: ['**']}", True),
    ],
)
def test_a_rule_behind_a_deny_that_covers_it_never_decides(
    tmp_path: Path, allow: str, deny: str, unreachable: bool
) -> None:
    """It is called unreachable only where that is certain."""
    path = tmp_path / "x.policy.yaml"
    rules = f"  - {{id: a, {allow}, decision: allow}}\n  - {{id: d, {deny}, decision: deny}}\n"
    path.write_text(f"version: 1\nrules:\n{rules}", encoding="utf-8")

    assert json.loads(checked(path, "--json"))["unreachable"] == (["a"] if unreachable else [])


def test_what_a_pattern_refuses_and_looks_past_is_shown(tmp_path: Path) -> None:
    """Beside its words."""
    path = tmp_path / "x.policy.yaml"
    path.write_text(
        "version: 1\nrules:\n"
        '  - {id: a, tool: shell, command: [{argv: [git, log, "**"], refuse_flags: [-O, --output]}], decision: allow}\n'
        '  - {id: d, tool: shell, command: [{argv: [git, push, "**"], anywhere: true}], decision: deny}\n',
        encoding="utf-8",
    )

    lines = checked(path).splitlines()

    assert "    git log ** without -O --output" in lines
    assert "    git push ** (options may stand before the subcommand)" in lines


@pytest.mark.parametrize(("program", "notes"), [("git", 1), ("npm", 1), ("python3", 0), ("bash", 0)])
def test_an_interpreter_is_opaque_and_needs_no_note(tmp_path: Path, program: str, notes: int) -> None:
    """What it runs is in its arguments in any case; of others an expansion hides the subcommand."""
    path = tmp_path / "x.policy.yaml"
    path.write_text(
        "version: 1\nrules:\n"
        f'  - {{id: a, tool: shell, command: [[{program}, "**"]], decision: allow}}\n'
        f'  - {{id: d, tool: shell, command: [[{program}, word, "**"]], decision: deny}}\n',
        encoding="utf-8",
    )

    assert len(json.loads(checked(path, "--json"))["notes"]) == notes


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"version: 1\nrules: {}\n", "rules"),
        (b"version: 2\nrules: []\n", "version"),
        (b"version: 1\nrules: [{id: a, tool: shel, decision: allow}]\n", "shell"),
        (b"version: 1\nrules: [{id: a, tool: shell, command: [[ls]], decision: maybe}]\n", "decision"),
        (b"version: 1\nrules: [{id: a, tool: todo, decision: allow}, {id: a, tool: todo, decision: deny}]\n", "'a'"),
        (b"version: 1\nrules: [\xff]\n", "UTF-8"),
        (b"version: 1\nrules: [{id: a\n", "YAML"),
    ],
)
def test_a_bad_policy_is_one_message_with_code_2(
    run_nightshift: Nightshift, tmp_path: Path, content: bytes, message: str
) -> None:
    """With the file's name and what is wrong; nothing on stdout, no traceback."""
    path = tmp_path / "bad.policy.yaml"
    path.write_bytes(content)

    done = run_nightshift("policy", "check", path)

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error CONFIG_INVALID: ")
    assert "bad.policy.yaml" in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("first", "second", "unreachable"),
    [
        ("tool: shell", "tool: shell, command: [[curl, '**']]", True),
        ("tool: shell, command: [[git, '**']]", "tool: shell, command: [[git, push, '**']]", True),
        ("tool: shell, command: [[git, push, '**']]", "tool: shell, command: [[git, '**']]", False),
        (
            "tool: shell, command: [[git, push, '**']]",
            "tool: shell, command: [{argv: [git, push], anywhere: true}]",
            False,
        ),
        ("tool: shell, command: [[git, '**']]", "tool: shell, command: [{argv: [git, push], anywhere: true}]", True),
        (
            "tool: shell, command: [{argv: [git, push, '**'], anywhere: true}]",
            "tool: shell, command: [{argv: [git, push], anywhere: true}]",
            True,
        ),
        ("tool: shell, trust: [untrusted]", "tool: shell", False),
        ("tool: shell", "tool: shell, escalate: [danger-full-access]", False),
        ("tool: write_file, paths: {write: ['**']}", "tool: write_file, paths: {write: [a]}", True),
        ("tool: write_file, paths: {write: [a]}", "tool: write_file, paths: {write: ['**']}", False),
        ("tool: write_file, paths: {write: ['**'], except: [b]}", "tool: write_file, paths: {write: [a]}", False),
        ("tool: todo", "tool: '*'", False),
        ("tool: '*'", "tool: todo", True),
    ],
)
def test_a_deny_behind_one_that_covers_it_never_decides(
    tmp_path: Path, first: str, second: str, unreachable: bool
) -> None:
    """Of two that match, the first of the file is named; turned round, both may decide."""
    rules = [f"  - {{id: {name}, {rule}, decision: deny}}\n" for name, rule in (("a", first), ("b", second))]
    path = tmp_path / "x.policy.yaml"

    path.write_text(f"version: 1\nrules:\n{''.join(rules)}", encoding="utf-8")
    assert json.loads(checked(path, "--json"))["unreachable"] == (["b"] if unreachable else [])
    path.write_text(f"version: 1\nrules:\n{''.join(reversed(rules))}", encoding="utf-8")
    assert "b" not in json.loads(checked(path, "--json"))["unreachable"]


def test_the_installed_command_checks_a_policy(run_nightshift: Nightshift, policy: Path) -> None:
    """Data on stdout; a policy with a mistake is one message with code 2."""
    good = run_nightshift("policy", "check", policy, "--json")
    policy.write_text(POLICY.replace("[ls, curl x]", "[pytest]"), encoding="utf-8")
    bad = run_nightshift("policy", "check", policy)
    missing = run_nightshift("policy", "check", policy.with_name("none.yaml"))

    assert (good.exit_code, json.loads(good.stdout)["schemaVersion"]) == (0, 1)
    assert (bad.exit_code, bad.stdout) == (2, "")
    assert "CONFIG_INVALID" in bad.stderr
    assert "rule 'tests': 'pytest' is expected not to match" in bad.stderr
    assert (missing.exit_code, missing.stdout) == (2, "")
    assert "no such file" in missing.stderr


@pytest.mark.parametrize("path", sorted((shipped_directory() / "policies").glob("*.yaml")), ids=lambda path: path.stem)
def test_every_shipped_policy_is_tested_and_has_no_surprises(path: Path) -> None:
    """Each rule has self-tests and can decide; nothing surprises."""
    report = json.loads(checked(path, "--json"))

    assert (report["unreachable"], report["untested"], report["notes"]) == ([], [], [])
