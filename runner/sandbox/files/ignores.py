"""What git ignores below a folder: its own rules, read from its own files, without running git.

Rules come from each ``.gitignore`` between the top of a repository and the folder, and from ``info/exclude`` of the
repository; the deepest file decides, in it the last rule. What is tracked is never ignored, so the index is read when
a rule says otherwise. Settings of a user (``core.excludesFile``) do not count, so that a search finds the same
everywhere. Rules match bytes, as git's do. Standard library only.
"""

from __future__ import annotations

import bisect
import os
import re
import stat

from .places import Refusal, encode_name, open_file, open_folder

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Container, Iterable

RULES = 1_000_000
"""Bytes of the largest file of rules that is read."""

INDEX = 256_000_000
"""Bytes of the largest index that is read."""

_SPECIAL = re.compile(rb"[*?\[\\]")

_CLASSES: dict[bytes, Iterable[int]] = {
    b"alnum": b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
    b"alpha": b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz",
    b"blank": b" \t",
    b"cntrl": (*range(32), 127),
    b"digit": b"0123456789",
    b"graph": range(33, 127),
    b"lower": b"abcdefghijklmnopqrstuvwxyz",
    b"print": range(32, 127),
    b"punct": b"!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~",
    b"space": b" \t\n\v\f\r",
    b"upper": b"ABCDEFGHIJKLMNOPQRSTUVWXYZ",
    b"xdigit": b"0123456789ABCDEFabcdef",
}


# --- rules -----------------------------------------------------------------------------------------


class _Rule:
    """One line: what it matches, for folders only or not, and whether it takes back what others ignore."""

    def __init__(self, expression: bytes, *, by_name: bool, folders_only: bool, negated: bool) -> None:
        self.expression = expression
        self.matches = re.compile(expression, re.DOTALL).fullmatch
        self.by_name = by_name
        self.folders_only = folders_only
        self.negated = negated


class RuleFile:
    """The rules of one file. ``base`` is the folder they are relative to, from the repository's top, slash behind."""

    def __init__(self, base: bytes, data: bytes) -> None:
        self._start = len(base)
        lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
        # The last rule that matches decides, so they are kept in the order in which they are asked.
        self._rules = [rule for rule in map(_parse, reversed(lines)) if rule is not None]
        # Most entries match no rule, and one expression says so faster than all of them in turn.
        self._any_name = self._any(by_name=True)
        self._any_path = self._any(by_name=False)

    def _any(self, *, by_name: bool) -> re.Pattern[bytes]:
        chosen = [b"(?:" + rule.expression + b")" for rule in self._rules if rule.by_name is by_name]
        return re.compile(b"|".join(chosen) or b"(?!)", re.DOTALL)

    def decide(self, path: bytes, name: bytes, *, is_folder: bool) -> bool | None:
        """Whether ``path`` (from the repository's top) is ignored; None when no rule says anything of it."""
        path = path[self._start :]
        if not self._any_name.fullmatch(name) and not self._any_path.fullmatch(path):
            return None
        for rule in self._rules:
            if (is_folder or not rule.folders_only) and rule.matches(name if rule.by_name else path):
                return not rule.negated
        return None


def _parse(line: bytes) -> _Rule | None:
    """The rule of a line, None if it has none or one that can never match."""
    if line.startswith(b"#"):
        return None
    pattern = _without_trailing_blanks(line.removesuffix(b"\r").partition(b"\0")[0])
    negated = pattern.startswith(b"!")
    pattern = pattern[negated:]
    folders_only = pattern.endswith(b"/")
    pattern = pattern[: len(pattern) - folders_only]
    by_name = b"/" not in pattern
    pattern = pattern.removeprefix(b"/")
    special = _SPECIAL.search(pattern)
    plain = len(pattern) if special is None else special.start()
    rest = _expression(pattern[plain:], whole_path=not by_name)
    if not pattern or rest is None:
        return None
    return _Rule(re.escape(pattern[:plain]) + rest, by_name=by_name, folders_only=folders_only, negated=negated)


def _without_trailing_blanks(line: bytes) -> bytes:
    """The line without blanks at its end; a backslash keeps the one behind it."""
    end = at = 0
    while at < len(line):
        escaped = line[at : at + 1] == b"\\"
        if escaped and at + 1 == len(line):
            return line
        at += 1 + escaped
        if escaped or line[at - 1 : at] != b" ":
            end = at
    return line[:end]


def _expression(pattern: bytes, *, whole_path: bool) -> bytes | None:
    """A pattern, or what is left of one behind its plain beginning, as a regular expression; None matches nothing."""
    one = b"[^/]" if whole_path else b"."
    out: list[bytes] = []
    at = 0
    while at < len(pattern):
        character = pattern[at : at + 1]
        if character == b"*":
            stars = len(pattern) - at - len(pattern[at:].lstrip(b"*"))
            begins = at == 0 or pattern[at - 1 : at] == b"/"
            at += stars
            if stars == 1 or not whole_path or not begins:
                out.append(_SOME)
            elif pattern[at : at + 1] == b"/":
                at += 1
                if out[-1:] != [_FOLDERS]:
                    out.append(_FOLDERS)
            elif pattern[at : at + 2] == rb"\/":  # which git takes for one folder at least
                at += 2
                out += [_SOME, b"/", _FOLDERS]
            else:
                out.append(_ANYTHING if at == len(pattern) else _SOME)
        elif character == b"[":
            found = _bracket(pattern, at)
            if found is None:
                return None
            members, at = found
            if whole_path:
                members.discard(ord("/"))
            out.append(b"[" + b"".join(b"\\x%02x" % each for each in sorted(members)) + b"]" if members else b"(?!)")
        else:
            at += character == b"\\"
            if at == len(pattern):
                return None
            out.append(one if character == b"?" else re.escape(pattern[at : at + 1]))
            at += 1
    return _joined(out, whole_path=whole_path)


_SOME, _FOLDERS, _ANYTHING = b"*", b"**/", b"**"
"""What stands for itself in a pattern that is read: part of a name, any folders, all that follows."""


def _joined(pieces: list[bytes], *, whole_path: bool) -> bytes:
    """The pieces of a pattern as one expression, whose time does not grow with the number of wildcards.

    What stands between two wildcards of a kind is as long wherever it fits, in names or in folders. So it is taken
    where it fits first and never tried elsewhere: that leaves the most to what follows.
    """
    parts: list[list[bytes]] = [[]]
    for piece in pieces:
        if piece == _FOLDERS:
            parts.append([])
        else:
            parts[-1].append(piece)
    first, *rest = [_names(part, whole_path=whole_path) for part in parts]
    if not rest:
        return first
    between = b"".join(b"(?>(?:.*?/)??" + part + b")" for part in rest[:-1])
    return first + between + b"(?:.*/)?" + rest[-1]


def _names(pieces: list[bytes], *, whole_path: bool) -> bytes:
    """The pieces between two ``**/`` as an expression."""
    each = b"[^/]" if whole_path else b"."
    out: list[bytes] = []
    name: list[bytes] = []
    for piece in [*pieces, b"/"]:
        if piece not in (b"/", _ANYTHING):
            name.append(piece)
            continue
        stars = [index for index, part in enumerate(name) if part == _SOME]
        for start, end in zip(stars, [*stars, None][1:], strict=True):
            text = b"".join(name[start + 1 : end])
            name[start] = each + b"*" + text if end is None else b"(?>" + each + b"*?" + text + b")"
        out += name if not stars else [*name[: stars[0]], *(name[star] for star in stars)]
        out.append(b".*" if piece == _ANYTHING else piece)
        name = []
    return b"".join(out[:-1])


def _bracket(pattern: bytes, at: int) -> tuple[set[int], int] | None:
    """The bytes that the bracket at ``at`` stands for, and where it ends; None if it is not closed, or unknown."""
    at += 1
    negated = pattern[at : at + 1] in (b"!", b"^")
    at += negated
    first, before = at, 0
    members: set[int] = set()
    while pattern[at : at + 1] != b"]" or at == first:
        named = pattern[at : at + 2] == b"[:"
        until = pattern.find(b"]", at + 2) if named else -1
        if at >= len(pattern) or (named and until < 0):
            return None
        if pattern[at : at + 1] == b"-" and before and pattern[at + 1 : at + 2] not in (b"", b"]"):
            at += 2 if pattern[at + 1 : at + 2] == b"\\" else 1
            if at >= len(pattern):
                return None
            members.update(range(before, pattern[at] + 1))
            before = 0
        elif named and until > at + 2 and pattern[until - 1 : until] == b":":
            members.update(_CLASSES.get(pattern[at + 2 : until - 1], ()))
            if pattern[at + 2 : until - 1] not in _CLASSES:
                return None
            at, before = until, 0
        else:
            at += pattern[at : at + 1] == b"\\"
            if at >= len(pattern):
                return None
            before = pattern[at]
            members.add(before)
        at += 1
    return (set(range(256)) - members if negated else members), at + 1


# --- repositories ----------------------------------------------------------------------------------


class _Repository:
    """What a repository says beside its ``.gitignore`` files. Nothing is there outside of one."""

    def __init__(self, control: str | None) -> None:
        common = None if control is None else _common(control)
        data = None if common is None else _content(f"{common}/info", "exclude", RULES)
        self._control, self._common = control, common
        self.exclude = RuleFile(b"", data or b"")
        self._tracked: list[bytes] | None = None

    def tracks(self, path: bytes, *, below: bool = False) -> bool:
        """Whether ``path`` is tracked, or with ``below`` something in it; False where the index cannot be read."""
        if self._tracked is None:
            self._tracked = self._read_index()
        at = bisect.bisect_left(self._tracked, path)
        found = self._tracked[at : at + 1]
        return found == [path] or (below and self.tracks_below(path + b"/"))

    def tracks_below(self, prefix: bytes) -> bool:
        """Whether a tracked path begins with ``prefix``."""
        tracked = self._tracked or []
        at = bisect.bisect_left(tracked, prefix)
        return at < len(tracked) and tracked[at].startswith(prefix)

    def _read_index(self) -> list[bytes]:
        if self._control is None or self._common is None:
            return []
        data = _content(self._control, "index", INDEX)
        settings = _content(self._common, "config", RULES) or b""
        sha256 = re.search(rb"(?im)^\s*objectformat\s*=\s*sha256\b", settings)
        try:
            return _tracked(data or b"", 32 if sha256 else 20)
        except (IndexError, ValueError):  # cut off, or of a kind that is not known
            return []


def _tracked(index: bytes, digest: int) -> list[bytes]:
    """The paths in an index of version 2 to 4, in their order, which is that of their bytes."""
    version, count = int.from_bytes(index[4:8], "big"), int.from_bytes(index[8:12], "big")
    if index[:4] != b"DIRC" or version not in (2, 3, 4):
        return []
    names: list[bytes] = []
    at, name = 12, b""
    for _ in range(count):
        start = at + 42 + digest
        if index[start - 2] & 0x40:
            start += 2
        kept = 0
        if version == 4:  # a name is the last one, less some bytes at its end, and what follows
            byte = index[start]
            left_out = byte & 0x7F
            while byte & 0x80:
                start += 1
                byte = index[start]
                left_out = ((left_out + 1) << 7) + (byte & 0x7F)
            start += 1
            kept = max(0, len(name) - left_out)
        end = index.index(b"\0", start)
        name = name[:kept] + index[start:end]
        names.append(name)
        at = end + 1 if version == 4 else at + ((end - at + 8) & ~7)
    return names


def _content(folder: str, name: str, limit: int) -> bytes | None:
    """The bytes of a regular file, None if there is none that may be read, or a larger one."""
    try:
        opened = open_folder(folder)
    except (OSError, Refusal):
        return None
    try:
        return _content_at(opened, name, limit)
    finally:
        os.close(opened)


def _content_at(folder: int, name: str, limit: int) -> bytes | None:
    try:
        with open_file(folder, name, name) as file:
            data = file.read(limit + 1)
    except (OSError, Refusal):
        return None
    return data if len(data) <= limit else None


def _common(control: str) -> str:
    """The folder that the worktrees of a repository share."""
    named = _content(control, "commondir", RULES)
    if named is None:
        return control
    return _resolved(control, named)


def _resolved(folder: str, named: bytes) -> str:
    """The path that a file in ``folder`` names, links resolved."""
    path = os.path.realpath(os.path.join(encode_name(folder), named.rstrip(b"\r\n")))
    return path.decode("utf-8", "surrogateescape")


def _control(path: str, folder: int) -> str | None:
    """The control folder of the repository whose top is ``path``, open as ``folder``; None if it is no top."""
    try:
        found = os.lstat(b".git", dir_fd=folder)
    except OSError:
        return None
    named = b".git"
    if stat.S_ISREG(found.st_mode):
        start, gitdir, named = (_content_at(folder, ".git", RULES) or b"").partition(b"gitdir: ")
        if start or not gitdir:
            return None
    control = _resolved(path, named)
    return control if os.path.lexists(encode_name(f"{control}/HEAD")) else None


class Scope:
    """The rules that hold for the entries of one folder.

    Attributes:
        path: The folder, absolute.
    """

    def __init__(
        self, path: str, repository: _Repository, base: bytes, files: tuple[RuleFile, ...], *, ignored: bool = False
    ) -> None:
        self.path = path
        self._repository = repository
        self._base = base
        self._files = files
        self._ignored = ignored

    @classmethod
    def of(cls, path: str, root: str) -> Scope:
        """The scope of a folder a search begins at, before ``opened``.

        It is never ignored itself: whoever names a folder means it. Outside of a repository rules count from ``root``
        on, if that is above, else from the folder on.
        """
        outside = root if f"{path}/".startswith(f"{root.rstrip('/')}/") else path
        at = path
        while True:
            with _Opened(at) as folder:
                control = None if folder is None else _control(at, folder)
            if control is not None or at == "/":
                break
            at = os.path.dirname(at)
        scope = cls(outside if control is None else at, _Repository(control), b"", ())
        for name in path[len(scope.path) :].strip("/").split("/"):
            if name:
                with _Opened(scope.path) as folder:
                    scope = (scope if folder is None else scope.with_rules(folder)).below(name, ignored=False)
        return scope

    def opened(self, folder: int, names: Container[str]) -> Scope:
        """The scope with the rules of the folder itself, which is open and holds ``names``."""
        if ".git" in names:
            control = _control(self.path, folder)
            if control is not None:
                return Scope(self.path, _Repository(control), b"", ()).with_rules(folder)
        return self.with_rules(folder) if ".gitignore" in names else self

    def with_rules(self, folder: int) -> Scope:
        """The scope with the ``.gitignore`` of the folder itself, which is open."""
        data = _content_at(folder, ".gitignore", RULES)
        if not data:
            return self
        files = (RuleFile(self._base, data), *self._files)
        return Scope(self.path, self._repository, self._base, files, ignored=self._ignored)

    def below(self, name: str, *, ignored: bool) -> Scope:
        """The scope of a folder in this one, before ``opened``."""
        path = f"{self.path.rstrip('/')}/{name}"
        base = self._base + encode_name(name) + b"/"
        return Scope(path, self._repository, base, self._files, ignored=ignored)

    def ignores(self, name: str, *, is_folder: bool) -> bool:
        """Whether git ignores an entry by a rule for it or for a folder above."""
        if self._ignored:
            return True
        encoded = encode_name(name)
        path = self._base + encoded
        for file in (*self._files, self._repository.exclude):
            decided = file.decide(path, encoded, is_folder=is_folder)
            if decided is not None:
                return decided
        return False

    def tracks(self, name: str, *, is_folder: bool) -> bool:
        """Whether an entry is tracked or, for a folder, something in it."""
        return self._repository.tracks(self._base + encode_name(name), below=is_folder)


class _Opened:
    """A folder that is open inside a ``with``, None if it may not be read."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._folder: int | None = None

    def __enter__(self) -> int | None:
        try:
            self._folder = open_folder(self._path)
        except (OSError, Refusal):
            self._folder = None
        return self._folder

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            os.close(self._folder)
