"""Bytes to words: the tokens of a shell text as bash sees them, for the part of bash that is analysed.

Strict by default: whatever is not known to mean one thing raises ``Unanalysed``. The lenient reading
never raises and goes on with a guess; it only feeds the search for denies. Offsets are byte offsets
into the UTF-8 text, as tree-sitter counts them. Pure; writes no events.
"""

from __future__ import annotations

import re
import unicodedata
from typing import NamedTuple

MAX_BYTES = 16 * 1024
"""Longest text that is analysed."""

MAX_DEPTH = 50
"""Deepest nesting of substitutions, groups and quoted texts that is analysed."""


class Unanalysed(Exception):  # noqa: N818  # a verdict on the text, not an error of the program
    """The text, or a part of it, is not one of those whose meaning is known. The message says why."""


class Token(NamedTuple):
    """One word of a command after quote removal.

    Attributes:
        value: The text; of an expansion only the literal start before it.
        expansion: It holds a ``$``, a backquote, an unquoted glob, a leading ``~`` or a brace list.
        variable: It holds an unquoted ``$`` or backquote, or ``"$@"``, so that it may become several words.
        single: It is exactly one word, whatever it expands to.
        digits: It is ``$!``, which is a number or nothing.
    """

    value: str
    expansion: bool = False
    variable: bool = False
    single: bool = True
    digits: bool = False


SPREAD = Token("", expansion=True, variable=True, single=False)
"""Any number of words nobody knows, as ``xargs`` appends them."""

WORD, CONTROL, NEWLINE, REDIRECT, DESCRIPTOR, COPY, DELIMITER, BODY = range(8)
"""Kinds of lexemes. COPY is the descriptor after ``>&``; DELIMITER and BODY belong to a here-document."""


class Lexeme:
    """One token of the text.

    ``raw`` is what was written, ``token`` and ``parts`` (the substitutions inside) belong to words.
    ``role`` is set by whoever reads the lexemes: ``keyword`` or ``pattern``.
    """

    __slots__ = ("end", "kind", "parts", "raw", "role", "start", "token")

    def __init__(self, kind: int, start: int, end: int, raw: str, token: Token | None = None) -> None:
        self.kind = kind
        self.start = start
        self.end = end
        self.raw = raw
        self.token = token
        self.parts: list[Frame] = []
        self.role = ""


class Frame:
    """The lexemes between ``start`` and ``end``: a whole text, or the inside of one substitution."""

    __slots__ = ("end", "lexemes", "start")

    def __init__(self, start: int, end: int, lexemes: list[Lexeme]) -> None:
        self.start = start
        self.end = end
        self.lexemes = lexemes


_FORBIDDEN_ASCII = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_FORBIDDEN_CATEGORIES = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp", "Zs"})

_CONTROL = re.compile(r"&&|\|\||\|&|;;|[;&|()]")
_REDIRECT = re.compile(r"&>>|&>|>>|>&|>\||>|<&|<")
_REFUSED_OPERATOR = re.compile(r";;&|;&|<<<|<<-|<>|<\(|>\(|\(\(")
_COPY = re.compile(r"[0-9]{1,2}(?=[ \t\n;&|()]|$)")
_HEREDOC = re.compile(r"[ \t]*(?:([A-Za-z0-9_]+)|'([A-Za-z0-9_]+)'|\"([A-Za-z0-9_]+)\")(?=[ \t\n])")
_LENIENT_HEREDOC = re.compile(r"-?[ \t]*(\\?)(['\"]?)([^\s'\"<>|&;()]+)['\"]?")
_DIGITS = re.compile(r"[0-9]+(?=[<>])")
_PLAIN = re.compile(r"[A-Za-z0-9_\-./:,=+@%^\]#!}\x80-\xff]+")
_QUOTED = re.compile(r"[^\"`$\\]+")
_ESCAPED = re.compile(r"((?:[^'\\]|\\.)*)('?)", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{1,2})|u([0-9a-fA-F]{1,4})|([0-7]{1,3})|(.))", re.DOTALL)
_NAME = re.compile(r"\$(?:[A-Za-z_][A-Za-z0-9_]*|[0-9@*?$!#\-])")
_BRACED = re.compile(r"\$\{(#?)(?:[A-Za-z_][A-Za-z0-9_]*|[0-9]+)\}")
_BEHIND_DOLLAR = '" |).,:;/=+%^'
"""What leaves a ``$`` alone in double quotes, as in ``"a$|b$"``."""
_ARITHMETIC = frozenset("0123456789+-*/% \t")
_NAMED_DESCRIPTOR = re.compile(r"\{[A-Za-z_][A-Za-z0-9_]*\}")


def check_characters(text: str) -> None:
    """Refuse control, format and separator characters other than blank, tab and newline.

    Raises:
        Unanalysed: The text holds one of them, or cannot be written as UTF-8.
    """
    found = _FORBIDDEN_ASCII.search(text)
    if found:
        raise Unanalysed(f"it holds the control character U+{ord(found[0]):04X}")
    if not text.isascii():
        for character in set(text):
            if character > "\x7f" and unicodedata.category(character) in _FORBIDDEN_CATEGORIES:
                raise Unanalysed(f"it holds the invisible character U+{ord(character):04X}")


def lex(text: str, *, strict: bool = True) -> Frame:
    """Cut a text into lexemes.

    Args:
        text: A shell text.
        strict: Raise at the first thing that is not known to mean one thing.

    Raises:
        Unanalysed: Only if ``strict``.
    """
    # One character of Latin-1 a byte: offsets are byte offsets, and the patterns stay simple.
    source = text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("latin-1")
    lexer = _Lexer(source, strict=strict, ascii_only=source is text)
    lexemes, end = lexer.lexemes(0, len(source), closer="", depth=0)
    return Frame(0, end, lexemes)


def _unescape(match: re.Match[str]) -> str:
    """What an escape of ``$'…'`` stands for; only the search for denies asks."""
    if match[4]:
        return {"n": "\n", "t": "\t", "r": "\r", "e": "\x1b"}.get(match[4], match[4])
    code = int(match[3], 8) if match[3] else int(match[1] or match[2], 16)
    return chr(code % 0x100)


class _Word:
    """A word while it is being read."""

    __slots__ = ("brace", "expansion", "parts", "pieces", "prefix", "single", "variable")

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.prefix: str | None = None
        self.expansion = False
        self.variable = False
        self.single = True
        self.brace: tuple[int, str] | None = None
        self.parts: list[Frame] = []

    def expand(self, *, variable: bool = False, single: bool = True) -> None:
        """Note that what follows is not literal."""
        if not self.expansion:
            self.expansion = True
            self.prefix = "".join(self.pieces)
        self.variable |= variable
        self.single &= single


class _Lexer:
    """Reads one text. Every method takes and returns offsets."""

    def __init__(self, source: str, *, strict: bool, ascii_only: bool) -> None:
        self.source = source
        self.strict = strict
        self.ascii_only = ascii_only

    def bad(self, reason: str) -> None:
        """Give up on the text; the lenient reading goes on."""
        if self.strict:
            raise Unanalysed(reason)

    def text(self, piece: str) -> str:
        """A piece of the source as it was before it was cut into bytes."""
        return piece if self.ascii_only else piece.encode("latin-1").decode("utf-8", "replace")

    # --- between words ------------------------------------------------------------------------

    def lexemes(self, start: int, end: int, *, closer: str, depth: int) -> tuple[list[Lexeme], int]:
        """Read lexemes up to ``end``, or to the ``)`` that closes the substitution they stand in.

        Returns:
            The lexemes and where they end; the closer is not among them.
        """
        if depth > MAX_DEPTH:
            self.bad(f"it is nested deeper than {MAX_DEPTH}")
            return [], end
        source = self.source
        found: list[Lexeme] = []
        pending: list[tuple[str, bool]] = []
        parentheses = 0
        position = start
        while position < end:
            character = source[position]
            if character in " \t":
                position += 1
                continue
            if character == "\n":
                found.append(Lexeme(NEWLINE, position, position + 1, "\n"))
                position += 1
                while pending:
                    position = self.here_document(found, position, end, *pending.pop(0))
                continue
            if character == "\\" and source.startswith("\n", position + 1) and position + 1 < end:
                self.continuation(position, end)
                position += 2
                continue
            if character == "#":
                self.bad("it holds a comment")
                newline = source.find("\n", position, end)
                position = end if newline < 0 else newline
                continue
            if character == ")" and closer and not parentheses:
                self.unfinished(pending)
                return found, position
            if character in ";&|()<>":
                parentheses += (character == "(") - (character == ")")
                position = self.operator(found, position, end, pending, nested=depth > 0)
                continue
            digits = _DIGITS.match(source, position, end)
            if digits:
                if digits.end() - position > 2:
                    self.bad("a descriptor is too large")
                found.append(Lexeme(DESCRIPTOR, position, digits.end(), digits[0]))
                position = digits.end()
                continue
            lexeme, position = self.word(position, end, depth)
            found.append(lexeme)
        if closer:
            self.bad("a substitution is not closed")
        self.unfinished(pending)
        return found, end

    def unfinished(self, pending: list[tuple[str, bool]]) -> None:
        """A here-document whose text never came."""
        if pending:
            self.bad("a here-document has no text")

    def continuation(self, position: int, end: int) -> None:
        """A backslash before a newline, outside of words."""
        before = self.source[position - 1] if position else ""
        after = self.source[position + 2] if position + 2 < end else ""
        if before not in (" ", "\t") and after not in (" ", "\t"):
            self.bad("a line is continued without a blank beside the backslash")

    def operator(
        self, found: list[Lexeme], position: int, end: int, pending: list[tuple[str, bool]], *, nested: bool
    ) -> int:
        """Read a control or redirection operator."""
        source = self.source
        refused = _REFUSED_OPERATOR.match(source, position, end)
        if refused:
            self.bad(f"`{refused[0]}` is not analysed")
        if source.startswith("<<", position):
            return self.here_operator(found, position, end, pending, nested=nested)
        match = _REDIRECT.match(source, position, end)
        if match is None:
            match = _CONTROL.match(source, position, end)
            assert match is not None
            found.append(Lexeme(CONTROL, position, match.end(), match[0]))
            return match.end()
        operator = match[0]
        position = match.end()
        if operator not in (">&", "<&"):
            found.append(Lexeme(REDIRECT, match.start(), position, operator))
            return position
        if source.startswith("-", position):
            found.append(Lexeme(REDIRECT, match.start(), position + 1, f"{operator}-"))
            position += 1
            if position < end and source[position] not in " \t\n;&|()":
                self.bad(f"`{operator}-` touches a word")
            return position
        found.append(Lexeme(REDIRECT, match.start(), position, operator))
        copy = _COPY.match(source, position, end)
        if copy is None:
            self.bad(f"`{operator}` is followed by something else than a descriptor")
            return position
        found.append(Lexeme(COPY, position, copy.end(), copy[0]))
        return copy.end()

    # --- here-documents -----------------------------------------------------------------------

    def here_operator(
        self, found: list[Lexeme], position: int, end: int, pending: list[tuple[str, bool]], *, nested: bool
    ) -> int:
        """Read ``<<`` and its delimiter; the text follows after the next newline."""
        source = self.source
        if nested or pending:
            self.bad("a here-document stands in a substitution or beside another one")
        if found and found[-1].kind == DESCRIPTOR:
            self.bad("a here-document has a descriptor")
        if self.strict:
            match = _HEREDOC.match(source, position + 2, end)
            if match is None:
                raise Unanalysed("the delimiter of a here-document is not a plain word followed by a blank or newline")
            found.append(Lexeme(REDIRECT, position, position + 2, "<<"))
            number = next(index for index in (1, 2, 3) if match[index])
            start = match.start(number) - (number > 1)
            found.append(Lexeme(DELIMITER, start, match.end(), source[start : match.end()]))
            pending.append((match[number], number > 1))
            return match.end()
        if source.startswith("<<<", position):
            found.append(Lexeme(CONTROL, position, position + 3, "<<<"))
            return position + 3
        match = _LENIENT_HEREDOC.match(source, position + 2, end)
        if match is None:
            return position + 2
        found.append(Lexeme(REDIRECT, position, position + 2, "<<"))
        found.append(Lexeme(DELIMITER, match.start(3), match.end(3), match[3]))
        pending.append((match[3], bool(match[1] or match[2])))
        return match.end()

    def here_document(self, found: list[Lexeme], position: int, end: int, delimiter: str, quoted: bool) -> int:
        """Read the text of a here-document and its end line; the newline after that stays."""
        source = self.source
        start = position
        while True:
            newline = source.find("\n", position, end)
            line_end = end if newline < 0 else newline
            line = source[position:line_end]
            if (line if self.strict else line.strip()) == delimiter:
                break
            if newline < 0:
                self.bad("the end line of a here-document is missing")
                position = line_end
                break
            position = newline + 1
        body = Lexeme(BODY, position, line_end, source[start:position])
        if not quoted and any(character in body.raw for character in "$`\\"):
            self.bad("a here-document without quotes holds `$`, a backquote or a backslash")
            word = _Word()
            self.quoted(word, start, position, 1, closer="")
            body.parts = word.parts
        found.append(body)
        return line_end

    # --- words --------------------------------------------------------------------------------

    def word(self, start: int, end: int, depth: int) -> tuple[Lexeme, int]:
        """Read one word."""
        source = self.source
        word = _Word()
        position = start
        while position < end:
            plain = _PLAIN.match(source, position, end)
            if plain:
                word.pieces.append(plain[0])
                position = plain.end()
                if position >= end:
                    break
            character = source[position]
            if character in " \t\n;&|()<>" or (position > start and self.continued(position, end)):
                break
            if character == "'":
                close = source.find("'", position + 1, end)
                if close < 0:
                    self.bad("a single quote is not closed")
                    close = end
                word.pieces.append(source[position + 1 : close])
                position = close + 1
            elif character == '"':
                position = self.quoted(word, position + 1, end, depth, closer='"')
            elif character == "\\":
                position = self.escape(word, position, end)
            elif character == "$":
                position = self.dollar(word, position, end, depth, quoted=False)
            elif character == "`":
                position = self.backquote(word, position, end, depth, quoted=False)
            else:
                position = self.special(word, start, position, end)
        position = min(position, end)
        raw = source[start:position]
        if position < end and source[position] in "<>" and _NAMED_DESCRIPTOR.fullmatch(raw):
            self.bad("a redirection names its descriptor")
        lexeme = Lexeme(WORD, start, position, self.text(raw), self.token(word, start, position))
        lexeme.parts = word.parts
        return lexeme, position

    def continued(self, position: int, end: int) -> bool:
        """Whether a line is continued here, behind a word and before a blank."""
        return self.source.startswith(("\\\n ", "\\\n\t"), position, end)

    def token(self, word: _Word, start: int, end: int) -> Token:
        """The finished word after quote removal."""
        value = "".join(word.pieces)
        expansion, single = word.expansion, word.single
        if expansion and word.prefix is not None:
            value = word.prefix
        if word.brace is not None:
            rest = self.source[word.brace[0] : end]
            if "}" in rest and ("," in rest or ".." in rest):
                if len(word.brace[1]) < len(value):
                    value = word.brace[1]
                expansion, single = True, False
        return Token(self.text(value), expansion, word.variable, single, self.source[start:end] == "$!")

    def escape(self, word: _Word, position: int, end: int) -> int:
        """A backslash in an unquoted word."""
        if position + 1 >= end:
            self.bad("it ends in a backslash")
            return position + 1
        following = self.source[position + 1]
        if following in " \t\n":
            self.bad("a backslash before a blank or newline stands in a word")
            if following == "\n":
                return position + 2
        word.pieces.append(following)
        return position + 2

    def special(self, word: _Word, start: int, position: int, end: int) -> int:
        """A glob, ``~`` or ``{`` in an unquoted word."""
        source = self.source
        character = source[position]
        if character in "*?[":
            # `[` and `[[` alone are commands, not patterns.
            brackets = 2 if source.startswith("[[", position) else 1
            alone = position == start and character == "["
            following = source[start + brackets] if start + brackets < end else " "
            if alone and following in " \t\n;&|()<>":
                word.pieces.append("[" * brackets)
                return start + brackets
            word.expand(single=False)
            word.pieces.append(character)
        elif character == "~":
            # bash also expands it behind the `=` and `:` of what looks like an assignment.
            if position == start or source[position - 1] in "=:'\"":
                word.expand()
            word.pieces.append("~")
        elif character == "{":
            if word.brace is None:
                word.brace = (position, "".join(word.pieces))
            word.pieces.append("{")
        else:
            self.bad(f"the character {character!r} is not analysed")
            word.pieces.append(character)
        return position + 1

    def quoted(self, word: _Word, position: int, end: int, depth: int, *, closer: str) -> int:
        """The inside of double quotes; returns what follows the closing one."""
        source = self.source
        while position < end:
            run = _QUOTED.match(source, position, end)
            if run:
                word.pieces.append(run[0])
                position = run.end()
                continue
            character = source[position]
            if character == '"':
                if closer:
                    return position + 1
                word.pieces.append('"')
                position += 1
            elif character == "\\":
                following = source[position + 1] if position + 1 < end else ""
                if following == "\n":
                    self.bad("a line is continued inside double quotes")
                word.pieces.append(following if following in '$`"\\' else character + following)
                position += 2
            elif character == "$":
                position = self.dollar(word, position, end, depth, quoted=True)
            else:
                position = self.backquote(word, position, end, depth, quoted=True)
        if closer:
            self.bad("a double quote is not closed")
        return end

    def dollar(self, word: _Word, position: int, end: int, depth: int, *, quoted: bool) -> int:
        """A ``$`` and what belongs to it."""
        source = self.source
        match = _NAME.match(source, position, end)
        if match:
            number = match[0] in ("$?", "$#", "$$")
            # `"$@"` becomes as many words as there are arguments, whatever they start with.
            every = match[0] == "$@"
            word.expand(variable=not quoted or every, single=(quoted and not every) or number)
            return match.end()
        match = _BRACED.match(source, position, end)
        if match:
            word.expand(variable=not quoted, single=quoted or bool(match[1]))
            return match.end()
        following = source[position + 1 : position + 2]
        if source.startswith("$((", position):
            close = self.arithmetic(position + 3, end)
            if close:
                word.expand(variable=not quoted)
                return close
            self.bad("an arithmetic expansion holds more than numbers")
        if following == "(":
            lexemes, close = self.lexemes(position + 2, end, closer=")", depth=depth + 1)
            word.parts.append(Frame(position, min(close + 1, end), lexemes))
            word.expand(variable=not quoted, single=quoted)
            return close + 1
        if following == "'" and not quoted:
            return self.escapes(word, position + 2, end)
        if following == '"' and not quoted:
            self.bad('a `$"` string is not analysed')
            return position + 1
        word.expand(variable=not quoted, single=quoted)
        if position + 1 < end and following not in (_BEHIND_DOLLAR if quoted else " \t\n;&|()<>"):
            self.bad(f"the parameter expansion `${self.text(following)}` is not analysed")
            if following == "{":
                # The lenient reading looks for substitutions inside the braces.
                return position + 2
        word.pieces.append("$")
        return position + 1

    def escapes(self, word: _Word, position: int, end: int) -> int:
        """The inside of ``$'…'``; returns what follows the closing quote."""
        found = _ESCAPED.match(self.source, position, end)
        assert found is not None
        inside = found[1]
        if not found[2] or "\\" in inside:
            self.bad("a `$'` string holds a backslash, or is not closed")
            inside = _ESCAPE.sub(_unescape, inside)
        word.pieces.append(inside)
        return found.end()

    def arithmetic(self, position: int, end: int) -> int:
        """Where ``$((…))`` over numbers ends; 0 if it is something else."""
        depth = 2
        digits = False
        for offset in range(position, end):
            character = self.source[offset]
            if character == "(":
                depth += 1
            elif character == ")":
                depth -= 1
                if depth == 1:
                    closed = digits and self.source.startswith(")", offset + 1) and offset + 1 < end
                    return offset + 2 if closed else 0
            elif character not in _ARITHMETIC:
                return 0
            digits |= character.isdigit()
        return 0

    def backquote(self, word: _Word, position: int, end: int, depth: int, *, quoted: bool) -> int:
        """A command substitution in backquotes."""
        close = self.source.find("`", position + 1, end)
        if close < 0:
            self.bad("a backquote is not closed")
            close = end
        if "\\" in self.source[position:close]:
            self.bad("a backslash stands between backquotes")
        lexemes, _ = self.lexemes(position + 1, close, closer="", depth=depth + 1)
        word.parts.append(Frame(position, min(close + 1, end), lexemes))
        word.expand(variable=not quoted, single=quoted)
        return close + 1
