"""The reference page of the tools says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from runner.compaction.spill import SMALL
from runner.tools.builtin.fetch import BYTES, FETCH_URL, URL_CHARS
from runner.tools.builtin.files import EDIT_FILE, IMAGE_BYTES, LINES, READ_FILE, SECONDS, WRITE_FILE
from runner.tools.builtin.finding import MESSAGE_CHARS, REPORT_FINDING, RULE_CHARS
from runner.tools.builtin.patch import APPLY_PATCH
from runner.tools.builtin.search import GLOB, GREP, MATCHES, PATHS
from runner.tools.builtin.shell import COMMAND_BYTES, SHELL
from runner.tools.builtin.todo import TODO
from runner.tools.pipeline import DENIALS

PAGE = Path(__file__).parents[2].joinpath("docs/reference/tools.md").read_text(encoding="utf-8")
TOOLS = (SHELL, READ_FILE, WRITE_FILE, EDIT_FILE, APPLY_PATCH, GLOB, GREP, TODO, REPORT_FINDING, FETCH_URL)


def test_every_tool_has_a_section_in_the_order_they_are_offered() -> None:
    """No tool is missing, none is invented."""
    assert re.findall(r"^## `(\w+)`$", PAGE, re.MULTILINE) == [tool["name"] for tool in TOOLS]


@pytest.mark.parametrize("tool", TOOLS, ids=lambda tool: tool["name"])
def test_every_argument_is_described_and_required_ones_are_marked(tool: dict[str, object]) -> None:
    """The table of a tool has exactly its arguments."""
    section = PAGE.split(f"## `{tool['name']}`\n")[1].split("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", section, re.MULTILINE))
    parameters = tool["parameters"]
    assert isinstance(parameters, dict)

    assert list(rows) == list(parameters["properties"])
    assert [name for name, note in rows.items() if note == "required"] == parameters["required"]


def test_codes_and_bounds_are_those_of_the_code() -> None:
    """A number that changes in one place must change in the other."""
    for code in DENIALS:
        assert f"`{code.name}`" in PAGE
    bounds = (COMMAND_BYTES, LINES, PATHS, MATCHES, SMALL, IMAGE_BYTES, MESSAGE_CHARS, RULE_CHARS, BYTES, URL_CHARS)
    for number in (*bounds, int(SECONDS)):
        assert re.search(rf"\b{number:,}\b", PAGE), number
