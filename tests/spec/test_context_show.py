"""``session show --context``: what filled the window at a step, as the installed command, of our logs and dsh's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema_rs
import pytest

from runner.artifacts.context import CONTEXT_FIELDS, KINDS, derive_context
from runner.artifacts.schema import object_schema
from runner.session.store import open_session
from runner.session.tokens import estimate_header, estimate_message

if TYPE_CHECKING:
    from conftest import MakeRepo, Nightshift, ScriptedTask

DSH = Path(__file__).parent.parent / "golden" / "dsh"
VALIDATOR = jsonschema_rs.validator_for(object_schema(CONTEXT_FIELDS))


def kinds(context: dict[str, Any]) -> dict[str, int]:
    """Kind → how many."""
    return {row["kind"]: row["count"] for row in context["messages"]}


def test_a_run_with_every_layer_shows_what_each_did(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """A spilled result, pruned ones, then a summary; the parts add up to the estimate of the request itself."""
    workspace = make_repo({f"f{n}.txt": (f"{n}" * 79 + "\n") * 48 for n in range(5)} | {"AGENTS.md": "Be brief."})
    reads = [{"calls": [{"tool": "read_file", "args": {"path": f"f{n}.txt"}}]} for n in range(5)]
    spilled = {"calls": [{"tool": "shell", "args": {"command": "seq 1 20000"}}]}
    model = {"provider": "scripted", "model": "scripted", "script": "task.script.yaml", "context_window": 10_000}
    profile = {
        "model": {**model, "max_output_tokens": 500},
        "compaction": {
            "min_output": 200,
            "summary_at": 0.6,
            "prune_over": 2_000,
            "prune_head": 1_000,
            "prune_tail": 200,
        },
    }
    task = scripted_task(
        [spilled, *reads, {"text": "Read."}, {"text": "I read all files."}, {"text": "Done."}],
        task={"turns": ["And now?"], "compact_at": [2], "context": ["AGENTS.md"]},
        profile=profile,
    )
    run = run_nightshift("run", task, "--workspace", workspace)
    assert run.exit_code == 0, run.stderr

    def context(step: int) -> dict[str, Any]:
        shown = run_nightshift("session", "show", run.artifacts, "--context", str(step), "--json")
        assert shown.exit_code == 0, shown.stderr
        parsed: dict[str, Any] = json.loads(shown.stdout)
        VALIDATOR.validate(parsed)
        body = json.loads(run_nightshift("session", "request", run.artifacts, "--step", str(step)).stdout)
        system, *messages = body["messages"]
        header: Any = {"config": {}, "system": system["content"], "tools": body["tools"]}
        assert parsed["estimate"] == estimate_header(header) + sum(map(estimate_message, messages))
        together = parsed["system"]["tokens"] + parsed["tools"]["tokens"]
        assert parsed["estimate"] == together + sum(row["tokens"] for row in parsed["messages"])
        assert (parsed["step"], parsed["window"], parsed["occupancy"]) == (step, 10_000, None)
        assert parsed["tools"]["count"] == len(body["tools"])
        assert [row["kind"] for row in parsed["messages"]] == [kind for kind in KINDS if kind in kinds(parsed)]
        return parsed

    first, last, folded = context(1), context(7), context(8)

    assert kinds(first) == {"prompts": 1, "state": 1, "context": 1}
    assert first["spilled"] == {"count": 0, "tokens": 0, "bytes": 0}
    assert kinds(last) == {"prompts": 1, "state": 1, "context": 1, "answers": 6, "calls": 6, "results": 6}
    assert (last["spilled"]["count"], last["spilled"]["bytes"]) == (1, len("".join(f"{n}\n" for n in range(1, 20_001))))
    prunes = len(run.data_of("compaction/prune"))
    assert last["pruned"]["count"] == prunes > 0
    assert last["pruned"]["freed"] > 500 * prunes
    assert folded["turn"] == 2
    assert kinds(folded)["summaries"] == 1
    assert kinds(folded)["prompts"] == 2
    [summary] = run.data_of("compaction/summary")
    assert folded["folded"] == len(summary["shadowedSeqs"])
    assert folded["estimate"] < last["estimate"]
    text = run_nightshift("session", "show", run.artifacts, "--context", "7").stdout
    assert "step 7, turn 1, model scripted" in text
    assert f"{last['estimate']} of 10000 tokens" in text
    assert "spilled: 1 result" in text


def test_a_log_of_dsh_shows_what_the_provider_counted() -> None:
    """Without ``request/sent``: what stood before the answer."""
    source = open_session(str(DSH / "compaction.jsonl"))

    context = derive_context(source.whole_events(), step=9)

    VALIDATOR.validate(context)
    assert (context["occupancy"], context["window"], context["folded"]) == (12_819, 24_000, 12)
    assert context["pruned"]["count"] == 3
    assert kinds(context) == {"summaries": 1, "answers": 3, "calls": 3, "results": 3}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--context", "10"], "no main request for step 10"),
        (["--context", "0"], "0 is not in the range"),
        (["--context", "x"], "'x' is not a valid integer"),
        (["--context", "1", "--full"], "--full and --context exclude each other"),
    ],
)
def test_a_step_that_is_not_there_is_refused(run_nightshift: Nightshift, arguments: list[str], said: str) -> None:
    """With what there is."""
    shown = run_nightshift("session", "show", DSH / "compaction.jsonl", *arguments)

    assert shown.exit_code == 2
    assert said in shown.stderr
    assert shown.stdout == ""


def test_a_step_that_was_never_answered_is_not_made_up() -> None:
    """The log of a provider that only failed."""
    source = open_session(str(DSH / "http500-retries.jsonl"))

    with pytest.raises(Exception, match="no main request for step 1") as caught:
        derive_context(source.whole_events(), step=1)

    assert "the step ended before a request was made" in str(getattr(caught.value, "hint", None))


@pytest.mark.parametrize("name", sorted(path.name for path in DSH.glob("*.jsonl")))
def test_every_answered_step_of_a_foreign_log_can_be_shown(name: str) -> None:
    """In the shape of the schema, and no part is lost."""
    source = open_session(str(DSH / name))
    types = [event.TYPE for event in source.whole_events()]
    answered = types.count("assistant/message") if types.count("assistant/message") == types.count("step/start") else 0

    for step in range(1, answered + 1):
        context = derive_context(source.whole_events(), step=step)
        VALIDATOR.validate(context)
        parts = context["system"]["tokens"] + context["tools"]["tokens"]
        assert context["estimate"] == parts + sum(row["tokens"] for row in context["messages"])
