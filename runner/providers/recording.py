"""What a session log recorded of a run that can be played again: answers, prompts, calls and results.

A log is data: nothing read here chooses what a run may do. One pass over the log, in bounded memory: what
is needed later goes to temporary files. The recording ends where the recorded run was cut off, cancelled,
stopped or resumed, since nothing behind that follows from the answers alone. Reads ``run/start``, turns,
steps, ``request/*``, ``assistant/*``, ``user/message``, ``tool/*``, ``compaction/*``. No effect on the prefix
cache.
"""

from __future__ import annotations

import hashlib
import tempfile
import weakref
from typing import TYPE_CHECKING, Any

import orjson

from runner.errors import ErrorCode, InternalError, LogError, RunnerError
from runner.messages import text_of, tool_calls_of
from runner.providers.assemble import ResponseAssembler
from runner.record import mutable_record
from runner.session import events as ev
from runner.session.header import is_chained
from runner.session.surface import Surface, check_message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runner.messages import Block, Chunk, JsonObject
    from runner.session.store import SessionSource

MAX_ANSWER = 32 * 1024 * 1024
"""Most bytes of the chunks of one answer. A model's answer ends at 4 MiB."""

MAX_PROMPTS = 10_000
MAX_PROMPT = 4 * 1024 * 1024
"""Most prompts, and most bytes of them together."""

PIECE_CHARACTERS = 1_000
"""Length of the deltas of an answer whose chunks were not recorded."""

_IN_MEMORY = 4 * 1024 * 1024

_CUT = frozenset(
    {
        ErrorCode.TOOL_NOT_STARTED.name,
        ErrorCode.TOOL_OUTCOME_UNKNOWN.name,
        ErrorCode.ABORTED_BEFORE_DISPATCH.name,
        ErrorCode.CANCELLED.name,
    }
)
"""Errors of results that say how a run ended and nothing of what the call does."""

_CHUNK_FIELDS: dict[str, dict[str, type]] = {
    "block-start": {"index": int, "blockType": str},
    "text-delta": {"index": int, "text": str},
    "reasoning-delta": {"index": int, "text": str},
    "tool-call-delta": {"index": int, "id": str, "name": str, "argumentsDelta": str},
    "block-end": {"index": int, "block": dict},
    "usage": {"usage": dict},
    "finish": {"reason": dict},
}
_FINISHES = ("stop", "tool-calls", "length", "filter")
_MOST_TOKENS = 10**12

_COMPARED = (
    ev.UserMessage,
    ev.AssistantMessage,
    ev.ToolCall,
    ev.ToolResult,
    ev.RequestHeaderEvent,
    ev.RequestSent,
)


class Spool:
    """JSON values in a temporary file, read by their position."""

    def __init__(self) -> None:
        self._file: Any = tempfile.SpooledTemporaryFile(max_size=_IN_MEMORY)  # noqa: SIM115  # lives as long as this
        self._ends = [0]
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def append(self, value: Any) -> None:
        """Add one value."""
        data = orjson.dumps(value)
        self._file.seek(self._ends[-1])
        self._file.write(data)
        self._ends.append(self._ends[-1] + len(data))

    def __getitem__(self, index: int) -> Any:
        """The value at a position from 0."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        start, end = self._ends[index], self._ends[index + 1]
        self._file.seek(start)
        return orjson.loads(self._file.read(end - start))

    def __iter__(self) -> Iterator[Any]:
        """All values in order; others may be read meanwhile."""
        for index in range(len(self)):
            yield self[index]


@mutable_record
class Recording:
    """A recorded run, ready to be played.

    Attributes:
        name: What messages call it.
        path: The log or archive it was read from.
        sha256: Of the whole decoded log.
        answers: One a request that was answered, in order: ``{purpose, turn, step, kind, ...}``. ``kind`` is
            ``chunks`` (with ``chunks``), ``too-long`` (the model refused the length), ``failed`` (with ``message``).
        events: Records of the events a replay is compared with, in order.
        prompts: What began each turn.
        results: Number of results of calls.
        steps: Number of ended steps.
        dialect: How the bodies of its requests were written; None if it does not say.
        base: ``base`` of ``run/start``; None if it does not say.
        cwd: The workspace as the header has it.
        session: Id of the session.
        model: Name of the model.
        window: Its context window in tokens.
        max_output: Most tokens of an answer.
        trust: Trust of the trigger, as recorded.
        compact_at: Turns before whose first request the history was compacted since the task said so.
        ends: Why it ends before the run was done; None for a run that came to its end.
        asked: What the recorded run had and a replay never has, in words.
        requests: Number of requests in ``events``, repeated attempts not counted.
        move: Set by who compares: gives a recorded text (the second argument: one inside of JSON) with the paths of the
            replay in place of the recorded ones.
        diverged: Set by who compares, once the run left the recording: nothing more is answered then.
    """

    name: str
    path: str
    sha256: str
    answers: Spool
    events: Spool
    prompts: tuple[str, ...]
    results: int
    steps: int
    dialect: str | None
    base: JsonObject | None
    cwd: str
    session: str
    model: str | None
    window: int | None
    max_output: int | None
    trust: str | None = None
    compact_at: tuple[int, ...] = ()
    ends: str | None = None
    asked: tuple[str, ...] = ()
    requests: int = 0
    move: Callable[[str, bool], str] | None = None
    diverged: RunnerError | None = None


def read_recording(source: SessionSource) -> Recording:
    """Read a whole session once.

    Raises:
        LogError: LOG_INVALID, the log cannot be read, an answer is malformed, or there is none.
    """
    digest = hashlib.sha256()
    for line in source.raw_lines():
        digest.update(line + b"\n")
    reader = _Reader(source.header)
    try:
        for event in source.events():
            reader.apply(event)
        reader.finish()
    except LogError as error:
        raise source.located(error, None) from None
    if len(reader.answers) == 0:
        raise LogError(
            f"{source.name}: no answer of a model is recorded in it, so there is nothing to replay",
            details={"path": str(source.path)},
        )
    return reader.recording(source, digest.hexdigest())


class _Reader:
    """Folds the events of a log into a recording."""

    def __init__(self, header: JsonObject) -> None:
        self.answers = Spool()
        self.events = Spool()
        self.ends: str | None = None
        self.done = False
        self._header = header
        self._surface = Surface()
        self._chunked = is_chained(header)  # of other logs the messages are the safer source
        self._prompts: list[str] = []
        self._prompt: str | None = None
        self._prompt_bytes = 0
        self._in_turn = False
        self._results = self._requests = self._steps = 0
        self._step = 0
        self._facts: JsonObject = {}
        self._chunks: list[Chunk] = []
        self._chunk_bytes = 0
        self._pending: ev.RequestSent | None = None
        self._last: JsonObject | None = None
        self._tries = 0
        self._compacting = False
        self._summary: JsonObject | None = None
        self._rules: dict[type[ev.Event], Callable[[Any], None]] = {
            ev.RunStart: self._run_start,
            ev.RunResume: lambda _: self.stop("the run was resumed"),
            ev.RunEnd: self._run_end,
            ev.TurnStart: self._turn_start,
            ev.TurnEnd: self._turn_end,
            ev.StepStart: self._step_start,
            ev.StepEnd: self._step_end,
            ev.UserMessage: self._user_message,
            ev.AssistantChunk: self._chunk,
            ev.AssistantMessage: self._answer,
            ev.ToolResult: self._result,
            ev.RequestHeaderEvent: self._request_header,
            ev.RequestContext: self._request_context,
            ev.RequestSent: self._request_sent,
            ev.CompactionStart: self._compaction_start,
            ev.CompactionSummary: self._compaction_summary,
            ev.CompactionEnd: self._compaction_end,
        }

    def apply(self, event: ev.Event) -> None:
        """Fold one event; those behind the end of the recording change nothing.

        Raises:
            LogError: LOG_INVALID, an answer is malformed or too long, or a message breaks a rule of the log.
        """
        if self.done or self.ends is not None:
            return
        if event.SURFACE:
            self._surface.apply(event)
        rule = self._rules.get(type(event))
        if rule is not None:
            rule(event)
        if isinstance(event, _COMPARED) and self.ends is None:
            self.events.append(event.record())

    def finish(self) -> None:
        """The log is over. One of ours says when its run was done, others only that the turn was."""
        if not self.done and self.ends is None and (self._chunked or self._in_turn):
            self.stop("the log is cut off")
        self._flush()
        if self._prompt is not None:
            self._prompts.append(self._prompt)

    def stop(self, why: str) -> None:
        """End the recording here."""
        self._flush()
        self.ends = f"{why} in step {self._step}" if self._step else why

    def recording(self, source: SessionSource, sha256: str) -> Recording:
        """The result, once all was read."""
        if source.dropped and self.ends:
            self.ends = f"{self.ends} ({source.dropped})"
        facts = self._facts
        return Recording(
            name=source.name,
            path=str(source.path),
            sha256=sha256,
            answers=self.answers,
            events=self.events,
            prompts=tuple(self._prompts),
            results=self._results,
            steps=self._steps,
            dialect=facts.get("dialect"),
            base=facts.get("base"),
            cwd=self._header.get("cwd", ""),
            session=self._header["id"],
            model=facts.get("model"),
            window=facts.get("window"),
            max_output=facts.get("maxTokens"),
            trust=facts.get("trust"),
            compact_at=facts.get("compact_at", ()),
            ends=self.ends,
            asked=tuple(facts.get("asked", ())),
            requests=self._requests,
        )

    # --- the run ------------------------------------------------------------------------------

    def _run_start(self, event: ev.RunStart) -> None:
        self._facts.setdefault("base", event.base)
        self._facts.setdefault("trust", event.trust)
        self._facts.setdefault("asked", list(_asked(event)))
        task = event.config.get("task")
        turns = task.get("compact_at") if isinstance(task, dict) else None
        if isinstance(turns, list) and all(type(turn) is int and turn > 0 for turn in turns):
            self._facts.setdefault("compact_at", tuple(turns))

    def _run_end(self, _: ev.RunEnd) -> None:
        self._flush()
        self.done = True

    def _turn_start(self, _: ev.TurnStart) -> None:
        if self._prompt is not None:
            self._prompts.append(self._prompt)
        self._prompt, self._in_turn = None, True

    def _turn_end(self, event: ev.TurnEnd) -> None:
        self._in_turn = False
        kind = event.reason.get("kind")
        if kind == "max-tokens":
            if self._last is not None and not self._last["whole"]:
                self._last["chunks"][-1] = _finish("length")
            self._flush()
            self.done = True
        elif kind != "completed":
            reason = event.reason.get("reason")
            code = reason.get("code") if isinstance(reason, dict) else None
            self.stop(f"the turn ended as {str(kind)[:40]}" + (f" ({str(code)[:40]})" if code else ""))

    def _step_start(self, _: ev.StepStart) -> None:
        self._step += 1
        self._chunks, self._chunk_bytes = [], 0

    def _step_end(self, _: ev.StepEnd) -> None:
        self._steps += 1
        if self._pending is not None:
            self.stop("a request was not answered")

    def _user_message(self, event: ev.UserMessage) -> None:
        if event.surface_op != "append" or self._prompt is not None:
            return
        if event.source.get("kind") != "user" and event.source.get("plugin") != "checks":
            return  # the run makes it anew by itself
        text = text_of(event.content)
        self._prompt_bytes += len(text)
        if not text.strip() or self._prompt_bytes > MAX_PROMPT or len(self._prompts) >= MAX_PROMPTS:
            what = "is empty" if not text.strip() else "is too long, together with those before it"
            raise LogError(f"event {event.seq} (user/message): the prompt {what}")
        self._prompt = text

    def _result(self, event: ev.ToolResult) -> None:
        if event.surface_op != "append":
            return
        if event.error is not None and event.error.get("code") in _CUT:
            self.stop("a call was cut off")
        else:
            self._results += 1

    # --- requests and answers -----------------------------------------------------------------

    def _request_header(self, event: ev.RequestHeaderEvent) -> None:
        config = event.header.get("config")
        if isinstance(config, dict):
            self._note("model", config.get("model"), str)
            most = config.get("maxTokens")
            if type(most) is int and most > self._facts.get("maxTokens", 0):
                self._facts["maxTokens"] = most

    def _request_context(self, event: ev.RequestContext) -> None:
        self._note("model", event.model, str)
        self._note("window", event.context_window, int)

    def _note(self, name: str, value: object, kind: type) -> None:
        if type(value) is kind and value and (kind is not int or value > 0):  # type: ignore[operator]  # an int then
            self._facts.setdefault(name, value)

    def _request_sent(self, event: ev.RequestSent) -> None:
        if event.purpose not in ("main", "repair", "summary"):
            return
        self._flush()
        self._chunks, self._chunk_bytes = [], 0
        self._facts.setdefault("dialect", event.dialect)
        if event.attempt > 1:
            return
        self._requests += 1
        if self._pending is not None:
            # Another request of the same step without a retry: the first one was too long.
            self._put(self._pending, kind="too-long")
            self._pending = None
        if event.purpose != "summary":
            self._pending = event
            return
        self._tries += 1
        if self._tries > 1:  # the try before this one gave no summary
            self._put(event, kind="chunks", chunks=list(chunks_of([], "stop", None)))

    def _chunk(self, event: ev.AssistantChunk) -> None:
        if not self._chunked:
            return
        self._chunk_bytes += _size(event.chunk)
        if self._chunk_bytes > MAX_ANSWER:
            raise LogError(f"event {event.seq} (assistant/chunk): the answer is over {MAX_ANSWER // 1024 // 1024} MiB")
        self._chunks.append(event.chunk)

    def _answer(self, event: ev.AssistantMessage) -> None:
        if event.surface_op != "append":
            return
        if event.interrupted:
            self.stop("an answer was cut off")
            return
        chunks, self._chunks = self._chunks, []
        whole = bool(chunks)
        if whole:
            _check_chunks(event, chunks)
        else:
            finish = "tool-calls" if tool_calls_of(event.message) else "stop"
            usage = None if event.usage is None else _checked_usage(event.usage, event.seq)
            chunks = list(chunks_of(event.message["content"], finish, usage))
        self._flush()
        sent, self._pending = self._pending, None
        self._last = {
            "purpose": "main" if sent is None else sent.purpose,
            "turn": event.turn,
            "step": event.step,
            "kind": "chunks",
            "chunks": chunks,
            "whole": whole,
        }

    def _put(self, sent: ev.RequestSent, **answer: Any) -> None:
        self.answers.append({"purpose": sent.purpose, "turn": sent.turn, "step": sent.step, **answer})

    def _flush(self) -> None:
        """Write the last answer, whose finish is known now."""
        if self._last is not None:
            self.answers.append({key: value for key, value in self._last.items() if key != "whole"})
            self._last = None

    # --- compaction ---------------------------------------------------------------------------

    def _compaction_start(self, _: ev.CompactionStart) -> None:
        self._flush()
        self._tries, self._summary = 0, None
        if self._pending is not None:
            self._put(self._pending, kind="too-long")
            self._pending = None

    def _compaction_summary(self, event: ev.CompactionSummary) -> None:
        self._summary = {"content": event.summary, "usage": event.usage, "seq": event.seq}

    def _compaction_end(self, event: ev.CompactionEnd) -> None:
        """The last try of a compaction is known now: the summary, one that was of no use, or a failure."""
        summary, tries = self._summary, self._tries
        self._summary, self._tries = None, 0
        if summary is None and not tries:
            return  # nobody was asked
        where: JsonObject = {"purpose": "summary", "turn": event.turn, "step": self._step}
        if summary is not None:
            content = [{"type": "text", "text": text_of(_checked(summary["content"], summary["seq"]))}]
            usage = None if summary["usage"] is None else _checked_usage(summary["usage"], summary["seq"])
            chunks = list(chunks_of(content, "stop", usage))
            self.answers.append({**where, "kind": "chunks", "chunks": chunks})
        elif tries == 1:
            message = event.error.get("message") if event.error else None
            self.answers.append({**where, "kind": "failed", "message": str(message)[:500]})
        else:
            usage = None if event.refused_usage is None else _checked_usage(event.refused_usage, event.seq)
            self.answers.append({**where, "kind": "chunks", "chunks": list(chunks_of([], "stop", usage))})


def _asked(event: ev.RunStart) -> Iterator[str]:
    """What a run was started with that no replay has."""
    profile = event.config.get("profile")
    profile = profile if isinstance(profile, dict) else {}
    if "danger-full-access" in (event.sandbox.get("mode"), profile.get("permission_mode")):
        yield "danger-full-access"
    if event.sandbox.get("network") not in (None, "off"):
        yield "network"
    yield from (name for name in ("plugins", "mcp") if profile.get(name) or event.config.get(name))


def _size(value: Any) -> int:
    """About how many bytes a chunk takes."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, dict):
        return 64 + sum(_size(inner) for inner in value.values())
    return 64 + sum(map(_size, value)) if isinstance(value, list) else 16


def _checked(content: Any, seq: int) -> list[Any]:
    """The content of a summary, once it is known to have the shape of one."""
    event = ev.UserMessage(content=content, source={}, role="user", id="", seq=seq)
    check_message(event)
    return event.content


def _checked_usage(usage: Any, seq: int) -> Any:
    """Usage from a log, once it is known to hold numbers of tokens."""
    counts = {name: value for name, value in usage.items() if name != "estimated"} if isinstance(usage, dict) else {}
    named = {"inputTokens", "outputTokens"} <= counts.keys()
    if not named or not all(type(value) is int and 0 <= value < _MOST_TOKENS for value in counts.values()):
        raise LogError(f"event {seq}: the usage holds no numbers of tokens")
    return usage


def _check_fields(chunk: Chunk) -> None:
    for name, kind in _CHUNK_FIELDS[chunk["type"]].items():
        if type(chunk[name]) is not kind:
            raise TypeError(f"{name} of a {chunk['type']}")


def _check_chunks(event: ev.AssistantMessage, chunks: list[Chunk]) -> None:
    """Refuse chunks that do not give the message they belong to.

    Raises:
        LogError: LOG_INVALID.
    """
    assembler = ResponseAssembler()
    where = f"event {event.seq} (assistant/message)"
    try:
        for chunk in chunks:
            _check_fields(chunk)
            assembler.add(chunk)
        finish = assembler.finish in _FINISHES and chunks[-1]["type"] == "finish"
        same = finish and assembler.content() == event.message["content"]
    except (InternalError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise LogError(f"{where}: its chunks are malformed: {type(error).__name__}: {error}") from error
    if assembler.usage is not None:
        _checked_usage(assembler.usage, event.seq)
    if not same:
        raise LogError(f"{where}: its chunks give another answer")


def chunks_of(content: list[Block] | list[JsonObject], finish: str, usage: Any) -> Iterator[Chunk]:
    """An answer as a stream: its blocks in pieces, its usage if it has one, and why it ended."""
    block: Any
    for index, block in enumerate(content):
        kind = block["type"]
        if kind not in ("text", "reasoning", "tool-call"):
            continue
        yield {"type": "block-start", "index": index, "blockType": kind}
        text = block["arguments"] if kind == "tool-call" else block["text"]
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = text[start : start + PIECE_CHARACTERS]
            if kind == "tool-call":
                call = {"id": block["id"], "name": block["name"], "argumentsDelta": piece}
                yield {"type": "tool-call-delta", "index": index, **call}
            else:
                yield {"type": f"{kind}-delta", "index": index, "text": piece}
        yield {"type": "block-end", "index": index, "block": block}
    if usage is not None:
        yield {"type": "usage", "usage": usage}
    yield _finish(finish)


def _finish(kind: str) -> Chunk:
    return {"type": "finish", "reason": {"kind": kind}}
