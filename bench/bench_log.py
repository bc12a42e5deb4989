"""Cost and size of the session log: reading a large one, and writing.

Generates a log of ``--size`` decoded bytes (see ``gen_log.py``; 1 GB takes a minute and a half and 0.7 GB of disk),
runs ``session verify``, ``export``, ``show`` and ``stats`` of the installed command on it, and prints time, speed
and the largest memory beside what is aimed at. Then writes a session of ``--steps`` steps as the loop does, each event
alone, and prints CPU time for one small append and for a step at the start and at the end, and the file's size beside
one zstd frame of the same bytes, before and after the log is closed.

    python bench/bench_log.py [--size 1G] [--rounds 1] [--log DIRECTORY] [--steps 200] [--check]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import zstandard
from gen_log import bytes_of

from runner.session import events as ev
from runner.session.header import LOG_NAME
from runner.session.log import SessionLog
from runner.session.store import open_session
from runner.testing.sessions import SampleSession

COMMAND = Path(sys.executable).with_name("nightshift")
SPEED = 60
"""Least megabytes of decoded log that each command reads in a second.

Of CPU or of the clock, whichever is more: other work on the machine makes the clock run."""

MEMORY = 200
"""Most megabytes that each command may take, as its largest resident size."""


class Run(NamedTuple):
    """One run of a command: seconds of CPU and of the clock, megabytes of memory, bytes it wrote."""

    cpu: float
    wall: float
    memory: float
    written: int


def run(command: list[str], output: Path, written: Path) -> Run:
    """Run a command with its output in a file; it must succeed."""
    began = time.monotonic()
    with output.open("wb") as stream:
        process = subprocess.Popen(command, stdout=stream)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)}: exit code {process.returncode}")
    wall = time.monotonic() - began
    return Run(used.ru_utime + used.ru_stime, wall, used.ru_maxrss * 1024 / 1e6, written.stat().st_size)


def readers(log: Path, scratch: Path, rounds: int) -> bool:
    """Print the table of the commands that read a log; whether all aims are met."""
    size = sum(len(line) + 1 for line in open_session(str(log)).raw_lines())
    output, archive = scratch / "output", scratch / "session.zip"
    commands = {
        "verify": ([str(log)], output),
        "export": ([str(log), "--output", str(archive)], archive),
        "show": ([str(log)], output),
        "stats": ([str(log)], output),
    }
    on_disk = (log / LOG_NAME).stat().st_size
    print(f"A log of {size / 1e6:.0f} MB, {on_disk / 1e6:.0f} MB on disk, the best of {rounds}:\n")
    print("| session | CPU, s | MB/s | wall, s | MB/s | aim | largest RSS, MB | aim | written, MB |")
    print("|---|---|---|---|---|---|---|---|---|")
    met = True
    for name, (arguments, written) in commands.items():
        runs = [run([str(COMMAND), "session", name, *arguments], output, written) for _ in range(rounds)]
        cpu, wall = min(one.cpu for one in runs), min(one.wall for one in runs)
        memory = max(one.memory for one in runs)
        fast, small = size / 1e6 / min(cpu, wall) >= SPEED, memory < MEMORY
        met = met and fast and small
        times = " | ".join(f"{seconds:.2f} | {size / 1e6 / seconds:.0f}" for seconds in (cpu, wall))
        verdicts = f"{SPEED}: {_verdict(met=fast)} | {memory:.0f} | under {MEMORY}: {_verdict(met=small)}"
        print(f"| {name} | {times} | {verdicts} | {runs[0].written / 1e6:.1f} |", flush=True)
    return met


def _verdict(*, met: bool) -> str:
    return "met" if met else "MISSED"


def clock() -> int:
    """Epoch milliseconds."""
    return time.time_ns() // 1_000_000


def append_cost(count: int = 5000) -> float:
    """Seconds of CPU for one append of a small event."""
    with (
        tempfile.TemporaryDirectory() as folder,
        SessionLog.create(Path(folder), header={"id": "session-bench", "cwd": "/w"}, clock=clock) as log,
    ):
        before = time.thread_time()
        for number in range(count):
            log.append(ev.LimitReached(name="steps", used=number, max=count, percent=90))
        return (time.thread_time() - before) / count


def writer(steps: int) -> None:
    """Print what writing costs."""
    with tempfile.TemporaryDirectory() as folder:
        session = SampleSession(Path(folder), bodies=False)
        session.begin()
        session.start_turn()
        costs = []
        for _ in range(steps):
            before = time.thread_time()
            session.step(words=30)
            costs.append(time.thread_time() - before)
        quarter = max(1, steps // 4)
        path = Path(folder) / LOG_NAME
        live = path.stat().st_size
        before = time.thread_time()
        session.log.close()
        closing = time.thread_time() - before
        decoded = b"".join(line + b"\n" for line in open_session(folder).raw_lines())
        frames = {level: len(zstandard.ZstdCompressor(level=level).compress(decoded)) for level in (3, 9, 19)}
        print(f"Writing {steps} steps, {len(decoded)} decoded bytes, {session.log.next_seq} events:\n")
        print("| | |\n|---|---|")
        print(f"| append of a small event, µs of CPU | {append_cost() * 1e6:.1f} |")
        print(f"| step, first quarter, µs of CPU | {sum(costs[:quarter]) / quarter * 1e6:.1f} |")
        print(f"| step, last quarter, µs of CPU | {sum(costs[-quarter:]) / quarter * 1e6:.1f} |")
        print(f"| close, ms of CPU | {closing * 1e3:.1f} |")
        for name, size in (("as written", live), ("closed", path.stat().st_size)):
            ratios = ", ".join(f"{size / frame:.2f} of level {level}" for level, frame in frames.items())
            print(f"| {name}, bytes | {size}: {ratios} |")


def main() -> int:
    """Measure and print; with ``--check`` the exit code is 1 if an aim was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--size", type=bytes_of, default=bytes_of("1G"), help="decoded bytes; 0 measures the writer only"
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--log", type=Path, help="an artifacts directory to read in place of a generated log")
    parser.add_argument("--steps", type=int, default=200, help="steps that are written; 0 measures the readers only")
    parser.add_argument("--check", action="store_true", help="fail if an aim is missed")
    options = parser.parse_args()
    met = True
    if options.log is not None or options.size:
        with tempfile.TemporaryDirectory() as folder:
            log = options.log
            if log is None:
                log = Path(folder) / "log"
                # In a process of its own: a child's largest memory is never less than its parent's at the start.
                generator = Path(__file__).with_name("gen_log.py")
                subprocess.run([sys.executable, generator, log, "--size", str(options.size)], check=True)
            met = readers(log, Path(folder), options.rounds)
            print()
    if options.steps:
        writer(options.steps)
    return int(options.check and not met)


if __name__ == "__main__":
    sys.exit(main())
