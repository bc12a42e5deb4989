"""From a checked policy file to the rules that decide, with every mistake that can be known beforehand.

A rule that can never match, a key without effect, a deny that other spellings get around: each is an
error, as is a self-test that fails. ``PolicyModel`` is loaded on first use, since a policy without
mistakes needs no pydantic.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final, cast

from runner.approvals.commands import TRANSPARENT
from runner.approvals.patterns import CommandPattern, PathPattern, Word, expand_braces
from runner.approvals.policy import DEFAULT_RULE, CallFacts, PathRule, Policy, Rule, decide
from runner.approvals.words import (
    COMMAND_TOOLS,
    KNOWN_TOOLS,
    PLAIN_TOOLS,
    READ_TOOLS,
    RESERVED,
    SEARCH_TOOLS,
    SHELLS,
    STEERING_VARIABLES,
    UNANALYSED_BUILTINS,
    WRITE_TOOLS,
)
from runner.config.load import config_error, load_yaml, shorten, unknown_name
from runner.config.shape import demand
from runner.config.trust import shipped_policy_hint
from runner.errors import ConfigError
from runner.permission import Mode, Trust

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence
    from pathlib import Path

    from runner.config.load import Document, Location, Problem
    from runner.config.policy_model import PolicyModel
    from runner.messages import JsonObject

__all__ = ["PolicyModel", "build_policy", "example_count", "load_policy", "read_policy"]

_WORKSPACE: Final = "/workspace"
"""Where the self-tests take place; nothing is looked up there."""


def __getattr__(name: str) -> object:
    """Load the pydantic model when it is asked for."""
    if name != "PolicyModel":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from runner.config.policy_model import PolicyModel

    return PolicyModel


def read_policy(path: Path, *, known_tools: Sequence[str] = KNOWN_TOOLS) -> Policy:
    """Load a policy file.

    Args:
        path: The file.
        known_tools: Names that ``tool`` may have.

    Raises:
        ConfigError: With every problem of the file at once.
    """
    try:
        document = load_yaml(path)
    except ConfigError as error:
        if not path.exists():
            error.hint = shipped_policy_hint(path.name) or error.hint
        raise
    demand("policy", document)
    return load_policy(document, known_tools=known_tools)


def load_policy(document: Document, *, known_tools: Sequence[str] = KNOWN_TOOLS) -> Policy:
    """Build the rules of a document that fits the format, and run their self-tests.

    Raises:
        ConfigError: With every problem at once, those of the self-tests last.
    """
    policy, problems = build_policy(document, known_tools=known_tools)
    if not problems:
        problems = _failed_examples(policy, document)
    if problems:
        raise config_error(document.source, problems)
    return policy


def build_policy(document: Document, *, known_tools: Sequence[str] = KNOWN_TOOLS) -> tuple[Policy, list[Problem]]:
    """Build the rules without running their self-tests.

    Args:
        document: A file, or a part of one, that fits the format.
        known_tools: Names that ``tool`` may have.

    Returns:
        The rules, and what is wrong with them.
    """
    problems: list[Problem] = []
    rules: list[Rule] = []
    for at, value in enumerate(document.value["rules"]):
        builder = _Builder(document, ("rules", at), value, known_tools)
        rules.append(builder.build())
        problems += builder.problems
    policy = Policy(tuple(rules), document.value, document.source)
    return policy, problems + _between_rules(policy, document)


def example_count(value: JsonObject) -> tuple[int, int]:
    """How many self-tests a rule of a policy's ``value`` has: matching ones, others."""
    examples = value.get("examples") or {}
    return len(examples.get("match") or ()), len(examples.get("no_match") or ())


class _Builder:
    """Builds one rule and notes what is wrong with it."""

    def __init__(self, document: Document, location: Location, value: JsonObject, known_tools: Sequence[str]) -> None:
        self.document = document
        self.location = location
        # An empty value is one that is not given.
        self.value = {key: each for key, each in value.items() if each is not None}
        self.known_tools = known_tools
        self.problems: list[Problem] = []
        self.allow = self.value["decision"] == "allow"

    def problem(self, text: str, *below: str | int) -> None:
        """Note what is wrong, and what to do."""
        location = (*self.location, *below)
        # Words of a list written in place have marks of their own; others are reported where they stand.
        while len(location) > len(self.location) and location not in self.document.marks:
            location = location[:-1]
        self.problems.append(self.document.problem(location, text))

    def without_effect(self, key: str, why: str) -> None:
        """Note a key that changes nothing."""
        if key in self.value and self.value[key] is not False:
            self.problem(f"has no effect: {why}; remove it", key)

    def build(self) -> Rule:
        """Build the rule."""
        tools = self.tools()
        value = self.value
        any_command = value.get("command") == "any"
        commands = () if any_command else tuple(self.commands())
        self.effects(tools, any_command=any_command)
        return Rule(
            id=value["id"],
            allow=self.allow,
            tools=tools,
            reason=value.get("reason", ""),
            any_command=any_command,
            commands=commands,
            builtin=value.get("builtin", False),
            env=frozenset(value.get("env", ())),
            paths=self.paths(tools),
            mode=Mode(value["mode"]) if "mode" in value else None,
            trust=frozenset(map(Trust, value["trust"])) if "trust" in value else None,
            escalate=tuple(map(Mode, value.get("escalate", ()))),
            accept_bypass=value.get("accept_bypass", False),
        )

    def tools(self) -> frozenset[str] | None:
        """The tools, None for every one."""
        given = self.value["tool"]
        names = [given] if isinstance(given, str) else given
        if names == ["*"]:
            return None
        for at, name in enumerate(names):
            if name == "*":
                self.problem("'*' stands for every tool: write it alone", "tool", at)
            elif name not in self.known_tools:
                self.problem(f"{name!r}: {unknown_name(name, self.known_tools, what='tool')}", "tool", at)
            elif name in names[:at]:
                self.problem(f"{name!r} is given twice: remove one", "tool", at)
        return frozenset(names)

    def effects(self, tools: frozenset[str] | None, *, any_command: bool) -> None:
        """Look for keys that change nothing."""
        if self.value["id"] == DEFAULT_RULE:
            self.problem(f"{DEFAULT_RULE!r} names the decision that no rule made: choose another name", "id")
        with_command = tools is None or not tools.isdisjoint(COMMAND_TOOLS)
        by_words = "command" in self.value or self.value.get("builtin", False)
        if not with_command:
            for key in ("command", "builtin", "escalate"):
                self.without_effect(key, "none of the tools is shell")
        elif self.allow and tools is not None and not by_words:
            self.problem("a rule that allows shell says which commands: add command, or write `command: any`", "tool")
        for at, name in enumerate(self.value.get("env", ())):
            if name in STEERING_VARIABLES:
                self.problem(f"{name!r}: texts that set it are not analysed; remove it", "env", at)
        if any_command:
            self.without_effect("builtin", "`command: any` covers it")
            self.without_effect("env", "`command: any` covers it")
        elif not by_words:
            self.without_effect("env", "there is no command")
        if not self.allow:
            self.without_effect("env", "a deny matches with and without assignments")
            self.without_effect("mode", "a denied call runs in no mode")
            if any_command or not by_words:
                self.without_effect("accept_bypass", "no spelling gets around this rule")
        else:
            self.without_effect("accept_bypass", "it belongs to a deny")

    # --- commands -------------------------------------------------------------------------------

    def commands(self) -> Iterator[CommandPattern]:
        """The patterns of ``command``."""
        seen: list[Any] = []
        for at, given in enumerate(self.value.get("command", ())):
            if given in seen:
                self.problem("is given twice: remove one", "command", at)
            seen.append(given)
            pattern = given if isinstance(given, dict) else {"argv": given}
            yield self.command(pattern, ("command", at))

    def command(self, given: JsonObject, below: Location) -> CommandPattern:
        """One pattern."""
        argv = [[word] if isinstance(word, str) else word for word in given["argv"]]
        rest = argv[-1] == ["**"]
        words = argv[:-1] if rest else argv
        flags = tuple(given.get("refuse_flags", ()))
        anywhere = given.get("anywhere", False)
        if any("**" in alternatives for alternatives in words):
            self.problem("'**' stands for all further words: it comes last and alone", *below)
        if anywhere and self.allow:
            self.problem("anywhere has no effect: it belongs to a deny; remove it", *below)
        elif anywhere and len(words) < 2:
            self.problem("anywhere has no effect: no subcommand follows the program; remove it", *below)
        if flags and not self.allow:
            self.problem("refuse_flags would narrow a deny: remove it", *below)
        for flag in flags:
            if not re.fullmatch(r"-[^-=\s][^=\s]*|--[^=\s]+", flag):
                self.problem(f"refuse_flags: {flag!r} is no option: write -x or --long", *below)
        pattern = CommandPattern(
            tuple(Word.of(alternatives, program=at == 0) for at, alternatives in enumerate(words)),
            rest,
            " ".join("|".join(alternatives) for alternatives in argv),
            tuple(flag for flag in flags if len(flag) > 1),
            anywhere,
        )
        if self.allow and words:
            self.reachable(pattern, words, below)
        return pattern

    def reachable(self, pattern: CommandPattern, words: list[list[str]], below: Location) -> None:
        """Look for an allow that no command can match."""
        more = len(words) > 1 or pattern.rest
        for name in words[0]:
            never = ""
            if name in RESERVED and name != "[[":
                never = f"{name!r} is a reserved word of the shell"
            elif name in UNANALYSED_BUILTINS and not (name == "command" and more):
                never = f"texts with {name!r} are not analysed; only `command: any` allows them"
            elif "=" in name or not name.strip():
                never = f"{name!r} is no name of a program; variables stand in env"
            elif name in TRANSPARENT and more:
                never = f"{name!r} is looked through; allow what it runs"
            elif name in SHELLS and len(words) > 1 and words[1] == ["-c"]:
                never = "the text of -c is looked through; allow what it runs" if name == "bash" else "not analysed"
            if never:
                self.problem(f"can never match: {never}", *below)
        for word in pattern.words[1:]:
            refused = [flag for flag in pattern.refuse_flags if word.literals == {flag} and not word.globs]
            if refused and not word.any:
                self.problem(f"can never match: it demands {refused[0]!r} and refuses it", *below)

    # --- paths ----------------------------------------------------------------------------------

    def paths(self, tools: frozenset[str] | None) -> PathRule | None:
        """The globs of ``paths``."""
        if "paths" not in self.value:
            return None
        given = {key: each for key, each in self.value["paths"].items() if each is not None}
        if "read" not in given and "write" not in given:
            self.problem("says neither what may be read nor what may be written: add read or write", "paths")
        for kind, able in (("read", READ_TOOLS), ("write", WRITE_TOOLS)):
            others = {*COMMAND_TOOLS, *READ_TOOLS, *WRITE_TOOLS, *PLAIN_TOOLS} - {*able}
            if kind in given and tools is not None and tools <= others:
                verb = "reads" if kind == "read" else "writes"
                self.problem(f"has no effect: none of the tools {verb} a path; remove it", "paths", kind)
        return PathRule(*(tuple(self.globs(given.get(key, ()), ("paths", key))) for key in ("read", "write", "except")))

    def globs(self, given: Sequence[str], below: Location) -> Iterator[PathPattern]:
        """The globs of one list."""
        for at, glob in enumerate(given):
            segments = glob.split("/")
            never = ""
            if glob.startswith("~"):
                never = "`~` is not replaced: write an absolute path"
            elif ".." in segments:
                never = "resolved paths have no '..'"
            elif glob.endswith("/"):
                never = f"resolved paths do not end in a slash: write {glob}**"
            elif any("**" in segment and segment != "**" for segment in segments):
                never = "'**' stands alone between slashes"
            elif "\\" in glob:
                never = "a backslash has no meaning in a glob"
            elif not glob.strip("/."):
                never = "write '**' for the whole workspace"
            if never:
                self.problem(f"{glob!r} can never match: {never}", *below, at)
            else:
                for each in expand_braces(glob):
                    yield PathPattern.of(each)


def _between_rules(policy: Policy, document: Document) -> list[Problem]:
    """What is wrong with rules beside each other."""
    problems = []
    seen: dict[str, int] = {}
    anything = [rule for rule in policy.rules if rule.allow and rule.any_command]
    for at, rule in enumerate(policy.rules):
        if rule.id in seen:
            problems.append(
                document.problem(
                    ("rules", at, "id"), f"{rule.id!r} is the id of rule {seen[rule.id] + 1}, too: change it"
                )
            )
        seen.setdefault(rule.id, at)
        if rule.allow or not (rule.commands or rule.builtin):
            continue
        bypass = next((other for other in anything if overlap(other, rule)), None)
        if bypass is not None and not rule.accept_bypass:
            text = (
                f"rule {bypass.id!r} allows every text, so that other spellings of these commands get through: "
                "list commands there, or write `accept_bypass: true` here"
            )
            problems.append(document.problem(("rules", at), text))
        elif bypass is None and rule.accept_bypass:
            text = "has no effect: no rule with `command: any` stands beside this one; remove it"
            problems.append(document.problem(("rules", at, "accept_bypass"), text))
    return problems


def overlap(allow: Rule, deny: Rule) -> bool:
    """Whether an allow and a deny can look at the same shell call."""
    if any(rule.tools is not None and rule.tools.isdisjoint(COMMAND_TOOLS) for rule in (allow, deny)):
        return False
    if allow.trust is not None and deny.trust is not None and allow.trust.isdisjoint(deny.trust):
        return False
    return not allow.escalate or not set(allow.escalate).isdisjoint(deny.escalate)


# --- self-tests ----------------------------------------------------------------------------------


def _failed_examples(policy: Policy, document: Document) -> list[Problem]:
    """Put every example to its rule alone."""
    problems = []
    for at, rule in enumerate(policy.rules):
        examples = document.value["rules"][at].get("examples") or {}
        for key, wanted in (("match", True), ("no_match", False)):
            for number, example in enumerate(examples.get(key) or ()):
                location = ("rules", at, "examples", key, number)
                shown = shorten(example if isinstance(example, str) else str(example))
                candidates = list(_facts(rule, example))
                if not candidates:
                    text = f"rule {rule.id!r} is not about {shown!r} at all: remove the example, or say what it is"
                    problems.append(document.problem(location, text))
                    continue
                matched, why = _try(rule, candidates)
                if matched != wanted:
                    words = ("to match, it does not", "not to match, it does")[not wanted]
                    text = f"rule {rule.id!r}: {shown!r} is expected {words}{f': {why}' if why else ''}"
                    problems.append(document.problem(location, text))
    return problems


def _try(rule: Rule, candidates: Sequence[CallFacts]) -> tuple[bool, str]:
    """Whether the rule, alone, decides one of these calls; and why not."""
    why = ""
    trust = Trust.TRUSTED if rule.trust is None else min(rule.trust)
    for facts in candidates:
        decision = decide(Policy((rule,)), facts, workspace=_WORKSPACE, mode=Mode.READ_ONLY, trust=trust)
        if decision.rule == rule.id:
            return True, ""
        why = decision.reason if rule.allow else ""
    return False, why


def _facts(rule: Rule, example: str | JsonObject) -> Iterator[CallFacts]:
    """The calls an example stands for."""
    given: JsonObject = example if isinstance(example, dict) else {_kind(rule): example}
    escalation = rule.escalate[0] if rule.escalate and rule.allow else None
    about_shell = rule.tools is None or not rule.tools.isdisjoint(COMMAND_TOOLS)
    if "command" in given:
        if about_shell:
            yield CallFacts(COMMAND_TOOLS[0], given["command"], escalation=escalation)
        return
    tool = given.get("tool")
    if "path" not in given:
        yield CallFacts(cast("str", tool), escalation=escalation)
        return
    path = given["path"]
    absolute = path if path.startswith("/") else f"{_WORKSPACE}/{path}"
    for kind, able in (("read", READ_TOOLS), ("write", WRITE_TOOLS)):
        named = [tool] if tool is not None else [*able] if rule.tools is None else sorted(rule.tools)
        # A path is a file unless only searches are meant; those look at everything below it.
        chosen = [name for name in named if name in able and name not in SEARCH_TOOLS] or [
            name for name in named if name in able or name not in KNOWN_TOOLS
        ]
        for name in chosen[:1]:
            paths = {kind: (absolute,)}
            yield CallFacts(name, read=paths.get("read", ()), write=paths.get("write", ()), escalation=escalation)


def _kind(rule: Rule) -> str:
    """What a bare example is for this rule."""
    if rule.commands or rule.builtin or rule.any_command:
        return "command"
    return "path" if rule.paths is not None or _reads_or_writes(rule.tools) else "tool"


def _reads_or_writes(tools: Collection[str] | None) -> bool:
    return tools is not None and any(tool in READ_TOOLS or tool in WRITE_TOOLS for tool in tools)
