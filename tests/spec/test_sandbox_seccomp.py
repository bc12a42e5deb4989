"""The system-call filter says what its tables say, on both architectures, instruction by instruction."""

from __future__ import annotations

import errno
import os
import re
import struct
from pathlib import Path

import pytest

from runner.errors import SandboxError
from runner.sandbox.seccomp import (
    AF_INET,
    AF_INET6,
    AF_NETLINK,
    AF_UNIX,
    ARCHITECTURES,
    DENIED_CALLS,
    INSPECTED_CALLS,
    build_filter,
    socket_families,
)

ALLOW = "allow"
KILL = "kill"
DENY = errno.EPERM
MACHINES = tuple(ARCHITECTURES)

HEADERS = {
    "x86_64": ("/usr/include/x86_64-linux-gnu/asm/unistd_64.h", "/usr/include/asm/unistd_64.h"),
    "aarch64": ("/usr/include/asm-generic/unistd.h",),
}

EXPECTED = {
    "x86_64": {
        "ptrace": 101, "process_vm_readv": 310, "process_vm_writev": 311, "pidfd_getfd": 438, "kcmp": 312,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "userfaultfd": 323, "bpf": 321,
        "perf_event_open": 298, "kexec_load": 246, "kexec_file_load": 320, "init_module": 175, "finit_module": 313,
        "delete_module": 176, "mount": 165, "umount2": 166, "pivot_root": 155, "chroot": 161, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
        "open_tree_attr": 467, "setns": 308, "unshare": 272, "add_key": 248, "request_key": 249, "keyctl": 250,
        "open_by_handle_at": 304, "swapon": 167, "swapoff": 168, "reboot": 169, "settimeofday": 164,
        "clock_settime": 227, "syslog": 103, "process_madvise": 440,
    },
    "aarch64": {
        "ptrace": 117, "process_vm_readv": 270, "process_vm_writev": 271, "pidfd_getfd": 438, "kcmp": 272,
        "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "userfaultfd": 282, "bpf": 280,
        "perf_event_open": 241, "kexec_load": 104, "kexec_file_load": 294, "init_module": 105, "finit_module": 273,
        "delete_module": 106, "mount": 40, "umount2": 39, "pivot_root": 41, "chroot": 51, "open_tree": 428,
        "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442,
        "open_tree_attr": 467, "setns": 268, "unshare": 97, "add_key": 217, "request_key": 218, "keyctl": 219,
        "open_by_handle_at": 265, "swapon": 224, "swapoff": 225, "reboot": 142, "settimeofday": 170,
        "clock_settime": 112, "syslog": 116, "process_madvise": 440,
    },
}  # fmt: skip
"""The deny list, written down a second time."""


def judge(program: bytes, machine: str, number: int, *arguments: int, audit: int | None = None) -> str | int:
    """What a filter decides on one call: an interpreter of the classic BPF that the kernel accepts."""
    token = ARCHITECTURES[machine].audit if audit is None else audit
    words = [*arguments, 0, 0, 0, 0, 0, 0][:6]
    data = struct.pack("=IIQ6Q", number, token, 0, *(word & 0xFFFFFFFFFFFFFFFF for word in words))
    instructions: list[tuple[int, int, int, int]] = list(struct.iter_unpack("=HBBI", program))
    place = accumulator = 0
    while True:
        code, if_true, if_false, value = instructions[place]
        place += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            if value == 0x7FFF0000:
                return ALLOW
            return KILL if value == 0x80000000 else value & 0xFFFF
        else:
            test = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            place += if_true if test else if_false


def numbers(machine: str) -> dict[str, int]:
    """All calls of the tables by name."""
    column = ARCHITECTURES[machine].column
    return {name: each[column] for name, each in {**DENIED_CALLS, **INSPECTED_CALLS}.items()}


def closed(machine: str, *, shared: bool = True) -> bytes:
    """The filter that lets no socket open."""
    return build_filter(machine, families=(), shares_host_view=shared)


@pytest.mark.parametrize("machine", MACHINES)
def test_the_deny_list_is_complete(machine: str) -> None:
    """Names and numbers agree with the list written down here."""
    column = ARCHITECTURES[machine].column

    assert {name: each[column] for name, each in DENIED_CALLS.items()} == EXPECTED[machine]


@pytest.mark.parametrize("machine", MACHINES)
def test_the_numbers_are_those_of_the_kernel_headers(machine: str) -> None:
    """Where the headers are installed each number is compared with them."""
    header = next((Path(path) for path in HEADERS[machine] if Path(path).exists()), None)
    if header is None:
        pytest.skip(f"no kernel headers for {machine} (package linux-libc-dev)")
    defined = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)", header.read_text()))
    found = {name: int(defined[name]) for name in numbers(machine) if name in defined}

    assert found == {name: number for name, number in numbers(machine).items() if name in found}
    assert set(numbers(machine)) - set(found) <= {"open_tree_attr"}


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("shared", [False, True])
def test_denied_calls_are_denied_and_all_others_allowed(machine: str, shared: bool) -> None:
    """Over all numbers up to 600, and those that look negative."""
    program = closed(machine, shared=shared)
    known = numbers(machine)
    denied = {known[name] for name in DENIED_CALLS}
    special = set(known.values()) - denied
    for number in range(600):
        if number not in special:
            assert judge(program, machine, number) == (DENY if number in denied else ALLOW), number
    assert judge(program, machine, known["clone3"]) == errno.ENOSYS


@pytest.mark.parametrize("machine", MACHINES)
def test_another_architecture_is_killed(machine: str) -> None:
    """Also when the number would be harmless: it means something else there."""
    for audit in (0x40000003, 0x40000028, 0, *(ARCHITECTURES[name].audit for name in MACHINES if name != machine)):
        assert judge(closed(machine), machine, 1, audit=audit) == KILL


def test_the_x32_numbers_are_denied() -> None:
    """Bit 30 set means the x32 table, which passes by a filter that does not look."""
    program = closed("x86_64")

    assert judge(program, "x86_64", 0x40000000) == DENY
    assert judge(program, "x86_64", 0x40000000 | 101) == DENY
    assert judge(program, "x86_64", 0xFFFFFFFF) == DENY


@pytest.mark.parametrize("machine", MACHINES)
def test_clone_is_judged_by_its_flags(machine: str) -> None:
    """Each namespace flag alone is enough; threads and processes pass; the upper half does not count."""
    program, clone = closed(machine), numbers(machine)["clone"]
    for bit in (17, 25, 26, 27, 28, 29, 30):
        assert judge(program, machine, clone, 1 << bit | 17) == DENY
    for flags in (17, 0x3D0F00, 0x01200011, 0x4111):
        assert judge(program, machine, clone, flags) == ALLOW
    assert judge(program, machine, clone, 1 << 60 | 17) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("shared", [False, True])
def test_ioctl_is_judged_by_its_request(machine: str, shared: bool) -> None:
    """Terminal injection always, inode flags where the files are the host's; the upper half does not help."""
    program, ioctl = closed(machine, shared=shared), numbers(machine)["ioctl"]
    for request in (0x5412, 0x541C, 0x5412 | 1 << 32, 0x5412 | 1 << 63):
        assert judge(program, machine, ioctl, 0, request) == DENY
    for request in (0x40086602, 0x40046602, 0x401C5820):
        assert judge(program, machine, ioctl, 0, request) == (DENY if shared else ALLOW)
    for request in (0x5401, 0x5413, 0x80086601, 0):
        assert judge(program, machine, ioctl, 0, request) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
def test_limits_of_other_processes_are_denied_where_they_can_be_seen(machine: str) -> None:
    """A call on oneself is how limits are read; on another process it is a way to end it."""
    prlimit = numbers(machine)["prlimit64"]

    assert judge(closed(machine), machine, prlimit, 0) == ALLOW
    assert judge(closed(machine), machine, prlimit, 1234) == DENY
    assert judge(closed(machine, shared=False), machine, prlimit, 1234) == ALLOW


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("unix", [False, True])
def test_sockets_are_judged_by_their_family(machine: str, network: bool, private: bool, unix: bool) -> None:
    """Every family below 64 is denied unless the policy needs it; netlink only for routes."""
    families = socket_families(network=network, private_network=private, unix_sockets=unix)
    program = build_filter(machine, families=families, shares_host_view=False)
    socket = numbers(machine)["socket"]
    allowed = {AF_INET, AF_INET6} if network or private else set()
    allowed |= {AF_NETLINK} if network else set()
    allowed |= {AF_UNIX} if unix else set()
    for family in range(64):
        for kind in (1, 2, 3, 5, 0x80801):
            assert judge(program, machine, socket, family, kind, 0) == (ALLOW if family in allowed else DENY)
    for protocol in range(1, 23):
        assert judge(program, machine, socket, AF_NETLINK, 3, protocol) == DENY
    assert judge(program, machine, socket, AF_UNIX | 1 << 32, 1) == (ALLOW if unix else DENY)


@pytest.mark.parametrize("machine", MACHINES)
def test_pairs_are_allowed_when_they_stay_connected(machine: str) -> None:
    """Streams and ordered packets, with any flags; a datagram pair could be sent anywhere."""
    pair = numbers(machine)["socketpair"]
    flags = (0, 0o4000, 0o2000000, 0o2004000)
    for kind, expected in ((1, ALLOW), (5, ALLOW), (2, DENY), (3, DENY), (0, DENY), (10, DENY)):
        for flag in flags:
            assert judge(closed(machine), machine, pair, AF_UNIX, kind | flag) == expected
    opened = build_filter(machine, families=(AF_UNIX,), shares_host_view=False)
    assert judge(opened, machine, pair, AF_UNIX, 2) == ALLOW
    for program in (opened, closed(machine)):
        assert judge(program, machine, pair, AF_INET, 1) == DENY


@pytest.mark.parametrize("machine", MACHINES)
def test_a_filter_fits_the_kernels_limits(machine: str) -> None:
    """Whole instructions, under the limit of 4,096, with every jump inside the program."""
    program = build_filter(machine, families=(AF_INET, AF_INET6, AF_NETLINK, AF_UNIX), shares_host_view=True)
    instructions = list(struct.iter_unpack("=HBBI", program))

    assert len(program) % 8 == 0
    assert len(instructions) < 4_096
    for place, (code, if_true, if_false, _) in enumerate(instructions):
        if code in (0x15, 0x35, 0x45):
            assert place + 1 + max(if_true, if_false) < len(instructions)


def test_an_unknown_machine_has_no_filter() -> None:
    """Without a table there is no sandbox."""
    with pytest.raises(SandboxError, match="riscv64"):
        build_filter("riscv64", families=(), shares_host_view=False)


def test_this_machine_has_a_filter() -> None:
    """The tests of the backends use it."""
    assert closed(os.uname().machine)
