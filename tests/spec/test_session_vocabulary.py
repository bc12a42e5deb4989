"""The vocabulary's table is true: each event has a writer or the mark ``read only``, a reader, and a description."""

from __future__ import annotations

import ast
import functools
import inspect
import re
from pathlib import Path
from typing import Any

import pytest

from runner.errors import ErrorCode, LogError
from runner.session import codec
from runner.session import events as ev
from runner.session.transcript import transcript

REPOSITORY = Path(__file__).resolve().parents[2]
TYPES = list(ev.EVENT_TYPES.values())
CLASSES = {cls.__name__: cls for cls in TYPES}
READ_ONLY = "read only"
READERS = {
    "projection": ("session.projection",),
    "request": ("session.rebuild",),
    "outcome": ("outcome",),
    "usage": ("artifacts.usage",),
    "reports": ("artifacts.facts",),
    "verify": ("session.verify", "session.structure", "session.surface"),
    "repair": ("session.repair", "session.structure"),
    "resume": ("agent.past",),
    "replay": ("providers.recording",),
    "export": ("session.export",),
    "show": ("session.transcript",),
}
"""What the table calls a reader → the modules it stands for."""

READ_BACK = {"session.codec", "providers.recording"}
"""Modules that construct what they read, to look at it."""

DSH = [
    "turn/start",
    "turn/end",
    "step/start",
    "step/end",
    "user/message",
    "assistant/chunk",
    "assistant/message",
    "tool/call",
    "tool/result",
    "request/header",
    "request/context",
    "agent/inbox/spliced",
    "permission/preset",
    "sandbox/mode",
    "approval/policy",
    "approval/asked",
    "approval/decided",
    "llm/retry",
    "llm/retry-started",
    "compaction/start",
    "compaction/summary",
    "compaction/end",
    "compaction/prune",
    "tool/code-dispatch-start",
    "tool/code-dispatch",
    "subagent/descriptor",
    "tool-workflow/run-start",
    "tool-workflow/agent-start",
    "tool-workflow/agent-end",
    "tool-workflow/run-end",
    "goal/change",
    "todo/write",
    "session/title",
    "session/title-llm-request",
    "hook/invoked",
    "hook/result",
    "command/run",
    "command/done",
    "plan/mode",
    "agent-preset/selected",
    "session/end-seed",
    "schedule/change",
    "feedback/record",
    "team/*",
]
OWN = [
    "run/start",
    "run/resume",
    "run/end",
    "request/sent",
    "setup/start",
    "setup/end",
    "check/start",
    "check/end",
    "limit/reached",
    "artifact/written",
    "redaction",
    "sandbox/egress",
    "log/seal",
]

each_type = pytest.mark.parametrize("cls", TYPES, ids=lambda cls: cls.TYPE)


class Uses:
    """Where the product names event classes: ``built`` and ``named``, class name → modules."""

    def __init__(self) -> None:
        self.built: dict[str, set[str]] = {}
        self.named: dict[str, set[str]] = {}

    def read(self, module: str, tree: ast.Module) -> None:
        """Take one module into account. Text that merely has a class's name counts for nothing."""
        direct: dict[str, str] = {}
        through: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module == "runner.session.events":
                direct |= {name.asname or name.name: name.name for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module == "runner.session":
                through |= {name.asname or name.name for name in node.names if name.name == "events"}

        def event_class(node: ast.AST) -> str | None:
            if isinstance(node, ast.Name):
                return direct.get(node.id)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in through:
                return node.attr
            return None

        for node in ast.walk(tree):
            if (name := event_class(node)) is not None:
                self.named.setdefault(name, set()).add(module)
            if not isinstance(node, ast.Call):
                continue
            if (name := event_class(node.func)) is not None:
                self.built.setdefault(name, set()).add(module)
            elif isinstance(node.func, ast.Attribute) and node.func.attr == "append_chunk":
                self.built.setdefault("AssistantChunk", set()).add(module)


@functools.cache
def uses() -> Uses:
    """Those of the whole product, without what supports tests."""
    found = Uses()
    for path in sorted((REPOSITORY / "runner").rglob("*.py")):
        module = ".".join(path.relative_to(REPOSITORY / "runner").with_suffix("").parts)
        if not module.startswith(("testing.", "session.events")):
            found.read(module, ast.parse(path.read_text(encoding="utf-8")))
    for modules in found.built.values():
        modules.difference_update(READ_BACK)
    return found


def names(text: str) -> list[str]:
    """The entries of a cell of the table."""
    return [name.strip() for name in text.split(",")]


def test_the_union_is_closed_and_has_every_type() -> None:
    """Those shared with the other harness, and our own; nothing else."""
    assert sorted(ev.EVENT_TYPES) == sorted([*DSH, *OWN])
    assert {name for name, cls in ev.EVENT_TYPES.items() if cls.IGNORABLE} == set(OWN)
    assert {name for name, cls in ev.EVENT_TYPES.items() if cls.SURFACE} == {
        "user/message",
        "assistant/message",
        "tool/result",
    }


@each_type
def test_every_event_has_the_writers_that_the_table_names(cls: type[ev.Event]) -> None:
    """Exactly the modules that construct it; one marked read only is constructed nowhere."""
    built = uses().built.get(cls.__name__, set())

    assert set(names(cls.WRITER)) == (built or {READ_ONLY})


@each_type
def test_every_event_has_a_reader_that_the_table_names(cls: type[ev.Event]) -> None:
    """Each reader named stands for a module that knows the type; ``show`` has a line for all."""
    readers = names(cls.READERS)

    assert "show" in readers
    for reader in readers:
        assert reader in READERS, f"{reader} is no reader the test knows"
        if reader != "show":
            assert uses().named.get(cls.__name__, set()) & set(READERS[reader]), f"{reader} does not know {cls.TYPE}"
    values = {field.attribute: example(field) for field in cls.FIELDS}
    assert len(list(transcript({"id": "s"}, [cls(seq=0, time=0, **values)]))) >= 2


@each_type
def test_every_event_is_documented(cls: type[ev.Event]) -> None:
    """A description of its own, and in the reference a row and a section with every field."""
    description = inspect.cleandoc(cls.__doc__ or "")
    assert description.endswith(".")
    assert cls.__doc__ != ev.Event.__doc__
    page = (REPOSITORY / "docs" / "reference" / "events.md").read_text(encoding="utf-8")
    [row] = re.findall(rf"^\| \[`{re.escape(cls.TYPE)}`\].*$", page, re.MULTILINE)
    assert f"| {cls.WRITER} | {cls.READERS} |" in row
    section = page.split(f"\n## {cls.TYPE}\n")[1].split("\n## ")[0]
    assert description.replace("``", "`").split("\n")[0] in section
    assert set(re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)) == {field.name for field in cls.FIELDS}


def test_the_check_of_writers_finds_what_it_is_for() -> None:
    """A construction by either import is seen, the mere name is not, nor another class of that name."""
    found = Uses()
    source = """
from runner.session import events as ev
from runner.session.events import TurnEnd as End, StepStart
from elsewhere import ToolCall
rules = {ev.TurnStart: 1, StepStart: 2}
log.append(ev.RunEnd(turns=1))
log.append(End(turn=1))
log.append_chunk(1, 1, {})
ToolCall()
"TodoWrite()"
"""
    found.read("module", ast.parse(source))

    assert set(found.built) == {"RunEnd", "TurnEnd", "AssistantChunk"}
    assert set(found.named) == {"TurnStart", "StepStart", "RunEnd", "TurnEnd"}


# --- reading -----------------------------------------------------------------------------------


def example(field: ev.Field) -> Any:
    """A value of a field's type."""
    message = {"content": [], "source": {}, "role": "user"}
    values: dict[str, Any] = {"integer": 1, "number": 1.5, "string": "s", "boolean": True, "array": [], "any": "x"}
    return values.get(field.kind, message)


def line_of(cls: type[ev.Event]) -> dict[str, Any]:
    """A line of one type with every field."""
    record: dict[str, Any] = {
        "type": cls.TYPE.replace("*", "joined"),
        "seq": 0,
        "time": 1,
        "data": {field.name: example(field) for field in cls.FIELDS},
    }
    if cls.SURFACE:
        record["surfaceOp"] = "append"
    return record


@each_type
def test_every_event_is_read_and_written_again_byte_for_byte(cls: type[ev.Event]) -> None:
    """With all fields, and with those alone that it must have."""
    for fields in (cls.FIELDS, [field for field in cls.FIELDS if field.required]):
        record = line_of(cls)
        record["data"] = {field.name: record["data"][field.name] for field in fields}
        if cls.IGNORABLE:
            record = {
                **{key: record[key] for key in ("type", "seq", "time")},
                "ignorable": True,
                "data": record["data"],
            }

        event = ev.event_from_record(codec.decode_line(codec.encode_line(record)))

        assert type(event) is cls
        if cls is not ev.TeamEvent:
            assert codec.encode_line(event.record()) == codec.encode_line(record)


@each_type
def test_an_event_without_a_field_it_must_have_is_refused(cls: type[ev.Event]) -> None:
    """With the field's name; a field of the wrong type too."""
    for field in cls.FIELDS:
        record = line_of(cls)
        del record["data"][field.name]
        if field.required:
            with pytest.raises(LogError, match=re.escape(f"data.{field.name} is missing")):
                ev.event_from_record(record)
        else:
            ev.event_from_record(record)
        if field.kind != "any":
            record["data"][field.name] = {"object": 1}.get(field.kind, {"x": 1})
            with pytest.raises(LogError, match=re.escape(f"data.{field.name} is not of type")):
                ev.event_from_record(record)


def test_an_unknown_event_is_refused_unless_it_is_ignorable() -> None:
    """LOG_UNKNOWN_EVENT; one that may be ignored takes its seq and keeps its line."""
    record: dict[str, Any] = {"type": "new/kind", "seq": 3, "time": 1, "data": {"a": 1}}
    for mark in ({}, {"ignorable": False}, {"ignorable": 1}, {"ignorable": "true"}):
        with pytest.raises(LogError) as caught:
            ev.event_from_record({**record, **mark})
        assert caught.value.code is ErrorCode.LOG_UNKNOWN_EVENT

    event = ev.event_from_record({**record, "ignorable": True})

    assert isinstance(event, ev.UnknownEvent)
    assert event.record() == {**record, "ignorable": True}
