"""Each request begins as the one before, byte for byte, except where a compaction or a new header is logged."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.providers.registry import dialects
from runner.session import events as ev
from runner.session.projection import derive_messages
from runner.session.store import open_session

if TYPE_CHECKING:
    from collections.abc import Iterator

    from conftest import MakeRepo, Nightshift, ScriptedTask

OURS = sorted((Path(__file__).parent.parent / "golden" / "ours").glob("*/session.jsonl*"))


def bodies(path: Path) -> Iterator[tuple[bytes, bool]]:
    """Body of each main request, and whether the log holds a reason to move the prefix since the one before."""
    surface: list[ev.Event] = []
    header: Any = None
    moved = True
    for event in open_session(str(path)).whole_events():
        if event.SURFACE:
            surface.append(event)
            moved = moved or isinstance(event.surface_op, dict)
        elif isinstance(event, ev.RequestHeaderEvent):
            header, moved = event.header, True
        elif isinstance(event, ev.RequestSent) and event.purpose == "main":
            dialect = dialects()[event.dialect]
            body = dialect.whole(header, derive_messages(surface))
            assert len(body) == event.bytes
            yield body.removesuffix(dialect.close), moved
            moved = False


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.parent.name)
def test_a_recorded_body_begins_with_the_one_before_unless_the_log_says_why_not(path: Path) -> None:
    """All sessions that the repository holds, compacted and resumed ones among them."""
    before: bytes | None = None
    count = 0
    for body, moved in bodies(path):
        if before is not None and not moved:
            assert body.startswith(before)
            count += 1
        before = body
    assert count > 0


def test_a_run_of_fifty_steps_is_told_its_state_once_and_keeps_one_prefix(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Mode, policy and limits enter with the first request; no header changes; nothing moves."""
    reads = [{"calls": [{"tool": "read_file", "args": {"path": "README.md", "limit": n + 1}}]} for n in range(49)]
    task = scripted_task([*reads, {"text": "Done."}], profile={"limits": {"steps": 100}})

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 0, finished.stderr
    whole = list(bodies(finished.artifacts / "session.jsonl.zst"))
    assert len(whole) == 50
    assert [moved for _, moved in whole] == [True] + [False] * 49
    assert all(after.startswith(before) for (before, _), (after, _) in itertools.pairwise(whole))
    assert whole[-1][0].count(b"Permission mode:") == 1
    assert [data["reason"] for data in finished.data_of("request/header")] == ["initial"]
