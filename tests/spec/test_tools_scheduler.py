"""The calls of one reply run in groups, are written in model order, and each gets a result."""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from runner.approvals.policy import CallFacts, Decision
from runner.approvals.resolver import Resolution
from runner.cancellation import Cancellation
from runner.errors import ErrorCode, RunnerError, SandboxError, StorageError
from runner.messages import text_of
from runner.permission import Mode
from runner.session.events import ApprovalAsked, ApprovalDecided, StepStart, TodoWrite, TurnStart
from runner.session.log import SessionLog
from runner.tools.base import ToolOutcome
from runner.tools.pipeline import Finalized, Pipeline, content_bytes
from runner.tools.registry import Registry
from runner.tools.scheduler import Scheduler

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from runner.messages import ImageBlock, JsonObject, TextBlock, ToolCallBlock, ToolSchema
    from runner.session.events import Event
    from runner.tools.base import Invocation
    from runner.tools.scheduler import CallReport


class Work:
    """A tool of one name: safe or not, with a behaviour."""

    idempotent = False

    def __init__(self, name: str, behave: Callable[[Invocation], ToolOutcome], *, safe: bool) -> None:
        self.schema: ToolSchema = {"name": name, "description": "", "parameters": {"type": "object"}}
        self._behave = behave
        self._safe = safe

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:
        return self._safe and isinstance(arguments, dict)

    def facts(self, arguments: JsonObject) -> CallFacts:
        return CallFacts(self.schema["name"], command=arguments.get("command"))

    def execute(self, invocation: Invocation) -> ToolOutcome:
        return self._behave(invocation)


class Unbounded:
    """A finalizer that leaves everything as it is and remembers the order."""

    def __init__(self) -> None:
        self.steps = 0
        self.seen: list[str] = []

    def begin_step(self) -> None:
        self.steps += 1

    def finalize(self, call_id: str, content: Sequence[TextBlock | ImageBlock], overflow: str | None) -> Finalized:
        assert overflow is None
        assert content
        self.seen.append(call_id)
        if "unkept" in text_of(list(content)):
            raise StorageError("no space for a spill")
        return Finalized(list(content), content_bytes(content))


class Share:
    """All the time that was asked for."""

    def __init__(self, granted: float) -> None:
        self.granted = granted

    def settle(self, used: Mapping[str, float]) -> None:
        assert used.keys() == {"tool_time"}


class Reply:
    """A scheduler over a real session log, with tools that leave a trace of what ran when."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.log = SessionLog.create(directory, header={"id": "session-1"}, clock=lambda: 1_000)
        self.events: list[Event] = []
        self.log.observers.append(self.events.append)
        self.log.append(TurnStart(turn=1))
        self.log.append(StepStart(turn=1, step=1))
        self.events.clear()
        self.cancellation = Cancellation()
        self.finalizer = Unbounded()
        self.trace: list[str] = []
        self.threads: list[str] = []
        self.shares: list[int] = []
        self.barriers: list[int] = []
        self.running = 0
        self.most = 0
        self._lock = threading.Lock()
        self.behaviours: dict[str, Callable[[], ToolOutcome]] = {}
        pipeline = Pipeline(
            registry=Registry([Work("read", self._work, safe=True), Work("write", self._work, safe=False)]),
            mode=Mode.WORKSPACE_WRITE,
            resolve=_resolve,
            emit=self.log.append_many,
            finalizer=self.finalizer,
            clock=time.monotonic,
            timeout=lambda: 10.0,
            holds_secret=lambda _call, _text: False,
            hold_time=self._hold_time,
        )
        values: dict[str, Any] = {
            "append": self.log.append,
            "new_id": lambda: f"id-{len(self.events)}",
            "mode": Mode.WORKSPACE_WRITE,
            "cancellation": self.cancellation,
            "parallel": 10,
            "before_side_effects": lambda: self.barriers.append(len(self.trace)),
            **options,
        }
        self.scheduler = Scheduler(pipeline, **values)

    def _hold_time(self, most: float, together: int) -> Share:
        with self._lock:
            self.shares.append(together)
        return Share(most)

    def _work(self, invocation: Invocation) -> ToolOutcome:
        with self._lock:
            self.running += 1
            self.most = max(self.most, self.running)
            self.trace.append(f"start {invocation.call_id}")
            self.threads.append(threading.current_thread().name)
        try:
            behave = self.behaviours.get(invocation.call_id)
            return behave() if behave else _said(f"did {invocation.call_id}")
        finally:
            with self._lock:
                self.running -= 1
                self.trace.append(f"end {invocation.call_id}")

    def run(self, *calls: str) -> CallReport:
        """Calls as ``tool id [command]``."""
        return self.scheduler.run([_call(call) for call in calls], turn=1, step=1)

    def written(self) -> list[str]:
        """The events as short text, in order."""
        out = []
        for event in self.events:
            data = event.record()["data"]
            call_id = data.get("callId") or data.get("message", {}).get("source", {}).get("callId", "")
            out.append(f"{event.TYPE} {call_id}".strip())
        return out

    def results(self) -> dict[str, tuple[str, str | None]]:
        """Text and error code of each result in the log."""
        out = {}
        for event in self.events:
            record = event.record()
            if record["type"] == "tool/result":
                (block,) = record["data"]["message"]["content"]
                code = record["data"].get("error", {}).get("code")
                assert block["isError"] is (code is not None)
                out[block["toolCallId"]] = (text_of(block["content"]), code)
        return out


def _resolve(facts: CallFacts, *, call_id: str, justification: str | None = None) -> Resolution:
    allowed = facts.command != "denied" and justification is None
    return Resolution(
        Decision(allowed=allowed, rule="r", reason="because"),
        ApprovalAsked(id=call_id, call_id=call_id, tool_name=facts.tool),
        ApprovalDecided(id=call_id, outcome="allowed-once" if allowed else "rejected"),
    )


def _call(text: str) -> ToolCallBlock:
    name, call_id, *command = text.split()
    arguments = json.dumps({"command": command[0]} if command else {})
    return {"type": "tool-call", "id": call_id, "name": name, "arguments": arguments}


def _said(text: str) -> ToolOutcome:
    return ToolOutcome([{"type": "text", "text": text}])


@pytest.fixture
def reply(tmp_path: Path) -> Iterator[Reply]:
    """A scheduler with ten places."""
    made = Reply(tmp_path / "log")
    yield made
    made.log.close()
    made.cancellation.close()


def test_a_call_is_written_before_and_its_result_after_it_ran(reply: Reply) -> None:
    """Call, approval, barrier, work, what the tool wants logged, result; the result names its call."""
    reply.behaviours["1"] = lambda: ToolOutcome([{"type": "text", "text": "x"}], events=[TodoWrite(todos=[])])

    report = reply.run("write 1")

    assert reply.written() == [
        "tool/call 1", "approval/asked 1", "approval/decided", "todo/write", "tool/result 1",
    ]  # fmt: skip
    call, result = reply.events[0].record(), reply.events[-1].record()
    assert result["sourceEventSeqs"] == [call["seq"]]
    assert result["surfaceOp"] == "append"
    assert result["data"]["message"]["role"] == "user"
    assert result["data"]["message"]["content"] == [
        {"type": "tool-result", "toolCallId": "1", "content": [{"type": "text", "text": "x"}], "isError": False}
    ]
    assert "error" not in result["data"]
    assert result["data"]["meta"]["attempts"] == 1
    assert (report.ends_run, len(report.results)) == (False, 1)


def test_safe_calls_overlap_and_an_exclusive_one_is_a_barrier(reply: Reply) -> None:
    """Reads before a write end before it starts; reads behind it start after it ended."""
    meeting = threading.Barrier(2)

    def meet() -> ToolOutcome:
        meeting.wait(10)
        return _said("met")

    reply.behaviours = {"1": meet, "2": meet, "4": meet, "5": meet}

    reply.run("read 1", "read 2", "write 3", "read 4", "read 5")

    at = {entry: index for index, entry in enumerate(reply.trace)}
    assert max(at["end 1"], at["end 2"]) < at["start 3"]
    assert at["end 3"] < min(at["start 4"], at["start 5"])
    assert [name for name in reply.written() if name.startswith("tool/result")] == [
        f"tool/result {n}" for n in (1, 2, 3, 4, 5)
    ]


def test_results_are_written_in_model_order_whatever_ends_first(reply: Reply) -> None:
    """The last call of a group ends first and waits for its turn."""
    first_may_end = threading.Event()

    def slow() -> ToolOutcome:
        assert first_may_end.wait(10)
        return _said("slow")

    def fast() -> ToolOutcome:
        first_may_end.set()
        return _said("fast")

    reply.behaviours = {"1": slow, "2": fast}

    reply.run("read 1", "read 2")

    assert reply.trace.index("end 2") < reply.trace.index("end 1")
    assert reply.written()[-2:] == ["tool/result 1", "tool/result 2"]
    assert reply.finalizer.seen == ["1", "2"]
    assert reply.finalizer.steps == 1


@pytest.mark.parametrize(("parallel", "most"), [(1, 1), (3, 3)])
def test_no_more_calls_run_at_once_than_allowed(tmp_path: Path, parallel: int, most: int) -> None:
    """The pool rolls: when one ends the next starts."""
    reply = Reply(tmp_path / "log", parallel=parallel)

    def nap() -> ToolOutcome:
        time.sleep(0.02)
        return _said("")

    reply.behaviours = {str(number): nap for number in range(9)}

    reply.run(*[f"read {number}" for number in range(9)])
    reply.log.close()

    assert reply.most == most


def test_calls_that_run_at_the_same_time_share_what_time_is_left(tmp_path: Path) -> None:
    """Each is told how many may run beside it: as many as there are, and as many as may."""
    reply = Reply(tmp_path / "log", parallel=3)

    reply.run("read 1", "read 2", "write 3", "read 4", "read 5", "read 6", "read 7", "read 8 denied")
    reply.log.close()

    assert reply.shares == [2, 2, 1, 3, 3, 3, 3]


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_denied_call_stops_what_stands_behind_it_where_that_ends_the_run(tmp_path: Path, kind: str) -> None:
    """What stands before it runs, beside it in a group too; nothing behind it is put to the policy."""
    reply = Reply(tmp_path / "log", abort_on_denied=True)

    report = reply.run(f"{kind} 1", f"{kind} 2 denied", f"{kind} 3", "write 4", "unknown 5")
    reply.log.close()

    assert report.ends_run
    codes = [code for _, code in reply.results().values()]
    assert codes == [None, "POLICY_DENIED", *["ABORTED_BEFORE_DISPATCH"] * 3]
    assert [entry for entry in reply.trace if entry.startswith("start")] == ["start 1"]
    assert [name for name in reply.written() if name.startswith("approval/asked")] == [
        "approval/asked 1", "approval/asked 2",
    ]  # fmt: skip


def test_a_malformed_call_does_not_end_a_run_that_a_denied_one_ends(tmp_path: Path) -> None:
    """Want of authority does, a mistake does not."""
    reply = Reply(tmp_path / "log", abort_on_denied=True)

    report = reply.run("unknown 1", "write 2")
    reply.log.close()

    assert not report.ends_run
    assert [code for _, code in reply.results().values()] == ["UNKNOWN_TOOL", None]


def test_a_single_call_pays_for_no_thread(reply: Reply) -> None:
    """It runs where the loop runs, safe or not; so does what is left when others were denied."""
    reply.run("read 1", "write 2", "read 3", "read 4 denied")

    assert reply.threads == [threading.current_thread().name] * 3


def test_the_log_is_made_durable_once_before_a_group_that_may_change_something(reply: Reply) -> None:
    """Reads alone need no barrier, a denied call neither."""
    reply.run("read 1", "read 2", "write 3", "write 4 denied", "read 5 command", "read 6 command", "read 7 denied")

    assert reply.barriers == [4, 6]


def test_denied_and_broken_calls_get_results_and_do_not_stop_the_others(reply: Reply) -> None:
    """Every call of the reply has exactly one result."""

    def broken() -> ToolOutcome:
        raise ZeroDivisionError

    reply.behaviours["3"] = broken

    report = reply.run("write 1 denied", "unknown 2", "read 3", "read 4")

    codes = {call: code for call, (_, code) in reply.results().items()}
    assert codes == {"1": "POLICY_DENIED", "2": "UNKNOWN_TOOL", "3": "TOOL_FAILED", "4": None}
    assert not report.ends_run
    assert [result.call["id"] for result in report.results] == ["1", "2", "3", "4"]


def test_after_a_cancellation_started_calls_drain_and_the_rest_is_written_as_not_started(tmp_path: Path) -> None:
    """No call is left without a result, and nothing new starts."""
    reply = Reply(tmp_path / "log", parallel=2)
    together = threading.Barrier(2)

    def cancel() -> ToolOutcome:
        together.wait(10)
        reply.cancellation.cancel("SIGTERM")
        return _said("drained 1")

    def drain() -> ToolOutcome:
        together.wait(10)
        reply.cancellation.wait(10)
        return _said("drained 2")

    reply.behaviours = {"1": cancel, "2": drain}

    reply.run("read 1", "read 2", "read 3", "write 4", "nonsense 5")
    reply.log.close()

    results = reply.results()
    assert (results["1"], results["2"]) == (("drained 1", None), ("drained 2", None))
    for call in ("3", "4", "5"):
        assert results[call] == ("Not started: the run was cancelled", "ABORTED_BEFORE_DISPATCH")
    assert reply.written().count("approval/asked 4") == 0
    assert [entry for entry in reply.trace if entry.startswith("start")] in (
        ["start 1", "start 2"], ["start 2", "start 1"],
    )  # fmt: skip


def test_a_halt_stops_what_has_not_started(tmp_path: Path) -> None:
    """A limit or a denial in the middle of a reply ends it there, with the reason."""
    stop: list[str] = []
    reply = Reply(tmp_path / "log", halt=lambda: stop[0] if stop else None)

    def reach() -> ToolOutcome:
        stop.append("the limit tool is reached")
        return _said("last")

    reply.behaviours["1"] = reach

    reply.run("write 1", "write 2")
    reply.log.close()

    assert reply.results()["1"] == ("last", None)
    assert reply.results()["2"] == ("Not started: the limit tool is reached", "ABORTED_BEFORE_DISPATCH")


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_broken_sandbox_ends_the_run_with_every_call_written(reply: Reply, kind: str) -> None:
    """The call it hit says so, what ran beside it keeps its result, the rest is not started."""

    def broken() -> ToolOutcome:
        raise SandboxError("the sandbox is gone")

    reply.behaviours["2"] = broken

    with pytest.raises(SandboxError):
        reply.run(f"{kind} 1", f"{kind} 2", "write 3")

    results = reply.results()
    assert results["1"][1] is None
    assert results["2"][1] == "SANDBOX_UNAVAILABLE"
    assert "the sandbox is gone" in results["2"][0]
    assert results["3"][1] == "ABORTED_BEFORE_DISPATCH"


def test_a_spill_that_cannot_be_written_ends_the_run_with_a_result(reply: Reply) -> None:
    """The model's call is closed in the log, with what failed."""
    reply.behaviours["1"] = lambda: _said("unkept")

    with pytest.raises(StorageError):
        reply.run("write 1", "write 2")

    assert reply.results()["1"][1] == "STORAGE_FAILED"
    assert reply.results()["2"][1] == "ABORTED_BEFORE_DISPATCH"


def test_a_log_that_breaks_starts_nothing_more(tmp_path: Path) -> None:
    """Without its record nothing may happen."""
    reply = Reply(tmp_path / "log")
    broken = threading.Event()

    def append(event: Event) -> Event:
        if event.TYPE == "tool/result":
            broken.set()
            raise StorageError("disk full")
        return reply.log.append(event)

    reply.scheduler._append = append

    def wait() -> ToolOutcome:
        assert broken.wait(30)
        time.sleep(0.2)  # until the scheduler has heard of it
        return _said("")

    reply.behaviours = {str(number): wait for number in range(1, 30)} | {"0": lambda: _said("")}

    with pytest.raises(RunnerError) as caught:
        reply.run(*[f"read {number}" for number in range(30)], "write 99")
    reply.log.close()

    assert caught.value.code is ErrorCode.STORAGE_FAILED
    assert "start 99" not in reply.trace
    assert len([entry for entry in reply.trace if entry.startswith("start")]) < 25
    assert reply.running == 0


def test_the_end_of_a_turn_stops_the_background(tmp_path: Path) -> None:
    """What was stopped is handed to the loop, which tells the model."""
    reply = Reply(tmp_path / "log", stop_background=lambda: ["call_1_1"])

    assert reply.scheduler.end_turn() == ["call_1_1"]
    reply.log.close()


def test_no_calls_are_no_events(reply: Reply) -> None:
    """An empty reply is legal."""
    assert reply.run().results == []
    assert reply.events == []
