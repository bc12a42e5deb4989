"""A file tool never says that it made a file on this machine when it only made one in a private folder."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.errors import ErrorCode
from runner.messages import text_of
from runner.permission import Mode
from runner.testing.sandbox import make_box
from runner.tools.base import Invocation
from runner.tools.builtin.files import EditFile, WriteFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.sandbox.executor import Executor
    from runner.testing.sandbox import Box

NOTE = "in the private temporary folder only"


@pytest.fixture
def below_tmp(backend: str) -> Iterator[Box]:
    """A box below /tmp, in whose place bubblewrap puts a private folder."""
    folder = Path(os.path.realpath(tempfile.mkdtemp(prefix="nightshift-test-", dir="/tmp")))
    box = make_box(folder, backend)
    yield box
    box.close()
    shutil.rmtree(folder)


def use(tool: WriteFile | EditFile, box: Box, mode: Mode = Mode.WORKSPACE_WRITE, **arguments: Any) -> tuple[Any, str]:
    """Error code and text of one call."""
    outcome = tool.execute(
        Invocation(
            call_id="1",
            arguments=arguments,
            facts=tool.facts(arguments),
            mode=mode,
            timeout=20,
            cancellation=box.cancellation,
            may_escalate=False,
        )
    )
    return outcome.error, text_of(list(outcome.content))


def shell(executor: Executor, box: Box, script: str) -> bytes:
    """Output of a command."""
    argv = ["/bin/bash", "-c", script]
    return executor.run(argv, mode=Mode.WORKSPACE_WRITE, timeout=20, cancellation=box.cancellation).output


def test_a_file_beside_a_workspace_below_tmp_is_said_to_be_private_or_is_refused(below_tmp: Box) -> None:
    """Commands see what the tool made; the machine does not have it, and the answer says so."""
    executor = below_tmp.executor()
    error, text = use(WriteFile(executor), below_tmp, path="../out.txt", content="x\n")
    seen = shell(executor, below_tmp, "cat ../out.txt 2>/dev/null; true")

    assert not (below_tmp.base / "out.txt").exists()
    if below_tmp.backend == "bubblewrap":
        assert error is None
        assert text.startswith(f"made {below_tmp.base}/out.txt (2 bytes) {NOTE}")
        assert seen == b"x\n"
        error, text = use(
            EditFile(executor), below_tmp, path=f"{below_tmp.base}/out.txt", edits=[{"old": "x", "new": "y"}]
        )
        assert error is None
        assert NOTE in text
        assert shell(executor, below_tmp, "cat ../out.txt") == b"y\n"
    else:
        assert error is ErrorCode.SANDBOX_DENIED
        assert seen == b""


def test_what_is_really_written_has_no_such_note(below_tmp: Box) -> None:
    """The positive twin: the workspace, a further root, the session's temporary folder, and bare runs."""
    (below_tmp.base / "more").mkdir()
    executor = below_tmp.executor(writable=(str(below_tmp.base / "more"),))
    for path in ("src/new", f"{below_tmp.base}/more/new", f"{executor.tmp}/new"):
        error, text = use(WriteFile(executor), below_tmp, path=path, content="x\n")

        assert error is None, text
        assert text.endswith("(2 bytes)")
        assert (below_tmp.workspace / path).read_text() == "x\n"
    bare = below_tmp.executor(Mode.DANGER_FULL_ACCESS)
    _, text = use(WriteFile(bare), below_tmp, Mode.DANGER_FULL_ACCESS, path="../out.txt", content="x\n")

    assert text.endswith("(2 bytes)")
    assert (below_tmp.base / "out.txt").read_text() == "x\n"


def test_outside_of_tmp_both_backends_refuse(box: Box) -> None:
    """There the path means what it means on the machine."""
    error, text = use(WriteFile(box.executor()), box, path="../out.txt", content="x\n")

    assert error is ErrorCode.SANDBOX_DENIED
    assert NOTE not in text
    assert not (box.base / "out.txt").exists()
