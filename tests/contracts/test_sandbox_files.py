"""What a confined command may change in the file system, judged by the host."""

from __future__ import annotations

import array
import fcntl
import os
import secrets
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.errors import ConfigError, SandboxError
from runner.permission import Mode
from runner.testing.sandbox import CANARY, make_box

if TYPE_CHECKING:
    from runner.testing.sandbox import Box

WRITES = {
    "create": 'echo x > "$1/new"',
    "mkdir": 'mkdir "$1/new"',
    "mkfifo": 'mkfifo "$1/new"',
    "symlink": 'ln -s /etc/passwd "$1/new"',
    "append": 'echo x >> "$1/canary"',
    "overwrite": 'echo x > "$1/canary"',
    "truncate": 'truncate -s 0 "$1/canary"',
    "unlink": 'rm -f "$1/canary"',
    "rmdir": 'rmdir "$1/folder"',
    "rename": 'mv "$1/canary" "$1/other"',
    "rename out": 'mv src/main.py "$1/folder/"',
    "rename in": 'mv "$1/canary" src/canary',
    "move the folder": 'mv "$1" "$1-moved"',
}


def tree(folder: Path) -> dict[str, str | None]:
    """Every path below a folder, with the content of regular files."""
    return {str(path): path.read_text() if path.is_file() else None for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("name", WRITES)
def test_nothing_changes_outside_the_workspace(box: Box, name: str) -> None:
    """Each way to write fails outside and leaves the host as it was."""
    result = box.run(WRITES[name], box.outside)

    box.assert_untouched()
    assert result.exit_code != 0, result.output
    assert (box.workspace / "src" / "main.py").read_text() == "print('main')\n"


@pytest.mark.parametrize("name", [name for name in WRITES if name != "move the folder"])
def test_the_same_writes_work_inside_the_workspace(box: Box, name: str) -> None:
    """The positive twin: in a folder of the workspace each of them succeeds."""
    inside = box.workspace / "src" / "inside"
    (inside / "folder").mkdir(parents=True)
    (inside / "canary").write_text("old\n")

    before = tree(box.workspace / "src")
    result = box.run(WRITES[name], inside)

    assert result.exit_code == 0, result.output
    assert tree(box.workspace / "src") != before


def test_links_do_not_lead_out(box: Box) -> None:
    """Neither through a link to a file, nor to a folder, nor by a hard link is anything outside written."""
    (box.workspace / "src" / "file-link").symlink_to(box.canary)
    (box.workspace / "src" / "folder-link").symlink_to(box.outside)
    script = """
        echo x > src/file-link
        echo x > src/folder-link/new
        ln -s "$1" src/own-link && echo x > src/own-link/new
        ln "$1/canary" src/hard && echo x > src/hard
        echo x > /proc/self/root"$1"/new
        echo x > /proc/self/cwd/../outside/new
        cd "$1" && echo x > new
        true
    """
    box.run(script, box.outside)

    box.assert_untouched()
    assert box.canary.stat().st_nlink == 1


def test_links_inside_the_workspace_are_followed(box: Box) -> None:
    """The positive twin: links to a file and to a folder, one of a command's own making, and a hard link."""
    (box.workspace / "src" / "real").mkdir()
    (box.workspace / "src" / "file-link").symlink_to("main.py")
    script = """
        set -e
        echo 1 > src/file-link; ln -s real src/folder-link; echo 2 > src/folder-link/new
        ln src/main.py src/hard; echo 3 >> src/hard; echo 4 >> /proc/self/cwd/src/main.py
    """
    result = box.run(script)

    assert result.exit_code == 0, result.output
    assert (box.workspace / "src" / "main.py").read_text() == "1\n3\n4\n"
    assert (box.workspace / "src" / "real" / "new").read_text() == "2\n"
    assert (box.workspace / "src" / "main.py").stat().st_nlink == 2


def test_two_outside_files_cannot_be_exchanged(box: Box) -> None:
    """An exchanging rename between the workspace and the outside fails in both directions."""
    code = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
result = libc.renameat2(-100, os.fsencode(sys.argv[1]), -100, os.fsencode(sys.argv[2]), 2)
print(result, os.strerror(ctypes.get_errno()))
"""
    swapped = box.workspace / "src" / "main.py"
    outside = box.python(code, box.canary, swapped)
    (box.workspace / "src" / "other.py").write_text("other\n")
    inside = box.python(code, box.workspace / "src" / "other.py", swapped)

    box.assert_untouched()
    assert outside.output.startswith(b"-1")
    assert inside.output.startswith(b"0"), inside.output
    assert swapped.read_text() == "other\n"


METADATA = """
import os, sys
path = sys.argv[1]
for name, change in (
    ("mode", lambda: os.chmod(path, 0o777)),
    ("times", lambda: os.utime(path, (1, 1))),
    ("attribute", lambda: os.setxattr(path, "user.nightshift", b"x")),
    ("owner", lambda: os.chown(path, 1, 1)),
):
    try:
        change()
        print(name)
    except OSError as error:
        print(error, file=sys.stderr)
"""


def metadata(path: Path) -> dict[str, object]:
    """Mode, times, extended attributes and owner of a file."""
    found = path.stat()
    return {
        "mode": stat.S_IMODE(found.st_mode),
        "times": found.st_mtime,
        "attribute": os.listxattr(path),
        "owner": (found.st_uid, found.st_gid),
    }


def changed_metadata(before: dict[str, object], path: Path) -> set[str]:
    """Which kinds are no longer what they were."""
    after = metadata(path)
    return {name for name in before if before[name] != after[name]}


def test_metadata_outside_is_kept_or_listed_as_not_enforced(box: Box) -> None:
    """Mode, times, attributes and owner: bubblewrap keeps them, Landlock says that it does not."""
    before = metadata(box.canary)
    box.python(METADATA, box.canary)
    changed = changed_metadata(before, box.canary)

    assert changed == (set() if box.backend == "bubblewrap" else {"mode", "times", "attribute"})
    assert bool(changed) == ("metadata" in box.executor().not_enforced(Mode.WORKSPACE_WRITE))
    assert box.canary.read_text() == CANARY


def test_metadata_inside_can_be_changed(box: Box) -> None:
    """The positive twin; a file's owner stays in any case, since no command has the capability."""
    inside = box.workspace / "src" / "main.py"
    before = metadata(inside)
    result = box.python(METADATA, inside)

    assert changed_metadata(before, inside) == {"mode", "times", "attribute"}, result.output


def test_metadata_of_devices_is_kept_or_listed_as_not_enforced(box: Box) -> None:
    """/dev/null is the host's own, wherever it is mounted: who owns it can change its times."""
    before = Path("/dev/null").stat()
    box.run("touch -d 2001-01-01 /dev/null")
    changed = Path("/dev/null").stat().st_mtime_ns != before.st_mtime_ns
    if changed:
        os.utime("/dev/null", ns=(before.st_atime_ns, before.st_mtime_ns))
    listed = {"metadata", "device_metadata"} & set(box.executor().not_enforced(Mode.WORKSPACE_WRITE))

    assert changed == (os.geteuid() == 0)
    assert not changed or listed


FLAGS = """
import array, fcntl, os, sys
target = os.open(sys.argv[1], os.O_RDONLY)
flags = array.array("l", [0])
fcntl.ioctl(target, 0x80086601, flags)
print("read", flush=True)
flags[0] |= 0x40  # no dump
fcntl.ioctl(target, 0x40086602, flags)
print("set")
"""


def has_no_dump_flag(path: Path) -> bool:
    """Whether the flag that the program above sets is set."""
    flags = array.array("l", [0])
    with path.open("rb") as file:
        fcntl.ioctl(file, 0x80086601, flags)
    return bool(flags[0] & 0x40)


def test_inode_flags_outside_cannot_be_set(box: Box) -> None:
    """Its owner needs no more than a file opened for reading, but the request is refused."""
    result = box.python(FLAGS, box.canary)

    assert not has_no_dump_flag(box.canary)
    assert result.output.startswith(b"read\n"), result.output
    assert result.exit_code != 0


def test_inode_flags_can_be_set_without_a_sandbox(bare_box: Box) -> None:
    """The positive twin: the same program, and the same file."""
    result = bare_box.python(FLAGS, bare_box.canary, mode=Mode.DANGER_FULL_ACCESS)

    assert has_no_dump_flag(bare_box.canary), result.output


def test_private_folders_replace_the_shared_ones(box: Box) -> None:
    """What a command writes to a temporary folder is not on the host, unless it is listed as shared."""
    name = f"nightshift-canary-{secrets.token_hex(6)}"
    result = box.run('for each in /tmp /var/tmp /dev/shm; do echo x > "$each/$1"; done; echo x > "$TMPDIR/$1"', name)

    for folder in ("/tmp", "/var/tmp"):
        assert not Path(folder, name).exists()
    shared = Path("/dev/shm", name)
    was_shared = shared.exists()
    shared.unlink(missing_ok=True)
    assert was_shared == ("private_shm" in box.executor().not_enforced(Mode.WORKSPACE_WRITE))
    assert (box.tmp / name).read_text() == "x\n", result.output


def test_the_temporary_folder_stays_for_the_session_under_one_path(box: Box) -> None:
    """Commands, later commands and the file worker see the same files under the same path."""
    executor = box.executor()
    box.run('echo kept > "$TMPDIR/file"')
    again = box.run('cat "$TMPDIR/file"')
    answer = executor.worker(Mode.WORKSPACE_WRITE).call(
        "read",
        {"path": f"{executor.tmp}/file", "offset": 1, "limit": 10, "max_bytes": 100},
        timeout=20,
        cancellation=box.cancellation,
    )

    assert again.output == b"kept\n"
    assert answer["value"]["text"] == "kept\n"


def test_read_only_writes_nothing_but_the_temporary_folder(box: Box) -> None:
    """In read-only the workspace keeps every byte; the temporary folder and /dev/null work."""
    script = """
        echo x > README; echo x > new; echo x > src/new; rm -f src/main.py; mkdir src/folder; touch src/main.py
        echo x > "$HOME/file"
        echo ok > "$TMPDIR/file" && echo ok > /dev/null && cat README "$TMPDIR/file"
    """
    result = box.run(script, mode=Mode.READ_ONLY)

    assert sorted(path.name for path in box.workspace.iterdir()) == [".git", "README", "src"]
    assert (box.workspace / "README").read_text() == "hello\n"
    assert [path.name for path in (box.workspace / "src").iterdir()] == ["main.py"]
    assert list((box.state / "home").iterdir()) == []
    assert result.output.endswith(b"hello\nok\n")


def test_further_writable_folders_can_be_written(box: Box) -> None:
    """``sandbox.writable`` opens a folder in workspace-write, and only there."""
    more = box.base / "more"
    more.mkdir()
    box.run('echo x > "$1/new"', more, writable=(str(more),), mode=Mode.READ_ONLY)
    assert list(more.iterdir()) == []

    box.run('echo x > "$1/new"', more, writable=(str(more),))
    assert (more / "new").read_text() == "x\n"


def test_a_writable_folder_that_became_a_link_is_refused(box: Box) -> None:
    """A root that was replaced by a symbolic link is an error of the sandbox, not a way out."""
    more = box.workspace / "more"
    more.mkdir()
    executor = box.executor(writable=(str(more),))
    more.rmdir()
    more.symlink_to(box.outside)

    with pytest.raises(SandboxError, match="symbolic link"):
        executor.run(
            ["/bin/sh", "-c", "echo x > more/new"],
            mode=Mode.WORKSPACE_WRITE,
            timeout=20,
            cancellation=box.cancellation,
        )
    box.assert_untouched()


def test_hidden_files_and_folders_cannot_be_read_or_written(box: Box) -> None:
    """Artifacts, keys and whatever else is hidden: no byte comes out, none goes in; the rest can be read."""
    hidden_folder, hidden_file = box.base / "artifacts", box.base / "key"
    hidden_folder.mkdir()
    (hidden_folder / "log").write_text("top secret")
    hidden_file.write_text("top secret")
    (box.base / "link").symlink_to(hidden_folder)
    (box.base / "plain").write_text("readable\n")
    script = """
        cat "$1/artifacts/log" "$1/key" "$1/link/log" /proc/self/root"$1"/key
        cp -r "$1/artifacts" src/copy; ln "$1/key" src/key
        echo x >> "$1/artifacts/log"; echo x > "$1/artifacts/new"; echo x >> "$1/key"; rm -rf "$1/artifacts" "$1/key"
        cat "$1/plain"
    """
    result = box.run(script, box.base, hidden=(hidden_folder, hidden_file))

    assert b"top secret" not in result.output
    assert result.output.endswith(b"readable\n")
    assert (hidden_folder / "log").read_text() == "top secret"
    assert [path.name for path in hidden_folder.iterdir()] == ["log"]
    assert hidden_file.read_text() == "top secret"
    copies = [path for path in (box.workspace / "src").rglob("*") if path.is_file() and b"secret" in path.read_bytes()]
    assert copies == []


def test_a_hidden_link_hides_what_it_leads_to(box: Box) -> None:
    """Credentials reached through a linked folder are hidden where they really are."""
    real = box.base / "real"
    real.mkdir()
    (real / "id").write_text("top secret")
    (box.base / "ssh").symlink_to(real)

    result = box.run('cat "$1/ssh/id" "$1/real/id"; true', box.base, hidden=(box.base / "ssh",))

    assert b"top secret" not in result.output


def test_a_workspace_inside_a_hidden_folder_works(box: Box) -> None:
    """The deeper path decides: a cell's workspace lives among hidden neighbours."""
    (box.base / "neighbour").write_text("top secret")

    result = box.run('cat "$1"; cat README; echo x > src/new && echo done', box.base / "neighbour", hidden=(box.base,))

    assert b"top secret" not in result.output
    assert result.output.endswith(b"hello\ndone\n")
    assert (box.workspace / "src" / "new").exists()


def test_a_hidden_file_in_the_workspace_cannot_be_moved_into_sight(box: Box) -> None:
    """Renaming or replacing a folder above a hidden file does not uncover it, not for the next command either."""
    secret = box.workspace / "src" / "deep" / "task.yaml"
    secret.parent.mkdir()
    secret.write_text("top secret")
    hidden = (secret,)
    box.run("mv src moved; mv src/deep src/moved; mv src/deep/task.yaml src/deep/x; rm -rf src/deep", hidden=hidden)
    result = box.run("grep -r secret . ; cat src/deep/task.yaml; true", hidden=hidden)

    assert b"top secret" not in result.output
    assert secret.read_text() == "top secret"


def test_new_top_level_files_work_where_the_backend_can(box: Box) -> None:
    """Bubblewrap adds files beside ``.git``; Landlock says that it cannot, unless ``unprotected_git``."""
    result = box.run("echo x > new && mkdir folder")
    listed = "new_top_level_files" in box.executor().not_enforced(Mode.WORKSPACE_WRITE)

    assert (box.workspace / "new").exists() == (box.backend == "bubblewrap"), result.output
    assert listed == (box.backend == "landlock")
    box.run("echo x > newer && mkdir folder-2", unprotected_git=True)
    assert (box.workspace / "newer").exists()


@pytest.mark.parametrize(
    "name", ["with space", "quo'te\"s", "new\nline", "-leading", "dollar$(touch x)", "*", "ünïcode"]
)
def test_any_name_of_a_workspace_works(place: Path, backend: str, name: str) -> None:
    """Odd names are names: the command runs in the folder and can write there and nowhere else."""
    box = make_box(place / name, backend)
    result = box.run('pwd && echo x > src/new; echo x > "$1/new"', box.outside)

    assert result.output.startswith(os.fsencode(box.workspace) + b"\n"), result.output
    assert (box.workspace / "src" / "new").exists()
    box.assert_untouched()
    box.close()


def test_a_workspace_below_tmp_works(tmp_path: Path, backend: str) -> None:
    """A private /tmp does not hide a workspace that lies there, nor what a command must read."""
    box = make_box(Path(os.path.realpath(tmp_path)) / "below", backend)
    executor = box.executor()
    result = box.run('cat README && echo x > src/new; cat "$1"', box.canary)
    reading = executor.run(
        ["/bin/cat", str(box.canary)],
        mode=Mode.WORKSPACE_WRITE,
        timeout=20,
        cancellation=box.cancellation,
        readable=[str(box.outside)],
    )

    assert result.output.startswith(b"hello\n")
    assert (box.workspace / "src" / "new").exists()
    assert reading.output == b"unchanged\n"
    box.assert_untouched()
    box.close()


def test_a_workspace_that_cannot_be_confined_is_a_configuration_error(box: Box) -> None:
    """A symbolic link, the root folder, a file and a kernel folder are refused before anything runs."""
    link = box.base / "link"
    link.symlink_to(box.workspace)
    for path in (link, Path("/"), box.canary, Path("/proc/self"), box.base / "missing"):
        with pytest.raises(ConfigError):
            box.executor(workspace=path)
    with pytest.raises(ConfigError, match="cannot be hidden"):
        box.run("true", hidden=(box.workspace,))
