"""The registry offers exactly what is registered and not masked, in a fixed order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from runner.approvals.policy import CallFacts
from runner.errors import ConfigError, ErrorCode, InternalError
from runner.tools.base import ToolOutcome
from runner.tools.registry import Registry

if TYPE_CHECKING:
    from runner.messages import JsonObject, ToolSchema
    from runner.tools.base import Invocation


class Named:
    """A tool that says its name and version."""

    idempotent = False

    def __init__(self, name: str, version: str = "global") -> None:
        self.schema: ToolSchema = {"name": name, "description": version, "parameters": {"type": "object"}}

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:
        return not arguments

    def facts(self, arguments: JsonObject) -> CallFacts:
        return CallFacts(f"{self.schema['name']}{len(arguments) or ''}")

    def execute(self, invocation: Invocation) -> ToolOutcome:
        return ToolOutcome([{"type": "text", "text": f"{self.schema['description']} {invocation.call_id}"}])


def _offered(registry: Registry) -> list[str]:
    return [schema["name"] for schema in registry.offered()]


def test_tools_are_offered_in_the_order_of_registration() -> None:
    """The tool table stands at the head of every request; its order may not vary."""
    registry = Registry([Named("b"), Named("a")])
    registry.register(Named("c"))

    assert _offered(registry) == ["b", "a", "c"]


def test_an_agent_layer_shadows_and_adds() -> None:
    """A shadowing tool takes the place of the global one; the global layer does not change."""
    base = Registry([Named("a"), Named("b")])
    agent = base.layer([Named("c"), Named("a", "agent")])

    found = agent.lookup("a")

    assert _offered(agent) == ["a", "b", "c"]
    assert not isinstance(found, ErrorCode)
    assert found.schema["description"] == "agent"
    assert _offered(base) == ["a", "b"]
    assert base.lookup("c") is ErrorCode.UNKNOWN_TOOL


def test_masks_intersect_and_hold_for_layers_above() -> None:
    """Nothing brings back what one mask took away."""
    base = Registry([Named("a"), Named("b"), Named("c")])
    agent = base.layer([Named("d")])

    base.restrict(["a", "b", "c"])
    base.exclude(["a"])
    agent.restrict(["b", "d"])
    base.restrict(["a", "b"])

    assert _offered(base) == ["b"]
    assert _offered(agent) == ["b"]
    assert agent.lookup("a") is ErrorCode.TOOL_MASKED
    assert agent.lookup("d") is ErrorCode.TOOL_MASKED
    assert agent.lookup("e") is ErrorCode.UNKNOWN_TOOL


def test_a_tool_that_is_shadowed_cannot_pass_a_mask_of_the_layer_below() -> None:
    """A mask names names, so a new tool of the name is masked too."""
    base = Registry([Named("a")])
    base.exclude(["a"])

    assert base.layer([Named("a", "agent")]).lookup("a") is ErrorCode.TOOL_MASKED


def test_an_empty_mask_offers_nothing() -> None:
    """An empty allowlist is a list, not the absence of one."""
    registry = Registry([Named("a")])
    registry.restrict([])

    assert registry.offered() == []
    assert registry.lookup("a") is ErrorCode.TOOL_MASKED


@pytest.mark.parametrize("method", ["restrict", "exclude"])
def test_an_unknown_name_in_a_mask_is_refused_with_a_suggestion(method: str) -> None:
    """A mistyped name must not silently allow or forbid nothing; all of them are named at once."""
    registry = Registry([Named("read_file"), Named("shell")])

    with pytest.raises(ConfigError) as caught:
        getattr(registry, method)(["read_flie", "nothing", "shell"])

    assert "'read_flie', did you mean read_file?" in caught.value.message
    assert "'nothing'" in caught.value.message
    assert _offered(registry) == ["read_file", "shell"]


def test_two_tools_of_one_name_in_a_layer_are_our_bug() -> None:
    """Which one counts would depend on the order."""
    with pytest.raises(InternalError):
        Registry([Named("a"), Named("a")])


def test_the_nearest_offered_name_is_suggested() -> None:
    """A masked tool is not suggested."""
    registry = Registry([Named("read_file"), Named("read_files")])
    registry.exclude(["read_files"])

    assert registry.near("readfile") == "read_file"
    assert registry.near("zzz") is None
