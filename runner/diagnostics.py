"""Diagnostics on stderr, through structlog.

Short lines for people, one JSON object a line with ``--log-format json``. They are never part
of the session log. structlog is loaded with the first line that is written, since importing it
costs more than a whole step; until then only the settings and the bound values are kept.
"""

from __future__ import annotations

import contextvars
import json
import sys
import time
from typing import TYPE_CHECKING, Any

from runner.neutral import neutral_json, neutral_text

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}

_bound: contextvars.ContextVar[Mapping[str, Any]] = contextvars.ContextVar("nightshift_bound", default={})  # noqa: B039  # never mutated, only replaced


class _Settings:
    """How diagnostics are written in this process; set once by the command line."""

    format = "text"
    level = LEVELS["warning"]
    redact: Callable[[str], str] = staticmethod(lambda text: text)
    logger: Any = None


def configure(*, log_format: str | None = None, level: str | None = None) -> None:
    """Choose the format (``text`` or ``json``) and the lowest level that is written; None changes nothing."""
    if log_format is not None:
        _Settings.format = log_format
    if level is not None:
        _Settings.level = LEVELS[level]
    _Settings.logger = None


def redact_with(redact: Callable[[str], str]) -> None:
    """Take known secrets out of every line written from now on."""
    _Settings.redact = redact


def bind(**values: object) -> None:
    """Add values (session, turn, step, callId) to every later line of this thread; None removes one."""
    merged = {**_bound.get(), **values}
    _bound.set({key: value for key, value in merged.items() if value is not None})


class _Stderr:
    """Writes to whatever ``sys.stderr`` is; a closed stream is no reason to stop a run."""

    def msg(self, message: str) -> None:
        """Write one line."""
        try:
            neutral = neutral_json if _Settings.format == "json" else neutral_text
            sys.stderr.write(neutral(_Settings.redact(message)) + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # stderr is gone; the session log holds what matters

    debug = info = warning = error = msg


def _build_logger() -> Any:
    import structlog

    if _Settings.format == "json":
        renderer: Any = structlog.processors.JSONRenderer(sort_keys=False)
    else:
        renderer = structlog.processors.KeyValueRenderer(key_order=["level", "event"])
    return structlog.wrap_logger(
        _Stderr(),
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_Settings.level),
        cache_logger_on_first_use=False,
    )


def emit(level: str, event: str, /, **values: object) -> None:
    """Write one diagnostic line if ``level`` is high enough."""
    if LEVELS[level] < _Settings.level:
        return
    if _Settings.logger is None:
        _Settings.logger = _build_logger()
    getattr(_Settings.logger, level)(event, **{**_bound.get(), **values})


def as_json() -> bool:
    """Whether lines for people must be diagnostics too, since every line on stderr is to be JSON."""
    return _Settings.format == "json"


def announce(level: str, event: str, /, **values: object) -> None:
    """Write one line of JSON whatever the lowest level is: what the command has to say in any case.

    Made here, since it may be the last word of a process that has no time to import a library.
    """
    line = {**_bound.get(), **values, "event": event, "level": level, "timestamp": _timestamp()}
    _Stderr().msg(json.dumps(line, default=repr))


def _timestamp() -> str:
    """Now, as structlog writes it."""
    seconds, rest = divmod(time.time_ns(), 1_000_000_000)
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{rest // 1000:06d}Z"


def debug(event: str, /, **values: object) -> None:
    """A line for whoever looks for a fault."""
    emit("debug", event, **values)


def info(event: str, /, **values: object) -> None:
    """A line about progress."""
    emit("info", event, **values)


def warning(event: str, /, **values: object) -> None:
    """A line about something that may surprise."""
    emit("warning", event, **values)
