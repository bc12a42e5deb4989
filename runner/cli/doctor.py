"""``nightshift doctor``: which sandbox backends work on this machine, why others do not, what to do.

Tries each backend for real, in a workspace of its own below the temporary folder. Changes nothing
on the machine. Exit code 0 if at least one backend works, else 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from runner.neutral import neutral_json, neutral_text

if TYPE_CHECKING:
    from runner.sandbox.probe import ProbeReport

_SETTINGS = (
    "user.max_user_namespaces",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, as_json: bool) -> int:
    """Say which sandbox backends work here, why others do not, and what to do."""
    from runner.errors import ErrorCode
    from runner.sandbox.select import probe_all

    reports = probe_all()
    chosen = next((report.backend for report in reports if report.ok), None)
    facts = _facts()
    if as_json:
        import json

        document = {**facts, "chosen": chosen, "backends": [_entry(report) for report in reports]}
        click.echo(neutral_json(json.dumps(document, indent=2, ensure_ascii=False)))
    else:
        for line in _lines(facts, reports, chosen):
            click.echo(neutral_text(line))
    return ErrorCode.COMPLETED.exit_code if chosen else ErrorCode.SANDBOX_UNAVAILABLE.exit_code


def _facts() -> dict[str, Any]:
    """What of the machine decides whether a sandbox works."""
    import os

    from runner.sandbox.landlock import kernel_abi
    from runner.sandbox.probe import kernel_setting

    system = os.uname()
    return {
        "schemaVersion": 1,
        "system": system.sysname,
        "kernel": system.release,
        "machine": system.machine,
        "user": os.geteuid(),
        "landlockAbi": kernel_abi()[0] or None,
        "settings": {name: kernel_setting(name) for name in _SETTINGS},
    }


def _entry(report: ProbeReport) -> dict[str, Any]:
    return {
        "backend": report.backend,
        "ok": report.ok,
        "reason": report.reason,
        "fix": report.fix,
        "output": report.output,
        "missing": list(report.missing),
        "notEnforced": list(report.not_enforced),
        "checks": dict(report.checks),
        "durationMs": round(report.duration * 1000, 1),
    }


def _lines(facts: dict[str, Any], reports: list[ProbeReport], chosen: str | None) -> list[str]:
    abi = facts["landlockAbi"] or "none"
    lines = [
        f"{facts['system']} {facts['kernel']} on {facts['machine']}, user {facts['user']}",
        f"Landlock ABI: {abi}",
        *(f"{name}: {'not there' if value is None else value}" for name, value in facts["settings"].items()),
        "",
    ]
    for report in reports:
        if report.ok:
            lines.append(f"{report.backend}: works ({report.duration * 1000:.0f} ms)")
            lines.append(f"  not enforced: {', '.join(report.not_enforced) or 'nothing is missing'}")
        else:
            lines.append(f"{report.backend}: does not work")
            lines.append(f"  reason: {report.reason}")
            if report.fix:
                lines.append(f"  fix: {report.fix}")
            lines += [f"  | {line}" for line in report.output.splitlines()[-10:]]
    chosen_line = f"sandbox.backend: auto chooses {chosen}" if chosen else "sandbox.backend: auto finds no backend"
    return [*lines, "", chosen_line]
