"""``nightshift policy test`` decides recorded calls again and says where the new policy differs from the log."""

from __future__ import annotations

import json
import tracemalloc
import zipfile
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from runner.approvals.policy import Policy
from runner.approvals.redecide import DSH_TOOLS, Counts, redecide
from runner.cli.main import run_cli
from runner.config.policy_report import TEST_SCHEMA
from runner.config.shape import shipped_directory
from runner.session import events as ev
from runner.session.export import export_session
from runner.session.log import SessionLog
from runner.session.store import open_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from conftest import Nightshift

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
DSH = sorted(path for path in (GOLDEN / "dsh").iterdir() if path.suffix != ".md")
OURS = sorted(path for path in (GOLDEN / "ours").iterdir() if path.is_dir())
WORKSPACE = "/home/user/project"
SESSION = "session-00000000-0000-4000-8000-00000000000a"

ALLOW = {"id": "all", "tool": "*", "command": "any", "decision": "allow"}
LOOK = {"id": "look", "tool": "shell", "command": [["ls", "**"], ["cat", "**"]], "decision": "allow"}
EDIT = {"id": "edit", "tool": ["write_file", "edit_file"], "paths": {"write": ["src/**"]}, "decision": "allow"}


class Recorded:
    """Writes a log of ours, call by call, with what a policy said then."""

    def __init__(
        self, directory: Path, *, header: Mapping[str, Any] | None = None, trust: str = "trusted", seed: bool = False
    ) -> None:
        fields = {"id": SESSION, "cwd": WORKSPACE, **(header or {})}
        times = count(1_796_000_000_000)
        self.log = SessionLog.create(directory, header=fields, clock=lambda: next(times))
        self._ids = count(1)
        self.begin("workspace-write", trust)
        self.log.append(ev.TurnStart(turn=1))
        if seed:
            self.call("shell", command="rm x", allowed="then")
            self.log.append(ev.SessionEndSeed())

    def begin(self, mode: str, trust: str = "trusted") -> None:
        """The first events of a run."""
        self.log.append(
            ev.RunStart(
                task_digest="",
                profile_digest="",
                policy_digest="",
                tools_digest="",
                versions={},
                base={},
                sandbox={"backend": "landlock", "mode": mode, "network": "off", "notEnforced": []},
                trust=trust,
                config={},
            )
        )
        self.log.append(ev.SandboxModeEvent(mode=mode))

    def resume(self, mode: str) -> None:
        """A run that goes on in another mode."""
        self.log.append(ev.RunResume(previous_seal=None, changes=["profile.permission_mode"]))
        self.log.append(ev.SandboxModeEvent(mode=mode))

    def call(
        self,
        tool: str,
        *,
        command: str | None = None,
        paths: Mapping[str, Sequence[str]] | None = None,
        escalation: str | None = None,
        allowed: str = "",
        denied: str = "",
        code: str | None = None,
        mode: str = "workspace-write",
        call_id: str | None = None,
        result: bool = True,
    ) -> str:
        """One step with one call; ``allowed`` or ``denied`` is the rule that said so, neither: nobody was asked."""
        number = next(self._ids)
        call_id = call_id or f"call_{number}"
        self.log.append(ev.StepStart(turn=1, step=number))
        call = ev.ToolCall(turn=1, step=number, call_id=call_id, name=tool, arguments="{}")
        seq = self.log.append(call).seq
        if allowed or denied:
            asked: Any = None if escalation is None else {"mode": escalation, "justification": "why"}
            facts: Any = {"command": command, "paths": paths, "escalation": asked}
            self.log.append(ev.ApprovalAsked(id=f"ask-{number}", call_id=call_id, tool_name=tool, **facts))
            outcome = "allowed-once" if allowed else "rejected"
            self.log.append(ev.ApprovalDecided(id=f"ask-{number}", outcome=outcome, rule=allowed or denied))
        if denied:
            code = "POLICY_DENIED"
        if result:
            self.result(seq, number, call_id, code, {"mode": mode, "attempts": 1 if allowed and not code else 0})
        self.log.append(ev.StepEnd(turn=1, step=number))
        return call_id

    def result(self, seq: int, step: int, call_id: str, code: str | None, meta: Mapping[str, Any]) -> None:
        """``tool/result`` of a call."""
        block = {"type": "tool-result", "toolCallId": call_id, "content": [], "isError": code is not None}
        message: Any = {
            "role": "user",
            "content": [block],
            "source": {"kind": "tool", "callId": call_id},
            "id": f"result-{seq}",
        }
        error: Any = None if code is None else {"name": "Error", "code": code}
        where: Any = {"turn": 1, "step": step, "source_event_seqs": [seq]}
        self.log.append(ev.ToolResult(message=message, error=error, meta=dict(meta), **where))

    def close(self) -> None:
        """Seal and close the log."""
        self.log.seal()
        self.log.close()


@pytest.fixture
def recorded(tmp_path: Path) -> Iterator[Recorded]:
    """A log in the folder ``artifacts``."""
    log = Recorded(tmp_path / "artifacts")
    yield log
    log.log.close()


def write_policy(folder: Path, *rules: Mapping[str, Any]) -> Path:
    """A policy file with these rules."""
    path = folder / "new.policy.yaml"
    path.write_text(json.dumps({"version": 1, "default": "deny", "rules": list(rules)}), encoding="utf-8")
    return path


@pytest.fixture
def compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """A function that closes a log, tests rules on it and gives the report."""

    def run(recorded: Recorded, *rules: Mapping[str, Any]) -> Any:
        recorded.close()
        code = run_cli(["policy", "test", str(write_policy(tmp_path, *rules)), str(tmp_path / "artifacts"), "--json"])
        report = json.loads(capsys.readouterr().out)
        jsonschema_rs.validator_for(TEST_SCHEMA).validate(report)
        assert code == (1 if report["differences"] else 0)
        assert len(report["differences"]) == report["counts"]["differences"]
        return report

    return run


# --- what is a difference -------------------------------------------------------------------------


def test_a_call_that_was_allowed_and_would_be_denied_is_a_difference(
    recorded: Recorded, compared: Callable[..., Any]
) -> None:
    """With where it stands, what it was about, both rules and the new reason."""
    recorded.call("shell", command="ls src", allowed="look")
    recorded.call("shell", command="rm -rf src", allowed="files")

    report = compared(recorded, LOOK)

    [difference] = report["differences"]
    assert difference == {
        "kind": "denied",
        "session": SESSION,
        "seq": 10,
        "turn": 1,
        "step": 2,
        "callId": "call_2",
        "tool": "shell",
        "command": "rm -rf src",
        "read": [],
        "write": [],
        "escalation": None,
        "recorded": {"decision": "allow", "rule": "files", "mode": "workspace-write"},
        "new": {"decision": "deny", "rule": "default", "mode": None, "reason": "no rule allows `rm -rf src`"},
    }
    assert report["counts"]["compared"] == 2
    assert report["sessions"][0]["session"] == SESSION


def test_a_call_that_was_denied_and_would_be_allowed_is_a_difference(
    recorded: Recorded, compared: Callable[..., Any]
) -> None:
    """The mode it would run in is part of it."""
    recorded.call("shell", command="cat x", denied="default")
    recorded.call("shell", command="curl x", denied="default")

    [difference] = compared(recorded, {**LOOK, "mode": "read-only"})["differences"]

    assert (difference["kind"], difference["command"]) == ("allowed", "cat x")
    assert difference["recorded"] == {"decision": "deny", "rule": "default", "mode": None}
    assert (difference["new"]["rule"], difference["new"]["mode"]) == ("look", "read-only")


@pytest.mark.parametrize(("then", "now"), [("workspace-write", "read-only"), ("read-only", None)])
def test_a_call_that_would_run_in_another_mode_is_a_difference(
    recorded: Recorded, compared: Callable[..., Any], then: str, now: str | None
) -> None:
    """In a tighter one, and in a wider one."""
    recorded.call("shell", command="ls", allowed="look", mode=then)

    [difference] = compared(recorded, {**LOOK, **({"mode": now} if now else {})})["differences"]

    assert difference["kind"] == "mode"
    assert difference["recorded"]["mode"] == then
    assert difference["new"]["mode"] == (now or "workspace-write")


def test_another_rule_with_the_same_decision_is_none(recorded: Recorded, compared: Callable[..., Any]) -> None:
    """Rules may be renamed and split; the number is told."""
    recorded.call("shell", command="ls", allowed="old-name")
    recorded.call("shell", command="curl x", denied="no-curl")
    recorded.call("shell", command="cat x", allowed="look")

    report = compared(recorded, LOOK)

    assert report["differences"] == []
    assert report["counts"]["otherRule"] == 2


def test_escalation_is_decided_as_it_was_asked(recorded: Recorded, compared: Callable[..., Any]) -> None:
    """A rule for escalated calls decides on those and on no others; the mode asked for is the one it ran in."""
    recorded.call("shell", command="ls", escalation="danger-full-access", allowed="wide", mode="danger-full-access")
    recorded.call("shell", command="cat x", escalation="danger-full-access", denied="default")

    report = compared(
        recorded, LOOK, {**LOOK, "id": "wide", "command": [["cat", "**"]], "escalate": ["danger-full-access"]}
    )

    assert [(each["kind"], each["escalation"]) for each in report["differences"]] == [
        ("denied", "danger-full-access"),
        ("allowed", "danger-full-access"),
    ]
    assert report["differences"][1]["new"]["mode"] == "danger-full-access"


def test_the_mode_of_a_resumed_part_counts_from_there_on(recorded: Recorded, compared: Callable[..., Any]) -> None:
    """The same call before and after."""
    recorded.call("shell", command="ls", allowed="look")
    recorded.resume("read-only")
    recorded.call("shell", command="ls", allowed="look", mode="read-only")

    assert compared(recorded, LOOK)["differences"] == []


def test_trust_comes_from_the_log(tmp_path: Path, compared: Callable[..., Any]) -> None:
    """A rule for trusted runs allows nothing in an untrusted one."""
    recorded = Recorded(tmp_path / "artifacts", trust="untrusted")
    recorded.call("shell", command="ls", allowed="look")

    assert [each["kind"] for each in compared(recorded, {**LOOK, "trust": ["trusted"]})["differences"]] == ["denied"]


# --- paths ----------------------------------------------------------------------------------------


def test_paths_count_as_they_were_resolved_then(recorded: Recorded, compared: Callable[..., Any]) -> None:
    """Also where a redirection went through a link; relative globs are about the recorded workspace."""
    recorded.call("edit_file", paths={"read": [f"{WORKSPACE}/src/a"], "write": [f"{WORKSPACE}/src/a"]}, allowed="edit")
    recorded.call("write_file", paths={"write": ["/etc/hosts"]}, allowed="edit")
    recorded.call("shell", command="ls > src/list", paths={"write": [f"{WORKSPACE}/src/list"]}, allowed="look")
    recorded.call("shell", command="ls > src/link", paths={"write": ["/etc/passwd"]}, allowed="look")
    recorded.call("shell", command="cat < src/in > src/out", paths={"write": ["/etc/out"]}, allowed="look")

    report = compared(recorded, LOOK, EDIT, {"id": "read", "tool": "read_file", "decision": "allow"})

    assert [(each["callId"], each["write"]) for each in report["differences"]] == [
        ("call_2", ["/etc/hosts"]),
        ("call_4", ["/etc/passwd"]),
        ("call_5", ["/etc/out"]),
    ]


def test_a_deny_does_not_see_the_name_of_a_link_that_led_elsewhere(
    recorded: Recorded, compared: Callable[..., Any]
) -> None:
    """As it was then: what counts is the file that was opened."""
    recorded.call("shell", command="ls > gen/link", paths={"write": [f"{WORKSPACE}/src/x"]}, allowed="look")
    deny = {"id": "no-gen", "tool": "write_file", "paths": {"write": ["gen/**"]}, "decision": "deny"}

    assert compared(recorded, LOOK, EDIT, deny)["differences"] == []


def test_a_redirection_the_log_holds_no_path_for_counts_by_its_name(
    recorded: Recorded, compared: Callable[..., Any]
) -> None:
    """A version that could not analyse the text recorded none."""
    recorded.call("shell", command="ls > sub/../out", denied="default")

    [difference] = compared(recorded, LOOK, {**EDIT, "paths": {"write": ["out"]}})["differences"]

    assert (difference["kind"], difference["new"]["rule"]) == ("allowed", "look")


def test_nothing_on_this_machine_is_looked_at(tmp_path: Path, compared: Callable[..., Any]) -> None:
    """A link that is here now, under the recorded name, changes nothing."""
    workspace = tmp_path / "workspace"
    workspace.mkdir()
    (workspace / "out").symlink_to("/etc/hosts")
    recorded = Recorded(tmp_path / "artifacts", header={"cwd": str(workspace)})
    recorded.call("shell", command="ls > out", denied="default")

    [difference] = compared(recorded, LOOK, {**EDIT, "paths": {"write": ["out"]}})["differences"]

    assert difference["kind"] == "allowed"


# --- what is not compared -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "code", ["INVALID_ARGS", "UNKNOWN_TOOL", "TOOL_MASKED", "ABORTED_BEFORE_DISPATCH", "TOOL_NOT_STARTED"]
)
def test_a_call_that_never_reached_the_policy_is_counted_apart(
    recorded: Recorded, compared: Callable[..., Any], code: str
) -> None:
    """By its code; it is no difference."""
    recorded.call("shell", code=code)

    counts = compared(recorded, ALLOW)["counts"]

    assert counts["notReached"][code] == sum(counts["notReached"].values()) == counts["calls"] == 1
    assert counts["compared"] == counts["differences"] == 0


def test_a_call_without_a_decision_is_unknown(recorded: Recorded, compared: Callable[..., Any]) -> None:
    """The run was killed before it was decided, or the log is cut there."""
    recorded.call("shell", result=False)
    recorded.call("shell", code="TOOL_OUTCOME_UNKNOWN")

    counts = compared(recorded)["counts"]

    assert (counts["calls"], counts["unknown"], counts["differences"]) == (2, 2, 0)


def test_a_decided_call_without_a_result_is_compared(recorded: Recorded, compared: Callable[..., Any]) -> None:
    """What was decided is known, only the mode is not."""
    recorded.call("shell", command="ls", allowed="look", result=False)
    recorded.call("shell", command="rm x", allowed="files", code="GUARD_DENIED")

    report = compared(recorded, {**LOOK, "mode": "read-only"})

    assert [(each["kind"], each["recorded"]["mode"]) for each in report["differences"]] == [("denied", None)]


def test_one_call_id_used_twice_is_two_calls(recorded: Recorded, compared: Callable[..., Any]) -> None:
    """Models do that, even in one answer."""
    recorded.call("shell", command="ls", allowed="look", call_id="same")
    recorded.call("shell", command="rm x", allowed="files", call_id="same")
    log = recorded.log
    log.append(ev.StepStart(turn=1, step=9))
    seqs = []
    for number, command in enumerate(("cat x", "curl x")):
        call = ev.ToolCall(turn=1, step=9, call_id="same", name="shell", arguments="{}")
        seqs.append(log.append(call).seq)
        log.append(ev.ApprovalAsked(id=f"twice-{number}", call_id="same", tool_name="shell", command=command))
        log.append(ev.ApprovalDecided(id=f"twice-{number}", outcome="allowed-once", rule="look"))
    for seq in seqs:
        recorded.result(seq, 9, "same", None, {"mode": "workspace-write", "attempts": 1})

    report = compared(recorded, LOOK)

    assert [each["command"] for each in report["differences"]] == ["rm x", "curl x"]
    assert report["counts"]["compared"] == 4


def test_a_pruned_result_is_not_a_second_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compaction replaces results; the calls stay as many as they were."""
    policy = write_policy(tmp_path, ALLOW)

    assert run_cli(["policy", "test", str(policy), str(GOLDEN / "ours/compaction"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["counts"]["calls"] == 7


# --- families -------------------------------------------------------------------------------------


def test_subagents_are_read_too_and_a_fork_does_not_count_its_parents_calls_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A child's own calls count; those it took over do, unless the parent is read as well."""
    parent = Recorded(tmp_path / "artifacts")
    parent.call("shell", command="rm x", allowed="then")
    parent.close()
    header = {"id": "session-child", "parentSession": SESSION, "seedLength": 10, "delegationDepth": 1}
    child = Recorded(tmp_path / "artifacts/subagents/one", header=header, seed=True)
    child.call("shell", command="rm y", allowed="then")
    child.close()
    policy = write_policy(tmp_path, LOOK)

    code = run_cli(["policy", "test", str(policy), str(tmp_path / "artifacts"), "--json"])
    report = json.loads(capsys.readouterr().out)
    assert code == 1
    assert [(each["session"], each["command"]) for each in report["differences"]] == [
        (SESSION, "rm x"),
        ("session-child", "rm y"),
    ]
    assert [each["inherited"] for each in report["sessions"]] == [0, 1]

    run_cli(["policy", "test", str(policy), str(tmp_path / "artifacts/subagents/one"), "--json"])
    alone = json.loads(capsys.readouterr().out)
    assert [each["command"] for each in alone["differences"]] == ["rm x", "rm y"]


def test_an_export_and_a_plain_log_say_the_same_as_the_directory(
    tmp_path: Path, recorded: Recorded, capsys: pytest.CaptureFixture[str]
) -> None:
    """ZIP, ``.jsonl``, ``.jsonl.zst``."""
    recorded.call("shell", command="rm x", allowed="files")
    recorded.close()
    policy = write_policy(tmp_path, LOOK)
    artifacts = tmp_path / "artifacts"
    export_session(open_session(str(artifacts)), tmp_path / "session.zip")
    with zipfile.ZipFile(tmp_path / "session.zip") as archive:
        (tmp_path / "session.jsonl").write_bytes(archive.read("session.jsonl"))

    said = []
    for source in (artifacts, artifacts / "session.jsonl.zst", tmp_path / "session.zip", tmp_path / "session.jsonl"):
        assert run_cli(["policy", "test", str(policy), str(source), "--json"]) == 1
        said.append(json.loads(capsys.readouterr().out)["differences"])

    assert len(said[0]) == 1
    assert all(each == said[0] for each in said)


# --- dsh ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", DSH, ids=lambda path: path.name)
def test_every_log_of_dsh_can_be_tested(path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that allows all but escalation does not differ; one that allows that too does where nobody answered."""
    code = run_cli(["policy", "test", str(write_policy(tmp_path, ALLOW)), str(path), "--json"])

    report = json.loads(capsys.readouterr().out)
    jsonschema_rs.validator_for(TEST_SCHEMA).validate(report)
    assert (code, report["differences"]) == (0, [])
    counts = report["counts"]
    assert counts["calls"] == counts["compared"] + counts["unknown"] + sum(counts["notReached"].values())

    escalated = {**ALLOW, "id": "wide", "escalate": ["danger-full-access"]}
    code = run_cli(["policy", "test", str(write_policy(tmp_path, ALLOW, escalated)), str(path), "--json"])
    asked = [each["callId"] for each in json.loads(capsys.readouterr().out)["differences"]]
    assert asked == (["call_13_0", "call_15_0"] if path.name.startswith("rich") else [])
    assert code == (1 if asked else 0)


@pytest.mark.parametrize("path", DSH, ids=lambda path: path.name)
def test_a_policy_without_rules_denies_whatever_ran_in_dsh(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each call that ran is a difference, none else."""
    run_cli(["policy", "test", str(write_policy(tmp_path)), str(path), "--json"])

    counts = json.loads(capsys.readouterr().out)["counts"]
    expected = {"rich": 19, "compaction": 8, "three-steps": 3, "sandbox-unavailable": 2, "code-mode": 3}
    assert counts["denied"] == counts["differences"] == expected.get(path.name.partition(".")[0], 0)


def test_calls_of_dsh_are_decided_in_our_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Shell texts, paths, escalation; a tool we do not have by its name alone."""
    rules: list[dict[str, Any]] = [
        {
            "id": "look",
            "tool": "shell",
            "command": [["seq", "**"], ["sleep", "**"]],
            "builtin": True,
            "decision": "allow",
        },
        {"id": "read", "tool": ["read_file", "grep", "glob"], "paths": {"read": ["**"]}, "decision": "allow"},
        {"id": "todo", "tool": "todo", "decision": "allow"},
        {"id": "wide", "tool": "write_file", "paths": {"write": ["/home/ci/outside.txt"]}, "decision": "allow"},
    ]

    run_cli(["policy", "test", str(write_policy(tmp_path, *rules)), str(GOLDEN / "dsh/rich.jsonl"), "--json"])

    report = json.loads(capsys.readouterr().out)
    assert [(each["callId"], each["kind"], each["tool"]) for each in report["differences"]] == [
        ("call_14_0", "denied", "bash"),
        ("call_18_0", "denied", "subagent"),
        ("call_20_0", "denied", "workflow"),
    ]
    assert report["differences"][0]["recorded"] == {"decision": "allow", "rule": None, "mode": "workspace-write"}
    assert report["counts"]["withoutFacts"] == 2
    assert report["counts"]["notReached"]["INVALID_ARGS"] == 1


DSH_CALLS = [
    ("bash", {"command": "ls"}, "shell", "ls", (), ()),
    ("bash", {"command": "ls", "workdir": "/w"}, "shell", "ls", (), ()),
    ("bash", {"command": "ls", "workdir": "sub"}, "bash", None, (), ()),
    ("bash", {}, "bash", None, (), ()),
    ("read", {"file_path": "a/../b"}, "read_file", None, ("/w/b",), ()),
    ("read_image", {"file_path": "/x.png"}, "read_file", None, ("/x.png",), ()),
    ("write", {"file_path": "/w/a", "content": ""}, "write_file", None, (), ("/w/a",)),
    ("edit", {"file_path": "a"}, "edit_file", None, ("/w/a",), ("/w/a",)),
    ("grep", {"pattern": "x"}, "grep", None, ("/w",), ()),
    ("grep", {"pattern": "x", "path": "src"}, "grep", None, ("/w/src",), ()),
    ("glob", {"pattern": "**/*.py", "path": "src"}, "glob", None, ("/w/src",), ()),
    ("glob", {"pattern": "/etc/**/*.conf"}, "glob", None, ("/etc",), ()),
    ("todo_write", {"todos": []}, "todo", None, (), ()),
    ("web_search", {"queries": ["x"]}, "web_search", None, (), ()),
    ("read", {"file_path": 1}, "read", None, (), ()),
    ("read", [], "read", None, (), ()),
]


@pytest.mark.parametrize(("name", "arguments", "tool", "command", "read", "write"), DSH_CALLS)
def test_the_table_of_dsh_tools_gives_facts(
    name: str, arguments: Any, tool: str, command: str | None, read: tuple[str, ...], write: tuple[str, ...]
) -> None:
    """One line for each tool in it; what does not mean the same is decided by its name."""
    header = {"type": "session", "version": 0, "id": "d", "cwd": "/w"}
    counts = Counts()
    events = [
        ev.SandboxModeEvent(mode="workspace-write"),
        ev.ToolCall(turn=1, step=1, call_id="c", name=name, arguments=json.dumps(arguments), seq=1),
        ev.ToolResult(
            turn=1,
            step=1,
            message={"role": "user", "content": [], "source": {"kind": "tool", "callId": "c"}, "id": "m"},
            surface_op="append",
            seq=2,
        ),
    ]

    [difference] = redecide(Policy(), header, events, counts)

    facts = difference.facts
    assert (facts.tool, facts.command, facts.read, facts.write) == (tool, command, read, write)
    assert difference.tool == name
    assert counts.without_facts == (tool not in {each for each, _ in DSH_TOOLS.values()})


# --- ours -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.name)
def test_every_golden_log_of_ours_can_be_tested(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A policy that allows all differs on the calls that were denied."""
    policy = shipped_directory() / "policies/eval.policy.yaml"

    code = run_cli(["policy", "test", str(policy), str(path), "--json"])

    report = json.loads(capsys.readouterr().out)
    assert [each["command"] for each in report["differences"]] == (
        ["git push origin main"] if path.name in ("turns", "forked") else []
    )
    assert code == (1 if report["differences"] else 0)
    assert report["counts"]["compared"] > 0


def test_memory_does_not_grow_with_the_log() -> None:
    """Neither with many steps nor with many calls that never get a result."""

    def events(steps: int) -> Iterator[ev.Event]:
        yield ev.SandboxModeEvent(mode="workspace-write")
        for number in range(steps):
            arguments = '{"command": "ls"}'
            yield ev.ToolCall(turn=1, step=1, call_id=f"c{number}", name="bash", arguments=arguments, seq=number)

    def peak(steps: int) -> int:
        counts = Counts()
        tracemalloc.start()
        for _ in redecide(Policy(), {"id": "d", "cwd": "/w"}, events(steps), counts):
            pass
        _, most = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert counts.unknown == steps
        return most

    peak(5_000)
    assert peak(20_000) < 1.5 * peak(6_000)


# --- the command ----------------------------------------------------------------------------------


def test_the_installed_command_lists_differences_and_exits_1(
    run_nightshift: Nightshift, tmp_path: Path, recorded: Recorded
) -> None:
    """Text for people: shortened, and nothing in it acts on a terminal; nothing on stderr."""
    recorded.call("shell", command="ls", allowed="look")
    recorded.call("shell", command="rm \x1b[31m\n::error::x " + "y" * 500, allowed="files")
    paths = {"read": [f"/x/{number}" for number in range(9)]}
    recorded.call("grep", paths=paths, allowed="read")
    recorded.close()
    policy = write_policy(tmp_path, LOOK)

    done = run_nightshift("policy", "test", policy, tmp_path / "artifacts")
    same = run_nightshift("policy", "test", write_policy(tmp_path, ALLOW), tmp_path / "artifacts")

    lines = done.stdout.splitlines()
    assert (done.exit_code, done.stderr) == (1, "")
    assert lines[0] == f"now denied: {SESSION}, turn 1, step 2, call call_2"
    assert lines[1].startswith(r"  shell: rm \x1b[31m\n:\:error::x yyy")
    assert lines[1].endswith("… (520 characters)")
    assert lines[2] == "  recorded: allowed by files, in workspace-write"
    assert lines[3].startswith("  new:      denied by default: ")
    assert lines[5] == "  grep: read /x/0, /x/1, /x/2 and 6 more"
    assert lines[-1] == "2 differences in 3 compared calls of 1 session: 2 now denied, 0 now allowed, 0 in another mode"
    assert "\x1b" not in done.stdout
    assert same.exit_code == 0
    assert same.stdout.startswith("0 differences in 3 compared calls of 1 session")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:40], "empty, or cut off inside its header"),
        (lambda data: b"no log\n" + data, "line 1"),
        (lambda data: data.replace(b'"seq":3', b'"seq":7'), "line 5"),
        (lambda data: data.replace(b'"trust":"trusted"', b'"trust":"very"'), "no sense"),
        (lambda data: data.replace(b'"mode":"workspace-write"', b'"mode":"wild"'), "no sense"),
        (lambda data: data.replace(b'"paths":null', b'"paths":{"read":"x"}'), "no sense"),
        (lambda data: data.replace(b'"cwd":"/home/user/project"', b'"origin":"x"'), "names no workspace"),
        (lambda data: data.replace(b'"escalation":null', b'"escalation":{"mode":[]}'), "no sense"),
    ],
)
def test_a_log_that_cannot_be_read_exits_13_with_one_message(
    run_nightshift: Nightshift, tmp_path: Path, recorded: Recorded, change: Callable[[bytes], bytes], message: str
) -> None:
    """It names the file, and no half of a report is printed."""
    recorded.call("shell", command="rm x", allowed="files")
    recorded.close()
    good = tmp_path / "artifacts"
    source = open_session(str(good))
    data = b"\n".join(source.raw_lines()) + b"\n"
    changed = change(data)
    assert changed != data
    (tmp_path / "bad.jsonl").write_bytes(changed)

    done = run_nightshift("policy", "test", write_policy(tmp_path, LOOK), good, tmp_path / "bad.jsonl")

    assert (done.exit_code, done.stdout) == (13, "")
    assert done.stderr.startswith("error LOG_INVALID: ")
    assert "bad.jsonl" in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bad.yaml", "artifacts"], "bad.yaml"),
        (["none.yaml", "artifacts"], "no such file"),
        (["new.policy.yaml", "nowhere"], "there is no session 'nowhere'"),
        (["new.policy.yaml"], "Missing argument 'SESSION...'"),
        ([], "Missing argument 'POLICY'"),
        (["new.policy.yaml", "artifacts", "--jsn"], "No such option"),
    ],
)
def test_wrong_usage_and_a_bad_policy_exit_2(
    run_nightshift: Nightshift, tmp_path: Path, recorded: Recorded, arguments: list[str], message: str
) -> None:
    """One message; nothing on stdout."""
    recorded.close()
    write_policy(tmp_path, LOOK)
    (tmp_path / "bad.yaml").write_text("version: 1\nrules: [{id: a, tool: shel, decision: allow}]\n", encoding="utf-8")

    done = run_nightshift("policy", "test", *arguments, cwd=tmp_path)

    assert (done.exit_code, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_the_end_of_a_killed_log_is_said_to_be_missing(
    run_nightshift: Nightshift, tmp_path: Path, recorded: Recorded
) -> None:
    """What is there is compared, what was torn is told on stderr."""
    recorded.call("shell", command="rm x", allowed="files")
    recorded.close()
    data = b"\n".join(open_session(str(tmp_path / "artifacts")).raw_lines()) + b'\n{"type":"step/st'
    (tmp_path / "torn.jsonl").write_bytes(data)

    done = run_nightshift("policy", "test", write_policy(tmp_path, LOOK), tmp_path / "torn.jsonl")

    assert done.exit_code == 1
    assert "note: " in done.stderr
    assert "torn.jsonl" in done.stderr


def test_a_log_that_is_cut_off_before_its_first_call_proves_nothing(
    recorded: Recorded, run_nightshift: Nightshift, tmp_path: Path
) -> None:
    """Code 13: "no differences" would be read as a proof."""
    recorded.close()
    header, *lines = open_session(str(tmp_path / "artifacts")).raw_lines()
    (tmp_path / "torn.jsonl").write_bytes(header + b"\n" + lines[0][:40])

    done = run_nightshift("policy", "test", write_policy(tmp_path, LOOK), tmp_path / "torn.jsonl")

    assert done.exit_code == 13
    assert "torn.jsonl: cut off before its first call" in done.stderr
    assert "differences" not in done.stdout
