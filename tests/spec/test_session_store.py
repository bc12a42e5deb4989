"""Opening sessions: every form is found and read; whatever is none is refused in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import stat
import struct
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from runner.errors import ConfigError, ErrorCode, LogError
from runner.session.store import SessionSource, default_root, open_session
from runner.testing.sessions import SAMPLE_ID, SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"
HEADER = b'{"type":"session","version":0,"id":"session-1","createdAt":1,"delegationDepth":0}\n'


def turn(seq: int, name: str = "turn/start") -> bytes:
    """One line."""
    return json.dumps({"type": name, "seq": seq, "time": 1, "data": {"turn": 1, "reason": {}}}).encode() + b"\n"


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """An artifacts directory with a finished session."""
    with SampleSession(tmp_path / "artifacts") as session:
        session.turn(steps=2)
        session.end()
    return tmp_path / "artifacts"


def read(reference: Path | str) -> SessionSource:
    """Open a session and read it to its end."""
    source = open_session(str(reference))
    for _ in source.events():
        pass
    return source


def refused(path: Path) -> LogError:
    """What a reader says of a broken session."""
    with pytest.raises(LogError) as caught:
        read(path)
    assert caught.value.code.exit_code == 13
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    return caught.value


def test_a_session_is_found_in_every_form(
    sample: Path, tmp_path: Path, decoded_frames: Callable[[Path], bytes]
) -> None:
    """A directory, its log, the decoded log, a renamed file: what a file is, its content says."""
    decoded = decoded_frames(sample / "session.jsonl.zst")
    (tmp_path / "plain.jsonl").write_bytes(decoded)
    (tmp_path / "misnamed.txt").write_bytes((sample / "session.jsonl.zst").read_bytes())

    events = [
        [event.record() for event in read(path).events()]
        for path in (sample, sample / "session.jsonl.zst", tmp_path / "plain.jsonl", tmp_path / "misnamed.txt")
    ]

    assert events[1:] == events[:1] * 3
    assert len(events[0]) > 40
    assert open_session(str(sample)).directory == sample


def test_a_session_is_found_by_its_id(sample: Path, tmp_path: Path) -> None:
    """Under the default root of the environment."""
    root = tmp_path / "state"
    shutil.copytree(sample, root / "nightshift" / SAMPLE_ID)

    source = open_session(SAMPLE_ID, environ={"XDG_STATE_HOME": str(root)})

    assert source.header["id"] == SAMPLE_ID
    assert source.directory == root / "nightshift" / SAMPLE_ID


@pytest.mark.parametrize(
    ("environ", "root"),
    [
        ({"RUNNER_TEMP": "/r", "XDG_STATE_HOME": "/x", "HOME": "/h"}, "/r/nightshift"),
        ({"XDG_STATE_HOME": "/x", "HOME": "/h"}, "/x/nightshift"),
        ({"RUNNER_TEMP": "", "XDG_STATE_HOME": "relative", "HOME": "/h"}, "/h/.local/state/nightshift"),
        ({"HOME": "/h"}, "/h/.local/state/nightshift"),
    ],
)
def test_the_default_root_follows_the_environment(environ: dict[str, str], root: str) -> None:
    """A relative or empty variable does not count."""
    assert default_root(environ) == Path(root)


@pytest.mark.parametrize("reference", ["no-such-session", "../escape", "a/b", "", "x" * 5000, "with\0nul"])
def test_a_name_of_nothing_is_a_usage_error(reference: str, tmp_path: Path) -> None:
    """CONFIG_INVALID with where it was looked for; an id cannot lead out of the root."""
    (tmp_path / "escape").mkdir()
    with pytest.raises(ConfigError, match="there is no session") as caught:
        open_session(reference, environ={"XDG_STATE_HOME": str(tmp_path / "state")})

    assert caught.value.hint


def test_a_directory_without_a_log_is_refused(tmp_path: Path) -> None:
    """With the name it should have had."""
    assert "holds no session log" in refused(tmp_path).message


BROKEN: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "empty, or cut off inside its header"),
    "a header cut off": (HEADER[:40], "empty, or cut off inside its header"),
    "a header without its newline": (HEADER[:-1], "empty, or cut off inside its header"),
    "text": (b"hello\nworld\n", "line 1: not valid JSON"),
    "other json": (b'{"type":"turn/start","seq":0}\n', "line 1: not the header"),
    "a list": (b"[]\n", "line 1: not a JSON object"),
    "binary": (bytes(range(256)) * 40, "line 1: not valid JSON"),
    "nul bytes": (b"\0" * 5000 + b"\n", "line 1: not valid JSON"),
    "nul in a line": (HEADER + b'{"type":"turn/start",\0"seq":0}\n', "line 2: not valid JSON"),
    "invalid utf-8": (HEADER + turn(0).replace(b"start", b"st\xffrt"), "line 2: not valid JSON"),
    "an empty line": (HEADER + b"\n" + turn(0), "line 2: not valid JSON"),
    "another version": (HEADER.replace(b'"version":0', b'"version":1'), "line 1: version 1 of the session log"),
    "a version of true": (HEADER.replace(b'"version":0', b'"version":false'), "line 1: version False"),
    "no version": (HEADER.replace(b'"version":0,', b""), "line 1: version None"),
    "no id": (HEADER.replace(b'"id":"session-1",', b""), "line 1: the header has no id"),
    "an id of the wrong type": (HEADER.replace(b'"session-1"', b"7"), "line 1: the header has no id"),
    "a depth of the wrong type": (HEADER.replace(b'Depth":0', b'Depth":"0"'), "the header's delegationDepth"),
    "a folder of the wrong type": (HEADER.replace(b'"createdAt":1', b'"cwd":1'), "the header's cwd"),
    "another chain": (HEADER.replace(b"}", b',"writer":{"chain":"md5","format":1}}'), "no chain this version knows"),
    "a newer format": (HEADER.replace(b"}", b',"writer":{"chain":"sha256","format":9}}'), "in a newer format"),
    "a gap": (HEADER + turn(0) + turn(2, "turn/end"), "line 3: seq is 2, expected 1"),
    "a repeat": (HEADER + turn(0) + turn(0), "line 3: seq is 0, expected 1"),
    "a start above zero": (HEADER + turn(1), "line 2: seq is 1, expected 0"),
    "no seq": (HEADER + b'{"type":"turn/start","time":1,"data":{"turn":1}}\n', "line 2: a line has no type or seq"),
    "no data": (HEADER + b'{"type":"turn/start","seq":0,"time":1}\n', "line 2: event 0 (turn/start): data"),
    "a second header": (HEADER + HEADER, "line 2: a line has no type or seq"),
    "an unknown event": (HEADER + turn(0, "new/event"), "line 2: event 0 (new/event): unknown event type"),
    "two logs": (HEADER + turn(0) + HEADER, "line 3: a line has no type or seq"),
}


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_log_is_refused_with_its_first_bad_line(tmp_path: Path, case: str, *, compressed: bool) -> None:
    """One sentence, exit code 13, plain or compressed."""
    content, message = BROKEN[case]
    path = tmp_path / "session.jsonl"
    path.write_bytes(zstandard.compress(content) if compressed else content)

    assert message in refused(path).message


def test_an_unknown_event_has_a_code_of_its_own_unless_it_may_be_ignored(tmp_path: Path) -> None:
    """LOG_UNKNOWN_EVENT says to update; an ignorable one takes its seq and means nothing."""
    path = tmp_path / "session.jsonl"
    path.write_bytes(HEADER + turn(0, "new/event"))
    assert refused(path).code is ErrorCode.LOG_UNKNOWN_EVENT

    path.write_bytes(HEADER + turn(0, "new/event").replace(b'"data"', b'"ignorable":true,"data"') + turn(1))

    assert [event.seq for event in read(path).events()] == [0, 1]


def test_damaged_compressed_data_is_refused(tmp_path: Path) -> None:
    """Garbage behind a frame, a changed checksum, and a magic number with nothing behind it."""
    path = tmp_path / "session.jsonl.zst"
    frame = zstandard.ZstdCompressor(write_checksum=True).compress(HEADER + turn(0))
    for content in (frame + b"garbage", frame[:-1] + b"?", frame + HEADER):
        path.write_bytes(content)
        assert "damaged zstd data" in refused(path).message
    path.write_bytes(frame[:4])
    assert "empty, or cut off inside its header" in refused(path).message


def test_a_torn_end_is_dropped_and_said(tmp_path: Path) -> None:
    """Whole records are kept; the rest of the last one is counted."""
    path = tmp_path / "session.jsonl"
    path.write_bytes(HEADER + turn(0) + turn(1)[:-1])

    source = read(path)

    assert [event.seq for event in source.events()] == [0]
    assert source.dropped == f"dropped {len(turn(1)) - 1} bytes of a torn last record behind line 2"
    path.write_bytes(HEADER + turn(0))
    assert read(path).dropped is None


def test_special_files_are_not_waited_for(tmp_path: Path) -> None:
    """A pipe, a device and a folder of another kind are refused at once."""
    os.mkfifo(tmp_path / "pipe")
    assert "no regular file" in refused(tmp_path / "pipe").message
    assert "no regular file" in refused(Path("/dev/zero")).message


# --- ZIP archives ------------------------------------------------------------------------------


def archive(path: Path, members: dict[str, bytes], change: Callable[[zipfile.ZipInfo], Any] | None = None) -> Path:
    """Write a ZIP; ``change`` may alter each member's entry."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target:
        for name, content in members.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if change is not None:
                change(info)
            target.writestr(info, content)
    return path


def test_an_archive_of_anything_else_is_refused(tmp_path: Path) -> None:
    """An empty archive, one without a log, a damaged and a truncated one."""
    path = tmp_path / "x.zip"
    archive(path, {})
    assert "no session" in refused(path).message
    archive(path, {"other.txt": b"x"})
    assert "holds no session.jsonl" in refused(path).message
    whole = archive(path, {"session.jsonl": HEADER + turn(0)}).read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    assert "not a readable ZIP archive" in refused(path).message
    path.write_bytes(whole.replace(b"PK\x01\x02", b"PK\x01\x03"))
    assert "not a readable ZIP archive" in refused(path).message
    at = whole.index(b"session.jsonl") + len(b"session.jsonl") + 10
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
    refused(path)


@pytest.mark.parametrize(
    "name",
    ["../session.jsonl", "/etc/passwd", "a/../../b", "a\\b", "./x", "a//b", "..", "media/../../x", "C:\\x", "a/./b"],
)
def test_a_member_that_leads_out_of_the_archive_is_refused(tmp_path: Path, name: str) -> None:
    """Even where the log itself is fine; nothing is read before."""
    path = archive(tmp_path / "x.zip", {"session.jsonl": HEADER, name: b"x"})

    assert "unsafe path" in refused(path).message


def test_a_member_that_is_a_link_or_a_device_is_refused(tmp_path: Path) -> None:
    """Only files and folders."""
    for kind in (stat.S_IFLNK, stat.S_IFCHR, stat.S_IFIFO):

        def special(info: zipfile.ZipInfo, kind: int = kind) -> None:
            info.external_attr = (kind | 0o777) << 16 if info.filename != "session.jsonl" else 0

        path = archive(tmp_path / "x.zip", {"session.jsonl": HEADER, "media/x": b"/etc/passwd"}, special)
        assert "a link or a special file" in refused(path).message


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_members_of_one_name_are_refused(tmp_path: Path) -> None:
    """Which one counts would depend on the reader."""
    path = tmp_path / "x.zip"
    with zipfile.ZipFile(path, "w") as target:
        target.writestr("session.jsonl", HEADER)
        target.writestr("session.jsonl", HEADER + turn(0))

    assert "two members named" in refused(path).message


def test_an_encrypted_member_is_refused(tmp_path: Path) -> None:
    """There is nobody to ask for a password."""
    path = archive(tmp_path / "x.zip", {"session.jsonl": HEADER})
    data = bytearray(path.read_bytes())
    for magic, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.index(magic) + offset
        data[at : at + 2] = struct.pack("<H", 1)
    path.write_bytes(data)

    assert "encrypted" in refused(path).message


def test_a_member_list_too_large_to_hold_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many members, or an end record that announces too long a list, in either form."""
    path = archive(tmp_path / "x.zip", {"session.jsonl": HEADER, **{f"m/{number}": b"" for number in range(20)}})
    read(path)
    with monkeypatch.context() as patch:
        patch.setattr("runner.session.store._MAX_MEMBERS", 20)
        assert "more than 20" in refused(path).message
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x05\x06")
    data[at + 12 : at + 16] = struct.pack("<L", 1 << 30)
    path.write_bytes(data)
    assert "member list is larger" in refused(path).message
    wide = struct.pack("<4sQHHLLQQQQ", b"PK\x06\x06", 44, 45, 45, 0, 0, 1 << 40, 1 << 40, 1 << 40, 0)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, at, 1)
    path.write_bytes(data[:at] + wide + locator + data[at:])
    assert "member list is larger" in refused(path).message


# --- bounded memory ----------------------------------------------------------------------------

BOUNDED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (int(sys.argv[2]) << 20,) * 2)
from runner.errors import LogError
from runner.session.export import export_session
from runner.session.store import open_session
from runner.session.verify import verify_session
from pathlib import Path
try:
    source = open_session(sys.argv[1])
    for _ in source.events():
        pass
    verify_session(source)
    export_session(source, Path(sys.argv[1] + ".out.zip"))
except LogError as error:
    print(error.code.exit_code, error.message.split(": ", 1)[1])
else:
    print("fine")
"""


def read_bounded(path: Path) -> str:
    """Read, verify and export a session in a process that may not use more memory."""
    command = [sys.executable, "-c", BOUNDED, str(path), "200"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=55)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


def test_a_line_of_100_mb_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    """Plain and compressed: the reader stops at 16 MiB."""
    path = tmp_path / "session.jsonl"
    with path.open("wb") as target:
        target.write(HEADER)
        for _ in range(100):
            target.write(b"x" * 1_000_000)
        target.write(b"\n")
    assert read_bounded(path) == "13 line 2 is longer than 16 MiB"

    path.write_bytes(zstandard.compress(path.read_bytes()))
    assert path.stat().st_size < 100_000
    assert read_bounded(path) == "13 line 2 is longer than 16 MiB"


def test_a_bomb_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    """Hundreds of megabytes of newlines or zeros behind a few bytes, as zstd and as a member of a ZIP."""
    encoder = zstandard.ZstdCompressor(level=1).compressobj()
    piece = b"\n" * 10_000_000
    data = encoder.compress(HEADER) + b"".join(encoder.compress(piece) for _ in range(40)) + encoder.flush()
    (tmp_path / "newlines.zst").write_bytes(data)
    assert "line 2: not valid JSON" in read_bounded(tmp_path / "newlines.zst")

    with zipfile.ZipFile(tmp_path / "log.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=1) as target:
        target.writestr("session.jsonl", HEADER + bytes(300_000_000))
    assert "line 2 is longer than 16 MiB" in read_bounded(tmp_path / "log.zip")


def test_an_archive_that_expands_beyond_measure_is_not_read(tmp_path: Path) -> None:
    """Gigabytes in a member beside a small log are refused by what the member list says."""
    path = archive(tmp_path / "x.zip", {"session.jsonl": HEADER + turn(0), "spill/x.txt": bytes(100_000)})
    data = bytearray(path.read_bytes())
    at = data.rindex(b"PK\x01\x02") + 24
    data[at : at + 4] = struct.pack("<L", 3 << 30)
    path.write_bytes(data)

    assert "expands beyond all measure" in refused(path).message


def test_a_long_log_is_read_verified_and_exported_in_bounded_memory(tmp_path: Path) -> None:
    """75 MB of events in 200 MB of address space, the interpreter and its libraries included."""
    path = tmp_path / "session.jsonl"
    text = "some text that is not quite the same every time " * 400
    with path.open("wb") as target:
        target.write(HEADER)
        for number in range(4_000):
            record = {"type": "todo/write", "seq": number, "time": number, "data": {"todos": [f"{number} {text}"]}}
            target.write(json.dumps(record).encode() + b"\n")
    assert path.stat().st_size > 75_000_000

    assert read_bounded(path) == "fine"
