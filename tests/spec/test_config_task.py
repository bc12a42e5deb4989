"""A task file says what is wrong with it: every problem at once, each with its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from runner.config.resolve import load_run
from runner.errors import ConfigError, ErrorCode

if TYPE_CHECKING:
    from pathlib import Path

    from runner.config.spec import RunSpec

PROFILE = """\
version: 1
model: {provider: scripted, script: s.script.yaml}
"""
SCRIPT = "version: 1\nresponses: [{text: done}]\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a profile and an empty workspace."""
    (tmp_path / "p.profile.yaml").write_text(PROFILE)
    (tmp_path / "s.script.yaml").write_text(SCRIPT)
    (tmp_path / "ws").mkdir()
    return tmp_path


def load(folder: Path, text: str, **options: Any) -> RunSpec:
    """Load ``text`` as a task in ``folder``."""
    (folder / "t.task.yaml").write_text(text)
    arguments: dict[str, Any] = {
        "task": folder / "t.task.yaml",
        "prompt": None,
        "profile": str(folder / "p.profile.yaml"),
        "workspace": str(folder / "ws"),
        "environ": {},
        "cwd": folder,
        "fence": lambda: "FENCE",
    }
    return load_run(**{**arguments, **options})


def problems(folder: Path, text: str, **options: Any) -> tuple[str, ...]:
    """The problems that a task is refused with."""
    with pytest.raises(ConfigError) as caught:
        load(folder, text, **options)
    assert caught.value.code is ErrorCode.CONFIG_INVALID
    return caught.value.problems


def test_a_small_task_gets_every_default(folder: Path) -> None:
    """Two keys are enough; the name is the file's."""
    task = load(folder, "version: 1\nprompt: Do it.\n").task

    assert (task.name, task.prompt) == ("t", "Do it.")
    assert (task.workspace.isolation, task.workspace.base, task.workspace.dirty) == ("in-place", "HEAD", "include")
    assert (task.turns, task.context, task.files, task.checks, task.compact_at) == ((), (), (), (), ())
    assert task.patch_required is False
    assert task.source == str(folder / "t.task.yaml")


def test_everything_a_task_may_say_is_taken(folder: Path) -> None:
    """All keys of the format at once."""
    (folder / "ws" / "AGENTS.md").write_text("Be brief.")
    task = load(
        folder,
        """\
version: 1
name: fix-tests
prompt: Do ${inputs.what}.
inputs: {what: {value: 1.10}}
workspace: {path: ws, isolation: copy, base: main, dirty: refuse}
profile: ./p.profile.yaml
context: [AGENTS.md]
outputs: {files: [out/report.md], patch: {required: true}}
checks: [{name: tests, run: pytest -q, timeout: 1.5m, retries: 2}, {name: lint, run: ruff check}]
limits: {steps: 60, wall: 5m}
turns: [And now?]
compact_at: [2]
""",
        workspace=None,
        profile=None,
    )

    assert task.task.prompt == "Do 1.10."
    assert task.task.workspace.path == str(folder / "ws")
    assert (task.task.workspace.isolation, task.task.workspace.base) == ("copy", "main")
    assert [(check.name, check.timeout, check.retries) for check in task.task.checks] == [
        ("tests", 90.0, 2),
        ("lint", 300.0, 0),
    ]
    assert task.task.files == ("out/report.md",)
    assert task.task.patch_required is True
    assert task.context_texts == ("Be brief.",)
    assert (task.profile.limits.steps, task.profile.limits.wall) == (60, 300.0)


def test_all_problems_of_a_file_are_listed_in_its_order(folder: Path) -> None:
    """Unknown and duplicate keys, wrong types and values out of range, in one message."""
    soon = "the text 'soon' is no duration: write seconds, or a text like 90s, 5m, 1.5h"

    found = problems(
        folder,
        """\
version: 2
promt: Do it.
prompt: 12
checks:
  - {name: tests, run: [pytest], timeout: soon}
  - {run: x, retries: -1}
limits: {steps: 1.5, wall: 0}
turns: none
turns: []
""",
    )

    assert found == (
        "t.task.yaml:1:10: version: the number 2 is no known version: write 1",
        "t.task.yaml:2:1: promt: unknown key, did you mean 'prompt'?",
        "t.task.yaml:3:9: prompt: a text is needed, this is the number 12: put it in quotes",
        "t.task.yaml:5:24: checks[0].run: a text is needed, this is a list",
        f"t.task.yaml:5:43: checks[0].timeout: {soon}",
        "t.task.yaml:6:5: checks[1].name: is missing: add it",
        "t.task.yaml:6:23: checks[1].retries: the number -1 is out of range: write at least 0",
        "t.task.yaml:7:17: limits.steps: a whole number is needed, this is the number 1.5",
        "t.task.yaml:7:28: limits.wall: the number 0 is out of range: write a duration from above zero to ten years",
        "t.task.yaml:8:8: turns: a list is needed, this is the text 'none'",
        "t.task.yaml:9:1: turns: given twice, first in line 8: remove one",
    )


def test_many_problems_are_counted_not_all_listed(folder: Path) -> None:
    """A file of the wrong kind does not fill the screen."""
    text = "version: 1\nprompt: x\n" + "".join(f"key{number}: 1\n" for number in range(200))

    found = problems(folder, text)

    assert len(found) == 51
    assert found[-1] == "and 150 more"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("steps: 5", "steps: unknown key here, did you mean 'limits.steps'?"),
        ("workspaces: {}", "workspaces: unknown key, did you mean 'workspace'?"),
        ("setup: []", "setup: unknown key"),
        ("workspace: {isolation: snapshot}", "workspace.isolation: the text 'snapshot' is none of the choices"),
        ("checks: [{name: a, run: b, from: clean}]", "checks[0].from: unknown key"),
        ("checks: [{name: a, run: b, restore: []}]", "checks[0].restore: unknown key"),
        ("outputs: {answer_schema: a.json}", "outputs.answer_schema: unknown key"),
        ("outputs: {answer_repairs: 2}", "outputs.answer_repairs: unknown key"),
        ("outputs: {patch: {max_files: 4}}", "outputs.patch.max_files: unknown key"),
        ("outputs: {patch: {allow: [src]}}", "outputs.patch.allow: unknown key"),
        ("limits: {children: 8}", "limits.children: unknown key"),
        ("limits: {depth: 2}", "limits.depth: unknown key"),
        ("outputs: {files: [/etc/passwd]}", "outputs.files[0]: '/etc/passwd' leaves the workspace"),
        ("outputs: {files: [a/../../b]}", "outputs.files[0]: 'a/../../b' leaves the workspace"),
        ("context: [../x]", "context[0]: '../x' leaves the workspace"),
        ('outputs: {files: ["a\\0b"]}', "outputs.files[0]: 'a\\x00b' holds a control character"),
        ("outputs: {files: [a/" + "b" * 256 + "]}", "is longer than a path can be: shorten it"),
        ("outputs: {files: [" + "a/" * 2001 + "b]}", "is longer than a path can be: shorten it"),
        ('inputs: {a: {file: "a\\0b"}}', "inputs.a.file: the text 'a\\x00b' holds a NUL"),
        ('checks: [{name: a, run: "a\\0b"}]', "checks[0].run: the text 'a\\x00b' holds a NUL"),
        ('workspace: {base: "a\\0b"}', "workspace.base: the text 'a\\x00b' is no revision"),
        ("workspace: {base: --upload-pack=x}", "workspace.base: the text '--upload-pack=x' is no revision"),
        ("name: a b", "name: the text 'a b' is no name: write letters"),
        ("inputs: {a b: {value: 1}}", "inputs.a b: the text 'a b' is no name of an input"),
        ("inputs: {a: }", "inputs.a: a mapping is needed, this is nothing"),
        ("compact_at: [0]", "compact_at[0]: the number 0 is out of range: write at least 1"),
        ("checks: [{name: a, run: b}, {name: a, run: c}]", "checks[1].name: 'a' is used twice"),
        ("prompt_file: p.txt", "has prompt and prompt_file: keep one"),
        ("workspace: {isolation: worktree}", "workspace.isolation: worktree needs a git repository"),
        ("context: [absent.md]", "context[0]: absent.md: no such file"),
        ("limits: {cost: .inf}", "limits.cost: infinity and not-a-number are no values here"),
    ],
)
def test_a_key_that_cannot_be_is_refused_with_what_to_do(folder: Path, line: str, problem: str) -> None:
    """Keys of later features are unknown keys; what is near a known one is pointed to."""
    found = problems(folder, f"version: 1\nprompt: x\n{line}\n")

    assert len(found) == 1
    assert found[0].startswith("t.task.yaml:")
    assert problem in found[0]


def test_a_task_without_a_prompt_is_refused(folder: Path) -> None:
    """Neither prompt nor prompt_file."""
    assert "prompt: is missing: add prompt or prompt_file" in problems(folder, "version: 1\n")[0]


def test_a_prompt_may_stand_in_a_file_beside_the_task(folder: Path) -> None:
    """Templates hold there, too; the origin names the file."""
    (folder / "prompt.md").write_text("Fix ${inputs.a}.\n")

    run = load(folder, "version: 1\nprompt_file: prompt.md\ninputs: {a: {value: it}}\n")

    assert run.task.prompt == "Fix it.\n"
    assert run.origins["task.prompt"] == "prompt.md"
    assert str(folder / "prompt.md") in run.defining_files


@pytest.mark.parametrize(
    ("content", "problem"),
    [(None, "no such file"), (b"\xff", "is not UTF-8"), (b" \n", "is empty: say what is to be done")],
)
def test_a_prompt_file_that_holds_no_prompt_is_refused(folder: Path, content: bytes | None, problem: str) -> None:
    """Where the task names it."""
    if content is not None:
        (folder / "prompt.md").write_bytes(content)

    found = problems(folder, "version: 1\nprompt_file: prompt.md\n")

    assert found[0].startswith("t.task.yaml:2:14: prompt_file: prompt.md")
    assert problem in found[0]


def test_a_prompt_on_the_command_line_is_taken_literally(folder: Path) -> None:
    """It has no templates, so a dollar sign is one."""
    run = load(folder, "", task=None, prompt="cost: $$ ${inputs.x}")

    assert run.task.prompt == "cost: $$ ${inputs.x}"
    assert (run.task.name, run.task.source) == ("prompt", None)
    assert run.origins["task.prompt"] == "--prompt"


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_on_the_command_line_is_refused(folder: Path, prompt: str) -> None:
    """There is nothing to do."""
    with pytest.raises(ConfigError, match="--prompt: the text is empty"):
        load(folder, "", task=None, prompt=prompt)


def test_a_task_and_a_prompt_exclude_each_other(folder: Path) -> None:
    """And one of them is needed."""
    with pytest.raises(ConfigError, match="exclude each other"):
        load(folder, "version: 1\nprompt: x\n", prompt="y")
    with pytest.raises(ConfigError, match="a task file or --prompt is needed"):
        load(folder, "", task=None)


def test_context_may_not_leave_the_workspace_through_a_link(folder: Path) -> None:
    """A link to a file outside would show it to the model."""
    (folder / "secret").write_text("key")
    (folder / "ws" / "AGENTS.md").symlink_to(folder / "secret")

    found = problems(folder, "version: 1\nprompt: x\ncontext: [AGENTS.md]\n")

    assert "AGENTS.md leads out of the workspace through a link" in found[0]
