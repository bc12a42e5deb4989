"""A loaded run as one JSON value: what ``nightshift plan --json`` prints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from runner.approvals.policy import Rule
    from runner.config.spec import RunSpec
    from runner.messages import JsonObject


def plan_report(spec: RunSpec, environ: Mapping[str, str]) -> JsonObject:
    """The plan of a run, as ``SCHEMA`` describes it.

    Args:
        spec: The run.
        environ: Environment of the runner; only whether a secret's variable is set is told.
    """
    model = spec.profile.model
    secrets = [] if model.api_key_env is None else [{"name": model.api_key_env, "set": model.api_key_env in environ}]
    if model.api_key_file is not None:
        secrets.append({"name": model.api_key_file, "set": os.access(model.api_key_file, os.R_OK)})
    return {
        "schemaVersion": 1,
        "task": spec.task.name,
        "profile": spec.profile.name,
        "trust": spec.trust.value,
        "trustReason": spec.trust_reason,
        "values": {key: {"value": value, "origin": spec.origins[key]} for key, value in spec.values.items()},
        "prompt": spec.task.prompt,
        "policy": [_rule(rule) for rule in spec.profile.policy.rules],
        "secrets": secrets,
        "files": list(spec.defining_files),
        "digests": {"task": spec.task_digest, "profile": spec.profile_digest, "policy": spec.policy_digest},
    }


def _rule(rule: Rule) -> JsonObject:
    return {
        "id": rule.id,
        "decision": "allow" if rule.allow else "deny",
        "tools": ["*"] if rule.tools is None else sorted(rule.tools),
        "about": list(_about(rule)),
        "mode": None if rule.mode is None else rule.mode.value,
        "trust": None if rule.trust is None else sorted(rule.trust),
        "escalate": list(rule.escalate),
        "opaque": rule.opaque,
        "reason": rule.reason,
    }


def _about(rule: Rule) -> Iterator[str]:
    """What a rule looks at, in words."""
    if rule.any_command:
        yield "any command"
    yield from (pattern.text for pattern in rule.commands)
    if rule.builtin:
        yield "harmless builtins"
    if rule.paths is not None:
        for verb, globs in (("read", rule.paths.read), ("write", rule.paths.write), ("except", rule.paths.excluded)):
            if globs:
                yield f"{verb} {' '.join(glob.glob for glob in globs)}"


def _object(description: str, properties: JsonObject) -> JsonObject:
    return {
        "type": "object",
        "description": description,
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _text(description: str, **more: Any) -> JsonObject:
    return {"type": "string", "description": description, **more}


def _list(description: str, items: JsonObject) -> JsonObject:
    return {"type": "array", "description": description, "items": items}


_STRING: Final[JsonObject] = {"type": "string"}
_DIGEST: Final = r"^[0-9a-f]{64}$"

SCHEMA: Final[JsonObject] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "title": "nightshift plan",
    **_object(
        "What a run would do, on whose authority, and where each setting comes from.",
        {
            "schemaVersion": {"const": 1, "description": "Version of this format."},
            "task": _text("Name of the task."),
            "profile": _text("Name of the profile."),
            "trust": _text("Trust of whoever started the run.", enum=["trusted", "untrusted"]),
            "trustReason": _text("Why."),
            "values": {
                "type": "object",
                "description": "Dotted key to effective value and its origin. Durations in seconds, sizes in bytes.",
                "additionalProperties": _object(
                    "One value.",
                    {
                        "value": {"description": "The value; null is none or unknown."},
                        "origin": _text("`file:line`, an option, or `default`."),
                    },
                ),
            },
            "prompt": _text("First message to the model, inputs filled in."),
            "policy": _list(
                "Rules of the policy; what none allows is denied.",
                _object(
                    "One rule.",
                    {
                        "id": _text("Its id."),
                        "decision": _text("What it says.", enum=["allow", "deny"]),
                        "tools": _list("Tools it looks at; `*` is every one.", _STRING),
                        "about": _list("Commands and paths it looks at, in words.", _STRING),
                        "mode": {"type": ["string", "null"], "description": "Tighter mode the call runs in."},
                        "trust": {
                            "type": ["array", "null"],
                            "items": _STRING,
                            "description": "Trust it is limited to.",
                        },
                        "escalate": _list("Wider modes that a call may ask for.", _STRING),
                        "opaque": {"type": "boolean", "description": "Whether it lets a program run unseen code."},
                        "reason": _text("Why it says so; empty if it does not tell."),
                    },
                ),
            ),
            "secrets": _list(
                "Secrets of the run, by name.",
                _object(
                    "One secret.",
                    {
                        "name": _text("Variable or file."),
                        "set": {"type": "boolean", "description": "Whether it is there."},
                    },
                ),
            ),
            "files": _list("Run-defining files that were read.", _STRING),
            "digests": _object(
                "SHA-256 of the resolved configuration.",
                {name: _text(f"Of the {name}.", pattern=_DIGEST) for name in ("task", "profile", "policy")},
            ),
        },
    ),
}
"""JSON Schema of a plan."""
