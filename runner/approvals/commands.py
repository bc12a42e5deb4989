"""What a simple command runs: builtins with their arguments, and programs that run another program.

Wrappers are read to the last word or not at all: an unknown option makes the text unanalysed. Where
an argument is an expansion, what it could become is taken into account. Pure; writes no events.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple, Protocol

from runner.approvals.lexer import MAX_DEPTH, SPREAD, Token, Unanalysed
from runner.approvals.words import (
    RESERVED,
    SHELLS,
    SUFFIX_WRAPPERS,
    UNANALYSED_BUILTINS,
    basename,
    is_interpreter,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


class SimpleCommand(NamedTuple):
    """One program or builtin with its arguments.

    Attributes:
        argv: Its words; the first one is literal.
        env: Names assigned for it, through ``env`` too.
        external: Another program starts it, so that it is no builtin of the shell.
        moved: It may run in another directory than the workspace.
    """

    argv: tuple[Token, ...]
    env: tuple[str, ...] = ()
    external: bool = False
    moved: bool = False

    @property
    def name(self) -> str:
        """The first word."""
        return self.argv[0].value

    def __str__(self) -> str:
        return " ".join(f"{token.value}…" if token.expansion else token.value or "''" for token in self.argv)


class Sink(Protocol):
    """Takes what is found in one text."""

    def run(self, command: SimpleCommand) -> None:
        """A command that has to be allowed."""
        ...

    def wrap(self, command: SimpleCommand) -> None:
        """A command whose words are seen by denies only."""
        ...

    def assign(self, names: Sequence[str]) -> None:
        """Variables that change for the whole text."""
        ...

    def change_directory(self) -> None:
        """A ``cd`` whose effect is not followed."""
        ...

    def text(self, text: str, *, env: tuple[str, ...], lost: bool, depth: int) -> None:
        """A literal text for another bash; ``lost``: nobody knows in which directory it runs."""
        ...


VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=")


def expand(
    argv: Sequence[Token],
    sink: Sink,
    *,
    env: tuple[str, ...] = (),
    external: bool = False,
    moved: bool = False,
    lost: bool = False,
    leading: bool = False,
    depth: int = 0,
) -> None:
    """Hand a simple command, and what it runs, to ``sink``.

    Args:
        argv: Its words, at least one.
        sink: Takes the commands.
        env: Names assigned before it.
        external: Another program starts it.
        moved: It may run in another directory than the workspace.
        lost: Nobody knows in which directory it runs.
        leading: It is a ``cd`` at the start of its scope, whose effect is followed.
        depth: How many wrappers stand around it.

    Raises:
        Unanalysed: It is not known what it runs.
    """
    if depth > MAX_DEPTH:
        raise Unanalysed(f"it is nested deeper than {MAX_DEPTH}")
    argv = tuple(argv)
    first = argv[0]
    if first.expansion:
        raise Unanalysed("the name of a command is an expansion")
    name = first.value
    if not name or "=" in name:
        raise Unanalysed(f"`{name}` is no plain name of a command")
    if name in RESERVED and name != "time":
        raise Unanalysed(f"the reserved word `{name}` stands where a command is needed")
    command = SimpleCommand(argv, env, external, moved)
    wrapper = _WRAPPERS.get(name)
    if wrapper is not None:
        wrapped = wrapper(argv)
        if wrapped.own:
            sink.run(command)
        elif wrapped.inner or wrapped.text is not None:
            sink.wrap(command)
        names = (*env, *wrapped.env)
        for inner in wrapped.inner:
            expand(
                inner,
                sink,
                env=names,
                # Quoted, in a pipe or behind an assignment, `time` is a program.
                external=True,
                moved=moved or wrapped.moves,
                lost=lost or wrapped.moves,
                depth=depth + 1,
            )
        if wrapped.text is not None:
            sink.text(wrapped.text, env=names, lost=lost, depth=depth + 1)
        return
    if name in UNANALYSED_BUILTINS and not (name == "command" and _asks_only(argv)):
        raise Unanalysed(f"`{name}` is not analysed")
    if basename(name) in SHELLS and _gives_text(argv):
        raise Unanalysed(f"`{basename(name)} -c` is another shell")
    if name == "cd" and not leading:
        sink.change_directory()
    check = _BUILTINS.get(name)
    if check is not None:
        check(argv, sink)
    sink.run(command)
    _wrap_suffixes(argv, sink)


def _wrap_suffixes(argv: Sequence[Token], sink: Sink) -> None:
    """Show denies what a program may run that is not looked through."""
    for suffix in suffixes(argv):
        if basename(suffix[0].value) in SHELLS and _gives_text(suffix):
            raise Unanalysed(f"`{argv[0].value}` runs another shell")
        sink.wrap(SimpleCommand(suffix))


def suffixes(argv: Sequence[Token]) -> Iterator[tuple[Token, ...]]:
    """What a program that runs others may run: every part of its words up to the end, for denies."""
    if basename(argv[0].value) in SUFFIX_WRAPPERS:
        for start in range(1, min(len(argv), MAX_DEPTH)):
            yield tuple(argv[start:])


def reads_code(argv: Sequence[Token]) -> bool:
    """Whether a command may run what it reads from stdin, itself or through a program it starts."""
    name = basename(argv[0].value)
    if is_interpreter(name):
        return True
    return name in SUFFIX_WRAPPERS and any(token.expansion or is_interpreter(token.value) for token in argv[1:])


_LINKING_OPTIONS = ("--archive", "--link", "--no-dereference", "--preserve", "--recursive", "--symbolic-link")


def may_link(argv: Sequence[Token]) -> bool:
    """Whether a command is one of the usual ones that make a link, or move one, to where another path leads then."""
    name = basename(argv[0].value)
    if name != "cp":
        return name in ("link", "ln", "mv")
    for token in argv[1:]:
        value = token.value
        if token.expansion and (token.variable or not value or value.startswith("-")):
            return True
        if value == "--":
            return False
        if value.startswith("--"):
            if any(option.startswith(value.partition("=")[0]) for option in _LINKING_OPTIONS):
                return True
        elif value.startswith("-") and not set("PRadlrs").isdisjoint(value):
            return True
    return False


def _asks_only(argv: Sequence[Token]) -> bool:
    """``command -v NAME`` only prints."""
    return len(argv) > 1 and not argv[1].expansion and argv[1].value in ("-v", "-V")


def _gives_text(argv: Sequence[Token]) -> bool:
    """Whether a shell may be given a text by an option."""
    for token in argv[1:]:
        if token.expansion and (token.variable or not token.value or token.value.startswith(("-", "+"))):
            return True
        if not token.value.startswith(("-", "+")):
            return False
        if not token.value.startswith("--") and "c" in token.value:
            return True
    return False


# --- builtins ------------------------------------------------------------------------------------

_BINARY = frozenset({
    "=", "==", "!=", "<", ">", "-eq", "-ne", "-lt", "-le", "-gt", "-ge", "-nt", "-ot", "-ef", "-a", "-o",
})  # fmt: skip
_UNARY = re.compile(r"-[abcdefghkprstuwxGLNOSzn]")
_COUNTS = re.compile(r"%[-+ #0'*.0-9hlLjzqtQ$]*n")


def _check_test(argv: Sequence[Token], _sink: Sink) -> None:
    """``test`` and ``[``: ``-v NAME[…]`` runs what stands in the brackets."""
    operands = list(argv[1:])
    if argv[0].value == "[":
        if not operands or operands[-1] != Token("]"):
            raise Unanalysed("`[` is not closed")
        operands.pop()
    if any(not token.expansion and token.value == "-v" for token in operands):
        raise Unanalysed("`-v` evaluates its argument")
    if not any(token.expansion for token in operands):
        return
    if not all(token.single for token in operands):
        raise Unanalysed(f"an expansion without double quotes stands in `{argv[0].value}`")
    while len(operands) > 1 and operands[0] == Token("!"):
        operands.pop(0)
    size = len(operands)
    known = (
        size == 1
        or (size == 2 and not operands[0].expansion and _UNARY.fullmatch(operands[0].value) is not None)
        or (size == 3 and not operands[1].expansion and operands[1].value in _BINARY)
    )
    if not known:
        raise Unanalysed(f"an expansion in `{argv[0].value}` may be an operator")


def _check_printf(argv: Sequence[Token], _sink: Sink) -> None:
    """``printf -v`` and ``%n`` assign."""
    operands = argv[1:]
    if operands and operands[0] == Token("--"):
        operands = operands[1:]
    elif operands and operands[0].value.startswith("-"):
        raise Unanalysed("an option of `printf` is not analysed")
    if operands and (operands[0].expansion or _COUNTS.search(operands[0].value.replace("%%", ""))):
        raise Unanalysed("the format of `printf` is not a literal, or assigns")


def _check_read(argv: Sequence[Token], sink: Sink) -> None:
    """``read`` with ``-r`` and literal names only; a subscript would be evaluated."""
    names = [token for token in argv[1:] if token != Token("-r")]
    if any(token.expansion or VARIABLE.fullmatch(token.value) is None for token in names):
        raise Unanalysed("`read` has more than `-r` and literal names")
    sink.assign([token.value for token in names] or ["REPLY"])


def _check_set(argv: Sequence[Token], _sink: Sink) -> None:
    """``set`` with ``e``, ``u``, ``x`` and ``-o pipefail`` only."""
    known = len(argv) > 1
    operands = iter(argv[1:])
    for token in operands:
        match = re.fullmatch(r"[-+](?=.)[eux]*(o?)", token.value)
        known = known and match is not None and not token.expansion
        if known and match is not None and match[1]:
            known = next(operands, None) == Token("pipefail")
    if not known:
        raise Unanalysed("`set` changes more than e, u, x and pipefail")


def _check_wait(argv: Sequence[Token], _sink: Sink) -> None:
    """``wait -p`` assigns."""
    if any(token.value.startswith("-") or (token.expansion and not token.digits) for token in argv[1:]):
        raise Unanalysed("an argument of `wait` is not analysed")


_BUILTINS: dict[str, Callable[[Sequence[Token], Sink], None]] = {
    "[": _check_test,
    "printf": _check_printf,
    "read": _check_read,
    "set": _check_set,
    "test": _check_test,
    "wait": _check_wait,
}


# --- wrappers ------------------------------------------------------------------------------------


class Wrapped(NamedTuple):
    """What a wrapper runs.

    Attributes:
        inner: The commands.
        env: Names it assigns or unsets for them.
        own: The wrapper itself needs a rule, too.
        text: A literal text for another bash.
        moves: They may run in another directory.
    """

    inner: Sequence[Sequence[Token]] = ()
    env: tuple[str, ...] = ()
    own: bool = False
    text: str | None = None
    moves: bool = False


_DURATION = re.compile(r"[0-9]+(?:\.[0-9]+)?[smhd]?")


class _Options:
    """Reads the options of a wrapper: literal words that are known, and nothing else."""

    def __init__(self, argv: Sequence[Token], flags: str = "", values: str = "", attached: str = "") -> None:
        """Note what is known.

        Args:
            argv: The wrapper's words.
            flags: Options without a value, separated by blanks.
            values: Options whose value is the next word, or stands behind ``=`` of a long one.
            attached: Pattern of further words that are an option and its value in one.
        """
        self.argv = argv
        self.at = 1
        self._flags = flags.split()
        self._values = values.split()
        self._attached = re.compile(attached) if attached else None

    @property
    def rest(self) -> Sequence[Token]:
        """The words that were not read yet."""
        return self.argv[self.at :]

    def literal(self) -> str:
        """The next word, which has to be literal."""
        if self.at >= len(self.argv) or self.argv[self.at].expansion:
            raise self.unknown()
        self.at += 1
        return self.argv[self.at - 1].value

    def unknown(self) -> Unanalysed:
        """The error for a word that is not known."""
        word = str(SimpleCommand((self.argv[self.at],))) if self.at < len(self.argv) else "nothing"
        return Unanalysed(f"`{word}` is not analysed as an argument of `{self.argv[0].value}`")

    def read(self) -> list[tuple[str, str]]:
        """Read options up to the first other word; returns options with their values."""
        found: list[tuple[str, str]] = []
        while self.at < len(self.argv):
            token = self.argv[self.at]
            if token.expansion and (not token.value or token.value.startswith("-") or not token.single):
                raise self.unknown()
            if not token.value.startswith("-") or token.expansion:
                break
            self.at += 1
            if token.value == "--":
                break
            option, equals, value = token.value.partition("=")
            if token.value in self._flags:
                found.append((token.value, ""))
            elif token.value in self._values:
                found.append((token.value, self.literal()))
            elif equals and option.startswith("--") and option in self._values:
                found.append((option, value))
            elif self._attached is not None and self._attached.fullmatch(token.value):
                found.append((token.value, ""))
            else:
                self.at -= 1
                raise self.unknown()
        return found

    def assignments(self) -> list[str]:
        """Read ``NAME=VALUE`` words; returns the names."""
        names = []
        while self.at < len(self.argv):
            token = self.argv[self.at]
            match = ASSIGNMENT.match(token.value)
            if match is None:
                if "=" in token.value:
                    raise self.unknown()
                break
            if not token.single:
                raise self.unknown()
            names.append(match[1])
            self.at += 1
        return names


def _env(argv: Sequence[Token]) -> Wrapped:
    options = _Options(argv, values="-u --unset")
    names = [name for _, name in options.read()]
    names += options.assignments()
    return Wrapped([options.rest], tuple(names)) if options.rest else Wrapped(own=True, env=tuple(names))


def _timeout(argv: Sequence[Token]) -> Wrapped:
    options = _Options(argv, flags="--foreground --preserve-status -v --verbose", values="-k -s --kill-after --signal")
    options.read()
    if not options.rest:
        return Wrapped(own=True)
    if _DURATION.fullmatch(options.literal()) is None:
        options.at -= 1
        raise options.unknown()
    return Wrapped([options.rest]) if options.rest else Wrapped(own=True)


def _nice(argv: Sequence[Token]) -> Wrapped:
    options = _Options(argv, values="-n --adjustment", attached=r"-n?-?[0-9]{1,3}")
    options.read()
    return Wrapped([options.rest]) if options.rest else Wrapped(own=True)


def _nohup(argv: Sequence[Token]) -> Wrapped:
    options = _Options(argv)
    options.read()
    return Wrapped([options.rest]) if options.rest else Wrapped(own=True)


def _time(argv: Sequence[Token]) -> Wrapped:
    options = _Options(argv, flags="-p")
    options.read()
    if not options.rest:
        raise Unanalysed("`time` stands without a command")
    return Wrapped([options.rest])


def _sudo(argv: Sequence[Token]) -> Wrapped:
    options = _Options(argv, flags="-n -H", values="-u --user")
    options.read()
    names = options.assignments()
    return Wrapped([options.rest] if options.rest else (), tuple(names), own=True)


def _xargs(argv: Sequence[Token]) -> Wrapped:
    options = _Options(
        argv,
        flags="-0 -r -t --null --no-run-if-empty --verbose",
        values="-n -P -L -d -I --max-args --max-procs --max-lines --delimiter",
        attached=r"-[nPL][0-9]+|-I.+|-d(?:.|\\[a-z0-9]+)",
    )
    found = options.read()
    places = [option[2:] or value for option, value in found if option.startswith("-I")]
    inner = options.rest or [Token("echo")]
    if not places:
        return Wrapped([[*inner, SPREAD]], own=True)
    if not places[-1]:
        raise Unanalysed("`xargs -I` has no place to fill in")
    if any(option.startswith(("-n", "-L", "--max-args", "--max-lines")) for option, _ in found):
        # Whichever stands last cancels the other, by versions of xargs.
        raise Unanalysed("`xargs -I` stands beside a number of words or lines")
    return Wrapped([_fill(inner, places[-1])], own=True)


def _fill(argv: Sequence[Token], place: str) -> list[Token]:
    """The words with ``place`` replaced by something nobody knows; each stays one word."""
    return [
        Token(token.value.partition(place)[0], expansion=True, variable=token.variable, single=token.single)
        if place in token.value
        else token
        for token in argv
    ]


_FIND_EXEC = frozenset({"-exec", "-execdir", "-ok", "-okdir"})
_FIND_VALUES = frozenset({
    "-D", "-amin", "-anewer", "-atime", "-cmin", "-cnewer", "-ctime", "-context", "-files0-from", "-fls",
    "-fprint", "-fprint0", "-fstype", "-gid", "-group", "-ilname", "-iname", "-iwholename",
    "-inum", "-ipath", "-iregex", "-links", "-lname", "-maxdepth", "-mindepth", "-mmin", "-mtime", "-name",
    "-newer", "-path", "-perm", "-printf", "-regex", "-regextype", "-samefile", "-size", "-type", "-uid", "-used",
    "-user", "-wholename", "-xtype",
})  # fmt: skip
"""Options of ``find`` that take the next word, whatever it is."""

_FIND_NEWER = re.compile(r"-newer[aBcm][aBcmt]")
"""They take the next word, too."""

_FIND_LEVEL = re.compile(r"-O[0-3]")

_FIND_FLAGS = frozenset({
    "-H", "-L", "-P", "-a", "-and", "-d", "-daystart", "-delete", "-depth", "-empty", "-executable", "-false",
    "-follow", "-ls", "-mount", "-nogroup", "-noleaf", "-not", "-nouser", "-nowarn", "-o", "-or", "-print", "-print0",
    "-prune", "-quit", "-readable", "-true", "-warn", "-writable", "-xdev",
})  # fmt: skip
"""Options of ``find`` that stand alone."""


def _find(argv: Sequence[Token]) -> Wrapped:
    inner: list[list[Token]] = []
    moves = False
    # Behind an option nobody knows, a word may be its value or the next action.
    unknown = ""
    position = 1
    while position < len(argv):
        token = argv[position]
        position += 1
        if token.expansion:
            if not _starts_plain(token):
                raise Unanalysed("an expansion among the words of `find` may be an action")
        elif token.value in _FIND_EXEC:
            moves |= token.value.endswith("dir")
            words, position = _find_command(argv, position)
            inner.append(words)
        elif (count := _find_values(token.value)) and position < len(argv):
            for value in argv[position : position + count]:
                if value.expansion and (unknown or not value.single) and not _starts_plain(value):
                    raise Unanalysed("an expansion among the words of `find` may be an action")
            # An unknown option before may have taken this one as its value.
            position += 0 if unknown else count
        elif token.value.startswith("-") and token.value not in _FIND_FLAGS and not _FIND_LEVEL.fullmatch(token.value):
            unknown = token.value
    if inner and unknown:
        raise Unanalysed(f"`{unknown}` is not analysed as an argument of `find` beside a command")
    return Wrapped(inner, own=True, moves=moves)


def _find_values(option: str) -> int:
    """How many words an option of ``find`` takes."""
    if option == "-fprintf":
        return 2
    return 1 if option in _FIND_VALUES or _FIND_NEWER.fullmatch(option) else 0


def _find_command(argv: Sequence[Token], start: int) -> tuple[list[Token], int]:
    """The command behind ``-exec``, and where it ends."""
    for position in range(start, len(argv)):
        token = argv[position]
        plus = token == Token("+") and argv[position - 1] == Token("{}")
        if (plus or token == Token(";")) and position > start:
            words = _fill(argv[start:position], "{}")
            return ([*words[:-1], SPREAD] if plus else words), position + 1
        if token.expansion and not _starts_plain(token):
            raise Unanalysed("an expansion may end the command of `find`")
    raise Unanalysed("a command of `find` is not complete")


def _starts_plain(token: Token) -> bool:
    """Whether an expansion can only become words that start like no option, action or end."""
    return not token.variable and bool(token.value) and token.value[0] not in "-;+!()"


def _bash(argv: Sequence[Token]) -> Wrapped:
    options = _Options(argv)
    position = 1
    while position < len(argv):
        token = argv[position]
        options.at = position
        if token.expansion and (token.variable or not token.value or token.value.startswith(("-", "+"))):
            raise options.unknown()
        if not token.value.startswith(("-", "+")):
            # A script: what it holds is the rule's matter.
            break
        if re.fullmatch(r"-[eux]*c", token.value):
            options.at = position + 1
            text = options.literal()
            if text.startswith(("-", "+")):
                options.at -= 1
                raise options.unknown()
            return Wrapped(text=text)
        if token.value == "-o" and argv[position + 1 : position + 2] == (Token("pipefail"),):
            position += 2
        elif token.value in ("--noprofile", "--norc") or re.fullmatch(r"-[eux]+", token.value):
            position += 1
        elif token.value in ("--version", "--help"):
            break
        else:
            raise options.unknown()
    return Wrapped(own=True)


_WRAPPERS: dict[str, Callable[[Sequence[Token]], Wrapped]] = {
    "bash": _bash,
    "/bin/bash": _bash,
    "/usr/bin/bash": _bash,
    "env": _env,
    "find": _find,
    "nice": _nice,
    "nohup": _nohup,
    "sudo": _sudo,
    "time": _time,
    "timeout": _timeout,
    "xargs": _xargs,
}

TRANSPARENT = frozenset({"env", "nice", "nohup", "time", "timeout"})
"""Wrappers that need no rule of their own: what they run must be allowed."""
