"""When the tests run as root, the tests of the sandbox run once more as an ordinary user.

In mounts of its own: where folders above the interpreter or the sources are closed to others, as a home of root is,
that user finds an open one in their place with nothing in it but what is needed.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]
NOBODY = 65534
HERE = Path(__file__).parent
THESE = sorted(path.name for path in HERE.glob("test_sandbox_*.py"))
NOT_AGAIN = {
    "test_sandbox_as_user.py",  # this one
    "test_sandbox_user.py",  # the same in short, for the fast tests
    "test_sandbox_cases.py",  # the index
}

ENTER = """
import json, os, subprocess, sys
stage, user, home, argv, closed, needed, environment = json.loads(sys.argv[1])
def mount(*arguments):
    subprocess.run(["mount", *arguments], check=True)
mount("-t", "tmpfs", "-o", "mode=755", "none", stage)
for number, path in enumerate(needed):
    os.mkdir(f"{stage}/{number}")
    mount("--rbind", path, f"{stage}/{number}")
for path in closed:
    mount("-t", "tmpfs", "-o", "mode=755", "none", path)
for number, path in enumerate(needed):
    if not os.path.isdir(path):
        os.makedirs(path)
        mount("--rbind", f"{stage}/{number}", path)
os.setgroups([])
os.setgid(user)
os.setuid(user)
os.chdir(home)
os.execve(argv[0], argv, environment)
"""


def closed_above(path: Path) -> Path | None:
    """The outermost folder on the way to ``path``, itself included, that others may not enter."""
    return next((each for each in reversed([path, *path.parents]) if each.stat().st_mode & 0o005 != 0o005), None)


@pytest.fixture
def home() -> Iterator[Path]:
    """A home of the user's own, outside the temporary folders."""
    folder = Path(tempfile.mkdtemp(prefix="nightshift-test-", dir="/var/lib"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.backend("bubblewrap", "landlock")
@pytest.mark.parametrize("name", [name for name in THESE if name not in NOT_AGAIN])
def test_the_sandbox_holds_for_an_ordinary_user(name: str, home: Path, tmp_path: Path) -> None:
    """Each file, both backends demanded: what root can skip an ordinary user cannot, and the other way round."""
    if os.geteuid() != 0:
        pytest.skip("only root runs them a second time: these run as an ordinary user already")
    needed = [os.path.realpath(sys.base_prefix), os.path.realpath(sys.prefix), str(REPOSITORY)]
    closed = {found for path in needed if (found := closed_above(Path(path))) is not None}
    hidden = [path for path in needed if any(Path(path).is_relative_to(each) for each in closed)]
    stage = tmp_path / "stage"
    stage.mkdir()
    environment = {
        "HOME": str(home),
        "TMPDIR": str(home),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
        "LANG": "C.UTF-8",
    }
    argv = [sys.executable, "-B", "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", f"{REPOSITORY}/pyproject.toml"]
    argv += ["--require-backend", "bubblewrap,landlock", str(HERE / name)]
    given = [str(stage), NOBODY, str(home), argv, sorted(map(str, closed)), hidden, environment]
    done = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", ENTER, json.dumps(given)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr
    # A machine where an ordinary user can make no control group leaves nothing of one file.
    assert " passed" in done.stdout or name == "test_sandbox_groups.py"
