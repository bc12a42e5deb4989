"""The fork server: starts Landlock's supervisors, holds nothing of the runner, and may be lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.errors import SandboxError
from runner.permission import Mode
from runner.sandbox import forkserver

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.sandbox.base import ProcessResult
    from runner.sandbox.executor import Executor
    from runner.testing.sandbox import Box

pytestmark = pytest.mark.parametrize("backend", ["landlock"])


def run(box: Box, executor: Executor, argv: Sequence[str], timeout: float = 20) -> ProcessResult:
    """Run a command through an executor."""
    return executor.run(argv, mode=Mode.WORKSPACE_WRITE, timeout=timeout, cancellation=box.cancellation)


def serving(box: Box) -> int:
    """Process id of the fork server."""
    pid = box.fork_server.pid
    assert pid is not None
    return pid


def test_one_server_starts_all_commands(box: Box) -> None:
    """It starts with the first command, and each command ends with its own exit code."""
    executor = box.executor()
    assert box.fork_server.pid is None
    codes = [run(box, executor, ["/bin/sh", "-c", f"exit {code}"]).exit_code for code in (0, 7)]
    first = serving(box)
    killed = run(box, executor, ["/bin/sh", "-c", "kill -9 $$"])

    assert codes == [0, 7]
    assert killed.exit_code == 128 + signal.SIGKILL
    assert serving(box) == first


def test_commands_started_at_the_same_time_are_not_mixed_up(box: Box) -> None:
    """Eight threads: each gets the output, the variables and the exit code of its own command."""
    executor = box.executor()

    def work(number: int) -> tuple[bytes, int | None]:
        argv = ["/bin/sh", "-c", 'echo "$NUMBER"; exit "$NUMBER"']
        result = executor.run(
            argv,
            mode=Mode.WORKSPACE_WRITE,
            timeout=20,
            cancellation=box.cancellation,
            environment={"NUMBER": str(number)},
        )
        return result.output, result.exit_code

    before = box.children()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(work, range(40)))

    assert answers == [(f"{number}\n".encode(), number) for number in range(40)]
    assert box.children() == before


def test_a_server_that_is_killed_is_started_again(box: Box) -> None:
    """Commands that run go on, and the next one gets a new server."""
    executor = box.executor()
    output = box.base / "output"
    argv = ["/bin/sh", "-c", "while [ ! -e src/go ]; do sleep 0.05; done; echo went on"]
    executor.start_background(argv, mode=Mode.WORKSPACE_WRITE, output=str(output), call_id="1")
    first = serving(box)
    os.kill(first, signal.SIGKILL)

    assert run(box, executor, ["/bin/echo", "again"]).output == b"again\n"
    assert serving(box) != first
    (box.workspace / "src" / "go").touch()
    deadline = time.monotonic() + 20
    while executor.background():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert output.read_text() == "went on\n"


def test_the_server_has_neither_variables_nor_descriptors_of_the_runner(
    box: Box, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its environment is empty, it sees its socket only, and it is no process others may look into."""
    monkeypatch.setenv("API_KEY", "top-secret-value")
    with (tmp_path / "open").open("w") as file:
        os.set_inheritable(file.fileno(), True)
        run(box, box.executor(), ["/bin/true"])
        process = Path(f"/proc/{serving(box)}")
        if os.geteuid() != 0:
            for look in ((process / "environ").read_bytes, lambda: list((process / "fd").iterdir())):
                with pytest.raises(PermissionError):
                    look()
            return
        targets = [str(entry.readlink()) for entry in (process / "fd").iterdir()]

    assert b"top-secret" not in (process / "environ").read_bytes()
    assert {target.split(":")[0] for target in targets} == {"/dev/null", "socket"}
    assert len(targets) == 4


def test_a_command_can_neither_reach_nor_signal_the_server(box: Box) -> None:
    """Its socket is in no descriptor of the command, and signals go nowhere outside."""
    executor = box.executor()
    run(box, executor, ["/bin/true"])
    script = 'ls /proc/self/fd | wc -l; kill -9 "$1" 2>/dev/null; echo "$?"'
    result = run(box, executor, ["/bin/bash", "-c", script, "bash", str(serving(box))])
    before = serving(box)

    assert result.output.split() == [b"4", b"1"]  # three streams, and the folder that ls reads
    run(box, executor, ["/bin/true"])
    assert serving(box) == before


def test_the_server_ends_with_the_runner(box: Box) -> None:
    """Its runner is killed without a chance to clean up: the server goes, and what it started goes."""
    program = """
import sys
from pathlib import Path
from runner.permission import Mode
from runner.testing.sandbox import make_box

box = make_box(Path(sys.argv[1]), "landlock")
executor = box.executor()
executor.start_background(["/bin/sleep", "60"], mode=Mode.WORKSPACE_WRITE, output=str(box.base / "output"), call_id="1")
print(box.fork_server.pid, *box.children(), flush=True)
sys.stdin.read()
"""
    argv = [sys.executable, "-c", program, str(box.base / "inner")]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as runner:
        assert runner.stdout is not None
        started = [int(pid) for pid in runner.stdout.readline().split()]
        assert len(started) == 2
        runner.kill()
    deadline = time.monotonic() + 10
    while left := [pid for pid in started if Path(f"/proc/{pid}").exists()]:
        assert time.monotonic() < deadline, left
        for pid in left:
            with contextlib.suppress(ChildProcessError):  # this process adopts what its own processes leave
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)


def test_a_server_that_does_not_start_breaks_the_sandbox(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """SANDBOX_UNAVAILABLE, and no descriptor is left of the try."""
    executor = box.executor()
    before = len(list(Path("/proc/self/fd").iterdir()))
    monkeypatch.setattr(forkserver, "own_program", lambda _: ("/bin/false",))
    with pytest.raises(SandboxError, match="the Landlock supervisor could not be started: it ended"):
        run(box, executor, ["/bin/true"])
    box.fork_server.close()

    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_commands_have_the_signals_of_any_program(box: Box) -> None:
    """Nothing that the server or Python does with signals reaches what it starts; a server told to end is replaced."""
    executor = box.executor()
    for name in ("TERM", "INT", "HUP", "PIPE"):
        result = run(box, executor, ["/bin/sh", "-c", f"kill -{name} $$; echo survived"])
        assert result.exit_code == 128 + signal.Signals[f"SIG{name}"], result.output
    os.kill(serving(box), signal.SIGTERM)

    assert run(box, executor, ["/usr/bin/env"]).exit_code == 0


def test_a_command_has_the_variables_of_its_policy_only(box: Box) -> None:
    """None that the interpreter of the server or of the supervisor set."""
    executor = box.executor()
    found = run(box, executor, ["/usr/bin/env"]).output.decode().splitlines()

    assert {line.partition("=")[0] for line in found} == set(executor.command(["x"], mode=executor.mode).environment)
