"""``summary.md`` says what happened, and nothing in it can act."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from runner.artifacts.facts import RunFold
from runner.artifacts.patch import PatchInfo
from runner.artifacts.report import SIZE_LIMIT, code_block, code_span, render_summary
from runner.neutral import neutral_text
from runner.session import events as ev

HEADER = {"id": "session-1", "createdAt": 1_000, "cwd": "/w"}


def start(**sandbox: Any) -> ev.RunStart:
    """The start of a run."""
    values = {"backend": "landlock", "mode": "workspace-write", "network": "off", "notEnforced": ["metadata"]}
    config = {
        "task": {"name": "fix-tests", "checks": [{"name": "tests", "run": "pytest"}]},
        "profile": {"limits": {"steps": 60, "cost": None, "wall": 1800}},
    }
    return ev.RunStart(
        task_digest="",
        profile_digest="",
        policy_digest="",
        tools_digest="",
        versions={},
        base={"commit": "c0ffee", "tree": "7ee", "dirty": True},
        sandbox={**values, **sandbox},
        trust="trusted",
        config=config,
    )


def user(text: str) -> ev.UserMessage:
    """A prompt."""
    return ev.UserMessage(content=[{"type": "text", "text": text}], source={"kind": "user"}, role="user", id="u")


def answer(text: str, **usage: Any) -> ev.AssistantMessage:
    """An answer."""
    message: Any = {
        "role": "assistant",
        "content": [{"type": "text", "text": text}],
        "source": {"kind": "model", "provider": "openai", "model": "m"},
        "id": "a",
    }
    values: Any = usage or None
    return ev.AssistantMessage(turn=1, step=1, message=message, usage=values, source_event_seqs=[])


def denied(
    call_id: str, command: str, *, rule: str = "no-push", why: str = "publishing is not yours"
) -> list[ev.Event]:
    """A call the policy refused."""
    message: Any = {
        "role": "user",
        "id": "r",
        "source": {"kind": "tool", "callId": call_id},
        "content": [
            {
                "type": "tool-result",
                "toolCallId": call_id,
                "content": [{"type": "text", "text": why}],
                "isError": True,
            }
        ],
    }
    return [
        ev.ToolCall(turn=1, step=1, call_id=call_id, name="shell", arguments="{}"),
        ev.ApprovalAsked(id=call_id, call_id=call_id, tool_name="shell", command=command),
        ev.ApprovalDecided(id=call_id, outcome="rejected", rule=rule, by="policy"),
        ev.ToolResult(
            turn=1, step=1, message=message, error={"name": "E", "code": "POLICY_DENIED"}, source_event_seqs=[0]
        ),
    ]


def write(path: str) -> list[ev.Event]:
    """A call that was allowed to write a file."""
    message: Any = {"role": "user", "id": "r", "source": {"kind": "tool", "callId": path}, "content": []}
    return [
        ev.ToolCall(turn=1, step=1, call_id=path, name="write_file", arguments="{}"),
        ev.ApprovalAsked(id=path, call_id=path, tool_name="write_file", paths={"read": [], "write": [path]}),
        ev.ApprovalDecided(id=path, outcome="allowed-once", rule="edit", by="policy"),
        ev.ToolResult(turn=1, step=1, message=message, meta={"bytes": 10}, source_event_seqs=[0]),
    ]


def finding(call_id: str, *, error: bool = False, **arguments: Any) -> list[ev.Event]:
    """A call of report_finding and its result."""
    content = [{"type": "tool-result", "toolCallId": call_id, "content": [], "isError": error}]
    message: Any = {"role": "user", "id": "r", "source": {"kind": "tool", "callId": call_id}, "content": content}
    failure = {"name": "InvalidArgsError", "code": "INVALID_ARGS"} if error else None
    given = json.dumps(arguments)
    return [
        ev.ToolCall(turn=1, step=1, call_id=call_id, name="report_finding", arguments=given),
        ev.ToolResult(turn=1, step=1, message=message, error=failure, meta={"bytes": 1}, source_event_seqs=[0]),
    ]


def run(*inner: ev.Event, opening: ev.RunStart | None = None, **reason: Any) -> RunFold:
    """The fold of a run around ``inner``."""
    events: list[ev.Event] = [
        opening or start(),
        ev.RequestContext(provider="openai", model="m", context_window=1_000),
        ev.TurnStart(turn=1),
        ev.StepStart(turn=1, step=1),
        *inner,
        ev.StepEnd(turn=1, step=1),
        ev.TurnEnd(turn=1, reason=reason or {"kind": "completed"}),
        ev.CheckEnd(name="tests", attempt=1, passed=True, exit_code=0, duration_ms=1_500),
    ]
    for seq, event in enumerate(events):
        event.seq, event.time = seq, 1_000 + 500 * seq
    return RunFold.of(events, HEADER)


def summary(fold: RunFold, **more: Any) -> str:
    """The report of a fold."""
    return render_summary(fold.outcome.outcome(), fold.usage.usage(), fold.facts, **more)


def section(text: str, title: str) -> str:
    """One section of a report."""
    found = re.search(rf"^## {title}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_report_says_what_was_asked_and_how_it_ended() -> None:
    """Task, prompt, outcome, code, evidence, final message."""
    text = summary(run(user("Make the tests pass."), answer("All green now.", inputTokens=10, outputTokens=2)))

    assert text.startswith("# `fix-tests`: completed\n")
    assert "completed, `COMPLETED` (exit code 0)" in text
    assert "Make the tests pass." in section(text, "What was asked")
    assert "All green now." in section(text, "Final message")
    assert "holds: `check tests`" in section(text, "Why")


def test_a_failure_says_why_and_what_to_do() -> None:
    """The cause, its hint, what does not hold, and what else went wrong."""
    reason: dict[str, Any] = {"kind": "aborted", "reason": {"kind": "limit", "code": "LIMIT_REACHED", "name": "steps"}}
    limit = ev.LimitReached(name="steps", used=60, max=60, percent=100)
    why = section(summary(run(limit, **reason)), "Why")

    assert "the limit steps was reached: 60 of 60" in why
    assert "What to do: `raise the limit" in why
    assert "**does not hold**: `turn`" in why


def test_denied_calls_stand_with_their_rule() -> None:
    """Tool, call, code, rule id, and what the model was told; only those that are shown, and how many more."""
    calls = [event for number in range(60) for event in denied(f"c{number}", f"git push {number}")]
    text = section(summary(run(*calls)), "Denied calls")

    assert "| `shell` | `git push 0` | `POLICY_DENIED` | `no-push` | `publishing is not yours` |" in text
    assert "And 10 more." in text
    assert "denied 60" in text


def test_findings_are_a_table_in_the_order_they_were_reported() -> None:
    """Those whose call was refused, or makes no sense, are none; texts of the model do nothing."""
    text = summary(
        run(
            *finding(
                "1", path="src/a.py", line=3, endLine=9.0, severity="error", rule="sql", message="built by | hand"
            ),
            *finding("2", path="b", severity="note", message="![x](https://example.org/x)\n# Title"),
            *finding("3", path="c", severity="error", message="refused", error=True),
            *finding("4", path="c", severity="grave", message="unknown"),
            *finding("5", path=["c"], severity="error", message="no text"),
            ev.ToolCall(turn=1, step=1, call_id="6", name="report_finding", arguments="{"),
        )
    )

    rows = [line for line in section(text, "Findings").splitlines() if line.startswith("|")][2:]
    assert rows == [
        r"| error | `src/a.py:3-9` | `sql` | `built by \| hand` |",
        r"| note | `b` | - | `![x](https://example.org/x)\n# Title` |",
    ]
    assert "## Findings" not in summary(run())


def test_many_findings_are_counted() -> None:
    """The table shows the first hundred."""
    findings = [event for n in range(120) for event in finding(str(n), path="a", severity="note", message=f"no {n}")]

    text = section(summary(run(*findings)), "Findings")

    assert text.count("| note |") == 100
    assert "And 20 more, in the log." in text


def test_the_changes_come_from_the_patch_or_from_what_was_allowed() -> None:
    """The log alone knows the size of the patch and the paths the tools may have written."""
    written = ev.ArtifactWritten(name="changes.patch", path="changes.patch", bytes=77, sha256="ab")
    fold = run(*write("src/a.py"), *write("src/b.py"), *write("src/a.py"), written)
    alone = section(summary(fold), "Changes")
    told = section(summary(fold, patch=PatchInfo(2, 10, 3, "7ee2", ("src/a.py", '"caf\\351"'))), "Changes")

    assert "77 bytes" in alone
    assert alone.count("src/a.py") == 1
    assert "2 files, 10 lines added, 3 removed" in told
    assert '- `"caf\\351"`' in told
    assert "commit `c0ffee` with uncommitted changes, tree `7ee`" in told
    assert "No patch was made" in section(summary(run()), "Changes")


def test_the_sandbox_section_names_what_is_not_enforced() -> None:
    """Nobody may take a weaker backend for a stronger one."""
    text = section(summary(run()), "Sandbox")
    bare = section(summary(run(opening=start(backend="none", notEnforced=["writes"]))), "Sandbox")

    assert "**not enforced here**: `metadata`" in text
    assert "bounded by the sandbox only" in text
    assert "commands ran without a sandbox" in bare
    assert "everything the sandbox promises" in section(summary(run(opening=start(notEnforced=[]))), "Sandbox")


def test_cost_and_limits_are_tables_and_unknown_is_said() -> None:
    """A cost nobody knows is not shown as 0."""
    text = summary(run(answer("x", inputTokens=1_200, outputTokens=5, cacheReadTokens=300)))

    assert "| all | 1 | 1,200 | 300 | unknown | 5 | unknown | unknown |" in section(text, "Cost")
    assert "cache hit rate: 20%" in section(text, "Cost")
    assert "| `steps` | 1 | 60 |" in section(text, "Limits")
    assert "`cost`" not in section(text, "Limits")


def test_a_limit_below_a_cent_is_not_shown_as_nothing() -> None:
    """And large ones are written out."""
    opening = start()
    opening.config["profile"]["limits"] = {"steps": 60, "cost": 0.004, "tokens": 10_000_000}
    reached = ev.LimitReached(name="tokens", used=9_000_001, max=10_000_000, percent=90)
    limits = section(summary(run(answer("x", inputTokens=1), reached, opening=opening)), "Limits")

    assert "| `cost` | unknown | 0.004 |" in limits
    assert "| `tokens` | 1 | 10,000,000 |" in limits
    assert "`tokens`: the model was told at 9,000,001 of 10,000,000" in limits


def test_checks_have_a_row_each() -> None:
    """Whether the last attempt passed, and how many there were."""
    assert "| `tests` | passed | 1 | 1.5 s |" in section(summary(run()), "Checks")


def test_artifacts_of_the_log_are_listed() -> None:
    """With size and digest."""
    written = ev.ArtifactWritten(name="report.md", path="files/report.md", bytes=1_234, sha256="abcd")

    assert "| `files/report.md` | 1,234 | `abcd` |" in section(summary(run(written)), "Artifacts")


def test_a_log_of_another_harness_has_a_report() -> None:
    """Nothing but messages, no run events."""
    fold = RunFold.of([user("hello"), answer("hi")], {"id": "x"})
    text = summary(fold)

    assert text.startswith("# `run`: failed")
    assert "does not say how commands were confined" in text


HOSTILE = """\
</details><script>alert(1)</script> ![x](https://example.org/pixel.png) @everyone #1
```
::error file=a.py,line=1::forged
  ::stop-commands::x
##[group]forged
##vso[task.setvariable variable=a]b
\x1b[31mred\x07 \u202egnp.exe \u200b
| a | b |
"""


def outside_code(text: str) -> str:
    """What Markdown takes as text: no code blocks, no code spans."""
    text = re.sub(r"^(`{3,})text\n.*?\n\1$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"(`+)(?!`).+?(?<!`)\1(?!`)", "", text)


@pytest.mark.parametrize("place", ["prompt", "answer", "command", "rule", "path", "check", "task"])
def test_nothing_foreign_acts_wherever_it_stands(place: str) -> None:
    """Markdown, HTML, mentions, commands of CI systems, terminal controls, direction marks."""
    values = dict.fromkeys(["prompt", "answer", "command", "rule", "path"], "x")
    if place in values:
        values[place] = HOSTILE
    opening = start()
    opening.config["task"]["name"] = HOSTILE if place == "task" else "t"
    fold = run(
        user(values["prompt"]),
        *denied("c", values["command"], rule=values["rule"], why=HOSTILE),
        *write(values["path"]),
        answer(values["answer"]),
        ev.CheckEnd(name=HOSTILE if place == "check" else "c", attempt=1, passed=False, duration_ms=1),
        opening=opening,
    )
    text = summary(fold)
    plain = outside_code(text)

    for mark in ("<script", "](https", "@everyone", "forged"):
        assert mark not in plain
    assert not re.search(r"^\s*::", text, re.MULTILINE)
    assert not re.search(r"##[a-z]*\[", text)
    for char in "\x1b\x07\u202e\u200b":
        assert char not in text
    assert [
        line
        for line in text.splitlines()
        if line.startswith("|") and line.replace("\\|", "").count("|") not in {3, 4, 5, 6, 9}
    ] == []


def test_a_report_stays_below_its_size() -> None:
    """However much the model wrote, and the cut falls on a whole character."""
    text = summary(run(user("p" * 500_000), *denied("c", "x" * 5_000_000), answer("ä€😀" * 1_000_000)))

    assert len(text.encode()) < SIZE_LIMIT
    assert "more characters in the log" in text


def test_a_report_that_is_cut_says_so() -> None:
    """The fence is closed before the note."""
    paths = tuple("ü" * 290 for _ in range(50))
    fold = run(answer("😀" * 100_000), *[event for n in range(100) for event in denied(f"c{n}", "€" * 400)])
    for number in range(2_000):
        fold.apply(ev.CheckEnd(name=f"{number} " + "€" * 290, attempt=1, passed=True, duration_ms=1))
    text = summary(fold, patch=PatchInfo(50, 1, 1, "t", paths))

    assert len(text.encode()) <= SIZE_LIMIT
    assert text.endswith("the whole run is in the session log.\n")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "-"),
        ("plain", "`plain`"),
        ("a`b", "``a`b``"),
        ("`a`", "`` `a` ``"),
        ("a|b", "`a\\|b`"),
        ("a\nb\tc", "`a\\nb\\tc`"),
        ("a\x00b", "`a\\x00b`"),
        ("\ud800", "`\\ud800`"),
    ],
)
def test_a_code_span_is_one_safe_line(text: str, expected: str) -> None:
    """Whatever it holds."""
    assert code_span(text) == expected


def test_a_code_block_cannot_be_closed_from_inside() -> None:
    """The fence is longer than any run of ticks."""
    block = code_block("a\n`````\nb")

    assert block == "``````text\na\n`````\nb\n``````"


def test_commands_are_broken_up_and_readable() -> None:
    """Only where a CI system would read one."""
    assert neutral_text("a::b\n::c::d") == "a::b\n:\\:c::d"
    assert neutral_text("## Title [x]\n##[x]") == "## Title [x]\n#\\#[x]"
