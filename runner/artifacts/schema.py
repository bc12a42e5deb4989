"""JSON Schemas of ``result.json``, ``usage.json`` and log events, and reference tables, from one field table each.

A tool for working on this project: ``python -m runner.artifacts.schema --write`` writes
``configs/schema``, ``--check`` fails when a file there is not what the tables say. Pure apart from that.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, NamedTuple

from runner.errors import ErrorCode

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from runner.messages import JsonObject
    from runner.session.events import Event

SCHEMA_VERSION = 1
"""``schemaVersion`` of both files; rises when a field changes its meaning or goes."""

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


class Field(NamedTuple):
    """One field of a JSON artifact.

    Attributes:
        name: Name in the file.
        type: JSON type, or ``array``; with ``fields`` an object or an array of objects.
        meaning: One sentence, with the unit.
        nullable: Whether null may stand for unknown or nothing.
        optional: Whether the field may be absent.
        fields: Fields of the object, or of each object in the array.
        items: JSON type of the values of an array without ``fields``.
    """

    name: str
    type: str
    meaning: str
    nullable: bool = False
    optional: bool = False
    fields: tuple[Field, ...] = ()
    items: str = "string"


def object_schema(fields: Sequence[Field]) -> JsonObject:
    """The schema of an object with exactly these fields."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [field.name for field in fields if not field.optional],
        "properties": {field.name: _field_schema(field) for field in fields},
    }


def _field_schema(field: Field) -> JsonObject:
    schema: JsonObject
    if field.type == "array":
        schema = {"type": "array", "items": object_schema(field.fields) if field.fields else {"type": field.items}}
    elif field.fields:
        schema = object_schema(field.fields)
    else:
        schema = {} if field.type == "any" else {"type": field.type}
    if field.nullable and field.type != "any":
        schema["type"] = [schema["type"], "null"]
    return {"description": field.meaning, **schema}


def ordered(fields: Sequence[Field], values: JsonObject) -> JsonObject:
    """``values`` in the order of the table.

    Raises:
        KeyError: A required field is missing, or one is not in the table.
    """
    result = {field.name: values[field.name] for field in fields if not field.optional or field.name in values}
    unknown = values.keys() - result.keys()
    if unknown:
        raise KeyError(f"not in the field table: {', '.join(sorted(unknown))}")
    return result


def build_schemas() -> dict[str, JsonObject]:
    """File name in ``configs/schema`` → JSON Schema."""
    from runner.artifacts.context import COMPACT_FIELDS, CONTEXT_FIELDS
    from runner.artifacts.result import RESULT_FIELDS
    from runner.artifacts.usage import USAGE_FIELDS

    tables = {
        "result": ("nightshift result.json", RESULT_FIELDS),
        "usage": ("nightshift usage.json", USAGE_FIELDS),
        "compact": ("nightshift session compact --json", COMPACT_FIELDS),
        "context": ("nightshift session show --context --json", CONTEXT_FIELDS),
    }
    schemas = {
        f"{name}.schema.json": {"$schema": _DIALECT, "title": title, **object_schema(fields)}
        for name, (title, fields) in tables.items()
    }
    return {**schemas, "event.schema.json": event_schema()}


def event_schema() -> JsonObject:
    """The schema of one event line of a session log, from the field tables of the vocabulary.

    The header line and packed rows of deltas are other lines. Fields that a table does not know are allowed,
    as they are when a log is read.
    """
    from runner.session.events import EVENT_TYPES

    return {
        "$schema": _DIALECT,
        "title": "nightshift session log: one event",
        "type": "object",
        "required": ["type", "seq", "time", "data"],
        "properties": {
            "type": {"type": "string"},
            "seq": {"type": "integer", "minimum": 0},
            "time": {"type": "number"},
            "ignorable": {"const": True},
            "data": {"type": "object"},
            "sourceEventSeqs": {"type": "array", "items": {"type": "integer"}},
            "surfaceOp": {"type": ["string", "object"]},
        },
        "allOf": [_event_rule(cls) for name, cls in sorted(EVENT_TYPES.items()) if not name.endswith("*")],
    }


def _event_rule(cls: type[Event]) -> JsonObject:
    """What holds for the lines of one type."""
    properties = {
        field.name: {} if field.kind == "any" else {"type": field.kind if field.required else [field.kind, "null"]}
        for field in cls.FIELDS
    }
    required = [field.name for field in cls.FIELDS if field.required]
    then: JsonObject = {"properties": {"data": {"required": required, "properties": properties}}}
    if cls.SURFACE:
        then["required"] = ["surfaceOp"]
    else:
        then["not"] = {"required": ["surfaceOp"]}
    meaning = (cls.__doc__ or "").partition("\n")[0]
    return {"description": meaning, "if": {"properties": {"type": {"const": cls.TYPE}}}, "then": then}


def field_rows(fields: Sequence[Field], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """``(key, type, meaning)`` of every field, nested ones with their path."""
    for field in fields:
        kind = f"array of {'objects' if field.fields else field.items + 's'}" if field.type == "array" else field.type
        key = f"{prefix}{field.name}{'[]' if field.type == 'array' else ''}"
        extra = (" or null" if field.nullable else "") + (", may be absent" if field.optional else "")
        yield f"`{key}`", kind + extra, field.meaning
        yield from field_rows(field.fields, f"{key}.")


_FILES = (
    ("session.jsonl.zst", "the session log; everything else is derived from it"),
    ("changes.patch", "what the agent changed; empty when nothing was"),
    ("files/<path>", "the declared outputs, under their paths in the workspace"),
    ("usage.json", "tokens, cost, time, context; the same as `nightshift session stats --json`"),
    ("summary.md", "the run for people"),
    ("spill/", "results that were too long for the context, whole"),
    ("session.zip", "the export: log, spilled results, media and a manifest"),
    ("result.json", "the run for machines; written last, so whoever finds it finds all the others complete"),
)

_END = """\
The directory has mode 0700, its files 0600. It must be absent or empty and lie outside the workspace and
`sandbox.writable`. Order at the end: `changes.patch` and the declared outputs, `run/end`, the reports out of the log,
the final seal, the ZIP, `result.json`. Each file written before the seal has its `artifact/written` event. A declared
output is opened beneath the workspace without following a link; it must be a regular file of at most 100 MB.

No artifact holds a known secret. In the log and in what is made from it the secret's name stands in its place. A
patch or a declared output that holds one, in any form the redactor knows, binary files of a patch included, is
withheld whole, since without the secret it would be another file: the run ends with TASK_FAILED, the reason names
the secret, and the files stay in the workspace (a copy or a worktree is kept, and its path is said).

After a signal a long output of a command is kept up to where it had been read, at least its first 4 MB, and the
result says how much is missing. Members of the ZIP over 4 MiB that hardly get smaller are stored as they are."""

_PATCH = """\
`changes.patch` applies with `git apply --index` to the recorded base and gives the recorded tree; that is checked
before it is published. The base is a commit, and always a tree: uncommitted changes and untracked files that are not
ignored belong to it (`dirty: include`), so the patch holds what the agent did and nothing else. Without a repository
the base is a tree alone. A workspace inside a repository gives paths from the repository's top. Ignored files and
empty folders are in no patch. A repository that the run made inside the workspace, and changes inside a submodule,
are errors (TASK_FAILED): a patch would lose them.

The runner works in a private repository that borrows the user's objects. The user's index, refs and objects are never
written, and hooks, fsmonitor, filters, textconv and global configuration never run. Content that a filter made (Git
LFS) is recorded as it lies in the workspace when it is changed."""

_ISOLATION = """\
`in-place` works in the directory itself. `copy` works on tracked files and untracked ones that are not ignored,
copied byte for byte; the copy has a small `.git` of its own with HEAD, refs and index of the original and borrowed
objects, without its configuration, hooks and remotes. `worktree` works in a detached `git worktree` of the base,
uncommitted changes carried over; it is removed at the end, and one whose run was killed is removed by the next. In
both, submodules are empty folders and the result leaves as a patch. Another `base` than HEAD starts from exactly that
commit."""


def reference_parts() -> list[str | tuple[tuple[str, ...], list[tuple[str, ...]]]]:
    """The parts of the reference page: text, and tables as ``(columns, rows)``."""
    from runner.artifacts.context import COMPACT_FIELDS, CONTEXT_FIELDS
    from runner.artifacts.result import RESULT_FIELDS
    from runner.artifacts.usage import USAGE_FIELDS

    columns = ("key", "type", "meaning")
    return [
        "What a run leaves behind, complete after any end.",
        (("file", "what it holds"), [(f"`{name}`", what) for name, what in _FILES]),
        _END,
        "## The patch and its base",
        _PATCH,
        "## Isolation",
        _ISOLATION,
        "## result.json",
        "JSON Schema: `configs/schema/result.schema.json`. Times are milliseconds. Unknown is null, never 0.",
        (columns, list(field_rows(RESULT_FIELDS))),
        "## usage.json",
        "JSON Schema: `configs/schema/usage.schema.json`. The buckets of tokens are disjoint; sums equal the log.",
        (columns, list(field_rows(USAGE_FIELDS))),
        "## session show --context STEP --json",
        "No file, but an answer about one step. JSON Schema: `configs/schema/context.schema.json`.",
        (columns, list(field_rows(CONTEXT_FIELDS))),
        "## session compact --json",
        "JSON Schema: `configs/schema/compact.schema.json`.",
        (columns, list(field_rows(COMPACT_FIELDS))),
    ]


def main(arguments: Sequence[str], *, folder: Path | None = None) -> int:
    """Write or check the schemas; returns the exit code."""
    if list(arguments) not in (["--write"], ["--check"]):
        print("usage: python -m runner.artifacts.schema --write | --check", file=sys.stderr)  # noqa: T201  # a tool
        return ErrorCode.CONFIG_INVALID.exit_code
    from runner.config.shape import shipped_directory

    target = folder or shipped_directory() / "schema"
    failed = False
    for name, schema in build_schemas().items():
        text = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
        path = target / name
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        if arguments[0] == "--write":
            path.write_text(text, encoding="utf-8")
        else:
            message = f"configs/schema/{name} is not what the field table says; run: make schema WRITE=1"
            print(message, file=sys.stderr)  # noqa: T201  # a tool
            failed = True
    return ErrorCode.TASK_FAILED.exit_code if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
