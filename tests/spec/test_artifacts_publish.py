"""The artifacts directory: where it may lie, how outputs get in, in which order it is finished."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import stat
import zipfile
import zlib
from itertools import count
from typing import TYPE_CHECKING, Any

import pytest

from runner.artifacts.facts import RunFold
from runner.artifacts.patch import PatchInfo, make_patch
from runner.artifacts.publish import (
    ArtifactStore,
    open_beneath,
    publish,
)
from runner.config.directories import check_artifacts_dir, prepare_artifacts_dir
from runner.errors import ConfigError, ErrorCode, RunnerError, StorageError
from runner.redaction import Redactor
from runner.session import events as ev
from runner.session.export import Export, export_zip
from runner.session.log import SessionLog
from runner.session.store import open_session
from runner.workspace import prepare_workspace

if TYPE_CHECKING:
    from pathlib import Path

SECRET = "sk-0123456789abcdef"  # a made-up key


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    """A store whose events are kept in ``logged``."""
    directory = tmp_path / "artifacts"
    directory.mkdir()
    logged: list[ev.ArtifactWritten] = []
    made = ArtifactStore(directory, append=logged.append, redactor=Redactor({"KEY": SECRET}))
    made.logged = logged  # type: ignore[attr-defined]  # for the tests
    return made


def names(store: ArtifactStore) -> list[str]:
    """Paths of the events a store logged."""
    return [event.path for event in store.logged]  # type: ignore[attr-defined]  # see the fixture


# --- the directory -------------------------------------------------------------------------------


def test_the_directory_is_made_private(tmp_path: Path) -> None:
    """Parents too; an empty one is taken and closed to others."""
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "empty").mkdir(mode=0o755)
    made = prepare_artifacts_dir(tmp_path / "a" / "b", workspace=str(work))
    taken = prepare_artifacts_dir(tmp_path / "empty", workspace=str(work))

    assert [stat.S_IMODE(path.stat().st_mode) for path in (made, taken)] == [0o700, 0o700]


def test_folders_above_the_directory_are_made_private_whatever_the_umask(tmp_path: Path) -> None:
    """Each one that was missing is 0700; what was there stays as it is."""
    work, there = tmp_path / "work", tmp_path / "there"
    work.mkdir()
    there.mkdir()
    there.chmod(0o755)
    old = os.umask(0)
    try:
        prepare_artifacts_dir(there / "nightshift" / "sessions" / "one", workspace=str(work))
    finally:
        os.umask(old)

    modes = [stat.S_IMODE((there / name).stat().st_mode) for name in (".", "nightshift", "nightshift/sessions")]
    assert modes == [0o755, 0o700, 0o700]


def test_a_directory_the_agent_could_write_is_refused(tmp_path: Path) -> None:
    """Inside the workspace or a writable root, by whatever name."""
    work, more = tmp_path / "work", tmp_path / "more"
    work.mkdir()
    more.mkdir()
    (tmp_path / "link").symlink_to(work)
    for path in (work / "out", more / "out", tmp_path / "link" / "out", work):
        with pytest.raises(ConfigError, match="artifacts"):
            check_artifacts_dir(path, str(work), [str(more)])

    assert list(work.iterdir()) == []


def test_a_directory_that_holds_the_workspace_is_refused(tmp_path: Path) -> None:
    """Its content is not ours alone."""
    (tmp_path / "out").mkdir()
    with pytest.raises(ConfigError):
        check_artifacts_dir(tmp_path / "out", str(tmp_path / "out" / "work"))


def test_a_directory_that_is_not_empty_is_refused(tmp_path: Path) -> None:
    """Nothing is overwritten; a file is no directory."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "x").touch()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="not empty"):
        prepare_artifacts_dir(tmp_path / "full", workspace="/nowhere")
    with pytest.raises(ConfigError, match="no directory"):
        prepare_artifacts_dir(tmp_path / "file", workspace="/nowhere")


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path: Path) -> None:
    """Its parent is a file."""
    (tmp_path / "file").touch()
    with pytest.raises((StorageError, ConfigError)):
        prepare_artifacts_dir(tmp_path / "file" / "out", workspace="/nowhere")


# --- files ---------------------------------------------------------------------------------------


def test_a_written_file_is_private_and_logged(store: ArtifactStore) -> None:
    """With size and digest."""
    artifact = store.write("usage.json", b"{}\n")

    assert artifact.as_json() == {
        "name": "usage.json",
        "path": "usage.json",
        "sha256": hashlib.sha256(b"{}\n").hexdigest(),
        "bytes": 3,
    }
    assert names(store) == ["usage.json"]
    assert stat.S_IMODE((store.directory / "usage.json").stat().st_mode) == 0o600


def test_a_store_that_cannot_write_says_so(store: ArtifactStore) -> None:
    """The directory went away."""
    store.directory.rmdir()
    with pytest.raises(StorageError, match="cannot be written"):
        store.write("usage.json", b"")
    with pytest.raises(StorageError, match="cannot be read"):
        store.add("changes.patch")


def test_spilled_results_are_taken_in_without_an_event(store: ArtifactStore) -> None:
    """Their results name them already; links are left out."""
    (store.directory / "spill").mkdir()
    (store.directory / "spill" / "call_1.txt").write_text("long")
    (store.directory / "spill" / "link").symlink_to("/etc/passwd")
    store.add_folder("spill")
    store.add_folder("media")

    assert [artifact.path for artifact in store.artifacts] == ["spill/call_1.txt"]
    assert names(store) == []


# --- declared outputs ----------------------------------------------------------------------------


def test_declared_outputs_are_copied_to_their_paths(store: ArtifactStore, tmp_path: Path) -> None:
    """Bytes as they are, 0600, logged under their declared names."""
    work = tmp_path / "work"
    (work / "deep" / "er").mkdir(parents=True)
    (work / "report.md").write_bytes(b"\xff\r\n")
    (work / "deep" / "er" / "x.bin").write_bytes(b"\0" * 3_000_000)
    missing = store.copy_outputs(str(work), ["report.md", "deep/er/x.bin", "./report.md"])

    assert [(m.path, m.reason) for m in missing] == []
    assert (store.directory / "files" / "report.md").read_bytes() == b"\xff\r\n"
    assert (store.directory / "files" / "deep" / "er" / "x.bin").stat().st_size == 3_000_000
    assert stat.S_IMODE((store.directory / "files" / "report.md").stat().st_mode) == 0o600
    assert sorted(names(store)) == ["files/deep/er/x.bin", "files/report.md"]


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("absent.md", "does not exist"),
        ("absent/absent.md", "does not exist"),
        ("link.md", "a link"),
        ("linked/passwd", "a link"),
        ("folder", "no regular file"),
        ("pipe", "no regular file"),
        ("file/inside", "a link or a file"),
        ("../outside.md", "leaves the workspace"),
        ("/etc/passwd", "leaves the workspace"),
        ("large", "the limit is 10"),
    ],
)
def test_what_is_no_plain_file_of_the_workspace_is_missing(
    store: ArtifactStore, tmp_path: Path, path: str, reason: str
) -> None:
    """An agent cannot make the runner publish a file of its choice."""
    work = tmp_path / "work"
    (work / "folder").mkdir(parents=True)
    (tmp_path / "outside.md").write_text("secret")
    (work / "link.md").symlink_to(tmp_path / "outside.md")
    (work / "linked").symlink_to("/etc")
    (work / "file").write_text("x")
    (work / "large").write_text("x" * 11)
    os.mkfifo(work / "pipe")
    (missing,) = store.copy_outputs(str(work), [path], limit=10)

    assert missing.path == path
    assert reason in missing.reason
    assert str(missing) == f"{path} ({missing.reason})"
    assert names(store) == []
    assert not [found for found in store.directory.rglob("*") if found.is_file()]


def test_a_link_in_place_of_a_folder_is_not_followed(tmp_path: Path) -> None:
    """Each part of the path is opened beneath the one before."""
    (tmp_path / "work" / "a").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "x").write_text("secret")
    (tmp_path / "work" / "a" / "b").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):  # noqa: PT011  # ELOOP or ENOTDIR, as the system likes
        open_beneath(str(tmp_path / "work"), "a/b/x")


# --- secrets -------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, (1 << 20) - 7, 3 << 20])
def test_a_declared_output_that_holds_a_secret_is_withheld(store: ArtifactStore, tmp_path: Path, size: int) -> None:
    """Wherever it stands, across two blocks too; the reason names it, and nothing is left of the copy."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "out.txt").write_bytes(b"\xff" * size + SECRET.encode() + b"\n" * 10)
    (work / "fine.txt").write_bytes(b"\xff" * size)

    missing = store.copy_outputs(str(work), ["out.txt", "fine.txt"])

    assert [str(output) for output in missing] == ["out.txt (it is withheld, since it holds the secret KEY)"]
    assert names(store) == ["files/fine.txt"]
    assert not (store.directory / "files" / "out.txt").exists()


@pytest.mark.parametrize(
    "line", [SECRET, SECRET.encode().hex().upper(), "\n+".join(base64.b64encode(SECRET.encode()).decode())]
)
def test_a_patch_that_holds_a_secret_is_withheld(store: ArtifactStore, line: str) -> None:
    """In any form, cut into lines of the patch too; the cause says what to do, and no file is left."""
    (store.directory / "changes.patch").write_text(f"--- a/x\n+++ b/x\n@@ -0,0 +1 @@\n+{line}\n")

    with pytest.raises(RunnerError, match=r"changes\.patch is withheld: the changes hold the secret KEY") as caught:
        store.add_patch()

    assert caught.value.code is ErrorCode.TASK_FAILED
    assert caught.value.hint
    assert names(store) == []
    assert not (store.directory / "changes.patch").exists()


@pytest.mark.parametrize("before", [b"", bytes(200_000)])
def test_a_secret_in_a_binary_file_of_a_patch_is_found(store: ArtifactStore, tmp_path: Path, before: bytes) -> None:
    """Git compresses it; a new file whole, a changed one as a difference. A patch without it is published."""
    work = tmp_path / "work"
    work.mkdir()
    start = before + random.Random(1).randbytes(5_000) + b"\0"
    (work / "data.bin").write_bytes(start)
    workspace = prepare_workspace(str(work), state=tmp_path / "state")
    (work / "fine.bin").write_bytes(start + b"fine")
    make_patch(workspace.snapshot, store.directory / "changes.patch")
    assert b"GIT binary patch" in (store.directory / "changes.patch").read_bytes()
    store.add_patch()

    for name in ("data.bin", "new.bin"):
        (work / name).write_bytes(start + SECRET.encode() + b"\0end")
        make_patch(workspace.snapshot, store.directory / "changes.patch")
        with pytest.raises(RunnerError, match="hold the secret KEY"):
            store.add_patch()
        (work / name).write_bytes(start)


def test_a_long_line_hides_no_binary_file(store: ArtifactStore) -> None:
    """Where a piece of a line is read that looks like the beginning of a binary part, none begins."""
    packed = zlib.compress(SECRET.encode())
    line = (
        chr(len(packed) + (64 if len(packed) < 27 else 70))
        + base64.b85encode(packed + bytes(-len(packed) % 4)).decode()
    )
    text = "+" + "x" * (65_536 - 1) + "GIT binary patch\n" + "+" + "x" * (65_536 - 1) + "literal 9\n"
    real = f"GIT binary patch\nliteral {len(SECRET)}\n{line}\n\nliteral 0\nHcmV?d00001\n\n"
    (store.directory / "changes.patch").write_text(text + real)

    with pytest.raises(RunnerError, match="hold the secret KEY"):
        store.add_patch()


def test_the_report_holds_no_secret(store: ArtifactStore) -> None:
    """Names of changed files, and whatever else comes into it."""
    fold = RunFold({"id": "session-1", "createdAt": 1_000})
    fold.apply(ev.UserMessage(content=[], source={"kind": "user"}, role="user", id=SECRET, seq=0, time=0))
    (store.directory / "session.jsonl.zst").write_bytes(b"")
    patch = PatchInfo(files=1, insertions=1, deletions=0, tree="0" * 40, paths=(f"a/{SECRET}.txt",))

    publish(
        store,
        fold,
        fold.outcome.outcome(missing_outputs=[SECRET]),
        seal=lambda: "",
        export=lambda target: Export(target, 0, "", {}),
        patch=patch,
    )

    summary = (store.directory / "summary.md").read_text()
    assert SECRET not in summary
    assert "a/[redacted KEY].txt" in summary
    assert summary.count("[redacted KEY]") >= 2


# --- the end of a run ----------------------------------------------------------------------------


def test_the_directory_is_finished_in_order(tmp_path: Path) -> None:
    """Outputs, run/end, reports, seal, ZIP, result: as the log and the files tell it."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "a.txt").write_text("one\n")
    workspace = prepare_workspace(str(work), state=tmp_path / "state")
    directory = prepare_artifacts_dir(tmp_path / "artifacts", workspace=workspace.path)
    clock = count(1_000)
    log = SessionLog.create(directory, header={"id": "session-1", "cwd": str(work)}, clock=lambda: next(clock))
    fold = RunFold({"id": "session-1", "createdAt": 1_000})
    log.observers.append(fold.apply)
    for event in (
        ev.TurnStart(turn=1),
        ev.StepStart(turn=1, step=1),
        ev.StepEnd(turn=1, step=1),
        ev.TurnEnd(turn=1, reason={"kind": "completed"}),
    ):
        log.append(event)
    (work / "a.txt").write_text("two\n")
    (work / "report.md").write_text("report\n")
    store = ArtifactStore(directory, append=log.append, redactor=Redactor({}))
    patch = make_patch(workspace.snapshot, directory / "changes.patch")
    store.add_patch()
    missing = store.copy_outputs(workspace.path, ["report.md"])
    outcome = fold.outcome.outcome(missing_outputs=[str(output) for output in missing])
    log.append(outcome.run_end())
    done: list[str] = []

    def seal() -> str:
        done.append("seal")
        log.seal()
        log.close()
        return log.digest

    def export(target: Path) -> Export:
        done.append("zip")
        assert not (directory / "result.json").exists()
        return export_zip(directory, target)

    result = publish(store, fold, outcome, seal=seal, export=export, patch=patch)

    assert done == ["seal", "zip"]
    types = [event.TYPE for event in open_session(str(directory)).events()]
    end = types.index("run/end")
    assert types[:end].count("artifact/written") == 2
    assert types[end:] == ["run/end", "artifact/written", "artifact/written", "log/seal"]
    assert sorted(path.name for path in directory.iterdir()) == [
        "changes.patch",
        "files",
        "result.json",
        "session.jsonl.zst",
        "session.zip",
        "summary.md",
        "usage.json",
    ]
    assert json.loads((directory / "result.json").read_text()) == result
    listed: dict[str, Any] = {artifact["path"]: artifact for artifact in result["artifacts"]}
    assert sorted(listed) == sorted(
        ["changes.patch", "files/report.md", "session.jsonl.zst", "session.zip", "summary.md", "usage.json"]
    )
    for path, artifact in listed.items():
        data = (directory / path).read_bytes()
        assert (artifact["sha256"], artifact["bytes"]) == (hashlib.sha256(data).hexdigest(), len(data))
        assert stat.S_IMODE((directory / path).stat().st_mode) == 0o600
    assert result["patch"]["files"] == 2
    with zipfile.ZipFile(directory / "session.zip") as archive:
        assert hashlib.sha256(archive.read("session.jsonl")).hexdigest() == result["logDigest"]
