"""Run a demo: prepare a repository with a failing test suite, let nightshift fix it, say what came of it.

``run.py quick DIRECTORY`` writes a small package on the spot. ``run.py real DIRECTORY`` takes the source
distribution of a package from the package index, version and hash pinned, and puts a bug in. The model's
answers come from a script beside this file; everything else is real. ``DIRECTORY`` gets ``workspace/`` and
``artifacts/``, both made anew each time.

Standard library only: it runs with the interpreter that nightshift is installed for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent

QUICK_FILES = {
    "README.md": "# basket\n\nPrices of a shopping basket.\n",
    "pyproject.toml": """[project]
name = "basket"
version = "1.0"

[tool.pytest.ini_options]
testpaths = ["tests"]
""",
    ".gitignore": "__pycache__/\n",
    "basket/__init__.py": '"""A shopping basket."""\n',
    "basket/prices.py": '''"""Prices of a basket."""


def total(prices, discount=0):
    """Return the sum of ``prices`` less ``discount`` percent, rounded to cents."""
    return round(sum(prices) * (1 - discount), 2)
''',
    "tests/test_prices.py": """from basket.prices import total


def test_the_total_of_an_empty_basket_is_zero():
    assert total([]) == 0


def test_without_a_discount_prices_add_up():
    assert total([1.25, 2.50, 3.00]) == 6.75


def test_the_discount_is_a_percentage():
    assert total([80.00, 20.00], discount=15) == 85.00
""",
}


class DemoError(Exception):
    """A step of the preparation failed; the message says which and why."""


def main(arguments: list[str]) -> int:
    """Prepare, run, report; returns nightshift's exit code."""
    if len(arguments) != 2 or arguments[0] not in PREPARE:
        print(f"usage: run.py {'|'.join(PREPARE)} DIRECTORY", file=sys.stderr)
        return 2
    name, directory = arguments[0], Path(arguments[1]).absolute()
    workspace, artifacts = directory / "workspace", directory / "artifacts"
    try:
        for path in (workspace, artifacts):
            shutil.rmtree(path, ignore_errors=True)
        workspace.mkdir(parents=True)
        PREPARE[name](directory, workspace)
        commit_all(workspace)
    except (DemoError, OSError) as error:
        print(f"the demo could not be prepared: {error}", file=sys.stderr)
        return 2
    # The sandbox keeps PATH, so `python` in there is the interpreter of this environment, which has pytest.
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    # Ctrl-C reaches nightshift as well, which seals its log; this process only waits for it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    exit_code = subprocess.Popen(
        [
            Path(sys.executable).with_name("nightshift"),
            "run",
            HERE / TASKS[name],
            "--workspace",
            workspace,
            "--artifacts",
            artifacts,
        ],
        env=environment,
        stdin=subprocess.DEVNULL,
    ).wait()
    report(artifacts, exit_code)
    return exit_code


def prepare_quick(_directory: Path, workspace: Path) -> None:
    """Write a package of one module whose third test fails."""
    for name, text in QUICK_FILES.items():
        path = workspace / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")


def prepare_real(directory: Path, workspace: Path) -> None:
    """Unpack a pinned source distribution and put the bug in."""
    requirements = HERE / "real.requirements.txt"
    expected = requirements.read_text(encoding="utf-8").rpartition("sha256:")[2].strip()
    downloads = directory / "downloads"
    archive = find_archive(downloads, expected)
    if archive is None:
        print("downloading the source distribution", file=sys.stderr)
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        run([*pip, "--no-binary", ":all:", "--require-hashes", "--dest", downloads, "--requirement", requirements])
        archive = find_archive(downloads, expected)
    if archive is None:
        raise DemoError(f"{downloads} holds no archive with SHA-256 {expected}")
    run(["tar", "-xzf", archive, "-C", workspace, "--strip-components=1", "--no-same-owner"])
    git(workspace, "init", "--quiet")
    git(workspace, "apply", "--unidiff-zero", HERE / "real.patch")


def find_archive(folder: Path, sha256: str) -> Path | None:
    """The archive in ``folder`` that has this digest, None if there is none."""
    for path in folder.glob("*.tar.gz"):
        if hashlib.sha256(path.read_bytes()).hexdigest() == sha256:
            return path
    return None


def commit_all(workspace: Path) -> None:
    """Make the workspace a repository with one commit that holds everything."""
    git(workspace, "init", "--quiet")
    git(workspace, "add", "--all")
    git(workspace, "commit", "--quiet", "--no-verify", "--no-gpg-sign", "--message", "The state to start from")


def git(workspace: Path, *arguments: str | Path) -> None:
    """Run git as nobody in particular: no configuration of this machine counts."""
    settings = {"user.name": "demo", "user.email": "demo@example.invalid", "init.defaultBranch": "main"}
    options = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
    run(["git", *options, "-C", workspace, *arguments])


def run(command: list[str | Path]) -> None:
    """Run one command of the preparation.

    Raises:
        DemoError: It could not be started or did not exit 0.
    """
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    environment = {**clean, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull}
    result = subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode != 0:
        raise DemoError(f"{' '.join(map(str, command))}: {result.stderr.strip()}")


def report(artifacts: Path, exit_code: int) -> None:
    """Print what `result.json` says beyond what nightshift has printed, in a few lines."""
    try:
        result = json.loads((artifacts / "result.json").read_text(encoding="utf-8"))
    except FileNotFoundError:
        print(f"no result was written; nightshift exited with {exit_code}", file=sys.stderr)
        return
    print()
    for label, text in report_lines(result):
        print(f"{label:<10}{text}")
    print(f"{'log':<10}{Path(sys.executable).with_name('nightshift')} session show {artifacts}")


def report_lines(result: dict[str, Any]) -> list[tuple[str, str]]:
    """The lines of the report, each a label and a text."""
    calls, approvals, patch = result["toolCalls"], result["approvals"], result["patch"]
    lines = [
        ("outcome", f"{result['code']}, exit code {result['exitCode']}"),
        ("sandbox", f"{result['sandbox']['backend'] or 'none was chosen'}, {result['sandbox']['mode']}"),
        ("calls", f"{calls['total']} tool calls, {approvals['denied']} denied by policy"),
    ]
    lines += [("check", f"{check['name']} {'passed' if check['passed'] else 'failed'}") for check in result["checks"]]
    if patch is not None:
        files = "1 file" if patch["files"] == 1 else f"{patch['files']} files"
        lines.append(("patch", f"{files}, +{patch['insertions']} -{patch['deletions']}"))
    return lines


PREPARE = {"quick": prepare_quick, "real": prepare_real}
TASKS = {"quick": "demo.task.yaml", "real": "real.task.yaml"}

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
