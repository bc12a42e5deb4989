"""Repair: the events that close what a killed run left open.

Pure, deterministic and idempotent: the closing events of a repaired log are none. ``time`` repeats the
last real event's. Writes (through whoever appends them) ``tool/result``, ``step/end``, ``turn/end``.
Prefix cache: the results extend the prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.errors import ErrorCode, LogError
from runner.session.events import StepEnd, ToolResult, TurnEnd
from runner.session.structure import Structure
from runner.session.surface import check_message

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runner.messages import Message
    from runner.session.events import Event
    from runner.session.structure import OpenCall

NOT_STARTED = "The run ended before this call was started, so it had no effect. Ask for it again if it is still needed."
"""What the model reads for a call that was never started."""

OUTCOME_UNKNOWN = (
    "The run ended while this call was running. Its outcome is unknown: it may have happened, in part or not at all. "
    "Do not retry it blindly. Retry it only if it is idempotent; otherwise verify first what state the workspace and "
    "any external system are in. Nobody can be asked: if the state cannot be verified, stop and report that."
)
"""What the model reads for a call that was running when the run ended."""


def closing_events(events: Iterable[Event]) -> list[Event]:
    """The events that close the open turn of ``events``, in order, with seq and time set.

    For each call of the open step without a result, in the model's order: TOOL_OUTCOME_UNKNOWN if the
    call was recorded, else TOOL_NOT_STARTED. Then ``step/end`` and ``turn/end`` with reason interrupted.

    Raises:
        LogError: LOG_INVALID, the events are broken before their end. That is corruption, not a kill.
    """
    structure = Structure()
    seq, time = -1, 0
    for event in events:
        if event.seq != seq + 1:
            raise LogError(f"event {event.seq} follows event {seq}")
        check_message(event)
        structure.apply(event)
        seq, time = event.seq, event.time
    return close(structure, next_seq=seq + 1, time=time)


def close(structure: Structure, *, next_seq: int, time: int) -> list[Event]:
    """The closing events for a structure that was folded from a whole log."""
    turn, step = structure.turn, structure.step
    if turn is None:
        return []
    closing: list[Event] = []
    if step is not None:
        for call in structure.calls:
            if call.result_seq is None:
                closing.append(_lost_result(call, turn=turn, step=step, seq=next_seq + len(closing), time=time))
        closing.append(StepEnd(turn=turn, step=step, seq=next_seq + len(closing), time=time))
    closing.append(TurnEnd(turn=turn, reason={"kind": "interrupted"}, seq=next_seq + len(closing), time=time))
    return closing


def _lost_result(call: OpenCall, *, turn: int, step: int, seq: int, time: int) -> ToolResult:
    started = call.call_seq is not None
    code = ErrorCode.TOOL_OUTCOME_UNKNOWN if started else ErrorCode.TOOL_NOT_STARTED
    message: Message = {
        "role": "user",
        "content": [
            {
                "type": "tool-result",
                "toolCallId": call.call_id,
                "content": [{"type": "text", "text": OUTCOME_UNKNOWN if started else NOT_STARTED}],
                "isError": True,
            }
        ],
        "source": {"kind": "tool", "callId": call.call_id},
        "id": f"interrupted-tool-result-{call.call_id}-{seq}",
    }
    return ToolResult(
        turn=turn,
        step=step,
        message=message,
        error={"name": "ToolOutcomeUnknownError" if started else "ToolNotStartedError", "code": code.name},
        source_event_seqs=[call.call_seq if call.call_seq is not None else call.message_seq],
        seq=seq,
        time=time,
    )
