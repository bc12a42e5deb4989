"""``apply_patch``: a unified diff over several files, all of it or nothing.

The patch is read here, so that the policy decides on every path it touches; the confined worker checks every hunk
before it writes anything. Writes no events.
Prefix cache: nothing beyond the fixed place in the tool table; results are appended.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from runner.approvals.policy import CallFacts
from runner.errors import ErrorCode, RunnerError
from runner.figures import counted
from runner.tools.base import ToolOutcome
from runner.tools.builtin.files import WorkerTool, resolve_write, shown, text_outcome
from runner.tools.patches import FilePatch, PatchError, parse_patch

if TYPE_CHECKING:
    from runner.messages import JsonObject, ToolSchema
    from runner.tools.base import Invocation


APPLY_PATCH: ToolSchema = {
    "name": "apply_patch",
    "description": "Apply a unified diff of one or more files, all of it or nothing. Context must be exact.",
    "parameters": {
        "type": "object",
        "properties": {"patch": {"type": "string"}},
        "required": ["patch"],
        "additionalProperties": False,
    },
}


class ApplyPatch(WorkerTool):
    """Applies a patch."""

    schema: ToolSchema = APPLY_PATCH

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """Patches are applied alone."""
        return False

    def facts(self, arguments: JsonObject) -> CallFacts:
        """Every file that is changed, made, deleted or renamed; those that were there are read too.

        Raises:
            RunnerError: INVALID_ARGS, when the text is no patch, or a path leads out of the workspace.
        """
        try:
            files = parse_patch(arguments["patch"])
        except PatchError as error:
            raise RunnerError(f"patch: {error}", code=ErrorCode.INVALID_ARGS) from error
        read = tuple(self._place(file.old) for file in files if file.old is not None)
        write = tuple(self._place(name) for file in files for name in file.names)
        if len(set(write)) < len(write):
            raise RunnerError("patch: a file stands in it under two names", code=ErrorCode.INVALID_ARGS)
        return CallFacts("apply_patch", read=read, write=write)

    def _place(self, name: str) -> str:
        """The path of a file of the patch, which lies in the workspace and behind no link."""
        path = resolve_write(self._workspace, name)
        plain = os.path.normpath(os.path.join(self._workspace, name))  # noqa: PTH118  # text like all paths of facts
        problem = ""
        if not plain.startswith(self._workspace.rstrip("/") + "/"):
            problem = "lies outside the workspace"
        elif path != plain:
            problem = "leads through a symbolic link; name the file itself"
        if problem:
            raise RunnerError(f"patch: {name[:100]} {problem}", code=ErrorCode.INVALID_ARGS)
        return path

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Apply the patch."""
        files = parse_patch(invocation.arguments["patch"])
        for path in invocation.facts.write:
            refused = self.refusal(invocation, path)
            if refused is not None:
                return refused
        # In the order of the facts, so that what was decided on is what is used.
        paths = iter(invocation.facts.write)
        placed = [{name: next(paths) for name in file.names} for file in files]
        changes = [
            {
                "old": None if file.old is None else places[file.old],
                "new": None if file.new is None else places[file.new],
                "executable": file.executable,
                "hunks": [hunk.as_json() for hunk in file.hunks],
            }
            for file, places in zip(files, placed, strict=True)
        ]
        value = self.ask(invocation, "patch", {"changes": changes})
        if isinstance(value, ToolOutcome):
            return value
        names = [{name: shown(self._workspace, path) for name, path in places.items()} for places in placed]
        lines = [_said(*each) for each in zip(files, names, value["files"], strict=True)]
        return text_outcome("\n".join(lines))


def _said(file: FilePatch, names: dict[str, str], places: list[JsonObject]) -> str:
    """What became of a file, on one line."""
    added = sum(line[0] == "+" for hunk in file.hunks for line in hunk.lines)
    removed = sum(line[0] == "-" for hunk in file.hunks for line in hunk.lines)
    if file.new is None:
        return f"deleted {names[file.old or '']} (-{removed})"
    new = names[file.new]
    mode = "" if file.executable is None else ", executable" if file.executable else ", not executable"
    if file.old is None:
        return f"made {new} (+{added}{mode})"
    what = f"changed {new}" if file.old == file.new else f"renamed {names[file.old]} to {new}"
    at = [f"{place['line']}{_shift(place['shift'])}" for place in places]
    where = f" at line {', '.join(at)}" if len(at) == 1 else f" at lines {', '.join(at)}" if at else ""
    return f"{what}{where} (+{added} -{removed}{mode})"


def _shift(lines: int) -> str:
    if not lines:
        return ""
    return f" ({counted(abs(lines), 'line')} {'below' if lines > 0 else 'above'} where the patch says)"
