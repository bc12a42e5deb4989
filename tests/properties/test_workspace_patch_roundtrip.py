"""A patch between two random trees gives exactly the second one."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from runner.artifacts.patch import make_patch
from runner.workspace import prepare_workspace

_names = st.sampled_from([b"a", b"b c", b"d\xff", b"e\nf", b'g"h', b"i\\j", b"-k", b"\xc3\xa4", b"*"])
_paths = st.lists(_names, min_size=1, max_size=3).map(b"/".join)
_contents = st.one_of(
    st.sampled_from([b"", b"x", b"x\n", b"x\r\n", b"x\ny\nz\n", b"x\nY\nz", b"\x00\x01", b"\r", b"\n"]),
    st.binary(max_size=40),
)
# A link to itself is left out: git apply --index looks through it at the file system and gives up.
_targets = st.sampled_from([b"nowhere", b"..", b"/etc/passwd", b"\xff"])
_entries = st.one_of(st.tuples(st.sampled_from(["file", "program"]), _contents), st.tuples(st.just("link"), _targets))
_trees = st.dictionaries(_paths, _entries, max_size=6)


def write(directory: Path, tree: dict[bytes, tuple[str, bytes]]) -> None:
    """Fill a directory; an entry whose parent is already a file or a link is left out."""
    for path, (kind, content) in tree.items():
        target = directory / os.fsdecode(path)
        if any((directory / above).is_symlink() for above in target.relative_to(directory).parents):
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            if kind == "link":
                target.symlink_to(os.fsdecode(content))
            elif not target.is_symlink():
                target.write_bytes(content)
                target.chmod(0o755 if kind == "program" else 0o644)
        except (FileExistsError, NotADirectoryError, IsADirectoryError):
            continue


def listing(directory: Path) -> dict[bytes, tuple[str, bytes]]:
    """Every file and link outside ``.git``."""
    found = {}
    for path in directory.rglob("*"):
        name = path.relative_to(directory)
        if name.parts[0] == ".git":
            continue
        if path.is_symlink():
            found[os.fsencode(name)] = ("link", os.fsencode(path.readlink()))
        elif path.is_file():
            found[os.fsencode(name)] = ("program" if path.stat().st_mode & 0o100 else "file", path.read_bytes())
    return found


def empty(directory: Path) -> None:
    """Remove everything but ``.git``."""
    for path in directory.iterdir():
        if path.name == ".git":
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(before=_trees, after=_trees, committed=st.booleans())
def test_applying_the_patch_gives_the_tree(
    before: dict[bytes, tuple[str, bytes]], after: dict[bytes, tuple[str, bytes]], committed: bool
) -> None:
    """On a repository with a commit and on a directory whose base is only a tree."""
    environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1"}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org"]

    def git(directory: Path, *arguments: str) -> str:
        done = subprocess.run([*command, *arguments], cwd=directory, env=environment, check=True, capture_output=True)
        return done.stdout.decode().strip()

    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        work, twin = root / "work", root / "twin"
        for directory in (work, twin):
            directory.mkdir()
            write(directory, before)
        git(twin, "init", "-q")
        git(twin, "add", "-A")
        if committed:
            git(work, "init", "-q")
            git(work, "add", "-A")
            git(work, "commit", "-q", "--allow-empty", "-m", "x")
        workspace = prepare_workspace(str(work), state=root / "state")
        empty(work)
        write(work, after)
        info = make_patch(workspace.snapshot, root / "changes.patch")

        assert git(twin, "write-tree") == workspace.base.tree
        assert (info is None) == (listing(work) == listing(twin))
        if info is not None:
            git(twin, "apply", "--index", "--whitespace=nowarn", str(root / "changes.patch"))
            assert git(twin, "write-tree") == info.tree
        assert listing(twin) == listing(work)
