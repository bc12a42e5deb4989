"""What a confined command can ask of the kernel: no privileges, no namespaces, nothing of the deny list."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.errors import ConfigError
from runner.permission import Mode
from runner.sandbox.base import SandboxLimits
from runner.sandbox.seccomp import ARCHITECTURES, DENIED_CALLS, INSPECTED_CALLS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.testing.sandbox import Box

CALLS = """
import ctypes, errno, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long
for word in sys.argv[1:]:
    name, number, *arguments = word.split(":")
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(int(number)), *(ctypes.c_long(int(each)) for each in arguments))
    print(name, result if result >= 0 else errno.errorcode[ctypes.get_errno()])
"""

NEW_USER, NEW_NET, NEW_PID = 0x10000000, 0x40000000, 0x20000000
TIOCSTI, TIOCLINUX = 0x5412, 0x541C


def number(name: str) -> int:
    """The call's number on this machine."""
    return {**DENIED_CALLS, **INSPECTED_CALLS}[name][ARCHITECTURES[os.uname().machine].column]


def answers(box: Box, words: list[str]) -> dict[str, str]:
    """What the kernel answers a command to each ``name:number:arguments``."""
    result = box.python(CALLS, *words)
    assert result.exit_code == 0, result.output
    return dict(line.split(" ", 1) for line in result.output.decode().splitlines())


def test_every_call_of_the_deny_list_is_refused(box: Box) -> None:
    """Each by its number, with arguments that do nothing where the call is allowed."""
    words = [f"{name}:{number(name)}:-1:0:0:0:0:0" for name in DENIED_CALLS]

    assert answers(box, words) == dict.fromkeys(DENIED_CALLS, "EPERM")


def test_the_same_calls_reach_the_kernel_without_a_sandbox(bare_box: Box) -> None:
    """The positive twin: bare, the kernel itself answers, so most are not refused."""
    harmless = [name for name in DENIED_CALLS if name not in ("ptrace", "reboot", "unshare", "syslog")]
    words = [f"{name}:{number(name)}:-1:0:0:0:0:0" for name in harmless]
    result = bare_box.python(CALLS, *words, mode=Mode.DANGER_FULL_ACCESS)
    refused = [line for line in result.output.decode().splitlines() if line.endswith("EPERM")]

    assert result.exit_code == 0, result.output
    assert len(refused) < len(harmless) / 2


def test_namespaces_cannot_be_made_by_any_call(box: Box) -> None:
    """A clone with a namespace flag is refused, clone3 answers ENOSYS, plain clone works."""
    flags = {"user": NEW_USER, "net": NEW_NET, "pid": NEW_PID, "user-and-net": NEW_USER | NEW_NET}
    words = [f"{name}:{number('clone')}:{flag | 17}:0:0:0:0" for name, flag in flags.items()]
    found = answers(box, [*words, f"clone3:{number('clone3')}:0:0"])

    assert found == {**dict.fromkeys(flags, "EPERM"), "clone3": "ENOSYS"}
    script = "unshare -Ur true; unshare -n true; bwrap --ro-bind / / true && echo nested; (echo forked) | cat"
    assert box.run(script).output.splitlines()[-1] == b"forked"
    assert b"nested" not in box.run(script).output


def test_nothing_is_mounted_by_any_means(box: Box) -> None:
    """Mount, bind, remount, chroot and a nested sandbox: the mounts of the host and of the command stay."""
    host = Path("/proc/self/mounts").read_text()
    script = """
        before=$(cat /proc/self/mounts)
        mount -t tmpfs none src; mount --bind / src; mount -o remount,rw /; mount -o remount,bind,rw "$1"
        umount -l /proc; chroot / true && echo "changed the root"; nsenter -t 1 -m true && echo "entered"
        unshare -Urm sh -c "mount -t tmpfs none src" && echo "new namespace"
        bwrap --bind / / sh -c 'echo x > "$0/new"' "$1"
        test "$before" = "$(cat /proc/self/mounts)" && echo same
    """
    result = box.run(f"exec 2> /dev/null; {script}", box.outside)

    assert result.output == b"same\n"
    assert Path("/proc/self/mounts").read_text() == host
    box.assert_untouched()


def test_terminal_injection_is_refused(box: Box) -> None:
    """TIOCSTI and TIOCLINUX, also with bits above the 32 that the kernel reads; other requests pass."""
    words = [
        f"sti:{number('ioctl')}:0:{TIOCSTI}:0",
        f"linux:{number('ioctl')}:0:{TIOCLINUX}:0",
        f"high:{number('ioctl')}:0:{TIOCSTI | 1 << 32}:0",
        f"winsize:{number('ioctl')}:0:{0x5413}:0",
    ]

    assert answers(box, words) == {"sti": "EPERM", "linux": "EPERM", "high": "EPERM", "winsize": "ENOTTY"}


INJECT = """
import fcntl, os, sys
try:
    terminal = os.open(sys.argv[1], os.O_RDWR)
    os.write(terminal, b"written")
    for letter in b"id":
        fcntl.ioctl(terminal, 0x5412, bytes([letter]))
except OSError as error:
    print(error)
"""


@pytest.fixture
def terminal() -> Iterator[tuple[int, str]]:
    """A terminal of the host: what arrives at its screen, and its name."""
    screen, keyboard = os.openpty()
    os.set_blocking(screen, False)
    yield screen, os.ttyname(keyboard)
    os.close(screen)
    os.close(keyboard)


def test_a_terminal_of_the_host_is_out_of_reach(box: Box, terminal: tuple[int, str]) -> None:
    """Nothing is put on its screen and nothing into its input."""
    screen, name = terminal
    result = box.python(INJECT, name)

    assert b"Errno" in result.output
    with pytest.raises(BlockingIOError):
        os.read(screen, 100)


def test_without_a_sandbox_the_terminal_is_reached(bare_box: Box, terminal: tuple[int, str]) -> None:
    """The positive twin."""
    screen, name = terminal
    bare_box.python(INJECT, name, mode=Mode.DANGER_FULL_ACCESS)

    assert os.read(screen, 100).startswith(b"written")


def test_foreign_system_call_tables_are_refused(box: Box) -> None:
    """The x32 numbers are denied, and a 32-bit call ends the process instead of passing by the filter."""
    if os.uname().machine != "x86_64":
        pytest.skip("only x86-64 has other tables than its own")
    assert answers(box, [f"x32:{0x40000000 | 39}:0"]) == {"x32": "EPERM"}
    # mov eax, 20 (getpid on i386); int 0x80; ret
    code = """
import ctypes, mmap
memory = mmap.mmap(-1, 4096, prot=7)
memory.write(bytes.fromhex("b814000000cd80c3"))
call = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
print("answered", call(), flush=True)
"""
    result = box.python(code)
    assert b"answered" not in result.output
    assert result.exit_code == 128 + 31, result


def test_a_command_has_no_capabilities_and_gains_none(box: Box) -> None:
    """All five sets are empty for root, no_new_privs is set, and a setuid program changes nothing."""
    result = box.run("grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status")
    status = dict(line.split(":\t") for line in result.output.decode().splitlines())

    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    if os.geteuid() == 0:
        assert status["CapBnd"] == "0" * 16
    assert box.run("sudo -n id -u || su -c id < /dev/null || echo neither").output.endswith(b"neither\n")
    shutil.copy("/usr/bin/id", box.workspace / "src" / "id")
    (box.workspace / "src" / "id").chmod(0o4755)
    assert box.run("src/id -u").output == f"{os.geteuid()}\n".encode()


def test_keep_dac_keeps_the_two_file_capabilities_of_root_only(box: Box) -> None:
    """``keep_dac`` lets a root runner work in a stranger's workspace; without it that is an error at load."""
    if os.geteuid() != 0:
        pytest.skip("only root has capabilities to keep")
    for path in (box.workspace, *box.workspace.rglob("*")):
        os.chown(path, 1001, 1001, follow_symlinks=False)
    (box.workspace / "README").chmod(0o600)
    with pytest.raises(ConfigError, match="belongs to user 1001"):
        box.executor()
    result = box.run(
        'echo x > README && chmod 644 README && grep CapEff /proc/self/status; echo x > "$1"', box.canary, keep_dac=True
    )

    assert result.output.splitlines()[0] == b"CapEff:\t000000000000000a", result.output
    assert (box.workspace / "README").read_text() == "x\n"
    box.assert_untouched()
    assert box.run("git log --format=%s", keep_dac=True).output == b"one\n"


def test_devices_are_out_of_reach(box: Box) -> None:
    """No device node can be made, no disk and no kernel log read; the harmless devices work."""
    script = """
        mknod src/null c 1 3; mknod src/disk b 8 0
        for each in /dev/kmsg /dev/mem /dev/sda /dev/vda /dev/nvme0n1 /dev/fuse /dev/kvm; do
            test -e "$each" && head -c 16 "$each" > /dev/null && echo "read $each"
        done 2>/dev/null
        dmesg > /dev/null 2>&1 && echo "read the kernel log"
        find /proc/sys /proc/sysrq-trigger /sys -type f 2>/dev/null | head -n 4000 | while read -r each; do
            test -e "$each" && { : >> "$each"; } 2>/dev/null && echo "changed $each"
        done
        head -c 4 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c; echo x > /dev/null && echo null
    """
    result = box.run(script)
    lines = result.output.decode().splitlines()

    assert [line for line in lines if line.startswith(("read", "changed", "pressed"))] == []
    assert lines[-3:] == ["4", "4", "null"]
    assert [path.name for path in (box.workspace / "src").iterdir()] == ["main.py"]


def test_limits_of_memory_and_file_size_hold(box: Box) -> None:
    """700 MiB against 512 and 80 MiB against 32 fail; what is below passes."""
    limits = SandboxLimits(memory=512 << 20, processes=512, file_size=32 << 20)
    code = "import sys; kept = bytearray(int(sys.argv[1]) << 20); print(len(kept) >> 20)"

    assert box.python(code, 700, limits=limits).output.splitlines()[-1] == b"MemoryError"
    assert box.python(code, 200, limits=limits).output == b"200\n"
    box.run("head -c 80M /dev/zero > src/large; head -c 20M /dev/zero > src/small", limits=limits)
    assert (box.workspace / "src" / "large").stat().st_size <= 32 << 20
    assert (box.workspace / "src" / "small").stat().st_size == 20 << 20


def test_a_lower_limit_of_the_runner_stays(box: Box, place: Path) -> None:
    """Where the runner's own hard limit is lower than the profile's, the command still starts."""
    before = resource.getrlimit(resource.RLIMIT_CORE)
    huge = SandboxLimits(memory=1 << 62, processes=1 << 30, file_size=1 << 62)
    assert box.run("echo started", limits=huge).output == b"started\n"
    assert resource.getrlimit(resource.RLIMIT_CORE) == before
    assert place.exists()
