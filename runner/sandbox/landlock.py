"""The Landlock backend: kernel access rules and our system-call filter, no namespaces.

Works inside default containers, where bubblewrap cannot. Each command runs under
``supervisor.py``, which applies the restrictions to the forked child only and cleans up after it.
Invariants: the policy travels by descriptor; what the kernel cannot enforce here stands in
``not_enforced``. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import errno
import os
import sys
from functools import cache
from typing import TYPE_CHECKING

from runner.errors import SandboxError
from runner.permission import Mode
from runner.sandbox import layout, seccomp, supervisor
from runner.sandbox.base import PROPERTIES, ConfinedCommand
from runner.sandbox.cgroup import command_groups, new_group
from runner.sandbox.launch import memory_file, own_program

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runner.sandbox.base import SandboxPolicy

_SIGNAL_SCOPE_ABI = 6
_DEVICE_ABI = 5


@cache
def kernel_abi() -> tuple[int, int]:
    """The kernel's Landlock ABI and 0, or 0 and the error number that says why there is none."""
    if sys.platform != "linux":
        return 0, errno.ENOSYS
    return supervisor.landlock_abi()


def _unusable(reason: str, why: int) -> SandboxError:
    from runner.sandbox.machine import fix_for_landlock, read_machine

    return SandboxError(reason, hint=fix_for_landlock(why, read_machine(os.environ)))


class Landlock:
    """Confines with Landlock under the supervisor. Needs ABI 3 (Linux 6.2)."""

    name = "landlock"

    def __init__(self) -> None:
        self._abi, why = kernel_abi()
        if self._abi == 0:
            reasons = {
                errno.ENOSYS: "the kernel has no Landlock",
                errno.EOPNOTSUPP: "the kernel has Landlock, but it was not switched on at boot",
                errno.EPERM: "the Landlock system calls are refused, by the container's filter it seems",
            }
            raise _unusable(reasons.get(why, f"Landlock does not answer: {os.strerror(why)}"), why)
        if self._abi < supervisor.MINIMUM_ABI:
            text = f"the kernel has Landlock ABI {self._abi}, which cannot deny truncation (Linux 6.2, ABI 3, can)"
            raise _unusable(text, 0)

    def _gaps(self, policy: SandboxPolicy, plan: layout.Layout) -> tuple[str, ...]:
        missing = ["metadata", "pid_isolation", "ipc_isolation", "priority"]
        if policy.mode is not Mode.READ_ONLY:
            missing.append("private_shm")
            if policy.unprotected_git:
                missing.append("git_protect")
            missing += plan.closed_to_new_files(plan.folders_above_exceptions())
        if plan.hidden:
            missing.append("hidden_names")
        if self._abi < _SIGNAL_SCOPE_ABI:
            missing.append("signal_scope")
            if policy.unix_sockets:
                missing.append("abstract_sockets")
        if self._abi < _DEVICE_ABI:
            missing.append("device_control")
        if os.geteuid() == 0:
            # The folder of the runner's descriptors belongs to root, and an owner may list it.
            missing.append("runner_descriptors")
            if command_groups() is None:
                missing.append("process_limit")
        return tuple(missing)

    def private_folders(self) -> tuple[str, ...]:
        """None: every path means what it means outside."""
        return ()

    def not_enforced(self, policy: SandboxPolicy) -> tuple[str, ...]:
        """What of the sandbox does not hold or does not work under ``policy``."""
        return self._gaps(policy, layout.resolve(policy, policy.workspace))

    def missing_properties(self, policy: SandboxPolicy) -> tuple[str, ...]:
        """Those of ``PROPERTIES`` that do not hold under ``policy``."""
        missing = self.not_enforced(policy)
        return tuple(name for name in PROPERTIES if name in missing)

    def _fields(self, policy: SandboxPolicy, plan: layout.Layout, cwd: str) -> Iterator[tuple[str, str]]:
        families = seccomp.socket_families(
            network=policy.network, private_network=False, unix_sockets=policy.unix_sockets
        )
        rules = seccomp.build_filter(os.uname().machine, families=families, shares_host_view=True)
        yield "runner", str(os.getpid())
        yield "cwd", cwd
        yield "filter", rules.hex()
        yield "network", "1" if policy.network else "0"
        yield "keep-dac", "1" if policy.keep_dac and os.geteuid() == 0 else "0"
        yield "shared-memory", "0" if policy.mode is Mode.READ_ONLY else "1"
        yield "no-lc-ctype", "0" if "LC_CTYPE" in policy.environment else "1"
        yield "memory", str(policy.limits.memory)
        yield "processes", str(policy.limits.processes)
        yield "file-size", str(policy.limits.file_size)
        for path in plan.hidden:
            yield "hidden", path
        for path in plan.readable:
            yield "readable", path
        for root in plan.roots:
            yield "root", root.path
            for path in (*root.protected, *root.links):
                yield "protected", path

    def confine(self, argv: Sequence[str], policy: SandboxPolicy, *, cwd: str | None = None) -> ConfinedCommand:
        """Wrap ``argv``; see ``Backend.confine``.

        Raises:
            ConfigError: CONFIG_INVALID, the workspace cannot be confined.
            SandboxError: SANDBOX_UNAVAILABLE, a writable folder was replaced, or the policy has an allowlist.
        """
        if policy.egress:
            raise SandboxError(
                "it gives a command no network of its own, so that nothing can be let through and all else be kept off",
                hint="use a machine where bubblewrap works, or sandbox.network: off",
            )
        folder = policy.workspace if cwd is None else cwd
        plan = layout.resolve(policy, folder)
        fields = self._fields(policy, plan, folder)
        content = b"".join(os.fsencode(part) + b"\0" for field in fields for part in field)
        group = new_group(policy.limits)
        if group is not None:
            content += b"group\0" + os.fsencode(group.members) + b"\0"
        description = memory_file("policy", content)
        status = memory_file("status")

        def finish() -> None:
            os.close(status)
            if group is not None:
                group.remove()

        def wrapper_failed(_code: int, _output: bytes) -> bool:
            # The supervisor's child writes one byte when it is confined and about to become the command.
            return os.pread(status, 1, 0) != b"s"

        return ConfinedCommand(
            argv=[*own_program("supervisor.py"), str(description), str(status), "--", *argv],
            environment=dict(policy.environment),
            cwd="/",
            backend=self.name,
            not_enforced=self._gaps(policy, plan),
            pass_fds=(description, status),
            cleanup=lambda: os.close(description),
            wrapper_failed=wrapper_failed,
            finish=finish,
            layout=plan,
            inner=list(argv),
        )
