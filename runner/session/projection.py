"""The projection: what the model sees, folded from the events.

Pure. ``message_of`` is the only place where an event becomes a message. ``Projection`` folds as
events come and costs what is new; ``derive_messages`` folds a whole list anew and shares no state
with it, so that the two can be compared. Effect on the prefix cache: none of its own; messages only
grow at the end until a replace, which ``Projection.generation`` makes visible.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from runner.errors import LogError
from runner.session.events import AssistantMessage, ToolResult, UserMessage
from runner.session.surface import Surface

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runner.messages import Message
    from runner.session.events import Event


def message_of(event: Event) -> Message | None:
    """The message of a surface event, None for any other event."""
    if isinstance(event, (AssistantMessage, ToolResult)):
        return event.message
    if isinstance(event, UserMessage):
        return cast("Message", {"role": event.role, "content": event.content, "source": event.source, "id": event.id})
    return None


class Projection:
    """The conversation after the events applied so far.

    ``nodes`` are the surface events and ``messages`` their messages, in order and index by index.
    While ``generation`` stays the same both lists only grow, so a caller may take what is new from
    where it stopped. Callers must not change the lists.
    """

    def __init__(self) -> None:
        self.nodes: list[Event] = []
        self.messages: list[Message] = []
        self.generation = 0
        self._surface = Surface()

    def apply(self, event: Event) -> None:
        """Fold one event.

        Raises:
            LogError: LOG_INVALID, the event breaks a surface rule; nothing was changed.
        """
        message = message_of(event)
        span = self._surface.apply(event)
        if message is None:
            return
        if span is None:
            self.nodes.append(event)
            self.messages.append(message)
        else:
            self.nodes[span.start : span.end] = [event]
            self.messages[span.start : span.end] = [message]
            self.generation += 1


def derive_messages(events: Iterable[Event]) -> list[Message]:
    """Fold all of ``events`` from nothing and return the messages.

    Raises:
        LogError: LOG_INVALID, a replace names a node that is not there.
    """
    conversation: list[tuple[int, Message]] = []
    for event in events:
        message = message_of(event)
        if message is None:
            continue
        entry = (event.seq, message)
        operation = event.surface_op
        if operation == "append":
            conversation.append(entry)
            continue
        where = {seq: index for index, (seq, _) in enumerate(conversation)}
        try:
            first, last = where[operation["start"]], where[operation["end"]]  # type: ignore[index]  # not a dict is caught below
        except (KeyError, TypeError) as error:
            raise LogError(f"event {event.seq}: the replaced span is not on the surface") from error
        conversation = [*conversation[:first], entry, *conversation[last + 1 :]]
    return [message for _, message in conversation]
