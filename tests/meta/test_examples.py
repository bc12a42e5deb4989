"""Every YAML example in the documents is a whole file that loads."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import MakeRepo, Nightshift

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```yaml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
NAME = re.compile(r"# (\S+)\.(task|profile|policy|script)\.yaml\n")

WITH_EXAMPLES = [path for path in DOCUMENTS if BLOCK.search(path.read_text(encoding="utf-8"))]


def test_there_are_examples() -> None:
    """The README has some."""
    assert REPOSITORY / "README.md" in WITH_EXAMPLES


@pytest.mark.parametrize("document", WITH_EXAMPLES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_the_examples_of_a_document_load(document: Path, run_nightshift: Nightshift, make_repo: MakeRepo) -> None:
    """All examples of a document, laid into one folder under the names they give, can be planned or checked."""
    folder = make_repo()
    kinds: dict[str, str] = {}
    for text in BLOCK.findall(document.read_text(encoding="utf-8")):
        match = NAME.match(text)
        assert match, f"an example in {document.name} does not begin with its file name:\n{text}"
        name = f"{match[1]}.{match[2]}.yaml"
        assert name not in kinds, f"{document.name} has two examples named {name}"
        (folder / name).write_text(text, encoding="utf-8")
        kinds[name] = match[2]
    for name, kind in list(kinds.items()):
        if kind == "profile":
            task = {
                "version": 1,
                "name": "example",
                "prompt": "Do it.",
                "profile": f"./{name}",
                "workspace": {"path": "."},
            }
            (folder / f"{name}.task.yaml").write_text(json.dumps(task), encoding="utf-8")
            kinds[f"{name}.task.yaml"] = "task"

    for name, kind in kinds.items():
        command = {"task": ("plan",), "policy": ("policy", "check")}.get(kind)
        if command:
            finished = run_nightshift(*command, folder / name, cwd=folder)
            assert finished.exit_code == 0, f"{name}\n{finished.stderr}"
