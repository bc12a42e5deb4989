"""Permission modes and trust: the words that policy, sandbox and configuration share."""

from __future__ import annotations

from enum import StrEnum


class Mode(StrEnum):
    """Permission modes, tightest first."""

    READ_ONLY = "read-only"
    WORKSPACE_WRITE = "workspace-write"
    DANGER_FULL_ACCESS = "danger-full-access"

    @property
    def rank(self) -> int:
        """0 for the tightest."""
        return list(Mode).index(self)


class Trust(StrEnum):
    """Whether whoever triggered the run may be trusted with its authority."""

    TRUSTED = "trusted"
    UNTRUSTED = "untrusted"
