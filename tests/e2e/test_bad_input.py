"""A user's mistake gives one clear message, the right code, no traceback and no half-written state."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "Done."}


def assert_refused(finished: Finished, *says: str) -> None:
    """Exit code 2, one message with a code and a way out, nothing created."""
    assert finished.exit_code == 2, (finished.exit_code, finished.stderr)
    assert finished.stderr.startswith("error CONFIG_INVALID: "), finished.stderr
    assert "Traceback" not in finished.stderr
    assert finished.stdout == ""
    for text in says:
        assert text in finished.stderr, finished.stderr
    assert not finished.artifacts.exists()


TASK = "version: 1\nname: t\nprompt: do it\n"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        pytest.param("version: 1\nprompt: [a, {b\n", ["task.yaml:3:1", "not valid YAML"], id="broken YAML"),
        pytest.param(TASK + "promt: x\n", ["task.yaml:4:1", "promt", "did you mean"], id="unknown key"),
        pytest.param(TASK + "prompt: again\n", ["task.yaml:4:1", "prompt"], id="duplicate key"),
        pytest.param("version: 1\nname: t\nprompt: 3\n", ["task.yaml:3", "prompt"], id="wrong type"),
        pytest.param("version: 2\nname: t\nprompt: x\n", ["task.yaml:1", "version"], id="wrong version"),
        pytest.param(b"", ["empty"], id="empty file"),
        pytest.param(b"- a\n- b\n", ["task.yaml"], id="a list"),
        pytest.param(b"\xff\xfe\x00", ["UTF-8"], id="not UTF-8"),
        pytest.param(b"prompt: x\x00y\n", ["task.yaml"], id="NUL"),
        pytest.param(b"x" * (5 << 20), ["1 MiB"], id="5 MiB"),
        pytest.param(
            "a: &a [x,x,x,x,x,x,x,x,x]\n"
            + "".join(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]\n" for a, b in pairwise("abcdefghij")),
            ["alias"],
            id="alias bomb",
        ),
        pytest.param(TASK + "checks: [{name: a, run: x, from: clean}]\n", ["from"], id="a key of a later version"),
        pytest.param(TASK.replace("do it", "${inputs.a}"), ["inputs.a"], id="unknown input"),
        pytest.param(TASK + "inputs: {a: {value: x}}\n", ["inputs.a"], id="unused input"),
        pytest.param(TASK + "workspace: {isolation: snapshot}\n", ["isolation"], id="isolation of a later version"),
        pytest.param(TASK + "profile: refacter\n", ["refacter", "refactor"], id="unknown profile"),
    ],
)
def test_a_bad_task_is_refused_with_its_place(
    content: str | bytes, says: list[str], run_nightshift: Nightshift, tmp_path: Path
) -> None:
    """Every mistake in a task file."""
    task = tmp_path / "task.yaml"
    task.write_bytes(content if isinstance(content, bytes) else content.encode())

    assert_refused(run_nightshift("run", task), *says)


@pytest.mark.parametrize(
    ("place", "says"), [("absent.yaml", "absent.yaml"), (".", "directory")], ids=["missing file", "directory"]
)
def test_a_task_that_is_no_file_is_refused(place: str, says: str, run_nightshift: Nightshift, tmp_path: Path) -> None:
    """A missing file and a directory."""
    assert_refused(run_nightshift("run", tmp_path / place), says)


def test_all_mistakes_of_a_file_come_at_once(run_nightshift: Nightshift, tmp_path: Path) -> None:
    """Three mistakes, three lines, each with line and column."""
    task = tmp_path / "task.yaml"
    task.write_text("version: 1\nname: t\nprompt: x\nfoo: 1\nbar: 2\nchecks: 3\n")

    assert_refused(run_nightshift("run", task), "task.yaml:4:1", "task.yaml:5:1", "task.yaml:6:")


MODEL = {"provider": "openai", "model": "unheard-of", "base_url": "http://127.0.0.1:9/v1"}


@pytest.mark.parametrize(
    ("profile", "says"),
    [
        pytest.param({"model": MODEL}, "context_window", id="unknown model without window"),
        pytest.param(
            {"model": {**MODEL, "context_window": 1000}, "limits": {"cost": 1}}, "prices", id="cost cap without prices"
        ),
        pytest.param(
            {"model": {**MODEL, "context_window": 100_000, "api_key_env": "NO_SUCH_KEY"}},
            "NO_SUCH_KEY",
            id="missing key variable",
        ),
        pytest.param({"permission_mode": "danger-full-access"}, "accept_unconfined", id="danger not accepted"),
        pytest.param({"tools": {"allow": ["shel"]}}, "shell", id="unknown tool"),
        pytest.param({"sandbox": {"env": {"allow": ["LD_PRELOAD"]}}}, "LD_PRELOAD", id="refused variable"),
        pytest.param({"sandbox": {"network": {"allow": ["a"]}}}, "no host and port", id="network without a port"),
        pytest.param({"limits": {"children": 2}}, "children", id="limit of a later version"),
        pytest.param({"extends": "./task.profile.yaml"}, "extends", id="a profile that extends itself"),
        pytest.param(
            {"model": {"provider": "scripted", "model": "x", "script": "absent.yaml"}}, "absent.yaml", id="no script"
        ),
    ],
)
def test_a_bad_profile_is_refused(
    profile: dict[str, Any], says: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Every mistake in a profile that costs money or safety."""
    assert_refused(run_nightshift("run", scripted_task([DONE], profile=profile), "--workspace", make_repo()), says)


def test_a_policy_whose_self_test_fails_is_refused(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The rule, the example, what was expected and what came out."""
    rule = {
        "id": "tests",
        "tool": "shell",
        "command": [["pytest", "**"]],
        "decision": "allow",
        "examples": {"match": ["pytest -q; curl x"]},
    }

    finished = run_nightshift("run", scripted_task([DONE], rules=[rule]), "--workspace", make_repo())

    assert_refused(finished, "tests", "pytest -q; curl x")


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("limits.steps=300", "limits.steps"),
        ("model.model=other", "model.model"),
        ("permission_mode=danger-full-access", "permission_mode"),
        ("nonsense=1", "nonsense"),
        ("limits.steps", "KEY=VALUE"),
    ],
)
def test_a_setting_that_may_not_be_changed_is_refused(
    option: str, says: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """--set outside what is overridable, or loosening a limit."""
    task = scripted_task([DONE], profile={"limits": {"steps": 20}})

    assert_refused(run_nightshift("run", task, "--workspace", make_repo(), "--set", option), says)


def _inside(workspace: Path) -> Path:
    return workspace / "artifacts"


def _filled(workspace: Path) -> Path:
    folder = workspace.parent / "filled"
    folder.mkdir()
    (folder / "old.txt").write_text("old")
    return folder


def _file(workspace: Path) -> Path:
    file = workspace.parent / "file"
    file.write_text("x")
    return file


@pytest.mark.parametrize("place", [_inside, _filled, _file], ids=["in the workspace", "not empty", "a file"])
def test_a_bad_artifacts_folder_is_refused(
    place: Callable[[Path], Path], run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """What is there stays as it was."""
    workspace = make_repo()
    artifacts = place(workspace)
    before = sorted(path.name for path in workspace.parent.iterdir())

    finished = run_nightshift("run", scripted_task([DONE]), "--workspace", workspace, "--artifacts", artifacts)

    assert finished.exit_code == 2, finished.stderr
    assert str(artifacts) in finished.stderr
    assert "Traceback" not in finished.stderr
    assert sorted(path.name for path in workspace.iterdir()) == [".git", "README.md"]
    assert set(before) <= {path.name for path in workspace.parent.iterdir()}


@pytest.mark.parametrize("workspace", ["/", "/no/such/place", "HOME", "FILE"])
def test_a_bad_workspace_is_refused(
    workspace: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, tmp_path: Path
) -> None:
    """One that is not there, a file, / and $HOME."""
    (tmp_path / "file").write_text("x")
    home = run_nightshift.environment()["HOME"]
    path = {"HOME": home, "FILE": str(tmp_path / "file")}.get(workspace, workspace)

    assert_refused(run_nightshift("run", scripted_task([DONE]), "--workspace", path), path)


def test_a_workspace_around_the_folder_for_temporary_files_is_refused(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """What a run needs for itself may not lie where the agent writes; the hint names the variable."""
    workspace = make_repo()
    (workspace / "tmp").mkdir()

    finished = run_nightshift(
        "run", scripted_task([DONE]), "--workspace", workspace, env={"TMPDIR": str(workspace / "tmp")}
    )

    assert_refused(finished, f"{workspace}/tmp lies inside the workspace", "hint: set TMPDIR")
    assert list((workspace / "tmp").iterdir()) == []


@pytest.mark.parametrize("command", [["run"], ["plan"], ["doctor"]])
def test_a_backend_that_cannot_be_switched_off_is_refused(
    command: list[str], run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """A misspelt name would leave the backend on."""
    more: list[str | Path] = [] if command == ["doctor"] else [scripted_task([DONE]), "--workspace", make_repo()]

    finished = run_nightshift(*command, *more, env={"NIGHTSHIFT_DISABLE_BACKENDS": "bubblewrap,landlok"})

    assert_refused(finished, "NIGHTSHIFT_DISABLE_BACKENDS: there is no sandbox backend 'landlok'", "landlock")


@pytest.mark.parametrize("name", ["refactor", "refactor.policy.yaml"])
def test_a_shipped_policy_that_is_named_as_if_it_lay_here_gets_a_hint(
    name: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """How a profile gets it, and where it is."""
    task = scripted_task([DONE], profile={"approvals": name})
    hint = "hint: the policy of the shipped profile comes with `extends: refactor`; as a file it is /"

    assert_refused(run_nightshift("run", task, "--workspace", make_repo()), f"{name}: no such file", hint)
    assert_refused(run_nightshift("policy", "check", name), f"{name}: no such file", hint)


@pytest.mark.parametrize("command", [[], ["session"], ["policy"]])
def test_a_command_line_that_ends_early_gets_the_help(command: list[str], run_nightshift: Nightshift) -> None:
    """As an answer, not as an error message; the exit code is still that of a command that did nothing."""
    finished = run_nightshift(*command)

    assert finished.exit_code in (0, 2)  # older versions of click take it for a success
    assert "Usage: nightshift" in finished.stdout + finished.stderr
    assert "CONFIG_INVALID" not in finished.stderr


def test_a_repository_with_credentials_in_its_configuration_is_refused(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, git: Callable[..., str]
) -> None:
    """The hint says how a checkout comes without them; the value is not shown."""
    workspace = make_repo()
    git(workspace, "config", "http.https://example.invalid/.extraheader", "AUTHORIZATION: basic c2VjcmV0LXRva2Vu")

    finished = run_nightshift("run", scripted_task([DONE]), "--workspace", workspace)

    assert_refused(finished, "extraheader", "persist-credentials")
    assert "c2VjcmV0LXRva2Vu" not in finished.stderr


def test_changes_that_are_not_committed_can_be_refused(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """workspace.dirty: refuse."""
    workspace = make_repo()
    (workspace / "README.md").write_text("changed\n")

    finished = run_nightshift(
        "run", scripted_task([DONE], task={"workspace": {"dirty": "refuse"}}), "--workspace", workspace
    )

    assert_refused(finished, "README.md")


def test_an_untrusted_trigger_reads_no_task_from_the_workspace(
    run_nightshift: Nightshift, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """With a fork's event the head's version of the task is never read."""
    workspace = make_repo({"task.yaml": TASK})
    event = tmp_path / "event.json"
    event.write_text(json.dumps({"pull_request": {"head": {"repo": {"fork": True}}, "base": {"sha": "0" * 40}}}))

    finished = run_nightshift("run", workspace / "task.yaml", "--workspace", workspace, "--event", event)

    assert_refused(finished)
