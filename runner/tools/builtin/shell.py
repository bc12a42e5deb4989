"""``shell``: a bash command in the sandbox.

The command runs as ``/bin/bash --noprofile --norc -c TEXT`` with stdin closed and no terminal. Its
output is text as it came; bytes that are no UTF-8 are escaped. A command that fails is a result,
with its exit status in ``meta``; a sandbox that fails ends the run. Writes no events.
Prefix cache: nothing beyond the fixed place in the tool table; results are appended.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from typing import TYPE_CHECKING

from runner.approvals.policy import CallFacts
from runner.errors import ErrorCode, RunnerError, StorageError
from runner.permission import Mode
from runner.sandbox.base import BARE
from runner.tools.base import ToolOutcome
from runner.tools.output import decode_output, file_stem

if TYPE_CHECKING:
    from runner.messages import JsonObject, TextBlock, ToolSchema
    from runner.sandbox.base import ProcessResult
    from runner.sandbox.executor import Executor
    from runner.tools.base import Invocation

BASH = ("/bin/bash", "--noprofile", "--norc", "-c")

COMMAND_BYTES = 120_000
"""Most bytes of a command; the kernel takes 131,072 for one argument."""

CAPTURE = 2_000_000
"""Bytes of output held in memory; what is more goes to a file."""

_DENIED = re.compile(
    rb"Permission denied|Operation not permitted|Read-only file system|Network is unreachable"
    rb"|Could not resolve host|Name or service not known|Temporary failure in name resolution"
    rb"|Address family not supported"
)
_LOOKED_AT = 8_192


SHELL: ToolSchema = {
    "name": "shell",
    "description": "Run a bash command in the workspace. Gives stdout and stderr together, and how it ended if not 0.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "string"},
            "timeout": {"type": "number", "minimum": 1, "description": "seconds, then it is killed"},
            "background": {"type": "boolean", "description": "do not wait for it; it is ended with the turn"},
            "sandbox_permissions": {
                "type": "string",
                "enum": [Mode.WORKSPACE_WRITE.value, Mode.DANGER_FULL_ACCESS.value],
                "description": "mode to ask for, for this call only",
            },
            "justification": {"type": "string", "description": "why; needed with sandbox_permissions"},
        },
        "required": ["command"],
        "additionalProperties": False,
    },
}


class Shell:
    """Runs commands.

    Args:
        executor: Where commands run.
        overflow: Private folder for output that is too long to be held; made when first needed.
    """

    schema: ToolSchema = SHELL
    idempotent = False

    def __init__(self, executor: Executor, *, overflow: str) -> None:
        self._executor = executor
        self._overflow = overflow
        self._started = 0

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """Commands run alone."""
        return False

    def facts(self, arguments: JsonObject) -> CallFacts:
        """The command, and the mode it asks for beyond the run's own.

        Raises:
            RunnerError: INVALID_ARGS, when the command cannot be run or an escalation gives no reason.
        """
        command: str = arguments["command"]
        problem = ""
        if "\0" in command:
            problem = "command: holds a NUL"
        elif len(command.encode("utf-8")) > COMMAND_BYTES:
            problem = f"command: longer than {COMMAND_BYTES} bytes; write a script file and run that"
        wanted = arguments.get("sandbox_permissions")
        if wanted is not None and not arguments.get("justification", "").strip():
            problem = "justification: required with sandbox_permissions"
        if problem:
            raise RunnerError(problem, code=ErrorCode.INVALID_ARGS)
        mode = None if wanted is None else Mode(wanted)
        beyond = mode is not None and mode.rank > self._executor.mode.rank
        return CallFacts("shell", command=command, escalation=mode if beyond else None)

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Run the command.

        Raises:
            SandboxError: The sandbox could not start it.
            StorageError: Output that is too long to be held cannot be kept.
        """
        command = [*BASH, invocation.arguments["command"]]
        self._started += 1
        if invocation.arguments.get("background", False):
            return self._start(command, invocation)
        asked = invocation.arguments.get("timeout", invocation.timeout)
        self._make_overflow()
        result = self._executor.run(
            command,
            mode=invocation.mode,
            timeout=min(asked, invocation.timeout),
            cancellation=invocation.cancellation,
            capture=CAPTURE,
            overflow=f"{self._overflow}/{file_stem(invocation.call_id)}-{self._started}.out",
        )
        return self._outcome(result, invocation, min(asked, invocation.timeout))

    def _make_overflow(self) -> None:
        try:
            os.makedirs(self._overflow, mode=0o700, exist_ok=True)  # noqa: PTH103  # pathlib is not loaded for one call
        except OSError as error:
            raise StorageError(
                f"the folder for long output {self._overflow} cannot be made: {error.strerror}",
                hint="free space there, or make it writable",
            ) from error

    def _start(self, command: list[str], invocation: Invocation) -> ToolOutcome:
        name = f"{file_stem(invocation.call_id)}-{self._started}"
        output = f"{self._executor.tmp}/background-{name}.log"
        try:
            # Models use one call id twice; the name with the number is this process's alone.
            self._executor.start_background(command, mode=invocation.mode, output=output, call_id=name)
        except OSError as error:
            where = "" if error.filename is None else f": {error.filename}"
            text = f"The command could not be started: {error.strerror}{where}"
            return ToolOutcome([{"type": "text", "text": text}], error=ErrorCode.TOOL_FAILED)
        text = (
            f"Started in the background. Its output goes to {output}: look at it with `tail {output}`. "
            f"It is ended with this turn."
        )
        return ToolOutcome([{"type": "text", "text": text}], meta={"backend": self._backend(invocation.mode)})

    def _outcome(self, result: ProcessResult, invocation: Invocation, timeout: float) -> ToolOutcome:
        output, _ = decode_output(result.output)
        if result.workspace_lost:
            text = f"The command was not run: {output}"
            return ToolOutcome([{"type": "text", "text": text.strip()}], error=ErrorCode.TOOL_FAILED)
        error, notes = None, []
        if result.cancelled:
            error = ErrorCode.CANCELLED
            notes.append("[ended, since the run was cancelled]")
        elif result.timed_out:
            error = ErrorCode.TOOL_TIMEOUT
            notes.append(f"[timed out after {timeout:g} s]")
        elif result.signal is not None:
            notes.append(f"[killed by {result.signal}]")
        elif result.exit_code:
            notes.append(f"[exit {result.exit_code}{_signal_note(result.exit_code)}]")
            bare = invocation.mode is Mode.DANGER_FULL_ACCESS
            if not bare and _DENIED.search(result.output[-_LOOKED_AT:]):
                notes.append(_denied_note(invocation))
        elif not output:
            notes.append("[no output]")
        meta: JsonObject = {"exitCode": result.exit_code}
        if result.signal is not None:
            meta["signal"] = result.signal
        if result.timed_out:
            meta["timedOut"] = True
        meta["backend"] = self._backend(invocation.mode)
        note = "\n".join(notes)
        content: list[TextBlock] = [{"type": "text", "text": output}]
        if result.overflow is None:
            gap = "\n" if note and output and not output.endswith("\n") else ""
            content[0]["text"] += gap + note
        elif note:
            content.append({"type": "text", "text": note})
        return ToolOutcome(content, error=error, meta=meta, overflow=result.overflow, cancelled=result.cancelled)

    def _backend(self, mode: Mode) -> str:
        """What confined a command of ``mode``; danger-full-access runs bare whatever the session has."""
        return BARE if mode is Mode.DANGER_FULL_ACCESS else self._executor.backend_name


def _signal_note(exit_code: int) -> str:
    """What shells and sandbox wrappers mean by a status over 128."""
    with contextlib.suppress(ValueError):
        return f", as after {signal.Signals(exit_code - 128).name}" if exit_code > 128 else ""
    return ""


def _denied_note(invocation: Invocation) -> str:
    may = "may be asked with sandbox_permissions and justification"
    if not invocation.may_escalate:
        may = "may not be asked"
    return f"[the sandbox (mode {invocation.mode.value}) may have stopped this; escalation {may}]"
