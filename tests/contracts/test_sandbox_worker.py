"""The file worker runs under the backend of its mode, answers many threads, and can be ended in any call."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.errors import InternalError, SandboxError
from runner.permission import Mode

if TYPE_CHECKING:
    from runner.sandbox.executor import Executor
    from runner.testing.sandbox import Box


def call(executor: Executor, box: Box, op: str, *, timeout: float = 20, **args: Any) -> dict[str, Any]:
    """One operation of the worker in the session's own mode."""
    mode = Mode(args.pop("mode", executor.mode))
    return executor.worker(mode).call(op, args, timeout=timeout, cancellation=box.cancellation)


def read(executor: Executor, box: Box, path: Path, **options: Any) -> dict[str, Any]:
    """Read a small file."""
    return call(executor, box, "read", path=str(path), offset=1, limit=100, max_bytes=100_000, **options)


def slow_search(box: Box) -> dict[str, Any]:
    """Arguments of a search that takes for ever."""
    (box.workspace / "src" / "bait").write_text("a" * 200 + "b\n")
    limits = {"limit": 100, "max_bytes": 10_000, "line_chars": 200}
    return {"path": str(box.workspace), "label": "", "pattern": "(a+)+$", "glob": None, **limits}


def test_the_worker_reads_and_writes_within_the_sandbox(box: Box) -> None:
    """Inside it works; outside, in .git and in read-only the kernel says no, and the answer says so."""
    executor = box.executor()
    assert read(executor, box, box.workspace / "README")["value"]["text"] == "hello\n"
    assert call(executor, box, "write", path=str(box.workspace / "src" / "new"), content="x")["ok"]
    denied = [
        call(executor, box, "write", path=str(path), content="x", mode=mode)
        for path, mode in (
            (box.canary, Mode.WORKSPACE_WRITE),
            (box.outside / "new", Mode.WORKSPACE_WRITE),
            (box.workspace / ".git" / "config", Mode.WORKSPACE_WRITE),
            (box.workspace / "src" / "main.py", Mode.READ_ONLY),
        )
    ]

    assert [(answer["ok"], answer["code"]) for answer in denied] == [(False, "DENIED")] * 4
    box.assert_untouched()
    assert (box.workspace / "src" / "main.py").read_text() == "print('main')\n"
    assert (box.workspace / "src" / "new").read_text() == "x"


def test_hidden_files_are_hidden_from_the_worker(box: Box) -> None:
    """The same policy as for commands."""
    executor = box.executor(hidden=(box.canary,))
    answer = read(executor, box, box.canary)

    assert not answer["ok"]
    assert "unchanged" not in str(answer)


def test_a_call_that_takes_too_long_ends_its_worker(box: Box) -> None:
    """TIMEOUT after the time given, no process left of it, and the next call gets a new worker."""
    executor = box.executor()
    before = box.children()
    began = time.monotonic()
    answer = call(executor, box, "grep", timeout=1, **slow_search(box))

    assert (answer["ok"], answer["code"]) == (False, "TIMEOUT")
    assert time.monotonic() - began < 6
    assert box.children() == before
    assert read(executor, box, box.workspace / "README")["ok"]


def test_a_cancelled_run_ends_a_call_at_once(box: Box) -> None:
    """CANCELLED, in the middle of a search."""
    executor = box.executor()
    arguments = slow_search(box)
    threading.Timer(0.5, box.cancellation.cancel, ["SIGTERM"]).start()
    began = time.monotonic()
    answer = call(executor, box, "grep", **arguments)

    assert (answer["ok"], answer["code"]) == (False, "CANCELLED")
    assert time.monotonic() - began < 4


def test_ten_threads_share_few_workers(box: Box) -> None:
    """Each gets its own answer; a slow search of one does not stop the others."""
    for number in range(10):
        (box.workspace / "src" / f"file-{number}").write_text(f"text {number}\n")
    executor = box.executor()
    before = box.children()
    with ThreadPoolExecutor(11) as pool:
        slow = pool.submit(call, executor, box, "grep", timeout=2, **slow_search(box))
        time.sleep(0.2)
        jobs = [
            pool.submit(read, executor, box, box.workspace / "src" / f"file-{number % 10}") for number in range(200)
        ]
        texts = [job.result()["value"]["text"] for job in jobs]
        assert not slow.done()
        assert slow.result()["code"] == "TIMEOUT"

    assert texts == [f"text {number % 10}\n" for number in range(200)]
    assert 1 <= len(box.children() - before) <= 3


def test_a_large_answer_and_a_large_request_come_through(box: Box) -> None:
    """More than a pipe holds, in both directions."""
    executor = box.executor()
    text = "line of text\n" * 200_000
    written = call(executor, box, "write", path=str(box.workspace / "src" / "large"), content=text)
    answer = call(
        executor, box, "read", path=str(box.workspace / "src" / "large"), offset=1, limit=10**6, max_bytes=10**7
    )

    assert written["ok"]
    assert answer["value"]["text"] == text


def test_a_worker_that_dies_is_a_failed_call_and_is_replaced(box: Box) -> None:
    """Killed from outside in the middle of a call: IO, no broken sandbox, and the next call works."""
    executor = box.executor()
    assert read(executor, box, box.workspace / "README")["ok"]
    (running,) = executor.worker(executor.mode)._idle
    threading.Timer(0.5, running.kill).start()
    answer = call(executor, box, "grep", **slow_search(box))

    assert (answer["ok"], answer["code"]) == (False, "IO")
    assert read(executor, box, box.workspace / "README")["ok"]


def test_a_sandbox_that_does_not_start_the_worker_ends_the_run(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """SANDBOX_UNAVAILABLE with the wrapper's own words, not a failed call."""
    executor = box.executor()
    real = executor.command

    def broken(*arguments: Any, **options: Any) -> Any:
        command = real(*arguments, **options)
        command.argv = ["/bin/sh", "-c", "echo the wrapper broke >&2; exit 1"]
        command.inner = None
        return command

    monkeypatch.setattr(executor, "command", broken)
    with pytest.raises(SandboxError, match="the wrapper broke"):
        read(executor, box, box.workspace / "README")


def test_close_leaves_no_process(box: Box) -> None:
    """Idle and busy workers, background processes and their descriptors are gone; a late call is an error."""
    before = box.children()
    descriptors = {path.name for path in Path("/proc/self/fd").iterdir()}
    executor = box.executor()
    assert read(executor, box, box.workspace / "README")["ok"]
    worker = executor.worker(executor.mode)
    executor.start_background(["/bin/sleep", "60"], mode=executor.mode, output=str(box.base / "output"), call_id="call")
    answers: list[dict[str, Any]] = []
    arguments = slow_search(box)
    busy = threading.Thread(target=lambda: answers.append(call(executor, box, "grep", timeout=30, **arguments)))
    busy.start()
    time.sleep(0.5)
    executor.close()
    busy.join(10)

    assert answers == [{"ok": False, "code": "IO", "message": "the file worker ended during grep"}]
    assert box.children() == before
    assert {path.name for path in Path("/proc/self/fd").iterdir()} == descriptors
    with pytest.raises(InternalError):
        worker.call("hello", {}, timeout=5, cancellation=box.cancellation)
    executor.close()


def test_the_danger_mode_has_a_worker_too(bare_box: Box) -> None:
    """Bare, with the same protocol."""
    executor = bare_box.executor(Mode.DANGER_FULL_ACCESS)
    assert call(executor, bare_box, "write", path=str(bare_box.outside / "new"), content="x")["ok"]

    assert (bare_box.outside / "new").read_text() == "x"
