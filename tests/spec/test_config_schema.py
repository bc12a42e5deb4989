"""The JSON Schemas are what the models say, and every shipped file keeps to them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from runner.config import schema
from runner.config.load import load_yaml
from runner.config.shape import MODELS, all_keys, demand, fits, schema_of, shipped_directory, split_key

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SHIPPED = sorted(path for path in CONFIGS.rglob("*.yaml"))


def test_the_written_schemas_are_what_the_models_say(capsys: pytest.CaptureFixture[str]) -> None:
    """``make schema`` finds no drift."""
    assert schema.main(["--check"]) == 0
    assert capsys.readouterr().err == ""


def test_drift_is_found_and_written_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing and a changed file."""
    monkeypatch.setattr(schema, "shipped_directory", lambda: tmp_path)
    assert schema.main(["--write"]) == 0
    (tmp_path / "schema" / "task.schema.json").write_text("{}")
    (tmp_path / "schema" / "script.schema.json").unlink()

    assert schema.main(["--check"]) == 1
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert schema.main(["--write"]) == 0
    assert schema.main(["--check"]) == 0
    assert schema.main([]) == 2


@pytest.mark.parametrize("kind", MODELS)
def test_a_schema_is_a_valid_and_fully_described_one(kind: str) -> None:
    """Each key and section has a description, which is what editors show."""
    found = schema_of(kind)

    jsonschema_rs.meta.validate(found)
    for section in [found, *found.get("$defs", {}).values()]:
        assert section["description"]
        for key, inner in section.get("properties", {}).items():
            assert inner.get("description"), key


@pytest.mark.parametrize("kind", MODELS)
def test_the_own_check_knows_every_keyword_of_a_schema(kind: str) -> None:
    """An unknown one would send every file to pydantic."""
    from runner.config.shape import _NOTES, _RULES

    def keywords(node: Any) -> set[str]:
        if not isinstance(node, dict):
            return set().union(*map(keywords, node)) if isinstance(node, list) else set()
        found = set(node)
        for key, value in node.items():
            if key in {"properties", "$defs"}:
                found |= set().union(*map(keywords, value.values()))
            elif key not in {"default", "enum", "const", "required", "examples"}:
                found |= keywords(value)
        return found

    assert keywords(schema_of(kind)) <= _NOTES | set(_RULES)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: str(path.relative_to(CONFIGS)))
def test_a_shipped_file_names_its_schema_and_keeps_to_it(path: Path) -> None:
    """In its first line, by a path that exists."""
    first = path.read_text(encoding="utf-8").partition("\n")[0]
    match = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", first)
    assert match
    target = (path.parent / match[1]).resolve()
    kind = path.name.split(".")[-2]
    assert target == CONFIGS / "schema" / f"{kind}.schema.json"

    document = load_yaml(path)
    jsonschema_rs.validator_for(json.loads(target.read_text(encoding="utf-8"))).validate(document.value)
    assert fits(schema_of(kind), document.value)
    demand(kind, document)


def test_defaults_stand_in_the_schema() -> None:
    """They are those of the settings that a run is resolved into."""
    definitions = schema_of("profile")["$defs"]

    assert definitions["ProfileLimits"]["properties"]["steps"]["default"] == 200
    assert definitions["Compaction"]["properties"]["keep"]["default"] == 0.16
    assert "default" not in definitions["CompactionOverride"]["properties"]["keep"]
    assert "default" not in definitions["ProfileLimits"]["properties"]["cost"]
    assert definitions["Sandbox"]["properties"]["network"]["default"] == "off"
    assert "default" not in schema_of("task")["$defs"]["TaskLimits"]["properties"]["steps"]


def test_a_missing_schema_leaves_the_decision_to_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken installation is slower, never laxer."""
    monkeypatch.setattr("runner.config.shape.schema_of", lambda _kind: {})
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text("version: 1\nprompt: x\n")
    bad.write_text("version: 1\nprompt: x\nnope: 1\n")

    demand("task", load_yaml(good))
    with pytest.raises(Exception, match="nope: unknown key"):
        demand("task", load_yaml(bad))


def test_dotted_keys_follow_the_schema() -> None:
    """Names inside a mapping may hold dots."""
    profile = schema_of("profile")

    assert split_key(profile, "limits.steps") == ["limits", "steps"]
    assert split_key(profile, "compaction.models.gpt-4.1.keep") == ["compaction", "models", "gpt-4.1", "keep"]
    assert split_key(profile, "compaction.models.gpt-4.1") == ["compaction", "models", "gpt-4.1"]
    assert split_key(profile, "sandbox.env.set.A") == ["sandbox", "env", "set", "A"]
    assert split_key(profile, "limits.stepz") is None
    assert split_key(profile, "limits.steps.x") is None
    assert split_key(profile, "") is None
    assert "sandbox.limits.memory" in all_keys(profile)


def test_the_shipped_files_are_found() -> None:
    """Beside the package in a checkout."""
    assert shipped_directory() == CONFIGS
