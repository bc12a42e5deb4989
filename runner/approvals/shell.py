"""Analysis of shell texts: which commands would run, which files their redirections touch.

Two readings have to agree: the lexemes (``lexer``) and the tree of tree-sitter-bash (``tree``). A text
outside the part of bash that is understood is not analysed; it is then searched, as far as that goes,
for what denies look at. Analysis is bounded: 16 KiB, 50 ms of CPU, depth 50. tree-sitter is
imported with the first text. Pure; writes no events and has no effect on the prefix cache.
"""

from __future__ import annotations

import posixpath
from typing import TYPE_CHECKING

from runner.approvals.commands import ASSIGNMENT, SimpleCommand, expand, may_link, reads_code
from runner.approvals.conditional import check_conditional
from runner.approvals.lexer import (
    BODY,
    CONTROL,
    COPY,
    DELIMITER,
    DESCRIPTOR,
    MAX_BYTES,
    MAX_DEPTH,
    NEWLINE,
    REDIRECT,
    WORD,
    Frame,
    Lexeme,
    Token,
    Unanalysed,
    check_characters,
    lex,
)
from runner.approvals.redirections import OWN_PLACE, follow, is_own
from runner.approvals.search import search_text
from runner.approvals.tree import Clock, check_tree, parse
from runner.approvals.words import CLOSING_WORDS, OPENING_WORDS, RESERVED, STEERING_VARIABLES, basename
from runner.record import record

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Analysis", "SimpleCommand", "Token", "analyse"]


@record
class Analysis:
    """What a text would do.

    Attributes:
        analysed: Whether everything it runs is known.
        reason: Why it is not analysed, empty otherwise.
        commands: Simple commands that have to be allowed, in the order of the text. In a text that
            is not analysed: those that were found.
        shadows: Commands that only denies look at: wrappers, texts for other shells.
        assigned: Variables that change for the whole text, so that every command needs them in ``env``.
        reads: Paths of ``<``, absolute or relative to the workspace.
        writes: Paths of ``>`` and its like.
    """

    analysed: bool
    reason: str = ""
    commands: tuple[SimpleCommand, ...] = ()
    shadows: tuple[SimpleCommand, ...] = ()
    assigned: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


def analyse(text: str) -> Analysis:
    """Say what bash would run for ``bash --noprofile --norc -c TEXT``. Never raises."""
    clock = Clock()
    findings = _Findings(clock)
    try:
        findings.read_text(text, bases=("",), depth=0)
        findings.finish()
    except Unanalysed as verdict:
        return _searched(text, str(verdict))
    return Analysis(
        not findings.doubt,
        findings.doubt,
        tuple(findings.commands),
        tuple(findings.shadows),
        tuple(findings.assigned),
        tuple(findings.reads),
        tuple(findings.writes),
    )


def _searched(text: str, reason: str) -> Analysis:
    """What can be found in a text that is not analysed."""
    search = search_text(text)
    return Analysis(
        False,
        reason,
        tuple(search.commands),
        tuple(search.shadows),
        (),
        tuple(dict.fromkeys(search.reads)),
        tuple(dict.fromkeys(search.writes)),
    )


def is_exempt(name: str) -> bool:
    """Whether a variable may change for the text without ``env``: lower case, and no proxy setting."""
    return name.islower() and not name.endswith("_proxy")


class _Level:
    """An open group or subshell.

    Attributes:
        scope: Whether it is a shell of its own, in which a leading ``cd`` is followed.
        outside: Possible directories, relative to the workspace, at its start.
        bases: Possible directories now.
        chained: The ``&&`` chain of a leading ``cd`` is still going on.
        first: Number of commands found when it was opened.
        pipe: Numbers of commands and of opened files found when the current pipeline began.
        piped: That has more than one part.
        fed: From which command on the pipeline reads a here-document, None for none.
        feeds: Whether something in it reads one.
    """

    __slots__ = ("bases", "chained", "fed", "feeds", "first", "outside", "pipe", "piped", "scope")

    def __init__(self, bases: tuple[str, ...], count: int, opened: int, *, scope: bool) -> None:
        self.scope = scope
        self.outside = bases
        self.bases = bases
        self.chained = False
        self.first = count
        self.pipe = (count, opened)
        self.piped = False
        self.fed: int | None = None
        self.feeds = False


class _Findings:
    """Collects what a text runs; the strict reading of its lexemes."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.commands: list[SimpleCommand] = []
        self.shadows: list[SimpleCommand] = []
        self.assigned: list[str] = []
        self.reads: list[str] = []
        self.writes: list[str] = []
        self.moved = False
        self.relative = False
        self.numbers = False
        self.doubt = ""
        self.links: list[tuple[int, str]] = []
        self.opened: list[int] = []
        self.repeats = False
        self.bases: tuple[str, ...] = ("",)

    # --- Sink -----------------------------------------------------------------------------------

    def run(self, command: SimpleCommand) -> None:
        """Note a command that has to be allowed."""
        name = command.name
        self.relative |= "/" in name and not name.startswith("/")
        self.note_link(command, len(self.commands))
        self.commands.append(command)

    def wrap(self, command: SimpleCommand) -> None:
        """Note a command for denies."""
        # The program that may run it has been noted.
        self.note_link(command, len(self.commands) - 1)
        self.shadows.append(command)

    def note_link(self, command: SimpleCommand, at: int) -> None:
        """Note a command, as the one of number ``at``, if it may change where a path leads."""
        if may_link(command.argv):
            self.links.append((at, basename(command.name)))

    def assign(self, names: Sequence[str]) -> None:
        """Note variables that change for the whole text."""
        self.assigned += [name for name in names if not is_exempt(name) and name not in self.assigned]

    def change_directory(self) -> None:
        """Note a ``cd`` that is not followed."""
        self.moved = True

    def text(self, text: str, *, env: tuple[str, ...], lost: bool, depth: int) -> None:
        """Read the text of a ``bash -c``."""
        first = len(self.commands)
        self.moved |= lost
        self.repeats |= any(command.name in ("find", "xargs") for command in self.commands)
        bases = self.bases
        self.read_text(text, bases=bases, depth=depth)
        self.bases = bases
        self.add_env(env, first, len(self.commands))

    def add_env(self, names: Sequence[str], first: int, end: int) -> None:
        """Note variables that some of the commands get from around them."""
        if names:
            self.commands[first:end] = [
                command._replace(env=(*names, *command.env)) for command in self.commands[first:end]
            ]

    # --- texts ----------------------------------------------------------------------------------

    def read_text(self, text: str, *, bases: tuple[str, ...], depth: int) -> None:
        """Read a whole text that starts in one of the directories ``bases``."""
        if depth > MAX_DEPTH:
            raise Unanalysed(f"it is nested deeper than {MAX_DEPTH}")
        if len(text) > MAX_BYTES or (not text.isascii() and len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES):
            raise Unanalysed(f"it is longer than {MAX_BYTES // 1024} KiB")
        check_characters(text)
        frame = lex(text)
        root = parse(text, self.clock)
        if root is None:
            raise Unanalysed("its analysis takes too long")
        check_tree(root, frame, self.clock)
        _Reader(self, frame, bases, depth).read()

    def finish(self) -> None:
        """Check what depends on the whole text."""
        if self.moved and (self.relative or any(not path.startswith("/") for path in (*self.reads, *self.writes))):
            raise Unanalysed("a `cd` that is not `cd DIRECTORY &&` at the start makes relative paths uncertain")
        steering = {*self.assigned, *(name for command in self.commands for name in command.env)} & STEERING_VARIABLES
        if steering:
            raise Unanalysed(f"{min(steering)} changes what bash makes of a text")
        if self.numbers and "IFS" in self.assigned:
            raise Unanalysed("a number may be split into words where IFS changes")
        if self.relative and any(command.moved and "/" in command.name for command in self.commands):
            raise Unanalysed("a program is named by a relative path in another directory")
        self.check_order(0, 0, at_once=self.repeats)

    def check_order(self, command: int, opened: int, *, at_once: bool) -> None:
        """Doubt a text in which a link may be made before a file is opened.

        Args:
            command: The first command to look at.
            opened: The first opened file to look at.
            at_once: The order of the text is not the order in which it runs.
        """
        for at, name in self.links:
            if at >= command and any(at_once or at < before for before in self.opened[opened:]):
                self.doubt = self.doubt or (
                    f"`{name}` may change where a redirection leads; write the file in a call of its own"
                )

    def redirect(self, operator: str, target: Lexeme, bases: tuple[str, ...], before: int) -> None:
        """Note the file of a redirection that is opened when ``before`` commands have run."""
        token = target.token
        if token is None or token.expansion or not token.value:
            raise Unanalysed("the target of a redirection is not a literal path")
        path = token.value
        if path == "/dev/null":
            return
        paths = self.reads if operator == "<" else self.writes
        if operator != "<":
            self.opened.append(before)
        for base in bases:
            joined = posixpath.join(base, path)
            if joined.startswith("/") and is_own(follow(joined)):
                self.doubt = self.doubt or OWN_PLACE
            if joined not in paths:
                paths.append(joined)


class _Reader:
    """Reads the lexemes of one frame in order, as bash would."""

    def __init__(self, findings: _Findings, frame: Frame, bases: tuple[str, ...], depth: int) -> None:
        self.findings = findings
        self.lexemes = frame.lexemes
        self.depth = depth
        self.at = 0
        self.levels = [_Level(bases, len(findings.commands), len(findings.opened), scope=True)]
        self.words: list[Lexeme] = []
        self.inside: dict[int, tuple[int, int]] = {}
        self.redirections: list[tuple[str, Lexeme]] = []
        self.here = False
        self.closed = False
        self.closed_from = 0
        self.needed = False
        self.leading: int | None = None

    # --- position -------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a command, or the end of a compound one, stands before this place."""
        return bool(self.words or self.redirections or self.here or self.closed)

    def previous(self) -> Lexeme | None:
        """The last lexeme that is not a newline or the text of a here-document."""
        for at in range(self.at - 1, -1, -1):
            if self.lexemes[at].kind not in (NEWLINE, BODY):
                return self.lexemes[at]
        return None

    def separated(self) -> bool:
        """Whether ``;``, ``&`` or a newline ended the last command."""
        if self.at == 0 or self.busy:
            return False
        before = self.lexemes[self.at - 1]
        return before.kind == NEWLINE or before.raw in (";", "&", ";;")

    def open(self, *, scope: bool) -> None:
        """Enter a group or subshell."""
        if len(self.levels) + self.depth > MAX_DEPTH:
            raise Unanalysed(f"it is nested deeper than {MAX_DEPTH}")
        count, opened = len(self.findings.commands), len(self.findings.opened)
        self.levels.append(_Level(self.levels[-1].bases, count, opened, scope=scope))
        if scope:
            self.find_leading(self.at + 1)

    def close(self) -> None:
        """Leave a group or subshell; what fed a here-document to it feeds what follows."""
        self.end_pipeline()
        level = self.levels.pop()
        if not self.levels:
            raise Unanalysed("it closes what it did not open")
        if level.feeds:
            self.feed(len(self.findings.commands))
        self.closed = True
        self.closed_from = level.first

    # --- reading --------------------------------------------------------------------------------

    def read(self) -> None:
        """Read the whole frame."""
        self.find_leading(0)
        while self.at < len(self.lexemes):
            self.findings.clock.tick()
            lexeme = self.lexemes[self.at]
            if lexeme.kind == WORD:
                self.read_word(lexeme)
            elif lexeme.kind == CONTROL:
                self.read_control(lexeme)
            elif lexeme.kind == NEWLINE:
                self.read_newline()
            elif lexeme.kind == REDIRECT:
                self.read_redirection(lexeme)
            elif lexeme.kind == DESCRIPTOR:
                self.at += 1
                if self.at >= len(self.lexemes) or self.lexemes[self.at].kind != REDIRECT:
                    raise Unanalysed("a descriptor stands without a redirection")
            elif lexeme.kind == BODY:
                self.at += 1
            else:
                raise Unanalysed("a redirection is not complete")
        if self.needed or len(self.levels) != 1:
            raise Unanalysed("it is not complete")
        self.end_command()
        self.end_pipeline()

    def find_leading(self, start: int) -> None:
        """Look for ``cd LITERAL &&`` at the start of a scope."""
        while start < len(self.lexemes) and self.lexemes[start].kind == NEWLINE:
            start += 1
        words = self.lexemes[start : start + 3]
        if len(words) < 3 or words[0].raw != "cd" or words[1].kind != WORD or words[2].raw != "&&":
            return
        token = words[1].token
        if token is None or token.expansion or not token.value or token.value.startswith("-"):
            return
        # bash takes `a/..` back by name, the kernel by what `a` leads to; so is a `..` behind an earlier `cd a`.
        parts = [part for part in token.value.split("/") if part not in ("", ".")]
        while parts and parts[0] == ".." and not token.value.startswith("/") and self.levels[-1].bases == ("",):
            parts.pop(0)
        if ".." in parts:
            return
        self.leading = start

    def read_word(self, lexeme: Lexeme) -> None:
        """Read a word, or the compound command that a keyword starts."""
        if lexeme.role == "keyword":
            self.read_keyword(lexeme)
            return
        if lexeme.role == "pattern":
            self.read_pattern(lexeme)
            return
        if lexeme.role != "word" or self.closed:
            raise Unanalysed(f"`{lexeme.raw}` stands where no word is expected")
        if not self.words and lexeme.raw in RESERVED and lexeme.raw != "time":
            raise Unanalysed(f"the reserved word `{lexeme.raw}` stands where a command is needed")
        before = len(self.findings.commands)
        self.read_parts(lexeme)
        self.inside[len(self.words)] = (before, len(self.findings.commands))
        self.words.append(lexeme)
        self.needed = False
        self.at += 1

    def read_parts(self, lexeme: Lexeme) -> None:
        """Read the substitutions inside a word."""
        for part in lexeme.parts:
            before = len(self.findings.commands)
            _Reader(self.findings, part, self.levels[-1].bases, self.depth + len(self.levels)).read()
            if len(self.findings.commands) == before:
                raise Unanalysed("a substitution runs no command")

    def read_newline(self) -> None:
        """A newline ends a command unless an operator asks for another one."""
        if self.busy:
            self.end_command()
            self.end_pipeline()
            self.end_chain()
        self.at += 1

    def read_control(self, lexeme: Lexeme) -> None:
        """Read a control operator."""
        operator = lexeme.raw
        if lexeme.role == "pattern":
            self.read_pattern(lexeme)
            return
        if operator == "(":
            self.begin_compound(lexeme)
            self.open(scope=True)
            self.at += 1
            return
        if operator == ")":
            if self.needed or not (self.busy or self.separated()) or not self.levels[-1].scope:
                raise Unanalysed("a parenthesis stands where none is expected")
            self.end_command()
            self.close()
            self.at += 1
            return
        if not self.busy and not (operator == ";;" and not self.needed):
            raise Unanalysed(f"`{operator}` follows no command")
        self.end_command()
        if operator in ("|", "|&"):
            self.levels[-1].piped = True
        else:
            self.end_pipeline()
        self.findings.repeats |= operator == "&"
        if operator in (";", "&", "||", ";;"):
            self.end_chain()
        self.needed = operator in ("|", "|&", "&&", "||")
        self.at += 1

    def read_redirection(self, lexeme: Lexeme) -> None:
        """Read a redirection operator and its target."""
        self.at += 1
        operator = lexeme.raw
        if operator in (">&-", "<&-"):
            self.redirections.append(("", lexeme))
            return
        target = self.lexemes[self.at] if self.at < len(self.lexemes) else None
        kind = {">&": COPY, "<&": COPY, "<<": DELIMITER}.get(operator, WORD)
        if target is None or target.kind != kind:
            raise Unanalysed("a redirection is not complete")
        self.at += 1
        self.needed = False
        if operator == "<<":
            self.here = True
        elif operator in (">&", "<&"):
            self.redirections.append(("", target))
        else:
            self.redirections.append((operator, target))

    # --- compound commands ----------------------------------------------------------------------

    def begin_compound(self, lexeme: Lexeme) -> None:
        """Demand that a compound command may start here."""
        if self.busy:
            raise Unanalysed(f"`{lexeme.raw}` stands where no command may start")
        self.needed = False

    def read_keyword(self, lexeme: Lexeme) -> None:
        """Read a keyword."""
        keyword = lexeme.raw
        self.at += 1
        following = self.lexemes[self.at] if self.at < len(self.lexemes) else None
        if keyword in ("if", "while", "{", "!"):
            self.begin_compound(lexeme)
            self.findings.repeats |= keyword == "while"
            if keyword == "!":
                if following is None or following.kind == NEWLINE:
                    raise Unanalysed("`!` stands without a command")
            else:
                self.open(scope=False)
            self.needed = True
        elif keyword in ("for", "case"):
            self.begin_compound(lexeme)
            self.findings.repeats |= keyword == "for"
            self.open(scope=False)
            self.read_for() if keyword == "for" else self.read_case()
        elif keyword == "[[":
            self.begin_compound(lexeme)
            self.read_conditional()
        elif keyword in OPENING_WORDS or keyword in CLOSING_WORDS:
            self.at -= 1
            last = self.previous()
            empty = keyword == "esac" and last is not None and last.raw == "in"
            if self.needed or not (self.separated() or empty):
                raise Unanalysed(f"`{keyword}` stands where no keyword is expected")
            self.at += 1
            if keyword in CLOSING_WORDS:
                self.close()
            else:
                self.end_pipeline()
                self.needed = True
        else:
            raise Unanalysed(f"`{keyword}` stands where no keyword is expected")

    def read_for(self) -> None:
        """``for NAME in WORDS``, up to ``do``."""
        header = self.lexemes[self.at : self.at + 2]
        if [each.role for each in header] != ["name", "keyword"] or header[1].raw != "in":
            raise Unanalysed("a `for` is not `for NAME in WORDS`")
        self.findings.assign([header[0].raw])
        self.at += 2
        while self.at < len(self.lexemes) and self.lexemes[self.at].role == "word":
            self.read_parts(self.lexemes[self.at])
            self.at += 1
        end = self.lexemes[self.at] if self.at < len(self.lexemes) else None
        if end is None or not (end.kind == NEWLINE or end.raw == ";"):
            raise Unanalysed("a `for` is not `for NAME in WORDS`")
        self.at += 1
        self.skip_newlines()
        if self.at >= len(self.lexemes) or self.lexemes[self.at].raw != "do":
            raise Unanalysed("a `for` is not followed by `do`")

    def read_case(self) -> None:
        """``case WORD in``; the patterns follow."""
        header = self.lexemes[self.at : self.at + 2]
        if [each.role for each in header] != ["word", "keyword"] or header[1].raw != "in":
            raise Unanalysed("a `case` is not `case WORD in`")
        self.read_parts(header[0])
        self.at += 2

    def read_pattern(self, lexeme: Lexeme) -> None:
        """A part of ``PATTERN | PATTERN )``."""
        last = self.previous()
        if self.busy or last is None:
            raise Unanalysed(f"`{lexeme.raw}` stands where no pattern is expected")
        start = last.raw == ";;" or (last.role == "keyword" and last.raw == "in")
        within = last.role == "pattern"
        word = lexeme.kind == WORD
        after_word = within and last.kind == WORD
        expected = {
            True: start or (within and last.raw in ("(", "|")),
            False: start if lexeme.raw == "(" else after_word,
        }[word]
        if not expected or (within and self.lexemes[self.at - 1] is not last):
            raise Unanalysed(f"`{lexeme.raw}` stands where no pattern is expected")
        self.read_parts(lexeme)
        self.at += 1

    def read_conditional(self) -> None:
        """``[[ … ]]``."""
        start = self.at - 1
        while self.at < len(self.lexemes) and not (
            self.lexemes[self.at].role == "keyword" and self.lexemes[self.at].raw == "]]"
        ):
            self.read_parts(self.lexemes[self.at])
            self.at += 1
        self.at += 1
        inside = self.lexemes[start : self.at]
        check_conditional(inside[1:-1])
        self.findings.run(SimpleCommand(tuple(each.token or Token(each.raw) for each in inside)))
        self.closed = True
        self.closed_from = len(self.findings.commands) - 1

    def skip_newlines(self) -> None:
        """Go on to the next lexeme that is not a newline."""
        while self.at < len(self.lexemes) and self.lexemes[self.at].kind == NEWLINE:
            self.at += 1

    # --- ends -----------------------------------------------------------------------------------

    def end_command(self) -> None:
        """Note the command that ends here."""
        level = self.levels[-1]
        words, redirections = self.words, self.redirections
        first = self.closed_from if self.closed else len(self.findings.commands)
        leading = bool(words) and self.leading is not None and words[0] is self.lexemes[self.leading]
        if words:
            self.words = []
            self.note(words, level.bases, leading=leading)
        if self.here:
            self.feed(first)
        for operator, target in redirections:
            if operator:
                self.findings.redirect(operator, target, level.bases, first)
        if redirections:
            self.redirections = []
        if leading:
            self.follow(words[1])
        self.here = self.closed = False

    def feed(self, first: int) -> None:
        """A here-document reaches the commands of this pipeline from the command ``first`` on."""
        level = self.levels[-1]
        level.feeds = True
        level.fed = first if level.fed is None else min(first, level.fed)

    def note(self, words: list[Lexeme], bases: tuple[str, ...], *, leading: bool) -> None:
        """Note the assignments and the command of one run of words."""
        names = []
        for lexeme in words:
            match = ASSIGNMENT.match(lexeme.raw)
            if match is None:
                break
            names.append(match[1])
        argv = [lexeme.token for lexeme in words[len(names) :] if lexeme.token is not None]
        if not argv:
            self.findings.assign(names)
            return
        self.findings.numbers |= any(token.variable and token.single for token in argv)
        # What runs inside a later assignment already gets the earlier ones.
        for number in range(1, len(names)):
            self.findings.add_env(names[:number], *self.inside[number])
        self.findings.bases = bases
        expand(
            argv,
            self.findings,
            env=tuple(names),
            moved=bases != ("",),
            leading=leading,
            depth=self.depth + len(self.levels) - 1,
        )

    def follow(self, directory: Lexeme) -> None:
        """The leading ``cd`` took place: its chain runs there."""
        level = self.levels[-1]
        assert directory.token is not None
        target = directory.token.value
        level.bases = tuple(dict.fromkeys(posixpath.join(base, target) for base in level.outside))
        level.chained = True

    def end_chain(self) -> None:
        """Behind the chain of a leading ``cd`` it is open whether the ``cd`` took place."""
        level = self.levels[-1]
        if level.chained:
            level.chained = False
            level.bases = tuple(dict.fromkeys((*level.bases, *level.outside)))

    def end_pipeline(self) -> None:
        """No interpreter may read a here-document, and what runs at once may not make links for the rest of it."""
        level = self.levels[-1]
        if level.piped:
            self.findings.check_order(*level.pipe, at_once=True)
        level.pipe = (len(self.findings.commands), len(self.findings.opened))
        level.piped = False
        if level.fed is not None:
            for command in self.findings.commands[level.fed :]:
                if reads_code(command.argv):
                    raise Unanalysed(f"a here-document is given to `{basename(command.name)}`")
            level.fed = None
