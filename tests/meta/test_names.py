"""Public names and error codes are API and described."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path

import pytest

import runner
from runner.errors import SIGNAL_EXIT_CODES, SOFT_FAIL_CLASSES, ErrorCode
from runner.session.events import EVENT_TYPES

REPOSITORY = Path(__file__).resolve().parents[2]
SOURCES = sorted((REPOSITORY / "runner").rglob("*.py"))

RESERVED_EXIT_CODES = {
    "COMPLETED": 0,
    "TASK_FAILED": 1,
    "CONFIG_INVALID": 2,
    "SANDBOX_UNAVAILABLE": 3,
    "POLICY_DENIED": 4,
    "LIMIT_REACHED": 5,
    "BUDGET_EXHAUSTED": 6,
    "PROVIDER_AUTH": 7,
    "PROVIDER_QUOTA": 8,
    "PROVIDER_FAILED": 9,
    "CONTEXT_EXHAUSTED": 10,
    "OUTPUT_INVALID": 11,
    "BATCH_PARTIAL": 12,
    "LOG_INVALID": 13,
    "NO_CHANGES": 14,
    "STORAGE_FAILED": 15,
    "SETUP_FAILED": 16,
    "INTERNAL": 70,
    "CANCELLED": 130,
}
"""What scripts rely on. Lines are added, never changed."""


def _in_order(names: list[str]) -> list[str]:
    """Constants, then classes, then the rest, as ruff sorts them."""
    return sorted(names, key=lambda name: (not name.isupper(), not name[:1].isupper(), name))


def _reference(page: str) -> str:
    return (REPOSITORY / "docs" / "reference" / page).read_text(encoding="utf-8")


def test_public_names_are_sorted_and_resolve() -> None:
    """``runner.__all__`` is sorted and each name in it can be had."""
    assert runner.__all__ == _in_order(runner.__all__)
    assert all(getattr(runner, name) is not None for name in runner.__all__)


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    """A name that is not public is refused as for any module."""
    with pytest.raises(AttributeError, match="no_such_name"):
        runner.no_such_name  # noqa: B018  # the access itself is what is tested


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_a_declared_list_of_names_is_sorted_and_resolves(path: Path) -> None:
    """Every ``__all__`` of a module names what the module has, in order; every module says what it is for."""
    tree = ast.parse(path.read_text(encoding="utf-8"))

    assert ast.get_docstring(tree), f"{path} has no docstring"
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and node.targets[0].id == "__all__":
            names = ast.literal_eval(node.value)
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            module = importlib.import_module(".".join(part for part in parts if part != "__init__"))
            assert names == _in_order(names)
            assert all(hasattr(module, name) for name in names)


def test_exit_codes_never_change() -> None:
    """The exit code of every outcome is the one that was published."""
    assert {code.name: code.exit_code for code in ErrorCode if code.value.exit_code is not None} == RESERVED_EXIT_CODES
    assert SIGNAL_EXIT_CODES == {"SIGHUP": 129, "SIGINT": 130, "SIGTERM": 143}


def test_no_two_codes_are_one() -> None:
    """Codes with equal values would be aliases in an enumeration; there are none."""
    assert len(ErrorCode.__members__) == len(list(ErrorCode))


def test_every_error_code_is_documented() -> None:
    """The reference page has a line for each error code."""
    documented = set(re.findall(r"^\| `([A-Z_]+)` \|", _reference("errors.md"), re.MULTILINE))

    assert documented == {code.name for code in ErrorCode}


def test_every_failure_class_is_documented_and_soft_classes_exist() -> None:
    """Classes that may fail softly are classes of outcomes."""
    classes = {code.value.failure_class for code in ErrorCode if code.value.failure_class}

    assert set(SOFT_FAIL_CLASSES) <= classes
    assert set(re.findall(r"\| `([a-z-]+)` \|", _reference("exit-codes.md"))) == classes


def test_every_event_is_documented() -> None:
    """The reference page has a section for each event of the vocabulary."""
    sections = re.findall(r"^## (\S+)$", _reference("events.md"), re.MULTILINE)

    assert sorted(sections) == sorted(EVENT_TYPES)
