"""The built-in tools through the command: what a run does with patches, findings and background processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runner.config.shape import shipped_directory

if TYPE_CHECKING:
    from conftest import MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "Done."}


def call(tool: str, **arguments: Any) -> dict[str, Any]:
    """A response with one call."""
    return {"calls": [{"tool": tool, "args": arguments}]}


def shipped(name: str, **more: Any) -> dict[str, Any]:
    """A shipped profile with its policy, for a scripted model."""
    return {"extends": name, "approvals": str(shipped_directory() / "policies" / f"{name}.policy.yaml"), **more}


PATCH = """\
--- a/src/a.py
+++ b/src/a.py
@@ -1 +1 @@
-one
+two
"""
WORKFLOW = """\
--- a/.github/workflows/ci.yml
+++ b/.github/workflows/ci.yml
@@ -1 +1 @@
-safe
+unsafe
"""
RENAME = """\
diff --git a/.github/workflows/ci.yml b/src/ci.yml
similarity index 100%
rename from .github/workflows/ci.yml
rename to src/ci.yml
"""


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_the_policy_decides_on_every_path_of_a_patch(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, backend: str
) -> None:
    """One file that may not change, or move away, denies the whole patch; the others alone are applied."""
    workspace = make_repo({"src/a.py": "one\n", ".github/workflows/ci.yml": "safe\n"})
    script = [
        call("apply_patch", patch=PATCH + WORKFLOW),
        call("apply_patch", patch=PATCH + RENAME),
        call("apply_patch", patch=PATCH),
        DONE,
    ]
    profile = shipped("refactor", sandbox={"backend": backend})

    finished = run_nightshift("run", scripted_task(script, profile=profile), "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    codes = [(event.get("error") or {}).get("code") for event in finished.data_of("tool/result")]
    assert codes == ["POLICY_DENIED", "POLICY_DENIED", None]
    decided = [(event["outcome"], event["rule"]) for event in finished.data_of("approval/decided")]
    assert decided == [("rejected", "protected"), ("rejected", "protected"), ("allowed-once", "edit")]
    asked = [event["paths"]["write"] for event in finished.data_of("approval/asked")]
    assert [path.removeprefix(f"{workspace}/") for path in asked[1]] == [
        "src/a.py", ".github/workflows/ci.yml", "src/ci.yml",
    ]  # fmt: skip
    assert (workspace / "src/a.py").read_text() == "two\n"
    assert (workspace / ".github/workflows/ci.yml").read_text() == "safe\n"


def test_findings_of_a_review_stand_in_its_summary(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """The review profile allows them; one that was refused is none."""
    workspace = make_repo({"src/a.py": "one\n"})
    place = {"path": "src/a.py", "line": 1}
    script = [
        call("report_finding", **place, severity="warning", rule="naming", message="`x` <b>is</b> no name"),
        call("report_finding", path="src/gone.py", severity="error", message="not there"),
        DONE,
    ]  # fmt: skip

    finished = run_nightshift("run", scripted_task(script, profile=shipped("review")), "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    summary = (finished.artifacts / "summary.md").read_text()
    assert "| warning | `src/a.py:1` | `naming` | `` `x` <b>is</b> no name `` |" in summary
    assert summary.count("| warning |") + summary.count("| error |") == 1


@pytest.mark.parametrize("backend", ["bubblewrap", "landlock"])
def test_a_turn_ends_when_its_background_processes_have_ended(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, backend: str
) -> None:
    """They are killed first, and the model is told in the next turn; nothing is left behind."""
    workspace = make_repo({"src/a.py": "one\n"})
    beat = "trap '' TERM HUP; while true; do date +%s%N > src/beat; sleep 0.02; done"
    wait = "until [ -s src/beat ]; do sleep 0.02; done"
    script = [call("shell", command=beat, background=True), call("shell", command=wait), DONE, DONE]
    task = scripted_task(script, profile={"sandbox": {"backend": backend}}, task={"turns": ["Go on."]})

    finished = run_nightshift("run", task, "--workspace", workspace)

    assert finished.exit_code == 0, finished.stderr
    first = finished.events_of("turn/end")[0]
    last_beat = (workspace / "src/beat").stat().st_mtime * 1_000
    assert last_beat <= first["time"] + 1
    texts = [message["content"][0]["text"] for message in finished.data_of("user/message")]
    assert [text for text in texts if text.startswith("Background processes ended with the turn: call_1_0")]
