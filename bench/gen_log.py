"""Generates a large session log of ours, as a run would have written it.

    python bench/gen_log.py DIRECTORY [--size 1G] [--line 2048] [--seed 1]

Writes ``DIRECTORY/session.jsonl.zst`` with the log's real writer. The log is whole: it begins with ``run/start``, ends
with ``run/end`` and a seal, every step has its request, its streamed answer in packed rows, its calls with their
approvals and results, and its seal; ``session verify`` rebuilds every request and finds it equal. A summary replaces
the older messages whenever the conversation has grown to some hundred thousand bytes, as compaction does. Most texts
are made-up source code that compresses as Python's standard library does (zlib: 3.6 at level 1, 4.5 at level 6).

The same options give the same decoded bytes. ``--size`` is that of the decoded log; it is exceeded by one step at most.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from runner.providers.openai_chat import ChatDialect
from runner.session import events as ev
from runner.session.log import SessionLog
from runner.session.projection import Projection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.messages import JsonObject, Message, RequestHeader, Usage

SESSION_ID = "session-00000000-0000-4000-8000-0000000000aa"
"""Id of a generated session."""

POOL = 16_000_000
"""Characters that texts are taken from: more than a compressor looks back on."""

_DIALECT = "openai-chat"
_KEEP = 40_000  # bytes of conversation that a summary leaves as they are
_TURN = 50  # steps of a turn
_PIECE = 5  # characters of a delta, about one token
_ENDS = [" ", " ", " ", " = ", ".", "(", ", ", '"', "_", "): ", "[", "] "]
_SYSTEM = "You work alone in a repository. Use the tools, then say what you did."
_TOOLS: Any = [
    {
        "name": name,
        "description": f"{name} in the workspace.",
        "parameters": {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument]},
    }
    for name, argument in (("shell", "command"), ("read_file", "path"), ("grep", "pattern"), ("edit_file", "path"))
]
_HEADER: RequestHeader = {
    "config": {"provider": "openai", "model": "mock", "maxTokens": 32_000},
    "system": _SYSTEM,
    "tools": _TOOLS,
}


def bytes_of(text: str) -> int:
    """A size such as ``64M`` or ``1G``; units are powers of 1,000."""
    factor = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}.get(text[-1:].lower())
    return int(float(text[:-1]) * factor) if factor else int(text)


class Texts:
    """Pieces of a pool of made-up text."""

    def __init__(self, source: random.Random, *, pool: int) -> None:
        self._random = source
        syllables = [first + second for first in "rtpslmncdf" for second in ("e", "i", "or", "al", "un", "st", "ex")]
        self._names = ["".join(source.choices(syllables, k=source.randint(1, 4))) for _ in range(8_000)]
        self._weights = list(accumulate(1 / (rank + 3) for rank in range(len(self._names))))
        code = "".join(self._files(pool))
        prose = " ".join(source.choices([*self._names[:2_000], "größer", "für", "naïve", "été"], k=60_000))
        self._pools = (code, code, code, code, code, code, code, prose)

    def _files(self, size: int) -> Iterator[str]:
        """Made-up source files: each has names of its own, and lines that come again."""
        made = 0
        while made < size:
            names = self._random.choices(self._names, cum_weights=self._weights, k=60)
            lines: list[str] = []
            for _ in range(200):
                if lines and self._random.random() < 0.2:
                    line = self._random.choice(lines)
                else:
                    length = self._random.randint(2, 8)
                    words = zip(
                        self._random.choices(names, k=length), self._random.choices(_ENDS, k=length), strict=True
                    )
                    line = "    " * self._random.choice((0, 1, 1, 2, 2, 3)) + "".join(map("".join, words)) + "\n"
                    lines.append(line)
                made += len(line)
                yield line

    def take(self, length: int) -> str:
        """``length`` characters."""
        pool = self._random.choice(self._pools)
        start = self._random.randrange(max(1, len(pool) - length))
        return pool[start : start + length]

    def around(self, mean: float) -> str:
        """Some text; most are short and a few are long, as tool results are."""
        return self.take(max(16, min(int(self._random.expovariate(1 / mean)), 49_000)))

    def digest(self) -> str:
        """64 hex digits."""
        return self._random.randbytes(32).hex()

    def identifier(self) -> str:
        """An id."""
        text = self._random.randbytes(16).hex()
        return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


class MeasuredLog(SessionLog):
    """The writer, with its size. It writes nothing because time has passed: the bytes are to be the same each time."""

    @property
    def due(self) -> None:
        """Nothing, ever; chunks are written when their block ends."""
        return

    @property
    def decoded_bytes(self) -> int:
        """Bytes of all lines."""
        return self._decoded_bytes

    @property
    def lines(self) -> int:
        """Lines written."""
        return self._lines


class Generator:
    """Writes one session; ``log`` is its log.

    Args:
        directory: Where the log is written; it must hold none.
        size: Decoded bytes.
        line: Mean length of a line in bytes. A step has some twenty lines, most of them short, so the results of its
            calls make up for them.
        seed: Where all texts, ids and times come from.
        pool: Characters of made-up text; a smaller pool is made faster and compresses better.
    """

    def __init__(self, directory: Path, *, size: int, line: int = 2048, seed: int = 1, pool: int = POOL) -> None:
        self._size = size
        self._random = random.Random(seed)
        self._texts = Texts(self._random, pool=pool)
        self._result = max(200.0, line * 14.3 - 5_000)
        self._time = 1_796_000_000_000
        self._dialect = ChatDialect(_DIALECT)
        self._projection = Projection()
        self._policy = self._texts.digest()
        self._turns = self._steps = 0
        self._hash = hashlib.sha256()
        self._sent = 0  # messages in the hash
        self._held = 0  # bytes in the hash
        self._restart()
        header = {"id": SESSION_ID, "cwd": "/workspace"}
        self.log = cast("MeasuredLog", MeasuredLog.create(directory, header=header, clock=self._clock))
        self.log.observers.append(self._fold)

    def run(self) -> None:
        """Write the whole log."""
        with self.log:
            self._begin()
            while self.log.decoded_bytes < self._size:
                self._turn()
            self.log.append(
                ev.RunEnd(outcome="completed", code="COMPLETED", exit_code=0, turns=self._turns, steps=self._steps)
            )
            self.log.seal()

    def _clock(self) -> int:
        self._time += self._random.getrandbits(3) // 3
        return self._time

    def _fold(self, event: ev.Event) -> None:
        if event.SURFACE:
            self._projection.apply(event)

    # --- requests -----------------------------------------------------------------------------

    def _restart(self) -> None:
        opening = self._dialect.open(_HEADER)
        self._hash, self._held, self._sent = hashlib.sha256(opening), len(opening), 0

    def _request(self) -> None:
        for message in self._projection.messages[self._sent :]:
            fragment = b"," + b",".join(self._dialect.fragments([message]))
            self._hash.update(fragment)
            self._held += len(fragment)
        self._sent = len(self._projection.messages)
        body = self._hash.copy()
        body.update(self._dialect.close)
        self.log.append(
            ev.RequestSent(
                **self._where(),
                attempt=1,
                purpose="main",
                provider="openai",
                dialect=_DIALECT,
                bytes=self._held + len(self._dialect.close),
                sha256=body.hexdigest(),
            )
        )

    def _where(self) -> JsonObject:
        return {"turn": self._turns, "step": self._steps}

    # --- events -------------------------------------------------------------------------------

    def _begin(self) -> None:
        self.log.append(
            ev.RunStart(
                task_digest=self._texts.digest(),
                profile_digest=self._texts.digest(),
                policy_digest=self._policy,
                tools_digest=self._texts.digest(),
                versions={"nightshift": "0", "python": "3", "os": "Linux"},
                base={"commit": None, "tree": self._texts.digest()[:40], "dirty": False},
                sandbox={"backend": "bubblewrap", "mode": "workspace-write", "network": "off", "notEnforced": []},
                trust="trusted",
                config={"profile": {"limits": {}}},
            )
        )
        self.log.append(ev.PermissionPreset(preset="workspace-write"))
        self.log.append(ev.SandboxModeEvent(mode="workspace-write"))
        self.log.append(ev.ApprovalPolicy(policy="declared"))

    def _turn(self) -> None:
        self._turns += 1
        self.log.append(ev.TurnStart(turn=self._turns))
        for number in range(1, _TURN + 1):
            last = number == _TURN or self.log.decoded_bytes >= self._size
            self._step(prompt=number == 1, calls=0 if last else self._random.choice((1, 1, 1, 1, 2, 3)))
            if last:
                break
        self.log.append(ev.TurnEnd(turn=self._turns, reason={"kind": "completed"}))
        self.log.seal()

    def _step(self, *, prompt: bool, calls: int) -> None:
        self._steps += 1
        self.log.append(ev.StepStart(**self._where()))
        if prompt:
            self._user([{"type": "text", "text": self._texts.take(600)}], {"kind": "user"})
        if self._steps == 1:
            self.log.append(ev.RequestContext(provider="openai", model="mock", context_window=128_000))
            self.log.append(ev.RequestHeaderEvent(header=_HEADER, reason="initial"))
        if self._held > 10 * _KEEP:
            self._compact()
        self._request()
        for name, call_id, arguments in self._answer(calls):
            self._call(name, call_id, arguments)
        self.log.append(ev.StepEnd(**self._where()))
        self.log.seal()

    def _user(self, content: list[Any], source: JsonObject, **envelope: Any) -> None:
        identifier = self._texts.identifier()
        self.log.append(ev.UserMessage(content=content, source=source, role="user", id=identifier, **envelope))

    def _answer(self, calls: int) -> list[tuple[str, str, str]]:
        first = self.log.next_seq
        content: list[Any] = [self._stream("text", 0, self._texts.around(1_000), {})]
        asked = []
        for index in range(1, calls + 1):
            tool = self._random.choice(_TOOLS)
            name, argument = tool["name"], tool["parameters"]["required"][0]
            call_id = f"call_{self._steps}_{index}"
            text = self._texts.around(90).translate({34: "'", 92: "/", 10: " "})
            arguments = f'{{"{argument}": "{text}"}}'
            content.append(self._stream("tool-call", index, arguments, {"id": call_id, "name": name}))
            asked.append((name, call_id, arguments))
        usage: Usage = {"inputTokens": self._held // 8, "cacheReadTokens": self._held // 8, "outputTokens": 300}
        self._chunk({"type": "usage", "usage": usage})
        self._chunk({"type": "finish", "reason": {"kind": "tool-calls" if calls else "stop"}})
        message: Message = {
            "role": "assistant",
            "content": content,
            "source": {"kind": "model", "provider": "openai", "model": "mock"},
            "id": self._texts.identifier(),
        }
        seqs = list(range(first, self.log.next_seq))
        self.log.append(ev.AssistantMessage(**self._where(), message=message, usage=usage, source_event_seqs=seqs))
        return asked

    def _stream(self, kind: str, index: int, text: str, names: JsonObject) -> JsonObject:
        part = "text" if kind == "text" else "argumentsDelta"
        self._chunk({"type": "block-start", "index": index, "blockType": kind})
        for at in range(0, len(text), _PIECE):
            self._chunk({"type": f"{kind}-delta", "index": index, **names, part: text[at : at + _PIECE]})
        block = {"type": kind, **names, "text" if kind == "text" else "arguments": text}
        self._chunk({"type": "block-end", "index": index, "block": block})
        return block

    def _chunk(self, chunk: JsonObject) -> None:
        self.log.append_chunk(self._turns, self._steps, chunk)

    def _call(self, name: str, call_id: str, arguments: str) -> None:
        call = self.log.append(ev.ToolCall(**self._where(), call_id=call_id, name=name, arguments=arguments))
        asked = self._texts.identifier()
        command = arguments if name == "shell" else None
        paths: JsonObject = {"read": [f"/workspace/{call_id}.py"], "write": []}
        self.log.append(ev.ApprovalAsked(id=asked, call_id=call_id, tool_name=name, command=command, paths=paths))
        self.log.append(
            ev.ApprovalDecided(id=asked, outcome="allowed-once", rule="all", policy_digest=self._policy, by="policy")
        )
        text = self._texts.around(self._result)
        failed = self._random.random() < 0.05
        result: Any = {
            "type": "tool-result",
            "toolCallId": call_id,
            "content": [{"type": "text", "text": text}],
            "isError": failed,
        }
        message: Message = {
            "role": "user",
            "content": [result],
            "source": {"kind": "tool", "callId": call_id},
            "id": self._texts.identifier(),
        }
        meta = {
            "durationMs": self._random.randrange(900),
            "exitCode": int(failed),
            "backend": "bubblewrap",
            "mode": "workspace-write",
            "bytes": len(text.encode()),
            "truncated": False,
            "attempts": 1,
        }
        error = {"name": "CommandFailed", "code": "COMMAND_FAILED"} if failed else None
        self.log.append(
            ev.ToolResult(**self._where(), message=message, error=error, meta=meta, source_event_seqs=[call.seq])
        )

    def _compact(self) -> None:
        """Put a summary in the place of all messages but the first and the last ones."""
        nodes = self._projection.nodes
        kept = len(nodes)
        held = 0
        while held < _KEEP and kept > 3:
            kept -= 1
            held += len(b",".join(self._dialect.fragments([self._projection.messages[kept]])))
        while kept > 3 and isinstance(nodes[kept], ev.ToolResult):
            kept -= 1  # a call and its results stay together
        seqs = [node.seq for node in nodes[1:kept]]
        span = {"start": seqs[0], "end": seqs[-1]}
        identifier = self._texts.identifier()
        block = {"type": "text", "text": self._texts.take(4_000)}
        usage: Usage = {"inputTokens": self._held // 4, "outputTokens": 1_000}
        self.log.append(ev.CompactionStart(compaction_id=identifier, turn=self._turns))
        self.log.append(
            ev.CompactionSummary(
                compaction_id=identifier,
                summary=[block],
                shadowed_range=span,
                shadowed_seqs=seqs,
                provider="openai",
                model="mock",
                usage=usage,
            )
        )
        source = {"kind": "plugin", "plugin": "compact", "compactionId": identifier}
        self._user([block], source, source_event_seqs=seqs, surface_op={"op": "replace", **span})
        self.log.append(ev.CompactionEnd(compaction_id=identifier, turn=self._turns))
        self._restart()


def main() -> None:
    """Generate a log and say what it is."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument(
        "--size", type=bytes_of, default=bytes_of("1G"), help="decoded bytes; k, M, G are powers of 1,000"
    )
    parser.add_argument("--line", type=int, default=2048, help="mean length of a line in bytes")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    before = time.process_time()
    generator = Generator(options.directory, size=options.size, line=options.line, seed=options.seed)
    generator.run()
    log = generator.log
    print(
        f"{log.path}: {log.decoded_bytes} bytes in {log.lines} lines ({log.decoded_bytes / log.lines:.0f} each), "
        f"{log.next_seq} events, {log.path.stat().st_size} bytes on disk, digest {log.digest}, "
        f"{time.process_time() - before:.1f} s of CPU"
    )


if __name__ == "__main__":
    main()
