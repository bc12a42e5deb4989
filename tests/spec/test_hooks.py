"""The hook points are a closed table: each is intercepted here, and shows what it may change and what not."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.agent.hook import POINTS, Hook, private_copy
from runner.cancellation import Cancellation
from runner.config.resolve import load_run
from runner.errors import SandboxError
from runner.messages import text_of
from runner.run import FinishedRun, RunOptions, run_task
from runner.session import events as ev
from runner.testing.model_server import ModelServer, chat_reply, json_reply
from runner.tools.base import ToolOutcome
from runner.tools.pipeline import Denial

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from conftest import MakeRepo, Nightshift, ScriptedTask

    from runner.agent.hook import RequestAccess, RequestEnded, StepStarting, TurnOver
    from runner.messages import JsonObject, Message
    from runner.session.events import Event
    from runner.testing.model_server import Reply
    from runner.tools.pipeline import PreparedCall

pytestmark = pytest.mark.backend("bubblewrap")


class BrokenError(Exception):
    """What the hooks of these tests raise."""


def call(command: str = "echo ran > ran.txt; echo shown", identity: str = "c1") -> Reply:
    """An answer that asks for one command."""
    return chat_reply("I run it.", calls=[(identity, "shell", json.dumps({"command": command}))], usage=usage(900, 50))


def usage(read: int, written: int) -> JsonObject:
    """The usage of an answer, as the dialect has it."""
    return {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}


DONE = chat_reply("Done.", usage=usage(1_000, 10))


class Bench:
    """Runs a task in this process with further hooks, against a model server."""

    def __init__(self, scripted_task: ScriptedTask, workspace: Path, root: Path, read: Callable[..., Any]) -> None:
        self.task = scripted_task
        self.workspace = workspace
        self.artifacts = root / "artifacts"
        self._read = read
        self.bodies: list[JsonObject] = []

    def run(
        self, hooks: Sequence[Hook], replies: Sequence[Reply], *, task: Any = None, profile: Any = None
    ) -> FinishedRun:
        """Run with paranoid comparisons of every request with its rebuild."""
        environ = {**os.environ, "SOME_KEY": "sk-test-123456"}
        cancellation = Cancellation()
        with ModelServer(replies) as server:
            model = {
                "provider": "openai",
                "model": "some-model",
                "base_url": server.url,
                "api_key_env": "SOME_KEY",
                "context_window": 100_000,
            }
            spec = load_run(
                task=self.task([], task=task, profile={"model": model, "retry": {"attempts": 1}, **(profile or {})}),
                prompt=None,
                profile=None,
                workspace=str(self.workspace),
                environ=environ,
                cwd=Path("/"),
            )
            options = RunOptions(artifacts=self.artifacts, hooks=hooks, paranoid=True)
            try:
                return run_task(spec, options, environ=environ, cancellation=cancellation)
            finally:
                cancellation.close()
                self.bodies = [request.json() for request in server.requests]

    def said(self, request: int = -1) -> str:
        """All that the model was sent with one request."""
        return json.dumps(self.bodies[request]["messages"])

    def data(self, kind: str) -> list[JsonObject]:
        """The data of the events of one type."""
        events = self._read(self.artifacts / "session.jsonl.zst")[1:]
        return [event["data"] for event in events if event["type"] == kind]

    @property
    def log(self) -> str:
        """The whole log as text."""
        return json.dumps(self._read(self.artifacts / "session.jsonl.zst"))


@pytest.fixture
def bench(
    scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path, session_log_reader: Callable[..., Any]
) -> Bench:
    """A workspace with one commit and a task without checks."""
    return Bench(scripted_task, make_repo({"src/a.txt": "one\n"}), tmp_path, session_log_reader)


def test_the_table_is_closed() -> None:
    """A hook has these points and no others."""
    assert {name for name in vars(Hook) if not name.startswith("_")} == set(POINTS)
    assert len(POINTS) == 7


# --- before_step ---------------------------------------------------------------------------------


def test_before_step_may_rewrite_what_enters(bench: Bench) -> None:
    """Change, add and leave out: the log and the model get what it made of it."""

    class Rewrite(Hook):
        def before_step(self, starting: StepStarting) -> None:
            if starting.step == 1:
                del starting.messages[0]
                starting.messages[-1]["content"] = [{"type": "text", "text": "Do something else."}]
                more: Message = {
                    "role": "user",
                    "id": "more",
                    "content": [{"type": "text", "text": "And this."}],
                    "source": {"kind": "plugin", "plugin": "test"},
                }
                starting.messages.append(more)

    finished = bench.run([Rewrite()], [DONE])

    assert finished.exit_code == 0
    assert [text_of(data["content"]) for data in bench.data("user/message")] == ["Do something else.", "And this."]
    assert "Do the work." not in bench.said()
    assert "Do something else." in bench.said()


def test_before_step_may_end_the_turn(bench: Bench) -> None:
    """Before a request is made: the turn has no step, and the run says why it ended."""

    class End(Hook):
        def before_step(self, starting: StepStarting) -> None:
            starting.end_turn = "the day is over"

    finished = bench.run([End()], [])

    assert (finished.result["code"], finished.exit_code) == ("POLICY_DENIED", 4)
    assert "the day is over" in finished.result["error"]["message"]
    assert bench.bodies == []
    assert bench.data("step/start") == []
    assert bench.data("turn/end") == [{"turn": 1, "reason": {"kind": "blocked", "message": "the day is over"}}]


# --- before_request ------------------------------------------------------------------------------


def test_before_request_may_replace_a_part_of_the_history(bench: Bench) -> None:
    """As compaction does; the log keeps what was replaced, the model sees what stands for it."""

    class Prune(Hook):
        def before_request(self, access: RequestAccess, *, overflow: bool) -> bool:
            assert not overflow
            result = access.projection.nodes[-1]
            if not isinstance(result, ev.ToolResult):
                return False
            span = {"start": result.seq, "end": result.seq}
            block: Any = {
                "type": "tool-result",
                "toolCallId": "c1",
                "content": [{"type": "text", "text": "pruned"}],
                "isError": False,
            }
            access.append(ev.CompactionPrune(shadowed_range=span, shadowed_seqs=[result.seq], shadowed_token_count=1))
            access.append(
                ev.ToolResult(
                    turn=result.turn,
                    step=result.step,
                    message={**result.message, "content": [block]},
                    source_event_seqs=[result.seq],
                    surface_op={"op": "replace", **span},
                )
            )
            return True

    finished = bench.run([Prune()], [call(), DONE])

    assert finished.exit_code == 0
    assert "pruned" in bench.said()
    assert "shown" not in bench.said().replace("echo shown", "")
    assert "shown" in json.dumps(bench.data("tool/result")[0])


@pytest.mark.parametrize(
    "event",
    [
        ev.UserMessage(role="user", id="x", content=[{"type": "text", "text": "smuggled"}], source={"kind": "user"}),
        ev.ApprovalPolicy(policy="smuggled"),
        ev.TurnEnd(turn=1, reason={"kind": "completed"}),
    ],
    ids=lambda event: event.TYPE,
)
def test_before_request_may_not_write_anything_else(bench: Bench, event: Event) -> None:
    """It is for compaction: another event ends the run before it is written and before anything is sent."""

    class Smuggle(Hook):
        def before_request(self, access: RequestAccess, *, overflow: bool) -> bool:
            access.append(private_copy(event))
            return True

    finished = bench.run([Smuggle()], [])

    assert (finished.result["code"], finished.exit_code) == ("INTERNAL", 70)
    assert event.TYPE in finished.result["error"]["message"]
    assert "smuggled" not in bench.log
    assert bench.bodies == []


# --- on_response ---------------------------------------------------------------------------------


class Responses(Hook):
    """Notes how requests end, and gives a number for each."""

    def __init__(self, answer: float | None) -> None:
        self.seen: list[RequestEnded] = []
        self._answer = answer

    def on_response(self, ended: RequestEnded) -> float | None:
        self.seen.append(ended)
        return self._answer


def test_on_response_may_ask_for_a_retry_and_sees_what_an_answer_took(bench: Bench) -> None:
    """A number for an answer asks for nothing; the first hook that gives one for a failure decides."""
    hooks = [Responses(None), Responses(0.0), Responses(3600.0)]

    finished = bench.run(hooks, [json_reply(503, {"error": {"message": "busy"}}), DONE])

    assert finished.exit_code == 0, finished.result
    assert len(bench.bodies) == 2
    for hook in hooks:
        failed, answered = hook.seen
        assert (failed.attempt, failed.purpose, failed.usage) == (1, "main", None)
        assert failed.error is not None
        assert failed.error.status == 503
        assert (answered.attempt, answered.error, answered.purpose) == (2, None, "main")
        assert answered.usage is not None
        assert (answered.usage["inputTokens"], answered.usage["outputTokens"]) == (1_000, 10)
        assert answered.waited >= failed.waited
    assert [data["delayMs"] for data in bench.data("llm/retry")] == [0]


def test_on_response_lets_a_failure_stand_when_no_hook_asks_for_more(bench: Bench) -> None:
    """PROVIDER_FAILED after one attempt."""
    finished = bench.run([Responses(None)], [json_reply(503, {"error": {"message": "busy"}})])

    assert finished.result["code"] == "PROVIDER_FAILED"
    assert len(bench.bodies) == 1


def test_on_response_sees_side_calls_too(bench: Bench) -> None:
    """A summary is a request like another, with a purpose of its own."""
    hook = Responses(None)

    finished = bench.run(
        [hook],
        [call("seq 300"), chat_reply("x" * 40, usage=usage(1, 1)), chat_reply("Short.", usage=usage(2_000, 5)), DONE],
        task={"turns": ["And now?"], "compact_at": [2]},
        profile={"compaction": {"keep": 0.001}},
    )

    assert finished.exit_code == 0, finished.result
    assert [ended.purpose for ended in hook.seen] == ["main", "main", "summary", "main"]
    assert [ended.usage["inputTokens"] for ended in hook.seen if ended.usage] == [900, 1, 2_000, 1_000]


# --- guard ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["denies", "throws", "says yes", "changes the call"])
def test_a_guard_can_only_deny(bench: Bench, way: str) -> None:
    """The call does not run and the model is told; nothing it does to the call reaches log or model."""

    class Guard(Hook):
        def guard(self, call: PreparedCall) -> Denial | None:
            if way == "throws":
                raise BrokenError
            if way == "says yes":
                return True  # type: ignore[return-value]  # wrong on purpose
            if way == "changes the call":
                call.arguments["command"] = call.call["name"] = "WRECKED"
                return None
            return Denial("not on a Monday")

    finished = bench.run([Guard()], [call(), DONE])

    assert finished.result["code"] == "POLICY_DENIED"
    assert finished.result["toolCalls"] == {"total": 1, "failed": 0, "denied": 1}
    assert not (bench.workspace / "ran.txt").exists()
    [result] = bench.data("tool/result")
    assert result["error"]["code"] == "GUARD_DENIED"
    assert "Guard.guard" in bench.said()
    assert "WRECKED" not in bench.log + bench.said()
    [decided] = bench.data("approval/decided")
    assert decided["outcome"] == "allowed-once"


def test_a_guard_is_not_asked_about_what_the_policy_denied(bench: Bench) -> None:
    """There is nothing left for it to take away, and no way for it to allow."""
    asked = []

    class Guard(Hook):
        def guard(self, call: PreparedCall) -> Denial | None:
            asked.append(call.call["id"])
            return None

    rules = [{"id": "look", "tool": "read_file", "decision": "allow"}]
    finished = bench.run([Guard()], [call(), DONE], profile={"approvals": {"version": 1, "rules": rules}})

    assert finished.result["code"] == "POLICY_DENIED"
    assert asked == []


# --- after_tool ----------------------------------------------------------------------------------


def test_after_tool_may_replace_the_result(bench: Bench) -> None:
    """The model sees the replacement; the log has it with the digest of what it replaced."""

    class Replace(Hook):
        def after_tool(self, call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
            assert text_of(list(outcome.content)) == "shown\n"
            return ToolOutcome([{"type": "text", "text": f"something about {call.arguments['command'][:4]}"}])

    finished = bench.run([Replace()], [call(), DONE])

    assert finished.exit_code == 0
    [result] = bench.data("tool/result")
    digest = hashlib.sha256(b'[{"text":"shown\\n","type":"text"}]').hexdigest()
    assert result["meta"]["replaced"] == {"sha256": digest}
    assert "something about echo" in bench.said()
    assert '"shown' not in bench.said()


def test_after_tool_changes_nothing_but_by_what_it_returns(bench: Bench) -> None:
    """What it does to what it was given is lost, so that nothing is replaced without a digest."""

    class Wreck(Hook):
        def after_tool(self, call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
            wreck(call.call)
            wreck(call.arguments)
            wreck(outcome.content)
            wreck(outcome.meta)
            outcome.error = None
            return None

    finished = bench.run([Wreck()], [call(), DONE])

    assert finished.exit_code == 0
    [result] = bench.data("tool/result")
    assert "replaced" not in result["meta"]
    assert result["meta"]["exitCode"] == 0
    assert "WRECKED" not in bench.log + bench.said()


def test_after_tool_is_not_asked_about_a_call_that_did_not_run(bench: Bench) -> None:
    """A denial is not a result that could be replaced by something better."""

    class Replace(Hook):
        def after_tool(self, call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
            raise AssertionError("not reached")

    finished = bench.run([Replace()], [call(), DONE], profile={"approvals": {"version": 1, "rules": []}})

    assert finished.result["code"] == "POLICY_DENIED"


# --- after_turn ----------------------------------------------------------------------------------


def test_after_turn_may_queue_a_followup(bench: Bench) -> None:
    """It becomes a turn of its own, behind the prompts that wait already."""

    class Again(Hook):
        def after_turn(self, over: TurnOver) -> Sequence[Message]:
            overs.append((over.turn, over.reason, over.more))
            if over.turn != 1:
                return ()
            source = {"kind": "plugin", "plugin": "test"}
            return [{"role": "user", "id": "m", "content": [{"type": "text", "text": "Look again."}], "source": source}]

    overs: list[tuple[int, str, int]] = []
    finished = bench.run([Again()], [DONE, DONE, DONE], task={"turns": ["And now?"]})

    assert (finished.exit_code, finished.result["turns"]) == (0, 3)
    assert overs == [(1, "completed", 1), (2, "completed", 1), (3, "completed", 0)]
    assert "Look again." not in bench.said(1)
    assert bench.bodies[2]["messages"][-1]["content"] == "Look again."


def test_after_turn_cannot_go_on_with_a_turn_that_failed(bench: Bench) -> None:
    """It is not even asked."""

    class Again(Hook):
        def after_turn(self, over: TurnOver) -> Sequence[Message]:
            raise AssertionError("not reached")

    finished = bench.run([Again()], [chat_reply("and so", finish="length")])

    assert finished.result["code"] == "TASK_FAILED"


# --- observe -------------------------------------------------------------------------------------


def wreck(value: Any) -> None:
    """Change everything in a JSON value that can be changed."""
    if isinstance(value, dict):
        for inner in value.values():
            wreck(inner)
        value |= dict.fromkeys(value, "WRECKED")
    elif isinstance(value, list):
        for inner in value:
            wreck(inner)
        value[:] = ["WRECKED"] * (len(value) + 1)


class Vandal(Hook):
    """Wrecks every event it sees."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def observe(self, event: Event) -> None:
        self.seen.add(event.TYPE)
        for each in event.FIELDS:
            wreck(getattr(event, each.attribute))
            setattr(event, each.attribute, "WRECKED")
        wreck(event.source_event_seqs)
        wreck(event.surface_op)
        event.seq = event.time = 10**9


def test_observe_is_read_only(bench: Bench, run_nightshift: Nightshift) -> None:
    """Whatever is done to what it is given reaches neither the log nor the model nor another observer."""
    vandal, seqs, beside = Vandal(), [], []

    class Beside(Hook):
        def observe(self, event: Event) -> None:
            seqs.append(event.seq)
            beside.append(json.dumps(event.record()))

    finished = bench.run(
        [vandal, Beside()],
        [call("echo ran > ran.txt; seq 300"), DONE, chat_reply("Short.", usage=usage(2_000, 5)), DONE],
        task={"turns": ["And now?"], "compact_at": [2], "checks": [{"name": "ran", "run": "test -e ran.txt"}]},
        profile={"compaction": {"keep": 0.001}},
    )

    assert finished.exit_code == 0, finished.result
    assert vandal.seen >= {
        "turn/start", "step/start", "user/message", "request/header", "request/sent", "assistant/chunk",
        "assistant/message", "tool/call", "approval/asked", "approval/decided", "tool/result", "step/end", "turn/end",
        "agent/inbox/spliced", "compaction/summary", "check/end", "log/seal", "run/end",
    }  # fmt: skip
    assert seqs == sorted(set(seqs))
    assert "WRECKED" not in bench.log + json.dumps(bench.bodies) + json.dumps(finished.result) + "".join(beside)
    assert len(bench.bodies) == 4
    verified = run_nightshift("session", "verify", bench.artifacts)
    assert verified.exit_code == 0, verified.stdout + verified.stderr


def test_an_observer_that_throws_is_logged_and_the_run_goes_on(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    """The observers behind it see every event all the same."""
    seen = []

    class Broken(Hook):
        def observe(self, event: Event) -> None:
            raise BrokenError(event.TYPE)

    class Behind(Hook):
        def observe(self, event: Event) -> None:
            seen.append(event.TYPE)

    finished = bench.run([Broken(), Behind()], [call(), DONE])

    assert finished.exit_code == 0
    assert (bench.workspace / "ran.txt").read_text() == "ran\n"
    assert {"turn/start", "tool/result", "run/end"} <= set(seen)
    said = capsys.readouterr().err
    assert "observer failed" in said
    assert "Broken.observe" in said


# --- order and failure ---------------------------------------------------------------------------


class Named(Hook):
    """Notes that it was asked, at every point."""

    def __init__(self, name: str, asked: list[str]) -> None:
        self._name = name
        self._asked = asked

    def note(self, point: str) -> None:
        self._asked.append(f"{point} {self._name}")

    def before_step(self, starting: StepStarting) -> None:
        self.note("before_step")

    def before_request(self, access: RequestAccess, *, overflow: bool) -> bool:
        self.note("before_request")
        return False

    def on_response(self, ended: RequestEnded) -> float | None:
        self.note("on_response")
        return None

    def guard(self, call: PreparedCall) -> Denial | None:
        self.note("guard")
        return None

    def after_tool(self, call: PreparedCall, outcome: ToolOutcome) -> ToolOutcome | None:
        self.note("after_tool")
        return ToolOutcome([{"type": "text", "text": f"{text_of(list(outcome.content)).strip()} {self._name}"}])

    def after_turn(self, over: TurnOver) -> Sequence[Message]:
        self.note("after_turn")
        return ()

    def observe(self, event: Event) -> None:
        if isinstance(event, ev.TurnStart):
            self.note("observe")


def test_hooks_are_asked_in_the_order_of_assembly(bench: Bench) -> None:
    """At every point, and each sees what the one before it made."""
    asked: list[str] = []

    finished = bench.run([Named("first", asked), Named("second", asked)], [call(), DONE])

    assert finished.exit_code == 0
    step = ["before_step", "before_request", "on_response"]
    expected = ["observe", *step, "guard", "after_tool", *step, "after_turn"]
    assert asked == [f"{point} {name}" for point in expected for name in ("first", "second")]
    assert "shown first second" in bench.said()


class Failing(Hook):
    """Throws at one point, an own error or one of the program."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def fail(self, *_: object, **__: object) -> Any:
        raise self._error


def failing(point: str, error: Exception) -> Hook:
    """A hook that throws at ``point`` only."""
    hook: Hook = type("Failing", (Failing,), {point: Failing.fail})(error)
    return hook


@pytest.mark.parametrize("point", ["before_step", "before_request", "on_response", "after_tool", "after_turn"])
def test_a_hook_that_throws_ends_the_run_with_70(bench: Bench, point: str, capsys: pytest.CaptureFixture[str]) -> None:
    """INTERNAL, with a whole log and every artifact; an answer that was paid for stands in the log."""
    finished = bench.run([failing(point, BrokenError("oops"))], [call(), DONE])

    assert (finished.exit_code, finished.result["code"]) == (70, "INTERNAL")
    assert "BrokenError('oops')" in finished.result["error"]["message"]
    assert json.loads((bench.artifacts / "result.json").read_text()) == finished.result
    names = {path.name for path in bench.artifacts.iterdir()}
    assert {"session.jsonl.zst", "session.zip", "summary.md", "usage.json"} <= names
    assert "internal error" in capsys.readouterr().err
    assert len(bench.data("assistant/message")) == len(bench.bodies)
    assert len(bench.data("turn/start")) == len(bench.data("turn/end")) == 1
    assert len(bench.data("step/start")) == len(bench.data("step/end"))


def test_a_hook_that_throws_behind_a_failed_request_ends_the_run_with_70(bench: Bench) -> None:
    """The failure it was asked about is not what the run says it ended with."""
    finished = bench.run([failing("on_response", BrokenError())], [json_reply(503, {"error": {"message": "busy"}})])

    assert (finished.exit_code, finished.result["code"]) == (70, "INTERNAL")


@pytest.mark.parametrize("point", ["before_step", "before_request", "on_response", "after_tool", "after_turn"])
def test_a_fault_that_a_hook_met_keeps_its_code(bench: Bench, point: str) -> None:
    """A broken sandbox is no bug of the hook that found it."""
    finished = bench.run([failing(point, SandboxError("it is gone"))], [call(), DONE])

    assert (finished.exit_code, finished.result["code"]) == (3, "SANDBOX_UNAVAILABLE")
