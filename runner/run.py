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
    ErrorCode,
    InternalError,
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
    from runner.sandbox.base import Backend, SandboxSpec
    from runner.sandbox.executor import Executor
    from runner.sandbox.select import Attempt
    from runner.workspace.isolation import Workspace

FINISH_SECONDS = 60.0
"""Most time for the patch of a run that ended by itself."""

_DOOR_SECONDS = 30.0

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
class Resumed:
    """What is different about a run that goes on: keys of the configuration that changed, and what was dropped."""

    changes: tuple[str, ...]
    dropped: str | None


@mutable_record
class Run:
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
    resumed: Resumed | None = None
    ended: bool = False
    new_id: Callable[[], str] = lambda: str(uuid.uuid4())
    backend: Backend | None = None
    tried: list[Attempt] = field(default_factory=list)
    executor: Executor | None = None
    hidden: tuple[str, ...] = ()
    checked: tuple[int, PatchInfo | None] | None = None
    unsaved: bool = False
    causes: list[Cause] = field(default_factory=list)


def now_ms() -> int:
    """Epoch milliseconds."""
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

    begun = begin(spec, environ)
    session_id = f"session-{uuid.uuid4()}"
    wanted, writable = spec.task.workspace, spec.profile.sandbox.writable
    directory = (options.artifacts or default_root(environ) / session_id).absolute()
    check_artifacts_dir(directory, wanted.path, writable)
    with State(begun, options, environ) as state:
        state.note(session_id, directory, workspace=wanted.path, writable=writable)
        with prepare_workspace(
            wanted.path, state=state.path, isolation=wanted.isolation, base=wanted.base, dirty=wanted.dirty
        ) as workspace:
            header = {"id": session_id, "createdAt": now_ms(), "cwd": workspace.path, "delegationDepth": 0}
            directory = prepare_artifacts_dir(directory, workspace=workspace.path, writable=writable)
            with SessionLog.create(directory, header=header, clock=now_ms) as log:
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
                return state.finish(run, run_in_log(run, begun.provider))


@record
class Begun:
    """What a run needs before anything is made: its secrets known, its provider built."""

    spec: RunSpec
    secrets: Mapping[str, str]
    redactor: Redactor
    provider: Provider

    def run(self, options: RunOptions, *, header: JsonObject, **parts: Any) -> Run:
        """The run, with what was made for it."""
        from runner.artifacts.facts import RunFold

        fold = RunFold(header, prices=self.spec.profile.model.prices)
        return Run(spec=self.spec, options=options, redactor=self.redactor, secrets=self.secrets, fold=fold, **parts)


def begin(spec: RunSpec, environ: Mapping[str, str]) -> Begun:
    """Read the secrets and build the provider; makes nothing on disk.

    Raises:
        ConfigError: CONFIG_INVALID, a key is missing or the provider cannot be built.
    """
    from runner.providers.registry import build_provider, load_secrets

    model = spec.profile.model
    secrets = load_secrets(model, environ=environ)
    redactor = Redactor(secrets)
    diagnostics.redact_with(lambda text: redactor.text(text)[0])
    provider = build_provider(model, environ=environ, script=spec.responses, recording=spec.recording, secrets=secrets)
    return Begun(spec, secrets, redactor, provider)


class State:
    """The private directory of a run, removed at its end unless it holds the only copy of the agent's work.

    While the run lives a record says where it is, so that somebody may go on if it is killed.
    """

    def __init__(
        self,
        begun: Begun,
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

    def finish(self, run: Run, finished: FinishedRun) -> FinishedRun:
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


def run_in_log(run: Run, provider: Provider) -> FinishedRun:
    """Everything that is logged."""
    diagnostics.bind(session=run.session_id)
    run.log.observers.append(run.fold.apply)
    stream = None
    if run.options.observe is not None:
        stream = run.options.observe(run.session_id, run.workspace.path)
        run.log.observers.append(stream.observe)
    diagnostics.info("run started", artifacts=str(run.directory), workspace=run.workspace.path)
    try:
        with Collected(run.causes):
            _work(run, provider)
        diagnostics.bind(turn=None, step=None)
        finished = finish_run(run)
        diagnostics.info("run ended", code=finished.result["code"], exit_code=finished.exit_code)
        return finished
    finally:
        if run.executor is not None:
            run.executor.close()


class Collected:
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


def _work(run: Run, provider: Provider) -> None:
    """Probe, open the session, let the agent work with the checks behind each last turn."""
    from runner.assembly import build_agent
    from runner.hooks.checks import ChecksHook

    try:
        run.executor = build_executor(run)
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


def _further_hooks(run: Run, checks: Hook) -> list[Hook]:
    """What watches the agent beside the built-in hooks; a run that plays a recording is compared with it."""
    hooks = [checks, *run.options.hooks]
    if run.spec.recording is None:
        return hooks
    if run.resumed is not None:
        diagnostics.warning("a replay that is resumed goes on with the recorded answers, but is not compared any more")
        return hooks
    from runner.hooks.replay import with_check

    return with_check(hooks, run.spec.recording, run.spec.profile.model.replay_normalise)


def build_executor(run: Run) -> Executor:
    """Choose the backend by probing and build what runs commands.

    Raises:
        SandboxError: No backend works here; nothing was run.
    """
    from runner.sandbox.environment import child_environment, hidden_paths
    from runner.sandbox.executor import Executor, session_policy
    from runner.sandbox.forkserver import ForkServer
    from runner.sandbox.select import select_backend

    profile, spec = run.spec.profile, run.spec.profile.sandbox
    keys = [path for path in (profile.model.api_key_file,) if path is not None]
    run.hidden = (
        *hidden_paths(run.environ, hidden=[*spec.hidden, str(run.directory), *keys]),
        *_other_sessions(run),
    )
    policy = session_policy(
        spec,
        mode=profile.mode,
        workspace=run.workspace.path,
        state=str(run.state),
        hidden=run.hidden,
        environment=child_environment(
            run.environ, spec, home=str(run.state / "home"), tmp=str(run.state / "tmp"), secrets=run.secrets
        ),
        readable=run.workspace.readable,
        protected=(*run.workspace.counterparts(run.spec.defining_files), *run.workspace.git_links),
    )
    tightens = any(rule.mode is not None for rule in profile.policy.rules)
    if profile.mode is not Mode.DANGER_FULL_ACCESS or spec.require or tightens:
        run.backend = select_backend(spec, policy, cancellation=run.cancellation, environ=run.environ, tried=run.tried)
    if not spec.egress:
        return Executor(run.backend, policy, fork_server=ForkServer())
    from runner.sandbox.egress import Proxy

    def decided(host: str, port: int, decision: str) -> None:
        run.log.append(ev.SandboxEgress(host=host, port=port, decision=decision))

    executor = Executor(run.backend, policy, fork_server=ForkServer(), proxy=Proxy(spec.egress, decided=decided))
    try:  # the probe knows nothing of the proxy's door
        executor.run(["/bin/sh", "-c", ":"], mode=profile.mode, timeout=_DOOR_SECONDS, cancellation=run.cancellation)
    except BaseException:
        executor.close()
        raise
    return executor


def _other_sessions(run: Run) -> tuple[str, ...]:
    """The folder in which sessions lie by default, to be hidden; it may come into being during the run."""
    root = default_root(run.environ).resolve()
    roots = (run.workspace.path, *run.spec.profile.sandbox.writable)
    # Somebody who works in that very folder wants it seen.
    return () if any(root == Path(path).resolve() for path in roots) else (str(root),)


def _network_of(spec: SandboxSpec) -> str | JsonObject:
    """What of the network commands reach, as in a profile."""
    if spec.egress:
        return {"allow": [str(each) for each in spec.egress]}
    return "on" if spec.network else "off"


def resume_event(fold: RunFold, config: JsonObject, seal: str | None, changes: list[str]) -> ev.RunResume:
    """The ``run/resume`` of a session; ``config`` stands in it if it is not the one in force in what ``fold`` saw."""
    fresh = None if config == fold.facts.config else config
    return ev.RunResume(previous_seal=seal, changes=changes, config=fresh)


def _open_session(run: Run, *, tools: Sequence[Any]) -> None:
    """The first events of a fresh log, or of one that goes on."""
    from runner.config.effective import digest

    profile, executor = run.spec.profile, run.executor
    if run.resumed is not None:
        changes = list(run.resumed.changes)
        if tools and run.past.start is not None and digest(list(tools)) != run.past.start.tools_digest:
            changes.append("tools")
        run.log.append(resume_event(run.fold, run.redactor.value(run.spec.config)[0], run.past.seal, changes))
        if any(key.startswith("profile.permission_mode") for key in changes):
            run.log.append_many(
                [ev.PermissionPreset(preset=profile.mode.value), ev.SandboxModeEvent(mode=profile.mode.value)]
            )
        return
    sandbox = {
        "backend": executor.backend_name if executor else None,
        "mode": profile.mode.value,
        "network": _network_of(profile.sandbox),
        "notEnforced": list(executor.not_enforced(profile.mode)) if executor else [],
        "probes": [{"backend": name, "ok": reason is None, "reason": reason} for name, reason in run.tried],
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


def _notice(run: Run) -> str:
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


def _workspace_since(run: Run) -> str:
    """Whether the workspace is as the session left it, in words."""
    import hashlib

    from runner.artifacts.patch import PATCH_NAME

    before = run.past.written.get(PATCH_NAME)
    target = run.state / "resumed.patch"
    now = make_run_patch(run, target)
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


def finish_run(run: Run) -> FinishedRun:
    """Patch, outputs, outcome, seal, reports, ZIP, result: in this order, whatever happened before."""
    from runner.artifacts.publish import ArtifactStore

    store = ArtifactStore(run.directory, append=run.log.append, redactor=run.redactor)
    patch: PatchInfo | None = None
    missing: list[str] = []
    run.unsaved = True
    with Collected(run.causes):
        run.log.barrier()
    with Collected(run.causes):
        if run.executor is not None:
            run.executor.stop_background()
    with Collected(run.causes):
        patch = _write_patch(run, store)
        run.unsaved = False
    with Collected(run.causes):
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
    with Collected(failed):
        return _publish(run, store, outcome, patch)
    return _publish_without_log(run, store, failed[0], patch)


def _patch_before_checks(run: Run) -> None:
    """Make the patch before checks run: what they write is not the agent's."""
    with Collected([]):  # a failure comes again at the end, where it counts
        run.checked = (run.fold.outcome.steps, make_run_patch(run, run.state / "checked.patch"))


def _write_patch(run: Run, store: ArtifactStore) -> PatchInfo | None:
    """Write ``changes.patch``: the one made before the checks, if the agent did nothing since."""
    from runner.artifacts.patch import PATCH_NAME

    target = run.directory / PATCH_NAME
    if run.checked is not None and run.checked[0] == run.fold.outcome.steps:
        patch = run.checked[1]
        shutil.move(run.state / "checked.patch", target)
    else:
        patch = make_run_patch(run, target)
    store.add_patch()
    return patch


def make_run_patch(run: Run, target: Path) -> PatchInfo | None:
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


def _publish(run: Run, store: ArtifactStore, outcome: Outcome, patch: PatchInfo | None) -> FinishedRun:
    soft_fail = run.options.soft_fail
    return publish_log(run.log, run.directory, run.fold, store, outcome, patch, soft_fail=soft_fail, ended=run.ended)


def publish_log(
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


def _publish_without_log(run: Run, store: ArtifactStore, cause: Cause, patch: PatchInfo | None) -> FinishedRun:
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
