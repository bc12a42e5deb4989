"""The closed table of hook points.

A hook overrides the points it needs. Hooks run in the order assembly gives them. When one
throws: ``guard`` denies, ``observe`` is logged and skipped, every other point ends the run
with INTERNAL. A hook may move the cached prefix only in ``before_request``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from runner.record import field, mutable_record, record

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.errors import ProviderError
    from runner.messages import JsonObject, Message, Usage
    from runner.session.events import Event
    from runner.session.projection import Projection
    from runner.tools.base import ToolOutcome
    from runner.tools.pipeline import Denial, PreparedCall


@mutable_record
class StepStarting:
    """A step is about to begin. A hook may add messages or end the turn.

    Attributes:
        turn: The turn, from 1.
        step: The step over the whole session, from 1.
        messages: What enters with this step; hooks may append to it.
        end_turn: Set to a reason to end the turn before a request is made.
    """

    turn: int
    step: int
    messages: list[Message] = field(default_factory=list)
    end_turn: str | None = None


class RequestAccess(Protocol):
    """What ``before_request`` may use: the loop itself, seen through what compaction needs."""

    turn: int
    step: int
    first_of_turn: bool
    projection: Projection

    @property
    def window(self) -> int:
        """The context window in tokens."""
        ...

    def occupancy(self) -> int:
        """Tokens the next request will hold: real usage of the last one plus what was added."""
        ...

    def append(self, event: Event) -> Event:
        """Write one event."""
        ...

    def summarise(
        self, messages: Sequence[Message], *, max_tokens: int, model: str | None
    ) -> tuple[list[JsonObject], Usage | None]:
        """Ask the model for a summary over ``messages``; content (empty: none was made) and usage."""
        ...


@record
class RequestFailed:
    """One attempt of a model request failed.

    Attributes:
        error: What happened.
        attempt: Number of this attempt, from 1.
        waited: Seconds since the first attempt began.
    """

    error: ProviderError
    attempt: int
    waited: float


@record
class TurnOver:
    """A turn ended with ``reason`` (the data of ``turn/end``); ``more`` prompts wait."""

    turn: int
    reason: str
    more: int


class Hook:
    """Base of all hooks: every point does nothing."""

    def before_step(self, starting: StepStarting) -> None:
        """Rewrite what enters the step, or end the turn."""

    def before_request(self, access: RequestAccess, *, overflow: bool) -> bool:
        """Compact if needed; True if the history changed. ``overflow``: the provider said too long."""
        return False

    def on_response(self, failed: RequestFailed) -> float | None:
        """Seconds to wait before another attempt, None to let the failure stand."""
        return None

    def guard(self, call: PreparedCall) -> Denial | None:
        """Deny the call, or abstain with None. There is no way to allow."""
        return None

    def after_tool(self, call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
        """A replacement for the outcome, or None. The digest of what it replaced is logged."""
        return None

    def after_turn(self, over: TurnOver) -> Sequence[Message]:
        """Prompts to queue as followups."""
        return ()

    def observe(self, event: Event) -> None:
        """See one event that was written; of a streamed block only its start and its end, where it is whole."""
