"""Checks decide, and a failing one goes back to the agent while retries are left."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from runner.agent.hook import TurnOver
from runner.cancellation import Cancellation
from runner.hooks.checks import ChecksHook, output_tail
from runner.outcome import derive_outcome
from runner.permission import Mode
from runner.sandbox.base import SandboxSpec
from runner.sandbox.executor import Executor, session_policy
from runner.session import events as ev

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from runner.messages import Message


@dataclass(frozen=True)
class Check:
    """A declared check."""

    name: str
    run: str
    timeout: float = 20.0
    retries: int = 0


class Bench:
    """A hook with a real executor in a real directory, and what it wrote."""

    def __init__(self, directory: Path, state: Path) -> None:
        self.workspace = directory
        self.events: list[ev.Event] = []
        self.cancellation = Cancellation()
        policy = session_policy(
            SandboxSpec(),
            mode=Mode.DANGER_FULL_ACCESS,
            workspace=str(directory.resolve()),
            state=str(state),
            hidden=(),
            environment={"PATH": "/usr/bin:/bin"},
        )
        self.executor = Executor(None, policy)

    def hook(self, *checks: Check, **more: Any) -> ChecksHook:
        """A hook for these checks."""
        ids = count(1)
        return ChecksHook(
            checks,
            executor=self.executor,
            mode=Mode.DANGER_FULL_ACCESS,
            cancellation=self.cancellation,
            append=self.events.append,
            redact=lambda text: text.replace("hunter22", "[redacted]"),
            new_id=lambda: f"m{next(ids)}",
            **more,
        )

    def ends(self) -> list[tuple[str, int, bool, int | None]]:
        """What the ``check/end`` events say."""
        return [(e.name, e.attempt, e.passed, e.exit_code) for e in self.events if isinstance(e, ev.CheckEnd)]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    """A bench in a fresh workspace."""
    workspace, state = tmp_path / "workspace", tmp_path / "state"
    workspace.mkdir()
    state.mkdir()
    made = Bench(workspace, state)
    yield made
    made.executor.close()
    made.cancellation.close()


def over(*, more: int = 0) -> TurnOver:
    """A turn that completed."""
    return TurnOver(turn=1, reason="completed", more=more)


def text(messages: Any) -> str:
    """The text of the one followup."""
    (message,) = messages
    typed: Message = message
    (block,) = typed["content"]
    assert block["type"] == "text"
    return block["text"]


def test_a_check_that_passes_asks_for_nothing(bench: Bench) -> None:
    """Start and end are logged."""
    messages = bench.hook(Check("tests", "true")).after_turn(over())

    assert list(messages) == []
    assert [type(event) for event in bench.events] == [ev.CheckStart, ev.CheckEnd]
    assert bench.ends() == [("tests", 1, True, 0)]


def test_a_failing_check_goes_back_to_the_agent_with_its_output(bench: Bench) -> None:
    """Name, how it ended, what it printed, and how often it may still fail."""
    check = Check("unit tests", "echo 'E   assert 1 == 2'; echo trouble >&2; exit 3", retries=2)
    messages = bench.hook(check).after_turn(over())
    said = text(messages)

    for words in ("'unit tests'", "exited with 3", "2 attempts left", "assert 1 == 2", "trouble"):
        assert words in said
    assert messages[0]["source"] == {"kind": "plugin", "plugin": "checks"}


def test_retries_are_used_up_one_by_one(bench: Bench) -> None:
    """Two retries are three attempts; the last failure is final."""
    hook = bench.hook(Check("tests", "exit 1", retries=2))
    asked = [len(hook.after_turn(over())) for _ in range(3)]

    assert asked == [1, 1, 0]
    assert [attempt for _, attempt, _, _ in bench.ends()] == [1, 2, 3]


def test_the_message_before_the_last_attempt_says_so(bench: Bench) -> None:
    """The agent knows that it is the last one."""
    assert "the next attempt is the last" in text(bench.hook(Check("tests", "exit 1", retries=1)).after_turn(over()))


def test_a_check_without_retries_is_final_at_once(bench: Bench) -> None:
    """No money is spent on other checks that could be retried: the outcome is settled."""
    hook = bench.hook(Check("strict", "exit 1"), Check("lenient", "exit 1", retries=5))

    assert list(hook.after_turn(over())) == []
    assert [name for name, *_ in bench.ends()] == ["strict", "lenient"]


def test_every_check_runs_again_after_a_repair(bench: Bench) -> None:
    """What passed before may be broken by the repair; passing attempts cost no retry."""
    hook = bench.hook(Check("a", "test ! -e broken", retries=1), Check("b", "test -e fixed", retries=2))
    first = hook.after_turn(over())
    (bench.workspace / "broken").touch()
    second = hook.after_turn(over())
    (bench.workspace / "broken").unlink()
    (bench.workspace / "fixed").touch()
    third = hook.after_turn(over())

    assert [len(first), len(second), len(third)] == [1, 1, 0]
    assert "'a'" not in text(first)
    assert "'a'" in text(second)
    events = [
        ev.TurnStart(turn=1),
        ev.StepEnd(turn=1, step=1),
        ev.TurnEnd(turn=1, reason={"kind": "completed"}),
        *bench.events,
    ]
    assert [(c.name, c.passed, c.attempts) for c in derive_outcome(events).checks] == [("a", True, 3), ("b", True, 3)]


def test_checks_wait_until_no_prompt_waits(bench: Bench) -> None:
    """They judge the whole task, not its first turn."""
    assert list(bench.hook(Check("tests", "exit 1", retries=1)).after_turn(over(more=1))) == []
    assert bench.events == []


def test_a_task_without_checks_asks_for_nothing(bench: Bench) -> None:
    """There is nothing to run."""
    assert list(bench.hook().after_turn(over())) == []


def test_a_check_that_runs_too_long_failed(bench: Bench) -> None:
    """It is killed; there is no exit code."""
    said = text(bench.hook(Check("slow", "sleep 30", timeout=0.2, retries=1)).after_turn(over()))

    assert "longer than 0.2 s" in said
    assert bench.ends() == [("slow", 1, False, None)]


def test_a_check_that_is_killed_failed(bench: Bench) -> None:
    """The signal is named."""
    assert "SIGKILL" in text(bench.hook(Check("t", "kill -KILL $$", retries=1)).after_turn(over()))


def test_a_cancelled_run_starts_no_further_check(bench: Bench) -> None:
    """The one that runs is ended, its end is logged, and nothing is asked."""
    timer = threading.Timer(0.3, bench.cancellation.cancel, ["SIGTERM"])
    timer.start()
    started = time.monotonic()
    messages = bench.hook(Check("one", "sleep 30", retries=3), Check("two", "true")).after_turn(over())

    assert list(messages) == []
    assert time.monotonic() - started < 10
    assert bench.ends() == [("one", 1, False, None)]


def test_the_check_runs_in_the_workspace_without_startup_files(bench: Bench) -> None:
    """A file of the workspace cannot change the shell that judges."""
    (bench.workspace / ".bashrc").write_text("exit 0\n")
    (bench.workspace / "here").touch()

    assert [passed for _, _, passed, _ in bench.ends()] == []
    bench.hook(Check("place", "test -e here && test -z $BASH_ENV && exit 7")).after_turn(over())
    assert bench.ends() == [("place", 1, False, 7)]


def test_a_secret_in_the_output_is_taken_out(bench: Bench) -> None:
    """The followup enters the session, so it is redacted first."""
    said = text(bench.hook(Check("t", "echo the key is hunter22; exit 1", retries=1)).after_turn(over()))

    assert "hunter22" not in said
    assert "[redacted]" in said


def test_only_the_end_of_a_long_output_is_given(bench: Bench) -> None:
    """And how much is left out."""
    said = text(bench.hook(Check("t", "seq 1 100000; exit 1", retries=1)).after_turn(over()))

    assert "are left out" in said
    assert "100000" in said
    assert len(said) < 9_000


def test_attempts_of_an_earlier_part_count(bench: Bench) -> None:
    """A resumed session does not begin anew."""
    hook = bench.hook(Check("t", "exit 1", retries=2), attempts={"t": 2})

    assert list(hook.after_turn(over())) == []
    assert bench.ends() == [("t", 3, False, 1)]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", ""),
        (b"plain\n", "plain"),
        (b"a\r\nb", "a\nb"),
        (b"\xff\x1b[31mred", "\\xff\\x1b[31mred"),
        (b"\xe2\x80\xae", "\\u202e"),
        (b"x" * 30, "[10 characters before this are left out]\n" + "x" * 20),
    ],
)
def test_output_becomes_safe_text(data: bytes, expected: str) -> None:
    """Bytes that are no UTF-8, controls and direction marks are written as escapes."""
    assert output_tail(data, 20) == expected
