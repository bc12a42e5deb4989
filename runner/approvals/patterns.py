"""Patterns of rules: words of commands, and paths.

Everything is compiled once, when the policy is built. Pure; writes no events.
"""

from __future__ import annotations

import posixpath
import re
from typing import TYPE_CHECKING

from runner.approvals.words import basename, is_opaque
from runner.record import field, record

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Sequence

    from runner.approvals.commands import SimpleCommand
    from runner.approvals.lexer import Token

_GLOB = re.compile(r"[*?]|\[.+\]", re.DOTALL)


def _translate(glob: str, *, any_character: str) -> str:
    """A glob inside one word or path segment as a regular expression that needs no backtracking over its stars."""
    chunks: list[list[str]] = [[]]
    at = 0
    while at < len(glob):
        character = glob[at]
        at += 1
        if character == "*":
            if chunks[-1] or len(chunks) == 1:
                chunks.append([])
        elif character == "?":
            chunks[-1].append(any_character)
        elif character == "[":
            # A `]` right behind the bracket is a member of the class.
            close = glob.find("]", at + 1 + (glob[at : at + 1] in ("!", "^")))
            if close < 0:
                chunks[-1].append(re.escape("["))
                continue
            chunks[-1].append(f"(?={any_character}){_character_class(glob[at:close])}")
            at = close + 1
        else:
            chunks[-1].append(re.escape(character))
    first, *others = ["".join(chunk) for chunk in chunks]
    if not others:
        return first
    # The first place where what stands between two stars fits is as good as any other.
    *middle, last = others
    return first + "".join(f"(?>{any_character}*?{chunk})" for chunk in middle) + f"{any_character}*{last}"


def _character_class(members: str) -> str:
    inverted = members[:1] in ("!", "^")
    members = members[1:] if inverted else members
    members = members.replace("\\", r"\\").replace("[", r"\[").replace("]", r"\]").replace("^", r"\^")
    for pair in ("&&", "||", "~~", "--"):
        members = members.replace(pair, f"{pair[0]}\\{pair[1]}")
    return f"[{'^' if inverted else ''}{members}]"


def _compile(glob: str, *, any_character: str) -> re.Pattern[str]:
    try:
        return re.compile(_translate(glob, any_character=any_character), re.DOTALL)
    except re.error:
        # A class such as [z-a]; bash takes it for no match.
        return re.compile(r"(?!)")


@record
class Word:
    """One word of a pattern: literals, globs, or any word.

    Attributes:
        literals: Words that match as they are.
        globs: Globs, one of which must match the whole word.
        any: ``*``, which alone matches an expansion, too.
    """

    literals: frozenset[str] = frozenset()
    globs: tuple[re.Pattern[str], ...] = ()
    any: bool = False

    @classmethod
    def of(cls, alternatives: Sequence[str], *, program: bool = False) -> Word:
        """Build it from the texts of a policy.

        Args:
            alternatives: Literals and globs.
            program: It names a program: a glob then stops at slashes.
        """
        return cls(
            frozenset(each for each in alternatives if not _GLOB.search(each)),
            tuple(
                _compile(each, any_character="[^/]" if program else ".")
                for each in alternatives
                if _GLOB.search(each) and each != "*"
            ),
            "*" in alternatives,
        )

    def matches(self, token: Token) -> bool:
        """Whether it matches a word of a command."""
        if self.any:
            return True
        return not token.expansion and self.matches_text(token.value)

    def matches_text(self, text: str) -> bool:
        """Whether it matches a literal word."""
        return self.any or text in self.literals or any(glob.fullmatch(text) for glob in self.globs)


@record
class CommandPattern:
    """One pattern of a rule's ``command``.

    Attributes:
        words: Patterns of the words, the program first.
        rest: Whether any number of words may follow (``**``).
        refuse_flags: Options that must not be there.
        anywhere: Options may stand before the subcommand.
        text: The pattern as it is shown.
        programs: The names of the programs it is about, None when there are others than literal ones.
        opaque: It lets a program run code that the policy does not see.
    """

    words: tuple[Word, ...]
    rest: bool
    text: str
    refuse_flags: tuple[str, ...] = ()
    anywhere: bool = False

    programs: frozenset[str] | None = field(init=False)
    opaque: bool = field(init=False)

    def __post_init__(self) -> None:
        program = self.words[0] if self.words else Word(any=True)
        programs = None if program.any or program.globs else program.literals
        object.__setattr__(self, "programs", programs)
        opaque = programs is None or any(is_opaque(name, self._subcommands()) for name in programs)
        object.__setattr__(self, "opaque", opaque)

    def allows(self, command: SimpleCommand) -> bool:
        """Whether it matches, the program by the name as written."""
        return self._fits(command.argv, 0) and self.refused(command) is None

    def _subcommands(self) -> Collection[str] | None:
        """What the first word behind the program, and behind options known to run nothing, may be."""
        words = iter(self.words[1:])
        for word in words:
            if word.any or word.globs:
                return None
            if word.literals == {"-C"}:
                next(words, None)
            elif word.literals != {"--no-pager"}:
                return word.literals
        return None if self.rest else ()

    def refused(self, command: SimpleCommand) -> str | None:
        """The word that ``refuse_flags`` does not let pass."""
        if self.refuse_flags:
            for token in command.argv[1:]:
                # Most words are neither.
                if not token.expansion and not token.value.startswith("-"):
                    continue
                if any(_is_flag(token, flag) for flag in self.refuse_flags):
                    return f"{token.value}…" if token.expansion else token.value
        return None

    def fits(self, command: SimpleCommand) -> bool:
        """Whether it matches, ``refuse_flags`` aside."""
        return self._fits(command.argv, 0)

    def denies(self, command: SimpleCommand) -> bool:
        """Whether it matches, the program by the last part of its path, too."""
        argv = command.argv
        program = self.words[0] if self.words else Word(any=True)
        if not program.matches(argv[0]) and (argv[0].expansion or not program.matches_text(basename(argv[0].value))):
            return False
        if not self.anywhere:
            return self._fits(argv, 1)
        # Behind each option the next word may be its value, or not.
        places, seen = [1], set()
        while places:
            at = places.pop()
            if at in seen or at > len(argv):
                continue
            seen.add(at)
            if self._fits(argv[at - 1 :], 1):
                return True
            if at < len(argv) and _may_be_option(argv[at]):
                places += [at + 1, at + 2]
        return False

    def _fits(self, argv: Sequence[Token], first: int) -> bool:
        """Whether the words from ``first`` on match those of ``argv`` from there on."""
        words = self.words
        size = len(words)
        if len(argv) < size or (len(argv) > size and not self.rest):
            return False
        for at in range(first, size):  # noqa: SIM110  # a generator costs more than the matching
            if not words[at].matches(argv[at]):
                return False
        return True


def _may_be_option(token: Token) -> bool:
    return token.value.startswith("-") or (token.expansion and not token.value)


def _is_flag(token: Token, flag: str) -> bool:
    """Whether a word is, or may become, the option ``flag``."""
    if token.variable or (token.expansion and token.value[:1] in ("", "-")):
        return True
    value = token.value
    if not value.startswith("-"):
        return False
    name = value.partition("=")[0]
    if name == flag:
        return True
    if len(flag) > 2:
        # Programs take long options by any prefix, and some with one dash as well as with two.
        bare, dashed = flag.lstrip("-"), name.lstrip("-")
        dashes = len(name) - len(dashed) - len(flag) + len(bare)
        return dashed == bare or (dashes >= 0 and bool(dashed) and bare.startswith(dashed))
    return not value.startswith("--") and flag[1] in value


# --- paths ---------------------------------------------------------------------------------------

_UNHEARD_OF = "\x00"
"""A name that only a wildcard matches."""


@record
class PathPattern:
    """A glob over paths: relative ones from the workspace, ``**`` over whole segments, dotfiles too.

    ``DIR/**`` covers what is below DIR; for reading, and in ``except`` and denies, DIR itself, too.
    """

    glob: str
    _own: re.Pattern[str] = field(repr=False, compare=False)
    _below: re.Pattern[str] = field(repr=False, compare=False)

    @classmethod
    def of(cls, glob: str) -> PathPattern:
        """Compile a glob."""
        segments = [segment for segment in glob.split("/") if segment not in ("", ".")]
        own = _compile_path(segments)
        inside = segments[:-1] if segments[-1:] == ["**"] else segments
        return cls(glob, own, _compile_path(inside) if inside else re.compile(""))

    @property
    def absolute(self) -> bool:
        """Whether it is about absolute paths."""
        return self.glob.startswith("/")

    def matches(self, path: str, workspace: str, *, folder: bool = True) -> bool:
        """Whether it matches a resolved absolute path.

        Args:
            path: Absolute and resolved.
            workspace: Absolute and resolved.
            folder: Let ``DIR/**`` match DIR, too.
        """
        place = self._place(path, workspace)
        if place is None:
            return False
        if self._own.fullmatch(place):
            return True
        return folder and self._below.fullmatch(place) is not None and self.glob.rstrip("/").endswith("**")

    def covers(self, path: str, workspace: str) -> bool:
        """Whether it matches everything below ``path``, and ``path`` itself."""
        place = self._place(path, workspace)
        if place is None or not self.matches(path, workspace):
            return False
        below = f"{place}/{_UNHEARD_OF}" if place else _UNHEARD_OF
        return all(self._own.fullmatch(each) is not None for each in (below, f"{below}/{_UNHEARD_OF}"))

    def may_match_below(self, path: str, workspace: str) -> bool:
        """Whether it may match something below ``path``; says yes when in doubt."""
        if self.matches(path, workspace):
            return True
        place = self._place(path, workspace)
        if place is None:
            # The pattern is relative: below a folder around the workspace lies the workspace.
            return not self.absolute and is_inside(workspace, path)
        folders = place.split("/") if place else []
        segments = [segment for segment in self.glob.split("/") if segment not in ("", ".")]
        for at, folder in enumerate(folders):
            if at >= len(segments):
                return False
            if "**" in segments[at]:
                return True
            if not _compile(segments[at], any_character="[^/]").fullmatch(folder):
                return False
        return len(segments) > len(folders)

    def _place(self, path: str, workspace: str) -> str | None:
        if self.absolute:
            return path.lstrip("/")
        if path == workspace:
            return ""
        return path[len(workspace.rstrip("/")) + 1 :] if is_inside(path, workspace) else None


def _compile_path(segments: Sequence[str]) -> re.Pattern[str]:
    groups: list[list[str]] = [[]]
    for segment in segments:
        if segment != "**":
            groups[-1].append(_translate(segment, any_character="[^/]"))
        elif groups[-1] or len(groups) == 1:
            groups.append([])
    first, *others = ["/".join(group) for group in groups]
    parts = [f"{first}/" if first and others else first]
    if others:
        *middle, last = others
        # Here, too, the first folder where the names between two `**` fit is as good as any other.
        parts += [f"(?>(?:[^/]+/)*?{group}/)" for group in middle]
        parts.append(f"(?:[^/]+/)*{last}" if last else ".+")
    try:
        return re.compile("".join(parts), re.DOTALL)
    except re.error:
        return re.compile(r"(?!)")


def is_inside(path: str, folder: str) -> bool:
    """Whether an absolute path is ``folder`` or below it."""
    return path == folder or path.startswith(f"{folder.rstrip('/')}/")


def expand_braces(glob: str) -> Iterator[str]:
    """Write out ``{a,b}`` of a path glob."""
    match = re.search(r"\{([^{}]*,[^{}]*)\}", glob)
    if match is None:
        yield glob
        return
    for choice in match[1].split(","):
        yield from expand_braces(glob[: match.start()] + choice + glob[match.end() :])


def join_path(workspace: str, path: str) -> str:
    """An absolute path for one that may be relative to the workspace; links are not followed."""
    return posixpath.normpath(posixpath.join(workspace, path))
