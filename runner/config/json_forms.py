"""Pieces of the JSON Schemas of what commands print: every key required, none besides."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.messages import JsonObject

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
DIGEST: Final = r"^[0-9a-f]{64}$"


def document_form(title: str, description: str, properties: JsonObject) -> JsonObject:
    """The schema of a whole answer."""
    return {"$schema": DIALECT, "title": f"nightshift {title}", **object_form(description, properties)}


def object_form(description: str, properties: JsonObject) -> JsonObject:
    """An object with exactly these keys."""
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def text_form(description: str, *, null: bool = False, **more: Any) -> JsonObject:
    """A text, or null if that may stand for nothing."""
    return {"type": ["string", "null"] if null else "string", "description": description, **more}


def choice_form(description: str, values: Sequence[str], *, null: bool = False) -> JsonObject:
    """One of these texts, or null if that may stand for nothing."""
    return {"enum": [*values, None] if null else list(values), "description": description}


def number_form(description: str) -> JsonObject:
    """A whole number from 0."""
    return {"type": "integer", "minimum": 0, "description": description}


def flag_form(description: str) -> JsonObject:
    """True or false."""
    return {"type": "boolean", "description": description}


def list_form(description: str, items: JsonObject | None = None, *, null: bool = False) -> JsonObject:
    """A list, of texts if not said otherwise; or null if that may stand for nothing."""
    form: JsonObject = {"type": ["array", "null"] if null else "array", "description": description}
    return form | {"items": {"type": "string"} if items is None else items}
