"""Proves a backend by running one command through it, with the builder that wraps every command.

The command tries what must work and what must not; the host then looks for itself at what happened.
That a program is installed proves nothing. Invariants: what the probe makes it takes away again;
the repository and all files of the workspace keep their content; a check that cannot be made fails.
Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING

from runner.errors import ConfigError, SandboxError
from runner.permission import Mode
from runner.record import field, record, replace
from runner.sandbox.base import BACKENDS, DISABLE_VARIABLE, MAC_BACKENDS, disabled_backends
from runner.sandbox.launch import interpreter
from runner.sandbox.layout import is_within, steps_to
from runner.sandbox.process import run

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping
    from typing import Self

    from runner.cancellation import Cancellation
    from runner.sandbox.base import Backend, ProcessResult, SandboxPolicy

_TIMEOUT = 15.0
_CONTENT = b"nightshift-probe"
_CANARY_TIME = 1_000_000_000_000_000_000
_KEPT_CAPABILITIES = 1 << 1 | 1 << 3  # CAP_DAC_OVERRIDE, CAP_FOWNER

_OUTSIDE_FOLDERS = ("/", "/etc", "/usr", "/var", "/opt")

_PROGRAM = r"""
import _socket, os, sys
workspace, git, protected, tmp, outside, port, runner, shared, name, *folders = sys.argv[1:]

def say(check, value):
    print(check, value, sep="\t")

def attempt(check, work, *arguments):
    try:
        work(*arguments)
    except OSError as error:
        say(check, "denied %d" % (error.errno or -1))
    else:
        say(check, "allowed")

def leave(folder):
    os.close(os.open(os.path.join(folder, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW))

def make(folder):
    leave(folder)
    os.unlink(os.path.join(folder, name))

def touch(path, flags=0):
    os.close(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK | flags))

def change():
    try:
        return make(workspace)
    except OSError as error:
        last = error
    for entry in list(os.scandir(workspace))[:200]:
        try:
            if entry.name == ".git" or entry.is_symlink():
                continue
            if entry.is_dir():
                return make(entry.path)
            if entry.is_file():
                return touch(entry.path)
        except OSError as error:
            last = error
    raise last

def connect(family, address):
    one = _socket.socket(family, _socket.SOCK_STREAM)
    one.settimeout(2)
    one.connect(address)

def connect_near():
    os.chdir(outside)
    connect(_socket.AF_UNIX, "socket")

attempt("tmp", make, tmp)
attempt("workspace", change)
if git:
    attempt("git", leave if os.path.isdir(git) else touch, git)
if protected:
    attempt("protected", touch, protected)
attempt("overwrite", touch, os.path.join(outside, "canary"), os.O_TRUNC)
for folder in (outside, *folders):
    attempt("create in " + folder, leave, folder)
attempt("secret", open, os.path.join(outside, "secret"), "rb")
attempt("metadata", os.utime, os.path.join(outside, "canary"), (1, 1))
attempt("signal", os.kill, int(runner), 0)
attempt("environ", open, "/proc/" + runner + "/environ", "rb")
attempt("tcp", connect, _socket.AF_INET, ("127.0.0.1", int(port)))
attempt("unix", connect_near)
attempt("abstract", connect, _socket.AF_UNIX, b"\0" + name.encode())
attempt("pair", _socket.socketpair)
attempt("filter", _socket.socket, 38, _socket.SOCK_SEQPACKET)
if shared:
    attempt("shm", leave, "/dev/shm")
say("pid-namespace", os.readlink("/proc/self/ns/pid"))
for line in open("/proc/self/status"):
    key, _, value = line.partition(":")
    if key in ("NoNewPrivs", "Seccomp", "CapEff", "CapPrm"):
        say(key, value.strip())
say("end", "allowed")
"""


@record
class ProbeReport:
    """What trying one backend gave.

    Attributes:
        backend: Its name.
        ok: Whether it confines here.
        reason: Why not, or None.
        fix: What to install or change, or None.
        output: What the failed command and its wrapper wrote.
        missing: Properties a profile may require that it does not have here.
        not_enforced: Promises it does not keep here.
        checks: What each check of the probe saw: ``allowed``, ``denied ERRNO``, or a value.
        duration: Seconds.
    """

    backend: str
    ok: bool
    reason: str | None = None
    fix: str | None = None
    output: str = ""
    missing: tuple[str, ...] = ()
    not_enforced: tuple[str, ...] = ()
    checks: Mapping[str, str] = field(default_factory=dict)
    duration: float = 0.0


def build_backend(name: str) -> Backend:
    """Make the backend called ``name``.

    Raises:
        SandboxError: SANDBOX_UNAVAILABLE, not for this platform, or a part of it is not there.
        ConfigError: CONFIG_INVALID, no such backend.
    """
    import sys

    if name in MAC_BACKENDS and sys.platform != "darwin":
        raise SandboxError(
            f"{name} confines on macOS only", hint="use sandbox.backend: auto, bubblewrap or landlock on Linux"
        )
    if name in BACKENDS and sys.platform != "linux":
        raise SandboxError(
            f"{name} confines on Linux only, not on {sys.platform}", hint="run in a Linux machine or container"
        )
    if name == "bubblewrap":
        from runner.sandbox.bubblewrap import Bubblewrap

        return Bubblewrap()
    if name == "landlock":
        from runner.sandbox.landlock import Landlock

        return Landlock()
    if name == "seatbelt":
        from runner.sandbox.seatbelt import Seatbelt

        return Seatbelt()
    raise ConfigError(f"there is no sandbox backend {name!r}", hint=f"use auto, {', '.join(BACKENDS)} or seatbelt")


def probe(name: str, policy: SandboxPolicy, *, cancellation: Cancellation, environ: Mapping[str, str]) -> ProbeReport:
    """Try one backend under ``policy``. What goes wrong with the backend is a report, not an exception.

    Raises:
        ConfigError: CONFIG_INVALID, no such backend, or no backend could apply this policy.
    """
    began = time.monotonic()
    if name in disabled_backends(environ):
        fix = f"take {name} out of {DISABLE_VARIABLE}"
        return ProbeReport(name, ok=False, reason=f"switched off by {DISABLE_VARIABLE}", fix=fix)
    try:
        backend = build_backend(name)
        with _Arena(policy) as arena:
            result, not_enforced = arena.try_out(backend, cancellation)
            checks = dict(line.split("\t", 1) for line in _lines(result) if "\t" in line)
            missing = backend.missing_properties(policy)
            seen = arena.look()
            problem = _command_problem(result) or _verdict(policy, checks, seen, missing, arena)
    except SandboxError as error:
        return ProbeReport(name, ok=False, reason=error.message, fix=error.hint, duration=time.monotonic() - began)
    except OSError as error:
        reason = f"the probe cannot be prepared: {error}"
        return ProbeReport(name, ok=False, reason=reason, duration=time.monotonic() - began)
    text = "\n".join(_lines(result))
    return ProbeReport(
        name,
        ok=problem is None,
        reason=problem,
        fix=None if problem is None else fix_for(name, text, environ),
        output="" if problem is None else text,
        missing=missing,
        not_enforced=not_enforced,
        checks=checks,
        duration=time.monotonic() - began,
    )


def _lines(result: ProcessResult) -> list[str]:
    return result.output.decode("utf-8", "backslashreplace").strip().splitlines()


def _command_problem(result: ProcessResult) -> str | None:
    last = (_lines(result) or ["no output"])[-1]
    if result.timed_out:
        return f"the probe did not end within {_TIMEOUT:.0f} s"
    if result.cancelled:
        return "the run was cancelled during the probe"
    if result.wrapper_failed:
        return last
    if result.exit_code != 0:
        return f"the probe ended with {result.exit_code or result.signal}: {last}"
    return None


class _Arena:
    """What the probe may and may not touch, and the host's own look at it afterwards."""

    def __init__(self, policy: SandboxPolicy) -> None:
        self.policy = policy
        self.name = f".nightshift-probe-{os.urandom(6).hex()}"
        git = os.path.join(policy.workspace, ".git")
        self.git = git if os.path.lexists(git) and not policy.unprotected_git else ""
        kept = steps_to(policy.protected)
        self.protected = next((path for path in kept if is_within(path, policy.workspace) and os.path.isfile(path)), "")

    def __enter__(self) -> Self:
        self._outside = os.path.join(os.path.realpath(os.path.dirname(self.policy.tmp)), f"probe-{self.name[-12:]}")
        os.mkdir(self._outside, 0o700)
        self._canary = os.path.join(self._outside, "canary")
        self._secret = os.path.join(self._outside, "secret")
        for path in (self._canary, self._secret):
            with open(path, "wb") as file:
                file.write(_CONTENT)
        os.utime(self._canary, ns=(_CANARY_TIME, _CANARY_TIME))
        self._descriptor = os.open(self._outside, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        self._listeners: dict[str, socket.socket] = {}
        for name, address in (
            ("tcp", ("127.0.0.1", 0)),
            # A socket's address must be short; the descriptor makes any folder's path fit.
            ("unix", f"/proc/self/fd/{self._descriptor}/socket"),
            ("abstract", b"\0" + self.name.encode()),
        ):
            # Where the runner itself can have no such socket, the command's own answer must do.
            with contextlib.suppress(OSError):
                self._listeners[name] = _listen(address)
        return self

    def __exit__(self, *_: object) -> None:
        for listener in self._listeners.values():
            listener.close()
        os.close(self._descriptor)
        for name in os.listdir(self._outside):
            os.unlink(os.path.join(self._outside, name))
        os.rmdir(self._outside)

    def port(self) -> int:
        """Where the probe's own server listens on loopback, 0 if it does not."""
        return self._listeners["tcp"].getsockname()[1] if "tcp" in self._listeners else 0

    def try_out(self, backend: Backend, cancellation: Cancellation) -> tuple[ProcessResult, tuple[str, ...]]:
        """Run the program under the backend; what it printed, and what the backend says it does not keep."""
        policy = replace(self.policy, hidden=(*self.policy.hidden, self._secret))
        arguments = (
            policy.workspace,
            self.git,
            self.protected,
            policy.tmp,
            self._outside,
            str(self.port()),
            str(os.getpid()),
            "" if policy.mode is Mode.READ_ONLY else "1",
            self.name,
            *_OUTSIDE_FOLDERS,
        )
        command = backend.confine([*interpreter(), "-c", _PROGRAM, *arguments], policy)
        result = run(command, timeout=_TIMEOUT, cancellation=cancellation)
        # The hidden secret is the probe's own; whether names of hidden files show depends on the policy's.
        return result, tuple(gap for gap in command.not_enforced if gap != "hidden_names" or self.policy.hidden)

    def look(self) -> dict[str, bool]:
        """What happened on the host, name → whether; what should not be there is taken away."""
        with open(self._canary, "rb") as file:
            changed = file.read() != _CONTENT
        seen = {
            "overwrite": changed,
            "metadata": os.stat(self._canary).st_mtime_ns != _CANARY_TIME,
            "shm": self._remove("/dev/shm"),  # noqa: S108  # the shared folder is what is looked at
            "git": bool(self.git) and self._remove(self.git),
        }
        for folder in (self._outside, *_OUTSIDE_FOLDERS):
            seen[f"create in {folder}"] = self._remove(folder)
        for name, listener in self._listeners.items():
            seen[name] = _was_reached(listener)
        return seen

    def _remove(self, folder: str) -> bool:
        try:
            os.unlink(os.path.join(folder, self.name))
        except OSError:
            return False
        return True

    def has_something_writable(self) -> bool:
        """Whether the workspace holds an entry that a command may change even where it may add none."""
        kept = [*steps_to(self.policy.protected), *self.policy.hidden]
        with os.scandir(self.policy.workspace) as entries:
            return any(
                entry.name != ".git"
                and not entry.is_symlink()
                and not any(is_within(path, entry.path) for path in kept)
                for entry in entries
            )


def _listen(address: tuple[str, int] | str | bytes) -> socket.socket:
    import socket

    listener = socket.socket(socket.AF_INET if isinstance(address, tuple) else socket.AF_UNIX)
    listener.bind(address)
    listener.listen()
    listener.setblocking(False)
    return listener


def _was_reached(listener: socket.socket) -> bool:
    try:
        connection, _ = listener.accept()
    except OSError:
        return False
    connection.close()
    return True


def _verdict(
    policy: SandboxPolicy,
    checks: Mapping[str, str],
    seen: Mapping[str, bool],
    missing: tuple[str, ...],
    arena: _Arena,
) -> str | None:
    """The first thing that is not as it must be, None if all is well."""
    isolated = checks.get("pid-namespace") != os.readlink("/proc/self/ns/pid")
    forbidden = {name: "a command can write outside the workspace" for name in checks if name.startswith("create in ")}
    forbidden |= {
        "overwrite": "a command can overwrite files outside the workspace",
        "secret": "a command can read a hidden file",
        "filter": "the system-call filter is not in force",
    }
    needed = {"end": "the probe did not get to its end", "tmp": "the temporary folder cannot be written"}
    needed["pair"] = "connected socket pairs are refused"
    if arena.git:
        forbidden["git"] = "a command can write into the repository's .git"
    if arena.protected:
        forbidden["protected"] = "a command can write to a file that defines the run"
    if not policy.unix_sockets:
        forbidden |= dict.fromkeys(("unix", "abstract"), "a command can connect to Unix sockets")
    if policy.network and arena.port():
        needed["tcp"] = "the network is on, but this machine cannot be reached"
    elif not policy.network:
        forbidden["tcp"] = "the network is off, but a command can reach this machine"
    if policy.mode is Mode.READ_ONLY:
        forbidden["workspace"] = "a command can write in the workspace"
    elif arena.has_something_writable():
        needed["workspace"] = "nothing in the workspace can be written"
    if not isolated:
        forbidden["environ"] = "a command can read the runner's environment"
        if "signal_scope" not in missing:
            forbidden["signal"] = "a command can signal the runner"
    if "metadata" not in missing:
        forbidden["metadata"] = "a command can change times and modes outside the workspace"
    for name, text in needed.items():
        if checks.get(name) != "allowed":
            return f"{text} ({name}: {checks.get(name, 'not tried')})"
    for name, text in forbidden.items():
        if not checks.get(name, "").startswith("denied") or seen.get(name, False):
            return f"{text} ({name}: {checks.get(name, 'not tried')})"
    return _process_problem(policy, checks, seen, missing, isolated=isolated)


def _process_problem(
    policy: SandboxPolicy,
    checks: Mapping[str, str],
    seen: Mapping[str, bool],
    missing: tuple[str, ...],
    *,
    isolated: bool,
) -> str | None:
    if "pid_isolation" not in missing and not isolated:
        return "a command shares the runner's process namespace"
    if "private_shm" not in missing and seen["shm"]:
        return "a command shares /dev/shm with the host"
    if checks.get("Seccomp") != "2" or checks.get("NoNewPrivs") != "1":
        return "the command runs without system-call filter or without no_new_privs"
    kept = _KEPT_CAPABILITIES if policy.keep_dac else 0
    for name in ("CapEff", "CapPrm"):
        if int(checks.get(name, "f"), 16) & ~kept:
            return f"the command has capabilities ({name}: {checks.get(name, 'unknown')})"
    return None


def fix_for(name: str, output: str, environ: Mapping[str, str]) -> str:
    """What to do about a failed probe, from what it said and from this machine."""
    if name != "bubblewrap":
        return "run 'nightshift doctor' for what the probe saw, and report it: this should work here"
    from runner.sandbox.machine import fix_for_bubblewrap, read_machine

    return fix_for_bubblewrap(output, read_machine(environ))
