"""The one background thread of the process that serves session logs.

It brings logs to stable storage when asked to, and writes held chunks whose time is over. It sleeps
while nothing is due and never holds its own lock while it calls a log.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import Protocol


class Served(Protocol):
    """What the committer needs of a log."""

    hold_until: float | None
    """Monotonic time at which held chunks must be written, None when none are held."""

    def write_overdue(self) -> None:
        """Write the held chunks if their time is over. Never raises a RunnerError."""

    def sync(self) -> None:
        """Bring what is written to stable storage. Never raises a RunnerError."""


class Committer:
    """Queue of syncs and deadlines; the thread starts with the first of them."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._syncs: set[Served] = set()
        self._watched: set[Served] = set()
        self._sleeps_until: float | None = None
        self._thread: threading.Thread | None = None

    def schedule(self, log: Served) -> None:
        """Call ``sync`` of ``log`` soon."""
        with self._wake:
            self._syncs.add(log)
            self._start()
            self._wake.notify()

    def watch(self, log: Served) -> None:
        """Call ``write_overdue`` of ``log`` when its ``hold_until`` is reached."""
        with self._wake:
            self._watched.add(log)
            self._start()
            if self._sleeps_until is None:  # else it wakes before this log's time and looks again
                self._wake.notify()

    def _start(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="session-log-committer", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._syncs and not self._overdue():
                    self._sleep()
                syncs, overdue = self._syncs, self._overdue()
                self._syncs = set()
            for log in overdue:
                log.write_overdue()
            for log in syncs:
                log.sync()

    def _overdue(self) -> list[Served]:
        now = monotonic()
        return [log for log in self._watched if (until := log.hold_until) is not None and until <= now]

    def _sleep(self) -> None:
        self._watched = {log for log in self._watched if log.hold_until is not None}
        self._sleeps_until = min(
            (until for log in self._watched if (until := log.hold_until) is not None), default=None
        )
        self._wake.wait(None if self._sleeps_until is None else max(0.0, self._sleeps_until - monotonic()))
        self._sleeps_until = None
