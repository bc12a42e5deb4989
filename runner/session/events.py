"""The closed vocabulary of the session log.

One slots class per event. The field table of a class (name on disk, kind, required) drives
reading, writing, the reference page and the schema; the class docstring is the contract.
An event is built without ``seq`` and ``time``; the log sets both when it appends.

The format version rises only when the WRITER emits something an older reader would misread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, dataclass_transform

from runner.errors import ErrorCode, LogError

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.messages import Chunk, JsonObject, Message, RequestHeader, Usage

LOG_VERSION = 0
"""``version`` of the header line, shared with dsh."""

LOG_FORMAT_VERSION = 1
"""``writer.format`` of the header line: our own rules (seals, key order)."""

_KINDS: dict[str, tuple[type, ...]] = {
    "integer": (int,),
    "number": (int, float),
    "string": (str,),
    "boolean": (bool,),
    "object": (dict,),
    "array": (list,),
    "any": (object,),
}


_EXACT: dict[str, frozenset[type]] = {
    **{kind: frozenset(types) for kind, types in _KINDS.items()},
    "any": frozenset((int, float, str, bool, dict, list, type(None))),
}
"""Types of a decoded JSON value of each kind."""

_ABSENT: Any = object()


class Field(NamedTuple):
    """One field of an event's ``data``."""

    attribute: str
    name: str
    kind: str
    required: bool
    always: bool = False

    def accepts(self, value: object) -> bool:
        """Whether ``value`` has the field's JSON type (a boolean is not a number)."""
        if isinstance(value, bool) and self.kind in ("integer", "number"):
            return False
        return isinstance(value, _KINDS[self.kind])


class _Unset:
    """Marks a field that must be given."""


_UNSET = _Unset()


def wire(kind: str, name: str | None = None, *, default: Any = _UNSET, always: bool = False) -> Any:
    """Declare one field: its JSON kind, its name on disk if it differs, a default if optional.

    ``always``: readers do without it, our writer writes null.
    """
    return (kind, name, default, always)


def _envelope(*, default: Any) -> Any:
    return ("envelope", None, default, False)


@dataclass_transform(kw_only_default=True, field_specifiers=(wire, _envelope))
class _EventMeta(type):
    """Turns field declarations into slots and a field table.

    ``READING`` is the same table for a reader: name on disk, setter, types, required. ``ALWAYS`` are the names on
    disk that our writer always writes.
    """

    READING: tuple[tuple[str, Callable[[Any, Any], None], frozenset[type], bool], ...]
    ALWAYS: frozenset[str]

    def __new__(mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any) -> _EventMeta:
        fields: list[Field] = []
        slots: list[str] = []
        for attribute in namespace.get("__annotations__", {}):
            declared = namespace.get(attribute)
            if not isinstance(declared, tuple) or len(declared) != 4:
                continue
            del namespace[attribute]
            kind, wire_name, default, always = declared
            slots.append(attribute)
            if kind != "envelope":
                fields.append(Field(attribute, wire_name or attribute, kind, default is _UNSET, always))
        namespace["__slots__"] = tuple(slots)
        namespace["FIELDS"] = tuple(fields)
        cls = super().__new__(mcs, name, bases, namespace)
        cls.READING = tuple(
            (field.name, getattr(cls, field.attribute).__set__, _EXACT[field.kind], field.required) for field in fields
        )
        cls.ALWAYS = frozenset(field.name for field in fields if field.always)
        for option, value in options.items():
            setattr(cls, option.upper(), value)
        return cls

    def __init__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **_: Any) -> None:
        super().__init__(name, bases, namespace)


class Event(metaclass=_EventMeta):
    """Envelope of every event.

    ``seq`` counts from 0 without gaps, ``time`` is epoch milliseconds; both are -1 until the
    log appends the event. ``extra`` keeps fields of ``data`` that the table does not know, ``omitted``
    names those that we always write and that a line read did without.
    """

    seq: int = _envelope(default=-1)
    time: int = _envelope(default=-1)
    source_event_seqs: list[int] | None = _envelope(default=None)
    surface_op: str | JsonObject | None = _envelope(default=None)
    extra: JsonObject | None = _envelope(default=None)
    omitted: tuple[str, ...] = _envelope(default=())

    TYPE: ClassVar[str] = ""
    WRITER: ClassVar[str] = ""
    READERS: ClassVar[str] = ""
    SURFACE: ClassVar[bool] = False
    IGNORABLE: ClassVar[bool] = False
    FIELDS: ClassVar[tuple[Field, ...]] = ()

    def __init__(self, **values: Any) -> None:
        self.seq = values.pop("seq", -1)
        self.time = values.pop("time", -1)
        self.source_event_seqs = values.pop("source_event_seqs", None)
        self.surface_op = values.pop("surface_op", "append" if self.SURFACE else None)
        self.extra = values.pop("extra", None)
        self.omitted = values.pop("omitted", ())
        for field in self.FIELDS:
            if field.attribute in values:
                setattr(self, field.attribute, values.pop(field.attribute))
            elif field.required:
                raise TypeError(f"{type(self).__name__} needs {field.attribute}")
            else:
                setattr(self, field.attribute, None)
        if values:
            raise TypeError(f"{type(self).__name__} has no {', '.join(values)}")

    @property
    def ignorable(self) -> bool:
        """Whether a reader that does not know the type may skip it."""
        return self.IGNORABLE

    def data(self) -> JsonObject:
        """The ``data`` object as it stands on disk; absent optional fields are left out."""
        data: JsonObject = {}
        for field in self.FIELDS:
            value = getattr(self, field.attribute)
            if value is not None or field.required or (field.always and field.attribute not in self.omitted):
                data[field.name] = value
        if self.extra:
            data.update(self.extra)
        return data

    def record(self) -> JsonObject:
        """The whole line as a JSON object, keys in the order of the format."""
        record: JsonObject = {"type": self.TYPE, "seq": self.seq, "time": self.time}
        if self.ignorable:
            record["ignorable"] = True
        record["data"] = self.data()
        if self.source_event_seqs is not None:
            record["sourceEventSeqs"] = self.source_event_seqs
        if self.surface_op is not None:
            record["surfaceOp"] = self.surface_op
        return record

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Event) and self.record() == other.record()

    __hash__ = None  # type: ignore[assignment]  # events are compared by content and mutable

    def __repr__(self) -> str:
        return f"<{self.TYPE} seq={self.seq}>"


class UnknownEvent(Event):
    """An ignorable event of a type this version does not know. It takes a seq and means nothing."""

    type_name: str = _envelope(default="")

    @property
    def ignorable(self) -> bool:
        """Always: others are refused when read."""
        return True

    def record(self) -> JsonObject:
        """The line as it was read."""
        return {**super().record(), "type": self.type_name}


# --- turns, steps, messages --------------------------------------------------------------------


class TurnStart(Event, type="turn/start", writer="agent.loop", readers="outcome, verify, repair, resume, show"):
    """A turn begins: one user message is being handled. Does not imply that a step follows."""

    turn: int = wire("integer")


class TurnEnd(
    Event, type="turn/end", writer="agent.loop, session.repair", readers="outcome, verify, repair, resume, show"
):
    """A turn is over. ``reason.kind``: completed, aborted, blocked, error, max-tokens, interrupted.

    ``aborted`` carries ``reason {kind: limit | budget | policy | signal, code}``, ``error`` an
    ``error {message, code}``. ``completed`` says that the model stopped, not that the task is done.
    """

    turn: int = wire("integer")
    reason: JsonObject = wire("object")


class StepStart(Event, type="step/start", writer="agent.loop", readers="request, usage, verify, repair, resume, show"):
    """A model request is about to be made. Does not imply that it was sent."""

    turn: int = wire("integer")
    step: int = wire("integer")


class StepEnd(
    Event, type="step/end", writer="agent.loop, session.repair", readers="outcome, usage, verify, repair, show"
):
    """A step is over, failed and cancelled ones too. Steps are counted by this event."""

    turn: int = wire("integer")
    step: int = wire("integer")


class UserMessage(
    Event,
    type="user/message",
    writer="agent.loop, compaction.summary",
    readers="projection, usage, reports, verify, resume, show",
    surface=True,
):
    """A message of role user: the prompt, a followup, a reminder, run-time context, a summary.

    ``source.kind`` says where it came from: user, plugin, goal, tool, compaction.
    """

    content: list[Any] = wire("array")
    source: JsonObject = wire("object")
    role: str = wire("string")
    id: str = wire("string")


class AssistantChunk(
    Event, type="assistant/chunk", writer="agent.loop", readers="usage, reports, verify, repair, show"
):
    """One piece of a streamed answer. A failed attempt leaves only its chunks."""

    turn: int = wire("integer")
    step: int = wire("integer")
    chunk: Chunk = wire("object")


class AssistantMessage(
    Event,
    type="assistant/message",
    writer="agent.loop",
    readers="projection, outcome, usage, verify, repair, resume, show",
    surface=True,
):
    """The whole answer of one successful call; ``interrupted`` marks one cut by cancellation.

    Its ``usage`` replaces the usage chunk of the same turn and step.
    """

    turn: int = wire("integer")
    step: int = wire("integer")
    message: Message = wire("object")
    usage: Usage | None = wire("object", default=None)
    interrupted: bool | None = wire("boolean", default=None)


class ToolCall(
    Event, type="tool/call", writer="tools.scheduler", readers="outcome, usage, reports, verify, repair, show"
):
    """The model asked for a call. Does not imply that it was allowed or started."""

    turn: int = wire("integer")
    step: int = wire("integer")
    call_id: str = wire("string", "callId")
    name: str = wire("string")
    arguments: str = wire("string")


class ToolResult(
    Event,
    type="tool/result",
    writer="compaction.prune, session.repair, tools.scheduler",
    readers="projection, outcome, usage, reports, verify, repair, resume, show",
    surface=True,
):
    """The result of one call, denied and failed ones too; ``error`` has a stable ``code``.

    ``meta``: ``durationMs, exitCode?, signal?, timedOut?, backend?, mode, bytes, truncated,
    spill?{path,bytes,sha256}, attempts, replaced?{sha256}``.
    """

    turn: int = wire("integer")
    step: int = wire("integer")
    message: Message = wire("object")
    error: JsonObject | None = wire("object", default=None)
    meta: JsonObject | None = wire("object", default=None)


class RequestHeaderEvent(Event, type="request/header", writer="agent.loop", readers="request, usage, resume, show"):
    """System prompt, tools and call configuration of the requests that follow.

    ``reason``: initial, resume, change. Written only when one of them holds.
    """

    header: RequestHeader = wire("object")
    reason: str = wire("string")


class RequestContext(Event, type="request/context", writer="agent.loop", readers="usage, reports, show"):
    """Model and window that the requests that follow are made for."""

    provider: str = wire("string")
    model: str = wire("string")
    context_window: int | None = wire("integer", "contextWindow", default=None)


class InboxSpliced(Event, type="agent/inbox/spliced", writer="agent.inbox", readers="resume, show"):
    """Messages were queued for, or claimed from, ``next-turn`` or ``next-step``."""

    target: str = wire("string")
    start: int = wire("integer")
    removed_count: int | None = wire("integer", "removedCount", default=None)
    inserted: list[Any] = wire("array")
    outcome: Any = wire("any", default=None)


# --- authority ---------------------------------------------------------------------------------


class PermissionPreset(Event, type="permission/preset", writer="run", readers="show"):
    """The permission mode the session starts with."""

    preset: str = wire("string")


class SandboxModeEvent(Event, type="sandbox/mode", writer="run", readers="reports, show"):
    """The sandbox mode the session starts with."""

    mode: str = wire("string")


class ApprovalPolicy(Event, type="approval/policy", writer="run", readers="show"):
    """How approvals are resolved; ours is always ``declared``."""

    policy: str = wire("string")


class ApprovalAsked(
    Event,
    type="approval/asked",
    writer="approvals.resolver, tools.pipeline",
    readers="outcome, reports, verify, repair, show",
):
    """One validated call was put to the policy.

    ``command`` is the shell text, ``paths`` the resolved paths ``{read: [], write: []}``, ``escalation``
    ``{mode, justification}`` when the call asks for more than the run's mode.
    """

    id: str = wire("string")
    call_id: str = wire("string", "callId")
    tool_name: str = wire("string", "toolName")
    command: str | None = wire("string", default=None, always=True)
    paths: JsonObject | None = wire("object", default=None, always=True)
    escalation: JsonObject | None = wire("object", default=None, always=True)
    reason: str | None = wire("string", default=None, always=True)


class ApprovalDecided(
    Event,
    type="approval/decided",
    writer="approvals.resolver, tools.pipeline",
    readers="outcome, reports, verify, repair, show",
):
    """The decision on the ``approval/asked`` of the same id.

    ``outcome``: allowed-once, rejected, cancelled (dsh also: unavailable). ``rule`` is the id of
    the deciding rule, or ``default``.
    """

    id: str = wire("string")
    outcome: str = wire("string")
    rule: str | None = wire("string", default=None)
    policy_digest: str | None = wire("string", "policyDigest", default=None)
    by: str | None = wire("string", default=None)


# --- provider retries, compaction --------------------------------------------------------------


class LlmRetry(Event, type="llm/retry", writer="agent.loop", readers="resume, show"):
    """A model request failed and will be made again after ``delayMs``."""

    retry_id: str = wire("string", "retryId")
    turn: int = wire("integer")
    step: int = wire("integer")
    retry: int = wire("integer")
    max_retries: int = wire("integer", "maxRetries")
    delay_ms: float = wire("number", "delayMs")
    failure: JsonObject = wire("object")


class LlmRetryStarted(Event, type="llm/retry-started", writer="agent.loop", readers="usage, reports, show"):
    """The delay of the ``llm/retry`` of the same id is over."""

    retry_id: str = wire("string", "retryId")
    turn: int = wire("integer")
    step: int = wire("integer")
    retry: int = wire("integer")


class CompactionStart(
    Event, type="compaction/start", writer="compaction.summary", readers="usage, verify, repair, show"
):
    """A summary is being made. Does not imply that it succeeds."""

    compaction_id: str = wire("string", "compactionId")
    turn: int = wire("integer")


class CompactionSummary(
    Event, type="compaction/summary", writer="compaction.summary", readers="usage, verify, repair, resume, show"
):
    """The summary and what it cost; the replacing ``user/message`` follows."""

    compaction_id: str = wire("string", "compactionId")
    summary: list[Any] = wire("array")
    shadowed_range: JsonObject = wire("object", "shadowedRange")
    shadowed_seqs: list[int] = wire("array", "shadowedSeqs")
    shadowed_token_count: int | None = wire("integer", "shadowedTokenCount", default=None)
    provider: str | None = wire("string", default=None)
    model: str | None = wire("string", default=None)
    usage: Usage | None = wire("object", default=None)


class CompactionEnd(
    Event, type="compaction/end", writer="compaction.summary", readers="usage, verify, repair, resume, show"
):
    """The compaction of the same id is over; ``error`` when it changed nothing.

    ``refusedUsage`` is what tries cost that gave no usable summary.
    """

    compaction_id: str = wire("string", "compactionId")
    turn: int = wire("integer")
    error: JsonObject | None = wire("object", default=None)
    refused_usage: Usage | None = wire("object", "refusedUsage", default=None)


class CompactionPrune(Event, type="compaction/prune", writer="compaction.prune", readers="verify, repair, show"):
    """One tool result is cut; the replacing ``tool/result`` is the next event."""

    shadowed_range: JsonObject = wire("object", "shadowedRange")
    shadowed_seqs: list[int] = wire("array", "shadowedSeqs")
    shadowed_token_count: int | None = wire("integer", "shadowedTokenCount", default=None)


class TodoWrite(Event, type="todo/write", writer="tools.builtin.todo", readers="show"):
    """The model's list of what is left to do. Says nothing about the task's outcome."""

    todos: list[Any] = wire("array")


# --- events of dsh that are read ---------------------------------------------------------------


class CodeDispatchStart(Event, type="tool/code-dispatch-start", writer="read only", readers="show"):
    """A call made from inside a code-mode program began."""

    root_call_id: str = wire("string", "rootCallId")
    parent_call_id: str = wire("string", "parentCallId")
    sub_call_id: str = wire("string", "subCallId")
    name: str = wire("string")
    arguments: Any = wire("any")


class CodeDispatch(Event, type="tool/code-dispatch", writer="read only", readers="show"):
    """A call made from inside a code-mode program ended."""

    root_call_id: str = wire("string", "rootCallId")
    parent_call_id: str = wire("string", "parentCallId")
    sub_call_id: str = wire("string", "subCallId")
    name: str = wire("string")
    arguments: Any = wire("any")
    is_error: bool = wire("boolean", "isError")
    content: list[Any] = wire("array")


class SubagentDescriptor(Event, type="subagent/descriptor", writer="read only", readers="show"):
    """What a subagent's session is for; stands in the child's log."""


class WorkflowRunStart(Event, type="tool-workflow/run-start", writer="read only", readers="show"):
    """A workflow run began."""

    run_id: str = wire("string", "runId")


class WorkflowAgentStart(Event, type="tool-workflow/agent-start", writer="read only", readers="usage, show"):
    """A workflow started a child."""

    run_id: str = wire("string", "runId")


class WorkflowAgentEnd(Event, type="tool-workflow/agent-end", writer="read only", readers="usage, show"):
    """A workflow's child ended."""

    run_id: str = wire("string", "runId")


class WorkflowRunEnd(Event, type="tool-workflow/run-end", writer="read only", readers="show"):
    """A workflow run ended."""

    run_id: str = wire("string", "runId")


class GoalChange(Event, type="goal/change", writer="read only", readers="show"):
    """A goal was set, changed or closed."""

    operation: Any = wire("any", default=None)
    goal: Any = wire("any", default=None)


class SessionTitle(Event, type="session/title", writer="read only", readers="show"):
    """A title was given to the session."""

    title: str = wire("string")


class SessionTitleRequest(Event, type="session/title-llm-request", writer="read only", readers="show"):
    """A model was asked for a title."""


class HookInvoked(Event, type="hook/invoked", writer="read only", readers="show"):
    """An external hook was started."""


class HookResult(Event, type="hook/result", writer="read only", readers="show"):
    """An external hook ended."""


class CommandRun(Event, type="command/run", writer="read only", readers="show"):
    """A slash command began."""


class CommandDone(Event, type="command/done", writer="read only", readers="show"):
    """A slash command ended."""


class PlanMode(Event, type="plan/mode", writer="read only", readers="show"):
    """Plan mode was switched."""


class AgentPresetSelected(Event, type="agent-preset/selected", writer="read only", readers="show"):
    """A preset was chosen."""


class SessionEndSeed(Event, type="session/end-seed", writer="session.fork", readers="outcome, usage, verify, show"):
    """What a fork took over from its parent ends here; usage before it belongs to the parent."""


class ScheduleChange(Event, type="schedule/change", writer="read only", readers="show"):
    """A schedule was changed."""


class FeedbackRecord(Event, type="feedback/record", writer="read only", readers="show"):
    """A person gave feedback."""


class TeamEvent(Event, type="team/*", writer="read only", readers="show"):
    """Any event of a team of agents (`team/...`)."""


# --- own events, all ignorable -----------------------------------------------------------------


class RunStart(Event, type="run/start", writer="run", readers="outcome, usage, reports, resume, show", ignorable=True):
    """A run begins: what it runs, on what, under which sandbox. First event of a fresh log."""

    task_digest: str = wire("string", "taskDigest")
    profile_digest: str = wire("string", "profileDigest")
    policy_digest: str = wire("string", "policyDigest")
    tools_digest: str = wire("string", "toolsDigest")
    versions: JsonObject = wire("object")
    base: JsonObject = wire("object")
    sandbox: JsonObject = wire("object")
    trust: str = wire("string")
    config: JsonObject = wire("object")


class RunEnd(Event, type="run/end", writer="outcome", readers="outcome, verify, resume, show", ignorable=True):
    """The run is over. Only ``artifact/written`` and the final seal follow."""

    outcome: str = wire("string")
    code: str = wire("string")
    failure_class: str | None = wire("string", "failureClass", default=None, always=True)
    exit_code: int = wire("integer", "exitCode")
    error: JsonObject | None = wire("object", default=None)
    turns: int = wire("integer")
    steps: int = wire("integer")


class RunResume(
    Event, type="run/resume", writer="run", readers="outcome, usage, reports, resume, show", ignorable=True
):
    """A run goes on from a repaired log.

    ``changes`` are the keys of the configuration that are not as the session began. ``config`` is the configuration
    from here on, as in ``run/start``, unless it is the one before.
    """

    previous_seal: str | None = wire("string", "previousSeal", default=None)
    changes: list[Any] = wire("array")
    config: JsonObject | None = wire("object", default=None)


class RequestSent(
    Event,
    type="request/sent",
    writer="agent.loop",
    readers="request, usage, verify, repair, resume, show",
    ignorable=True,
):
    """A request body is about to be sent: its size and SHA-256, before content encoding.

    ``purpose``: main, summary, judge, repair. Does not imply that an answer came.
    """

    turn: int = wire("integer")
    step: int = wire("integer")
    attempt: int = wire("integer")
    purpose: str = wire("string")
    provider: str = wire("string")
    dialect: str = wire("string")
    bytes: int = wire("integer")
    sha256: str = wire("string")


class SetupStart(Event, type="setup/start", writer="read only", readers="show", ignorable=True):
    """A setup command begins."""

    index: int = wire("integer")


class SetupEnd(Event, type="setup/end", writer="read only", readers="outcome, show", ignorable=True):
    """A setup command ended."""

    index: int = wire("integer")
    exit_code: int | None = wire("integer", "exitCode", default=None)
    duration_ms: int = wire("integer", "durationMs")


class CheckStart(Event, type="check/start", writer="hooks.checks", readers="show", ignorable=True):
    """A check command begins."""

    name: str = wire("string")
    attempt: int = wire("integer")


class CheckEnd(Event, type="check/end", writer="hooks.checks", readers="outcome, resume, show", ignorable=True):
    """A check command ended. The last attempt of each check decides.

    ``output`` is the end of what a failing attempt printed, without secrets.
    """

    name: str = wire("string")
    attempt: int = wire("integer")
    passed: bool = wire("boolean")
    exit_code: int | None = wire("integer", "exitCode", default=None)
    duration_ms: int = wire("integer", "durationMs")
    output: str | None = wire("string", default=None)


class LimitReached(Event, type="limit/reached", writer="agent.loop", readers="outcome, reports, show", ignorable=True):
    """A limit is at 90 or 100 percent. At 100 the run ends with that limit's code.

    ``needed`` is what the next request may take, when that is what no longer fits.
    """

    name: str = wire("string")
    used: float = wire("number")
    max: float = wire("number")
    percent: int = wire("integer")
    needed: float | None = wire("number", default=None)


class ArtifactWritten(
    Event, type="artifact/written", writer="artifacts.publish", readers="reports, verify, resume, show", ignorable=True
):
    """A file of the artifacts directory is complete."""

    name: str = wire("string")
    path: str = wire("string")
    bytes: int = wire("integer")
    sha256: str = wire("string")


class Redaction(
    Event, type="redaction", writer="assembly, tools.pipeline", readers="reports, export, show", ignorable=True
):
    """Known secrets were taken out before anything was written; ``where`` names the place."""

    kind: str = wire("string")
    count: int = wire("integer")
    where: str = wire("string")


class SandboxEgress(Event, type="sandbox/egress", writer="run", readers="reports, show", ignorable=True):
    """The proxy decided, by the network allowlist, on a connection that a command asked for: `allowed` or `denied`."""

    host: str = wire("string")
    port: int = wire("integer")
    decision: str = wire("string")


class LogSeal(Event, type="log/seal", writer="session.log", readers="verify, resume, show", ignorable=True):
    """SHA-256 over every decoded byte before the value; ``lines`` counts the lines before the seal."""

    lines: int = wire("integer")
    sha256: str = wire("string")


def _registry() -> dict[str, type[Event]]:
    return {cls.TYPE: cls for cls in Event.__subclasses__() if cls.TYPE}


EVENT_TYPES: dict[str, type[Event]] = _registry()
"""Every event type by its name on disk; ``team/*`` stands for all that begin with ``team/``."""


def event_from_record(record: JsonObject) -> Event:
    """Build the event of one decoded line (not of a packed row).

    Raises:
        LogError: LOG_UNKNOWN_EVENT for an unknown type that is not ignorable, LOG_INVALID when
            a field is missing or has the wrong type, or the surface rules do not hold.
    """
    type_name, seq, time, data = record.get("type"), record.get("seq"), record.get("time"), record.get("data")
    cls = EVENT_TYPES.get(type_name) if isinstance(type_name, str) else None
    if cls is None or type(seq) is not int or type(data) is not dict or type(time) not in _NUMBERS:
        return _event_with_care(record)
    if ("surfaceOp" in record) != cls.SURFACE:
        return _event_with_care(record)
    event: Event = _new(cls)
    known = 0
    for name, put, types, required in cls.READING:
        value = data.get(name, _ABSENT)
        if type(value) in types:
            known += 1
        elif required or (value is not None and value is not _ABSENT):
            return _event_with_care(record)
        elif value is None:
            known += 1
        else:
            value = None
        put(event, value)
    event.seq, event.time = seq, time  # type: ignore[assignment]  # a foreign log may hold a fraction
    event.source_event_seqs, event.surface_op = record.get("sourceEventSeqs"), record.get("surfaceOp")
    event.extra = _rest(cls, data) if known != len(data) else None
    event.omitted = () if not cls.ALWAYS or data.keys() >= cls.ALWAYS else _omitted(cls, data)
    return event


_NUMBERS = frozenset((int, float))
_new = object.__new__


def _rest(cls: type[Event], data: JsonObject) -> JsonObject:
    known = {field.name for field in cls.FIELDS}
    return {name: value for name, value in data.items() if name not in known}


def _omitted(cls: type[Event], data: JsonObject) -> tuple[str, ...]:
    return tuple(field.attribute for field in cls.FIELDS if field.always and field.name not in data)


def _event_with_care(record: JsonObject) -> Event:
    """The event of a line that is not quite as ours are, or what is wrong with it."""
    type_name, seq, data = record.get("type"), record.get("seq"), record.get("data")
    if not isinstance(type_name, str) or not isinstance(seq, int) or isinstance(seq, bool):
        raise LogError("a line has no type or seq")
    where = f"event {seq} ({type_name})"
    if not isinstance(data, dict) or not isinstance(record.get("time"), (int, float)):
        raise LogError(f"{where}: data or time is missing or of the wrong type")
    cls = EVENT_TYPES.get(type_name) or (TeamEvent if type_name.startswith("team/") else None)
    if cls is None:
        if record.get("ignorable") is not True:
            raise LogError(
                f"{where}: unknown event type",
                code=ErrorCode.LOG_UNKNOWN_EVENT,
                hint="the log was written by a newer version; update nightshift",
            )
        unknown = UnknownEvent(seq=seq, time=record["time"], extra=data)
        unknown.type_name = type_name
        return unknown
    if ("surfaceOp" in record) != cls.SURFACE:
        raise LogError(f"{where}: surfaceOp is {'missing' if cls.SURFACE else 'not allowed here'}")
    rest = dict(data)
    values: JsonObject = {}
    for field in cls.FIELDS:
        if field.name not in rest:
            if field.required:
                raise LogError(f"{where}: data.{field.name} is missing")
            continue
        value = rest.pop(field.name)
        if not field.accepts(value) and not (value is None and not field.required):
            raise LogError(f"{where}: data.{field.name} is not of type {field.kind}")
        values[field.attribute] = value
    return cls(
        seq=seq,
        time=record["time"],
        source_event_seqs=record.get("sourceEventSeqs"),
        surface_op=record.get("surfaceOp"),
        extra=rest or None,
        omitted=_omitted(cls, data),
        **values,
    )
