"""Whatever a model writes as a call, it gets a result, and the log keeps its order."""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.agent.settings import CompactionSpec
from runner.approvals.patterns import PathPattern
from runner.approvals.policy import CallFacts, Decision, PathRule, Policy, Rule
from runner.approvals.resolver import Resolution, Resolver
from runner.cancellation import Cancellation
from runner.compaction.spill import Spill, SpillStore
from runner.errors import ErrorCode
from runner.permission import Mode, Trust
from runner.redaction import Redactor
from runner.sandbox.base import SandboxSpec
from runner.sandbox.executor import Executor, session_policy
from runner.session.events import ApprovalAsked, ApprovalDecided, StepStart, TurnStart
from runner.session.log import SessionLog
from runner.session.media import MediaStore
from runner.tools.base import ToolOutcome
from runner.tools.builtin.files import EditFile, ReadFile, WriteFile
from runner.tools.builtin.finding import ReportFinding
from runner.tools.builtin.patch import ApplyPatch
from runner.tools.builtin.search import Glob, Grep
from runner.tools.builtin.shell import Shell
from runner.tools.builtin.todo import Todo
from runner.tools.pipeline import DENIALS, Denial, Pipeline, PreparedCall
from runner.tools.registry import Registry
from runner.tools.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Iterator

    import pytest

    from runner.messages import JsonObject, ToolCallBlock, ToolSchema
    from runner.session.events import Event
    from runner.tools.base import Invocation

_INSIDE = (PathPattern.of("**"),)

BOUNDED = settings(max_examples=150, deadline=None)

_names = st.sampled_from(
    [
        "shell",
        "read_file",
        "write_file",
        "edit_file",
        "glob",
        "grep",
        "todo",
        "apply_patch",
        "report_finding",
        "other",
        "",
    ]
)
_keys = st.sampled_from(
    ["command", "path", "content", "edits", "pattern", "glob", "todos", "offset", "limit", "old", "new", "status",
     "timeout", "background", "sandbox_permissions", "justification", "patch", "severity", "message", "line",
     "endLine", "x"]
)  # fmt: skip
_words = st.sampled_from(
    ["a", "sub/a", "sub", "../x", "/", "/etc/passwd", "", ".", "~", "a\0", "*", "**/*", "[", "(", "(a|b)", "spill:c1",
     "spill:../x", "workspace-write", "danger-full-access", "pending", "link", "loop", "x" * 5_000, "\u0661", "\x1b[0m"]
)  # fmt: skip
_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _words | st.text(max_size=20)
_values = st.recursive(
    _scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_keys, inner, max_size=4), max_leaves=12
)


@st.composite
def _likely(draw: st.DrawFn) -> tuple[str, Any]:
    """A call with the right keys, often with the right types."""
    name = draw(
        st.sampled_from(
            ["read_file", "write_file", "edit_file", "apply_patch", "glob", "grep", "todo", "report_finding"]
        )
    )
    word = _words | st.text(max_size=12)
    number = st.integers(min_value=-2, max_value=10**20)
    hunk = st.tuples(st.integers(0, 3), st.sampled_from(["one", "two", "x"]), st.sampled_from(["1", "caf\xe9", ""]))
    patch = st.builds(
        lambda old, new, hunks: (
            f"--- {old}\n+++ {new}\n" + "".join(f"@@ -{n} +{n} @@\n-{a}\n+{b}\n" for n, a, b in hunks)
        ),
        word,
        word,
        st.lists(hunk, max_size=2),
    )
    edit = st.fixed_dictionaries({"old": word, "new": word})
    shapes: dict[str, st.SearchStrategy[Any]] = {
        "read_file": st.fixed_dictionaries({"path": word}, optional={"offset": number, "limit": number}),
        "write_file": st.fixed_dictionaries({"path": word, "content": word}),
        "edit_file": st.fixed_dictionaries({"path": word, "edits": st.lists(edit, max_size=3)}),
        "apply_patch": st.fixed_dictionaries({"patch": st.lists(patch, max_size=3).map("".join)}),
        "report_finding": st.fixed_dictionaries(
            {"path": word, "severity": st.sampled_from(["error", "note", "bad"]), "message": word},
            optional={"line": number, "endLine": number, "rule": word},
        ),
        "glob": st.fixed_dictionaries({"pattern": word}, optional={"path": word}),
        "grep": st.fixed_dictionaries({"pattern": word}, optional={"path": word, "glob": word}),
        "todo": st.fixed_dictionaries({"todos": st.lists(st.fixed_dictionaries({"content": word, "status": word}))}),
    }
    return name, draw(shapes[name])


class Bench:
    """The built-in tools over a small tree, without a sandbox: only file tools are allowed to run."""

    def __init__(self, root: Path) -> None:
        self.root = root / "workspace"
        (self.root / "sub").mkdir(parents=True)
        (self.root / "a").write_text("one\ntwo\n")
        (self.root / "sub" / "a").write_bytes(b"caf\xe9\n")
        (self.root / "link").symlink_to("a")
        (self.root / "loop").symlink_to("loop")
        policy = session_policy(
            SandboxSpec(),
            mode=Mode.DANGER_FULL_ACCESS,
            workspace=str(self.root),
            state=str(root / "state"),
            hidden=(),
            environment={"PATH": "/usr/bin:/bin"},
        )
        self.executor = Executor(None, policy)
        media = MediaStore(str(root))
        store = SpillStore(str(root / "spill"))
        spill = Spill(store, spec=CompactionSpec(), window=64_000, redactor=Redactor({}))
        self.events: list[Event] = []
        self.cancellation = Cancellation()
        self.pipeline = Pipeline(
            registry=Registry(
                [
                    Shell(self.executor, overflow=str(root / "overflow")),
                    ReadFile(self.executor, page_bytes=spill.page_bytes, spill=store.read, keep_image=media.write),
                    WriteFile(self.executor),
                    EditFile(self.executor),
                    ApplyPatch(self.executor),
                    Glob(self.executor),
                    Grep(self.executor, page_bytes=spill.page_bytes),
                    Todo(),
                    ReportFinding(self.executor),
                ]
            ),
            mode=Mode.DANGER_FULL_ACCESS,
            resolve=Resolver(
                Policy((Rule(id="inside", allow=True, paths=PathRule(read=_INSIDE, write=_INSIDE)),)),
                workspace=str(self.root),
                mode=Mode.DANGER_FULL_ACCESS,
                trust=Trust.TRUSTED,
                new_id=lambda: str(len(self.events)),
            ).resolve,
            emit=self.events.extend,
            finalizer=spill,
            clock=time.monotonic,
            timeout=lambda: 20.0,
            holds_secret=lambda _call, _text: False,
        )

    def check(self, name: str, raw: str) -> None:
        self.events.clear()
        call: ToolCallBlock = {"type": "tool-call", "id": "c1", "name": name, "arguments": raw}
        result = self.pipeline.run_call(call, self.cancellation)
        assert result.content
        assert len(json.dumps(result.content)) < 400_000
        assert result.meta["attempts"] == (0 if result.denied else 1)
        decided = [event.record()["data"]["outcome"] for event in self.events if event.TYPE == "approval/decided"]
        if result.error in (ErrorCode.INVALID_ARGS, ErrorCode.UNKNOWN_TOOL):
            assert decided == []
        else:
            assert decided == ["rejected" if result.error is ErrorCode.POLICY_DENIED else "allowed-once"]


def _bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    made = Bench(Path(os.path.realpath(tmp_path_factory.mktemp("bench"))))
    yield made
    made.executor.close()


def test_any_call_gets_a_result(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Random names and arguments, well-formed or not: never an exception, never an unbounded text."""
    bench = next(made := _bench(tmp_path_factory))

    @BOUNDED
    @given(name=_names, raw=st.dictionaries(_keys, _values, max_size=5).map(json.dumps) | st.text(max_size=40))
    def check(name: str, raw: str) -> None:
        bench.check(name, raw)

    check()
    next(made, None)


def test_any_likely_call_gets_a_result_and_stays_inside(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Calls of the right shape with odd values run for real; nothing outside the workspace changes."""
    bench = next(made := _bench(tmp_path_factory))
    before = sorted(path.name for path in bench.root.parent.iterdir())

    @BOUNDED
    @given(call=_likely())
    def check(call: tuple[str, Any]) -> None:
        bench.check(call[0], json.dumps(call[1]))

    check()
    assert {path.name for path in bench.root.parent.iterdir()} - set(before) <= {"spill"}
    next(made, None)


def _resolve(facts: CallFacts, *, call_id: str, justification: str | None = None) -> Resolution:
    allowed = facts.command is None and justification is None
    return Resolution(
        Decision(allowed=allowed, rule="r", reason=""),
        ApprovalAsked(id=call_id, call_id=call_id, tool_name=facts.tool),
        ApprovalDecided(id=call_id, outcome="allowed-once" if allowed else "rejected"),
    )


class _Tool:
    """A tool whose argument says whether it is safe, how long it takes and what the policy thinks."""

    idempotent = False

    def __init__(self) -> None:
        self.schema: ToolSchema = {"name": "work", "description": "", "parameters": {"type": "object"}}
        self.exclusive = threading.Lock()
        self.running = 0
        self.overlapped = False

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:
        return bool(arguments["safe"])

    def facts(self, arguments: JsonObject) -> CallFacts:
        return CallFacts("work", command="denied" if arguments["denied"] else None)

    def execute(self, invocation: Invocation) -> ToolOutcome:
        with self.exclusive:
            self.running += 1
            self.overlapped |= self.running > 1 and not invocation.arguments["safe"]
        time.sleep(invocation.arguments["ms"] / 1_000)
        with self.exclusive:
            self.overlapped |= self.running > 1 and not invocation.arguments["safe"]
            self.running -= 1
        return ToolOutcome([{"type": "text", "text": invocation.call_id}])


_work = st.fixed_dictionaries(
    {"safe": st.booleans(), "denied": st.booleans(), "ms": st.integers(min_value=0, max_value=3)}
)


@settings(max_examples=40, deadline=None)
@given(
    works=st.lists(_work, max_size=10),
    parallel=st.integers(min_value=1, max_value=4),
    stop_after=st.integers(min_value=0, max_value=12),
)
def test_calls_and_results_are_written_in_model_order(works: list[JsonObject], parallel: int, stop_after: int) -> None:
    """Random mixes of safe, exclusive and denied calls, cancelled anywhere: one call, one result each, in order."""
    with tempfile.TemporaryDirectory() as directory:
        log = SessionLog.create(Path(directory) / "log", header={"id": "session-1"}, clock=lambda: 1)
        log.append(TurnStart(turn=1))
        log.append(StepStart(turn=1, step=1))
        events: list[Event] = []
        log.observers.append(events.append)
        cancellation = Cancellation()
        tool = _Tool()
        spill = Spill(SpillStore(f"{directory}/spill"), spec=CompactionSpec(), window=64_000, redactor=Redactor({}))

        def append(event: Event) -> Event:
            written = log.append(event)
            if sum(each.TYPE == "tool/result" for each in events) == stop_after:
                cancellation.cancel("SIGTERM")
            return written

        pipeline = Pipeline(
            registry=Registry([tool]),
            mode=Mode.WORKSPACE_WRITE,
            resolve=_resolve,
            emit=log.append_many,
            finalizer=spill,
            clock=time.monotonic,
            timeout=lambda: 5.0,
            holds_secret=lambda _call, _text: False,
        )
        scheduler = Scheduler(
            pipeline,
            append=append,
            new_id=lambda: str(len(events)),
            mode=Mode.WORKSPACE_WRITE,
            cancellation=cancellation,
            parallel=parallel,
            before_side_effects=log.barrier,
        )
        calls: list[ToolCallBlock] = [
            {"type": "tool-call", "id": str(number), "name": "work", "arguments": json.dumps(work)}
            for number, work in enumerate(works)
        ]

        report = scheduler.run(calls, turn=1, step=1)
        log.close()
        cancellation.close()

    order = [str(number) for number in range(len(works))]
    records = [event.record() for event in events]
    called = [record["data"]["callId"] for record in records if record["type"] == "tool/call"]
    resulted = [record for record in records if record["type"] == "tool/result"]
    assert called == order
    assert [record["data"]["message"]["source"]["callId"] for record in resulted] == order
    assert [result.call["id"] for result in report.results] == order
    for record in resulted:
        (seq,) = record["sourceEventSeqs"]
        assert seq < record["seq"]
    assert not tool.overlapped
    seen_abort = False
    for work, result in zip(works, report.results, strict=True):
        aborted = result.error is ErrorCode.ABORTED_BEFORE_DISPATCH
        assert aborted or result.error is (ErrorCode.POLICY_DENIED if work["denied"] else None)
        # Behind a call that was not started no exclusive call may have run.
        assert aborted or not seen_abort or work["safe"]
        seen_abort |= aborted


@settings(max_examples=100, deadline=None)
@given(
    allowed=st.booleans(),
    guards=st.lists(st.sampled_from(["abstain", "deny", "throw", "change"]), max_size=4),
    more=st.sampled_from(["abstain", "deny", "throw", "change"]),
    place=st.integers(min_value=0, max_value=4),
)
def test_adding_a_guard_never_allows_more(allowed: bool, guards: list[str], more: str, place: int) -> None:
    """Whatever guards there are, one more can only take away; and none runs a call that the policy denied."""

    def guard(kind: str) -> Any:
        def decide(call: PreparedCall) -> Denial | None:
            if kind == "throw":
                raise ZeroDivisionError
            if kind == "change":
                call.arguments["denied"] = True
            return Denial("no") if kind == "deny" else None

        return decide

    def runs(kinds: list[str]) -> bool:
        pipeline = Pipeline(
            registry=Registry([_Tool()]),
            mode=Mode.READ_ONLY,
            resolve=_resolve,
            emit=lambda _events: None,
            finalizer=Spill(SpillStore("/nowhere"), spec=CompactionSpec(), window=64_000, redactor=Redactor({})),
            clock=lambda: 0.0,
            timeout=lambda: 1.0,
            holds_secret=lambda _call, _text: False,
            guards=[guard(kind) for kind in kinds],
        )
        raw = json.dumps({"safe": True, "denied": not allowed, "ms": 0})
        cancellation = Cancellation()
        result = pipeline.run_call({"type": "tool-call", "id": "1", "name": "work", "arguments": raw}, cancellation)
        cancellation.close()
        assert result.error is None or result.error in DENIALS
        return result.error is None

    before, after = runs(guards), runs([*guards[:place], more, *guards[place:]])

    assert before or not after
    assert allowed or not before
