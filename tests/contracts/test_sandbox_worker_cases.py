"""The file worker is held to the policy of commands by the same cases, and ends in the middle of any call."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.permission import Mode
from runner.sandbox.files.requests import MODULES
from runner.sandbox.launch import interpreter
from runner.sandbox.supervisor import below

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Callable

    from runner.sandbox.executor import Executor
    from runner.testing.sandbox import Box

LIMITS = {"limit": 1000, "max_bytes": 100_000, "line_chars": 500}

OPERATIONS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "read": lambda path: {"path": str(path), "offset": 1, **LIMITS},
    "write": lambda path: {"path": str(path), "content": "evil\n"},
    "edit": lambda path: {"path": str(path), "edits": [{"old": "unchanged", "new": "evil"}]},
    "patch": lambda path: {
        "changes": [
            {
                "old": str(path),
                "new": str(path),
                "executable": None,
                "hunks": [{"start": 1, "lines": ["-unchanged", "+evil"], "oldOpen": False, "newOpen": False}],
            }
        ]
    },
    "glob": lambda path: {"path": str(path), "label": "", "pattern": "**", **LIMITS},
    "grep": lambda path: {"path": str(path), "label": "", "pattern": ".", "glob": None, **LIMITS},
}
"""Each operation of the worker, aimed at one path."""

WITHOUT_PATH = {"fetch"}
"""Operations that open no file: what they reach is the network's affair."""

CHANGING = ("write", "edit", "patch")
READING = ("read", "glob", "grep")


def call(executor: Executor, box: Box, op: str, path: Path, *, timeout: float = 20) -> dict[str, Any]:
    """One operation on one path."""
    arguments = {"url": "http://127.0.0.1:1/", "seconds": 1} if op in WITHOUT_PATH else OPERATIONS[op](path)
    return executor.worker(executor.mode).call(op, arguments, timeout=timeout, cancellation=box.cancellation)


def test_every_operation_is_tried() -> None:
    """A new one joins the cases here."""
    assert set(OPERATIONS) == set(MODULES) - WITHOUT_PATH


@pytest.mark.parametrize("op", OPERATIONS)
def test_each_operation_works_inside_the_workspace(box: Box, op: str) -> None:
    """The positive twin of all that follows: the same arguments on a file, or a folder, of the workspace."""
    target = box.workspace / "src" / "inside"
    target.mkdir()
    (target / "file").write_text("unchanged\n")
    answer = call(box.executor(), box, op, target if op in ("glob", "grep") else target / "file")

    assert answer["ok"], answer
    assert ((target / "file").read_text() == "evil\n") == (op in CHANGING)
    if op in READING:
        assert ("unchanged" if op != "glob" else "file") in str(answer["value"])


@pytest.mark.parametrize("op", CHANGING)
def test_nothing_outside_is_changed_through_links_ancestors_or_proc(box: Box, op: str) -> None:
    """A link to the file, to its folder, of a folder further up, ``/proc/self/root`` and ``/proc/self/cwd``."""
    (box.workspace / "src" / "file-link").symlink_to(box.canary)
    (box.workspace / "src" / "folder-link").symlink_to(box.outside)
    (box.workspace / "src" / "above-link").symlink_to(box.base)
    executor = box.executor()
    for path in (
        box.canary,
        box.workspace / "src" / "file-link",
        box.workspace / "src" / "folder-link" / "canary",
        box.workspace / "src" / "above-link" / "outside" / "canary",
        box.workspace / ".." / "outside" / "canary",
        box.base.joinpath("/proc/self/root", *box.canary.parts[1:]),
        box.base.joinpath("/proc/self/cwd", "..", "outside", "canary"),
        box.workspace / ".git" / "config",
    ):
        answer = call(executor, box, op, path)
        assert not answer["ok"], (path, answer)

    box.assert_untouched()
    assert "evil" not in (box.workspace / ".git" / "config").read_text()


@pytest.mark.parametrize("op", CHANGING)
def test_a_hard_link_that_a_command_tries_to_make_leads_nowhere(box: Box, op: str) -> None:
    """It cannot be made, so the worker finds no second name of a file outside."""
    box.run('ln "$1" src/hard; true', box.canary)
    call(box.executor(), box, op, box.workspace / "src" / "hard")

    box.assert_untouched()
    assert box.canary.stat().st_nlink == 1


SWAP = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
os.chdir(sys.argv[1])
os.symlink(sys.argv[2], "link")
print("started", flush=True)
while True:
    libc.renameat2(-100, b"d", -100, b"link", 2)
    time.sleep(0.0003)
"""


@pytest.mark.parametrize("op", ["write", "read"])
def test_a_folder_that_is_exchanged_all_the_time_leads_nowhere(box: Box, op: str) -> None:
    """A process swaps it for a link to the outside and back while the worker is at it: nothing gets out or in."""
    folder = box.workspace / "src" / "d"
    folder.mkdir()
    (folder / "canary").write_text("inside\n")
    executor = box.executor()
    argv = [*interpreter(), "-c", SWAP, str(box.workspace / "src"), str(box.outside)]
    executor.start_background(argv, mode=Mode.WORKSPACE_WRITE, output=str(box.base / "output"), call_id="1")
    while not (box.base / "output").read_bytes():
        box.cancellation.wait(0.01)
    answers = [call(executor, box, op, folder / "canary") for _ in range(400)]
    executor.stop_background()
    executor.close()

    box.assert_untouched()
    assert any(answer["ok"] for answer in answers)
    assert any(not answer["ok"] for answer in answers)
    assert "unchanged" not in str(answers)


@pytest.mark.parametrize("op", ["read", "grep"])
def test_other_processes_cannot_be_read(
    box: Box, op: str, victim: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the runner's environment and memory, nor a neighbour's, nor a file through their roots."""
    monkeypatch.setenv("API_KEY", "top-secret-value")
    executor = box.executor(hidden=(box.canary,))
    answers = [
        call(executor, box, op, box.base.joinpath("/proc", str(pid), *parts))
        for pid in ("self", "1", os.getpid(), os.getppid(), victim.pid)
        for parts in (("environ",), ("cmdline",), ("root", *box.canary.parts[1:]), ("fd", "0"), ("mem",))
    ]

    assert "top-secret-value" not in str(answers)
    assert "unchanged" not in str(answers)
    assert not call(executor, box, "grep", box.base.joinpath("/proc", str(victim.pid), "root"))["ok"]


@pytest.mark.parametrize("op", OPERATIONS)
def test_hidden_files_are_out_of_reach_of_every_operation(box: Box, op: str) -> None:
    """A hidden folder and a hidden file in the workspace, in place and through links."""
    secret = box.workspace / "src" / "secret"
    secret.write_text("unchanged\n")
    (box.workspace / "src" / "link").symlink_to(secret)
    (box.workspace / "src" / "folder-link").symlink_to(box.outside)
    executor = box.executor(hidden=(secret, box.outside))
    folders = [box.outside, box.workspace / "src" / "folder-link", box.workspace]
    files = [secret, box.workspace / "src" / "link", box.canary, box.workspace / "src" / "folder-link" / "canary"]
    answers = [call(executor, box, op, path) for path in (folders if op in ("glob", "grep") else files)]

    assert "unchanged" not in str(answers)
    assert secret.read_text() == "unchanged\n"
    box.assert_untouched()


def test_files_of_other_users_are_out_of_reach(box: Box) -> None:
    """Root's worker has no right of root's over them; an ordinary user's never had."""
    if os.geteuid() == 0:
        theirs = box.workspace / "src" / "theirs"
        theirs.write_text("unchanged\n")
        theirs.chmod(0o600)
        os.chown(theirs, 1001, 1001)
    else:
        theirs = next(path for path in map(box.base.joinpath, ("/etc/shadow", "/etc/gshadow")) if path.exists())
    executor = box.executor()
    read = call(executor, box, "read", theirs)
    edited = call(executor, box, "edit", theirs)

    assert (read["ok"], read["code"]) == (False, "DENIED")
    assert not edited["ok"]
    if os.geteuid() == 0:
        assert theirs.read_text() == "unchanged\n"
        theirs.chmod(0o644)
        assert call(executor, box, "read", theirs)["value"]["text"] == "unchanged\n"


def worker_processes(executor: Executor) -> list[int]:
    """The wrapper of the worker that waits for work, and all below it."""
    (idle,) = executor.worker(executor.mode)._idle
    return [idle._process.pid, *below([idle._process.pid])]


@pytest.mark.parametrize("end", ["timeout", "cancellation", "close"])
@pytest.mark.parametrize("op", MODULES)
def test_a_worker_is_ended_in_the_middle_of_any_call(box: Box, op: str, end: str) -> None:
    """It has the request and does not answer: the time limit, a cancellation and the session's end all end it."""
    executor = box.executor()
    target = box.workspace / "src" if op in ("glob", "grep") else box.workspace / "src" / "main.py"
    assert call(executor, box, "read", box.workspace / "README")["ok"]
    before = worker_processes(executor)
    os.kill(before[-1], signal.SIGSTOP)
    stop: Callable[[], object] = {
        "timeout": lambda: None,
        "cancellation": lambda: box.cancellation.cancel("SIGTERM"),
        "close": executor.close,
    }[end]
    timer = threading.Timer(0.1, stop)
    timer.start()
    began = time.monotonic()
    answer = call(executor, box, op, target, timeout=0.2 if end == "timeout" else 20)
    timer.join()

    codes = {"timeout": "TIMEOUT", "cancellation": "CANCELLED", "close": "IO"}
    assert (answer["ok"], answer["code"]) == (False, codes[end])
    assert time.monotonic() - began < 6
    assert [pid for pid in before if Path(f"/proc/{pid}").exists()] == []
    assert (box.workspace / "src" / "main.py").read_text() == "print('main')\n"
    if end == "timeout":
        assert call(executor, box, "read", box.workspace / "README")["ok"]


def test_a_write_that_is_cut_short_leaves_the_old_text_or_the_new(box: Box) -> None:
    """Killed at some moment of a large write, eight times: the file is one of the two, whole."""
    shutil.rmtree(box.workspace / ".git")  # so that the file can be replaced as a whole under both backends
    executor = box.executor()
    worker = executor.worker(executor.mode)
    target = box.workspace / "src" / "file"
    old, new = "old\n" * 1_000_000, "new!\n" * 2_000_000
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16):
        target.write_text(old)
        assert call(executor, box, "read", box.workspace / "README")["ok"]
        (running,) = worker._idle
        timer = threading.Timer(delay, running.kill)
        timer.start()
        worker.call("write", {"path": str(target), "content": new}, timeout=20, cancellation=box.cancellation)
        timer.join()
        assert target.read_text() in (old, new)
