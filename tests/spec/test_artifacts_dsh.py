"""Usage and outcome of logs that another harness wrote, against sums taken straight from their lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema_rs
import pytest

from runner.artifacts.facts import RunFold
from runner.artifacts.report import render_summary
from runner.artifacts.schema import build_schemas
from runner.errors import ErrorCode
from runner.session.store import open_session

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"
LOGS = sorted(GOLDEN.glob("*.jsonl"))


def sums(path: Path) -> dict[str, int]:
    """Tokens by bucket, read without any code of ours: the last usage of a step, and every summary."""
    steps: dict[tuple[int, int], dict[str, Any]] = {}
    usages: list[dict[str, Any]] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        data = record.get("data", {})
        if record["type"] == "assistant/chunk" and data["chunk"]["type"] == "usage":
            steps[data["turn"], data["step"]] = data["chunk"]["usage"]
        elif record["type"] == "assistant/message" and "usage" in data:
            steps[data["turn"], data["step"]] = data["usage"]
        elif record["type"] == "compaction/summary":
            usages.append(data["usage"])
    total: dict[str, int] = {}
    for usage in [*usages, *steps.values()]:
        for name, value in usage.items():
            total[name] = total.get(name, 0) + value
    return total


def fold(path: Path) -> RunFold:
    """The fold of a log."""
    source = open_session(str(path))
    return RunFold.of(source.events(), source.header)


def test_there_are_logs_to_read() -> None:
    """A missing folder must not pass as success."""
    assert len(LOGS) >= 5


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_the_totals_equal_the_sums_over_the_log(path: Path) -> None:
    """Buckets nobody reported are null."""
    usage = fold(path).usage.usage()
    wanted = sums(path)
    names = {"input": "inputTokens", "cacheRead": "cacheReadTokens", "output": "outputTokens"}
    jsonschema_rs.validator_for(build_schemas()["usage.schema.json"]).validate(usage)

    assert {name: usage["usage"][name] for name in names} == {name: wanted.get(key) for name, key in names.items()}
    assert usage["usage"]["cacheWrite"] is None
    for bucket in ("input", "output"):
        rows = [row[bucket] for row in usage["perStep"] if row[bucket] is not None]
        models = [row[bucket] for row in usage["perModel"] if row[bucket] is not None]
        assert sum(rows) == sum(models) == (usage["usage"][bucket] or 0)
    assert usage["requests"] == sum(row["attempts"] for row in usage["perStep"])
    assert usage["costUsd"] is None


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name)
def test_every_log_has_a_report(path: Path) -> None:
    """Nothing in it is taken for granted."""
    folded = fold(path)
    text = render_summary(folded.outcome.outcome(), folded.usage.usage(), folded.facts)

    assert text.startswith("# `run`: ")
    assert "## Cost" in text


@pytest.mark.parametrize(
    ("name", "code", "steps"),
    [
        ("three-steps.jsonl", ErrorCode.COMPLETED, 3),
        ("rich.jsonl", ErrorCode.COMPLETED, 20),
        ("http500-retries.jsonl", ErrorCode.PROVIDER_FAILED, 1),
        ("killed-then-repaired.jsonl", ErrorCode.INTERNAL, 1),
        ("compaction.jsonl", ErrorCode.COMPLETED, 9),
    ],
)
def test_the_outcome_of_a_log_without_run_events(name: str, code: ErrorCode, steps: int) -> None:
    """Turns and steps are enough."""
    outcome = fold(GOLDEN / name).outcome.outcome()

    assert (outcome.code, outcome.steps) == (code, steps)
