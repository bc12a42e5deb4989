"""One-way cancellation that is safe to trigger from a signal handler.

Whoever blocks waits on ``fileno()`` beside its own descriptors. No lock is taken on any path, since a handler
may interrupt the thread that would hold it.
"""

from __future__ import annotations

import os
import select


class Cancellation:
    """A flag that goes up once, with the reason of the first caller."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._reason: str | None = None

    @property
    def cancelled(self) -> bool:
        """Whether the flag is up."""
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Why, for example ``SIGTERM``; None while the flag is down."""
        return self._reason

    def fileno(self) -> int:
        """A descriptor that becomes readable when the flag goes up. Never read from it."""
        return self._read

    def cancel(self, reason: str) -> None:
        """Raise the flag; later calls change nothing."""
        if self._reason is not None:
            return
        self._reason = reason
        os.write(self._write, b"x")

    def wait(self, seconds: float | None) -> bool:
        """Sleep until the flag goes up or ``seconds`` have passed; returns whether it is up."""
        if not self.cancelled:
            poll = select.poll()
            poll.register(self._read, select.POLLIN)
            poll.poll(None if seconds is None else max(0, seconds) * 1000)
        return self.cancelled

    def close(self) -> None:
        """Free the descriptors. The object must not be used for waiting afterwards."""
        for descriptor in (self._read, self._write):
            os.close(descriptor)
        self._read = self._write = -1
