"""A command's control group holds all its processes, bounds them together, and goes with it."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.errors import SandboxError
from runner.permission import Mode
from runner.sandbox import bubblewrap, cgroup, landlock
from runner.sandbox.base import SandboxLimits
from runner.sandbox.cgroup import Groups, command_groups, find_place
from runner.testing.sandbox import COUNT_FORKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.testing.sandbox import Box

WITHOUT_CONTROLLERS = "only cgroup v2 with memory and pids bounds a command as a whole: here they belong to version 1"


def has_controllers() -> bool:
    """Whether version 2 of control groups has what bounds memory and processes, at the top of the machine."""
    mounts = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines() if " - cgroup2 " in line]
    return any(
        {"memory", "pids"} <= set(Path(fields[4], "cgroup.controllers").read_text().split()) for fields in mounts
    )


def members(folder: Path) -> list[int]:
    """Processes in the groups below a folder."""
    return [int(word) for path in folder.glob("nightshift-command-*/cgroup.procs") for word in path.read_text().split()]


def names(folder: Path) -> list[str]:
    """What those processes are called."""
    found = []
    for pid in members(folder):
        with contextlib.suppress(OSError):  # it has ended since
            found.append(Path(f"/proc/{pid}/comm").read_text().strip())
    return sorted(found)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A group of the test's own in the kernel's hierarchy, whatever controllers it has."""
    place = find_place(Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text())
    if place is not None and os.geteuid() != 0 and not os.access(place.folder, os.W_OK):
        pytest.skip("only root may write the machine's control groups")
    if place is None or not os.access(place.folder, os.W_OK):
        pytest.skip("cgroup v2 is not mounted, or cannot be written")
    made = Path(place.folder) / f"nightshift-test-{secrets.token_hex(6)}"
    made.mkdir()
    yield made
    for inner in [path for path in made.iterdir() if path.is_dir()]:
        inner.rmdir()
    made.rmdir()


@pytest.fixture
def grouped(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands get groups in that folder, with a setting that every kernel knows in the place of the limits."""
    groups = Groups(str(folder))
    monkeypatch.setattr(cgroup, "command_groups", lambda: groups)
    for module in (bubblewrap, landlock):
        monkeypatch.setattr(module, "command_groups", lambda: groups)
    monkeypatch.setattr(cgroup, "settings_of", lambda *_, **__: {"cgroup.max.descendants": "7", "memory.swap.max": "0"})
    return folder


def test_all_processes_of_a_command_are_in_its_group(box: Box, grouped: Path) -> None:
    """The command, what it forks and what leaves its session; the runner is not, and the group goes with the call."""
    executor = box.executor()
    argv = ["/bin/bash", "-c", "sleep 30 & setsid sleep 30 & echo up; wait"]
    output = box.base / "output"
    executor.start_background(argv, mode=Mode.WORKSPACE_WRITE, output=str(output), call_id="1")
    deadline = time.monotonic() + 20
    while [name for name in names(grouped) if name != "bwrap"] != ["bash", "sleep", "sleep"]:
        assert time.monotonic() < deadline, names(grouped)
        time.sleep(0.02)
    [group] = grouped.glob("nightshift-command-*")

    assert b"up" in output.read_bytes()
    assert os.getpid() not in members(grouped)
    assert (group / "cgroup.max.descendants").read_text() == "7\n"
    executor.stop_background()
    assert list(grouped.glob("nightshift-command-*")) == []


def test_each_command_has_a_group_of_its_own_and_leaves_none(box: Box, grouped: Path) -> None:
    """Commands that succeed, fail and are not there, and file operations; then nothing is left."""
    executor = box.executor()
    options: dict[str, Any] = {"mode": Mode.WORKSPACE_WRITE, "timeout": 20, "cancellation": box.cancellation}
    codes = [executor.run([name], **options).exit_code for name in ("/bin/true", "/bin/false", "no-such-program")]
    assert executor.worker(executor.mode).call(
        "read",
        {"path": str(box.workspace / "README"), "offset": 1, "limit": 1, "max_bytes": 100},
        timeout=20,
        cancellation=box.cancellation,
    )["ok"]

    assert codes == [0, 1, 127]
    assert len(list(grouped.glob("nightshift-command-*"))) == 1  # the worker's
    executor.close()
    assert list(grouped.glob("nightshift-command-*")) == []


def test_a_command_cannot_leave_its_group(box: Box, grouped: Path) -> None:
    """The hierarchy is read-only for it, whatever its path."""
    script = """
        for each in "$1"/../cgroup.procs "$1"/cgroup.procs "$1"/*/cgroup.procs; do echo $$ > "$each"; done 2> /dev/null
        mkdir "$1"/new 2> /dev/null; cat "$1"/nightshift-command-*/cgroup.procs | grep -c .
    """
    result = box.run(script, grouped)

    assert int(result.output.split()[-1]) >= 1
    assert not (grouped / "new").exists()


def test_what_a_killed_runner_left_is_removed(folder: Path) -> None:
    """Its empty groups go when the next one begins; those of a runner that lives stay."""
    for name in ("nightshift-command-4194304-1", f"nightshift-command-{os.getpid()}-9999", "other"):
        (folder / name).mkdir()
    Groups(str(folder))

    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [
        f"nightshift-command-{os.getpid()}-9999",
        "other",
    ]


def test_a_group_that_the_kernel_refuses_is_a_broken_sandbox(box: Box, grouped: Path) -> None:
    """Never a command without its limits."""
    (grouped / "cgroup.max.descendants").write_text("0")
    executor = box.executor()
    with pytest.raises(SandboxError, match="no control group can be made for a command") as caught:
        executor.run(["/bin/true"], mode=Mode.WORKSPACE_WRITE, timeout=20, cancellation=box.cancellation)

    assert caught.value.code.exit_code == 3


def test_limits_hold_for_all_processes_of_a_command_together(box: Box) -> None:
    """For root as well: 400 forks against 150, and three processes of 300 MiB against 512; one of them fits."""
    if command_groups() is None:
        pytest.skip(WITHOUT_CONTROLLERS if not has_controllers() else "the runner's control group is not its to divide")
    limits = SandboxLimits(memory=512 << 20, processes=150)
    grab = "import time; kept = bytearray(b'x') * (300 << 20); print('kept', flush=True); time.sleep(2)"
    several = f'for n in 1 2 3; do python3 -c "{grab}" & done; wait -n; wait -n; wait -n; wait; true'

    assert 100 < int(box.python(COUNT_FORKS, limits=limits).output) <= 150
    # A shell says of a killed child what it was, so whole lines are counted.
    assert box.run(f'python3 -c "{grab}"', limits=limits).output == b"kept\n"
    assert box.run(several, limits=limits).output.splitlines().count(b"kept") < 3
    assert box.run(several, limits=SandboxLimits(memory=2 << 30)).output.splitlines().count(b"kept") == 3
    assert "process_limit" not in box.executor().not_enforced(Mode.WORKSPACE_WRITE)


def test_a_group_takes_with_it_what_is_left_in_it(folder: Path) -> None:
    """A process that nobody else ended is killed, and the group is gone."""
    group = Groups(str(folder)).make({})
    with subprocess.Popen(["/bin/sleep", "60"]) as left:
        Path(group.members).write_text(str(left.pid))
        group.remove()

        assert left.wait(10) == -signal.SIGKILL
    assert not Path(group.members).parent.exists()


def test_a_group_whose_limits_the_kernel_refuses_is_not_left_behind(folder: Path) -> None:
    """Its folder is gone with the error."""
    with pytest.raises(FileNotFoundError):
        Groups(str(folder)).make({"no.such.setting": "1"})

    assert [path for path in folder.iterdir() if path.is_dir()] == []
