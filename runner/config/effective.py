"""Reading a checked document: effective values with their defaults, origins and problems."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from runner.record import field, mutable_record

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.config.load import Document, Location, Problem
    from runner.messages import JsonObject


def canonical_json(value: Any) -> bytes:
    """UTF-8 JSON with sorted keys and no spaces."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode(errors="surrogatepass")


def digest(value: Any) -> str:
    """Hex SHA-256 of ``canonical_json``."""
    return hashlib.sha256(canonical_json(value)).hexdigest()


def differing_keys(first: JsonObject, second: JsonObject) -> list[str]:
    """Dotted keys at which two configurations differ, sorted; a list counts as one value."""
    found = []
    for key in sorted(first.keys() | second.keys()):
        ours, theirs = first.get(key), second.get(key)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            found += [f"{key}.{inner}" for inner in differing_keys(ours, theirs)]
        elif ours != theirs:
            found.append(key)
    return found


@mutable_record
class Effective:
    """Reads the values of one document with their defaults, and notes value, origin and problems.

    ``values`` and ``origins`` have the same locations. What is in ``private`` is shown but left out of
    the digest: where a file happens to lie says nothing about what the run does.
    """

    name: str
    document: Document
    values: dict[Location, Any] = field(default_factory=dict)
    origins: dict[Location, str] = field(default_factory=dict)
    private: set[Location] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)

    def raw(self, *location: str | int) -> Any:
        """The value in the file; None when it is not given."""
        value = self.document.value
        for part in location:
            value = value.get(part) if isinstance(value, dict) else None
        return value

    def take(
        self, *location: str, default: Any = None, convert: Callable[[Any], Any] | None = None, private: bool = False
    ) -> Any:
        """The effective value at ``location``, noted with its origin."""
        raw = self.raw(*location)
        if raw is None:
            value, origin = default, "default"
        else:
            value, origin = raw, self.document.mark(location).origin
            if convert is not None:
                try:
                    value = convert(raw)
                except ValueError as error:
                    self.problem(location, str(error))
                    value = default
        self.note(location, value, origin, private=private)
        return value

    def note(self, location: Location, value: Any, origin: str, *, private: bool = False) -> None:
        """Note an effective value."""
        self.values[location] = list(value) if isinstance(value, tuple) else value
        self.origins[location] = origin
        if private:
            self.private.add(location)

    def problem(self, location: Location, text: str) -> None:
        """Note what is wrong with the value at ``location``."""
        self.problems.append(self.document.problem(location, text))

    def nested(self) -> JsonObject:
        """The values as one JSON object, without the private ones."""
        whole: JsonObject = {}
        for location, value in self.values.items():
            if location in self.private:
                continue
            target = whole
            for part in location[:-1]:
                target = target.setdefault(str(part), {})
            target[str(location[-1])] = value
        return whole
