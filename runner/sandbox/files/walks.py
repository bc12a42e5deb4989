"""Files below a folder, in order of their paths.

Standard library only.
"""

from __future__ import annotations

import os

from .ignores import Scope
from .patterns import Glob, parse_glob
from .places import PATH_ONLY, encode_name, open_folder, shown

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any

    Arguments = dict[str, Any]
    Value = dict[str, Any]


VISITS = 500_000
"""Folder entries one search looks at."""

DEPTH = 150
"""Nested folders one search goes down."""


class Walk:
    """Files below a folder in order of their paths, without those that git ignores.

    Links are not followed, ``.git`` is left out. What the pattern names outright, without a wildcard in it or in a
    folder above, is found even if it is ignored. ``ignored`` counts the entries that were left out for a rule.
    """

    def __init__(self) -> None:
        self.visited = 0
        self.unreadable = 0
        self.ignored = 0
        self.incomplete = False

    def files(
        self, folder: int, glob: Glob, scope: Scope, prefix: str = "", depth: int = 0
    ) -> Iterator[tuple[str, int, str]]:
        """Yield path, open folder and name of every file that matches. Closes ``folder``."""
        try:
            try:
                entries = self._entries(folder)
            except PermissionError:
                self.unreadable += 1
                return
            scope = scope.opened(folder, {name for name, _ in entries})
            for key, is_folder in entries:
                name = key.rstrip("/")
                following = glob.enter(name) if name != ".git" else None
                if following is None or not (is_folder or following.matched):
                    continue
                ignored = not following.literal and scope.ignores(name, is_folder=is_folder)
                if ignored and not scope.tracks(name, is_folder=is_folder):
                    self.ignored += 1
                elif not is_folder:
                    yield prefix + name, folder, name
                elif depth >= DEPTH:
                    self.incomplete = True
                else:
                    try:
                        below = os.open(encode_name(name), PATH_ONLY, dir_fd=folder)
                    except OSError:  # gone, or became a link, since it was listed
                        self.unreadable += 1
                        continue
                    inside = scope.below(name, ignored=ignored)
                    yield from self.files(below, following, inside, prefix + key, depth + 1)
        finally:
            os.close(folder)

    def _entries(self, folder: int) -> list[tuple[str, bool]]:
        """Names, folders with a slash behind so that sorting them sorts whole paths."""
        readable = os.open(b".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        entries = []
        try:
            with os.scandir(readable) as listing:
                for entry in listing:
                    self.visited += 1
                    if self.visited > VISITS:
                        self.incomplete = True
                        break
                    name = os.fsencode(entry.name).decode("utf-8", "surrogateescape")
                    is_folder = name != ".git" and entry.is_dir(follow_symlinks=False)
                    entries.append((name + "/" if is_folder else name, is_folder))
        finally:
            os.close(readable)
        entries.sort()
        return entries

    def notes(self) -> Value:
        """What the search did not see."""
        return {"unreadable": self.unreadable, "ignored": self.ignored, "incomplete": self.incomplete}


def glob(arguments: Arguments) -> Value:
    """Paths below ``path`` that match ``pattern``, with ``label`` in front, at most ``limit``.

    ``root`` is the workspace; see ``Scope.of``.
    """
    alternatives = parse_glob(arguments["pattern"])
    start: str = arguments["path"]
    folder = open_folder(start)
    walk = Walk()
    paths: list[str] = []
    more = False
    files = walk.files(folder, Glob(alternatives), Scope.of(start, arguments.get("root", start)))
    for path, _, _ in files:
        if len(paths) == arguments["limit"]:
            more = True
            break
        paths.append(arguments["label"] + shown(path))
    files.close()  # type: ignore[attr-defined]  # it is a generator; this frees its descriptors now
    return {"paths": paths, "more": more, **walk.notes()}
