"""``result.json``: the run in one object for machines, written last and by rename.

Whoever finds the file finds everything it names complete. Built from the folds of the log and from
what the runner alone knows (digest of the log, artifacts). Writes no events.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from runner.artifacts.schema import SCHEMA_VERSION, Field, ordered
from runner.artifacts.usage import USAGE_TOTAL_FIELDS
from runner.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from runner.artifacts.facts import Facts
    from runner.artifacts.patch import PatchInfo
    from runner.messages import JsonObject
    from runner.outcome import Outcome

RESULT_NAME = "result.json"

_COUNT = "Number of calls"

RESULT_FIELDS = (
    Field("schemaVersion", "integer", "Version of this format."),
    Field("outcome", "string", "completed, failed or cancelled."),
    Field("code", "string", "Name of the deciding code."),
    Field("failureClass", "string", "Class of the code; null when completed.", nullable=True),
    Field("exitCode", "integer", "Number of the exit code table, whatever --soft-fail made of it."),
    Field("softFailed", "boolean", "True when --soft-fail made the process exit 0.", optional=True),
    Field(
        "secondary",
        "array",
        "Further causes, in order.",
        fields=(
            Field("code", "string", "Code."),
            Field("failureClass", "string", "Class of the code.", nullable=True),
            Field("message", "string", "What happened."),
        ),
    ),
    Field("sessionId", "string", "Id of the session.", nullable=True),
    Field("task", "string", "Name of the task.", nullable=True),
    Field("startedAt", "integer", "Start of the session, epoch milliseconds.", nullable=True),
    Field("durationMs", "integer", "Time at work, without the time between an end and its resume."),
    Field("finalMessage", "string", "Text of the last answer that has any.", nullable=True),
    Field("structuredOutput", "any", "The answer as JSON, when the task declares a schema; else null."),
    Field("turns", "integer", "Turns with at least one ended step."),
    Field("steps", "integer", "Ended steps."),
    Field("usage", "object", "Tokens of all answers.", fields=USAGE_TOTAL_FIELDS),
    Field("costUsd", "number", "Cost in US dollars; null when it is not known.", nullable=True),
    Field(
        "toolCalls",
        "object",
        "Tool calls.",
        fields=(
            Field("total", "integer", f"{_COUNT}."),
            Field("failed", "integer", f"{_COUNT} that gave an error."),
            Field("denied", "integer", f"{_COUNT} that were refused before they ran."),
        ),
    ),
    Field(
        "approvals",
        "object",
        "Decisions of the policy.",
        fields=(
            Field("asked", "integer", f"{_COUNT} put to the policy."),
            Field("allowed", "integer", f"{_COUNT} it allowed."),
            Field("denied", "integer", f"{_COUNT} it denied."),
        ),
    ),
    Field(
        "checks",
        "array",
        "The checks, in the order of their first attempt.",
        fields=(
            Field("name", "string", "Name in the task."),
            Field("passed", "boolean", "Whether the last attempt passed."),
            Field("attempts", "integer", "Attempts."),
            Field("durationMs", "integer", "Time of all attempts."),
        ),
    ),
    Field(
        "sandbox",
        "object",
        "How the commands were confined.",
        fields=(
            Field("backend", "string", "Backend, none for bare commands; null when the run never got there.", True),
            Field("mode", "string", "Permission mode.", nullable=True),
            Field("notEnforced", "array", "Promises the backend does not keep here."),
        ),
    ),
    Field(
        "limits",
        "array",
        "The limits that are set; times in seconds.",
        fields=(
            Field("name", "string", "Key of the profile."),
            Field("used", "number", "What was used.", nullable=True),
            Field("max", "number", "Where it ends."),
        ),
    ),
    Field(
        "base",
        "object",
        "What the agent began with.",
        fields=(
            Field("commit", "string", "Commit below it.", nullable=True),
            Field("tree", "string", "Tree of the whole content.", nullable=True),
        ),
    ),
    Field(
        "patch",
        "object",
        "The changes; null when there are none.",
        nullable=True,
        fields=(
            Field("files", "integer", "Changed files."),
            Field("insertions", "integer", "Lines added in text files."),
            Field("deletions", "integer", "Lines removed in text files."),
            Field("tree", "string", "Tree that the patch gives."),
        ),
    ),
    Field("logDigest", "string", "SHA-256 of the whole decoded log, for verify --expect.", nullable=True),
    Field(
        "artifacts",
        "array",
        "The other files of the directory.",
        fields=(
            Field("name", "string", "What it is called in the task, or the file's name."),
            Field("path", "string", "Path in the directory."),
            Field("sha256", "string", "SHA-256 of its bytes."),
            Field("bytes", "integer", "Size."),
        ),
    ),
    Field(
        "error",
        "object",
        "The deciding cause; null when completed.",
        nullable=True,
        fields=(
            Field("code", "string", "Code."),
            Field("message", "string", "What happened."),
            Field("hint", "string", "What to do about it.", nullable=True),
        ),
    ),
)
"""The field table of ``result.json``."""


def build_result(
    outcome: Outcome,
    usage: JsonObject,
    facts: Facts,
    *,
    soft_failed: bool = False,
    patch: PatchInfo | None = None,
    log_digest: str | None = None,
    artifacts: Sequence[JsonObject] = (),
    limits: Sequence[JsonObject] | None = None,
    structured_output: object = None,
) -> JsonObject:
    """The content of ``result.json``.

    Args:
        outcome: The outcome.
        usage: The content of ``usage.json``.
        facts: The facts of the log.
        soft_failed: Whether ``--soft-fail`` made the process exit 0.
        patch: The changes, None without.
        log_digest: SHA-256 of the whole decoded log.
        artifacts: ``{name, path, sha256, bytes}`` of every other file.
        limits: ``{name, used, max}`` of the limits that are set; None takes them from the log.
        structured_output: The answer as JSON.
    """
    values: JsonObject = {
        "schemaVersion": SCHEMA_VERSION,
        "outcome": outcome.outcome,
        "code": outcome.code.name,
        "failureClass": outcome.failure_class,
        "exitCode": outcome.exit_code,
        "secondary": [
            {"code": cause.code.name, "failureClass": cause.code.failure_class, "message": cause.message}
            for cause in outcome.secondary
        ],
        "sessionId": facts.session_id,
        "task": facts.task,
        "startedAt": facts.started_at,
        "durationMs": facts.duration_ms,
        "finalMessage": outcome.final_message,
        "structuredOutput": structured_output,
        "turns": outcome.turns,
        "steps": outcome.steps,
        "usage": usage["usage"],
        "costUsd": usage["costUsd"],
        "toolCalls": {
            "total": outcome.calls.total,
            "failed": outcome.calls.failed,
            "denied": outcome.calls.denied,
        },
        "approvals": {
            "asked": outcome.approvals.asked,
            "allowed": outcome.approvals.allowed,
            "denied": outcome.approvals.denied,
        },
        "checks": [
            {
                "name": check.name,
                "passed": check.passed,
                "attempts": check.attempts,
                "durationMs": check.duration_ms,
            }
            for check in outcome.checks
        ],
        "sandbox": {
            "backend": facts.sandbox.get("backend"),
            "mode": facts.sandbox.get("mode", facts.mode),
            "notEnforced": list(facts.sandbox.get("notEnforced") or ()),
        },
        "limits": list(facts.limit_table(usage) if limits is None else limits),
        "base": {"commit": facts.base.get("commit"), "tree": facts.base.get("tree")},
        "patch": None if patch is None else patch.as_json(),
        "logDigest": log_digest,
        "artifacts": list(artifacts),
        "error": outcome.error(),
    }
    if soft_failed:
        values["softFailed"] = True
    return ordered(RESULT_FIELDS, values)


def write_result(directory: Path, result: JsonObject) -> Path:
    """Write ``result.json``, complete or not at all, 0600.

    Raises:
        StorageError: STORAGE_FAILED.
    """
    target = directory / RESULT_NAME
    text = json.dumps(result, ensure_ascii=False, indent=2) + "\n"
    try:
        write_file(target, text.encode("utf-8", "replace"))
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror}") from error
    return target


def write_file(target: Path, data: bytes) -> None:
    """Write a file of the artifacts directory by rename, 0600, and make it last over a power cut.

    Raises:
        OSError: As the system says.
    """
    temporary = target.with_name(f".{target.name}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    folder = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
