"""Each call runs under its own mode; without a backend only danger-full-access runs."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.errors import ConfigError, InternalError, SandboxError
from runner.permission import Mode
from runner.sandbox.base import BARE
from runner.sandbox.executor import NOTHING_ENFORCED

if TYPE_CHECKING:
    from runner.testing.sandbox import Box


def test_danger_mode_runs_the_command_unchanged(bare_box: Box) -> None:
    """The same argv, no wrapper, no capability taken, everything reachable; and that is what is said."""
    executor = bare_box.executor(Mode.DANGER_FULL_ACCESS)
    argv = [
        "/bin/bash",
        "-c",
        'echo x > "$1/new"; grep Seccomp: /proc/self/status; tr "\\0" " " < /proc/$$/cmdline',
        "name",
        str(bare_box.outside),
    ]
    command = executor.command(argv, mode=Mode.DANGER_FULL_ACCESS)
    result = bare_box.run(argv[2], bare_box.outside, mode=Mode.DANGER_FULL_ACCESS)

    assert (command.argv, command.backend, command.wrapped) == (argv, BARE, False)
    assert (bare_box.outside / "new").exists()
    assert result.output.startswith(b"Seccomp:\t0\n/bin/bash -c echo x")
    assert executor.backend_name == BARE
    assert executor.not_enforced(Mode.DANGER_FULL_ACCESS) == NOTHING_ENFORCED


@pytest.mark.parametrize("mode", [Mode.READ_ONLY, Mode.WORKSPACE_WRITE])
def test_without_a_backend_a_tighter_call_is_refused(bare_box: Box, mode: Mode) -> None:
    """Never run bare: commands, background processes and the worker."""
    executor = bare_box.executor(Mode.DANGER_FULL_ACCESS)
    target = bare_box.workspace / "src" / "new"
    argv = ["/bin/sh", "-c", f"touch '{target}'"]
    with pytest.raises(SandboxError, match=f"{mode} needs a sandbox"):
        executor.run(argv, mode=mode, timeout=10, cancellation=bare_box.cancellation)
    with pytest.raises(SandboxError):
        executor.start_background(argv, mode=mode, output=str(bare_box.base / "output"), call_id="1")
    with pytest.raises(SandboxError):
        executor.worker(mode).call(
            "write", {"path": str(target), "content": "x"}, timeout=10, cancellation=bare_box.cancellation
        )

    assert not target.exists()


def test_one_call_may_escalate_and_the_next_is_confined_again(box: Box) -> None:
    """The mode goes with the call, and so does what is not enforced."""
    executor = box.executor()
    outside = ["/bin/sh", "-c", f"echo x > '{box.outside}/new'"]

    def run(mode: Mode) -> int | None:
        return executor.run(outside, mode=mode, timeout=20, cancellation=box.cancellation).exit_code

    assert run(Mode.WORKSPACE_WRITE) != 0
    assert not (box.outside / "new").exists()
    assert run(Mode.DANGER_FULL_ACCESS) == 0
    (box.outside / "new").unlink()
    assert run(Mode.WORKSPACE_WRITE) != 0
    box.assert_untouched()
    assert executor.not_enforced(Mode.DANGER_FULL_ACCESS) == NOTHING_ENFORCED
    assert executor.not_enforced(Mode.WORKSPACE_WRITE) != NOTHING_ENFORCED
    assert executor.backend_name == box.backend


def test_a_call_may_be_tighter_than_the_session(box: Box) -> None:
    """Read-only inside a workspace-write session writes nothing."""
    executor = box.executor()
    argv = ["/bin/sh", "-c", "echo x > README"]
    tight = executor.run(argv, mode=Mode.READ_ONLY, timeout=20, cancellation=box.cancellation)

    assert tight.exit_code != 0
    assert (box.workspace / "README").read_text() == "hello\n"


def test_further_writable_folders_are_for_one_command(box: Box) -> None:
    """The next command does not have them."""
    executor = box.executor()
    argv = ["/bin/sh", "-c", f"echo x >> '{box.outside}/folder/new'"]
    options: dict[str, Any] = {"mode": Mode.WORKSPACE_WRITE, "timeout": 20, "cancellation": box.cancellation}
    executor.run(argv, writable=[str(box.outside / "folder")], **options)
    executor.run(argv, **options)

    assert (box.outside / "folder" / "new").read_text() == "x\n"


def test_a_wrapper_that_breaks_in_mid_run_is_a_sandbox_failure(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code 3 with the wrapper's words, never a failed command."""
    executor = box.executor()
    real = executor.command

    def broken(*arguments: Any, **options: Any) -> Any:
        command = real(*arguments, **options)
        command.argv = ["/bin/sh", "-c", "echo no more namespaces; exit 1"]
        command.inner = None
        return command

    monkeypatch.setattr(executor, "command", broken)
    with pytest.raises(SandboxError, match="no more namespaces") as caught:
        executor.run(["/bin/true"], mode=executor.mode, timeout=20, cancellation=box.cancellation)
    executor.start_background(["/bin/true"], mode=executor.mode, output=str(box.base / "output"), call_id="1")
    time.sleep(0.2)
    with pytest.raises(SandboxError, match="was not started"):
        executor.background()

    assert caught.value.code.exit_code == 3
    assert caught.value.details["backend"] == box.backend


def test_private_folders_are_made_and_private(box: Box) -> None:
    """Folders tmp and home of the session, mode 0700, whatever the umask."""
    old = os.umask(0)
    try:
        executor = box.executor()
    finally:
        os.umask(old)

    assert executor.tmp == str(box.state / "tmp")
    assert executor.home == str(box.state / "home")
    for folder in (box.state / "tmp", box.state / "home"):
        assert folder.stat().st_mode & 0o777 == 0o700


def test_ended_background_processes_are_cleaned_up(box: Box) -> None:
    """What ended by itself is no longer listed, and ``stop_background`` names only what still ran."""
    executor = box.executor()
    for name, argv in (("short", ["/bin/true"]), ("long", ["/bin/sleep", "60"])):
        executor.start_background(argv, mode=executor.mode, output=str(box.base / name), call_id=name)
    while executor.background() != ["long"]:
        box.cancellation.wait(0.01)

    assert executor.stop_background() == ["long"]
    assert executor.stop_background() == []
    with pytest.raises(FileExistsError):
        executor.start_background(["/bin/true"], mode=executor.mode, output=str(box.base / "long"), call_id="other")
    executor.start_background(["/bin/sleep", "60"], mode=executor.mode, output=str(box.base / "x"), call_id="twice")
    with pytest.raises(InternalError, match="twice"):
        executor.start_background(["/bin/true"], mode=executor.mode, output=str(box.base / "y"), call_id="twice")


def test_a_relative_or_missing_workspace_is_refused(box: Box, monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """At once, with a hint where there is one."""
    monkeypatch.chdir(place)
    for path in (Path("workspace"), Path(), place / "missing"):
        with pytest.raises(ConfigError, match="workspace"):
            box.executor(workspace=path)


def test_a_workspace_that_is_gone_fails_the_call_and_not_the_sandbox(box: Box) -> None:
    """Deleted, or replaced by a link, as an escalated call can do it: commands and file operations say so."""
    executor = box.executor()
    worker = executor.worker(executor.mode)
    options: dict[str, Any] = {"mode": executor.mode, "timeout": 20, "cancellation": box.cancellation}
    read = {"path": str(box.workspace / "README"), "offset": 1, "limit": 1, "max_bytes": 100}
    asked: dict[str, Any] = {"timeout": 20, "cancellation": box.cancellation}
    assert worker.call("read", read, **asked)["ok"]
    assert executor.run(["/bin/true"], **options).workspace_lost is False
    moved = box.base / "moved"
    box.workspace.rename(moved)
    for replace_by in (None, moved):
        if replace_by is not None:
            box.workspace.symlink_to(replace_by)
        result = executor.run(["/bin/sh", "-c", "echo x > new"], **options)
        answer = worker.call("read", read, **asked)
        with pytest.raises(OSError, match="is gone"):
            executor.start_background(["/bin/true"], mode=executor.mode, output=str(box.base / "out"), call_id="1")

        assert result.workspace_lost
        assert result.exit_code == 126
        assert b"is gone" in result.output
        assert answer["code"] == "NOT_FOUND"
        assert "is gone" in answer["message"]
        assert not (moved / "new").exists()
    box.workspace.unlink()
    moved.rename(box.workspace)

    assert executor.run(["/bin/sh", "-c", "echo x > src/new"], **options).exit_code == 0
    assert worker.call("read", read, **asked)["ok"]
