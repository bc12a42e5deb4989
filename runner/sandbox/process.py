"""Runs one command to its end: groups, time, capture, cancellation, and nothing left behind.

Each command leads a session of its own. It carries a mark (the soft value of a resource limit that
only real-time tasks feel), which its descendants inherit and cannot lose by accident; what is
reparented to the runner is known by it and killed, without touching commands of other threads.
Invariants: no ``preexec_fn``, no thread for a command; ``run`` returns only when no descendant is
left; a command that runs under a sandbox's wrapper is signalled below the wrapper.
Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import queue
import resource
import select
import signal
import subprocess
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from runner.errors import SandboxError, StorageError
from runner.sandbox.base import ProcessResult
from runner.sandbox.launch import memory_file
from runner.sandbox.supervisor import below, children_of, parent_and_session, signal_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.cancellation import Cancellation
    from runner.sandbox.base import ConfinedCommand
    from runner.sandbox.forkserver import ForkServer

GRACE = 2.0
"""Seconds between TERM and KILL when a command ran out of time."""

CANCEL_GRACE = 1.0
"""The same when the run is cancelled: it must be over in five seconds, all in all."""

OVERFLOW_LIMIT = 1_000_000_000
"""Bytes of the overflow file at most; what comes after them is counted, not kept."""

_CHUNK = 65_536
_PIPE_SIZE = 1 << 20
_CLEANUP_SECONDS = 10.0
_WRAPPER_SECONDS = 3.0
_REMINDER = 0.2
_TICK = 0.02
_LONGEST_WAIT = 3_600.0
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36
_MARK_BASE = 1 << 61

PIPE = subprocess.PIPE
DEVNULL = subprocess.DEVNULL


def _prctl(option: int, value: int) -> None:
    import ctypes
    import sys

    if sys.platform != "linux":
        raise SandboxError(
            f"commands can be started on Linux only so far, not on {sys.platform}: no other kernel lets the runner "
            "adopt what they leave behind",
            hint="run in a Linux machine or container",
        )
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) < 0:
        raise SandboxError(
            f"prctl({option}) failed: {os.strerror(ctypes.get_errno())}",
            hint="nightshift needs Linux 3.4 or newer and a kernel that lets it adopt orphaned processes",
        )


class _Subreaper:
    """Makes this process adopt what its descendants orphan, once."""

    def __init__(self) -> None:
        self._pid = 0

    def ensure(self) -> None:
        if self._pid != os.getpid():  # not inherited by fork
            _prctl(_PR_SET_CHILD_SUBREAPER, 1)
            self._pid = os.getpid()


_subreaper = _Subreaper()


def harden_self() -> None:
    """Make the runner undumpable (its memory and environment closed to its own user) and a subreaper.

    Raises:
        SandboxError: SANDBOX_UNAVAILABLE, the kernel refused.
    """
    _prctl(_PR_SET_DUMPABLE, 0)
    _subreaper.ensure()
    if threading.current_thread() is threading.main_thread():
        # Ignored children are reaped by the kernel and their exit status is lost; a parent may have left it so.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _reaped(pid: int) -> bool:
    """Reap a child of the runner that is nobody else's to wait for; whether it has ended."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG) is not None
    except ChildProcessError:
        return True


def _wait_a_little(pid: int) -> None:
    """Wait until a process has ended, or for a moment."""
    try:
        descriptor = os.pidfd_open(pid)
    except OSError:
        time.sleep(0.001)
        return
    try:
        _wait_readable(descriptor, _TICK)
    finally:
        os.close(descriptor)


def _wait_readable(descriptor: int, seconds: float) -> None:
    poll = select.poll()  # unlike select, it takes descriptors of any number
    poll.register(descriptor, select.POLLIN)
    poll.poll(int(min(seconds, _LONGEST_WAIT) * 1000) + 1)


class _Marks:
    """Hands out marks that no other command has, of this runner or another."""

    def __init__(self) -> None:
        self._next = 0

    def new(self) -> int:
        if self._next == 0:
            self._next = _MARK_BASE | int.from_bytes(os.urandom(4)) << 24
        self._next += 1
        return self._next


_marks = _Marks()
_spawn_lock = threading.Lock()


class _Forked:
    """A child that the fork server started: of ``Popen`` what is used here."""

    def __init__(self, pid: int, stdin: int | None, stdout: int | None) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.returncode = 0

    def wait(self) -> int:
        """Reap the child; returns its exit code, negative for a signal."""
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _both_ends(wanted: int, *, reads: bool) -> tuple[int, int | None]:
    """A descriptor for the child, to be closed here in any case, and our end if it is a pipe's."""
    if wanted == DEVNULL:
        return os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC), None
    if wanted == PIPE:
        read, write = os.pipe2(os.O_CLOEXEC)
        return (read, write) if reads else (write, read)
    return os.dup(wanted), None


def _fork(server: ForkServer, command: ConfinedCommand, stdin: int, stdout: int, stderr: int) -> tuple[_Forked, int]:
    """Have the fork server start the command; else as ``_spawn``."""
    assert command.inner is not None
    with _spawn_lock:
        endless = resource.getrlimit(resource.RLIMIT_RTTIME)[1] == resource.RLIM_INFINITY
        mark = _marks.new() if endless else 0
    source, own_source = _both_ends(stdin, reads=True)
    target, own_target = _both_ends(stdout, reads=False)
    errors = target if stderr == subprocess.STDOUT else stderr
    try:
        pid = server.start(command.inner, command.environment, (*command.pass_fds, source, target, errors), mark)
    except BaseException:
        for descriptor in (own_source, own_target):
            if descriptor is not None:
                os.close(descriptor)
        raise
    finally:
        os.close(source)
        os.close(target)
    return _Forked(pid, own_source, own_target), mark


def _spawn(command: ConfinedCommand, stdin: int, stdout: int, stderr: int) -> tuple[subprocess.Popen[bytes], int]:
    """Start the command with a mark. Every process that carries the mark descends from it."""
    with _spawn_lock:
        mark = _marks.new()
        before = resource.getrlimit(resource.RLIMIT_RTTIME)
        try:
            resource.setrlimit(resource.RLIMIT_RTTIME, (mark, before[1]))
        except (OSError, ValueError):
            mark = 0  # a lower hard limit; the session still tells most descendants
        try:
            process = subprocess.Popen(
                command.argv,
                stdin=stdin,
                stdout=stdout,
                stderr=stderr,
                cwd=command.cwd,
                env=command.environment,
                pass_fds=command.pass_fds,
                start_new_session=True,
                bufsize=0,
            )
        finally:
            if mark:
                resource.setrlimit(resource.RLIMIT_RTTIME, before)
    return process, mark


class _Spawner:
    """A thread that lives as long as the runner and starts what outlives the thread that asked.

    The kernel's "signal me when my parent dies" means the parent thread.
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def call(self, work: Callable[[], tuple[subprocess.Popen[bytes], int]]) -> tuple[subprocess.Popen[bytes], int]:
        with self._lock:
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._serve, name="nightshift-spawn", daemon=True)
                self._thread.start()
        answers: queue.SimpleQueue[tuple[subprocess.Popen[bytes], int] | BaseException] = queue.SimpleQueue()

        def job() -> None:
            try:
                answers.put(work())
            except BaseException as error:  # noqa: BLE001  # handed to the thread that asked
                answers.put(error)

        self._jobs.put(job)
        answer = answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def _serve(self) -> None:
        while True:
            self._jobs.get()()


_spawner = _Spawner()


class RunningProcess:
    """A started command. Call ``stop`` or ``finish`` in the end; both leave no descendant.

    Attributes:
        pid: Process id of the command, or of its wrapper.
        stdin: Descriptor to write to, None unless started with a pipe.
        stdout: Descriptor to read from, non-blocking; None unless started with a pipe.
        exit_fd: Descriptor that becomes readable at the end; None where the kernel has none.
    """

    def __init__(self, command: ConfinedCommand, process: subprocess.Popen[bytes] | _Forked, mark: int) -> None:
        self.pid = process.pid
        self.command = command
        self._process = process
        self._mark = mark
        self._lock = threading.RLock()
        self._finished = False
        self._told: set[int] = set()
        self.stdin = self._take(process.stdin)
        self.stdout = self._take(process.stdout)
        if self.stdout is not None:
            os.set_blocking(self.stdout, False)
        try:
            self.exit_fd: int | None = os.pidfd_open(self.pid)
        except OSError:
            self.exit_fd = None

    @staticmethod
    def _take(stream: object) -> int | None:
        """Take a pipe's descriptor away from its file object, which would add buffers and warnings."""
        if stream is None or isinstance(stream, int):
            return stream
        descriptor = os.dup(stream.fileno())  # type: ignore[attr-defined]  # a raw file by bufsize=0
        stream.close()  # type: ignore[attr-defined]  # likewise
        return descriptor

    def exited(self) -> bool:
        """Whether the command has ended. It is not reaped yet, so its id is not used again."""
        if self._finished:
            return True
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def wait(self, seconds: float) -> bool:
        """Wait until the command has ended; returns whether it has."""
        deadline = time.monotonic() + seconds
        while not self.exited():
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            if self.exit_fd is None:
                time.sleep(min(_TICK, left))
            else:
                _wait_readable(self.exit_fd, left)
        return True

    def strays(self) -> list[int]:
        """Descendants that were orphaned and are now children of the runner, zombies too."""
        own_session = os.getsid(0)
        found = []
        for pid in children_of(os.getpid()):
            status = parent_and_session(pid) if pid != self.pid else None
            if status is None or status[1] == own_session:
                continue  # started by the runner in another way: what comes through here leads a session
            if status[1] == self.pid or (self._mark and self._mark_of(pid) == self._mark):
                found.append(pid)
        return found

    @staticmethod
    def _mark_of(pid: int) -> int:
        try:
            return resource.prlimit(pid, resource.RLIMIT_RTTIME)[0]
        except OSError:
            return 0

    def terminate(self) -> None:
        """Send TERM to the command and all that descends from it, but not to a sandbox's wrapper.

        Called again, it reaches those that have come since: a wrapper may still be starting the command.
        """
        with self._lock:
            if not self._finished:
                orphans = self.strays()
                commands = orphans if self.command.wrapped else [self.pid, *orphans]
                new = {*commands, *below([self.pid, *orphans])} - self._told
                signal_all(new, signal.SIGTERM)
                self._told |= new

    def kill(self) -> None:
        """End the command by force. What it leaves, ``finish`` kills.

        A wrapper that gets TERM ends everything below it at once; one that does not is killed itself.
        """
        with self._lock:
            if self._finished:
                return
            if self.command.wrapped:
                signal_all([self.pid], signal.SIGTERM)
                if self.wait(_WRAPPER_SECONDS):
                    return
            signal_all([self.pid], signal.SIGKILL)

    def finish(self) -> int:
        """Reap an ended command and kill what it left; returns its exit code, negative for a signal.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, a descendant cannot be killed.
        """
        with self._lock:
            if not self._finished:
                try:
                    self._remove_strays()
                finally:
                    self._process.wait()
                    self._finished = True
                    self._close()
            return self._process.returncode

    def _remove_strays(self) -> None:
        """Kill what was orphaned until nothing is left: what a killed process leaves is orphaned in turn.

        Only children of the runner are signalled. Nobody else reaps them, so their ids stay theirs.
        """
        deadline = time.monotonic() + _CLEANUP_SECONDS
        while strays := self.strays():
            signal_all(strays, signal.SIGKILL)
            reaped = [pid for pid in strays if _reaped(pid)]
            if not reaped:
                _wait_a_little(strays[0])
            if time.monotonic() > deadline:
                raise SandboxError(
                    f"{len(strays)} processes of a command could not be killed: {strays[:10]}",
                    hint="they wait inside the kernel, as for a network file system that does not answer",
                )

    def stop(self, grace: float = GRACE) -> int:
        """End the command: TERM, up to ``grace`` seconds, KILL. Returns as ``finish``."""
        with self._lock:
            if self._finished:
                return self._process.returncode
            until = time.monotonic() + grace
            while not self.exited() and time.monotonic() < until:
                self.terminate()
                self.wait(min(_REMINDER, max(0.0, until - time.monotonic())))
            if not self.exited():
                self.kill()
                self.wait(_CLEANUP_SECONDS)
            return self.finish()

    def _close(self) -> None:
        for descriptor in (self.stdin, self.stdout, self.exit_fd):
            if descriptor is not None:
                os.close(descriptor)
        self.stdin = self.stdout = self.exit_fd = None


def start(
    command: ConfinedCommand,
    *,
    stdin: int = DEVNULL,
    stdout: int = PIPE,
    stderr: int = subprocess.STDOUT,
    outlives_thread: bool = True,
    fork_server: ForkServer | None = None,
) -> RunningProcess:
    """Start a command without waiting for it.

    Args:
        command: The wrapped command; its ``cleanup`` is called here, its ``finish`` is the caller's.
        stdin: ``DEVNULL``, ``PIPE`` or a descriptor.
        stdout: ``PIPE`` or a descriptor.
        stderr: A descriptor; by default it goes where stdout goes.
        outlives_thread: The command may run longer than the calling thread.
        fork_server: Starts the wrapper of a command that has an ``inner`` one.

    Raises:
        OSError: The program or the working directory is not there.
        SandboxError: SANDBOX_UNAVAILABLE, the kernel does not let the runner adopt orphans, or the fork server
            does not work.
    """
    _subreaper.ensure()

    def work() -> tuple[subprocess.Popen[bytes], int]:
        return _spawn(command, stdin, stdout, stderr)

    process: subprocess.Popen[bytes] | _Forked
    try:
        if fork_server is not None and command.inner is not None:
            process, mark = _fork(fork_server, command, stdin, stdout, stderr)
        else:
            process, mark = _spawner.call(work) if outlives_thread else work()
    except BaseException:
        command.finish()
        raise
    finally:
        command.cleanup()
    return RunningProcess(command, process, mark)


class _Capture:
    """Keeps the head and the tail of what comes, and everything in a file once it is too much."""

    def __init__(self, capture: int, overflow: str | None) -> None:
        self._capture = capture
        self._head_size = capture // 2
        self._overflow = overflow
        self._file: int | None = None
        self._filed = 0
        self._head: list[bytes] = []
        self._tail: deque[bytes] = deque()
        self._tail_bytes = 0
        self.total = 0

    @property
    def truncated(self) -> bool:
        return self.total > self._capture

    @property
    def path(self) -> str | None:
        return self._overflow if self.truncated else None

    def feed(self, data: bytes) -> None:
        self.total += len(data)
        if not self.truncated:
            self._head.append(data)
        elif self._tail:
            self._file_away(data)
            self._tail.append(data)
            self._tail_bytes += len(data)
            keep = self._capture - self._head_size
            while len(self._tail) > 1 and self._tail_bytes - len(self._tail[0]) >= keep:
                self._tail_bytes -= len(self._tail.popleft())
        else:
            whole = b"".join([*self._head, data])
            self._file_away(whole)
            self._head = [whole[: self._head_size]]
            self._tail.append(whole[self._head_size :])
            self._tail_bytes = len(self._tail[0])

    def _file_away(self, data: bytes) -> None:
        if self._overflow is not None:
            if self._file is None:
                self._open(self._overflow)
            self._write(data)

    def _fail(self, error: OSError) -> StorageError:
        return StorageError(
            f"the output of a command cannot be kept in {self._overflow}: {error.strerror}",
            hint="free space on that file system, or choose another folder with --artifacts",
        )

    def _open(self, path: str) -> None:
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            self._file = os.open(path, flags, 0o600)
        except OSError as error:
            raise self._fail(error) from error

    def _write(self, data: bytes) -> None:
        assert self._file is not None
        data = data[: max(0, OVERFLOW_LIMIT - self._filed)]
        self._filed += len(data)
        try:
            while data:
                data = data[os.write(self._file, data) :]
        except OSError as error:
            raise self._fail(error) from error

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def output(self) -> bytes:
        head = b"".join(self._head)
        if not self.truncated:
            return head
        tail = b"".join(self._tail)
        return head + tail[len(tail) - (self._capture - self._head_size) :]


class _Loop:
    """Waits for output, the end, the time limit and the cancellation of one command, all at once."""

    def __init__(self, running: RunningProcess, capture: _Capture, cancellation: Cancellation) -> None:
        assert running.stdout is not None
        self._running = running
        self._capture = capture
        self._cancellation = cancellation
        self._stdout = running.stdout
        self._exit_fd = running.exit_fd
        self._poll = select.poll()
        self._poll.register(self._stdout, select.POLLIN)
        if self._exit_fd is not None:
            self._poll.register(self._exit_fd, select.POLLIN)
        self._poll.register(cancellation.fileno(), select.POLLIN)
        self._deaf = False  # whether a cancellation changes nothing any more
        self.timed_out = False
        self.cancelled = False

    def _read(self) -> None:
        """Take one chunk only, so that an endless writer does not keep us from the clock."""
        try:
            data = os.read(self._stdout, _CHUNK)
        except BlockingIOError:
            return
        if data:
            self._capture.feed(data)
        else:
            self._poll.unregister(self._stdout)

    def _wait(self, seconds: float) -> bool:
        """Take output until the command has ended (True), or the time or a cancellation has come (False)."""
        until = time.monotonic() + seconds
        longest = _TICK if self._exit_fd is None else _LONGEST_WAIT
        while not self.cancelled or self._deaf:
            left = until - time.monotonic()
            if left <= 0:
                break
            # Rounded up: a wait of under a millisecond would otherwise spin.
            for descriptor, _ in self._poll.poll(int(min(left, longest) * 1000) + 1):
                if descriptor == self._stdout:
                    self._read()
                elif descriptor == self._cancellation.fileno():
                    self.cancelled = True
            if self._running.exited():
                return True
        return self._running.exited()

    def run(self, timeout: float) -> None:
        """Bring the command itself to its end, by force if need be."""
        if self._wait(timeout):
            self.cancelled = False
            return
        self.timed_out = not self.cancelled
        self._deaf = True
        self._poll.unregister(self._cancellation.fileno())
        until = time.monotonic() + (CANCEL_GRACE if self.cancelled else GRACE)
        while (left := until - time.monotonic()) > 0:
            self._running.terminate()
            if self._wait(min(_REMINDER, left)):
                return
        self._running.kill()
        self._wait(_CLEANUP_SECONDS)


def _not_started(command: ConfinedCommand, error: OSError, began: float) -> ProcessResult:
    """A bare command that is not there fails as a shell would say it; a wrapper that is not is a broken sandbox."""
    message = f"{error.filename or command.argv[0]}: {error.strerror}\n".encode("utf-8", "surrogateescape")
    return ProcessResult(
        exit_code=127 if error.errno == errno.ENOENT else 126,
        signal=None,
        timed_out=False,
        cancelled=False,
        output=message,
        total_bytes=len(message),
        truncated=False,
        duration=time.monotonic() - began,
        wrapper_failed=command.wrapped,
    )


def _signal_name(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"SIG{-code}"


def run(
    command: ConfinedCommand,
    *,
    timeout: float,
    cancellation: Cancellation,
    capture: int = 8_000_000,
    overflow: str | None = None,
    stdin: bytes | None = None,
    fork_server: ForkServer | None = None,
) -> ProcessResult:
    """Run a command to its end.

    Args:
        command: The wrapped command; its ``cleanup`` and ``finish`` are called here.
        timeout: Seconds it may take; then TERM, a grace, KILL, all of its processes.
        cancellation: Ends it the same way.
        capture: Bytes of output to keep in memory; of more than that the first and the last half.
        overflow: Path of a file to be made for the whole output if it is more than ``capture``.
        stdin: What the command can read; nothing if None.
        fork_server: See ``start``.

    Raises:
        StorageError: STORAGE_FAILED, the overflow file cannot be written; the command is killed.
        SandboxError: SANDBOX_UNAVAILABLE, a descendant cannot be killed.
    """
    began = time.monotonic()
    source = DEVNULL if stdin is None else memory_file("stdin", stdin)
    try:
        running = start(command, stdin=source, outlives_thread=False, fork_server=fork_server)
    except OSError as error:
        return _not_started(command, error, began)
    finally:
        if source != DEVNULL:
            os.close(source)
    kept = _Capture(capture, overflow)
    loop = _Loop(running, kept, cancellation)
    try:
        assert running.stdout is not None
        with contextlib.suppress(OSError):  # a user's allowance of pipe memory can be used up; a small pipe works too
            fcntl.fcntl(running.stdout, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        loop.run(timeout)
        last = os.dup(running.stdout)
        try:
            code = running.finish()
            _drain_rest(last, kept)
        finally:
            os.close(last)
        ended_by_us = loop.timed_out or loop.cancelled
        output = kept.output()
        return ProcessResult(
            exit_code=code if code >= 0 else None,
            signal=_signal_name(code) if code < 0 else None,
            timed_out=loop.timed_out,
            cancelled=loop.cancelled,
            output=output,
            total_bytes=kept.total,
            truncated=kept.truncated,
            duration=time.monotonic() - began,
            wrapper_failed=not ended_by_us and command.wrapper_failed(code, output),
            overflow=kept.path,
        )
    except BaseException:
        running.stop(0)
        raise
    finally:
        kept.close()
        command.finish()


def _drain_rest(descriptor: int, kept: _Capture) -> None:
    """What the last processes wrote before they were killed: a pipe full at most."""
    left = 2 * _PIPE_SIZE
    while left > 0:
        try:
            data = os.read(descriptor, _CHUNK)
        except BlockingIOError:
            return  # somebody outside the command holds the pipe; what it has to say is not ours
        if not data:
            return
        left -= len(data)
        kept.feed(data)
