"""A session that goes on: resumed behind its closed events, compacted, or closed and published for good.

A session is data. What it says of ids, seals, base and patch is checked before anything is written, and what may be
run, read and written comes from the configuration that was loaded anew. Writes ``run/resume`` through ``runner.run``,
and the closing events of ``runner.session.repair``. The history is taken over as it is, so the prefix stays cached
unless a compaction is asked for.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from runner.errors import ConfigError, ErrorCode, LogError, RunnerError
from runner.outcome import Cause, cause_of_end
from runner.record import record
from runner.redaction import Redactor
from runner.run import (
    Begun,
    Collected,
    FinishedRun,
    Resumed,
    RunOptions,
    State,
    begin,
    build_executor,
    finish_run,
    make_run_patch,
    now_ms,
    publish_log,
    resume_event,
    run_in_log,
)
from runner.session import events as ev
from runner.session.log import SessionLog
from runner.session.store import default_root, open_session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.agent.past import Past
    from runner.artifacts.facts import RunFold
    from runner.artifacts.patch import PatchInfo
    from runner.cancellation import Cancellation
    from runner.compaction.summary import Compacted
    from runner.config.spec import RunSpec
    from runner.messages import JsonObject
    from runner.session.structure import Structure
    from runner.workspace.isolation import Workspace

_KILLED = Cause(
    ErrorCode.INTERNAL,
    "the runner was killed or crashed before the run had ended",
    "go on with it: nightshift resume SESSION; or run the task again",
)
"""Why a run that was recovered has ended."""


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

    begun = begin(spec, environ)
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
    with State(begun, options, environ, resuming=True, old=old) as state:
        wanted = spec.task.workspace
        log, dropped = SessionLog.reopen(directory, clock=now_ms, fold=take, accept=accept)
        with log, _taken_up(spec, past, state.path, directory) as workspace:
            try:
                if not foreign:
                    state.note(session_id, directory, workspace=wanted.path, writable=spec.profile.sandbox.writable)
                log.observers += [past.apply, fold.apply]
                log.append_many(close(structure, next_seq=log.next_seq, time=past.time))
                log.observers.clear()
            except BaseException:
                workspace.close(keep=True)  # it may hold the only copy of the agent's work
                raise
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
            run.fold, run.resumed = fold, Resumed(tuple(changes), dropped)
            _remove_results(directory)
            return state.finish(run, run_in_log(run, begun.provider))


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

    header = open_session(str(directory)).header
    noted = read_record(default_root(environ), header["id"])
    if noted is not None and noted.artifacts != str(directory):
        noted = None
    end, sealed = last_end(directory)
    if end is not None and sealed and (directory / "result.json").is_file():
        # Looked at only: taken up again it could be packed in other bytes than those the result names.
        if noted is not None and end.code == ErrorCode.COMPLETED.name:
            remove_record(default_root(environ), noted.session)
            remove_tree(Path(noted.state))
        return None
    begun = begin(spec, environ) if spec is not None else None
    header, past, structure, fold = _folds(directory, begun)

    def take(event: ev.Event) -> None:
        past.apply(event)
        structure.apply(event)
        fold.apply(event)

    def last_time() -> int:
        return past.time or int(header["createdAt"])  # how long the session lay there is no time of the run

    log, _ = SessionLog.reopen(directory, clock=last_time, fold=take, accept=lambda: _check_seed(header, past))
    with log:
        over = past.ended is not None and sealed
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
            with Collected(run.causes):
                run.executor = build_executor(run)
            if not over:
                return finish_run(run)
            patch = None
            with Collected([]):  # it is there; what is in it is said if the workspace can be read
                patch = make_run_patch(run, state / "recovered.patch")
            return _complete(log, directory, fold, past, patch)
        finally:
            if run.executor is not None:
                run.executor.close()
            begun.provider.close()


@record
class CompactedSession:
    """What ``session compact`` did: messages folded into a summary (0: nothing to compact), occupancy and window."""

    session: str
    directory: Path
    folded: int
    before: int
    after: int
    window: int


def compact_session(
    spec: RunSpec,
    directory: Path,
    *,
    environ: Mapping[str, str],
    cancellation: Cancellation,
) -> CompactedSession:
    """Replace the older part of a session's history by a summary. Runs nothing of the task.

    A session whose run was killed stays as open as it was. One whose run ended is published anew with the same
    outcome. Where there is nothing to compact, nothing is written.

    Args:
        spec: The configuration, loaded anew; it must be the one that the session began with.
        directory: The artifacts directory.
        environ: Environment variables of the process.
        cancellation: Goes up on a signal.

    Raises:
        RunnerError: As for ``resume_task``; CONTEXT_EXHAUSTED, no summary could be had; or a limit is reached. The
            session can still be resumed.
    """
    from runner.agent.settings import compaction_for
    from runner.compaction.summary import older_part
    from runner.providers.registry import skip_answered
    from runner.session.repair import close

    begun = begin(spec, environ)
    profile, window = spec.profile, spec.profile.model.context_window
    keep = compaction_for(profile.compaction, profile.compaction_models, profile.model.model).keep
    header, past, structure, fold = _folds(directory, begun)

    def take(event: ev.Event) -> None:
        past.apply(event)
        structure.apply(event)
        fold.apply(event)

    def accept() -> None:
        _check_seed(header, past)
        _refuse_changes(begun, past, accept_changes=False)
        if past.header is None or older_part(past.projection.nodes, keep_tokens=int(keep * window)) is None:
            raise _NothingToCompactError

    try:
        log, _ = SessionLog.reopen(directory, clock=now_ms, fold=take, accept=accept)
    except _NothingToCompactError:
        held = 0 if past.header is None else past.occupancy.of(past.header, past.projection)
        return CompactedSession(header["id"], directory, 0, held, held, window)
    with log:
        log.observers += [past.apply, fold.apply]
        log.append_many(close(structure, next_seq=log.next_seq, time=past.time))
        ended, written = past.ended, dict(past.written)
        log.append(resume_event(fold, begun.redactor.value(begun.spec.config)[0], past.seal, []))
        log.observers.remove(past.apply)  # from here on the loop keeps the history
        skip_answered(begun.provider, past.answered)
        try:
            done = _compact(begun, directory, log, past, cancellation)
        finally:
            begun.provider.close()
            if ended is None:
                log.seal()
            else:
                _publish_again(begun, directory, log, fold, ended, written)
    if done.failure is not None:
        raise RunnerError(
            f"no summary could be made: {done.failure}",
            code=ErrorCode.CONTEXT_EXHAUSTED,
            hint="the session is as it was, and can be resumed",
        )
    return CompactedSession(header["id"], directory, done.folded, done.before, done.after, window)


class _NothingToCompactError(Exception):
    """Leaves a log as it is."""


def _compact(begun: Begun, directory: Path, log: SessionLog, past: Past, cancellation: Cancellation) -> Compacted:
    import time
    import uuid

    from runner.assembly import build_compactor

    assert past.header is not None
    return build_compactor(
        begun.spec,
        log=log,
        directory=directory,
        provider=begun.provider,
        redactor=begun.redactor,
        cancellation=cancellation,
        clock=time.monotonic,
        new_id=lambda: str(uuid.uuid4()),
        past=past,
        header=past.header,
    )()


def _publish_again(
    begun: Begun,
    directory: Path,
    log: SessionLog,
    fold: RunFold,
    ended: ev.RunEnd,
    written: Mapping[str, ev.ArtifactWritten],
) -> None:
    """End a session as it had ended before, with the artifacts it had; its reports are made anew."""
    from runner.artifacts.publish import SUMMARY_NAME, USAGE_NAME, ArtifactStore

    patch = _patch_of(directory)
    store = ArtifactStore(directory, append=log.append, redactor=begun.redactor)
    cause = cause_of_end(ended)
    for path, each in written.items():
        if path not in (USAGE_NAME, SUMMARY_NAME):
            store.add(path, name=each.name)
    outcome = fold.outcome.outcome(causes=[] if cause is None else [cause])
    publish_log(log, directory, fold, store, outcome, patch)


def _patch_of(directory: Path) -> PatchInfo | None:
    """What ``result.json`` says of the patch; it is shown, nothing is done on its word."""
    import json

    from runner.artifacts.patch import PatchInfo

    try:
        said = json.loads((directory / "result.json").read_bytes())["patch"]
        files, insertions, deletions = (int(said[key]) for key in ("files", "insertions", "deletions"))
        return PatchInfo(files=files, insertions=insertions, deletions=deletions, tree=str(said["tree"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def last_end(directory: Path) -> tuple[ev.RunEnd | None, bool]:
    """The end of the session's last run, None if it has none; and whether a seal is the last event. Only reads.

    Raises:
        LogError: LOG_INVALID, the log cannot be read.
    """
    end: ev.RunEnd | None = None
    sealed = False
    for event in open_session(str(directory)).events():
        if isinstance(event, ev.RunEnd):
            end = event
        elif isinstance(event, (ev.RunResume, ev.SessionEndSeed)):
            end = None
        sealed = isinstance(event, ev.LogSeal)
    return end, sealed


def _publish_bare(log: SessionLog, directory: Path, fold: RunFold, past: Past) -> FinishedRun:
    """Seal and publish a session of which only the log is known."""
    from runner.artifacts.publish import ArtifactStore

    store = ArtifactStore(directory, append=log.append, redactor=Redactor({}))
    outcome = fold.outcome.outcome(causes=[] if past.ended else [_KILLED])
    return publish_log(log, directory, fold, store, outcome, None, ended=past.ended is not None)


def _complete(log: SessionLog, directory: Path, fold: RunFold, past: Past, patch: PatchInfo | None) -> FinishedRun:
    """The log is sealed behind its ``run/end``: what it names is there, only the ZIP and the result are missing."""
    from runner.artifacts.publish import ArtifactStore

    store = ArtifactStore(directory, append=log.append, redactor=Redactor({}))
    for path, written in past.written.items():
        store.add(path, name=written.name, logged=False)
    return publish_log(log, directory, fold, store, fold.outcome.outcome(), patch, ended=True, sealed=True)


def _folds(directory: Path, begun: Begun | None) -> tuple[JsonObject, Past, Structure, RunFold]:
    """The header of a session, and the folds that know of it what a run must."""
    from runner.agent.past import Past
    from runner.artifacts.facts import RunFold
    from runner.providers.prices import cost_of
    from runner.session.structure import Structure

    profile = begun.spec.profile if begun is not None else None
    prices = profile.model.prices if profile is not None else None
    for_summaries = (profile.summary_prices if profile is not None else None) or prices
    header = open_session(str(directory)).header
    past = Past(
        cost_of=lambda usage: None if prices is None else cost_of(usage, prices),
        summary_cost_of=lambda usage: None if for_summaries is None else cost_of(usage, for_summaries),
        seed=header.get("seedLength") or 0,
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


def _refuse_changes(begun: Begun, past: Past, *, accept_changes: bool) -> list[str]:
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
