"""Whether a loaded file has the shape its format asks for.

The pydantic models are the source; ``runner.config.schema`` writes them out as the JSON Schemas in
``configs/schema``. A run checks its files against those, by ``fits`` below: importing pydantic and
building the models costs 0.2 s of CPU, as much as the rest of loading several times over. Only a file
that does not fit is given to its model, which then explains every problem. A property test keeps the
two of one opinion; a schema that is missing or has an unknown keyword fits nothing, so pydantic decides.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from runner.config.load import config_error, validate

if TYPE_CHECKING:
    from collections.abc import Callable

    from pydantic import BaseModel

    from runner.config.load import Document
    from runner.messages import JsonObject

MODELS: Final = {
    "task": ("runner.config.task", "TaskModel"),
    "profile": ("runner.config.profile", "ProfileModel"),
    "policy": ("runner.config.policy", "PolicyModel"),
    "script": ("runner.config.script", "ScriptModel"),
}
"""Format → module and name of its model."""


@cache
def shipped_directory() -> Path:
    """The directory with the shipped profiles, policies, tasks and schemas.

    It lies in the package when that was installed from a wheel, beside it in a source checkout.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / "configs"
    return inside if inside.is_dir() else package.parent / "configs"


@cache
def schema_of(kind: str) -> JsonObject:
    """The JSON Schema of a format (a key of ``MODELS``); empty when it is not there."""
    path = shipped_directory() / "schema" / f"{kind}.schema.json"
    try:
        schema: JsonObject = json.loads(path.read_bytes())
    except (OSError, ValueError):
        # `validate` decides then, and `make check` finds what is wrong with the file.
        return {}
    return schema


def model_of(kind: str) -> type[BaseModel]:
    """The pydantic model of a format (a key of ``MODELS``)."""
    import importlib

    module, name = MODELS[kind]
    model: type[BaseModel] = getattr(importlib.import_module(module), name)
    return model


def demand(kind: str, document: Document) -> None:
    """Make sure that ``document`` is of the format ``kind`` (a key of ``MODELS``).

    Raises:
        ConfigError: With every problem of the file at once.
    """
    if not fits(schema_of(kind), document.value):
        validate(model_of(kind), document)
    elif document.problems:
        raise config_error(document.source, document.problems)


def fits(schema: JsonObject, value: Any) -> bool:
    """Whether ``value`` is what ``schema`` describes.

    Knows the keywords that our schemas use. Stricter than JSON Schema where YAML tells more apart:
    1.0 is no whole number, and true is no number.
    """
    return bool(schema) and _fits(schema, value, schema)


def _fits(node: JsonObject, value: Any, root: JsonObject) -> bool:
    for keyword, wanted in node.items():
        if keyword in _NOTES:
            continue
        rule = _RULES.get(keyword)
        if rule is None or not rule(wanted, value, node, root):
            return False
    return True


_NOTES: Final = {"$defs", "$id", "$schema", "additionalProperties", "default", "description", "examples", "title"}
"""Keywords that restrict nothing by themselves; ``additionalProperties`` is read with ``type: object``."""

_TYPES: Final[dict[str, Callable[[Any], bool]]] = {
    "null": lambda value: value is None,
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "string": lambda value: isinstance(value, str),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
}


def _type(wanted: Any, value: Any, node: JsonObject, root: JsonObject) -> bool:
    if isinstance(wanted, list):
        return any(_TYPES[each](value) for each in wanted)
    if not _TYPES[wanted](value):
        return False
    if wanted != "object":
        return True
    properties = node.get("properties", {})
    others = node.get("additionalProperties", True)
    return all(
        key in properties
        or others is True
        or (others is not False and (others == {} or _fits(others, value[key], root)))
        for key in value
    )


def _properties(wanted: Any, value: Any, _node: JsonObject, root: JsonObject) -> bool:
    return not isinstance(value, dict) or all(
        _fits(wanted[key], each, root) for key, each in value.items() if key in wanted
    )


def _property_names(wanted: Any, value: Any, _node: JsonObject, root: JsonObject) -> bool:
    return not isinstance(value, dict) or all(_fits(wanted, key, root) for key in value)


def _items(wanted: Any, value: Any, _node: JsonObject, root: JsonObject) -> bool:
    return not isinstance(value, list) or all(_fits(wanted, each, root) for each in value)


def _reference(wanted: Any, value: Any, _node: JsonObject, root: JsonObject) -> bool:
    return _fits(root["$defs"][wanted.removeprefix("#/$defs/")], value, root)


def _any_of(wanted: Any, value: Any, _node: JsonObject, root: JsonObject) -> bool:
    return any(_fits(each, value, root) for each in wanted)


def _pattern(wanted: Any, value: Any, _node: JsonObject, _root: JsonObject) -> bool:
    # All our patterns span the whole text; unlike `$`, `fullmatch` takes no newline at the end.
    return not isinstance(value, str) or re.fullmatch(wanted, value) is not None


def _is_number(value: Any) -> bool:
    return _TYPES["number"](value)


_RULES: Final[dict[str, Callable[[Any, Any, JsonObject, JsonObject], bool]]] = {
    "type": _type,
    "properties": _properties,
    "propertyNames": _property_names,
    "items": _items,
    "$ref": _reference,
    "anyOf": _any_of,
    "pattern": _pattern,
    "required": lambda wanted, value, _n, _r: not isinstance(value, dict) or all(key in value for key in wanted),
    "const": lambda wanted, value, _n, _r: type(value) is type(wanted) and value == wanted,
    "enum": lambda wanted, value, _n, _r: any(type(value) is type(each) and value == each for each in wanted),
    "minLength": lambda wanted, value, _n, _r: not isinstance(value, str) or len(value) >= wanted,
    "minItems": lambda wanted, value, _n, _r: not isinstance(value, list) or len(value) >= wanted,
    "minimum": lambda wanted, value, _n, _r: not _is_number(value) or value >= wanted,
    "maximum": lambda wanted, value, _n, _r: not _is_number(value) or value <= wanted,
    "exclusiveMinimum": lambda wanted, value, _n, _r: not _is_number(value) or value > wanted,
    "exclusiveMaximum": lambda wanted, value, _n, _r: not _is_number(value) or value < wanted,
}


def resolve_node(schema: JsonObject, node: JsonObject) -> JsonObject:
    """Follow ``$ref`` and drop the null alternative of an optional key."""
    while True:
        if "$ref" in node:
            node = schema["$defs"][node["$ref"].removeprefix("#/$defs/")]
            continue
        options = [option for option in node.get("anyOf", ()) if option != {"type": "null"}]
        if len(options) != 1:
            return node
        node = options[0]


def split_key(schema: JsonObject, key: str) -> list[str] | None:
    """The parts of a dotted key; None when the format has no such key.

    Names inside a mapping may hold dots themselves (``compaction.models.gpt-4.1.keep``): a mapping
    of sections takes all but the last part for its name, a mapping of values everything.
    """
    parts, rest = [], key.split(".")
    node = resolve_node(schema, schema)
    while rest:
        properties = node.get("properties")
        if properties is not None:
            name = rest.pop(0)
            if name not in properties:
                return None
            parts.append(name)
            node = resolve_node(schema, properties[name])
            continue
        inner = node.get("additionalProperties")
        if not isinstance(inner, dict) or not all(rest):
            return None
        inner = resolve_node(schema, inner)
        if "properties" in inner and len(rest) > 1 and rest[-1] in inner["properties"]:
            return [*parts, ".".join(rest[:-1]), rest[-1]]
        return [*parts, ".".join(rest)]
    return parts


def all_keys(schema: JsonObject, node: JsonObject | None = None, prefix: str = "") -> list[str]:
    """Every dotted key of a format, sections included; mappings with free names are not entered."""
    keys = []
    for name, inner in resolve_node(schema, node or schema).get("properties", {}).items():
        keys.append(f"{prefix}{name}")
        keys += all_keys(schema, inner, f"{prefix}{name}.")
    return keys
