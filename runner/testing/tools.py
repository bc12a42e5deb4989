"""The built-in tools with everything around them but a loop: for tests of what a call does and gives.

Everything is real: the pipeline, the sandbox, the spill. The policy allows all calls, and what was decided on is kept.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

from runner.agent.settings import CompactionSpec
from runner.approvals.policy import Policy, Rule
from runner.approvals.resolver import Resolver
from runner.cancellation import Cancellation
from runner.compaction.spill import Spill, SpillStore
from runner.messages import text_of
from runner.permission import Mode, Trust
from runner.redaction import Redactor
from runner.sandbox.base import SandboxSpec
from runner.sandbox.executor import Executor, session_policy
from runner.sandbox.probe import build_backend
from runner.session.media import MediaStore
from runner.tools.builtin.files import EditFile, ReadFile, WriteFile
from runner.tools.builtin.finding import ReportFinding
from runner.tools.builtin.patch import ApplyPatch
from runner.tools.builtin.search import Glob, Grep
from runner.tools.builtin.shell import Shell
from runner.tools.builtin.todo import Todo
from runner.tools.pipeline import Pipeline
from runner.tools.registry import Registry

if TYPE_CHECKING:
    from pathlib import Path

    from runner.approvals.policy import CallFacts
    from runner.approvals.resolver import Resolution
    from runner.errors import ErrorCode
    from runner.session.events import Event
    from runner.tools.pipeline import CallResult

BACKENDS = ("none", "bubblewrap", "landlock")
"""Every way in which tools run; ``none`` is danger-full-access without a backend."""


class Bench:
    """The built-in tools over one workspace, with a policy that allows everything.

    Args:
        backend: One of ``BACKENDS``.
        root: An empty folder, its path canonical; ``workspace`` is made in it.
        mode: The run's permission mode, where there is a backend.
        window: The model's context window in tokens.

    Attributes:
        root: The workspace.
        facts: What was decided on, one a call.
        events: What the pipeline wrote.
        may_escalate: Whether a rule would allow a call that asks for danger-full-access.
        timeout: Seconds the next call may take.
    """

    def __init__(self, backend: str, root: Path, *, mode: Mode = Mode.WORKSPACE_WRITE, window: int = 1_000_000) -> None:
        self.root = root / "workspace"
        self.root.mkdir(exist_ok=True)
        (root / "session").mkdir(exist_ok=True)
        spec = SandboxSpec()
        bare = backend == "none"
        self.mode = Mode.DANGER_FULL_ACCESS if bare else mode
        policy = session_policy(
            spec,
            mode=self.mode,
            workspace=str(self.root),
            state=str(root / "state"),
            hidden=(str(root / "session"),),
            environment={"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"},
        )
        self.executor = Executor(None if bare else build_backend(backend), policy)
        store = SpillStore(str(root / "session" / "spill"))
        self.spill = Spill(store, spec=CompactionSpec(), window=window, redactor=Redactor({"KEY": "hunter22"}))
        media = MediaStore(str(root / "session"))
        page = self.spill.page_bytes
        self.registry = Registry(
            [
                Shell(self.executor, overflow=str(root / "overflow")),
                ReadFile(self.executor, page_bytes=page, spill=store.read, keep_image=media.write),
                WriteFile(self.executor),
                EditFile(self.executor),
                ApplyPatch(self.executor),
                Glob(self.executor),
                Grep(self.executor, page_bytes=page),
                Todo(),
                ReportFinding(self.executor),
            ]
        )
        self.events: list[Event] = []
        self.facts: list[CallFacts] = []
        self.may_escalate = False
        self.cancellation = Cancellation()
        self.timeout = 20.0
        self._calls = 0
        self.pipeline = Pipeline(
            registry=self.registry,
            mode=self.mode,
            resolve=self._resolve,
            emit=self.events.extend,
            finalizer=self.spill,
            clock=time.monotonic,
            timeout=lambda: self.timeout,
            holds_secret=lambda _call, text: "hunter22" in text,
        )

    def _resolve(self, facts: CallFacts, *, call_id: str, justification: str | None = None) -> Resolution:
        self.facts.append(facts)
        rules = [Rule(id="all", allow=True, any_command=True)]
        if self.may_escalate:
            rules.append(Rule(id="more", allow=True, any_command=True, escalate=(Mode.DANGER_FULL_ACCESS,)))
        resolver = Resolver(
            Policy(tuple(rules)),
            workspace=str(self.root),
            mode=self.mode,
            trust=Trust.TRUSTED,
            new_id=lambda: str(len(self.events)),
        )
        return resolver.resolve(facts, call_id=call_id, justification=justification)

    def run(self, name: str, call_id: str = "", /, **arguments: Any) -> CallResult:
        """Take one call through the whole pipeline."""
        self._calls += 1
        call_id = call_id or f"call_1_{self._calls}"
        return self.pipeline.run_call(
            {"type": "tool-call", "id": call_id, "name": name, "arguments": json.dumps(arguments)}, self.cancellation
        )

    def good(self, name: str, /, **arguments: Any) -> str:
        """The text of a call that succeeds."""
        result = self.run(name, **arguments)
        assert result.error is None, result
        return text_of(list(result.content))

    def bad(self, name: str, /, **arguments: Any) -> tuple[ErrorCode, str]:
        """Code and text of a call that fails."""
        result = self.run(name, **arguments)
        assert result.error is not None, result
        return result.error, text_of(list(result.content))

    def close(self) -> None:
        """End what runs."""
        self.executor.close()
        self.cancellation.close()
