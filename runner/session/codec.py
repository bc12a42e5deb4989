"""Lines, packed rows and zstd frames: how events become bytes and bytes events.

Invariants: a line is compact JSON in UTF-8 with its keys in the order they were built; what cannot be
UTF-8 becomes U+FFFD; no reader holds more than one bounded line; a packed row and the deltas it stands
for are equal in every field. Readers go on after a zstd frame and say when the last one is unfinished.
"""

from __future__ import annotations

import itertools
import re
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import orjson

from runner.errors import InternalError, LogError
from runner.session.events import AssistantChunk, event_from_record

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from runner.messages import Chunk, JsonObject
    from runner.session.events import Event

MAX_WRITE_LINE = 8 * 1024 * 1024
"""Longest line a writer may write, in bytes with its newline."""

MAX_READ_LINE = 16 * 1024 * 1024
"""Longest line a reader takes, in bytes without its newline."""

ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"

_PLAIN_READ = 256 * 1024
_ZSTD_BLOCK = 32 * 1024
_ZSTD_READ = 1024  # bytes of a frame that can stand for at most 32 MiB of content
_ZSTD_PIECE = 64 * 1024
_MAX_WINDOW = 64 * 1024 * 1024
_MIN_ROW = 3
_LONE_SURROGATES = "[\ud800-\udfff]"  # compiled when it is needed, which is hardly ever
_MAX_INTEGER, _MIN_INTEGER = 2**64 - 1, -(2**63)


class _RowKind(NamedTuple):
    row: str
    delta: str
    part: str
    parts: str
    named: bool


_ROWS = (
    _RowKind("text-chunks", "text-delta", "text", "texts", named=False),
    _RowKind("reasoning-chunks", "reasoning-delta", "text", "texts", named=False),
    _RowKind("tool-call-chunks", "tool-call-delta", "argumentsDelta", "args", named=True),
)
_BY_ROW = {kind.row: kind for kind in _ROWS}
_BY_DELTA = {kind.delta: kind for kind in _ROWS}
DELTAS = frozenset(_BY_DELTA)
"""Types of the chunks that hold a piece of a block."""


# --- lines -------------------------------------------------------------------------------------


def encode_line(record: JsonObject) -> bytes:
    """One line of ``record``, newline included. Lone surrogates become U+FFFD.

    Raises:
        InternalError: The record holds something that is no JSON value.
    """
    line = encode_exact(record)
    if line is not None:
        return line
    try:
        return orjson.dumps(clean(record), option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        raise InternalError(f"a value cannot be written to the session log: {error}") from error


def encode_exact(record: JsonObject) -> bytes | None:
    """The line of ``record``, None when it cannot be written as it is (see ``clean``)."""
    try:
        return orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError:
        return None


def clean(value: Any) -> Any:
    """A copy of a JSON value that can be written: lone surrogates become U+FFFD, huge integers floats."""
    if isinstance(value, str):
        return re.sub(_LONE_SURROGATES, "\ufffd", value)
    if isinstance(value, dict):
        return {clean(key): clean(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [clean(item) for item in value]
    if isinstance(value, int) and not _MIN_INTEGER <= value <= _MAX_INTEGER:
        try:
            return float(value)
        except OverflowError:
            return None
    return value


def decode_line(line: bytes) -> JsonObject:
    """The JSON object of one line.

    Raises:
        LogError: LOG_INVALID, the line is no JSON object in UTF-8.
    """
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LogError(f"not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise LogError("not a JSON object")
    return record


class Lines:
    """The whole lines of a byte stream, without their newlines.

    ``number`` is the number of the line given last, from 1. After the last line ``torn`` is the number of
    bytes that stood behind the last newline.
    """

    def __init__(self, chunks: Iterable[bytes]) -> None:
        self.number = 0
        self.torn = 0
        self._chunks = chunks

    def __iter__(self) -> Iterator[bytes]:
        """Yield the lines.

        Raises:
            LogError: LOG_INVALID, a line is longer than 16 MiB.
        """
        parts: list[bytes] = []
        held = 0
        for chunk in self._chunks:
            start, end = 0, chunk.find(b"\n")  # several times as fast as split
            while end >= 0:
                line = chunk[start:end]
                if held:
                    line = b"".join((*parts, line))
                    parts, held = [], 0
                self.number += 1
                if len(line) > MAX_READ_LINE:
                    raise self._too_long(self.number)
                yield line
                start, end = end + 1, chunk.find(b"\n", end + 1)
            if start < len(chunk):
                parts.append(chunk[start:])
                held += len(chunk) - start
            if held > MAX_READ_LINE:
                raise self._too_long(self.number + 1)
        self.torn = held

    def _too_long(self, number: int) -> LogError:
        return LogError(f"line {number} is longer than {MAX_READ_LINE // 1024 // 1024} MiB")


def read_lines(stream: Readable) -> Lines:
    """The lines of a plain stream."""
    return Lines(plain_chunks(stream))


# --- streams -----------------------------------------------------------------------------------


class Readable(Protocol):
    """A binary stream, as far as it is needed."""

    def read(self, size: int, /) -> bytes:
        """The next bytes, at most ``size``; none at the end."""
        ...


def plain_chunks(stream: Readable) -> Iterator[bytes]:
    """The bytes of ``stream`` in pieces."""
    while chunk := stream.read(_PLAIN_READ):
        yield chunk


class ZstdChunks:
    """The decoded bytes of a stream of zstd frames, in pieces of at most 256 KiB.

    After the last piece ``unfinished`` says whether the input ended inside a frame. Everything that could
    be decoded before that was given.
    """

    def __init__(self, stream: Readable) -> None:
        self.unfinished = False
        self._stream = stream

    def __iter__(self) -> Iterator[bytes]:
        """Yield the pieces.

        Raises:
            LogError: LOG_INVALID, the data is no zstd frame or is damaged.
        """
        import zstandard

        factory = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        decoder, offset = factory.decompressobj(), 0
        held: list[bytes] = []
        size = 0
        while block := self._stream.read(_ZSTD_BLOCK):
            for start in range(0, len(block), _ZSTD_READ):
                data = block[start : start + _ZSTD_READ]
                offset += len(data)
                while data:
                    try:
                        decoded = decoder.decompress(data)
                    except zstandard.ZstdError as error:
                        yield from _pieces(held)
                        raise LogError(f"damaged zstd data before byte {offset}: {_reason(error)}") from error
                    held.append(decoded)
                    size += len(decoded)
                    if size >= _ZSTD_PIECE:
                        yield from _pieces(held)
                        held, size = [], 0
                    finished = decoder.eof
                    data = decoder.unused_data if finished else b""
                    self.unfinished = not finished
                    if finished:
                        decoder = factory.decompressobj()
        yield from _pieces(held)


def _pieces(held: list[bytes]) -> Iterator[bytes]:
    """The same bytes in pieces of a bounded size."""
    decoded = held[0] if len(held) == 1 else b"".join(held)
    if len(decoded) <= _PLAIN_READ:
        yield decoded
        return
    for start in range(0, len(decoded), _PLAIN_READ):
        yield decoded[start : start + _PLAIN_READ]


def _reason(error: Exception) -> str:
    return str(error).removeprefix("zstd decompressor error: ").lower()


def torn_note(lines: Lines, chunks: object) -> str | None:
    """What was dropped at the end of a stream that was read to its end, None if nothing was."""
    unfinished = isinstance(chunks, ZstdChunks) and chunks.unfinished
    if lines.torn:
        return f"dropped {lines.torn} bytes of a torn last record behind line {lines.number}"
    return f"the last zstd frame is unfinished; it ends whole behind line {lines.number}" if unfinished else None


# --- packed rows -------------------------------------------------------------------------------


class HeldChunk(NamedTuple):
    """One ``assistant/chunk`` that has its seq and time and is not written yet."""

    seq: int
    time: int
    turn: int
    step: int
    chunk: Chunk

    def event(self) -> AssistantChunk:
        """The event."""
        return AssistantChunk(turn=self.turn, step=self.step, chunk=self.chunk, seq=self.seq, time=self.time)


def _block_of(held: HeldChunk) -> tuple[Any, ...] | None:
    """What consecutive deltas of one block have in common; None for a chunk that cannot be packed."""
    chunk = held.chunk
    kind = _BY_DELTA.get(chunk.get("type", ""))
    if kind is None or type(chunk.get("index")) is not int or not isinstance(chunk.get(kind.part), str):
        return None
    if not kind.named:
        return (kind, held.turn, held.step, chunk["index"]) if len(chunk) == 3 else None
    if len(chunk) != 5 or not isinstance(chunk.get("id"), str) or not isinstance(chunk.get("name"), str):
        return None
    return kind, held.turn, held.step, chunk["index"], chunk["id"], chunk["name"]


def pack(chunks: Sequence[HeldChunk]) -> Iterator[JsonObject]:
    """Records for consecutive chunks: three or more deltas of one block become one row."""
    start = 0
    while start < len(chunks):
        block = _block_of(chunks[start])
        end = start + 1
        if block is not None:
            while end < len(chunks) and _block_of(chunks[end]) == block:
                end += 1
        if block is not None and end - start >= _MIN_ROW:
            yield _row(chunks[start:end], block[0])
        else:
            for held in chunks[start:end]:
                yield held.event().record()
        start = end


def _row(run: Sequence[HeldChunk], kind: _RowKind) -> JsonObject:
    first = run[0]
    data: JsonObject = {
        "turn": first.turn,
        "step": first.step,
        "index": first.chunk["index"],
        "dt": [later.time - earlier.time for earlier, later in itertools.pairwise(run)],
    }
    if kind.named:
        data["id"], data["name"] = first.chunk["id"], first.chunk["name"]
    data[kind.parts] = [held.chunk[kind.part] for held in run]
    return {"type": kind.row, "seq0": first.seq, "time0": first.time, "data": data}


class ChunkRow:
    """A packed row, checked: ``count`` deltas of one block, which are consecutive ``assistant/chunk`` events.

    ``seq`` is that of the first, ``time`` that of the last. It stands for its events where they are only counted
    and placed, which costs a fraction of building them.
    """

    __slots__ = ("_kind", "_record", "count", "seq", "step", "time", "turn")

    SURFACE = False
    TYPE = AssistantChunk.TYPE

    def __init__(self, record: JsonObject) -> None:
        """Check the row of ``record``.

        Raises:
            LogError: LOG_INVALID, it is malformed.
        """
        kind = self._kind = _BY_ROW[record["type"]]
        data, seq, time = record.get("data"), record.get("seq0"), record.get("time0")
        if type(seq) is not int or type(time) is not int or not isinstance(data, dict):
            raise LogError(f"{kind.row}: seq0, time0 or data is missing or of the wrong type")
        turn, step = data.get("turn"), data.get("step")
        parts, steps = data.get(kind.parts), data.get("dt")
        if type(turn) is not int or type(step) is not int or type(data.get("index")) is not int:
            raise LogError(f"event {seq} ({kind.row}): turn, step or index is no integer")
        if not isinstance(parts, list) or not isinstance(steps, list) or not parts or len(steps) != len(parts) - 1:
            raise LogError(f"event {seq} ({kind.row}): dt does not fit {kind.parts}")
        if kind.named and not (isinstance(data.get("id"), str) and isinstance(data.get("name"), str)):
            raise LogError(f"event {seq} ({kind.row}): id or name is no text")
        if not (_all_text(parts) and _INTEGER.issuperset(map(type, steps))):
            raise LogError(f"event {seq} ({kind.row}): a part of {kind.parts} or dt is of the wrong type")
        self._record = record
        self.seq, self.count, self.time = seq, len(parts), time + sum(steps)
        self.turn, self.step = turn, step

    def chunks(self) -> Iterator[HeldChunk]:
        """The chunks it stands for."""
        kind, data = self._kind, self._record["data"]
        head: JsonObject = {"type": kind.delta, "index": data["index"]}
        if kind.named:
            head["id"], head["name"] = data["id"], data["name"]
        times = itertools.accumulate(data["dt"], initial=self._record["time0"])
        for seq, time, part in zip(itertools.count(self.seq), times, data[kind.parts], strict=False):
            yield HeldChunk(seq, time, self.turn, self.step, {**head, kind.part: part})

    def records(self) -> list[JsonObject]:
        """The lines its events would have if they were not packed."""
        where = {"turn": self.turn, "step": self.step}
        return [
            {"type": self.TYPE, "seq": seq, "time": time, "data": {**where, "chunk": chunk}}
            for seq, time, _, _, chunk in self.chunks()
        ]

    def events(self) -> Iterator[AssistantChunk]:
        """The events it stands for."""
        for held in self.chunks():
            yield held.event()


_INTEGER = frozenset((int,))


def _all_text(parts: list[Any]) -> bool:
    """Whether all are text, found out by joining them: a look at the type of each takes four times as long."""
    try:
        "".join(parts)
    except TypeError:
        return False
    return True


def expand(record: JsonObject) -> Iterator[HeldChunk]:
    """The chunks a packed row stands for.

    Raises:
        LogError: LOG_INVALID, the row is malformed.
    """
    return ChunkRow(record).chunks()


def read_record(record: JsonObject, *, first: int) -> Event | ChunkRow:
    """The event of one decoded line, or the row that stands for several.

    Args:
        record: The line.
        first: The seq that the first event must have.

    Raises:
        LogError: LOG_INVALID or LOG_UNKNOWN_EVENT.
    """
    type_name = record.get("type")
    if isinstance(type_name, str) and type_name in _BY_ROW:
        if record.get("seq0") != first:
            raise LogError(f"seq0 is {record.get('seq0')}, expected {first}")
        return ChunkRow(record)
    event = event_from_record(record)
    if event.seq != first:
        raise LogError(f"seq is {event.seq}, expected {first}")
    return event


def events_of(record: JsonObject, *, first: int) -> Iterator[Event]:
    """The events of one decoded line: one, or those of a packed row; otherwise as ``read_record``."""
    read = read_record(record, first=first)
    if isinstance(read, ChunkRow):
        yield from read.events()
    else:
        yield read


# --- seal --------------------------------------------------------------------------------------

SEAL_END = b'"}}\n'


def seal_start(*, seq: int, time: int, lines: int) -> bytes:
    """A seal's line up to and including the opening quote of its ``sha256``."""
    return b'{"type":"log/seal","seq":%d,"time":%d,"ignorable":true,"data":{"lines":%d,"sha256":"' % (seq, time, lines)
