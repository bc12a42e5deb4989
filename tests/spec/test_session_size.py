"""Large logs: memory does not grow with them, and what is not looked into piece by piece is read the same."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import random
import re
import resource
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from runner import neutral
from runner.errors import LogError, StorageError
from runner.providers.registry import dialects
from runner.session import codec
from runner.session import events as ev
from runner.session.export import export_session
from runner.session.repair import closing_events
from runner.session.store import open_session
from runner.session.transcript import transcript
from runner.session.verify import verify_session
from runner.testing.sessions import SampleSession

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = sorted(path for path in (ROOT / "tests" / "golden" / "dsh").iterdir() if path.suffix != ".md")
SMALL, LARGE = 3_000_000, 18_000_000


@functools.cache
def generator() -> Any:
    """The module that generates logs."""
    spec = importlib.util.spec_from_file_location("gen_log", ROOT / "bench" / "gen_log.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generate(directory: Path, size: int, *, seed: int = 1) -> Path:
    """A generated log of ``size`` decoded bytes."""
    generator().Generator(directory, size=size, seed=seed, pool=300_000).run()
    return directory


def peak(command: list[str]) -> float:
    """Largest resident size of a command in megabytes."""
    # The command is started by a small process, since a child's peak is at least what its parent had.
    code = "import os,subprocess,sys\np=subprocess.Popen(sys.argv[1:],stdout=subprocess.DEVNULL)\n"
    code += "_,s,u=os.wait4(p.pid,0)\nprint(s,u.ru_maxrss)"
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    done = subprocess.run(
        [sys.executable, "-I", "-c", code, *command], capture_output=True, text=True, check=True, env=environment
    )
    status, size = map(int, done.stdout.split())
    assert status == 0
    return size * 1024 / 1e6


# --- generated logs ----------------------------------------------------------------------------


def test_a_generated_log_is_whole_and_every_request_is_rebuilt(tmp_path: Path) -> None:
    """It has the wanted size, packed rows, summaries and approvals; the same options give the same bytes."""
    log = generate(tmp_path / "a", 1_500_000)

    result = verify_session(open_session(str(log)), dialects=dialects())

    assert (result.state, result.requests_not_checked) == ("whole", 0)
    assert result.requests_checked == result.steps > 20
    lines = list(open_session(str(log)).raw_lines())
    assert 1_500_000 <= sum(len(line) + 1 for line in lines) < 1_900_000
    kinds = {line.split(b'"', 4)[3] for line in lines}
    assert {b"text-chunks", b"tool-call-chunks", b"compaction/summary", b"approval/decided"} <= kinds
    assert verify_session(open_session(str(generate(tmp_path / "b", 1_500_000)))).digest == result.digest
    assert verify_session(open_session(str(generate(tmp_path / "c", 1_500_000, seed=2)))).digest != result.digest


def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    """Verified, exported, shown and counted as streams: six times the log takes some megabytes more, if any."""
    small, large = generate(tmp_path / "small", SMALL), generate(tmp_path / "large", LARGE)
    nightshift = str(Path(sys.executable).with_name("nightshift"))
    commands = {
        "verify": [],
        "show": [],
        "show --json": ["--json"],
        "stats": [],
        "export": ["--output", str(tmp_path / "x.zip")],
    }

    for name, options in commands.items():
        command = [nightshift, "session", name.split()[0]]
        before, after = (peak([*command, str(log), *options]) for log in (small, large))
        assert after < before + 10, name
        assert after < 200, name


# --- packed rows -------------------------------------------------------------------------------


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_packed_events_are_the_same_events(path: Path) -> None:
    """A row counts and places its events; expanded it gives them, and their lines."""
    events = list(open_session(str(path)).events())

    expanded: list[Any] = []
    for event in open_session(str(path)).packed_events():
        if isinstance(event, codec.ChunkRow):
            inner = list(event.events())
            assert [one.record() for one in inner] == event.records()
            assert (event.seq, event.count, event.time) == (inner[0].seq, len(inner), inner[-1].time)
            expanded += inner
        else:
            expanded.append(event)
    assert expanded == events
    whole = [event.seq for event in open_session(str(path)).whole_events()]
    assert set(whole) <= {event.seq for event in events}
    assert [event.seq for event in events if not isinstance(event, ev.AssistantChunk)] == [
        event.seq for event in open_session(str(path)).whole_events() if not isinstance(event, ev.AssistantChunk)
    ]


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_a_transcript_does_not_depend_on_packing(path: Path) -> None:
    """Runs of pieces are one line either way."""
    source = open_session(str(path))

    assert list(transcript(source.header, source.packed_events())) == list(transcript(source.header, source.events()))


# --- verification ------------------------------------------------------------------------------


def test_a_conversation_too_large_for_memory_verifies_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines move to a temporary file, which is written anew when most of it no longer counts."""
    log = generate(tmp_path / "log", 1_500_000)
    expected = verify_session(open_session(str(log)), dialects=dialects()).as_json()
    monkeypatch.setattr("runner.session.rebuild._IN_MEMORY", 20_000)

    assert verify_session(open_session(str(log)), dialects=dialects()).as_json() == expected


# --- export ------------------------------------------------------------------------------------


def lines_of(directory: Path) -> list[bytes]:
    """The lines of a log, with their newlines."""
    return [line + b"\n" for line in open_session(str(directory)).raw_lines()]


def sealed(lines: list[bytes]) -> list[bytes]:
    """The same lines with every seal made anew."""
    whole, result = hashlib.sha256(), []
    for number, line in enumerate(lines):
        data = line
        if line.startswith(b'{"type":"log/seal"'):
            record = codec.decode_line(line)
            start = codec.seal_start(seq=record["seq"], time=record["time"], lines=number)
            digest = whole.copy()
            digest.update(start)
            data = start + digest.hexdigest().encode() + codec.SEAL_END
        whole.update(data)
        result.append(data)
    return result


def exported(tmp_path: Path, lines: list[bytes]) -> tuple[bytes, dict[str, Any]]:
    """The log in an export of ``lines``, and its manifest."""
    (tmp_path / "log.jsonl").write_bytes(b"".join(lines))
    written = export_session(open_session(str(tmp_path / "log.jsonl")), tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "x.zip") as archive:
        data = archive.read("session.jsonl")
    assert written.manifest["members"][0]["sha256"] == hashlib.sha256(data).hexdigest()
    return data, written.manifest


@pytest.fixture
def lines(tmp_path: Path) -> list[bytes]:
    """The lines of a session of ours."""
    with SampleSession(tmp_path / "artifacts") as session:
        session.turn(steps=3)
        session.turn(steps=2)
        session.end()
    return lines_of(tmp_path / "artifacts")


@pytest.mark.parametrize("waiting", [1, 3_000, 1_000_000])
def test_an_export_holds_the_log_byte_for_byte(
    tmp_path: Path, lines: list[bytes], waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many lines wait for their seal before they are read."""
    monkeypatch.setattr("runner.session.export._WAITING", waiting)

    assert exported(tmp_path, lines)[0] == b"".join(lines)


@pytest.mark.parametrize("waiting", [1, 1_000_000])
def test_a_changed_byte_under_a_seal_stops_the_export(
    tmp_path: Path, lines: list[bytes], waiting: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even one that leaves the line a good event; the seal's line and the first it covers are named."""
    monkeypatch.setattr("runner.session.export._WAITING", waiting)
    seals = [number for number, line in enumerate(lines, 1) if b'"log/seal"' in line]
    changed = seals[1] + 2
    lines[changed] = re.sub(rb'"time":(\d+)\d,', rb'"time":\g<1>x,', lines[changed]).replace(b"x,", b"3,")

    with pytest.raises(LogError, match=rf"line {seals[2]}: the seal does not fit: a line from {seals[1] + 1} to "):
        exported(tmp_path, lines)


@pytest.mark.parametrize("seal", ["no json", '{"type":"log/seal","seq":3}', '{"type":"log/seal-of-mine"}'])
def test_a_line_that_only_looks_like_a_seal_stops_the_export(tmp_path: Path, lines: list[bytes], seal: str) -> None:
    """It is none, and what stands before it is not taken for sealed."""
    at = next(number for number, line in enumerate(lines) if b'"log/seal"' in line)
    lines[at] = seal.encode() + b"\n"

    with pytest.raises(LogError, match=f"line {at + 1}: "):
        exported(tmp_path, lines)


def test_a_turn_left_open_under_seals_is_closed_in_the_copy(tmp_path: Path, lines: list[bytes]) -> None:
    """The last seal may stand inside a step, with calls that have no result; they are found and answered."""
    results = [number for number, line in enumerate(lines) if b'"type":"tool/result"' in line]
    cut = lines[: results[-1]]
    seq = codec.decode_line(cut[-1])["seq"] + 1
    start = codec.seal_start(seq=seq, time=1_796_000_900_000, lines=len(cut))
    cut.append(start + b"0" * 64 + codec.SEAL_END)
    cut = sealed(cut)

    data, manifest = exported(tmp_path, cut)

    assert manifest["repaired"] is True
    assert data.startswith(b"".join(cut))
    expected = closing_events(open_session(str(tmp_path / "log.jsonl")).events())
    assert [event.TYPE for event in expected] == ["tool/result", "step/end", "turn/end"]
    added = data[len(b"".join(cut)) :].splitlines(keepends=True)
    assert added[:-1] == [codec.encode_line(event.record()) for event in expected]
    assert verify_session(open_session(str(tmp_path / "x.zip")), allow_open=True).manifest == "ok"


def test_sealed_redactions_are_said(tmp_path: Path) -> None:
    """The manifest tells of those under a seal too."""
    with SampleSession(tmp_path / "artifacts") as session:
        session.start_turn()
        session.start_step("Go.")
        session.log.append(ev.Redaction(kind="env", count=1, where="tool/result"))
        session.answer(calls=0)
        session.end_step()
        session.end_turn()

    assert exported(tmp_path, lines_of(tmp_path / "artifacts"))[1]["redacted"] is True


def test_a_large_member_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    """It fails in the middle of the member: STORAGE_FAILED, and nothing is left."""
    with SampleSession(tmp_path / "artifacts") as session:
        session.turn(steps=1)
    (tmp_path / "artifacts" / "spill").mkdir()
    text = " ".join(random.Random(1).choices([f"word{number}" for number in range(300)], k=2_000_000))
    (tmp_path / "artifacts" / "spill" / "large.txt").write_text(text)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(StorageError, match="File too large"):
            export_session(open_session(str(tmp_path / "artifacts")), tmp_path / "x.zip")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert sorted(path.name for path in tmp_path.iterdir()) == ["artifacts"]


# --- text --------------------------------------------------------------------------------------


def test_what_needs_no_escapes_is_found_without_a_regular_expression() -> None:
    """No character that the expressions escape is taken for inert, alone or in a text beyond ASCII."""
    active = re.compile(neutral._ACTIVE)
    for code in range(sys.maxunicode + 1):
        character = chr(code)
        for text in (character, f"é{character}"):
            assert not (neutral._is_inert(text) and active.search(text)), hex(code)
    assert neutral._is_inert("plain\n\ttext ~")
    assert neutral._is_inert("größer\n数")
