"""Sessions for tests: logs written the way a run writes them, with made-up but repeatable content.

The events, their order and the request bodies are those of a real run; clock, ids and texts come from a
seed, so the same calls give the same bytes::

    with SampleSession(folder) as session:
        session.turn(steps=3)
        session.end()
"""

from __future__ import annotations

import hashlib
import random
from typing import TYPE_CHECKING, Any, Self

from runner.providers.scripted import ScriptedDialect
from runner.session import events as ev
from runner.session.log import SessionLog
from runner.session.projection import Projection

if TYPE_CHECKING:
    from pathlib import Path

    from runner.messages import JsonObject, Message, RequestHeader, Usage

SAMPLE_ID = "session-00000000-0000-4000-8000-000000000001"
"""Id of a sample session unless another is given."""

_WORDS = ["def", "return", "import", "assert", "value", "test", "file", "line", "none", "true", "class", "self", "été"]
_HEADER: RequestHeader = {
    "config": {"provider": "scripted", "model": "sample", "maxTokens": 32_000},
    "system": "You work alone.",
    "tools": [{"name": "shell", "description": "Run a command.", "parameters": {"type": "object"}}],
}


class SampleSession:
    """Writes one session into ``directory``. ``log`` is its log, ``turns`` and ``steps`` count what was begun.

    Args:
        directory: The artifacts directory.
        session_id: Its id.
        seed: Where ids, texts and the clock's pace come from.
        header: Further fields of the header.
        bodies: Make the request bodies; without them a step's cost does not grow, and no request verifies.
    """

    def __init__(
        self,
        directory: Path,
        *,
        session_id: str = SAMPLE_ID,
        seed: int = 1,
        header: JsonObject | None = None,
        bodies: bool = True,
    ) -> None:
        self.turns = 0
        self.steps = 0
        self.directory = directory
        self._random = random.Random(seed)  # noqa: S311  # test data
        self._time = 1_796_000_000_000
        self._dialect = ScriptedDialect()
        self._bodies = bodies
        self._projection = Projection()
        fields = {"id": session_id, "cwd": "/workspace", **(header or {})}
        self.log = SessionLog.create(directory, header=fields, clock=self._clock)
        self.log.observers.append(self._projection.apply)
        self._digest = self._hex()

    def __enter__(self) -> Self:
        """Return the session itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the log, whatever state it is in."""
        self.log.close()

    # --- content ------------------------------------------------------------------------------

    def _clock(self) -> int:
        self._time += self._random.choice((0, 0, 0, 1, 1, 2, 7))
        return self._time

    def _hex(self) -> str:
        return hashlib.sha256(self._random.randbytes(8)).hexdigest()

    def new_id(self) -> str:
        """A fresh id."""
        text = self._random.randbytes(16).hex()
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"

    def text(self, words: int) -> str:
        """Some text."""
        return " ".join(self._random.choice(_WORDS) for _ in range(words))

    # --- events -------------------------------------------------------------------------------

    def begin(self) -> None:
        """The events a fresh log begins with."""
        self.log.append(
            ev.RunStart(
                task_digest=self._hex(),
                profile_digest=self._hex(),
                policy_digest=self._digest,
                tools_digest=self._hex(),
                versions={"nightshift": "0", "python": "3", "os": "Linux"},
                base={"commit": None, "tree": self._hex()[:40], "dirty": False},
                sandbox={"backend": "bubblewrap", "mode": "workspace-write", "network": "off", "notEnforced": []},
                trust="trusted",
                config={"limits": {"steps": 200}},
            )
        )
        self.log.append(ev.PermissionPreset(preset="workspace-write"))
        self.log.append(ev.SandboxModeEvent(mode="workspace-write"))
        self.log.append(ev.ApprovalPolicy(policy="declared"))

    def turn(self, *, steps: int = 2, prompt: str = "Make the tests pass.", kind: str = "completed") -> None:
        """A whole turn; its last step makes no call. A fresh log is begun first."""
        if self.log.next_seq == 0:
            self.begin()
        self.start_turn()
        for number in range(1, steps + 1):
            self.step(calls=0 if number == steps else 1, prompt=prompt if number == 1 else None)
        self.end_turn(kind)

    def start_turn(self) -> None:
        """``turn/start``."""
        self.turns += 1
        self.log.append(ev.TurnStart(turn=self.turns))

    def end_turn(self, kind: str = "completed") -> None:
        """``turn/end`` and its seal."""
        self.log.append(ev.TurnEnd(turn=self.turns, reason={"kind": kind}))
        self.log.seal()

    def step(self, *, calls: int = 1, prompt: str | None = None, words: int = 20) -> None:
        """A whole step with ``calls`` calls and their results."""
        self.start_step(prompt)
        for call_id, arguments in self.answer(calls=calls).items():
            self.result(call_id, self.call(call_id, arguments), text=self.text(words))
        self.end_step()

    def start_step(self, prompt: str | None = None) -> None:
        """``step/start``, the prompt if there is one, and the request."""
        self.steps += 1
        self.log.append(ev.StepStart(turn=self.turns, step=self.steps))
        if prompt is not None:
            content = [{"type": "text", "text": prompt}]
            self.log.append(ev.UserMessage(content=content, source={"kind": "user"}, role="user", id=self.new_id()))
        if self.steps == 1:
            self.log.append(ev.RequestContext(provider="scripted", model="sample", context_window=128_000))
            self.log.append(ev.RequestHeaderEvent(header=_HEADER, reason="initial"))
        body = self._dialect.whole(_HEADER, self._projection.messages) if self._bodies else self._hex().encode()
        self.log.append(
            ev.RequestSent(
                turn=self.turns,
                step=self.steps,
                attempt=1,
                purpose="main",
                provider="scripted",
                dialect=self._dialect.name,
                bytes=len(body),
                sha256=hashlib.sha256(body).hexdigest(),
            )
        )

    def answer(self, *, calls: int = 1, text: str | None = None) -> dict[str, str]:
        """A streamed answer and its anchor; returns the arguments of its calls by call id."""
        first = self.log.next_seq
        content: list[Any] = [self._stream_text(text or self.text(12))]
        asked = {}
        for index in range(1, calls + 1):
            call_id = f"call_{self.steps}_{index}"
            asked[call_id] = f'{{"command": "cat {self._random.choice(_WORDS)}_{self._random.randrange(99)}.py"}}'
            content.append(self._stream_call(index, call_id, asked[call_id]))
        usage: Usage = {"inputTokens": 900 + self._random.randrange(500), "outputTokens": 40, "cacheReadTokens": 300}
        self.log.append_chunk(self.turns, self.steps, {"type": "usage", "usage": usage})
        finish = {"kind": "tool-calls" if calls else "stop"}
        self.log.append_chunk(self.turns, self.steps, {"type": "finish", "reason": finish})
        message: Message = {
            "role": "assistant",
            "content": content,
            "source": {"kind": "model", "provider": "scripted", "model": "sample"},
            "id": self.new_id(),
        }
        seqs = list(range(first, self.log.next_seq))
        where: JsonObject = {"turn": self.turns, "step": self.steps}
        self.log.append(ev.AssistantMessage(**where, message=message, usage=usage, source_event_seqs=seqs))
        return asked

    def _stream_text(self, text: str) -> JsonObject:
        where = self.turns, self.steps
        self.log.append_chunk(*where, {"type": "block-start", "index": 0, "blockType": "text"})
        for at in range(0, len(text), 7):
            self.log.append_chunk(*where, {"type": "text-delta", "index": 0, "text": text[at : at + 7]})
        block = {"type": "text", "text": text}
        self.log.append_chunk(*where, {"type": "block-end", "index": 0, "block": block})
        return block

    def _stream_call(self, index: int, call_id: str, arguments: str) -> JsonObject:
        where = self.turns, self.steps
        self.log.append_chunk(*where, {"type": "block-start", "index": index, "blockType": "tool-call"})
        for at in range(0, len(arguments), 6):
            head = {"type": "tool-call-delta", "index": index, "id": call_id, "name": "shell"}
            self.log.append_chunk(*where, {**head, "argumentsDelta": arguments[at : at + 6]})
        block = {"type": "tool-call", "id": call_id, "name": "shell", "arguments": arguments}
        self.log.append_chunk(*where, {"type": "block-end", "index": index, "block": block})
        return block

    def call(self, call_id: str, arguments: str) -> int:
        """``tool/call`` and its approval; returns the seq of the call."""
        where: JsonObject = {"turn": self.turns, "step": self.steps}
        call = self.log.append(ev.ToolCall(**where, call_id=call_id, name="shell", arguments=arguments))
        asked = self.new_id()
        self.log.append(ev.ApprovalAsked(id=asked, call_id=call_id, tool_name="shell", command=arguments))
        self.log.append(
            ev.ApprovalDecided(id=asked, outcome="allowed-once", rule="all", policy_digest=self._digest, by="policy")
        )
        return call.seq

    def result(self, call_id: str, call_seq: int, *, text: str) -> ev.Event:
        """``tool/result`` of a recorded call."""
        message: Message = {
            "role": "user",
            "content": [
                {
                    "type": "tool-result",
                    "toolCallId": call_id,
                    "content": [{"type": "text", "text": text}],
                    "isError": False,
                }
            ],
            "source": {"kind": "tool", "callId": call_id},
            "id": self.new_id(),
        }
        meta = {"durationMs": self._random.randrange(90), "exitCode": 0, "mode": "workspace-write", "attempts": 1}
        where: JsonObject = {"turn": self.turns, "step": self.steps}
        return self.log.append(ev.ToolResult(**where, message=message, meta=meta, source_event_seqs=[call_seq]))

    def end_step(self) -> None:
        """``step/end``, its seal and its background sync."""
        self.log.append(ev.StepEnd(turn=self.turns, step=self.steps))
        self.log.seal()
        self.log.schedule_sync()

    def compact(self, start: int, end: int) -> None:
        """Put a summary in the place of the nodes from seq ``start`` to seq ``end``."""
        nodes = [node.seq for node in self._projection.nodes]
        seqs = nodes[nodes.index(start) : nodes.index(end) + 1]
        span, identifier, text = {"start": start, "end": end}, self.new_id(), self.text(10)
        self.log.append(ev.CompactionStart(compaction_id=identifier, turn=self.turns))
        self.log.append(
            ev.CompactionSummary(
                compaction_id=identifier,
                summary=[{"type": "text", "text": text}],
                shadowed_range=span,
                shadowed_seqs=seqs,
            )
        )
        self.log.append(
            ev.UserMessage(
                content=[{"type": "text", "text": text}],
                source={"kind": "plugin", "plugin": "compact", "compactionId": identifier},
                role="user",
                id=self.new_id(),
                source_event_seqs=seqs,
                surface_op={"op": "replace", **span},
            )
        )
        self.log.append(ev.CompactionEnd(compaction_id=identifier, turn=self.turns))

    def write_artifact(self, path: str, content: bytes) -> None:
        """Write a file of the artifacts directory and its ``artifact/written``."""
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        self.log.append(ev.ArtifactWritten(name=target.name, path=path, bytes=len(content), sha256=digest))

    def end(self, *, report: bytes = b"# Summary\n") -> None:
        """``run/end``, one artifact, the final seal, and the end of the file."""
        self.log.append(
            ev.RunEnd(outcome="completed", code="COMPLETED", exit_code=0, turns=self.turns, steps=self.steps)
        )
        self.write_artifact("summary.md", report)
        self.log.seal()
        self.log.close()
