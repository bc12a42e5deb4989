"""Ordinary tools work inside: temporary files, pools, subprocesses, git, pipes, locales."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from runner.permission import Mode

if TYPE_CHECKING:
    from runner.testing.sandbox import Box


def test_shell_tools_work(box: Box) -> None:
    """mktemp, pipes that end early, here-documents, process substitution, /dev/stdout, job control."""
    script = """
        set -e
        file=$(mktemp); echo text > "$file"; cat "$file"; folder=$(mktemp -d); rmdir "$folder"
        yes | head -n 1
        cat <<< here; cat <(echo substituted)
        echo direct > /dev/stdout; echo error > /dev/stderr
        sleep 0.01 & wait; git status --porcelain
        test -z "$(cat)" && echo "stdin is empty"
    """
    result = box.run(script)

    assert result.output.decode().split("\n") == [
        "text", "y", "here", "substituted", "direct", "error", "stdin is empty", ""
    ]  # fmt: skip
    assert result.exit_code == 0


def test_python_pools_and_event_loops_work(box: Box) -> None:
    """Pools of multiprocessing with its semaphores, asyncio with subprocesses, threads, temporary files."""
    code = """
import asyncio, multiprocessing, subprocess, tempfile, threading
def double(value):
    return value * 2
async def main():
    process = await asyncio.create_subprocess_exec("echo", "asyncio", stdout=subprocess.PIPE)
    output, _ = await process.communicate()
    print(output.decode().strip())
    await asyncio.to_thread(print, "thread")
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(2) as pool:
        print(pool.map(double, [1, 2]))
    queue = multiprocessing.get_context("fork").Queue()
    queue.put("queued"); print(queue.get())
    asyncio.run(main())
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"x")
    print(subprocess.run(["cat"], input="piped", text=True, capture_output=True).stdout)
"""
    (box.workspace / "src" / "main.py").write_text(code)
    executor = box.executor()
    result = executor.run(
        [sys.executable, "src/main.py"], mode=Mode.WORKSPACE_WRITE, timeout=50, cancellation=box.cancellation
    )

    assert result.output.decode().split("\n") == ["[2, 4]", "queued", "asyncio", "thread", "piped", ""]


def test_a_test_suite_runs(box: Box) -> None:
    """A suite under pytest from this environment, without a cache folder, in a workspace that is a repository."""
    (box.workspace / "src" / "test_it.py").write_text("def test_it(tmp_path):\n    (tmp_path / 'x').write_text('x')\n")
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", "src"]
    result = box.executor().run(argv, mode=Mode.WORKSPACE_WRITE, timeout=50, cancellation=box.cancellation)

    assert b"1 passed" in result.output, result.output


def test_stdin_and_working_directory_are_what_was_asked_for(box: Box) -> None:
    """Bytes given are read to their end; PWD and the directory agree."""
    result = box.executor().run(
        ["/bin/bash", "-c", 'wc -c; pwd; echo "$PWD"; echo "$ADDED"'],
        mode=Mode.WORKSPACE_WRITE,
        timeout=20,
        cancellation=box.cancellation,
        cwd=str(box.workspace / "src"),
        stdin=b"x" * 300_000,
        environment={"ADDED": "yes"},
    )
    folder = str(box.workspace / "src")

    assert result.output.decode().split() == ["300000", folder, folder, "yes"]
