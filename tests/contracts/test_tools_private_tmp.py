"""A file tool never says that it made a file where nothing lasts and the machine has none."""

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

    from runner.testing.sandbox import Box

NOTE = "The temporary folder is"


@pytest.fixture
def below_tmp(backend: str) -> Iterator[Box]:
    """A box below /tmp, in whose place bubblewrap puts a fresh folder for each command."""
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


def test_a_file_beside_a_workspace_below_tmp_is_refused(below_tmp: Box) -> None:
    """The folder there is fresh for each command, or closed; the answer names the temporary folder that lasts."""
    executor = below_tmp.executor()
    for path in ("../out.txt", "/tmp/new/out.txt", "/var/tmp/out.txt"):
        error, text = use(WriteFile(executor), below_tmp, path=path, content="x\n")

        assert error is ErrorCode.SANDBOX_DENIED
        assert f"temporary folder is {executor.tmp}" in text
        assert (NOTE in text) == (below_tmp.backend == "bubblewrap")
    (below_tmp.base / "out.txt").write_text("x\n")
    edits = [{"old": "x", "new": "y"}]
    error, text = use(EditFile(executor), below_tmp, path=f"{below_tmp.base}/out.txt", edits=edits)

    assert error is ErrorCode.SANDBOX_DENIED
    assert f"temporary folder is {executor.tmp}" in text
    assert (below_tmp.base / "out.txt").read_text() == "x\n"
    assert not Path("/tmp/new/out.txt").exists()


def test_what_lasts_is_written(below_tmp: Box) -> None:
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
