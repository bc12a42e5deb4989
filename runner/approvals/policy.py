"""The decision on one tool call: pure, total, strictest wins.

A matching deny beats every allow, whatever the order. What no rule allows is denied by ``default``.
Every part of a call has to be allowed: each command of a shell text, each file of its redirections, each
path of a file tool. Writes no events; the reason of a denial reaches the model in the call's result.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING

from runner.approvals.patterns import join_path
from runner.approvals.redirections import OWN_PLACE, follow, is_own
from runner.approvals.words import KNOWN_TOOLS, MATCHED_BUILTINS, SEARCH_TOOLS, basename
from runner.permission import Mode
from runner.record import field, record, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.approvals.patterns import CommandPattern, PathPattern
    from runner.approvals.shell import Analysis, SimpleCommand
    from runner.permission import Trust

DEFAULT_RULE = "default"
"""The rule id of a decision that no rule made."""

_EXTERNAL_BUILTINS = frozenset({"true", "false", "echo", "printf", "test", "["})
"""Names of builtins that are harmless programs as well."""


@record
class CallFacts:
    """What the policy may look at.

    Attributes:
        tool: Exact tool name.
        command: Shell text, None for tools without one.
        read: Absolute paths the call reads, links resolved.
        write: Absolute paths the call creates or changes, links resolved.
        escalation: The mode the call asks for beyond the run's own, None without escalation.
    """

    tool: str
    command: str | None = None
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    escalation: Mode | None = None


@record
class Decision:
    """The outcome for one call.

    Attributes:
        allowed: Whether the call may run.
        rule: Id of the deciding rule, or ``default``.
        reason: Why, for the model and the log.
        mode: The tighter mode an allowing rule asks for, else None.
        may_escalate: Whether a rule would allow the call with escalation.
        opaque: The allowing rule lets a program run code from the workspace.
    """

    allowed: bool
    rule: str
    reason: str
    mode: Mode | None = None
    may_escalate: bool = False
    opaque: bool = False


@record
class PathRule:
    """``paths`` of a rule: globs for what is read, for what is written, and what both leave out."""

    read: tuple[PathPattern, ...] = ()
    write: tuple[PathPattern, ...] = ()
    excluded: tuple[PathPattern, ...] = ()

    def allows(self, kind: str, path: str, workspace: str, *, search: bool) -> bool:
        """Whether a path, and for a search everything below it, is among those meant."""
        patterns = self.read if kind == "read" else self.write
        if search:
            return any(pattern.covers(path, workspace) for pattern in patterns) and not any(
                pattern.may_match_below(path, workspace) for pattern in self.excluded
            )
        folder = kind == "read"
        return any(pattern.matches(path, workspace, folder=folder) for pattern in patterns) and not any(
            pattern.matches(path, workspace) for pattern in self.excluded
        )

    def denies(self, kind: str, path: str, workspace: str, *, search: bool) -> bool:
        """Whether a path, or for a search something below it, is among those meant."""
        patterns = self.read if kind == "read" else self.write
        if search:
            return any(pattern.may_match_below(path, workspace) for pattern in patterns) and not any(
                pattern.covers(path, workspace) for pattern in self.excluded
            )
        return any(pattern.matches(path, workspace) for pattern in patterns) and not any(
            pattern.matches(path, workspace, folder=False) for pattern in self.excluded
        )


@record
class Rule:
    """One rule.

    Attributes:
        id: Its name in decisions.
        allow: Whether it allows or denies.
        tools: Exact tool names, None for every tool.
        reason: Why, for the model and the log.
        any_command: ``command: any``: every text, those not analysed too.
        commands: Patterns, one of which a simple command must match.
        builtin: Whether harmless builtins match, too.
        env: Variables that may be assigned for a command.
        paths: Globs, None for every path.
        mode: The tighter mode that the call runs in.
        trust: Trust of the run, None for both.
        escalate: Modes that an escalated call may ask for.
        accept_bypass: The author knows that ``command: any`` beside this deny lets other texts through.
    """

    id: str
    allow: bool
    tools: frozenset[str] | None = None
    reason: str = ""
    any_command: bool = False
    commands: tuple[CommandPattern, ...] = ()
    builtin: bool = False
    env: frozenset[str] = frozenset()
    paths: PathRule | None = None
    mode: Mode | None = None
    trust: frozenset[Trust] | None = None
    escalate: tuple[Mode, ...] = ()
    accept_bypass: bool = False
    _named: Mapping[str, tuple[CommandPattern, ...]] = field(init=False, repr=False, compare=False)
    _others: tuple[CommandPattern, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        named: dict[str, tuple[CommandPattern, ...]] = {}
        for pattern in self.commands:
            for name in pattern.programs or ():
                named[name] = (*named.get(name, ()), pattern)
        object.__setattr__(self, "_named", named)
        object.__setattr__(self, "_others", tuple(each for each in self.commands if each.programs is None))

    def patterns_for(self, name: str) -> tuple[CommandPattern, ...]:
        """The patterns that may match a program of this name."""
        return self._named.get(name, ()) + self._others

    @property
    def by_tool(self) -> bool:
        """Whether a call without a command matches by the name of its tool alone."""
        return self.paths is None and not self.commands and (self.any_command or not self.builtin)

    @property
    def names_tool(self) -> bool:
        """Whether a call with neither command nor paths matches: by the name of its tool alone."""
        return self.by_tool or (self.paths is not None and self.tools is not None)

    @property
    def opaque(self) -> bool:
        """Whether it allows a program to run code that the policy does not see."""
        return self.allow and (self.any_command or any(pattern.opaque for pattern in self.commands))

    def applies(self, tool: str, trust: Trust, escalation: Mode | None) -> bool:
        """Whether it looks at calls of ``tool`` at all.

        An allow with ``escalate`` is about escalated calls only, a deny about the others as well.
        """
        if self.tools is not None and tool not in self.tools:
            return False
        if self.trust is not None and trust not in self.trust:
            return False
        if escalation is None:
            return not (self.allow and self.escalate)
        return escalation in self.escalate

    def applies_to(self, tools: Sequence[str], trust: Trust) -> bool:
        """Whether it looks at calls of any of ``tools``, escalated or not."""
        if self.trust is not None and trust not in self.trust:
            return False
        return self.tools is None or any(tool in self.tools for tool in tools)

    def allows_command(self, command: SimpleCommand, assigned: Sequence[str]) -> bool | None:
        """Whether it allows one command of a text that assigns ``assigned``.

        Returns:
            None if not, else whether what it allows is opaque.
        """
        if (command.env or assigned) and not self.env.issuperset((*command.env, *assigned)):
            return None
        for pattern in self.patterns_for(command.name):
            if pattern.allows(command):
                return pattern.opaque
        return False if self._is_builtin(command) else None

    def denies_text(self, analysis: Analysis) -> bool:
        """Whether it denies a shell text."""
        if self.any_command:
            return True
        if not self.commands and not self.builtin:
            return self.paths is None
        return any(self._denies(command) for command in (*analysis.commands, *analysis.shadows))

    def _denies(self, command: SimpleCommand) -> bool:
        name = command.name
        if self.builtin and name in MATCHED_BUILTINS:
            return True
        patterns = self.patterns_for(name)
        if "/" in name:
            patterns += self._named.get(basename(name), ())
        return any(pattern.denies(command) for pattern in patterns)

    def _is_builtin(self, command: SimpleCommand) -> bool:
        names = _EXTERNAL_BUILTINS if command.external else MATCHED_BUILTINS
        return self.builtin and command.name in names


@record
class Policy:
    """The rules of a run.

    Attributes:
        rules: In the order of the file, which decides nothing but which of two denies is named.
        value: The policy as JSON, defaults left out.
        source: The file, for messages.
    """

    rules: tuple[Rule, ...] = ()
    value: Mapping[str, object] = field(default_factory=lambda: {"version": 1, "default": "deny", "rules": []})
    source: str = ""

    @property
    def digest(self) -> str:
        """SHA-256 over the UTF-8 JSON of ``value`` with sorted keys and no spaces, as hex."""
        text = json.dumps(self.value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


@record
class Judgement:
    """A decision and what it was made on.

    Attributes:
        decision: The decision.
        read: Resolved paths that the call reads, those of redirections too.
        write: Resolved paths that it creates or changes.
    """

    decision: Decision
    read: tuple[str, ...]
    write: tuple[str, ...]


def decide(
    policy: Policy,
    facts: CallFacts,
    *,
    workspace: str,
    mode: Mode,
    trust: Trust,
    resolve: Callable[[str], str] | None = None,
) -> Decision:
    """Decide one call. Total: every call gets a decision, in bounded time.

    Args:
        policy: The rules.
        facts: The call.
        workspace: Absolute path, links resolved.
        mode: The run's mode.
        trust: The run's trust.
        resolve: Resolves the absolute path of a redirection, like ``redirections.follow``; by name only if not given.
            OSError and ValueError make the text unanalysed.
    """
    return judge(policy, facts, workspace=workspace, mode=mode, trust=trust, resolve=resolve).decision


def judge(
    policy: Policy,
    facts: CallFacts,
    *,
    workspace: str,
    mode: Mode,
    trust: Trust,
    resolve: Callable[[str], str] | None = None,
) -> Judgement:
    """Like ``decide``, with the paths that were looked at."""
    case = _Case(policy, facts, workspace=workspace, mode=mode, trust=trust, resolve=resolve)
    asked = facts.escalation if facts.escalation is not None and facts.escalation.rank > mode.rank else None
    decision = case.decide(asked)
    if asked is None:
        wider = [each for each in Mode if each.rank > mode.rank]
        considered = {each for rule in policy.rules if rule.allow for each in rule.escalate}
        if any(each in considered and case.decide(each).allowed for each in wider):
            decision = replace(decision, may_escalate=True)
    return Judgement(decision, case.reads, case.writes)


class _Case:
    """One call, analysed once, decided for one or more modes."""

    def __init__(
        self,
        policy: Policy,
        facts: CallFacts,
        *,
        workspace: str,
        mode: Mode,
        trust: Trust,
        resolve: Callable[[str], str] | None,
    ) -> None:
        self.policy = policy
        self.facts = facts
        self.workspace = join_path(workspace, "")
        self.mode = mode
        self.trust = trust
        self.analysis: Analysis | None = None
        self._applying: dict[tuple[str, Mode | None, bool], list[Rule]] = {}
        reads, writes = [*facts.read], [*facts.write]
        if facts.command is not None:
            from runner.approvals.shell import analyse

            self.analysis = analyse(facts.command)
            reads += [self._lead(path, resolve or follow) for path in self.analysis.reads]
            writes += [self._lead(path, resolve or follow) for path in self.analysis.writes]
        self.reads = tuple(dict.fromkeys(join_path(self.workspace, path) for path in reads))
        self.writes = tuple(dict.fromkeys(join_path(self.workspace, path) for path in writes))

    def _lead(self, path: str, resolve: Callable[[str], str]) -> str:
        """Where the path of a redirection leads; when nobody can tell, the text is not analysed."""
        absolute = join_unresolved(self.workspace, path)
        named = follow(absolute)
        try:
            found = resolve(absolute)
        except (OSError, ValueError):
            self._doubt("it cannot be told where a redirection leads")
            return named
        # A recorded path is where it led then; the name tells whether it could have led elsewhere.
        if is_own(found) or is_own(named):
            self._doubt(OWN_PLACE)
        return found

    def _doubt(self, reason: str) -> None:
        assert self.analysis is not None
        if self.analysis.analysed:
            self.analysis = replace(self.analysis, analysed=False, reason=reason)

    def decide(self, escalation: Mode | None) -> Decision:
        """Decide the call when it asks for ``escalation``."""
        denied = self._denied(escalation)
        if denied is not None:
            return Decision(False, denied.id, denied.reason or f"rule {denied.id} denies this")
        grant = _Grant()
        problem = self._text(escalation, grant) if self.analysis is not None else self._call(escalation, grant)
        if problem:
            return Decision(False, DEFAULT_RULE, problem)
        return grant.decision(escalation or self.mode)

    def _rules(self, tool: str, escalation: Mode | None, *, allow: bool) -> list[Rule]:
        key = (tool, escalation, allow)
        found = self._applying.get(key)
        if found is None:
            found = self._applying[key] = [
                rule for rule in self.policy.rules if rule.allow == allow and rule.applies(tool, self.trust, escalation)
            ]
        return found

    # --- denies ---------------------------------------------------------------------------------

    def _denied(self, escalation: Mode | None) -> Rule | None:
        tool = self.facts.tool
        for rule in self._rules(tool, escalation, allow=False):
            matches = rule.by_tool if self.analysis is None else rule.denies_text(self.analysis)
            if matches:
                return rule
        for kind, path in self._paths():
            for rule in self._rules(self._path_tool(kind), escalation, allow=False):
                search = tool in SEARCH_TOOLS
                if rule.by_tool or (rule.paths and rule.paths.denies(kind, path, self.workspace, search=search)):
                    return rule
        return None

    def _paths(self) -> list[tuple[str, str]]:
        return [("write", path) for path in self.writes] + [("read", path) for path in self.reads]

    def _path_tool(self, kind: str) -> str:
        """The tool as which a path is decided: a redirection as the file tool that does the same."""
        if self.analysis is None:
            return self.facts.tool
        return "read_file" if kind == "read" else "write_file"

    # --- allows ---------------------------------------------------------------------------------

    def _call(self, escalation: Mode | None, grant: _Grant) -> str:
        """Decide a call without a command; returns what no rule allows."""
        tool = self.facts.tool
        rules = self._rules(tool, escalation, allow=True)
        if not self.reads and not self.writes:
            matching = [rule for rule in rules if rule.names_tool]
            if not matching:
                return self._unmatched(f"the tool {tool}", escalation)
            grant.add(matching, opaque=False)
            return ""
        return self._allow_paths(escalation, grant)

    def _allow_paths(self, escalation: Mode | None, grant: _Grant) -> str:
        search = self.facts.tool in SEARCH_TOOLS
        allowed: set[str] = set()
        for kind, path in self._paths():
            if kind == "read" and path in allowed:
                # An edit reads what it may write.
                continue
            tool = self._path_tool(kind)
            matching = [
                rule
                for rule in self._rules(tool, escalation, allow=True)
                if rule.by_tool or (rule.paths and rule.paths.allows(kind, path, self.workspace, search=search))
            ]
            if not matching:
                what = "everything below " if search else ""
                return self._unmatched(f"{tool} on {what}{path}", escalation)
            allowed.add(path)
            grant.add(matching, opaque=False)
        return ""

    def _text(self, escalation: Mode | None, grant: _Grant) -> str:
        """Decide a shell text; returns what no rule allows."""
        analysis = self.analysis
        assert analysis is not None
        rules = self._rules(self.facts.tool, escalation, allow=True)
        anything = [rule for rule in rules if rule.any_command]
        if anything:
            grant.add(anything, opaque=True)
        if not analysis.analysed:
            if anything:
                return ""
            return f"the command cannot be analysed: {analysis.reason}; write it in a simpler form"
        if not analysis.commands and not (anything and (self.facts.command or "").strip()):
            return "the text runs no command"
        for command in analysis.commands:
            opaque = [(rule, rule.allows_command(command, analysis.assigned)) for rule in rules]
            matching = [rule for rule, each in opaque if each is not None]
            if matching:
                grant.add(matching, opaque=any(each for _, each in opaque))
            elif not anything:
                return self._unmatched(f"`{command}`", escalation) + _near_miss(rules, command, analysis.assigned)
        return "" if anything else self._allow_paths(escalation, grant)

    def _unmatched(self, what: str, escalation: Mode | None) -> str:
        asking = f" with {escalation}" if escalation is not None else ""
        return f"no rule allows {what}{asking}"


class _Grant:
    """The rules that allow the parts of a call."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        self.opaque = False

    def add(self, rules: Sequence[Rule], *, opaque: bool) -> None:
        """Note the rules that allow one part."""
        self.rules += rules
        self.opaque |= opaque

    def decision(self, mode: Mode) -> Decision:
        """The decision, when every part is allowed. The rule with the tightest mode is named, else the first."""
        rule = self.rules[0]
        tighter: Mode | None = None
        for each in self.rules:
            if each.mode is not None and each.mode.rank < (tighter or mode).rank:
                rule, tighter = each, each.mode
        others = [each for each in dict.fromkeys(each.id for each in self.rules) if each != rule.id]
        reason = rule.reason or f"rule {rule.id} allows this"
        if others:
            reason += f" (with {', '.join(others)})"
        return Decision(True, rule.id, reason, mode=tighter, opaque=self.opaque)


def _near_miss(rules: Sequence[Rule], command: SimpleCommand, assigned: Sequence[str]) -> str:
    """Why the rules that look right do not allow a command."""
    for rule in rules:
        for pattern in rule.patterns_for(command.name):
            if pattern.fits(command):
                refused = pattern.refused(command)
                if refused is not None:
                    return f": rule {rule.id} refuses {refused!r}"
                missing = [name for name in (*command.env, *assigned) if name not in rule.env]
                if missing:
                    return f": rule {rule.id} does not let {missing[0]} be set"
    return ""


def join_unresolved(workspace: str, path: str) -> str:
    """An absolute path, ``..`` left in place: what a link leads to decides what that means."""
    return path if path.startswith("/") else f"{workspace.rstrip('/')}/{path}"


# --- what the model is told ----------------------------------------------------------------------

_SUMMARY_CHARACTERS = 2_000


def summarise(policy: Policy, *, trust: Trust, tools: Sequence[str] = KNOWN_TOOLS) -> str:
    """What the rules allow, in a few lines for the model.

    Args:
        policy: The rules.
        trust: The run's trust.
        tools: The tools the model is offered.
    """
    lines: list[str] = []
    rules = [rule for rule in policy.rules if rule.applies_to(tools, trust)]
    for heading, chosen in (
        ("Allowed", [rule for rule in rules if rule.allow and not rule.escalate]),
        ("Denied", [rule for rule in rules if not rule.allow]),
        ("Allowed with sandbox_permissions", [rule for rule in rules if rule.allow and rule.escalate]),
    ):
        entries = [entry for rule in chosen for entry in _entries(rule, tools)]
        if entries:
            lines += [f"{heading}:", *dict.fromkeys(f"- {entry}" for entry in entries)]
    text = "\n".join([*lines, "Anything else is denied."])
    if len(text) > _SUMMARY_CHARACTERS:
        text = text[:_SUMMARY_CHARACTERS].rsplit("\n", 1)[0] + "\n- and more. What is not allowed is denied."
    return text


def _entries(rule: Rule, tools: Sequence[str]) -> list[str]:
    named = [tool for tool in tools if rule.tools is None or tool in rule.tools]
    entries = []
    if "shell" in named and (rule.any_command or rule.commands or rule.builtin):
        shown = ["any text"] if rule.any_command else [pattern.text for pattern in rule.commands]
        entries.append(f"shell: {', '.join([*shown, *(['cd, echo, test and the like'] if rule.builtin else [])])}")
    others = [tool for tool in named if tool != "shell" or (rule.by_tool and not rule.any_command)]
    if others and rule.paths is not None:
        globs = [
            f"{kind} {', '.join(pattern.glob for pattern in patterns)}"
            for kind, patterns in (("read", rule.paths.read), ("write", rule.paths.write))
            if patterns
        ]
        left_out = ", ".join(pattern.glob for pattern in rule.paths.excluded)
        entries.append(f"{', '.join(others)}: {'; '.join(globs)}{f', not {left_out}' if left_out else ''}")
    elif others and rule.by_tool:
        entries.append(", ".join(others))
    return entries
