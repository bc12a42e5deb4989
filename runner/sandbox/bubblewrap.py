"""The bubblewrap backend: namespaces, a read-only view of the file system, our system-call filter.

Invariants: the wrapper and what it starts are found at fixed paths that only root can change, never
on PATH. Mounts are ordered by depth, so the deeper path decides. Paths travel by descriptor, not on a
command line that others can read. What can be moved out from under a protection is itself made
a mount point, and so is each folder between a writable one and a mount inside it: no link of a
command's making leads a later mount astray. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import os
import re
import resource
import stat
import sys
from functools import cache, lru_cache
from typing import TYPE_CHECKING

from runner.errors import SandboxError
from runner.permission import Mode
from runner.sandbox import layout, seccomp
from runner.sandbox.base import PROPERTIES, PROXY_PORT, ConfinedCommand
from runner.sandbox.cgroup import command_groups, new_group
from runner.sandbox.launch import memory_file, own_program
from runner.sandbox.supervisor import tasks_of_user

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from runner.sandbox.base import SandboxLimits, SandboxPolicy

_FIXED = ("/usr/bin", "/bin", "/usr/local/bin", "/run/current-system/sw/bin")
_TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108  # the paths that a fresh folder replaces
_KEPT_CAPABILITIES = ("dac_override", "fowner")
_OWN_PROCESSES = 2  # bwrap outside of the sandbox and in it


def fixed_program(name: str) -> str | None:
    """Path of a program that only root can have put there, None if there is none."""
    for folder in _FIXED:
        path = os.path.realpath(os.path.join(folder, name))
        try:
            found = os.stat(path)
            parent = os.stat(os.path.dirname(path))
        except OSError:
            continue
        executable = stat.S_ISREG(found.st_mode) and found.st_mode & 0o111
        others_may_write = (found.st_mode | parent.st_mode) & 0o022
        if executable and found.st_uid == 0 and parent.st_uid == 0 and not others_may_write:
            return path
    return None


def _is_seen_through_a_namespace() -> bool:
    """Whether root's files seem to belong to the user that stands for all whom a user namespace does not map."""
    try:
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:
            return os.stat("/").st_uid == int(file.read())
    except (OSError, ValueError):
        return False


def _capped(kind: int, value: int) -> int:
    """``value``, or the limit this process already has if that is lower: it cannot be raised."""
    hard = resource.getrlimit(kind)[1]
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


@cache
def _counts_per_namespace() -> bool:
    """Whether the kernel counts a user's processes for each user namespace (Linux 5.14) or all together."""
    version = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return version is not None and (int(version[1]), int(version[2])) >= (5, 14)


def _limits(program: str, limits: SandboxLimits) -> list[str]:
    processes = limits.processes
    if os.geteuid() != 0 and not _counts_per_namespace():
        processes += tasks_of_user(os.getuid())
    return [
        program,
        "--core=0",
        # Data, not address space: run-times reserve far more addresses than they ever use.
        f"--data={_capped(resource.RLIMIT_DATA, limits.memory)}",
        f"--fsize={_capped(resource.RLIMIT_FSIZE, limits.file_size)}",
        f"--nproc={_capped(resource.RLIMIT_NPROC, processes)}",
        "--",
    ]


def _folders(paths: Iterable[str]) -> list[str]:
    return [os.path.realpath(path) for path in paths if os.path.isdir(path)]


@lru_cache(maxsize=64)
def _program_folders(search_path: str) -> list[str]:
    """The folders of PATH; for a ``bin`` the folder around it, which holds what its programs need."""
    folders = []
    for entry in search_path.split(":"):
        if entry.startswith("/"):
            around, name = os.path.split(entry.rstrip("/"))
            folders.append(around if name in ("bin", "sbin") and around not in _TEMPORARY else entry)
    return _folders(folders)


@cache
def _own_folders() -> list[str]:
    return _folders((sys.prefix, sys.base_prefix, os.path.dirname(__file__)))


def _kept_folders(policy: SandboxPolicy, plan: layout.Layout, temporary: Sequence[str]) -> list[str]:
    """Folders that must stay readable although a private or an empty folder is put around them."""
    replaced = (*temporary, *plan.hidden)
    programs = _program_folders(policy.environment.get("PATH", ""))
    kept = []
    for paths, covers in ((plan.readable, replaced), (_own_folders(), replaced), (programs, temporary)):
        for path in paths:
            covered = any(layout.is_within(path, cover) and path != cover for cover in covers)
            if covered and not any(layout.is_within(path, root.path) for root in plan.roots):
                kept.append(path)
    return list(dict.fromkeys(kept))


class _Mounts:
    """Collects mounts and puts them into an order in which the deeper path decides."""

    def __init__(self) -> None:
        self._steps: list[tuple[int, int, list[str]]] = []
        self._late: list[str] = []

    def add(self, path: str, arguments: list[str], *, rank: int = 0) -> None:
        """Mount at ``path``; of two at the same path the one with the higher ``rank`` lies on top."""
        self._steps.append((layout.depth(path), rank, arguments))

    def last(self, arguments: list[str]) -> None:
        """Do this when all mounts are made."""
        self._late += arguments

    def arguments(self) -> list[str]:
        """The options for all mounts, outermost first."""
        ordered = sorted(self._steps, key=lambda step: step[:2])
        return [argument for _, _, step in ordered for argument in step] + self._late


def _add_root(mounts: _Mounts, root: layout.Root) -> None:
    if root.path not in root.frozen:
        mounts.add(root.path, ["--bind", root.path, root.path], rank=1)
    for folder in root.frozen:
        _freeze(mounts, folder)


def _freeze(mounts: _Mounts, folder: str) -> None:
    """Keep a link in a folder: it cannot be mounted over, so the folder is read-only and its other entries are not."""
    mounts.add(folder, ["--ro-bind", folder, folder], rank=1)
    with os.scandir(folder) as entries:
        for entry in entries:
            if not entry.is_symlink():
                mounts.add(entry.path, ["--bind-try", entry.path, entry.path])


def _pin(mounts: _Mounts, path: str, plan: layout.Layout, pinned: set[str]) -> None:
    """Make the folders between a writable root and ``path`` mount points, so that none can be renamed."""
    for root in plan.roots:
        if layout.is_within(path, root.path):
            for folder in layout.between(path, root.path):
                # In what is read-only or hidden nothing can be renamed, and a mount there would open it.
                if folder not in pinned and plan.writable(folder):
                    pinned.add(folder)
                    mounts.add(folder, ["--bind", folder, folder])


def _temporary_folders() -> list[str]:
    return [path for path in dict.fromkeys(map(os.path.realpath, _TEMPORARY)) if os.path.isdir(path)]


def _hide(mounts: _Mounts, path: str) -> None:
    if os.path.isdir(path):
        mounts.add(path, ["--tmpfs", path], rank=4)
        mounts.last(["--remount-ro", path])
    else:
        mounts.add(path, ["--ro-bind", "/dev/null", path], rank=4)


def _mounts(policy: SandboxPolicy, plan: layout.Layout) -> list[str]:
    mounts = _Mounts()
    temporary = _temporary_folders()
    for path in temporary:
        # Fresh for each command. The mount points below it are made before the command starts and are gone with
        # it: in a folder that commands share, one of them could put a link in the way of the next one's mounts.
        mounts.add(path, ["--tmpfs", path])
    kept = _kept_folders(policy, plan, temporary)
    for path in kept:
        mounts.add(path, ["--ro-bind-try", path, path])
    pinned = {root.path for root in plan.roots}
    for root in plan.roots:
        _pin(mounts, root.path, plan, pinned)
        _add_root(mounts, root)
        for path in root.protected:
            _pin(mounts, path, plan, pinned)
            mounts.add(path, ["--ro-bind", path, path], rank=3)
        for path in root.links:
            _pin(mounts, path, plan, pinned)
    shown = [*(root.path for root in plan.roots), *kept]
    for path in plan.hidden:
        covers = [each for each in plan.hidden if layout.is_within(path, each) and path != each]
        if any(not _shown_again(path, cover, shown) for cover in covers):
            continue  # gone with what is around it; a mount would only show its name
        # What a fresh temporary folder replaces is gone already, unless a root shows it again.
        inside = [folder for folder in temporary if layout.is_within(path, folder)]
        if inside and not any(layout.is_within(path, folder) for folder in shown):
            continue
        if layout.is_within(path, "/dev"):
            continue
        _pin(mounts, path, plan, pinned)
        _hide(mounts, path)
    return mounts.arguments()


def _shown_again(path: str, cover: str, shown: Iterable[str]) -> bool:
    """Whether a folder around ``path`` is shown although ``cover`` around it is hidden."""
    return any(layout.is_within(path, folder) and layout.is_within(folder, cover) for folder in shown)


class Bubblewrap:
    """Confines with ``bwrap``. Works where the kernel lets this process make namespaces."""

    name = "bubblewrap"

    def __init__(self) -> None:
        if fixed_program("bwrap") is None and _is_seen_through_a_namespace():
            raise SandboxError(
                "this process runs inside a user namespace, where the files of root are nobody's, so no bwrap can be "
                "known to be the system's",
                hint="use the landlock backend there",
            )
        self._wrapper = self._required("bwrap", "bubblewrap")
        self._limiter = self._required("prlimit")
        self._dropper = self._required("setpriv")
        self._shell = self._required("sh", "dash")

    @staticmethod
    def _required(name: str, package: str = "util-linux") -> str:
        path = fixed_program(name)
        if path is None:
            from runner.sandbox.machine import fix_for_missing, read_machine

            raise SandboxError(
                f"no {name} owned by root in {', '.join(_FIXED)}",
                hint=fix_for_missing(package, read_machine(os.environ)),
            )
        return path

    @staticmethod
    def _gaps(policy: SandboxPolicy, plan: layout.Layout) -> tuple[str, ...]:
        missing = []
        if policy.mode is not Mode.READ_ONLY:
            if policy.unprotected_git:
                missing.append("git_protect")
            missing += plan.closed_to_new_files(plan.frozen_folders())
        if policy.network and policy.unix_sockets:
            missing.append("abstract_sockets")
        if os.geteuid() == 0:
            missing.append("device_metadata")  # the device nodes in /dev are the host's, and root owns them
            if command_groups() is None:
                missing.append("process_limit")
        return tuple(missing)

    def private_folders(self) -> tuple[str, ...]:
        """The machine's temporary folders: each command has fresh ones in their place."""
        return tuple(_temporary_folders())

    def not_enforced(self, policy: SandboxPolicy) -> tuple[str, ...]:
        """What of the sandbox does not hold or does not work under ``policy``."""
        return self._gaps(policy, layout.resolve(policy, policy.workspace))

    def missing_properties(self, policy: SandboxPolicy) -> tuple[str, ...]:
        """Those of ``PROPERTIES`` that do not hold under ``policy``."""
        missing = self.not_enforced(policy)
        return tuple(name for name in PROPERTIES if name in missing)

    def _options(self, policy: SandboxPolicy, plan: layout.Layout, cwd: str, fds: tuple[int, int]) -> list[str]:
        status, program = fds
        options = ["--unshare-ipc", "--unshare-pid", "--unshare-uts", "--unshare-cgroup-try"]
        if os.geteuid() != 0:
            # Root has the rights already, and a second mapping of ids would only hide other owners.
            options.append("--unshare-user")
        if not policy.network:
            options.append("--unshare-net")
        options += ["--die-with-parent", "--new-session", "--cap-drop", "ALL"]
        if os.geteuid() == 0:
            for name in ("setpcap", *(_KEPT_CAPABILITIES if policy.keep_dac else ())):
                options += ["--cap-add", f"CAP_{name.upper()}"]
        options += ["--json-status-fd", str(status), "--seccomp", str(program)]
        options += ["--ro-bind", "/", "/", "--dev", "/dev", "--proc", "/proc"]
        # The kernel's settings in /proc obey the user id alone: root could change them without any capability.
        options += ["--remount-ro", "/proc"]
        options += _mounts(policy, plan)
        return [*options, "--chdir", cwd]

    def _inner(self, policy: SandboxPolicy) -> list[str]:
        """What runs inside before the command: it empties root's bounding set, sets limits, opens the proxy's door."""
        door = (
            [] if policy.doorway is None else [*own_program("doorway.py"), str(policy.doorway), str(PROXY_PORT), "--"]
        )
        if os.geteuid() != 0:
            return [*_limits(self._limiter, policy.limits), *door]
        kept = "".join(f",+{name}" for name in _KEPT_CAPABILITIES) if policy.keep_dac else ""
        return [
            self._dropper,
            "--ambient-caps=-all",
            "--inh-caps=-all",
            f"--bounding-set=-all{kept}",
            "--",
            *_limits(self._limiter, policy.limits),
            *door,
        ]

    def confine(self, argv: Sequence[str], policy: SandboxPolicy, *, cwd: str | None = None) -> ConfinedCommand:
        """Wrap ``argv``; see ``Backend.confine``.

        Raises:
            ConfigError: CONFIG_INVALID, the workspace cannot be confined.
            SandboxError: SANDBOX_UNAVAILABLE, a writable folder was replaced.
        """
        folder = policy.workspace if cwd is None else cwd
        plan = layout.resolve(policy, folder)
        families = seccomp.socket_families(
            network=policy.network, private_network=not policy.network, unix_sockets=policy.unix_sockets
        )
        rules = seccomp.build_filter(os.uname().machine, families=families, shares_host_view=False)
        group = new_group(policy.limits, own_processes=_OWN_PROCESSES)
        # The shell joins the group, becomes bwrap, and all that follows is in it.
        join = [] if group is None else [self._shell, "-c", 'echo 0 > "$0" && exec "$@"', group.members]
        program = memory_file("seccomp", rules)
        status = memory_file("status")
        options = self._options(policy, plan, folder, (status, program))
        arguments = memory_file("arguments", b"".join(os.fsencode(option) + b"\0" for option in options))

        def cleanup() -> None:
            os.close(program)
            os.close(arguments)

        def finish() -> None:
            os.close(status)
            if group is not None:
                group.remove()

        def wrapper_failed(_code: int, _output: bytes) -> bool:
            # bwrap reports an exit code only for a command that it got as far as starting.
            return b'"exit-code"' not in os.pread(status, 4_096, 0)

        return ConfinedCommand(
            argv=[*join, self._wrapper, "--args", str(arguments), "--", *self._inner(policy), *argv],
            environment=dict(policy.environment),
            cwd="/",
            backend=self.name,
            not_enforced=self._gaps(policy, plan),
            pass_fds=(program, status, arguments, *([] if policy.doorway is None else [policy.doorway])),
            cleanup=cleanup,
            wrapper_failed=wrapper_failed,
            finish=finish,
            layout=plan,
        )
