"""Reads unified diffs: what a patch changes, before anything is looked at on disk.

Strict, so that what was decided on is what is done: the counts of a hunk must fit what follows it, names are relative
and stay below their folder, and what is not understood is refused, not skipped. Pure; writes no events.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from runner.record import record

if TYPE_CHECKING:
    from collections.abc import Sequence

_HUNK = re.compile(r"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@")
_QUOTED = re.compile(r'"((?:[^"\\]|\\.)*)"')
_ESCAPE = re.compile(rb'\\([0-7]{3}|[abfnrtv"\\])')
_CONTROLS = {b"a": b"\a", b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_NOTHING = "/dev/null"
_KINDS = {"120000": "a symbolic link", "160000": "a submodule"}


class PatchError(ValueError):
    """The text is no patch that can be applied; the message says why."""


@record
class Hunk:
    """Some lines of a file and what they become.

    Attributes:
        start: Line the old lines begin at, from 1; without old lines the line they follow.
        lines: Each with its mark: a blank for what stays, ``-`` or ``+``. Without line ends.
        old_open: The last old line has no line end.
        new_open: The last new line has none.
    """

    start: int
    lines: tuple[str, ...]
    old_open: bool = False
    new_open: bool = False

    def as_json(self) -> dict[str, object]:
        """The hunk for the file worker."""
        return {"start": self.start, "lines": self.lines, "oldOpen": self.old_open, "newOpen": self.new_open}


@record
class FilePatch:
    """What happens to one file.

    Attributes:
        old: Its name before, None if it is made.
        new: Its name after, None if it is deleted.
        executable: Whether it is to be executable, None if that stays.
        hunks: In the order of their lines.
    """

    old: str | None
    new: str | None
    executable: bool | None = None
    hunks: tuple[Hunk, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The name before and the one after, each once."""
        return tuple(dict.fromkeys(name for name in (self.old, self.new) if name is not None))


def parse_patch(text: str) -> list[FilePatch]:
    """The files of a patch, in order.

    Raises:
        PatchError: It is no unified diff, or it does what is not done here.
    """
    lines = text.split("\n")
    if not lines[-1]:
        lines.pop()
    if lines and all(line.endswith("\r") for line in lines):
        lines = [line[:-1] for line in lines]
    files = _Reader(lines).files()
    if not files:
        raise PatchError("it names no file: write it as 'git diff' does, with '--- a/FILE' and '+++ b/FILE'")
    seen: set[str] = set()
    for file in files:
        for name in file.names:
            if name in seen:
                raise PatchError(f"{name} stands in it twice; put its hunks together")
            seen.add(name)
    return files


class _Reader:
    """The lines of a patch, read once from the top."""

    def __init__(self, lines: Sequence[str]) -> None:
        self._lines = lines
        self._at = 0

    def files(self) -> list[FilePatch]:
        found = []
        while self._at < len(self._lines):
            line = self._lines[self._at]
            if line.startswith("diff --git ") or self._names_follow():
                found.append(self._file())
            elif line.startswith("@@ "):
                raise PatchError(f"line {self._at + 1}: a hunk stands before the names of its file")
            elif found and found[-1].hunks and line[:1] in (" ", "+", "-") and line.rstrip() != "--":
                raise PatchError(f"line {self._at + 1}: {line[:60]!r} belongs to no hunk; correct the counts before it")
            else:
                self._at += 1  # what people write around a patch
        return found

    def _names_follow(self) -> bool:
        here = self._lines[self._at : self._at + 2]
        return len(here) == 2 and here[0].startswith("--- ") and here[1].startswith("+++ ")

    def _file(self) -> FilePatch:
        start = self._at
        named: dict[str, str] = {}
        first = self._lines[start]
        git = first.startswith("diff --git ")
        if git:
            self._at += 1
            self._extended(named)
        renamed = self._renamed(named, start + 1)
        names = renamed
        if self._at < len(self._lines) and self._names_follow():
            old, new = (_name(line[4:]) for line in self._lines[self._at : self._at + 2])
            names = _without_prefixes(old, new)
            if renamed is not None and names != renamed:
                said = f"{names[0] or _NOTHING} to {names[1] or _NOTHING} at line {self._at + 1}"
                raise PatchError(
                    f"the file at line {start + 1} is renamed from {renamed[0]} to {renamed[1]}, and is changed from "
                    f"{said}; begin another file with its own 'diff --git' line"
                )
            self._at += 2
        elif names is None:
            name = _one_name(first.removeprefix("diff --git "), start + 1)
            names = (None if "new file mode" in named else name), (None if "deleted file mode" in named else name)
        file = FilePatch(*names, executable=_executable(named), hunks=tuple(self._hunks(names)))
        _check(file, named, start + 1)
        return file

    def _extended(self, named: dict[str, str]) -> None:
        """The lines that git writes between the names and the first hunk."""
        while self._at < len(self._lines) and not self._names_follow():
            line = self._lines[self._at]
            if line.startswith(("diff --git ", "@@ ")):
                return
            if line.startswith(("Binary files ", "GIT binary patch")):
                raise PatchError(f"line {self._at + 1}: binary files cannot be patched here")
            if line.startswith(("copy from ", "copy to ")):
                raise PatchError(f"line {self._at + 1}: copies are not made here; let the patch make the file")
            for key in ("old mode", "new mode", "new file mode", "deleted file mode", "rename from", "rename to"):
                if line.startswith(key + " "):
                    value = line[len(key) + 1 :]
                    named[key] = _name(value) if key.startswith("rename") else value.strip()
            self._at += 1

    @staticmethod
    def _renamed(named: dict[str, str], line: int) -> tuple[str | None, str | None] | None:
        pair = named.get("rename from"), named.get("rename to")
        if pair == (None, None):
            return None
        if None in pair:
            raise PatchError(f"the file at line {line} needs both 'rename from' and 'rename to'")
        return pair

    def _hunks(self, names: tuple[str | None, str | None]) -> list[Hunk]:
        hunks: list[Hunk] = []
        while self._at < len(self._lines) and self._lines[self._at].startswith("@@"):
            hunks.append(self._hunk(next(filter(None, names), _NOTHING), len(hunks) + 1))
        return hunks

    def _hunk(self, name: str, number: int) -> Hunk:
        header = self._lines[self._at]
        match = _HUNK.match(header)
        if match is None:
            form = "@@ -START,COUNT +START,COUNT @@"
            raise PatchError(f"line {self._at + 1}: {header[:60]!r} is no head of a hunk; it is {form}")
        self._at += 1
        start, body = self._at, int(match[1])
        wanted = {"-": int(match[2] or 1), "+": int(match[4] or 1)}
        left, lines, open_ends = dict(wanted), list[str](), set[str]()
        while any(left.values()) or self._follows("\\"):
            line = self._lines[self._at] if self._at < len(self._lines) else "?"
            line = " " + line if line in ("", "\r") else line  # many editors cut the blank of an empty line off
            mark = line[0]
            sides = "-+" if mark == " " else mark
            if mark == "\\" and lines:
                open_ends |= {"-", "+"} if lines[-1][0] == " " else {lines[-1][0]}
            elif mark not in " -+" or any(side in open_ends or not left[side] for side in sides):
                raise self._miscounted(name, number, start, wanted)
            else:
                lines.append(line)
                for side in sides:
                    left[side] -= 1
            self._at += 1
        return Hunk(body, tuple(lines), old_open="-" in open_ends, new_open="+" in open_ends)

    def _follows(self, mark: str) -> bool:
        return self._at < len(self._lines) and self._lines[self._at].startswith(mark)

    def _miscounted(self, name: str, number: int, start: int, wanted: dict[str, int]) -> PatchError:
        self._at = start
        old = new = 0
        while self._at < len(self._lines) and not self._names_follow():
            mark = self._lines[self._at][:1]
            if mark not in ("", " ", "-", "+", "\\", "\r"):
                break
            old += mark not in ("+", "\\")
            new += mark not in ("-", "\\")
            self._at += 1
        return PatchError(
            f"{name}, hunk {number}: its head counts {wanted['-']} old and {wanted['+']} new lines, and {old} old and "
            f"{new} new ones follow; correct the head"
        )


def _name(text: str) -> str:
    """A name as it stands behind ``---`` and the like: quoted, or up to a tab and a time."""
    quoted = _QUOTED.match(text)
    return _unquoted(quoted[1]) if quoted is not None else text.split("\t", maxsplit=1)[0].removesuffix("\r")


def _unquoted(text: str) -> str:
    def plain(match: re.Match[bytes]) -> bytes:
        code = match[1]
        return bytes([int(code, 8) & 0xFF]) if len(code) == 3 else _CONTROLS.get(code, code)

    return _ESCAPE.sub(plain, text.encode("utf-8", "surrogateescape")).decode("utf-8", "surrogateescape")


def _one_name(text: str, line: int) -> str:
    """The name in a ``diff --git`` line of a file that keeps it."""
    names = [_unquoted(each) for each in _QUOTED.findall(text)]
    if not names:
        half = len(text) // 2
        names = [text[:half], text[half + 1 :]]
    if [name[:2] for name in names] != ["a/", "b/"] or names[0][2:] != names[1][2:]:
        raise PatchError(f"line {line}: what file it is about cannot be told; add '--- a/FILE' and '+++ b/FILE'")
    return names[0][2:]


def _without_prefixes(old: str, new: str) -> tuple[str | None, str | None]:
    """The names without ``a/`` and ``b/`` if both have theirs; None for one that is /dev/null."""
    names = [None if name == _NOTHING else name for name in (old, new)]
    pairs = list(zip(names, ("a/", "b/"), strict=True))
    if all(name is None or name.startswith(prefix) for name, prefix in pairs):
        names = [None if name is None else name[len(prefix) :] for name, prefix in pairs]
    return names[0], names[1]


def _executable(named: dict[str, str]) -> bool | None:
    mode = named.get("new mode", named.get("new file mode"))
    for each in (mode, named.get("deleted file mode")):
        if each is not None and not each.startswith("100"):
            raise PatchError(f"it makes, changes or deletes {_KINDS.get(each, f'a file of mode {each[:20]}')}")
    return None if mode is None else mode.endswith("755")


def _check(file: FilePatch, named: dict[str, str], line: int) -> None:
    """Refuse what contradicts itself, and names that no file tool takes."""
    where = f"the file at line {line}"
    if file.old is None and file.new is None:
        raise PatchError(f"{where} is /dev/null before and after")
    if (file.old is not None and "new file mode" in named) or (file.new is not None and "deleted file mode" in named):
        raise PatchError(f"{where} is made or deleted by its mode line and not by its names")
    if None not in (file.old, file.new) and file.old != file.new and "rename from" not in named:
        raise PatchError(
            f"{where} has two names, {file.old} and {file.new}; a rename needs 'rename from' and 'rename to'"
        )
    if not file.hunks and file.old == file.new and file.executable is None:
        raise PatchError(f"{where} has no hunk, so nothing about it changes")
    for name in file.names:
        parts = name.split("/")
        if not name or "\0" in name:
            raise PatchError(f"{where} has an empty name, or one with a NUL")
        if ".." in parts:
            raise PatchError(f"{name[:100]} holds '..', which no path of a patch may")
        if any(part.lower() == ".git" for part in parts):
            raise PatchError(f"{name[:100]} lies in .git, which no patch changes")
