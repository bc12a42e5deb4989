"""Where a control group for commands may be made is read from what the kernel says of this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from runner.sandbox.base import SandboxLimits
from runner.sandbox.cgroup import Place, divide, find_place, settings_of

if TYPE_CHECKING:
    from pathlib import Path

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
HYBRID = (
    "26 24 0:24 / /sys/fs/cgroup rw - tmpfs tmpfs rw\n"
    "27 26 0:25 / /sys/fs/cgroup/memory rw shared:5 - cgroup cgroup rw,memory\n"
    "28 26 0:27 / /sys/fs/cgroup/unified rw master:1 shared:6 - cgroup2 cgroup2 rw\n"
)


@pytest.mark.parametrize(
    ("mountinfo", "cgroup", "place"),
    [
        (V2, "0::/\n", Place("/sys/fs/cgroup", top=True)),
        (V2, "0::/user.slice/a.scope\n", Place("/sys/fs/cgroup/user.slice/a.scope", top=False)),
        (HYBRID, "4:memory:/x\n0::/a:b\n", Place("/sys/fs/cgroup/unified/a:b", top=False)),
        (V2.replace(" / ", " /docker/x ", 1), "0::/docker/x\n", Place("/sys/fs/cgroup", top=False)),
        (V2.replace(" / ", " /docker/x ", 1), "0::/docker/x/y\n", Place("/sys/fs/cgroup/y", top=False)),
        (V2.replace(" / ", " /docker/x ", 1), "0::/docker/xy\n", None),
        (V2.replace("/sys/fs/cgroup", r"/a\040b"), "0::/c\n", Place("/a b/c", top=False)),
        (V2, "0::/../elsewhere\n", None),
        (V2, "4:memory:/x\n", None),
        ("27 26 0:25 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n", "4:memory:/x\n0::/x\n", None),
        ("", "", None),
    ],
)
def test_the_place_of_a_process_is_found(mountinfo: str, cgroup: str, place: Place | None) -> None:
    """In a hierarchy of its own, a mixed one, a namespace, a part that is mounted; or there is none."""
    assert find_place(mountinfo, cgroup) == place


def test_the_limits_become_settings() -> None:
    """The wrapper's own processes are no command's."""
    made = settings_of(SandboxLimits(memory=1000, processes=10), own_processes=2)

    assert (made["memory.max"], made["memory.swap.max"], made["pids.max"]) == ("1000", "0", "12")


def group_folder(folder: Path, *, controllers: str = "cpu memory pids", members: str = "") -> Path:
    """A folder with the files of a group, as far as it is looked at."""
    folder.mkdir()
    for name, content in (
        ("cgroup.controllers", controllers),
        ("cgroup.subtree_control", ""),
        ("cgroup.procs", members),
        ("cgroup.type", "domain"),
    ):
        (folder / name).write_text(f"{content}\n")
    return folder


def contents(folder: Path) -> dict[str, str | None]:
    """All below a folder."""
    return {str(path): path.read_text() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize("case", ["not delegated", "controllers", "strangers", "nothing there"])
def test_a_group_that_is_not_the_runners_own_is_left_alone(tmp_path: Path, case: str) -> None:
    """No sign of delegation, a controller that is missing, other processes in it: no group, and no change."""
    folder = tmp_path / "group"
    if case != "nothing there":
        stranger = f"{os.getpid()}\n1\n4194304" if case == "strangers" else str(os.getpid())
        group_folder(folder, controllers="cpu pids" if case == "controllers" else "memory pids", members=stranger)
    before = contents(tmp_path)

    assert divide(Place(str(folder), top=case != "not delegated")) is None
    assert contents(tmp_path) == before


def test_the_runner_moves_itself_into_a_leaf_before_it_divides_its_group(tmp_path: Path) -> None:
    """It and those above it; then the controllers are switched on for what comes beside the leaf."""
    folder = group_folder(tmp_path / "group", members=f"{os.getppid()}\n{os.getpid()}")
    leaf = folder / "nightshift-runner"
    leaf.mkdir()
    (leaf / "cgroup.procs").write_text("")

    assert divide(Place(str(folder), top=True)) is not None
    assert (leaf / "cgroup.procs").read_text().startswith(str(os.getpid()))
    assert (folder / "cgroup.subtree_control").read_text().startswith("+memory +pids")
    # What comes next in the same place finds itself in the leaf, and the group above divided.
    (folder / "cgroup.subtree_control").write_text("memory pids\n")
    assert divide(Place(str(leaf), top=False)) is not None
