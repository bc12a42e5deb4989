"""Compare policies of compaction by what they cost: python bench/bench_context.py [SESSION...].

Takes the messages of recorded sessions as they came (what a compaction did to them is undone), plays them again
under each policy in a window they do not fit, with the product's own hook, and asks a simulated provider cache what
each request would have cost: blocks of tokens, known while the prefix before them is the same, forgotten after a
time. Prints for each session and policy the requests, the summaries and cuts, the share of input read from the cache,
and the cost in thousands of uncached input tokens. No model is asked: a summary is a text of a fixed size.
"""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from runner.agent.occupancy import Occupancy
from runner.agent.settings import CompactionSpec
from runner.compaction.policy import CompactionHook
from runner.session import events as ev
from runner.session.projection import Projection
from runner.session.store import open_session
from runner.testing.sessions import SampleSession

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from runner.messages import Message, Usage

ROOT = Path(__file__).resolve().parent.parent

BLOCK = 128
"""Tokens of a block of the simulated cache."""

LIFETIME = 300.0
"""Seconds after its last use that a block is forgotten."""

PACE = 10.0
"""Seconds from one request to the next."""

CACHED = 0.1
"""Price of a cached input token, of an uncached one."""

OUTPUT = 5.0
"""The same of an output token."""

SUMMARY_TOKENS = 800

POLICIES = {
    "as shipped": CompactionSpec(),
    "prune more": CompactionSpec(prune_over=1_000, prune_head=400, prune_tail=100),
    "summary only": CompactionSpec(prune_over=10**9),
    "early, 0.5": CompactionSpec(summary_at=0.5),
    "late, 0.9": CompactionSpec(summary_at=0.9),
    "keep 0.05": CompactionSpec(keep=0.05),
    "keep 0.4": CompactionSpec(keep=0.4),
}


class PrefixCache:
    """A provider's prefix cache: which leading blocks of a request it has seen not long ago.

    Args:
        block: Tokens of a block, four bytes each.
        lifetime: Seconds.
    """

    def __init__(self, *, block: int = BLOCK, lifetime: float = LIFETIME) -> None:
        self._bytes = block * 4
        self._lifetime = lifetime
        self._used: dict[bytes, float] = {}

    def request(self, body: bytes, now: float) -> tuple[int, int]:
        """Tokens of a request that are read from the cache, and those that are not; all whole blocks are kept."""
        chain, cached, hitting = b"", 0, True
        for start in range(0, len(body) - self._bytes + 1, self._bytes):
            chain = hashlib.blake2b(chain + body[start : start + self._bytes], digest_size=16).digest()
            known = self._used.get(chain)
            hitting = hitting and known is not None and now - known <= self._lifetime
            cached += self._bytes // 4 if hitting else 0
            self._used[chain] = now
        return cached, -(-len(body) // 4) - cached


class Replayed:
    """One session under one policy. What it took stands in ``cached``, ``uncached`` and ``output``, in tokens."""

    def __init__(self, window: int, spec: CompactionSpec, header: Any, cache: PrefixCache) -> None:
        self.turn, self.step, self.first_of_turn = 1, 0, False
        self.window = window
        self.projection = Projection()
        self.cached = self.uncached = self.output = 0
        self.summaries = self.cuts = self.requests = 0
        self.next_seq = 0
        self._header = header
        self._opening = orjson.dumps([header["system"], header["tools"]])
        self._occupancy = Occupancy()
        self._cache = cache
        self._hook = CompactionHook(spec, provider="p", model="m", compact_at=(), new_id=lambda: f"n{self.next_seq}")

    def append(self, event: ev.Event) -> ev.Event:
        """As the loop does, without a log."""
        event.seq, self.next_seq = self.next_seq, self.next_seq + 1
        self.projection.apply(event)
        self.summaries += isinstance(event, ev.CompactionSummary)
        self.cuts += isinstance(event, ev.CompactionPrune)
        return event

    def occupancy(self) -> int:
        """As the loop's; no request is ever counted by a provider."""
        return self._occupancy.of(self._header, self.projection)

    def summarise(
        self, messages: Sequence[Message], *, max_tokens: int, model: str | None
    ) -> tuple[list[Any], Usage | None]:
        """A summary of a fixed size, unless that is too long for the policy."""
        del model
        self._send(messages)
        size = min(SUMMARY_TOKENS, max_tokens)
        self.output += size
        return [{"type": "text", "text": "word" * size}], None

    def ask(self, answer: ev.AssistantMessage) -> None:
        """One request, and the answer that was recorded."""
        self.step += 1
        self._hook.before_request(self, overflow=False)
        self._send(self.projection.messages)
        self.output += len(orjson.dumps(answer.message["content"])) // 4

    def _send(self, messages: Sequence[Message]) -> None:
        body = self._opening + b",".join(orjson.dumps(message["content"]) for message in messages)
        cached, uncached = self._cache.request(body, self.requests * PACE)
        self.requests += 1
        self.cached += cached
        self.uncached += uncached

    @property
    def cost(self) -> float:
        """In uncached input tokens."""
        return self.uncached + CACHED * self.cached + OUTPUT * self.output


def messages_of(events: Iterable[ev.Event]) -> tuple[Any, list[ev.Event]]:
    """System prompt and tools of a session, and its messages as they came."""
    header: Any = {"config": {}, "system": "", "tools": []}
    messages: list[ev.Event] = []
    for event in events:
        if isinstance(event, ev.RequestHeaderEvent):
            header = event.header
        elif event.SURFACE and event.surface_op == "append":
            messages.append(event)
    return {**header, "system": header.get("system") or "", "tools": header.get("tools") or []}, messages


def play(header: Any, messages: Sequence[ev.Event], window: int, spec: CompactionSpec) -> Replayed:
    """All requests of a session under a policy."""
    session = Replayed(window, spec, header, PrefixCache())
    for each in messages:
        if isinstance(each, ev.AssistantMessage):
            session.ask(each)
        session.append(_again(each, session))
    return session


def _again(event: ev.Event, session: Replayed) -> ev.Event:
    """The same message as a new event."""
    earlier = [max(0, session.next_seq - 1)]
    if isinstance(event, ev.AssistantMessage):
        return ev.AssistantMessage(turn=1, step=session.step, message=event.message, source_event_seqs=earlier)
    if isinstance(event, ev.ToolResult):
        return ev.ToolResult(turn=1, step=session.step, message=event.message, source_event_seqs=earlier)
    assert isinstance(event, ev.UserMessage)
    return ev.UserMessage(content=event.content, source=event.source, role=event.role, id=event.id)


def sample(folder: Path) -> Path:
    """A session of 200 steps, made up."""
    with SampleSession(folder, bodies=False) as session:
        for _ in range(4):
            session.turn(steps=50)
        session.end()
    return folder


def report(name: str, path: Path) -> Iterator[str]:
    """The lines about one session; its window is two fifths of what it holds, so that every policy has work."""
    header, messages = messages_of(open_session(str(path)).whole_events())
    whole = play(header, messages, 10**9, CompactionSpec())
    window = max(8_000, whole.occupancy() * 2 // 5)
    yield f"{name}: {whole.requests} requests, {whole.occupancy()} tokens in the end, in a window of {window}"
    yield f"  {'policy':<14}{'requests':>9}{'summaries':>10}{'cuts':>6}{'cached':>8}{'cost, k':>9}"
    for policy, spec in POLICIES.items():
        found = play(header, messages, window, spec)
        share = found.cached / max(1, found.cached + found.uncached)
        counts = f"{found.requests:>9}{found.summaries:>10}{found.cuts:>6}"
        yield f"  {policy:<14}{counts}{share:>8.1%}{found.cost / 1000:>9.1f}"


def main(arguments: Sequence[str]) -> int:
    """Print a table for each session."""
    import tempfile

    golden = ROOT / "tests" / "golden"
    named = {path: Path(path) for path in arguments} or {
        "dsh, eight prunes and a summary": golden / "dsh" / "compaction.jsonl",
        "dsh, 20 steps": golden / "dsh" / "rich.jsonl",
        "ours, a small window": golden / "ours" / "compaction",
    }
    with tempfile.TemporaryDirectory() as folder:
        if not arguments:
            named["made up, 200 steps"] = sample(Path(folder) / "sample")
        for name, path in named.items():
            print("\n".join(report(name, path)), end="\n\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
