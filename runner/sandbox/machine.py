"""What of this machine decides which sandbox works, and what to do where one does not.

Reads files of the system and starts nothing. Invariants: a fix is for the environment that was found, and none loosens
what keeps a container in. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import errno
import os
import re
from typing import TYPE_CHECKING

from runner.record import field, record

if TYPE_CHECKING:
    from collections.abc import Mapping

SETTINGS = (
    "user.max_user_namespaces",
    "kernel.unprivileged_userns_clone",
    "kernel.apparmor_restrict_unprivileged_userns",
)
"""Settings of the kernel that can keep namespaces from being made."""


@record
class Machine:
    """Facts about where this process runs.

    Attributes:
        distribution: ``ID`` of ``os-release``, and what it is like.
        version: ``VERSION_ID`` of it, such as ``24.04``; empty without one.
        container: ``kubernetes``, ``docker``, ``podman`` or another name; None outside of containers.
        root: Whether this is root.
        settings: Value of each of ``SETTINGS``; None for one that the kernel does not have.
    """

    distribution: tuple[str, ...] = ()
    version: str = ""
    container: str | None = None
    root: bool = False
    settings: Mapping[str, str | None] = field(default_factory=dict)


def _text(*path: str) -> str | None:
    try:
        with open(os.path.join(*path), encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _container(base: str, environ: Mapping[str, str]) -> str | None:
    if "KUBERNETES_SERVICE_HOST" in environ or os.path.exists(
        os.path.join(base, "var/run/secrets/kubernetes.io/serviceaccount")
    ):
        return "kubernetes"
    for name, path in (("docker", ".dockerenv"), ("podman", "run/.containerenv")):
        if os.path.exists(os.path.join(base, path)):
            return name
    return _text(base, "run/systemd/container") or None


def read_machine(environ: Mapping[str, str], *, base: str = "/") -> Machine:
    """Look at the machine; ``environ`` is the runner's environment, ``base`` the folder that stands for the root."""
    release = {
        key: value.strip("\"'")
        for key, _, value in (line.partition("=") for line in (_text(base, "etc/os-release") or "").splitlines())
    }
    return Machine(
        distribution=tuple(f"{release.get('ID', '')} {release.get('ID_LIKE', '')}".split()),
        version=release.get("VERSION_ID", ""),
        container=_container(base, environ),
        root=os.geteuid() == 0,
        settings={name: _text(base, "proc/sys", name.replace(".", "/")) for name in SETTINGS},
    )


_APPARMOR = (
    "AppArmor keeps ordinary programs from making namespaces (Ubuntu 23.10 and later). As root: write "
    "'abi <abi/4.0>, include <tunables/global> profile bwrap /usr/bin/bwrap flags=(unconfined) { userns, }' into "
    "/etc/apparmor.d/bwrap and run 'apparmor_parser -r /etc/apparmor.d/bwrap', or run "
    "'sysctl -w kernel.apparmor_restrict_unprivileged_userns=0'; the landlock backend works there as it is"
)
_KEEP = "do not loosen the container for it"
_CONTAINERS = {
    "kubernetes": (
        f"a pod's default filter (RuntimeDefault) forbids new namespaces; {_KEEP}: use the landlock backend, which "
        "needs Linux 6.2 or newer on the node and nothing in the pod's securityContext"
    ),
    "docker": (
        f"Docker's default filter forbids new namespaces; {_KEEP} (--privileged, seccomp=unconfined): use the landlock "
        "backend, which needs Linux 6.2 or newer on the host and works with --cap-drop ALL"
    ),
}
_CONTAINER = (
    f"this looks like a container whose engine forbids new namespaces; {_KEEP}: use the landlock backend, which needs "
    "Linux 6.2 or newer on the host"
)
_INSTALLERS = {"debian": "apt-get install", "fedora": "dnf install", "alpine": "apk add", "arch": "pacman -S"}
_LIKE = {"ubuntu": "debian", "rhel": "fedora", "centos": "fedora", "suse": "suse"}


def fix_for_missing(package: str, machine: Machine) -> str:
    """How a package gets installed there."""
    names = [_LIKE.get(name, name) for name in machine.distribution]
    command = next((_INSTALLERS[name] for name in names if name in _INSTALLERS), None)
    return f"install it: {command} {package}" if command else f"install the package {package}"


def fix_for_bubblewrap(output: str, machine: Machine) -> str:
    """What to do about bubblewrap that was tried and does not work; ``output`` is what it said."""
    settings = machine.settings
    if settings.get("user.max_user_namespaces") == "0":
        return "user namespaces are switched off: as root, 'sysctl -w user.max_user_namespaces=15000'"
    if settings.get("kernel.unprivileged_userns_clone") == "0" and not machine.root:
        return "user namespaces are for root only here: as root, 'sysctl -w kernel.unprivileged_userns_clone=1'"
    if machine.container in _CONTAINERS:
        return _CONTAINERS[machine.container]
    if settings.get("kernel.apparmor_restrict_unprivileged_userns") == "1":
        return _APPARMOR
    if "mount proc" in output:
        return "this looks like a container that masks /proc; use the landlock backend there"
    if machine.container is not None or re.search(r"namespace|Operation not permitted", output):
        return _CONTAINER
    return "run 'nightshift doctor' for what the probe saw"


def fix_for_landlock(why: int, machine: Machine) -> str:
    """What to do about a kernel without a Landlock that suffices; ``why`` is its error number, 0 for one too old."""
    where = {None: "", "kubernetes": " on the node"}.get(machine.container, " on the host")
    if why == errno.EPERM:
        return (
            "the container's filter does not know Landlock: use an engine whose default filter does (Docker 20.10.10, "
            "containerd 1.5.6, or newer)"
        )
    if why == errno.EOPNOTSUPP:
        return f"add landlock to the lsm= list on the kernel's command line{where}"
    if not where and machine.distribution[:1] == ("debian",) and machine.version == "12":
        return (
            "Debian 12's own kernel is too old: take one from its backports ('apt-get install -t bookworm-backports "
            "linux-image-amd64'), or use bubblewrap, which works there"
        )
    return f"use Linux 6.2 or newer, built with Landlock{where}"
