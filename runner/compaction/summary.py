"""Summary: a message that stands for the older part of the history.

The summary request replays the kept prefix with the same system prompt and tools. The replace moves
the cached prefix; what stands before the cut (run-time state, context, the first prompt) stays.
Writes ``compaction/start``, ``compaction/summary``, the replacing ``user/message``, ``compaction/end``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    The cut never stands before a tool result, so calls keep their results; it is at least ``start``.
    """
    index, kept = len(nodes), 0
    while index > start:
        message = message_of(nodes[index - 1])
        size = estimate_message(message, cautious) if message else 0
        if kept + size > keep_tokens:
            break
        kept += size
        index -= 1
    while index > start and index < len(nodes) and isinstance(nodes[index], ToolResult):
        index -= 1
    return index


class Summariser:
    """Makes one summary and puts it in place of what it stands for."""

    def __init__(self, spec: CompactionSpec, *, provider: str, model: str, new_id: Callable[[], str]) -> None:
        self._spec = spec
        self._provider = provider
        self._model = spec.summary_model or model
        self._new_id = new_id
        self._refused: Usage | None = None

    def compact(self, access: RequestAccess) -> bool:
        """Replace the older part by a summary; False when there is nothing to compact or it failed.

        Two tries: a reply with calls, an empty one, or one that does not shrink the history counts
        as one. A provider that fails ends the try too; CONTEXT_EXHAUSTED and faults of the network
        are the same to us here, since the history is unchanged.
        """
        nodes = access.projection.nodes
        start = opening_length(nodes)
        end = cut_index(nodes, start=start, keep_tokens=int(self._spec.keep * access.window))
        if not any(isinstance(node, AssistantMessage) for node in nodes[start:end]):
            return False
        compaction_id = self._new_id()
        access.append(CompactionStart(compaction_id=compaction_id, turn=access.turn))
        failure = "no usable summary after two tries"
        self._refused = None
        for _ in range(2):
            try:
                if self._try(access, nodes[start:end], compaction_id):
                    access.append(
                        CompactionEnd(compaction_id=compaction_id, turn=access.turn, refused_usage=self._refused)
                    )
                    return True
            except ProviderError as error:
                failure = error.message
                if error.code is not ErrorCode.CONTEXT_EXHAUSTED:
                    break
        error_data = {"code": ErrorCode.CONTEXT_EXHAUSTED.name, "message": failure}
        access.append(
            CompactionEnd(compaction_id=compaction_id, turn=access.turn, error=error_data, refused_usage=self._refused)
        )
        return False

    def _try(self, access: RequestAccess, shadowed: Sequence[Event], compaction_id: str) -> bool:
        nodes = access.projection.nodes
        upto = nodes.index(shadowed[-1]) + 1
        messages = [message for node in nodes[:upto] if (message := message_of(node))]
        instruction = user_message(INSTRUCTION, message_id=self._new_id(), kind="plugin", plugin="compact")
        content, usage = access.summarise(
            [*messages, instruction], max_tokens=self._spec.summary_max_tokens, model=self._spec.summary_model
        )
        text = text_of(content).strip()
        before = sum(estimate_message(message, cautious) for node in shadowed if (message := message_of(node)))
        summary: Message = user_message(
            _LEAD + text, message_id=self._new_id(), kind="plugin", plugin="compact", compactionId=compaction_id
        )
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
