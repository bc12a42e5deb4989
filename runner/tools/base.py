"""The contract of a tool.

Tools are built by assembly with what they need. They write no events; what they want logged
they return in ``ToolOutcome.events``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from runner.record import field, mutable_record, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.approvals.policy import CallFacts
    from runner.cancellation import Cancellation
    from runner.errors import ErrorCode
    from runner.messages import ImageBlock, JsonObject, TextBlock, ToolSchema
    from runner.permission import Mode
    from runner.session.events import Event


@record
class Invocation:
    """One allowed call, about to run.

    Attributes:
        call_id: Id of the call in the log.
        arguments: Parsed arguments, valid against the tool's schema.
        facts: What was decided on. A tool uses these paths; it never resolves them again.
        mode: The permission mode of this call.
        timeout: Seconds the call may take at most.
        cancellation: Goes up when the run is cancelled.
        may_escalate: A rule exists that would consider the call with escalation.
    """

    call_id: str
    arguments: JsonObject
    facts: CallFacts
    mode: Mode
    timeout: float
    cancellation: Cancellation
    may_escalate: bool = False


@mutable_record
class ToolOutcome:
    """What a call gave, before spill and redaction.

    Attributes:
        content: Blocks for the model.
        error: ``ErrorCode`` of a failure, None on success. A command that exits non-zero is a
            success of the shell tool with ``meta["exitCode"]``.
        meta: JSON values for ``tool/result.meta``, without what the pipeline adds itself
            (``durationMs, mode, bytes, truncated, spill, attempts``).
        events: Events to append after the result's ``tool/call`` and before ``tool/result``.
        overflow: Path of a file with the whole output when ``content`` holds only a part.
        cancelled: The call ended early since the run was cancelled.
    """

    content: Sequence[TextBlock | ImageBlock]
    error: ErrorCode | None = None
    meta: JsonObject = field(default_factory=dict)
    events: Sequence[Event] = ()
    overflow: str | None = None
    cancelled: bool = False


class Tool(Protocol):
    """One tool. ``idempotent`` says that the pipeline may run a call again after a fault of ours."""

    schema: ToolSchema
    idempotent: bool

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:
        """True only if a call with these arguments may overlap other safe calls."""
        ...

    def facts(self, arguments: JsonObject) -> CallFacts:
        """What the policy decides on: command, resolved paths, escalation.

        Raises:
            RunnerError: INVALID_ARGS, when the arguments make no sense beyond what the schema says.
        """
        ...

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Run the call. Failures of the task are outcomes.

        Raises:
            SandboxError: The sandbox itself broke; the run ends.
        """
        ...
