"""The life of one run: probe, agent, checks, outcome, seal, artifacts.

The only writer of ``run/*``, the session's opening events, and ``artifact/*``. From the probe on the artifacts
directory is complete after any end: what breaks becomes a cause, never a missing folder.
"""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from runner import __version__, diagnostics
from runner.errors import (
    SIGNAL_EXIT_CODES,
    ConfigError,
    ErrorCode,
    InternalError,
    LogError,
    RunnerError,
    SandboxError,
    StorageError,
)
from runner.outcome import Cause, cancelled_by, cause_of, exit_status
from runner.permission import Mode
from runner.record import field, mutable_record, record
from runner.redaction import Redactor
from runner.session import events as ev
from runner.session.log import SessionLog
from runner.session.store import default_root

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.agent.hook import Hook
    from runner.agent.past import Past
    from runner.artifacts.facts import RunFold
    from runner.artifacts.patch import PatchInfo
    from runner.artifacts.publish import ArtifactStore
    from runner.artifacts.stream import StreamJson
    from runner.cancellation import Cancellation
    from runner.config.spec import RunSpec
    from runner.messages import JsonObject
    from runner.outcome import Outcome
    from runner.providers.base import Provider
    from runner.sandbox.base import Backend
    from runner.sandbox.executor import Executor
    from runner.session.structure import Structure
    from runner.workspace.isolation import Workspace

_KILLED = Cause(
    ErrorCode.INTERNAL,
    "the runner was killed or crashed before the run had ended",
    "go on with it: nightshift resume SESSION; or run the task again",
)
"""Why a run that was recovered has ended."""

FINISH_SECONDS = 60.0
"""Most time for the patch of a run that ended by itself."""

CANCELLED_FINISH_SECONDS = 3.0
"""The same after a signal: the whole end must stay under five seconds."""


@record
class RunOptions:
    """What the command line adds to the configuration.

    Attributes:
        artifacts: Where the artifacts go; None for the default place.
        soft_fail: Failure classes that exit 0.
        paranoid: Compare every request with its rebuild.
        observe: Gets session id and workspace, returns a view of the events as they are written.
        hooks: Further hooks of the agent.
        command: Options of the command line, noted in case the run is killed; None notes nothing.
    """

    artifacts: Path | None = None
    soft_fail: tuple[str, ...] = ()
    paranoid: bool = False
    observe: Callable[[str, str], StreamJson] | None = None
    hooks: Sequence[Hook] = ()
    command: JsonObject | None = None


@record
class FinishedRun:
    """A finished run: ``result.json``, the artifacts directory, the exit code of the process."""

    result: JsonObject
    directory: Path
    exit_code: int
    softened: bool


@record
class _Resumed:
    """What is different about a run that goes on: keys of the configuration that changed, and what was dropped."""

    changes: tuple[str, ...]
    dropped: str | None


@mutable_record
class _Run:
    """What the parts of one run share."""

    spec: RunSpec
    options: RunOptions
    environ: Mapping[str, str]
    cancellation: Cancellation
    session_id: str
    directory: Path
    state: Path
    workspace: Workspace
    redactor: Redactor
    secrets: Mapping[str, str]
    log: SessionLog
    fold: RunFold
    past: Past
    resumed: _Resumed | None = None
    ended: bool = False
    new_id: Callable[[], str] = lambda: str(uuid.uuid4())
    backend: Backend | None = None
    executor: Executor | None = None
    hidden: tuple[str, ...] = ()
    checked: tuple[int, PatchInfo | None] | None = None
    unsaved: bool = False
    causes: list[Cause] = field(default_factory=list)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def run_task(
    spec: RunSpec,
    options: RunOptions,
    *,
    environ: Mapping[str, str],
    cancellation: Cancellation,
) -> FinishedRun:
    """Run one task to its artifacts.

    Args:
        spec: The resolved configuration.
        options: What the command line adds.
        environ: Environment variables of the process.
        cancellation: Goes up on a signal.

    Raises:
        RunnerError: The run could not begin (nothing was created), or not even ``result.json`` could be
            written. Every other end is in the returned result.
    """
    from runner.agent.past import Past
    from runner.config.directories import check_artifacts_dir, prepare_artifacts_dir
    from runner.workspace.isolation import prepare_workspace

    begun = _begin(spec, environ)
    session_id = f"session-{uuid.uuid4()}"
    wanted, writable = spec.task.workspace, spec.profile.sandbox.writable
    directory = (options.artifacts or default_root(environ) / session_id).absolute()
    check_artifacts_dir(directory, wanted.path, writable)
    with _State(begun, options, environ) as state:
        state.note(session_id, directory, workspace=wanted.path, writable=writable)
        with prepare_workspace(
            wanted.path, state=state.path, isolation=wanted.isolation, base=wanted.base, dirty=wanted.dirty
        ) as workspace:
            header = {"id": session_id, "createdAt": _now_ms(), "cwd": workspace.path, "delegationDepth": 0}
            directory = prepare_artifacts_dir(directory, workspace=workspace.path, writable=writable)
            with SessionLog.create(directory, header=header, clock=_now_ms) as log:
                run = begun.run(
                    options,
                    environ=environ,
                    cancellation=cancellation,
                    session_id=session_id,
                    directory=directory,
                    state=state.path,
                    workspace=workspace,
                    log=log,
                    header=header,
                    past=Past(),
                )
                return state.finish(run, _run_in_log(run, begun.provider))


def resume_task(
    spec: RunSpec,
    directory: Path,
    options: RunOptions,
    *,
    environ: Mapping[str, str],
    cancellation: Cancellation,
    accept_changes: bool = False,
) -> FinishedRun:
    """Go on with the session of an artifacts directory whose run was killed, or ended without success.

    The session's own events are closed and kept, its used limits count, its workspace is taken up as it is, or
    made again from the recorded base and ``changes.patch``.

    Args:
        spec: The configuration, loaded anew; it must be the one that the session began with.
        directory: The artifacts directory.
        options: As for ``run_task``; ``artifacts`` is not looked at.
        environ: Environment variables of the process.
        cancellation: Goes up on a signal.
        accept_changes: Go on although the configuration changed; the log says in which keys.

    Raises:
        RunnerError: As for ``run_task``. CONFIG_INVALID: the configuration changed (named by key), the run
            completed, the workspace is not the session's. The log is as it was.
    """
    from runner.providers.registry import skip_answered
    from runner.session.repair import close
    from runner.workspace.records import read_record

    begun = _begin(spec, environ)
    header, past, structure, fold = _folds(directory, begun)
    session_id = header["id"]
    changes: list[str] = []

    def take(event: ev.Event) -> None:
        past.apply(event)
        structure.apply(event)
        fold.apply(event)

    def accept() -> None:
        _check_seed(header, past)
        changes.extend(_refuse_changes(begun, past, accept_changes=accept_changes))

    noted = read_record(default_root(environ), session_id)
    # An id may be anybody's: a note that is about another directory is none about this one, and stays.
    foreign = noted is not None and noted.artifacts != str(directory)
    old = None if noted is None or foreign else Path(noted.state)
    with _State(begun, options, environ, resuming=True, old=old) as state:
        wanted = spec.task.workspace
        log, dropped = SessionLog.reopen(directory, clock=_now_ms, fold=take, accept=accept)
        with log, _taken_up(spec, past, state.path, directory) as workspace:
            if not foreign:
                state.note(session_id, directory, workspace=wanted.path, writable=spec.profile.sandbox.writable)
            log.observers += [past.apply, fold.apply]
            log.append_many(close(structure, next_seq=log.next_seq, time=past.time))
            log.observers.clear()
            skip_answered(begun.provider, past.answered)
            run = begun.run(
                options,
                environ=environ,
                cancellation=cancellation,
                session_id=session_id,
                directory=directory,
                state=state.path,
                workspace=workspace,
                log=log,
                header=header,
                past=past,
            )
            run.fold, run.resumed = fold, _Resumed(tuple(changes), dropped)
            _remove_results(directory)
            return state.finish(run, _run_in_log(run, begun.provider))


def recover_session(
    spec: RunSpec | None, directory: Path, *, environ: Mapping[str, str], cancellation: Cancellation
) -> FinishedRun | None:
    """Close, seal and publish what a killed run left. Runs nothing of the task; what is left stays for ``resume``.

    Args:
        spec: The configuration of the run, loaded anew. Without it no patch is made and no output copied, since
            a session may not say what is read.
        directory: The artifacts directory.
        environ: Environment variables of the process.
        cancellation: Goes up on a signal.

    Returns:
        None when the session is whole already.

    Raises:
        RunnerError: The log cannot be read or is written by another process, or nothing can be written.
    """
    from runner.session.repair import close
    from runner.workspace.isolation import take_up_workspace
    from runner.workspace.records import read_record, remove_record
    from runner.workspace.removal import remove_tree

    begun = _begin(spec, environ) if spec is not None else None
    header, past, structure, fold = _folds(directory, begun)
    sealed = False

    def take(event: ev.Event) -> None:
        nonlocal sealed
        past.apply(event)
        structure.apply(event)
        fold.apply(event)
        sealed = isinstance(event, ev.LogSeal)

    log, _ = SessionLog.reopen(directory, clock=_now_ms, fold=take, accept=lambda: _check_seed(header, past))
    with log:
        over = past.ended is not None and sealed
        noted = read_record(default_root(environ), header["id"])
        if noted is not None and noted.artifacts != str(directory):
            noted = None
        if over and (directory / "result.json").is_file():
            if noted is not None and past.ended is not None and past.ended.code == ErrorCode.COMPLETED.name:
                remove_record(default_root(environ), noted.session)
                remove_tree(Path(noted.state))
            return None
        log.observers += [past.apply, fold.apply]
        log.append_many(close(structure, next_seq=log.next_seq, time=past.time))
        log.observers.clear()
        if not over:
            _remove_results(directory)
        state = None if noted is None else Path(noted.state)
        workspace = None
        if spec is not None and state is not None:
            workspace = take_up_workspace(state, spec.task.workspace.path, spec.task.workspace.isolation)
        if begun is None or workspace is None or state is None:
            log.observers.append(fold.apply)
            return _complete(log, directory, fold, past, None) if over else _publish_bare(log, directory, fold, past)
        run = begun.run(
            RunOptions(),
            environ=environ,
            cancellation=cancellation,
            session_id=header["id"],
            directory=directory,
            state=state,
            workspace=workspace,
            log=log,
            header=header,
            past=past,
        )
        run.fold, run.ended = fold, past.ended is not None
        if not run.ended:
            run.causes.append(_KILLED)
        log.observers.append(fold.apply)
        try:
            with _Collected(run.causes):
                run.executor = _build_executor(run)
            if not over:
                return _finish(run)
            patch = None
            with _Collected([]):  # it is there; what is in it is said if the workspace can be read
                patch = _make_patch(run, state / "recovered.patch")
            return _complete(log, directory, fold, past, patch)
        finally:
            if run.executor is not None:
                run.executor.close()
            begun.provider.close()


def _publish_bare(log: SessionLog, directory: Path, fold: RunFold, past: Past) -> FinishedRun:
    """Seal and publish a session of which only the log is known."""
    from runner.artifacts.publish import ArtifactStore

    store = ArtifactStore(directory, append=log.append, redactor=Redactor({}))
    outcome = fold.outcome.outcome(causes=[] if past.ended else [_KILLED])
    return _publish_log(log, directory, fold, store, outcome, None, ended=past.ended is not None)


def _complete(log: SessionLog, directory: Path, fold: RunFold, past: Past, patch: PatchInfo | None) -> FinishedRun:
    """The log is sealed behind its ``run/end``: what it names is there, only the ZIP and the result are missing."""
    from runner.artifacts.publish import ArtifactStore

    store = ArtifactStore(directory, append=log.append, redactor=Redactor({}))
    for path, written in past.written.items():
        store.add(path, name=written.name, logged=False)
    return _publish_log(log, directory, fold, store, fold.outcome.outcome(), patch, ended=True, sealed=True)


@record
class _Begun:
    """What a run needs before anything is made: its secrets known, its provider built."""

    spec: RunSpec
    secrets: Mapping[str, str]
    redactor: Redactor
    provider: Provider

    def run(self, options: RunOptions, *, header: JsonObject, **parts: Any) -> _Run:
        """The run, with what was made for it."""
        from runner.artifacts.facts import RunFold

        fold = RunFold(header, prices=self.spec.profile.model.prices)
        return _Run(spec=self.spec, options=options, redactor=self.redactor, secrets=self.secrets, fold=fold, **parts)


def _begin(spec: RunSpec, environ: Mapping[str, str]) -> _Begun:
    from runner.providers.registry import build_provider, load_secrets

    model = spec.profile.model
    secrets = load_secrets(model, environ=environ)
    redactor = Redactor(secrets)
    diagnostics.redact_with(lambda text: redactor.text(text)[0])
    provider = build_provider(model, environ=environ, script=spec.responses, recording=spec.recording, secrets=secrets)
    return _Begun(spec, secrets, redactor, provider)


class _State:
    """The private directory of a run, removed at its end unless it holds the only copy of the agent's work.

    While the run lives a record says where it is, so that somebody may go on if it is killed.
    """

    def __init__(
        self,
        begun: _Begun,
        options: RunOptions,
        environ: Mapping[str, str],
        *,
        resuming: bool = False,
        old: Path | None = None,
    ) -> None:
        from runner.workspace.leftovers import KEEP_SECONDS, PREFIX, Claim, remove_leftovers
        from runner.workspace.records import prune_records

        self._begun = begun
        self._options = options
        self._root = default_root(environ)
        self._resuming = resuming
        self._noted: str | None = None
        self._keep = old is not None and old.is_dir()
        self._lasting = False
        remove_leftovers(Path(tempfile.gettempdir()), older_than=KEEP_SECONDS)
        prune_records(self._root)
        self.path = old if old is not None and self._keep else Path(tempfile.mkdtemp(prefix=PREFIX))
        try:
            self._claim = Claim(self.path)
        except OSError as error:
            raise StorageError(f"the state directory {self.path} cannot be written: {error.strerror}") from error

    def note(self, session: str, directory: Path, *, workspace: str, writable: Sequence[str]) -> None:
        """Write the record, where no agent can write it."""
        from runner.workspace.records import RunRecord, write_record

        root = self._root.resolve()
        if self._options.command is None or any(root.is_relative_to(each) for each in (workspace, *writable)):
            return
        write_record(self._root, RunRecord(session, str(directory), str(self.path), self._options.command))
        self._noted = session

    def finish(self, run: _Run, finished: FinishedRun) -> FinishedRun:
        """The run has come to its own end."""
        self._remove_record()
        self._keep = self._lasting = run.unsaved and run.workspace.isolation != "in-place"
        if self._keep:
            # Without a patch this directory is the only place where the agent's work still is.
            run.workspace.close(keep=True)
            diagnostics.warning("no patch could be made, so the workspace is kept", path=run.workspace.path)
        return finished

    def _remove_record(self) -> None:
        from runner.workspace.records import remove_record

        if self._noted is not None:
            remove_record(self._root, self._noted)
            self._noted = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        from runner.workspace.removal import remove_tree

        self._begun.provider.close()
        if not self._keep:
            remove_tree(self.path)
        if not self._resuming:
            self._remove_record()
        self._claim.release(keep=self._lasting)


def _folds(directory: Path, begun: _Begun | None) -> tuple[JsonObject, Past, Structure, RunFold]:
    """The header of a session, and the folds that know of it what a run must."""
    from runner.agent.past import Past
    from runner.artifacts.facts import RunFold
    from runner.providers.prices import cost_of
    from runner.session.store import open_session
    from runner.session.structure import Structure

    prices = begun.spec.profile.model.prices if begun is not None else None
    header = open_session(str(directory)).header
    past = Past(
        cost_of=lambda usage: None if prices is None else cost_of(usage, prices), seed=header.get("seedLength") or 0
    )
    return header, past, Structure(), RunFold(header, prices=prices)


def _check_seed(header: JsonObject, past: Past) -> None:
    """Refuse a fork whose header is wrong about what was taken over.

    Raises:
        LogError: LOG_INVALID.
    """
    length = header.get("seedLength")
    if past.seed_end != (None if length is None else length - 1):
        raise LogError("the header's seedLength is not where the log has its session/end-seed")


def _refuse_changes(begun: _Begun, past: Past, *, accept_changes: bool) -> list[str]:
    """The keys of the configuration that changed since the session began.

    Raises:
        ConfigError: CONFIG_INVALID, there are some and they are not accepted; or there is nothing to go on with.
    """
    from runner.config.effective import differing_keys

    if past.start is None:
        raise ConfigError("the session has no run/start: it was killed before it began", hint="run the task again")
    if past.ended is not None and past.ended.code == ErrorCode.COMPLETED.name:
        raise ConfigError("the session completed, so there is nothing to go on with", hint="run a new task")
    changes = differing_keys(past.start.config, begun.redactor.value(begun.spec.config)[0])
    if past.start.trust != begun.spec.trust.value:
        changes.append("trust")
    kept = [key for key in changes if key in ("task.prompt", "task.turns")]
    if kept:
        raise ConfigError(
            f"{' and '.join(kept)} changed, and a session keeps its prompts", hint="put it back, or run a new task"
        )
    if changes and not accept_changes:
        raise ConfigError(
            "the configuration is not the one that the session began with",
            problems=[f"{key} changed" for key in changes],
            hint="put it back, or pass --accept-config-change, which the log will say",
        )
    return changes


def _taken_up(spec: RunSpec, past: Past, state: Path, directory: Path) -> Workspace:
    """The workspace of a session that goes on.

    Raises:
        ConfigError: CONFIG_INVALID, it cannot be had.
    """
    from runner.artifacts.patch import PATCH_NAME
    from runner.workspace.isolation import restore_workspace, take_up_workspace
    from runner.workspace.snapshot import Base

    wanted = spec.task.workspace
    found = take_up_workspace(state, wanted.path, wanted.isolation)
    if found is not None:
        return found
    assert past.start is not None
    written = past.written.get(PATCH_NAME)
    patch = None if written is None or not written.bytes else _own_patch(directory / PATCH_NAME, written, state)
    return restore_workspace(
        wanted.path, state=state, isolation=wanted.isolation, base=Base(**past.start.base), patch=patch
    )


def _own_patch(path: Path, written: ev.ArtifactWritten, state: Path) -> Path:
    """A copy of the patch that the session wrote, in the state directory; the folder it lies in may be anybody's.

    Raises:
        ConfigError: CONFIG_INVALID, it is no regular file, or not as it was written.
    """
    import hashlib
    import stat

    copy, digest, left = state / "resumed.patch", hashlib.sha256(), written.bytes
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as source, copy.open("wb") as target:
            status = os.fstat(descriptor)
            same = stat.S_ISREG(status.st_mode) and status.st_size == written.bytes
            while same and left > 0 and (data := source.read(min(left, 1 << 20))):
                digest.update(data)
                target.write(data)
                left -= len(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", hint="bring the whole folder") from error
    if not same or digest.hexdigest() != written.sha256:
        raise ConfigError(f"{path} is not as the session wrote it", hint="bring the folder as it was published")
    return copy


def _remove_results(directory: Path) -> None:
    """Take away what an earlier end left: the run is on its way again."""
    from runner.workspace.removal import remove_tree

    for name in ("result.json", "session.zip", "summary.md", "usage.json", "changes.patch"):
        (directory / name).unlink(missing_ok=True)
    remove_tree(directory / "files")


def _run_in_log(run: _Run, provider: Provider) -> FinishedRun:
    """Everything that is logged."""
    diagnostics.bind(session=run.session_id)
    run.log.observers.append(run.fold.apply)
    stream = None
    if run.options.observe is not None:
        stream = run.options.observe(run.session_id, run.workspace.path)
        run.log.observers.append(stream.observe)
    diagnostics.info("run started", artifacts=str(run.directory), workspace=run.workspace.path)
    try:
        with _Collected(run.causes):
            _work(run, provider)
        diagnostics.bind(turn=None, step=None)
        finished = _finish(run)
        diagnostics.info("run ended", code=finished.result["code"], exit_code=finished.exit_code)
        return finished
    finally:
        if run.executor is not None:
            run.executor.close()


class _Collected:
    """Turns what a part of the run raises into a cause, so that the rest of the run still happens."""

    def __init__(self, causes: list[Cause]) -> None:
        self._causes = causes

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        if isinstance(error, Exception):
            if not isinstance(error, RunnerError) or error.code is ErrorCode.INTERNAL:
                # Our bug. It is said as such, and the artifacts are complete nevertheless.
                diagnostics.emit("error", "internal error", error=repr(error), where=_where(error))
            if not isinstance(error, RunnerError):
                error = InternalError(f"{type(error).__name__}: {error}")
            self._causes.append(cause_of(error))
        return error is None or isinstance(error, Exception)


def _where(error: BaseException) -> str:
    """The innermost line of a traceback, as ``file:line``."""
    import traceback

    frames = traceback.extract_tb(error.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else "unknown"


# --- the work ------------------------------------------------------------------------------------


def _work(run: _Run, provider: Provider) -> None:
    """Probe, open the session, let the agent work with the checks behind each last turn."""
    from runner.assembly import build_agent
    from runner.hooks.checks import ChecksHook

    try:
        run.executor = _build_executor(run)
    except RunnerError as error:
        _open_session(run, tools=[])
        if isinstance(error, SandboxError) and run.cancellation.cancelled:
            return  # a probe that was cut short says nothing about the sandbox
        raise
    checks = ChecksHook(
        run.spec.task.checks,
        executor=run.executor,
        mode=run.spec.profile.mode,
        cancellation=run.cancellation,
        append=run.log.append,
        redact=lambda text: run.redactor.text(text)[0],
        new_id=run.new_id,
        before=lambda: _patch_before_checks(run),
        attempts=run.past.failed_checks,
    )
    notice = None if run.resumed is None else _notice(run)
    agent = build_agent(
        run.spec,
        log=run.log,
        directory=run.directory,
        state=run.state,
        executor=run.executor,
        provider=provider,
        redactor=run.redactor,
        cancellation=run.cancellation,
        clock=time.monotonic,
        new_id=run.new_id,
        hooks=_further_hooks(run, checks),
        paranoid=run.options.paranoid,
        open_session=lambda tools: _open_session(run, tools=tools),
        past=run.past,
        notice=notice,
    )
    if not gc.isenabled():  # since the process began: nothing of what was imported is ever garbage
        gc.freeze()
        gc.enable()
    with _WallClock(agent.budget.wall_left(), run.cancellation):
        agent.loop.run()


def _further_hooks(run: _Run, checks: Hook) -> list[Hook]:
    """What watches the agent beside the built-in hooks; a run that plays a recording is compared with it."""
    hooks = [checks, *run.options.hooks]
    if run.spec.recording is None:
        return hooks
    if run.resumed is not None:
        diagnostics.warning("a replay that is resumed goes on with the recorded answers, but is not compared any more")
        return hooks
    from runner.hooks.replay import with_check

    return with_check(hooks, run.spec.recording, run.spec.profile.model.replay_normalise)


def _build_executor(run: _Run) -> Executor:
    """Choose the backend by probing and build what runs commands.

    Raises:
        SandboxError: No backend works here; nothing was run.
    """
    from runner.sandbox.environment import child_environment, hidden_paths
    from runner.sandbox.executor import Executor, session_policy
    from runner.sandbox.select import select_backend

    profile, spec = run.spec.profile, run.spec.profile.sandbox
    keys = [path for path in (profile.model.api_key_file,) if path is not None]
    run.hidden = (
        *hidden_paths(run.environ, hidden=[*spec.hidden, str(run.directory), *keys]),
        *_other_sessions(run),
    )
    shared: dict[str, Any] = {
        "mode": profile.mode,
        "workspace": run.workspace.path,
        "state": str(run.state),
        "hidden": run.hidden,
        "environment": child_environment(
            run.environ, spec, home=str(run.state / "home"), tmp=str(run.state / "tmp"), secrets=run.secrets
        ),
        "readable": run.workspace.readable,
        "protected": (*run.workspace.counterparts(run.spec.defining_files), *run.workspace.git_links),
    }
    tightens = any(rule.mode is not None for rule in profile.policy.rules)
    if profile.mode is not Mode.DANGER_FULL_ACCESS or spec.require or tightens:
        policy = session_policy(spec, **shared)
        run.backend = select_backend(spec, policy, cancellation=run.cancellation, environ=run.environ)
    return Executor(run.backend, spec, **shared)


def _other_sessions(run: _Run) -> tuple[str, ...]:
    """The folder in which sessions lie by default, to be hidden; it may come into being during the run."""
    root = default_root(run.environ).resolve()
    roots = (run.workspace.path, *run.spec.profile.sandbox.writable)
    # Somebody who works in that very folder wants it seen.
    return () if any(root == Path(path).resolve() for path in roots) else (str(root),)


def _open_session(run: _Run, *, tools: Sequence[Any]) -> None:
    """The first events of a fresh log, or of one that goes on."""
    from runner.config.effective import digest

    profile, executor = run.spec.profile, run.executor
    if run.resumed is not None:
        changes = list(run.resumed.changes)
        if tools and run.past.start is not None and digest(list(tools)) != run.past.start.tools_digest:
            changes.append("tools")
        run.log.append(ev.RunResume(previous_seal=run.past.seal, changes=changes))
        if any(key.startswith("profile.permission_mode") for key in changes):
            run.log.append_many(
                [ev.PermissionPreset(preset=profile.mode.value), ev.SandboxModeEvent(mode=profile.mode.value)]
            )
        return
    sandbox = {
        "backend": executor.backend_name if executor else None,
        "mode": profile.mode.value,
        "network": "on" if profile.sandbox.network else "off",
        "notEnforced": list(executor.not_enforced(profile.mode)) if executor else [],
    }
    run.log.append_many(
        [
            ev.RunStart(
                task_digest=run.spec.task_digest,
                profile_digest=run.spec.profile_digest,
                policy_digest=run.spec.policy_digest,
                tools_digest=digest(list(tools)),
                versions={
                    "nightshift": __version__,
                    "python": ".".join(map(str, sys.version_info[:3])),
                    "os": f"{os.uname().sysname} {os.uname().release}",
                },
                base=run.workspace.base.as_json(),
                sandbox=sandbox,
                trust=run.spec.trust.value,
                config=run.redactor.value(run.spec.config)[0],
            ),
            ev.PermissionPreset(preset=profile.mode.value),
            ev.SandboxModeEvent(mode=profile.mode.value),
            ev.ApprovalPolicy(policy="declared"),
        ]
    )


def _notice(run: _Run) -> str:
    """What an agent that goes on is told of the interruption and of its workspace."""
    ended = run.past.ended
    if run.past.forked:
        what = "This session was taken over from another one"
    elif ended is None:
        what = "The run was killed"
    else:
        what = f"The run had ended ({ended.code}: {(ended.error or {}).get('message', '')})"
    return (
        f"{what} and goes on now. {_workspace_since(run)} Look at what is there before you go on with the task, "
        "and do not repeat blindly what may have been done."
    )


def _workspace_since(run: _Run) -> str:
    """Whether the workspace is as the session left it, in words."""
    import hashlib

    from runner.artifacts.patch import PATCH_NAME

    before = run.past.written.get(PATCH_NAME)
    target = run.state / "resumed.patch"
    now = _make_patch(run, target)
    if before is None and now is None:
        return "The workspace is what the session began with: nothing that earlier calls may have written is in it."
    if before is None:
        return "What its last step did to the workspace is not known, nor whether others changed it since."
    if hashlib.sha256(target.read_bytes()).hexdigest() == before.sha256:
        return "The workspace is as it was then."
    return "The workspace was changed since by somebody else."


class _WallClock:
    """Raises the cancellation when the wall limit is over."""

    def __init__(self, seconds: float | None, cancellation: Cancellation) -> None:
        import threading

        self._timer = None
        if seconds is not None:
            self._timer = threading.Timer(seconds, cancellation.cancel, ["wall"])
            self._timer.daemon = True

    def __enter__(self) -> None:
        if self._timer is not None:
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        if self._timer is not None:
            self._timer.cancel()


# --- the end -------------------------------------------------------------------------------------


def _finish(run: _Run) -> FinishedRun:
    """Patch, outputs, outcome, seal, reports, ZIP, result: in this order, whatever happened before."""
    from runner.artifacts.publish import ArtifactStore

    store = ArtifactStore(run.directory, append=run.log.append, redactor=run.redactor)
    patch: PatchInfo | None = None
    missing: list[str] = []
    run.unsaved = True
    with _Collected(run.causes):
        run.log.barrier()
    with _Collected(run.causes):
        if run.executor is not None:
            run.executor.stop_background()
    with _Collected(run.causes):
        patch = _write_patch(run, store)
        run.unsaved = False
    with _Collected(run.causes):
        missing = [str(output) for output in store.copy_outputs(run.workspace.path, run.spec.task.files)]
    reason = run.cancellation.reason
    if reason in SIGNAL_EXIT_CODES:
        run.causes.append(cancelled_by(reason))
    outcome = run.fold.outcome.outcome(
        missing_outputs=missing,
        patch_missing=run.spec.task.patch_required and patch is None and not run.unsaved,
        causes=run.causes,
        checks=[check.name for check in run.spec.task.checks],
    )
    failed: list[Cause] = []
    with _Collected(failed):
        return _publish(run, store, outcome, patch)
    return _publish_without_log(run, store, failed[0], patch)


def _patch_before_checks(run: _Run) -> None:
    """Make the patch before checks run: what they write is not the agent's."""
    with _Collected([]):  # a failure comes again at the end, where it counts
        run.checked = (run.fold.outcome.steps, _make_patch(run, run.state / "checked.patch"))


def _write_patch(run: _Run, store: ArtifactStore) -> PatchInfo | None:
    """Write ``changes.patch``: the one made before the checks, if the agent did nothing since."""
    from runner.artifacts.patch import PATCH_NAME

    target = run.directory / PATCH_NAME
    if run.checked is not None and run.checked[0] == run.fold.outcome.steps:
        patch = run.checked[1]
        shutil.move(run.state / "checked.patch", target)
    else:
        patch = _make_patch(run, target)
    store.add_patch()
    return patch


def _make_patch(run: _Run, target: Path) -> PatchInfo | None:
    """Write a patch, confined when an agent may have written to the tree."""
    from runner.artifacts.patch import make_patch
    from runner.cancellation import Cancellation
    from runner.workspace import plain_git
    from runner.workspace.confined import confined_git

    cancelled = run.cancellation.reason in SIGNAL_EXIT_CODES
    ending = Cancellation()  # a fresh one: a cancelled run still gets its patch
    try:
        run_git = plain_git
        if run.backend is not None:
            run_git = confined_git(
                run.backend,
                run.spec.profile.sandbox,
                run.workspace,
                state=run.state,
                cancellation=ending,
                hidden=run.hidden,
                timeout=CANCELLED_FINISH_SECONDS if cancelled else FINISH_SECONDS,
            )
        return make_patch(run.workspace.snapshot, target, run_git=run_git)
    finally:
        ending.close()


def _publish(run: _Run, store: ArtifactStore, outcome: Outcome, patch: PatchInfo | None) -> FinishedRun:
    soft_fail = run.options.soft_fail
    return _publish_log(run.log, run.directory, run.fold, store, outcome, patch, soft_fail=soft_fail, ended=run.ended)


def _publish_log(
    log: SessionLog,
    directory: Path,
    fold: RunFold,
    store: ArtifactStore,
    outcome: Outcome,
    patch: PatchInfo | None,
    *,
    soft_fail: Sequence[str] = (),
    ended: bool = False,
    sealed: bool = False,
) -> FinishedRun:
    """Write ``run/end`` and, without ``sealed``, reports and seal, unless the log has them; the ZIP and the result."""
    from runner.artifacts.publish import publish
    from runner.session.export import export_zip

    if not ended:
        log.append(outcome.run_end())
    log.barrier()
    exit_code, softened = exit_status(outcome, soft_fail)

    def seal() -> str:
        if not sealed:
            log.seal()
        log.close()
        return log.digest

    result = publish(
        store,
        fold,
        outcome,
        seal=seal,
        export=lambda target: export_zip(directory, target),
        patch=patch,
        soft_failed=softened,
        reports=not sealed,
    )
    return FinishedRun(result, directory, exit_code, softened)


def _publish_without_log(run: _Run, store: ArtifactStore, cause: Cause, patch: PatchInfo | None) -> FinishedRun:
    """The log or a report cannot be written: keep what can be kept, and say so in the result.

    Raises:
        RunnerError: Not even ``result.json`` can be written; with the code of ``cause``.
    """
    from runner.artifacts.result import build_result, write_result

    run.causes.append(cause)
    outcome = run.fold.outcome.outcome(causes=run.causes, checks=[check.name for check in run.spec.task.checks])
    result = build_result(
        outcome,
        run.fold.usage.usage(),
        run.fold.facts,
        soft_failed=False,
        patch=patch,
        log_digest=run.log.digest,
        artifacts=[artifact.as_json() for artifact in store.artifacts],
    )
    try:
        write_result(run.directory, result)
    except StorageError as error:
        raise RunnerError(cause.message, code=cause.code, hint=cause.hint) from error
    return FinishedRun(result, run.directory, outcome.exit_code, softened=False)
