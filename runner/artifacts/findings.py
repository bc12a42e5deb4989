"""Findings of a review, read from the calls of ``report_finding`` in a log.

A call whose arguments fit the tool's schema and whose result is no error is one finding. Logs of others are read too,
so nothing about the arguments is taken for granted. Pure; no effect on the prefix cache.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from runner.record import record
from runner.tools.builtin.finding import REPORT_FINDING, SEVERITIES

if TYPE_CHECKING:
    from runner.session import events as ev

TOOL = REPORT_FINDING["name"]


@record
class Finding:
    """One finding. ``path`` is relative to the workspace; lines count from 1 and may be unknown."""

    path: str
    severity: str
    message: str
    line: int | None = None
    end_line: int | None = None
    rule: str | None = None

    @property
    def place(self) -> str:
        """Path and lines, as people write them."""
        if self.line is None:
            return self.path
        return f"{self.path}:{self.line}" + (f"-{self.end_line}" if self.end_line not in (None, self.line) else "")


def finding_of(call: ev.ToolCall) -> Finding | None:
    """What a call reports, None if it is of another tool or its arguments are no finding.

    Whether it counts, its result says.
    """
    if call.name != TOOL:
        return None
    try:
        given = json.loads(call.arguments)
        path, severity, message = given["path"], given["severity"], given["message"]
        line, end, rule = (given.get(name) for name in ("line", "endLine", "rule"))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    texts = (path, severity, message, "" if rule is None else rule)
    if not all(isinstance(text, str) for text in texts) or severity not in SEVERITIES:
        return None
    return Finding(path, severity, message, _whole(line), _whole(end), rule)


def _whole(number: object) -> int | None:
    """A line number, None if it is none; JSON allows 3.0 for 3."""
    if isinstance(number, float) and number.is_integer():
        number = int(number)
    return number if isinstance(number, int) and not isinstance(number, bool) and number > 0 else None
