"""Signals that cancel a run: SIGINT, SIGTERM and SIGHUP alike.

The first one raises the run's cancellation. The second ends the process at once: it says which log is
not sealed, and removes the half-written files beside it. From the end of the run on they are ignored,
since its exit code stands. A thread reads Python's wake-up descriptor, since a Python handler does not
run while the main thread is about to block, and a model's stream may stay silent for minutes.
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
    from collections.abc import Callable

    from runner.cancellation import Cancellation

_HANDLED = tuple(getattr(signal, name) for name in SIGNAL_EXIT_CODES)

_LAST_WORDS_SECONDS = 0.5
"""Most time that a second signal spends on saying and removing; stderr or the disk may be stuck."""

_LOG_NAMES = ("session.jsonl.zst", ".session.jsonl.zst.new")
_EXPORT_NAME = ".session.zip.new"
_HALF_WRITTEN = (".new", ".part")
"""How the names of files end that are written to be renamed."""


def ignore_signals() -> None:
    """Let no later signal change what the process has decided: its output, its exit code."""
    for number in _HANDLED:
        signal.signal(number, signal.SIG_IGN)


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


def _open_files() -> list[Path]:
    """The files this process has open, by the names they have now."""
    found = []
    for descriptor in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # it was closed meanwhile
            found.append(descriptor.readlink())
    return found


def _clear_up() -> Path | None:
    """Remove the half-written files of the artifacts directory; returns the log if it is still written.

    The kernel knows where they are: log or export is open while the run has something to lose. The
    directory itself holds our files only, those of the agent lie in folders below it.
    """
    opened = _open_files()
    log = next((path for path in opened if path.name in _LOG_NAMES), None)
    known = log or next((path for path in opened if path.name == _EXPORT_NAME), None)
    if known is not None:
        for path in known.parent.iterdir():
            if path.name.endswith(_HALF_WRITTEN):
                path.unlink(missing_ok=True)
    return None if log is None else log.with_name(_LOG_NAMES[0])


class CancelOnSignal:
    """Context manager that turns signals into a cancellation. For the main thread only.

    Behind it the signals are ignored. One that was ignored when the process began (``nohup``) stays so.

    Args:
        cancellation: Raised with the signal's name, for example ``SIGTERM``.
        say: Shows one line to whoever sent the second one.
    """

    def __init__(self, cancellation: Cancellation, *, say: Callable[[str], object]) -> None:
        self._cancellation = cancellation
        self._say = say
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._previous_wakeup = -1
        self._thread = threading.Thread(target=self._watch, name="signals", daemon=True)

    def __enter__(self) -> Self:
        os.set_blocking(self._read, True)
        for number in _HANDLED:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, lambda _number, _frame: None)
        self._previous_wakeup = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        ignore_signals()
        signal.set_wakeup_fd(self._previous_wakeup)
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
                    self._end(number)
                self._cancellation.cancel(signal.Signals(number).name)

    def _end(self, number: int) -> None:
        """End the process, whatever the other threads are at."""
        last = threading.Thread(target=self._last_words, args=[signal.Signals(number).name], daemon=True)
        last.start()
        last.join(_LAST_WORDS_SECONDS)
        _end_children()  # only now, or a thread that waits for one would log how it ended
        os._exit(128 + number)

    def _last_words(self, name: str) -> None:
        log = None
        with contextlib.suppress(OSError):
            log = _clear_up()
        what = "no result was written" if log is None else f"the log may not be sealed: {log}"
        self._say(f"ended at once by a second signal, {name}: {what}")
