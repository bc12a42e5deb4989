"""Measure what one confined command costs: python bench/bench_sandbox.py [ROUNDS].

Prints milliseconds for one ``true``: started by ``subprocess`` alone, run bare by this product, and under each
backend that works here, in ``workspace-write`` in a repository of its own; beside each the ratio to the bare one and
what it adds, with the aim. The kinds take turns within a round, so that what else the machine does meets all of them
alike.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runner.errors import SandboxError
from runner.permission import Mode
from runner.sandbox.base import BARE
from runner.sandbox.probe import BACKENDS
from runner.testing.sandbox import make_box

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.testing.sandbox import Box

TRUE = ["/bin/true"]
ADDED = {"bubblewrap": 15, "landlock": 20}
"""Most milliseconds that a backend may add to a command, on a quiet machine."""


def plain() -> None:
    """The least Python needs for a process."""
    subprocess.run(TRUE, stdin=subprocess.DEVNULL, capture_output=True, check=True, start_new_session=True)


def ours(box: Box) -> Callable[[], None]:
    """One command through the executor of a box."""
    mode = Mode.DANGER_FULL_ACCESS if box.backend == BARE else Mode.WORKSPACE_WRITE
    executor = box.executor(mode)

    def work() -> None:
        result = executor.run(TRUE, mode=mode, timeout=60, cancellation=box.cancellation)
        if result.exit_code != 0:
            raise SystemExit(f"{box.backend}: {result.output.decode(errors='replace')}")

    return work


def measure(kinds: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each kind, round by round; the first of each is not counted."""
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for number in range(rounds + 1):
        for name, work in kinds.items():
            began = time.perf_counter()
            work()
            if number:
                times[name].append((time.perf_counter() - began) * 1000)
    return times


def main() -> None:
    """Measure and print."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory(prefix="nightshift-bench-") as folder:
        boxes: list[Box] = []
        kinds: dict[str, Callable[[], None]] = {"subprocess": plain}
        for backend in (BARE, *BACKENDS):
            box = make_box(Path(os.path.realpath(folder)) / backend, backend)
            boxes.append(box)
            try:
                work = ours(box)
                work()
            except SandboxError as error:
                print(f"{backend}: not measured, {error.message}")
            else:
                kinds["bare" if backend == BARE else backend] = work
        times = measure(kinds, rounds)
        for box in boxes:
            box.close()
    bare = statistics.median(times["bare"])
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {rounds} rounds, ms for one `true`")
    print(f"{'':<12}{'least':>8}{'median':>8}{'ratio':>8}{'added':>8}  aim")
    for name, each in times.items():
        median = statistics.median(each)
        aim = ADDED.get(name)
        verdict = "" if aim is None else f"under {aim}: {'met' if median - bare < aim else 'MISSED'}"
        print(f"{name:<12}{min(each):8.1f}{median:8.1f}{median / bare:8.1f}{median - bare:8.1f}  {verdict}".rstrip())


if __name__ == "__main__":
    main()
