"""What is noted of a run in case it is killed."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

import pytest

from runner.errors import ConfigError, StorageError
from runner.workspace.records import KEEP_SECONDS, RecordKeeper, RunRecord, read_record, remove_leftovers

if TYPE_CHECKING:
    from pathlib import Path


def noted(tmp_path: Path, session: str = "session-1") -> RunRecord:
    """A record with a state directory that is there."""
    state = tmp_path / f"nightshift-{session}"
    (state / "tmp").mkdir(parents=True)
    return RunRecord(session, str(tmp_path / "artifacts"), str(state), {"task": "t.yaml"})


def leave(root: Path, record: RunRecord) -> None:
    """What a killed run leaves."""
    with RecordKeeper(root) as keeper:
        keeper.keep(record)


def test_a_record_is_private_and_read_back(tmp_path: Path) -> None:
    """0600 in a folder 0700; gone once the run has ended."""
    record = noted(tmp_path)
    root = tmp_path / "root"
    with RecordKeeper(root) as keeper:
        keeper.keep(record)

        assert read_record(root, "session-1") == record
        assert (root / ".runs").stat().st_mode & 0o777 == 0o700
        assert (root / ".runs" / "session-1.json").stat().st_mode & 0o777 == 0o600

        keeper.remove()
        assert read_record(root, "session-1") is None


def test_a_session_is_run_by_one_process(tmp_path: Path) -> None:
    """CONFIG_INVALID while the other one lives."""
    record = noted(tmp_path)
    with RecordKeeper(tmp_path) as keeper, RecordKeeper(tmp_path) as second:
        keeper.keep(record)
        with pytest.raises(ConfigError, match="run by another process"):
            second.keep(record)
    with RecordKeeper(tmp_path) as third:
        third.keep(record)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"artifacts": "a"}', b"x" * 100])
def test_what_is_no_record_is_none(tmp_path: Path, content: bytes) -> None:
    """A torn or foreign file is as good as none."""
    (tmp_path / ".runs").mkdir()
    (tmp_path / ".runs" / "session-1.json").write_bytes(content)

    assert read_record(tmp_path, "session-1") is None


@pytest.mark.parametrize("session", ["../session-1", "", ".", "a/b", "-x", "x" * 200])
def test_a_session_cannot_name_another_file(tmp_path: Path, session: str) -> None:
    """An id is data of a log."""
    (tmp_path / "session-1.json").write_text(json.dumps({"artifacts": "a", "state": "s", "command": {}}))

    assert read_record(tmp_path, session) is None


def test_a_link_is_no_record(tmp_path: Path) -> None:
    """Nor is it written through."""
    target = tmp_path / "target.json"
    target.write_text(json.dumps({"artifacts": "a", "state": "s", "command": {}}))
    (tmp_path / ".runs").mkdir()
    (tmp_path / ".runs" / "session-1.json").symlink_to(target)

    assert read_record(tmp_path, "session-1") is None
    with RecordKeeper(tmp_path) as keeper, pytest.raises(StorageError):
        keeper.keep(noted(tmp_path))


def test_leftovers_are_removed_after_a_week(tmp_path: Path) -> None:
    """Younger ones, those of runs that live, and folders that are not a run's stay."""
    root = tmp_path / "root"
    old, young, living = (noted(tmp_path, name) for name in ("old", "young", "living"))
    foreign = RunRecord("foreign", "a", str(tmp_path / "home"), {})
    (tmp_path / "home").mkdir()
    for record in (old, young, foreign):
        leave(root, record)
    with RecordKeeper(root) as keeper:
        keeper.keep(living)
        for name in ("old", "living", "foreign"):
            os.utime(root / ".runs" / f"{name}.json", (1_000_000, 1_000_000))
        now = (root / ".runs" / "young.json").stat().st_mtime + KEEP_SECONDS / 2

        removed = remove_leftovers(root, now=now)

    assert removed == [old.state]
    assert [os.path.exists(each.state) for each in (old, young, living, foreign)] == [False, True, True, True]  # noqa: PTH110
    assert sorted(path.stem for path in (root / ".runs").iterdir()) == ["living", "young"]


def test_without_records_there_is_nothing_to_remove(tmp_path: Path) -> None:
    """The folder need not be there."""
    assert remove_leftovers(tmp_path / "nowhere") == []
