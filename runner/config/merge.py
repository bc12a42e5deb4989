"""A profile out of its files: ``extends`` followed and merged, then ``--set`` and the task's limits.

Mappings merge, scalars and lists replace; a null replaces as well and stands for the default in the
end. ``overridable`` belongs to the file it stands in. Every value keeps the mark of the file or option it came from.
"""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any, Final

from runner.agent.settings import Limits
from runner.config.load import Document, Mark, config_error, near_miss, parse_value, parse_yaml
from runner.config.shape import all_keys, demand, schema_of, split_key
from runner.config.spec import ToolsSpec
from runner.config.trust import find_profile
from runner.config.values import LIMIT_VALUES
from runner.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from runner.config.load import Location, Problem
    from runner.config.trust import Content, Reader

MAX_EXTENDS: Final = 8
"""Longest chain of ``extends``, counted in steps."""

MAX_PROFILES: Final = 64
"""Most files that one profile is made of."""

_PER_FILE: Final = ("extends", "overridable")
"""Keys of a profile that its children do not inherit."""


def read_referenced(reader: Reader, path: Path, document: Document, location: Location) -> Document:
    """Load the YAML file that ``document`` names at ``location``; a failure to read it points there."""
    content = read_bytes_referenced(reader, path, document, location)
    return parse_yaml(content.data, source=content.name, directory=content.directory)


def read_bytes_referenced(reader: Reader, path: Path, document: Document, location: Location) -> Content:
    """Read the file that ``document`` names at ``location``; a failure points there."""
    try:
        return reader.read(path)
    except ConfigError as error:
        problem = document.problem(location, error.message)
        raise config_error(document.source, [problem], hint=error.hint) from None


def load_profile(path: Path, reader: Reader, *, asked_by: tuple[Document, Location] | None = None) -> Document:
    """Load a profile with everything it extends, merged.

    Args:
        path: Absolute path of the file.
        reader: Reads run-defining files.
        asked_by: Document and location that name the file, for a message when it cannot be read.

    Raises:
        ConfigError: One of the files cannot be read or is no profile, or ``extends`` is circular,
            too long or too wide.
    """
    document = reader.load(path) if asked_by is None else read_referenced(reader, path, *asked_by)
    return _Chain(reader).merged(document, (os.path.realpath(path),))


class _Chain:
    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        self.files = 0

    def merged(self, document: Document, trail: tuple[str, ...]) -> Document:
        """``document`` over what it extends. ``trail`` holds the files from the first to this one."""
        demand("profile", document)
        self.files += 1
        whole = Document(document.source, {}, {(): document.mark(())})
        extends = document.value.get("extends") or []
        for index, reference in enumerate([extends] if isinstance(extends, str) else extends):
            location: Location = ("extends",) if isinstance(extends, str) else ("extends", index)
            overlay(whole, self._parent(document, location, reference, trail))
        for key in _PER_FILE:
            _remove(whole, (key,))
        overlay(whole, document)
        _remove(whole, ("extends",))
        return whole

    def _parent(self, document: Document, location: Location, reference: str, trail: tuple[str, ...]) -> Document:
        def fail(text: str, hint: str | None = None) -> ConfigError:
            return config_error(document.source, [document.problem(location, text)], hint=hint)

        try:
            path = find_profile(reference, document.mark(location).directory)
        except ConfigError as error:
            raise fail(error.message, error.hint) from None
        real = os.path.realpath(path)
        if real in trail:
            names = " → ".join(os.path.basename(each) for each in [*trail[trail.index(real) :], real])  # noqa: PTH119  # texts
            raise fail(f"goes in a circle: {names}: take one step out")
        if len(trail) > MAX_EXTENDS:
            raise fail(f"the chain is longer than {MAX_EXTENDS} steps: extend a profile nearer to the first")
        if self.files >= MAX_PROFILES:
            raise fail(f"the profile is made of more than {MAX_PROFILES} files: extend fewer")
        return self.merged(read_referenced(self.reader, path, document, location), (*trail, real))


def overlay(lower: Document, upper: Document) -> None:
    """Lay ``upper`` over ``lower``, which is changed: mappings merge, others replace, null too."""
    _overlay(lower, upper, lower.value, upper.value, ())


def _overlay(lower: Document, upper: Document, target: dict[str, Any], source: dict[str, Any], at: Location) -> None:
    # A section is where a file has it: what an option sets inside does not move it.
    if at not in lower.marks or upper.mark(at).line:
        lower.marks[at] = upper.mark(at)
    for key, value in source.items():
        here = (*at, key)
        if isinstance(value, dict):
            if not isinstance(target.get(key), dict):
                _remove(lower, here)
                target[key] = {}
            lower.keys[here] = upper.key_mark(here)
            _overlay(lower, upper, target[key], value, here)
            continue
        _remove(lower, here)
        target[key] = copy.deepcopy(value)
        size = len(here)
        for mine, theirs in ((lower.marks, upper.marks), (lower.keys, upper.keys)):
            mine |= {location: mark for location, mark in theirs.items() if location[:size] == here}
        lower.texts |= {location: text for location, text in upper.texts.items() if location[:size] == here}
        lower.marks.setdefault(here, upper.mark(here))


def _remove(document: Document, at: Location) -> None:
    """Take the value at ``at`` out, with its marks."""
    value = document.value
    for part in at[:-1]:
        value = value[part]
    if at[-1] not in value:
        return
    del value[at[-1]]
    size = len(at)
    for kept in (document.marks, document.keys, document.texts):
        for location in [location for location in kept if location[:size] == at]:
            del kept[location]


def limit_number(name: str, value: Any) -> float | None:
    """A limit as a number to compare; None is no limit.

    Raises:
        ValueError: It is no such limit's value.
    """
    if value is None:
        number: float | None = getattr(Limits(), name)
        return number
    if name in LIMIT_VALUES:
        return LIMIT_VALUES[name](value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise ValueError("a number is needed")


def _loosens(name: str, new: Any, old: Any) -> bool:
    """Whether a limit goes up."""
    try:
        wanted, bound = limit_number(name, new), limit_number(name, old)
    except ValueError:
        # A value of the wrong kind is reported when the whole profile is checked.
        return False
    return bound is not None and (wanted is None or wanted > bound)


def _may_override(overridable: Sequence[str], key: Sequence[str]) -> bool:
    dotted = ".".join(key)
    return any(dotted == entry or dotted.startswith(f"{entry}.") for entry in overridable)


def apply_sets(profile: Document, sets: Sequence[str], *, cwd: Path, tools: Sequence[str]) -> None:
    """Apply ``--set KEY=VALUE`` texts to a merged profile, which is changed; the last one wins.

    Args:
        profile: The profile.
        sets: The texts. VALUE is YAML.
        cwd: Where relative paths in a value start.
        tools: Names of the tools that an absent ``tools.allow`` stands for.

    Raises:
        ConfigError: A text is no ``KEY=VALUE``, the key is unknown or may not be set, or the value
            loosens what may only be tightened.
    """
    before = copy.deepcopy(profile.value)
    schema = schema_of("profile")
    last: dict[tuple[str, ...], Any] = {}
    documents = []
    for text in sets:
        key, equals, raw = text.partition("=")
        if not key or not equals:
            raise ConfigError(f"--set {text}: has no key and value", hint="write --set KEY=VALUE")
        parts = split_key(schema, key)
        if parts is None:
            near = near_miss(key, all_keys(schema))
            raise ConfigError(
                f"--set {key}: the profile has no such key",
                hint=f"did you mean {near!r}?" if near else "`nightshift schema profile` lists the keys",
            )
        value = parse_value(raw, source=f"--set {key}", directory=str(cwd))
        last.update({tuple(leaf): new for leaf, new in _leaves(parts, value)})
        documents.append(_set_document(parts, value, cwd))
    for leaf, new in last.items():
        _check_set(leaf, new, before, tools)
    for document in documents:
        overlay(profile, document)


def _leaves(parts: Sequence[str], value: Any) -> Iterator[tuple[list[str], Any]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _leaves([*parts, key], inner)
    else:
        yield list(parts), value


def _set_document(parts: Sequence[str], value: Any, cwd: Path) -> Document:
    nested = value
    for part in reversed(parts):
        nested = {part: nested}
    return Document("--set", nested, {(): Mark("--set", 0, 0, str(cwd))})


def _check_set(key: Sequence[str], new: Any, before: dict[str, Any], tools: Sequence[str]) -> None:
    dotted, section = ".".join(key), key[0]
    overridable = before.get("overridable") or []
    if section == "compaction" or (_may_override(overridable, key) and section not in {"version", *_PER_FILE}):
        return
    if section not in {"limits", "tools"}:
        listed = f"; overridable here: {', '.join(overridable)}" if overridable else ""
        raise ConfigError(
            f"--set {dotted}: the profile does not let this key be set",
            hint=f"compaction.* is free, limits and tools may be tightened{listed}; "
            f"or list {dotted} in the profile's `overridable`",
        )
    if len(key) != 2:
        # A whole section that is emptied or replaced by something else is no tightening of one value.
        raise ConfigError(f"--set {dotted}: set one of its keys", hint=f"for instance --set {section}.KEY=VALUE")
    old = (before.get(section) or {}).get(key[1])
    loosened = _loosens(key[1], new, old) if section == "limits" else _widens(key[1], new, old, tools)
    if loosened:
        raise ConfigError(
            f"--set {dotted}: loosens the profile's {_shown(key[1], section, old)}, it may only be tightened",
            hint=f"use a tighter value, or list {dotted} in the profile's `overridable`",
        )


def _shown(name: str, section: str, old: Any) -> str:
    if old is None and section == "limits":
        old = getattr(Limits(), name)
    return "default" if old is None else str(old)


def _widens(name: str, new: Any, old: Any, tools: Sequence[str]) -> bool:
    """Whether a key of ``tools`` would let the model do more."""
    if name == "parallel":
        default = ToolsSpec().parallel
        return isinstance(new, int | None) and (default if new is None else new) > (default if old is None else old)
    if not isinstance(new, list | None) or not all(isinstance(each, str) for each in new or ()):
        # A value of the wrong kind is reported when the whole profile is checked.
        return False
    if name == "allow":
        bound = tools if old is None else old
        return old is not None if new is None else not set(new) <= set(bound)
    return not set(old or []) <= set(new or [])


def tighten(profile: Document, declared: dict[str, Any], task: Document) -> list[Problem]:
    """Lay a task's limits over the profile's, which is changed; returns what is wrong with them.

    Args:
        profile: The merged profile, ``--set`` applied.
        declared: The profile's values before ``--set``.
        task: The task. Its limits may be above the profile's only where ``overridable`` lists them.
            ``--set`` is a bound for the task as well.
    """
    problems = []
    limits = task.value.get("limits") or {}
    for name, wanted in limits.items():
        if wanted is None:
            continue
        old = (declared.get("limits") or {}).get(name)
        now = (profile.value.get("limits") or {}).get(name)
        free = _may_override(declared.get("overridable") or [], ("limits", name))
        was_set = profile.mark(("limits", name)).line == 0 and now is not None
        if not free and _loosens(name, wanted, old) and _loosens(name, wanted, now):
            shown = _shown(name, "limits", old)
            text = f"is more than the profile's {shown}: lower it, or list limits.{name} in the profile's `overridable`"
            problems.append(task.problem(("limits", name), text))
        elif not _loosens(name, wanted, now) or (free and not was_set):
            location: Location = ("limits", name)
            overlay(profile, Document(task.source, {"limits": {name: wanted}}, {(): profile.mark(())}))
            profile.marks[location] = task.mark(location)
    return problems
