"""The resolved configuration of one run: frozen values, each with its origin.

Nothing below ``config`` imports this; ``assembly`` and ``run`` take the parts they need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.approvals.words import DEFAULT_TOOLS
from runner.record import field, record

if TYPE_CHECKING:
    from collections.abc import Mapping

    from runner.agent.settings import CompactionSpec, Limits, RetrySpec
    from runner.approvals.policy import Policy
    from runner.messages import JsonObject
    from runner.permission import Mode, Trust
    from runner.providers.base import ModelSpec, Prices
    from runner.providers.recording import Recording
    from runner.sandbox.base import SandboxSpec


@record
class InputValue:
    """One template input after resolution."""

    name: str
    value: str
    trust: Trust


@record
class CheckSpec:
    """A command that decides whether the task is done. ``timeout`` in seconds."""

    name: str
    run: str
    timeout: float = 300.0
    retries: int = 0


@record
class WorkspaceSpec:
    """Where the agent works. ``isolation``: in-place, copy, worktree. ``dirty``: include, refuse, ignore."""

    path: str
    isolation: str = "in-place"
    base: str = "HEAD"
    dirty: str = "include"


@record
class TaskSpec:
    """A task, templates filled in.

    Attributes:
        name: Task name.
        prompt: First user message, data blocks of untrusted inputs appended.
        turns: Further prompts, one turn each.
        context: Files whose text is given to the model before the prompt, as declared (relative
            to the workspace).
        files: Declared output files, relative to the workspace.
        patch_required: Whether a run without changes fails with NO_CHANGES.
        compact_at: Turns (from 1) before whose first request the history is compacted.
        source: Path of the task file, None for ``--prompt``.
    """

    name: str
    prompt: str
    workspace: WorkspaceSpec
    turns: tuple[str, ...] = ()
    context: tuple[str, ...] = ()
    inputs: tuple[InputValue, ...] = ()
    files: tuple[str, ...] = ()
    patch_required: bool = False
    checks: tuple[CheckSpec, ...] = ()
    compact_at: tuple[int, ...] = ()
    source: str | None = None


@record
class ToolsSpec:
    """``allow`` None means the built-in tools that need no network."""

    allow: tuple[str, ...] | None = None
    deny: tuple[str, ...] = ()
    parallel: int = 10

    def offers(self, name: str) -> bool:
        """Whether a built-in tool is offered."""
        return name in (DEFAULT_TOOLS if self.allow is None else self.allow) and name not in self.deny


@record
class ProfileSpec:
    """A profile, ``extends`` merged and ``--set`` applied.

    Attributes:
        summary_prices: Prices of the model that writes summaries, None if they are those of ``model``.
    """

    name: str
    model: ModelSpec
    mode: Mode
    sandbox: SandboxSpec
    tools: ToolsSpec
    policy: Policy
    on_denied: str
    compaction: CompactionSpec
    compaction_models: Mapping[str, CompactionSpec]
    limits: Limits
    retry: RetrySpec
    accept_unconfined: bool = False
    summary_prices: Prices | None = None


@record
class RunSpec:
    """Everything one run needs.

    Attributes:
        task: The task.
        profile: The profile.
        trust: Trust of the trigger.
        origins: Dotted key (``profile.limits.steps``, ``task.prompt``) → ``file:line``, ``--set``,
            ``--input``, ``default``, for every effective value.
        values: The effective values under the same dotted keys (JSON values).
        config: The resolved configuration as one JSON object, for ``run/start`` and digests; holds
            no secret values.
        task_digest: SHA-256 over the UTF-8 JSON with sorted keys and no spaces; likewise the others.
        defining_files: Absolute paths of all run-defining files read.
        trust_reason: Why the trigger has that trust, in a few words.
        context_texts: Text of each of ``task.context``, in the version that may be believed.
        responses: Answers of the ``scripted`` provider, as ``load_script`` gives them.
        recording: What the ``replay`` provider plays, None for another provider.
    """

    task: TaskSpec
    profile: ProfileSpec
    trust: Trust
    task_digest: str
    profile_digest: str
    policy_digest: str
    config: JsonObject
    origins: Mapping[str, str] = field(default_factory=dict)
    values: Mapping[str, object] = field(default_factory=dict)
    defining_files: tuple[str, ...] = ()
    trust_reason: str = ""
    context_texts: tuple[str, ...] = ()
    responses: tuple[JsonObject, ...] = ()
    recording: Recording | None = None
