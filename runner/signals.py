"""Signals that cancel a run: SIGINT, SIGTERM and SIGHUP alike.

The first one raises the run's cancellation, the second ends the process at once. A thread reads
Python's wake-up descriptor, since a Python handler does not run while the main thread is about
to block, and a model's stream may stay silent for minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Self

from runner.errors import SIGNAL_EXIT_CODES

if TYPE_CHECKING:
    from runner.cancellation import Cancellation

_HANDLED = tuple(getattr(signal, name) for name in SIGNAL_EXIT_CODES)


def _end_children() -> None:
    """Kill the direct children; what is confined dies with them."""
    for task in Path("/proc/self/task").iterdir():
        try:
            children = (task / "children").read_text(encoding="ascii").split()
        except OSError:
            continue  # the thread ended meanwhile
        for child in children:
            with contextlib.suppress(ProcessLookupError):  # it ended by itself
                os.kill(int(child), signal.SIGKILL)


class CancelOnSignal:
    """Context manager that turns signals into a cancellation. For the main thread only.

    Args:
        cancellation: Raised with the signal's name, for example ``SIGTERM``.
    """

    def __init__(self, cancellation: Cancellation) -> None:
        self._cancellation = cancellation
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous: dict[int, signal._HANDLER] = {}
        self._previous_wakeup = -1
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def __enter__(self) -> Self:
        os.set_blocking(self._read, True)
        for number in _HANDLED:
            self._previous[number] = signal.signal(number, lambda _number, _frame: None)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(self._previous_wakeup)
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        os.write(self._write, b"\0")
        self._thread.join()
        os.close(self._read)
        os.close(self._write)

    def _watch(self) -> None:
        seen = 0
        while True:
            for number in os.read(self._read, 64):
                if number == 0:
                    return
                if number not in _HANDLED:
                    continue
                seen += 1
                if seen > 1:
                    _end_children()
                    os._exit(128 + number)
                self._cancellation.cancel(signal.Signals(number).name)
