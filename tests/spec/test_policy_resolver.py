"""Every decision leaves a pair of events that says what was asked and which rule decided."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

from runner.approvals.policy import CallFacts
from runner.approvals.resolver import Resolver
from runner.config.load import Document, Mark
from runner.config.policy import load_policy
from runner.permission import Mode, Trust

if TYPE_CHECKING:
    from pathlib import Path

RULES = [
    {"id": "look", "tool": "shell", "command": [["ls", "**"]], "decision": "allow"},
    {"id": "edit", "tool": "write_file", "paths": {"write": ["src/**"]}, "decision": "allow"},
    {"id": "wide", "tool": "shell", "command": [["make"]], "escalate": ["danger-full-access"], "decision": "allow"},
]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """A workspace with a folder, and links out of it."""
    (tmp_path / "workspace" / "src").mkdir(parents=True)
    (tmp_path / "workspace" / "src" / "out").symlink_to(tmp_path / "outside")
    (tmp_path / "workspace" / "link").symlink_to("src")
    return tmp_path / "workspace"


@pytest.fixture
def resolver(workspace: Path) -> Resolver:
    """A resolver with counted ids."""
    document = Document("test", {"version": 1, "rules": RULES}, {(): Mark("test", 0, 0, "/")})
    numbers = itertools.count(1)
    return Resolver(
        load_policy(document),
        workspace=str(workspace),
        mode=Mode.WORKSPACE_WRITE,
        trust=Trust.TRUSTED,
        new_id=lambda: f"approval-{next(numbers)}",
    )


def test_a_call_is_asked_and_decided(resolver: Resolver) -> None:
    """Command, rule and digest of the policy stand in the log."""
    resolution = resolver.resolve(CallFacts("shell", "ls -a"), call_id="call-1")

    assert resolution.decision.allowed
    assert resolution.asked.data() == {
        "id": "approval-1",
        "callId": "call-1",
        "toolName": "shell",
        "command": "ls -a",
        "paths": None,
        "escalation": None,
        "reason": None,
    }
    decided = resolution.decided.data()
    assert len(decided.pop("policyDigest")) == 64
    assert decided == {"id": "approval-1", "outcome": "allowed-once", "rule": "look", "by": "policy"}


def test_a_denied_call_is_rejected_by_the_rule_or_by_default(resolver: Resolver) -> None:
    """An unanswerable question is an immediate no."""
    resolution = resolver.resolve(CallFacts("shell", "rm x"), call_id="call-1")

    assert (resolution.decided.outcome, resolution.decided.rule) == ("rejected", "default")
    assert not resolver.decide(CallFacts("shell", "rm x")).allowed


def test_paths_are_logged_where_they_lead(resolver: Resolver, workspace: Path) -> None:
    """Those of redirections too, links followed to the end."""
    inside = resolver.resolve(CallFacts("shell", "ls > link/a"), call_id="1")
    outside = resolver.resolve(CallFacts("shell", "ls > src/out"), call_id="2")
    file = resolver.resolve(CallFacts("write_file", write=(f"{workspace}/src/b",)), call_id="3")

    assert (inside.decision.allowed, inside.asked.paths) == (True, {"write": [f"{workspace}/src/a"]})
    assert (outside.decision.allowed, outside.asked.paths) == (False, {"write": [str(workspace.parent / "outside")]})
    assert (file.decision.rule, file.asked.paths) == ("edit", {"write": [f"{workspace}/src/b"]})


def test_escalation_is_logged_with_its_reason(resolver: Resolver) -> None:
    """The mode that is asked for, and why."""
    facts = CallFacts("shell", "make", escalation=Mode.DANGER_FULL_ACCESS)

    resolution = resolver.resolve(facts, call_id="1", justification="it needs the network")

    assert resolution.decision.rule == "wide"
    assert resolution.asked.escalation == {"mode": "danger-full-access", "justification": "it needs the network"}
    assert resolver.decide(CallFacts("shell", "make")).may_escalate


def test_what_was_approved_once_is_not_approved_twice(resolver: Resolver) -> None:
    """Each call is asked anew, under an id of its own."""
    facts = CallFacts("shell", "make", escalation=Mode.DANGER_FULL_ACCESS)

    first = resolver.resolve(facts, call_id="1")
    second = resolver.resolve(facts, call_id="2")
    plain = resolver.resolve(CallFacts("shell", "make"), call_id="3")

    assert [each.asked.id for each in (first, second, plain)] == ["approval-1", "approval-2", "approval-3"]
    assert not plain.decision.allowed
