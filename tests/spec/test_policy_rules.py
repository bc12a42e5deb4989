"""What a rule matches: words, options, paths, trust, modes, escalation. Strictest wins."""

from __future__ import annotations

from typing import Any

import pytest

from runner.approvals.policy import DEFAULT_RULE, CallFacts, Decision, Policy, decide, summarise
from runner.config.load import Document, Mark
from runner.config.policy import load_policy
from runner.config.shape import demand
from runner.permission import Mode, Trust

WORKSPACE = "/srv/space"

ALLOW: dict[str, Any] = {"decision": "allow"}
DENY: dict[str, Any] = {"decision": "deny"}


def policy_of(*rules: dict[str, Any]) -> Policy:
    """A policy of these rules; ids are counted where they are not given."""
    value = {"version": 1, "rules": [{"id": f"r{number}", **rule} for number, rule in enumerate(rules)]}
    document = Document("test", value, {(): Mark("test", 0, 0, "/")})
    demand("policy", document)
    return load_policy(document)


def decided(
    policy: Policy,
    facts: CallFacts,
    *,
    mode: Mode = Mode.WORKSPACE_WRITE,
    trust: Trust = Trust.TRUSTED,
) -> Decision:
    """The decision in a fixed workspace."""
    return decide(policy, facts, workspace=WORKSPACE, mode=mode, trust=trust)


def shell(command: str, escalation: Mode | None = None) -> CallFacts:
    """A shell call."""
    return CallFacts("shell", command, escalation=escalation)


def write(path: str, tool: str = "write_file") -> CallFacts:
    """A call that writes a path of the workspace, or an absolute one."""
    return CallFacts(tool, write=(path if path.startswith("/") else f"{WORKSPACE}/{path}",))


def read(path: str, tool: str = "read_file") -> CallFacts:
    """A call that reads a path of the workspace, or an absolute one."""
    return CallFacts(tool, read=(path if path.startswith("/") else f"{WORKSPACE}/{path}".rstrip("/"),))


# --- words ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "matching", "others"),
    [
        (["git", "status"], ["git status"], ["git", "git status -s", "git stat"]),
        (["git", "**"], ["git", "git a", "git a b"], ["gitk", "hg"]),
        (["git", "*"], ["git a", "git $x", "git *"], ["git", "git a b"]),
        (["git", "*", "**"], ["git a", "git a b"], ["git"]),
        (["npm", "run", "test*"], ["npm run test", "npm run test:a/b"], ["npm run atest", "npm run test$x"]),
        (["x", "?.py"], ["x a.py"], ["x ab.py", "x .py", "x '?'.pyc"]),
        (["x", "[a-c]1"], ["x a1", "x c1"], ["x d1", "x '[a-c]1'"]),
        (["x", "[!a]1"], ["x b1"], ["x a1", "x 1"]),
        (["x", ["a", "b*"]], ["x a", "x b", "x bc"], ["x ab", "x c"]),
        ([["x", "y"], "a"], ["x a", "y a"], ["z a", "x"]),
        (["./*", "**"], ["./run", "./run a"], ["./sub/run", "run", "/run"]),
        (["*"], ["ls", "./x", "/bin/ls"], ["ls -l"]),
        (["**"], ["ls", "rm -rf /"], ["eval x"]),
        (["["], [], ["[ a ]"]),
        (["[", "**"], ["[ a ]"], ["test a"]),
        (["x", "a b"], ["x 'a b'", 'x "a b"'], ["x a b"]),
    ],
)
def test_patterns_match_words_after_quote_removal(pattern: list[Any], matching: list[str], others: list[str]) -> None:
    """Literals, globs inside a word, alternatives, one word, any number of words."""
    policy = policy_of({"tool": "shell", "command": [pattern], **ALLOW})

    assert [text for text in [*matching, *others] if decided(policy, shell(text)).allowed] == matching


def test_commands_of_one_text_may_be_allowed_by_different_rules() -> None:
    """Two allowed commands joined by a pipe are allowed; one that no rule allows is not."""
    policy = policy_of(
        {"tool": "shell", "command": [["ls", "**"]], **ALLOW}, {"tool": "shell", "command": [["wc", "-l"]], **ALLOW}
    )

    decision = decided(policy, shell("ls -a | wc -l"))

    assert (decision.allowed, decision.rule) == (True, "r0")
    assert "r1" in decision.reason
    assert not decided(policy, shell("ls -a | wc -l | sh")).allowed


def test_a_refused_option_is_named_with_its_rule() -> None:
    """The reason of the denial tells the model what to leave out."""
    policy = policy_of({"tool": "shell", "command": [{"argv": ["git", "diff", "**"], "refuse_flags": ["-c"]}], **ALLOW})

    decision = decided(policy, shell("git diff -pc"))

    assert decision.rule == DEFAULT_RULE
    assert "r0" in decision.reason
    assert "-pc" in decision.reason


def test_a_variable_that_may_not_be_set_is_named_with_its_rule() -> None:
    """So does one about an assignment."""
    policy = policy_of({"tool": "shell", "command": [["pytest"]], "env": ["A"], **ALLOW})

    assert decided(policy, shell("A=1 pytest")).allowed
    assert "PATH" in decided(policy, shell("PATH=. pytest")).reason


@pytest.mark.parametrize("flag", ["-delete", "-x", "--long"])
def test_refused_options_are_found_in_every_spelling(flag: str) -> None:
    """The option itself, with a value, a prefix of a long one, a letter in a bundle, behind ``--``, quoted."""
    policy = policy_of({"tool": "shell", "command": [{"argv": ["p", "**"], "refuse_flags": [flag]}], **ALLOW})
    spellings = [flag, f"{flag}=v", f"'{flag}'", f"a -- {flag}", f"\\{flag}"]
    spellings += [flag[:-1]] if len(flag) > 3 else ["-ax", "-xa"]
    # Some programs take both dashes alike.
    spellings += [f"-{flag}", flag.removeprefix("-")] if flag == "--long" else []
    spellings += ["--delete", "--del=v"] if flag == "-delete" else []

    assert [word for word in spellings if decided(policy, shell(f"p {word}")).allowed] == []
    assert decided(policy, shell("p a --other -y b")).allowed


def test_a_call_of_a_path_tool_needs_every_path_allowed() -> None:
    """One path that no rule allows, or one that is denied, decides."""
    policy = policy_of(
        {"tool": "write_file", "paths": {"write": ["src/**"]}, **ALLOW},
        {"tool": "write_file", "paths": {"write": ["src/secret"]}, **DENY},
    )
    paths = {name: f"{WORKSPACE}/{name}" for name in ("src/a", "src/b", "src/secret", "other")}

    def allowed(*names: str) -> bool:
        return decided(policy, CallFacts("write_file", write=tuple(paths[name] for name in names))).allowed

    assert allowed("src/a", "src/b")
    assert not allowed("src/a", "other")
    assert not allowed("src/a", "src/secret")


# --- paths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("glob", "matching", "others"),
    [
        ("src/**", ["src/a", "src/a/b", "src/.hidden"], ["src", "srcs/a", "other", "/src/a"]),
        ("**", ["a", ".git/config", "a/b"], ["/etc/passwd", "/srv/spaces/a", "/srv"]),
        ("*.py", ["a.py", ".py"], ["src/a.py", "a.pyc"]),
        ("**/*.py", ["a.py", "x/y/a.py"], ["a.txt"]),
        ("src/**/test_*.py", ["src/test_a.py", "src/x/y/test_a.py"], ["src/a.py", "test_a.py"]),
        ("a?c/[xy]", ["abc/x"], ["abc/z", "a/c/x"]),
        ("{a,b}/*.{md,txt}", ["a/x.md", "b/y.txt"], ["c/x.md", "a/x.py"]),
        ("./src/*", ["src/a"], ["src/a/b"]),
        ("/etc/**", ["/etc/hosts"], ["etc/hosts", "/etcetera"]),
        ("/srv/space/src/*", ["src/a"], ["a"]),
        ("a\nb", ["a\nb"], ["a"]),
    ],
)
def test_path_globs_match_resolved_paths(glob: str, matching: list[str], others: list[str]) -> None:
    """Relative to the workspace or absolute; ``**`` over whole folders; dotfiles are no exception."""
    policy = policy_of({"tool": "write_file", "paths": {"write": [glob]}, **ALLOW})

    assert [path for path in [*matching, *others] if decided(policy, write(path)).allowed] == matching


def test_dots_in_a_path_do_not_lead_around_a_rule() -> None:
    """What is decided on is where the path leads."""
    policy = policy_of({"tool": "write_file", "paths": {"write": ["src/**"]}, **ALLOW})

    assert not decided(policy, write("src/../other")).allowed
    assert not decided(policy, write("src/../../../etc/passwd")).allowed
    assert decided(policy, write("other/../src/a")).allowed


def test_what_a_rule_leaves_out_is_not_allowed_by_it() -> None:
    """``except`` takes away from the rule, and another rule may still allow it."""
    edit = {"tool": "write_file", "paths": {"write": ["src/**"], "except": ["src/gen/**"]}, **ALLOW}

    assert not decided(policy_of(edit), write("src/gen/a")).allowed
    assert not decided(policy_of(edit), write("src/gen")).allowed
    assert decided(policy_of(edit), write("src/a")).allowed
    assert decided(
        policy_of(edit, {"tool": "write_file", "paths": {"write": ["src/gen/a"]}, **ALLOW}), write("src/gen/a")
    ).allowed


def test_a_rule_without_paths_allows_any_path_of_its_tool() -> None:
    """And none of another tool."""
    policy = policy_of({"tool": "write_file", **ALLOW})

    assert decided(policy, write("/etc/passwd")).allowed
    assert not decided(policy, write("a", tool="edit_file")).allowed
    assert not decided(policy, read("a")).allowed


def test_reading_and_writing_are_apart() -> None:
    """A path that may be read may not be written, except what an edit itself reads."""
    policy = policy_of({"tool": ["read_file", "edit_file"], "paths": {"read": ["**"], "write": ["src/**"]}, **ALLOW})
    path = f"{WORKSPACE}/src/a"

    assert decided(policy, read("docs/a")).allowed
    assert not decided(policy, write("docs/a", tool="edit_file")).allowed
    assert decided(policy, CallFacts("edit_file", read=(path,), write=(path,))).allowed
    only_write = policy_of({"tool": "edit_file", "paths": {"write": ["src/**"]}, **ALLOW})
    assert decided(only_write, CallFacts("edit_file", read=(path,), write=(path,))).allowed
    assert not decided(only_write, CallFacts("edit_file", read=(f"{WORKSPACE}/x",), write=(path,))).allowed


def test_a_search_is_about_everything_below_its_folder() -> None:
    """Neither ``except`` nor a deny is got around by searching the folder above."""
    whole = policy_of({"tool": ["glob", "grep"], "paths": {"read": ["**"]}, **ALLOW})
    part = policy_of({"tool": "grep", "paths": {"read": ["src/**"]}, **ALLOW})
    without = policy_of({"tool": "grep", "paths": {"read": ["**"], "except": ["secret/**"]}, **ALLOW})
    denied = policy_of(
        {"tool": "grep", "paths": {"read": ["**"]}, **ALLOW}, {"tool": "grep", "paths": {"read": ["a/**/.env"]}, **DENY}
    )
    shallow = policy_of({"tool": "grep", "paths": {"read": ["*", "*/*"]}, **ALLOW})

    def searched(policy: Policy, path: str) -> bool:
        return decided(policy, read(path, tool="grep")).allowed

    assert searched(whole, ".") or searched(whole, "")
    assert decided(whole, read("", tool="glob")).allowed
    assert [path for path in ("", "src", "src/a", "docs") if searched(part, path)] == ["src", "src/a"]
    assert [path for path in ("", "src", "secret", "secret/a") if searched(without, path)] == ["src"]
    assert [path for path in ("", "b", "a", "a/b") if searched(denied, path)] == ["b"]
    assert [path for path in ("", "src", "src/a") if searched(shallow, path)] == []


def test_a_file_tool_without_a_path_matches_by_name() -> None:
    """Such as a read of a spilled result, which the runner holds itself."""
    named = policy_of({"tool": "read_file", "paths": {"read": ["src/**"]}, **ALLOW})
    every = policy_of({"tool": "*", "paths": {"read": ["src/**"]}, **ALLOW})

    assert decided(named, CallFacts("read_file")).allowed
    assert not decided(every, CallFacts("read_file")).allowed
    assert not decided(named, CallFacts("write_file")).allowed


# --- tools ---------------------------------------------------------------------------------------


def test_tools_match_by_their_exact_name() -> None:
    """A list names several; a star stands for all, unknown ones too."""
    policy = policy_of({"tool": ["todo", "read_file"], **ALLOW})
    every = policy_of({"tool": "*", **ALLOW})

    assert decided(policy, CallFacts("todo")).allowed
    assert not decided(policy, CallFacts("todos")).allowed
    assert not decided(policy, CallFacts("tod")).allowed
    assert decided(every, CallFacts("anything")).allowed
    assert decided(every, write("/x")).allowed


def test_only_command_any_allows_every_text() -> None:
    """A rule for all tools without a command says nothing about shell texts."""
    without = policy_of({"tool": "*", **ALLOW})
    anything = policy_of({"tool": "*", "command": "any", **ALLOW})

    assert not decided(without, shell("ls")).allowed
    assert decided(anything, shell("ls")).allowed
    assert decided(anything, shell('eval "$x" > /etc/passwd')).allowed
    assert decided(anything, CallFacts("todo")).allowed
    assert decided(anything, write("/etc/passwd")).allowed


def test_a_rule_about_commands_says_nothing_about_other_tools() -> None:
    """A star with patterns does not open tools that have no command."""
    policy = policy_of({"tool": "*", "command": [["ls"]], **ALLOW})

    assert decided(policy, shell("ls")).allowed
    assert not decided(policy, CallFacts("todo")).allowed
    assert not decided(policy, write("a")).allowed


# --- strictest wins ------------------------------------------------------------------------------


@pytest.mark.parametrize("deny_first", [True, False])
def test_a_deny_beats_every_allow_whatever_the_order(deny_first: bool) -> None:
    """The order of the rules decides nothing."""
    allow = {"id": "yes", "tool": "shell", "command": [["git", "**"]], **ALLOW}
    deny = {"id": "no", "tool": "shell", "command": [["git", "push", "**"]], "reason": "not here", **DENY}
    policy = policy_of(*([deny, allow] if deny_first else [allow, deny]))

    decision = decided(policy, shell("git push"))

    assert (decision.allowed, decision.rule, decision.reason) == (False, "no", "not here")
    assert decided(policy, shell("git pull")).rule == "yes"


def test_what_no_rule_allows_is_denied_by_default() -> None:
    """No rules, no match, an unknown tool, a text without a command."""
    empty = Policy()
    ls = policy_of({"tool": "shell", "command": [["ls"]], **ALLOW})

    for policy, facts in [
        (empty, shell("ls")),
        (empty, CallFacts("todo")),
        (ls, shell("cat x")),
        (ls, shell("")),
        (ls, shell(" \n\t")),
        (ls, CallFacts("nothing")),
        (ls, read("a")),
    ]:
        decision = decided(policy, facts)
        assert (decision.allowed, decision.rule) == (False, DEFAULT_RULE)
        assert decision.reason


def test_a_deny_of_a_tool_denies_the_redirections_that_do_the_same() -> None:
    """A redirection is decided as the file tool's call."""
    policy = policy_of(
        {"tool": "shell", "command": [["ls"]], **ALLOW},
        {"tool": "write_file", **ALLOW},
        {"id": "no", "tool": "write_file", "paths": {"write": ["x/**"]}, **DENY},
        {"id": "never", "tool": "read_file", **DENY},
    )

    assert decided(policy, shell("ls > y")).allowed
    assert decided(policy, shell("ls > x/y")).rule == "no"
    assert decided(policy, shell("ls < y")).rule == "never"


def test_redirections_are_decided_where_links_lead() -> None:
    """The path that is opened counts, not the one that is written."""
    policy = policy_of(
        {"tool": "shell", "command": [["ls"]], **ALLOW}, {"tool": "write_file", "paths": {"write": ["src/**"]}, **ALLOW}
    )

    def follow(path: str) -> str:
        return path.replace("/link", "/src").replace("/src/out", "/etc")

    def allowed(text: str) -> bool:
        facts = shell(text)
        return decide(
            policy, facts, workspace=WORKSPACE, mode=Mode.READ_ONLY, trust=Trust.TRUSTED, resolve=follow
        ).allowed

    assert allowed("ls > link/a")
    assert not allowed("ls > src/out")
    assert not allowed("ls > other")


# --- mode, trust, escalation ---------------------------------------------------------------------


def test_a_rule_may_tighten_the_mode_of_its_call() -> None:
    """The tightest of all allowing rules counts, and it is named; none loosens the run's own."""
    policy = policy_of(
        {"id": "all", "tool": "shell", "command": [["**"]], **ALLOW},
        {"id": "look", "tool": "shell", "command": [["ls", "**"]], "mode": "read-only", **ALLOW},
        {"id": "work", "tool": "shell", "command": [["make"]], "mode": "workspace-write", **ALLOW},
    )

    def mode_of(text: str, mode: Mode) -> tuple[str, Mode | None]:
        decision = decided(policy, shell(text), mode=mode)
        return decision.rule, decision.mode

    assert mode_of("ls", Mode.WORKSPACE_WRITE) == ("look", Mode.READ_ONLY)
    assert mode_of("make && ls", Mode.DANGER_FULL_ACCESS) == ("look", Mode.READ_ONLY)
    assert mode_of("make", Mode.DANGER_FULL_ACCESS) == ("work", Mode.WORKSPACE_WRITE)
    assert mode_of("make", Mode.WORKSPACE_WRITE) == ("all", None)
    assert mode_of("make", Mode.READ_ONLY) == ("all", None)
    assert mode_of("ls", Mode.READ_ONLY) == ("all", None)


def test_a_rule_may_be_for_runs_of_one_trust_only() -> None:
    """An allow and a deny alike."""
    policy = policy_of(
        {"id": "ours", "tool": "shell", "command": [["make"]], "trust": ["trusted"], **ALLOW},
        {"id": "both", "tool": "shell", "command": [["ls"]], **ALLOW},
        {"id": "strangers", "tool": "shell", "command": [["ls"]], "trust": ["untrusted"], **DENY},
    )

    assert decided(policy, shell("make")).rule == "ours"
    assert decided(policy, shell("make"), trust=Trust.UNTRUSTED).rule == DEFAULT_RULE
    assert decided(policy, shell("ls")).rule == "both"
    assert decided(policy, shell("ls"), trust=Trust.UNTRUSTED).rule == "strangers"


def test_escalation_is_decided_by_rules_that_name_it() -> None:
    """Others look at calls without escalation only; a denied call is told whether asking may help."""
    policy = policy_of(
        {"id": "plain", "tool": "shell", "command": [["make"]], **ALLOW},
        {
            "id": "wide",
            "tool": "shell",
            "command": [["curl", "**"]],
            "escalate": ["danger-full-access"],
            **ALLOW,
        },
    )

    assert decided(policy, shell("make")).rule == "plain"
    assert not decided(policy, shell("make", Mode.DANGER_FULL_ACCESS)).allowed
    refused = decided(policy, shell("curl x"))
    assert (refused.allowed, refused.may_escalate) == (False, True)
    asked = decided(policy, shell("curl x", Mode.DANGER_FULL_ACCESS))
    assert (asked.allowed, asked.rule, asked.mode) == (True, "wide", None)
    assert not decided(policy, shell("rm x")).may_escalate
    assert not decided(policy, shell("curl x"), mode=Mode.DANGER_FULL_ACCESS).may_escalate


def test_asking_for_no_more_than_the_run_has_is_no_escalation() -> None:
    """Such a call is decided like any other."""
    policy = policy_of({"tool": "shell", "command": [["make"]], **ALLOW})

    assert decided(policy, shell("make", Mode.READ_ONLY)).allowed
    assert decided(policy, shell("make", Mode.WORKSPACE_WRITE)).allowed


def test_a_deny_that_names_modes_holds_without_escalation_too() -> None:
    """A deny without ``escalate`` looks at plain calls only."""
    wide = {"tool": "shell", "command": [["git", "**"]], "escalate": ["danger-full-access"], **ALLOW}
    plain = {"tool": "shell", "command": [["git", "**"]], **ALLOW}
    deny = {"id": "no", "tool": "shell", "command": [["git", "push"]], **DENY}
    escalated = shell("git push", Mode.DANGER_FULL_ACCESS)

    assert decided(policy_of(wide, plain, deny), shell("git push")).rule == "no"
    assert decided(policy_of(wide, plain, deny), escalated).allowed
    both = policy_of(wide, plain, deny | {"escalate": ["danger-full-access"]})
    assert decided(both, shell("git push")).rule == "no"
    assert decided(both, escalated).rule == "no"


def test_a_redirection_of_an_escalated_call_needs_a_rule_for_such_calls() -> None:
    """It is decided like the write it is."""
    wide = {"tool": "shell", "command": [["ls"]], "escalate": ["danger-full-access"], **ALLOW}
    plain = {"tool": "write_file", **ALLOW}
    both = {"tool": ["shell", "write_file"], "command": [["ls"]], "paths": {"write": ["**"]}} | {
        "escalate": ["danger-full-access"],
        **ALLOW,
    }
    facts = shell("ls > x", Mode.DANGER_FULL_ACCESS)

    assert not decided(policy_of(wide, plain), facts).allowed
    assert decided(policy_of(both), facts).allowed


# --- what it says --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "opaque"),
    [
        ([["pytest", "**"]], True),
        ([["python3.12", "**"]], True),
        ([["make", "test"]], True),
        ([["npm", "run", "x"]], True),
        ([["./x"]], True),
        ([[["ls", "node"], "**"]], True),
        ([["*", "**"]], True),
        ("any", True),
        ([["ls", "**"], ["git", "status"]], False),
        ([["git", ["log", "diff"], "**"], ["git", "--no-pager", "show", "*"], ["git", "-C", "*", "status"]], False),
        ([["git", "commit", "**"]], True),
        ([["git", "**"]], True),
        ([["git", "*"]], True),
        ([["git", ["log", "bisect"], "**"]], True),
        ([["git", "rebase", "-x", "*"]], True),
        ([["git", "-c", "*", "log"]], True),
        ([["git", "--no-pager", "**"]], True),
        ([["git", "s*"]], True),
        ([["git"]], False),
        ([["stdbuf", "**"]], True),
        ([["flock", "**"]], True),
        ([["find", "**"], ["xargs", "**"], ["sudo", "**"], ["command", "-v", "*"]], False),
        ([[["cargo", "go", "tox", "uv"], "test", "**"]], True),
        ([["/usr/bin/ls"]], True),
        ([[["ruff", "black", "gofmt", "jq"], "**"]], False),
    ],
)
def test_rules_that_run_code_the_policy_does_not_see_are_opaque(command: Any, opaque: bool) -> None:
    """Programs that run code of the workspace, or of their arguments, and any text."""
    assert policy_of({"tool": "shell", "command": command, **ALLOW}).rules[0].opaque is opaque


def test_a_decision_is_opaque_only_for_what_the_call_runs() -> None:
    """A rule may allow opaque programs and others."""
    policy = policy_of({"tool": "shell", "command": [["pytest"], ["ls"]], "builtin": True, **ALLOW})

    assert decided(policy, shell("pytest")).opaque
    assert decided(policy, shell("ls && pytest")).opaque
    assert not decided(policy, shell("ls")).opaque
    assert not decided(policy, shell("echo x")).opaque


def test_the_digest_is_that_of_the_values() -> None:
    """SHA-256 over JSON with sorted keys and no spaces; another rule gives another one."""
    first = policy_of({"tool": "todo", **ALLOW})
    again = policy_of({"decision": "allow", "tool": "todo"})

    assert first.digest == again.digest
    assert len(first.digest) == 64
    assert first.digest != policy_of({"tool": "todo", **DENY}).digest


def test_the_model_is_told_what_is_allowed() -> None:
    """In a few lines, for the tools it is offered and the trust of the run, and never at length."""
    policy = policy_of(
        {"tool": "shell", "command": [["pytest", "**"], [["git", "hg"], "log"]], "builtin": True, **ALLOW},
        {"tool": ["write_file", "edit_file"], "paths": {"write": ["src/**"], "except": ["src/gen/**"]}, **ALLOW},
        {"tool": "shell", "command": [["git", "push", "**"]], **DENY},
        {"tool": "shell", "command": [["curl"]], "escalate": ["danger-full-access"], **ALLOW},
        {"tool": "shell", "command": [["rm", "**"]], "trust": ["untrusted"], **ALLOW},
        {"tool": "todo", **ALLOW},
    )

    text = summarise(policy, trust=Trust.TRUSTED, tools=["shell", "write_file"])

    assert text.splitlines() == [
        "Allowed:",
        "- shell: pytest **, git|hg log, cd, echo, test and the like",
        "- write_file: write src/**, not src/gen/**",
        "Denied:",
        "- shell: git push **",
        "Allowed with sandbox_permissions:",
        "- shell: curl",
        "Anything else is denied.",
    ]
    many = policy_of(*({"tool": "shell", "command": [[f"program-{n}", "**"]], **ALLOW} for n in range(200)))
    assert len(summarise(many, trust=Trust.TRUSTED)) < 2_200
