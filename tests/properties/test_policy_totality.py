"""Every call gets a decision; only a rule allows; what is stricter never allows more."""

from __future__ import annotations

import copy
import fnmatch
import inspect
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from runner.approvals.policy import DEFAULT_RULE, CallFacts, Policy, decide
from runner.approvals.resolver import Resolver, follow_links
from runner.approvals.review import notes, table, unreachable
from runner.approvals.shell import analyse
from runner.approvals.words import KNOWN_TOOLS, MATCHED_BUILTINS, WRITE_TOOLS
from runner.config.load import Document, Mark
from runner.config.policy import build_policy
from runner.errors import ErrorCode
from runner.permission import Mode, Trust
from runner.sandbox.base import SandboxSpec
from runner.sandbox.executor import Executor, session_policy
from runner.session.events import ApprovalDecided
from runner.tools.builtin.files import EditFile, ReadFile, WriteFile
from runner.tools.builtin.finding import ReportFinding
from runner.tools.builtin.patch import ApplyPatch
from runner.tools.builtin.search import Glob, Grep
from runner.tools.builtin.shell import Shell
from runner.tools.builtin.todo import Todo
from runner.tools.pipeline import Finalized, Pipeline, PreparedCall, content_bytes
from runner.tools.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.approvals.lexer import Token
    from runner.approvals.shell import SimpleCommand
    from runner.messages import ImageBlock, TextBlock
    from runner.session.events import Event
    from runner.tools.base import Tool

pytestmark = pytest.mark.timeout(300)

WORKSPACE = "/srv/space"
TOOLS = (*KNOWN_TOOLS, "unknown")

words = st.sampled_from(["ls", "git", "push", "-C", "--all", "a", "pytest", "*", "a*", "?", "[ab]", "[", "./x", "env"])
patterns = st.lists(words | st.lists(words, min_size=1, max_size=2), min_size=1, max_size=3)
globs = st.lists(
    st.sampled_from(
        ["**", "src/**", "*.py", "**/*.py", "src/gen/*", "/etc/**", "{a,b}/*", ".env", "**/.git/**", "/**"]
    ),
    min_size=1,
    max_size=2,
)
modes = st.sampled_from(list(Mode))
trusts = st.sampled_from(list(Trust))


@st.composite
def commands(draw: st.DrawFn, *, allow: bool) -> Any:
    """``command`` of a rule."""
    if draw(st.integers(0, 5)) == 0:
        return "any"
    found = []
    for argv in draw(st.lists(patterns, min_size=1, max_size=3)):
        whole = [*argv, "**"] if draw(st.booleans()) else argv
        pattern: dict[str, Any] = {"argv": whole}
        if allow and draw(st.booleans()):
            pattern["refuse_flags"] = ["-C", "--all"]
        if not allow and draw(st.booleans()):
            pattern["anywhere"] = True
        found.append(pattern)
    return found


@st.composite
def rules(draw: st.DrawFn, *, allow: bool | None = None) -> dict[str, Any]:
    """A rule; it need not make sense, but it has the right shape."""
    allow = draw(st.booleans()) if allow is None else allow
    rule: dict[str, Any] = {
        "tool": draw(st.just("*") | st.lists(st.sampled_from(TOOLS), min_size=1, max_size=3, unique=True)),
        "decision": "allow" if allow else "deny",
    }
    optional: dict[str, st.SearchStrategy[Any]] = {
        "command": commands(allow=allow),
        "builtin": st.booleans(),
        "env": st.lists(st.sampled_from(["A", "PATH", "x"]), max_size=2),
        "paths": st.fixed_dictionaries({}, optional={"read": globs, "write": globs, "except": globs}),
        "mode": st.sampled_from(["read-only", "workspace-write"]),
        "trust": st.lists(trusts.map(str), min_size=1, max_size=2),
        "escalate": st.lists(st.sampled_from(["workspace-write", "danger-full-access"]), max_size=2, unique=True),
    }
    for key in draw(st.lists(st.sampled_from(sorted(optional)), unique=True, max_size=3)):
        rule[key] = draw(optional[key])
    return rule


pieces = st.sampled_from([
    "ls", "git", "git push", "git -C a push", "pytest -q", "env A=1 ", "A=1 ", "x=1;", " > a", " > src/x",
    " < .env", "$x", "$(git push)", "`ls`", "'a b'", '"', "'", ";", " && ", " | ", "\n", "(", ")", "{ ", "; }",
    "if ", "then ", "fi", "eval ", "bash -c 'git push'", "sh -c 'ls'", "<<E\na\nE\n", "cd src && ", "[ -f a ]", "*",
    "~", "#", "\\", "é", "\x00", "xargs ", "find . -exec ls {} +", "time ", "echo a", " 2>&1", "&",
])  # fmt: skip
texts = st.lists(pieces, max_size=8).map("".join) | st.text(max_size=20)
paths = st.sampled_from(["a", "a.py", "src/x", "src/gen/x", ".env", ".git/config", "../x", "", "src"]).map(
    lambda path: f"{WORKSPACE}/{path}"
) | st.sampled_from(["/etc/passwd", "/", "relative", "", "/srv/space/", "//x"])
path_lists = st.lists(paths, max_size=3).map(tuple)


@st.composite
def calls(draw: st.DrawFn) -> CallFacts:
    """Facts of a call, those that no tool would give among them."""
    return CallFacts(
        draw(st.sampled_from(TOOLS) | st.text(max_size=5)),
        draw(st.none() | texts),
        draw(path_lists),
        draw(path_lists),
        draw(st.none() | modes),
    )


def policy_of(given_rules: list[dict[str, Any]]) -> Policy:
    """A policy of the rules, whatever is wrong with them."""
    value = {"version": 1, "rules": [{"id": f"r{number}", **rule} for number, rule in enumerate(given_rules)]}
    policy, _ = build_policy(Document("test", value, {(): Mark("test", 0, 0, "/")}), known_tools=TOOLS)
    return policy


def allowed(policy: Policy, facts: CallFacts, mode: Mode, trust: Trust) -> bool:
    """Whether a call is allowed."""
    return decide(policy, facts, workspace=WORKSPACE, mode=mode, trust=trust).allowed


@settings(max_examples=150, deadline=None)
@given(st.lists(rules(), max_size=5), calls(), modes, trusts)
def test_every_call_gets_a_decision_that_a_rule_made(
    some: list[dict[str, Any]], facts: CallFacts, mode: Mode, trust: Trust
) -> None:
    """An allow is named after a rule that allows and looks at such calls, a denial after one that denies or default."""
    policy = policy_of(some)

    decision = decide(policy, facts, workspace=WORKSPACE, mode=mode, trust=trust)

    assert decision.reason
    named = [rule for rule in policy.rules if rule.id == decision.rule]
    if decision.allowed:
        escalation = facts.escalation if facts.escalation and facts.escalation.rank > mode.rank else None
        tools = {facts.tool, "read_file", "write_file"} if facts.command is not None else {facts.tool}
        assert named[0].allow
        assert any(named[0].applies(tool, trust, escalation) for tool in tools)
        effective = escalation or mode
        assert decision.mode is None or decision.mode.rank < effective.rank
    else:
        assert decision.rule == DEFAULT_RULE or not named[0].allow
        assert decision.mode is None
        assert not decision.opaque


@settings(max_examples=150, deadline=None)
@given(st.lists(rules(), max_size=4), rules(allow=False), calls(), modes, trusts)
def test_adding_a_deny_never_allows_more(
    some: list[dict[str, Any]], deny: dict[str, Any], facts: CallFacts, mode: Mode, trust: Trust
) -> None:
    """Whatever it says, and wherever it stands."""
    without = policy_of(some)

    if allowed(policy_of([*some, deny]), facts, mode, trust):
        assert allowed(without, facts, mode, trust)
        assert allowed(policy_of([deny, *some]), facts, mode, trust)


@settings(max_examples=100, deadline=None)
@given(st.lists(rules(), max_size=4), rules(allow=True), calls(), modes, trusts)
def test_adding_an_allow_never_denies_more_and_never_loosens_a_mode(
    some: list[dict[str, Any]], allow: dict[str, Any], facts: CallFacts, mode: Mode, trust: Trust
) -> None:
    """The tightest mode of all allowing rules counts."""
    before = decide(policy_of(some), facts, workspace=WORKSPACE, mode=mode, trust=trust)
    after = decide(policy_of([*some, allow]), facts, workspace=WORKSPACE, mode=mode, trust=trust)

    if before.allowed:
        assert after.allowed
        assert (after.mode or mode).rank <= (before.mode or mode).rank or before.mode is None


@settings(max_examples=40, deadline=None)
@given(st.lists(rules(), max_size=3), st.lists(pieces, min_size=1, max_size=3), st.sampled_from([60, 1_000, 9_000]))
def test_long_texts_are_decided_too(some: list[dict[str, Any]], repeated: list[str], times: int) -> None:
    """However often the same nasty pieces come; the time of the whole test is bounded."""
    facts = CallFacts("shell", "".join(repeated) * times)

    assert decide(policy_of(some), facts, workspace=WORKSPACE, mode=Mode.READ_ONLY, trust=Trust.TRUSTED).reason


# --- what a rule names, and what is stricter ------------------------------------------------------


def names_word(alternatives: str | list[str], token: Token, *, program: bool) -> bool:
    """Whether a word of a pattern names a word of a command, in the plainest way."""
    given_words = [alternatives] if isinstance(alternatives, str) else alternatives
    if token.expansion:
        return "*" in given_words
    return any(
        word in {"*", token.value}
        or (fnmatch.fnmatchcase(token.value, word) and not (program and "/" in token.value.removeprefix(word[:2])))
        for word in given_words
    )


def names_command(rule: dict[str, Any], command: SimpleCommand) -> bool:
    """Whether a rule, as it is written, names a command."""
    if rule.get("command") == "any" or (rule.get("builtin") and command.name in MATCHED_BUILTINS):
        return True
    for pattern in rule.get("command", ()):
        argv = pattern["argv"]
        rest = argv[-1] in ("**", ["**"])
        named = argv[:-1] if rest else argv
        if len(command.argv) < len(named) or (len(command.argv) > len(named) and not rest):
            continue
        pairs = zip(named, command.argv, strict=False)
        if all(names_word(word, token, program=not at) for at, (word, token) in enumerate(pairs)):
            return True
    return False


@settings(max_examples=120, deadline=None)
@given(st.lists(rules(), min_size=1, max_size=5), texts, modes, trusts)
def test_a_text_is_allowed_only_if_a_rule_names_each_of_its_commands(
    some: list[dict[str, Any]], text: str, mode: Mode, trust: Trust
) -> None:
    """Put to the rules as they are written; a text that is not analysed needs one with ``command: any``."""
    if not allowed(policy_of(some), CallFacts("shell", text), mode, trust):
        return

    analysis = analyse(text)
    able = [rule for rule in some if rule["decision"] == "allow" and (rule["tool"] == "*" or "shell" in rule["tool"])]
    able = [rule for rule in able if str(trust) in rule.get("trust", [str(trust)]) and not rule.get("escalate")]
    anything = any(rule.get("command") == "any" for rule in able)

    assert anything or analysis.analysed
    assert anything or analysis.commands
    for command in analysis.commands:
        assert any(names_command(rule, command) for rule in able)


@st.composite
def narrowed(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """An allow, and the same one with less in it."""
    rule = draw(rules(allow=True))
    less = copy.deepcopy(rule)
    by_words = "command" in rule
    ways = ["trust", "mode"] + ["env"] * bool(rule.get("env")) + ["except"] * bool(rule.get("paths"))
    if by_words:
        ways += ["builtin", "command", "command", "flags", "words"]
    if rule["tool"] == "*" or len(rule["tool"]) > 1:
        ways.append("tool")
    way = draw(st.sampled_from(ways))
    if way == "trust":
        less["trust"] = rule.get("trust", [str(each) for each in Trust])[:1]
    elif way == "mode":
        less["mode"] = "read-only"
    elif way == "env":
        less["env"] = rule["env"][1:]
    elif way == "except":
        less["paths"]["except"] = rule["paths"].get("except", []) + draw(globs)
    elif way == "builtin":
        less.pop("builtin", None)
    elif way == "tool":
        less["tool"] = ["shell"] if rule["tool"] == "*" else rule["tool"][1:]
    elif rule["command"] == "any":
        less["command"] = [{"argv": ["ls", "**"]}, {"argv": ["git", "*"]}]
    elif way == "command":
        less["command"] = rule["command"][1:] or [{"argv": ["never"]}]
    else:
        pattern = less["command"][0]
        if way == "flags":
            pattern["refuse_flags"] = [*pattern.get("refuse_flags", []), "-q", "--force"]
        elif pattern["argv"][-1] == "**" and len(pattern["argv"]) > 1:
            pattern["argv"] = pattern["argv"][:-1]
    return rule, less


@settings(max_examples=120, deadline=None)
@given(st.lists(rules(), max_size=3), narrowed(), calls(), modes, trusts)
def test_an_allow_with_less_in_it_never_allows_more(
    others: list[dict[str, Any]],
    pair: tuple[dict[str, Any], dict[str, Any]],
    facts: CallFacts,
    mode: Mode,
    trust: Trust,
) -> None:
    """A tool, a trust, a variable, a pattern less, an option or a path more that is left out: and no rule at all."""
    rule, less = pair

    if allowed(policy_of([*others, less]), facts, mode, trust):
        assert allowed(policy_of([*others, rule]), facts, mode, trust)
    if allowed(policy_of(others), facts, mode, trust):
        assert allowed(policy_of([*others, less]), facts, mode, trust)


@settings(max_examples=100, deadline=None)
@given(st.lists(rules(), max_size=4), calls(), modes, trusts)
def test_the_mode_of_the_run_allows_nothing(
    some: list[dict[str, Any]], facts: CallFacts, mode: Mode, trust: Trust
) -> None:
    """Calls without escalation are decided alike in every mode; what runs never gets a wider one than asked for."""
    plain = CallFacts(facts.tool, facts.command, facts.read, facts.write)
    policy = policy_of(some)

    assert len({allowed(policy, plain, each, trust) for each in Mode}) == 1
    decision = decide(policy, facts, workspace=WORKSPACE, mode=mode, trust=trust)
    widest = max(mode.rank, facts.escalation.rank if facts.escalation else 0)
    assert decision.mode is None or decision.mode.rank < widest


@settings(max_examples=100, deadline=None)
@given(st.permutations(range(4)), st.lists(rules(), min_size=4, max_size=4), calls(), modes, trusts)
def test_the_order_of_rules_decides_nothing(
    order: list[int], some: list[dict[str, Any]], facts: CallFacts, mode: Mode, trust: Trust
) -> None:
    """Only which of several rules is named."""
    policy, other = policy_of(some), policy_of([some[at] for at in order])
    first = decide(policy, facts, workspace=WORKSPACE, mode=mode, trust=trust)
    second = decide(other, facts, workspace=WORKSPACE, mode=mode, trust=trust)

    assert (first.allowed, first.mode, first.may_escalate) == (second.allowed, second.mode, second.may_escalate)


@settings(max_examples=100, deadline=None)
@given(st.lists(rules(), max_size=5), calls(), trusts)
def test_what_is_said_beforehand_holds(some: list[dict[str, Any]], facts: CallFacts, trust: Trust) -> None:
    """A cell that says deny or allow is right about every call; a rule called unreachable is never named."""
    policy = policy_of(some)
    list(notes(policy))
    # Only calls that the tools can make: a reading tool writes nothing, an edit reads what it writes, and all but
    # the reading of a spilled result names a path.
    needed = f"{WORKSPACE}/a"
    reads, writes = facts.read, facts.write or (needed,)
    facts = CallFacts(
        facts.tool,
        (facts.command or "ls") if facts.tool == "shell" else None,
        {
            "read_file": reads,
            "edit_file": writes,
            "apply_patch": writes,
            "glob": reads or (needed,),
            "grep": reads or (needed,),
        }.get(facts.tool, ()),
        writes if facts.tool in WRITE_TOOLS else (),
    )
    cells = {(cell.tool, cell.mode, cell.trust): cell for cell in table(policy, tools=[facts.tool])}

    for mode in Mode:
        decision = decide(policy, facts, workspace=WORKSPACE, mode=mode, trust=trust)
        cell = cells[facts.tool, mode, trust]
        assert not (cell.outcome == "deny" and decision.allowed and (facts.read or facts.write or facts.command))
        assert not (cell.outcome == "allow" and not decision.allowed and (facts.command or "x").strip())
        assert decision.rule not in dict(unreachable(policy)) or not decision.allowed


# --- through the tools and the pipeline ------------------------------------------------------------


class Kept:
    """A finalizer that changes nothing."""

    def begin_step(self) -> None:
        pass

    def finalize(self, call_id: str, content: Sequence[TextBlock | ImageBlock], overflow: str | None) -> Finalized:
        assert call_id
        assert overflow is None
        return Finalized(list(content), content_bytes(content))


def tools_of(root: Path, mode: Mode) -> list[Tool]:
    """The built-in tools of a run in ``mode`` over a small tree; nothing of it runs here."""
    executor = Executor(
        None,
        session_policy(
            SandboxSpec(), mode=mode, workspace=f"{root}/work", state=f"{root}/{mode}", hidden=(), environment={}
        ),
    )

    def never(*_: object) -> Any:
        raise AssertionError("a call ran")

    # What a read is given for its pages and images does not matter: it only says what it would touch.
    others: dict[str, Any] = dict.fromkeys([*inspect.signature(ReadFile).parameters][1:], never)
    return [
        Shell(executor, overflow=f"{root}/overflow"),
        ReadFile(executor, **others),
        WriteFile(executor),
        EditFile(executor),
        ApplyPatch(executor),
        Glob(executor),
        Grep(executor, page_bytes=1_000),
        Todo(),
        ReportFinding(executor),
    ]


paths_in = st.sampled_from([
    "a", "sub/a", "src/x", "../x", "/etc/passwd", "link/x", "loop/x", "out/x", "", ".", "~", "a\0", ".env",
    ".git/config", "**/*", "sub/*.py", "/", "src/../.env", "\udc80", "spill:c1",
])  # fmt: skip
odd = st.none() | st.integers() | st.text(max_size=5) | paths_in


@st.composite
def written_calls(draw: st.DrawFn) -> tuple[str, str]:
    """Name and arguments of a call as a model writes them; most have the right shape."""
    some = paths_in | odd
    shapes: dict[str, st.SearchStrategy[Any]] = {
        "shell": st.fixed_dictionaries(
            {"command": texts},
            optional={"sandbox_permissions": modes.map(str), "justification": st.sampled_from(["", "why"])},
        ),
        "read_file": st.fixed_dictionaries({"path": some}),
        "write_file": st.fixed_dictionaries({"path": some, "content": st.text(max_size=3)}),
        "edit_file": st.fixed_dictionaries({"path": some, "edits": st.just([{"old": "a", "new": "b"}])}),
        "glob": st.fixed_dictionaries({"pattern": some}, optional={"path": some}),
        "grep": st.fixed_dictionaries({"pattern": some}, optional={"path": some}),
        "apply_patch": st.fixed_dictionaries(
            {"patch": paths_in.map(lambda path: f"--- a/{path}\n+++ b/{path}\n@@ -1 +1 @@\n-a\n+b\n") | texts}
        ),
        "todo": st.just({"todos": [{"content": "a", "status": "pending"}]}),
        "report_finding": st.fixed_dictionaries({"path": some, "severity": st.just("note"), "message": some}),
        "unknown": st.dictionaries(st.text(max_size=4), odd, max_size=2),
    }
    name = draw(st.sampled_from(sorted(shapes)))
    return name, draw(shapes[name].map(json.dumps) | shapes[name].map(json.dumps) | st.text(max_size=10))


def test_every_call_of_a_real_tool_is_decided_by_the_policy_alone(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Through arguments, facts, links and stages: refused with a reason, or allowed by a rule that is recorded."""
    root = Path(os.path.realpath(tmp_path_factory.mktemp("totality")))
    (root / "work" / "sub").mkdir(parents=True)
    (root / "work" / "link").symlink_to("sub")
    (root / "work" / "loop").symlink_to("loop")
    (root / "work" / "out").symlink_to("/etc")
    tools = {mode: tools_of(root, mode) for mode in Mode}
    prepared_calls = []

    @settings(max_examples=120, deadline=None)
    @given(st.lists(rules(), max_size=5), written_calls(), modes, trusts)
    def check(some: list[dict[str, Any]], call: tuple[str, str], mode: Mode, trust: Trust) -> None:
        policy = policy_of(some)
        events: list[Event] = []
        resolver = Resolver(policy, workspace=f"{root}/work", mode=mode, trust=trust, new_id=lambda: "a1")
        pipeline = Pipeline(
            registry=Registry(tools[mode]),
            mode=mode,
            resolve=resolver.resolve,
            emit=events.extend,
            finalizer=Kept(),
            clock=lambda: 0.0,
            timeout=lambda: 1.0,
            holds_secret=lambda _call, _text: False,
        )

        made = pipeline.prepare(
            pipeline.parse({"type": "tool-call", "id": "c1", "name": call[0], "arguments": call[1]})
        )

        decided = [event for event in events if isinstance(event, ApprovalDecided)]
        by_id = {rule.id: rule for rule in policy.rules}
        if isinstance(made, PreparedCall):
            prepared_calls.append(made)
            assert made.decision == decide(
                policy, made.facts, workspace=f"{root}/work", mode=mode, trust=trust, resolve=follow_links
            )
            assert made.decision.allowed
            assert by_id[made.decision.rule].allow
            assert [(event.outcome, event.rule) for event in decided] == [("allowed-once", made.decision.rule)]
            assert made.mode.rank <= max(mode.rank, made.facts.escalation.rank if made.facts.escalation else 0)
        else:
            assert made.outcome.content
            if made.outcome.error is ErrorCode.POLICY_DENIED:
                assert [event.outcome for event in decided] == ["rejected"]
                rule = decided[0].rule
                assert rule == DEFAULT_RULE or (rule is not None and not by_id[rule].allow)
            else:
                assert made.outcome.error in {ErrorCode.INVALID_ARGS, ErrorCode.UNKNOWN_TOOL}
                assert not decided

    check()
    assert prepared_calls
    assert sorted(path.name for path in (root / "work").iterdir()) == ["link", "loop", "out", "sub"]
