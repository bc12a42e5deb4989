"""Every tool call passes the stages in order; only the policy allows, and nothing overturns a denial."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

import pytest

from runner.approvals.policy import CallFacts, Decision
from runner.approvals.resolver import Resolution
from runner.cancellation import Cancellation
from runner.errors import ErrorCode, InternalError, RunnerError, SandboxError, StorageError
from runner.messages import text_of
from runner.permission import Mode
from runner.record import replace
from runner.session.events import ApprovalAsked, ApprovalDecided, TodoWrite
from runner.tools.base import ToolOutcome
from runner.tools.pipeline import Denial, Finalized, Pipeline, PreparedCall, content_bytes
from runner.tools.registry import Registry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from runner.messages import ImageBlock, JsonObject, TextBlock, ToolCallBlock, ToolSchema
    from runner.session.events import Event
    from runner.tools.base import Invocation
    from runner.tools.pipeline import CallResult

ALLOW = Decision(allowed=True, rule="yes", reason="fine")


class Echo:
    """A tool that gives its argument back, or does what a test asks."""

    def __init__(self, *, idempotent: bool = False) -> None:
        self.schema: ToolSchema = {
            "name": "echo",
            "description": "",
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "times": {"type": "array", "items": {"type": "integer"}}},
                "required": ["text"],
                "additionalProperties": False,
            },
        }
        self.idempotent = idempotent
        self.invocations: list[Invocation] = []
        self.behave: Callable[[Invocation], ToolOutcome] = lambda invocation: ToolOutcome(
            [{"type": "text", "text": invocation.arguments["text"]}], meta={"exitCode": 0}
        )
        self.described = CallFacts("echo", command="echo", read=("/r",), write=("/w",))

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:
        return bool(arguments["text"] == "safe")

    def facts(self, arguments: JsonObject) -> CallFacts:
        if arguments["text"] == "bad":
            raise RunnerError("text: makes no sense", code=ErrorCode.INVALID_ARGS)
        if arguments["text"] == "broken":
            raise ZeroDivisionError
        return self.described

    def execute(self, invocation: Invocation) -> ToolOutcome:
        self.invocations.append(invocation)
        return self.behave(invocation)


class Plain:
    """A finalizer that changes nothing but one known secret."""

    def begin_step(self) -> None:
        pass

    def finalize(self, call_id: str, content: Sequence[TextBlock | ImageBlock], overflow: str | None) -> Finalized:
        assert call_id == "c1"
        assert overflow is None
        text = text_of(list(content))
        clean = text.replace("hunter22", "[redacted]")
        return Finalized([{"type": "text", "text": clean}], content_bytes(content), redactions=int(text != clean))


class Line:
    """A pipeline over one echo tool, with everything it emits."""

    def __init__(self, **options: Any) -> None:
        self.tool = Echo(idempotent=options.pop("idempotent", False))
        self.asked: list[CallFacts] = []
        self.events: list[Event] = []
        self.registry = Registry([self.tool])
        self.decision: Decision | Exception = ALLOW
        self.cancellation = Cancellation()
        ticks = iter(range(1_000))
        values: dict[str, Any] = {
            "registry": self.registry,
            "mode": Mode.WORKSPACE_WRITE,
            "resolve": self._resolve,
            "emit": self.events.extend,
            "finalizer": Plain(),
            "clock": lambda: next(ticks) * 0.25,
            "timeout": lambda: 7.5,
            "holds_secret": lambda _call, text: "hunter22" in text,
            **options,
        }
        self.pipeline = Pipeline(**values)

    def _resolve(self, facts: CallFacts, *, call_id: str, justification: str | None = None) -> Resolution:
        self.asked.append(facts)
        if isinstance(self.decision, Exception):
            raise self.decision
        outcome = "allowed-once" if self.decision.allowed else "rejected"
        return Resolution(
            self.decision,
            ApprovalAsked(id="a1", call_id=call_id, tool_name=facts.tool, reason=justification),
            ApprovalDecided(id="a1", outcome=outcome, rule=self.decision.rule),
        )

    def run(self, arguments: object = None, *, name: str = "echo") -> CallResult:
        raw = arguments if isinstance(arguments, str) else json.dumps(arguments or {"text": "hello"})
        call: ToolCallBlock = {"type": "tool-call", "id": "c1", "name": name, "arguments": raw}
        return self.pipeline.run_call(call, self.cancellation)

    def records(self) -> list[JsonObject]:
        return [event.record() for event in self.events]


@pytest.fixture
def line() -> Iterator[Line]:
    """An allowing pipeline."""
    made = Line()
    yield made
    made.cancellation.close()


def _text(result: CallResult) -> str:
    return text_of(list(result.content))


def test_an_allowed_call_runs_with_what_was_decided_on(line: Line) -> None:
    """The tool gets arguments, facts, mode and time limit; the result carries what the log needs."""
    result = line.run()

    (invocation,) = line.tool.invocations
    assert invocation.arguments == {"text": "hello"}
    assert invocation.facts is line.asked[0]
    assert (invocation.mode, invocation.timeout, invocation.call_id) == (Mode.WORKSPACE_WRITE, 7.5, "c1")
    assert (_text(result), result.error, result.is_error) == ("hello", None, False)
    assert result.meta == {
        "durationMs": 250,
        "exitCode": 0,
        "mode": "workspace-write",
        "bytes": 5,
        "truncated": False,
        "attempts": 1,
    }


def test_one_pair_of_events_stands_for_every_validated_call(line: Line) -> None:
    """The policy's own two events, asked first."""
    line.run()

    asked, decided = line.records()
    assert asked["type"] == "approval/asked"
    nothing = {"command": None, "paths": None, "escalation": None, "reason": None}
    assert asked["data"] == {"id": "a1", "callId": "c1", "toolName": "echo", **nothing}
    assert decided["type"] == "approval/decided"
    assert decided["data"] == {"id": "a1", "outcome": "allowed-once", "rule": "yes"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("", "text"),
        ("   ", "text"),
        ("{", "not valid JSON"),
        ("null", "not an object"),
        ("[]", "not an object"),
        ('"text"', "not an object"),
        ('{"text": 1}', "arguments.text: 1 is not of type"),
        ('{"text": "a", "times": [1, "x"]}', 'arguments.times[1]: "x" is not'),
        ('{"text": "a", "txet": 1}', "txet"),
        ('{"text": "a", "text": "b"}', "stands twice"),
        ('{"text": NaN}', "not valid JSON"),
        ('{"text": "\\ud800"}', "not valid JSON"),
        ('{"text": "a"} x', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ('{"text": "bad"}', "text: makes no sense"),
        ('{"text": "broken"}', "cannot be told"),
    ],
)
def test_malformed_arguments_are_refused_with_where_and_what(line: Line, arguments: str, says: str) -> None:
    """Nothing malformed reaches the policy, the guards or the tool."""
    result = line.run(arguments)

    assert result.error is ErrorCode.INVALID_ARGS
    assert _text(result).startswith("Denied at stage validate: ")
    assert says in _text(result)
    assert line.events == []
    assert line.tool.invocations == []
    assert result.meta == {
        "durationMs": 0, "mode": "workspace-write", "bytes": result.meta["bytes"], "truncated": False, "attempts": 0,
    }  # fmt: skip


def test_a_message_about_huge_arguments_is_short(line: Line) -> None:
    """An error does not repeat a megabyte to the model."""
    result = line.run({"text": ["x" * 1_000_000], "more": "y" * 1_000_000})

    assert result.error is ErrorCode.INVALID_ARGS
    assert len(_text(result)) < 2_000


def test_unknown_and_masked_tools_are_told_apart(line: Line) -> None:
    """The model learns whether the name is wrong or the tool is not for it."""
    unknown = line.run(name="ecko")
    line.registry.exclude(["echo"])
    masked = line.run()

    assert unknown.error is ErrorCode.UNKNOWN_TOOL
    assert "did you mean echo?" in _text(unknown)
    assert masked.error is ErrorCode.TOOL_MASKED
    assert line.events == []


@pytest.mark.parametrize("raw", ['{"text": "hunter22"}', '{"text": "\\u0068unter22"}'])
def test_a_call_that_holds_a_secret_is_refused(line: Line, raw: str) -> None:
    """Escapes in the raw arguments do not hide it, and nothing about it is logged."""
    result = line.run(raw)

    assert result.error is ErrorCode.INVALID_ARGS
    assert "hunter22" not in _text(result)
    assert line.events == []
    assert line.tool.invocations == []


def test_a_search_for_secrets_that_fails_denies() -> None:
    """What could not be checked is not run."""

    def broken(_call: ToolCallBlock, _text: str) -> bool:
        raise ValueError

    line = Line(holds_secret=broken)

    assert line.run().error is ErrorCode.INVALID_ARGS
    assert line.tool.invocations == []


@pytest.mark.parametrize("may", [True, False])
def test_a_denial_names_stage_rule_reason_and_escalation(line: Line, may: bool) -> None:
    """The model reads who denied it, why, and whether asking for more makes sense."""
    line.decision = Decision(
        allowed=False, rule="no-push", reason="publishing is the workflow's job.", may_escalate=may
    )

    result = line.run()

    assert result.error is ErrorCode.POLICY_DENIED
    assert result.denied
    text = _text(result)
    assert text.startswith("Denied at stage policy: rule no-push: publishing is the workflow's job. Escalation may")
    assert ("may not be asked" in text) is not may
    assert line.records()[1]["data"]["outcome"] == "rejected"
    assert line.records()[1]["data"]["rule"] == "no-push"
    assert line.tool.invocations == []


@pytest.mark.parametrize("wanted", [None, Mode.DANGER_FULL_ACCESS])
def test_a_policy_that_throws_denies_and_is_logged(line: Line, wanted: Mode | None) -> None:
    """The pair is complete, with the default rule and what was asked for."""
    line.tool.described = replace(line.tool.described, escalation=wanted)
    line.decision = ZeroDivisionError()

    result = line.run()

    assert result.error is ErrorCode.POLICY_DENIED
    assert "rule default" in _text(result)
    assert [record["type"] for record in line.records()] == ["approval/asked", "approval/decided"]
    asked, decided = [record["data"] for record in line.records()]
    assert asked == {
        "id": "undecided-c1",
        "callId": "c1",
        "toolName": "echo",
        "command": "echo",
        "paths": {"read": ["/r"], "write": ["/w"]},
        "escalation": wanted and {"mode": "danger-full-access"},
        "reason": None,
    }
    assert decided == {"id": "undecided-c1", "outcome": "rejected", "rule": "default", "by": "policy"}


@pytest.mark.parametrize(
    ("wanted", "rule_mode", "expected"),
    [
        (None, None, Mode.WORKSPACE_WRITE),
        (None, Mode.READ_ONLY, Mode.READ_ONLY),
        (None, Mode.DANGER_FULL_ACCESS, Mode.WORKSPACE_WRITE),
        (Mode.DANGER_FULL_ACCESS, None, Mode.DANGER_FULL_ACCESS),
        (Mode.DANGER_FULL_ACCESS, Mode.READ_ONLY, Mode.READ_ONLY),
    ],
)
def test_a_call_runs_in_the_mode_that_was_decided(
    line: Line, wanted: Mode | None, rule_mode: Mode | None, expected: Mode
) -> None:
    """A rule only tightens; an allowed escalation holds for its call, and the result says the mode."""
    line.tool.described = CallFacts("echo", escalation=wanted)
    line.decision = Decision(allowed=True, rule="r", reason="", mode=rule_mode)

    result = line.run()

    assert line.tool.invocations[0].mode is expected
    assert result.meta["mode"] == expected.value


@pytest.mark.parametrize("wanted", [Mode.DANGER_FULL_ACCESS, None])
def test_the_policy_gets_the_justification_of_an_escalation(line: Line, wanted: Mode | None) -> None:
    """And only of one: a reason given for nothing is none."""
    line.tool.schema["parameters"]["properties"]["justification"] = {"type": "string"}
    line.tool.described = CallFacts("echo", escalation=wanted)

    line.run({"text": "a", "justification": "needs the network"})

    assert line.records()[0]["data"].get("reason") == ("needs the network" if wanted else None)


def test_a_guard_denies_after_the_policy_allowed() -> None:
    """The first denial counts; the guards behind it are not asked."""
    seen: list[str] = []

    def first(call: PreparedCall) -> Denial | None:
        seen.append(call.call["name"])
        return None

    def second(_call: PreparedCall) -> Denial | None:
        return Denial("this file is the judge")

    def third(_call: PreparedCall) -> Denial | None:
        raise AssertionError("not reached")

    line = Line(guards=[first, second, third])

    result = line.run()

    assert result.error is ErrorCode.GUARD_DENIED
    assert "this file is the judge" in _text(result)
    assert seen == ["echo"]
    assert line.records()[1]["data"]["outcome"] == "allowed-once"
    assert line.tool.invocations == []


@pytest.mark.parametrize("answer", [True, False, "yes", ALLOW, object()], ids=lambda answer: type(answer).__name__)
def test_a_guard_that_says_something_odd_denies(answer: object) -> None:
    """There is no answer that allows, and none that is taken for an abstention but None."""
    line = Line(guards=[lambda _call: answer])

    result = line.run()

    assert result.error is ErrorCode.GUARD_DENIED
    assert line.tool.invocations == []


def test_a_guard_that_throws_denies() -> None:
    """A check that could not run counts as failed."""

    def broken(_call: PreparedCall) -> Denial | None:
        raise ZeroDivisionError

    line = Line(guards=[broken])

    assert line.run().error is ErrorCode.GUARD_DENIED
    assert line.tool.invocations == []


def test_a_guard_cannot_change_the_call() -> None:
    """What was decided on is what runs, or nothing runs."""

    def meddling(call: PreparedCall) -> Denial | None:
        call.arguments["text"] = "something else"
        return None

    line = Line(guards=[meddling])

    assert line.run().error is ErrorCode.GUARD_DENIED
    assert line.tool.invocations == []


class Held:
    """Time that was held for a call, and what was said of its use."""

    def __init__(self, granted: float) -> None:
        self.granted = granted
        self.settled: list[dict[str, float]] = []

    def settle(self, used: Mapping[str, float]) -> None:
        self.settled.append(dict(used))


@pytest.mark.parametrize(("granted", "seconds"), [(3.0, 3.0), (0.0, 0.1)])
def test_a_call_gets_the_time_that_is_held_for_it_and_gives_the_rest_back(granted: float, seconds: float) -> None:
    """What it took is counted once, a call that breaks included; a denied call holds nothing."""
    asked: list[tuple[float, int]] = []
    held: list[Held] = []

    def hold_time(most: float, together: int) -> Held:
        asked.append((most, together))
        held.append(Held(granted))
        return held[-1]

    def broken(_invocation: Invocation) -> ToolOutcome:
        raise SandboxError("bwrap is gone")

    line = Line(hold_time=hold_time)

    line.run()
    line.run("{")
    line.tool.behave = broken
    with pytest.raises(SandboxError):
        line.run()

    assert asked == [(7.5, 1)] * 2
    assert [invocation.timeout for invocation in line.tool.invocations] == [seconds] * 2
    assert [each.settled for each in held] == [[{"tool_time": 0.25}]] * 2


def test_a_broken_tool_is_run_again_only_if_that_is_harmless() -> None:
    """An idempotent call gets a second attempt; another one gets a result that says what is unknown."""
    for idempotent in (True, False):
        line = Line(idempotent=idempotent)

        def behave(_invocation: Invocation, tool: Echo = line.tool) -> ToolOutcome:
            if len(tool.invocations) == 1:
                raise BrokenPipeError
            return ToolOutcome([{"type": "text", "text": "second"}])

        line.tool.behave = behave
        result = line.run()
        if idempotent:
            assert (_text(result), result.error, result.meta["attempts"]) == ("second", None, 2)
        else:
            assert result.error is ErrorCode.TOOL_FAILED
            assert "not known" in _text(result)
            assert (result.meta["attempts"], len(line.tool.invocations)) == (1, 1)


def test_a_tool_that_stays_broken_is_a_failed_result() -> None:
    """Two attempts, no more, and the run goes on."""

    def behave(_invocation: Invocation) -> ToolOutcome:
        raise BrokenPipeError

    line = Line(idempotent=True)
    line.tool.behave = behave

    result = line.run()

    assert (result.error, result.meta["attempts"]) == (ErrorCode.TOOL_FAILED, 2)


def test_a_broken_sandbox_ends_the_run(line: Line) -> None:
    """It is no failure of the command, and never a result that looks like one."""

    def behave(_invocation: Invocation) -> ToolOutcome:
        raise SandboxError("bwrap is gone")

    line.tool.behave = behave

    with pytest.raises(SandboxError):
        line.run()


def test_a_log_that_cannot_be_written_stops_the_call(line: Line) -> None:
    """Without its approval in the log a call does not run."""

    def emit(_events: Sequence[Event]) -> None:
        raise StorageError("disk full")

    line = Line(emit=emit)

    with pytest.raises(StorageError):
        line.run()
    assert line.tool.invocations == []


def test_a_replaced_outcome_leaves_the_digest_of_what_it_replaced(tmp_path: Any) -> None:
    """Hooks see the outcome in turn; the log can prove what was taken out."""
    overflow = tmp_path / "overflow"
    overflow.write_text("long")

    def replace(call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
        assert call.arguments == {"text": "hello"}
        return ToolOutcome([{"type": "text", "text": text_of(list(outcome.content)) + "!"}], meta=outcome.meta)

    line = Line(after_tool=[lambda _call, _outcome: None, replace, replace])
    line.tool.behave = lambda _invocation: ToolOutcome([{"type": "text", "text": "hello"}], overflow=str(overflow))

    result = line.run()

    assert _text(result) == "hello!!"
    assert result.meta["replaced"] == {"sha256": hashlib.sha256(b'[{"text":"hello","type":"text"}]').hexdigest()}
    assert not overflow.exists()


def test_a_hook_that_throws_after_the_call_ends_the_run() -> None:
    """A result that could not be inspected is not passed on."""

    def broken(_call: PreparedCall, _outcome: ToolOutcome) -> ToolOutcome | None:
        raise ZeroDivisionError

    line = Line(after_tool=[broken])

    with pytest.raises(InternalError):
        line.run()


def test_secrets_in_results_are_taken_out_and_counted(line: Line) -> None:
    """The event says how many and where, before the result is written."""
    line.tool.behave = lambda _invocation: ToolOutcome(
        [{"type": "text", "text": "pw hunter22"}], events=[TodoWrite(todos=[])]
    )

    result = line.run()

    assert _text(result) == "pw [redacted]"
    assert [event.TYPE for event in result.events] == ["todo/write", "redaction"]
    assert result.events[1].record()["data"] == {"kind": "secret", "count": 1, "where": "tool/result c1"}


@pytest.mark.parametrize(
    ("name", "arguments", "safe"),
    [
        ("echo", '{"text": "safe"}', True),
        ("echo", '{"text": "other"}', False),
        ("echo", "{", False),
        ("echo", "{}", False),
        ("none", '{"text": "safe"}', False),
    ],
)
def test_a_call_is_safe_to_overlap_only_if_its_tool_says_so(line: Line, name: str, arguments: str, safe: bool) -> None:
    """Doubt means exclusive, and asking leaves no trace."""
    call: ToolCallBlock = {"type": "tool-call", "id": "c1", "name": name, "arguments": arguments}

    assert line.pipeline.parse(call).safe is safe
    assert line.events == []


def test_a_classifier_that_throws_or_says_something_odd_means_exclusive(line: Line) -> None:
    """Only exactly true counts."""
    call: ToolCallBlock = {"type": "tool-call", "id": "c1", "name": "echo", "arguments": '{"text": "safe"}'}
    for answer in (1, "yes", ZeroDivisionError()):

        def classify(_arguments: JsonObject, answer: Any = answer) -> Any:
            if isinstance(answer, Exception):
                raise answer
            return answer

        line.tool.is_concurrency_safe = classify  # type: ignore[method-assign,assignment]  # the tool is wrong on purpose
        assert line.pipeline.parse(call).safe is False
        assert line.run().error is None
