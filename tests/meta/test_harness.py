"""The tests' own rules hold: required backends are demanded, nothing leaves this machine, tasks are written whole."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import MakeRepo, ScriptedTask

REPOSITORY = Path(__file__).resolve().parents[2]

SAMPLE = """
import pytest

@pytest.mark.parametrize("name", ["bubblewrap", "landlock"])
def test_sample(name):
    pass

@pytest.mark.backend("landlock")
def test_marked():
    pass
"""

SKIPPING = """
import pytest

def test_missing():
    pytest.skip("no headers here")

def test_elsewhere():
    pytest.skip("only root has this")
"""


def run_pytest(
    folder: Path, *options: str, disabled: str = "", sample: str = SAMPLE
) -> subprocess.CompletedProcess[str]:
    """Run a sample test file under our conftest with some backends made unavailable."""
    (folder / "test_sample.py").write_text(sample, encoding="utf-8")
    (folder / "conftest.py").write_text(
        (REPOSITORY / "tests" / "conftest.py").read_text(encoding="utf-8"), encoding="utf-8"
    )
    environment = {"PATH": os.environ["PATH"], "NIGHTSHIFT_DISABLE_BACKENDS": disabled}
    return subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            REPOSITORY / "pyproject.toml",
            f"--rootdir={folder}",
            "-rs",
            *options,
            folder,
        ],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_required_backend_that_is_missing_fails_the_run(tmp_path: Path) -> None:
    """``--require-backend`` ends the run before any test, with the reason."""
    finished = run_pytest(tmp_path, "--require-backend", "landlock", disabled="landlock")

    assert finished.returncode == 1
    assert "landlock:" in finished.stdout + finished.stderr
    assert "passed" not in finished.stdout


def test_an_unknown_backend_name_is_a_usage_error(tmp_path: Path) -> None:
    """A misspelt name cannot make the demand disappear."""
    finished = run_pytest(tmp_path, "--require-backend", "bublewrap")

    assert finished.returncode == pytest.ExitCode.USAGE_ERROR
    assert "bublewrap" in finished.stderr


def test_without_the_demand_a_missing_backend_is_listed_at_the_end(tmp_path: Path) -> None:
    """Its tests are skipped with the reason, and the summary says that it was not exercised."""
    finished = run_pytest(tmp_path, disabled="landlock,bubblewrap")

    assert finished.returncode == 0, finished.stdout
    assert "3 skipped" in finished.stdout
    assert "landlock: NOT exercised" in finished.stdout
    assert "bubblewrap: NOT exercised" in finished.stdout


@pytest.mark.backend("landlock")
def test_exercised_backends_are_counted(tmp_path: Path) -> None:
    """Tests count for the backend that a marker or a parameter names."""
    finished = run_pytest(tmp_path, "--require-backend", "landlock", disabled="bubblewrap")

    assert finished.returncode == 0, finished.stdout
    assert "landlock: exercised, 2 passed" in finished.stdout


@pytest.mark.parametrize("address", [("192.0.2.1", 80), ("example.invalid", 443), ("2001:db8::1", 80, 0, 0)])
@pytest.mark.parametrize("method", ["connect", "connect_ex"])
def test_connections_that_leave_this_machine_are_blocked(address: tuple[object, ...], method: str) -> None:
    """Neither form of connecting reaches another address than loopback."""
    family = socket.AF_INET6 if len(address) > 2 else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as client, pytest.raises(RuntimeError, match="this machine only"):
        getattr(client, method)(address)


def test_loopback_connections_are_not_blocked() -> None:
    """Servers that tests start can be reached."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.sendall(b"x")
        accepted, _ = server.accept()
        with accepted:
            assert accepted.recv(1) == b"x"


def test_a_scripted_task_is_written_whole(scripted_task: ScriptedTask) -> None:
    """The builder writes task, profile, policy and script that name each other."""
    task = scripted_task([{"text": "Done."}], profile={"limits": {"steps": 3}}, rules=[], name="small")

    parts = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in task.parent.iterdir()}
    assert parts["small.task.yaml"]["profile"] == "small.profile.yaml"
    assert parts["small.profile.yaml"]["limits"] == {"steps": 3}
    assert parts["small.policy.yaml"]["rules"] == []
    assert parts["small.script.yaml"]["responses"] == [{"text": "Done."}]


def test_a_made_repository_has_one_commit_and_is_clean(make_repo: MakeRepo, git: Callable[..., str]) -> None:
    """The files are committed, binary ones too."""
    repository = make_repo({"a/b.txt": "text\n", "c.bin": b"\xff\x00"})

    assert git(repository, "status", "--porcelain") == ""
    assert git(repository, "ls-files").split() == ["a/b.txt", "c.bin"]
    assert git(repository, "rev-list", "--count", "HEAD").strip() == "1"


def test_what_else_is_missing_is_said_and_fails_where_all_is_demanded(tmp_path: Path) -> None:
    """A skip for want of a part is listed, and is a failure in CI; one for another kind of machine is only listed."""
    lenient = run_pytest(tmp_path, sample=SKIPPING)
    strict = run_pytest(tmp_path, "--require-backend", "landlock", sample=SKIPPING)

    assert lenient.returncode == 0, lenient.stdout
    assert "NOT exercised, 1 tests: no headers here" in lenient.stdout
    assert "NOT exercised, 1 tests: only root has this" in lenient.stdout
    assert strict.returncode == 1, strict.stdout
    assert "a part is missing, and this run demands all of them: no headers here" in strict.stdout
    assert "1 failed" in strict.stdout
    assert "demands all of them: only root" not in strict.stdout
