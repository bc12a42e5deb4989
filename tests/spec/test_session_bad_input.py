"""Bad input to every command that reads a session: one clear message, code 13, nothing left behind."""

from __future__ import annotations

import json
import stat
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import zstandard

from runner.cli.main import run_cli
from runner.session.store import open_session

if TYPE_CHECKING:
    from collections.abc import Callable

OURS = Path(__file__).resolve().parents[1] / "golden" / "ours"
LINES = [line + b"\n" for line in open_session(str(OURS / "turns")).raw_lines()]
WHOLE = b"".join(LINES)
COMMANDS: dict[str, list[str]] = {
    "show": [],
    "stats": [],
    "verify": ["--allow-open"],
    "export": ["--output", "out.zip"],
    "request": ["--step", "1"],
    "fork": ["--turn", "1", "--output", "child"],
}
EARLY = 4
"""A line that every command reads."""


def with_line(change: Callable[[bytes], bytes]) -> bytes:
    """The log with an early line changed."""
    return b"".join([*LINES[:EARLY], change(LINES[EARLY]), *LINES[EARLY + 1 :]])


def frame(data: bytes) -> bytes:
    """One zstd frame."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


LOGS: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty, or cut off inside its header"),
    "text": (b"This is no log.\nNor is this.\n", "line 1: not valid JSON"),
    "other JSON": (b'{"type":"turn/start"}\n', "line 1: not the header of a session log"),
    "a document": (json.dumps({"a": [1, 2]}, indent=2).encode(), "line 1: not valid JSON"),
    "a truncated header": (LINES[0][:50], "empty, or cut off inside its header"),
    "a truncated compressed header": (frame(LINES[0])[:30], "empty, or cut off inside its header"),
    "a wrong version": (WHOLE.replace(b'"version":0', b'"version":3', 1), "line 1: version 3 of the session log"),
    "a newer format": (WHOLE.replace(b'"format":1', b'"format":2', 1), "line 1: the log was written in a newer format"),
    "binary garbage": (bytes(range(256)) * 100, "line 1: not valid JSON"),
    "NUL bytes": (bytes(20_000) + b"\n", "line 1: not valid JSON"),
    "a NUL byte in a line": (with_line(lambda line: line[:20] + b"\0" + line[20:]), "line 5: not valid JSON"),
    "invalid UTF-8": (with_line(lambda line: line.replace(b'"data"', b'"d\xffta"')), "line 5: not valid JSON"),
    "UTF-16": (WHOLE.decode().encode("utf-16"), "line 1: not valid JSON"),
    "a byte order mark": (b"\xef\xbb\xbf" + WHOLE, "line 1: not valid JSON"),
    "a seq gap": (b"".join([*LINES[:EARLY], *LINES[EARLY + 1 :]]), "line 5: seq is 4, expected 3"),
    "a seq repeat": (with_line(lambda line: line + line), "line 6: seq is 3, expected 4"),
    "a seq of text": (with_line(lambda line: line.replace(b'"seq":3', b'"seq":"3"')), "line 5: a line has no type or"),
    "an unknown event": (
        with_line(lambda _line: b'{"type":"new/kind","seq":3,"time":1,"data":{}}\n'),
        "line 5: event 3 (new/kind): unknown event type",
    ),
    "deep nesting": (with_line(lambda _line: b"[" * 100_000 + b"\n"), "line 5: not valid JSON"),
    "a frame and then text": (frame(b"".join(LINES[:3])) + WHOLE, "damaged zstd data"),
    "text and then a frame": (b"".join(LINES[:3]) + frame(WHOLE), "line 4: not valid JSON"),
    "a frame that is damaged": (frame(WHOLE)[:-2] + b"??", "damaged zstd data"),
    "frames of two logs": (frame(b"".join(LINES[:3])) + frame(WHOLE), "line 4: a line has no type or seq"),
    "a gzip file": (b"\x1f\x8b\x08\x00" + bytes(100) + b"\n", "line 1: not valid JSON"),
}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def assert_refused(command: str, path: Path, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """One message, code 13, no traceback, no output of the command."""
    assert run_cli(["session", command, str(path), *COMMANDS[command]]) == 13
    err = capfd.readouterr().err
    assert message in err
    assert err.startswith((f"error LOG_INVALID: {path}", f"error LOG_UNKNOWN_EVENT: {path}"))
    told = [line for line in err.splitlines() if not line.startswith("hint: ")]
    assert len(told) == 1
    assert len(told[0]) < 1_000
    assert sorted(each.name for each in path.parent.iterdir()) == [path.name]


@pytest.mark.parametrize("case", LOGS)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_log_is_refused(command: str, case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Whatever it is, and whatever it is read for."""
    content, message = LOGS[case]
    (tmp_path / "session.jsonl").write_bytes(content)

    assert_refused(command, tmp_path / "session.jsonl", message, capfd)


def archive(path: Path, **members: bytes | tuple[bytes, int]) -> None:
    """Write a ZIP; a member may come with its file mode."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in members.items():
            data, mode = content if isinstance(content, tuple) else (content, stat.S_IFREG | 0o600)
            info = zipfile.ZipInfo(name)
            info.external_attr = mode << 16
            info.compress_type = zipfile.ZIP_DEFLATED
            target.writestr(info, data)


ARCHIVES: dict[str, tuple[dict[str, bytes | tuple[bytes, int]], str]] = {
    "no log": ({"other.txt": b"x"}, "holds no session.jsonl"),
    "nothing": ({}, "an empty ZIP archive"),
    "a path with ..": ({"session.jsonl": WHOLE, "../evil.txt": b"x"}, "unsafe path: '../evil.txt'"),
    "a path with .. inside": ({"session.jsonl": WHOLE, "spill/../../evil.txt": b"x"}, "unsafe path"),
    "an absolute path": ({"session.jsonl": WHOLE, "/tmp/evil.txt": b"x"}, "unsafe path"),
    "a path of another system": ({"session.jsonl": WHOLE, "spill\\evil.txt": b"x"}, "unsafe path"),
    "a link": ({"session.jsonl": WHOLE, "spill/x.txt": (b"/etc/passwd", stat.S_IFLNK | 0o777)}, "is a link"),
    "a log that is a link": ({"session.jsonl": (b"/etc/passwd", stat.S_IFLNK | 0o777)}, "is a link"),
    "a device": ({"session.jsonl": WHOLE, "spill/x.txt": (b"", stat.S_IFCHR | 0o600)}, "a special file"),
    "an empty log": ({"session.jsonl": b""}, "empty, or cut off inside its header"),
    "a log that is none": ({"session.jsonl": b"\x00\xff\n"}, "line 1: not valid JSON"),
}


@pytest.mark.parametrize("case", ARCHIVES)
@pytest.mark.parametrize("command", COMMANDS)
def test_a_bad_archive_is_refused(command: str, case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nothing is read or written outside, whatever the members are called."""
    members, message = ARCHIVES[case]
    archive(tmp_path / "x.zip", **members)

    assert_refused(command, tmp_path / "x.zip", message, capfd)


@pytest.mark.parametrize("command", COMMANDS)
def test_an_archive_cut_short_is_refused(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A download that stopped."""
    data = (OURS / "turns" / "session.zip").read_bytes()
    (tmp_path / "x.zip").write_bytes(data[: len(data) // 2])

    assert_refused(command, tmp_path / "x.zip", "not a readable ZIP archive", capfd)


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_not_there_is_a_usage_error(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Code 2, and what can be named."""
    assert run_cli(["session", command, str(tmp_path / "no"), *COMMANDS[command]]) == 2
    err = capfd.readouterr().err
    assert "there is no session" in err
    assert "hint: name an artifacts directory" in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_without_a_log_is_refused(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """With the name the log should have had."""
    folder = tmp_path / "artifacts"
    folder.mkdir()

    assert_refused(command, folder, "holds no session log", capfd)
