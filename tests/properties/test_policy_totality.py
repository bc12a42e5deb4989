"""Every call gets a decision; only a rule allows; a deny never allows more."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.approvals.policy import DEFAULT_RULE, CallFacts, Policy, decide
from runner.approvals.review import notes, table, unreachable
from runner.config.load import Document, Mark
from runner.config.policy import build_policy
from runner.permission import Mode, Trust

WORKSPACE = "/srv/space"
TOOLS = ("shell", "read_file", "write_file", "edit_file", "glob", "grep", "todo", "unknown")

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
        {"read_file": reads, "edit_file": writes, "glob": reads or (needed,), "grep": reads or (needed,)}.get(
            facts.tool, ()
        ),
        writes if facts.tool in {"write_file", "edit_file"} else (),
    )
    cells = {(cell.tool, cell.mode, cell.trust): cell for cell in table(policy, tools=[facts.tool])}

    for mode in Mode:
        decision = decide(policy, facts, workspace=WORKSPACE, mode=mode, trust=trust)
        cell = cells[facts.tool, mode, trust]
        assert not (cell.outcome == "deny" and decision.allowed and (facts.read or facts.write or facts.command))
        assert not (cell.outcome == "allow" and not decision.allowed and (facts.command or "x").strip())
        assert decision.rule not in dict(unreachable(policy)) or not decision.allowed
