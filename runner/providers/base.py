"""What the loop needs of a model provider.

Prefix cache: a dialect fixes one key order with configuration, tools and system
before the messages, so that body N without its closing brackets is a byte prefix of body N+1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from runner.record import field, record
from runner.session.media import no_media

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from runner.cancellation import Cancellation
    from runner.messages import Chunk, Message, RequestHeader
    from runner.session.media import Media


@record
class Prices:
    """Money per million tokens in ``currency``; None is unknown, never free."""

    input: float | None = None
    cache_read: float | None = None
    cache_write: float | None = None
    output: float | None = None
    currency: str = "USD"


@record
class ModelSpec:
    """Resolved settings of the model. Sizes in tokens, times in seconds."""

    provider: str
    model: str
    base_url: str | None = None
    api_key_env: str | None = None
    api_key_file: str | None = None
    context_window: int = 128_000
    max_output_tokens: int = 32_000
    temperature: float | None = None
    tool_choice: str | None = None
    images: bool = False
    proxy: str | None = None
    first_token: float = 60.0
    idle: float = 120.0
    script: str | None = None
    replay: str | None = None
    replay_normalise: tuple[str, ...] = ()
    prices: Prices = field(default_factory=Prices)


class Dialect(Protocol):
    """How one API writes a request body. Pure: the same input gives the same bytes.

    ``open(header)``, each fragment with a comma before it, and ``close`` are the body; a fragment is one or
    more comma-joined JSON values. ``whole`` builds the same body by one serialisation of one value
    and shares no code with the fragments' joining, so that the two can be compared.
    ``media`` gives the bytes of images.
    """

    name: str
    close: bytes

    def open(self, header: RequestHeader) -> bytes:
        """Everything up to and including the system message, no comma behind it."""
        ...

    def fragments(self, messages: Iterable[Message], media: Media = no_media) -> Iterator[bytes]:
        """The bytes of the messages that a request has beyond the one before; a message may have none.

        The results of one step come together in one call, so that what belongs behind the last of them can be
        put there.
        """
        ...

    def whole(self, header: RequestHeader, messages: Sequence[Message], media: Media = no_media) -> bytes:
        """The whole body, serialised anew."""
        ...


class Provider(Protocol):
    """A model that answers requests as a stream of chunks."""

    name: str
    dialect: Dialect

    def stream(self, body: bytes, *, cancellation: Cancellation) -> Iterator[Chunk]:
        """Send one request and yield its chunks; the last one is ``finish``.

        Raises:
            ProviderError: The request failed, before or inside the stream. After a cancellation
                the iterator ends early, without ``finish`` and without an error.
        """
        ...

    def close(self) -> None:
        """Free connections. May be called more than once."""
        ...
