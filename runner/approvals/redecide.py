"""The recorded calls of a session, decided again under another policy.

A session is data: tool, command, resolved paths, escalation, mode and trust of a call come from the log, only
the rules come from outside. Nothing on this machine is looked at. Invariants: each call is decided again, or
counted with the reason why it was not; events are a stream, and what is held does not grow with the log. Reads
``run/start``, ``sandbox/mode``, ``tool/call``, ``tool/code-dispatch*``, ``approval/*``, ``tool/result`` and the
ends of steps; writes none. No effect on the prefix cache.
"""

from __future__ import annotations

import json
import posixpath
from typing import TYPE_CHECKING, Any, Final

from runner.approvals.policy import CallFacts, judge
from runner.errors import ErrorCode, LogError
from runner.permission import Mode, Trust
from runner.record import field, mutable_record, record
from runner.session import events as ev
from runner.session.header import is_chained

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from runner.approvals.policy import Policy
    from runner.messages import JsonObject
    from runner.session.events import Event

DSH_TOOLS: Final = {
    "bash": ("shell", "command"),
    "read": ("read_file", "file_path"),
    "read_image": ("read_file", "file_path"),
    "write": ("write_file", "file_path"),
    "edit": ("edit_file", "file_path"),
    "glob": ("glob", "path"),
    "grep": ("grep", "path"),
    "todo_write": ("todo", ""),
}
"""dsh's tools whose arguments mean what those of a tool of ours do: its name here, and the argument that counts."""

NOT_REACHED: Final = (
    ErrorCode.INVALID_ARGS,
    ErrorCode.UNKNOWN_TOOL,
    ErrorCode.TOOL_MASKED,
    ErrorCode.ABORTED_BEFORE_DISPATCH,
    ErrorCode.TOOL_NOT_STARTED,
)
"""Codes of calls that ended before a policy looked at them."""

_NOT_REACHED: Final = frozenset(code.name for code in NOT_REACHED)
_DENIED: Final = frozenset({ErrorCode.POLICY_DENIED.name, ErrorCode.GUARD_DENIED.name})
_UNSURE: Final = ErrorCode.TOOL_OUTCOME_UNKNOWN.name
_OPEN_CALLS: Final = 4_096
"""Calls of one step that wait for their results; of more, the oldest are taken to have none."""


@record
class Verdict:
    """What was decided on a call.

    Attributes:
        allowed: Whether it was let through.
        rule: The deciding rule, None where the log does not tell.
        mode: The mode it ran in, or would run in; None for a denied call and where the log does not tell.
        reason: Why; empty for what was recorded.
    """

    allowed: bool
    rule: str | None
    mode: Mode | None
    reason: str = ""


@record
class Difference:
    """A call on which the new policy decides otherwise.

    Attributes:
        kind: ``denied`` for what was allowed, ``allowed`` for what was denied, ``mode`` for another mode.
        session: Id of the session.
        seq: Number of the event that recorded the call.
        turn: Its turn.
        step: Its step.
        call_id: Its id.
        tool: Its tool, by the name in the log.
        facts: What was decided on.
        recorded: What the log says.
        new: What the policy says.
    """

    kind: str
    session: str
    seq: int
    turn: int
    step: int
    call_id: str
    tool: str
    facts: CallFacts
    recorded: Verdict
    new: Verdict


@mutable_record
class Counts:
    """What became of the calls of one or more sessions.

    Attributes:
        calls: Calls in the logs. Each is compared, not reached, unknown or inherited.
        compared: Calls that were decided again and compared.
        denied: Allowed then, denied now.
        allowed: Denied then, allowed now.
        mode: Allowed then and now, in another mode.
        other_rule: The same decision, by a rule of another name; no difference.
        without_facts: Compared calls of a tool that is not ours, decided by their name alone.
        not_reached: Calls that ended before a policy looked at them, by their codes.
        unknown: Calls on which the log holds no decision.
        inherited: Calls that a forked session took over from one that is read as well.
    """

    calls: int = 0
    compared: int = 0
    denied: int = 0
    allowed: int = 0
    mode: int = 0
    other_rule: int = 0
    without_facts: int = 0
    not_reached: dict[str, int] = field(default_factory=dict)
    unknown: int = 0
    inherited: int = 0

    @property
    def differences(self) -> int:
        """Calls on which the new policy decides otherwise."""
        return self.denied + self.allowed + self.mode

    def add(self, other: Counts) -> None:
        """Add those of another session."""
        for name in ("calls", "compared", "denied", "allowed", "mode", "other_rule", "without_facts"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.unknown += other.unknown
        self.inherited += other.inherited
        for code, number in other.not_reached.items():
            self.not_reached[code] = self.not_reached.get(code, 0) + number


@mutable_record
class _Call:
    """A recorded call whose result is still to come."""

    seq: int
    turn: int
    step: int
    call_id: str
    tool: str
    mode: str | None
    facts: CallFacts
    known: bool
    asked: str | None = None
    outcome: str | None = None
    rule: str | None = None


def redecide(
    policy: Policy, header: JsonObject, events: Iterable[Event], counts: Counts, *, skip: int = 0
) -> Iterator[Difference]:
    """Decide the calls of one session again.

    Args:
        policy: The rules.
        header: The header of the log.
        events: Its events; chunks may be left out.
        counts: Where the calls are counted; complete when the iterator is at its end.
        skip: Events at the start that belong to a session that is read as well.

    Yields:
        The calls on which the policy decides otherwise, in the order of their results.

    Raises:
        LogError: LOG_INVALID, the log does not say in which workspace or mode a call was made, or holds a value
            that makes no sense.
    """
    fold = _Fold(policy, header, counts, skip)
    for event in events:
        try:
            yield from fold.apply(event)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise LogError(f"{event.TYPE} with seq {event.seq} holds a value that makes no sense: {error!r}") from error
    yield from fold.end()


class _Fold:
    """What has been seen of a session so far."""

    def __init__(self, policy: Policy, header: JsonObject, counts: Counts, skip: int) -> None:
        self._policy = policy
        self._session: str = header["id"]
        self._workspace: str = header.get("cwd", "")
        self._ours = is_chained(header)
        self._counts = counts
        self._skip = skip
        self._mode: str | None = None
        # dsh has a person at the keyboard, who is trusted, and does not say so.
        self._trust: str = Trust.TRUSTED.value
        self._turn = self._step = 0
        self._open: dict[str, list[_Call]] = {}
        self._count = 0

    def apply(self, event: Event) -> Iterator[Difference]:
        """Take one event."""
        if isinstance(event, ev.RunStart):
            self._trust = event.trust
            self._mode = event.sandbox.get("mode", self._mode)
        elif isinstance(event, ev.SandboxModeEvent):
            self._mode = event.mode
        elif isinstance(event, ev.StepStart):
            yield from self.end()
            self._turn, self._step = event.turn, event.step
        elif isinstance(event, ev.ToolCall):
            yield from self._begin(event.seq, event.call_id, event.name, event.arguments, (event.turn, event.step))
        elif isinstance(event, ev.CodeDispatchStart):
            place = (self._turn, self._step)
            yield from self._begin(event.seq, event.sub_call_id, event.name, event.arguments, place)
        elif isinstance(event, ev.ApprovalAsked):
            self._ask(event)
        elif isinstance(event, ev.ApprovalDecided):
            self._decide(event)
        elif isinstance(event, ev.CodeDispatch):
            yield from self._finish(event.sub_call_id, None, None)
        elif isinstance(event, ev.ToolResult) and event.surface_op == "append":
            code = None if event.error is None else event.error.get("code")
            yield from self._finish(event.message["source"]["callId"], code, event.meta or {})
        elif isinstance(event, ev.StepEnd):
            yield from self.end()

    def end(self) -> Iterator[Difference]:
        """No more results come for the calls that are open."""
        for calls in list(self._open.values()):
            for call in calls:
                yield from self._settle(call, _UNSURE, None)
        self._open.clear()
        self._count = 0

    # --- one call ---------------------------------------------------------------------------------

    def _begin(
        self, seq: int, call_id: str, tool: str, arguments: object, place: tuple[int, int]
    ) -> Iterator[Difference]:
        if seq < self._skip:
            self._counts.calls += 1
            self._counts.inherited += 1
            return
        if self._count >= _OPEN_CALLS:
            yield from self.end()
        facts = None if self._ours else _dsh_facts(tool, arguments, self._workspace)
        known = self._ours or facts is not None
        call = _Call(seq, *place, call_id, tool, self._mode, facts or CallFacts(tool), known)
        self._open.setdefault(call_id, []).append(call)
        self._count += 1

    def _ask(self, event: ev.ApprovalAsked) -> None:
        # A model may use an id twice in one answer; what is asked is about the last call.
        calls = self._open.get(event.call_id)
        if not calls:
            return
        call = calls[-1]
        call.asked = event.id
        if self._ours:
            paths, escalation = event.paths or {}, event.escalation or {}
            call.facts = CallFacts(
                event.tool_name,
                event.command,
                _texts(paths.get("read")),
                _texts(paths.get("write")),
                Mode(escalation["mode"]) if escalation else None,
            )

    def _decide(self, event: ev.ApprovalDecided) -> None:
        for calls in self._open.values():
            for call in calls:
                if call.asked == event.id and call.outcome is None:
                    call.outcome, call.rule = event.outcome, event.rule
                    return

    def _finish(self, call_id: str, code: str | None, meta: JsonObject | None) -> Iterator[Difference]:
        calls = self._open.get(call_id)
        if not calls:
            return
        call = calls.pop(0)
        self._count -= 1
        if not calls:
            del self._open[call_id]
        yield from self._settle(call, code, meta)

    def _settle(self, call: _Call, code: str | None, meta: JsonObject | None) -> Iterator[Difference]:
        counts = self._counts
        counts.calls += 1
        if call.outcome is None and code is not None and code in _NOT_REACHED:
            counts.not_reached[code] = counts.not_reached.get(code, 0) + 1
            return
        allowed = self._was_allowed(call, code)
        if allowed is None:
            counts.unknown += 1
            return
        recorded = Verdict(allowed, call.rule, self._recorded_mode(call, meta) if allowed else None)
        new = self._judge(call, call.facts)
        counts.compared += 1
        counts.without_facts += not call.known
        kind = _kind(recorded, new)
        if kind:
            setattr(counts, kind, getattr(counts, kind) + 1)
            place = (call.turn, call.step, call.call_id, call.tool)
            yield Difference(kind, self._session, call.seq, *place, call.facts, recorded, new)
        elif recorded.rule is not None and recorded.rule != new.rule:
            counts.other_rule += 1

    def _was_allowed(self, call: _Call, code: str | None) -> bool | None:
        """What the log says was decided, None if it does not."""
        if call.outcome is not None:
            return None if call.outcome == "cancelled" else call.outcome == "allowed-once"
        if self._ours or call.asked is not None or code == _UNSURE:
            return None
        return code not in _DENIED

    def _recorded_mode(self, call: _Call, meta: JsonObject | None) -> Mode | None:
        if self._ours:
            # A call that did not run has the run's mode in its result, whatever its own would have been.
            return Mode(meta["mode"]) if meta and meta.get("attempts") else None
        return call.facts.escalation or self._run_mode(call)

    def _run_mode(self, call: _Call) -> Mode:
        if call.mode is None:
            raise LogError(f"the log does not say in which mode call {call.call_id} of step {call.step} was made")
        return Mode(call.mode)

    def _judge(self, call: _Call, facts: CallFacts) -> Verdict:
        if not posixpath.isabs(self._workspace):
            raise LogError("the header of the log names no workspace (cwd), so paths cannot be compared with rules")
        mode = self._run_mode(call)
        decision = judge(
            self._policy,
            facts,
            workspace=self._workspace,
            mode=mode,
            trust=Trust(self._trust),
            resolve=_resolved_then(facts) if self._ours else posixpath.normpath,
        ).decision
        if not decision.allowed:
            return Verdict(False, decision.rule, None, decision.reason)
        beyond = facts.escalation is not None and facts.escalation.rank > mode.rank
        own = facts.escalation if beyond and facts.escalation is not None else mode
        tighter = decision.mode is not None and decision.mode.rank < own.rank
        return Verdict(True, decision.rule, decision.mode if tighter else own, decision.reason)


def _kind(recorded: Verdict, new: Verdict) -> str:
    """How two verdicts differ; empty if they do not."""
    if recorded.allowed != new.allowed:
        return "allowed" if new.allowed else "denied"
    return "mode" if recorded.mode is not None and recorded.mode != new.mode else ""


def _resolved_then(facts: CallFacts) -> Callable[[str], str]:
    """Gives the files of redirections as they were resolved then, links followed.

    The log holds them in one list for each kind, and ``facts`` has these lists. So a redirection of a kind that
    was recorded adds nothing; of another it stands by its name, since then it was not seen at all.
    """
    from runner.approvals.shell import analyse

    if facts.command is None or not (facts.read or facts.write):
        return posixpath.normpath
    found = analyse(facts.command)
    kinds = iter([facts.read] * len(found.reads) + [facts.write] * len(found.writes))

    def resolve(path: str) -> str:
        known = next(kinds, ())
        return known[0] if known else posixpath.normpath(path)

    return resolve


def _texts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise TypeError("paths that are no list of texts")
    return tuple(value)


def _dsh_facts(tool: str, arguments: object, workspace: str) -> CallFacts | None:
    """What a call of dsh is about, in words of ours; None where that cannot be told."""
    values = _object(arguments)
    name, key = DSH_TOOLS.get(tool, (tool, None))
    if key is None or values is None:
        return None
    about = values.get(key, "." if key == "path" else None) if key else ""
    wanted = values.get("sandbox_permissions")
    escalation = Mode(wanted) if wanted in [each.value for each in Mode] else None
    if not isinstance(about, str) or not isinstance(values.get("pattern", ""), str):
        return None
    if name == "todo":
        return CallFacts(name)
    if name == "shell":
        elsewhere = _named(workspace, str(values.get("workdir") or ".")) != _named(workspace, ".")
        return None if elsewhere else CallFacts(name, about, escalation=escalation)
    if name == "glob":
        about = _searched(about, values.get("pattern", ""))
    path = (_named(workspace, about),)
    reads, writes = name != "write_file", name in ("write_file", "edit_file")
    return CallFacts(name, None, path if reads else (), path if writes else (), escalation)


def _object(arguments: object) -> dict[str, Any] | None:
    """Arguments as an object: raw JSON in a call of the model, a value in one of its programs."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _named(workspace: str, path: str) -> str:
    """The absolute path by name alone; no link is followed."""
    return posixpath.normpath(posixpath.join(workspace, path))


def _searched(folder: str, pattern: str) -> str:
    """The folder a glob looks into; of an absolute pattern what stands before the first wildcard."""
    if not pattern.startswith("/"):
        return folder
    parts = pattern.split("/")[:-1]
    plain = next((at for at, part in enumerate(parts) if any(sign in part for sign in "*?[{")), len(parts))
    return "/".join(parts[:plain]) or "/"
