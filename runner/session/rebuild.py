"""Request bodies rebuilt from a log alone.

Pure but for a temporary file that holds the messages, so that memory does not grow with the log. The
body of a ``request/sent`` of purpose main is its dialect's form of the last ``request/header`` and the
fold of all events before it.
Prefix cache: no effect; it shows what the effect was.
"""

from __future__ import annotations

import hashlib
import tempfile
from array import array
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

import orjson

from runner.errors import ConfigError, LogError
from runner.figures import counted
from runner.session.events import (
    AssistantMessage,
    RequestHeaderEvent,
    RequestSent,
    StepStart,
    ToolResult,
    UserMessage,
)
from runner.session.media import MissingMediaError, no_media
from runner.session.projection import derive_messages, message_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from runner.messages import Message, RequestHeader
    from runner.session.events import Event
    from runner.session.media import Media
    from runner.session.surface import Span

_IN_MEMORY = 8 * 1024 * 1024
_WHOLE_LIMIT = 16 * 1024 * 1024


class BodyDialect(Protocol):
    """What is needed of a provider's dialect; see ``runner.providers.base.Dialect``."""

    @property
    def close(self) -> bytes:
        """What ends a body."""
        ...

    def open(self, header: RequestHeader) -> bytes:
        """What begins a body, system message included."""
        ...

    def fragments(self, messages: Iterable[Message], media: Media) -> Iterator[bytes]:
        """The bytes of the messages that a request has beyond the one before."""
        ...

    def whole(self, header: RequestHeader, messages: Sequence[Message], media: Media) -> bytes:
        """The whole body, serialised anew."""
        ...


class SentBody(NamedTuple):
    """One request as it was sent: its event, and its body rebuilt and compared."""

    event: RequestSent
    data: bytes


class BodyCheck:
    """Compares every rebuildable ``request/sent`` of a log with its body, in one pass.

    Every body is hashed from the messages in the log, each fragment made once. At the first request,
    after each replace and header change and at steps 1, 2, 4, 8 and so on the body is serialised as a
    whole as well. ``checked`` and ``not_checked`` count requests.
    """

    KINDS = frozenset((UserMessage, AssistantMessage, ToolResult, RequestHeaderEvent, RequestSent))
    """Events that count; others need not be given."""

    def __init__(self, dialects: Mapping[str, BodyDialect], media: Media = no_media) -> None:
        self._media = media
        self.checked = 0
        self.not_checked = 0
        self._dialects = dialects
        self._header: RequestHeader | None = None
        self._store = _MessageStore()
        self._dialect: BodyDialect | None = None
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._hashed: int | None = None

    def __enter__(self) -> Self:
        """Return the check itself."""
        return self

    def __exit__(self, *_: object) -> None:
        self._store.close()

    def apply(self, event: Event, size: int, span: Span | None) -> None:
        """Fold one event.

        Args:
            event: The event.
            size: Bytes of its line.
            span: What it replaced, if it is a message that replaces others.

        Raises:
            LogError: LOG_INVALID, a request's body is not what the log says.
        """
        if event.SURFACE:
            message = message_of(event)
            if message is not None:
                self._store.put(message, size, span)
                if span is not None:
                    self._hashed = None
        elif isinstance(event, RequestHeaderEvent):
            self._header, self._hashed = event.header, None
        elif isinstance(event, RequestSent):
            self._check(event)

    def _check(self, event: RequestSent) -> None:
        dialect = self._dialects.get(event.dialect)
        if event.purpose != "main" or dialect is None:
            self.not_checked += 1
            return
        if self._header is None:
            raise LogError(f"event {event.seq} (request/sent): no request/header stands before it")
        try:
            self._compare(event, dialect, self._header)
        except MissingMediaError:
            self._hashed = None
            self.not_checked += 1
            return
        except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
            raise LogError(f"event {event.seq} (request/sent): its body cannot be rebuilt: {error!r}") from error
        self.checked += 1

    def _compare(self, event: RequestSent, dialect: BodyDialect, header: RequestHeader) -> None:
        anew = self._hashed is None or dialect is not self._dialect
        thorough = (anew or event.step & (event.step - 1) == 0) and self._store.bytes <= _WHOLE_LIMIT
        if anew:
            opening = dialect.open(header)
            self._dialect, self._hashed = dialect, 0
            self._hash, self._bytes = hashlib.sha256(opening), len(opening)
        every = list(self._store.read(0)) if thorough else None
        new = self._store.read(self._hashed or 0) if every is None else every[self._hashed :]
        for fragment in dialect.fragments(new, self._media):
            self._hash.update(b",")
            self._hash.update(fragment)
            self._bytes += len(fragment) + 1
        self._hashed = len(self._store)
        body = self._hash.copy()
        body.update(dialect.close)
        _require_same(event, body.hexdigest(), self._bytes + len(dialect.close))
        if every is not None:
            data = dialect.whole(header, every, self._media)
            _require_same(event, hashlib.sha256(data).hexdigest(), len(data))


def request_body(
    events: Iterable[Event],
    *,
    step: int,
    attempt: int | None,
    dialects: Mapping[str, BodyDialect],
    media: Media = no_media,
) -> SentBody:
    """The body of the main request of the ``step``-th step, rebuilt and compared with what was sent.

    Args:
        events: All events of the session.
        step: Which ``step/start`` of the session, from 1.
        attempt: Which attempt, from 1; None is the last one.
        dialects: Dialects by name.
        media: Gives the bytes of images.

    Raises:
        ConfigError: CONFIG_INVALID, there is no such step or attempt.
        LogError: LOG_INVALID, the body is not what was sent, or its dialect is not known.
    """
    before: list[Event] = []
    header: RequestHeader | None = None
    steps = 0
    found: tuple[RequestSent, RequestHeader | None, int] | None = None
    for event in events:
        steps += isinstance(event, StepStart)
        if steps > step:
            break
        if isinstance(event, RequestHeaderEvent):
            header = event.header
        elif isinstance(event, RequestSent) and steps == step and event.purpose == "main":
            if attempt is None or event.attempt == attempt:
                found = event, header, len(before)
        elif event.SURFACE:
            before.append(event)
    if found is None:
        which = f"step {step}" if attempt is None else f"attempt {attempt} of step {step}"
        raise ConfigError(
            f"the session has no main request for {which}",
            hint=f"it has {counted(steps, 'step')}"
            if steps < step
            else "not every step sends a request, nor every log records it",
        )
    sent, header, length = found
    dialect = dialects.get(sent.dialect)
    if dialect is None or header is None:
        raise LogError(f"event {sent.seq} (request/sent): no dialect {sent.dialect!r}, or no request/header before it")
    try:
        data = dialect.whole(header, derive_messages(before[:length]), media)
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        raise LogError(f"event {sent.seq} (request/sent): its body cannot be rebuilt: {error!r}") from error
    _require_same(sent, hashlib.sha256(data).hexdigest(), len(data))
    return SentBody(sent, data)


def _require_same(event: RequestSent, sha256: str, size: int) -> None:
    if sha256 != event.sha256 or size != event.bytes:
        raise LogError(
            f"event {event.seq} (request/sent): the body rebuilt from the log is not the one that was sent",
            details={"sent": event.sha256, "rebuilt": sha256, "sentBytes": event.bytes, "rebuiltBytes": size},
        )


class _MessageStore:
    """The messages of the surface, in order; once they are many, their JSON in a temporary file.

    ``bytes`` is the length of their lines.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._messages: list[Message] = []
        self._lengths = array("q")
        self._places: list[tuple[int, int]] | None = None
        self._file: Any = None
        self._end = 0

    def __len__(self) -> int:
        return len(self._lengths)

    def put(self, message: Message, size: int, span: Span | None) -> None:
        """Add a message, whose line has ``size`` bytes, in place of a span of positions if one is given."""
        where = slice(len(self), len(self)) if span is None else slice(span.start, span.end)
        self.bytes += size - sum(self._lengths[where])
        self._lengths[where] = array("q", (size,))
        if self._places is None:
            self._messages[where] = [message]
            if self.bytes > _IN_MEMORY:
                self._move(self._messages)
                self._messages = []
        else:
            data = orjson.dumps(message)
            self._file.seek(self._end)
            self._places[where] = [(self._end, self._file.write(data))]
            self._end += len(data)
            if self._end > _IN_MEMORY and self._end > 4 * self.bytes:
                self._move(self.read(0))

    def read(self, start: int) -> Iterator[Message]:
        """Yield the messages from a position on."""
        if self._places is None:
            yield from self._messages[start:]
            return
        for offset, length in self._places[start:]:
            self._file.seek(offset)
            message: Message = orjson.loads(self._file.read(length))
            yield message

    def close(self) -> None:
        """Free the file."""
        if self._file is not None:
            self._file.close()

    def _move(self, messages: Iterable[Message]) -> None:
        """Write the messages that still count into a new file."""
        fresh, places, end = tempfile.TemporaryFile(), [], 0  # noqa: SIM115  # closed by close
        for message in messages:
            data = orjson.dumps(message)
            places.append((end, fresh.write(data)))
            end += len(data)
        self.close()
        self._file, self._places, self._end = fresh, places, end
