"""Totals beside a log against its events: ``usage.json`` and ``result.json``, field by field.

Both are derived again from the log, in the one pass that verifies it. The first field that differs is
named with both values. What the log does not say (further causes, hints, the size of the patch, a structured
answer) is not compared. Files that are not there, or that belong to a log that has not ended, are listed
as not checked. Reads events only; no effect on the prefix cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from runner.artifacts.facts import RunFold
from runner.artifacts.publish import USAGE_NAME
from runner.artifacts.result import RESULT_FIELDS, RESULT_NAME, build_result
from runner.artifacts.schema import SCHEMA_VERSION
from runner.errors import LogError
from runner.neutral import neutral_line
from runner.session import events as ev
from runner.session.header import is_chained
from runner.session.store import is_inside
from runner.session.verify import digest_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.messages import JsonObject
    from runner.session.store import Files, SessionSource
    from runner.session.verify import Verification

NAMES = (USAGE_NAME, RESULT_NAME)
"""The files that are compared, in this order."""

_LIMIT = 64 * 1024 * 1024
_READ = 1024 * 1024
_SHOWN = 120
_NOT_IN_THE_LOG = frozenset({"secondary", "softFailed", "structuredOutput", "patch", "artifacts", "error"})
_ABSENT = object()


class TotalsCheck:
    """Compares the totals of one session with its log; see ``runner.session.verify.Totals``.

    Args:
        source: The session.
    """

    def __init__(self, source: SessionSource) -> None:
        self._source = source
        with source.beside() as files:
            self._present = [name for name in NAMES if files.size(name) is not None]
        self._fold = RunFold(source.header) if self._present and is_chained(source.header) else None
        self._end: ev.RunEnd | None = None
        self._written: dict[str, ev.ArtifactWritten] = {}

    def apply(self, event: ev.Event) -> None:
        """Take one event into account.

        Raises:
            LogError: LOG_INVALID, it holds a value that cannot be counted.
        """
        if self._fold is None:
            return
        if isinstance(event, ev.RunEnd):
            self._end = event
        elif isinstance(event, (ev.RunResume, ev.SessionEndSeed)):
            self._written.clear()
        elif isinstance(event, ev.ArtifactWritten):
            self._written[event.path] = event
        try:
            self._fold.apply(event)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise LogError(f"event {event.seq} ({event.TYPE}): it cannot be counted: {error!r}") from error

    def compare(self, result: Verification) -> None:
        """Compare, and say in ``result`` what was checked and what was not.

        Raises:
            LogError: LOG_INVALID, a file is malformed, or says something else than the log.
        """
        if self._fold is None or result.state != "whole":
            result.totals_not_checked += NAMES
            return
        result.totals_not_checked += [name for name in NAMES if name not in self._present]
        try:
            usage = self._fold.usage.usage()
            derived = build_result(self._fold.outcome.outcome(), usage, self._fold.facts, log_digest=result.digest)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise LogError(f"{self._source.name}: its events cannot be counted: {error!r}") from error
        with self._source.beside() as files:
            for name in self._present:
                told = self._read(files, name)
                if name == USAGE_NAME:
                    self._require_same(name, told, usage)
                else:
                    self._compare_result(told, derived)
                    self._compare_artifacts(files, told, result)
                result.totals_checked.append(name)

    # --- result.json --------------------------------------------------------------------------

    def _compare_result(self, told: JsonObject, derived: JsonObject) -> None:
        known = {field.name for field in RESULT_FIELDS}
        unknown = sorted(set(told) - known)
        if unknown:
            raise self._differs(RESULT_NAME, unknown[0], told[unknown[0]], _ABSENT)
        if self._end is not None:
            self._compare_end(told, self._end)
        wanted = {name: value for name, value in derived.items() if name not in _NOT_IN_THE_LOG}
        self._require_same(RESULT_NAME, {name: told[name] for name in wanted if name in told}, wanted)

    def _compare_end(self, told: JsonObject, end: ev.RunEnd) -> None:
        """What ``run/end`` says itself."""
        said = {
            "outcome": end.outcome,
            "code": end.code,
            "failureClass": end.failure_class,
            "exitCode": end.exit_code,
            "turns": end.turns,
            "steps": end.steps,
        }
        self._require_same(RESULT_NAME, {name: told.get(name, _ABSENT) for name in said}, said)
        error = told.get("error", _ABSENT)
        if isinstance(error, dict) and end.error is not None:
            error = {name: value for name, value in error.items() if name != "hint"}
        self._require_same(RESULT_NAME, {"error": error}, {"error": end.error})

    def _compare_artifacts(self, files: Files, told: JsonObject, result: Verification) -> None:
        """The list of artifacts against the files, and against what the log says was written."""
        listed: dict[str, JsonObject] = {}
        for number, entry in enumerate(_entries(told.get("artifacts"))):
            where = f"artifacts[{number}]"
            match entry:
                case {"path": str(path), "sha256": str(), "bytes": int()} if is_inside(path) and path not in listed:
                    listed[path] = entry
                case _:
                    raise LogError(f"{self._place(RESULT_NAME)}: {where} is no entry of a file, or one twice")
        for path, event in self._written.items():
            entry = listed.get(path, {})
            said = {"name": event.name, "path": path, "sha256": event.sha256, "bytes": event.bytes}
            self._require_same(RESULT_NAME, {f"artifacts[{path}]": entry or _ABSENT}, {f"artifacts[{path}]": said})
        for path, entry in listed.items():
            size = files.size(path)
            if size is None:
                if path not in result.artifacts_not_checked:
                    result.artifacts_not_checked.append(path)
                continue
            if path not in result.artifacts_checked:
                there = {"bytes": size, "sha256": digest_of(files, path)}
                said = {name: entry[name] for name in there}
                self._require_same(
                    RESULT_NAME, {f"artifacts[{path}]": said}, {f"artifacts[{path}]": there}, who="the file"
                )
                result.artifacts_checked.append(path)

    # --- comparing ----------------------------------------------------------------------------

    def _read(self, files: Files, name: str) -> JsonObject:
        if (files.size(name) or 0) > _LIMIT:
            raise LogError(f"{self._place(name)} is larger than {_LIMIT // 1024 // 1024} MiB")
        pieces: list[bytes] = []
        held = 0
        with files.open(name) as stream:
            while held <= _LIMIT and (piece := stream.read(_READ)):
                pieces.append(piece)
                held += len(piece)
        try:
            told = orjson.loads(b"".join(pieces))
        except orjson.JSONDecodeError as error:
            raise LogError(f"{self._place(name)} is no valid JSON: {error}") from error
        if not isinstance(told, dict):
            raise LogError(f"{self._place(name)} is no JSON object")
        if told.get("schemaVersion") != SCHEMA_VERSION:
            raise LogError(
                f"{self._place(name)}: schemaVersion is {_shown(told.get('schemaVersion'))}, "
                f"this version reads {SCHEMA_VERSION}"
            )
        return told

    def _require_same(
        self, name: str, told: Mapping[str, Any], derived: Mapping[str, Any], *, who: str = "the log"
    ) -> None:
        found = _difference("", told, derived)
        if found is not None:
            raise self._differs(name, *found, who=who)

    def _differs(self, name: str, field: str, told: object, derived: object, *, who: str = "the log") -> LogError:
        one = "is missing" if told is _ABSENT else f"is {_shown(told)}"
        other = "nothing" if derived is _ABSENT else _shown(derived)
        return LogError(neutral_line(f"{self._place(name)}: {field} {one}, {who} says {other}"))

    def _place(self, name: str) -> str:
        return f"{self._source.name}: {name}"


def _entries(value: object) -> list[Any]:
    return value if isinstance(value, list) else [None]


def _difference(where: str, told: Any, derived: Any) -> tuple[str, Any, Any] | None:
    """The first place where two JSON values differ, and the values there."""
    if isinstance(told, dict) and isinstance(derived, dict):
        for key in [*derived, *(key for key in told if key not in derived)]:
            inner = f"{where}.{key}" if where else key
            found = _difference(inner, told.get(key, _ABSENT), derived.get(key, _ABSENT))
            if found is not None:
                return found
        return None
    if isinstance(told, list) and isinstance(derived, list):
        for number in range(max(len(told), len(derived))):
            one = told[number] if number < len(told) else _ABSENT
            other = derived[number] if number < len(derived) else _ABSENT
            found = _difference(f"{where}[{number}]", one, other)
            if found is not None:
                return found
        return None
    same = told == derived and isinstance(told, bool) == isinstance(derived, bool)
    return None if same else (where, told, derived)


def _shown(value: object) -> str:
    try:
        text = orjson.dumps(value).decode()
    except TypeError:
        text = str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
