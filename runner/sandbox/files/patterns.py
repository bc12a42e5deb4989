"""Patterns for paths, matched component by component on the way down.

Standard library only.
"""

from __future__ import annotations

import re

from .places import Refusal

_ANY_DEPTH = None
"""Stands for ``**`` in a parsed pattern."""

_WILD = "*?["


def _expand_braces(pattern: str) -> list[str]:
    """Every pattern that ``{a,b}`` stands for; a brace without a comma is a plain character."""
    done: list[str] = []
    todo = [pattern]
    while todo:
        current = todo.pop()
        found = re.search(r"\{([^{}]*,[^{}]*)\}", current)
        if found is None:
            done.append(current)
        else:
            todo += [current[: found.start()] + each + current[found.end() :] for each in found[1].split(",")]
        if len(todo) + len(done) > 100:
            raise Refusal("INVALID", "the braces of the pattern stand for more than 100 patterns")
    return sorted(done)


def _component(part: str) -> re.Pattern[str]:
    """One pattern component (no slash) as a regular expression for a whole name.

    What stands between two ``*`` is taken where it fits first and never again elsewhere, which is enough: so a name
    is matched in a time that does not grow with the number of ``*``. A bracket that is not closed is itself.
    """
    pieces: list[str] = []
    out: list[str] = []
    index = 0
    while index < len(part):
        character = part[index]
        index += 1
        if character == "*":
            if out or not pieces:  # else a * behind a *
                pieces.append("".join(out))
                out = []
        elif character == "?":
            out.append(".")
        elif character == "[" and (end := part.find("]", index + 1 + (part[index : index + 1] in ("!", "^")))) > 0:
            negated = part[index] in "!^"
            inner = re.sub(r"[\\\[\]&~|^]", r"\\\g<0>", part[index + negated : end])
            out.append(f"[{'^' if negated else ''}{inner}]")
            index = end + 1
        else:
            out.append(re.escape(character))
    if not pieces:
        return re.compile("(?s:" + "".join(out) + r")\Z")
    between = "".join(f"(?>.*?{piece})" for piece in pieces[1:])
    return re.compile(f"(?s:{pieces[0]}{between}.*{''.join(out)})\\Z")


class Alternative:
    """One pattern without braces: an expression a component, None for ``**``.

    ``plain`` is the number of components at its start that have no wildcard.
    """

    def __init__(self, components: list[str]) -> None:
        self.parts = [_ANY_DEPTH if each == "**" else _component(each) for each in components]
        wild = (at for at, each in enumerate(components) if any(character in _WILD for character in each))
        self.plain = next(wild, len(components))


def parse_glob(pattern: str) -> list[Alternative]:
    """The alternatives that the braces of a pattern stand for."""
    if not pattern:
        raise Refusal("INVALID", "the pattern is empty; ** stands for all files")
    alternatives = []
    for each in _expand_braces(pattern):
        components = [part for part in each.split("/") if part not in ("", ".")]
        if ".." in components or not components or each.startswith("/"):
            raise Refusal("INVALID", f"the pattern {pattern!r} is not relative to the folder that is searched")
        try:
            alternatives.append(Alternative(components))
        except re.error as error:
            raise Refusal("INVALID", f"the pattern {pattern!r}: {error.msg}") from None
    return alternatives


class Glob:
    """How far each alternative of a pattern has matched on the way down, ``depth`` folders deep."""

    def __init__(self, alternatives: list[Alternative], states: list[set[int]] | None = None, depth: int = 0) -> None:
        self._alternatives = alternatives
        self._states = states or [self._closed(each.parts, {0}) for each in alternatives]
        self._depth = depth

    @staticmethod
    def _closed(parts: list[re.Pattern[str] | None], states: set[int]) -> set[int]:
        for state in sorted(states):
            following = state
            while following < len(parts) and parts[following] is _ANY_DEPTH:
                following += 1
                states.add(following)
        return states

    def enter(self, name: str) -> Glob | None:
        """The state below the entry ``name``, None when nothing can match there."""
        moved = []
        for each, states in zip(self._alternatives, self._states, strict=True):
            following = set()
            for state in states:
                if state == len(each.parts):
                    continue
                part = each.parts[state]
                if part is _ANY_DEPTH:
                    following.add(state)
                elif part.match(name):
                    following.add(state + 1)
            moved.append(self._closed(each.parts, following))
        return Glob(self._alternatives, moved, self._depth + 1) if any(moved) else None

    @property
    def matched(self) -> bool:
        """Whether the whole path so far matches."""
        pairs = zip(self._alternatives, self._states, strict=True)
        return any(len(each.parts) in states for each, states in pairs)

    @property
    def literal(self) -> bool:
        """Whether the path so far is one that the pattern names outright, without a wildcard."""
        pairs = zip(self._alternatives, self._states, strict=True)
        return any(self._depth <= each.plain and self._depth in states for each, states in pairs)
