"""Measures nightshift beside the least Python loop, in one run, and prints ratios. ``make bench``.

Both do the same scripted work against a model server on loopback: N shell calls, then a final text. nightshift
runs with the profile ``eval`` and without a sandbox, so that the loop is measured and not bubblewrap; ``--sandboxed``
adds a second row with one. CPU is what the system accounts to the process and the children it waited for, and a
step's is a slope between two numbers of steps, so that the start does not count. On a busy machine CPU is the
figure to look at; wall times are not.

usage: run.py [--steps 5,50,200] [--rounds 3] [--sandboxed] [--no-imports] [--out FILE] [--check]
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import uuid
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from rig import Place, Results, Settings, environment_for, floor, measure, mock_model, number, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rig import Command, Runner

COMMAND = Path(sys.executable).with_name("nightshift")


class Aim(NamedTuple):
    """One figure, what the floor has, and the most it may be."""

    name: str
    ours: float
    floor: float
    most: float
    unit: str


def nightshift(place: Place, mode: str) -> Command:
    """One run of the installed command."""
    settings = {
        "permission_mode": mode,
        "model.provider": "openai",
        "model.base_url": f"{place.url}/v1",
        "model.model": "mock",
        "model.api_key_env": "OPENAI_API_KEY",
    }
    artifacts = place.home / f"artifacts-{uuid.uuid4().hex}"
    return [
        str(COMMAND),
        "run",
        *("--prompt", place.prompt, "--profile", "eval"),
        *("--workspace", str(place.work), "--artifacts", str(artifacts)),
        *(word for key, value in settings.items() for word in ("--set", f"{key}={value}")),
    ], {}


def aims(ours: Results, least: Results) -> list[Aim]:
    """What is aimed at. A first request may take 1.25 times codex's, which is 2.9 times the floor's."""
    first, *_, last = ours.steps
    middle = ours.steps[-2]
    return [
        Aim("CPU a step, ms", ours.cpu_per_step(first, last), least.cpu_per_step(first, last), 2.5, "times the floor"),
        Aim("exec to first request, s", ours.first_request(), least.first_request(), 3.65, "times the floor"),
        Aim(
            f"CPU a step, {middle} to {last} steps beside {first} to {middle}, ms",
            ours.cpu_per_step(middle, last),
            ours.cpu_per_step(first, middle),
            1.25,
            "times",
        ),
        Aim("largest RSS, MB", ours.at(last, "maxrss_mb"), 1.0, 70.0, "MB"),
    ]


def ratios(found: Sequence[Aim]) -> str:
    """The aims as a Markdown table."""
    lines = ["| | nightshift | beside | ratio | aim |", "|---|---|---|---|---|"]
    for aim in found:
        beside = "-" if aim.unit == "MB" else number(aim.floor)
        ratio = aim.ours / aim.floor
        verdict = "met" if ratio <= aim.most else "MISSED"
        lines.append(
            f"| {aim.name} | {number(aim.ours)} | {beside} | {number(ratio)} | "
            f"at most {aim.most:g} {aim.unit}: {verdict} |"
        )
    return "\n".join(lines)


def imports(settings: Settings) -> str:
    """Where the start goes: time of each package's modules alone, as the interpreter counts it, in a short run."""
    with mock_model() as url:
        top = settings.scratch / "imports"
        place = Place(url, top / "home", top / "work")
        place.home.mkdir(parents=True)
        place.work.mkdir()
        subprocess.run(["git", "init", "-q", str(place.work)], check=True)
        command, extra = nightshift(place, "danger-full-access")
        # The interpreter of the installed command reads no variables of its own.
        command = [sys.executable, "-E", "-P", "-X", "importtime", "-m", "runner", *command[1:]]
        environment = environment_for(place.home, top, extra)
        done = subprocess.run(command, cwd=place.work, env=environment, capture_output=True, text=True, check=True)
    spent: Counter[str] = Counter()
    for line in done.stderr.splitlines():
        if line.startswith("import time:") and "[us]" not in line:
            alone, _, module = line.removeprefix("import time:").split("|")
            spent[module.strip().partition(".")[0]] += int(alone)
    lines = [
        f"Imports of a whole run: {sum(spent.values()) / 1000:.0f} ms, measuring included. The largest packages:",
        "",
        "| package | ms |",
        "|---|---|",
    ]
    return "\n".join([*lines, *(f"| {name} | {micros / 1000:.1f} |" for name, micros in spent.most_common(16))])


def main() -> int:
    """Measure and print; the exit code is 1 if a run failed, or with ``--check`` if an aim was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default="5,50,200", help="at least three numbers")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sandboxed", action="store_true", help="add a row for workspace-write with a sandbox")
    parser.add_argument("--no-imports", action="store_true", help="leave the table of imports out")
    parser.add_argument("--out", type=Path, help="write every run's figures there as JSON")
    parser.add_argument("--check", action="store_true", help="fail if an aim is missed")
    options = parser.parse_args()
    steps = tuple(sorted(set(map(int, options.steps.split(",")))))
    if len(steps) < 3:
        parser.error("--steps wants at least three numbers")
    settings = Settings(steps=steps, rounds=options.rounds)
    runners: dict[str, Runner] = {"floor": floor, "nightshift": lambda place: nightshift(place, "danger-full-access")}
    if options.sandboxed:
        runners["nightshift, sandboxed"] = lambda place: nightshift(place, "workspace-write")
    rows = measure(settings, runners, options.out)
    found = aims(Results(rows, "nightshift"), Results(rows, "floor"))
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds\n")
    print(table(rows) + "\n")
    print(ratios(found) + "\n")
    if not options.no_imports:
        print(imports(settings))
    failed = not all(row["ok"] for row in rows)
    missed = any(not aim.ours / aim.floor <= aim.most or math.isnan(aim.ours) for aim in found)
    return int(failed or (options.check and missed))


if __name__ == "__main__":
    sys.exit(main())
