"""The repository holds together: commands in the README exist, links resolve, no machine's paths."""

from __future__ import annotations

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

from runner import reference

REPOSITORY = Path(__file__).resolve().parents[2]


@cache
def tracked_texts() -> dict[str, str]:
    """Path → text of every file of the repository, the index included, that is text."""
    listed = subprocess.run(
        ["git", "-c", f"safe.directory={REPOSITORY}", "ls-files", "-z"],
        cwd=REPOSITORY,
        capture_output=True,
        check=True,
        text=True,
    ).stdout
    texts = {}
    for name in filter(None, listed.split("\0")):
        path = REPOSITORY / name
        if path.is_file():
            data = path.read_bytes()
            if b"\0" not in data:
                texts[name] = data.decode("utf-8")
    return texts


def documents() -> list[str]:
    """All Markdown files of the repository."""
    return [name for name in tracked_texts() if name.endswith(".md")]


def make_targets() -> set[str]:
    """The targets that ``make help`` lists."""
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))


def test_make_help_lists_the_promised_targets() -> None:
    """Each target a developer is told about exists and has a line of help."""
    promised = "help demo demo-real test test-all test-docker check lint types format schema docs bench image build"

    assert make_targets() >= set(promised.split())


def test_documents_name_only_make_targets_that_exist() -> None:
    """A ``make`` command shown in any document is a target."""
    named = {
        target
        for name in documents()
        for target in re.findall(r"(?:`|^)make ([a-z][a-z-]*)", tracked_texts()[name], re.MULTILINE)
    }

    assert "demo" in named
    assert named <= make_targets()


def test_links_between_documents_resolve() -> None:
    """A relative link in a document leads to a file of the repository."""
    broken = [
        f"{name}: {target}"
        for name in documents()
        for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)\s#]+)", tracked_texts()[name])
        if not (REPOSITORY / name).parent.joinpath(target).exists()
    ]

    assert broken == []


def test_nothing_names_the_machine_it_was_written_on() -> None:
    """No file holds the path of this work tree, nor anybody's home folder."""
    places = [re.escape(str(REPOSITORY)), r"/home/(?!user/|ci/)[a-z]+/", r"/Users/[A-Za-z]+/"]
    if Path.home() != Path("/root"):
        places.append(re.escape(f"{Path.home()}/"))
    traces = re.compile("|".join(places))
    found = [
        f"{name}:{number}"
        for name, text in tracked_texts().items()
        for number, line in enumerate(text.splitlines(), start=1)
        if traces.search(line)
    ]

    assert found == []


def test_reference_pages_are_what_the_code_says() -> None:
    """Every generated page of docs/reference equals what is generated now."""
    assert reference.main(["--check"]) == 0


def test_a_changed_reference_page_is_reported_and_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The check names each page that differs and fails; writing repairs it and leaves pages that people write."""
    shutil.copytree(REPOSITORY / "configs" / "schema", tmp_path / "configs" / "schema")
    monkeypatch.setattr(reference, "ROOT", tmp_path)
    folder = tmp_path / "docs" / "reference"
    assert reference.main(["--write"]) == 0
    assert reference.main(["--check"]) == 0
    (folder / "errors.md").write_text(f"# Changed\n\n{reference.NOTE}\n", encoding="utf-8")
    (folder / "old.md").write_text(f"# Old\n\n{reference.NOTE}\n", encoding="utf-8")
    (folder / "hand.md").write_text("# Written by hand\n", encoding="utf-8")
    (folder / "events.md").unlink()
    capsys.readouterr()

    assert reference.main(["--check"]) == 1
    reported = re.findall(r"docs/reference/(\S+)", capsys.readouterr().err)
    assert reported == ["README.md", "errors.md", "events.md", "old.md"]
    assert reference.main(["--write"]) == 0
    assert reference.main(["--check"]) == 0
    assert not (folder / "old.md").exists()
    assert (folder / "hand.md").read_text(encoding="utf-8") == "# Written by hand\n"
    assert "[Written by hand](hand.md)" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("arguments", [[], ["--chek"], ["--write", "--check"]])
def test_the_reference_tool_refuses_other_arguments(arguments: list[str]) -> None:
    """Anything but one of the two options is a usage error."""
    assert reference.main(arguments) == 2


def test_every_shipped_yaml_names_its_schema() -> None:
    """The first line of each shipped YAML leads an editor to the schema of its kind, which exists."""
    wrong = []
    for name, text in tracked_texts().items():
        if not name.startswith("configs/") or not name.endswith(".yaml"):
            continue
        kind = Path(name).suffixes[-2].removeprefix(".")
        match = re.match(r"# yaml-language-server: \$schema=(\S+)\n", text)
        target = (REPOSITORY / name).parent.joinpath(match[1]) if match else None
        if target is None or not target.exists() or not target.name.startswith(kind):
            wrong.append(name)

    assert wrong == []


def test_every_dependency_outside_the_core_has_a_decision_record() -> None:
    """Each dependency that was chosen, not given, is explained in docs/decisions."""
    records = " ".join(
        path.read_text(encoding="utf-8") for path in (REPOSITORY / "docs" / "decisions").glob("[0-9]*.md")
    )
    core = {"click", "httpx", "pydantic", "pyyaml", "structlog", "zstandard"}
    pyproject = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")
    listed = re.search(r"^dependencies = \[(.*?)^\]", pyproject, re.MULTILINE | re.DOTALL)
    assert listed is not None
    names = set(re.findall(r'"([a-z0-9-]+)>=', listed[1]))

    assert core <= names
    assert [name for name in sorted(names - core) if not re.search(rf"\b{name}\b", records)] == []
