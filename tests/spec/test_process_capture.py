"""Output of a command: bytes as they came, bounded in memory, whole in a file when asked for."""

from __future__ import annotations

import os
import resource
import time
from typing import TYPE_CHECKING, Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import StorageError
from runner.sandbox import process
from runner.sandbox.base import BARE, ConfinedCommand, ProcessResult
from runner.sandbox.supervisor import children_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture
def cancellation() -> Iterator[Cancellation]:
    """A flag that stays down."""
    flag = Cancellation()
    yield flag
    flag.close()


def bash(script: str, cancellation: Cancellation, **options: Any) -> ProcessResult:
    """Run a bash script without a sandbox."""
    command = ConfinedCommand(
        argv=["/bin/bash", "-c", script], environment={"PATH": "/usr/bin:/bin"}, cwd="/", backend=BARE
    )
    return process.run(command, timeout=options.pop("timeout", 30), cancellation=cancellation, **options)


def test_both_streams_come_in_the_order_they_were_written(cancellation: Cancellation) -> None:
    """Both share one pipe."""
    result = bash("echo 1; echo 2 >&2; echo 3", cancellation)

    assert (result.output, result.total_bytes, result.truncated, result.overflow) == (b"1\n2\n3\n", 6, False, None)
    assert result.exit_code == 0


def test_bytes_that_are_no_text_stay_what_they_are(cancellation: Cancellation) -> None:
    """Invalid UTF-8, NUL and carriage returns are not touched."""
    assert bash(r"printf '\377\000\r\n\303'", cancellation).output == b"\xff\x00\r\n\xc3"


@pytest.mark.parametrize("size", [0, 1, 999, 1000, 1001, 1002, 5000, 300_000])
@pytest.mark.parametrize("capture", [0, 1, 2, 1000])
def test_head_and_tail_are_kept(cancellation: Cancellation, tmp_path: Path, size: int, capture: int) -> None:
    """Of more than ``capture`` bytes the first and the last half stay; the file has them all."""
    everything = bytes(i * 7 % 251 for i in range(size))
    source, overflow = tmp_path / "source", tmp_path / "overflow"
    source.write_bytes(everything)
    result = bash(f"cat '{source}'", cancellation, capture=capture, overflow=str(overflow))

    head = capture // 2
    tail = capture - head
    expected = everything if size <= capture else everything[:head] + everything[size - tail :]
    assert result.output == expected
    assert result.total_bytes == size
    assert result.truncated == (size > capture)
    if size > capture:
        assert result.overflow == str(overflow)
        assert overflow.read_bytes() == everything
        assert overflow.stat().st_mode & 0o777 == 0o600
    else:
        assert result.overflow is None
        assert not overflow.exists()


def test_two_hundred_megabytes_use_little_memory(cancellation: Cancellation, tmp_path: Path) -> None:
    """Neither many lines nor one endless line fill the memory; the file has every byte."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    overflow = tmp_path / "overflow"
    result = bash("head -c 200000000 /dev/zero | tr '\\0' x", cancellation, capture=100_000, overflow=str(overflow))
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before

    assert result.total_bytes == overflow.stat().st_size == 200_000_000
    assert len(result.output) == 100_000
    assert grown < 20_000


def test_the_overflow_file_has_a_limit(
    cancellation: Cancellation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An endless writer cannot fill the disk: what comes after the limit is counted only."""
    monkeypatch.setattr(process, "OVERFLOW_LIMIT", 10_000)
    overflow = tmp_path / "overflow"
    result = bash("head -c 50000 /dev/zero", cancellation, capture=100, overflow=str(overflow))

    assert overflow.stat().st_size == 10_000
    assert result.total_bytes == 50_000


@pytest.mark.parametrize("place", ["missing/overflow", "exists", "link"])
def test_an_overflow_file_that_cannot_be_made_is_a_storage_failure(
    cancellation: Cancellation, tmp_path: Path, place: str
) -> None:
    """A missing folder, an existing file, a link: STORAGE_FAILED, and the command is gone."""
    (tmp_path / "exists").write_text("kept")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    before = children_of(os.getpid())
    with pytest.raises(StorageError, match=place.rpartition("/")[2]) as caught:
        bash("head -c 5000 /dev/zero; sleep 60", cancellation, capture=100, overflow=str(tmp_path / place))

    assert caught.value.hint
    assert children_of(os.getpid()) == before
    assert (tmp_path / "exists").read_text() == "kept"
    assert not (tmp_path / "elsewhere").exists()


def test_a_command_reads_what_it_is_given(cancellation: Cancellation) -> None:
    """Nothing by default, never the runner's own stdin; bytes when given, more than a pipe holds."""
    assert bash("wc -c; readlink /proc/self/fd/0", cancellation).output == b"0\n/dev/null\n"
    assert bash("wc -c", cancellation, stdin=b"x" * 1_000_000).output == b"1000000\n"
    assert bash("true", cancellation, stdin=b"x" * 1_000_000).exit_code == 0


def test_output_before_the_end_is_complete(cancellation: Cancellation) -> None:
    """A command that ends right after a large write loses none of it."""
    for _ in range(20):
        assert bash("head -c 700000 /dev/zero", cancellation).total_bytes == 700_000


def test_the_duration_is_the_commands(cancellation: Cancellation) -> None:
    """In seconds, from before its start to after its end."""
    began = time.monotonic()
    result = bash("sleep 0.2", cancellation)

    assert 0.2 <= result.duration <= time.monotonic() - began
