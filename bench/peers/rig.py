"""Runs agent harnesses on identical scripted work against ``mock_model.py``, and measures them.

A runner is a function that gives the command line for one run. For each round the order is: for N in the step
counts, for each runner, so that a drifting machine hits all of them. A run gets a copy of the runner's own HOME
as uncounted warm-up runs left it, and a new empty git work directory.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PROMPT = "Do the task step by step with the shell, then say that you are done."
KEPT_VARIABLES = ("PATH", "LANG", "TERM", "TZ", "SSL_CERT_FILE")

JsonObject = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Where one run happens. ``url`` is the model server's address without a path."""

    url: str
    home: Path
    work: Path
    root: Path | None = None
    prompt: str = PROMPT


Command = tuple[list[str], Mapping[str, str]]
"""Command line and further environment variables."""

Runner = Callable[[Place], Command]


@dataclass(frozen=True)
class Settings:
    """How runs are made. ``latency`` in ms, ``timeout`` in seconds, ``output_bytes`` of each command."""

    steps: Sequence[int] = (5, 50, 200)
    rounds: int = 3
    warm_steps: int = 8
    output_bytes: int = 1000
    latency: float = 0
    timeout: float = 240
    root: Path | None = None
    sample_last: bool = False
    keep: bool = False
    scratch: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="peers-")))


def floor(place: Place) -> Command:
    """The least a Python loop can do."""
    log = place.home / "floor.jsonl"
    return [sys.executable, str(HERE / "floor_loop.py"), f"{place.url}/v1", place.prompt, str(log)], {}


@contextlib.contextmanager
def mock_model() -> Iterator[str]:
    """A model server of its own process; yields its address."""
    process = subprocess.Popen(
        [sys.executable, str(HERE / "mock_model.py"), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        yield found[0]
    finally:
        process.terminate()
        process.wait()


def ask(url: str, *, post: bool = False) -> Any:
    """One control request to the model server."""
    request = urllib.request.Request(url, method="POST" if post else "GET", data=b"" if post else None)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def file_sizes(top: Path) -> dict[str, int]:
    """Size of every regular file below ``top``."""
    sizes = {}
    for path in top.rglob("*"):
        with contextlib.suppress(OSError):
            if path.is_file() and not path.is_symlink():
                sizes[str(path.relative_to(top))] = path.stat().st_size
    return sizes


def tree_memory(pid: int) -> int:
    """Sum of RSS over a process and its descendants, in KiB; a shared page counts once a process."""
    total, pending = 0, [pid]
    while pending:
        folder = Path(f"/proc/{pending.pop()}")
        with contextlib.suppress(OSError, ValueError):
            total += int((folder / "statm").read_text().split()[1]) * 4
            for task in (folder / "task").iterdir():
                pending += map(int, (task / "children").read_text().split())
    return total


@dataclass
class Watched:
    """A started process, killed when its time is over, its tree's memory sampled if asked for."""

    command: Sequence[str]
    work: Path
    environment: Mapping[str, str]
    output: Path
    timeout: float
    sample: bool
    timed_out: bool = False
    peak: int = 0

    def run(self) -> tuple[float, float, int, Any]:
        """Start and end on CLOCK_MONOTONIC, exit code, resource usage of it and of all it waited for."""
        over = threading.Event()
        with self.output.open("wb") as output:
            began = time.monotonic()
            process = subprocess.Popen(
                self.command,
                cwd=self.work,
                env=dict(self.environment),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )

            def kill() -> None:
                self.timed_out = True
                with contextlib.suppress(OSError):
                    os.killpg(process.pid, signal.SIGKILL)

            def watch() -> None:
                while not over.wait(0.05):
                    self.peak = max(self.peak, tree_memory(process.pid))

            timer = threading.Timer(self.timeout, kill)
            timer.start()
            if self.sample:
                threading.Thread(target=watch, daemon=True).start()
            _, status, used = os.wait4(process.pid, 0)
            ended = time.monotonic()
            over.set()
            timer.cancel()
            process.returncode = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(OSError):
                os.killpg(process.pid, signal.SIGKILL)  # what the run left behind in its own group
        return began, ended, process.returncode, used


def environment_for(home: Path, top: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The same few variables for every runner; the package registry is out of reach while it is measured."""
    own = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    return {
        **own,
        "HOME": str(home),
        "TMPDIR": str(top),
        "OPENAI_API_KEY": "sk-test",
        "ANTHROPIC_API_KEY": "sk-test",
        "NO_COLOR": "1",
        "CI": "1",
        "npm_config_registry": "http://127.0.0.1:9/",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "no_proxy": "127.0.0.1,localhost",
        "NO_PROXY": "127.0.0.1,localhost",
        **extra,
    }


def _median_ms(gaps: Sequence[float]) -> float | None:
    return round(statistics.median(gaps) * 1e3, 2) if gaps else None


def one_run(
    settings: Settings, name: str, runner: Runner, url: str, steps: int, warm: Path, *, sample: bool
) -> JsonObject:
    """One measured run of ``steps`` steps."""
    top = Path(tempfile.mkdtemp(prefix=f"{name.replace(' ', '-')}-", dir=settings.scratch))
    home, work = top / "home", top / "work"
    work.mkdir()
    if warm.is_dir():
        shutil.copytree(warm, home, symlinks=True)
    else:
        home.mkdir()
    subprocess.run(["git", "init", "-q", str(work)], check=True)
    command, extra = runner(Place(url, home, work, settings.root))
    query = f"steps={steps}&output_bytes={settings.output_bytes}&latency={settings.latency}"
    ask(f"{url}/__reset?{query}", post=True)
    before = file_sizes(home)
    watched = Watched(command, work, environment_for(home, top, extra), top / "output.log", settings.timeout, sample)
    began, ended, code, used = watched.run()
    record = ask(f"{url}/__stats")
    requests = record.pop("requests")
    main = [request for request in requests if request["kind"] == "main"]
    model = [request for request in requests if request["kind"] in ("main", "side")]
    gaps = [later["t"] - earlier["t"] for earlier, later in pairwise(main)]
    quarter = max(1, len(gaps) // 4)
    grown = {path: size - before.get(path, 0) for path, size in file_sizes(home).items()}
    grown = {path: size for path, size in grown.items() if size > 0}
    result = {
        "peer": name,
        "steps": steps,
        "rc": code,
        "timed_out": watched.timed_out,
        "wall_s": round(ended - began, 4),
        "user_s": round(used.ru_utime, 3),
        "sys_s": round(used.ru_stime, 3),
        "maxrss_mb": round(used.ru_maxrss / 1024, 1),
        "tree_rss_mb": round(watched.peak / 1024, 1) if sample else None,
        "first_model_s": round(model[0]["t"] - began, 4) if model else None,
        "tail_s": round(ended - main[-1]["t"], 4) if main else None,
        "gap_ms": _median_ms(gaps),
        "gap_first_ms": _median_ms(gaps[:quarter]),
        "gap_last_ms": _median_ms(gaps[-quarter:]),
        "log_bytes": sum(grown.values()),
        "log_top": sorted(grown.items(), key=lambda item: -item[1])[:4],
        **record,
    }
    result["ok"] = code == 0 and record["main"] >= steps + 1
    if not result["ok"]:
        result["output_tail"] = watched.output.read_bytes()[-1200:].decode("utf-8", "replace")
    if settings.keep:
        result["dir"] = str(top)
    else:
        shutil.rmtree(top, ignore_errors=True)
    return result


def warm_home(settings: Settings, name: str, runner: Runner, url: str) -> Path:
    """The HOME that uncounted runs leave; what later runs copy.

    Some runners download or unpack parts of themselves in the background of their first runs, so this repeats
    until a run adds less than a MiB that is no log, four times at most.
    """
    home = settings.scratch / "warm" / name
    home.parent.mkdir(parents=True, exist_ok=True)
    kept = Settings(**{**vars(settings), "keep": True})
    for _ in range(4):
        run = one_run(kept, name, runner, url, settings.warm_steps, home, sample=False)
        shutil.rmtree(home, ignore_errors=True)
        shutil.copytree(Path(run["dir"]) / "home", home, symlinks=True)
        shutil.rmtree(run["dir"], ignore_errors=True)
        if not run["ok"]:
            raise SystemExit(
                f"{name} does not work here: exit code {run['rc']}, {run['main']} requests\n{run['output_tail']}"
            )
        print(f"# warm {name}: {run['main']} requests in {run['wall_s']} s", file=sys.stderr)
        unpacked = sum(
            size for path, size in run["log_top"] if not any(word in path for word in ("sqlite", ".db", "log", "zip"))
        )
        if unpacked < 1 << 20:
            break
    return home


def measure(settings: Settings, runners: Mapping[str, Runner], out: Path | None = None) -> list[JsonObject]:
    """All rounds; the results are also written to ``out`` as they come."""
    rows: list[JsonObject] = []
    with mock_model() as url:
        homes = {name: warm_home(settings, name, runner, url) for name, runner in runners.items()}
        for turn in range(settings.rounds):
            for steps in settings.steps:
                for name, runner in runners.items():
                    sample = settings.sample_last and turn == settings.rounds - 1
                    row = one_run(settings, name, runner, url, steps, homes[name], sample=sample)
                    row["round"] = turn
                    rows.append(row)
                    print(
                        f"# {turn} {name} N={steps} ok={row['ok']} wall={row['wall_s']:.2f} "
                        f"first={row['first_model_s']} cpu={row['user_s'] + row['sys_s']:.2f} rss={row['maxrss_mb']}"
                        + (f" {row['output_tail']!r}" if not row["ok"] else ""),
                        file=sys.stderr,
                    )
                    if out is not None:
                        out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return rows


# --- what the results say --------------------------------------------------------------------------


class Results:
    """Medians over the successful runs of one runner."""

    def __init__(self, rows: Sequence[JsonObject], name: str) -> None:
        self.name = name
        self.rows = [row for row in rows if row["peer"] == name]
        self.good = [row for row in self.rows if row["ok"]]
        self.steps = sorted({row["steps"] for row in self.rows})

    def at(self, steps: int, key: str) -> float:
        """Median of one figure at one number of steps, not a number where there is none."""
        found = [row[key] for row in self.good if row["steps"] == steps and row[key] is not None]
        return statistics.median(found) if found else float("nan")

    def first_request(self) -> float:
        """Seconds from exec to the first model request."""
        found = [row["first_model_s"] for row in self.good if row["first_model_s"] is not None]
        return statistics.median(found) if found else float("nan")

    def cpu(self, steps: int) -> float:
        """Seconds of user and system time of a whole run."""
        found = [row["user_s"] + row["sys_s"] for row in self.good if row["steps"] == steps]
        return statistics.median(found) if found else float("nan")

    def cpu_per_step(self, fewer: int, more: int) -> float:
        """Milliseconds of CPU a step, between two numbers of steps."""
        return (self.cpu(more) - self.cpu(fewer)) / (more - fewer) * 1e3

    def wall_per_step(self, fewer: int, more: int) -> float:
        """Milliseconds of wall time a step, between two numbers of steps."""
        return (self.at(more, "wall_s") - self.at(fewer, "wall_s")) / (more - fewer) * 1e3


def number(value: float, digits: int = 2) -> str:
    """A figure of a table; a dash for what is not known."""
    return "-" if value != value else f"{value:.{digits}f}"  # noqa: PLR0124  # how a missing number is told


def table(rows: Sequence[JsonObject]) -> str:
    """All runners in one Markdown table."""
    names = list(dict.fromkeys(row["peer"] for row in rows))
    steps = sorted({row["steps"] for row in rows})
    pairs = list(pairwise(steps))
    last = steps[-1]
    head = [
        "peer",
        "first req s",
        *(f"wall N={count} s" for count in steps),
        *(f"slope {fewer}-{more} ms/step" for fewer, more in pairs),
        f"gap first > last quarter N={last} ms",
        "cpu ms/step",
        "max RSS MB",
        "tree RSS MB",
        "req KB first > last",
        "byte prefix",
        "prompt prefix",
        "kept",
        f"log KB N={last}",
        "side/other",
        "ok",
    ]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for name in names:
        one = Results(rows, name)
        cells = [
            name,
            number(one.first_request()),
            *(number(one.at(count, "wall_s")) for count in steps),
            *(number(one.wall_per_step(fewer, more), 1) for fewer, more in pairs),
            f"{number(one.at(last, 'gap_first_ms'), 1)} > {number(one.at(last, 'gap_last_ms'), 1)}",
            number(one.cpu_per_step(steps[0], last), 1) if len(steps) > 1 else "-",
            number(one.at(last, "maxrss_mb"), 0),
            number(one.at(last, "tree_rss_mb"), 0),
            f"{number(one.at(last, 'first_bytes') / 1e3, 1)} > {number(one.at(last, 'last_bytes') / 1e3, 1)}",
            number(one.at(last, "lcp_frac"), 3),
            number(one.at(last, "prompt_lcp_frac"), 3),
            number(one.at(last, "prompt_kept_frac"), 3),
            number(one.at(last, "log_bytes") / 1e3, 0),
            f"{number(one.at(last, 'side'), 0)}/{number(one.at(last, 'other'), 0)}",
            f"{len(one.good)}/{len(one.rows)}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
