"""From a resolved configuration to an agent that is ready to run.

The only module that names concrete tools and hooks together. Everything below gets what it
needs as an argument.
Prefix cache: tools, system prompt and call configuration are fixed before the first request, so the prefix begins the
same all through the run.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from runner.agent.budget import Budget
from runner.agent.hook import Hook, hooks_at
from runner.agent.inbox import Inbox
from runner.agent.loop import Loop
from runner.agent.prompt import SYSTEM_PROMPT, PromptBuilder, runtime_context
from runner.agent.settings import compaction_for
from runner.approvals.policy import summarise
from runner.approvals.resolver import Resolver
from runner.approvals.words import DEFAULT_TOOLS
from runner.compaction.policy import CompactionHook
from runner.compaction.spill import Spill, SpillStore
from runner.errors import InternalError
from runner.hooks.repeat import RepeatHook
from runner.hooks.retry import RetryHook
from runner.providers.prices import cost_of
from runner.providers.redacting import RedactingProvider
from runner.session.events import Redaction
from runner.session.media import MediaStore
from runner.tools.builtin.fetch import FetchUrl
from runner.tools.builtin.files import EditFile, ReadFile, WriteFile
from runner.tools.builtin.finding import ReportFinding
from runner.tools.builtin.patch import ApplyPatch
from runner.tools.builtin.search import Glob, Grep
from runner.tools.builtin.shell import Shell
from runner.tools.builtin.todo import Todo
from runner.tools.pipeline import Pipeline
from runner.tools.registry import Registry
from runner.tools.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from runner.agent.loop import CallReport
    from runner.agent.past import Past
    from runner.cancellation import Cancellation
    from runner.compaction.summary import Compacted
    from runner.config.spec import RunSpec
    from runner.messages import JsonObject, RequestHeader, ToolCallBlock, ToolSchema
    from runner.providers.base import ModelSpec, Provider
    from runner.redaction import Redactor
    from runner.sandbox.executor import Executor
    from runner.session.log import SessionLog


class Agent:
    """A loop with what a run needs beside it.

    Attributes:
        loop: The loop; its inbox holds the first prompt and what follows.
        registry: The tools it has.
        budget: What it used of its limits.
    """

    def __init__(self, loop: Loop, registry: Registry, budget: Budget) -> None:
        self.loop = loop
        self.registry = registry
        self.budget = budget


def call_config(model: ModelSpec) -> JsonObject:
    """The fixed part of the call configuration, as it stands in ``request/header``."""
    config: JsonObject = {"provider": model.provider, "model": model.model}
    if model.temperature is not None:
        config["temperature"] = model.temperature
    if model.tool_choice is not None:
        config["toolChoice"] = model.tool_choice
    return config


def build_registry(
    spec: RunSpec, executor: Executor, spill: Spill, store: SpillStore, media: MediaStore, state: Path
) -> Registry:
    """The built-in tools with the profile's masks.

    Raises:
        ConfigError: ``tools.allow`` or ``tools.deny`` names a tool that does not exist.
    """
    registry = Registry(
        [
            Shell(executor, overflow=str(state / "overflow")),
            ReadFile(executor, page_bytes=spill.page_bytes, spill=store.read, keep_image=media.write),
            WriteFile(executor),
            EditFile(executor),
            ApplyPatch(executor),
            Glob(executor),
            Grep(executor, page_bytes=spill.page_bytes),
            Todo(),
            ReportFinding(executor),
            FetchUrl(executor),
        ]
    )
    tools = spec.profile.tools
    registry.restrict(DEFAULT_TOOLS if tools.allow is None else tools.allow)
    registry.exclude(tools.deny)
    return registry


def build_agent(
    spec: RunSpec,
    *,
    log: SessionLog,
    directory: Path,
    state: Path,
    executor: Executor,
    provider: Provider,
    redactor: Redactor,
    cancellation: Cancellation,
    clock: Callable[[], float],
    new_id: Callable[[], str],
    open_session: Callable[[list[ToolSchema]], object],
    past: Past,
    notice: str | None = None,
    hooks: Sequence[Hook] = (),
    paranoid: bool = False,
) -> Agent:
    """Build the agent of a run, its prompts queued.

    Args:
        spec: The configuration.
        log: The open session log; observers are added to it.
        directory: The artifacts directory, where long results are kept.
        state: Private directory of the session.
        executor: Where commands and file tools run.
        provider: The model.
        redactor: Knows the secrets.
        cancellation: Ends the run.
        clock: Monotonic seconds.
        new_id: Gives ids.
        open_session: Writes the opening events; gets the tools that are offered.
        past: The session so far; events written from now on are not to be applied to it.
        notice: What an agent that goes on is told of the interruption; None for a new session.
        hooks: Further hooks, asked after the built-in ones (the checks among them).
        paranoid: Compare every request with its rebuild.
    """
    profile, model = spec.profile, spec.profile.model
    compaction = compaction_for(profile.compaction, profile.compaction_models, model.model)
    budget = Budget(profile.limits, clock=clock, used=past.used)
    store = SpillStore(str(directory / "spill"))
    spill = Spill(
        store,
        spec=compaction,
        window=model.context_window,
        redactor=redactor,
        cancelled=lambda: cancellation.cancelled,
    )
    media = MediaStore(str(directory))
    registry = build_registry(spec, executor, spill, store, media, state)
    redacting = RedactingProvider(
        provider, redactor, report=lambda count: log.append(Redaction(kind="secret", count=count, where="answer"))
    )
    all_hooks: list[Hook] = [
        RetryHook(profile.retry, random=random.random),
        CompactionHook(
            compaction, provider=model.provider, model=model.model, compact_at=spec.task.compact_at, new_id=new_id
        ),
        RepeatHook(new_id=new_id),
        *hooks,
    ]
    resolver = Resolver(
        profile.policy, workspace=executor.workspace, mode=profile.mode, trust=spec.trust, new_id=new_id
    )

    def holds_secret(call: ToolCallBlock, plain: str) -> bool:
        return call["id"] in redacting.tainted or redactor.holds(call["arguments"]) or redactor.holds(plain)

    def call_timeout() -> float:
        left = budget.wall_left()
        return profile.limits.tool if left is None else max(0.1, min(profile.limits.tool, left))

    def halt_reason() -> str | None:
        state = budget.over("tool_time", "output_bytes")
        return None if state is None else f"the limit {state.name} is reached"

    pipeline = Pipeline(
        registry=registry,
        mode=profile.mode,
        resolve=resolver.resolve,
        emit=log.append_many,
        finalizer=spill,
        clock=clock,
        timeout=call_timeout,
        holds_secret=holds_secret,
        hold_time=budget.hold_time,
        guards=hooks_at(all_hooks, "guard"),
        after_tool=hooks_at(all_hooks, "after_tool"),
    )
    scheduler = Scheduler(
        pipeline,
        append=log.append,
        new_id=new_id,
        mode=profile.mode,
        cancellation=cancellation,
        parallel=profile.tools.parallel,
        before_side_effects=log.barrier,
        halt=halt_reason,
        abort_on_denied=profile.on_denied == "abort",
        stop_background=executor.stop_background,
    )
    offered = registry.offered()
    open_session(offered)
    inbox = Inbox(log.append, past.queues)
    loop = Loop(
        log=log,
        provider=redacting,
        config=call_config(model),
        system=SYSTEM_PROMPT,
        tools=offered,
        window=model.context_window,
        max_output=model.max_output_tokens,
        min_output=compaction.min_output,
        steady_output=compaction.steady_output(model.context_window),
        budget=budget,
        past=past,
        inbox=inbox,
        calls=scheduler,
        hooks=all_hooks,
        cancellation=cancellation,
        clock=clock,
        new_id=new_id,
        cost_of=lambda usage: cost_of(usage, model.prices),
        summary_cost_of=lambda usage: cost_of(usage, profile.summary_prices or model.prices),
        attempts=profile.retry.attempts,
        paranoid=paranoid,
        media=media.read,
    )
    prompts = _prompts(spec, executor, redactor, new_id, [tool["name"] for tool in offered])
    if notice is None:
        for message in prompts.opening():
            inbox.inject(message)
        for text in (spec.task.prompt, *spec.task.turns):
            inbox.followup(prompts.prompt(redactor.text(text)[0]))
    else:
        missing = (spec.task.prompt, *spec.task.turns)[len(past.prompts) :]
        _go_on(inbox, past, prompts, [redactor.text(text)[0] for text in missing], redactor.text(notice)[0])
    return Agent(loop, registry, budget)


def build_compactor(
    spec: RunSpec,
    *,
    log: SessionLog,
    directory: Path,
    provider: Provider,
    redactor: Redactor,
    cancellation: Cancellation,
    clock: Callable[[], float],
    new_id: Callable[[], str],
    past: Past,
    header: RequestHeader,
) -> Callable[[], Compacted]:
    """What compacts a session's history by hand: one turn of a loop that has no tools to run.

    Args:
        spec: The configuration.
        log: The open session log.
        directory: The artifacts directory.
        provider: The model.
        redactor: Knows the secrets.
        cancellation: Ends it.
        clock: Monotonic seconds.
        new_id: Gives ids.
        past: The session so far.
        header: System prompt and tools of the last request, which the provider may still have cached.
    """
    profile, model = spec.profile, spec.profile.model
    compaction = compaction_for(profile.compaction, profile.compaction_models, model.model)
    redacting = RedactingProvider(
        provider, redactor, report=lambda count: log.append(Redaction(kind="secret", count=count, where="answer"))
    )
    hook = CompactionHook(compaction, provider=model.provider, model=model.model, compact_at=(), new_id=new_id)
    loop = Loop(
        log=log,
        provider=redacting,
        config=call_config(model),
        system=header["system"],
        tools=header["tools"],
        window=model.context_window,
        max_output=model.max_output_tokens,
        min_output=compaction.min_output,
        steady_output=compaction.steady_output(model.context_window),
        budget=Budget(profile.limits, clock=clock, used=past.used),
        past=past,
        inbox=Inbox(log.append, past.queues),
        calls=_NoCalls(),
        hooks=[RetryHook(profile.retry, random=random.random)],
        cancellation=cancellation,
        clock=clock,
        new_id=new_id,
        cost_of=lambda usage: cost_of(usage, model.prices),
        summary_cost_of=lambda usage: cost_of(usage, profile.summary_prices or model.prices),
        attempts=profile.retry.attempts,
        media=MediaStore(str(directory)).read,
    )
    return lambda: loop.compact(hook.summarise)


class _NoCalls:
    """Where no call may be run."""

    def run(self, calls: Sequence[ToolCallBlock], *, turn: int, step: int) -> CallReport:
        raise InternalError(f"{len(calls)} calls in a turn {turn} that only compacts, step {step}")

    def end_turn(self) -> list[str]:
        return []


def _go_on(inbox: Inbox, past: Past, prompts: PromptBuilder, missing: Sequence[str], notice: str) -> None:
    """Queue what a session that goes on needs: what was never queued or was lost, and a word on what happened.

    The notice is a turn of its own where a turn was cut off, or where nothing else asks for one.
    """
    lost = past.lost
    lost_prompts = [message for target, message in lost if target == "next-turn"]
    for message in prompts.again(past.messages, begun=bool(past.prompts)):
        inbox.inject(message)
    for target, message in lost:
        if target == "next-step":
            inbox.inject(message)
    for message in reversed(lost_prompts):
        inbox.first(message)
    for text in missing:
        inbox.followup(prompts.prompt(text))
    cut_off = past.turn > 0 and not past.completed and not lost_prompts
    if cut_off or not inbox.queued_turns:
        inbox.first(prompts.resumed(notice))
    elif past.step:
        inbox.inject(prompts.resumed(notice))


def _prompts(
    spec: RunSpec, executor: Executor, redactor: Redactor, new_id: Callable[[], str], offered: Sequence[str]
) -> PromptBuilder:
    """What builds the messages of run-time state, context files and prompts, without secrets."""
    profile = spec.profile
    state = runtime_context(
        mode=profile.mode.value,
        workspace=executor.workspace,
        tmp=executor.tmp,
        network=profile.sandbox.network,
        egress=[str(each) for each in profile.sandbox.egress],
        not_enforced=executor.not_enforced(profile.mode),
        policy_summary=summarise(profile.policy, trust=spec.trust, tools=offered),
        limits=profile.limits,
    )
    context = [(name, redactor.text(text)[0]) for name, text in zip(spec.task.context, spec.context_texts, strict=True)]
    return PromptBuilder(new_id=new_id, context=context, state=state)
