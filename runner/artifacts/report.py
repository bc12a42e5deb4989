"""``summary.md``: the run for people, from the log alone.

Everything that a model, a tool or an input wrote stands in code spans or code blocks, so no Markdown,
HTML, link or mention of theirs takes effect. Control and direction characters are written as escapes,
and no line can be read as a command of a CI system. At most ``SIZE_LIMIT`` bytes. Writes no events.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from runner.artifacts.usage import BUCKETS
from runner.errors import ErrorCode
from runner.figures import amount, counted, decimals
from runner.neutral import neutral_line, neutral_text

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from runner.artifacts.facts import DeniedCall, Facts
    from runner.artifacts.patch import PatchInfo
    from runner.messages import JsonObject
    from runner.outcome import Outcome

SIZE_LIMIT = 1_000_000
"""Bytes of the whole report; GitHub takes 1,048,576 for a step summary."""

_TEXT_LIMIT = 20_000
_MESSAGE_LIMIT = 100_000
_CELL_LIMIT = 300
_FINDING_LIMIT = 1_000
_PATHS_SHOWN = 50

_OPAQUE = """\
What a program out of the workspace does (a test runner, a build tool) is bounded by the sandbox only, not by the \
policy."""


def code_span(text: str, *, limit: int = _CELL_LIMIT) -> str:
    """One line of foreign text as a code span that is also safe in a table cell; empty text is a dash."""
    line = neutral_line(text[: limit + 1]).strip()
    if not line:
        return "-"
    if len(line) > limit:
        line = line[:limit] + "…"
    ticks = "`" * (_longest_run(line, "`") + 1)
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{space}{line}{space}{ticks}".replace("|", "\\|")


def code_block(text: str, *, limit: int = _TEXT_LIMIT) -> str:
    """Foreign text as a code block whose fence it cannot close."""
    body = neutral_text(text[:limit]).rstrip("\n")
    if len(text) > limit:
        body += f"\n… {len(text) - limit} more characters in the log"
    fence = "`" * max(3, _longest_run(body, "`") + 1)
    return f"{fence}text\n{body}\n{fence}"


def _longest_run(text: str, char: str) -> int:
    return max((len(run) for run in re.findall(re.escape(char) + "+", text)), default=0)


def render_summary(outcome: Outcome, usage: JsonObject, facts: Facts, *, patch: PatchInfo | None = None) -> str:
    """The whole of ``summary.md``.

    Args:
        outcome: The outcome.
        usage: The content of ``usage.json``.
        facts: The facts of the log.
        patch: Numbers and paths of the patch, if the caller has them; the log knows its size only.
    """
    parts = [part for section in _sections(outcome, usage, facts, patch) for part in section]
    text = "\n\n".join(parts) + "\n"
    data = text.encode("utf-8")
    if len(data) <= SIZE_LIMIT:
        return text
    # A cut may fall into a code block; the end closes any fence that is no longer than this one.
    note = "\n" + "`" * 40 + "\n\nThe report was cut here; the whole run is in the session log.\n"
    return data[: SIZE_LIMIT - len(note)].decode("utf-8", "ignore") + note


def _sections(outcome: Outcome, usage: JsonObject, facts: Facts, patch: PatchInfo | None) -> Iterator[Iterable[str]]:
    yield _head(outcome, usage, facts)
    yield _why(outcome)
    yield _asked(facts)
    yield _answer(outcome)
    yield _findings(facts)
    yield _changes(facts, patch)
    yield _denied(outcome, facts)
    yield _checks(outcome)
    yield _cost(usage, facts)
    yield _limits(usage, facts)
    yield _sandbox(facts)
    yield _artifacts(facts)


def _head(outcome: Outcome, usage: JsonObject, facts: Facts) -> list[str]:
    rows = [
        ("Outcome", f"{outcome.outcome}, `{outcome.code.name}` (exit code {outcome.exit_code})"),
        ("Model", code_span("/".join(part for part in (facts.provider, facts.model) if part))),
        ("Time", _seconds(facts.duration_ms)),
        ("Turns, steps", f"{outcome.turns}, {outcome.steps}"),
        ("Cost", _money(usage)),
        ("Tool calls", f"{outcome.calls.total}, {outcome.calls.failed} failed, {outcome.calls.denied} denied"),
        ("Session", code_span(facts.session_id or "")),
    ]
    return [f"# {code_span(facts.task or 'run')}: {outcome.outcome}", _table(("", ""), rows)]


def _why(outcome: Outcome) -> list[str]:
    parts = ["## Why"]
    if outcome.cause is None:
        parts.append(f"{ErrorCode.COMPLETED.meaning.capitalize()}.")
    else:
        parts.append(code_block(outcome.cause.message))
        if outcome.cause.hint:
            parts.append(f"What to do: {code_span(outcome.cause.hint, limit=1000)}")
    lines = [
        f"- {'holds' if item.holds else '**does not hold**'}: {code_span(item.name)}, {code_span(item.detail)}"
        for item in outcome.evidence
    ]
    lines += [f"- also: `{cause.code.name}`, {code_span(cause.message)}" for cause in outcome.secondary]
    return [*parts, "\n".join(lines)] if lines else parts


def _asked(facts: Facts) -> list[str]:
    if not facts.prompt:
        return []
    more = [f"{counted(facts.prompts - 1, 'more prompt')} followed."] if facts.prompts > 1 else []
    return ["## What was asked", code_block(facts.prompt), *more]


def _answer(outcome: Outcome) -> list[str]:
    if outcome.final_message is None:
        return []
    return ["## Final message", code_block(outcome.final_message, limit=_MESSAGE_LIMIT)]


def _findings(facts: Facts) -> list[str]:
    if not facts.findings_total:
        return []
    rows = [
        (
            found.severity,
            code_span(found.place),
            code_span(found.rule or ""),
            code_span(found.message, limit=_FINDING_LIMIT),
        )
        for found in facts.findings
    ]
    parts = ["## Findings", _table(("severity", "place", "rule", "finding"), rows)]
    if facts.findings_total > len(rows):
        parts.append(f"And {facts.findings_total - len(rows):,} more, in the log.")
    return parts


def _changes(facts: Facts, patch: PatchInfo | None) -> list[str]:
    parts = ["## Changes"]
    written = facts.artifacts.get("changes.patch")
    if patch is not None:
        lines = f"{counted(patch.insertions, 'line')} added, {patch.deletions:,} removed"
        parts.append(f"{counted(patch.files, 'file')}, {lines}, in `changes.patch`.")
        parts.append(_listing(patch.paths, patch.files))
    elif written is not None and written.bytes:
        parts.append(f"`changes.patch` has {counted(written.bytes, 'byte')}.")
    else:
        parts.append("No patch was made.")
    if facts.writes and patch is None:
        parts += ["The file tools were allowed to write:", _listing(list(facts.writes), facts.writes_total)]
    base = facts.base
    if base:
        commit = base.get("commit")
        start = f"commit {code_span(str(commit))}" if commit else "a directory without a commit"
        dirty = " with uncommitted changes" if base.get("dirty") else ""
        parts.append(f"The agent began with {start}{dirty}, tree {code_span(str(base.get('tree')))}.")
    return parts


def _listing(paths: Sequence[str], total: int) -> str:
    lines = [f"- {code_span(path)}" for path in paths[:_PATHS_SHOWN]]
    if total > len(lines):
        lines.append(f"- and {total - len(lines)} more")
    return "\n".join(lines)


def _denied(outcome: Outcome, facts: Facts) -> list[str]:
    if not facts.denied_total:
        return []
    rows = [_denied_row(call) for call in facts.denied[:_PATHS_SHOWN]]
    parts = ["## Denied calls", _table(("tool", "call", "code", "rule", "answer to the model"), rows)]
    if facts.denied_total > len(rows):
        parts.append(f"And {facts.denied_total - len(rows)} more.")
    approvals = outcome.approvals
    parts.append(f"The policy was asked {counted(approvals.asked, 'time')} and denied {approvals.denied}.")
    return parts


def _denied_row(call: DeniedCall) -> tuple[str, ...]:
    return (
        code_span(call.tool),
        code_span(call.what),
        code_span(call.code),
        code_span(call.rule or ""),
        code_span(call.why),
    )


def _checks(outcome: Outcome) -> list[str]:
    if not outcome.checks:
        return []
    rows = [
        (
            code_span(check.name),
            "passed" if check.passed else "**failed**",
            str(check.attempts),
            _seconds(check.duration_ms),
        )
        for check in outcome.checks
    ]
    parts = ["## Checks", _table(("check", "last attempt", "attempts", "time"), rows)]
    for check in outcome.checks:
        if not check.passed and check.output:
            parts += [f"The end of what {code_span(check.name)} printed:", code_block(check.output)]
    return parts


def _cost(usage: JsonObject, facts: Facts) -> list[str]:
    total, context = usage["usage"], usage["context"]
    rate = total["cacheHitRate"]
    rows = [
        (
            code_span(row["model"] or ""),
            str(row["requests"]),
            *(_number(row[name]) for name in BUCKETS),
            _money(row),
        )
        for row in usage["perModel"]
    ]
    rows.append(("all", str(usage["requests"]), *(_number(total[name]) for name in BUCKETS), _money(usage)))
    lines = [
        f"- cache hit rate: {'unknown' if rate is None else f'{rate:.0%}'}",
        f"- context window: {_number(context['window'])}, fullest request {_number(context['peak'])}",
        f"- retries: {facts.retries}, summaries of the history: {usage['compactions']}",
    ]
    if usage["estimated"]:
        lines.append("- some of these numbers are estimates: the provider reported none")
    columns = ("model", "requests", "input", "cache reads", "cache writes", "output", "reasoning", "cost")
    tools = [
        (code_span(tool["name"]), *(str(tool[key]) for key in ("calls", "failed", "denied")), _time(tool["durationMs"]))
        for tool in usage["tools"][:_PATHS_SHOWN]
    ]
    parts = ["## Cost", _table(columns, rows), "\n".join(lines)]
    return [*parts, _table(("tool", "calls", "failed", "denied", "time"), tools)] if tools else parts


def _limits(usage: JsonObject, facts: Facts) -> list[str]:
    rows = [
        (code_span(limit["name"]), _number(limit["used"]), _number(limit["max"])) for limit in facts.limit_table(usage)
    ]
    lines = [
        f"- {code_span(event.name)}: {'reached' if event.percent == 100 else 'the model was told'} "
        f"at {amount(event.used)} of {amount(event.max)}"
        for event in facts.limits
    ]
    parts = [_table(("limit", "used", "most"), rows)] if rows else []
    parts += ["\n".join(lines)] if lines else []
    return ["## Limits", *parts] if parts else []


def _sandbox(facts: Facts) -> list[str]:
    sandbox = facts.sandbox
    if not sandbox:
        return ["## Sandbox", "The log does not say how commands were confined."]
    lines = [
        f"- backend: {code_span(str(sandbox.get('backend')))}",
        f"- mode: {code_span(str(sandbox.get('mode')))}",
        f"- network: {code_span(_network(sandbox.get('network')))}",
        f"- trust of the trigger: {code_span(facts.trust or '')}",
    ]
    lines += _egress(facts)
    lines += [
        f"- **ran in {code_span(call.mode)}**, by the rule {code_span(call.rule or '')}: "
        f"{code_span(call.tool)} {code_span(call.what)}"
        for call in facts.escalated[:_PATHS_SHOWN]
    ]
    if facts.escalated_total > _PATHS_SHOWN:
        lines.append(f"- further calls that ran in a wider mode: {facts.escalated_total - _PATHS_SHOWN}")
    if facts.redactions:
        lines.append(f"- known secrets taken out of the log: {facts.redactions}")
    missing = [str(name) for name in sandbox.get("notEnforced") or ()]
    if sandbox.get("backend") is None:
        lines[0] = "- backend: none was chosen; no command ran"
        return ["## Sandbox", "\n".join(lines)]
    if sandbox["backend"] == "none":
        lines.append("- **commands ran without a sandbox**")
    if missing:
        lines.append("- **not enforced here**: " + ", ".join(code_span(name) for name in missing))
    else:
        lines.append("- everything the sandbox promises is enforced here")
    return [
        "## Sandbox",
        "\n".join(lines),
        _OPAQUE,
    ]


def _network(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    allowed = value.get("allow") if isinstance(value, dict) else None
    return f"only {', '.join(map(str, allowed))}" if isinstance(allowed, list) else str(value)


def _egress(facts: Facts) -> list[str]:
    """Connections that commands asked the proxy for."""
    lines = []
    for decision in ("denied", "allowed"):
        places = [
            f"{code_span(f'{host}:{port}')} ({counted(count, 'time')})"
            for (host, port, decided), count in facts.egress.items()
            if decided == decision
        ]
        if places:
            lines.append(f"- connections {decision}: {', '.join(places)}")
    if facts.egress_more:
        lines.append(f"- connections to further places: {facts.egress_more}")
    return lines


def _artifacts(facts: Facts) -> list[str]:
    rows = [
        (code_span(path), _number(event.bytes), code_span(event.sha256))
        for path, event in list(facts.artifacts.items())[:_PATHS_SHOWN]
    ]
    return ["## Artifacts", _table(("file", "bytes", "SHA-256"), rows)] if rows else []


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _number(value: float | None) -> str:
    if value is None:
        return "unknown"
    return f"{value:,}" if isinstance(value, int) else decimals(value, 2)


def _money(row: JsonObject) -> str:
    return "unknown" if row["costUsd"] is None else f"${decimals(row['costUsd'], 4)}"


def _seconds(milliseconds: float) -> str:
    return f"{milliseconds / 1000:,.1f} s"


def _time(milliseconds: float | None) -> str:
    return "unknown" if milliseconds is None else _seconds(milliseconds)
