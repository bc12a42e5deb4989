"""``glob`` and ``grep``: find files by pattern and lines by regular expression.

Both run in the confined worker, so a regular expression without end costs its time limit and no
more. Writes no events.
Prefix cache: nothing beyond the fixed place in the tool table; results are appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner.approvals.policy import CallFacts
from runner.figures import counted
from runner.tools.base import ToolOutcome
from runner.tools.builtin.files import WorkerTool, resolve_read, shown, text_outcome

if TYPE_CHECKING:
    from runner.messages import JsonObject, ToolSchema
    from runner.sandbox.executor import Executor
    from runner.tools.base import Invocation

PATHS = 1_000
"""Most paths of one ``glob``."""

MATCHES = 250
"""Most lines of one ``grep``."""

LINE_CHARS = 300
"""Code points of one matching line that are shown."""

_MAGIC = "*?[{"


GLOB: ToolSchema = {
    "name": "glob",
    "description": "List files by pattern (*, **, ?, [..], {a,b}), relative to path. Skips .git and what git ignores.",
    "parameters": {
        "type": "object",
        "properties": {
            "pattern": {"type": "string"},
            "path": {"type": "string", "description": "folder, default the workspace"},
        },
        "required": ["pattern"],
        "additionalProperties": False,
    },
}


class Glob(WorkerTool):
    """Lists files by pattern.

    Args:
        executor: Where the worker runs.
    """

    schema: ToolSchema = GLOB
    idempotent = True

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """Searches may overlap."""
        return True

    def facts(self, arguments: JsonObject) -> CallFacts:
        """The folder that is searched."""
        start, _ = _split_pattern(arguments)
        return CallFacts("glob", read=(resolve_read(self._workspace, start),))

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """List the files."""
        folder = invocation.facts.read[0]
        _, pattern = _split_pattern(invocation.arguments)
        value = self.ask(
            invocation,
            "glob",
            {
                "path": folder,
                "root": self._workspace,
                "pattern": pattern,
                "label": _label(self._workspace, folder),
                "limit": PATHS,
            },
        )
        if isinstance(value, ToolOutcome):
            return value
        more = f"more than {PATHS} paths; narrow the pattern" if value["more"] else ""
        return text_outcome(_lines(value["paths"], "no file matches", more, value))


GREP: ToolSchema = {
    "name": "grep",
    "description": "Find lines by Python regular expression, as path:line:text. Skips binary files and what glob does.",
    "parameters": {
        "type": "object",
        "properties": {
            "pattern": {"type": "string"},
            "path": {"type": "string", "description": "file or folder, default the workspace"},
            "glob": {"type": "string", "description": "only files like this, as *.py"},
        },
        "required": ["pattern"],
        "additionalProperties": False,
    },
}


class Grep(WorkerTool):
    """Finds lines by regular expression.

    Args:
        executor: Where the worker runs.
        page_bytes: Most bytes of one result; under the limit from which results spill.
    """

    schema: ToolSchema = GREP
    idempotent = True

    def __init__(self, executor: Executor, *, page_bytes: int) -> None:
        super().__init__(executor)
        self._page_bytes = page_bytes

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """Searches may overlap."""
        return True

    def facts(self, arguments: JsonObject) -> CallFacts:
        """The file or folder that is searched."""
        return CallFacts("grep", read=(resolve_read(self._workspace, arguments.get("path", ".")),))

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Search."""
        path = invocation.facts.read[0]
        value = self.ask(
            invocation,
            "grep",
            {
                "path": path,
                "root": self._workspace,
                "pattern": invocation.arguments["pattern"],
                "glob": invocation.arguments.get("glob"),
                "label": _label(self._workspace, path),
                "limit": MATCHES,
                "max_bytes": self._page_bytes,
                "line_chars": LINE_CHARS,
            },
        )
        if isinstance(value, ToolOutcome):
            return value
        nothing = "no line matches"
        if value["binary"]:
            nothing += f"\n[{counted(value['binary'], 'binary file')} skipped]"
        more = f"more matches than the first {len(value['lines'])}; narrow the pattern, path or glob"
        return text_outcome(_lines(value["lines"], nothing, more if value["more"] else "", value))


def _split_pattern(arguments: JsonObject) -> tuple[str, str]:
    """Folder and pattern; of an absolute pattern the folder is what stands before the first wildcard."""
    path, pattern = arguments.get("path", "."), arguments["pattern"]
    if not pattern.startswith("/"):
        return path, pattern
    parts = pattern.split("/")
    plain = next((index for index, part in enumerate(parts) if any(c in part for c in _MAGIC)), len(parts) - 1)
    return "/".join(parts[:plain]) or "/", "/".join(parts[plain:])


def _label(workspace: str, path: str) -> str:
    name = shown(workspace, path)
    return "" if name == "." else name.rstrip("/") + "/"


def _lines(lines: list[str], nothing: str, more: str, value: JsonObject) -> str:
    notes = [more] if more else []
    if value["ignored"]:
        ignored = counted(value["ignored"], "file or folder", "files or folders")
        look = "" if lines else "; name one as path to look into it"
        notes.append(f"{ignored} that git ignores left out{look}")
    if value["unreadable"]:
        notes.append(f"{counted(value['unreadable'], 'file or folder', 'files or folders')} could not be read")
    if value["incomplete"]:
        notes.append("the tree is too large or too deep to be searched whole")
    return "\n".join([*lines, *([] if lines else [nothing]), *(f"[{note}]" for note in notes)])
