"""The end of a command: in time, by force if need be, with nothing left behind and nobody else touched."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.cancellation import Cancellation
from runner.sandbox import process
from runner.sandbox.base import BARE, ConfinedCommand, ProcessResult
from runner.sandbox.supervisor import children_of

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def cancellation() -> Iterator[Cancellation]:
    """A flag that is down at first."""
    flag = Cancellation()
    yield flag
    flag.close()


HANGS = 30
"""Seconds after which a command whose children sleep for 60 was waited for instead of ended."""


def command(script: str) -> ConfinedCommand:
    """A bash script that runs bare."""
    return ConfinedCommand(
        argv=["/bin/bash", "-c", script], environment={"PATH": "/usr/bin:/bin"}, cwd="/", backend=BARE
    )


def bash(script: str, cancellation: Cancellation, *, timeout: float = 30, **options: Any) -> ProcessResult:
    """Run a bash script without a sandbox."""
    return process.run(command(script), timeout=timeout, cancellation=cancellation, **options)


def is_running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pid_in(file: Path) -> int:
    """The process id that a script wrote to a file; waits for it."""
    deadline = time.monotonic() + 20
    while not file.exists() or not file.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int(file.read_text())


def test_exit_codes_and_signals_are_told_apart(cancellation: Cancellation) -> None:
    """A code is a code, a signal has its name."""
    assert bash("exit 7", cancellation).exit_code == 7
    killed = bash("kill -SEGV $$", cancellation)
    assert (killed.exit_code, killed.signal) == (None, "SIGSEGV")
    real_time = bash("kill -40 $$", cancellation)
    assert (real_time.exit_code, real_time.signal) == (None, "SIG40")


def test_a_program_that_is_not_there_is_a_failed_command(cancellation: Cancellation) -> None:
    """127 for a missing program or folder, 126 for one that cannot be run; never an exception."""
    for argv, cwd, code in (
        (["/no/such/program"], "/", 127),
        (["no-such-program"], "/", 127),
        (["/etc/passwd"], "/", 126),
        (["/bin/true"], "/no/such/folder", 127),
    ):
        bare = ConfinedCommand(argv=argv, environment={"PATH": "/usr/bin"}, cwd=cwd, backend=BARE)
        result = process.run(bare, timeout=10, cancellation=cancellation)
        assert (result.exit_code, result.wrapper_failed) == (code, False)
        assert result.output


def test_a_wrapper_that_is_not_there_is_a_broken_sandbox(cancellation: Cancellation) -> None:
    """The same fault under a backend's name is the sandbox's, and its descriptors are freed."""
    freed = []
    wrapped = ConfinedCommand(
        argv=["/no/such/bwrap", "true"],
        environment={},
        cwd="/",
        backend="bubblewrap",
        cleanup=lambda: freed.append("cleanup"),
        finish=lambda: freed.append("finish"),
    )
    result = process.run(wrapped, timeout=10, cancellation=cancellation)

    assert result.wrapper_failed
    assert sorted(freed) == ["cleanup", "finish"]


def test_a_timeout_ends_the_whole_tree(cancellation: Cancellation, tmp_path: Path) -> None:
    """Children, grandchildren and those in other groups; output so far is kept."""
    script = f"echo before; (setsid sleep 60 & echo $! > {tmp_path}/pid); sleep 60 & sleep 60"
    began = time.monotonic()
    result = bash(script, cancellation, timeout=2)

    assert result.timed_out
    assert not result.cancelled
    assert result.output == b"before\n"
    assert time.monotonic() - began < HANGS
    assert not is_running(pid_in(tmp_path / "pid"))


def test_term_comes_before_kill(cancellation: Cancellation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command may clean up within the grace; one that ignores TERM is killed after it."""
    monkeypatch.setattr(process, "GRACE", 0.5)
    polite = bash(f"trap 'echo bye; touch {tmp_path}/x; exit 0' TERM; sleep 60 & wait", cancellation, timeout=2)
    assert polite.timed_out
    assert polite.output == b"bye\n"
    assert (tmp_path / "x").exists()

    began = time.monotonic()
    deaf = bash("trap '' TERM; while :; do sleep 0.05; done", cancellation, timeout=2)
    assert deaf.signal == "SIGKILL"
    assert time.monotonic() - began >= 2.5  # the grace was given


def test_cancellation_ends_a_command(cancellation: Cancellation) -> None:
    """Raised before or during the command, from another thread."""
    threading.Timer(0.3, cancellation.cancel, ["SIGINT"]).start()
    began = time.monotonic()
    result = bash("sleep 60", cancellation)
    assert (result.cancelled, result.timed_out) == (True, False)
    assert time.monotonic() - began < HANGS

    assert bash("sleep 60", cancellation).cancelled


def test_a_command_that_closes_its_output_is_waited_for(cancellation: Cancellation, tmp_path: Path) -> None:
    """The end of the output is not the end of the command."""
    result = bash(f"exec >&- 2>&-; sleep 0.4; touch {tmp_path}/done", cancellation)

    assert result.exit_code == 0
    assert (tmp_path / "done").exists()


def test_a_daemon_that_holds_the_pipe_does_not_hang_the_call(cancellation: Cancellation, tmp_path: Path) -> None:
    """It is killed when the command itself has ended, also one that writes without end."""
    for kept in ("sleep 60", "yes"):
        pid = tmp_path / kept.split()[0]
        began = time.monotonic()
        result = bash(f"setsid {kept} & echo $! > {pid}; echo started", cancellation, capture=1_000)

        assert result.exit_code == 0
        assert result.output.startswith(b"started\n" if kept == "sleep 60" else b"")
        assert time.monotonic() - began < HANGS
        assert not is_running(pid_in(pid))


DAEMON = """
(setsid bash -c 'trap "" TERM HUP; exec env -i bash -c "trap \\"\\" TERM; echo \\$\\$ > {0}/pid; sleep 60; true"' \
    > /dev/null 2>&1 &) &
while [ ! -s {0}/pid ]; do sleep 0.01; done; {1}
"""


def test_a_daemon_with_a_cleared_environment_is_found(cancellation: Cancellation, tmp_path: Path) -> None:
    """Forked twice, its own session, no environment, deaf to TERM: gone when ``run`` returns."""
    before = children_of(os.getpid())
    bash(DAEMON.format(tmp_path, "true"), cancellation)

    assert not is_running(pid_in(tmp_path / "pid"))
    assert children_of(os.getpid()) == before


def test_daemons_of_other_commands_are_left_alone(cancellation: Cancellation, tmp_path: Path) -> None:
    """While one command ends, the orphans of another that still runs live on, and die with their own."""
    until_told = f"while [ ! -e {tmp_path}/end ]; do sleep 0.02; done"
    other = threading.Thread(target=bash, args=(DAEMON.format(tmp_path, until_told), cancellation))
    other.start()
    try:
        daemon = pid_in(tmp_path / "pid")
        for _ in range(5):
            bash("sleep 0 & setsid sleep 60 & true", cancellation)
        assert is_running(daemon)
    finally:
        (tmp_path / "end").touch()
        other.join()

    assert not is_running(daemon)


def test_processes_that_others_started_are_left_alone(cancellation: Cancellation) -> None:
    """A child of the runner that did not come through here is nobody's stray, whatever its session."""
    others = [
        subprocess.Popen(["/bin/sleep", "60"]),
        subprocess.Popen(["/bin/sleep", "60"], start_new_session=True),
    ]
    try:
        for _ in range(3):
            bash("setsid sleep 60 & true", cancellation)
        assert [other.poll() for other in others] == [None, None]
    finally:
        for other in others:
            other.kill()
            other.wait()


def test_many_commands_run_at_once(cancellation: Cancellation) -> None:
    """Four threads, each with its own output and its own end; no descriptor is left open."""
    bash("true", cancellation)
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    results: dict[int, bytes] = {}

    def work(number: int) -> None:
        for _ in range(5):
            results[number] = bash(f"setsid sleep 60 & echo {number}", cancellation, timeout=50).output

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert results == {number: f"{number}\n".encode() for number in range(4)}
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_a_started_process_can_be_watched_and_stopped(cancellation: Cancellation) -> None:
    """``start`` gives a process with its pipes; ``stop`` ends it and all below it, twice is once."""
    running = process.start(command("read line; echo got $line; setsid sleep 60 & sleep 60"), stdin=process.PIPE)
    assert running.stdin is not None
    assert running.stdout is not None
    os.write(running.stdin, b"hello\n")
    deadline = time.monotonic() + HANGS
    received = b""
    while not received.endswith(b"hello\n"):
        assert time.monotonic() < deadline
        with contextlib.suppress(BlockingIOError):
            received += os.read(running.stdout, 100)
        time.sleep(0.01)

    assert not running.exited()
    assert not running.wait(0.05)
    assert running.stop(20) == -signal.SIGTERM
    assert running.stop(20) == -signal.SIGTERM
    assert running.exited()
    assert received == b"got hello\n"
    assert not cancellation.cancelled


def test_a_runner_with_many_open_files_runs_commands(cancellation: Cancellation) -> None:
    """Descriptors beyond 1,024 are waited for like any other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4_096, hard), hard))
    kept: list[int] = []
    try:
        while not kept or kept[-1] < 1_100:
            kept.append(os.dup(0))
        assert bash("setsid sleep 60 & echo done", cancellation).output == b"done\n"
        assert bash("sleep 60", cancellation, timeout=0.5).timed_out
    finally:
        for descriptor in kept:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_signals_that_this_program_ignores_are_not_ignored_in_commands(cancellation: Cancellation) -> None:
    """A pipe whose reader left ends its writer quietly."""
    result = bash("yes | head -n 1; echo ${PIPESTATUS[0]}", cancellation)

    assert result.output == b"y\n141\n"


HARDENED = """
import ctypes, os, signal
from runner.sandbox.process import harden_self
harden_self()
libc = ctypes.CDLL(None)
adopts = ctypes.c_int()
libc.prctl(37, ctypes.byref(adopts), 0, 0, 0)
print(libc.prctl(3, 0, 0, 0, 0), adopts.value, signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL)
"""


def test_the_runner_hardens_itself() -> None:
    """Not dumpable, adopts orphans, and reaps its children itself even if its parent ignored them."""
    result = subprocess.run(
        ["/bin/bash", "-c", 'trap "" CHLD; exec "$@"', "bash", sys.executable, "-c", HARDENED],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": os.environ["PATH"]},
    )

    assert result.stdout == "0 1 True\n"
