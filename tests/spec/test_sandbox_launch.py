"""Programs of our own start by absolute path, without what the environment or a stale file could change."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from pathlib import Path

import pytest

from runner.sandbox import launch


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in a folder that stands for the package's."""
    monkeypatch.setattr(launch, "__file__", str(tmp_path / "launch.py"))
    launch.own_program.cache_clear()
    path = tmp_path / "program.py"
    path.write_text("import sys; print('one', sys.flags.isolated, sys.flags.no_site, __name__)\n")
    return path


def output() -> str:
    """What the program prints when it is started as the sandbox does."""
    launch.own_program.cache_clear()
    environment = {"PYTHONPATH": "/evil", "PYTHONSTARTUP": "/evil"}
    return subprocess.run(
        launch.own_program("program.py"), capture_output=True, text=True, check=True, env=environment
    ).stdout


def test_a_program_runs_isolated(program: Path) -> None:
    """No site, no environment, as the main program; by the path of its source where nothing is compiled."""
    assert output() == "one 1 1 __main__\n"
    assert launch.own_program("program.py")[-1] == str(program)
    assert launch.own_program("program.py")[0] == os.path.realpath(launch.interpreter()[0])


def test_bytecode_of_this_source_is_used(program: Path) -> None:
    """Compiled once, the program starts from the compiled file and does the same."""
    py_compile.compile(str(program), doraise=True)

    assert output() == "one 1 1 __main__\n"
    assert launch.own_program("program.py")[-1].endswith(f"{sys.implementation.cache_tag}.pyc")


@pytest.mark.parametrize("change", ["text", "time", "magic", "short", "hash"])
def test_bytecode_of_anything_else_is_not(program: Path, change: str) -> None:
    """A changed source, another interpreter, a cut file, another kind of check: the source runs."""
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH if change == "hash" else None
    compiled = py_compile.compile(str(program), doraise=True, invalidation_mode=mode)
    assert compiled is not None
    content = Path(compiled).read_bytes()
    before = program.stat()
    program.write_text(program.read_text().replace("one", "two" if change != "text" else "other"))
    if change != "time":
        os.utime(program, ns=(before.st_atime_ns, before.st_mtime_ns))
    else:
        os.utime(program, ns=(before.st_atime_ns, before.st_mtime_ns + 5_000_000_000))
    if change == "magic":
        Path(compiled).write_bytes(b"\0\0\0\0" + content[4:])
    if change == "short":
        Path(compiled).write_bytes(content[:7])

    assert output().startswith("other" if change == "text" else "two")


def test_a_memory_file_is_read_once_from_its_start() -> None:
    """Whole, however large, and closed in programs that are not given it."""
    content = os.urandom(3_000_000)
    descriptor = launch.memory_file("content", content)
    try:
        assert not os.get_inheritable(descriptor)
        with open(descriptor, "rb", closefd=False) as file:
            assert file.read() == content
    finally:
        os.close(descriptor)
