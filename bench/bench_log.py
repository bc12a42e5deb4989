"""Cost and size of the session log's writer.

Writes a session of STEPS steps as the loop does (each event alone) and prints CPU time per append at the
start and at the end, the share of a step, and the file's size beside one zstd frame of the same bytes,
before and after the log is closed.

    python bench/bench_log.py [STEPS]
"""

from __future__ import annotations

import hashlib
import os
import random
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path

import zstandard

from runner.session import events as ev
from runner.session.log import LOG_NAME, SessionLog

WORDS = "def return import assert value test calc python file error line result expected none true class self".split()


class Session:
    """Writes plausible steps with seeded content."""

    def __init__(self, log: SessionLog, seed: int = 7) -> None:
        self.log = log
        self.random = random.Random(seed)
        self.policy = self.digest()

    def digest(self) -> str:
        return hashlib.sha256(self.random.randbytes(8)).hexdigest()

    def identifier(self) -> str:
        return str(uuid.UUID(bytes=self.random.randbytes(16)))

    def text(self, low: int, high: int) -> str:
        return " ".join(self.random.choice(WORDS) for _ in range(self.random.randrange(low, high)))

    def start(self) -> None:
        self.log.append(ev.TurnStart(turn=1))

    def step(self, step: int) -> None:
        log, where, call_id = self.log, {"turn": 1, "step": step}, f"call_{step}_0"
        log.append(ev.StepStart(**where))
        if step == 1:
            log.append(
                ev.UserMessage(content=[{"type": "text", "text": "Go"}], source={"kind": "user"}, role="user", id="m")
            )
        sent = {"attempt": 1, "purpose": "main", "provider": "openai", "dialect": "openai-chat"}
        log.append(ev.RequestSent(**where, **sent, bytes=5000 + step * 300, sha256=self.digest()))
        first = log.next_seq
        arguments = f'{{"command": "cat src/{self.random.choice(WORDS)}_{self.random.randrange(99)}.py"}}'
        block = {"type": "tool-call", "id": call_id, "name": "shell", "arguments": arguments}
        log.append_chunk(1, step, {"type": "block-start", "index": 0, "blockType": "tool-call"})
        for at in range(0, len(arguments), 6):
            delta = {"type": "tool-call-delta", "index": 0, "id": call_id, "name": "shell"}
            log.append_chunk(1, step, {**delta, "argumentsDelta": arguments[at : at + 6]})
        log.append_chunk(1, step, {"type": "block-end", "index": 0, "block": block})
        usage = {"inputTokens": 900 + self.random.randrange(500), "outputTokens": 40, "cacheReadTokens": step * 300}
        log.append_chunk(1, step, {"type": "usage", "usage": usage})
        log.append_chunk(1, step, {"type": "finish", "reason": {"kind": "tool-calls"}})
        source = {"kind": "model", "provider": "openai", "model": "m"}
        message = {"role": "assistant", "content": [block], "source": source, "id": self.identifier()}
        seqs = list(range(first, log.next_seq))
        log.append(ev.AssistantMessage(**where, message=message, usage=usage, source_event_seqs=seqs))
        call = log.append(ev.ToolCall(**where, call_id=call_id, name="shell", arguments=arguments))
        asked = self.identifier()
        log.append(ev.ApprovalAsked(id=asked, call_id=call_id, tool_name="shell", command=arguments))
        log.append(
            ev.ApprovalDecided(id=asked, outcome="allowed-once", rule="read", policy_digest=self.policy, by="policy")
        )
        content = [{"type": "text", "text": self.text(5, 60)}]
        result = {"type": "tool-result", "toolCallId": call_id, "content": content, "isError": False}
        source = {"kind": "tool", "callId": call_id}
        message = {"role": "user", "content": [result], "source": source, "id": self.identifier()}
        meta = {"durationMs": self.random.randrange(90), "exitCode": 0, "mode": "workspace-write", "attempts": 1}
        log.append(ev.ToolResult(**where, message=message, meta=meta, source_event_seqs=[call.seq]))
        log.append(ev.StepEnd(**where))
        log.seal()
        log.schedule_sync()


def main() -> None:
    """Print the numbers."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    with tempfile.TemporaryDirectory() as folder:
        log = SessionLog.create(Path(folder), header={"id": "session-bench", "cwd": "/w"}, clock=clock)
        session = Session(log)
        session.start()
        costs = []
        for step in range(1, steps + 1):
            before = time.thread_time()
            session.step(step)
            costs.append(time.thread_time() - before)
        quarter = max(1, steps // 4)
        path = Path(folder) / LOG_NAME
        live = path.stat().st_size
        before = time.thread_time()
        log.close()
        closing = time.thread_time() - before
        decoded = subprocess.run(["zstd", "-dcq", path], check=True, capture_output=True).stdout
        frames = {level: len(zstandard.ZstdCompressor(level=level).compress(decoded)) for level in (3, 9, 19)}
        print(f"steps {steps}, decoded {len(decoded)} bytes")
        print(f"append of a small event     {append_cost() * 1e6:7.1f} µs CPU")
        print(f"step, first quarter         {sum(costs[:quarter]) / quarter * 1e6:7.1f} µs CPU")
        print(f"step, last quarter          {sum(costs[-quarter:]) / quarter * 1e6:7.1f} µs CPU")
        print(f"close                       {closing * 1e3:7.1f} ms CPU")
        for name, size in (("as written", live), ("closed", path.stat().st_size)):
            ratios = ", ".join(f"{size / frame:.2f} of level {level}" for level, frame in frames.items())
            print(f"{name:<12}{size:9} bytes: {ratios}")


def append_cost(count: int = 5000) -> float:
    """Seconds of CPU for one append of a small event."""
    with (
        tempfile.TemporaryDirectory() as folder,
        SessionLog.create(Path(folder), header={"id": "session-bench", "cwd": "/w"}, clock=clock) as log,
    ):
        before = time.thread_time()
        for number in range(count):
            log.append(ev.LimitReached(name="steps", used=number, max=count, percent=90))
        return (time.thread_time() - before) / count


def clock() -> int:
    """Epoch milliseconds."""
    return time.time_ns() // 1_000_000


if __name__ == "__main__":
    os.umask(0o077)
    main()
