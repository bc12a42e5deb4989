"""The Seatbelt backend for macOS: a generated profile for ``sandbox-exec``.

Everything that is not allowed is denied. Of two rules that match the later one decides, so the rules of
paths stand in the order of depth, and the deeper path decides as with the other backends. Seatbelt goes by
path: what must stay keeps its name, and so does each folder above it up to the writable one.
Invariants: ``confine`` starts nothing and makes nothing; the profile travels on the command line, so it holds paths
and no secret; a path is quoted whatever it holds. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from runner.permission import Mode
from runner.sandbox import layout
from runner.sandbox.base import PROPERTIES, ConfinedCommand

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from runner.sandbox.base import SandboxLimits, SandboxPolicy

PROGRAM = "/usr/bin/sandbox-exec"
"""Part of macOS, and only root can change it."""

_SHELL = "/bin/sh"
_BLOCK = 512
_BROKEN = (65, 71)
_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}

# What programs need to start at all, and to look up their user's name.
_BASE = """\
(version 1)
(deny default)
(allow process-exec)
(allow process-fork)
(allow process-info* (target same-sandbox))
(allow signal (target same-sandbox))
(allow sysctl-read)
(allow ipc-posix-sem)
(allow mach-lookup (global-name "com.apple.system.opendirectoryd.libinfo"))
(allow file-read*)
(allow file-write-data file-ioctl
    (literal "/dev/null") (literal "/dev/zero") (literal "/dev/random") (literal "/dev/urandom"))
"""

# Names are resolved by system services, one of them behind a Unix socket.
_NETWORK = """\
(allow network-outbound (remote ip))
(allow network-inbound (local ip))
(allow network-bind (local ip))
(allow network-outbound (literal "/private/var/run/mDNSResponder"))
(allow system-socket)
(allow mach-lookup
    (global-name "com.apple.SystemConfiguration.configd")
    (global-name "com.apple.dnssd.service")
    (global-name "com.apple.trustd.agent"))
"""

_UNIX_SOCKETS = """\
(allow network-outbound (remote unix-socket))
(allow network-inbound (local unix-socket))
(allow network-bind (local unix-socket))
"""


def quoted(path: str) -> str:
    """A path as a string of the profile language; bytes that are no text and control characters as escapes."""
    escaped = "".join(_ESCAPES.get(each) or _character(each) for each in path)
    return f'"{escaped}"'


def _character(each: str) -> str:
    if each.isprintable():
        return each
    return "".join(f"\\x{byte:02x}" for byte in os.fsencode(each))


def _rules(plan: layout.Layout) -> Iterator[tuple[str, int, str]]:
    """The rules of paths: path, rank among those of equal depth, rule."""
    kept: set[str] = set()
    for root in plan.roots:
        yield root.path, 1, f"(allow file-read* file-write* (subpath {quoted(root.path)}))"
        kept.add(root.path)
        for path in root.protected:
            yield path, 3, f"(deny file-write* (subpath {quoted(path)}))"
        for path in root.links:
            yield path, 3, f"(deny file-write* (literal {quoted(path)}))"
        nested = [each.path for each in plan.roots]
        inside = (path for path in (*plan.hidden, *nested) if layout.is_below(path, root.path))
        for path in (*root.protected, *root.links, *inside):
            kept.update(layout.between(path, root.path))
    for path in plan.readable:
        yield path, 0, f"(allow file-read* (subpath {quoted(path)}))"
    for path in plan.hidden:
        yield path, 4, f"(deny file-read* file-write* (subpath {quoted(path)}))"
    for path in kept:
        yield path, 2, f"(deny file-write-unlink (literal {quoted(path)}))"


def profile(policy: SandboxPolicy, plan: layout.Layout) -> str:
    """The profile of one command.

    Args:
        policy: What the command may do.
        plan: The file system as it gets it, from ``layout.resolve``.
    """
    parts = [_BASE]
    if policy.network:
        parts.append(_NETWORK)
    if policy.unix_sockets:
        parts.append(_UNIX_SOCKETS)
    ordered = sorted(_rules(plan), key=lambda rule: (layout.depth(rule[0]), rule[0], rule[1]))
    return "".join([*parts, *(f"{rule}\n" for _, _, rule in ordered)])


def _limited(argv: Iterable[str], limits: SandboxLimits) -> list[str]:
    """The command behind a shell that sets those limits that this kernel heeds."""
    script = f'ulimit -c 0 && ulimit -f {limits.file_size // _BLOCK} && exec "$@"'
    return [_SHELL, "-c", script, "sh", *argv]


class Seatbelt:
    """Confines with ``sandbox-exec``. Works on macOS only; nothing here asks which system this is."""

    name = "seatbelt"

    def private_folders(self) -> tuple[str, ...]:
        """None: every path means what it means outside."""
        return ()

    def not_enforced(self, policy: SandboxPolicy) -> tuple[str, ...]:
        """What of the sandbox does not hold under ``policy``."""
        missing = ["pid_isolation", "ipc_isolation", "priority", "system_calls"]
        # The kernel counts all processes of the user, limits addresses of none, and lets nobody adopt orphans.
        missing += ["process_limit", "memory_limit", "process_lifetime"]
        if policy.unprotected_git and policy.mode is not Mode.READ_ONLY:
            missing.append("git_protect")
        return tuple(missing)

    def missing_properties(self, policy: SandboxPolicy) -> tuple[str, ...]:
        """Those of ``PROPERTIES`` that do not hold under ``policy``."""
        missing = self.not_enforced(policy)
        return tuple(name for name in PROPERTIES if name in missing)

    def confine(self, argv: Sequence[str], policy: SandboxPolicy, *, cwd: str | None = None) -> ConfinedCommand:
        """Wrap ``argv``; see ``Backend.confine``.

        Raises:
            ConfigError: CONFIG_INVALID, the workspace cannot be confined.
            SandboxError: SANDBOX_UNAVAILABLE, a writable folder was replaced.
        """
        folder = policy.workspace if cwd is None else cwd
        plan = layout.resolve(policy, folder)

        def wrapper_failed(code: int, output: bytes) -> bool:
            # A command that says the same with the same code ends the run as well: it gains nothing by that.
            return code in _BROKEN and b"sandbox-exec: " in output

        return ConfinedCommand(
            argv=[PROGRAM, "-p", profile(policy, plan), *_limited(argv, policy.limits)],
            environment=dict(policy.environment),
            cwd=folder,
            backend=self.name,
            not_enforced=self.not_enforced(policy),
            wrapper_failed=wrapper_failed,
            layout=plan,
        )
