"""The confined worker reads, writes and edits files exactly, and refuses everything else clearly."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import runner.sandbox

if TYPE_CHECKING:
    from collections.abc import Iterator

WORKER = Path(runner.sandbox.__file__).with_name("worker.py")


class Client:
    """A worker process and the requests to it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-E", str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"LC_ALL": "C"},
        )

    def send(self, line: bytes) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + b"\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def ask(self, op: str, name: str, **arguments: Any) -> dict[str, Any]:
        path = name if name.startswith("/") else f"{self.root}/{name}"
        return self.send(json.dumps({"id": 7, "op": op, "args": {"path": path, **arguments}}).encode())

    def value(self, op: str, name: str, **arguments: Any) -> dict[str, Any]:
        answer = self.ask(op, name, **arguments)
        assert answer["ok"], answer
        value: dict[str, Any] = answer["value"]
        return value

    def read(self, name: str, *, offset: int = 1, limit: int = 2_000, max_bytes: int = 50_000) -> dict[str, Any]:
        return self.value("read", name, offset=offset, limit=limit, max_bytes=max_bytes)

    def refused(self, op: str, name: str, **arguments: Any) -> tuple[str, str]:
        if op == "read":
            arguments = {"offset": 1, "limit": 2_000, "max_bytes": 50_000, **arguments}
        answer = self.ask(op, name, **arguments)
        assert not answer["ok"], answer
        return answer["code"], answer["message"]

    def close(self) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        return self._process.wait(10)


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Client]:
    """A worker over an empty folder."""
    client = Client(Path(os.path.realpath(tmp_path)))
    yield client
    assert client.close() == 0


def _edits(*pairs: tuple[str, str]) -> list[dict[str, str]]:
    return [{"old": old, "new": new} for old, new in pairs]


def test_hello_shows_that_the_folders_are_there(worker: Client) -> None:
    """The first request proves the workspace reachable, or says what is missing."""
    good = {"id": 1, "op": "hello", "args": {"workspace": str(worker.root), "tmp": str(worker.root)}}
    bad = {"id": 2, "op": "hello", "args": {"workspace": f"{worker.root}/gone", "tmp": str(worker.root)}}

    assert worker.send(json.dumps(good).encode())["ok"]
    assert worker.send(json.dumps(bad).encode())["code"] == "NOT_FOUND"


def test_a_small_file_is_read_whole(worker: Client) -> None:
    """Text comes back byte for byte with its line numbers."""
    (worker.root / "a.txt").write_text("one\ntwo\nthree")

    value = worker.read("a.txt")

    assert value["text"] == "one\ntwo\nthree"
    assert (value["first"], value["last"], value["total"], value["more"]) == (1, 3, 3, False)
    assert value["cut"] is None


def test_a_page_of_a_file_says_where_it_ends(worker: Client) -> None:
    """Offset and limit select lines; the rest is counted."""
    (worker.root / "a.txt").write_text("".join(f"line {n}\n" for n in range(1, 1001)))

    value = worker.read("a.txt", offset=10, limit=3)

    assert value["text"] == "line 10\nline 11\nline 12\n"
    assert (value["first"], value["last"], value["total"], value["more"]) == (10, 12, 1000, True)


def test_reading_stops_at_the_byte_limit_between_lines(worker: Client) -> None:
    """A page holds whole lines, as many as fit."""
    (worker.root / "a.txt").write_text("x" * 99 + "\n" + "y" * 99 + "\n" + "z" * 99 + "\n")

    value = worker.read("a.txt", max_bytes=250)

    assert value["text"] == "x" * 99 + "\n" + "y" * 99 + "\n"
    assert (value["last"], value["total"], value["more"]) == (2, 3, True)


def test_an_endless_line_is_cut_and_its_length_told(worker: Client) -> None:
    """One line of megabytes neither fills memory nor hides the lines after it."""
    (worker.root / "a.txt").write_bytes(b"start\n" + "é".encode() * 1_500_000 + b"\nend\n")

    value = worker.read("a.txt", offset=2, max_bytes=1001)

    assert value["text"] == "é" * 500
    assert (value["cut"], value["last"], value["total"], value["more"]) == (3_000_001, 2, 3, True)
    assert worker.read("a.txt", offset=3)["text"] == "end\n"


def test_an_empty_file_has_no_lines(worker: Client) -> None:
    """Nothing is not an error."""
    (worker.root / "a.txt").write_bytes(b"")

    value = worker.read("a.txt")

    assert (value["text"], value["total"], value["more"]) == ("", 0, False)


def test_an_offset_past_the_end_is_refused_with_the_length(worker: Client) -> None:
    """The message says how many lines there are."""
    (worker.root / "a.txt").write_text("one\ntwo\n")

    code, message = worker.refused("read", "a.txt", offset=3)

    assert code == "INVALID"
    assert "has 2 lines" in message


@pytest.mark.parametrize(
    ("data", "text", "encoding"),
    [
        (b"\xef\xbb\xbfabc\n", "abc\n", "utf-8-sig"),
        ("\ufeffh\u00e9llo\n".encode("utf-16-le"), "h\u00e9llo\n", "utf-16-le"),
        ("\ufeffh\u00e9llo\n".encode("utf-16-be"), "h\u00e9llo\n", "utf-16-be"),
        (b"caf\xe9\n", "caf\u00e9\n", "latin-1"),
    ],
)
def test_other_encodings_are_read_and_named(worker: Client, data: bytes, text: str, encoding: str) -> None:
    """Byte order marks decide; bytes that are no UTF-8 are taken as Latin-1, and that is said."""
    (worker.root / "a.txt").write_bytes(data)

    value = worker.read("a.txt")

    assert (value["text"], value["encoding"]) == (text, encoding)


def test_crlf_line_ends_are_told_and_not_shown(worker: Client) -> None:
    """The text has plain line ends, the flag says what the file has."""
    (worker.root / "a.txt").write_bytes(b"one\r\ntwo\r\n")

    value = worker.read("a.txt")

    assert (value["text"], value["crlf"]) == ("one\ntwo\n", True)


def test_what_is_no_text_file_is_refused(worker: Client) -> None:
    """Binary files, folders, pipes and missing files each have their own answer."""
    (worker.root / "binary").write_bytes(b"\x7fELF\0\0")
    (worker.root / "folder").mkdir()
    os.mkfifo(worker.root / "pipe")
    (worker.root / "settings.py").write_text("")

    assert worker.refused("read", "binary")[0] == "NOT_TEXT"
    assert worker.refused("read", "folder")[0] == "IS_DIRECTORY"
    assert worker.refused("read", "pipe")[0] == "INVALID"
    assert worker.refused("read", "/dev/zero")[0] == "INVALID"
    code, message = worker.refused("read", "setings.py")
    assert code == "NOT_FOUND"
    assert "did you mean settings.py" in message
    assert worker.refused("read", "settings.py/x")[0] == "NOT_FOUND"
    assert worker.refused("read", "a" * 300)[0] == "INVALID"


@pytest.mark.parametrize("op", ["read", "write", "edit"])
def test_no_component_of_a_path_is_followed_when_it_is_a_link(worker: Client, op: str) -> None:
    """A link in the last or any other place is refused, even one that stays inside."""
    (worker.root / "real").mkdir()
    (worker.root / "real" / "a.txt").write_text("kept")
    (worker.root / "file-link").symlink_to("real/a.txt")
    (worker.root / "folder-link").symlink_to("real")
    (worker.root / "dangling").symlink_to("real/new.txt")
    more: dict[str, Any] = {"content": "changed", "edits": _edits(("kept", "changed"))}

    leads = {"file-link": "/a.txt", "folder-link/a.txt": "", "dangling": "/new.txt"}
    for name, target in leads.items():
        code, message = worker.refused(op, name, **more)
        assert code == "LINK"
        assert f"is a symbolic link to real{target}, and links are not followed" in message
    assert (worker.root / "real" / "a.txt").read_text() == "kept"
    assert not (worker.root / "real" / "new.txt").exists()


@pytest.mark.parametrize("op", ["read", "write", "edit"])
def test_a_link_that_leads_back_to_itself_is_named_as_such(worker: Client, op: str) -> None:
    """There is no target that could be used instead."""
    (worker.root / "loop").symlink_to("loop")
    (worker.root / "there").symlink_to("back")
    (worker.root / "back").symlink_to("there")
    more: dict[str, Any] = {"content": "x", "edits": _edits(("a", "b"))}

    for name, target in (("loop", "loop"), ("there", "back"), ("loop/below", "loop")):
        code, message = worker.refused(op, name, **more)
        assert code == "INVALID"
        assert message.endswith(f"is a symbolic link to {target}, which leads back to it")


@pytest.mark.parametrize("name", ["/", "/tmp/..", "../x", "a\0b", ""])
def test_a_path_that_is_not_resolved_is_refused(worker: Client, name: str) -> None:
    """The worker takes only what its caller has resolved."""
    request = {"id": 1, "op": "write", "args": {"path": name, "content": "x"}}

    answer = worker.send(json.dumps(request).encode())

    assert (answer["ok"], answer["code"]) == (False, "INVALID")


@pytest.mark.parametrize(
    "line",
    [b"", b"nonsense", b"[]", b"{}", b'{"id":1,"op":"remove","args":{}}', b'{"id":1,"op":"read","args":[]}', b"\xff"],
)
def test_a_broken_request_gets_an_answer_and_the_worker_lives(worker: Client, line: bytes) -> None:
    """Nothing a request holds ends the worker."""
    assert worker.send(line)["code"] == "INVALID"
    (worker.root / "a.txt").write_text("still here")
    assert worker.read("a.txt")["text"] == "still here"


def test_writing_makes_missing_folders_and_keeps_a_mode(worker: Client) -> None:
    """New files get the usual mode, old ones keep theirs; no temporary file stays behind."""
    value = worker.value("write", "a/b/c.txt", content="new\n")
    assert value == {"created": True, "bytes": 4, "atomic": True}
    script = worker.root / "run.sh"
    script.write_text("old")
    script.chmod(0o751)

    value = worker.value("write", "run.sh", content="neu: \u00fc\n")

    assert value == {"created": False, "bytes": 8, "atomic": True}
    assert script.read_bytes() == "neu: \u00fc\n".encode()
    assert script.stat().st_mode & 0o777 == 0o751
    assert (worker.root / "a/b/c.txt").stat().st_mode & 0o777 == 0o666 & ~_umask()
    assert sorted(path.name for path in worker.root.iterdir()) == ["a", "run.sh"]


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_writing_does_not_change_what_shares_the_old_content(worker: Client) -> None:
    """A file that has a second name keeps its content under that name."""
    (worker.root / "a").write_text("old")
    (worker.root / "b").hardlink_to(worker.root / "a")

    worker.value("write", "a", content="new")

    assert (worker.root / "b").read_text() == "old"


def test_writing_over_a_folder_or_below_a_file_is_refused(worker: Client) -> None:
    """Nothing is replaced that is no file."""
    (worker.root / "folder").mkdir()
    (worker.root / "file").write_text("kept")

    assert worker.refused("write", "folder", content="")[0] == "IS_DIRECTORY"
    assert worker.refused("write", "file/x", content="")[0] == "NOT_FOUND"
    assert worker.refused("write", "x", content="\ud800")[0] == "INVALID"
    assert (worker.root / "file").read_text() == "kept"


def test_one_edit_replaces_exactly_one_place(worker: Client) -> None:
    """The rest of the file and its mode stay as they are."""
    (worker.root / "a.py").write_text("a = 1\nb = 2\nc = 3\n")
    (worker.root / "a.py").chmod(0o640)

    value = worker.value("edit", "a.py", edits=_edits(("b = 2", "b = 22\nbb = 2")))

    assert value["lines"] == [2]
    assert (worker.root / "a.py").read_text() == "a = 1\nb = 22\nbb = 2\nc = 3\n"
    assert (worker.root / "a.py").stat().st_mode & 0o777 == 0o640


def test_several_edits_are_all_made_or_none(worker: Client) -> None:
    """The second edit sees what the first did; a failing one leaves the file untouched."""
    (worker.root / "a.py").write_text("a = 1\nb = 2\n")

    worker.value("edit", "a.py", edits=_edits(("a = 1", "x = 1"), ("x = 1\nb", "x = 1\ny")))
    code, message = worker.refused("edit", "a.py", edits=_edits(("x = 1", "z = 1"), ("nowhere", "")))

    assert code == "NO_MATCH"
    assert "edit 2 of 2" in message
    assert (worker.root / "a.py").read_text() == "x = 1\ny = 2\n"


def test_an_ambiguous_edit_names_the_lines(worker: Client) -> None:
    """Overlapping and repeated matches count; the model is told where they are."""
    (worker.root / "a.txt").write_text("same\nother\nsame\naaa\n")

    code, message = worker.refused("edit", "a.txt", edits=_edits(("same", "x")))
    assert code == "AMBIGUOUS"
    assert "lines 1, 3" in message
    assert worker.refused("edit", "a.txt", edits=_edits(("aa", "x")))[0] == "AMBIGUOUS"
    assert (worker.root / "a.txt").read_text() == "same\nother\nsame\naaa\n"


def test_a_missed_edit_shows_the_nearest_lines(worker: Client) -> None:
    """Wrong blanks and small slips are shown as the file has them."""
    (worker.root / "a.py").write_text("def f():\n    return compute(1)\n\ndef g():\n    pass\n")

    _, blanks = worker.refused("edit", "a.py", edits=_edits(("def g():\n  pass", "x")))
    _, slip = worker.refused("edit", "a.py", edits=_edits(("    return compute(2)", "x")))
    _, nothing = worker.refused("edit", "a.py", edits=_edits(("@@@@@@@", "x")))

    assert "but for blanks" in blanks
    assert "\n4: def g():\n5:     pass" in blanks
    assert "nearest lines:\n2:     return compute(1)" in slip
    assert "no line of it looks like any line of old" in nothing


def test_a_missed_edit_whose_first_line_is_like_none_shows_where_the_others_are(worker: Client) -> None:
    """The first line that is there exactly counts, else the most alike; the message says which line of old that is."""
    (worker.root / "a.py").write_text("import os\n\nx = alpha + beta\ny = x * 2\n}\nreturn y\n")

    _, exact = worker.refused(
        "edit", "a.py", edits=_edits(("def calc_total():\n}\nx = alpha + beta\ny = x * 2\nreturn y", "z"))
    )
    _, alike = worker.refused("edit", "a.py", edits=_edits(("def calc_total():\n\nx = alpha - beta\nq", "z")))

    assert exact == (
        "old is not in the file; nearest lines to line 3 of old, whose line 1 is like none:"
        "\n1: import os\n2: \n3: x = alpha + beta\n4: y = x * 2\n5: }"
    )
    assert "nearest lines to line 3 of old, whose line 1 is like none:\n1: import os\n2: \n3: x = alpha" in alike


def test_the_nearest_line_among_thousands_that_look_alike_is_found_soon(worker: Client) -> None:
    """Comparing each of them in full would take a minute."""
    lines = [f"{'abcdefgh ' * 20}{number}" for number in range(5_000)]
    (worker.root / "a.txt").write_text("\n".join(lines))
    started = time.monotonic()

    old = "\n".join(["@@@", *(f"{'hgfedcba ' * 20}{number}" for number in range(100))])
    answer = worker.ask("edit", "a.txt", edits=[{"old": old, "new": ""}])

    assert answer["code"] == "NO_MATCH"
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("pair", [("", "x"), ("a", "a")])
def test_an_edit_that_says_nothing_is_refused(worker: Client, pair: tuple[str, str]) -> None:
    """Empty text to replace and a replacement by itself are mistakes."""
    (worker.root / "a.txt").write_text("a")

    assert worker.refused("edit", "a.txt", edits=_edits(pair))[0] == "INVALID"


@pytest.mark.parametrize(
    ("before", "pair", "after"),
    [
        (b"one\r\ntwo\r\n", ("one\ntwo", "eins\nzwei"), b"eins\r\nzwei\r\n"),
        (b"one\r\ntwo\nthree\n", ("one\ntwo", "eins\nzwei"), b"eins\r\nzwei\nthree\n"),
        (b"\xef\xbb\xbfone\n", ("one", "\u00e9"), "\ufeff\u00e9\n".encode()),
        ("\ufeffone\r\n".encode("utf-16-le"), ("one\n", "two\n"), "\ufefftwo\r\n".encode("utf-16-le")),
        (b"caf\xe9 one", ("one", "\u00fc"), b"caf\xe9 \xfc"),
        (b"\xef\xbb\xbfcaf\xe9 one", ("one", "two"), b"\xef\xbb\xbfcaf\xe9 two"),
    ],
)
def test_edits_keep_line_ends_and_encoding(worker: Client, before: bytes, pair: tuple[str, str], after: bytes) -> None:
    """CRLF, byte order mark and encoding of the file survive an edit written with plain line ends."""
    (worker.root / "a.txt").write_bytes(before)

    worker.value("edit", "a.txt", edits=_edits(pair))

    assert (worker.root / "a.txt").read_bytes() == after


def test_an_edit_that_the_encoding_cannot_hold_is_refused(worker: Client) -> None:
    """A Latin-1 file is not turned into something else behind the model's back."""
    (worker.root / "a.txt").write_bytes(b"caf\xe9 one")

    assert worker.refused("edit", "a.txt", edits=_edits(("one", "\u20ac")))[0] == "INVALID"
    assert (worker.root / "a.txt").read_bytes() == b"caf\xe9 one"


def test_binary_and_huge_files_are_not_edited(worker: Client) -> None:
    """An edit of them would need to guess, or too much memory."""
    (worker.root / "binary").write_bytes(b"a\0b")
    with (worker.root / "huge").open("wb") as file:
        file.truncate(40_000_000)

    assert worker.refused("edit", "binary", edits=_edits(("a", "x")))[0] == "NOT_TEXT"
    assert worker.refused("edit", "huge", edits=_edits(("a", "x")))[0] == "TOO_LARGE"


def test_a_large_file_is_paged_in_bounded_memory(worker: Client) -> None:
    """The worker's memory does not grow with the file."""
    with (worker.root / "large.txt").open("wb") as file:
        for _ in range(60):
            file.write((b"x" * 999 + b"\n") * 1_000)

    value = worker.read("large.txt", offset=59_000, limit=2)

    assert (value["first"], value["last"], value["total"]) == (59_000, 59_001, 60_000)
    status = Path(f"/proc/{worker._process.pid}/status").read_text()
    peak = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    assert peak < 40_000


class Unprivileged:
    """Runs a worker that is not root, over a folder that belongs to that user."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._user = 65534 if os.geteuid() == 0 else os.geteuid()

    def own(self, path: Path, mode: int) -> None:
        if os.geteuid() == 0:
            os.chown(path, self._user, self._user)
        path.chmod(mode)

    def ask(self, name: str, content: str, *, file_size: int = resource.RLIM_INFINITY) -> dict[str, Any]:
        request = {"id": 1, "op": "write", "args": {"path": f"{self.root}/{name}", "content": content}}
        # Everything is imported first: the interpreter may lie where the other user cannot read.
        start = f"""
import difflib, os, resource, sys
sys.path.append({str(WORKER.parent)!r})
import files.requests, files.changes
resource.setrlimit(resource.RLIMIT_FSIZE, ({file_size}, {file_size}))
if os.geteuid() == 0:
    os.setgroups([])
    os.setgid({self._user})
    os.setuid({self._user})
files.requests.serve()
"""
        result = subprocess.run(
            [sys.executable, "-I", "-S", "-E", "-c", start],
            input=json.dumps(request),
            capture_output=True,
            text=True,
            check=True,
        )
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer


@pytest.fixture
def unprivileged() -> Iterator[Unprivileged]:
    """A folder that another user can reach, which pytest's own folders are not."""
    root = Path(os.path.realpath(tempfile.mkdtemp()))
    root.chmod(0o755)
    yield Unprivileged(root)
    (root / "folder").chmod(0o755)
    shutil.rmtree(root)


def test_where_the_folder_may_not_be_written_the_file_is_written_in_place(unprivileged: Unprivileged) -> None:
    """Without a right to make files the old file gets the new bytes, under its old inode."""
    folder = unprivileged.root / "folder"
    folder.mkdir()
    target = folder / "a.txt"
    target.write_text("old " * 100)
    unprivileged.own(target, 0o600)
    unprivileged.own(folder, 0o555)
    inode = target.stat().st_ino

    shorter = unprivileged.ask("folder/a.txt", "new")

    assert shorter["value"] == {"created": False, "bytes": 3, "atomic": False}
    assert (target.read_text(), target.stat().st_ino) == ("new", inode)
    assert unprivileged.ask("folder/a.txt", "x" * 2_000_000)["value"]["atomic"] is False
    assert target.stat().st_size == 2_000_000
    assert unprivileged.ask("folder/new.txt", "x")["code"] == "DENIED"
    assert [path.name for path in folder.iterdir()] == ["a.txt"]


@pytest.mark.parametrize("mode", [0o555, 0o755])
def test_a_write_that_fails_half_way_leaves_the_old_content(unprivileged: Unprivileged, mode: int) -> None:
    """In place the old bytes are put back; beside the file nothing is left behind."""
    folder = unprivileged.root / "folder"
    folder.mkdir()
    target = folder / "a.txt"
    target.write_text("old content")
    unprivileged.own(target, 0o600)
    unprivileged.own(folder, mode)

    answer = unprivileged.ask("folder/a.txt", "new content that is longer than the limit", file_size=20)

    assert answer["code"] == "TOO_LARGE"
    assert target.read_text() == "old content"
    assert [path.name for path in folder.iterdir()] == ["a.txt"]


def test_a_file_that_may_not_be_written_is_not_replaced(unprivileged: Unprivileged) -> None:
    """A right to make files in the folder is no right to replace a read-only file."""
    folder = unprivileged.root / "folder"
    folder.mkdir()
    (folder / "fixed.txt").write_text("old")
    unprivileged.own(folder / "fixed.txt", 0o444)
    unprivileged.own(folder, 0o755)

    assert unprivileged.ask("folder/fixed.txt", "new")["code"] == "DENIED"
    assert (folder / "fixed.txt").read_text() == "old"
