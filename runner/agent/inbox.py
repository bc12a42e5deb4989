"""What waits to enter the conversation: prompts for turns, messages for the next step.

Writes ``agent/inbox/spliced`` through the callable it is given, before its own state changes.
Adds messages at the end of the history only, so the provider's cached prefix is kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.session.events import InboxSpliced

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.agent.past import Target
    from runner.messages import Message
    from runner.session.events import Event


class Inbox:
    """Two queues. ``wakes`` is up when something in them asks for a turn.

    Args:
        emit: Appends an event to the session log.
        queues: What waits already, by target, as the log has it; taken over.
    """

    def __init__(self, emit: Callable[[Event], object], queues: dict[Target, list[Message]] | None = None) -> None:
        self._emit = emit
        self._queues: dict[Target, list[Message]] = queues or {"next-turn": [], "next-step": []}
        self._wake = self.queued_turns > 0

    @property
    def wakes(self) -> bool:
        """Whether a turn should begin."""
        return self._wake

    @property
    def queued_turns(self) -> int:
        """Prompts waiting for a turn of their own."""
        return len(self._queues["next-turn"])

    def send(self, message: Message, *, target: Target, wake: bool) -> None:
        """Queue one message."""
        queue = self._queues[target]
        self._emit(InboxSpliced(target=target, start=len(queue), inserted=[message]))
        queue.append(message)
        self._wake = self._wake or wake

    def followup(self, message: Message) -> None:
        """Queue a prompt for a turn of its own."""
        self.send(message, target="next-turn", wake=True)

    def steer(self, message: Message) -> None:
        """Queue a message for the next step and ask for one."""
        self.send(message, target="next-step", wake=True)

    def inject(self, message: Message) -> None:
        """Queue a message for the next step, whenever that comes."""
        self.send(message, target="next-step", wake=False)

    def first(self, message: Message) -> None:
        """Queue a prompt for a turn of its own, before all others."""
        self._emit(InboxSpliced(target="next-turn", start=0, inserted=[message]))
        self._queues["next-turn"].insert(0, message)
        self._wake = True

    def claim_turn(self) -> list[Message]:
        """Take all next-step messages and one queued prompt, for a turn that begins."""
        claimed = self.claim_step()
        queue = self._queues["next-turn"]
        if queue:
            self._emit(InboxSpliced(target="next-turn", start=0, removed_count=1, inserted=[]))
            claimed.append(queue.pop(0))
        self._wake = bool(queue)
        return claimed

    def claim_step(self) -> list[Message]:
        """Take all next-step messages, for a step that begins."""
        queue = self._queues["next-step"]
        if not queue:
            return []
        self._emit(InboxSpliced(target="next-step", start=0, removed_count=len(queue), inserted=[]))
        claimed, queue[:] = list(queue), []
        self._wake = bool(self._queues["next-turn"])
        return claimed
