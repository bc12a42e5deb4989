"""What a command says: data on stdout, everything else on stderr.

A stream that takes no more goes silent, and a run goes on: what counts stands in the artifacts. A reader that
went away knows why; that a disk is full is said in the end. With ``--log-format json`` each line on stderr is JSON.
Whatever is said may quote a model, so no terminal and no CI system finds anything in it to act on.
"""

from __future__ import annotations

import errno
import sys
from typing import TYPE_CHECKING

from runner import diagnostics
from runner.neutral import neutral_json, neutral_text

if TYPE_CHECKING:
    from runner.errors import RunnerError


NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What the system says when a file takes no more."""


class _Stdout:
    """What became of the data on stdout; one for the process."""

    lost: OSError | None = None


def lost_output() -> OSError | None:
    """Why data on stdout could not be written, None if all was, or if nobody wanted it any more."""
    if sys.stdout is not None:
        try:
            sys.stdout.flush()
        except OSError as error:
            _note(error)
        except ValueError:
            pass  # it was closed
    return _Stdout.lost


def _note(error: OSError) -> None:
    if error.errno in NO_SPACE and _Stdout.lost is None:
        _Stdout.lost = error


def _write(name: str, text: str) -> None:
    stream = getattr(sys, name)
    if stream is None:
        return
    try:
        stream.write(text + "\n")
        stream.flush()
    except UnicodeEncodeError:
        _write(name, text.encode("ascii", "backslashreplace").decode("ascii"))
    except (OSError, ValueError) as error:
        if name == "stdout" and isinstance(error, OSError):
            _note(error)
        setattr(sys, name, None)


def put(text: str) -> None:
    """One piece of data for people on stdout."""
    _write("stdout", neutral_text(text))


def put_json(text: str) -> None:
    """One piece of JSON on stdout."""
    _write("stdout", neutral_json(text))


def say(text: str, /, **values: object) -> None:
    """One line for people on stderr; ``values`` are the same in fields, for JSON."""
    if diagnostics.as_json():
        diagnostics.announce("info", text, **values)
    else:
        _write("stderr", neutral_text(text))


def say_error(code: str, message: str, hint: str | None) -> None:
    """An expected error on stderr: code, message, hint."""
    if diagnostics.as_json():
        diagnostics.announce("error", message, code=code, hint=hint)
        return
    _write("stderr", neutral_text(f"error {code}: {message}"))
    if hint:
        _write("stderr", neutral_text(f"hint: {hint}"))


def show_error(error: RunnerError) -> None:
    """``say_error`` for an exception."""
    say_error(error.code.name, error.message, error.hint)


def show_traceback(error: BaseException) -> None:
    """Where a bug of ours is."""
    import traceback

    _write("stderr", neutral_text("".join(traceback.format_exception(error)).rstrip("\n")))
