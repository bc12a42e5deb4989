"""Applies patches of several files: every hunk is checked before the first write, and all of it is done or nothing.

Should a step fail half-way the steps before it are taken back. A file that goes is renamed first and deleted at the
end, so that it can come back as it was. Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import stat

from .changes import UMASK, nearest, store
from .places import Refusal, encode_name, find_target, open_file, open_folder, refusal_of, shown, split
from .texts import SNIFF, WHOLE, decode, encode_text, encoding_of, load

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Arguments = dict[str, Any]
    Value = dict[str, Any]

_LISTED = 10


class _Plan:
    """One file before and after: paths, bytes, mode; and what the answer says of it."""

    def __init__(self, change: Arguments) -> None:
        self.old: str | None = change["old"]
        self.new: str | None = change["new"]
        self.places: list[Value] = []
        hunks: list[Arguments] = change["hunks"]
        before = b""
        mode = 0o666 & ~UMASK
        if self.old is not None:
            before, mode = _read(self.old)
        if self.new is not None and self.new != self.old:
            _require_free(self.new)
        self.before = before
        self.after = self._patched(before, hunks) if hunks else before
        if self.new is None and self.after:
            raise Refusal("NO_MATCH", f"{shown(self.old or '')} is to be deleted, but not all of its lines are removed")
        executable = change["executable"]
        self.mode = mode if executable is None else (mode & ~0o111) | (0o111 & ~UMASK if executable else 0)
        self.old_mode = mode

    def _patched(self, before: bytes, hunks: list[Arguments]) -> bytes:
        path = self.old or self.new or ""
        if self.old is None:
            return _joined(hunks[0], "+").encode("utf-8") if _only_adds(hunks) else _contradicts(path)
        text, encoding = decode(before, encoding_of(before[:SNIFF], path), path)
        # A patch that writes carriage returns out means them; one without gets the line ends of the file.
        exact = any(line.endswith("\r") for hunk in hunks for line in hunk["lines"])
        crlf = not exact and text.count("\r\n") == text.count("\n") > 0
        patched = self._apply(text.replace("\r\n", "\n") if crlf else text, hunks, shown(path))
        return encode_text(patched.replace("\n", "\r\n") if crlf else patched, encoding) if patched else b""

    def _apply(self, text: str, hunks: list[Arguments], path: str) -> str:
        lines = _lines(text)
        out: list[str] = []
        done = shift = 0
        for number, hunk in enumerate(hunks, 1):
            old = _lines(_joined(hunk, "-"))
            where = f"{path}, hunk {number} of {len(hunks)} (line {hunk['start']})"
            expected = hunk["start"] - 1 if old else hunk["start"]
            at = _find(lines, old, expected + shift, done, where)
            shift = at - expected
            out += lines[done:at]
            new = _lines(_joined(hunk, "+"))
            done = at + len(old)
            _require_line_ends(out, new, last=done == len(lines), where=where)
            self.places.append({"line": len(out) + 1, "shift": shift})
            out += new
        return "".join([*out, *lines[done:]])


def _lines(text: str) -> list[str]:
    pieces = text.split("\n")
    last = pieces.pop()
    return [piece + "\n" for piece in pieces] + ([last] if last else [])


def _counted(lines: list[str]) -> str:
    return "1 line" if len(lines) == 1 else f"{len(lines)} lines"


def _joined(hunk: Arguments, side: str) -> str:
    """The lines of one side of a hunk as text."""
    lines = [line[1:] for line in hunk["lines"] if line[0] in (" ", side)]
    is_open = hunk["oldOpen"] if side == "-" else hunk["newOpen"]
    return "\n".join(lines) + ("\n" if lines and not is_open else "")


def _only_adds(hunks: list[Arguments]) -> bool:
    return len(hunks) == 1 and all(line[0] == "+" for line in hunks[0]["lines"])


def _contradicts(path: str) -> bytes:
    raise Refusal("INVALID", f"{shown(path)} is to be made, but its hunks have old lines or are more than one")


def _find(lines: list[str], old: list[str], expected: int, done: int, where: str) -> int:
    """Where the old lines of a hunk stand: at the line it names, else at the only place that is the same."""
    if not old:
        if not done <= expected <= len(lines):
            raise Refusal("NO_MATCH", f"{where} adds lines where the file has none: it has {_counted(lines)}")
        return expected
    count = len(old)
    if expected >= done and lines[expected : expected + count] == old:
        return expected
    first = old[0]
    found = [at for at in range(done, len(lines) - count + 1) if lines[at] == first and lines[at : at + count] == old]
    if len(found) > 1:
        listed = ", ".join(str(at + 1) for at in found[:_LISTED]) + (", ..." if len(found) > _LISTED else "")
        raise Refusal("AMBIGUOUS", f"{where}: its old lines are not there, and at lines {listed}; give more context")
    if found:
        return found[0]
    if lines and lines[len(lines) - count :] == [*old[:-1], old[-1].removesuffix("\n")] and old[-1].endswith("\n"):
        hint = "; the file has no newline at its end: say '\\ No newline at end of file' below its last line"
    else:
        hint = nearest("".join(lines), "".join(old).removesuffix("\n"), "the hunk's old lines")
    raise Refusal("NO_MATCH", f"{where}: its old lines are not in the file{hint}")


def _require_line_ends(out: list[str], new: list[str], *, last: bool, where: str) -> None:
    """Only the last line of a file may have no end, whatever hunks say."""
    if (out and new and not out[-1].endswith("\n")) or (new and not last and not new[-1].endswith("\n")):
        raise Refusal("NO_MATCH", f"{where}: a line without a newline would not be the last one of the file")


def _read(path: str) -> tuple[bytes, int]:
    """Content and mode of a file."""
    parent, name = split(path)
    folder = open_folder(parent)
    try:
        with open_file(folder, name, path) as file:
            return load(file, path), stat.S_IMODE(os.fstat(file.fileno()).st_mode)
    finally:
        os.close(folder)


def _require_free(path: str) -> None:
    """Refuse to make a file where something stands, or below what is no folder."""
    parent, name = split(path)
    try:
        folder = open_folder(parent)
    except Refusal as refusal:
        if refusal.code == "NOT_FOUND" and not _stands_in_the_way(parent):
            return
        raise
    try:
        if find_target(folder, name, path) is not None:
            raise Refusal("INVALID", f"{shown(path)} is to be made and is there already")
    finally:
        os.close(folder)


def _stands_in_the_way(folder: str) -> bool:
    while not os.path.lexists(encode_name(folder)):
        folder = os.path.dirname(folder)
    return not os.path.isdir(encode_name(folder))


class _Steps:
    """What was done so far, and how each step is taken back."""

    def __init__(self) -> None:
        self._back: list[tuple[str, Callable[[], object]]] = []
        self._gone: list[tuple[str, str]] = []

    def carry_out(self, plan: _Plan) -> None:
        """Write what a file becomes, then take away what it was if its name goes."""
        if plan.new is not None and (plan.new != plan.old or plan.after != plan.before):
            self._write(plan, plan.new)
        if plan.new is not None and plan.new == plan.old and plan.mode != plan.old_mode:
            _set_mode(plan.new, plan.mode)
            self._back.append((plan.new, lambda: _set_mode(plan.new or "", plan.old_mode)))
        if plan.old is not None and plan.old != plan.new:
            self._put_away(plan.old)

    def _write(self, plan: _Plan, path: str) -> None:
        made = path != plan.old
        if made:
            self._make_folders(os.path.dirname(path))
        _put(path, plan.after)  # which leaves what was there if it fails
        self._back.append((path, (lambda: _remove(path)) if made else (lambda: _put(path, plan.before))))
        if made:
            _set_mode(path, plan.mode)

    def _make_folders(self, folder: str) -> None:
        missing = []
        while not os.path.lexists(encode_name(folder)):
            missing.append(folder)
            folder = os.path.dirname(folder)
        for each in reversed(missing):
            os.close(open_folder(each, create=True))
            self._back.append((each, lambda each=each: _remove_folder(each)))  # type: ignore[misc]  # bound now

    def _put_away(self, path: str) -> None:
        parent, name = split(path)
        aside = f".nightshift-{os.getpid()}-{os.urandom(4).hex()}.tmp"
        _rename(parent, name, aside)
        self._back.append((path, lambda: _rename(parent, aside, name)))
        self._gone.append((parent, aside))

    def finish(self) -> None:
        """Delete what was put away. Only now: nothing is taken back any more."""
        for parent, aside in self._gone:
            with contextlib.suppress(OSError, Refusal):  # the patch is done; what is left over has a name of ours
                _remove(f"{parent.rstrip('/')}/{aside}")

    def take_back(self) -> list[str]:
        """Undo all steps, the last one first; returns the paths that could not be put back."""
        lost = []
        for path, undo in reversed(self._back):
            try:
                undo()
            except (OSError, Refusal):
                lost.append(shown(path))
        return lost


def _put(path: str, data: bytes) -> None:
    parent, name = split(path)
    folder = open_folder(parent)
    try:
        store(folder, name, path, data)
    finally:
        os.close(folder)


def _remove(path: str) -> None:
    parent, name = split(path)
    folder = open_folder(parent)
    try:
        os.unlink(encode_name(name), dir_fd=folder)
    finally:
        os.close(folder)


def _remove_folder(path: str) -> None:
    parent, name = split(path)
    folder = open_folder(parent)
    try:
        os.rmdir(encode_name(name), dir_fd=folder)
    finally:
        os.close(folder)


def _rename(parent: str, name: str, target: str) -> None:
    folder = open_folder(parent)
    try:
        os.rename(encode_name(name), encode_name(target), src_dir_fd=folder, dst_dir_fd=folder)
    finally:
        os.close(folder)


def _set_mode(path: str, mode: int) -> None:
    parent, name = split(path)
    folder = open_folder(parent)
    try:
        with open_file(folder, name, path) as file:
            os.fchmod(file.fileno(), mode)
    finally:
        os.close(folder)


def patch(arguments: Arguments) -> Value:
    """Make all ``changes`` (``old``, ``new``, ``executable``, ``hunks``; see ``runner/tools/patches.py``) or none."""
    plans = []
    room = WHOLE
    for change in arguments["changes"]:
        plans.append(_Plan(change))
        room -= len(plans[-1].before) + len(plans[-1].after)
        if room < 0:
            raise Refusal("TOO_LARGE", f"the files of the patch have more than the {WHOLE} bytes this can hold")
    steps = _Steps()
    for plan in plans:
        try:
            steps.carry_out(plan)
        except (OSError, Refusal) as error:
            refused = error if isinstance(error, Refusal) else refusal_of(error, plan.new or plan.old or "")
            lost = steps.take_back()
            if lost:
                message = f"{refused}; what was done before could not be taken back at {', '.join(lost)}"
                raise Refusal("IO", message) from error
            raise Refusal(refused.code, f"{refused}; nothing is changed") from error
    steps.finish()
    return {"files": [plan.places for plan in plans]}
