"""Nothing that a command leaves behind leads the mounts of the next one astray.

bubblewrap makes its mount points while the machine's real file system is at ``/oldroot``, and follows links on
the way. So no mount point may lie where a command could have put one. Landlock has no mounts; the promise is the same.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.errors import ConfigError, SandboxError
from runner.permission import Mode
from runner.testing.sandbox import make_box
from runner.workspace.isolation import prepare_workspace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from runner.sandbox.executor import Executor
    from runner.testing.sandbox import Box

LINKS = """
    ln -s "/oldroot$1" "$TMPDIR/tmp"; ln -s "/oldroot$1" "$TMPDIR/var"
    for folder in /tmp /var/tmp "$TMPDIR/.." "$TMPDIR/../.." "$PWD/.." "$PWD/../.."; do
        for each in "$folder"/*; do
            mv "$each" "$each-moved" && ln -s "/oldroot$1" "$each"
        done
    done
    true
"""


@pytest.fixture
def shared_box(backend: str) -> Iterator[Box]:
    """A box below ``/tmp``, in whose place a private folder may be mounted."""
    base = Path(os.path.realpath(tempfile.mkdtemp(prefix="nightshift-test-", dir="/tmp")))
    made = make_box(base / "box", backend)
    yield made
    made.close()
    shutil.rmtree(base)


def run(box: Box, executor: Executor, script: str, *arguments: str | Path, mode: Mode = Mode.WORKSPACE_WRITE) -> bytes:
    """Output of a bash script."""
    argv = ["/bin/bash", "-c", script, "bash", *map(str, arguments)]
    return executor.run(argv, mode=mode, timeout=30, cancellation=box.cancellation).output


@pytest.mark.parametrize("isolation", ["in-place", "copy"])
def test_links_in_temporary_folders_lead_no_mount_outside(shared_box: Box, isolation: str) -> None:
    """A command puts links in place of all folders above the session's own: the host stays, the next call works."""
    box = shared_box
    with prepare_workspace(
        str(box.workspace), state=box.state, isolation=isolation, base="HEAD", dirty="include"
    ) as workspace:
        executor = box.executor(workspace=Path(workspace.path))
        before = sorted(map(str, box.base.rglob("*")))
        for mode in (Mode.WORKSPACE_WRITE, Mode.READ_ONLY):
            run(box, executor, LINKS, box.outside, mode=mode)
            try:
                output = run(box, executor, 'cat README; rm "$TMPDIR/tmp" "$TMPDIR/var"', mode=mode)
            except SandboxError as error:
                output = error.message.encode()
            box.assert_untouched()  # first, since it is the worse of the two
            assert output == b"hello\n"
            assert sorted(map(str, box.base.rglob("*"))) == before
        answer = executor.worker(Mode.WORKSPACE_WRITE).call(
            "read",
            {"path": f"{workspace.path}/README", "offset": 1, "limit": 10, "max_bytes": 100},
            timeout=20,
            cancellation=box.cancellation,
        )
        executor.close()

    assert answer["value"]["text"] == "hello\n"
    box.assert_untouched()


def test_the_shared_temporary_folder_does_not_last(shared_box: Box) -> None:
    """What a command leaves in ``/tmp`` is gone with it or was refused; ``$TMPDIR`` keeps its files."""
    executor = shared_box.executor()
    output = run(shared_box, executor, 'echo x > /tmp/file && cat /tmp/file; echo kept > "$TMPDIR/file"')
    again = run(shared_box, executor, 'ls /tmp/file /var/tmp/file; cat "$TMPDIR/file"')

    assert output.startswith(b"x\n") == (shared_box.backend == "bubblewrap")
    assert again.count(b"No such file") == 2
    assert again.endswith(b"kept\n")


def test_a_folder_above_a_nested_writable_one_is_not_replaced(box: Box) -> None:
    """Where it can be moved away, the next call is refused; no mount follows the link in its place."""
    nested = box.workspace / "src" / "above" / "nested"
    nested.mkdir(parents=True)
    executor = box.executor(writable=(str(nested),))
    script = 'mkdir -p "src/above/nested"; mv src/above src/moved && ln -s "/oldroot$1" src/above; true'
    run(box, executor, script, box.outside)
    moved = (box.workspace / "src" / "above").is_symlink()
    if moved:
        with pytest.raises(SandboxError, match="symbolic link"):
            run(box, executor, "true")
    else:
        assert run(box, executor, "cat README") == b"hello\n"

    assert moved == (box.backend == "landlock")
    box.assert_untouched()


def test_private_folders_may_not_lie_where_commands_write(box: Box) -> None:
    """A temporary folder of the runner inside the workspace is a configuration error that says what to do."""
    box.state = box.workspace / "src" / "state"
    box.state.mkdir()
    with pytest.raises(ConfigError, match="lies in") as caught:
        box.executor()
    box.state = box.outside / "folder"
    with pytest.raises(ConfigError, match="lies in"):
        box.executor(writable=(str(box.outside),))

    assert "TMPDIR" in (caught.value.hint or "")
    box.assert_untouched()


def start_waiting(box: Box, executor: Executor) -> Path:
    """A background process that runs until it is ended; returns the file of its output."""
    output = box.base / "output"
    argv = ["/bin/bash", "-c", "echo up; sleep 60"]
    executor.start_background(argv, mode=Mode.WORKSPACE_WRITE, output=str(output), call_id="1")
    while output.read_bytes() != b"up\n":
        box.cancellation.wait(0.02)
    return output


@pytest.mark.parametrize("kind", ["folder", "file", "hidden"])
def test_a_background_process_cannot_replace_what_became_protected_after_its_start(box: Box, kind: str) -> None:
    """It could lead the next command's mounts outside while they are made: it ends first, and its output says why."""
    workspace = box.base / "without-git"
    (workspace / "a" / "deep").mkdir(parents=True)
    secret = workspace / "a" / "secret"
    executor = box.executor(workspace=workspace, hidden=(secret,))
    output = start_waiting(box, executor)
    run(box, executor, "echo x > a/file")
    assert executor.background() == ["1"]
    script = {
        "folder": "mkdir -p .git/objects; echo ref: refs/heads/main > .git/HEAD",
        "file": "echo gitdir: a/deep > .git",
        "hidden": "echo x > a/secret",
    }[kind]
    run(box, executor, script)
    result = run(box, executor, "echo y > a/file; cat a/file")

    assert result == b"y\n"
    assert executor.background() == []
    assert b"[ended: " in output.read_bytes()


def test_a_background_process_runs_on_where_it_can_replace_nothing(box: Box) -> None:
    """What is protected, hidden or writable by itself was so before it: commands of any mode do not end it."""
    secret, nested = box.workspace / "src" / "secret", box.workspace / "src" / "nested"
    secret.write_text("x")
    nested.mkdir()
    executor = box.executor(hidden=(secret,), writable=(str(nested),))
    output = start_waiting(box, executor)
    for mode in (Mode.WORKSPACE_WRITE, Mode.READ_ONLY, Mode.DANGER_FULL_ACCESS):
        run(box, executor, "mkdir -p src/inner && git -C src/inner init -q", mode=mode)
        arguments = {"path": str(box.workspace / "README"), "offset": 1, "limit": 10, "max_bytes": 100}
        assert executor.worker(mode).call("read", arguments, timeout=20, cancellation=box.cancellation)["ok"]

    assert executor.stop_background() == ["1"]
    assert output.read_bytes() == b"up\n"


def test_a_hidden_path_stays_hidden_when_the_link_to_it_is_replaced(box: Box) -> None:
    """The link may lie where a command can write; what it led to at the start is what is hidden."""
    secret = box.outside / "folder"
    (secret / "key").write_text("top secret")
    link = box.workspace / "src" / "link"
    link.symlink_to(secret)
    executor = box.executor(hidden=(link,))
    run(box, executor, "ln -sfn /usr src/link; rm -f src/link")
    output = run(box, executor, 'cat "$1/key"; cat src/link/key', secret)

    assert b"top secret" not in output
