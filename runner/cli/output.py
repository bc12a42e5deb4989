"""What a command says: data on stdout, everything else on stderr.

A stream that takes no more (a closed pipe, a full disk) goes silent and changes nothing else: what
counts stands in the artifacts and the exit code. With ``--log-format json`` each line on stderr is JSON.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from runner import diagnostics

if TYPE_CHECKING:
    from runner.errors import RunnerError


def _write(name: str, text: str) -> None:
    stream = getattr(sys, name)
    if stream is None:
        return
    try:
        stream.write(text + "\n")
        stream.flush()
    except UnicodeEncodeError:
        _write(name, text.encode("ascii", "backslashreplace").decode("ascii"))
    except (OSError, ValueError):
        setattr(sys, name, None)


def put(text: str) -> None:
    """One piece of data on stdout."""
    _write("stdout", text)


def say(text: str, /, **values: object) -> None:
    """One line for people on stderr; ``values`` are the same in fields, for JSON."""
    if diagnostics.as_json():
        diagnostics.announce("info", text, **values)
    else:
        _write("stderr", text)


def say_error(code: str, message: str, hint: str | None) -> None:
    """An expected error on stderr: code, message, hint."""
    if diagnostics.as_json():
        diagnostics.announce("error", message, code=code, hint=hint)
        return
    _write("stderr", f"error {code}: {message}")
    if hint:
        _write("stderr", f"hint: {hint}")


def show_error(error: RunnerError) -> None:
    """``say_error`` for an exception."""
    say_error(error.code.name, error.message, error.hint)
