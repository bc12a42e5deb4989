"""The closed table of hook points, and how they are asked.

A hook overrides the points it needs; points are asked in the order in which assembly gives the hooks. What a point may
change is what it returns, or the one object made for it to be changed (``StepStarting``); everything else it is given
is its own copy or cannot be changed. When a hook throws: ``guard`` denies, ``observe`` is logged and skipped, every
other point ends the run with INTERNAL. A ``RunnerError`` is no bug of a hook but a fault that it met; it keeps its
code. Writes no events. A hook may move the cached prefix only in ``before_request``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from runner import diagnostics
from runner.agent.budget import RunStopped
from runner.errors import InternalError, RunnerError
from runner.messages import copy_json
from runner.record import field, mutable_record, record

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.errors import ProviderError
    from runner.messages import JsonObject, Message, Usage
    from runner.session.events import Event
    from runner.session.projection import Projection
    from runner.tools.base import ToolOutcome
    from runner.tools.pipeline import Denial, PreparedCall


@mutable_record
class StepStarting:
    """A step is about to begin. A hook may rewrite what enters or end the turn.

    Attributes:
        turn: The turn, from 1.
        step: The step over the whole session, from 1.
        messages: What enters with this step; hooks may add, change and remove.
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
        """Write one event of a compaction: one of its own types, or one that replaces a part of the history.

        Raises:
            InternalError: It is another one.
        """
        ...

    def summarise(
        self, messages: Sequence[Message], *, max_tokens: int, model: str | None
    ) -> tuple[list[JsonObject], Usage | None]:
        """Ask the model for a summary over ``messages``; content (empty: none was made) and usage."""
        ...


@record
class RequestEnded:
    """One attempt of a model request failed, or the request got its answer, which is in the log.

    Attributes:
        error: What happened, None for an answer.
        attempt: Number of this attempt, from 1.
        waited: Seconds since the first attempt began.
        purpose: ``main`` or ``summary``, as in ``request/sent``.
        usage: What the provider says the answer took, None if it does not or there is none.
    """

    error: ProviderError | None
    attempt: int
    waited: float
    purpose: str = "main"
    usage: Usage | None = None


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

    def on_response(self, ended: RequestEnded) -> float | None:
        """Of a failed attempt: seconds to wait before another one, None to let the failure stand.

        The first hook that gives a number decides. Of an answer: nothing can be asked for, its usage may be noted.
        """
        return None

    def guard(self, call: PreparedCall) -> Denial | None:
        """Deny the call, or abstain with None. There is no way to allow."""
        return None

    def after_tool(self, call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
        """A replacement for the outcome, or None. The digest of what it replaced is logged."""
        return None

    def after_turn(self, over: TurnOver) -> Sequence[Message]:
        """Prompts to queue as followups of a turn that was completed."""
        return ()

    def observe(self, event: Event) -> None:
        """See one event that was written; of a streamed block only its start and its end, where it is whole."""


POINTS = ("before_step", "before_request", "on_response", "guard", "after_tool", "after_turn", "observe")
"""Every point, in the order in which a step meets them."""


def hooks_at(hooks: Sequence[Hook], point: str) -> list[Callable[..., Any]]:
    """The methods of those hooks that override ``point``, in order."""
    return [getattr(hook, point) for hook in hooks if getattr(type(hook), point) is not getattr(Hook, point)]


def ask(methods: Sequence[Callable[..., Any]], *given: object, **named: object) -> list[Any]:
    """Ask hooks at a point whose failure ends the run; returns what each said.

    Raises:
        InternalError: One threw.
        RunnerError: One met a fault of the infrastructure.
        RunStopped: One called into the loop, which has to stop.
    """
    answers = []
    for method in methods:
        try:
            answers.append(method(*given, **named))
        except (RunnerError, RunStopped):
            raise
        except Exception as error:
            raise InternalError(f"the hook {name_of(method)} failed: {error!r}") from error
    return answers


def show(observers: Sequence[Callable[[Event], None]], event: Event) -> None:
    """Let each observer see a copy of an event; what one throws is logged and stops nobody."""
    for observer in observers:
        try:
            observer(private_copy(event))
        except Exception as error:  # noqa: BLE001  # an observer may never stop the run
            diagnostics.warning("observer failed", hook=name_of(observer), error=repr(error))


def name_of(method: Callable[..., Any]) -> str:
    """A hook's method as ``Class.point``."""
    return getattr(method, "__qualname__", type(method).__name__)


def private_copy(event: Event) -> Event:
    """A copy of an event that shares nothing that can be changed with it."""
    cls = type(event)
    copy = cls.__new__(cls)
    for name in _slots(cls):
        value = getattr(event, name)
        setattr(copy, name, copy_json(value) if type(value) in _CHANGEABLE else value)
    return copy


_CHANGEABLE = (dict, list)

_SLOTS: dict[type, tuple[str, ...]] = {}


def _slots(cls: type) -> tuple[str, ...]:
    found = _SLOTS.get(cls)
    if found is None:
        found = _SLOTS[cls] = tuple(name for each in cls.__mro__ for name in getattr(each, "__slots__", ()))
    return found
