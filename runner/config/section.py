"""What the pydantic models of the YAML files share: the strict base class and the value types.

The models say what the files may hold; their attribute docstrings become the descriptions in the JSON
Schemas and on the reference pages. They only check: a run works on the checked YAML values, and
defaults are those of the frozen settings beside the code that uses them, filled in once by ``resolve``.
pydantic is imported only to explain what is wrong with a file, see ``runner.config.shape``.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from runner.config.load import describe
from runner.config.values import DURATION_PATTERN, SIZE_PATTERN, parse_duration, parse_size


class Section(BaseModel):
    """A mapping of known keys; an unknown one, or a value of another type, is an error."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )


def _custom(message: str) -> PydanticCustomError:
    # Braces in a template would be taken for places to fill in.
    return PydanticCustomError("value", "{message}", {"message": message})


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


def _names(value: Any) -> Any:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not items or not all(isinstance(item, str) and item for item in items):
        raise _custom(f"a text or a list of texts is needed, this is {describe(value)}")
    return value


def _relative_path(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _custom(f"a path is needed, this is {describe(value)}")
    if not value.isprintable():
        raise _custom(f"{value!r} holds a control character: write a plain path")
    if value.startswith(("/", "~")) or ".." in value.split("/"):
        raise _custom(f"{value!r} leaves the workspace: write a path relative to the workspace, without '..'")
    return value


def _file_or_mapping(value: Any) -> str | dict[str, Any]:
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


_SIZE_SCHEMA: Final = {"anyOf": [{"type": "number", "minimum": 1}, {"type": "string", "pattern": SIZE_PATTERN}]}
_NAMES_SCHEMA: Final = {
    "anyOf": [
        {"type": "string", "minLength": 1},
        {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1},
    ]
}
_RELATIVE_SCHEMA: Final = {"type": "string", "pattern": r"^(?![/~])(?!\.\.(/|$))(?!.*/\.\.(/|$)).+$"}

Duration = Annotated[float, PlainValidator(_duration), WithJsonSchema(_duration_schema(positive=True))]
"""Seconds above zero; ``5m``, ``90s``, ``2h``, ``1.5h``, ``250ms`` or a bare number."""

Delay = Annotated[float, PlainValidator(_delay), WithJsonSchema(_duration_schema(positive=False))]
"""Like ``Duration``, zero included."""

Size = Annotated[int, PlainValidator(_size), WithJsonSchema(_SIZE_SCHEMA)]
"""Bytes or tokens; ``4g``, ``100M``, ``500k`` or a bare number."""

Names = Annotated[list[str], PlainValidator(_names), WithJsonSchema(_NAMES_SCHEMA)]
"""A name or file, or a list of them."""

RelativePath = Annotated[str, PlainValidator(_relative_path), WithJsonSchema(_RELATIVE_SCHEMA)]
"""A path relative to the workspace that stays inside it."""

FileOrMapping = Annotated[
    str | dict[str, Any],
    PlainValidator(_file_or_mapping),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "object"}]}),
]
"""A file, or its content in place."""

Scalar = Annotated[str | int | float | bool, PlainValidator(_scalar), WithJsonSchema(_SCALAR)]
"""A text, a number, true or false."""

Version = Annotated[int, PlainValidator(_version), WithJsonSchema({"const": 1, "type": "integer"})]
"""Version of a format: 1."""

Count = Annotated[int, Field(ge=1)]
"""A whole number from 1."""

Text = Annotated[str, Field(min_length=1)]
"""A text that is not empty."""

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$")]
"""A name that can stand in paths and reports."""

Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of an environment variable."""
