"""Turns, steps, calls and results: which of them are open, and whether they nest as they must.

Pure. One state machine serves repair (what has to be closed) and verification (what is broken).
Invariants: turns follow each other and count up; steps lie inside turns; each recorded call has one
result in its step; a decision answers a question; a compaction ends in the turn it began in. What a
kill left open in a turn that ended ``interrupted`` is no defect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.errors import LogError
from runner.record import mutable_record
from runner.session.codec import ChunkRow
from runner.session.events import (
    ApprovalAsked,
    ApprovalDecided,
    AssistantChunk,
    AssistantMessage,
    CompactionEnd,
    CompactionPrune,
    CompactionStart,
    CompactionSummary,
    RequestSent,
    StepEnd,
    StepStart,
    ToolCall,
    ToolResult,
    TurnEnd,
    TurnStart,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.session.events import Event


@mutable_record
class OpenCall:
    """One call block of the open step, with the seqs of its message, its ``tool/call`` and its result."""

    call_id: str
    message_seq: int
    call_seq: int | None = None
    result_seq: int | None = None


class Structure:
    """The state after the events applied so far.

    ``turn`` and ``step`` are the open ones, None when none is open; ``calls`` are the call blocks of
    the open step in the model's order; ``steps`` and ``turns`` count the ended ones.
    """

    def __init__(self) -> None:
        self.turn: int | None = None
        self.step: int | None = None
        self.calls: list[OpenCall] = []
        self.last_turn = 0
        self.turns = 0
        self.steps = 0
        self._last_step = 0
        self._asked: dict[str, int] = {}
        self._compactions: dict[str, int] = {}
        self._unanswered: int | None = None
        self._prune: CompactionPrune | None = None
        self._rules: dict[type[Event | ChunkRow], Callable[..., None]] = {
            TurnStart: self._turn_start,
            TurnEnd: self._turn_end,
            StepStart: self._step_start,
            StepEnd: self._step_end,
            AssistantChunk: self._inside,
            ChunkRow: self._inside,
            AssistantMessage: self._answer,
            ToolCall: self._call,
            ToolResult: self._result,
            RequestSent: self._sent,
            ApprovalAsked: self._ask,
            ApprovalDecided: self._decide,
            CompactionStart: self._compaction_start,
            CompactionSummary: self._compaction_summary,
            CompactionEnd: self._compaction_end,
            CompactionPrune: self._pruned,
        }

    def apply(self, event: Event | ChunkRow) -> None:
        """Fold one event, or a row that stands for several.

        Raises:
            LogError: LOG_INVALID, the event cannot stand here.
        """
        if self._prune is not None:
            self._check_prune(event)
        rule = self._rules.get(type(event))
        if rule is not None:
            rule(event)

    # --- turns and steps ----------------------------------------------------------------------

    def _turn_start(self, event: TurnStart) -> None:
        if self.turn is not None:
            raise _broken(event, f"turn {self.turn} is still open")
        if event.turn <= self.last_turn:
            raise _broken(event, f"turn {event.turn} follows turn {self.last_turn}")
        self.turn = self.last_turn = event.turn
        self._last_step = 0
        self._unanswered = None

    def _turn_end(self, event: TurnEnd) -> None:
        if event.turn != self.turn:
            raise _broken(event, f"turn {event.turn} ends and {_named('turn', self.turn)} is open")
        if self.step is not None:
            raise _broken(event, f"step {self.step} is still open")
        kind = event.reason.get("kind")
        if kind != "interrupted" and self._compactions:
            raise _broken(event, f"the compaction of event {min(self._compactions.values())} has no end")
        if kind != "interrupted" and self._asked:
            raise _broken(event, f"the approval asked in event {min(self._asked.values())} was not decided")
        if kind == "completed" and self._unanswered is not None:
            raise _broken(event, f"a call of the message in event {self._unanswered} has no result")
        self._compactions.clear()
        self._asked.clear()
        self.turn = None
        self.turns += 1

    def _step_start(self, event: StepStart) -> None:
        if event.turn != self.turn:
            raise _broken(event, f"a step of turn {event.turn} starts and {_named('turn', self.turn)} is open")
        if self.step is not None:
            raise _broken(event, f"step {self.step} is still open")
        if event.step <= self._last_step:
            raise _broken(event, f"step {event.step} follows step {self._last_step}")
        self.step = self._last_step = event.step
        self.calls = []

    def _step_end(self, event: StepEnd) -> None:
        self._inside(event)
        for call in self.calls:
            if call.result_seq is None:
                if call.call_seq is not None:
                    raise _broken(event, f"the call {call.call_id} of event {call.call_seq} has no result")
                self._unanswered = call.message_seq
        self.step = None
        self.calls = []
        self.steps += 1

    def _inside(
        self, event: StepEnd | AssistantChunk | ChunkRow | AssistantMessage | ToolCall | ToolResult | RequestSent
    ) -> None:
        if self.turn is None or event.turn != self.turn or event.step != self.step:
            raise _broken(
                event,
                f"it belongs to turn {event.turn}, step {event.step}, and "
                f"{_named('turn', self.turn)}, {_named('step', self.step)} is open",
            )

    def _sent(self, event: RequestSent) -> None:
        # A compaction that was asked for by hand makes its request in a turn without steps.
        if not (event.purpose == "summary" and self._compactions and self.step is None and event.turn == self.turn):
            self._inside(event)

    # --- calls --------------------------------------------------------------------------------

    def _answer(self, event: AssistantMessage) -> None:
        if event.surface_op != "append":
            return
        self._inside(event)
        for block in event.message["content"]:
            if block["type"] == "tool-call":
                self.calls.append(OpenCall(block["id"], event.seq))

    def _call(self, event: ToolCall) -> None:
        self._inside(event)
        for call in self.calls:
            if call.call_id == event.call_id and call.call_seq is None and call.result_seq is None:
                call.call_seq = event.seq
                return
        raise _broken(event, f"no message of the step asks for the call {event.call_id}")

    def _result(self, event: ToolResult) -> None:
        if event.surface_op != "append":
            return
        self._inside(event)
        ids = [block["toolCallId"] for block in event.message["content"] if block["type"] == "tool-result"]
        if len(ids) != 1:
            raise _broken(event, f"it holds {len(ids)} results")
        waiting = [call for call in self.calls if call.call_id == ids[0] and call.result_seq is None]
        if not waiting:
            raise _broken(event, f"the call {ids[0]} is not open in this step")
        # Of two calls with one id, the recorded one is the one that can have a result.
        call = next((call for call in waiting if call.call_seq is not None), waiting[0])
        call.result_seq = event.seq

    # --- approvals and compaction -------------------------------------------------------------

    def _ask(self, event: ApprovalAsked) -> None:
        if event.id in self._asked:
            raise _broken(event, f"the approval {event.id} is asked twice")
        self._asked[event.id] = event.seq

    def _decide(self, event: ApprovalDecided) -> None:
        if self._asked.pop(event.id, None) is None:
            raise _broken(event, f"the approval {event.id} was not asked")

    def _compaction_start(self, event: CompactionStart) -> None:
        if self._compactions:
            raise _broken(event, f"the compaction of event {min(self._compactions.values())} is still open")
        self._compactions[event.compaction_id] = event.seq

    def _compaction_summary(self, event: CompactionSummary) -> None:
        if event.compaction_id not in self._compactions:
            raise _broken(event, f"compaction {event.compaction_id} is not open")

    def _compaction_end(self, event: CompactionEnd) -> None:
        if self._compactions.pop(event.compaction_id, None) is None:
            raise _broken(event, f"compaction {event.compaction_id} is not open")

    def _pruned(self, event: CompactionPrune) -> None:
        self._prune = event

    def _check_prune(self, event: Event | ChunkRow) -> None:
        span = self._prune.shadowed_range if self._prune else {}
        wanted = {"op": "replace", "start": span.get("start"), "end": span.get("end")}
        if isinstance(event, ToolResult) and event.surface_op == wanted:
            self._prune = None
        elif isinstance(event, TurnEnd) and event.reason.get("kind") == "interrupted":
            self._prune = None  # the run was killed between the two
        elif not isinstance(event, StepEnd):
            raise _broken(event, "the event after compaction/prune must be the tool/result that replaces its span")


def _named(what: str, number: int | None) -> str:
    return f"no {what}" if number is None else f"{what} {number}"


def _broken(event: Event | ChunkRow, what: str) -> LogError:
    return LogError(f"event {event.seq} ({event.TYPE}): {what}")
