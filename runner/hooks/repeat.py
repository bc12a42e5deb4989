"""Reminders when the model makes the same call again and again.

The same tool with the same key-sorted arguments in a row: a gentle word at 3, details at 5 and
8. A reminder never blocks.
Prefix cache: kept, a reminder is appended at the end of the history.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from runner.agent.hook import Hook
from runner.session.events import ToolCall

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.agent.hook import StepStarting
    from runner.messages import Message
    from runner.session.events import Event

REMIND_AT = (3, 5, 8)
_SHOWN = 500


def _canonical(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), sort_keys=True)
    except (ValueError, RecursionError):
        return arguments  # no JSON, or too deep for the parser: the text is what is compared


class RepeatHook(Hook):
    """Counts equal calls in a row and reminds with the next step."""

    def __init__(self, *, new_id: Callable[[], str]) -> None:
        self._new_id = new_id
        self._last: tuple[str, str] | None = None
        self._count = 0
        self._due: list[str] = []

    def observe(self, event: Event) -> None:
        """Count ``tool/call`` events."""
        if not isinstance(event, ToolCall):
            return
        key = (event.name, _canonical(event.arguments))
        self._count = self._count + 1 if key == self._last else 1
        self._last = key
        if self._count not in REMIND_AT:
            return
        text = f"You have made the same {event.name} call {self._count} times in a row."
        if self._count == REMIND_AT[0]:
            text += " If its result does not help, try another way."
        else:
            shown = key[1] if len(key[1]) <= _SHOWN else key[1][:_SHOWN] + "..."
            text += (
                f" Its arguments were {shown}. The result will not change. Do something else, or say what blocks you."
            )
        self._due.append(text)

    def before_step(self, starting: StepStarting) -> None:
        """Put due reminders into the step."""
        for text in self._due:
            message: Message = {
                "role": "user",
                "id": self._new_id(),
                "content": [{"type": "text", "text": text}],
                "source": {"kind": "plugin", "plugin": "repeat"},
            }
            starting.messages.append(message)
        self._due.clear()
