"""Reference costs of a machine: interpreter and imports, a shell, bwrap, appending with and without a sync, JSON, zstd.

Minimum, median, maximum of each; CPU in ms where a process is started. The libraries are those of the interpreter
that runs this.

usage: floors.py [--runs 9] [--mb 100] [--dir DIR_ON_THE_DISK_TO_TEST]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson
import zstandard

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

IMPORTS = (
    "httpx",
    "httpcore",
    "pydantic",
    "yaml",
    "click",
    "structlog",
    "zstandard",
    "orjson",
    "jsonschema_rs",
    "tree_sitter, tree_sitter_bash",
    "argparse",
    "asyncio",
    "http.client",
    "httpx, pydantic, yaml, click, structlog, zstandard",
)
EVENT: dict[str, Any] = {
    "type": "tool/result",
    "seq": 12345,
    "time": 1796048774318,
    "data": {
        "turn": 1,
        "step": 17,
        "message": {"role": "user", "content": [], "source": {"kind": "tool", "callId": "call_000017"}, "id": "m-17"},
        "meta": {"durationMs": 4, "exitCode": 0, "mode": "workspace-write", "bytes": 812, "truncated": False},
    },
    "sourceEventSeqs": [12340],
    "surfaceOp": "append",
}
FLUSHES = {
    "never": 0,
    "a block flush an event": 1,
    "a block flush every 16 events": 16,
    "one frame an event": -1,
    "one frame every 64 events": -64,
}


class Spawned(NamedTuple):
    """What one process cost: ms, ms, MB."""

    wall: float
    cpu: float
    memory: float
    code: int


def spread(values: Sequence[float]) -> str:
    """Minimum, median, maximum."""
    return f"{min(values):.3f} / {statistics.median(values):.3f} / {max(values):.3f}" if values else "-"


def row(name: str, wall: Sequence[float], cpu: Sequence[float] = (), unit: str = "ms", note: str = "") -> None:
    """Print one row of the table."""
    print(f"| {name} | {spread(wall)} | {spread(cpu)} | {unit} | {note} |", flush=True)


def spawn(command: Sequence[str]) -> Spawned:
    """Run one process to its end."""
    began = time.monotonic()
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Spawned(
        (time.monotonic() - began) * 1e3,
        (used.ru_utime + used.ru_stime) * 1e3,
        used.ru_maxrss / 1024,
        process.returncode,
    )


def processes(runs: int) -> None:
    """Interpreter, imports, shell, bwrap; in turn, so that a drifting machine hits all of them."""
    python = sys.executable
    cases: dict[str, list[str]] = {
        "python": [python, "-c", "pass"],
        "python -I -S": [python, "-I", "-S", "-c", "pass"],
        "sh -c true": ["sh", "-c", "true"],
    }
    if shutil.which("bwrap"):
        root = ["bwrap", "--ro-bind", "/", "/", "--dev", "/dev"]
        apart = ["--proc", "/proc", "--tmpfs", "/tmp", "--unshare-all", "--die-with-parent"]
        cases["bwrap, all namespaces, sh -c true"] = [*root, *apart, "sh", "-c", "true"]
        cases["bwrap, no namespace but mounts, sh -c true"] = [*root, "sh", "-c", "true"]
    cases.update({f"python, import {names}": [python, "-c", f"import {names}"] for names in IMPORTS})
    found: dict[str, list[Spawned]] = {name: [] for name in cases}
    for _ in range(runs):
        for name, command in cases.items():
            found[name].append(spawn(command))
    for name, spawned in found.items():
        codes = {one.code for one in spawned}
        note = f"{max(one.memory for one in spawned):.0f} MB" + ("" if codes == {0} else f", exit codes {codes}")
        row(name, [one.wall for one in spawned], [one.cpu for one in spawned], note=note)


def appending(folder: Path) -> None:
    """One line, with and without a sync."""
    line = b"x" * 299 + b"\n"
    syncs: dict[str, Callable[[int], None] | None] = {"no sync": None, "fdatasync": os.fdatasync, "fsync": os.fsync}
    for name, sync in syncs.items():
        descriptor = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        taken = []
        for _ in range(200):
            began = time.monotonic()
            os.write(descriptor, line)
            if sync is not None:
                sync(descriptor)
            taken.append((time.monotonic() - began) * 1e3)
        os.close(descriptor)
        row(f"append 300 bytes, {name}", taken)


def writing_json() -> None:
    """An event of 1 KB."""
    event = {**EVENT, "filler": "src/pkg/module.py:10:def main():\n" * 19}
    writers: dict[str, Callable[[], object]] = {
        "json.dumps": lambda: json.dumps(event),
        "json.dumps, compact and sorted": lambda: json.dumps(event, separators=(",", ":"), sort_keys=True),
        "orjson.dumps": lambda: orjson.dumps(event),
        "orjson.dumps, sorted": lambda: orjson.dumps(event, option=orjson.OPT_SORT_KEYS),
    }
    for name, write in writers.items():
        taken = []
        for _ in range(9):
            began = time.process_time()
            for _ in range(3000):
                write()
            taken.append((time.process_time() - began) / 3000 * 1e6)
        row(f"{name}, an event of 1 KB", taken, unit="µs CPU")


def log_lines(size: int) -> list[bytes]:
    """Lines of about 1 KB with text that is not all alike, ``size`` bytes together."""
    chance = random.Random(1)
    words = [f"{chance.getrandbits(chance.choice((12, 20, 28))):x}" for _ in range(4000)]
    lines: list[bytes] = []
    total = 0
    while total < size:
        event = {**EVENT, "seq": len(lines), "text": " ".join(chance.choices(words, k=110))}
        lines.append(orjson.dumps(event) + b"\n")
        total += len(lines[-1])
    return lines


def squeeze(lines: list[bytes], every: int) -> tuple[float, float, int]:
    """Compress all lines; ms of wall and CPU, bytes. Positive: flushes; negative: frames."""
    began, began_cpu, size = time.monotonic(), time.process_time(), 0
    if every >= 0:
        stream = zstandard.ZstdCompressor(level=3).compressobj()
        for number, line in enumerate(lines, 1):
            size += len(stream.compress(line))
            if every and number % every == 0:
                size += len(stream.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        size += len(stream.flush())
    else:
        compressor = zstandard.ZstdCompressor(level=3)
        for start in range(0, len(lines), -every):
            size += len(compressor.compress(b"".join(lines[start : start - every])))
    return (time.monotonic() - began) * 1e3, (time.process_time() - began_cpu) * 1e3, size


def compressing(runs: int, megabytes: int) -> None:
    """A log, compressed with more and fewer flushes; in turn."""
    lines = log_lines(megabytes * 1_000_000)
    total = sum(map(len, lines))
    found: dict[str, list[tuple[float, float, int]]] = {name: [] for name in FLUSHES}
    for _ in range(min(runs, 5)):
        for name, every in FLUSHES.items():
            found[name].append(squeeze(lines, every))
    for name, rows in found.items():
        seconds = statistics.median(cpu for _, cpu, _ in rows) / 1e3
        note = (
            f"ratio {total / rows[0][2]:.2f}, {total / 1e6 / seconds:.0f} MB/s CPU, "
            f"{seconds / len(lines) * 1e6:.1f} µs an event"
        )
        row(
            f"zstd -3, {megabytes} MB of log, flush: {name}",
            [one[0] for one in rows],
            [one[1] for one in rows],
            note=note,
        )


def main() -> None:
    """Print one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--mb", type=int, default=100)
    parser.add_argument("--dir", type=Path)
    options = parser.parse_args()
    print("| what | wall min / median / max | CPU min / median / max | unit | note |\n|---|---|---|---|---|")
    processes(options.runs)
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        appending(Path(folder))
    writing_json()
    compressing(options.runs, options.mb)


if __name__ == "__main__":
    main()
