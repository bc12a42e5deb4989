"""The second reading of a shell text: tree-sitter's tree must agree with the lexemes.

tree-sitter-bash accepts more than bash does and parses some texts cleanly that bash reads otherwise,
so its tree is never believed alone. Every node and field has to be on the list below, every leaf
has to be exactly one lexeme, and no lexeme may be left over. What the tree adds is the grammar: which
words are keywords, and that all compound commands are whole. Pure; writes no events.
"""

from __future__ import annotations

import time
from functools import cache
from typing import TYPE_CHECKING

from runner.approvals.lexer import BODY, CONTROL, COPY, DELIMITER, DESCRIPTOR, NEWLINE, REDIRECT, WORD, Unanalysed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tree_sitter import Language, Node, Point

    from runner.approvals.lexer import Frame, Lexeme

SECONDS = 0.05
"""CPU time that the analysis of one text may take."""

_LOOK_EVERY = 256


class Clock:
    """The time left for one text.

    The wall clock is cheap to read and decides for nearly every text. Only when it says that the time is
    over is the thread's own clock started, which a busy machine does not move on.
    """

    def __init__(self) -> None:
        self._end = time.monotonic() + SECONDS
        self._cpu_end: float | None = None
        self._count = 0

    @property
    def expired(self) -> bool:
        """Whether the time is over."""
        if self._cpu_end is None:
            if time.monotonic() <= self._end:
                return False
            self._cpu_end = time.thread_time() + SECONDS
        return time.thread_time() > self._cpu_end

    def tick(self) -> None:
        """Look at the clock now and then.

        Raises:
            Unanalysed: The time is over.
        """
        self._count += 1
        if self._count % _LOOK_EVERY == 0 and self.expired:
            raise Unanalysed(f"its analysis takes longer than {SECONDS * 1000:.0f} ms")


@cache
def _language() -> Language:
    import tree_sitter
    import tree_sitter_bash

    return tree_sitter.Language(tree_sitter_bash.language())


def parse(text: str, clock: Clock) -> Node | None:
    """Parse a text; error recovery is quadratic, so the parse is stopped when the time is over.

    Returns:
        The root of the tree, None when the time was over.
    """
    import tree_sitter

    data = text.encode("utf-8", "replace")

    def read(offset: int, _point: Point) -> bytes:
        return data[offset:]

    def progress(_offset: int, _has_error: bool) -> bool:
        return clock.expired

    # A parser costs a microsecond; one a text needs no lock between threads.
    parser = tree_sitter.Parser(_language())
    try:
        return parser.parse(read, progress_callback=progress).root_node
    except ValueError:
        # Raised for a parse that the progress callback stopped.
        return None


_DESCEND, _WORD, _NAME, _OPERATOR, _KEYWORD, _TARGET, _DESCRIPTOR, _TEST, _PATTERN, _PATTERN_OPERATOR, _DELIMITER, \
    _BODY, _END = range(13)  # fmt: skip

_WORDS = (
    "word", "string", "raw_string", "ansi_c_string", "concatenation", "number", "simple_expansion", "expansion",
    "command_substitution", "arithmetic_expansion", "brace_expression",
)  # fmt: skip
_STATEMENTS = (
    "redirected_statement", "variable_assignments", "command", "negated_command", "for_statement", "while_statement",
    "if_statement", "case_statement", "pipeline", "list", "compound_statement", "subshell",
)  # fmt: skip
_TERMINATORS = (";", "&")


def _table() -> dict[tuple[str, str | None, str], int]:
    """(parent, field, child) → what to do with the child. What is not listed is not analysed."""
    table: dict[tuple[str, str | None, str], int] = {}

    def allow(parent: str, field: str | None, children: Iterable[str], action: int) -> None:
        table.update({(parent, field, child): action for child in children})

    def statements(parent: str, field: str | None = None, *, terminators: bool = True) -> None:
        allow(parent, field, _STATEMENTS, _DESCEND)
        allow(parent, field, ["variable_assignment"], _WORD)
        allow(parent, field, ["test_command"], _TEST)
        if terminators:
            allow(parent, field, _TERMINATORS, _OPERATOR)

    for parent in ("program", "command_substitution", "compound_statement", "subshell", "do_group", "if_statement",
                   "elif_clause", "else_clause", "case_item"):  # fmt: skip
        statements(parent)
    for parent in ("list", "pipeline", "negated_command"):
        statements(parent, terminators=False)
    statements("if_statement", "condition")
    statements("while_statement", "condition")
    statements("redirected_statement", "body", terminators=False)
    statements("heredoc_redirect", "right", terminators=False)
    allow("list", None, ["&&", "||"], _OPERATOR)
    allow("pipeline", None, ["|", "|&"], _OPERATOR)
    allow("subshell", None, ["(", ")"], _OPERATOR)
    for parent, keywords in (
        ("compound_statement", "{ }"), ("negated_command", "!"), ("do_group", "do done"),
        ("if_statement", "if then fi"), ("elif_clause", "elif then"), ("else_clause", "else"),
        ("while_statement", "while"), ("for_statement", "for in"),
        ("case_statement", "case in esac"),
    ):  # fmt: skip
        allow(parent, None, keywords.split(), _KEYWORD)
    allow("if_statement", None, ["elif_clause", "else_clause"], _DESCEND)
    allow("while_statement", "body", ["do_group"], _DESCEND)
    allow("for_statement", "body", ["do_group"], _DESCEND)
    allow("for_statement", "variable", ["variable_name"], _NAME)
    allow("for_statement", "value", _WORDS, _WORD)
    allow("for_statement", None, [";"], _OPERATOR)
    allow("case_statement", "value", _WORDS, _WORD)
    allow("case_statement", None, ["case_item"], _DESCEND)
    allow("case_item", "value", [*_WORDS, "extglob_pattern"], _PATTERN)
    allow("case_item", None, ["(", "|", ")"], _PATTERN_OPERATOR)
    allow("case_item", None, [";;"], _OPERATOR)
    allow("case_item", "termination", [";;"], _OPERATOR)
    allow("variable_assignments", None, ["variable_assignment"], _WORD)
    allow("command", None, ["variable_assignment"], _WORD)
    allow("command", "redirect", ["file_redirect"], _DESCEND)
    allow("command", "name", ["command_name"], _WORD)
    allow("command", "argument", [*_WORDS, "==", "=~"], _WORD)
    allow("redirected_statement", "redirect", ["file_redirect", "heredoc_redirect"], _DESCEND)
    allow("file_redirect", "descriptor", ["file_descriptor"], _DESCRIPTOR)
    allow("file_redirect", None, [">", ">>", ">|", "&>", "&>>", "<", ">&", "<&", ">&-", "<&-"], _OPERATOR)
    allow("file_redirect", "destination", _WORDS, _TARGET)
    allow("heredoc_redirect", None, ["<<"], _OPERATOR)
    allow("heredoc_redirect", None, ["heredoc_start"], _DELIMITER)
    allow("heredoc_redirect", None, ["heredoc_body"], _BODY)
    allow("heredoc_redirect", None, ["heredoc_end"], _END)
    allow("heredoc_redirect", None, ["pipeline"], _DESCEND)
    allow("heredoc_redirect", "redirect", ["file_redirect"], _DESCEND)
    allow("heredoc_redirect", "operator", ["&&", "||"], _OPERATOR)
    return table


_ALLOWED = _table()

_LEXEMES = {
    _WORD: (WORD,),
    _NAME: (WORD,),
    _PATTERN: (WORD,),
    _KEYWORD: (WORD,),
    _OPERATOR: (CONTROL, REDIRECT),
    _PATTERN_OPERATOR: (CONTROL,),
    _TARGET: (WORD, COPY),
    _DESCRIPTOR: (DESCRIPTOR,),
    _DELIMITER: (DELIMITER,),
}


def check_tree(root: Node, frame: Frame, clock: Clock) -> None:
    """Demand that tree and lexemes agree, and set the roles of the lexemes.

    Raises:
        Unanalysed: They do not agree, or the tree has something that is not on the list.
    """
    if root.has_error:
        raise Unanalysed("it is not complete, or not in the part of bash that is analysed")
    _check(root, frame, clock)


def _check(root: Node, frame: Frame, clock: Clock) -> None:
    """Compare one frame with the node it stands for: the program, or a command substitution."""
    places = {lexeme.start: at for at, lexeme in enumerate(frame.lexemes) if lexeme.kind not in (NEWLINE, BODY)}
    ends = {(lexeme.start, lexeme.end) for lexeme in frame.lexemes if lexeme.kind == BODY}
    inside = root.type == "command_substitution"
    consumed = 0
    stack = [root]
    while stack:
        node = stack.pop()
        kind = node.type
        children = node.children
        # A substitution's own brackets are no lexemes of what stands inside.
        brackets = (0, len(children) - 1) if inside and node is root else ()
        for at, child in enumerate(children):
            if at in brackets:
                continue
            clock.tick()
            action = _ALLOWED.get((kind, node.field_name_for_child(at), child.type))
            if action is None:
                raise Unanalysed(f"{_describe(child)} is not analysed")
            if action == _DESCEND:
                stack.append(child)
            elif action == _TEST:
                consumed += _check_test(child, frame, places, clock)
            elif action == _END:
                if (child.start_byte, child.end_byte) not in ends:
                    raise _disagree(child)
                ends.remove((child.start_byte, child.end_byte))
            elif action != _BODY:
                _check_leaf(child, action, frame, places, clock)
                consumed += 1
    if consumed != len(places) or ends:
        raise Unanalysed("it can be read in two ways")


def _check_leaf(node: Node, action: int, frame: Frame, places: dict[int, int], clock: Clock) -> None:
    at = places.get(node.start_byte)
    lexeme = None if at is None else frame.lexemes[at]
    if lexeme is None or lexeme.end != node.end_byte or lexeme.kind not in _LEXEMES[action] or lexeme.role:
        raise _disagree(node)
    if action in (_KEYWORD, _OPERATOR, _PATTERN_OPERATOR) and lexeme.raw != node.type:
        raise _disagree(node)
    lexeme.role = _ROLES[action]
    if lexeme.parts:
        _check_parts(node, lexeme.parts, clock)


_ROLES = {
    _WORD: "word",
    _NAME: "name",
    _PATTERN: "pattern",
    _KEYWORD: "keyword",
    _OPERATOR: "operator",
    _PATTERN_OPERATOR: "pattern",
    _TARGET: "word",
    _DESCRIPTOR: "operator",
    _DELIMITER: "operator",
}


def _check_parts(node: Node, parts: list[Frame], clock: Clock) -> None:
    """Compare the substitutions inside a word with those inside its node."""
    found = []
    stack = [node]
    while stack:
        each = stack.pop()
        clock.tick()
        if each.type == "command_substitution":
            found.append(each)
        else:
            stack.extend(reversed(each.children))
    if [(each.start_byte, each.end_byte) for each in found] != [(part.start, part.end) for part in parts]:
        raise _disagree(node)
    for each, part in zip(found, parts, strict=True):
        _check(each, part, clock)


def _check_test(node: Node, frame: Frame, places: dict[int, int], clock: Clock) -> int:
    """Take all lexemes of ``[ … ]`` or ``[[ … ]]``; the tree's view of the inside is not used.

    Returns:
        How many there are.
    """
    first = places.get(node.start_byte)
    if first is None:
        raise _disagree(node)
    taken: list[Lexeme] = []
    for lexeme in frame.lexemes[first:]:
        if lexeme.start >= node.end_byte:
            break
        taken.append(lexeme)
    opening, closing = taken[0], taken[-1]
    brackets = {"[": "]", "[[": "]]"}
    if brackets.get(opening.raw) != closing.raw or closing.end != node.end_byte or len(taken) < 2:
        raise _disagree(node)
    for lexeme in taken:
        if lexeme.kind not in (WORD, CONTROL, REDIRECT) or lexeme.role:
            raise Unanalysed("the inside of brackets is not analysed")
        lexeme.role = "word"
    if opening.raw == "[[":
        opening.role = closing.role = "keyword"
    elif any(lexeme.kind != WORD for lexeme in taken):
        raise Unanalysed("an operator stands inside `[`")
    _check_parts(node, [part for lexeme in taken for part in lexeme.parts], clock)
    return len(taken)


def _disagree(node: Node) -> Unanalysed:
    return Unanalysed(f"it can be read in two ways at byte {node.start_byte}")


def _describe(node: Node) -> str:
    names = {
        "declaration_command": "`export` and its like",
        "function_definition": "a function",
        "c_style_for_statement": "an arithmetic `for`",
        "unset_command": "`unset`",
        "array": "an array",
        "subscript": "a subscript",
        "herestring_redirect": "a here-string",
        "process_substitution": "a process substitution",
    }
    return names.get(node.type, f"`{node.type.replace('_', ' ')}`")
