"""Provider-neutral messages, content blocks, tool calls and usage.

These are the JSON values of the session log, typed. Nothing is converted between
memory and disk: a message in the log is the message in the program.
"""

from __future__ import annotations

from typing import Any, Literal, NotRequired, TypedDict, cast

JsonObject = dict[str, Any]


class TextBlock(TypedDict):
    """Plain text."""

    type: Literal["text"]
    text: str


class ReasoningBlock(TypedDict):
    """The model's reasoning; ``signature`` is the provider's opaque proof, sent back unchanged."""

    type: Literal["reasoning"]
    text: str
    signature: NotRequired[str]


class ImageBlock(TypedDict):
    """An image; its bytes lie once in ``media/<sha256>.<ext>``."""

    type: Literal["image"]
    mediaType: str
    sha256: str
    bytes: int


class ToolCallBlock(TypedDict):
    """A call the model asks for; ``arguments`` is the raw JSON text as the model wrote it."""

    type: Literal["tool-call"]
    id: str
    name: str
    arguments: str


class ToolResultBlock(TypedDict):
    """The result of one call."""

    type: Literal["tool-result"]
    toolCallId: str
    content: list[TextBlock | ImageBlock]
    isError: bool


Block = TextBlock | ReasoningBlock | ImageBlock | ToolCallBlock | ToolResultBlock


class Message(TypedDict):
    """One node of the conversation. ``source.kind``: user, model, tool, plugin, goal, compaction."""

    role: Literal["user", "assistant"]
    content: list[Block]
    source: JsonObject
    id: str


class Usage(TypedDict):
    """Tokens of one response, in disjoint buckets.

    ``inputTokens`` is uncached input; reasoning is inside ``outputTokens``. A bucket the
    provider did not report is absent. ``estimated`` marks numbers of ours.
    """

    inputTokens: int
    outputTokens: int
    cacheReadTokens: NotRequired[int]
    cacheWriteTokens: NotRequired[int]
    reasoningTokens: NotRequired[int]
    estimated: NotRequired[bool]


class ToolSchema(TypedDict):
    """A tool as the model sees it; ``parameters`` is a JSON Schema object."""

    name: str
    description: str
    parameters: JsonObject


class RequestHeader(TypedDict):
    """Everything of a request except its messages.

    ``config``: ``provider``, ``model``, ``maxTokens`` and what else the call fixes
    (``temperature``, ``toolChoice``).
    """

    config: JsonObject
    system: str
    tools: list[ToolSchema]


Chunk = JsonObject
"""One piece of a streamed answer, as it stands in ``assistant/chunk``.

``{"type": "block-start", "index": int, "blockType": "text" | "reasoning" | "tool-call"}``
``{"type": "text-delta" | "reasoning-delta", "index": int, "text": str}``
``{"type": "tool-call-delta", "index": int, "id": str, "name": str, "argumentsDelta": str}``
``{"type": "block-end", "index": int, "block": Block}``
``{"type": "usage", "usage": Usage}``
``{"type": "finish", "reason": {"kind": "stop" | "tool-calls" | "length" | "filter"}}``: the last chunk
"""


def copy_json(value: Any) -> Any:
    """A JSON value whose objects and lists are new."""
    kind = type(value)
    if kind is dict:
        return {key: copy_json(inner) for key, inner in value.items()}
    return [copy_json(inner) for inner in value] if kind is list else value


def text_of(content: list[Any]) -> str:
    """Join the text blocks of ``content`` with newlines; other blocks are left out."""
    return "\n".join(block["text"] for block in content if block["type"] == "text")


def tool_calls_of(message: Message) -> list[ToolCallBlock]:
    """The calls of an assistant message, in the model's order."""
    return [block for block in message["content"] if block["type"] == "tool-call"]


def input_tokens(usage: Usage) -> int:
    """All input of a response: uncached, cache reads and writes."""
    return usage["inputTokens"] + usage.get("cacheReadTokens", 0) + usage.get("cacheWriteTokens", 0)


def total_tokens(usage: Usage) -> int:
    """All tokens of a response: input, cached or not, and output."""
    return input_tokens(usage) + usage["outputTokens"]


def add_usage(first: Usage | None, second: Usage | None) -> Usage | None:
    """The sum of two usages, bucket by bucket; a bucket that only one has is that one's."""
    if first is None or second is None:
        return first or second
    total: JsonObject = {**first}
    for bucket, amount in second.items():
        before = total.get(bucket)
        if isinstance(amount, bool):
            total[bucket] = amount or bool(before)
        elif isinstance(amount, int):
            total[bucket] = amount + (before or 0)
    return cast("Usage", total)
