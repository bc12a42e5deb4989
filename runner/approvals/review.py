"""What a policy allows before anything runs: a table, and what its author should know.

Pure; writes no events and has no effect on the prefix cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.approvals.words import (
    COMMAND_TOOLS,
    KNOWN_TOOLS,
    READ_TOOLS,
    SEARCH_TOOLS,
    SHELLS,
    WRITE_TOOLS,
)
from runner.permission import Mode, Trust
from runner.record import record

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runner.approvals.patterns import CommandPattern, PathPattern, Word
    from runner.approvals.policy import Policy, Rule


_RUN_ARGUMENTS = SHELLS | {"node", "perl", "php", "python", "python3", "ruby"}
"""Programs that run whatever code their arguments hold."""


@record
class Cell:
    """What becomes of the calls of one tool in runs of one mode and trust.

    Attributes:
        tool: The tool.
        mode: The run's mode.
        trust: The run's trust.
        outcome: ``allow`` and ``deny`` for all calls, ``some`` where it depends on the call.
        allows: Ids of the rules that allow some of them, with the mode the call runs in.
        denies: Ids of the rules that deny some of them.
        escalated: Ids of the rules that allow calls asking for a wider mode.
    """

    tool: str
    mode: Mode
    trust: Trust
    outcome: str
    allows: tuple[tuple[str, Mode], ...]
    denies: tuple[str, ...]
    escalated: tuple[str, ...]


def table(policy: Policy, *, tools: Sequence[str] = KNOWN_TOOLS) -> list[Cell]:
    """One cell for each tool, mode and trust, in that order."""
    return [tool_cell(policy, tool, mode, trust) for tool in tools for mode in Mode for trust in Trust]


def tool_cell(policy: Policy, tool: str, mode: Mode, trust: Trust) -> Cell:
    """The cell of one tool, mode and trust."""
    applying = [rule for rule in policy.rules if rule.applies(tool, trust, None)]
    allows = [rule for rule in applying if rule.allow and _reach(rule, tool) != "none"]
    denies = [rule for rule in applying if not rule.allow and _reach(rule, tool) != "none"]
    if any(_reach(rule, tool) == "all" for rule in denies) or not allows:
        outcome = "deny"
    elif not denies and any(_reach(rule, tool) == "all" for rule in allows):
        outcome = "allow"
    else:
        outcome = "some"
    wider = [each for each in Mode if each.rank > mode.rank]
    escalated = [
        rule.id
        for rule in policy.rules
        if rule.allow
        and any(rule.applies(tool, trust, each) for each in wider)
        and _reach(rule, tool) != "none"
        and not any(_covers(deny, rule) for deny in policy.rules if not deny.allow)
    ]
    shown = [] if outcome == "deny" else allows
    return Cell(
        tool,
        mode,
        trust,
        outcome,
        tuple((rule.id, min(mode, rule.mode or mode, key=lambda each: each.rank)) for rule in shown),
        tuple(rule.id for rule in denies),
        tuple(escalated),
    )


def _reach(rule: Rule, tool: str) -> str:
    """Whether a rule that looks at a tool matches ``all``, ``some`` or ``none`` of its calls."""
    if tool in COMMAND_TOOLS:
        if rule.any_command or (not rule.allow and rule.by_tool):
            return "all"
        return "some" if rule.commands or rule.builtin else "none"
    if rule.by_tool:
        return "all"
    if rule.paths is None:
        return "none"
    return "some" if (rule.paths.read if tool in READ_TOOLS else rule.paths.write) else "none"


def unreachable(policy: Policy) -> list[tuple[str, str]]:
    """Rules that can never decide, each with the deny that is in their way.

    Any deny beats an allow; of two denies that match, the first of the file is named.
    """
    denies = [rule for rule in policy.rules if not rule.allow]
    found = []
    for rule in policy.rules:
        before = denies if rule.allow else denies[: denies.index(rule)]
        deny = next((deny for deny in before if _covers(deny, rule)), None)
        if deny is not None:
            found.append((rule.id, deny.id))
    return found


def _covers(deny: Rule, allow: Rule) -> bool:
    """Whether a deny matches every call that an allow, or another deny, matches."""
    if deny.tools is not None and (allow.tools is None or not allow.tools <= deny.tools):
        return False
    if deny.trust is not None and (allow.trust is None or not allow.trust <= deny.trust):
        return False
    if not set(allow.escalate) <= set(deny.escalate):
        return False
    if deny.by_tool and not deny.any_command:
        return True
    by_words = bool(allow.any_command or allow.commands or allow.builtin)
    words = not by_words or (
        deny.any_command
        or (
            not allow.any_command
            and (deny.builtin or not allow.builtin)
            and all(any(_wider(wide, narrow) for wide in deny.commands) for narrow in allow.commands)
        )
    )
    only_shell = allow.tools <= {*COMMAND_TOOLS} if allow.tools else allow.paths is None and not allow.by_tool
    return words and (only_shell or deny.by_tool or (_needs_paths(allow) and _covers_paths(deny, allow)))


def _needs_paths(allow: Rule) -> bool:
    """Whether a rule matches no call without paths; ``read_file`` of a spilled result is one, and tools of others."""
    with_paths = {*COMMAND_TOOLS, *SEARCH_TOOLS, *WRITE_TOOLS}
    return not allow.names_tool or (allow.tools is not None and allow.tools <= with_paths)


def _covers_paths(deny: Rule, allow: Rule) -> bool:
    if deny.paths is None or allow.paths is None or deny.paths.excluded:
        return False
    return all(
        any(_wider_glob(wide, narrow) for wide in wides)
        for wides, narrows in ((deny.paths.read, allow.paths.read), (deny.paths.write, allow.paths.write))
        for narrow in narrows
    )


def _wider_glob(wide: PathPattern, narrow: PathPattern) -> bool:
    return wide.glob in (narrow.glob, "/**") or (wide.glob == "**" and not narrow.absolute)


def _wider(wide: CommandPattern, narrow: CommandPattern) -> bool:
    """Whether a pattern of a deny matches all that a pattern of another rule matches."""
    if narrow.anywhere and not wide.anywhere and (len(wide.words) > 1 or not wide.rest):
        return False
    if len(narrow.words) < len(wide.words):
        return False
    if not wide.rest and (narrow.rest or len(narrow.words) > len(wide.words)):
        return False
    return all(_wider_word(*pair) for pair in zip(wide.words, narrow.words, strict=False))


def _wider_word(wide: Word, narrow: Word) -> bool:
    return wide.any or (not narrow.any and not narrow.globs and all(map(wide.matches_text, narrow.literals)))


def notes(policy: Policy) -> Iterator[str]:
    """Things that are allowed and surprise."""
    allows = [rule for rule in policy.rules if rule.allow]
    for deny in policy.rules:
        if deny.allow:
            continue
        for allow in allows:
            missing = [mode for mode in allow.escalate if mode not in deny.escalate]
            shared = allow.tools is None or deny.tools is None or not allow.tools.isdisjoint(deny.tools)
            if missing and shared:
                modes = ", ".join(missing)
                yield f"{deny.id} does not look at calls that {allow.id} allows with {modes}; add them to its escalate"
            if any(_hides(wide, narrow) for wide in allow.commands for narrow in deny.commands):
                yield (
                    f"{allow.id} lets an expansion stand where {deny.id} looks for a literal word; "
                    "list the subcommands, or add refuse_flags"
                )


def _hides(allow: CommandPattern, deny: CommandPattern) -> bool:
    """Whether an allow takes an expansion for a word that a deny needs to see."""
    if len(deny.words) < 2 or allow.refuse_flags or not allow.words:
        return False
    shared = allow.words[0].literals & deny.words[0].literals
    # These run the same from their arguments in any number of ways, and are listed as opaque.
    if shared <= _RUN_ARGUMENTS:
        return False
    return allow.words[1].any if len(allow.words) > 1 else allow.rest
