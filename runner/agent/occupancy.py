"""How full the context window is: the real usage of the last request plus an estimate of what changed.

Pure; writes no events and has no effect on the prefix cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.messages import total_tokens
from runner.session import tokens

if TYPE_CHECKING:
    from runner.messages import RequestHeader, Usage
    from runner.session.projection import Projection


class Occupancy:
    """Tokens of the next request: the real usage of the last one plus the estimate of what changed."""

    def __init__(self) -> None:
        self._base = 0
        self._base_estimate = 0
        self._header: RequestHeader | None = None
        self._estimate = 0
        self._messages = 0
        self._generation = -1

    def _estimated(self, projection: Projection) -> int:
        if projection.generation != self._generation:
            self._generation, self._messages, self._estimate = projection.generation, 0, 0
        messages = projection.messages
        for index in range(self._messages, len(messages)):
            self._estimate += tokens.estimate_message(messages[index], tokens.cautious)
        self._messages = len(messages)
        return self._estimate

    def anchor(self, usage: Usage, header: RequestHeader, projection: Projection) -> None:
        """Take the usage of a successful call whose answer is the projection's last message."""
        self._base = total_tokens(usage)
        self._base_estimate = self._estimated(projection)
        self._header = header

    def of(self, header: RequestHeader, projection: Projection) -> int:
        """Tokens of a request with ``header`` over the projection as it is now."""
        estimate = self._estimated(projection)
        if self._header is None:
            return tokens.estimate_header(header, tokens.cautious) + estimate
        return max(0, self._base + estimate - self._base_estimate)
