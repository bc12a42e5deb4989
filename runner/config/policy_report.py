"""What ``nightshift policy check`` and ``policy test`` print as JSON, and the schemas of both.

``plan`` uses the same forms for the policy of a run, so that a rule and a tool read alike everywhere.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from runner.approvals.redecide import NOT_REACHED
from runner.approvals.review import notes, table, unreachable
from runner.config.json_forms import (
    DIGEST,
    choice_form,
    document_form,
    flag_form,
    list_form,
    number_form,
    object_form,
    text_form,
)
from runner.config.policy import example_count
from runner.permission import Mode, Trust

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runner.approvals.policy import Policy, Rule
    from runner.approvals.redecide import Counts, Difference, Verdict
    from runner.approvals.review import Cell
    from runner.messages import JsonObject


def check_report(policy: Policy) -> JsonObject:
    """What can be said of a policy before anything runs, as ``CHECK_SCHEMA`` describes it."""
    values: Sequence[JsonObject] = policy.value["rules"]  # type: ignore[assignment]  # checked by the format
    blocked = dict(unreachable(policy))
    rules: list[JsonObject] = []
    for rule, value in zip(policy.rules, values, strict=True):
        matching, others = example_count(value)
        examples = {"match": matching, "noMatch": others}
        rules.append({**rule_value(rule), "unreachableBehind": blocked.get(rule.id), "examples": examples})
    return {
        "schemaVersion": 1,
        "policy": policy.source,
        "digest": policy.digest,
        "rules": rules,
        "table": [cell_value(cell) for cell in table(policy)],
        "unreachable": [rule.id for rule in policy.rules if rule.id in blocked],
        "untested": [rule["id"] for rule in rules if not any(rule["examples"].values())],
        "opaque": [rule.id for rule in policy.rules if rule.opaque],
        "notes": list(dict.fromkeys(notes(policy))),
    }


def rule_value(rule: Rule) -> JsonObject:
    """One rule as JSON."""
    return {
        "id": rule.id,
        "decision": "allow" if rule.allow else "deny",
        "tools": ["*"] if rule.tools is None else sorted(rule.tools),
        "about": list(_about(rule)),
        "mode": None if rule.mode is None else rule.mode.value,
        "trust": None if rule.trust is None else sorted(rule.trust),
        "escalate": list(rule.escalate),
        "opaque": rule.opaque,
        "reason": rule.reason,
    }


def _about(rule: Rule) -> Iterator[str]:
    """What a rule looks at, in words."""
    if rule.any_command:
        yield "any command"
    for pattern in rule.commands:
        options = " (options may stand before the subcommand)" if pattern.anywhere else ""
        refused = f" without {' '.join(pattern.refuse_flags)}" if pattern.refuse_flags else ""
        yield f"{pattern.text}{refused}{options}"
    if rule.builtin:
        yield "harmless builtins"
    if rule.env:
        yield f"with {' '.join(sorted(rule.env))}"
    if rule.paths is not None:
        for verb, globs in (("read", rule.paths.read), ("write", rule.paths.write), ("except", rule.paths.excluded)):
            if globs:
                yield f"{verb} {' '.join(glob.glob for glob in globs)}"


def cell_value(cell: Cell) -> JsonObject:
    """What becomes of the calls of one tool in runs of one mode and trust, as JSON."""
    return {
        "tool": cell.tool,
        "mode": cell.mode,
        "trust": cell.trust,
        "outcome": cell.outcome,
        "allows": [{"rule": rule, "mode": mode} for rule, mode in cell.allows],
        "denies": list(cell.denies),
        "escalated": list(cell.escalated),
    }


def difference_value(difference: Difference) -> JsonObject:
    """One call on which a policy decides otherwise, as JSON."""
    facts = difference.facts
    return {
        "kind": difference.kind,
        "session": difference.session,
        "seq": difference.seq,
        "turn": difference.turn,
        "step": difference.step,
        "callId": difference.call_id,
        "tool": difference.tool,
        "command": facts.command,
        "read": list(facts.read),
        "write": list(facts.write),
        "escalation": facts.escalation,
        "recorded": _verdict_value(difference.recorded),
        "new": {**_verdict_value(difference.new), "reason": difference.new.reason},
    }


def _verdict_value(verdict: Verdict) -> JsonObject:
    return {"decision": "allow" if verdict.allowed else "deny", "rule": verdict.rule, "mode": verdict.mode}


def counts_value(counts: Counts) -> JsonObject:
    """What became of the calls of one or more sessions, as JSON."""
    return {
        "calls": counts.calls,
        "compared": counts.compared,
        "differences": counts.differences,
        "denied": counts.denied,
        "allowed": counts.allowed,
        "mode": counts.mode,
        "otherRule": counts.other_rule,
        "withoutFacts": counts.without_facts,
        "notReached": {code.name: counts.not_reached.get(code.name, 0) for code in NOT_REACHED},
        "unknown": counts.unknown,
        "inherited": counts.inherited,
    }


# --- schemas -------------------------------------------------------------------------------------

_DECISIONS: Final = ("allow", "deny")
_MODES: Final = [mode.value for mode in Mode]
_TRUSTS: Final = [trust.value for trust in Trust]
_VERSION: Final[JsonObject] = {"const": 1, "description": "Version of this format."}
_POLICY: Final[JsonObject] = {
    "policy": text_form("The file."),
    "digest": text_form("SHA-256 of the policy, as it stands in session logs.", pattern=DIGEST),
}

RULE_FORM: Final[JsonObject] = {
    "id": text_form("Its id."),
    "decision": choice_form("What it says.", _DECISIONS),
    "tools": list_form("Tools it looks at; `*` is every one."),
    "about": list_form("Commands, variables and paths it looks at, in words."),
    "mode": choice_form("Tighter mode the call runs in.", _MODES, null=True),
    "trust": list_form("Trust of runs it is limited to; null is every run.", null=True),
    "escalate": list_form("Wider modes that a call may ask for."),
    "opaque": flag_form("Whether it lets a program run code that the policy does not see."),
    "reason": text_form("Why it says so; empty if it does not tell."),
}
"""Properties of ``rule_value``."""

CELL_FORM: Final[JsonObject] = object_form(
    "What becomes of the calls of one tool in runs of one mode and trust.",
    {
        "tool": text_form("The tool."),
        "mode": choice_form("Mode of the run.", _MODES),
        "trust": choice_form("Trust of the run.", _TRUSTS),
        "outcome": choice_form("All calls, none, or some: then it depends on the call.", ["allow", "deny", "some"]),
        "allows": list_form(
            "Rules that allow some of them.",
            object_form(
                "One rule.", {"rule": text_form("Its id."), "mode": choice_form("Mode the call runs in.", _MODES)}
            ),
        ),
        "denies": list_form("Ids of the rules that deny some of them."),
        "escalated": list_form("Ids of the rules that allow calls asking for a wider mode."),
    },
)
"""Form of ``cell_value``."""

CHECK_SCHEMA: Final = document_form(
    "policy check",
    "What a policy allows, before anything runs.",
    {
        "schemaVersion": _VERSION,
        **_POLICY,
        "rules": list_form(
            "The rules, in the order of the file.",
            object_form(
                "One rule.",
                {
                    **RULE_FORM,
                    "unreachableBehind": text_form(
                        "The deny that always comes first, so that it never decides.", null=True
                    ),
                    "examples": object_form(
                        "Number of its self-tests.",
                        {"match": number_form("What it is about."), "noMatch": number_form("What it is not about.")},
                    ),
                },
            ),
        ),
        "table": list_form("One entry for each tool, mode and trust.", CELL_FORM),
        "unreachable": list_form("Ids of the rules that never decide."),
        "untested": list_form("Ids of the rules without self-tests."),
        "opaque": list_form("Ids of the rules behind which only the sandbox bounds what a program does."),
        "notes": list_form("What may surprise."),
    },
)
"""JSON Schema of ``policy check --json``."""

_VERDICT: Final[JsonObject] = {
    "decision": choice_form("Whether the call was let through.", _DECISIONS),
    "rule": text_form("The deciding rule, or `default`; null where the log does not tell.", null=True),
    "mode": choice_form("Mode of an allowed call; null where the log does not tell.", _MODES, null=True),
}

_COUNTS: Final[JsonObject] = {
    "calls": number_form("Calls in the logs: compared, notReached, unknown and inherited together."),
    "compared": number_form("Calls that were decided again and compared."),
    "differences": number_form("Those on which the policy decides otherwise: denied, allowed and mode together."),
    "denied": number_form("Allowed then, denied now."),
    "allowed": number_form("Denied then, allowed now."),
    "mode": number_form("Allowed then and now, in another mode."),
    "otherRule": number_form("The same decision, by a rule of another name. No difference."),
    "withoutFacts": number_form("Compared calls of tools that are not ours: decided by the name of the tool alone."),
    "notReached": object_form(
        "Calls that ended before a policy looked at them, by error code.",
        {code.name: number_form(f"{code.meaning.capitalize()}.") for code in NOT_REACHED},
    ),
    "unknown": number_form("Calls on which the log holds no decision."),
    "inherited": number_form("Calls that a forked session took over from one that is read as well."),
}

TEST_SCHEMA: Final = document_form(
    "policy test",
    "What a policy says on the recorded calls of sessions.",
    {
        "schemaVersion": _VERSION,
        **_POLICY,
        "counts": object_form("What became of all calls.", _COUNTS),
        "sessions": list_form(
            "The same for each session, subagents behind their parent.",
            object_form(
                "One session.",
                {"session": text_form("Its id."), "path": text_form("Where its log is."), **_COUNTS},
            ),
        ),
        "differences": list_form(
            "Calls on which the policy decides otherwise, session by session.",
            object_form(
                "One call.",
                {
                    "kind": choice_form("What is different, as in counts.", ["denied", "allowed", "mode"]),
                    "session": text_form("Id of the session."),
                    "seq": number_form("Number of the event that recorded the call."),
                    "turn": number_form("Its turn."),
                    "step": number_form("Its step."),
                    "callId": text_form("Its id."),
                    "tool": text_form("Its tool, by the name in the log."),
                    "command": text_form("Its shell text.", null=True),
                    "read": list_form("Absolute paths it reads, as they were resolved then."),
                    "write": list_form("Absolute paths it writes, as they were resolved then."),
                    "escalation": choice_form("The wider mode it asks for.", _MODES, null=True),
                    "recorded": object_form("What the log says.", _VERDICT),
                    "new": object_form("What the policy says.", {**_VERDICT, "reason": text_form("Why.")}),
                },
            ),
        ),
    },
)
"""JSON Schema of ``policy test --json``."""
