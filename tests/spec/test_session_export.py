"""Exports: one ZIP with everything, the same bytes each time, repaired where the log was open."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import time
import zipfile
import zlib
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.errors import LogError, StorageError
from runner.session import events as ev
from runner.session.export import export_session, export_zip
from runner.session.header import LOG_NAME
from runner.session.repair import closing_events
from runner.session.store import open_session
from runner.session.verify import verify_session
from runner.testing.sessions import SAMPLE_ID, SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """A finished session with spilled output, an image and a subagent."""
    directory = tmp_path / "artifacts"
    with SampleSession(directory) as session:
        session.turn(steps=3)
        session.end()
    for path, content in (("spill/call_1_1.txt", b"long output\n" * 100), ("media/ab.png", b"\x89PNG")):
        (directory / path).parent.mkdir()
        (directory / path).write_bytes(content)
    child = {"parentSession": SAMPLE_ID, "origin": "subagent", "delegationDepth": 1}
    with SampleSession(directory / "subagents" / "child-1", session_id="child-1", seed=2, header=child) as session:
        session.turn(steps=1)
    (directory / "subagents" / "child-1" / "spill").mkdir()
    (directory / "subagents" / "child-1" / "spill" / "c.txt").write_bytes(b"its own")
    return directory


def members(path: Path) -> dict[str, bytes]:
    """Path → content of an archive."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_an_export_holds_the_log_its_files_and_its_subagents(
    artifacts: Path, tmp_path: Path, decoded_frames: Callable[[Path], bytes]
) -> None:
    """Logs are decoded; the manifest comes last and lists every other member with size and digest."""
    written = export_zip(artifacts, tmp_path / "session.zip")

    content = members(tmp_path / "session.zip")
    assert list(content) == [
        "session.jsonl",
        "media/ab.png",
        "spill/call_1_1.txt",
        "subagents/child-1/session.jsonl",
        "subagents/child-1/spill/c.txt",
        "manifest.json",
    ]
    decoded = decoded_frames(artifacts / LOG_NAME)
    assert content["session.jsonl"] == decoded
    manifest = json.loads(content["manifest.json"])
    assert manifest == written.manifest
    assert {key: manifest[key] for key in ("schemaVersion", "session", "repaired", "redacted")} == {
        "schemaVersion": 1,
        "session": SAMPLE_ID,
        "repaired": False,
        "redacted": False,
    }
    assert manifest["members"] == [
        {"path": path, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for path, data in content.items()
        if path != "manifest.json"
    ]
    archive = (tmp_path / "session.zip").read_bytes()
    assert (written.bytes, written.sha256) == (len(archive), hashlib.sha256(archive).hexdigest())


def test_the_same_session_gives_the_same_bytes(artifacts: Path, tmp_path: Path) -> None:
    """Wherever and whenever it is exported, by whatever user."""
    copy = shutil.copytree(artifacts, tmp_path / "copy")
    for path in copy.rglob("*"):
        os.utime(path, (1, 1))
        path.chmod(0o755)

    first = export_zip(artifacts, tmp_path / "one.zip")
    second = export_zip(copy, tmp_path / "two.zip")

    assert first.sha256 == second.sha256
    assert (tmp_path / "one.zip").stat().st_mode & 0o777 == 0o600


def test_an_export_of_an_export_is_equal(artifacts: Path, tmp_path: Path) -> None:
    """A ZIP is a session like any other."""
    first = export_zip(artifacts, tmp_path / "one.zip")

    assert export_session(open_session(str(tmp_path / "one.zip")), tmp_path / "two.zip").sha256 == first.sha256


def test_other_tools_read_the_archive(artifacts: Path, tmp_path: Path) -> None:
    """``unzip -t`` or any ZIP reader finds every member whole."""
    export_zip(artifacts, tmp_path / "session.zip")

    with zipfile.ZipFile(tmp_path / "session.zip") as archive:
        assert archive.testzip() is None
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}


def test_an_open_log_is_repaired_in_the_copy(tmp_path: Path) -> None:
    """The copy is closed, sealed over its new end and marked; the log itself is not touched."""
    session = SampleSession(tmp_path / "artifacts")
    session.turn(steps=2)
    session.start_turn()
    session.start_step("Go on.")
    session.call(*next(iter(session.answer(calls=2).items())))
    session.log.barrier()
    before = session.log.path.read_bytes()

    written = export_zip(session.directory, tmp_path / "session.zip")

    assert session.log.path.read_bytes() == before
    assert written.manifest["repaired"] is True
    events = list(open_session(str(tmp_path / "session.zip")).events())
    assert closing_events(events) == []
    assert [event.TYPE for event in events[-5:]] == ["tool/result", "tool/result", "step/end", "turn/end", "log/seal"]
    result = verify_session(open_session(str(tmp_path / "session.zip")), allow_open=True)
    assert (result.manifest, result.state, result.last_seal_line) == ("ok", "open", result.lines)
    again = export_zip(session.directory, tmp_path / "again.zip")
    assert again.sha256 == written.sha256
    session.log.close()


def test_a_torn_log_is_exported_without_its_torn_record(tmp_path: Path) -> None:
    """That is a repair too."""
    session = SampleSession(tmp_path / "artifacts")
    session.turn(steps=2)
    data = session.log.path.read_bytes()
    session.log.close()
    session.log.path.write_bytes(data[:-2])

    written = export_zip(session.directory, tmp_path / "session.zip")

    assert written.manifest["repaired"] is True
    assert verify_session(open_session(str(tmp_path / "session.zip")), allow_open=True).manifest == "ok"


def test_redactions_are_said(tmp_path: Path) -> None:
    """The manifest tells whether secrets were taken out of what the log holds."""
    with SampleSession(tmp_path / "artifacts") as session:
        session.turn(steps=1)
        session.log.append(ev.Redaction(kind="env", count=1, where="tool/result"))

    assert export_zip(session.directory, tmp_path / "session.zip").manifest["redacted"] is True


def test_links_in_the_artifacts_are_not_followed(artifacts: Path, tmp_path: Path) -> None:
    """A link among spilled files is left out, wherever it points."""
    (tmp_path / "secret").write_text("secret")
    (artifacts / "spill" / "link.txt").symlink_to(tmp_path / "secret")
    (artifacts / "media" / "folder").symlink_to(tmp_path, target_is_directory=True)

    export_zip(artifacts, tmp_path / "session.zip")

    assert not [name for name, data in members(tmp_path / "session.zip").items() if "link" in name or b"secret" in data]


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.suffix != ".md"))
def test_every_log_of_dsh_is_exported(name: str, tmp_path: Path) -> None:
    """From any form, subagents included; the export verifies and only the killed one is marked repaired."""
    written = export_session(open_session(str(GOLDEN / name)), tmp_path / "session.zip")

    result = verify_session(open_session(str(tmp_path / "session.zip")))
    assert (result.manifest, result.state) == ("ok", "closed")
    assert len(result.children) == (2 if name == "rich.zip" else 0)
    assert written.manifest["repaired"] is (name == "killed-open-turn.zip")


def test_a_damaged_log_is_not_exported(artifacts: Path, tmp_path: Path) -> None:
    """Nothing is left of the attempt, and what stood under the name before stays."""
    target = tmp_path / "session.zip"
    target.write_text("what was there")
    lines = [line + b"\n" for line in open_session(str(artifacts)).raw_lines()]
    (tmp_path / "broken.jsonl").write_bytes(b"".join(lines[:20] + lines[21:]))

    with pytest.raises(LogError, match="line 21"):
        export_session(open_session(str(tmp_path / "broken.jsonl")), target)

    assert target.read_text() == "what was there"
    assert not [path for path in tmp_path.iterdir() if path.name.endswith(".new")]


def test_an_export_that_cannot_be_written_is_reported(artifacts: Path, tmp_path: Path) -> None:
    """A missing folder, and a limit on the file's size, are STORAGE_FAILED and leave nothing."""
    with pytest.raises(StorageError, match="cannot write"):
        export_zip(artifacts, tmp_path / "missing" / "session.zip")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2048, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            export_zip(artifacts, tmp_path / "session.zip")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifacts"]


def test_members_of_any_content_are_compressed_in_little_time(artifacts: Path, tmp_path: Path) -> None:
    """A cancelled run has seconds for its end, and its output may hardly get smaller: zlib takes four times as long."""
    contents = {
        "dense": random.Random(1).randbytes(6_000_000).hex().encode(),
        "text": b"the same line again\n" * 400_000,
    }
    for name, content in contents.items():
        (artifacts / "spill" / f"{name}.txt").write_bytes(content)

    before = time.process_time()
    export_zip(artifacts, tmp_path / "a.zip")
    taken = time.process_time() - before

    before = time.process_time()
    by_zlib = {name: len(zlib.compress(content, 1)) for name, content in contents.items()}
    assert taken < (time.process_time() - before) * 0.75
    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        for name, content in contents.items():
            assert archive.read(f"spill/{name}.txt") == content
            assert archive.getinfo(f"spill/{name}.txt").compress_type == zipfile.ZIP_DEFLATED
            assert archive.getinfo(f"spill/{name}.txt").compress_size < 1.2 * by_zlib[name]


@pytest.mark.skipif(shutil.which("unzip") is None, reason="unzip is not installed")
def test_an_export_is_read_by_unzip(artifacts: Path, tmp_path: Path) -> None:
    """Its compressor is not that of Python's zipfile, which all other tests read with."""
    export_zip(artifacts, tmp_path / "a.zip")

    subprocess.run(["unzip", "-q", tmp_path / "a.zip", "-d", tmp_path / "out"], capture_output=True, check=True)

    with zipfile.ZipFile(tmp_path / "a.zip") as archive:
        for name in archive.namelist():
            assert (tmp_path / "out" / name).read_bytes() == archive.read(name)
