"""Takes known secrets out of a model's answer, and of what a failed request says, before anything is logged.

A call whose arguments held one is remembered, so that the pipeline can refuse it. Effect on the
prefix cache: none, the history holds what was logged from the start.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.errors import ProviderError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from runner.cancellation import Cancellation
    from runner.messages import Chunk
    from runner.providers.base import Dialect, Provider
    from runner.redaction import Redactor, StreamRedactor

_TEXT = {"text-delta": "text", "reasoning-delta": "text", "tool-call-delta": "argumentsDelta"}


class RedactingProvider:
    """A provider whose answers hold no known secret.

    Args:
        provider: The provider that is asked.
        redactor: Knows the secrets.
        report: Called after an answer with the number of secrets taken out, if there were any.
    """

    def __init__(self, provider: Provider, redactor: Redactor, *, report: Callable[[int], object]) -> None:
        self.name = provider.name
        self.dialect: Dialect = provider.dialect
        self.tainted: set[str] = set()
        self._provider = provider
        self._redactor = redactor
        self._report = report

    def stream(self, body: bytes, *, cancellation: Cancellation) -> Iterator[Chunk]:
        """The provider's chunks, redacted; deltas may be held back until a secret can be told.

        Raises:
            ProviderError: The provider's, redacted.
        """
        try:
            yield from self._redacted(self._provider.stream(body, cancellation=cancellation))
        except ProviderError as error:
            raise self._said(error) from None

    def _said(self, error: ProviderError) -> ProviderError:
        """The error with everything in it that the other side may have said (its cause too) without secrets."""
        clean = self._redactor.text
        return ProviderError(
            clean(error.message)[0],
            code=error.code,
            hint=None if error.hint is None else clean(error.hint)[0],
            retryable=error.retryable,
            status=error.status,
            retry_after=error.retry_after,
            kind=clean(error.kind)[0],
        )

    def _redacted(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        streams: dict[int, tuple[StreamRedactor, Chunk]] = {}
        taken = 0
        for raw in chunks:
            kind = raw["type"]
            texts = {key: raw[key] for key in (_TEXT.get(kind), "block") if key in raw}
            # Ids, names, reasons: all but the text that may come in pieces and the block that repeats it.
            rest, _ = self._redactor.value({key: value for key, value in raw.items() if key not in texts})
            chunk: Any = {**raw, **rest}
            if kind in _TEXT:
                stream, _ = streams.get(chunk["index"]) or (self._redactor.stream(), chunk)
                streams[chunk["index"]] = (stream, chunk)
                piece = stream.feed(chunk[_TEXT[kind]])
                if piece or not chunk[_TEXT[kind]]:
                    yield {**chunk, _TEXT[kind]: piece}
            elif kind == "block-end":
                held = streams.pop(chunk["index"], None)
                if held is not None and (rest := held[0].finish()):
                    yield {**held[1], _TEXT[held[1]["type"]]: rest}
                block, count = self._redactor.value(chunk["block"])
                if count and block["type"] == "tool-call":
                    self.tainted.add(block["id"])
                taken += count
                yield {**chunk, "block": block}
            else:
                yield chunk
        if taken:
            self._report(taken)

    def close(self) -> None:
        """Close the provider that is asked."""
        self._provider.close()
