"""``read_file``, ``write_file``, ``edit_file``: exact file access through the confined worker.

Paths are resolved once, for the policy, and the worker gets what the policy saw: for reads every
link resolved, for writes all but the last component, which may not be a link. Texts of the worker
become results; its refusals become failed results, never exceptions. Writes no events.
Prefix cache: nothing beyond the fixed place in the tool table; results are appended.
"""

from __future__ import annotations

import os
from binascii import a2b_base64
from typing import TYPE_CHECKING

from runner.approvals.policy import CallFacts
from runner.errors import ErrorCode, RunnerError
from runner.figures import counted
from runner.tools.base import ToolOutcome

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.messages import ImageBlock, JsonObject, ToolSchema
    from runner.sandbox.executor import Executor
    from runner.tools.base import Invocation

SPILL = "spill:"
"""Start of a path that means the whole text of an earlier result."""

LINES = 2_000
"""Lines of a page when the call names no limit."""

IMAGE_BYTES = 5_000_000
"""Most bytes of an image that is shown to the model."""

SECONDS = 60.0
"""Seconds one operation of the worker may take."""

_SHARED = ("/tmp/", "/var/tmp/")  # noqa: S108  # paths that a model tries, not ones that are used

_ERRORS = {
    "DENIED": ErrorCode.SANDBOX_DENIED,
    "LINK": ErrorCode.SANDBOX_DENIED,
    "TIMEOUT": ErrorCode.TOOL_TIMEOUT,
    "CANCELLED": ErrorCode.CANCELLED,
}


_CUT_SHORT = ("TIMEOUT", "CANCELLED")


def resolve_read(workspace: str, path: str) -> str:
    """The absolute path a read of ``path`` opens, every link resolved."""
    return os.path.realpath(_absolute(workspace, path))


def resolve_write(workspace: str, path: str) -> str:
    """The absolute path a write to ``path`` changes; the last component is not followed.

    Raises:
        RunnerError: INVALID_ARGS, when the path cannot name a file.
    """
    parent, name = os.path.split(_absolute(workspace, path))
    if name in ("", ".", ".."):
        raise RunnerError(f"path: {path!r} names a folder, not a file", code=ErrorCode.INVALID_ARGS)
    return os.path.join(os.path.realpath(parent), name)  # noqa: PTH118  # stays text like all paths of facts


def _absolute(workspace: str, path: str) -> str:
    problem = ""
    if not path or "\0" in path:
        problem = "is empty or holds a NUL"
    elif path.startswith("~"):
        problem = "starts with ~, which is not expanded; write ./~ for a file of that name"
    if problem:
        raise RunnerError(f"path: {path[:100]!r} {problem}", code=ErrorCode.INVALID_ARGS)
    return os.path.join(workspace, path)  # noqa: PTH118  # stays text like all paths of facts


def shown(workspace: str, path: str) -> str:
    """A resolved path as the model writes it: relative inside the workspace."""
    if path == workspace:
        return "."
    prefix = workspace.rstrip("/") + "/"
    return path.removeprefix(prefix)


def text_outcome(text: str, error: ErrorCode | None = None, *, cancelled: bool = False) -> ToolOutcome:
    """An outcome with one text."""
    return ToolOutcome([{"type": "text", "text": text}], error=error, cancelled=cancelled)


class WorkerTool:
    """A tool whose calls are one operation of the confined worker.

    Args:
        executor: Where the worker runs.
    """

    schema: ToolSchema
    idempotent = False

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._workspace = executor.workspace

    def ask(self, invocation: Invocation, op: str, arguments: JsonObject) -> JsonObject | ToolOutcome:
        """The value of one operation, or the outcome that says why there is none."""
        answer: JsonObject = self._executor.worker(invocation.mode).call(
            op, arguments, timeout=min(SECONDS, invocation.timeout), cancellation=invocation.cancellation
        )
        if answer["ok"]:
            value: JsonObject = answer["value"]
            return value
        message = answer["message"].replace(self._workspace.rstrip("/") + "/", "")
        if answer["code"] in _CUT_SHORT and invocation.facts.write:
            message += "; what it had written until then stays, so look before you go on"
        if answer["code"] == "DENIED":
            message += f" (mode {invocation.mode.value})"
            if any(self._executor.is_protected(path) for path in invocation.facts.write):
                message += "; this file defines the run, so it stays as it is"
            if any(path.startswith(_SHARED) for path in invocation.facts.write):
                message += f"; the temporary folder is {self._executor.tmp}"
        error = _ERRORS.get(answer["code"], ErrorCode.TOOL_FAILED)
        return text_outcome(message, error, cancelled=error is ErrorCode.CANCELLED)

    def refusal(self, invocation: Invocation, path: str) -> ToolOutcome | None:
        """The outcome of a write to where each command has a folder of its own, so that nothing lasts; else None."""
        if not self._executor.is_private(path, invocation.mode):
            return None
        text = (
            f"{path} is not written: each command has a fresh folder of its own there, so the file would be gone. "
            f"The temporary folder is {self._executor.tmp} (mode {invocation.mode.value})"
        )
        return text_outcome(text, ErrorCode.SANDBOX_DENIED)


READ_FILE: ToolSchema = {
    "name": "read_file",
    "description": "Read a text file or an image. Long files come in pages; the first line then says which lines.",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "offset": {"type": "integer", "minimum": 1, "description": "first line, from 1"},
            "limit": {"type": "integer", "minimum": 1, "description": "number of lines"},
        },
        "required": ["path"],
        "additionalProperties": False,
    },
}


class ReadFile(WorkerTool):
    """Gives a page of a text file, or an image.

    Args:
        executor: Where the worker runs.
        page_bytes: Most bytes of one page; under the limit from which results spill.
        spill: Gives a page of an earlier result that was too long, or says why it cannot. Takes its name,
            the first line, the number of lines and the most bytes.
        keep_image: Keeps the bytes of an image of a media type beside the log, and gives the block that names it.
    """

    schema: ToolSchema = READ_FILE
    idempotent = True

    def __init__(
        self,
        executor: Executor,
        *,
        page_bytes: int,
        spill: Callable[[str, int, int, int], JsonObject | str],
        keep_image: Callable[[bytes, str], ImageBlock],
    ) -> None:
        super().__init__(executor)
        self._keep_image = keep_image
        self._page_bytes = page_bytes
        self._spill = spill

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """Reads may overlap."""
        return True

    def facts(self, arguments: JsonObject) -> CallFacts:
        """The file, or nothing for a spilled result, which the runner itself holds."""
        path = arguments["path"]
        if path.startswith(SPILL):
            return CallFacts("read_file")
        return CallFacts("read_file", read=(resolve_read(self._workspace, path),))

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Read one page."""
        offset, limit = _whole(invocation.arguments, "offset", 1), _whole(invocation.arguments, "limit", LINES)
        path = invocation.arguments["path"]
        value: JsonObject | ToolOutcome | str
        if path.startswith(SPILL):
            value = self._spill(path.removeprefix(SPILL), offset, limit, self._page_bytes)
            if isinstance(value, str):
                return text_outcome(value, ErrorCode.TOOL_FAILED)
        else:
            arguments = {"offset": offset, "limit": limit, "max_bytes": self._page_bytes, "max_image": IMAGE_BYTES}
            value = self.ask(invocation, "read", {"path": invocation.facts.read[0], **arguments})
        if isinstance(value, ToolOutcome):
            return value
        if "image" in value:
            return ToolOutcome([self._keep_image(a2b_base64(value["data"]), value["image"])])
        return text_outcome(page_text(value))


def page_text(value: JsonObject) -> str:
    """A page as the model reads it: a first line in brackets only if there is something to say."""
    notes = []
    first, last, total = value["first"], value["last"], value["total"]
    if value["more"] or first > 1:
        of = "" if total is None else f" of {total}"
        notes.append(f"lines {first}-{last}{of}" + (f", read on with offset {last + 1}" if value["more"] else ""))
    if value["encoding"] != "utf-8":
        notes.append(value["encoding"])
    if value["crlf"]:
        notes.append("CRLF line ends")
    if value["cut"] is not None:
        kept = len(value["text"].rpartition("\n")[2].encode("utf-8", "surrogatepass"))
        rest = f"; sed -n {last}p FILE | tail -c +{kept + 1} gives the rest" if value["encoding"] == "utf-8" else ""
        notes.append(f"line {last} is cut, it has {value['cut']} bytes{rest}")
    head = f"[{'; '.join(notes)}]\n" if notes else ""
    return head + value["text"] if value["text"] else head + "[empty]"


def _whole(arguments: JsonObject, name: str, default: int) -> int:
    """An integer argument; JSON allows 3.0 for 3."""
    return int(min(arguments.get(name, default), 1 << 53))


WRITE_FILE: ToolSchema = {
    "name": "write_file",
    "description": "Make or replace a text file; missing folders are made.",
    "parameters": {
        "type": "object",
        "properties": {"path": {"type": "string"}, "content": {"type": "string"}},
        "required": ["path", "content"],
        "additionalProperties": False,
    },
}


class WriteFile(WorkerTool):
    """Makes or replaces a text file."""

    schema: ToolSchema = WRITE_FILE

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """Writes run alone."""
        return False

    def facts(self, arguments: JsonObject) -> CallFacts:
        """The file that is written."""
        return CallFacts("write_file", write=(resolve_write(self._workspace, arguments["path"]),))

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Write the file."""
        path = invocation.facts.write[0]
        refused = self.refusal(invocation, path)
        if refused is not None:
            return refused
        value = self.ask(invocation, "write", {"path": path, "content": invocation.arguments["content"]})
        if isinstance(value, ToolOutcome):
            return value
        verb = "made" if value["created"] else "replaced"
        return text_outcome(f"{verb} {shown(self._workspace, path)} ({counted(value['bytes'], 'byte')})")


EDIT_FILE: ToolSchema = {
    "name": "edit_file",
    "description": "Replace exact text. Each old must stand in the file once, blanks and all; all edits or none.",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "edits": {
                "type": "array",
                "minItems": 1,
                "items": {
                    "type": "object",
                    "properties": {"old": {"type": "string"}, "new": {"type": "string"}},
                    "required": ["old", "new"],
                    "additionalProperties": False,
                },
            },
        },
        "required": ["path", "edits"],
        "additionalProperties": False,
    },
}


class EditFile(WorkerTool):
    """Replaces exact text in a file."""

    schema: ToolSchema = EDIT_FILE

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """Edits run alone."""
        return False

    def facts(self, arguments: JsonObject) -> CallFacts:
        """The file that is changed, and read: a miss shows the lines nearest to what was asked for."""
        path = resolve_write(self._workspace, arguments["path"])
        return CallFacts("edit_file", read=(path,), write=(path,))

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Make the edits."""
        path = invocation.facts.write[0]
        refused = self.refusal(invocation, path)
        if refused is not None:
            return refused
        value = self.ask(invocation, "edit", {"path": path, "edits": invocation.arguments["edits"]})
        if isinstance(value, ToolOutcome):
            return value
        lines = ", ".join(str(line) for line in value["lines"])
        where = f"line {lines}" if len(value["lines"]) == 1 else f"lines {lines}"
        return text_outcome(f"edited {shown(self._workspace, path)} at {where}")
