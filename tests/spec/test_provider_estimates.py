"""Token estimates follow the formulas of the log format."""

from __future__ import annotations

from typing import Any

import pytest

from runner.session.tokens import (
    cautious,
    estimate_block,
    estimate_header,
    estimate_message,
    estimate_request,
    estimate_system,
    estimate_tools,
    estimate_usage,
    reported,
)

TEXT: Any = {"type": "text", "text": "12345"}
CALL: Any = {"type": "tool-call", "id": "ignored", "name": "shell", "arguments": '{"a":1}'}
RESULT: Any = {"type": "tool-result", "toolCallId": "ignored", "content": [TEXT, TEXT], "isError": False}
IMAGE: Any = {"type": "image", "mediaType": "image/png", "sha256": "0", "bytes": 1}
TOOLS: Any = [{"name": "t", "description": "d", "parameters": {}}]
HEADER: Any = {"config": {}, "system": "You work.", "tools": TOOLS}
MESSAGE: Any = {"role": "user", "content": [TEXT, RESULT], "source": {}, "id": "i"}


@pytest.mark.parametrize(
    ("text", "plain", "careful"),
    [("", 0, 0), ("a", 1, 1), ("abcd", 1, 1), ("abcde", 2, 2), ("größe", 2, 3), ("数数数数", 1, 4), ("🦉", 1, 1)],
)
def test_the_two_measures_differ_outside_ascii_only(text: str, plain: int, careful: int) -> None:
    """Four code points are a token in reports; what decides whether a request fits counts each other one whole."""
    assert (reported(text), cautious(text)) == (plain, careful)


@pytest.mark.parametrize(
    ("block", "tokens"),
    [
        (TEXT, 2 + 4),
        ({"type": "reasoning", "text": "12345"}, 2 + 4),
        (CALL, 2 + 2 + 4),
        (RESULT, (2 + 4) * 2 + 4),
        (IMAGE, 16 + 4),
    ],
)
def test_each_kind_of_block_has_its_formula(block: Any, tokens: int) -> None:
    """Ids, and what else the model does not see, cost nothing; unknown blocks count as their JSON."""
    assert estimate_block(block) == tokens


def test_messages_system_and_tools_add_up_to_the_request() -> None:
    """Each with its own overhead."""
    tools_json = '[{"name":"t","description":"d","parameters":{}}]'
    assert estimate_message(MESSAGE) == 6 + 16 + 4
    assert estimate_system("You work.") == 3 + 4
    assert estimate_tools(TOOLS) == -(-len(tools_json) // 4) + 4
    assert estimate_tools([]) == 0
    assert estimate_header(HEADER) == estimate_system("You work.") + estimate_tools(TOOLS)
    assert estimate_request(HEADER, [MESSAGE, MESSAGE]) == estimate_header(HEADER) + 2 * estimate_message(MESSAGE)


def test_the_measure_reaches_every_text() -> None:
    """Also those inside results, names and arguments."""
    block: Any = {"type": "tool-result", "toolCallId": "x", "content": [{"type": "text", "text": "ééé"}]}
    call: Any = {"type": "tool-call", "id": "x", "name": "é", "arguments": "é"}

    assert estimate_block(block, cautious) == 3 + 4 + 4
    assert estimate_block(call, cautious) == 1 + 1 + 4
    message: Any = {**MESSAGE, "content": [block]}
    assert estimate_message(message, cautious) == 3 + 4 + 4 + 4


def test_an_estimated_usage_says_that_it_is_one() -> None:
    """And claims nothing about the cache."""
    assert estimate_usage(HEADER, [MESSAGE], [TEXT]) == {
        "inputTokens": estimate_request(HEADER, [MESSAGE]),
        "outputTokens": 6,
        "estimated": True,
    }
