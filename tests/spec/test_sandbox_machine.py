"""What to do where a sandbox does not work is said for the environment it is asked in, and loosens no container."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Any

import pytest

from runner.sandbox.machine import (
    SETTINGS,
    Machine,
    fix_for_bubblewrap,
    fix_for_landlock,
    fix_for_missing,
    read_machine,
)

if TYPE_CHECKING:
    from pathlib import Path

DEBIAN = Machine(distribution=("debian",), version="12")
UBUNTU = Machine(
    distribution=("ubuntu", "debian"),
    version="24.04",
    settings={"kernel.apparmor_restrict_unprivileged_userns": "1", "user.max_user_namespaces": "100"},
)
DOCKER = Machine(distribution=("debian",), version="12", container="docker")
POD = Machine(distribution=("alpine",), container="kubernetes")
DENIED = "bwrap: No permissions to create new namespace, likely because the kernel does not allow non-privileged users"


@pytest.mark.parametrize(
    ("machine", "output", "says"),
    [
        (UBUNTU, "bwrap: setting up uid map: Permission denied", ["AppArmor", "apparmor_parser -r", "landlock"]),
        (UBUNTU, "bwrap: loopback: Failed RTM_NEWADDR: Operation not permitted", ["AppArmor"]),
        (DOCKER, DENIED, ["Docker's default filter", "do not loosen", "landlock", "--cap-drop ALL"]),
        (POD, DENIED, ["RuntimeDefault", "do not loosen", "landlock", "securityContext"]),
        (Machine(container="lxc"), "bwrap: pivot_root: x", ["container", "landlock"]),
        (DEBIAN, "bwrap: Can't mount proc on /newroot/proc: Operation not permitted", ["masks /proc", "landlock"]),
        (DEBIAN, DENIED, ["container", "landlock"]),
        (DEBIAN, "bwrap: something else", ["nightshift doctor"]),
        (Machine(settings={"user.max_user_namespaces": "0"}), DENIED, ["user.max_user_namespaces=15000"]),
        (Machine(settings={"kernel.unprivileged_userns_clone": "0"}), DENIED, ["unprivileged_userns_clone=1"]),
        (Machine(root=True, settings={"kernel.unprivileged_userns_clone": "0"}), DENIED, ["container"]),
    ],
)
def test_the_fix_for_bubblewrap_is_that_of_the_environment(machine: Machine, output: str, says: list[str]) -> None:
    """Debian, Ubuntu with AppArmor, Docker, Kubernetes, others; settings of the kernel come first."""
    fix = fix_for_bubblewrap(output, machine)

    assert [word for word in says if word not in fix] == []


@pytest.mark.parametrize(
    ("machine", "why", "says"),
    [
        (DEBIAN, errno.ENOSYS, "backports"),
        (DEBIAN, 0, "bubblewrap, which works there"),
        (UBUNTU, errno.ENOSYS, "use Linux 6.2 or newer, built with Landlock"),
        (DOCKER, errno.ENOSYS, "on the host"),
        (POD, 0, "on the node"),
        (DOCKER, errno.EPERM, "Docker 20.10.10"),
        (UBUNTU, errno.EOPNOTSUPP, "lsm="),
        (POD, errno.EOPNOTSUPP, "on the node"),
    ],
)
def test_the_fix_for_landlock_says_whose_kernel_it_is_about(machine: Machine, why: int, says: str) -> None:
    """A container has its host's, a pod its node's."""
    assert says in fix_for_landlock(why, machine)


@pytest.mark.parametrize(
    ("distribution", "says"),
    [
        (("debian",), "apt-get install bubblewrap"),
        (("ubuntu", "debian"), "apt-get install bubblewrap"),
        (("linuxmint", "ubuntu"), "apt-get install bubblewrap"),
        (("rocky", "rhel", "centos", "fedora"), "dnf install bubblewrap"),
        (("alpine",), "apk add bubblewrap"),
        ((), "install the package bubblewrap"),
    ],
)
def test_a_missing_program_is_installed_with_what_the_distribution_has(
    distribution: tuple[str, ...], says: str
) -> None:
    """By what it is, or what it is like."""
    assert says in fix_for_missing("bubblewrap", Machine(distribution=distribution))


def place(base: Path, files: dict[str, str]) -> Path:
    """Write files below a folder that stands for the root."""
    for path, content in files.items():
        (base / path).parent.mkdir(parents=True, exist_ok=True)
        (base / path).write_text(content)
    return base


UBUNTU_FILES = {
    "etc/os-release": 'NAME="Ubuntu"\nID=ubuntu\nID_LIKE=debian\nVERSION_ID="24.04"\n',
    "proc/sys/kernel/apparmor_restrict_unprivileged_userns": "1\n",
}


@pytest.mark.parametrize(
    ("files", "environ", "expected"),
    [
        ({}, {}, {"distribution": (), "version": "", "container": None}),
        (UBUNTU_FILES, {}, {"distribution": ("ubuntu", "debian"), "version": "24.04", "container": None}),
        ({".dockerenv": ""}, {}, {"container": "docker"}),
        ({"run/.containerenv": ""}, {}, {"container": "podman"}),
        ({"run/systemd/container": "lxc\n"}, {}, {"container": "lxc"}),
        ({".dockerenv": ""}, {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, {"container": "kubernetes"}),
        ({"var/run/secrets/kubernetes.io/serviceaccount/token": ""}, {}, {"container": "kubernetes"}),
    ],
)
def test_the_machine_is_read_from_its_files(
    tmp_path: Path, files: dict[str, str], environ: dict[str, str], expected: dict[str, Any]
) -> None:
    """What is not there is left out."""
    machine = read_machine(environ, base=str(place(tmp_path, files)))

    assert {name: getattr(machine, name) for name in expected} == expected
    assert set(machine.settings) == set(SETTINGS)
    assert machine.settings["kernel.apparmor_restrict_unprivileged_userns"] == ("1" if files is UBUNTU_FILES else None)


def test_no_fix_loosens_a_container() -> None:
    """Neither privileges nor another filter is ever asked for."""
    for machine in (DOCKER, POD, Machine(container="podman")):
        fixes = [fix_for_bubblewrap(DENIED, machine), *(fix_for_landlock(why, machine) for why in (0, errno.EPERM))]
        for fix in fixes:
            assert "--privileged" not in fix.replace("do not loosen the container for it (--privileged", "")
