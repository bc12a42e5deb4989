"""The system-call filter of both Linux backends, built as a classic BPF program.

Invariants: the architecture is checked first and a foreign one is killed; a call that is denied
answers EPERM, except clone3, which answers ENOSYS so that libc falls back to clone, whose flags a
filter can see. Arguments are compared on their low 32 bits, which is all the kernel reads of each
argument used here. Everything not named is allowed: the filter narrows, the backend confines.
Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import errno
import struct
from functools import lru_cache

from runner.errors import SandboxError
from runner.record import record

AF_UNIX = 1
AF_INET = 2
AF_INET6 = 10
AF_NETLINK = 16

_SOCK_TYPE_MASK = 0xF
_SOCK_STREAM = 1
_SOCK_SEQPACKET = 5
_NETLINK_ROUTE = 0

_X32_BIT = 0x40000000

_TIOCSTI = 0x5412
_TIOCLINUX = 0x541C
# Setting inode flags needs only ownership and a descriptor opened for reading.
_INODE_FLAG_REQUESTS = (0x40086602, 0x40046602, 0x401C5820)

# NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET. NEWTIME does not fit into clone's flags.
_NAMESPACE_FLAGS = 0x00020000 | 0x02000000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000

DENIED_CALLS: dict[str, tuple[int, int]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    "process_madvise": (440, 440),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "userfaultfd": (323, 282),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "setns": (308, 268),
    "unshare": (272, 97),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "open_by_handle_at": (304, 265),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "syslog": (103, 116),
}
"""Calls that are always denied: name → number on x86-64 and on aarch64."""

INSPECTED_CALLS: dict[str, tuple[int, int]] = {
    "ioctl": (16, 29),
    "socket": (41, 198),
    "socketpair": (53, 199),
    "clone": (56, 220),
    "clone3": (435, 435),
    "prlimit64": (302, 261),
}
"""Calls whose arguments decide: name → number on x86-64 and on aarch64."""


@record
class Architecture:
    """One architecture: its audit token, its column in the tables, whether it has the x32 ABI."""

    audit: int
    column: int
    x32: bool


ARCHITECTURES = {
    "x86_64": Architecture(audit=0xC000003E, column=0, x32=True),
    "aarch64": Architecture(audit=0xC00000B7, column=1, x32=False),
}

_LOAD = 0x20  # BPF_LD | BPF_W | BPF_ABS
_AND = 0x54  # BPF_ALU | BPF_AND | BPF_K
_IF_EQUAL = 0x15  # BPF_JMP | BPF_JEQ | BPF_K
_IF_AT_LEAST = 0x35  # BPF_JMP | BPF_JGE | BPF_K
_IF_ANY_BIT = 0x45  # BPF_JMP | BPF_JSET | BPF_K
_RETURN = 0x06  # BPF_RET | BPF_K

_KILL = 0x80000000
_ALLOW = 0x7FFF0000
_ERRNO = 0x00050000
_DENY = _ERRNO | errno.EPERM
_NO_SUCH_CALL = _ERRNO | errno.ENOSYS

_NUMBER_AT = 0
_ARCH_AT = 4


def _argument_at(index: int) -> int:
    return 16 + 8 * index


def _op(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _count(program: bytes) -> int:
    return len(program) // 8


def _when(number: int, body: bytes) -> bytes:
    """``body`` runs for call ``number`` only, and returns on every path."""
    return _op(_IF_EQUAL, number, 0, _count(body)) + body


def _deny_if_equal(argument: int, values: tuple[int, ...]) -> bytes:
    """Deny when the argument is one of ``values``, else allow."""
    tests = b"".join(_op(_IF_EQUAL, value, len(values) - place, 0) for place, value in enumerate(values))
    return _op(_LOAD, _argument_at(argument)) + tests + _op(_RETURN, _ALLOW) + _op(_RETURN, _DENY)


def _socket_rules(families: tuple[int, ...]) -> bytes:
    """Allow the families named; netlink only for routing questions; nothing else."""
    plain = [family for family in families if family != AF_NETLINK]
    tail = _op(_RETURN, _DENY) + _op(_RETURN, _ALLOW)
    if AF_NETLINK in families:
        netlink = _op(_LOAD, _argument_at(2)) + _op(_IF_EQUAL, _NETLINK_ROUTE, 1, 0)
        tail = _op(_IF_EQUAL, AF_NETLINK, 0, _count(netlink)) + netlink + tail
    body = b""
    for family in reversed(plain):
        body = _op(_IF_EQUAL, family, _count(body) + _count(tail) - 1, 0) + body
    return _op(_LOAD, _argument_at(0)) + body + tail


def _pair_rules(*, unix_sockets: bool) -> bytes:
    """Allow connected pairs. A datagram pair could be pointed at a path afterwards, so it counts as a socket."""
    deny_allow = _op(_RETURN, _DENY) + _op(_RETURN, _ALLOW)
    if unix_sockets:
        return _op(_LOAD, _argument_at(0)) + _op(_IF_EQUAL, AF_UNIX, 1, 0) + deny_allow
    return (
        _op(_LOAD, _argument_at(0))
        + _op(_IF_EQUAL, AF_UNIX, 0, 4)
        + _op(_LOAD, _argument_at(1))
        + _op(_AND, _SOCK_TYPE_MASK)
        + _op(_IF_EQUAL, _SOCK_STREAM, 2, 0)
        + _op(_IF_EQUAL, _SOCK_SEQPACKET, 1, 0)
        + deny_allow
    )


def _clone_rules() -> bytes:
    return (
        _op(_LOAD, _argument_at(0))
        + _op(_IF_ANY_BIT, _NAMESPACE_FLAGS, 1, 0)
        + _op(_RETURN, _ALLOW)
        + _op(_RETURN, _DENY)
    )


@lru_cache(maxsize=16)
def build_filter(machine: str, *, families: tuple[int, ...], shares_host_view: bool) -> bytes:
    """Return the filter as an array of ``struct sock_filter``.

    Args:
        machine: ``x86_64`` or ``aarch64``, as ``os.uname().machine`` says.
        families: Socket families a process may open. ``AF_UNIX`` missing still leaves connected
            pairs of streams, which asyncio and multiprocessing need and which reach nobody.
        shares_host_view: The command sees the host's processes and files (no namespaces of its
            own): limits of other processes and inode flags are then denied as well.

    Raises:
        SandboxError: SANDBOX_UNAVAILABLE, no table for this machine.
    """
    architecture = ARCHITECTURES.get(machine)
    if architecture is None:
        raise SandboxError(
            f"there is no system-call filter for the {machine} architecture",
            hint="run on x86-64 or aarch64",
        )
    column = architecture.column
    number = {name: numbers[column] for name, numbers in {**DENIED_CALLS, **INSPECTED_CALLS}.items()}
    requests = (_TIOCSTI, _TIOCLINUX) + (_INODE_FLAG_REQUESTS if shares_host_view else ())

    program = _op(_LOAD, _ARCH_AT) + _op(_IF_EQUAL, architecture.audit, 1, 0) + _op(_RETURN, _KILL)
    program += _op(_LOAD, _NUMBER_AT)
    if architecture.x32:
        program += _op(_IF_AT_LEAST, _X32_BIT, 0, 1) + _op(_RETURN, _DENY)
    program += _when(number["clone3"], _op(_RETURN, _NO_SUCH_CALL))
    for name in DENIED_CALLS:
        program += _when(number[name], _op(_RETURN, _DENY))
    program += _when(number["clone"], _clone_rules())
    program += _when(number["ioctl"], _deny_if_equal(1, requests))
    program += _when(number["socket"], _socket_rules(families))
    program += _when(number["socketpair"], _pair_rules(unix_sockets=AF_UNIX in families))
    if shares_host_view:
        limits = _op(_LOAD, _argument_at(0)) + _op(_IF_EQUAL, 0, 1, 0) + _op(_RETURN, _DENY) + _op(_RETURN, _ALLOW)
        program += _when(number["prlimit64"], limits)
    return program + _op(_RETURN, _ALLOW)


def socket_families(*, network: bool, private_network: bool, unix_sockets: bool) -> tuple[int, ...]:
    """The families a command may open.

    Args:
        network: The policy lets the command use the network.
        private_network: The command has a network of its own that reaches nothing outside it.
        unix_sockets: The policy lets the command connect to Unix sockets.
    """
    families: tuple[int, ...] = ()
    if network or private_network:
        families += (AF_INET, AF_INET6)
    if network:
        families += (AF_NETLINK,)
    if unix_sockets:
        families += (AF_UNIX,)
    return families
