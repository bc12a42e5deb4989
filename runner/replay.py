"""``session replay``: runs the loop again with the recorded answers, tools and sandbox real, and compares.

A session is data. Its answers and prompts are played; profile and policy are the caller's, the workspace is a
fresh copy of the recorded base, the network is off. Nothing else that the log says is followed. Writes no
events itself; the run it starts has a log and artifacts of its own.
"""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError, ErrorCode, LogError
from runner.permission import Trust
from runner.record import record, replace

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.cancellation import Cancellation
    from runner.config.spec import RunSpec, WorkspaceSpec
    from runner.hooks.replay import ReplayCheck
    from runner.messages import JsonObject
    from runner.providers.recording import Recording
    from runner.run import FinishedRun

_OBJECT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")

_BROKEN = frozenset(
    {
        ErrorCode.SANDBOX_UNAVAILABLE,
        ErrorCode.STORAGE_FAILED,
        ErrorCode.INTERNAL,
        ErrorCode.CANCELLED,
        ErrorCode.CONFIG_INVALID,
        ErrorCode.LOG_INVALID,
    }
)
"""Ends of a run that say nothing good of a replay, whatever it showed before."""


@record
class Replayed:
    """What a replay came to.

    Attributes:
        identical: Whether everything that was recorded was seen again.
        steps: Steps of the replay.
        results: Results of calls that were the recorded ones.
        requests: ``{same, alike, different}``: same byte for byte, same apart from paths, ids and what is declared
            (those of ``same`` included), and not the same byte for byte.
        divergence: The first divergence, as ``ReplayCheck`` has it; None without.
        ends: Why the recording ends before its run was done, None if it does not.
        error: ``{code, message, hint}`` of what kept the replay from its end; None without.
        session: Id of the session that was replayed.
        directory: Artifacts of the replay.
        exit_code: Exit code of the process.
    """

    identical: bool
    steps: int
    results: int
    requests: Mapping[str, int]
    divergence: JsonObject | None
    ends: str | None
    error: JsonObject | None
    session: str
    directory: Path
    exit_code: int

    def as_json(self) -> JsonObject:
        """What ``--json`` prints."""
        return {
            "schemaVersion": 1,
            "identical": self.identical,
            "steps": self.steps,
            "results": self.results,
            "requests": dict(self.requests),
            "divergence": self.divergence,
            "recording": {"session": self.session, "ends": self.ends},
            "error": self.error,
            "artifacts": str(self.directory),
        }


def load_replay(
    recording: Recording,
    *,
    profile: str,
    workspace: str | None,
    sets: Sequence[str],
    normalise: Sequence[str],
    environ: Mapping[str, str],
    cwd: Path,
) -> RunSpec:
    """The run that replays a recording. Creates nothing that stays.

    Args:
        recording: What is played.
        profile: Shipped profile or file.
        workspace: Where the recorded base is; the current directory if None.
        sets: ``KEY=VALUE`` texts for the profile.
        normalise: Patterns of what may differ.
        environ: Environment of the runner.
        cwd: Absolute current directory.

    Raises:
        ConfigError: CONFIG_INVALID, the profile or a pattern is wrong, the profile would not confine the run, or
            the workspace does not hold the recorded base.
        LogError: LOG_INVALID, the recording has no prompt.
    """
    from runner.config.recorded import Played, parse_patterns
    from runner.config.resolve import load_run

    if not recording.prompts:
        raise LogError(f"{recording.name}: no prompt is recorded in it, so there is nothing to replay")
    spec = load_run(
        task=None,
        prompt=recording.prompts[0],
        profile=profile,
        workspace=workspace,
        sets=sets,
        environ=environ,
        cwd=cwd,
        check_credentials=False,
        played=Played(recording, parse_patterns(tuple(normalise))),
    )
    task = replace(
        spec.task,
        name="replay",
        turns=recording.prompts[1:],
        compact_at=recording.compact_at,
        workspace=_find_base(spec.task.workspace, recording),
    )
    # What was recorded may lower the trust, and so the authority, but never raise it.
    trust = Trust.UNTRUSTED if recording.trust == Trust.UNTRUSTED.value else spec.trust
    return replace(spec, task=task, trust=trust)


def run_replay(
    spec: RunSpec,
    recording: Recording,
    *,
    artifacts: Path | None,
    environ: Mapping[str, str],
    cancellation: Cancellation,
) -> Replayed:
    """Replay, and say what it came to.

    Raises:
        RunnerError: As ``run_task``.
    """
    from runner.hooks.replay import ReplayCheck
    from runner.run import RunOptions, run_task

    check = ReplayCheck(recording, spec.profile.model.replay_normalise)
    try:
        finished = run_task(
            spec, RunOptions(artifacts=artifacts, hooks=(check,)), environ=environ, cancellation=cancellation
        )
        return _judge(finished, check, recording)
    finally:
        check.close()


def _judge(finished: FinishedRun, check: ReplayCheck, recording: Recording) -> Replayed:
    result = finished.result
    code = ErrorCode[result["code"]]
    if code is ErrorCode.COMPLETED:
        check.finish()
    left = check.remaining() is not None
    wrong = _wrong_base(result, recording) if code not in _BROKEN else None
    identical = check.divergence is None and not left and code not in _BROKEN and wrong is None
    error: JsonObject | None = None
    exit_code = 0
    if check.divergence is not None:
        exit_code = ErrorCode.LOG_INVALID.exit_code
    elif not identical:
        cause = result["error"] or {"code": code.name, "message": f"the replay ended with {code.name}", "hint": None}
        error = wrong or {**cause, "message": f"the replay ended before the recording: {cause['message']}"}
        exit_code = ErrorCode[error["code"]].exit_code if wrong else result["exitCode"]
    return Replayed(
        identical=identical,
        steps=result["steps"],
        results=check.results,
        requests={"same": check.same, "alike": check.alike, "different": check.different},
        divergence=check.divergence,
        ends=recording.ends,
        error=error,
        session=recording.session,
        directory=finished.directory,
        exit_code=exit_code,
    )


def _wrong_base(result: JsonObject, recording: Recording) -> JsonObject | None:
    """The workspace changed between the look at it and the copy, or git makes other files of the same tree."""
    expected, actual = (recording.base or {}).get("tree"), (result.get("base") or {}).get("tree")
    if expected == actual:
        return None
    message = f"the copy of the workspace is not the recorded base: its tree is {actual}, not {expected}"
    return {"code": ErrorCode.CONFIG_INVALID.name, "message": message, "hint": "leave the workspace alone meanwhile"}


def _find_base(workspace: WorkspaceSpec, recording: Recording) -> WorkspaceSpec:
    """Where a fresh copy of the recorded base comes from.

    Raises:
        ConfigError: CONFIG_INVALID, the workspace does not hold it, or the log says nothing of it.
    """
    from runner.workspace import find_repository, resolve_workspace

    commit, tree = _recorded_base(recording)
    path = resolve_workspace(workspace.path)
    repository = find_repository(path)
    if commit is None:
        _demand_content(path, tree)
        return replace(workspace, isolation="copy", base="HEAD", dirty="include")
    if repository is None:
        raise _no_base(path, f"is no git repository, and the recorded base is the commit {commit}")
    found = _tree_of(repository.git_dir, commit)
    if found != tree:
        what = "has no commit" if found is None else f"has another tree ({found}) than recorded ({tree}) in the commit"
        raise _no_base(path, f"{what} {commit}, the recorded base")
    return replace(workspace, isolation="copy", base=commit, dirty="ignore")


def _recorded_base(recording: Recording) -> tuple[str | None, str]:
    """Commit and tree of the base; the commit is None where the tree holds more than it."""
    base: Any = recording.base
    if base is None:
        raise ConfigError(
            f"{recording.name}: the log does not say what base its run began with, so no fresh copy of it can be made",
            hint="logs of other programs do not record it; a task with `provider: replay` plays their answers",
        )
    commit, tree, dirty = base.get("commit"), base.get("tree"), base.get("dirty")
    names = [name for name in (commit, tree) if name is not None]
    if tree is None or not all(isinstance(name, str) and _OBJECT.fullmatch(name) for name in names):
        raise LogError(f"{recording.name}: the recorded base names no git objects")
    return (None if dirty is not False else commit), tree


def _tree_of(git_dir: str, commit: str) -> str | None:
    from runner.workspace.git import git

    # Reads objects and looks at no work tree; a missing object is not fetched (`base_environment`).
    arguments = ["rev-parse", "--quiet", "--verify", "--end-of-options", f"{commit}^{{tree}}"]
    found = git(arguments, cwd="/", environment={"GIT_DIR": git_dir})
    lines = found.output.decode("ascii", "replace").split()
    # With --end-of-options older gits print the option as well.
    return lines[-1] if found.exit_code == 0 and lines else None


def _demand_content(path: str, tree: str) -> None:
    """Make sure that what a directory holds now is the tree, untracked files and changes included."""
    from runner.workspace import find_repository, take_snapshot
    from runner.workspace.removal import remove_tree

    state = Path(tempfile.mkdtemp(prefix="nightshift-"))
    try:
        found = take_snapshot(path, find_repository(path), state=state, name="source").base.tree
    finally:
        remove_tree(state)
    if found != tree:
        raise _no_base(path, f"does not hold the recorded base: its content is the tree {found}, not {tree}")


def _no_base(path: str, what: str) -> ConfigError:
    return ConfigError(
        f"the workspace {os.path.relpath(path) if path.startswith(str(Path.cwd())) else path} {what}",
        hint="name a directory that holds the base the session began with: --workspace DIR",
    )
