"""The decision on one tool call: pure, total, strictest wins."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.permission import Mode

DEFAULT_RULE = "default"
"""The rule id of a decision that no rule made."""


@dataclass(frozen=True, slots=True)
class CallFacts:
    """What the policy may look at.

    Attributes:
        tool: Exact tool name.
        command: Shell text, None for tools without one.
        read: Absolute paths the call reads, links resolved.
        write: Absolute paths the call creates or changes, links resolved.
        escalation: The mode the call asks for beyond the run's own, None without escalation.
    """

    tool: str
    command: str | None = None
    read: tuple[str, ...] = ()
    write: tuple[str, ...] = ()
    escalation: Mode | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The outcome for one call.

    Attributes:
        allowed: Whether the call may run.
        rule: Id of the deciding rule, or ``default``.
        reason: Why, for the model and the log.
        mode: The tighter mode an allowing rule asks for, else None.
        may_escalate: Whether a rule exists that would consider the call with escalation.
        opaque: The allowing rule lets a program run code from the workspace.
    """

    allowed: bool
    rule: str
    reason: str
    mode: Mode | None = None
    may_escalate: bool = False
    opaque: bool = False


@dataclass(frozen=True, slots=True)
class Policy:
    """Placeholder."""
