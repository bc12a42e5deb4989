"""Requests to the worker: one JSON object a line on descriptor 0, one answer a line on descriptor 1.

A request is ``{"id", "op", "args"}``, an answer ``{"id", "ok": true, "value"}`` or ``{"id", "ok": false, "code",
"message"}``. A request that makes no sense gets an answer as well; nothing but the end of the input ends the worker.
Standard library only.
"""

from __future__ import annotations

import json
import os

from .places import Refusal, open_folder, refusal_of, shown, write_all

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Arguments = dict[str, Any]
    Value = dict[str, Any]


def hello(arguments: Arguments) -> Value:
    """Show that the workspace and the temporary folder are there."""
    for name in ("workspace", "tmp"):
        os.close(open_folder(arguments[name]))
    return {"pid": os.getpid()}


MODULES = {
    "read": "pages",
    "write": "changes",
    "edit": "changes",
    "patch": "patches",
    "glob": "walks",
    "grep": "searches",
    "fetch": "fetches",
}
"""Operations by the module that has a function of that name."""


def _operation(name: str) -> Callable[[Arguments], Value]:
    if name == "hello":
        return hello
    module = __import__(f"{__package__}.{MODULES[name]}", fromlist=[name])
    found: Callable[[Arguments], Value] = getattr(module, name)
    return found


def answer(line: bytes) -> Value:
    """The answer to one request line. Never raises for what a request holds."""
    number = None
    subject = ""
    try:
        request = json.loads(line)
        number = request["id"]
        subject = str(request["args"].get("path", ""))
        return {"id": number, "ok": True, "value": _operation(request["op"])(request["args"])}
    except Refusal as refusal:
        code, message = refusal.code, str(refusal)
    except OSError as error:
        refused = refusal_of(error, subject)
        code, message = refused.code, str(refused)
    except MemoryError:
        code, message = "TOO_LARGE", f"{shown(subject)} does not fit into memory"
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        code, message = "INVALID", f"the request cannot be understood: {type(error).__name__}: {error}"
    return {"id": number, "ok": False, "code": code, "message": message}


def serve() -> None:
    """Answer requests until the other side closes."""
    with open(0, "rb", closefd=False) as requests:
        for line in requests:
            write_all(1, json.dumps(answer(line), separators=(",", ":")).encode("ascii") + b"\n")
