"""A loaded run as one JSON value: what ``nightshift plan --json`` prints."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

from runner.config.json_forms import (
    DIGEST,
    choice_form,
    document_form,
    flag_form,
    list_form,
    object_form,
    text_form,
)
from runner.config.policy_report import CELL_FORM, RULE_FORM, cell_value, rule_value

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

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
        "tools": list(_tools(spec)),
        "policy": [rule_value(rule) for rule in spec.profile.policy.rules],
        "secrets": secrets,
        "files": list(spec.defining_files),
        "digests": {"task": spec.task_digest, "profile": spec.profile_digest, "policy": spec.policy_digest},
    }


def _tools(spec: RunSpec) -> Iterator[JsonObject]:
    """What becomes of the calls of each tool in this run."""
    from runner.approvals.review import tool_cell
    from runner.approvals.words import KNOWN_TOOLS

    profile = spec.profile
    opaque = {rule.id for rule in profile.policy.rules if rule.opaque}
    for tool in KNOWN_TOOLS:
        cell = cell_value(tool_cell(profile.policy, tool, profile.mode, spec.trust))
        yield {
            "tool": tool,
            "offered": profile.tools.offers(tool),
            **{key: cell[key] for key in ("outcome", "allows", "denies", "escalated")},
            "opaque": [rule["rule"] for rule in cell["allows"] if rule["rule"] in opaque],
        }


SCHEMA: Final = document_form(
    "plan",
    "What a run would do, on whose authority, and where each setting comes from.",
    {
        "schemaVersion": {"const": 1, "description": "Version of this format."},
        "task": text_form("Name of the task."),
        "profile": text_form("Name of the profile."),
        "trust": choice_form("Trust of whoever started the run.", ["trusted", "untrusted"]),
        "trustReason": text_form("Why."),
        "values": {
            "type": "object",
            "description": "Dotted key to effective value and its origin. Durations in seconds, sizes in bytes.",
            "additionalProperties": object_form(
                "One value.",
                {
                    "value": {"description": "The value; null is none or unknown."},
                    "origin": text_form("`file:line`, an option, or `default`."),
                },
            ),
        },
        "prompt": text_form("First message to the model, inputs filled in."),
        "tools": list_form(
            "What becomes of the calls of each tool in this run.",
            object_form(
                "One tool.",
                {
                    "tool": text_form("Its name."),
                    "offered": flag_form("Whether the model may call it at all; if not, each call is denied."),
                    **{key: CELL_FORM["properties"][key] for key in ("outcome", "allows", "denies", "escalated")},
                    "opaque": list_form("Those of the allowing rules behind which only the sandbox bounds a program."),
                },
            ),
        ),
        "policy": list_form("Rules of the policy; what none allows is denied.", object_form("One rule.", RULE_FORM)),
        "secrets": list_form(
            "Secrets of the run, by name.",
            object_form(
                "One secret.", {"name": text_form("Variable or file."), "set": flag_form("Whether it is there.")}
            ),
        ),
        "files": list_form("Run-defining files that were read."),
        "digests": object_form(
            "SHA-256 of the resolved configuration.",
            {name: text_form(f"Of the {name}.", pattern=DIGEST) for name in ("task", "profile", "policy")},
        ),
    },
)
"""JSON Schema of a plan."""
