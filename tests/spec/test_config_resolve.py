"""A run is one frozen value with the origin of everything in it; nothing is created on the way."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from runner.config.directories import check_artifacts_dir
from runner.config.resolve import load_run
from runner.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from pathlib import Path

    from runner.config.spec import RunSpec

PROFILE = "version: 1\nmodel: {provider: scripted, script: s.yaml}\nlimits: {turns: 5}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a task, a scripted profile and an empty workspace."""
    (tmp_path / "t.task.yaml").write_text("version: 1\nprompt: x\nprofile: ./p.profile.yaml\nlimits: {steps: 9}\n")
    (tmp_path / "p.profile.yaml").write_text(PROFILE)
    (tmp_path / "s.yaml").write_text("version: 1\nresponses: [{text: done}]\n")
    (tmp_path / "ws").mkdir()
    return tmp_path


def load(folder: Path, **options: Any) -> RunSpec:
    """Load the task of ``folder``."""
    arguments: dict[str, Any] = {
        "task": folder / "t.task.yaml",
        "prompt": None,
        "profile": None,
        "workspace": "ws",
        "environ": {},
        "cwd": folder,
    }
    return load_run(**{**arguments, **options})


def refused(folder: Path, **options: Any) -> ConfigError:
    """The error that a run is refused with."""
    with pytest.raises(ConfigError) as caught:
        load(folder, **options)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    assert caught.value.code.exit_code == 2
    return caught.value


def canonical(value: object) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def test_every_effective_value_has_an_origin(folder: Path) -> None:
    """File and line, an option, or the default."""
    run = load(folder, sets=["limits.tokens=2M", "compaction.keep=0.1"])

    assert run.values.keys() == run.origins.keys()
    assert (run.values["profile.limits.steps"], run.origins["profile.limits.steps"]) == (9, "t.task.yaml:4")
    assert (run.values["profile.limits.turns"], run.origins["profile.limits.turns"]) == (5, "p.profile.yaml:3")
    assert (run.values["profile.limits.tokens"], run.origins["profile.limits.tokens"]) == (2_000_000, "--set")
    assert (run.values["profile.limits.wall"], run.origins["profile.limits.wall"]) == (1800.0, "default")
    assert (run.values["task.workspace.path"], run.origins["task.workspace.path"]) == (
        str(folder / "ws"),
        "--workspace",
    )
    assert (run.values["task.workspace.isolation"], run.origins["task.workspace.isolation"]) == ("in-place", "default")
    assert run.values["profile.compaction.keep"] == run.profile.compaction.keep == 0.1
    json.dumps(dict(run.values))


def test_digests_are_of_the_resolved_configuration(folder: Path) -> None:
    """Anybody can compute them again from the logged configuration."""
    run = load(folder)

    for name, found in (("task", run.task_digest), ("profile", run.profile_digest), ("policy", run.policy_digest)):
        assert found == hashlib.sha256(canonical(run.config[name])).hexdigest()


def test_digests_say_what_the_run_does_not_where_its_files_lie(folder: Path, tmp_path: Path) -> None:
    """The same files elsewhere give the same digests; another script or limit gives another one."""
    first = load(folder)
    moved = tmp_path / "moved"
    moved.mkdir()
    for name in ("t.task.yaml", "p.profile.yaml", "s.yaml"):
        (moved / name).write_bytes((folder / name).read_bytes())
    (moved / "ws").mkdir()

    second = load(moved)
    assert (second.task_digest, second.profile_digest) == (first.task_digest, first.profile_digest)

    (moved / "s.yaml").write_text("version: 1\nresponses: [{text: other}]\n")
    assert load(moved).profile_digest != first.profile_digest
    assert load(folder, sets=["limits.turns=4"]).profile_digest != first.profile_digest


def test_all_run_defining_files_are_listed(folder: Path) -> None:
    """The task, the profile with what it extends, and the script."""
    (folder / "base.profile.yaml").write_text(PROFILE)
    (folder / "p.profile.yaml").write_text("version: 1\nextends: ./base.profile.yaml\n")

    run = load(folder)

    assert run.defining_files == tuple(
        str(folder / name) for name in ("t.task.yaml", "p.profile.yaml", "base.profile.yaml", "s.yaml")
    )


def test_loading_creates_nothing(folder: Path) -> None:
    """Neither when it succeeds nor when it fails."""
    before = sorted(folder.rglob("*"))

    load(folder)
    refused(folder, sets=["nothing=1"])

    assert sorted(folder.rglob("*")) == before


def test_the_workspace_defaults_to_the_current_directory(folder: Path) -> None:
    """The task's own belongs to the task's folder; the option goes before both."""
    assert load(folder, workspace=None, cwd=folder / "ws").task.workspace.path == str(folder / "ws")

    (folder / "t.task.yaml").write_text("version: 1\nprompt: x\nprofile: ./p.profile.yaml\nworkspace: {path: ws}\n")
    run = load(folder, workspace=None, cwd=folder.parent)
    assert run.task.workspace.path == str(folder / "ws")
    assert run.origins["task.workspace.path"].endswith("t.task.yaml:4")
    assert load(folder, workspace=".").task.workspace.path == str(folder)


@pytest.mark.parametrize(
    ("workspace", "problem"),
    [
        ("absent", "no such directory"),
        ("t.task.yaml", "is no directory"),
        ("link", "is a link"),
        ("link/", "is a link"),
        ("dangling", "is a link"),
        ("/", "is the root of the file system"),
        ("//", "is the root of the file system"),
        ("home", "is the home directory"),
        ("home/.", "is the home directory"),
        ("ws/../home", "is the home directory"),
        ("a\0b", "holds a NUL byte"),
    ],
)
def test_a_workspace_that_cannot_be_one_is_refused(folder: Path, workspace: str, problem: str) -> None:
    """By option and in the task alike, before anything else happens."""
    (folder / "home").mkdir()
    (folder / "link").symlink_to("ws")
    (folder / "dangling").symlink_to("absent")
    environ = {"HOME": str(folder / "home")}

    assert problem in refused(folder, workspace=workspace, environ=environ).message

    if "\0" not in workspace:
        path = json.dumps(workspace)
        (folder / "t.task.yaml").write_text(f"version: 1\nprompt: x\nworkspace: {{path: {path}}}\n")
        error = refused(folder, workspace=None, environ=environ)
        assert error.problems[0].startswith("t.task.yaml:3:19: workspace.path: ")
        assert problem in error.problems[0]


def test_the_real_home_is_refused_without_home(folder: Path) -> None:
    """The user database says where it is."""
    import pwd

    home = pwd.getpwuid(os.getuid()).pw_dir

    assert "is the home directory" in refused(folder, workspace=home, environ={}).message


def test_a_workspace_below_a_link_is_resolved(folder: Path) -> None:
    """Only the directory itself may be no link."""
    (folder / "ws" / "inner").mkdir()
    (folder / "link").symlink_to("ws")

    assert load(folder, workspace="link/inner").task.workspace.path == str(folder / "ws" / "inner")


def test_a_workspace_with_a_runner_package_does_no_harm(folder: Path) -> None:
    """Nothing is imported from it, even when it is the current directory."""
    (folder / "ws" / "runner").mkdir()
    for name in ("runner/__init__.py", "runner/errors.py", "yaml.py", "json.py"):
        (folder / "ws" / name).write_text("raise SystemExit('imported from the workspace')\n")

    assert load(folder, workspace=None, cwd=folder / "ws").task.workspace.path == str(folder / "ws")
    done = subprocess.run(
        [os.path.join(os.path.dirname(sys.executable), "nightshift"), "plan", folder / "t.task.yaml"],  # noqa: PTH118, PTH120  # argv
        cwd=folder / "ws",
        env={"PATH": os.environ["PATH"], "HOME": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_a_run_needs_no_pydantic(folder: Path) -> None:
    """Importing it costs more than the rest of loading; only a wrong file needs it, for its messages."""
    program = (
        "import sys, pathlib\n"
        "from runner.config.resolve import load_run\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "load_run(task=folder / 't.task.yaml', prompt=None, profile=None, workspace='ws', environ={}, cwd=folder)\n"
        "print('pydantic' in sys.modules)\n"
    )

    done = subprocess.run(
        [sys.executable, "-P", "-c", program, folder], capture_output=True, text=True, check=True, cwd=folder
    )

    assert done.stdout == "False\n"


@pytest.mark.parametrize("name", ["absent", "empty"])
def test_artifacts_may_go_to_an_absent_or_empty_directory(folder: Path, name: str) -> None:
    """Outside the workspace."""
    (folder / "empty").mkdir()

    check_artifacts_dir(folder / name, str(folder / "ws"), ())


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("ws/out", "lies in the workspace"),
        ("ws", "lies in the workspace"),
        ("alias/out", "lies in the workspace"),
        ("cache/out", "lies in the writable directory"),
        ("full", "is not empty"),
        ("t.task.yaml", "is no directory"),
        ("t.task.yaml/out", "is no directory"),
        ("link", "is a link"),
    ],
)
def test_artifacts_may_not_lie_where_the_agent_writes(folder: Path, path: str, problem: str) -> None:
    """Nor among other files, nor behind a link."""
    (folder / "alias").symlink_to("ws")
    (folder / "link").symlink_to("absent")
    for name in ("cache", "full/inner"):
        (folder / name).mkdir(parents=True)

    with pytest.raises(ConfigError, match=problem):
        check_artifacts_dir(folder / path, str(folder / "ws"), (str(folder / "cache"),))
