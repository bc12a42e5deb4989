"""Which tools an agent has: a global layer, a layer of its own over it, and masks.

Invariants: the order of ``offered`` never changes while nothing is registered or masked; masks only
take away and intersect; a name nobody registered is refused when a mask is set, never ignored.
Prefix cache: the tool table stands at the head of every request, so a change of
layers or masks during a session moves the whole prefix. Assembly fixes both before the first
request. Writes no events.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.errors import ConfigError, ErrorCode, InternalError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runner.messages import ToolSchema
    from runner.tools.base import Tool


class Registry:
    """The tools of one layer over those of ``parent``.

    Args:
        tools: Tools of this layer, in the order they are offered. A tool whose name the parent has
            takes the parent's place.
        parent: The layer below; its masks hold here too.
    """

    def __init__(self, tools: Iterable[Tool] = (), *, parent: Registry | None = None) -> None:
        self._parent = parent
        self._own: dict[str, Tool] = {}
        self._mask: frozenset[str] | None = None
        for tool in tools:
            self.register(tool)

    def layer(self, tools: Iterable[Tool] = ()) -> Registry:
        """A layer for one agent over this one."""
        return Registry(tools, parent=self)

    def register(self, tool: Tool) -> None:
        """Add a tool to this layer.

        Raises:
            InternalError: This layer has a tool of that name already.
        """
        name = tool.schema["name"]
        if name in self._own:
            raise InternalError(f"two tools of one layer are called {name}")
        self._own[name] = tool

    def restrict(self, names: Iterable[str]) -> None:
        """Allow only ``names``, of what was allowed so far.

        Raises:
            ConfigError: A name is unknown; every unknown one is listed.
        """
        allowed = self._known(names)
        self._mask = allowed if self._mask is None else self._mask & allowed

    def exclude(self, names: Iterable[str]) -> None:
        """Take ``names`` away.

        Raises:
            ConfigError: A name is unknown; every unknown one is listed.
        """
        denied = self._known(names)
        self.restrict(name for name in self.tools() if name not in denied)

    def offered(self) -> list[ToolSchema]:
        """The tools the model is told about, in a fixed order."""
        return [tool.schema for name, tool in self.tools().items() if self.allows(name)]

    def lookup(self, name: str) -> Tool | ErrorCode:
        """The tool of that name; UNKNOWN_TOOL when there is none, TOOL_MASKED when it may not be used."""
        tool = self.tools().get(name)
        if tool is None:
            return ErrorCode.UNKNOWN_TOOL
        return tool if self.allows(name) else ErrorCode.TOOL_MASKED

    def near(self, name: str) -> str | None:
        """The offered name that looks most like ``name``, None if none does."""
        return _near(name, [schema["name"] for schema in self.offered()])

    def tools(self) -> dict[str, Tool]:
        """Every tool by name, masked ones too, in the order of ``offered``."""
        return {**(self._parent.tools() if self._parent else {}), **self._own}

    def allows(self, name: str) -> bool:
        """Whether no mask takes ``name`` away; says nothing about whether it exists."""
        inherited = self._parent is None or self._parent.allows(name)
        return inherited and (self._mask is None or name in self._mask)

    def _known(self, names: Iterable[str]) -> frozenset[str]:
        known = self.tools()
        wanted = list(names)
        problems = []
        for name in wanted:
            if name not in known:
                near = _near(name, list(known))
                problems.append(f"unknown tool {name!r}" + (f", did you mean {near}?" if near else ""))
        if problems:
            raise ConfigError(
                "tools: a name is not the name of a tool", problems=problems, hint=f"tools are: {', '.join(known)}"
            )
        return frozenset(wanted)


def _near(name: str, names: list[str]) -> str | None:
    import difflib

    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), None)
