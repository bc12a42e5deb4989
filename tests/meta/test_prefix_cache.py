"""Every module that puts text before the model says what that does to the provider's prefix cache."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

RUNNER = Path(__file__).resolve().parents[2] / "runner"
MAKERS = {"user_message", "ToolOutcome", "Denial", "Finalized", "UserMessage", "ToolResult", "CompactionPrune"}
"""What becomes a message is made by one of these."""


def puts_text(tree: ast.Module) -> bool:
    """Whether a module makes messages or results, writes request bodies, or the tool table in them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in MAKERS:
                return True
        if isinstance(node, ast.ClassDef):
            names = {each.name for each in node.body if isinstance(each, ast.FunctionDef)}
            if {"open", "fragments", "whole"} <= names or "offered" in names:
                return True
    return False


def modules() -> list[str]:
    """Those that do, and every tool; what only builds test sessions or reads recorded ones does not run for a model."""
    found = []
    for path in sorted(RUNNER.rglob("*.py")):
        name = path.relative_to(RUNNER).as_posix()
        tool = path.parent.name == "builtin" and path.name != "__init__.py"
        elsewhere = name.startswith("testing/") or name == "providers/recording.py"
        if not elsewhere and (tool or puts_text(ast.parse(path.read_text(encoding="utf-8")))):
            found.append(name)
    return found


def test_the_modules_that_everybody_knows_are_found() -> None:
    """The rule for finding them works."""
    known = {"agent/loop.py", "agent/prompt.py", "compaction/summary.py", "compaction/prune.py", "compaction/spill.py"}
    known |= {"hooks/checks.py", "tools/registry.py", "tools/pipeline.py", "providers/openai_chat.py"}
    known |= {f"tools/builtin/{name}.py" for name in ("shell", "files", "search", "todo", "patch", "finding")}

    assert known <= set(modules())


@pytest.mark.parametrize("name", modules())
def test_a_module_that_puts_text_before_the_model_says_what_it_does_to_the_prefix(name: str) -> None:
    """In a line of its own in the module's docstring."""
    docstring = ast.get_docstring(ast.parse((RUNNER / name).read_text(encoding="utf-8"))) or ""

    assert re.search(r"^Prefix cache: \S", docstring, re.MULTILINE), f"runner/{name} has no line 'Prefix cache: ...'"
