"""``nightshift policy``: what a policy allows, before anything runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from runner.figures import counted
from runner.neutral import neutral_json, neutral_text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.approvals.policy import Policy, Rule
    from runner.approvals.review import Cell
    from runner.messages import JsonObject


@click.group(name="policy")
def command() -> None:
    """Check policies."""


@command.command()
@click.argument("policy", type=click.Path(), metavar="POLICY")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def check(policy: str, as_json: bool) -> None:
    """Say what a policy allows.

    Loads POLICY, runs its self-tests, and prints its rules, a table of tool, mode and trust with the
    outcome and the rules behind it, rules that can never decide, rules without self-tests, and opaque
    ones: those that let a program run code the policy does not see.
    """
    import json
    from pathlib import Path

    from runner.config.policy import read_policy

    loaded = read_policy(Path(policy))
    report = _report(loaded)
    if as_json:
        click.echo(neutral_json(json.dumps(report, ensure_ascii=False, indent=2)))
    else:
        click.echo(neutral_text(_text(report)))


def _report(policy: Policy) -> JsonObject:
    """The whole check as JSON."""
    from runner.approvals.review import notes, table, unreachable
    from runner.config.policy import example_count

    values: Sequence[JsonObject] = policy.value["rules"]  # type: ignore[assignment]  # checked by the format
    blocked = dict(unreachable(policy))
    rules: list[JsonObject] = []
    for rule, value in zip(policy.rules, values, strict=True):
        matching, others = example_count(value)
        rules.append(
            {
                "id": rule.id,
                "decision": "allow" if rule.allow else "deny",
                "tool": "*" if rule.tools is None else sorted(rule.tools),
                "about": _about(rule),
                "mode": rule.mode,
                "trust": None if rule.trust is None else sorted(rule.trust),
                "escalate": list(rule.escalate),
                "opaque": rule.opaque,
                "unreachableBehind": blocked.get(rule.id),
                "examples": {"match": matching, "noMatch": others},
                "reason": rule.reason or None,
            }
        )
    return {
        "schemaVersion": 1,
        "policy": policy.source,
        "digest": policy.digest,
        "rules": rules,
        "table": [_cell(cell) for cell in table(policy)],
        "unreachable": sorted(blocked),
        "untested": [rule["id"] for rule in rules if not any(rule["examples"].values())],
        "opaque": [rule.id for rule in policy.rules if rule.opaque],
        "notes": list(dict.fromkeys(notes(policy))),
    }


def _cell(cell: Cell) -> JsonObject:
    return {
        "tool": cell.tool,
        "mode": cell.mode,
        "trust": cell.trust,
        "outcome": cell.outcome,
        "allows": [{"rule": rule, "mode": mode} for rule, mode in cell.allows],
        "denies": list(cell.denies),
        "escalated": list(cell.escalated),
    }


def _about(rule: Rule) -> list[str]:
    """What a rule looks at, in words."""
    about = ["any command"] if rule.any_command else [pattern.text for pattern in rule.commands]
    if rule.builtin:
        about.append("builtins")
    if rule.env:
        about.append(f"with {', '.join(sorted(rule.env))}")
    if rule.paths is not None:
        for word, patterns in (("read", rule.paths.read), ("write", rule.paths.write), ("except", rule.paths.excluded)):
            if patterns:
                about.append(f"{word} {' '.join(pattern.glob for pattern in patterns)}")
    return about


_ESCALATED = {"allow": "only calls that ask for", "deny": "calls without escalation and those that ask for"}


def _text(report: JsonObject) -> str:
    lines = [f"{report['policy']}: {counted(len(report['rules']), 'rule')}, digest {report['digest']}", ""]
    for rule in report["rules"]:
        tools = rule["tool"] if rule["tool"] == "*" else ", ".join(rule["tool"])
        remarks = [
            f"in {rule['mode']}" if rule["mode"] else "",
            f"{', '.join(rule['trust'])} only" if rule["trust"] else "",
            f"{_ESCALATED[rule['decision']]} {', '.join(rule['escalate'])}" if rule["escalate"] else "",
            "opaque" if rule["opaque"] else "",
            f"never decides, {rule['unreachableBehind']} is in its way" if rule["unreachableBehind"] else "",
            "{match}+{noMatch} self-tests".format(**rule["examples"]),
        ]
        lines.append(f"{rule['id']}: {rule['decision']} {tools} ({'; '.join(filter(None, remarks))})")
        lines += [f"    {about}" for about in rule["about"]]
    lines += ["", *_table(report["table"]), ""]
    for key, words in (
        ("unreachable", "Never decide"),
        ("untested", "Without self-tests"),
        ("opaque", "Opaque: what these run is bounded by the sandbox only"),
    ):
        lines.append(f"{words}: {', '.join(report[key]) or 'none'}")
    lines += [f"Note: {note}" for note in report["notes"]]
    return "\n".join(lines)


def _table(cells: Sequence[JsonObject]) -> list[str]:
    """The cells as lines; runs of either trust share one where they do not differ."""
    rows: list[tuple[str, str, str, str]] = [("tool", "mode", "trust", "outcome")]
    grouped: dict[tuple[str, str], dict[str, str]] = {}
    for cell in cells:
        grouped.setdefault((cell["tool"], cell["mode"]), {})[cell["trust"]] = _outcome(cell)
    for (tool, mode), by_trust in grouped.items():
        if len(set(by_trust.values())) == 1:
            rows.append((tool, mode, "both", next(iter(by_trust.values()))))
        else:
            rows += [(tool, mode, trust, outcome) for trust, outcome in by_trust.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return [f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:{widths[2]}}  {row[3]}" for row in rows]


def _outcome(cell: JsonObject) -> str:
    parts = [cell["outcome"]]
    allows = [each["rule"] + ("" if each["mode"] == cell["mode"] else f" in {each['mode']}") for each in cell["allows"]]
    for word, rules in (("by", allows), ("but not", cell["denies"]), ("escalated", cell["escalated"])):
        if rules:
            parts.append(f"{word} {', '.join(rules)}")
    return "; ".join(parts)
