"""The line protocol of ``--output-format stream-json``.

One JSON object a line, in the shape that consumers of ``claude -p --output-format stream-json``
parse: ``system`` (init), ``assistant``, ``user``, ``result``. A view of the log, never its source.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from runner.session.events import AssistantMessage, RequestHeaderEvent, RunStart, ToolResult

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.messages import JsonObject, Usage
    from runner.session.events import Event


def _usage(usage: Usage | None) -> JsonObject:
    if usage is None:
        return {}
    return {
        "input_tokens": usage["inputTokens"],
        "cache_read_input_tokens": usage.get("cacheReadTokens", 0),
        "cache_creation_input_tokens": usage.get("cacheWriteTokens", 0),
        "output_tokens": usage["outputTokens"],
    }


def _tool_input(arguments: str) -> Any:
    """The arguments as JSON if they are, and no deeper than can be written again."""
    import orjson

    try:
        value = orjson.loads(arguments)
        orjson.dumps(value)
    except (ValueError, TypeError):
        return {"arguments": arguments}
    return value


class StreamJson:
    """Observes events and writes one line for each that the protocol knows.

    Args:
        session_id: Id of the session.
        cwd: The workspace.
        write: Takes one line without its newline.
    """

    def __init__(self, *, session_id: str, cwd: str, write: Callable[[str], object]) -> None:
        self._session_id = session_id
        self._cwd = cwd
        self._write = write
        self._mode = ""
        self._denials: list[JsonObject] = []
        self._names: dict[str, str] = {}

    def _line(self, record: JsonObject) -> None:
        self._write(json.dumps({**record, "session_id": self._session_id}, ensure_ascii=False))

    def observe(self, event: Event) -> None:
        """Write the line of one event, if it has one."""
        if isinstance(event, RunStart):
            self._mode = event.sandbox["mode"]
        elif isinstance(event, RequestHeaderEvent) and event.reason != "change":
            self._line(
                {
                    "type": "system",
                    "subtype": "init",
                    "cwd": self._cwd,
                    "tools": [tool["name"] for tool in event.header["tools"]],
                    "model": event.header["config"]["model"],
                    "permissionMode": self._mode,
                }
            )
        elif isinstance(event, AssistantMessage):
            self._assistant(event)
        elif isinstance(event, ToolResult):
            self._result(event)

    def _assistant(self, event: AssistantMessage) -> None:
        content: list[JsonObject] = []
        for block in event.message["content"]:
            if block["type"] == "text":
                content.append({"type": "text", "text": block["text"]})
            elif block["type"] == "tool-call":
                self._names[block["id"]] = block["name"]
                content.append(
                    {
                        "type": "tool_use",
                        "id": block["id"],
                        "name": block["name"],
                        "input": _tool_input(block["arguments"]),
                    }
                )
        message = {
            "id": event.message["id"],
            "type": "message",
            "role": "assistant",
            "model": event.message["source"].get("model"),
            "content": content,
            "usage": _usage(event.usage),
        }
        self._line({"type": "assistant", "message": message})

    def _result(self, event: ToolResult) -> None:
        content: list[JsonObject] = []
        for block in event.message["content"]:
            if block["type"] != "tool-result":
                continue
            text = "\n".join(inner["text"] for inner in block["content"] if inner["type"] == "text")
            content.append(
                {
                    "type": "tool_result",
                    "tool_use_id": block["toolCallId"],
                    "content": text,
                    "is_error": block["isError"],
                }
            )
            if event.error and event.error.get("code") in ("POLICY_DENIED", "GUARD_DENIED", "TOOL_MASKED"):
                call_id = block["toolCallId"]
                self._denials.append({"tool_name": self._names.get(call_id, ""), "tool_use_id": call_id})
        self._line({"type": "user", "message": {"role": "user", "content": content}})

    def finish(self, result: JsonObject) -> None:
        """Write the ``result`` line from the run's ``result.json``."""
        success = result["outcome"] == "completed"
        limit = result["failureClass"] in ("limit", "budget")
        usage = result["usage"]
        self._line(
            {
                "type": "result",
                "subtype": "success" if success else "error_max_turns" if limit else "error_during_execution",
                "is_error": not success,
                "duration_ms": result["durationMs"],
                "num_turns": result["steps"],
                "result": result["finalMessage"] or "",
                "total_cost_usd": result["costUsd"],
                "usage": {
                    "input_tokens": usage["input"],
                    "cache_read_input_tokens": usage["cacheRead"],
                    "cache_creation_input_tokens": usage["cacheWrite"],
                    "output_tokens": usage["output"],
                },
                "permission_denials": self._denials,
                "code": result["code"],
                "exit_code": result["exitCode"],
            }
        )
