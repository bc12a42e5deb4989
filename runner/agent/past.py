"""What a loop needs to know of the session before it: empty for a new one, a fold of the log for one that goes on.

Pure; writes no events. The history is taken over as it is in the log, so the prefix stays what the
provider has cached.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from runner.agent.budget import COUNTED, amounts_of
from runner.agent.occupancy import Occupancy
from runner.session import events as ev
from runner.session import tokens
from runner.session.projection import Projection

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.messages import Message, RequestHeader, Usage

Target = Literal["next-turn", "next-step"]


class Past:
    """A fold of the events of a session.

    Args:
        cost_of: Money for a usage, None when unknown.
        summary_cost_of: The same for summaries, which another model may write.
        seed: Events that were taken over from another session; what they used is not this one's.

    Attributes:
        projection: The message history.
        surface: The events it was folded from.
        occupancy: How full the window is.
        header: The last call configuration that was logged, None before the first request.
        turn: Number of the last turn.
        step: Number of the last step.
        completed: Whether the last turn ended by itself.
        queues: What waits to enter, by target.
        prompts: Ids of the prompts that were ever queued.
        start: The last ``run/start``, None for a log without.
        ended: The last ``run/end``, None if nothing but artifacts and seals may follow it.
        forked: Whether all of it was taken over from another session.
        seed_end: Seq of the last ``session/end-seed``, None without.
        seal: Digest of the last seal.
        written: The artifacts that the last part of the run wrote, by path.
        answered: Requests that got an answer, or a failure that the run went on behind.
        failed_checks: How often each check failed so far, by name.
    """

    def __init__(
        self,
        *,
        cost_of: Callable[[Usage], float | None] = lambda _usage: None,
        summary_cost_of: Callable[[Usage], float | None] | None = None,
        seed: int = 0,
    ) -> None:
        self.projection = Projection()
        self.surface: list[ev.Event] = []
        self.occupancy = Occupancy()
        self.header: RequestHeader | None = None
        self.turn = 0
        self.step = 0
        self.completed = False
        self.queues: dict[Target, list[Message]] = {"next-turn": [], "next-step": []}
        self.prompts: set[str] = set()
        self.start: ev.RunStart | None = None
        self.ended: ev.RunEnd | None = None
        self.forked = False
        self.seed_end: int | None = None
        self.seal: str | None = None
        self.written: dict[str, ev.ArtifactWritten] = {}
        self.answered = 0
        self.failed_checks: dict[str, int] = {}
        self._cost_of = cost_of
        self._summary_cost_of = summary_cost_of or cost_of
        self._seed = seed
        self._asking = False
        self._before_turn = (False, 0)
        self._compacted = False
        self._used: dict[str, float] = dict.fromkeys(COUNTED, 0)
        self._milliseconds = 0
        self._first_time: int | None = None
        self._last_time = 0
        self._end_time = 0
        self._claimed: dict[str, tuple[Target, Message]] = {}
        self._rules: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.RunStart: self._run_start,
            ev.RunResume: self._run_resume,
            ev.RunEnd: self._run_end,
            ev.SessionEndSeed: self._end_seed,
            ev.ArtifactWritten: self._artifact,
            ev.CheckEnd: self._checked,
            ev.LogSeal: self._sealed,
            ev.TurnStart: self._turn_start,
            ev.TurnEnd: self._turn_end,
            ev.StepStart: self._step_start,
            ev.InboxSpliced: self._spliced,
            ev.RequestHeaderEvent: self._request_header,
            ev.RequestSent: self._sent,
            ev.LlmRetry: self._settled,
            ev.CompactionSummary: self._summary,
            ev.CompactionEnd: self._compaction_end,
            ev.ToolResult: self._tool_result,
        }

    @property
    def used(self) -> dict[str, float]:
        """What this session used of each limit, in the units of ``Limits``."""
        # The turn that was cut off goes on in the next one, which counts.
        cut = 1 if self.turn and not self.completed and self._used["turns"] else 0
        wall = (self._milliseconds + self._span()) / 1000
        return {**self._used, "turns": self._used["turns"] - cut, "wall": wall}

    @property
    def lost(self) -> list[tuple[Target, Message]]:
        """Messages that were claimed for a turn or step and never entered it, in order."""
        return list(self._claimed.values())

    @property
    def time(self) -> int:
        """Epoch milliseconds of the last event, 0 without."""
        return self._end_time

    def apply(self, event: ev.Event) -> None:
        """Take one event into account."""
        rule = self._rules.get(type(event))
        if rule is not None:
            rule(event)
        if event.SURFACE:
            self._enter(event)
        self._end_time = event.time
        # What publishes a run is no work of the agent, and may have been written long after by recover.
        if isinstance(event, (ev.RunEnd, ev.ArtifactWritten, ev.LogSeal, ev.SessionEndSeed)):
            return
        if self._first_time is None and event.seq >= self._seed:
            self._first_time = event.time
        self._last_time = event.time

    def _span(self) -> int:
        return 0 if self._first_time is None else max(0, self._last_time - self._first_time)

    def _charge(self, event: ev.Event, name: str, amount: float) -> None:
        if event.seq >= self._seed:
            self._used[name] += amount

    # --- the run ------------------------------------------------------------------------------

    def _run_start(self, event: ev.RunStart) -> None:
        self.start = event

    def _run_resume(self, event: ev.RunResume) -> None:
        self._milliseconds += self._span()
        self._first_time = self._last_time = event.time
        self.ended = None
        self.forked = False
        self.written.clear()

    def _end_seed(self, event: ev.SessionEndSeed) -> None:
        self.seed_end = event.seq
        self.ended = None
        self.forked = True
        self.written.clear()

    def _run_end(self, event: ev.RunEnd) -> None:
        self.ended = event

    def _artifact(self, event: ev.ArtifactWritten) -> None:
        self.written[event.path] = event

    def _checked(self, event: ev.CheckEnd) -> None:
        if not event.passed:
            self.failed_checks[event.name] = self.failed_checks.get(event.name, 0) + 1

    def _sealed(self, event: ev.LogSeal) -> None:
        self.seal = event.sha256

    # --- turns and what enters them -----------------------------------------------------------

    def _turn_start(self, event: ev.TurnStart) -> None:
        self._before_turn = (self.completed, self.step)
        self._compacted = False
        self.turn = event.turn
        self.completed = False
        self._charge(event, "turns", 1)

    def _turn_end(self, event: ev.TurnEnd) -> None:
        kind = event.reason.get("kind")
        completed, step = self._before_turn
        if kind == "completed" and self._compacted and self.step == step:  # by hand, which is no turn of the agent
            self._charge(event, "turns", -1)
            self.completed = completed
        else:
            self.completed = kind == "completed"
        if kind == "error" and self._asking:
            self._settled()

    def _step_start(self, event: ev.StepStart) -> None:
        self.step = event.step
        self._charge(event, "steps", 1)

    def _spliced(self, event: ev.InboxSpliced) -> None:
        target: Target = "next-turn" if event.target == "next-turn" else "next-step"
        queue = self.queues[target]
        end = event.start + (event.removed_count or 0)
        for message in queue[event.start : end]:
            self._claimed[message["id"]] = (target, message)
        queue[event.start : end] = event.inserted
        for message in event.inserted:
            self._claimed.pop(message["id"], None)
            if message["source"].get("kind") == "user":
                self.prompts.add(message["id"])

    @property
    def messages(self) -> list[Message]:
        """Everything the agent was told or will be: the history, what was claimed and lost, what waits."""
        waiting = (message for queue in self.queues.values() for message in queue)
        return [*self.projection.messages, *(message for _, message in self.lost), *waiting]

    # --- the history --------------------------------------------------------------------------

    def _request_header(self, event: ev.RequestHeaderEvent) -> None:
        self.header = event.header

    def _enter(self, event: ev.Event) -> None:
        if isinstance(event, ev.UserMessage) and event.id is not None:
            self._claimed.pop(event.id, None)
        answered = isinstance(event, ev.AssistantMessage) and event.surface_op == "append"
        before = self.occupancy.of(self.header, self.projection) if answered and self.header is not None else 0
        self.surface.append(event)
        self.projection.apply(event)
        if not isinstance(event, ev.AssistantMessage) or not answered:
            return
        if not event.interrupted:
            self._settled()
        if event.usage is not None and self.header is not None:
            self.occupancy.anchor(event.usage, self.header, self.projection)
        content = event.message["content"]
        self._settle(event, event.usage, before, tokens.estimate_content(content, tokens.cautious))

    def _settle(self, event: ev.Event, usage: Usage | None, asked: int, answered: int) -> None:
        """Count a call as the loop does: without a report by what it is estimated to have used."""
        found = usage if usage is not None else {"inputTokens": asked, "outputTokens": answered}
        summary = isinstance(event, (ev.CompactionSummary, ev.CompactionEnd))
        cost = self._summary_cost_of(found) if summary else self._cost_of(found)
        for name, used in amounts_of(found, cost).items():
            self._charge(event, name, used)

    def _sent(self, _: ev.RequestSent) -> None:
        self._asking = True

    def _settled(self, *_: object) -> None:
        self._asking = False
        self.answered += 1

    def _summary(self, event: ev.CompactionSummary) -> None:
        self._settled()
        answered = tokens.estimate_content(event.summary, tokens.cautious)
        self._settle(event, event.usage, event.shadowed_token_count or 0, answered)

    def _compaction_end(self, event: ev.CompactionEnd) -> None:
        self._compacted = True
        if event.refused_usage is not None:
            self._settle(event, event.refused_usage, 0, 0)

    def _tool_result(self, event: ev.ToolResult) -> None:
        if event.surface_op != "append":
            return
        meta = event.meta or {}
        size, milliseconds = meta.get("bytes"), meta.get("durationMs")
        if isinstance(size, int):
            self._charge(event, "output_bytes", size)
        if isinstance(milliseconds, int):
            self._charge(event, "tool_time", milliseconds / 1000)
