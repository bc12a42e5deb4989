"""The same promises hold for an ordinary user, who has fewer rights and owns fewer files."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.sandbox import CANARY

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[2]
NOBODY = 65534
AS_NOBODY: dict[str, Any] = {"user": NOBODY, "group": NOBODY, "extra_groups": []}

DRIVER = """
import json, os, sys
from pathlib import Path
from runner.permission import Mode
from runner.sandbox.base import SandboxLimits
from runner.sandbox.process import harden_self
from runner.sandbox.select import select_backend
from runner.sandbox.base import SandboxSpec
from runner.testing.sandbox import COUNT_FORKS, make_box

harden_self()
box = make_box(Path(sys.argv[1]) / "box", sys.argv[2])
executor = box.executor()
found = {"uid": os.geteuid()}
found["backend"] = select_backend(
    SandboxSpec(backend=sys.argv[2]), executor._policy, cancellation=box.cancellation
).name

def run(name, script, *arguments, **options):
    result = box.run(script, *arguments, **options)
    found[name] = [result.exit_code, result.output.decode("utf-8", "replace")]

run("outside", '''
    echo x > "$1/new"; echo x > "$1/canary"; rm "$1/canary"; mv "$1" "$1-x"; ln "$1/canary" src/hard
    ln -s "$1" src/link; echo x > src/link/new; echo x > .git/config; echo x > .git/hooks/pre-commit; mv .git src/
''', box.outside)
run("inside", 'set -e; echo x > src/new; cat README; git status --porcelain -uno; file=$(mktemp); echo "$file"')
run("read-only", 'echo x > src/new-2; echo x > README; echo x > "$TMPDIR/y" && echo fine', mode=Mode.READ_ONLY)
run("caps", "grep -E '^(Cap(Eff|Prm)|NoNewPrivs|Seccomp:)' /proc/self/status")
run("runner", 'kill -0 "$1"; cat "/proc/$1/environ"; ls -l "/proc/$1/root/"', os.getpid())
run("unshare", "unshare -Ur true && echo made; sudo -n true && echo sudo; exit 0")
for name, count in (("forks", 150), ("more forks", 450)):
    result = box.python(COUNT_FORKS, limits=SandboxLimits(processes=count))
    found[name] = result.output.decode().strip()
found["not enforced"] = executor.not_enforced(Mode.WORKSPACE_WRITE)
box.close()
print(json.dumps(found))
"""


def python_for_others() -> str | None:
    """A Python, new enough, that another user can run."""
    for path in (os.path.realpath(sys.executable), "/usr/bin/python3", "/usr/local/bin/python3"):
        code = "import sys; sys.exit(sys.version_info < (3, 11))"
        try:
            if subprocess.run([path, "-c", code], capture_output=True, check=False, **AS_NOBODY).returncode == 0:
                return path
        except OSError:
            continue
    return None


@pytest.fixture
def home_of_nobody(place: Path) -> Iterator[Path]:
    """A folder of the user's own: of nobody's when the tests run as root."""
    if os.geteuid() != 0:
        yield place
        return
    folder = Path(tempfile.mkdtemp(prefix="nightshift-test-", dir="/var/lib"))
    os.chown(folder, NOBODY, NOBODY)
    yield folder
    shutil.rmtree(folder)


def drive(folder: Path, backend: str) -> dict[str, Any]:
    """Run the driver as an ordinary user."""
    command, package, user = sys.executable, REPOSITORY, {}
    if os.geteuid() == 0:
        python = python_for_others()
        if python is None:
            pytest.skip("there is no Python that another user can run")
        command, package, user = python, folder / "package", AS_NOBODY
        shutil.copytree(REPOSITORY / "runner", package / "runner", ignore=shutil.ignore_patterns("__pycache__"))
    result = subprocess.run(
        [command, "-B", "-c", DRIVER, str(folder), backend],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(package), "HOME": str(folder), "SECRET": "top-secret-value"},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        **user,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_an_ordinary_user_is_confined_too(home_of_nobody: Path, backend: str) -> None:
    """Files, .git, read-only, capabilities, the runner's secrets, namespaces and the number of processes."""
    found = drive(home_of_nobody, backend)
    box = home_of_nobody / "box"

    assert found["uid"] != 0
    assert found["backend"] == backend
    assert sorted(path.name for path in (box / "outside").iterdir()) == ["canary", "folder"]
    assert (box / "outside" / "canary").read_text() == CANARY
    assert (box / "outside" / "canary").stat().st_nlink == 1
    assert "x" not in (box / "workspace" / ".git" / "config").read_text().splitlines()
    assert not (box / "workspace" / ".git" / "hooks" / "pre-commit").exists()
    assert found["inside"][0] == 0, found["inside"]
    assert (box / "workspace" / "src" / "new").read_text() == "x\n"
    assert not (box / "workspace" / "src" / "new-2").exists()
    assert found["read-only"][1].endswith("fine\n")
    assert (box / "workspace" / "README").read_text() == "hello\n"
    assert "0000000000000000" in found["caps"][1]
    assert "top-secret-value" not in found["runner"][1]
    assert found["unshare"][1].endswith("denied\n") or "made" not in found["unshare"][1]
    assert "sudo\n" not in found["unshare"][1].replace("sudo: ", "")
    # Where the kernel counts all of a user's processes, those that end meanwhile make room for others.
    assert 100 < int(found["forks"]) <= 170
    assert int(found["more forks"]) == 400
    assert "process_limit" not in found["not enforced"]
