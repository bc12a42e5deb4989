"""Cost and size of the session log's writer.

Writes a session of STEPS steps as the loop does, each event alone, and prints CPU time for one small append
and for a step at the start and at the end, and the file's size beside one zstd frame of the same bytes,
before and after the log is closed.

    python bench/bench_log.py [STEPS]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

import zstandard

from runner.session import events as ev
from runner.session.log import LOG_NAME, SessionLog
from runner.testing.sessions import SampleSession


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


def main() -> None:
    """Print the numbers."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
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
        decoded = subprocess.run(["zstd", "-dcq", path], check=True, capture_output=True).stdout
        frames = {level: len(zstandard.ZstdCompressor(level=level).compress(decoded)) for level in (3, 9, 19)}
        print(f"steps {steps}, decoded {len(decoded)} bytes, {session.log.next_seq} events")
        print(f"append of a small event  {append_cost() * 1e6:8.1f} µs CPU")
        print(f"step, first quarter      {sum(costs[:quarter]) / quarter * 1e6:8.1f} µs CPU")
        print(f"step, last quarter       {sum(costs[-quarter:]) / quarter * 1e6:8.1f} µs CPU")
        print(f"close                    {closing * 1e3:8.1f} ms CPU")
        for name, size in (("as written", live), ("closed", path.stat().st_size)):
            ratios = ", ".join(f"{size / frame:.2f} of level {level}" for level, frame in frames.items())
            print(f"{name:<12}{size:9} bytes: {ratios}")


if __name__ == "__main__":
    main()
