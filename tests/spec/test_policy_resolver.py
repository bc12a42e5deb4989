"""Every decision leaves a pair of events that says what was asked and which rule decided."""

from __future__ import annotations

import errno
import itertools
import os
import subprocess
from typing import TYPE_CHECKING

import pytest

from runner.approvals.policy import CallFacts, Decision
from runner.approvals.redirections import OWN_PLACE, follow, is_own
from runner.approvals.resolver import Resolver, follow_links
from runner.config.load import Document, Mark
from runner.config.policy import load_policy, read_policy
from runner.config.shape import shipped_directory
from runner.permission import Mode, Trust
from runner.tools.builtin.files import resolve_read

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


def shipped(workspace: Path, name: str = "refactor") -> Resolver:
    """A resolver of a shipped policy."""
    return Resolver(
        read_policy(shipped_directory() / "policies" / f"{name}.policy.yaml"),
        workspace=str(workspace),
        mode=Mode.WORKSPACE_WRITE,
        trust=Trust.TRUSTED,
        new_id=lambda: "approval-1",
    )


def is_unanalysed(decision: Decision, reason: str = OWN_PLACE) -> bool:
    """Whether a text is denied since nobody knows what its redirection opens."""
    return not decision.allowed and decision.rule == "default" and f"cannot be analysed: {reason}" in decision.reason


def test_a_protected_file_is_not_written_through_the_place_of_bash(workspace: Path) -> None:
    """The runner's own /proc/self is another one: bash would have overwritten the file."""
    (workspace / ".github" / "workflows").mkdir(parents=True)
    target = workspace / ".github" / "workflows" / "ci.yml"
    text = "cd .github/workflows && echo evil > /proc/self/cwd/ci.yml"

    refused = shipped(workspace).resolve(CallFacts("shell", text), call_id="1")
    subprocess.run(["bash", "--noprofile", "--norc", "-c", text], cwd=workspace, check=True)

    assert target.read_text() == "evil\n"
    assert is_unanalysed(refused.decision)
    assert (refused.decided.outcome, refused.decided.rule) == ("rejected", "default")
    assert refused.asked.paths == {"write": ["/proc/self/cwd/ci.yml"]}
    assert shipped(workspace, "eval").decide(CallFacts("shell", text)).allowed


@pytest.mark.parametrize(
    ("target", "path", "place"),
    [
        ("/proc/self/cwd", "x/ci.yml", "/proc/self/cwd/ci.yml"),
        ("/proc/self", "x/cwd/ci.yml", "/proc/self/cwd/ci.yml"),
        ("/proc/1/cwd", "x/out", "/proc/1/cwd/out"),
        ("/proc/self/cwd/../../a", "x", "/proc"),
        ("/dev/stdout", "x", "/dev/stdout"),
        ("/dev/fd", "x/1", "/dev/fd/1"),
        ("/dev", "x/fd/1", "/dev/fd/1"),
        ("/dev", "x/../proc/self/cwd/y", "/proc/self/cwd/y"),
        ("../../../../../../../../../../proc/self/cwd", "x/y", "/proc/self/cwd/y"),
        ("y", "x/a", "/proc/self/cwd/a"),
    ],
)
@pytest.mark.parametrize("operator", [">", "<"])
def test_a_link_into_the_place_of_a_process_is_found(
    workspace: Path, target: str, path: str, place: str, operator: str
) -> None:
    """At the end of the path, on the way, and behind other links."""
    (workspace / "x").symlink_to(target)
    (workspace / "y").symlink_to("z")
    (workspace / "z").symlink_to("/proc/self/cwd")
    resolver = shipped(workspace)

    resolution = resolver.resolve(CallFacts("shell", f"cat {operator} {path}"), call_id="1")

    assert is_unanalysed(resolution.decision)
    assert resolution.asked.paths == {"write" if operator == ">" else "read": [place]}


def test_a_directory_behind_such_a_link_is_found(workspace: Path) -> None:
    """``cd`` goes there, and the relative path of the redirection with it."""
    (workspace / "x").symlink_to("/proc/self/cwd")

    assert is_unanalysed(shipped(workspace).decide(CallFacts("shell", "cd x && echo > y")))
    assert shipped(workspace).decide(CallFacts("shell", "cd x && cat y")).allowed


def test_what_cannot_be_resolved_is_not_analysed(workspace: Path) -> None:
    """A loop and a name that is too long end in a decision, not in an error."""
    (workspace / "loop").symlink_to("pool")
    (workspace / "pool").symlink_to("loop/x")

    for path in ("loop", "src/../loop/x", "a" * 300, f"src/{'a' * 300}/b"):
        decision = shipped(workspace).decide(CallFacts("shell", f"echo > {path}"))
        assert is_unanalysed(decision, "it cannot be told where a redirection leads"), path
    assert shipped(workspace, "eval").decide(CallFacts("shell", "echo > loop")).allowed


def test_a_component_that_may_not_be_looked_at_is_an_error() -> None:
    """Only what is no link, or is not there, is taken by its name."""

    def refuse(_path: str) -> str:
        raise PermissionError(errno.EACCES, "no")

    with pytest.raises(PermissionError):
        follow("/a/b", refuse)


def test_links_are_followed_as_the_kernel_does(workspace: Path) -> None:
    """Relative and absolute ones, chains, ``..`` behind them, files as folders, and what is not there."""
    (workspace / "src" / "deep").mkdir()
    (workspace / "src" / "file").write_text("")
    (workspace / "up").symlink_to("src/deep/..")
    (workspace / "far").symlink_to(workspace / "link" / "deep")
    (workspace / "none").symlink_to("missing/../gone")
    (workspace / "src" / "deep" / "chain").symlink_to("../../far/../deep")
    names = ["src", "link", "up", "far", "none", "deep", "chain", "file", "out", "..", "."]

    for parts in itertools.product(names, repeat=3):
        path = f"{workspace}//{'/'.join(parts)}"
        assert follow_links(path) == os.path.realpath(path), path
    assert follow_links("/") == follow("/..//.") == "/"


def test_without_links_a_path_is_taken_by_its_name() -> None:
    """So that a policy can be tried without the machine that it is for."""
    assert follow("//tmp/../etc/./x") == "/etc/x"
    assert is_own(follow("/tmp/../proc/self/cwd/../../../x"))
    assert not any(map(is_own, ("/dev/null", "/dev/urandom", "/dev/shm/x", "/dev", "/process", "/")))


def test_a_link_of_an_earlier_call_is_seen_and_one_of_the_same_text_not_needed(workspace: Path) -> None:
    """Links are followed as they are when a call is decided, so a text that makes one is not analysed."""
    (workspace / ".github").mkdir()
    (workspace / "l").symlink_to(".github")
    resolver = shipped(workspace)

    assert resolver.decide(CallFacts("shell", "echo > l/ci.yml")).rule == "protected"
    made = resolver.decide(CallFacts("shell", "ln -s ../.github src/l && echo > src/l/ci.yml"))
    assert is_unanalysed(made, "`ln` may change where a redirection leads; write the file in a call of its own")


def test_a_file_tool_is_decided_by_the_path_it_opens(workspace: Path) -> None:
    """It opens the resolved path itself, which has no link of any process in it."""
    (workspace / "x").symlink_to("/proc/self")
    rules = [{"id": "here", "tool": "read_file", "paths": {"read": ["**"]}, "decision": "allow"}]
    document = Document("test", {"version": 1, "rules": rules}, {(): Mark("test", 0, 0, "/")})
    resolver = Resolver(
        load_policy(document),
        workspace=str(workspace),
        mode=Mode.WORKSPACE_WRITE,
        trust=Trust.TRUSTED,
        new_id=lambda: "approval-1",
    )

    for path in ("/proc/self/environ", "x/environ", "/proc/thread-self/../environ"):
        resolved = resolve_read(str(workspace), path)
        resolution = resolver.resolve(CallFacts("read_file", read=(resolved,)), call_id="1")

        assert not resolution.decision.allowed
        assert "no rule allows read_file on /proc/" in resolution.decision.reason
        assert resolution.asked.paths == {"read": [resolved]}
        assert "self" not in resolved
