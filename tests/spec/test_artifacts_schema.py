"""One field table gives schema, reference and the order of the file."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema_rs
import pytest

from runner.artifacts.result import RESULT_FIELDS
from runner.artifacts.schema import Field, build_schemas, field_rows, main, object_schema, ordered, reference_parts
from runner.artifacts.usage import USAGE_FIELDS

SHIPPED = Path(__file__).resolve().parents[2] / "configs" / "schema"


def test_the_shipped_schemas_are_what_the_tables_say() -> None:
    """`make schema` checks the same."""
    for name, schema in build_schemas().items():
        assert json.loads((SHIPPED / name).read_text(encoding="utf-8")) == schema
    assert main(["--check"]) == 0


@pytest.mark.parametrize("form", ["result", "usage", "context", "compact"])
def test_the_schemas_are_schemas(form: str) -> None:
    """They compile, refuse unknown fields, and describe each field."""
    schema = build_schemas()[f"{form}.schema.json"]
    jsonschema_rs.validator_for(schema)

    assert schema["additionalProperties"] is False
    assert all(field["description"] for field in schema["properties"].values())


def test_a_schema_that_drifted_is_found_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Check fails until write was called."""
    assert main(["--check"], folder=tmp_path) == 1
    assert "result.schema.json" in capsys.readouterr().err
    assert main(["--write"], folder=tmp_path) == 0
    assert main(["--check"], folder=tmp_path) == 0
    (tmp_path / "usage.schema.json").write_text("{}")
    assert main(["--check"], folder=tmp_path) == 1


def test_wrong_arguments_are_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """As for every command."""
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err


def test_the_fields_are_those_of_the_design_in_its_order() -> None:
    """Outside checks read these names."""
    result = "schemaVersion outcome code failureClass exitCode softFailed secondary sessionId task startedAt durationMs"
    result += " finalMessage structuredOutput turns steps usage costUsd toolCalls approvals checks sandbox limits base"
    result += " patch logDigest artifacts error"
    usage = "schemaVersion sessionId turns steps requests usage costUsd currency estimated context perStep perModel"
    usage += " tools compactions subagents"

    assert [field.name for field in RESULT_FIELDS] == result.split()
    assert [field.name for field in USAGE_FIELDS] == usage.split()


def test_values_come_in_the_order_of_the_table() -> None:
    """Missing, unknown and optional fields are told apart."""
    fields = (Field("a", "string", "A."), Field("b", "integer", "B.", optional=True))

    assert list(ordered(fields, {"b": 1, "a": "x"})) == ["a", "b"]
    assert ordered(fields, {"a": "x"}) == {"a": "x"}
    with pytest.raises(KeyError, match="b"):
        ordered((Field("b", "integer", "B."),), {})
    with pytest.raises(KeyError, match="not in the field table: c"):
        ordered(fields, {"a": "x", "c": 1})


def test_nullable_and_nested_fields_have_their_types() -> None:
    """Null only where the table says so."""
    fields = (
        Field("a", "string", "A.", nullable=True),
        Field("o", "object", "O.", nullable=True, fields=(Field("x", "integer", "X."),)),
        Field("l", "array", "L."),
        Field("any", "any", "Anything."),
    )
    validator = jsonschema_rs.validator_for(object_schema(fields))

    assert validator.is_valid({"a": None, "o": None, "l": ["x"], "any": {"y": [1]}})
    assert validator.is_valid({"a": "x", "o": {"x": 1}, "l": [], "any": None})
    assert not validator.is_valid({"a": None, "o": None, "l": None, "any": 1})
    assert not validator.is_valid({"a": None, "o": {"x": None}, "l": [], "any": 1})


def test_the_reference_lists_every_field_with_its_path() -> None:
    """Nested ones too."""
    keys = [key for key, _, _ in field_rows(RESULT_FIELDS)]

    assert {"`usage.cacheHitRate`", "`artifacts[].sha256`", "`error.hint`"} <= set(keys)
    assert any(isinstance(part, str) and "changes.patch" in part for part in reference_parts())


def test_the_schema_of_events_takes_real_logs_and_refuses_what_the_table_does_not_allow() -> None:
    """Every plain event line of a recorded log of another harness fits; a wrong type and a wrong place do not."""
    validator = jsonschema_rs.validator_for(build_schemas()["event.schema.json"])
    recorded = Path(__file__).resolve().parents[1] / "golden/dsh/rich.jsonl"
    lines = [json.loads(line) for line in recorded.read_text(encoding="utf-8").splitlines()]
    events = [line for line in lines if "seq" in line]

    assert len(events) > 100
    assert [line["type"] for line in events if not validator.is_valid(line)] == []
    turn = {"type": "turn/start", "seq": 1, "time": 1, "data": {"turn": 1}}
    assert validator.is_valid(turn)
    assert not validator.is_valid({**turn, "data": {"turn": "1"}})
    assert not validator.is_valid({**turn, "data": {}})
    assert not validator.is_valid({**turn, "surfaceOp": "append"})
