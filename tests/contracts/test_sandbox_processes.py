"""Nothing of a command outlives it, and nothing in it reaches the runner."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.permission import Mode
from runner.sandbox.launch import interpreter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runner.testing.sandbox import Box

DAEMON = """
import os, signal, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork():
        os._exit(0)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    with open(sys.argv[1], "a") as beat:
        for _ in range(600):
            print(sys.argv[2], file=beat, flush=True)
            time.sleep(0.02)
    os._exit(0)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.005)
exec(sys.argv[3])
"""


def is_beating(beat: Path) -> bool:
    """Whether somebody still writes to the file."""
    before = beat.stat().st_size
    time.sleep(0.15)
    return beat.stat().st_size != before


def wait_for(condition: Callable[[], bool]) -> None:
    """Wait up to 20 seconds for something to become true."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


@pytest.fixture
def marker() -> str:
    """A word that stands in the command line of a test's processes and nowhere else."""
    return f"nightshift-mark-{os.urandom(6).hex()}"


def running_with(marker: str) -> list[int]:
    """Processes of the host, zombies apart, whose command line holds ``marker``."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                if marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


def test_a_daemon_that_ignores_signals_dies_with_its_call(box: Box, marker: str) -> None:
    """Forked twice, in a session of its own, deaf to TERM: gone when ``run`` returns."""
    beat = box.tmp / "beat"
    before = box.children()
    result = box.python(DAEMON, beat, marker, "pass")

    assert result.exit_code == 0, result.output
    assert running_with(marker) == []
    assert box.children() == before
    assert not is_beating(beat)


def test_a_daemon_dies_with_the_timeout(box: Box, marker: str) -> None:
    """The same when the command itself ran out of time."""
    beat = box.tmp / "beat"
    result = box.python(DAEMON, beat, marker, "time.sleep(60)", timeout=3)

    assert result.timed_out
    assert running_with(marker) == []
    assert not is_beating(beat)


FORK_WHEN_KILLED = """
import os, signal, sys, time

def say(word):
    with open(sys.argv[1], "a") as file:
        file.write(word)

def once_more(*_):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if os.fork() == 0:
        os.setsid()
        say("forked ")
    time.sleep(60)

signal.signal(signal.SIGTERM, once_more)
for _ in range(14):
    if os.fork() == 0:
        break
say("ready ")
time.sleep(60)
"""


def test_processes_that_fork_while_they_are_being_killed_are_all_gone(box: Box, marker: str) -> None:
    """Fifteen that each fork once when they are told to end, into a session of its own, deaf from then on."""
    executor = box.executor()
    said = box.tmp / "said"
    before = box.children()
    argv = [*interpreter(), "-c", FORK_WHEN_KILLED, str(said), marker]
    executor.start_background(argv, mode=Mode.WORKSPACE_WRITE, output=str(box.base / "output"), call_id="1")
    wait_for(lambda: said.exists() and said.read_text().count("ready") == 15)

    assert executor.stop_background() == ["1"]
    assert "forked" in said.read_text()
    assert running_with(marker) == []
    assert box.children() == before


def test_a_timeout_lets_the_command_clean_up_first(box: Box) -> None:
    """TERM comes first and reaches the command under the wrapper, with time to react."""
    script = 'trap "echo cleaned > src/cleaned; exit 3" TERM; echo ready; while :; do sleep 0.05; done'
    result = box.run(script, timeout=2)

    assert result.timed_out
    assert not result.wrapper_failed
    assert (box.workspace / "src" / "cleaned").exists()


RUNNER = """
import os, sys
from pathlib import Path
from runner.cancellation import Cancellation
from runner.permission import Mode
from runner.sandbox.launch import interpreter
from runner.sandbox.process import harden_self
from runner.testing.sandbox import Box
harden_self()
base = Path(sys.argv[1])
box = Box(sys.argv[2], base, base / "workspace", base / "outside", base / "state")
code, marker = sys.argv[3:]
def argv(kind):
    return [*interpreter(), "-c", code, str(box.tmp / "beat"), marker + kind, "time.sleep(60)"]
executor = box.executor()
executor.start_background(argv("background"), mode=Mode.WORKSPACE_WRITE, output=str(base / "output"), call_id="1")
executor.run(argv("foreground"), mode=Mode.WORKSPACE_WRITE, timeout=60, cancellation=box.cancellation)
"""


def test_when_the_runner_is_killed_everything_dies(box: Box, marker: str) -> None:
    """SIGKILL of the runner: foreground and background commands and their daemons are gone a moment later."""
    beat = box.tmp / "beat"
    (box.state / "tmp").mkdir()
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(Path(__file__).parents[2])}
    runner = subprocess.Popen(
        [sys.executable, "-c", RUNNER, str(box.base), box.backend, DAEMON, marker], env=environment
    )
    try:
        wait_for(lambda: beat.exists() and b"background" in beat.read_bytes() and b"foreground" in beat.read_bytes())
        wait_for(lambda: is_beating(beat))
    finally:
        runner.send_signal(signal.SIGKILL)
        runner.wait()
    wait_for(lambda: running_with(marker) == [])

    assert not is_beating(beat)


def test_background_processes_end_with_their_turn(box: Box, marker: str) -> None:
    """A declared background process runs on after its call, is listed, and is gone after ``stop_background``."""
    executor = box.executor()
    beat = box.tmp / "beat"
    argv = [*interpreter(), "-c", DAEMON, str(beat), marker, "print('up', flush=True); time.sleep(60)"]
    executor.start_background(argv, mode=Mode.WORKSPACE_WRITE, output=str(box.base / "output"), call_id="call-1")
    wait_for(lambda: (box.base / "output").read_bytes() != b"" and beat.exists())

    assert executor.background() == ["call-1"]
    wait_for(lambda: is_beating(beat))
    assert executor.stop_background() == ["call-1"]
    assert executor.background() == []
    assert running_with(marker) == []
    assert not is_beating(beat)
    assert (box.base / "output").read_bytes() == b"up\n"


def test_a_background_process_survives_the_thread_that_started_it(box: Box, marker: str) -> None:
    """The wrapper dies with the runner, not with the thread that happened to start it."""
    executor = box.executor()
    argv = ["/bin/bash", "-c", "echo up; sleep 60; true", marker]
    thread = threading.Thread(
        target=executor.start_background,
        args=(argv,),
        kwargs={"mode": Mode.WORKSPACE_WRITE, "output": str(box.base / "output"), "call_id": "1"},
    )
    thread.start()
    thread.join()
    wait_for(lambda: running_with(marker) != [])
    time.sleep(0.3)  # as long as a parent's death needs to arrive

    assert executor.background() == ["1"]
    assert running_with(marker) != []


def test_the_runner_cannot_be_signalled(box: Box, victim: subprocess.Popen[bytes]) -> None:
    """Neither the runner, nor its neighbours, nor the wrapper that watches the command."""
    script = """
        for number in TERM KILL STOP USR1; do
            kill -$number "$1"; kill -$number "$2"; kill -$number $PPID; kill -$number 1; kill -$number -1
        done 2>/dev/null
        trap "" TERM; sleep 0.1 & kill -KILL $! && echo own
    """
    result = box.run(script, os.getpid(), victim.pid)

    assert victim.poll() is None
    assert result.exit_code is not None or result.signal == "SIGKILL"
    survived = box.run('sleep 5 & kill -KILL $! && echo "own child killed"')
    assert survived.output == b"own child killed\n"


def test_the_runner_cannot_be_read(box: Box, victim: subprocess.Popen[bytes]) -> None:
    """Environment, memory, root, working directory and descriptors of processes outside stay closed."""
    script = """
        for pid in "$1" "$2"; do
            cat /proc/$pid/environ /proc/$pid/maps /proc/$pid/mem /proc/$pid/root/"$3" /proc/$pid/cwd/. 2>/dev/null
            ls -l /proc/$pid/fd /proc/$pid/root/ 2>/dev/null
            readlink /proc/$pid/exe /proc/$pid/cwd
            echo x > /proc/$pid/root/"$3"
        done
        cat /proc/self/environ | tr "\\0" "\\n" | grep -c ^PATH
    """
    result = box.run(script, victim.pid, os.getpid(), box.canary)

    assert b"top-secret-value" not in result.output
    assert b"unchanged" not in result.output
    assert result.output.splitlines()[-1] == b"1", result.output
    box.assert_untouched()


def test_without_a_sandbox_the_same_process_is_open(bare_box: Box, victim: subprocess.Popen[bytes]) -> None:
    """The positive twin: it is seen, read, traced and signalled by the very same means."""
    script = 'cat /proc/$1/environ; ls /proc/$1/root"$2"; grep -c sleep /proc/$1/cmdline'
    seen = bare_box.run(script, victim.pid, bare_box.canary, mode=Mode.DANGER_FULL_ACCESS)
    traced = bare_box.python(TRACE, victim.pid, mode=Mode.DANGER_FULL_ACCESS)

    assert b"top-secret-value" in seen.output
    assert str(bare_box.canary).encode() in seen.output
    assert seen.output.endswith(b"1\n")
    assert {b"SUCCEEDED pidfd_getfd", b"SUCCEEDED pidfd_send_signal"} <= set(traced.output.splitlines())
    assert victim.wait(10) == -signal.SIGKILL


HARDENED = """
import time
from runner.sandbox.process import harden_self
harden_self()
print("hardened", flush=True)
time.sleep(60)
"""


@pytest.fixture
def hardened() -> Iterator[int]:
    """The process id of a program outside the sandbox that has closed itself as the runner does."""
    environment = {"PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", HARDENED], env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"hardened\n"
        yield process.pid
        process.kill()


def test_what_the_runners_descriptors_lead_to_is_closed(box: Box, hardened: int) -> None:
    """Where their numbers can be listed at all, as by root under Landlock, that is named as a gap."""
    result = box.run("cd /proc/$1/fd; echo *; cd /; readlink /proc/$1/fd/1; cat /proc/$1/fdinfo/1 2>&1", hardened)
    listed = any(word.isdigit() for word in result.output.split())

    assert b"pipe" not in result.output
    assert b"flags" not in result.output
    assert listed == ("runner_descriptors" in box.executor().not_enforced(Mode.WORKSPACE_WRITE)), result.output


TRACE = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
target = int(sys.argv[1])
buffer = ctypes.create_string_buffer(16)
class Vec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("len", ctypes.c_size_t)]
local = Vec(ctypes.addressof(buffer), 16)
remote = Vec(ctypes.addressof(buffer), 16)
calls = {
    "ptrace": lambda: libc.ptrace(16, target, None, None),
    "process_vm_readv": lambda: libc.process_vm_readv(target, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0),
    "process_vm_writev": lambda: libc.process_vm_writev(target, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0),
    "prlimit": lambda: libc.prlimit(target, 7, ctypes.byref(local), None),
}
try:
    descriptor = os.pidfd_open(target)
    calls["pidfd_getfd"] = lambda: libc.syscall(438, descriptor, 0, 0)
    calls["pidfd_send_signal"] = lambda: libc.syscall(424, descriptor, 9, None, 0)
except OSError:
    pass
for name, call in calls.items():
    if call() >= 0:
        print("SUCCEEDED", name)
print("tried")
"""


def test_no_tracing_and_no_foreign_memory(box: Box, victim: subprocess.Popen[bytes]) -> None:
    """ptrace, cross-memory reads and writes, stolen descriptors, foreign limits: all refused."""
    result = box.python(TRACE, victim.pid)

    assert victim.poll() is None
    assert result.output == b"tried\n"


def test_the_view_of_other_processes_is_as_listed(box: Box, victim: subprocess.Popen[bytes]) -> None:
    """Seeing, renicing and sharing IPC objects with the host: only where the backend says so."""
    listed = set(box.executor().not_enforced(Mode.WORKSPACE_WRITE))
    before = os.getpriority(os.PRIO_PROCESS, victim.pid)
    script = 'grep -c sleep "/proc/$1/cmdline"; renice -n 5 -p "$1" > /dev/null; ipcmk -Q | tr -dc 0-9'
    result = box.run(script, victim.pid)
    seen, queue = (*result.output.decode().splitlines()[:1], result.output.decode().split()[-1])
    queues = {line.split()[1] for line in Path("/proc/sysvipc/msg").read_text().splitlines()[1:]}
    if queue in queues:
        subprocess.run(["ipcrm", "-q", queue], check=True)

    assert (seen == "1") == ("pid_isolation" in listed), result.output
    # Root's own capabilities protect its priority as well, so it may be kept although it is listed.
    assert os.getpriority(os.PRIO_PROCESS, victim.pid) == before or "priority" in listed
    assert (queue in queues) == ("ipc_isolation" in listed)


def test_the_child_environment_holds_nothing_but_the_allowlist(box: Box) -> None:
    """A key in the runner's environment is not in the command's, nor in that of its wrapper."""
    environ = {
        "PATH": "/usr/bin:/bin",
        "API_KEY": "top-secret-value",
        "LANG": "C.UTF-8",
        "LC_ALL": "C.UTF-8",
        "KEPT": "1",
    }
    script = "env; cat /proc/*/environ | base64 -w0; cat /proc/*/cmdline | tr '\\0' '\\n'"
    result = box.run(script, environ=environ, env_allow=("KEPT",), env_set={"EXTRA": "given"})
    names = {line.split(b"=")[0].decode() for line in result.output.splitlines() if b"=" in line and b" " not in line}

    assert b"top-secret-value" not in result.output
    assert {"KEPT", "EXTRA", "HOME", "TMPDIR", "LC_ALL"} <= names
    assert "API_KEY" not in names
    assert "LC_CTYPE" not in names


def test_only_standard_descriptors_are_open(box: Box) -> None:
    """Nothing the runner or the wrapper holds is inherited by a command."""
    code = """
import os
for name in os.listdir("/proc/self/fd"):
    try:
        print(name, os.readlink("/proc/self/fd/" + name).partition(":")[0])
    except FileNotFoundError:
        pass  # the listing's own
"""
    leak = os.open(box.canary, os.O_RDONLY)
    os.set_inheritable(leak, True)
    try:
        result = box.python(code)
    finally:
        os.close(leak)

    assert sorted(result.output.decode().splitlines()) == ["0 /dev/null", "1 pipe", "2 pipe"]


FLOODS = {
    "many lines": "yes 0123456789 | head -c 200M",
    "one endless line": "head -c 200M /dev/zero | tr '\\0' x",
    "no text": "head -c 200M /dev/zero | tr '\\0' '\\377'",
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_output_is_taken_without_filling_the_memory(box: Box, name: str) -> None:
    """200 MB: head and tail are kept as they came, all of it is counted, and the memory stays small."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    argv = ["/bin/bash", "-c", f"{FLOODS[name]}; printf 'the end'"]
    result = box.executor().run(
        argv, mode=Mode.WORKSPACE_WRITE, timeout=50, cancellation=box.cancellation, capture=1_000_000
    )

    assert result.total_bytes == (200 << 20) + len(b"the end")
    assert (result.truncated, len(result.output)) == (True, 1_000_000)
    first = {"many lines": b"0123456789\n", "one endless line": b"xxxx", "no text": b"\xff\xff"}[name]
    assert result.output.startswith(first)
    assert result.output.endswith(b"the end")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 40_000


def test_exit_codes_and_signals_come_through(box: Box) -> None:
    """Codes are the command's; an ending signal is 128 plus its number, and never a broken sandbox."""
    assert box.run("exit 7").exit_code == 7
    killed = box.run("kill -SEGV $$")
    assert (killed.exit_code, killed.wrapper_failed) == (139, False)
    missing = box.executor().run(
        ["no-such-program"], mode=Mode.WORKSPACE_WRITE, timeout=20, cancellation=box.cancellation
    )
    assert (missing.exit_code, missing.wrapper_failed) == (127, False)
    assert b"no-such-program" in missing.output


def test_a_command_cannot_pretend_that_the_sandbox_broke(box: Box) -> None:
    """Words and exit codes of a wrapper, said by the command, are the command's."""
    result = box.run("echo 'bwrap: setting up uid map: Permission denied'; echo 'nightshift sandbox: x'; exit 125")

    assert (result.exit_code, result.wrapper_failed) == (125, False)


def test_cancellation_ends_a_command_at_once(box: Box) -> None:
    """A raised flag ends the whole tree within the grace."""
    threading.Timer(0.5, box.cancellation.cancel, ["SIGTERM"]).start()
    began = time.monotonic()
    result = box.run("trap '' TERM; sleep 60 & wait; sleep 60")

    assert result.cancelled
    assert not result.timed_out
    assert time.monotonic() - began < 4
    assert result.output == b""
