"""What is noted of a run in case it is killed."""

from __future__ import annotations

import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from runner.errors import InternalError, StorageError
from runner.workspace.records import RunRecord, prune_records, read_record, remove_record, write_record

if TYPE_CHECKING:
    from pathlib import Path


def noted(tmp_path: Path, session: str = "session-1") -> RunRecord:
    """A record with a state directory that is there."""
    state = tmp_path / f"nightshift-{session}"
    (state / "tmp").mkdir(parents=True)
    return RunRecord(session, str(tmp_path / "artifacts"), str(state), {"task": "t.yaml"})


def test_a_record_is_private_and_read_back(tmp_path: Path) -> None:
    """0600 in a folder 0700; gone once the run has ended."""
    record = noted(tmp_path)
    root = tmp_path / "root"

    write_record(root, record)

    assert read_record(root, "session-1") == record
    assert (root / ".runs").stat().st_mode & 0o777 == 0o700
    assert (root / ".runs" / "session-1.json").stat().st_mode & 0o777 == 0o600
    remove_record(root, "session-1")
    assert read_record(root, "session-1") is None
    remove_record(root, "session-1")


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"\xff", b'{"artifacts": "a"}', b"x" * 100])
def test_what_is_no_record_is_none(tmp_path: Path, content: bytes) -> None:
    """A torn or foreign file is as good as none."""
    (tmp_path / ".runs").mkdir()
    (tmp_path / ".runs" / "session-1.json").write_bytes(content)

    assert read_record(tmp_path, "session-1") is None


@pytest.mark.parametrize("session", ["../session-1", "", ".", "a/b", "-x", "x" * 200, "/etc/x", "a\nb"])
def test_a_session_cannot_name_another_file(tmp_path: Path, session: str) -> None:
    """An id is data of a log."""
    content = json.dumps({"artifacts": "a", "state": "s", "command": {}})
    (tmp_path / "session-1.json").write_text(content)

    assert read_record(tmp_path, session) is None
    with pytest.raises(InternalError):
        write_record(tmp_path, RunRecord(session, "a", "s", {}))
    with pytest.raises(InternalError):
        remove_record(tmp_path, session)
    assert (tmp_path / "session-1.json").read_text() == content


def test_a_link_is_no_record(tmp_path: Path) -> None:
    """Nor is it written through: it is replaced."""
    target = tmp_path / "target.json"
    target.write_text(json.dumps({"artifacts": "a", "state": "s", "command": {}}))
    (tmp_path / ".runs").mkdir()
    (tmp_path / ".runs" / "session-1.json").symlink_to(target)

    assert read_record(tmp_path, "session-1") is None
    write_record(tmp_path, noted(tmp_path))
    assert json.loads(target.read_text())["state"] == "s"


def test_a_record_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    """STORAGE_FAILED with the path."""
    (tmp_path / ".runs").write_text("a file")

    with pytest.raises(StorageError, match=r"session-1\.json cannot be written"):
        write_record(tmp_path, noted(tmp_path))


def test_old_records_go_when_their_state_directory_is_gone(tmp_path: Path) -> None:
    """Young ones, and those somebody could still go on with, stay."""
    root = tmp_path / "root"
    for name in ("gone", "there", "young"):
        record = noted(tmp_path, name)
        write_record(root, record)
        if name != "there":
            shutil.rmtree(record.state)
    (root / ".runs" / "torn.json").write_text("{")
    for name in ("gone", "there", "torn"):
        os.utime(root / ".runs" / f"{name}.json", (1_000_000, 1_000_000))

    prune_records(root)
    prune_records(tmp_path / "nowhere")

    assert sorted(path.stem for path in (root / ".runs").iterdir()) == ["there", "young"]
