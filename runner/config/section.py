"""What the pydantic models of the YAML files share: the strict base class and the value types.

The models say what the files may hold; their attribute docstrings become the descriptions in the JSON
Schemas and on the reference pages. They only check: a run works on the checked YAML values, and
defaults are those of the frozen settings beside the code that uses them, filled in once by ``resolve``.
pydantic is imported only to explain what is wrong with a file, see ``runner.config.shape``.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from runner.config.load import describe, shorten
from runner.config.values import DURATION_PATTERN, LEAST_MEMORY, SIZE_PATTERN, parse_duration, parse_memory, parse_size

if TYPE_CHECKING:
    from collections.abc import Callable


class Section(BaseModel):
    """A mapping of known keys; an unknown one, or a value of another type, is an error."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


_NO_NUL: Final = r"^[^\x00]+$"
_CONTROL: Final = r"[\x00-\x1f\x7f]"

_LONGEST_PATH: Final = 4000
_LONGEST_NAME: Final = 255
"""Most characters of a path, and between its slashes; Linux counts bytes, and takes 4,095 with what is in front."""


def _custom(message: str) -> PydanticCustomError:
    # Braces in a template would be taken for places to fill in.
    return PydanticCustomError("value", "{message}", {"message": message})


def in_words(pattern: str, words: str | Callable[[str], str]) -> BeforeValidator:
    """Says in words what a text that does not fit ``pattern`` does wrong, and what to do.

    Args:
        pattern: The pattern of the field.
        words: They follow the value; a function gets it, and gives the whole sentence.
    """

    def check(value: Any) -> Any:
        if isinstance(value, str) and value and re.fullmatch(pattern, value) is None:
            raise _custom(words(value) if callable(words) else f"{describe(value)} {words}")
        return value

    return BeforeValidator(check)


def _duration(value: Any) -> Any:
    try:
        parse_duration(value)
    except ValueError as error:
        raise _custom(str(error)) from None
    return value


def _delay(value: Any) -> Any:
    try:
        parse_duration(value, zero=True)
    except ValueError as error:
        raise _custom(str(error)) from None
    return value


def _size(value: Any) -> Any:
    try:
        parse_size(value)
    except ValueError as error:
        raise _custom(str(error)) from None
    return value


def _memory(value: Any) -> Any:
    try:
        parse_memory(value)
    except ValueError as error:
        raise _custom(str(error)) from None
    return value


def _names(value: Any) -> Any:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, str) and item for item in items):
        raise _custom(f"a text or a list of texts is needed, this is {describe(value)}")
    if any("\0" in item for item in items):
        raise _custom("holds a NUL, which no name has: take it out")
    return value


def _relative_path(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _custom(f"a path is needed, this is {describe(value)}")
    if re.search(_CONTROL, value):
        raise _custom(f"{shorten(value)!r} holds a control character: write a plain path")
    if value.startswith(("/", "~")) or ".." in value.split("/"):
        raise _custom(f"{shorten(value)!r} leaves the workspace: write a path relative to the workspace, without '..'")
    if len(value) > _LONGEST_PATH or any(len(name) > _LONGEST_NAME for name in value.split("/")):
        raise _custom(f"{shorten(value)!r} is longer than a path can be: shorten it")
    return value


def _file_or_mapping(value: Any) -> str | dict[str, Any]:
    if isinstance(value, str) and "\0" in value:
        raise _custom(f"{describe(value)} holds a NUL, which no path has: take it out")
    if (isinstance(value, str) and value) or isinstance(value, dict):
        return value
    raise _custom(f"a file or a mapping is needed, this is {describe(value)}")


def _version(value: Any) -> int:
    # pydantic's Literal takes true for 1.
    if type(value) is int and value == 1:
        return value
    raise _custom(f"{describe(value)} is no known version: write 1")


_SCALAR: Final = {"type": ["string", "number", "boolean"]}


def _scalar(value: Any) -> str | int | float | bool:
    if isinstance(value, str | int | float | bool):
        return value
    raise _custom(f"a text, a number or true/false is needed, this is {describe(value)}")


def _duration_schema(*, positive: bool) -> dict[str, Any]:
    bound = "exclusiveMinimum" if positive else "minimum"
    return {"anyOf": [{"type": "number", bound: 0}, {"type": "string", "pattern": DURATION_PATTERN}]}


def _size_schema(least: int) -> dict[str, Any]:
    return {"anyOf": [{"type": "number", "minimum": least}, {"type": "string", "pattern": SIZE_PATTERN}]}


_TEXT_SCHEMA: Final = {"type": "string", "minLength": 1, "pattern": _NO_NUL}
_NAMES_SCHEMA: Final = {"anyOf": [_TEXT_SCHEMA, {"type": "array", "items": _TEXT_SCHEMA, "minItems": 1}]}
_RELATIVE_SCHEMA: Final = {
    "type": "string",
    "pattern": (
        rf"^(?!~)(?!\.\.(/|$))(?!.*/\.\.(/|$))(?=.{{1,{_LONGEST_PATH}}}$)"
        rf"[^/\x00-\x1f\x7f]{{1,{_LONGEST_NAME}}}(/[^/\x00-\x1f\x7f]{{0,{_LONGEST_NAME}}})*$"
    ),
}

Duration = Annotated[float, PlainValidator(_duration), WithJsonSchema(_duration_schema(positive=True))]
"""Seconds above zero; ``5m``, ``90s``, ``2h``, ``1.5h``, ``250ms`` or a bare number."""

Delay = Annotated[float, PlainValidator(_delay), WithJsonSchema(_duration_schema(positive=False))]
"""Like ``Duration``, zero included."""

Size = Annotated[int, PlainValidator(_size), WithJsonSchema(_size_schema(1))]
"""Bytes or tokens; ``4g``, ``100M``, ``500k`` or a bare number."""

Memory = Annotated[int, PlainValidator(_memory), WithJsonSchema(_size_schema(LEAST_MEMORY))]
"""Like ``Size``, for the memory of a command."""

Names = Annotated[list[str], PlainValidator(_names), WithJsonSchema(_NAMES_SCHEMA)]
"""A name or file, or a list of them."""

RelativePath = Annotated[str, PlainValidator(_relative_path), WithJsonSchema(_RELATIVE_SCHEMA)]
"""A path relative to the workspace that stays inside it."""

FileOrMapping = Annotated[
    str | dict[str, Any],
    PlainValidator(_file_or_mapping),
    WithJsonSchema({"anyOf": [_TEXT_SCHEMA, {"type": "object"}]}),
]
"""A file, or its content in place."""

Scalar = Annotated[str | int | float | bool, PlainValidator(_scalar), WithJsonSchema(_SCALAR)]
"""A text, a number, true or false."""

Version = Annotated[int, PlainValidator(_version), WithJsonSchema({"const": 1, "type": "integer"})]
"""Version of a format: 1."""

Count = Annotated[int, Field(ge=1)]
"""A whole number from 1."""

Text = Annotated[
    str,
    Field(min_length=1, pattern=_NO_NUL),
    in_words(_NO_NUL, "holds a NUL, which no file or program takes: take it out"),
]
"""A text that is not empty and holds no NUL."""

_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
Name = Annotated[
    str,
    Field(pattern=_NAME),
    in_words(_NAME, "is no name: write letters, digits, '.', '_' and '-', a letter or digit first, at most 100"),
]
"""A name that can stand in paths and reports."""

_VARIABLE: Final = r"^[A-Za-z_][A-Za-z0-9_]*$"
Variable = Annotated[
    str,
    Field(pattern=_VARIABLE),
    in_words(_VARIABLE, "is no name of a variable: write letters, digits and '_', no digit first"),
]
"""The name of an environment variable."""
