"""Who started a run decides which version of its files is believed."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from runner.config.resolve import load_run
from runner.config.trust import derive_trigger, judge_event
from runner.errors import ConfigError
from runner.permission import Trust

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import MakeRepo

    from runner.config.spec import RunSpec

SHA = "a" * 40
HEAD = {"repo": {"fork": False, "full_name": "o/r"}}
BASE = {"sha": SHA, "repo": {"full_name": "o/r"}}
FORK = {"repo": {"fork": True, "full_name": "x/r"}}


@pytest.mark.parametrize(
    "payload",
    [
        {"pull_request": {"head": HEAD, "base": BASE, "author_association": "MEMBER"}},
        {"pull_request": {"head": {"repo": {"fork": False}}, "base": {}, "author_association": "OWNER"}},
        {
            "pull_request": {"head": HEAD, "base": BASE, "author_association": "OWNER"},
            "review": {"author_association": "COLLABORATOR"},
        },
        {"issue": {"author_association": "MEMBER"}, "action": "opened"},
        {"issue": {"author_association": "OWNER"}, "comment": {"author_association": "OWNER"}},
        {"ref": "refs/heads/main", "pusher": {"name": "x"}, "commits": []},
        {"schedule": "0 3 * * *", "workflow": "nightly.yml"},
        {"inputs": None, "ref": "refs/heads/main", "workflow": "w.yml", "sender": {}},
        {"action": "go", "client_payload": {}},
        {
            "workflow_run": {"event": "push", "head_repository": {"full_name": "o/r"}},
            "repository": {"full_name": "o/r"},
        },
    ],
)
def test_an_event_of_somebody_with_write_access_is_trusted(payload: dict[str, Any]) -> None:
    """Members' pull requests from the repository itself, pushes, schedules, runs started by hand."""
    assert judge_event(payload, {}).trust is Trust.TRUSTED


@pytest.mark.parametrize(
    "payload",
    [
        {"pull_request": {"head": FORK, "base": BASE, "author_association": "MEMBER"}},
        {"pull_request": {"head": {"repo": {"fork": True}}, "author_association": "OWNER"}},
        {"pull_request": {"head": {"repo": None}, "base": BASE, "author_association": "OWNER"}},
        {"pull_request": {"head": HEAD, "base": BASE, "author_association": "CONTRIBUTOR"}},
        {"pull_request": {"head": HEAD, "base": BASE}},
        {"pull_request": {"head": HEAD, "base": BASE, "author_association": "OWNER"}, "comment": {}},
        {"pull_request": "x"},
        {"pull_request": {"head": FORK, "base": BASE}, "pusher": {}, "ref": "x"},
        {"issue": {"author_association": "NONE"}},
        {"issue": {"author_association": "OWNER"}, "comment": {"author_association": "NONE"}},
        {"issue": {"author_association": "NONE"}, "comment": {"author_association": "OWNER"}},
        {
            "issue": {"author_association": "OWNER", "pull_request": {"url": "x"}},
            "comment": {"author_association": "OWNER"},
        },
        {"issue": None},
        {"discussion": {"author_association": "FIRST_TIME_CONTRIBUTOR"}},
        {"workflow_run": {"event": "pull_request", "head_repository": {"full_name": "o/r"}}},
        {
            "workflow_run": {"event": "push", "head_repository": {"full_name": "x/r"}},
            "repository": {"full_name": "o/r"},
        },
        {"action": "published", "release": {}},
        {},
        [],
        None,
        "text",
    ],
)
def test_everything_else_is_untrusted(payload: object) -> None:
    """Forks, strangers, comments on pull requests, and whatever is not known. Never a crash."""
    trigger = judge_event(payload, {})

    assert trigger.trust is Trust.UNTRUSTED
    assert trigger.reason


def test_a_base_is_what_the_event_names(tmp_path: Path) -> None:
    """The pull request's base, or the default branch's commit for events about issues."""
    pull = {"pull_request": {"head": FORK, "base": BASE}}
    assert judge_event(pull, {"GITHUB_SHA": "b" * 40}).base == SHA
    assert judge_event({"issue": {}}, {"GITHUB_SHA": SHA}).base == SHA
    assert judge_event({"pull_request": {"base": {"sha": "--output=x"}}}, {}).base is None
    assert judge_event({"release": {}}, {"GITHUB_SHA": SHA}).base is None
    assert derive_trigger(None, "untrusted", {"GITHUB_SHA": SHA}, tmp_path).base is None


def test_without_an_event_file_a_run_is_trusted(tmp_path: Path) -> None:
    """Whoever wrote the command line started it; ``CI`` alone changes nothing."""
    assert derive_trigger(None, None, {"CI": "true"}, tmp_path).trust is Trust.TRUSTED
    assert derive_trigger(None, None, {"GITHUB_EVENT_PATH": ""}, tmp_path).trust is Trust.TRUSTED


def test_trust_can_only_be_lowered(tmp_path: Path) -> None:
    """An option that raises it is refused."""
    assert derive_trigger(None, "untrusted", {}, tmp_path).trust is Trust.UNTRUSTED
    with pytest.raises(ConfigError, match="trust can only be lowered"):
        derive_trigger(None, "trusted", {}, tmp_path)


def test_the_option_goes_before_the_variable(tmp_path: Path) -> None:
    """Relative to the current directory."""
    (tmp_path / "push.json").write_text('{"pusher": {}, "ref": "x"}')
    (tmp_path / "odd.json").write_text("{}")
    environ = {"GITHUB_EVENT_PATH": str(tmp_path / "odd.json")}

    assert derive_trigger("push.json", None, environ, tmp_path).trust is Trust.TRUSTED
    assert derive_trigger(None, None, environ, tmp_path).trust is Trust.UNTRUSTED


@pytest.mark.parametrize("content", [None, b"", b"{", b"\xff", b"[" * 100_000])
def test_an_event_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    """Named by the option it is an error; from the variable it makes the run untrusted."""
    path = tmp_path / "event.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ConfigError, match="event file"):
        derive_trigger(str(path), None, {}, tmp_path)
    assert derive_trigger(None, None, {"GITHUB_EVENT_PATH": str(path)}, tmp_path).trust is Trust.UNTRUSTED


PROFILE = "version: 1\nmodel: {{provider: scripted, script: s.yaml}}\nlimits: {{steps: {}}}\n"
FILES = {
    "ci/t.task.yaml": "version: 1\nprompt_file: prompt.md\nprofile: ./p.profile.yaml\n",
    "ci/prompt.md": "The base's prompt.",
    "ci/p.profile.yaml": PROFILE.format(7),
    "ci/s.yaml": "version: 1\nresponses: [{text: base}]\n",
    "AGENTS.md": "The base's rules.",
}


class Pull:
    """A checkout in the state of a pull request that changed every file of the run."""

    def __init__(self, repo: Path, git: Callable[..., str]) -> None:
        self.repo = repo
        self.base = git(repo, "rev-parse", "HEAD").strip()
        for name in FILES:
            (repo / name).write_text("version: 1\nwhatever: the head says\n")
        git(repo, "commit", "--quiet", "--all", "--message", "attack")
        payload = {"pull_request": {"head": FORK, "base": {**BASE, "sha": self.base}}}
        self.event = repo.parent / "event.json"
        self.event.write_text(json.dumps(payload))

    def load(self, **options: Any) -> RunSpec:
        """Load the run of the checkout, as the pull request's event starts it."""
        arguments: dict[str, Any] = {
            "task": self.repo / "ci" / "t.task.yaml",
            "prompt": None,
            "profile": None,
            "workspace": None,
            "event": str(self.event),
            "environ": {},
            "cwd": self.repo,
        }
        return load_run(**{**arguments, **options})


@pytest.fixture
def pull(make_repo: MakeRepo, git: Callable[..., str]) -> Pull:
    """A pull request from a fork."""
    return Pull(make_repo(FILES), git)


def test_with_an_untrusted_trigger_the_base_defines_the_run(pull: Pull) -> None:
    """Task, prompt, profile and script are the base's, although the checkout has others."""
    run = pull.load()

    assert run.trust is Trust.UNTRUSTED
    assert run.task.prompt == "The base's prompt."
    assert run.profile.limits.steps == 7
    assert run.responses == ({"text": "base"},)
    assert run.origins["profile.limits.steps"] == f"{pull.base[:12]}:ci/p.profile.yaml:3"


def test_with_an_untrusted_trigger_context_is_the_base_s(pull: Pull, tmp_path: Path) -> None:
    """The head could write instructions there; a file that only the head has is refused."""
    text = "version: 1\nprompt: x\nprofile: workspace/ci/p.profile.yaml\ncontext: [{}]\n"
    task = tmp_path / "t.task.yaml"

    task.write_text(text.format("AGENTS.md"))
    assert pull.load(task=task, workspace=str(pull.repo)).context_texts == ("The base's rules.",)

    (pull.repo / "NEW.md").write_text("attack")
    task.write_text(text.format("NEW.md"))
    with pytest.raises(ConfigError, match=r"context\[0\]: NEW.md is not in the base revision"):
        pull.load(task=task, workspace=str(pull.repo))


def test_the_same_checkout_is_read_as_it_is_when_trusted(pull: Pull) -> None:
    """So the test above tests something."""
    with pytest.raises(ConfigError, match="whatever: unknown key"):
        pull.load(event=None)


def test_naming_the_workspace_changes_nothing_for_files_inside_it(pull: Pull) -> None:
    """By option, or by a subdirectory: the whole checkout is under test."""
    assert pull.load(workspace=".").profile.limits.steps == 7
    assert pull.load(workspace="ci").profile.limits.steps == 7


def test_files_outside_the_checkout_are_read_as_they_are(pull: Pull, tmp_path: Path) -> None:
    """A second checkout, for example."""
    outside = tmp_path / "trusted"
    outside.mkdir()
    (outside / "t.task.yaml").write_text("version: 1\nprompt: outside\nprofile: ./p.profile.yaml\n")
    (outside / "p.profile.yaml").write_text(PROFILE.format(9))
    (outside / "s.yaml").write_text("version: 1\nresponses: []\n")

    run = pull.load(task=outside / "t.task.yaml", workspace=str(pull.repo), cwd=tmp_path)

    assert (run.task.prompt, run.profile.limits.steps) == ("outside", 9)


def test_a_link_does_not_make_the_head_s_file_an_outside_one(
    pull: Pull, tmp_path: Path, git: Callable[..., str]
) -> None:
    """Neither a link in the checkout that leads out, nor one outside that leads in."""
    (pull.repo / "ci" / "p.profile.yaml").unlink()
    (tmp_path / "evil.yaml").write_text(PROFILE.format(99))
    (pull.repo / "ci" / "p.profile.yaml").symlink_to(tmp_path / "evil.yaml")
    git(pull.repo, "commit", "--quiet", "--all", "--message", "a link")
    (tmp_path / "alias.task.yaml").symlink_to(pull.repo / "ci" / "t.task.yaml")

    assert pull.load().profile.limits.steps == 7
    assert pull.load(task=tmp_path / "alias.task.yaml", workspace=".").profile.limits.steps == 7


def test_a_task_cannot_place_itself_outside(pull: Pull, tmp_path: Path) -> None:
    """A checkout's task that names another workspace is still the checkout's."""
    (tmp_path / "elsewhere").mkdir()
    (pull.repo / "ci" / "t.task.yaml").write_text("version: 1\nprompt: attack\nworkspace: {path: ../../elsewhere}\n")

    assert pull.load(cwd=tmp_path).task.prompt == "The base's prompt."


def test_a_file_that_the_base_lacks_is_not_taken_from_the_head(pull: Pull) -> None:
    """It must be there first."""
    (pull.repo / "ci" / "new.task.yaml").write_text("version: 1\nprompt: attack\n")

    with pytest.raises(ConfigError, match="no such file in the base revision"):
        pull.load(task=pull.repo / "ci" / "new.task.yaml")


def test_a_link_in_the_base_is_not_followed(make_repo: MakeRepo, git: Callable[..., str]) -> None:
    """Its target would be the head's."""
    repo = make_repo(FILES)
    (repo / "ci" / "link.task.yaml").symlink_to("t.task.yaml")
    git(repo, "add", "--all")
    git(repo, "commit", "--quiet", "--message", "a link")
    pull = Pull(repo, git)

    with pytest.raises(ConfigError, match="is no regular file in"):
        pull.load(task=repo / "ci" / "link.task.yaml")


def test_a_base_that_was_not_fetched_is_explained(pull: Pull) -> None:
    """A shallow checkout has the head alone."""
    pull.event.write_text(json.dumps({"pull_request": {"head": FORK, "base": BASE}}))

    with pytest.raises(ConfigError, match=f"the base revision {SHA} is not in") as caught:
        pull.load()

    assert caught.value.hint is not None
    assert "fetch-depth: 0" in caught.value.hint


def test_without_a_base_files_of_the_checkout_are_refused(pull: Pull, tmp_path: Path) -> None:
    """``--trust untrusted`` says nothing about a base."""
    with pytest.raises(ConfigError, match="no base revision is known"):
        pull.load(event=None, trust="untrusted")

    (tmp_path / "t.task.yaml").write_text("version: 1\nprompt: x\nprofile: workspace/ci/p.profile.yaml\n")
    with pytest.raises(ConfigError, match="no base revision is known"):
        pull.load(task=tmp_path / "t.task.yaml", event=None, trust="untrusted", workspace=str(pull.repo))


def test_a_task_outside_may_name_the_base(pull: Pull, tmp_path: Path) -> None:
    """It is believed, so the revision it names is."""
    workspace = f"workspace: {{path: workspace, base: {pull.base}}}"
    text = f"version: 1\nprompt: x\nprofile: workspace/ci/p.profile.yaml\n{workspace}\n"
    (tmp_path / "t.task.yaml").write_text(text)
    (tmp_path / "cwd").mkdir()

    run = pull.load(task=tmp_path / "t.task.yaml", event=None, trust="untrusted", cwd=tmp_path / "cwd")

    assert run.profile.limits.steps == 7


def test_a_believed_task_may_not_lie_in_its_own_workspace(tmp_path: Path) -> None:
    """Outside of any repository there is no base to read it from."""
    (tmp_path / "w").mkdir()
    (tmp_path / "w" / "t.task.yaml").write_text("version: 1\nprompt: x\nprofile: quickstart\nworkspace: {path: .}\n")
    (tmp_path / "cwd").mkdir()

    with pytest.raises(ConfigError, match="holds the task file itself, and the trigger is untrusted"):
        load_run(
            task=tmp_path / "w" / "t.task.yaml",
            prompt=None,
            profile=None,
            workspace=None,
            trust="untrusted",
            environ={},
            cwd=tmp_path / "cwd",
        )


def test_configuration_of_the_checkout_runs_nothing(pull: Pull, git: Callable[..., str], tmp_path: Path) -> None:
    """Hooks, a file system monitor and filters of the repository are not executed to read the base."""
    mark = tmp_path / "executed"
    script = tmp_path / "evil.sh"
    script.write_text(f"#!/bin/sh\ntouch {mark}\n")
    script.chmod(0o755)
    for key in (
        "core.fsmonitor",
        "filter.x.smudge",
        "filter.x.clean",
        "diff.x.textconv",
        "core.pager",
        "core.sshCommand",
    ):
        git(pull.repo, "config", key, str(script))
    (pull.repo / ".gitattributes").write_text("* filter=x diff=x\n")

    assert pull.load().profile.limits.steps == 7
    assert not mark.exists()


def test_shipped_files_are_believed_from_an_environment_inside_the_checkout(
    pull: Pull, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job often makes its virtual environment there."""
    shipped = pull.repo / ".venv" / "configs"
    (shipped / "profiles").mkdir(parents=True)
    (shipped / "profiles" / "own.profile.yaml").write_text(PROFILE.format(3))
    (shipped / "profiles" / "s.yaml").write_text("version: 1\nresponses: []\n")
    (tmp_path / "t.task.yaml").write_text("version: 1\nprompt: x\nprofile: own\n")
    monkeypatch.setattr("runner.config.trust.shipped_directory", lambda: shipped)

    assert pull.load(task=tmp_path / "t.task.yaml", workspace=".").profile.limits.steps == 3


def test_a_key_file_of_the_checkout_is_refused(pull: Pull, tmp_path: Path) -> None:
    """The pull request would choose which file is sent as a key."""
    (tmp_path / "p.profile.yaml").write_text(
        "version: 1\nmodel: {provider: openai, model: gpt-5, api_key_file: workspace/ci/prompt.md}\n"
    )
    (pull.repo / "sub").mkdir()

    with pytest.raises(ConfigError, match="api_key_file: is part of the untrusted checkout"):
        pull.load(profile=str(tmp_path / "p.profile.yaml"), workspace="sub")


@pytest.mark.parametrize("network", ["on", "{allow: ['pypi.org:443']}"])
def test_an_untrusted_trigger_gets_no_network(pull: Pull, tmp_path: Path, network: str) -> None:
    """Whatever the profile says; the origin says why."""
    (tmp_path / "p.profile.yaml").write_text(PROFILE.format(5) + f"sandbox: {{network: {network}}}\n")
    (tmp_path / "s.yaml").write_text("version: 1\nresponses: []\n")

    run = pull.load(profile=str(tmp_path / "p.profile.yaml"))

    assert (run.profile.sandbox.network, run.profile.sandbox.egress) == (False, ())
    assert run.origins["profile.sandbox.network"] == "untrusted trigger"


def test_an_untrusted_trigger_takes_the_tools_away_that_need_the_network(pull: Pull, tmp_path: Path) -> None:
    """The profile is right for a trusted run, so it is no error; plan says why."""
    lines = "sandbox: {network: on}\ntools: {allow: [read_file, fetch_url]}\n"
    (tmp_path / "p.profile.yaml").write_text(PROFILE.format(5) + lines)
    (tmp_path / "s.yaml").write_text("version: 1\nresponses: []\n")

    run = pull.load(profile=str(tmp_path / "p.profile.yaml"))

    assert run.profile.tools.allow == ("read_file",)
    assert run.origins["profile.tools.allow"] == "untrusted trigger"
