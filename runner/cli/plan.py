"""``nightshift plan``: what a run would do, on whose authority, and where each setting comes from.

Reads the files and nothing else: no key, no model call, nothing created.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, Final

import click

from runner.cli.options import load_options, run_options
from runner.cli.policy import outcome_text
from runner.neutral import neutral_json, neutral_text

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from runner.messages import JsonObject

_OPAQUE: Final = "opaque: what it runs is bounded by the sandbox only"
_WIDEST: Final = 72
_LINE: Final = 110
_NARROW: Final = {
    "read-only": "nothing is written but a temporary folder",
    "workspace-write": "nothing is written outside the workspace, sandbox.writable and a temporary folder",
    "danger-full-access": "which is no sandbox",
}
"""Mode → what that means, for people."""


@click.command(name="plan")
@run_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(task: str | None, artifacts: str | None, as_json: bool, **options: Any) -> None:
    """Show what TASK would do: every effective value with its origin, and what the policy allows.

    Limits, sandbox and the names of secrets are part of it. Needs no key and makes no model call.
    """
    from runner.config.plan import plan_report

    spec = load_options(task=task, check_credentials=False, **options)
    if artifacts is not None:
        from pathlib import Path

        from runner.config.directories import check_artifacts_dir

        check_artifacts_dir(Path.cwd() / artifacts, spec.task.workspace.path, spec.profile.sandbox.writable)
    report = plan_report(spec, os.environ)
    if as_json:
        click.echo(neutral_json(json.dumps(report, ensure_ascii=False, indent=2)))
    else:
        click.echo(neutral_text("\n".join(_text(report))))


def shown(value: Any, widest: int = _WIDEST) -> str:
    """A value on one line of a terminal: JSON, nothing in it active, at most ``widest`` characters."""
    text = neutral_json(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= widest else f"{text[: widest - 1]}…"


def _text(report: JsonObject) -> Iterator[str]:
    yield f"task {report['task']}, profile {report['profile']}"
    yield f"trigger {report['trust']}: {report['trustReason']}"
    yield from _values(report["values"])
    yield ""
    yield "what the task may do"
    yield from _tool_lines(report)
    yield ""
    yield "policy"
    for rule in report["policy"]:
        yield from _rule_lines(rule, report["trust"])
    if not any(rule["decision"] == "allow" for rule in report["policy"]):
        yield "  no rule allows anything: every call is denied"
    else:
        yield "  what no rule allows is denied"
    yield ""
    yield "secrets"
    for secret in report["secrets"]:
        yield f"  {secret['name']}: {'set' if secret['set'] else 'not set'}"
    if not report["secrets"]:
        yield "  none"
    yield ""
    yield "files"
    for path in report["files"]:
        yield f"  {path}"
    yield ""
    yield "digests"
    for name, digest in report["digests"].items():
        yield f"  {name:<8}{digest}"


def _values(values: Mapping[str, JsonObject]) -> Iterator[str]:
    """One line for each value, under a heading for each section; origins in one column."""
    sections: dict[str, list[tuple[str, str, str]]] = {}
    for key, each in values.items():
        kind, _, rest = key.partition(".")
        name, dot, inner = rest.partition(".")
        heading = "task" if kind == "task" else name if dot else "profile"
        value = "none" if each["value"] is None else shown(each["value"])
        sections.setdefault(heading, []).append((rest if kind == "task" or not dot else inner, value, each["origin"]))
    names = max(len(name) for rows in sections.values() for name, _, _ in rows)
    widths = max(len(value) for rows in sections.values() for _, value, _ in rows)
    for heading, rows in sections.items():
        yield ""
        yield heading
        for name, value, origin in rows:
            yield f"  {name:<{names}}  {value:<{widths}}  {origin}"


def _tool_lines(report: JsonObject) -> Iterator[str]:
    """One line for each tool: what becomes of its calls in this run. Then what bounds those that run."""
    mode = report["values"]["profile.permission_mode"]["value"]
    tools = [tool for tool in report["tools"] if tool["offered"]]
    widest = max((len(tool["tool"]) for tool in tools), default=0)
    for tool in tools:
        yield f"  {tool['tool']:<{widest}}  {outcome_text({**tool, 'mode': mode})}"
    masked = [tool["tool"] for tool in report["tools"] if not tool["offered"]]
    if masked:
        yield f"  not offered, each call denied: {', '.join(masked)}"
    opaque = dict.fromkeys(rule for tool in tools for rule in tool["opaque"])
    if opaque:
        yield f"  {_OPAQUE}: {', '.join(opaque)}"
    yield f"  sandbox: {mode}, {_NARROW[mode]}"
    wider = dict.fromkeys(rule for tool in tools for rule in tool["escalated"])
    if wider:
        yield f"  but a call may ask for a wider mode for itself alone, by the rules {', '.join(wider)}"


def _rule_lines(rule: JsonObject, trust: str) -> Iterator[str]:
    """A rule on one line, or what it looks at below it where that gets too long."""
    escalated = f"asking for {' or '.join(rule['escalate'])}" if rule["escalate"] else ""
    remarks = [
        f"in {rule['mode']}" if rule["mode"] else "",
        f"{' and '.join(rule['trust'])} only" if rule["trust"] else "",
        "" if rule["trust"] is None or trust in rule["trust"] else "not in this run",
        escalated if rule["decision"] == "allow" or not escalated else f"also calls {escalated}",
        _OPAQUE if rule["opaque"] else "",
    ]
    head = f"  {rule['decision']:<5} {rule['id']}: {', '.join(rule['tools'])}"
    tail = "".join(f" ({remark})" for remark in remarks if remark)
    about = "; ".join(rule["about"])
    if len(head) + len(about) <= _LINE:
        yield f"{head}{f': {about}' if about else ''}{tail}"
    else:
        yield head + tail
        yield from (f"          {each}" for each in rule["about"])
