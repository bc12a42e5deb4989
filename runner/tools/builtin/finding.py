"""``report_finding``: one finding of a review, at a place in a file.

The call and its result are the record: arguments that fit the schema and a result that is no error make a finding,
and whoever folds the log needs nothing else. So what is not in its final form is refused: a path that is not relative
and plain, lines that do not follow each other. Writes no events of its own.
Prefix cache: nothing beyond the fixed place in the tool table; results are appended.
"""

from __future__ import annotations

import os
import stat
from typing import TYPE_CHECKING

from runner.approvals.policy import CallFacts
from runner.errors import ErrorCode, RunnerError
from runner.tools.builtin.files import text_outcome

if TYPE_CHECKING:
    from runner.messages import JsonObject, ToolSchema
    from runner.sandbox.executor import Executor
    from runner.tools.base import Invocation, ToolOutcome

SEVERITIES = ("error", "warning", "note")

MESSAGE_CHARS = 4_000
"""Most code points of a message."""

RULE_CHARS = 100
"""Most code points of the name of a rule."""

REPORT_FINDING: ToolSchema = {
    "name": "report_finding",
    "description": "Record a finding of a review for the run's report.",
    "parameters": {
        "type": "object",
        "properties": {
            "path": {"type": "string"},
            "line": {"type": "integer", "minimum": 1},
            "endLine": {"type": "integer", "minimum": 1},
            "severity": {"type": "string", "enum": list(SEVERITIES)},
            "rule": {"type": "string"},
            "message": {"type": "string"},
        },
        "required": ["path", "severity", "message"],
        "additionalProperties": False,
    },
}


class ReportFinding:
    """Records findings.

    Args:
        executor: Knows the workspace.
    """

    schema: ToolSchema = REPORT_FINDING
    idempotent = True

    def __init__(self, executor: Executor) -> None:
        self._workspace = executor.workspace

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """Findings stand in the order in which they are reported."""
        return False

    def facts(self, arguments: JsonObject) -> CallFacts:
        """Nothing is touched; the place must be one that a report can name.

        Raises:
            RunnerError: INVALID_ARGS, it is no file of the workspace, or the lines do not follow each other.
        """
        path: str = arguments["path"]
        line, end = arguments.get("line"), arguments.get("endLine")
        problem = self._problem(path)
        if not problem and end is not None and (line is None or end < line):
            problem = "endLine: needs a line that is not behind it"
        for name, most in (("message", MESSAGE_CHARS), ("rule", RULE_CHARS)):
            text = arguments.get(name, "-")
            if not problem and (not text.strip() or len(text) > most):
                problem = f"{name}: is blank, or has more than {most:,} characters"
        if problem:
            raise RunnerError(problem, code=ErrorCode.INVALID_ARGS)
        return CallFacts("report_finding")

    def _problem(self, path: str) -> str:
        """What is wrong with a path, nothing if it is that of a file of the workspace in its plain form."""
        inside = self._workspace.rstrip("/") + "/"
        if "\0" in path:
            return "path: holds a NUL"
        plain = os.path.normpath(os.path.join(inside, path))  # noqa: PTH118  # stays text, as in the log
        if not plain.startswith(inside):
            return f"path: {path[:100]} lies outside the workspace"
        if plain != inside + path:
            return f"path: write it as {plain.removeprefix(inside)[:200]}"
        resolved = os.path.realpath(plain)
        if not resolved.startswith(inside):
            return f"path: {path[:100]} leads out of the workspace"
        try:
            found = os.stat(resolved)  # noqa: PTH116  # stays text, as in the log
        except OSError:
            return f"path: {path[:100]} does not exist"
        return "" if stat.S_ISREG(found.st_mode) else f"path: {path[:100]} is no file"

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Confirm it; the call is the record."""
        arguments = invocation.arguments
        line = f":{int(arguments['line'])}" if "line" in arguments else ""
        return text_outcome(f"recorded: {arguments['severity']} at {arguments['path']}{line}")
