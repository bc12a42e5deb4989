"""``read_file``, ``glob`` and ``grep`` of one reply run side by side, in the confined worker, and nothing else does."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.agent.hook import Hook
from runner.cancellation import Cancellation
from runner.config.resolve import load_run
from runner.run import FinishedRun, RunOptions, run_task
from runner.tools.builtin.files import ReadFile
from runner.tools.builtin.search import Glob, Grep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from conftest import MakeRepo, ScriptedTask

    from runner.tools.base import Invocation, ToolOutcome
    from runner.tools.pipeline import PreparedCall

pytestmark = pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])

DONE: dict[str, Any] = {"text": "Done."}
READS: list[dict[str, Any]] = [
    {"tool": "read_file", "args": {"path": "src/a.txt"}},
    {"tool": "glob", "args": {"pattern": "src/*"}},
    {"tool": "grep", "args": {"pattern": "one"}},
]


class Meeting(Hook):
    """Holds every call that ran until ``parties`` of them have."""

    def __init__(self, parties: int) -> None:
        self.met = 0
        self._barrier = threading.Barrier(parties)

    def after_tool(self, call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
        try:
            self._barrier.wait(20)
            self.met += 1
        except threading.BrokenBarrierError:
            self._barrier.reset()
        return None


def run(task: Path, workspace: Path, artifacts: Path, hooks: Sequence[Hook]) -> FinishedRun:
    """Run a task in this process."""
    spec = load_run(task=task, prompt=None, profile=None, workspace=str(workspace), environ=os.environ, cwd=Path("/"))
    cancellation = Cancellation()
    try:
        return run_task(
            spec, RunOptions(artifacts=artifacts, hooks=hooks), environ=os.environ, cancellation=cancellation
        )
    finally:
        cancellation.close()


def test_reads_and_searches_meet(
    backend: str,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    session_log_reader: Callable[..., Any],
) -> None:
    """Each waits, before its work and behind it, until all three are there: one behind the other they never would."""
    before = threading.Barrier(3)

    def meet(kind: type[ReadFile | Glob | Grep]) -> None:
        real = kind.execute

        def execute(self: Any, invocation: Invocation) -> ToolOutcome:
            before.wait(20)
            return real(self, invocation)

        monkeypatch.setattr(kind, "execute", execute)

    for kind in (ReadFile, Glob, Grep):
        meet(kind)
    behind = Meeting(3)
    task = scripted_task([{"calls": READS}, DONE], profile={"sandbox": {"backend": backend}})

    finished = run(task, make_repo({"src/a.txt": "one\n"}), tmp_path / "artifacts", [behind])

    assert finished.exit_code == 0, finished.result
    assert behind.met == 3
    events = session_log_reader(tmp_path / "artifacts" / "session.jsonl.zst")
    results = [event["data"]["message"] for event in events if event["type"] == "tool/result"]
    assert [result["source"]["callId"] for result in results] == ["call_1_0", "call_1_1", "call_1_2"]
    texts = [result["content"][0]["content"][0]["text"] for result in results]
    assert all(expected in text for expected, text in zip(("one", "src/a.txt", "src/a.txt:1:one"), texts, strict=True))


@pytest.mark.parametrize(
    ("calls", "parallel"),
    [
        pytest.param([{"tool": "shell", "args": {"command": f": {n}"}} for n in range(2)], 10, id="commands"),
        pytest.param([{"tool": "todo", "args": {"todos": []}}] * 2, 10, id="lists of work"),
        pytest.param(
            [{"tool": "write_file", "args": {"path": f"src/{n}", "content": ""}} for n in range(2)], 10, id="writes"
        ),
        pytest.param(READS[:2], 1, id="reads where the profile says one"),
    ],
)
def test_other_calls_do_not_overlap(
    backend: str,
    calls: list[dict[str, Any]],
    parallel: int,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
    tmp_path: Path,
) -> None:
    """What may change something runs alone, where the loop runs, and ``tools.parallel`` holds for the rest."""

    class Watch(Hook):
        def after_tool(self, call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
            threads.append(threading.current_thread())
            return None

    threads: list[threading.Thread] = []
    profile = {"sandbox": {"backend": backend}, "tools": {"parallel": parallel}}
    task = scripted_task([{"calls": calls}, DONE], profile=profile)

    finished = run(task, make_repo({"src/a.txt": "one\n"}), tmp_path / "artifacts", [Watch()])

    assert finished.exit_code == 0, finished.result
    assert threads == [threading.current_thread()] * 2
