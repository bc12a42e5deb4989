"""What every tool call passes: validate, policy, guards, execute, post-execute, finalize (``Pipeline.run_call``).

Invariants: only the policy allows, and only a call that was validated reaches it; one
``approval/asked`` and one ``approval/decided`` stand for each of those. A guard can only deny, and
nothing behind it overturns that. A stage that throws denies. What was decided on (arguments,
resolved paths, mode) is what runs; guards and hooks get copies of it. ``prepare`` and ``finish`` run
in model order on the loop's thread, ``perform`` may run on any thread and emits nothing.
Events: ``approval/asked`` and ``approval/decided`` through ``emit``.
Prefix cache: kept, results are appended.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any, Protocol

from runner import diagnostics
from runner.approvals.policy import DEFAULT_RULE, Decision
from runner.approvals.resolver import Resolution
from runner.errors import ErrorCode, InternalError, RunnerError
from runner.messages import copy_json, text_of
from runner.record import field, mutable_record, record, replace
from runner.session.events import ApprovalAsked, ApprovalDecided, Redaction
from runner.tools.base import Invocation, ToolOutcome

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from runner.approvals.policy import CallFacts
    from runner.cancellation import Cancellation
    from runner.messages import ImageBlock, JsonObject, TextBlock, ToolCallBlock
    from runner.permission import Mode
    from runner.session.events import Event
    from runner.tools.base import Tool
    from runner.tools.registry import Registry

ATTEMPTS = 2
"""Times an idempotent call is run when the tool itself breaks."""

DENIALS = frozenset(
    {
        ErrorCode.INVALID_ARGS,
        ErrorCode.UNKNOWN_TOOL,
        ErrorCode.TOOL_MASKED,
        ErrorCode.POLICY_DENIED,
        ErrorCode.GUARD_DENIED,
    }
)
"""Codes of calls that were not run."""

_LEAST_SECONDS = 0.1
"""What a call gets when hardly any time is left: none could be answered in no time at all."""

_PROBLEMS = 5
_PROBLEM_CHARS = 300


class _Refused(Exception):  # noqa: N818  # control flow of this module
    """The call goes no further."""

    def __init__(self, stage: str, code: ErrorCode, reason: str) -> None:
        super().__init__(reason)
        self.stage = stage
        self.code = code
        self.reason = reason


@record
class Denial:
    """A guard's refusal. There is no opposite: a guard that does not deny returns None."""

    reason: str


@record
class ParsedCall:
    """A call as the schema of its tool sees it.

    Attributes:
        call: The call as the model wrote it.
        tool: The tool, None if the call names none that may be used.
        arguments: Parsed arguments, valid against the schema.
        safe: Whether it may overlap other safe calls. Anything doubtful may not.
        refusal: Why it goes no further, None for a valid call.
    """

    call: ToolCallBlock
    tool: Tool | None
    arguments: JsonObject
    safe: bool
    refusal: _Refused | None = None


@record
class PreparedCall:
    """A call that is valid and that the policy allows.

    Attributes:
        call: The call as the model wrote it.
        tool: The tool.
        arguments: Parsed arguments, valid against the schema. To be read only.
        facts: What was decided on.
        decision: The policy's decision.
        mode: The mode the call runs in.
        safe: Whether it may overlap other safe calls.
    """

    call: ToolCallBlock
    tool: Tool
    arguments: JsonObject
    facts: CallFacts
    decision: Decision
    mode: Mode
    safe: bool = False

    @property
    def has_side_effects(self) -> bool:
        """Whether the call may change something; only a safe call without command and writes does not."""
        return not self.safe or self.facts.command is not None or bool(self.facts.write)


@mutable_record
class PerformedCall:
    """A call on its way to becoming a result: run, or refused.

    Attributes:
        call: The call as the model wrote it.
        outcome: What the tool, or the stage that refused, has to say.
        mode: The mode the call ran in, or would have.
        milliseconds: Time it took to run.
        attempts: Times it was run; 0 for a refused call.
        replaced: SHA-256 of the content that an ``after_tool`` hook replaced, None otherwise.
    """

    call: ToolCallBlock
    outcome: ToolOutcome
    mode: Mode
    milliseconds: int = 0
    attempts: int = 0
    replaced: str | None = None


@mutable_record
class CallResult:
    """What stands in ``tool/result``, and the events to be written before it."""

    call: ToolCallBlock
    content: list[TextBlock | ImageBlock]
    error: ErrorCode | None
    meta: JsonObject
    events: list[Event] = field(default_factory=list)

    @property
    def is_error(self) -> bool:
        """Whether the call failed or was denied."""
        return self.error is not None

    @property
    def denied(self) -> bool:
        """Whether the call was refused before it ran."""
        return self.error in DENIALS


@record
class Finalized:
    """Content as the model sees it.

    Attributes:
        content: Blocks, redacted and within the limits.
        bytes: UTF-8 bytes of the whole text before anything was left out, and those of images.
        truncated: Whether something was left out.
        spill: ``{path, bytes, sha256}`` of the file that holds the whole text, None without.
        redactions: Number of secrets taken out.
    """

    content: list[TextBlock | ImageBlock]
    bytes: int
    truncated: bool = False
    spill: JsonObject | None = None
    redactions: int = 0


class Resolve(Protocol):
    """The policy, with the events that record what it decided."""

    def __call__(self, facts: CallFacts, *, call_id: str, justification: str | None = None) -> Resolution:
        """Decide on one call; ``justification`` says why it asks for more than the run's mode."""
        ...


class Finalizer(Protocol):
    """The last stage: keeps secrets and floods out of the session."""

    def begin_step(self) -> None:
        """The results that follow belong to a new step."""
        ...

    def finalize(self, call_id: str, content: Sequence[TextBlock | ImageBlock], overflow: str | None) -> Finalized:
        """Redact and bound one result. ``overflow`` is the file that holds all of its first block.

        Raises:
            StorageError: The whole text cannot be kept.
        """
        ...


class HeldTime(Protocol):
    """Seconds held for one call; ``granted`` of them."""

    granted: float

    def settle(self, used: Mapping[str, float]) -> None:
        """Count the seconds the call took as ``tool_time``, give the rest back."""
        ...


class Pipeline:
    """The stages of a tool call.

    Args:
        registry: The agent's tools.
        mode: The run's permission mode.
        resolve: The policy: decides on the facts of a call and gives the pair of events that says so.
        emit: Appends events to the session log.
        finalizer: The last stage.
        clock: Monotonic seconds.
        timeout: Seconds the next call may take at most.
        hold_time: Holds, of at most so many seconds, the share of one of so many calls that run at the same time in
            what is left for all calls of the run.
        holds_secret: Whether a call must be refused since it holds a known secret; gets the call as
            the model wrote it and its arguments as plain JSON, without escapes that hide text.
        guards: Asked in order after the policy; the first denial counts.
        after_tool: May replace the outcome of a call that ran, in order.
    """

    def __init__(
        self,
        *,
        registry: Registry,
        mode: Mode,
        resolve: Resolve,
        emit: Callable[[Sequence[Event]], object],
        finalizer: Finalizer,
        clock: Callable[[], float],
        timeout: Callable[[], float],
        holds_secret: Callable[[ToolCallBlock, str], bool],
        hold_time: Callable[[float, int], HeldTime] | None = None,
        guards: Sequence[Callable[[PreparedCall], Denial | None]] = (),
        after_tool: Sequence[Callable[[PreparedCall, ToolOutcome], ToolOutcome | None]] = (),
    ) -> None:
        self._registry = registry
        self._mode = mode
        self._resolve = resolve
        self._emit = emit
        self._finalizer = finalizer
        self._clock = clock
        self._timeout = timeout
        self._hold_time = hold_time or _Unlimited
        self._holds_secret = holds_secret
        self._guards = guards
        self._after_tool = after_tool
        self._validators: dict[str, tuple[Tool, Any]] = {}

    def run_call(self, call: ToolCallBlock, cancellation: Cancellation) -> CallResult:
        """Take one call through all stages, one behind the other. The scheduler does the same with many calls.

        1. Validate (can only refuse): a known tool that no mask takes away, arguments that fit its schema, paths that
           can be told, no secret among the arguments.
        2. Policy, the only stage that allows: one asked/decided pair for every validated call.
        3. Guards: can only deny.
        4. Execute: in the mode that was decided, with time limit and cancellation, again only if that is harmless.
        5. Post-execute: ``after_tool`` hooks may replace the outcome.
        6. Finalize: spill and redaction.

        The caller writes ``tool/call`` before and ``tool/result`` behind them.

        Raises:
            RunnerError: Infrastructure broke (sandbox, storage), or a hook threw (INTERNAL).
        """
        performed = self.prepare(self.parse(call))
        if isinstance(performed, PreparedCall):
            performed = self.perform(performed, cancellation)
        return self.finish(performed)

    def parse(self, call: ToolCallBlock) -> ParsedCall:
        """The first half of stage 1: what needs nothing but the call and the tool. Leaves no trace."""
        tool = None
        try:
            tool = self._find_tool(call)
            arguments = self._parse_arguments(tool, call)
        except _Refused as refusal:
            return ParsedCall(call, tool, {}, safe=False, refusal=refusal)
        return ParsedCall(call, tool, arguments, safe=_classify(tool, arguments))

    def prepare(self, parsed: ParsedCall) -> PreparedCall | PerformedCall:
        """Stages 1 to 3: may the call run? A refused one comes back as performed."""
        try:
            tool, facts = self._validate(parsed)
            decision = self._ask_policy(parsed, facts)
            mode = self._mode_of(facts, decision)
            prepared = PreparedCall(parsed.call, tool, parsed.arguments, facts, decision, mode, parsed.safe)
            self._ask_guards(prepared)
        except _Refused as refused:
            text = f"Denied at stage {refused.stage}: {refused.reason}"
            outcome = ToolOutcome([{"type": "text", "text": text}], error=refused.code)
            return PerformedCall(parsed.call, outcome, self._mode)
        return prepared

    def perform(self, prepared: PreparedCall, cancellation: Cancellation, *, together: int = 1) -> PerformedCall:
        """Stages 4 and 5: run the call and let ``after_tool`` look at what came out.

        Args:
            prepared: The call.
            cancellation: Ends it.
            together: Calls that may run at the same time, this one included.

        Raises:
            RunnerError: Infrastructure broke, or a hook threw (INTERNAL).
        """
        held = self._hold_time(self._timeout(), together)
        started = self._clock()
        try:
            outcome, attempts = self._execute(prepared, max(_LEAST_SECONDS, held.granted), cancellation)
        finally:
            milliseconds = round((self._clock() - started) * 1000)
            held.settle({"tool_time": milliseconds / 1000})
        outcome, replaced = self._inspect(prepared, outcome)
        return PerformedCall(prepared.call, outcome, prepared.mode, milliseconds, attempts, replaced)

    def finish(self, performed: PerformedCall) -> CallResult:
        """Stage 6: spill, redact and describe the result.

        Raises:
            StorageError: The whole text of a long result cannot be kept.
        """
        call, outcome = performed.call, performed.outcome
        final = self._finalizer.finalize(call["id"], outcome.content, outcome.overflow)
        meta: JsonObject = {
            "durationMs": performed.milliseconds,
            **outcome.meta,
            "mode": performed.mode.value,
            "bytes": final.bytes,
            "truncated": final.truncated,
        }
        if final.spill is not None:
            meta["spill"] = final.spill
        meta["attempts"] = performed.attempts
        if performed.replaced is not None:
            meta["replaced"] = {"sha256": performed.replaced}
        events = list(outcome.events)
        if final.redactions:
            events.append(Redaction(kind="secret", count=final.redactions, where=f"tool/result {call['id']}"))
        return CallResult(call, final.content, outcome.error, meta, events)

    def begin_step(self) -> None:
        """The calls that follow belong to a new step."""
        self._finalizer.begin_step()

    # --- 1. validate ----------------------------------------------------------------------------

    def _find_tool(self, call: ToolCallBlock) -> Tool:
        found = self._registry.lookup(call["name"])
        if isinstance(found, ErrorCode):
            near = self._registry.near(call["name"])
            what = f"there is no tool {call['name'][:100]!r}"
            if found is ErrorCode.TOOL_MASKED:
                what = f"the tool {call['name']} may not be used in this run"
            raise _Refused("validate", found, what + (f", did you mean {near}?" if near else ""))
        return found

    def _parse_arguments(self, tool: Tool, call: ToolCallBlock) -> JsonObject:
        raw = call["arguments"].strip() or "{}"
        arguments = _parse_object(raw)
        if isinstance(arguments, str):
            raise _Refused("validate", ErrorCode.INVALID_ARGS, f"the arguments are {arguments}")
        problems = []
        try:
            for error in self._validator(tool).iter_errors(arguments):
                where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.instance_path)
                problems.append(f"arguments{_shorten(where)}: {_shorten(error.message)}")
                if len(problems) == _PROBLEMS:
                    break
        except (ValueError, OverflowError, RecursionError) as error:  # a value that the validator cannot take
            problems.append(f"arguments: {_shorten(str(error))}")
        if problems:
            raise _Refused("validate", ErrorCode.INVALID_ARGS, "; ".join(problems))
        return arguments

    def _validator(self, tool: Tool) -> Any:
        name = tool.schema["name"]
        known, validator = self._validators.get(name, (None, None))
        if known is not tool:
            import jsonschema_rs

            validator = jsonschema_rs.validator_for(tool.schema["parameters"])
            self._validators[name] = (tool, validator)
        return validator

    def _validate(self, parsed: ParsedCall) -> tuple[Tool, CallFacts]:
        """The second half of the stage, which looks at the workspace as it is when the call's turn comes."""
        if parsed.tool is None or parsed.refusal is not None:
            raise parsed.refusal or _Refused("validate", ErrorCode.UNKNOWN_TOOL, "there is no such tool")
        facts = self._collect_facts(parsed.tool, parsed.arguments)
        self._refuse_secrets(parsed.call, parsed.arguments)
        return parsed.tool, facts

    @staticmethod
    def _collect_facts(tool: Tool, arguments: JsonObject) -> CallFacts:
        try:
            return tool.facts(arguments)
        except RunnerError as error:
            if error.code is not ErrorCode.INVALID_ARGS:
                raise
            raise _Refused("validate", ErrorCode.INVALID_ARGS, error.message) from error
        except Exception as error:
            diagnostics.warning("a tool could not describe a call", tool=tool.schema["name"], error=repr(error))
            reason = "what the call would touch cannot be told"
            raise _Refused("validate", ErrorCode.INVALID_ARGS, reason) from error

    def _refuse_secrets(self, call: ToolCallBlock, arguments: JsonObject) -> None:
        plain = json.dumps(arguments, ensure_ascii=False)
        try:
            held = self._holds_secret(call, plain)
        except Exception as error:
            diagnostics.warning("the search for secrets failed", error=repr(error))
            reason = "the arguments could not be searched for secrets"
            raise _Refused("validate", ErrorCode.INVALID_ARGS, reason) from error
        if held:
            reason = "the arguments hold the value of a secret, which no tool may get"
            raise _Refused("validate", ErrorCode.INVALID_ARGS, reason)

    # --- 2. policy ------------------------------------------------------------------------------

    def _ask_policy(self, parsed: ParsedCall, facts: CallFacts) -> Decision:
        call = parsed.call
        justification = parsed.arguments.get("justification") if facts.escalation is not None else None
        try:
            resolution = self._resolve(facts, call_id=call["id"], justification=justification)
        except Exception as error:  # noqa: BLE001  # whatever it was, it is not a permission
            diagnostics.warning("the policy could not decide", tool=call["name"], error=repr(error))
            resolution = _undecided(call, facts)
        self._emit((resolution.asked, resolution.decided))
        decision = resolution.decision
        if not decision.allowed:
            raise _Refused("policy", ErrorCode.POLICY_DENIED, _policy_reason(decision))
        return decision

    def _mode_of(self, facts: CallFacts, decision: Decision) -> Mode:
        mode = facts.escalation or self._mode
        return mode if decision.mode is None or mode.rank < decision.mode.rank else decision.mode

    # --- 3. guards ------------------------------------------------------------------------------

    def _ask_guards(self, prepared: PreparedCall) -> None:
        for guard in self._guards:
            name = _name_of(guard)
            shown = _own_copy(prepared)
            try:
                denial = guard(shown)
            except Exception as error:
                diagnostics.warning("a guard failed", guard=name, error=repr(error))
                raise _Refused("guards", ErrorCode.GUARD_DENIED, f"the guard {name} failed, which denies") from error
            if isinstance(denial, Denial):
                reason = f"{name}: {denial.reason}. Escalation does not change this."
                raise _Refused("guards", ErrorCode.GUARD_DENIED, reason)
            if denial is not None:
                reason = f"the guard {name} gave neither a denial nor nothing, which denies"
                raise _Refused("guards", ErrorCode.GUARD_DENIED, reason)
            if (shown.call, shown.arguments) != (prepared.call, prepared.arguments):
                raise _Refused("guards", ErrorCode.GUARD_DENIED, f"the guard {name} changed the call, which denies")

    # --- 4. execute -----------------------------------------------------------------------------

    def _execute(self, prepared: PreparedCall, seconds: float, cancellation: Cancellation) -> tuple[ToolOutcome, int]:
        """Run the call; returns its outcome and how often it was run."""
        tool = prepared.tool
        invocation = Invocation(
            call_id=prepared.call["id"],
            arguments=prepared.arguments,
            facts=prepared.facts,
            mode=prepared.mode,
            timeout=seconds,
            cancellation=cancellation,
            may_escalate=prepared.decision.may_escalate,
        )
        attempts = 0
        while True:
            attempts += 1
            try:
                return tool.execute(invocation), attempts
            except RunnerError:
                raise
            except Exception as error:  # noqa: BLE001  # a fault of the tool is a result, not the end of the run
                name = tool.schema["name"]
                diagnostics.warning("a tool broke", tool=name, callId=invocation.call_id, error=repr(error))
                if tool.idempotent and attempts < ATTEMPTS and not cancellation.cancelled:
                    continue
                text = f"The tool {name} broke ({type(error).__name__}). This is a fault of the tool."
                if not tool.idempotent:
                    text += " Whether the call had an effect is not known."
                return ToolOutcome([{"type": "text", "text": text}], error=ErrorCode.TOOL_FAILED), attempts

    # --- 5. post-execute ------------------------------------------------------------------------

    def _inspect(self, prepared: PreparedCall, outcome: ToolOutcome) -> tuple[ToolOutcome, str | None]:
        """Ask the ``after_tool`` hooks; the digest is that of the content the tool gave."""
        first = outcome
        for hook in self._after_tool:
            shown = replace(outcome, content=copy_json(list(outcome.content)), meta=copy_json(outcome.meta))
            try:
                replacement = hook(_own_copy(prepared), shown)
            except RunnerError:
                raise
            except Exception as error:
                raise InternalError(f"the hook {_name_of(hook)} failed: {error!r}") from error
            outcome = outcome if replacement is None else replacement
        if outcome is first:
            return outcome, None
        if first.overflow is not None and first.overflow != outcome.overflow:
            _remove(first.overflow)
        whole = json.dumps(list(first.content), ensure_ascii=False, sort_keys=True, separators=(",", ":"))
        return outcome, hashlib.sha256(whole.encode("utf-8", "backslashreplace")).hexdigest()


class _Unlimited:
    """All the time that was asked for."""

    def __init__(self, seconds: float, together: int) -> None:
        del together
        self.granted = seconds

    def settle(self, used: Mapping[str, float]) -> None:
        """Count nothing."""


def abort(call: ToolCallBlock, mode: Mode, reason: str) -> PerformedCall:
    """What stands for a call that was not started."""
    outcome = ToolOutcome([{"type": "text", "text": f"Not started: {reason}"}], error=ErrorCode.ABORTED_BEFORE_DISPATCH)
    return PerformedCall(call, outcome, mode)


def error_record(code: ErrorCode) -> JsonObject:
    """``tool/result.error`` for a code: ``{name, code}``."""
    name = "".join(part.capitalize() for part in code.name.split("_"))
    return {"name": f"{name}Error", "code": code.name}


def content_bytes(content: Sequence[TextBlock | ImageBlock]) -> int:
    """UTF-8 bytes of the text in ``content``."""
    return len(text_of(list(content)).encode("utf-8", "backslashreplace"))


def _classify(tool: Tool, arguments: JsonObject) -> bool:
    try:
        return tool.is_concurrency_safe(arguments) is True
    except Exception as error:  # noqa: BLE001  # a classifier that throws says nothing about the call
        diagnostics.warning("a tool could not classify a call", tool=tool.schema["name"], error=repr(error))
        return False


def _own_copy(prepared: PreparedCall) -> PreparedCall:
    """The call for somebody who may only look at it."""
    return replace(prepared, call=copy_json(prepared.call), arguments=copy_json(prepared.arguments))


def _name_of(function: Callable[..., object]) -> str:
    return getattr(function, "__qualname__", type(function).__name__)


def _undecided(call: ToolCallBlock, facts: CallFacts) -> Resolution:
    """The denial of a call that the policy failed on."""
    approval = f"undecided-{call['id']}"
    paths = {"read": list(facts.read), "write": list(facts.write)}
    asked = ApprovalAsked(
        id=approval,
        call_id=call["id"],
        tool_name=call["name"],
        command=facts.command,
        paths=paths,
        escalation=None if facts.escalation is None else {"mode": facts.escalation.value},
    )
    return Resolution(
        Decision(allowed=False, rule=DEFAULT_RULE, reason="the policy could not decide on this call"),
        asked,
        ApprovalDecided(id=approval, outcome="rejected", rule=DEFAULT_RULE, by="policy"),
    )


def _policy_reason(decision: Decision) -> str:
    may = "may be asked: repeat the call with sandbox_permissions and justification"
    if not decision.may_escalate:
        may = "may not be asked"
    return f"rule {decision.rule}: {decision.reason.rstrip('.')}. Escalation {may}."


def _parse_object(text: str) -> JsonObject | str:
    """The JSON object, or what is wrong with the text."""
    import orjson

    try:
        value = orjson.loads(text)
        json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError, TypeError) as error:
        return f"not valid JSON ({_shorten(str(error))})"
    return value if isinstance(value, dict) else f"a JSON {type(value).__name__}, not an object"


def _unique_keys(pairs: list[tuple[str, Any]]) -> None:
    """Refuse a repeated key: which value counts would depend on who reads it."""
    seen = set()
    for key, _ in pairs:
        if key in seen:
            raise ValueError(f"the key {key!r} stands twice")
        seen.add(key)


def _shorten(text: str) -> str:
    half = _PROBLEM_CHARS // 2
    return text if len(text) <= _PROBLEM_CHARS else f"{text[:half]} ... {text[-half:]}"


def _remove(path: str) -> None:
    import contextlib
    import os

    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)  # noqa: PTH108  # pathlib is not loaded for one call
