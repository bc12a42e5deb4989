"""Foreign text (of a model, a tool, a server, a log) as text that is only read, never acted on.

A terminal acts on control characters and direction marks, a CI system on commands in what a step prints:
``::x::`` at the start of a line, ``##[x]`` anywhere. Both stand as they were written, but broken up. The one
place for this: reports, the command line's output and transcripts use it. Pure; no effect on the prefix cache.
"""

from __future__ import annotations

import re

_CONTROL = "\x7f-\x9f"
_DIRECTION = "\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb"
# Compiled at first use, which is after a run has begun its first request.
_ACTIVE = f"[\x00-\x08\x0b-\x1f{_CONTROL}{_DIRECTION}\ud800-\udfff]"
_ACTIVE_IN_JSON = f"[{_CONTROL}{_DIRECTION}\ud800-\udfff]"
# GitHub cuts all white space off before it looks. Within one line, so that blank lines cost nothing.
_COMMAND_START = r"(?m)^([^\S\n]*):(?=:)"
_COMMAND_ANYWHERE = r"##(?=[a-zA-Z]*\[)"
_ACTIVE_ASCII = bytes((*range(0x09), *range(0x0B, 0x20), 0x7F))


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def neutral_text(text: str) -> str:
    """``text`` with controls as escapes (newlines and tabs stay) and commands of CI systems broken up."""
    text = text.replace("\r\n", "\n")
    if not _is_inert(text):
        text = re.sub(_ACTIVE, _escape, text)
    if "::" in text:
        text = re.sub(_COMMAND_START, r"\1:\\", text)
    if "##" in text:
        text = re.sub(_COMMAND_ANYWHERE, r"#\\#", text)
    return text


def _is_inert(text: str) -> bool:
    """Whether nothing in ``text`` is to be escaped, found without a regular expression: most text is, and long."""
    if text.isascii():
        return len(text.encode().translate(None, _ACTIVE_ASCII)) == len(text)
    return text.replace("\n", "").replace("\t", "").isprintable()


def neutral_line(text: str) -> str:
    """The same on one line: newlines and tabs are escapes too."""
    if text.isprintable() and "::" not in text and "##" not in text:
        return text  # nearly always
    return neutral_text(text).replace("\n", "\\n").replace("\t", "\\t")


def neutral_json(text: str) -> str:
    """JSON text with the same value in which nothing is active; its strings hold what may be."""
    if not _is_inert(text):
        text = re.sub(_ACTIVE_IN_JSON, lambda found: f"\\u{ord(found[0]):04x}", text)
    return re.sub(_COMMAND_ANYWHERE, r"#\\u0023", text) if "##" in text else text
