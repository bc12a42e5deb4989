"""Request bodies, kept as bytes and extended by what is new.

Prefix cache: a body is the previous body without its closing brackets plus new
fragments, unless the header changed or compaction replaced a part of the history.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, NamedTuple

from runner.errors import InternalError
from runner.session.projection import derive_messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.messages import RequestHeader
    from runner.providers.base import Dialect
    from runner.session.events import Event
    from runner.session.media import Media
    from runner.session.projection import Projection


class Body(NamedTuple):
    """A finished request body and the hex SHA-256 of its bytes."""

    data: bytes
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> Body:
        """A body with its digest."""
        return cls(data, hashlib.sha256(data).hexdigest())


class RequestBody:
    """The kept bytes of one conversation under one header."""

    def __init__(self, dialect: Dialect, media: Media) -> None:
        self._dialect = dialect
        self._media = media
        self._header: RequestHeader | None = None
        self._kept = bytearray()
        self._hash = hashlib.sha256()
        self._messages = 0
        self._generation = -1

    def update(self, header: RequestHeader, projection: Projection) -> Body:
        """The body for the projection as it is now; costs what is new since the last call."""
        if header is not self._header or projection.generation != self._generation:
            self._header, self._generation, self._messages = header, projection.generation, 0
            self._kept = bytearray(self._dialect.open(header))
            self._hash = hashlib.sha256(self._kept)
        messages = projection.messages
        for fragment in self._dialect.fragments(messages[self._messages :], self._media):
            self._kept += b"," + fragment
            self._hash.update(b",")
            self._hash.update(fragment)
        self._messages = len(messages)
        whole = self._hash.copy()
        whole.update(self._dialect.close)
        return Body(b"".join((self._kept, self._dialect.close)), whole.hexdigest())


def whole_body(dialect: Dialect, header: RequestHeader, events: Sequence[Event], media: Media) -> Body:
    """The body rebuilt from events alone: folded anew, serialised anew, nothing kept is used."""
    return Body.of(dialect.whole(header, derive_messages(events), media))


def check_rebuild(body: Body, dialect: Dialect, header: RequestHeader, events: Sequence[Event], media: Media) -> None:
    """Compare a body about to be sent with its rebuild from the log's events.

    Raises:
        InternalError: They differ; nothing may be sent.
    """
    rebuilt = whole_body(dialect, header, events, media)
    if rebuilt.sha256 != body.sha256:
        at = next(
            (i for i, (a, b) in enumerate(zip(body.data, rebuilt.data, strict=False)) if a != b),
            min(len(body.data), len(rebuilt.data)),
        )
        raise InternalError(
            f"the request is not what the log says: the bodies differ at byte {at}",
            details={"sent": body.sha256, "rebuilt": rebuilt.sha256},
        )
