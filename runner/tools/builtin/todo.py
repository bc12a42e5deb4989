"""``todo``: the model's own list of what is left to do.

Event: ``todo/write``, handed to the pipeline with the result. It says nothing about the task's
outcome.
Prefix cache: nothing beyond the fixed place in the tool table; results are appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.approvals.policy import CallFacts
from runner.figures import counted
from runner.session.events import TodoWrite
from runner.tools.base import ToolOutcome

if TYPE_CHECKING:
    from runner.messages import JsonObject, ToolSchema
    from runner.tools.base import Invocation

STATES = ("pending", "in_progress", "completed")


TODO: ToolSchema = {
    "name": "todo",
    "description": "Write down the whole list of steps of a longer task and how far they are.",
    "parameters": {
        "type": "object",
        "properties": {
            "todos": {
                "type": "array",
                "maxItems": 100,
                "items": {
                    "type": "object",
                    "properties": {"content": {"type": "string"}, "status": {"type": "string", "enum": list(STATES)}},
                    "required": ["content", "status"],
                    "additionalProperties": False,
                },
            }
        },
        "required": ["todos"],
        "additionalProperties": False,
    },
}


class Todo:
    """Keeps the list in the session log."""

    schema: ToolSchema = TODO
    idempotent = True

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """The last list counts, so lists come one after the other."""
        return False

    def facts(self, arguments: JsonObject) -> CallFacts:  # noqa: ARG002  # nothing outside the log is touched
        """Nothing is touched."""
        return CallFacts("todo")

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Hand the list over."""
        todos = invocation.arguments["todos"]
        counts = [f"{sum(todo['status'] == state for todo in todos)} {state}" for state in STATES]
        text = f"{counted(len(todos), 'todo')}: {', '.join(counts)}"
        return ToolOutcome([{"type": "text", "text": text}], events=[TodoWrite(todos=todos)])
