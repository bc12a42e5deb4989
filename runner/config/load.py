"""Strict loading of the YAML files people write: text to plain values with a mark for each.

YAML 1.2 core types only (``on``, ``no``, ``12:30`` are text), no duplicate keys, no tags of one's
own, bounded size, depth and alias expansion. Whatever is wrong becomes one ``ConfigError`` that
lists every problem of the file as ``file:line:col: path.to.key: what, and what to do``.

Values are composed from PyYAML's parser events, one after the other: nothing here recurses, so a
deeply nested file is an error and not a crash of the C parser. yaml and pydantic are imported when
the first file is read.
"""

from __future__ import annotations

import os
import re
import stat
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from runner.errors import ConfigError
from runner.figures import counted

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from pydantic import BaseModel
    from pydantic_core import ErrorDetails

    Model = TypeVar("Model", bound=BaseModel)

MAX_BYTES: Final = 1_048_576
"""Largest file that is read, and the most that its aliases may add when written out."""

MAX_DEPTH: Final = 64
"""Deepest nesting of lists and mappings."""

MAX_VALUES: Final = 100_000
"""Most scalars, lists and mappings in one file."""

MAX_PROBLEMS: Final = 50
"""Most problems listed for one file; the rest is counted."""

Location = tuple[str | int, ...]


class Mark(NamedTuple):
    """Where a value was written. ``line`` and ``column`` count from 1; line 0 is no file.

    ``directory`` is where relative paths of the value start.
    """

    source: str
    line: int
    column: int
    directory: str

    def __str__(self) -> str:
        """``file:line:col``, or the option's name for a value from the command line."""
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source

    @property
    def origin(self) -> str:
        """``file:line``, or the option's name."""
        return f"{self.source}:{self.line}" if self.line else self.source


class Problem(NamedTuple):
    """One thing that is wrong, and where."""

    mark: Mark
    text: str

    def __str__(self) -> str:
        """``file:line:col: path.to.key: what, and what to do``."""
        return f"{self.mark}: {self.text}"


class Document:
    """A loaded file: its value, and a mark for every value and key in it.

    Attributes:
        source: The file as it is shown.
        value: JSON values.
        marks: Location of a value → its mark. Values behind an alias have none of their own.
        keys: Location of a mapping's entry → the mark of its key.
        texts: Location of a plain scalar that is no text → what was written (``1.10``).
        problems: What the text itself does wrong without being unreadable (a key given twice).
        prefix: Where this lies in the file, when it is a part of one.
    """

    __slots__ = ("keys", "marks", "prefix", "problems", "source", "texts", "value")

    def __init__(
        self,
        source: str,
        value: Any,
        marks: dict[Location, Mark] | None = None,
        keys: dict[Location, Mark] | None = None,
        texts: dict[Location, str] | None = None,
        *,
        prefix: Location = (),
    ) -> None:
        self.source = source
        self.value = value
        self.marks = {} if marks is None else marks
        self.keys = {} if keys is None else keys
        self.texts = {} if texts is None else texts
        self.problems: list[Problem] = []
        self.prefix = prefix

    def mark(self, location: Location) -> Mark:
        """The mark of the value at ``location``, else of what holds it."""
        return self._nearest(self.marks, location)

    def key_mark(self, location: Location) -> Mark:
        """The mark of the key at ``location``, else of the value."""
        return self.keys.get(location) or self.mark(location)

    def where(self, location: Location) -> str:
        """``file:line:col`` of the value at ``location``."""
        return str(self.mark(location))

    def problem(self, location: Location, text: str, *, at_key: bool = False) -> Problem:
        """A problem at ``location``; ``text`` says what, and what to do."""
        mark = self.key_mark(location) if at_key else self.mark(location)
        path = dotted((*self.prefix, *location))
        return Problem(mark, f"{path}: {text}" if path else text)

    def child(self, location: Location) -> Document:
        """The part below ``location`` as a document of its own, with the same marks."""
        value = self.value
        for part in location:
            value = value[part]
        size = len(location)
        root = self.mark(location)
        return Document(
            root.source,
            value,
            {(): root} | {at[size:]: mark for at, mark in self.marks.items() if at[:size] == location},
            {at[size:]: mark for at, mark in self.keys.items() if at[:size] == location},
            {at[size:]: text for at, text in self.texts.items() if at[:size] == location},
            prefix=(*self.prefix, *location),
        )

    @staticmethod
    def _nearest(marks: Mapping[Location, Mark], location: Location) -> Mark:
        while location not in marks:
            location = location[:-1]
        return marks[location]


def dotted(location: Iterable[str | int]) -> str:
    """A location as ``path.to.key[2]``."""
    text = ""
    for part in location:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def config_error(source: str, problems: Iterable[Problem], *, hint: str | None = None) -> ConfigError:
    """One error for all problems of one file, in file order; ``source`` stands at its head if they are of several."""
    ordered = sorted(set(problems), key=lambda problem: (problem.mark[:3], problem.text))
    sources = {problem.mark.source for problem in ordered}
    if len(sources) == 1:
        (source,) = sources
    lines = [str(problem) for problem in ordered[:MAX_PROBLEMS]]
    if len(ordered) > MAX_PROBLEMS:
        lines.append(f"and {len(ordered) - MAX_PROBLEMS} more")
    return ConfigError(f"{source}: {counted(len(ordered), 'problem')}", problems=lines, hint=hint)


def read_file(path: Path, *, name: str | None = None) -> bytes:
    """Read a small regular file.

    Args:
        path: The file.
        name: How errors call it; the path if omitted.

    Raises:
        ConfigError: It is missing, no regular file, unreadable or over ``MAX_BYTES``.
    """
    name = name or str(path)
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise ConfigError(f"{name}: no such file", hint="check the path") from None
    except NotADirectoryError:
        raise ConfigError(f"{name}: a part of the path is not a directory", hint="check the path") from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{name}: cannot be read: {reason}", hint="check the path and its permissions") from None
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(f"{name}: is a directory, a file is needed", hint="name the file itself")
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{name}: is no regular file", hint="pipes and devices are not read; save it as a file")
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{name}: is over 1 MiB, the most that is read", hint="is this the right file?")
    return data


def load_yaml(path: Path, *, name: str | None = None) -> Document:
    """Load a YAML file whose top level is a mapping.

    Args:
        path: The file.
        name: How marks and errors call it; the path if omitted.

    Raises:
        ConfigError: The file cannot be read or is not YAML as described above. A duplicate key is
            kept as a problem of the document, so that ``validate`` reports it with the others.
    """
    name = name or str(path)
    return parse_yaml(read_file(path, name=name), source=name, directory=str(path.absolute().parent))


def parse_yaml(data: bytes, *, source: str, directory: str) -> Document:
    """Load YAML text whose top level is a mapping, like ``load_yaml``.

    Args:
        data: UTF-8.
        source: How marks and errors call it.
        directory: Where relative paths in it start.
    """
    document = _compose(_decode(data, source, directory), source, directory)
    if document is None:
        raise ConfigError(f"{source}: is empty", hint="a file needs at least `version: 1`")
    if not isinstance(document.value, dict):
        what = describe(document.value)
        raise config_error(source, [document.problem((), f"a mapping is needed, this is {what}: write `key: value`")])
    return document


def parse_value(text: str, *, source: str, directory: str) -> Any:
    """Load one YAML value from the command line; an empty text is null.

    Raises:
        ConfigError: It is not YAML; ``source`` names the option.
    """
    document = _compose(_decode(text.encode(errors="surrogateescape"), source, directory), source, directory)
    if document is None:
        return None
    if document.problems:
        raise ConfigError(f"{source}: {document.problems[0].text}")
    return document.value


# One pattern of all that YAML allows takes 5 ms to compile; these are few.
_CONTROLS: Final = re.compile("[\0-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")
_NONCHARACTERS: Final = "\ufeff\ufffe\uffff"


def _first_unprintable(text: str) -> int | None:
    """Index of the first character that YAML does not allow in a file."""
    control = _CONTROLS.search(text)
    found = [text.index(each) for each in _NONCHARACTERS if each in text]
    return min([*found, control.start()] if control else found, default=None)


def _decode(data: bytes, source: str, directory: str) -> str:
    """UTF-8 without a byte order mark, NUL or control characters."""
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        before = data[: error.start].decode()
        text, what = before, f"byte 0x{data[error.start]:02x} is not UTF-8: save the file as UTF-8"
    else:
        at = _first_unprintable(text)
        if at is None:
            return text
        before = text[:at]
        name = "a NUL byte" if text[at] == "\0" else f"the character U+{ord(text[at]):04X}"
        what = f"{name} is not allowed: remove it, or write an escape in double quotes"
    line = before.count("\n") + 1
    column = len(before) - (before.rfind("\n") + 1) + 1
    raise config_error(source, [Problem(Mark(source, line, column, directory), what)])


_NULL: Final = re.compile(r"~|null|Null|NULL|")
_BOOL: Final = re.compile(r"true|True|TRUE|false|False|FALSE")
_INT: Final = re.compile(r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_MAX_DIGITS: Final = 18

_PREFIX: Final = "tag:yaml.org,2002:"


class _NotCoreError(Exception):
    """A scalar is no value we take; the text says why."""


def _resolve(text: str) -> Any:
    """The value of a plain scalar by the YAML 1.2 core schema."""
    # Most plain scalars are words: one look at the first character spares the patterns.
    if text and text[0] not in "+-.0123456789~nNtTfF":
        return text
    if _NULL.fullmatch(text):
        return None
    if _BOOL.fullmatch(text):
        return text[0] in "tT"
    if _INT.fullmatch(text):
        digits = text.lstrip("+-").lstrip("0")
        if len(digits) > _MAX_DIGITS:
            raise _NotCoreError("the number is too large: put it in quotes if it is a text")
        return int(text, 8 if text.startswith("0o") else 16) if text[1:2] in {"o", "x"} else int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value in {float("inf"), float("-inf")}:
            raise _NotCoreError("the number is too large: put it in quotes if it is a text")
        return value
    if _NOT_FINITE.fullmatch(text):
        raise _NotCoreError("infinity and not-a-number are no values here: put it in quotes if it is a text")
    return text


def _scalar(text: str, tag: str | None, *, plain: bool) -> Any:
    """The value of a scalar. An explicit core tag must fit the text."""
    if tag is None:
        return _resolve(text) if plain else text
    if tag in {"!", f"{_PREFIX}str"}:
        return text
    kinds: dict[str, tuple[type, ...]] = {
        f"{_PREFIX}int": (int,),
        f"{_PREFIX}float": (int, float),
        f"{_PREFIX}bool": (bool,),
        f"{_PREFIX}null": (type(None),),
    }
    value = _resolve(text)
    wanted = kinds.get(tag)
    if wanted is None or type(value) not in wanted:
        raise _NotCoreError(f"the tag {tag.replace(_PREFIX, '!!')} cannot stand here: remove it")
    return float(value) if tag.endswith(":float") else value


class _Frame:
    """An open list or mapping. ``weight`` is what it holds, written out; ``height`` its nesting."""

    __slots__ = ("anchor", "container", "discard", "height", "key", "location", "weight")

    def __init__(self, container: dict[str, Any] | list[Any], location: Location, anchor: str | None) -> None:
        self.container = container
        self.location = location
        self.anchor = anchor
        self.key: str | None = None
        self.discard = False
        self.weight = 1
        self.height = 1


class _Composer:
    """Builds one document from parser events, with a stack of open containers."""

    def __init__(self, source: str, directory: str) -> None:
        self.document = Document(source, None)
        self.source = source
        self.directory = directory
        self.stack: list[_Frame] = []
        self.anchors: dict[str, tuple[Any, int, int] | None] = {}
        self.expanded = 0

    def fail(self, mark: Mark, text: str) -> ConfigError:
        """The error of a file that cannot be read on, after what was found before."""
        location = self._location() if self.stack else ()
        path = f"{dotted(location)}: " if location else ""
        return config_error(self.source, [*self.document.problems, Problem(mark, path + text)])

    def mark(self, mark: Any) -> Mark:
        """Ours for one of PyYAML's."""
        return Mark(self.source, mark.line + 1, mark.column + 1, self.directory)

    def _location(self) -> Location:
        frame = self.stack[-1]
        if isinstance(frame.container, list):
            return (*frame.location, len(frame.container))
        if frame.key is None:
            return frame.location
        # What stands under a key given twice is read and thrown away; its marks must not cover the first one's.
        return (*frame.location, frame.key, -1) if frame.discard else (*frame.location, frame.key)

    def _wants_key(self) -> bool:
        return bool(self.stack) and isinstance(self.stack[-1].container, dict) and self.stack[-1].key is None

    def scalar(self, event: Any) -> None:
        """A key or a value."""
        mark = self.mark(event.start_mark)
        plain = event.implicit[0]
        try:
            value = _scalar(event.value, event.tag, plain=plain)
        except _NotCoreError as error:
            raise self.fail(mark, str(error)) from None
        if self._wants_key():
            if event.anchor is not None:
                raise self.fail(mark, "an anchor on a key is not allowed: remove it")
            self._key(value, event.value, mark, plain=plain)
            return
        location = self._location() if self.stack else ()
        if not isinstance(value, str):
            self.document.texts[location] = event.value
        self._count(mark)
        self.document.marks[location] = mark
        self._place(value, 1 + len(event.value), 0, event.anchor)

    def _count(self, mark: Mark) -> None:
        if len(self.document.marks) >= MAX_VALUES:
            raise self.fail(mark, f"more than {MAX_VALUES:,} values: is this the right file?")

    def _key(self, key: Any, text: str, mark: Mark, *, plain: bool) -> None:
        if not isinstance(key, str):
            raise self.fail(mark, f"{describe(key)} is a key, keys are text: put it in quotes")
        if key == "<<" and plain:
            raise self.fail(mark, "merge keys are not part of YAML 1.2: write the keys out, or use `extends`")
        frame = self.stack[-1]
        frame.key = text
        frame.weight += 1 + len(text)
        location = (*frame.location, key)
        first = self.document.keys.get(location)
        frame.discard = first is not None
        if first is None:
            self.document.keys[location] = mark
        else:
            found = f"given twice, first in line {first.line}: remove one"
            self.document.problems.append(Problem(mark, f"{dotted(location)}: {found}"))

    def open(self, event: Any, container: dict[str, Any] | list[Any]) -> None:
        """The start of a list or mapping."""
        mark = self.mark(event.start_mark)
        if self._wants_key():
            raise self.fail(mark, "a list or mapping is a key, keys are text: put it in quotes")
        if event.tag not in {None, "!", f"{_PREFIX}map", f"{_PREFIX}seq"}:
            raise self.fail(mark, f"the tag {event.tag.replace(_PREFIX, '!!')} cannot stand here: remove it")
        if len(self.stack) >= MAX_DEPTH:
            raise self.fail(mark, f"nested deeper than {MAX_DEPTH} levels: make it flatter")
        location = self._location() if self.stack else ()
        self._count(mark)
        self.document.marks[location] = mark
        if event.anchor is not None:
            self.anchors[event.anchor] = None
        self.stack.append(_Frame(container, location, event.anchor))

    def close(self) -> None:
        """The end of a list or mapping."""
        frame = self.stack.pop()
        self._place(frame.container, frame.weight, frame.height, frame.anchor)

    def alias(self, event: Any) -> None:
        """A value given before under an anchor. It is shared, and counted as if written out."""
        mark = self.mark(event.start_mark)
        if self._wants_key():
            raise self.fail(mark, "an alias is a key: write the key out")
        if event.anchor not in self.anchors:
            raise self.fail(mark, f"*{event.anchor} stands for nothing: no &{event.anchor} before it")
        anchored = self.anchors[event.anchor]
        if anchored is None:
            raise self.fail(mark, f"*{event.anchor} stands inside its own &{event.anchor}: write the value out")
        value, weight, height = anchored
        self.expanded += weight
        if self.expanded > MAX_BYTES or len(self.stack) + height > MAX_DEPTH:
            raise self.fail(
                mark, f"aliases expand to over 1 MiB or {MAX_DEPTH} levels: write out the values that are needed"
            )
        self.document.marks[self._location()] = mark
        self._place(value, weight, height, None)

    def _place(self, value: Any, weight: int, height: int, anchor: str | None) -> None:
        if anchor is not None:
            self.anchors[anchor] = (value, weight, height)
        if not self.stack:
            self.document.value = value
            return
        frame = self.stack[-1]
        frame.weight += weight
        frame.height = max(frame.height, height + 1)
        if isinstance(frame.container, list):
            frame.container.append(value)
        elif frame.key is not None:
            if not frame.discard:
                frame.container[frame.key] = value
            frame.key = None


def _events(text: str) -> Iterator[Any]:
    """PyYAML's events of ``text``; by libyaml where PyYAML was built with it."""
    import yaml

    return iter(yaml.parse(text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)))


def _compose(text: str, source: str, directory: str) -> Document | None:
    """The one document of ``text``; None when there is none or it is null."""
    import yaml

    composer = _Composer(source, directory)
    documents = 0
    try:
        for event in _events(text):
            kind = type(event)
            if kind is yaml.ScalarEvent:
                composer.scalar(event)
            elif kind is yaml.MappingStartEvent:
                composer.open(event, {})
            elif kind is yaml.SequenceStartEvent:
                composer.open(event, [])
            elif kind is yaml.AliasEvent:
                composer.alias(event)
            elif kind in {yaml.MappingEndEvent, yaml.SequenceEndEvent}:
                composer.close()
            elif kind is yaml.DocumentStartEvent:
                documents += 1
                if documents > 1:
                    mark = composer.mark(event.start_mark)
                    raise composer.fail(mark, "a second document starts: one file holds one document")
                if event.version == (1, 1):
                    mark = composer.mark(event.start_mark)
                    raise composer.fail(mark, "YAML 1.1 is asked for, files are read as YAML 1.2: remove the line")
    except yaml.MarkedYAMLError as error:
        where = error.problem_mark or error.context_mark
        mark = composer.mark(where) if where is not None else Mark(source, 1, 1, directory)
        raise composer.fail(mark, f"not valid YAML: {_explain_syntax(error)}") from None
    except yaml.YAMLError as error:
        # A reader error has no mark; the text was checked before, so it does not name a character.
        raise ConfigError(f"{source}: not valid YAML: {error}") from None
    document = composer.document
    return None if documents == 0 or document.value is None else document


def _explain_syntax(error: Any) -> str:
    problem = error.problem or error.context or "it cannot be read"
    if "cannot start any token" in problem:
        return f"{problem}: indent with spaces, quote a text that starts with @, ` or %"
    if error.context and error.problem:
        return f"{error.context}, {problem}: check quotes, brackets and indentation"
    return f"{problem}: check quotes, colons and indentation"


def describe(value: Any) -> str:
    """A value in a message: its kind, and itself when it is short."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {shorten(value)!r}"
    if isinstance(value, list):
        return "a list" if value else "an empty list"
    return "a mapping"


def shorten(text: str, limit: int = 60) -> str:
    """At most ``limit`` code points of ``text``."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def near_miss(name: str, known: Iterable[str]) -> str | None:
    """The known name that ``name`` is most likely meant to be."""
    from difflib import get_close_matches

    found = get_close_matches(name.lower(), {each.lower(): each for each in known}, n=1, cutoff=0.6)
    return next((each for each in known if each.lower() == found[0]), None) if found else None


def unknown_name(name: str, known: Sequence[str], *, what: str = "key") -> str:
    """Say that ``name`` is unknown, with the nearest known one, or all of a short list."""
    near = near_miss(name, known)
    if near is not None:
        return f"unknown {what}, did you mean {near!r}?"
    listed = ", ".join(known)
    return f"unknown {what}: remove it; known here: {listed}" if known else f"unknown {what}: remove it"


def validate(model: type[Model], document: Document) -> Model:
    """Check ``document`` against a pydantic model.

    Returns:
        The instance.

    Raises:
        ConfigError: With every problem of the file at once, those of its text included.
    """
    instance, problems = check(model, document)
    if instance is None or problems:
        raise config_error(document.source, problems)
    return instance


def check(model: type[Model], document: Document) -> tuple[Model | None, list[Problem]]:
    """Like ``validate``, but hand the problems back, for callers that have more to add."""
    from pydantic import ValidationError

    try:
        return model.model_validate(document.value), list(document.problems)
    except ValidationError as error:
        found = error.errors(include_url=False)
        return None, [*document.problems, *(_explain(each, model, document) for each in found)]


_WANTED: Final = {
    "string_type": "a text is needed",
    "int_type": "a whole number is needed",
    "int_from_float": "a whole number is needed",
    "float_type": "a number is needed",
    "bool_type": "true or false is needed",
    "list_type": "a list is needed",
    "dict_type": "a mapping is needed",
    "model_type": "a mapping is needed",
    "none_required": "nothing may stand here",
}


def _explain(error: ErrorDetails, model: type[BaseModel], document: Document) -> Problem:
    """One of pydantic's errors in our words."""
    kind = error["type"]
    location = tuple(part for part in error["loc"] if not str(part).startswith("["))  # "[key]", and kinds of a union
    context = error.get("ctx", {})
    value = error["input"]
    if kind == "extra_forbidden":
        return document.problem(location, _unknown_key(model, location), at_key=True)
    if kind == "missing":
        return document.problem(location, "is missing: add it")
    text = _WANTED.get(kind)
    if text is not None:
        quote = kind == "string_type" and value is not None and not isinstance(value, list | dict)
        advice = ": put it in quotes" if quote else ""
        return document.problem(location, f"{text}, this is {describe(value)}{advice}")
    if kind in {"literal_error", "enum"}:
        return document.problem(location, f"{describe(value)} is none of the choices: write {context['expected']}")
    if kind in {"greater_than", "greater_than_equal", "less_than", "less_than_equal"}:
        relation, bound = next((key, context[key]) for key in ("gt", "ge", "lt", "le") if key in context)
        words = {"gt": "more than", "ge": "at least", "lt": "less than", "le": "at most"}
        return document.problem(location, f"{describe(value)} is out of range: write {words[relation]} {bound}")
    if kind in {"string_too_short", "too_short"}:
        return document.problem(location, "is empty: fill it, or remove the key")
    if kind == "string_pattern_mismatch":
        return document.problem(location, f"{describe(value)} does not fit {context['pattern']}: change it")
    # Errors raised by our own validators are whole sentences already.
    return document.problem(location, error["msg"].removeprefix("Value error, "))


def _unknown_key(model: type[BaseModel], location: Location) -> str:
    """What to say of a key that the model does not have, and where it may belong."""
    name = str(location[-1])
    known = key_names(_model_at(model, location[:-1]))
    if near_miss(name, known) is None:
        elsewhere = [path for path in key_paths(model) if path.rpartition(".")[2] == name]
        if len(elsewhere) == 1:
            return f"unknown key here, did you mean {elsewhere[0]!r}?"
    return unknown_name(name, known)


def key_names(model: type[BaseModel] | None) -> list[str]:
    """The keys a model takes, by their names in YAML."""
    return [] if model is None else [info.alias or name for name, info in model.model_fields.items()]


def key_paths(model: type[BaseModel], prefix: str = "") -> list[str]:
    """The dotted keys of a model and of the sections below it; lists and maps are not entered."""
    paths = []
    for name, info in model.model_fields.items():
        path = f"{prefix}{info.alias or name}"
        paths.append(path)
        inner, many = field_model(info.annotation)
        if inner is not None and not many:
            paths += key_paths(inner, f"{path}.")
    return paths


def field_model(annotation: Any) -> tuple[type[BaseModel] | None, bool]:
    """The one model inside an annotation, and whether a list or map of it is meant.

    ``Section``, ``Section | None``, ``list[Section]`` and ``dict[str, Section]`` are known.
    """
    from typing import get_args, get_origin

    from pydantic import BaseModel

    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation, False
    many = get_origin(annotation) in {list, dict}
    for argument in get_args(annotation):
        inner, deeper = field_model(argument)
        if inner is not None:
            return inner, many or deeper
    return None, many


def _model_at(model: type[BaseModel], location: Location) -> type[BaseModel] | None:
    """The model that a location lies in; None where it is not one of ours."""
    current: type[BaseModel] | None = model
    parts = iter(location)
    for part in parts:
        if current is None:
            return None
        info = next((info for name, info in current.model_fields.items() if part in {name, info.alias}), None)
        current, many = (None, False) if info is None else field_model(info.annotation)
        if many and next(parts, None) is None:
            return None
    return current
