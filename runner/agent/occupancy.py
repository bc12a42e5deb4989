"""How full the context window is: the real usage of the last request plus an estimate of what changed.

Pure; writes no events. Invariants: what a provider counted is never estimated again; numbers of ours are no
count, so a usage that is marked as estimated anchors nothing; a step costs what is new in it.
Prefix cache: no effect.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runner.messages import total_tokens
from runner.session import tokens

if TYPE_CHECKING:
    from collections.abc import Iterable

    from runner.messages import Message, RequestHeader, Usage
    from runner.session.projection import Projection


DOUBT = 6
"""The part of what is estimated, as its divisor, by which a request may be longer than it is taken for."""


class Occupancy:
    """Tokens of the next request, by the cautious measure where they are estimated."""

    def __init__(self) -> None:
        self._anchored = False
        self._base = 0
        self._base_estimate = 0
        self._header: RequestHeader | None = None
        self._header_estimate = 0
        self._estimate = 0
        self._messages = 0
        self._generation = -1

    def _estimated(self, header: RequestHeader, projection: Projection) -> int:
        """The estimate of a whole request."""
        if projection.generation != self._generation:
            self._generation, self._messages, self._estimate = projection.generation, 0, 0
        messages = projection.messages
        for index in range(self._messages, len(messages)):
            self._estimate += tokens.estimate_message(messages[index], tokens.cautious)
        self._messages = len(messages)
        return self._estimate + self._estimated_header(header)

    def _estimated_header(self, header: RequestHeader) -> int:
        """The estimate of system prompt and tools, made once while they stay what they are."""
        kept = self._header
        if kept is None or header["system"] != kept["system"] or header["tools"] != kept["tools"]:
            self._header_estimate = tokens.estimate_header(header, tokens.cautious)
        self._header = header
        return self._header_estimate

    def anchor(self, usage: Usage, header: RequestHeader, projection: Projection) -> None:
        """Take the usage of a successful call whose answer is the projection's last message."""
        if usage.get("estimated"):
            return
        self._anchored = True
        self._base = total_tokens(usage)
        self._base_estimate = self._estimated(header, projection)

    def of(self, header: RequestHeader, projection: Projection) -> int:
        """Tokens of a request with ``header`` over the projection as it is now."""
        estimate = self._estimated(header, projection)
        return max(0, self._base + estimate - self._base_estimate) if self._anchored else estimate

    def doubt(self, header: RequestHeader, projection: Projection) -> int:
        """Tokens by which the next request may be longer than ``of`` says: a part of what no provider has counted.

        A provider that counted more than was estimated before will do so again.
        """
        estimate = self._estimated(header, projection)
        if not self._anchored:
            return estimate // DOUBT
        new = abs(estimate - self._base_estimate)
        denser = max(0.0, self._base / max(1, self._base_estimate) - 1)
        return math.ceil(new * (denser + 1 / DOUBT))

    def of_messages(self, header: RequestHeader, projection: Projection, messages: Iterable[Message]) -> int:
        """Tokens of a request with ``header`` over ``messages``, most of which are the projection's."""
        asked = sum(tokens.estimate_message(message, tokens.cautious) for message in messages)
        return max(0, self.of(header, projection) - self._estimate + asked)
