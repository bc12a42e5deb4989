"""The JSON Schemas of the YAML formats, generated from the pydantic models, and of what ``plan`` and ``policy`` print.

A tool for working on this project: ``python -m runner.config.schema --write`` writes
``configs/schema``, ``--check`` fails when a file there differs from what the models say. The defaults
in a schema are those of the frozen settings that a run is resolved into.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any, Final

from runner.agent.settings import CompactionSpec, Limits, RetrySpec
from runner.config.json_forms import DIALECT
from runner.config.plan import SCHEMA as PLAN_SCHEMA
from runner.config.policy_report import CHECK_SCHEMA, TEST_SCHEMA
from runner.config.resolve_profile import DEFAULTS
from runner.config.shape import MODELS, model_of, shipped_directory
from runner.config.spec import CheckSpec, ToolsSpec, WorkspaceSpec
from runner.errors import ErrorCode
from runner.providers.base import ModelSpec, Prices
from runner.sandbox.base import SandboxLimits

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.messages import JsonObject

SETTINGS: Final[Mapping[str, Any]] = {
    "Check": CheckSpec(name="", run=""),
    "Workspace": WorkspaceSpec(path=""),
    "ModelSection": ModelSpec(provider="", model=""),
    "Prices": Prices(),
    "SandboxLimits": SandboxLimits(),
    "Tools": ToolsSpec(),
    "Compaction": CompactionSpec(),
    "ProfileLimits": Limits(),
    "Retry": RetrySpec(),
}
"""Section of a model → settings with the defaults of its keys, under the same names."""

_DEPENDS: Final = {"ModelSection.context_window", "ModelSection.images"}
"""Keys whose default depends on other keys; their description says how."""


def build_schemas() -> dict[str, JsonObject]:
    """File name in ``configs/schema`` → JSON Schema, keys in a stable order."""
    return {
        **{f"{kind}.schema.json": build_schema(kind) for kind in MODELS},
        "plan.schema.json": PLAN_SCHEMA,
        "policy-check.schema.json": CHECK_SCHEMA,
        "policy-test.schema.json": TEST_SCHEMA,
    }


def build_schema(kind: str) -> JsonObject:
    """The JSON Schema of one format.

    Args:
        kind: A key of ``MODELS``.
    """
    schema = model_of(kind).model_json_schema()
    definitions: JsonObject = schema.pop("$defs", {})
    for name, definition in [(model_of(kind).__name__, schema), *definitions.items()]:
        _finish(name, definition, kind)
    if kind == "profile":
        policy = build_schema("policy")
        definitions |= {f"Policy{name}": _renamed(each) for name, each in policy.pop("$defs", {}).items()}
        definitions["Policy"] = _renamed({key: policy[key] for key in policy if key not in {"$schema", "title"}})
        approvals = schema["properties"]["approvals"]
        approvals["anyOf"] = [
            {"$ref": "#/$defs/Policy"} if option == {"type": "object"} else option for option in approvals["anyOf"]
        ]
    ordered: JsonObject = {"$schema": DIALECT, "title": f"nightshift {kind}"}
    ordered |= {key: schema[key] for key in schema if key != "title"}
    return ordered | ({"$defs": dict(sorted(definitions.items()))} if definitions else {})


def _finish(section: str, node: JsonObject, kind: str) -> None:
    """Bring one generated section into the form our schemas have.

    Titles that repeat the key go, a null default goes, the real default comes, nested choices of
    null are joined, and names of a free mapping are checked by ``propertyNames``.
    """
    node.pop("title", None)
    settings = SETTINGS.get(section)
    for key, inner in node.get("properties", {}).items():
        inner.pop("title", None)
        if "default" in inner and inner["default"] is None:
            del inner["default"]
        default = DEFAULTS.get(f"{section}.{key}", getattr(settings, key, None))
        free = key not in node.get("required", ()) and f"{section}.{key}" not in _DEPENDS
        if free and default != "" and isinstance(default, str | int | float):
            whole = isinstance(default, float) and default.is_integer()
            inner["default"] = int(default) if whole else default
        _flatten(inner)
    for definition in [node, *node.get("properties", {}).values()]:
        _name_patterns(definition)
    node["description"] = " ".join(node.get("description", kind).split())


def _flatten(node: JsonObject) -> None:
    """Join the choices of a choice."""
    if "anyOf" in node:
        options: list[Any] = []
        for option in node["anyOf"]:
            nested = next(iter(option.values())) if set(option) in ({"anyOf"}, {"oneOf"}) else None
            options += nested or [option]
        node["anyOf"] = options
    if "description" in node:
        node["description"] = " ".join(node["description"].split())


def _name_patterns(node: JsonObject) -> None:
    for option in [node, *node.get("anyOf", ())]:
        patterns = option.pop("patternProperties", None)
        if patterns:
            ((pattern, inner),) = patterns.items()
            option["propertyNames"] = {"pattern": pattern}
            option["additionalProperties"] = inner


def _renamed(node: Any) -> Any:
    """A copy whose references carry the prefix that the policy's definitions have in a profile."""
    if isinstance(node, list):
        return [_renamed(each) for each in node]
    if not isinstance(node, dict):
        return node
    return {
        key: f"#/$defs/Policy{value.removeprefix('#/$defs/')}" if key == "$ref" else _renamed(value)
        for key, value in node.items()
    }


def main(arguments: Sequence[str]) -> int:
    """Write or check the schemas; returns the exit code."""
    if list(arguments) not in (["--write"], ["--check"]):
        print("usage: python -m runner.config.schema --write | --check", file=sys.stderr)  # noqa: T201  # a tool
        return ErrorCode.CONFIG_INVALID.exit_code
    folder = shipped_directory() / "schema"
    expected = {
        name: json.dumps(schema, indent=2, ensure_ascii=False) + "\n" for name, schema in build_schemas().items()
    }
    changed = []
    for name, text in expected.items():
        path = folder / name
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            changed.append(path)
    for path in changed:
        if arguments[0] == "--check":
            message = f"configs/schema/{path.name} is not what the models say; run: make schema WRITE=1"
            print(message, file=sys.stderr)  # noqa: T201  # a tool
        else:
            folder.mkdir(exist_ok=True)
            path.write_text(expected[path.name], encoding="utf-8")
    return ErrorCode.TASK_FAILED.exit_code if changed and arguments[0] == "--check" else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
