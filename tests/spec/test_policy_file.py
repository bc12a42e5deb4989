"""A policy file with a mistake is refused, and every mistake that can be known beforehand is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from runner.config.policy import read_policy
from runner.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from pathlib import Path


def write_policy(folder: Path, rules: str, head: str = "version: 1\ndefault: deny\n") -> Path:
    """A policy file with these rules, each on lines of its own."""
    path = folder / "test.policy.yaml"
    path.write_text(f"{head}rules:\n{rules}", encoding="utf-8")
    return path


def problems_of(folder: Path, rules: str, head: str = "version: 1\ndefault: deny\n") -> str:
    """What is said about a policy file that is refused."""
    path = write_policy(folder, rules, head)
    with pytest.raises(ConfigError) as caught:
        read_policy(path)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    return "\n".join(line.removeprefix(str(path)) for line in str(caught.value).splitlines()[1:])


ALLOW = "  - {id: a, tool: shell, command: [[ls]], decision: allow}\n"


def test_a_policy_without_mistakes_is_read(tmp_path: Path) -> None:
    """The rules stand in the order of the file; the source is kept for messages."""
    path = write_policy(tmp_path, ALLOW + "  - {id: b, tool: '*', decision: deny, reason: no}\n")

    policy = read_policy(path)

    assert [rule.id for rule in policy.rules] == ["a", "b"]
    assert policy.source == str(path)


def test_an_empty_list_of_rules_denies_everything(tmp_path: Path) -> None:
    """It is a policy, too."""
    path = tmp_path / "x.policy.yaml"
    path.write_text("version: 1\nrules: []\n", encoding="utf-8")

    assert read_policy(path).rules == ()


@pytest.mark.parametrize(
    ("head", "rules", "expected"),
    [
        ("version: 2\n", ALLOW, "version"),
        ("version: 1\ndefault: allow\n", ALLOW, "default"),
        ("version: 1\nrule: 1\n", ALLOW, "did you mean 'rules'"),
        ("version: 1\n", "  - {id: a, tool: shell, comand: [[ls]], decision: allow}\n", "did you mean 'command'"),
        ("version: 1\n", "  - {id: a, tool: shell, command: [[ls]], decision: ask}\n", "decision"),
        ("version: 1\n", "  - {id: a, tool: shell, command: [[ls]]}\n", "decision: is missing"),
        ("version: 1\n", "  - {tool: shell, command: [[ls]], decision: allow}\n", "id: is missing"),
        ("version: 1\n", "  - {id: a b, tool: todo, decision: allow}\n", "id"),
        ("version: 1\n", "  - {id: a, tool: [], decision: allow}\n", "tool"),
        ("version: 1\n", "  - {id: a, tool: shell, command: ls, decision: allow}\n", "write [[pytest, '**']]"),
        ("version: 1\n", "  - {id: a, tool: shell, command: [ls], decision: allow}\n", "write [git, status]"),
        ("version: 1\n", "  - {id: a, tool: shell, command: [[]], decision: allow}\n", "list of words"),
        ("version: 1\n", "  - {id: a, tool: shell, command: [[sleep, 5]], decision: allow}\n", "put it in quotes"),
        ("version: 1\n", "  - {id: a, tool: shell, command: [[ls, [[x]]]], decision: allow}\n", "a text is needed"),
        (
            "version: 1\n",
            "  - {id: a, tool: shell, command: [], decision: allow}\n",
            "patterns is needed, this is an empty list",
        ),
        (
            "version: 1\n",
            "  - {id: a, tool: shell, command: [[]], decision: allow}\n",
            "words is needed, this is an empty list",
        ),
        (
            "version: 1\n",
            "  - {id: a, tool: [], decision: allow}\n",
            "a list of texts is needed, this is an empty list",
        ),
        (
            "version: 1\n",
            "  - {id: a, tool: shell, command: [{argv: [ls], refuse: [-x]}], decision: allow}\n",
            "did you mean 'refuse_flags'",
        ),
        ("version: 1\n", "  - {id: a, tool: shell, command: [{anywhere: true}], decision: deny}\n", "argv"),
        ("version: 1\n", "  - {id: a, tool: todo, mode: danger-full-access, decision: allow}\n", "mode"),
        ("version: 1\n", "  - {id: a, tool: todo, trust: [], decision: allow}\n", "trust"),
        ("version: 1\n", "  - {id: a, tool: todo, trust: [me], decision: allow}\n", "trust"),
        (
            "version: 1\n",
            "  - {id: a, tool: shell, command: any, escalate: [read-only], decision: allow}\n",
            "escalate",
        ),
        (
            "version: 1\n",
            "  - {id: a, tool: read_file, paths: {reed: ['**']}, decision: allow}\n",
            "did you mean 'read'",
        ),
        ("version: 1\n", "  - {id: a, tool: read_file, paths: {read: []}, decision: allow}\n", "paths.read"),
        ("version: 1\n", "  - {id: a, tool: todo, decision: allow, examples: {match: []}}\n", "examples"),
        ("version: 1\n", "  - {id: a, tool: todo, decision: allow, examples: {match: [{text: x}]}}\n", "example 1"),
        ("version: 1\n", "  - {id: a, tool: todo, decision: allow, examples: {match: [{}]}}\n", "example 1"),
        ("version: 1\n", "  - {id: a, tool: todo, decision: allow, examples: {match: [1]}}\n", "example 1"),
    ],
)
def test_what_does_not_fit_the_format_is_an_error(tmp_path: Path, head: str, rules: str, expected: str) -> None:
    """Unknown keys, other values, wrong types: with place, path and what to do."""
    found = problems_of(tmp_path, rules, head)

    assert expected in found
    assert found.startswith(":")


@pytest.mark.parametrize(
    ("rules", "expected"),
    [
        (ALLOW + ALLOW, "'a' is the id of rule 1, too"),
        ("  - {id: default, tool: todo, decision: allow}\n", "'default' names the decision that no rule made"),
        ("  - {id: a, tool: [read_fil], decision: allow}\n", "did you mean 'read_file'"),
        ("  - {id: a, tool: Shell, command: any, decision: allow}\n", "did you mean 'shell'"),
        ("  - {id: a, tool: ['*', todo], decision: allow}\n", "write it alone"),
        ("  - {id: a, tool: [todo, todo], decision: allow}\n", "given twice"),
        ("  - {id: a, tool: shell, decision: allow}\n", "add command"),
        ("  - {id: a, tool: [shell, todo], decision: allow}\n", "add command"),
        # keys without effect
        ("  - {id: a, tool: todo, command: [[ls]], decision: allow}\n", "command: has no effect"),
        ("  - {id: a, tool: todo, builtin: true, decision: allow}\n", "builtin: has no effect"),
        ("  - {id: a, tool: todo, escalate: [danger-full-access], decision: allow}\n", "escalate: has no effect"),
        ("  - {id: a, tool: '*', env: [A], decision: allow}\n", "env: has no effect"),
        ("  - {id: a, tool: shell, command: any, env: [A], decision: allow}\n", "env: has no effect"),
        ("  - {id: a, tool: shell, command: [[ls]], env: [A, PS4], decision: allow}\n", "texts that set it are not"),
        ("  - {id: a, tool: shell, command: any, builtin: true, decision: allow}\n", "builtin: has no effect"),
        ("  - {id: a, tool: shell, command: [[ls]], env: [A], decision: deny}\n", "env: has no effect"),
        ("  - {id: a, tool: shell, command: [[ls]], mode: read-only, decision: deny}\n", "mode: has no effect"),
        (
            "  - {id: a, tool: shell, command: [[ls]], accept_bypass: true, decision: allow}\n",
            "accept_bypass: has no effect",
        ),
        (
            "  - {id: a, tool: shell, command: [[ls]], accept_bypass: true, decision: deny}\n",
            "no rule with `command: any`",
        ),
        ("  - {id: a, tool: todo, accept_bypass: true, decision: deny}\n", "accept_bypass: has no effect"),
        ("  - {id: a, tool: todo, paths: {read: ['**']}, decision: allow}\n", "paths.read: has no effect"),
        ("  - {id: a, tool: read_file, paths: {write: ['**']}, decision: allow}\n", "paths.write: has no effect"),
        ("  - {id: a, tool: write_file, paths: {read: ['**']}, decision: allow}\n", "paths.read: has no effect"),
        ("  - {id: a, tool: shell, command: [[ls]], paths: {write: [x]}, decision: allow}\n", "paths.write: has no"),
        ("  - {id: a, tool: read_file, paths: {except: [x]}, decision: allow}\n", "add read or write"),
        # patterns that can never match
        ("  - {id: a, tool: shell, command: [[ls, '**', x]], decision: allow}\n", "comes last and alone"),
        ("  - {id: a, tool: shell, command: [[ls, [a, '**']]], decision: allow}\n", "comes last and alone"),
        ("  - {id: a, tool: shell, command: [[ls], [ls]], decision: allow}\n", "given twice"),
        ("  - {id: a, tool: shell, command: [[if, '**']], decision: allow}\n", "reserved word"),
        ("  - {id: a, tool: shell, command: [[eval, '**']], decision: allow}\n", "not analysed"),
        ("  - {id: a, tool: shell, command: [[[ls, export], x]], decision: allow}\n", "'export' are not analysed"),
        ("  - {id: a, tool: shell, command: [[A=1, ls]], decision: allow}\n", "variables stand in env"),
        ("  - {id: a, tool: shell, command: [[timeout, '*', pytest]], decision: allow}\n", "allow what it runs"),
        ("  - {id: a, tool: shell, command: [[env, '**']], decision: allow}\n", "allow what it runs"),
        ("  - {id: a, tool: shell, command: [[bash, -c, '*']], decision: allow}\n", "allow what it runs"),
        ("  - {id: a, tool: shell, command: [[sh, -c, '*']], decision: allow}\n", "can never match"),
        (
            "  - {id: a, tool: shell, command: [{argv: [git, -c, x], refuse_flags: [-c]}], decision: allow}\n",
            "demands '-c' and refuses it",
        ),
        (
            "  - {id: a, tool: shell, command: [{argv: [ls, '**'], refuse_flags: [x]}], decision: allow}\n",
            "'x' is no option",
        ),
        (
            "  - {id: a, tool: shell, command: [{argv: [ls, '**'], refuse_flags: [--a=b]}], decision: allow}\n",
            "is no option",
        ),
        (
            "  - {id: a, tool: shell, command: [{argv: [ls, '**'], refuse_flags: [-x]}], decision: deny}\n",
            "would narrow a deny",
        ),
        (
            "  - {id: a, tool: shell, command: [{argv: [git, push], anywhere: true}], decision: allow}\n",
            "anywhere has no effect",
        ),
        (
            "  - {id: a, tool: shell, command: [{argv: [git, '**'], anywhere: true}], decision: deny}\n",
            "anywhere has no effect",
        ),
        ("  - {id: a, tool: read_file, paths: {read: [../x]}, decision: allow}\n", "resolved paths have no '..'"),
        ("  - {id: a, tool: read_file, paths: {read: [~/x]}, decision: allow}\n", "`~` is not replaced"),
        ("  - {id: a, tool: read_file, paths: {read: [src/]}, decision: allow}\n", "write src/**"),
        ("  - {id: a, tool: read_file, paths: {read: [src/a**]}, decision: allow}\n", "stands alone between slashes"),
        ("  - {id: a, tool: read_file, paths: {read: ['a\\b']}, decision: allow}\n", "no meaning in a glob"),
        ("  - {id: a, tool: read_file, paths: {read: [.]}, decision: allow}\n", "write '**'"),
        ("  - {id: a, tool: read_file, paths: {read: ['**'], except: [x/]}, decision: allow}\n", "paths.except[0]"),
    ],
)
def test_a_rule_that_cannot_do_what_it_says_is_an_error(tmp_path: Path, rules: str, expected: str) -> None:
    """Duplicates, unknown tools, keys without effect, patterns that can never match."""
    assert expected in problems_of(tmp_path, rules)


def test_a_deny_of_commands_beside_any_command_needs_the_authors_word(tmp_path: Path) -> None:
    """Other spellings get through, and the author has to know it."""
    deny = "  - {id: no, tool: shell, command: [[git, push, '**']], decision: deny%s}\n"
    anything = "  - {id: any, tool: '*', command: any, decision: allow%s}\n"

    found = problems_of(tmp_path, anything % "" + deny % "")

    assert "rules[1]: rule 'any' allows every text" in found
    assert "accept_bypass: true" in found
    for rules in (
        anything % "" + deny % ", accept_bypass: true",
        anything % ", trust: [trusted]" + deny % ", trust: [untrusted]",
        anything % ", escalate: [danger-full-access]" + deny % "",
        anything.replace("'*'", "shell") % "" + "  - {id: no, tool: shell, decision: deny}\n",
        anything % "" + "  - {id: no, tool: write_file, paths: {write: [x]}, decision: deny}\n",
    ):
        read_policy(write_policy(tmp_path, rules))
    assert "rule 'any'" in problems_of(
        tmp_path, anything % ", escalate: [danger-full-access]" + deny % ", escalate: [danger-full-access]"
    )


def test_tools_of_a_run_may_be_others_than_the_built_in_ones(tmp_path: Path) -> None:
    """Names are checked against what the caller knows; paths of such tools are taken on trust."""
    path = write_policy(tmp_path, "  - {id: a, tool: fetch, paths: {read: [x]}, decision: allow}\n")

    assert read_policy(path, known_tools=["fetch"]).rules[0].tools == frozenset({"fetch"})
    with pytest.raises(ConfigError):
        read_policy(path)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            "{id: a, tool: shell, command: [[ls]], decision: allow, examples: {match: [ls -l]}}",
            "examples.match[0]: rule 'a': 'ls -l' is expected to match, it does not: no rule allows `ls -l`",
        ),
        (
            "{id: a, tool: shell, command: [[ls, '**']], decision: allow, examples: {no_match: [cat, ls -l]}}",
            "examples.no_match[1]: rule 'a': 'ls -l' is expected not to match, it does",
        ),
        (
            "{id: a, tool: shell, command: [[git, push]], decision: deny, examples: {match: [git pull]}}",
            "'git pull' is expected to match, it does not",
        ),
        (
            "{id: a, tool: shell, command: [[ls]], decision: allow, examples: {match: ['eval ls']}}",
            "is expected to match, it does not: the command cannot be analysed",
        ),
        (
            "{id: a, tool: write_file, paths: {write: [src/**]}, decision: allow, examples: {match: [doc/x]}}",
            "'doc/x' is expected to match, it does not",
        ),
        (
            "{id: a, tool: write_file, paths: {write: [src/**]}, decision: allow, examples: {no_match: [src/x]}}",
            "'src/x' is expected not to match, it does",
        ),
        (
            "{id: a, tool: todo, decision: allow, examples: {match: [shell]}}",
            "'shell' is expected to match, it does not",
        ),
        (
            "{id: a, tool: todo, decision: allow, examples: {match: [{command: ls}]}}",
            "is not about",
        ),
    ],
)
def test_a_failing_self_test_is_an_error(tmp_path: Path, rule: str, expected: str) -> None:
    """It names the rule, the example, what was expected and what is."""
    assert expected in problems_of(tmp_path, f"  - {rule}\n")


def test_self_tests_put_each_example_to_its_rule_alone(tmp_path: Path) -> None:
    """Other rules neither help nor hinder; trust, modes and kinds of a rule are taken into account."""
    rules = """
  - id: a
    tool: shell
    command: [[pytest, "**"]]
    env: [A]
    trust: [untrusted]
    escalate: [danger-full-access]
    decision: allow
    examples: {match: [pytest -q, A=1 pytest], no_match: [ls, "pytest | ls", "pytest > x"]}
  - {id: b, tool: shell, command: [[ls]], decision: allow, examples: {match: [{command: ls}], no_match: [pytest]}}
  - {id: c, tool: shell, command: [[pytest, "**"]], decision: deny, examples: {match: ["true; pytest x"]}}
  - id: d
    tool: [shell, write_file, read_file]
    command: [[make]]
    paths: {write: ["out/**"], read: ["**"], except: [out/x]}
    decision: allow
    examples:
      match: ["make > out/log", {path: out/a}, {path: any, tool: read_file}]
      no_match: ["make > log", {path: out/x}, {path: any, tool: write_file}]
  - {id: e, tool: grep, paths: {read: [src/**]}, decision: allow, examples: {match: [src], no_match: ["."]}}
  - {id: f, tool: "*", decision: deny, examples: {match: [todo, {tool: shell}, {path: x}, {command: ls}]}}
"""
    assert len(read_policy(write_policy(tmp_path, rules)).rules) == 6


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path: Path) -> None:
    """Each with file, line, column and path."""
    rules = "  - {id: a, tool: toto, decision: allow}\n  - {id: a, tool: todo, env: [A], decision: deny}\n"

    lines = problems_of(tmp_path, rules).splitlines()

    assert any("rules[0].tool" in line for line in lines)
    assert any("rules[1].id" in line for line in lines)
    assert any("rules[1].env" in line for line in lines)
