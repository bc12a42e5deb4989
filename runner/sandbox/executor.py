"""Runs the commands and file operations of one session, each under the mode of its call.

Owns the session's private folders, its file workers (one small pool for each mode, started on first
use through the same backend) and its background processes. Invariants: without a backend only
danger-full-access runs; a tighter call is refused, never run bare; ``close`` leaves no process.
Thread-safe. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import threading
import time
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError, InternalError, SandboxError
from runner.permission import Mode
from runner.record import replace
from runner.sandbox import layout, process
from runner.sandbox.base import BARE, PROPERTIES, ConfinedCommand, ProcessResult, SandboxPolicy
from runner.sandbox.launch import memory_file, own_program

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.cancellation import Cancellation
    from runner.sandbox.base import Backend, SandboxSpec
    from runner.sandbox.egress import Door, Proxy
    from runner.sandbox.forkserver import ForkServer

NOTHING_ENFORCED = ("writes", "hidden_files", "network", "unix_sockets", "system_calls", "limits", *PROPERTIES)
"""What does not hold for a command that runs bare."""

_POOL = 3
_PATIENCE = 0.05
_CHUNK = 1 << 18
_ANSWER_LIMIT = 256_000_000
_WORKER_GRACE = 1.0
_ENDED = b"""
[ended: a repository, a protected or a hidden file came into being after this process had started, so it could \
replace it; start it again]
"""


def session_policy(
    spec: SandboxSpec,
    *,
    mode: Mode,
    workspace: str,
    state: str,
    hidden: Sequence[str],
    environment: Mapping[str, str],
    readable: Sequence[str] = (),
    protected: Sequence[str] = (),
) -> SandboxPolicy:
    """Make a session's private folders and return the policy of its ordinary commands.

    Args:
        spec: The profile's sandbox section.
        mode: The session's permission mode.
        workspace: Canonical path of the workspace.
        state: A private folder outside the workspace; ``tmp/`` and ``home/`` are made in it.
        hidden: Paths commands must not see.
        environment: The scrubbed environment of commands, see ``child_environment``.
        readable: Folders outside the workspace that its repository needs, see ``SandboxPolicy``.
        protected: Files that must stay what they are wherever commands may write: those that define the run.

    Raises:
        ConfigError: CONFIG_INVALID, the workspace cannot be confined, or belongs to somebody else
            while the runner is root and may not keep root's file rights; or ``state`` lies where
            commands may write.
    """
    layout.require_workspace(workspace)
    _require_apart(state, (workspace, *spec.writable))
    if mode is not Mode.DANGER_FULL_ACCESS:
        _require_owner(workspace, spec)
    folders = {}
    for name in ("tmp", "home"):
        folders[name] = os.path.join(os.path.realpath(state), name)
        os.makedirs(folders[name], mode=0o700, exist_ok=True)
    private = {"HOME": folders["home"], "PWD": workspace} | dict.fromkeys(("TMPDIR", "TMP", "TEMP"), folders["tmp"])
    return SandboxPolicy(
        mode=mode,
        workspace=workspace,
        tmp=folders["tmp"],
        home=folders["home"],
        environment={**environment, **_git_trust(workspace), **private},
        writable=tuple(os.path.realpath(path) for path in spec.writable),
        # Both, since a link to something hidden may lie where a command can point it elsewhere.
        hidden=tuple(dict.fromkeys((*hidden, *map(os.path.realpath, hidden)))),
        protected=tuple(os.path.abspath(path) for path in protected),
        readable=tuple(os.path.realpath(path) for path in readable),
        network=spec.network,
        egress=spec.egress,
        unix_sockets=spec.unix_sockets,
        unprotected_git=spec.unprotected_git,
        keep_dac=spec.keep_dac,
        limits=spec.limits,
    )


def _git_trust(workspace: str) -> dict[str, str]:
    """Lets git work in a workspace of another owner, for these commands and this folder only."""
    if os.stat(workspace).st_uid == os.geteuid():
        return {}
    return {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "safe.directory", "GIT_CONFIG_VALUE_0": workspace}


def _require_apart(state: str, writable: Sequence[str]) -> None:
    """Private folders where commands write could be replaced by them, and mounts would follow."""
    path = os.path.realpath(state)
    for folder in map(os.path.realpath, writable):
        if layout.is_within(path, folder):
            raise ConfigError(
                f"the session's private folder {path} lies in {folder}, where commands may write",
                hint="set TMPDIR of the runner to a folder outside the workspace and sandbox.writable",
            )


def _require_owner(workspace: str, spec: SandboxSpec) -> None:
    """Root without its capabilities is a stranger in a folder of another user."""
    owner = os.stat(workspace).st_uid
    if os.geteuid() == 0 and owner != 0 and not spec.keep_dac:
        raise ConfigError(
            f"the workspace {workspace} belongs to user {owner}, but the runner is root, whose commands "
            "run without root's capabilities and so could not write there",
            hint="run as the workspace's owner, change its owner, or set sandbox.keep_dac: true",
        )


def _through(door: Door, command: ConfinedCommand) -> ConfinedCommand:
    """Tie a door to the life of the command it was made for. A command that did not open it was not started."""

    def finish() -> None:
        command.finish()
        door.close()

    def wrapper_failed(code: int, output: bytes) -> bool:
        return command.wrapper_failed(code, output) or not door.was_opened()

    return replace(command, finish=finish, wrapper_failed=wrapper_failed)


def _not_run(reason: str) -> ProcessResult:
    """The result of a command that was not started for want of a workspace."""
    output = f"{reason}\n".encode("utf-8", "surrogateescape")
    return ProcessResult(
        exit_code=126,
        signal=None,
        timed_out=False,
        cancelled=False,
        output=output,
        total_bytes=len(output),
        truncated=False,
        duration=0.0,
        workspace_lost=True,
    )


class _Conversation:
    """One running file worker and the request in flight."""

    def __init__(self, command: ConfinedCommand, fork_server: ForkServer | None) -> None:
        self._command = command
        self._errors = memory_file("worker-errors")
        try:
            self._process = process.start(
                command, stdin=process.PIPE, stdout=process.PIPE, stderr=self._errors, fork_server=fork_server
            )
        except OSError as error:
            os.close(self._errors)
            raise SandboxError(
                f"the file worker could not be started: {error}", hint="run 'nightshift doctor'"
            ) from error
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin, False)
        self._next_id = 0
        self._answered = False

    def kill(self) -> None:
        """End the worker; whoever waits for its answer learns that it is gone."""
        self._process.kill()

    def close(self, grace: float) -> int:
        """End the worker and free what it used; returns its exit code."""
        code = self._process.stop(grace)
        os.close(self._errors)
        self._command.finish()
        return code

    def failure(self) -> str | None:
        """After the worker's end: why the sandbox did not start it, None if it did."""
        if self._answered:
            return None
        self._process.wait(_WORKER_GRACE)
        text = os.pread(self._errors, 8_192, 0).decode("utf-8", "backslashreplace").strip()
        return (text or "no message") if self._command.wrapper_failed(0, text.encode()) else None

    def ask(self, op: str, args: Mapping[str, Any], deadline: float, cancellation: Cancellation) -> dict[str, Any]:
        """Send one request and wait for its answer.

        Raises:
            EOFError: The worker is gone.
            TimeoutError: No answer in time; the worker must be ended.
            InterruptedError: The run was cancelled; the worker must be ended.
        """
        import json

        self._next_id += 1
        request = json.dumps({"id": self._next_id, "op": op, "args": args}, separators=(",", ":")).encode("ascii")
        wait = _Wait(deadline, cancellation)
        self._send(request + b"\n", wait)
        answer: dict[str, Any] = json.loads(self._receive(wait))
        self._answered = True
        if answer.pop("id") != self._next_id:
            raise InternalError("the file worker answered another request")
        return answer

    def _send(self, data: bytes, wait: _Wait) -> None:
        assert self._process.stdin is not None
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._process.stdin, rest) :]
            except BlockingIOError:
                wait.until(self._process.stdin, select.POLLOUT)
            except BrokenPipeError:
                raise EOFError from None

    def _receive(self, wait: _Wait) -> bytes:
        assert self._process.stdout is not None
        parts: list[bytes] = []
        size = 0
        while True:
            wait.until(self._process.stdout, select.POLLIN)
            try:
                data = os.read(self._process.stdout, _CHUNK)
            except BlockingIOError:
                continue
            if not data:
                raise EOFError
            parts.append(data)
            size += len(data)
            if data.endswith(b"\n"):
                return b"".join(parts)
            if size > _ANSWER_LIMIT:
                raise EOFError


class _Wait:
    """Waits for a descriptor, a deadline and a cancellation at once."""

    def __init__(self, deadline: float, cancellation: Cancellation) -> None:
        self._deadline = deadline
        self._cancellation = cancellation

    def until(self, descriptor: int, events: int) -> None:
        """Return when ``descriptor`` is ready.

        Raises:
            TimeoutError: The deadline passed.
            InterruptedError: The run was cancelled.
        """
        poll = select.poll()
        poll.register(descriptor, events)
        poll.register(self._cancellation.fileno(), select.POLLIN)
        while True:
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError
            ready = {each for each, _ in poll.poll(int(min(left, 3_600) * 1000) + 1)}
            if self._cancellation.cancelled:
                raise InterruptedError
            if descriptor in ready:
                return


class Worker:
    """File and search operations, confined. Calls from several threads share a few processes."""

    def __init__(self, executor: Executor, mode: Mode) -> None:
        self._executor = executor
        self._mode = mode
        self._changed = threading.Condition()
        self._idle: list[_Conversation] = []
        self._busy: set[_Conversation] = set()
        self._starting = 0
        self._closed = False

    def call(self, op: str, args: Mapping[str, Any], *, timeout: float, cancellation: Cancellation) -> dict[str, Any]:
        """Do one operation.

        Returns:
            ``{"ok": True, "value": {...}}`` or ``{"ok": False, "code": ..., "message": ...}``. Beside the
            worker's own codes: ``TIMEOUT``, ``CANCELLED``, ``IO`` when the worker died, and
            ``NOT_FOUND`` when the workspace is gone.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, the sandbox could not start the worker.
        """
        lost = self._executor.lost_workspace(self._mode)
        if lost is not None:
            return {"ok": False, "code": "NOT_FOUND", "message": lost}
        deadline = time.monotonic() + timeout
        conversation: _Conversation | None = None
        try:
            conversation = self._acquire(deadline, cancellation)
            answer = conversation.ask(op, args, deadline, cancellation)
        except TimeoutError:
            self._discard(conversation)
            return {"ok": False, "code": "TIMEOUT", "message": f"{op} did not end within {timeout:g} s"}
        except InterruptedError:
            self._discard(conversation)
            return {"ok": False, "code": "CANCELLED", "message": "the run was cancelled"}
        except EOFError:
            return self._lost(conversation, op)
        except BaseException:
            self._discard(conversation)
            raise
        self._release(conversation)
        return answer

    def _acquire(self, deadline: float, cancellation: Cancellation) -> _Conversation:
        patience = time.monotonic() + _PATIENCE
        with self._changed:
            while True:
                if self._closed:
                    raise InternalError("a file operation was asked for after the session's end")
                if self._idle:
                    conversation = self._idle.pop()
                    self._busy.add(conversation)
                    return conversation
                count = len(self._busy) + self._starting
                now = time.monotonic()
                # Most operations take a millisecond, a start takes thirty: wait a little before the next start.
                if count == 0 or (count < _POOL and now >= patience):
                    self._starting += 1
                    break
                if cancellation.cancelled:
                    raise InterruptedError
                if now >= deadline:
                    raise TimeoutError
                self._changed.wait(min(_PATIENCE, deadline - now))
        try:
            command = self._executor.command(own_program("worker.py"), mode=self._mode)
            conversation = _Conversation(command, self._executor.fork_server)
        finally:
            with self._changed:
                self._starting -= 1
                self._changed.notify_all()
        with self._changed:
            self._busy.add(conversation)
            if self._closed:
                conversation.kill()
        return conversation

    def _release(self, conversation: _Conversation) -> None:
        with self._changed:
            self._busy.discard(conversation)
            if not self._closed:
                self._idle.append(conversation)
                self._changed.notify()
                return
        conversation.close(_WORKER_GRACE)

    def _discard(self, conversation: _Conversation | None) -> None:
        if conversation is None:
            return
        conversation.close(0)
        with self._changed:
            self._busy.discard(conversation)
            self._changed.notify_all()

    def _lost(self, conversation: _Conversation | None, op: str) -> dict[str, Any]:
        assert conversation is not None
        reason = conversation.failure()
        self._discard(conversation)
        lost = self._executor.lost_workspace(self._mode)
        if lost is not None:
            return {"ok": False, "code": "NOT_FOUND", "message": lost}
        if reason is not None and not self._closed:
            raise self._executor.broken(self._mode, reason)
        return {"ok": False, "code": "IO", "message": f"the file worker ended during {op}"}

    def close(self) -> None:
        """End all processes, also those that work on a request."""
        with self._changed:
            self._closed = True
            idle, self._idle = self._idle, []
            for conversation in self._busy:
                conversation.kill()
            self._changed.notify_all()
        for conversation in idle:
            conversation.close(_WORKER_GRACE)
        with self._changed:
            self._changed.wait_for(lambda: not self._busy and not self._starting, timeout=10)


class _Background:
    """A background process and the open file of its output."""

    def __init__(self, running: process.RunningProcess, output: int) -> None:
        self.running = running
        self.output = output

    def close(self) -> None:
        """Free what it used, after its end."""
        self.running.command.finish()
        os.close(self.output)


class Executor:
    """Everything that runs outside the runner's own process in one session.

    Attributes:
        mode: The session's permission mode.
        workspace: Canonical path of the workspace.
        tmp: The session's temporary folder, seen by commands and file tools under the same path.
        home: The private HOME of commands.
        fork_server: Starts the commands of a backend that has a supervisor; None starts each supervisor anew.
        proxy: What lets commands through to what the policy's ``egress`` names; None without such a list.
    """

    def __init__(
        self,
        backend: Backend | None,
        policy: SandboxPolicy,
        *,
        fork_server: ForkServer | None = None,
        proxy: Proxy | None = None,
    ) -> None:
        """Start nothing yet.

        Args:
            backend: Confines the commands; None means that they run bare, which only danger-full-access may.
            policy: The policy of the session's ordinary commands, see ``session_policy``.
            fork_server: Makes the commands of a backend with a supervisor start faster; closed with the executor.
            proxy: Enforces the policy's ``egress``; closed with the executor.
        """
        self._backend = backend
        self._policy = policy
        self.mode = policy.mode
        self.workspace = policy.workspace
        self.tmp = policy.tmp
        self.home = policy.home
        self.fork_server = fork_server
        self.proxy = proxy
        self._lock = threading.Lock()
        self._workers: dict[Mode, Worker] = {}
        self._confining = threading.Lock()
        self._background: dict[str, _Background] = {}

    @property
    def backend_name(self) -> str:
        """Name of the backend, ``none`` without one."""
        return BARE if self._backend is None else self._backend.name

    def not_enforced(self, mode: Mode) -> tuple[str, ...]:
        """Promises of the sandbox that do not hold for commands in ``mode``."""
        if mode is Mode.DANGER_FULL_ACCESS or self._backend is None:
            return NOTHING_ENFORCED
        return self._backend.not_enforced(replace(self._policy, mode=mode))

    def is_protected(self, path: str) -> bool:
        """Whether ``path`` (absolute, its folder canonical) is a file that must stay what it is, or a link to one."""
        return path in layout.steps_to(self._policy.protected)

    def is_private(self, path: str, mode: Mode) -> bool:
        """Whether commands in ``mode`` find something of their own at ``path``, which the machine does not have there.

        bubblewrap puts a fresh folder in the place of ``/tmp`` and ``/var/tmp`` for each command.
        """
        if mode is Mode.DANGER_FULL_ACCESS or self._backend is None:
            return False
        policy = self._policy
        shown = (policy.workspace, policy.tmp, policy.home, *policy.writable, *policy.readable)
        replaced = any(layout.is_within(path, folder) for folder in self._backend.private_folders())
        return replaced and not any(layout.is_within(path, folder) for folder in shown)

    def lost_workspace(self, mode: Mode) -> str | None:
        """What is wrong with the workspace if something deleted or replaced it since, None if it is there."""
        if not os.path.isdir(self.workspace):
            return f"the workspace {self.workspace} is gone: it was deleted, moved or replaced"
        if mode is not Mode.DANGER_FULL_ACCESS and os.path.realpath(self.workspace) != self.workspace:
            return f"the workspace {self.workspace} is gone: a symbolic link stands there or above it"
        return None

    def command(
        self,
        argv: Sequence[str],
        *,
        mode: Mode,
        cwd: str | None = None,
        writable: Sequence[str] = (),
        readable: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> ConfinedCommand:
        """Wrap ``argv`` for ``mode``; arguments as for ``run``.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, ``mode`` needs a backend and there is none.
        """
        folder = self.workspace if cwd is None else cwd
        variables = {**self._policy.environment, "PWD": folder, **(environment or {})}
        if mode is Mode.DANGER_FULL_ACCESS:
            return ConfinedCommand(
                argv=list(argv), environment=variables, cwd=folder, backend=BARE, not_enforced=NOTHING_ENFORCED
            )
        if self._backend is None:
            raise SandboxError(
                f"a call in {mode.value} needs a sandbox, and this session has none",
                hint="name what you need in sandbox.require, so that danger-full-access gets a backend too",
            )
        roots = (*self._policy.writable, *(os.path.realpath(path) for path in writable))
        kept = (*self._policy.readable, *readable)
        policy = replace(self._policy, mode=mode, environment=variables, writable=roots, readable=kept)
        with self._confining:
            return self._confine(self._backend, argv, policy, folder)

    def _confine(self, backend: Backend, argv: Sequence[str], policy: SandboxPolicy, cwd: str) -> ConfinedCommand:
        """Wrap a command; background processes that could lead its mounts astray while they are made end first.

        Such a process was started before something became protected or hidden, so that it can still move that
        away and put a link in its place.
        """
        try:
            command = self._wrap(backend, argv, policy, cwd)
        except (ConfigError, SandboxError, OSError):
            if not self._end_background(lambda _: True):
                raise
            return self._wrap(backend, argv, policy, cwd)  # what failed may have been their doing
        plan = command.layout
        if plan is not None and self._end_background(lambda other: other.endangers(plan)):
            command.cleanup()
            command.finish()
            command = self._wrap(backend, argv, policy, cwd)
        return command

    def _wrap(self, backend: Backend, argv: Sequence[str], policy: SandboxPolicy, cwd: str) -> ConfinedCommand:
        """Wrap a command, with a way to the proxy if there is one."""
        if self.proxy is None:
            return backend.confine(argv, policy, cwd=cwd)
        door = self.proxy.door()
        try:
            environment = {**policy.environment, **self.proxy.environment}
            command = backend.confine(argv, replace(policy, environment=environment, doorway=door.inside), cwd=cwd)
        except BaseException:
            door.close()
            raise
        return _through(door, command)

    def _end_background(self, chosen: Callable[[layout.Layout], bool]) -> bool:
        """End the confined background processes with a layout that is ``chosen``; whether there were any."""
        with self._lock:
            ending = {
                call: each
                for call, each in self._background.items()
                if each.running.command.layout is not None and chosen(each.running.command.layout)
            }
            for call in ending:
                del self._background[call]
        for each in ending.values():
            with contextlib.suppress(OSError):  # a full disk is no reason to let it live
                os.write(each.output, _ENDED)
            try:
                each.running.stop()
            finally:
                each.close()
        return bool(ending)

    def run(
        self,
        argv: Sequence[str],
        *,
        mode: Mode,
        timeout: float,
        cancellation: Cancellation,
        cwd: str | None = None,
        capture: int = 8_000_000,
        overflow: str | None = None,
        writable: Sequence[str] = (),
        readable: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        stdin: bytes | None = None,
    ) -> ProcessResult:
        """Run a command to its end.

        Args:
            argv: The command; its program is an absolute path or found on the environment's PATH.
            mode: Permission mode of this call.
            timeout: Seconds.
            cancellation: Ends it early.
            cwd: Working directory; the workspace if None.
            capture: Bytes of output kept in memory.
            overflow: File for the whole output if it is more than that.
            writable: Further folders this one command may write (workspace-write only).
            readable: Folders this one command must be able to read, even below a private ``/tmp``.
            environment: Variables to add to the session's environment or to replace in it.
            stdin: What it can read; nothing if None.

        Returns:
            What became of it. A workspace that is gone is a failed command, not a broken sandbox.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, the sandbox could not start the command.
            StorageError: STORAGE_FAILED, the overflow file cannot be written.
        """
        lost = self.lost_workspace(mode)
        if lost is not None:
            return _not_run(lost)
        command = self.command(argv, mode=mode, cwd=cwd, writable=writable, readable=readable, environment=environment)
        result = process.run(
            command,
            timeout=timeout,
            cancellation=cancellation,
            capture=capture,
            overflow=overflow,
            stdin=stdin,
            fork_server=self.fork_server,
        )
        if result.wrapper_failed:
            lost = self.lost_workspace(mode)
            if lost is not None:
                return _not_run(lost)
            raise self.broken(mode, result.output.decode("utf-8", "backslashreplace").strip())
        return result

    def broken(self, mode: Mode, output: str) -> SandboxError:
        """The error for a sandbox that did not start what it should have."""
        lines = output.splitlines() or ["no message"]
        return SandboxError(
            f"the {self.backend_name} sandbox could not start a command: {lines[-1]}",
            hint="run 'nightshift doctor' on this machine",
            details={"backend": self.backend_name, "mode": mode.value, "output": output[-4_000:]},
        )

    def start_background(self, argv: Sequence[str], *, mode: Mode, output: str, call_id: str) -> int:
        """Start a command that may outlive its call; returns its process id.

        Args:
            argv: The command.
            mode: Permission mode of this call.
            output: File to be made for stdout and stderr.
            call_id: The call it belongs to.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, no backend for ``mode``, or the wrapper is not there.
            OSError: A bare program or the workspace is not there, or the file cannot be made.
        """
        lost = self.lost_workspace(mode)
        if lost is not None:
            raise NotADirectoryError(errno.ENOTDIR, lost)
        with self._lock:
            if call_id in self._background:
                raise InternalError(f"call {call_id} has a background process already")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        target = os.open(output, flags, 0o600)
        try:
            command = self.command(argv, mode=mode)
            running = process.start(command, stdout=target, fork_server=self.fork_server)
        except OSError as error:
            os.close(target)
            if mode is Mode.DANGER_FULL_ACCESS:
                raise
            raise self.broken(mode, str(error)) from error
        except BaseException:
            os.close(target)
            raise
        with self._lock:
            self._background[call_id] = _Background(running, target)
        return running.pid

    def background(self) -> list[str]:
        """Calls whose background processes still run, oldest first. Those that ended are cleaned up.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, the sandbox could not start one of them.
        """
        with self._lock:
            ended = {call: each for call, each in self._background.items() if each.running.exited()}
            for call in ended:
                del self._background[call]
            left = list(self._background)
        for call, each in ended.items():
            code = each.running.finish()
            failed = each.running.command.wrapper_failed(code, b"")
            each.close()
            if failed:
                raise self.broken(self.mode, f"the background process of {call} was not started, see its output")
        return left

    def stop_background(self) -> list[str]:
        """End all background processes; returns the calls whose processes were still running.

        Raises:
            SandboxError: SANDBOX_UNAVAILABLE, one of them cannot be killed.
        """
        with self._lock:
            stopping, self._background = self._background, {}
        running_still = [call for call, each in stopping.items() if not each.running.exited()]
        for each in stopping.values():
            each.running.terminate()
        until = time.monotonic() + process.GRACE
        failed = None
        for each in stopping.values():
            try:
                each.running.stop(max(0.0, until - time.monotonic()))
            except SandboxError as error:
                failed = error  # the others must end all the same
            each.close()
        if failed is not None:
            raise failed
        return running_still

    def worker(self, mode: Mode) -> Worker:
        """The file worker for ``mode``. Its first call starts a process."""
        with self._lock:
            if mode not in self._workers:
                self._workers[mode] = Worker(self, mode)
            return self._workers[mode]

    def close(self) -> None:
        """End everything this session started. May be called twice."""
        try:
            self.stop_background()
        finally:
            with self._lock:
                workers, self._workers = self._workers, {}
            for worker in workers.values():
                worker.close()
            if self.fork_server is not None:
                self.fork_server.close()
            if self.proxy is not None:
                self.proxy.close()
