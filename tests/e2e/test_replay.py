"""A recorded session runs again: with the recorded answers, real tools, and the first difference reported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, chat_reply, json_reply

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

FILES = {"calc.py": "def add(a, b):\n    return a - b\n", "README.md": "# Calc\n", "d/a.txt": ""}
DONE: dict[str, Any] = {"text": "Done."}
SHOW: dict[str, Any] = {"tool": "shell", "args": {"command": "pwd; echo $TMPDIR $HOME; cat calc.py"}}
NANOSECONDS: dict[str, Any] = {"tool": "shell", "args": {"command": "echo it took $(date +%N) ns"}}
RULES: list[dict[str, Any]] = [
    {"id": "no-push", "tool": "shell", "command": [["git", "push", "**"]], "decision": "deny", "accept_bypass": True},
    {"id": "all", "tool": "*", "command": "any", "decision": "allow"},
]
EDIT: dict[str, Any] = {
    "tool": "edit_file",
    "args": {"path": "calc.py", "edits": [{"old": "a - b", "new": "a + b"}]},
}


def shell(command: str) -> dict[str, Any]:
    """A response that runs one command."""
    return {"calls": [{"tool": "shell", "args": {"command": command}}]}


class Recorder:
    """Records runs of scripts and replays them."""

    def __init__(self, run: Nightshift, write: ScriptedTask, make_repo: MakeRepo) -> None:
        self.run = run
        self.write = write
        self.workspace = make_repo(FILES)

    def record(self, *responses: dict[str, Any], expected: int = 0, **options: Any) -> Finished:
        """A recorded run; the profile of the replay is its own."""
        task = self.write(responses, **{"rules": RULES, **options})
        self.profile = task.with_name("task.profile.yaml")
        recorded = self.run("run", task, "--workspace", self.workspace)
        assert recorded.exit_code == expected, recorded.stderr
        return recorded

    def replay(self, session: Path, *options: str | Path, expected: int = 0, profile: Path | str = "") -> Finished:
        """``session replay``."""
        target = self.run.directory / f"replay-{len(self.run.started)}"
        more = ("--workspace", self.workspace, "--artifacts", target, *options)
        replayed = self.run("session", "replay", session, "--profile", profile or self.profile, *more)
        assert replayed.exit_code == expected, replayed.stdout + replayed.stderr
        return replayed

    def report(self, session: Path, *options: str | Path, expected: int = 0, **more: Any) -> dict[str, Any]:
        """What ``session replay --json`` prints."""
        report: dict[str, Any] = json.loads(self.replay(session, "--json", *options, expected=expected, **more).stdout)
        return report

    def task_on(self, session: Path, **model: Any) -> Path:
        """A task whose model is the recording."""
        settings = {"provider": "replay", "replay": str(session), **model}
        profile = {"model": settings}
        task = {"workspace": {"path": str(self.workspace), "isolation": "copy"}}
        path: Path = self.write([], profile=profile, rules=RULES, task=task, name="again")
        return path


@pytest.fixture
def recorder(run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo) -> Recorder:
    """Records and replays on one repository."""
    return Recorder(run_nightshift, scripted_task, make_repo)


# --- identical -----------------------------------------------------------------------------------


def test_a_replay_in_a_fresh_copy_of_the_base_is_identical(recorder: Recorder, git: Callable[..., str]) -> None:
    """Paths differ and do not count; denied, failed, parallel and unknown calls are the same; the workspace stays."""
    recorded = recorder.record(
        {"text": "I look.", "calls": [{"tool": "read_file", "args": {"path": name}} for name in FILES]},
        {"calls": [SHOW, EDIT, {"tool": "shell", "args": {"command": "git push origin"}}]},
        {"calls": [{"tool": "nothing", "args": {}}, {"tool": "shell", "args": {"command": "cat calc.py; exit 3"}}]},
        DONE,
    )
    before = git(recorder.workspace, "diff")
    assert "a + b" in before  # the run worked in place, and the replay must not begin there

    replayed = recorder.replay(recorded.artifacts)

    assert (
        "identical: 4 steps, 8 results, 0 of 4 requests byte for byte (4 apart from paths and ids)" in replayed.stdout
    )
    assert git(recorder.workspace, "diff") == before
    assert replayed.result["code"] == "COMPLETED"
    assert replayed.result["costUsd"] == 0
    assert replayed.result["base"] == recorded.result["base"]
    assert (replayed.artifacts / "changes.patch").read_bytes() == (recorded.artifacts / "changes.patch").read_bytes()
    assert recorder.run("session", "verify", replayed.artifacts).exit_code == 0
    [start] = replayed.data_of("run/start")
    assert start["sandbox"]["network"] == "off"
    assert {data["provider"] for data in replayed.data_of("request/sent")} == {"replay"}
    calls = [[data["callId"] for data in finished.data_of("tool/call")] for finished in (recorded, replayed)]
    assert calls[0] == calls[1]


def test_without_a_directory_the_artifacts_of_a_replay_stay_where_sessions_lie(recorder: Recorder) -> None:
    """The place is said, in the text and in the JSON, and what lies there is whole."""
    recorded = recorder.record({"calls": [SHOW]}, DONE)
    arguments = ("session", "replay", recorded.artifacts, "--profile", recorder.profile)

    text = recorder.run(*arguments, "--workspace", recorder.workspace)
    report = json.loads(recorder.run(*arguments, "--workspace", recorder.workspace, "--json").stdout)

    assert (text.exit_code, report["identical"]) == (0, True)
    said = text.stderr.splitlines()[-1]
    assert said.startswith("artifacts: ")
    places = [Path(said.removeprefix("artifacts: ")), Path(report["artifacts"])]
    assert places[0] != places[1]
    for place in places:
        assert place.parent.name == "nightshift"
        assert json.loads((place / "result.json").read_text())["code"] == "COMPLETED"
        assert recorder.run("session", "verify", place.name).exit_code == 0


def test_paths_that_the_model_named_are_those_of_the_copy(recorder: Recorder) -> None:
    """Absolute paths in answers lead into the copy, and nowhere else."""
    place = recorder.workspace
    write = {"path": f"{place}/d/made.txt", "content": "made\n"}
    recorded = recorder.record(
        {
            "text": f"I look at {place}/calc.py.",
            **shell(f"cat {place}/calc.py\n{place}/calc.py || echo > {place}/d/b.txt"),
        },
        {"calls": [{"tool": "write_file", "args": write}, {"tool": "read_file", "args": {"path": write["path"]}}]},
        DONE,
    )
    made = [recorder.workspace / "d" / name for name in ("made.txt", "b.txt")]
    for path in made:
        path.unlink()

    replayed = recorder.replay(recorded.artifacts)

    assert "identical: 3 steps, 3 results, 0 of 3 requests byte for byte (3 apart" in replayed.stdout
    assert replayed.result["patch"]["files"] == 2
    assert not any(path.exists() for path in made)


def test_each_form_of_a_session_can_be_replayed(recorder: Recorder, tmp_path: Path) -> None:
    """The directory, the log, the plain log, the ZIP, and its id."""
    recorded = recorder.record({"calls": [SHOW]}, DONE)
    plain = tmp_path / "plain.jsonl"
    plain.write_text("".join(json.dumps(line) + "\n" for line in recorded.lines), encoding="utf-8")
    forms = [recorded.artifacts / "session.jsonl.zst", recorded.artifacts / "session.zip", plain]

    reports = [recorder.report(form) for form in forms]

    assert [report["identical"] for report in reports] == [True, True, True]
    assert {report["recording"]["session"] for report in reports} == {recorded.result["sessionId"]}


def test_a_replay_has_the_recorded_turns_and_the_failed_checks_between_them(recorder: Recorder) -> None:
    """What began each turn is played as a prompt; the checks themselves are not run."""
    checks = [{"name": "tests", "run": "grep -q 'a + b' calc.py", "retries": 2}]
    recorded = recorder.record(
        DONE, shell("echo second"), DONE, {"calls": [EDIT]}, DONE, task={"turns": ["Go on."], "checks": checks}
    )
    assert recorded.result["turns"] == 3

    replayed = recorder.replay(recorded.artifacts)

    assert "identical: 5 steps, 2 results" in replayed.stdout
    assert replayed.result["turns"] == 3
    assert replayed.events_of("check/start") == []


def small_window() -> dict[str, Any]:
    """A profile of a model whose window a few files fill."""
    settings = {"provider": "scripted", "model": "small", "script": "task.script.yaml", "context_window": 10_000}
    return {
        "model": {**settings, "max_output_tokens": 500},
        "compaction": {"min_output": 200, "summary_at": 0.55},
    }


def read(number: int) -> dict[str, Any]:
    """A response that reads one of the files of ``files``."""
    return {"calls": [{"tool": "read_file", "args": {"path": f"f{number}.txt"}}]}


@pytest.fixture
def files(recorder: Recorder, make_repo: MakeRepo) -> None:
    """The workspace holds files of 3,840 characters."""
    recorder.workspace = make_repo({f"f{n}.txt": (f"{n}" * 79 + "\n") * 48 for n in range(5)}, name="files")


@pytest.mark.usefixtures("files")
def test_compaction_is_replayed_with_its_recorded_summary(recorder: Recorder) -> None:
    """The turn asks for it as it did, and the summary request gets the recorded text."""
    summary = {"text": "I was asked to look and I looked.", "usage": {"input": 70, "output": 7}}
    task = {"turns": ["And now?"], "compact_at": [2]}
    responses = [read(0), read(1), DONE, summary, read(2), DONE]
    recorded = recorder.record(*responses, task=task, profile=small_window())
    assert len(recorded.events_of("compaction/summary")) == 1

    replayed = recorder.replay(recorded.artifacts)

    assert "identical: 5 steps, 3 results, 0 of 6 requests" in replayed.stdout
    [found] = replayed.data_of("compaction/summary")
    [wanted] = recorded.data_of("compaction/summary")
    assert found["summary"] == wanted["summary"]
    assert found["usage"] == wanted["usage"]


@pytest.mark.usefixtures("files")
def test_a_window_that_filled_up_fills_up_again(recorder: Recorder) -> None:
    """Window and output are those of the recording; tries that gave no summary are of no use again."""
    responses = [*map(read, range(5)), {"text": ""}, {"text": "I read files."}, DONE]
    recorded = recorder.record(*responses, profile=small_window())
    purposes = [data["purpose"] for data in recorded.data_of("request/sent")]
    assert purposes.count("summary") == 2
    assert len(recorded.events_of("compaction/summary")) == 1

    replayed = recorder.replay(recorded.artifacts)

    assert "identical: 6 steps, 5 results, 0 of 8 requests" in replayed.stdout
    assert [data["purpose"] for data in replayed.data_of("request/sent")] == purposes
    [context] = replayed.data_of("request/context")
    assert context == {"provider": "replay", "model": "small", "contextWindow": 10_000}


def test_failed_attempts_and_refused_lengths_of_a_real_endpoint(recorder: Recorder) -> None:
    """Retries are not repeated; a request that was too long is, since the history was changed for it."""
    overflow = json_reply(400, {"error": {"message": "too long", "code": "context_length_exceeded"}})
    again = json_reply(500, {"error": {"message": "try again"}})
    call = [("call_x", "shell", '{"command": "cat calc.py; seq 3000"}')]
    last = [("call_z", "shell", '{"command": "true"}')]
    replies = [
        again,
        chat_reply("One.", calls=call),
        chat_reply("Two.", calls=last),
        chat_reply("Three.", calls=last),
        overflow,
        chat_reply("Done."),
    ]
    with ModelServer(replies) as server:
        model = {"provider": "openai", "model": "m", "base_url": server.url, "context_window": 64_000}
        recorded = recorder.record(profile={"model": model, "retry": {"attempts": 3, "seconds": 20}})
    sent = recorded.data_of("request/sent")
    assert len(sent) == 6
    assert sent[0]["dialect"] == "openai-chat"

    replayed = recorder.replay(recorded.artifacts)

    assert (
        "identical: 4 steps, 3 results, 0 of 5 requests byte for byte (5 apart from paths and ids)" in replayed.stdout
    )
    assert replayed.events_of("llm/retry") == []
    assert {data["dialect"] for data in replayed.data_of("request/sent")} == {"openai-chat"}
    bodies = recorder.run("session", "request", replayed.artifacts, "--step", "4").stdout
    assert "call_z" in bodies


def test_a_session_that_failed_replays_to_the_same_end(recorder: Recorder) -> None:
    """An answer that was too long ends the run, and its replay, as failed: the replay itself is identical."""
    recorded = recorder.record({"text": "And so", "finish": "length"}, expected=1)

    replayed = recorder.replay(recorded.artifacts)

    assert "identical: 1 step, 0 results" in replayed.stdout
    assert replayed.result["exitCode"] == 1


# --- divergence ----------------------------------------------------------------------------------


def test_the_first_divergence_is_named_and_ends_the_replay(recorder: Recorder) -> None:
    """Turn, step, call, both digests and both texts; nothing is called behind it; log and artifacts are whole."""
    recorded = recorder.record(shell("cat calc.py"), {"calls": [SHOW, NANOSECONDS, EDIT]}, shell("rm -f calc.py"), DONE)

    report = recorder.report(recorded.artifacts, expected=13)

    assert report["identical"] is False
    assert (report["steps"], report["results"]) == (2, 2)
    divergence = report["divergence"]
    place = {key: divergence[key] for key in ("turn", "step", "callId", "tool", "what")}
    assert place == {"turn": 1, "step": 2, "callId": "call_2_1", "tool": "shell", "what": "result"}
    assert re.fullmatch(r"[0-9a-f]{64}", divergence["expected"])
    assert divergence["expected"] != divergence["actual"]
    assert re.search(r"it took \d{9} ns", divergence["expectedText"])
    assert divergence["expectedText"] != divergence["actualText"]


def test_a_divergence_stands_in_the_log_and_the_artifacts_of_the_replay(recorder: Recorder) -> None:
    """Code 13, complete artifacts, a log that verifies; calls behind the divergence were denied."""
    recorded = recorder.record({"calls": [NANOSECONDS, EDIT]}, shell("rm -f calc.py"), DONE)

    replayed = recorder.replay(recorded.artifacts, expected=13)

    assert "first divergence: turn 1, step 1, call call_1_0 (shell): result" in replayed.stdout
    assert "error LOG_INVALID: the replay leaves the recording in turn 1, step 1, call call_1_0" in replayed.stderr
    assert replayed.result["code"] == "LOG_INVALID"
    assert [data.get("error", {}).get("code") for data in replayed.data_of("tool/result")] == [None, "GUARD_DENIED"]
    assert len(replayed.data_of("request/sent")) == 1
    assert (replayed.artifacts / "session.zip").is_file()
    assert recorder.run("session", "verify", replayed.artifacts).exit_code == 0


@pytest.mark.parametrize("pattern", [r"\d{9}(?= ns)", r"took .*? ns"])
def test_what_is_declared_volatile_may_differ(recorder: Recorder, pattern: str) -> None:
    """A pattern on the command line, or in the profile."""
    recorded = recorder.record({"calls": [NANOSECONDS]}, DONE)

    assert recorder.report(recorded.artifacts, "--normalise", "nothing", "--normalise", pattern)["identical"] is True
    task = recorder.task_on(recorded.artifacts, replay_normalise=[pattern])
    assert recorder.run("run", task).exit_code == 0


def test_another_decision_of_the_policy_is_a_divergence(recorder: Recorder) -> None:
    """The profile decides, whatever was allowed before: another error code is said as such."""
    recorded = recorder.record(shell("touch made.txt"), DONE)

    report = recorder.report(recorded.artifacts, profile="review", expected=13)

    divergence = report["divergence"]
    assert divergence["what"] == "error"
    assert (divergence["expectedError"], divergence["actualError"]) == (None, "POLICY_DENIED")


def test_compaction_at_another_place_is_a_divergence(recorder: Recorder) -> None:
    """A summary is asked for where the recording has none: the run ends before it is made up."""
    recorded = recorder.record(shell("seq 900"), shell("seq 900"), shell("seq 900"), DONE)
    profile = json.loads(recorder.profile.read_text(encoding="utf-8"))
    profile["model"] |= {"context_window": 4_200, "max_output_tokens": 300}
    profile["compaction"] = {"min_output": 100, "summary_at": 0.5, "keep": 0.1}
    recorder.profile.write_text(json.dumps(profile), encoding="utf-8")

    report = recorder.report(recorded.artifacts, expected=13)

    assert report["divergence"]["what"] in ("request", "result")


# --- the base ------------------------------------------------------------------------------------


def test_the_base_is_taken_from_the_recorded_commit(recorder: Recorder, git: Callable[..., str]) -> None:
    """The repository went on since: HEAD has other content, and work that is not committed is left out."""
    recorded = recorder.record(shell("cat calc.py; git log --oneline | wc -l; git status --short"), DONE)
    (recorder.workspace / "calc.py").write_text("other = 1\n", encoding="utf-8")
    assert recorder.report(recorded.artifacts)["identical"] is True
    git(recorder.workspace, "commit", "--quiet", "--all", "--message", "Later")

    assert recorder.report(recorded.artifacts)["identical"] is True


def test_a_workspace_without_the_recorded_base_is_refused(
    recorder: Recorder, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """Another repository, a directory without one, a directory that is not there."""
    recorded = recorder.record(shell("true"), DONE)
    plain = tmp_path / "plain"
    plain.mkdir()
    for workspace, message in (
        (make_repo({"a": "b"}, name="other"), "has no commit"),
        (plain, "is no git repository, and the recorded base is the commit"),
        (tmp_path / "absent", "absent"),
    ):
        recorder.workspace = workspace
        refused = recorder.replay(recorded.artifacts, expected=2)
        assert message in refused.stderr
        assert "Traceback" not in refused.stderr


def test_a_base_with_uncommitted_work_or_without_git_is_known_by_its_content(
    recorder: Recorder, tmp_path: Path
) -> None:
    """The directory must hold the very tree the run began with."""
    (recorder.workspace / "new.txt").write_text("not committed\n", encoding="utf-8")
    dirty = recorder.record(shell("cat new.txt"), DONE)
    assert recorder.report(dirty.artifacts)["identical"] is True
    recorder.workspace = tmp_path / "plain"
    recorder.workspace.mkdir()
    (recorder.workspace / "a.txt").write_text("plain\n", encoding="utf-8")
    plain = recorder.record(shell("cat a.txt; echo more >> a.txt"), DONE)

    refused = recorder.replay(plain.artifacts, expected=2)
    assert "does not hold the recorded base" in refused.stderr
    (recorder.workspace / "a.txt").write_text("plain\n", encoding="utf-8")
    assert recorder.report(plain.artifacts)["identical"] is True
    assert (recorder.workspace / "a.txt").read_text(encoding="utf-8") == "plain\n"


# --- recordings that end early -------------------------------------------------------------------


def cut_before(recorded: Finished, target: Path, event: str, number: int = 1) -> Path:
    """The plain log up to and without the ``number``-th event of a type."""
    kept = []
    for line in recorded.lines:
        number -= line["type"] == event
        if number == 0:
            break
        kept.append(json.dumps(line) + "\n")
    target.write_text("".join(kept), encoding="utf-8")
    return target


@pytest.mark.parametrize(
    ("event", "number", "results", "where"),
    [("step/end", 3, 3, "step 3"), ("tool/result", 3, 2, "step 3"), ("assistant/message", 3, 2, "step 3")],
)
def test_a_log_that_was_cut_off_is_replayed_up_to_there(
    recorder: Recorder, tmp_path: Path, event: str, number: int, results: int, where: str
) -> None:
    """What is left is compared, and it is said where the recording ends."""
    recorded = recorder.record(shell("echo one"), shell("echo two"), shell("echo three"), DONE)
    cut = cut_before(recorded, tmp_path / "cut.jsonl", event, number)

    report = recorder.report(cut)

    assert report["identical"] is True
    assert report["results"] == results
    assert report["recording"]["ends"] == f"the log is cut off in {where}"
    assert f"ends early: the log is cut off in {where}" in recorder.replay(cut).stdout


def test_a_recording_of_a_run_that_was_stopped_ends_where_it_was(recorder: Recorder) -> None:
    """A limit ended it; the replay has no such limit and ends with the answers."""
    profile = json.loads(json.dumps({"limits": {"steps": 2}}))
    recorded = recorder.record(shell("echo one"), shell("echo two"), DONE, profile=profile, expected=5)
    wide = recorder.profile.with_name("wide.profile.yaml")
    wide.write_text(recorder.profile.read_text(encoding="utf-8").replace('"steps": 2', '"steps": 9'), encoding="utf-8")

    report = recorder.report(recorded.artifacts, profile=wide)

    assert report["identical"] is True
    assert report["recording"]["ends"] == "the turn ended as aborted (LIMIT_REACHED) in step 2"


def test_a_replay_that_cannot_come_to_the_end_of_the_recording_fails_as_a_run_does(recorder: Recorder) -> None:
    """Here the profile allows fewer steps."""
    recorded = recorder.record(shell("echo one"), shell("echo two"), DONE)

    replayed = recorder.replay(recorded.artifacts, "--set", "limits.steps=2", expected=5)

    assert "not identical: 2 steps, 2 results" in replayed.stdout
    assert "error LIMIT_REACHED: the replay ended before the recording" in replayed.stderr


def test_a_task_that_asks_for_more_than_was_recorded_fails(recorder: Recorder) -> None:
    """The recording is exhausted: a failure of the provider, not retried."""
    recorded = recorder.record(shell("echo one"), DONE)
    task = recorder.task_on(recorded.artifacts)
    text = json.loads(task.read_text(encoding="utf-8"))
    task.write_text(json.dumps({**text, "turns": ["More."]}), encoding="utf-8")

    finished = recorder.run("run", task)

    assert finished.exit_code == 9
    assert "has 2 answers, and request 3 asks for another" in finished.result["error"]["message"]
    assert finished.events_of("llm/retry") == []


# --- provider: replay ----------------------------------------------------------------------------


def test_a_task_plays_a_recording_and_is_compared_with_it(recorder: Recorder, git: Callable[..., str]) -> None:
    """As long as results agree it runs; a changed workspace ends it with code 13 at the right call."""
    recorded = recorder.record(shell("echo hello"), shell("cat calc.py"), DONE)
    task = recorder.task_on(recorded.artifacts)
    finished = recorder.run("run", task)
    assert finished.exit_code == 0, finished.stderr
    assert finished.result["finalMessage"] == "Done."

    (recorder.workspace / "calc.py").write_text("changed = 1\n", encoding="utf-8")
    finished = recorder.run("run", task)

    assert finished.exit_code == 13
    assert finished.result["error"]["code"] == "LOG_INVALID"
    assert "turn 1, step 2, call call_2_0 (shell)" in finished.result["error"]["message"]
    assert "changed = 1" in finished.result["error"]["hint"]
    assert recorder.run("session", "verify", finished.artifacts).exit_code == 0
    assert git(recorder.workspace, "diff", "--stat").count("calc.py") == 1


def test_a_plan_shows_what_a_replay_would_have(recorder: Recorder) -> None:
    """Model, window and a digest of the recording; no key, no network."""
    recorded = recorder.record(shell("echo hello"), DONE)

    plan = recorder.run("plan", "--json", recorder.task_on(recorded.artifacts))

    values = json.loads(plan.stdout)["values"]
    assert values["profile.model.model"]["value"] == "scripted"
    assert values["profile.model.context_window"]["value"] == 128_000
    assert re.fullmatch(r"[0-9a-f]{64}", values["profile.model.replay_sha256"]["value"])
    assert values["profile.sandbox.network"]["value"] == "off"
    assert json.loads(plan.stdout)["secrets"] == []
    assert str(recorded.artifacts / "session.jsonl.zst") in json.loads(plan.stdout)["files"]
