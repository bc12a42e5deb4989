"""Summary: a message that stands for the older part of the history.

Invariants: what stands before it (run-time state, context, the first prompt) and what the last step added stays; a call
stays with its results; every ``compaction/start`` gets its ``compaction/end``, whatever happened in between.
Writes ``compaction/start``, ``compaction/summary``, the replacing ``user/message``, ``compaction/end``.
Prefix cache: the request replays the kept prefix with the same system prompt and tools; the replace
moves the prefix from the first message behind the opening on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from runner.agent.prompt import user_message
from runner.errors import ErrorCode, ProviderError
from runner.messages import add_usage, text_of
from runner.session.events import (
    AssistantMessage,
    CompactionEnd,
    CompactionStart,
    CompactionSummary,
    ToolResult,
    UserMessage,
)
from runner.session.projection import message_of
from runner.session.tokens import cautious, estimate_message

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from runner.agent.hook import RequestAccess
    from runner.agent.settings import CompactionSpec
    from runner.messages import Message, Usage
    from runner.session.events import Event

INSTRUCTION = """\
The conversation above grows too long and its older part will be replaced by your summary. Write it \
for yourself: the task as asked, what was done and found, files and names that matter, decisions and \
their reasons, what failed, what is left to do. Facts only, no calls, no greeting."""

_LEAD = "Summary of the conversation up to here:\n\n"

TRIES = 2
"""Requests for one summary."""


class Compacted(NamedTuple):
    """What came of a compaction.

    Attributes:
        folded: Messages that the summary stands for, 0 without one.
        before: Occupancy before.
        after: Occupancy behind it.
        failure: Why there is no summary although there was something to fold.
    """

    folded: int
    before: int
    after: int
    failure: str | None = None


def opening_length(nodes: Sequence[Event]) -> int:
    """How many nodes stay verbatim at the start: everything up to the first prompt of a user."""
    for index, node in enumerate(nodes):
        if isinstance(node, UserMessage) and node.source.get("kind") == "user":
            return index + 1
        if not isinstance(node, UserMessage):
            break
    return 0


def cut_index(nodes: Sequence[Event], *, start: int, keep_tokens: int) -> int:
    """First node of the tail that stays, so that the tail holds about ``keep_tokens`` tokens.

    The cut never stands before a tool result, so calls keep their results. What the last step added, or what has
    just entered, stays even if it is larger. The index is at least ``start``.
    """
    cut = index = _last_group(nodes, start)
    kept = sum(_size(node) for node in nodes[index:])
    while index > start:
        index -= 1
        kept += _size(nodes[index])
        if kept > keep_tokens:
            break
        if not isinstance(nodes[index], ToolResult):
            cut = index
    return cut


def older_part(nodes: Sequence[Event], *, keep_tokens: int, least: int = 1) -> tuple[int, int] | None:
    """First node, and the one behind the last, of what a summary would replace; None if that is nothing.

    There has to be an answer of the model in it, and it holds at least ``least`` tokens.
    """
    start = opening_length(nodes)
    end = cut_index(nodes, start=start, keep_tokens=keep_tokens)
    older = nodes[start:end]
    if not any(isinstance(node, AssistantMessage) for node in older) or sum(map(_size, older)) < least:
        return None
    return start, end


def _last_group(nodes: Sequence[Event], start: int) -> int:
    """First node of what has just entered, and of the calls and results it stands behind."""
    index = len(nodes)
    while index > start and isinstance(nodes[index - 1], UserMessage):
        index -= 1
    if index > start and isinstance(nodes[index - 1], ToolResult):
        while index > start and isinstance(nodes[index - 1], ToolResult):
            index -= 1
        index = max(start, index - 1)  # the answer with the calls
    return index


def _size(node: Event) -> int:
    message = message_of(node)
    return estimate_message(message, cautious) if message else 0


def _state_in(nodes: Sequence[Event]) -> str | None:
    """The last run-time state that the model was told in ``nodes``, in a message of its own or behind a summary."""
    state = None
    for node in nodes:
        if isinstance(node, UserMessage):
            plugin = node.source.get("plugin")
            if plugin == "runtime":
                state = text_of(node.content)
            elif plugin == "compact" and len(node.content) > 1:
                state = node.content[1]["text"]
    return state


class Summariser:
    """Makes one summary and puts it in place of what it stands for."""

    def __init__(self, spec: CompactionSpec, *, provider: str, model: str, new_id: Callable[[], str]) -> None:
        self._spec = spec
        self._provider = provider
        self._model = spec.summary_model or model
        self._new_id = new_id
        self._refused: Usage | None = None

    def compact(
        self, access: RequestAccess, *, least: int = 1, make_room: Callable[[], bool] | None = None
    ) -> Compacted:
        """Replace the older part by a summary.

        Two tries: a reply with calls, an empty one, and one that does not shrink the history count as one each. A
        request that is too long is made again only if ``make_room`` could cut something. Another failure of the
        provider ends the tries, since it had its own retries.

        Args:
            access: The loop.
            least: Tokens of the smallest older part that is worth a summary.
            make_room: Shortens messages in place, without changing their number; says whether it could.
        """
        before = access.occupancy()
        older = older_part(access.projection.nodes, keep_tokens=int(self._spec.keep * access.window), least=least)
        if older is None:
            return Compacted(0, before, before)
        start, end = older
        compaction_id = self._new_id()
        access.append(CompactionStart(compaction_id=compaction_id, turn=access.turn))
        self._refused = None
        failure: str | None = "the run was stopped"
        try:
            failure = self._tries(access, start, end, compaction_id, make_room)
        finally:
            error = None if failure is None else {"code": ErrorCode.CONTEXT_EXHAUSTED.name, "message": failure}
            access.append(
                CompactionEnd(compaction_id=compaction_id, turn=access.turn, error=error, refused_usage=self._refused)
            )
        return Compacted(end - start if failure is None else 0, before, access.occupancy(), failure)

    def _tries(
        self,
        access: RequestAccess,
        start: int,
        end: int,
        compaction_id: str,
        make_room: Callable[[], bool] | None,
    ) -> str | None:
        """Why there is no summary, None if there is one."""
        failure = f"no usable summary after {TRIES} tries"
        for _ in range(TRIES):
            try:
                if self._try(access, access.projection.nodes[start:end], compaction_id):
                    return None
            except ProviderError as error:
                failure = error.message
                if error.code is not ErrorCode.CONTEXT_EXHAUSTED or make_room is None or not make_room():
                    break
        return failure

    def _try(self, access: RequestAccess, shadowed: Sequence[Event], compaction_id: str) -> bool:
        nodes = access.projection.nodes
        upto = nodes.index(shadowed[-1]) + 1
        messages = [message for node in nodes[:upto] if (message := message_of(node))]
        instruction = user_message(INSTRUCTION, message_id=self._new_id(), kind="plugin", plugin="compact")
        content, usage = access.summarise(
            [*messages, instruction], max_tokens=self._spec.summary_max_tokens, model=self._spec.summary_model
        )
        text = text_of(content).strip()
        before = sum(map(_size, shadowed))
        summary: Message = user_message(
            _LEAD + text, message_id=self._new_id(), kind="plugin", plugin="compact", compactionId=compaction_id
        )
        state = _state_in(shadowed)
        if state is not None:
            summary["content"].append({"type": "text", "text": state})
        if not text or estimate_message(summary, cautious) >= before:
            self._refused = add_usage(self._refused, usage)
            return False
        span = {"start": shadowed[0].seq, "end": shadowed[-1].seq}
        seqs = [node.seq for node in shadowed]
        access.append(
            CompactionSummary(
                compaction_id=compaction_id,
                summary=content,
                shadowed_range=span,
                shadowed_seqs=seqs,
                shadowed_token_count=before,
                provider=self._provider,
                model=self._model,
                usage=usage,
            )
        )
        access.append(
            UserMessage(
                content=list(summary["content"]),
                source=summary["source"],
                role="user",
                id=summary["id"],
                source_event_seqs=seqs,
                surface_op={"op": "replace", **span},
            )
        )
        return True
