"""What may stand between ``[[`` and ``]]``.

Operators are read by bash while it parses, so an expansion is never one. What evaluates its operands
(``-v``, ``-R``, ``-eq`` and its like) is not analysed. Pure; writes no events.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from runner.approvals.lexer import CONTROL, REDIRECT, WORD, Unanalysed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.approvals.lexer import Lexeme

_UNARY = re.compile(r"-[abcdefghkprstuwxGLNOSzno]")
_BINARY = frozenset({"=", "==", "!=", "=~", "<", ">", "-nt", "-ot", "-ef"})
_MAX_NESTING = 20


def check_conditional(lexemes: Sequence[Lexeme]) -> None:
    """Demand a conditional expression that runs nothing but its substitutions.

    Raises:
        Unanalysed: It is something else.
    """
    reader = _Conditional(lexemes)
    reader.alternatives(0)
    if reader.at != len(lexemes):
        raise reader.unknown()


class _Conditional:
    """Reads the expression by descent: alternatives of conjunctions of terms."""

    def __init__(self, lexemes: Sequence[Lexeme]) -> None:
        self.lexemes = lexemes
        self.at = 0

    def raw(self, ahead: int = 0) -> str:
        """What is written at this place, empty behind the end."""
        at = self.at + ahead
        return self.lexemes[at].raw if at < len(self.lexemes) else ""

    def unknown(self) -> Unanalysed:
        """The error for this place."""
        return Unanalysed(f"`{self.raw() or ']]'}` is not analysed inside `[[`")

    def alternatives(self, nesting: int) -> None:
        """``A || B``."""
        self.conjunction(nesting)
        while self.raw() == "||":
            self.at += 1
            self.conjunction(nesting)

    def conjunction(self, nesting: int) -> None:
        """``A && B``."""
        self.term(nesting)
        while self.raw() == "&&":
            self.at += 1
            self.term(nesting)

    def term(self, nesting: int) -> None:
        """One test, a negation, or an expression in parentheses."""
        while self.raw() == "!":
            self.at += 1
        if self.raw() == "(" and self.lexemes[self.at].kind == CONTROL:
            if nesting >= _MAX_NESTING:
                raise self.unknown()
            self.at += 1
            self.alternatives(nesting + 1)
            if self.raw() != ")":
                raise self.unknown()
            self.at += 1
            return
        if _UNARY.fullmatch(self.raw()):
            self.at += 1
            self.operand()
            return
        self.operand()
        if self.is_binary():
            self.at += 1
            self.operand()

    def is_binary(self) -> bool:
        """Whether a known operator with two operands stands here."""
        if self.raw() not in _BINARY:
            return False
        return self.lexemes[self.at].kind == (REDIRECT if self.raw() in ("<", ">") else WORD)

    def operand(self) -> None:
        """A word that is no operator."""
        lexeme = self.lexemes[self.at] if self.at < len(self.lexemes) else None
        if lexeme is None or lexeme.kind != WORD or lexeme.raw == "!" or lexeme.raw.startswith("-"):
            # A word with a dash may be an operator that evaluates; write it in quotes.
            raise self.unknown()
        self.at += 1
