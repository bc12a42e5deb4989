"""What a run must keep out of its agent's hands: the files that define it, other sessions, its own workspace's end."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.messages import text_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

BACKENDS = ("bubblewrap", "landlock")
DONE: dict[str, Any] = {"text": "Done."}
ATTACK = """
for f in ci/job.*.yaml prompt.md; do echo evil >> $f; echo evil > $f; rm -f $f; mv $f $f.gone; done
mv ci moved; rm -rf ci; mkdir -p ci; echo evil > ci/job.task.yaml; echo more >> ci/other.yaml; true
"""


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    """A response with one call."""
    return {"calls": [{"tool": tool, "args": arguments}]}


def answers(finished: Finished) -> list[tuple[str | None, str]]:
    """Code and text of each tool result, in order."""
    results = finished.data_of("tool/result")
    return [
        ((each.get("error") or {}).get("code"), text_of(each["message"]["content"][0]["content"])) for each in results
    ]


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty folder in the user's home: below ``/tmp`` a private folder would hide everything."""
    folder = Path(os.path.realpath(tempfile.mkdtemp(prefix=".nightshift-test-", dir=Path.home())))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def workspace(scripted_task: ScriptedTask, make_repo: MakeRepo) -> Path:
    """A repository that holds the task and what belongs to it, in a folder and at the top."""
    responses = [
        call("shell", command=ATTACK),
        call("write_file", path="ci/job.policy.yaml", content="evil"),
        call("edit_file", path="prompt.md", edits=[{"old": "work", "new": "evil"}]),
        call("write_file", path="src/a.txt", content="two\n"),
        DONE,
    ]
    task = scripted_task(responses, name="job", prompt="unused")
    files = {f"ci/{path.name}": path.read_bytes() for path in task.parent.iterdir()}
    described = json.loads(files["ci/job.task.yaml"])
    del described["prompt"]
    files["ci/job.task.yaml"] = json.dumps(described | {"prompt_file": "../prompt.md"}).encode()
    return make_repo({**files, "ci/other.yaml": "one\n", "prompt.md": "Do the work.\n", "src/a.txt": "one\n"})


@pytest.mark.parametrize("isolation", ["in-place", "copy", "worktree"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_agent_does_not_change_the_files_that_define_its_run(
    backend: str, isolation: str, run_nightshift: Nightshift, workspace: Path
) -> None:
    """Task, profile, policy, script, and prompt stay; their neighbours do not; the patch holds just those."""
    task = workspace / "ci" / "job.task.yaml"
    task.write_text(json.dumps(json.loads(task.read_text()) | {"workspace": {"path": "..", "isolation": isolation}}))
    profile = workspace / "ci" / "job.profile.yaml"
    profile.write_text(json.dumps(json.loads(profile.read_text()) | {"sandbox": {"backend": backend}}))
    names = [f"ci/job.{kind}.yaml" for kind in ("task", "profile", "policy", "script")] + ["prompt.md"]
    before = {name: (workspace / name).read_bytes() for name in names}
    finished = run_nightshift("run", "ci/job.task.yaml", cwd=workspace)
    patch = (finished.artifacts / "changes.patch").read_text()
    shell, written, edited, free = answers(finished)

    assert {name: (workspace / name).read_bytes() for name in names} == before
    assert finished.result["code"] == "COMPLETED", finished.stderr
    assert [line for line in patch.splitlines() if line.startswith("diff ")] == [
        "diff --git a/ci/other.yaml b/ci/other.yaml",
        "diff --git a/src/a.txt b/src/a.txt",
    ]
    assert shell[0] is None
    for code, text in (written, edited):
        assert code == "SANDBOX_DENIED"
        assert "this file defines the run" in text
    assert free == (None, "replaced src/a.txt (4 bytes)")


@pytest.mark.parametrize("backend", BACKENDS)
def test_other_sessions_are_out_of_sight(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, place: Path
) -> None:
    """The default root is hidden whether this run uses it or not; what lies beside it can be read."""
    workspace, other = place / "workspace", place / "state" / "nightshift" / "session-other"
    workspace.mkdir()
    other.mkdir(parents=True)
    (other / "result.json").write_text("an old secret\n")
    (place / "state" / "visible").write_text("not hidden\n")
    command = f"cat {place}/state/visible {other}/result.json; ls {place}/state/nightshift; true"
    task = scripted_task([call("shell", command=command), DONE], profile={"sandbox": {"backend": backend}})
    finished = run_nightshift("run", task, "--workspace", workspace, env={"XDG_STATE_HOME": str(place / "state")})
    by_default = run_nightshift.start(
        "run", task, "--workspace", workspace, "--artifacts", other.parent / "session-own",
        env={"XDG_STATE_HOME": str(place / "state")},
    ).finish()  # fmt: skip

    for each in (finished, by_default):
        assert each.exit_code == 0, each.stderr
        text = answers(each)[0][1]
        assert text.startswith("not hidden\n")
        assert "an old secret" not in text
        if backend == "bubblewrap":
            assert "session-" not in text.replace(f"{other}/result.json", "")


def test_a_bare_run_whose_agent_deletes_the_workspace_is_told_so(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, tmp_path: Path
) -> None:
    """Files and commands fail as tools, the run goes on to its end, and its outcome names the workspace."""
    workspace = tmp_path / "bare"
    workspace.mkdir()
    (workspace / "a").write_text("one\n")
    task = scripted_task(
        [
            call("shell", command="echo here"),
            call("shell", command='rm -rf "$PWD"'),
            call("write_file", path="a", content="x"),
            call("read_file", path="/etc/hostname"),
            call("shell", command="echo never"),
            call("shell", command="echo never", background=True),
            DONE,
        ],
        profile={"permission_mode": "danger-full-access", "accept_unconfined": True},
        task={"checks": [{"name": "there", "run": "true"}]},
    )
    finished = run_nightshift("run", task, "--workspace", workspace)
    first, _, *lost = answers(finished)

    assert first == (None, "here\n")
    assert [code for code, _ in lost] == ["TOOL_FAILED"] * 4
    assert all(f"the workspace {workspace} is gone" in text for _, text in lost)
    assert finished.result["code"] == "TASK_FAILED"
    assert finished.exit_code == 1
    assert "doctor" not in finished.stderr
    assert not workspace.exists()


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_the_git_link_of_a_submodule_cannot_be_changed(
    backend: str, run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, git: Callable[..., str]
) -> None:
    """An agent that could point it elsewhere would choose the configuration git runs with next time."""
    other = make_repo(name="other")
    workspace = make_repo()
    git(workspace, "-c", "protocol.file.allow=always", "submodule", "--quiet", "add", str(other), "sub")
    git(workspace, "commit", "--quiet", "--message", "A submodule")
    before = (workspace / "sub/.git").read_text()
    command = "echo 'gitdir: evil' > sub/.git; rm -f sub/.git; mv sub moved; echo ok > sub/README.md; cat sub/README.md"
    task = scripted_task(
        [{"calls": [{"tool": "shell", "args": {"command": command}}]}, {"text": "Done."}],
        profile={"sandbox": {"backend": backend}},
    )

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert (workspace / "sub/.git").read_text() == before
    assert (workspace / "sub/README.md").read_text() == "ok\n"
    # A patch cannot carry what is in a submodule, and that is said.
    assert (finished.exit_code, finished.result["code"]) == (1, "TASK_FAILED")
    assert "submodule" in finished.result["error"]["message"]
