"""The lenient reading of a text that is not analysed: what denies may look at, as far as it can be found.

It never fails and guesses where it has to, so it may find commands that are none and miss others.
Only denies use it. Pure; writes no events.
"""

from __future__ import annotations

from itertools import pairwise

from runner.approvals.commands import ASSIGNMENT, SimpleCommand, suffixes
from runner.approvals.lexer import BODY, CONTROL, MAX_DEPTH, NEWLINE, REDIRECT, WORD, Frame, Lexeme, Token, lex
from runner.approvals.words import RESERVED, SHELLS, basename

_CHARACTERS = 64 * 1024
_CHARACTERS_IN_ALL = 4 * _CHARACTERS
_COMMANDS = 4096
_TEXTS_DEPTH = 8


def search_text(text: str) -> Search:
    """Search a text, the first 64 Ki characters of it, and the texts inside it up to four times as many in all."""
    search = Search()
    search.text(text[:_CHARACTERS], 0)
    return search


class Search:
    """Collects what denies may look at; guesses where it has to."""

    def __init__(self) -> None:
        self.commands: list[SimpleCommand] = []
        self.shadows: list[SimpleCommand] = []
        self.reads: list[str] = []
        self.writes: list[str] = []
        self._seen: set[str] = set()
        self._left = _CHARACTERS_IN_ALL

    def text(self, text: str, depth: int) -> None:
        """Search a text and the texts inside it."""
        # Wrappers and `eval` in a row would have the same text searched again and again.
        if depth <= _TEXTS_DEPTH and text not in self._seen and len(text) <= self._left:
            self._seen.add(text)
            self._left -= len(text)
            self.frame(lex(text, strict=False), depth)

    def frame(self, frame: Frame, depth: int) -> None:
        """Search the lexemes of a frame."""
        words: list[Token] = []
        lexemes = frame.lexemes
        for at, lexeme in enumerate(lexemes):
            for part in lexeme.parts:
                if depth <= MAX_DEPTH:
                    self.frame(part, depth + 1)
            before = lexemes[at - 1] if at else None
            if lexeme.kind in (CONTROL, NEWLINE):
                if lexeme.raw != "<<<":
                    self.found(words, depth)
                    words = []
            elif lexeme.kind == BODY:
                self.body(lexeme, lexemes[:at], depth)
            elif lexeme.kind == WORD and lexeme.raw in ("{", "}"):
                self.found(words, depth)
                words = []
            elif lexeme.kind == WORD and lexeme.token is not None:
                if before is not None and before.kind == REDIRECT and not before.raw.endswith("-"):
                    self.path(before.raw, lexeme.token)
                elif before is not None and before.raw == "<<<":
                    self.fed(words, lexeme.token.value, depth)
                elif words or not self.skipped(lexeme):
                    words.append(lexeme.token)
        self.found(words, depth)

    def skipped(self, lexeme: Lexeme) -> bool:
        """What may stand before a command."""
        return (lexeme.raw in RESERVED and lexeme.raw != "time") or ASSIGNMENT.match(lexeme.raw) is not None

    def path(self, operator: str, token: Token) -> None:
        """Note the path of a redirection."""
        if not token.expansion and token.value and token.value != "/dev/null":
            (self.reads if operator == "<" else self.writes).append(token.value)

    def body(self, body: Lexeme, before: list[Lexeme], depth: int) -> None:
        """A here-document that a shell reads holds commands."""
        names = {lexeme.token.value for lexeme in before[-64:] if lexeme.kind == WORD and lexeme.token}
        if any(basename(name) in SHELLS for name in names):
            self.text(body.raw, depth + 1)

    def fed(self, words: list[Token], text: str, depth: int) -> None:
        """So does a here-string."""
        if any(basename(word.value) in SHELLS for word in words):
            self.text(text, depth + 1)

    def found(self, words: list[Token], depth: int) -> None:
        """Note a command, and what it may run."""
        if not words:
            return
        candidates = [tuple(words), *suffixes(words)]
        for number, argv in enumerate(candidates):
            if len(self.commands) + len(self.shadows) >= _COMMANDS:
                return
            (self.shadows if number else self.commands).append(SimpleCommand(argv))
            self.inner(argv, depth)

    def inner(self, argv: tuple[Token, ...], depth: int) -> None:
        """Search the texts that a command is given."""
        name = basename(argv[0].value)
        values = [token.value for token in argv[1:]]
        if name == "eval":
            self.text(" ".join(values), depth + 1)
        elif name == "trap" and values:
            self.text(values[0], depth + 1)
        elif name == "alias":
            for value in values:
                self.text(value.partition("=")[2], depth + 1)
        elif name in SHELLS | {"su", "script"}:
            for before, value in pairwise(values):
                if before.startswith("-") and "c" in before:
                    self.text(value, depth + 1)
