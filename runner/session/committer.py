"""The one background thread of the process that serves session logs.

It writes held chunks and brings logs to stable storage when their time has come. It sleeps while
nothing is due and never holds its own lock while it calls a log.
"""

from __future__ import annotations

import threading
from time import monotonic
from typing import Protocol


class Served(Protocol):
    """What the committer needs of a log."""

    @property
    def due(self) -> float | None:
        """Monotonic time at which the log must be served, None when there is nothing to do."""
        ...

    def serve(self) -> None:
        """Do what is due. Never raises a RunnerError."""


class Committer:
    """Waits for the first of the times at which logs are due; the thread starts with the first of them."""

    def __init__(self) -> None:
        self._wake = threading.Condition()
        self._watched: set[Served] = set()
        self._sleeps_until: float | None = None
        self._thread: threading.Thread | None = None

    def watch(self, log: Served) -> None:
        """Call ``serve`` of ``log`` when it is due."""
        with self._wake:
            self._watched.add(log)
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="session-log-committer", daemon=True)
                self._thread.start()
            due = log.due
            if due is not None and (self._sleeps_until is None or due < self._sleeps_until):
                self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while not (ready := self._ready()):
                    self._sleep()
            for log in ready:
                log.serve()

    def _ready(self) -> list[Served]:
        now = monotonic()
        return [log for log in self._watched if (due := log.due) is not None and due <= now]

    def _sleep(self) -> None:
        times = {log: due for log in self._watched if (due := log.due) is not None}
        self._watched = set(times)
        self._sleeps_until = min(times.values(), default=None)
        self._wake.wait(None if self._sleeps_until is None else max(0.0, self._sleeps_until - monotonic()))
        self._sleeps_until = None
