"""Importing costs nothing: no I/O, nothing heavy, nothing of the wrong layer."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
HEAVY = ["httpx", "pydantic", "structlog", "yaml", "jsonschema_rs", "tree_sitter", "ctypes", "asyncio"]

WATCH_IMPORT = """
import json, os, sys
seen = []
def hook(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        if writes or not str(path).endswith((".py", ".pyc", ".so", ".zip")):
            seen.append([event, str(path)])
    elif event.partition(".")[0] in ("socket", "subprocess", "shutil", "tempfile", "ctypes", "sqlite3", "fcntl"):
        seen.append([event, repr(arguments)])
    elif event in ("os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.mkdir", "os.remove",
                   "os.rename", "os.rmdir", "os.chmod", "os.putenv", "os.unsetenv", "os.link", "os.symlink",
                   "os.truncate", "os.utime", "signal.pthread_kill", "os.kill"):
        seen.append([event, repr(arguments)])
sys.addaudithook(hook)
import runner
print(json.dumps({"seen": seen, "modules": sorted(sys.modules)}))
"""


def _python(*arguments: str) -> str:
    environment = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, check=False, cwd="/"
    )
    assert process.returncode == 0, process.stderr
    return process.stdout


def test_importing_the_package_does_no_io() -> None:
    """Apart from reading its own code, ``import runner`` touches neither files nor processes nor the network."""
    facts = json.loads(_python("-c", WATCH_IMPORT))

    assert facts["seen"] == []


def test_importing_the_package_loads_nothing_heavy() -> None:
    """None of the heavy libraries is loaded by ``import runner``, click neither."""
    facts = json.loads(_python("-c", WATCH_IMPORT))

    assert set(facts["modules"]).isdisjoint({*HEAVY, "click"})


def test_help_loads_nothing_heavy() -> None:
    """``nightshift --help`` shows its text without loading httpx or any other heavy library."""
    program = (
        "import sys, json\n"
        "from runner.cli.main import run_cli\n"
        "code = run_cli(['--help'])\n"
        "print(json.dumps([code, sorted(sys.modules)]))\n"
    )

    code, modules = json.loads(_python("-c", program).splitlines()[-1])

    assert code == 0
    assert set(modules).isdisjoint(HEAVY)


INSIDE = [
    path.relative_to(REPOSITORY / "runner" / "sandbox").as_posix()
    for path in (
        *(REPOSITORY / "runner" / "sandbox" / name for name in ("supervisor.py", "worker.py")),
        *sorted((REPOSITORY / "runner" / "sandbox" / "files").glob("*.py")),
    )
]


@pytest.mark.parametrize("module", INSIDE)
def test_what_runs_inside_the_sandbox_needs_only_the_standard_library(module: str) -> None:
    """The supervisor and the file worker import nothing but the standard library and what lies beside them."""
    tree = ast.parse((REPOSITORY / "runner" / "sandbox" / module).read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    imported |= {node.module or "." for node in froms if node.level == 0}

    assert {name.partition(".")[0] for name in imported} <= sys.stdlib_module_names
    beside = {f"files/{node.module}.py" for node in froms if node.level}
    assert beside <= set(INSIDE)
