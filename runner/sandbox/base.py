"""Settings and the contract of a sandbox backend.

``confine(argv, policy)`` is pure: it wraps argv and says what to inherit. ``process.run``
executes. The policy goes with each call and is fully resolved: absolute canonical paths only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from runner.errors import ConfigError
from runner.record import field, mutable_record, record

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.permission import Mode
    from runner.sandbox.egress import Endpoint
    from runner.sandbox.layout import Layout


BARE = "none"
"""Name that stands for "no backend" in log and reports."""

BACKENDS = ("bubblewrap", "landlock")
"""Those of Linux, in the order in which ``auto`` tries them."""

MAC_BACKENDS = ("seatbelt",)
"""Those of macOS."""

DISABLE_VARIABLE = "NIGHTSHIFT_DISABLE_BACKENDS"
"""Names of backends, separated by commas, to be treated as unavailable. It can only make things stricter."""

PROPERTIES = ("pid_isolation", "git_protect", "metadata", "private_shm", "signal_scope")
"""What a profile may ``require`` of a backend."""


def platform_backends(platform: str) -> tuple[str, ...]:
    """The backends that are tried on a platform, as ``sys.platform`` names it, in the order of ``auto``."""
    return MAC_BACKENDS if platform == "darwin" else BACKENDS


def disabled_backends(environ: Mapping[str, str]) -> frozenset[str]:
    """Backends that ``NIGHTSHIFT_DISABLE_BACKENDS`` makes unavailable.

    Raises:
        ConfigError: CONFIG_INVALID, it names something else: what was meant would stay available.
    """
    names = [name for part in environ.get(DISABLE_VARIABLE, "").split(",") if (name := part.strip())]
    for name in names:
        if name not in (*BACKENDS, *MAC_BACKENDS):
            raise ConfigError(
                f"{DISABLE_VARIABLE}: there is no sandbox backend {name!r}", hint=f"use {', '.join(BACKENDS)}"
            )
    return frozenset(names)


PROXY_PORT = 3128
"""Port on which a command finds the network proxy, on the loopback address of its own network."""


@record
class SandboxLimits:
    """Resource limits of one confined command; bytes and a number of processes."""

    memory: int = 4_000_000_000
    processes: int = 512
    file_size: int = 1_000_000_000


@record
class SandboxSpec:
    """Resolved ``sandbox`` section of a profile. Paths are absolute.

    ``egress`` is the allowlist of a network that is off otherwise; empty without one.
    """

    backend: str = "auto"
    require: tuple[str, ...] = ()
    network: bool = False
    egress: tuple[Endpoint, ...] = ()
    unix_sockets: bool = False
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    env_allow: tuple[str, ...] = ()
    env_set: Mapping[str, str] = field(default_factory=dict)
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    unprotected_git: bool = False
    keep_dac: bool = False


@record
class SandboxPolicy:
    """What one command may do.

    Attributes:
        mode: The permission mode of this call.
        workspace: Canonical workspace path; also the command's working directory by default.
        tmp: The session's temporary folder, seen by shell and file tools under the same path.
        home: A private empty directory.
        writable: Further writable roots (workspace-write only).
        hidden: Paths that must look empty or absent.
        protected: Absolute paths of files in the workspace or a writable root that stay what they are:
            readable, and neither changed, removed, moved nor replaced. A link on the way stays as well.
        readable: Folders that must stay readable although a fresh temporary folder or a
            hidden folder takes the place of what surrounds them; the working directory always is.
        environment: The whole environment of the command, already scrubbed.
        egress: Where the command may get through the proxy, of a network that is off otherwise.
        doorway: Descriptor through which the command opens its way to the proxy, None where it gets none.
    """

    mode: Mode
    workspace: str
    tmp: str
    home: str
    environment: Mapping[str, str]
    writable: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    protected: tuple[str, ...] = ()
    readable: tuple[str, ...] = ()
    network: bool = False
    egress: tuple[Endpoint, ...] = ()
    doorway: int | None = None
    unix_sockets: bool = False
    unprotected_git: bool = False
    keep_dac: bool = False
    limits: SandboxLimits = field(default_factory=SandboxLimits)


@mutable_record
class ConfinedCommand:
    """A wrapped command, ready for ``process.run`` or ``process.start``.

    ``cleanup`` frees what the wrapper needs (descriptors); call it once the command has started
    or failed to. ``wrapper_failed(exit_code, stderr)`` tells a broken sandbox from a failed command;
    a negative exit code is the number of the signal that ended the wrapper. ``finish`` frees the
    rest; call it once, after the end. ``wrapped`` is False for a command that runs bare. ``layout`` is
    the file system as the command gets it, None for a bare one. ``inner`` is the command without its
    wrapper where a ``ForkServer`` can start the same wrapper, with the descriptors ``pass_fds``, without ``argv``.
    """

    argv: list[str]
    environment: dict[str, str]
    cwd: str
    backend: str
    not_enforced: tuple[str, ...] = ()
    pass_fds: tuple[int, ...] = ()
    cleanup: Callable[[], None] = lambda: None
    wrapper_failed: Callable[[int, bytes], bool] = lambda _code, _stderr: False
    finish: Callable[[], None] = lambda: None
    layout: Layout | None = None
    inner: list[str] | None = None

    @property
    def wrapped(self) -> bool:
        """Whether the started process is a sandbox's and the command one of its children."""
        return self.backend != BARE


class Backend(Protocol):
    """One way to confine a command."""

    name: str

    def missing_properties(self, policy: SandboxPolicy) -> tuple[str, ...]:
        """Names of ``PROPERTIES`` this backend does not keep on this machine under ``policy``."""
        ...

    def not_enforced(self, policy: SandboxPolicy) -> tuple[str, ...]:
        """Names of all promises this backend does not keep on this machine under ``policy``."""
        ...

    def private_folders(self) -> tuple[str, ...]:
        """Folders of this machine in whose place each command finds a fresh one that is gone with it."""
        ...

    def confine(self, argv: Sequence[str], policy: SandboxPolicy, *, cwd: str | None = None) -> ConfinedCommand:
        """Wrap ``argv``. The executable is an absolute path or found on the policy's PATH."""
        ...


@record
class ProcessResult:
    """What became of a command.

    Attributes:
        exit_code: Exit status, None when a signal ended it.
        signal: Name of the ending signal, None otherwise.
        timed_out: It ran into its timeout and was killed.
        cancelled: The run was cancelled and it was killed.
        output: stdout and stderr as they came, at most ``capture`` bytes; then head and tail.
        total_bytes: Bytes the command wrote in all.
        truncated: Whether ``output`` lacks some of them.
        overflow: File with all of them when ``output`` lacks some and a file was asked for.
        duration: Seconds.
        wrapper_failed: The sandbox could not start the command; ``output`` says why.
        workspace_lost: It was not started, since the workspace is gone; ``output`` says so.
    """

    exit_code: int | None
    signal: str | None
    timed_out: bool
    cancelled: bool
    output: bytes
    total_bytes: int
    truncated: bool
    duration: float
    wrapper_failed: bool = False
    overflow: str | None = None
    workspace_lost: bool = False
