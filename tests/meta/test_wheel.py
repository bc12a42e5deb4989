"""What users install: the built wheel in a fresh environment, used from another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Installed:
    """A fresh environment that holds the wheel, and a folder to work in that is not the repository."""

    venv: Path
    elsewhere: Path

    @property
    def package(self) -> Path:
        """The installed package."""
        (found,) = self.venv.glob("lib/python3.*/site-packages/runner")
        return found

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment with nothing of the repository in reach."""
        return subprocess.run(
            [self.venv / "bin" / command[0], *command[1:]],
            cwd=self.elsewhere,
            env={"PATH": f"{self.venv / 'bin'}{os.pathsep}/usr/bin:/bin", "HOME": str(self.venv.parent / "home")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )


def _run(*command: str | Path) -> None:
    result = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, f"{command}\n{result.stdout}\n{result.stderr}"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Build the wheel and install it with what it needs from the package index."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder / "dist", REPOSITORY)
    (wheel,) = (folder / "dist").glob("nightshift_runner-*.whl")
    _run(sys.executable, "-m", "venv", folder / "venv")
    _run(folder / "venv" / "bin" / "pip", "install", "--quiet", "--no-input", f"{wheel}[demo]")
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    return Installed(folder / "venv", elsewhere)


def test_the_command_says_its_version(installed: Installed) -> None:
    """The installed command runs and names the version of the package."""
    printed = installed.run("nightshift", "--version")

    assert printed.returncode == 0, printed.stderr
    assert (
        printed.stdout.split()[-1]
        == installed.run("python", "-c", "import runner; print(runner.__version__)").stdout.strip()
    )


@pytest.mark.parametrize("name", ["task", "profile", "policy", "script"])
def test_the_schemas_come_with_it(installed: Installed, name: str) -> None:
    """Each format's JSON Schema can be printed and is the one in the repository."""
    printed = installed.run("nightshift", "schema", name)

    assert printed.returncode == 0, printed.stderr
    shipped = REPOSITORY / "configs" / "schema" / f"{name}.schema.json"
    assert json.loads(printed.stdout) == json.loads(shipped.read_text(encoding="utf-8"))


def test_everything_below_configs_comes_with_it(installed: Installed) -> None:
    """Profiles, policies, tasks, schemas and demos lie in the package as they lie in the repository."""
    source, target = REPOSITORY / "configs", installed.package / "configs"
    names = {path.relative_to(source) for path in source.rglob("*") if path.is_file() and path.suffix != ".pyc"}

    assert names == {path.relative_to(target) for path in target.rglob("*") if path.is_file() and path.suffix != ".pyc"}
    assert Path("profiles/quickstart.profile.yaml") in names


def test_a_shipped_task_can_be_planned_from_another_folder(installed: Installed) -> None:
    """``plan`` resolves a shipped task, with its profile and policy by name, without a key."""
    tasks = sorted((installed.package / "configs" / "tasks").glob("*.task.yaml"))
    assert tasks
    for task in tasks:
        planned = installed.run("nightshift", "plan", task, "--json")

        assert planned.returncode == 0, f"{task.name}\n{planned.stderr}"
        assert json.loads(planned.stdout)


def test_the_demo_runs_from_the_installed_package(installed: Installed) -> None:
    """The demo that comes with the package passes in the fresh environment."""
    demo = installed.run("python", installed.package / "configs" / "demo" / "run.py", "quick", "demo")

    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert "outcome   COMPLETED" in demo.stdout
