"""``nightshift policy``: what a policy allows before anything runs, and what it says on calls that were recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from runner.cli.output import put, put_json, say
from runner.figures import counted
from runner.neutral import neutral_line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runner.approvals.policy import Policy
    from runner.approvals.redecide import Counts
    from runner.messages import JsonObject
    from runner.session.store import SessionSource

_JSON = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_HELD = 4 * 1024 * 1024
"""Bytes of differences that are held in memory; more wait in a file."""

_SHOWN = 160
"""Characters of a command or a path that are shown."""

_PATHS = 3
"""Paths of a call that are shown."""


@click.group(name="policy")
def command() -> None:
    """Check a policy, and test it on recorded sessions."""


@command.command()
@click.argument("policy", type=click.Path(path_type=Path), metavar="POLICY")
@_JSON
def check(policy: Path, *, as_json: bool) -> None:
    """Say what a policy allows.

    Loads POLICY, runs its self-tests, and prints its rules, a table of tool, mode and trust with the
    outcome and the rules behind it, rules that can never decide, rules without self-tests, and opaque
    ones: those that let a program run code the policy does not see.
    """
    from runner.config.policy import read_policy
    from runner.config.policy_report import check_report

    report = check_report(read_policy(policy))
    if as_json:
        put_json(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        put("\n".join(_check_lines(report)))


@command.command("test")
@click.argument("policy", type=click.Path(path_type=Path), metavar="POLICY")
@click.argument("sessions", nargs=-1, required=True, metavar="SESSION...")
@_JSON
def run_test(policy: Path, sessions: Sequence[str], *, as_json: bool) -> int:
    """Say where a policy decides otherwise than the log of a session says.

    Puts every recorded call of each SESSION, its subagents' too, to POLICY and lists the calls that it allows, denies,
    or runs in another mode, and the log says otherwise. Nothing runs. SESSION is an id, an artifacts directory, a
    .jsonl, a .jsonl.zst or .zstd, or an exported ZIP, of ours or of dsh. Exit code 1 if there are differences, 0 if
    there are none.
    """
    import tempfile

    from runner.approvals.redecide import Counts
    from runner.config.policy import read_policy
    from runner.session.store import open_session

    loaded = read_policy(policy)
    sources = [each for name in sessions for each in _family(open_session(name))]
    known = {source.header["id"] for source in sources}
    total = Counts()
    rows: list[JsonObject] = []
    # A log that turns out to be damaged leaves no half of a report.
    with tempfile.SpooledTemporaryFile(_HELD, "w+", encoding="utf-8", errors="surrogatepass") as found:
        for source in sources:
            counts = _redecide(loaded, source, known, found)
            total.add(counts)
            rows.append(_session_row(source, counts))
        found.seek(0)
        head = {"schemaVersion": 1, "policy": loaded.source, "digest": loaded.digest}
        if as_json:
            _put_json_report(head, total, rows, found)
        else:
            for line in found:
                put("\n".join(_difference_lines(json.loads(line))))
            put("\n".join(_count_lines(total, len(rows))))
    return 1 if total.differences else 0


def _family(source: SessionSource) -> Iterator[SessionSource]:
    """A session and those of its subagents."""
    yield source
    for _, child in source.children():
        yield from _family(child)


def _redecide(policy: Policy, source: SessionSource, known: set[str], found: IO[str]) -> Counts:
    """Decide the calls of one session again; a line of JSON for each difference goes to ``found``."""
    from runner.approvals.redecide import Counts, redecide
    from runner.config.policy_report import difference_value
    from runner.errors import LogError

    header, counts = source.header, Counts()
    parent = header.get("parentSession")
    skip = int(header.get("seedLength", 0)) if parent in known and parent != header["id"] else 0
    try:
        for difference in redecide(policy, header, source.whole_events(), counts, skip=skip):
            found.write(json.dumps(difference_value(difference)) + "\n")
    except LogError as error:
        raise source.located(error, None) from None
    if source.dropped and not counts.calls:  # no difference would mean nothing
        what = f"{source.name}: cut off before its first call, so there is nothing to compare ({source.dropped})"
        raise LogError(what, hint="name a session whose log holds calls")
    if source.dropped:
        say(neutral_line(f"note: {source.name}: {source.dropped}"))
    return counts


def _session_row(source: SessionSource, counts: Counts) -> JsonObject:
    from runner.config.policy_report import counts_value

    return {"session": source.header["id"], "path": source.name, **counts_value(counts)}


# --- what a test prints ---------------------------------------------------------------------------


def _put_json_report(head: JsonObject, total: Counts, rows: Sequence[JsonObject], found: IO[str]) -> None:
    """One JSON document, the differences read line by line."""
    from runner.config.policy_report import counts_value

    values = {**head, "counts": counts_value(total), "sessions": rows}
    put_json(json.dumps(values, ensure_ascii=False, indent=2).removesuffix("\n}") + ',\n  "differences": [')
    separator = " "
    for line in found:
        put_json(f"   {separator}{json.dumps(json.loads(line), ensure_ascii=False)}")
        separator = ","
    put_json("  ]\n}")


_KINDS = {"denied": "now denied", "allowed": "now allowed", "mode": "other mode"}


def _difference_lines(difference: JsonObject) -> Iterator[str]:
    place = f"turn {difference['turn']}, step {difference['step']}, call {difference['callId']}"
    yield neutral_line(f"{_KINDS[difference['kind']]}: {difference['session']}, {place}")
    about = [] if difference["command"] is None else [_shorten(difference["command"])]
    for verb in ("read", "write"):
        paths = difference[verb]
        more = f" and {len(paths) - _PATHS} more" if len(paths) > _PATHS else ""
        about += [f"{verb} {', '.join(_shorten(path) for path in paths[:_PATHS])}{more}"] if paths else []
    if difference["escalation"]:
        about.append(f"asks for {difference['escalation']}")
    yield neutral_line(f"  {difference['tool']}{': ' if about else ''}{'; '.join(about)}")
    yield neutral_line(f"  recorded: {_verdict(difference['recorded'])}")
    yield neutral_line(f"  new:      {_verdict(difference['new'])}: {_shorten(difference['new']['reason'])}")


def _verdict(verdict: JsonObject) -> str:
    word = {"allow": "allowed", "deny": "denied"}[verdict["decision"]]
    if verdict["rule"] is None and verdict["decision"] == "allow":
        word = "ran"  # nobody was asked
    rule = "" if verdict["rule"] is None else f" by {verdict['rule']}"
    return word + rule + ("" if verdict["mode"] is None else f", in {verdict['mode']}")


def _shorten(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({len(text):,} characters)"


def _count_lines(counts: Counts, sessions: int) -> Iterator[str]:
    yield (
        f"{counted(counts.differences, 'difference')} in {counted(counts.compared, 'compared call')} of "
        f"{counted(sessions, 'session')}: {counts.denied:,} now denied, {counts.allowed:,} now allowed, "
        f"{counts.mode:,} in another mode"
    )
    if counts.other_rule:
        yield f"  the same decision by a rule of another name: {counts.other_rule:,}"
    if counts.without_facts:
        yield f"  decided by the name of the tool alone, which is not ours: {counts.without_facts:,}"
    apart = [(code.lower().replace("_", " "), number) for code, number in sorted(counts.not_reached.items())]
    apart += [
        ("no decision in the log", counts.unknown),
        ("taken over from a session that is read too", counts.inherited),
    ]
    if any(number for _, number in apart):
        yield f"  not compared: {', '.join(f'{word} {number:,}' for word, number in apart if number)}"


# --- what a check prints --------------------------------------------------------------------------

_ESCALATED = {"allow": "only calls that ask for", "deny": "calls without escalation, and those that ask for"}


def _check_lines(report: JsonObject) -> Iterator[str]:
    rules: Sequence[JsonObject] = report["rules"]
    yield neutral_line(f"{report['policy']}: {counted(len(rules), 'rule')}, every self-test passes")
    yield f"digest {report['digest']}"
    yield ""
    for rule in rules:
        yield _rule_line(rule)
        yield from (f"    {about}" for about in rule["about"])
    yield ""
    yield from _table(report["table"])
    yield "What no rule allows is denied."
    yield ""
    for key, words in (
        ("unreachable", "Never decide, a deny always comes first"),
        ("untested", "Without self-tests"),
        ("opaque", "Opaque, what these run is bounded by the sandbox only"),
    ):
        yield f"{words}: {', '.join(report[key]) or 'none'}"
    yield from (f"Note: {note}" for note in report["notes"])


def _rule_line(rule: JsonObject) -> str:
    matching, others = rule["examples"]["match"], rule["examples"]["noMatch"]
    remarks = [
        f"in {rule['mode']}" if rule["mode"] else "",
        f"{' and '.join(rule['trust'])} runs only" if rule["trust"] else "",
        f"{_ESCALATED[rule['decision']]} {' or '.join(rule['escalate'])}" if rule["escalate"] else "",
        "opaque" if rule["opaque"] else "",
        f"never decides, {rule['unreachableBehind']} always comes first" if rule["unreachableBehind"] else "",
        f"{counted(matching + others, 'self-test')}" if matching + others else "no self-tests",
    ]
    tools = "every tool" if rule["tools"] == ["*"] else ", ".join(rule["tools"])
    return f"{rule['id']}: {rule['decision']} {tools} ({'; '.join(filter(None, remarks))})"


def _table(cells: Sequence[JsonObject]) -> Iterator[str]:
    """The cells as lines; runs of either trust, and of every mode, share one where they do not differ."""
    rows: list[tuple[str, str, str, str]] = [("tool", "mode", "trust", "outcome")]
    tools: dict[str, dict[str, dict[str, str]]] = {}
    for cell in cells:
        tools.setdefault(cell["tool"], {}).setdefault(cell["mode"], {})[cell["trust"]] = outcome_text(cell)
    for tool, by_mode in tools.items():
        if all(each == next(iter(by_mode.values())) for each in by_mode.values()):
            by_mode = {"every": next(iter(by_mode.values()))}  # noqa: PLW2901  # the same, in one line
        for mode, by_trust in by_mode.items():
            if len(set(by_trust.values())) == 1:
                rows.append((tool, mode, "both", next(iter(by_trust.values()))))
            else:
                rows += [(tool, mode, trust, outcome) for trust, outcome in by_trust.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        yield f"{row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]:{widths[2]}}  {row[3]}"


def outcome_text(cell: JsonObject) -> str:
    """What becomes of the calls of one tool, and by which rules, in words."""
    parts = [cell["outcome"]]
    allows = [each["rule"] + ("" if each["mode"] == cell["mode"] else f" in {each['mode']}") for each in cell["allows"]]
    for word, rules in (
        ("by", allows),
        ("never what matches" if allows else "by", cell["denies"]),
        ("with escalation by", cell["escalated"]),
    ):
        if rules:
            parts.append(f"{word} {', '.join(rules)}")
    return "; ".join([" ".join(parts[:2]), *parts[2:]])
