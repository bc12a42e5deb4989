"""The first line of a session log: what it must hold, and how ours is built.

Invariants: ``version`` is 0; with ``writer.chain`` the log is ours and its seals are demanded. Pure.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from runner import __version__
from runner.errors import InternalError, LogError
from runner.session.events import LOG_FORMAT_VERSION, LOG_VERSION

if TYPE_CHECKING:
    from runner.messages import JsonObject

LOG_NAME = "session.jsonl.zst"
"""Name of our log in its directory."""

CHAIN = "sha256"
"""The only chain there is: seals with SHA-256 over the decoded bytes."""

SESSION_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""What an id of ours looks like: it names folders and files, so it can lead nowhere."""

_ORDER = ("id", "createdAt", "cwd", "parentSession", "seedLength", "origin", "delegationDepth")


def make_header(fields: JsonObject, *, created_at: int) -> JsonObject:
    """The header of a new log of ours; ``fields`` may hold any of the optional ones, and ``id``.

    Raises:
        InternalError: INTERNAL, ``id`` is missing or a field is unknown.
    """
    values = {"createdAt": created_at, "delegationDepth": 0, **fields}
    fixed: JsonObject = {
        "type": "session",
        "version": LOG_VERSION,
        "writer": {"name": "nightshift", "version": __version__, "format": LOG_FORMAT_VERSION, "chain": CHAIN},
    }
    unknown = set(values).difference(_ORDER, fixed)
    if unknown or "id" not in values:
        raise InternalError(f"a session header with {sorted(unknown)} and {'an' if 'id' in values else 'no'} id")
    ordered = {name: values[name] for name in _ORDER if name in values}
    header = {"type": fixed["type"], "version": fixed["version"], **ordered, "writer": fixed["writer"]}
    check_header(header)
    return header


def check_header(record: JsonObject) -> None:
    """Check the first line of a log.

    Raises:
        LogError: LOG_INVALID, it is no header, or of a version or chain this version cannot read.
    """
    version, writer = record.get("version"), record.get("writer")
    if record.get("type") != "session":
        raise LogError("not the header of a session log")
    if version != LOG_VERSION or isinstance(version, bool):
        raise LogError(f"version {version!r} of the session log is not supported, only {LOG_VERSION}")
    if not isinstance(record.get("id"), str) or not record["id"]:
        raise LogError("the header has no id")
    for name in ("createdAt", "seedLength", "delegationDepth"):
        if name in record and (isinstance(record[name], bool) or not isinstance(record[name], (int, float))):
            raise LogError(f"the header's {name} is no number")
    for name in ("cwd", "parentSession", "origin"):
        if not isinstance(record.get(name, ""), str):
            raise LogError(f"the header's {name} is no text")
    if writer is None:
        return
    if not SESSION_ID.fullmatch(record["id"]):
        raise LogError("the header's id is not one of ours: letters, digits, dots, dashes, at most 128")
    if not isinstance(writer, dict) or writer.get("chain") != CHAIN:
        raise LogError("the header's writer has no chain this version knows")
    if type(writer.get("format")) is not int or writer["format"] > LOG_FORMAT_VERSION:
        raise LogError("the log was written in a newer format", hint="update nightshift")


def is_chained(header: JsonObject) -> bool:
    """Whether the log is one of ours, with seals."""
    return isinstance(header.get("writer"), dict)
