"""Spill: a result that is too long goes to a file whole, and its head and tail to the model.

The last stage of the tool pipeline: secrets are taken out first, so neither the log nor the file
holds one. What is kept depends only on the results of the step so far, in model order. A cut never
parts a code point. Writes no events; the spilled file stands in ``tool/result.meta``.
Prefix cache: none, a result is cut before it enters the history.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from typing import TYPE_CHECKING, NamedTuple

from runner.errors import StorageError
from runner.messages import text_of
from runner.session.tokens import IMAGE_TOKENS, cautious
from runner.tools.output import escape_chunks, file_stem, is_clean
from runner.tools.pipeline import Finalized

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from runner.agent.settings import CompactionSpec
    from runner.messages import ImageBlock, JsonObject, TextBlock
    from runner.redaction import Redactor, StreamRedactor

SMALL = 600
"""Bytes of a result that is never cut: what stands for a cut result is about as long."""

CANCELLED_BYTES = 4_000_000
"""Bytes of an output that are kept of it once the run is cancelled, since the rest of the run waits for them."""

_BLOCK = 1_000_000
_NAME = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]{0,99})(?:@(\d{1,15}))?")
_PAGE_MARGIN = 1_000
_CONTINUATION = bytes(range(0x80, 0xC0))


class SpillStore:
    """The whole texts of a session's long results, one file each.

    Args:
        directory: ``spill`` in the session's directory; made with the first file.
    """

    def __init__(self, directory: str) -> None:
        self._directory = os.path.realpath(directory)
        self._used: dict[str, int] = {}

    def write(self, call_id: str, chunks: Iterable[str]) -> tuple[str, JsonObject]:
        """Keep a text; returns the name it is read by and ``{path, bytes, sha256}``.

        Raises:
            StorageError: STORAGE_FAILED, it cannot be written.
        """
        digest, size = hashlib.sha256(), 0
        try:
            os.makedirs(self._directory, mode=0o700, exist_ok=True)  # noqa: PTH103  # pathlib is not loaded for this
            name, descriptor = self._open_new(file_stem(call_id))
            with os.fdopen(descriptor, "wb") as file:
                for chunk in chunks:
                    data = chunk.encode("utf-8", "backslashreplace")
                    digest.update(data)
                    size += len(data)
                    file.write(data)
        except OSError as error:
            raise StorageError(
                f"a long tool result cannot be kept in {self._directory}: {error.strerror}",
                hint="free space there, or give another --artifacts folder",
            ) from error
        return name, {"path": f"spill/{name}.txt", "bytes": size, "sha256": digest.hexdigest()}

    def _open_new(self, stem: str) -> tuple[str, int]:
        """A file that was not there before: models use one call id twice."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        while True:
            number = self._used[stem] = self._used.get(stem, 0) + 1
            name = stem if number == 1 else f"{stem}-{number}"
            with contextlib.suppress(FileExistsError):
                return name, os.open(f"{self._directory}/{name}.txt", flags, 0o600)

    def read(self, reference: str, offset: int, limit: int, max_bytes: int) -> JsonObject | str:
        """A page of a kept text, shaped as the worker's ``read``, or why there is none.

        Args:
            reference: Its name; ``NAME@N`` starts at byte N instead of a line.
            offset: First line, from 1.
            limit: Most lines.
            max_bytes: Most bytes.
        """
        from runner.sandbox.files import pages, places

        match = _NAME.fullmatch(reference)
        unknown = f"this session has no result spill:{reference[:100]}"
        if match is None:
            return unknown
        path = f"{self._directory}/{match[1]}.txt"
        try:
            if match[2] is not None:
                return _read_bytes(path, int(match[2]), max_bytes)
            return pages.read({"path": path, "offset": offset, "limit": limit, "max_bytes": max_bytes})
        except places.Refusal as refusal:
            return unknown if refusal.code == "NOT_FOUND" else str(refusal).replace(path, f"spill:{match[1]}")
        except OSError:
            return unknown


def _read_bytes(path: str, start: int, max_bytes: int) -> JsonObject | str:
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(start)
        data = file.read(max_bytes)
    if not data:
        return f"byte {start} is past the end: the result has {size} bytes"
    # Neither end may lie inside a code point: continuation bytes go, at the end with what they continue.
    text = data.lstrip(_CONTINUATION).decode("utf-8", "ignore")
    end = start + len(data)
    note = f"bytes {start} to {end} of {size}" + (f", read on with @{end}" if end < size else "")
    page: JsonObject = {"text": f"[{note}]\n{text}", "first": 1, "last": 1, "total": 1, "more": False}
    return {**page, "encoding": "utf-8", "crlf": False, "cut": None}


class _Ends(NamedTuple):
    """The ends of a text and the sizes of all of it."""

    head: str
    tail: str
    bytes: int
    lines: int


class Spill:
    """Bounds and redacts tool results.

    Args:
        store: Where whole texts go.
        spec: Thresholds.
        window: Context window in tokens.
        redactor: Takes known secrets out.
        cancelled: Whether the run was cancelled; a long output is then kept in part. Asked for each block of it.
    """

    def __init__(
        self,
        store: SpillStore,
        *,
        spec: CompactionSpec,
        window: int,
        redactor: Redactor,
        cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._store = store
        self._spec = spec
        self._window = window
        self._redactor = redactor
        self._cancelled = cancelled
        self._left = window // 4

    @property
    def page_bytes(self) -> int:
        """Most bytes of a page that tools may give without it being spilled (for ASCII text)."""
        return max(SMALL, min(self._spec.spill_bytes, self._window // 8 * 4) - _PAGE_MARGIN)

    def begin_step(self) -> None:
        """The results that follow belong to a new step, which has a quarter of the window for them."""
        self._left = self._window // 4

    def finalize(self, call_id: str, content: Sequence[TextBlock | ImageBlock], overflow: str | None) -> Finalized:
        """Redact and bound one result.

        ``overflow`` is a file with all bytes of which the first block holds a part; it is removed.

        Raises:
            StorageError: STORAGE_FAILED, the whole text cannot be kept.
        """
        if overflow is not None:
            try:
                return self._finalize_file(call_id, content, overflow)
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(overflow)  # noqa: PTH108  # pathlib is not loaded for this
        redactions = 0
        blocks: list[TextBlock | ImageBlock] = []
        for block in content:
            if block["type"] == "text":
                text, count = self._redactor.text(block["text"])
                redactions += count
                block = {"type": "text", "text": text}  # noqa: PLW2901  # the raw text must not be used any more
            blocks.append(block)
        blocks = self._bounded_images(blocks)
        shown = sum(block["bytes"] for block in blocks if block["type"] == "image")
        whole = text_of(blocks)
        size, tokens = len(whole.encode("utf-8", "backslashreplace")), cautious(whole)
        if size <= SMALL or (size <= self._spec.spill_bytes and tokens <= min(self._window // 8, self._left)):
            self._left -= tokens
            return Finalized(blocks, size + shown, redactions=redactions)
        name, spill = self._store.write(call_id, [whole])
        ends = _ends_of([whole], self._spec.spill_head, self._spec.spill_tail)
        cut = self._cut(name, ends)
        kept: list[TextBlock | ImageBlock] = [{"type": "text", "text": cut}]
        kept += [block for block in blocks if block["type"] != "text"]
        return Finalized(kept, size + shown, truncated=True, spill=spill, redactions=redactions)

    def _bounded_images(self, blocks: list[TextBlock | ImageBlock]) -> list[TextBlock | ImageBlock]:
        """The blocks, without images for which the step has no room left; a text says so."""
        kept: list[TextBlock | ImageBlock] = []
        for block in blocks:
            if block["type"] == "text" or self._left >= IMAGE_TOKENS:
                self._left -= IMAGE_TOKENS if block["type"] == "image" else 0
                kept.append(block)
            else:
                text = f"[{block['mediaType']} left out: the results of this step are too long; read it in a later one]"
                kept.append({"type": "text", "text": text})
        return kept

    def _finalize_file(self, call_id: str, content: Sequence[TextBlock | ImageBlock], overflow: str) -> Finalized:
        """The same for an output that was never held whole: read, redacted and written in one pass."""
        notes = text_of(list(content[1:]))
        stream = self._redactor.stream()
        ends = _Collector(self._spec.spill_head, self._spec.spill_tail)
        checked = _Blocks(overflow, self._cancelled)
        blocks = _Blocks(overflow, self._cancelled)
        try:
            texts = _decoded(blocks) if is_clean(checked) else escape_chunks(blocks)
            name, spill = self._store.write(call_id, ends.watch(_redacted(stream, texts)))
        except OSError as error:
            raise StorageError(f"a long output cannot be read back: {error.strerror}") from error
        cut = self._cut(name, ends.ends())
        if blocks.left:
            notes = (
                f"[{blocks.left} more bytes of the output were not kept, since the run was cancelled]\n{notes}".strip()
            )
        notes, count = self._redactor.text(notes)
        kept: list[TextBlock | ImageBlock] = [{"type": "text", "text": f"{cut}\n{notes}" if notes else cut}]
        kept += [block for block in content[1:] if block["type"] != "text"]
        return Finalized(kept, spill["bytes"], truncated=True, spill=spill, redactions=stream.count + count)

    def _cut(self, name: str, ends: _Ends) -> str:
        """Head, what is left out and how to get it, tail; within what the step has left."""
        spec = self._spec
        room = max(0, min(self._window // 16, self._left - SMALL // 4))
        share = room * spec.spill_head // max(1, spec.spill_head + spec.spill_tail)
        head = _within(ends.head, share)
        tail = _within(ends.tail[::-1], room - share)[::-1]
        head_bytes, tail_bytes = len(head.encode("utf-8")), len(tail.encode("utf-8"))
        first = head.count("\n") + 1
        last = ends.lines - max(0, tail.count("\n") - tail.endswith("\n"))
        text = (
            f"[{ends.bytes - head_bytes - tail_bytes} of {ends.bytes} bytes are left out here, lines {first} to {last}"
            f" of {ends.lines}; read_file with path spill:{name} and offset {first} gives them"
        )
        if ends.bytes > 2_000 * ends.lines:
            text += f", path spill:{name}@{head_bytes} from a byte on"
        gap = "" if not head or head.endswith("\n") else "\n"
        cut = f"{head}{gap}{text}]\n{tail}"
        self._left -= cautious(cut)
        return cut


def _within(text: str, tokens: int) -> str:
    """The start of ``text`` that takes at most ``tokens`` by the cautious estimate."""
    if cautious(text) <= tokens:
        return text
    low, high = 0, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if cautious(text[:middle]) <= tokens else (low, middle - 1)
    return text[:low]


def _ends_of(chunks: Iterable[str], head: int, tail: int) -> _Ends:
    collector = _Collector(head, tail)
    for _ in collector.watch(chunks):
        pass
    return collector.ends()


class _Collector:
    """Keeps the first ``head`` and the last ``tail`` UTF-8 bytes of what goes by, in whole code points."""

    def __init__(self, head: int, tail: int) -> None:
        self._head_size = head
        self._tail_size = tail
        self._head = b""
        self._tail = b""
        self._bytes = 0
        self._lines = 0
        self._last = ""

    def watch(self, chunks: Iterable[str]) -> Iterator[str]:
        """Hand the chunks on."""
        for chunk in chunks:
            data = chunk.encode("utf-8", "backslashreplace")
            self._bytes += len(data)
            self._lines += chunk.count("\n")
            self._last = chunk[-1:] or self._last
            missing = max(0, self._head_size - len(self._head))
            self._head += data[:missing]
            self._tail = (self._tail + data[missing:])[-self._tail_size :] if self._tail_size else b""
            yield chunk

    def ends(self) -> _Ends:
        """The ends of all that went by."""
        head = self._head.decode("utf-8", "ignore")
        tail = self._tail.lstrip(_CONTINUATION).decode("utf-8", "ignore")
        lines = self._lines + (self._last not in ("", "\n"))
        return _Ends(head, tail, self._bytes, lines)


def _redacted(stream: StreamRedactor, chunks: Iterable[str]) -> Iterator[str]:
    for chunk in chunks:
        yield stream.feed(chunk)
    yield stream.finish()


class _Blocks:
    """The bytes of a file; after a cancellation no more of it than ``CANCELLED_BYTES``.

    Attributes:
        left: Bytes that were not given for that.
    """

    def __init__(self, path: str, cancelled: Callable[[], bool]) -> None:
        self._path = path
        self._cancelled = cancelled
        self.left = 0

    def __iter__(self) -> Iterator[bytes]:
        with open(self._path, "rb") as file:  # noqa: PTH123  # pathlib is not loaded for this
            while block := file.read(_BLOCK):
                yield block
                if file.tell() >= CANCELLED_BYTES and self._cancelled():
                    self.left = os.fstat(file.fileno()).st_size - file.tell()
                    return


def _decoded(blocks: Iterable[bytes]) -> Iterator[str]:
    import codecs

    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in blocks:
        yield decoder.decode(block)
