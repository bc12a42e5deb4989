"""Huge lines and bombs given to the installed command: one message, code 13, and little memory."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard

from runner.session.store import open_session

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from conftest import Nightshift

OURS = Path(__file__).resolve().parents[1] / "golden" / "ours"
BEGIN = b"".join(line + b"\n" for line in list(open_session(str(OURS / "turns")).raw_lines())[:4])
WHOLE = b"".join(line + b"\n" for line in open_session(str(OURS / "turns")).raw_lines())
MOST = 150 * 1024
"""Kilobytes that a process may have resident, the interpreter and its libraries included."""

COMMANDS: dict[str, list[str]] = {
    "verify": ["--allow-open"],
    "fork": ["--turn", "1", "--output", "child"],
    "show": [],
    "stats": [],
    "export": ["--output", "out.zip"],
    "request": ["--step", "1"],
}


def long_line() -> Iterator[bytes]:
    """The beginning of a log, then one line of 100 MB that is JSON."""
    yield BEGIN
    yield b'{"type":"todo/write","seq":3,"time":1,"data":{"todos":["'
    for _ in range(100):
        yield b"x" * 1_000_000
    yield b'"]}}\n'


def newlines() -> Iterator[bytes]:
    """400 MB of empty lines."""
    yield BEGIN
    for _ in range(400):
        yield b"\n" * 1_000_000


def zeros() -> Iterator[bytes]:
    """300 MB without a newline."""
    yield BEGIN
    for _ in range(300):
        yield bytes(1_000_000)


def plain(path: Path, pieces: Iterator[bytes]) -> None:
    """As they are."""
    with path.open("wb") as target:
        target.writelines(pieces)


def compressed(path: Path, pieces: Iterator[bytes]) -> None:
    """As one zstd frame."""
    encoder = zstandard.ZstdCompressor(level=1).compressobj()
    with path.open("wb") as target:
        target.writelines(encoder.compress(piece) for piece in pieces)
        target.write(encoder.flush())


def zipped(path: Path, pieces: Iterator[bytes]) -> None:
    """As the log of a ZIP, in which only one member is large, and not suspicious by its ratio alone."""
    with (
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("session.jsonl", "w", force_zip64=True) as member,
    ):
        for piece in pieces:
            member.write(piece)


def many_members(path: Path, pieces: Iterator[bytes]) -> None:
    """A ZIP that says that its members are gigabytes."""
    del pieces
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("session.jsonl", WHOLE)
        archive.writestr("spill/x.txt", bytes(100_000))
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<L", 3 << 30)
    path.write_bytes(data)


CASES: dict[str, tuple[Callable[[Path, Iterator[bytes]], None], Callable[[], Iterator[bytes]], str]] = {
    "a line of 100 MB": (plain, long_line, "line 5 is longer than 16 MiB"),
    "a compressed line of 100 MB": (compressed, long_line, "line 5 is longer than 16 MiB"),
    "a zipped line of 100 MB": (zipped, long_line, "line 5 is longer than 16 MiB"),
    "a bomb of newlines": (compressed, newlines, "line 5: not valid JSON"),
    "a zipped bomb of newlines": (zipped, newlines, "line 5: not valid JSON"),
    "a bomb of zeros": (compressed, zeros, "line 5 is longer than 16 MiB"),
    "a zipped bomb of zeros": (zipped, zeros, "line 5 is longer than 16 MiB"),
    "a member of gigabytes": (many_members, zeros, "expands beyond all measure"),
}


# A process counts as its own what its parent had resident when it was started, so the parent is a small one.
MEASURE = """
import json, os, subprocess, sys
process = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
try:
    process.wait(50)
except subprocess.TimeoutExpired:
    process.kill()
    process.wait()
import resource
print(json.dumps([process.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""


def measure(run_nightshift: Nightshift, *arguments: str | Path) -> tuple[int, str, int]:
    """Run the installed command; exit code, stderr, most kilobytes it had resident."""
    folder = run_nightshift.directory / "measured"
    folder.mkdir(exist_ok=True)
    environment = {key: value for key, value in run_nightshift.environment().items() if not key.startswith("COV")}
    command = [Path(sys.executable).with_name("nightshift"), *arguments]
    done = subprocess.run(
        [sys.executable, "-I", "-c", MEASURE, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        errors="replace",
        check=True,
    )
    code, resident = json.loads(done.stdout)
    return code, done.stderr, resident


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    "command", [name if name in ("verify", "fork") else pytest.param(name, marks=pytest.mark.slow) for name in COMMANDS]
)
def test_a_huge_line_or_a_bomb_takes_little_memory(
    command: str, case: str, tmp_path: Path, run_nightshift: Nightshift
) -> None:
    """Every command that reads a session stops at the same place, with the same message."""
    write, pieces, message = CASES[case]
    path = tmp_path / "session"
    write(path, pieces())

    code, err, resident = measure(run_nightshift, "session", command, path, *COMMANDS[command])

    assert code == 13, err
    assert message in err
    assert err.startswith(f"error LOG_INVALID: {path}")
    assert len([line for line in err.splitlines() if not line.startswith("hint: ")]) == 1
    assert resident < MOST
    assert not (run_nightshift.directory / "measured" / "child").exists()
    assert not (run_nightshift.directory / "measured" / "out.zip").exists()


def test_a_sound_log_takes_as_little(run_nightshift: Nightshift) -> None:
    """The bound is near what the command takes anyway, so it means something."""
    code, err, resident = measure(run_nightshift, "session", "verify", OURS / "turns")

    assert (code, err) == (0, "")
    assert MOST / 10 < resident < MOST
