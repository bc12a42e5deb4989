"""``nightshift doctor``: which sandbox backends work on this machine, why others do not, what to do.

Tries each backend for real, in a workspace of its own below the temporary folder, with the default settings
or those of a profile. Changes nothing on the machine. Exit code 0 if a run would find a backend, else 3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from runner.neutral import neutral_json, neutral_text

if TYPE_CHECKING:
    from runner.permission import Mode
    from runner.sandbox.base import SandboxSpec
    from runner.sandbox.probe import ProbeReport


@click.command()
@click.option("--profile", metavar="NAME|FILE", help="Try with the sandbox settings of a profile.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, profile: str | None, as_json: bool) -> int:
    """Say which sandbox backends work here, why others do not, and what to do."""
    from runner.errors import ErrorCode
    from runner.permission import Mode
    from runner.sandbox.base import SandboxSpec
    from runner.sandbox.select import candidates, failure, probe_all

    spec, mode = (SandboxSpec(), Mode.WORKSPACE_WRITE) if profile is None else _settings(profile)
    reports = [(report, failure(report, spec.require)) for report in probe_all(spec, mode=mode)]
    usable = [report.backend for report, reason in reports if reason is None]
    chosen = next((name for name in candidates(spec) if name in usable), None)
    facts = {**_facts(), "profile": profile, "asked": spec.backend}
    if as_json:
        import json

        document = {**facts, "chosen": chosen, "backends": [_entry(*each) for each in reports]}
        click.echo(neutral_json(json.dumps(document, indent=2, ensure_ascii=False)))
    else:
        for line in _lines(facts, reports, chosen):
            click.echo(neutral_text(line))
    return ErrorCode.COMPLETED.exit_code if chosen else ErrorCode.SANDBOX_UNAVAILABLE.exit_code


def _settings(profile: str) -> tuple[SandboxSpec, Mode]:
    """The sandbox settings and the permission mode of a profile, as a run in a folder of its own would have them."""
    import os
    import tempfile
    from pathlib import Path

    from runner.config.resolve import load_run

    with tempfile.TemporaryDirectory(prefix="nightshift-probe-") as folder:
        run = load_run(
            task=None,
            prompt="none",
            profile=profile,
            workspace=folder,
            environ={key: value for key, value in os.environ.items() if key != "GITHUB_EVENT_PATH"},
            cwd=Path.cwd(),
            check_credentials=False,
        )
    return run.profile.sandbox, run.profile.mode


def _facts() -> dict[str, Any]:
    """What of the machine decides whether a sandbox works."""
    import os

    from runner.sandbox.cgroup import command_groups
    from runner.sandbox.landlock import kernel_abi
    from runner.sandbox.machine import read_machine

    system, machine = os.uname(), read_machine(os.environ)
    return {
        "schemaVersion": 1,
        "system": system.sysname,
        "kernel": system.release,
        "machine": system.machine,
        "user": os.geteuid(),
        "distribution": " ".join([*machine.distribution[:1], machine.version]).strip() or None,
        "container": machine.container,
        "landlockAbi": kernel_abi()[0] or None,
        "controlGroups": command_groups() is not None,
        "settings": dict(machine.settings),
    }


def _entry(report: ProbeReport, reason: str | None) -> dict[str, Any]:
    return {
        "backend": report.backend,
        "ok": reason is None,
        "reason": reason,
        "fix": report.fix,
        "output": report.output,
        "missing": list(report.missing),
        "notEnforced": list(report.not_enforced),
        "checks": dict(report.checks),
        "durationMs": round(report.duration * 1000, 1),
    }


def _lines(facts: dict[str, Any], reports: list[tuple[ProbeReport, str | None]], chosen: str | None) -> list[str]:
    abi = facts["landlockAbi"] or "none"
    lines = [
        f"{facts['system']} {facts['kernel']} on {facts['machine']}, user {facts['user']}",
        f"distribution: {facts['distribution'] or 'unknown'}, container: {facts['container'] or 'none'}",
        f"Landlock ABI: {abi}",
        f"a control group for each command: {'yes' if facts['controlGroups'] else 'no'}",
        *(f"{name}: {'not there' if value is None else value}" for name, value in facts["settings"].items()),
        "",
    ]
    for report, reason in reports:
        if report.ok:
            lines.append(f"{report.backend}: {reason or f'works ({report.duration * 1000:.0f} ms)'}")
            lines.append(f"  not enforced: {', '.join(report.not_enforced) or 'nothing is missing'}")
        else:
            lines.append(f"{report.backend}: does not work")
            lines.append(f"  reason: {reason}")
            if report.fix:
                lines.append(f"  fix: {report.fix}")
            lines += [f"  | {line}" for line in report.output.splitlines()[-10:]]
    came_to = f"chooses {chosen}" if chosen else "finds no backend"
    return [*lines, "", f"sandbox.backend: {facts['asked']} {came_to}"]
