"""A long scripted session with the installed command: CPU and memory a step, by fifths.

A step costs what is new in it, so the last thousand steps of five cost what the first do. The answers come from a
script, the calls are cheap ones that need no sandbox, and nothing is compacted, so the history only grows. CPU and
memory are those of the command's own process, read when a fifth of the steps is over; the file worker is left out.

    python bench/bench_steps.py [--steps 5000] [--check]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

COMMAND = Path(sys.executable).with_name("nightshift")
FLAT = 1.25
"""Most that a step of the last fifth may cost beside one of the first."""

_TICK = os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Sample(NamedTuple):
    """What a process has used: steps, seconds of CPU, megabytes of memory."""

    steps: int
    cpu: float
    memory: float


def script(steps: int) -> str:
    """A script of ``steps`` calls and a final answer."""
    lines = ["version: 1", "responses:"]
    usage = "usage: {input: 100, cacheRead: 1000, output: 30}"
    for number in range(steps):
        call = f"{{tool: read_file, args: {{path: notes.txt, limit: {number + 1}}}}}"
        if number % 2:
            call = f"{{tool: todo, args: {{todos: [{{content: step {number}, status: pending}}]}}}}"
        lines.append(f"- {{calls: [{call}], {usage}}}")
    return "\n".join([*lines, f"- {{text: done, {usage}}}", ""])


def sample(pid: int, steps: int) -> Sample:
    """What the process ``pid`` has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return Sample(steps, (int(fields[11]) + int(fields[12])) / _TICK, pages * _PAGE / 1e6)


def measure(folder: Path, steps: int) -> list[Sample]:
    """Run the session; samples at its first answer and behind each fifth."""
    work = folder / "work"
    work.mkdir()
    (work / "notes.txt").write_text("a line\n" * 20)
    (folder / "steps.script.yaml").write_text(script(steps))
    settings = {
        "permission_mode": "danger-full-access",
        "model.provider": "scripted",
        "model.script": str(folder / "steps.script.yaml"),
        "model.context_window": 1_000_000_000,
        "limits.steps": 2 * steps,
    }
    command = [str(COMMAND), "run", "--prompt", "Go on.", "--profile", "eval", "--output-format", "stream-json"]
    command += ["--workspace", str(work), "--artifacts", str(folder / "artifacts")]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    marks = [1, *(steps * fifth // 5 for fifth in range(1, 6))]
    samples: list[Sample] = []
    answers = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        for line in process.stdout:
            answers += json.loads(line).get("type") == "assistant"
            if len(samples) < len(marks) and answers == marks[len(samples)]:
                samples.append(sample(process.pid, answers))
    if process.returncode:
        raise SystemExit(f"the session ended with exit code {process.returncode}")
    return samples


def main() -> int:
    """Measure and print; with ``--check`` the exit code is 1 if the last fifth costs more."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--check", action="store_true", help="fail if a step of the last fifth costs more")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(Path(folder), options.steps)
    costs = []
    print("| steps | CPU a step, ms | RSS at the end, MB |\n|---|---|---|")
    for before, after in itertools.pairwise(samples):
        costs.append((after.cpu - before.cpu) / (after.steps - before.steps) * 1000)
        print(f"| {before.steps} to {after.steps} | {costs[-1]:.2f} | {after.memory:.0f} |")
    ratio = costs[-1] / costs[0]
    print(f"\nlast fifth beside the first: {ratio:.2f}, at most {FLAT}: {'met' if ratio <= FLAT else 'MISSED'}")
    return int(options.check and ratio > FLAT)


if __name__ == "__main__":
    sys.exit(main())
