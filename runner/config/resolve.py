"""From files and options to one frozen ``RunSpec``: every effective value with its origin.

Everything that can be wrong with a run before it starts is found here, as CONFIG_INVALID, before
anything is created or sent. Defaults are filled in here and nowhere below.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from runner.approvals.words import DEFAULT_TOOLS
from runner.config.directories import check_directory
from runner.config.effective import Effective, digest
from runner.config.inputs import InputSource, fill, parse_assignments, references, template_problems
from runner.config.load import Document, Mark, config_error, dotted, read_file
from runner.config.merge import apply_sets, load_profile, read_bytes_referenced, tighten
from runner.config.recorded import play, read_replay
from runner.config.resolve_profile import DEFAULTS, read_script, resolve_profile, untrusted_reason
from runner.config.shape import demand
from runner.config.spec import CheckSpec, RunSpec, TaskSpec, WorkspaceSpec
from runner.config.trust import Reader, Trigger, checkout_of, derive_trigger, find_profile, is_inside, read_blob
from runner.config.values import parse_duration
from runner.errors import ConfigError
from runner.permission import Trust
from runner.record import fields, replace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.config.load import Location
    from runner.config.recorded import Played

__all__ = ["DEFAULT_PROFILE", "load_run"]

DEFAULT_PROFILE: Final = "review"
"""Shipped profile of a run that names none: it writes nothing."""


def load_run(
    *,
    task: Path | None,
    prompt: str | None,
    profile: str | None,
    workspace: str | None,
    sets: Sequence[str] = (),
    inputs: Sequence[str] = (),
    event: str | None = None,
    trust: str | None = None,
    environ: Mapping[str, str],
    cwd: Path,
    check_credentials: bool = True,
    fence: Callable[[], str] | None = None,
    played: Played | None = None,
) -> RunSpec:
    """Load and check everything one run needs. Creates nothing.

    Args:
        task: Task file; exactly one of this and ``prompt``.
        prompt: Text of the task in place of a file; taken literally, without templates.
        profile: Shipped profile or file, before the task's own.
        workspace: Directory to work in, before the task's own.
        sets: ``KEY=VALUE`` texts of ``--set``.
        inputs: ``NAME=VALUE`` texts of ``--input``.
        event: Event file, before ``$GITHUB_EVENT_PATH``.
        trust: ``untrusted`` lowers the trust of the trigger.
        environ: Environment of the runner.
        cwd: Absolute current directory: relative paths of options start here.
        check_credentials: Whether the variable or file with the key must be there.
        fence: Gives the random text around data blocks.
        played: A recording to be played in place of the profile's model.

    Raises:
        ConfigError: With all problems of the file that has some.
    """
    trigger = derive_trigger(event, trust, environ, cwd)
    reader = Reader(cwd, trigger.trust, trigger.base, _checkouts(task, workspace, cwd, trigger))
    if (task is None) == (prompt is None):
        both = "a task file and --prompt exclude each other" if task else "a task file or --prompt is needed"
        raise ConfigError(both, hint="nightshift run TASK.yaml, or nightshift run --prompt TEXT")
    document = _prompt_document(prompt, cwd) if task is None else reader.load(task)
    if task is not None:
        demand("task", document)
    asked = Effective("task", document)
    asked.take("name", default="prompt" if task is None else _default_name(task.name))
    path = _workspace(asked, workspace, cwd, environ)
    _extend_tested(reader, path, task, document)
    selected = _select_profile(asked, profile, reader, cwd)
    declared = Document(selected.source, json.loads(json.dumps(selected.value)))
    apply_sets(selected, sets, cwd=cwd, tools=DEFAULT_TOOLS)
    problems = tighten(selected, declared.value, document)
    if problems:
        raise config_error(document.source, problems)
    if played is not None:
        play(selected, played, cwd)
    demand("profile", selected)
    task_spec = _resolve_task(
        asked,
        path,
        source=None if task is None else os.path.normpath(cwd / task),
        reader=reader,
        given=parse_assignments(inputs),
        environ=environ,
        fence=fence or _random_fence,
    )
    chosen = Effective("profile", selected)
    untrusted = untrusted_reason(trigger, task_spec.inputs)
    responses = read_script(chosen, reader)
    recording = read_replay(chosen, reader, played)
    profile_spec, policy_value = resolve_profile(
        chosen,
        reader,
        path,
        environ=environ,
        check_credentials=check_credentials,
        untrusted=untrusted,
        responses=responses,
        recording=recording,
    )
    config = {"task": asked.nested(), "profile": chosen.nested(), "policy": policy_value}
    sections = (asked, chosen)
    return RunSpec(
        task=task_spec,
        profile=profile_spec,
        trust=trigger.trust,
        trust_reason=trigger.reason,
        task_digest=digest(config["task"]),
        profile_digest=digest(config["profile"]),
        policy_digest=digest(policy_value),
        config=config,
        origins={dotted((each.name, *at)): origin for each in sections for at, origin in each.origins.items()},
        values={dotted((each.name, *at)): value for each in sections for at, value in each.values.items()},
        defining_files=tuple(reader.files),
        context_texts=_context_texts(asked, path, reader),
        responses=responses,
        recording=recording,
    )


def _random_fence() -> str:
    return os.urandom(8).hex()


def _prompt_document(prompt: str | None, cwd: Path) -> Document:
    if not prompt or not prompt.strip():
        raise ConfigError("--prompt: the text is empty", hint="say what is to be done")
    return Document("--prompt", {"prompt": prompt}, {(): Mark("--prompt", 0, 0, str(cwd))})


def _checkouts(task: Path | None, workspace: str | None, cwd: Path, trigger: Trigger) -> list[Path]:
    """Directories whose files an untrusted trigger may have written, as far as the command line says.

    Without ``--workspace`` the task says where the workspace is, and so cannot be believed to lie outside
    of it: then its own checkout counts as well.
    """
    if trigger.trust is Trust.TRUSTED:
        return []
    if workspace is not None:
        return _with_real(cwd / workspace)
    tested = _with_real(cwd)
    if task is not None:
        own = checkout_of(Path(os.path.normpath(cwd / task)).parent)
        tested += [own] if own is not None else []
    return tested


def _with_real(directory: Path) -> list[Path]:
    """The checkout around a directory, or the directory; under its name and with links resolved."""
    named = Path(os.path.normpath(directory))
    real = Path(os.path.realpath(directory))
    return list(dict.fromkeys([checkout_of(named) or named, checkout_of(real) or real]))


def _extend_tested(reader: Reader, workspace: str, task: Path | None, document: Document) -> None:
    """Let the workspace that the task names count as under test, the task file included."""
    if reader.trust is Trust.TRUSTED:
        return
    believed = task is None or reader.under_test(reader.cwd / task) is None
    for top in _with_real(Path(workspace)):
        if top not in reader.tested:
            reader.tested.append(top)
    base = (document.value.get("workspace") or {}).get("base")
    if task is not None and believed:
        if reader.under_test(Path(os.path.normpath(reader.cwd / task))) is not None:
            problem = document.problem(
                ("workspace", "path"), "holds the task file itself, and the trigger is untrusted"
            )
            raise config_error(
                document.source, [problem], hint="keep the task outside the workspace, or use --workspace"
            )
        if reader.base is None and base not in {None, "HEAD"}:
            reader.base = base


def _workspace(task: Effective, option: str | None, cwd: Path, environ: Mapping[str, str]) -> str:
    declared = task.raw("workspace", "path")
    location: Location = ("workspace", "path")
    if option is not None:
        path, problem = check_directory(option, cwd, environ)
        if problem:
            raise ConfigError(f"--workspace {option}: {problem}")
        task.note(location, path, "--workspace", private=True)
        return path
    mark = task.document.mark(location)
    path, problem = check_directory(declared or ".", mark.directory if declared else cwd, environ)
    if problem and declared:
        raise config_error(task.document.source, [task.document.problem(location, problem)])
    if problem:
        raise ConfigError(f"the current directory, {cwd}: {problem}", hint="name the workspace: --workspace DIR")
    task.note(location, path, mark.origin if declared else "default", private=True)
    return path


def _select_profile(task: Effective, option: str | None, reader: Reader, cwd: Path) -> Document:
    location: Location = ("profile",)
    named = task.raw("profile")
    if option is not None:
        task.note(location, option, "--profile", private=True)
        return load_profile(find_profile(option, cwd), reader)
    if named is None:
        task.note(location, DEFAULT_PROFILE, "default", private=True)
        return load_profile(find_profile(DEFAULT_PROFILE, cwd), reader)
    task.note(location, named, task.document.mark(location).origin, private=True)
    try:
        path = find_profile(named, task.document.mark(location).directory)
    except ConfigError as error:
        problem = task.document.problem(location, error.message)
        raise config_error(task.document.source, [problem], hint=error.hint) from None
    return load_profile(path, reader, asked_by=(task.document, location))


def _resolve_task(
    task: Effective,
    workspace: str,
    *,
    source: str | None,
    reader: Reader,
    given: Mapping[str, str],
    environ: Mapping[str, str],
    fence: Callable[[], str],
) -> TaskSpec:
    document = task.document
    literal = source is None
    prompt = _prompt(task, reader)
    turns = tuple(task.take("turns", default=[]))
    found = InputSource(document, given=given, reader=reader, environ=environ, workspace=workspace)
    values = found.values()
    task.problems += found.problems
    used: set[str] = set()
    texts: list[tuple[Location, str]] = [(("turns", index), text) for index, text in enumerate(turns)]
    if not literal:
        texts.append((("prompt_file",) if task.raw("prompt_file") else ("prompt",), prompt))
        for location, text in texts:
            used.update(references(text))
            task.problems += [document.problem(location, wrong) for wrong in template_problems(text, values)]
        for unused in values.keys() - used:
            text = f"is used in no prompt: write ${{inputs.{unused}}} there, or remove it"
            task.problems.append(document.problem(("inputs", unused), text, at_key=True))
    for each in values.values():
        task.note(("inputs", each.name, "value"), each.value, found.origins[each.name])
        declared = task.raw("inputs", each.name, "trust") == each.trust.value
        origin = document.mark(("inputs", each.name, "trust")).origin if declared else "default"
        task.note(("inputs", each.name, "trust"), each.trust.value, origin)
    checks = _checks(task)
    spec = TaskSpec(
        name=task.values["name",],
        prompt="",
        workspace=WorkspaceSpec(
            path=workspace,
            **{key: task.take("workspace", key, default=default) for key, default in _WORKSPACE_DEFAULTS.items()},
        ),
        turns=turns,
        context=tuple(task.take("context", default=[])),
        inputs=tuple(values.values()),
        files=tuple(task.take("outputs", "files", default=[])),
        patch_required=task.take("outputs", "patch", "required", default=DEFAULTS["Patch.required"]),
        checks=checks,
        compact_at=tuple(task.take("compact_at", default=[])),
        source=source,
    )
    if spec.workspace.isolation == "worktree" and checkout_of(Path(workspace)) is None:
        task.problem(("workspace", "isolation"), f"worktree needs a git repository, {workspace} is in none: use copy")
    if task.problems:
        raise config_error(document.source, task.problems)
    if literal:
        return replace(spec, prompt=prompt)
    return replace(
        spec,
        prompt=fill(prompt, values, fence),
        turns=tuple(fill(text, values, fence) for text in turns),
    )


_WORKSPACE_DEFAULTS: Final = {each.name: each.default for each in fields(WorkspaceSpec) if each.name != "path"}


def _default_name(file: str) -> str:
    stem = re.sub(r"(\.task)?\.ya?ml$", "", file)
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("-._")[:100] or "task"


def _prompt(task: Effective, reader: Reader) -> str:
    """The template of the prompt, from the task or its ``prompt_file``."""
    document, location = task.document, ("prompt_file",)
    text, file = task.raw("prompt"), task.raw("prompt_file")
    if (text is None) == (file is None):
        what = "has prompt and prompt_file: keep one" if file else "prompt: is missing: add prompt or prompt_file"
        raise config_error(document.source, [*task.problems, document.problem((), what)])
    if file is None:
        task.take("prompt")
        return str(text)
    path = Path(document.mark(location).directory) / file
    data, name, _ = read_bytes_referenced(reader, path, document, location)
    try:
        prompt = data.decode()
    except UnicodeDecodeError:
        raise config_error(document.source, [document.problem(location, f"{name} is not UTF-8")]) from None
    if not prompt.strip():
        raise config_error(document.source, [document.problem(location, f"{name} is empty: say what is to be done")])
    task.note(("prompt",), prompt, name)
    return prompt


def _checks(task: Effective) -> tuple[CheckSpec, ...]:
    found: list[CheckSpec] = []
    default = CheckSpec(name="", run="")
    for index, raw in enumerate(task.raw("checks") or []):
        location: Location = ("checks", index)
        if raw["name"] in {check.name for check in found}:
            task.problem((*location, "name"), f"{raw['name']!r} is used twice: give each check its own name")
        timeout = default.timeout
        if raw.get("timeout") is not None:
            try:
                timeout = parse_duration(raw["timeout"])
            except ValueError as error:
                task.problem((*location, "timeout"), str(error))
        retries = default.retries if raw.get("retries") is None else raw["retries"]
        found.append(CheckSpec(raw["name"], raw["run"], timeout, retries))
    value = [{each.name: getattr(check, each.name) for each in fields(check)} for check in found]
    origin = task.document.mark(("checks",)).origin if found else "default"
    task.note(("checks",), value, origin)
    return tuple(found)


def _context_texts(task: Effective, workspace: str, reader: Reader) -> tuple[str, ...]:
    """The text of each context file, in the version that may be believed."""
    texts = []
    for index, name in enumerate(task.raw("context") or []):
        try:
            data = _context_file(workspace, name, reader)
            texts.append(data.decode())
        except UnicodeDecodeError:
            task.problem(("context", index), f"{name} is not UTF-8: save it as UTF-8, or leave it out")
        except ConfigError as error:
            task.problem(("context", index), f"{error.message}: {error.hint or 'correct the path, or leave it out'}")
    if task.problems:
        raise config_error(task.document.source, task.problems)
    return tuple(texts)


def _context_file(workspace: str, name: str, reader: Reader) -> bytes:
    if "\0" in name:
        raise ConfigError("the name of a file holds a NUL")
    path = Path(workspace) / name
    top = reader.under_test(path)
    if top is not None:
        relative = str(path.relative_to(top)) if is_inside(path, top) else name
        data = None if reader.base is None else read_blob(top, reader.base, relative)
        if data is None:
            raise ConfigError(f"{name} is not in the base revision, and the checkout is untrusted")
        return data
    if not is_inside(os.path.realpath(path), workspace):
        raise ConfigError(f"{name} leads out of the workspace through a link")
    return read_file(path, name=name)
