"""Token estimates where no provider has counted. Pure.

Two measures of a text: ``reported``, for numbers shown to people, takes four code points as one token;
``cautious``, for what decides whether a request fits, takes every non-ASCII code point as a whole one.
The sums around them are those of the log format that dsh and we share.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from runner.messages import Message, RequestHeader, ToolSchema, Usage

    Measure = Callable[[str], int]

OVERHEAD = 4
"""Tokens that each block, message, system prompt and tool table costs beside its text."""

IMAGE_TOKENS = 1_600
"""What an image is taken for where it decides whether a request fits: APIs count by its size, up to about this."""


def reported(text: str) -> int:
    """ceil(code points / 4)."""
    return -(-len(text) // 4)


def cautious(text: str) -> int:
    """ceil(ASCII code points / 4) plus one for each other code point."""
    if text.isascii():
        return -(-len(text) // 4)
    ascii_only = len(text.encode("ascii", "ignore"))
    return -(-ascii_only // 4) + len(text) - ascii_only


def _json(value: Any) -> str:
    return orjson.dumps(value).decode()


def estimate_block(block: Any, measure: Measure = reported) -> int:
    """Tokens of one content block, in or outside a message."""
    match block["type"]:
        case "text" | "reasoning":
            return measure(block["text"]) + OVERHEAD
        case "tool-call":
            return measure(block["name"]) + measure(block["arguments"]) + OVERHEAD
        case "tool-result":
            return sum(estimate_block(part, measure) for part in block["content"]) + OVERHEAD
        case "image" if measure is cautious:
            return IMAGE_TOKENS
        case _:
            return measure(_json(block)) + OVERHEAD


def estimate_content(content: Iterable[Any], measure: Measure = reported) -> int:
    """Tokens of the blocks of one message, without the message's own."""
    return sum(estimate_block(block, measure) for block in content)


def estimate_message(message: Message, measure: Measure = reported) -> int:
    """Tokens of one message."""
    return estimate_content(message["content"], measure) + OVERHEAD


def estimate_system(system: str, measure: Measure = reported) -> int:
    """Tokens of a system prompt."""
    return measure(system) + OVERHEAD


def estimate_tools(tools: Sequence[ToolSchema], measure: Measure = reported) -> int:
    """Tokens of a tool table, 0 for an empty one."""
    return measure(_json(tools)) + OVERHEAD if tools else 0


def estimate_header(header: RequestHeader, measure: Measure = reported) -> int:
    """Tokens of everything of a request except its messages."""
    return estimate_system(header["system"], measure) + estimate_tools(header["tools"], measure)


def estimate_request(header: RequestHeader, messages: Iterable[Message], measure: Measure = reported) -> int:
    """Tokens of a whole request."""
    return estimate_header(header, measure) + sum(estimate_message(message, measure) for message in messages)


def estimate_usage(header: RequestHeader, messages: Iterable[Message], content: Iterable[Any]) -> Usage:
    """The usage of a response whose provider reported none, marked as an estimate.

    Nothing is known about the cache, so its buckets are absent.
    """
    return {
        "inputTokens": estimate_request(header, messages),
        "outputTokens": estimate_content(content),
        "estimated": True,
    }
