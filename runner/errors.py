"""Stable error codes, exit codes and the exception tree.

Every failure a user can see carries an ``ErrorCode``. Codes are API: they are
never renamed and never reused. Code routes on the code, never on the text.

``RunnerError``
  ``ConfigError``        CONFIG_INVALID, with every problem of a file at once
  ``ProviderError``      PROVIDER_AUTH, PROVIDER_QUOTA, PROVIDER_FAILED, CONTEXT_EXHAUSTED
  ``SandboxError``       SANDBOX_UNAVAILABLE
  ``LogError``           LOG_INVALID, LOG_UNKNOWN_EVENT
  ``StorageError``       STORAGE_FAILED
  ``InternalError``      INTERNAL: this is our bug
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class _Code(NamedTuple):
    exit_code: int | None
    failure_class: str | None
    meaning: str
    parent: str | None = None


class ErrorCode(Enum):
    """One stable code a failure can have.

    The first group are outcomes: each has a process exit code of its own. The
    second group refine an outcome and take its exit code. The third group are
    values inside a tool result, which the model reads; they end nothing by
    themselves and have no exit code.
    """

    COMPLETED = _Code(0, None, "finished, outputs and checks hold")
    TASK_FAILED = _Code(1, "task", "a check, an output, max-tokens, refusal, or every call failed")
    CONFIG_INVALID = _Code(2, "config", "usage, YAML, self-test, missing credential, lock held")
    SANDBOX_UNAVAILABLE = _Code(3, "sandbox", "no backend passed, one lacks a required property, or it broke")
    POLICY_DENIED = _Code(
        4,
        "policy",
        "on_denied: abort, blocked by a hook, or all calls denied; as a tool result: a rule denied the call",
    )
    LIMIT_REACHED = _Code(5, "limit", "steps, turns, wall, idle, tool time, output bytes, children")
    BUDGET_EXHAUSTED = _Code(6, "budget", "cost or tokens, own or an ancestor's")
    PROVIDER_AUTH = _Code(7, "auth", "the key was refused")
    PROVIDER_QUOTA = _Code(8, "quota", "rate limit or quota after the retry budget")
    PROVIDER_FAILED = _Code(9, "provider", "other provider or network fault, script exhausted")
    CONTEXT_EXHAUSTED = _Code(10, "context", "compaction could not make room")
    OUTPUT_INVALID = _Code(11, "output", "the answer never met answer_schema")
    BATCH_PARTIAL = _Code(12, "batch", "some cells failed")
    LOG_INVALID = _Code(13, "log", "a log or export does not verify, or diverges in replay")
    NO_CHANGES = _Code(14, "no-changes", "a patch was required and none was made")
    STORAGE_FAILED = _Code(15, "storage", "log or artifacts cannot be written")
    SETUP_FAILED = _Code(16, "setup", "a setup command failed")
    INTERNAL = _Code(70, "internal", "our bug")
    CANCELLED = _Code(130, "cancelled", "SIGHUP (129), SIGINT (130), SIGTERM (143); log sealed, artifacts written")

    LOG_UNKNOWN_EVENT = _Code(None, None, "the log holds an event type this version does not know", "LOG_INVALID")

    INVALID_ARGS = _Code(None, None, "the arguments do not fit the tool's schema")
    UNKNOWN_TOOL = _Code(None, None, "no tool has that name")
    TOOL_MASKED = _Code(None, None, "the tool exists but this run may not use it")
    GUARD_DENIED = _Code(None, None, "a guard refused the call")
    SANDBOX_DENIED = _Code(None, None, "the sandbox stopped what the call tried to do")
    TOOL_FAILED = _Code(None, None, "the tool ran and reported a failure")
    TOOL_TIMEOUT = _Code(None, None, "the call ran into its time limit")
    TOOL_NOT_STARTED = _Code(None, None, "the run ended before the call was started")
    TOOL_OUTCOME_UNKNOWN = _Code(None, None, "the run ended while the call was running")
    ABORTED_BEFORE_DISPATCH = _Code(None, None, "the run was cancelled before the call was started")

    def __repr__(self) -> str:
        """Show the stable name only."""
        return self.name

    def __str__(self) -> str:
        """Return the stable name, as it stands in logs and reports."""
        return self.name

    @property
    def meaning(self) -> str:
        """One line for the reference page."""
        return self.value.meaning

    @property
    def outcome(self) -> ErrorCode:
        """The code of the first group that decides the exit code."""
        parent = self.value.parent
        return self if parent is None else ErrorCode[parent]

    @property
    def exit_code(self) -> int:
        """Process exit code (for CANCELLED the one of SIGINT)."""
        code = self.outcome.value.exit_code
        if code is None:
            raise InternalError(f"{self.name} is a tool result code and ends no run")
        return code

    @property
    def failure_class(self) -> str | None:
        """The class for ``--soft-fail`` and retries, None for COMPLETED."""
        return self.outcome.value.failure_class


# Members with equal values would be aliases; each `meaning` is unique, and a test keeps it so.

SOFT_FAIL_CLASSES = (
    "task",
    "policy",
    "limit",
    "budget",
    "auth",
    "quota",
    "provider",
    "context",
    "output",
    "batch",
    "no-changes",
    "setup",
)
"""Classes that ``--soft-fail`` may turn into exit 0. Not config, sandbox, log, storage, internal, cancelled."""

SIGNAL_EXIT_CODES = {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}


class RunnerError(Exception):
    """Base of every expected failure.

    Args:
        message: What failed, and where. One sentence, no traceback.
        code: Stable code.
        hint: What to do about it.
        details: Facts for machines (JSON values).
    """

    default_code = ErrorCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        hint: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hint = hint
        self.details = dict(details or {})


class ConfigError(RunnerError):
    """A user's input is wrong. ``problems`` holds one line for each, in file order."""

    default_code = ErrorCode.CONFIG_INVALID

    def __init__(
        self,
        message: str,
        *,
        problems: Sequence[str] = (),
        hint: str | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__("\n".join([message, *problems]) if problems else message, hint=hint, details=details)
        self.problems = tuple(problems)


class ProviderError(RunnerError):
    """A model request failed.

    Args:
        message: What the provider or the network said.
        code: PROVIDER_AUTH, PROVIDER_QUOTA, PROVIDER_FAILED or CONTEXT_EXHAUSTED.
        retryable: Whether the same request may succeed later.
        status: HTTP status, None when no answer came.
        retry_after: Seconds the server asked to wait, None if it did not say.
        kind: The provider's own error code, or one of ours for transport faults
            (``connect``, ``first-token-timeout``, ``idle-timeout``, ``stream-broken``, ``empty``).
    """

    default_code = ErrorCode.PROVIDER_FAILED

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        hint: str | None = None,
        retryable: bool = False,
        status: int | None = None,
        retry_after: float | None = None,
        kind: str = "error",
    ) -> None:
        super().__init__(message, code=code, hint=hint, details={"status": status, "kind": kind})
        self.retryable = retryable
        self.status = status
        self.retry_after = retry_after
        self.kind = kind


class SandboxError(RunnerError):
    """No usable sandbox, or the sandbox itself broke. Never a failure of the confined command."""

    default_code = ErrorCode.SANDBOX_UNAVAILABLE


class LogError(RunnerError):
    """A session log cannot be read or does not verify."""

    default_code = ErrorCode.LOG_INVALID


class StorageError(RunnerError):
    """The session log or the artifacts cannot be written."""

    default_code = ErrorCode.STORAGE_FAILED


class InternalError(RunnerError):
    """An invariant of ours does not hold. This is our bug."""

    default_code = ErrorCode.INTERNAL
