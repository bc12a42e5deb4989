"""nightshift: a headless CI and batch runner for LLM agents.

Importing this package does no I/O and loads nothing heavy. Public names are
resolved on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from runner.errors import ErrorCode, RunnerError

__all__ = ["ErrorCode", "RunnerError", "__version__"]

__version__ = "0.1.0"

_PUBLIC = {"ErrorCode": "runner.errors", "RunnerError": "runner.errors"}


def __getattr__(name: str) -> object:
    """Load a public name from the module that owns it."""
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module 'runner' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(module), name)
