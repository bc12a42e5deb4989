"""The runner's own git: how it is started, how a repository is found, what its configuration says.

Every process gets a whole environment of ours: system, global and foreign configuration off, no
hooks, no fsmonitor, no prompts, no replaced objects. A repository is always named explicitly, so
git never searches and ``safe.directory`` is never needed. Where a tree may hold what an agent
wrote, the caller hands over a ``RunGit`` that runs inside the sandbox.

An earlier run may have written the tree, and the repositories in it, before this one begins. Invariant:
no program that they name runs outside the sandbox. Git gets a foreign repository only for commands that
read objects or settings, and a submodule is read as files (``read_submodule``, ``head_commit``).
"""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from runner.errors import ConfigError
from runner.record import field, record
from runner.sandbox.base import ProcessResult

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

_GIT_PLACES = "/usr/bin:/bin:/usr/local/bin:/opt/homebrew/bin"
"""Fixed places: ``$PATH`` may lead into the workspace."""

_SETTINGS = {
    "core.hooksPath": "/dev/null",
    "core.fsmonitor": "false",
    "core.attributesFile": "/dev/null",
    "core.excludesFile": "/dev/null",
    "core.untrackedCache": "false",
    "core.quotePath": "true",
    "core.pager": "cat",
    "core.safecrlf": "false",
    "gc.auto": "0",
    "maintenance.auto": "false",
    "protocol.allow": "never",
    "submodule.recurse": "false",
    "advice.detachedHead": "false",
}

_POINTER_LIMIT = 8_192
_PACKED_LIMIT = 64_000_000
_CONFIG_LIMIT = 4_000_000
_MOST_REFERENCES = 5

_CREDENTIAL_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]*://(?P<user>[^\s/@:]*)(?::(?P<password>[^\s/@]*))?@")

_TOKEN = re.compile(r"gh[a-z]_|github_pat_|gl[a-z]*-|xox[a-z]-|ATATT|[A-Za-z0-9_-]{32,}")
"""User names that are tokens: the prefixes of well-known services, or long random text."""


class RunGit(Protocol):
    """Runs one command of the runner's own.

    ``environment`` is the whole environment git needs, ``writable`` the only directories it may
    write. ``output`` of the result must be complete; it may hold stderr as well.
    """

    def __call__(
        self, argv: list[str], *, environment: dict[str, str], writable: tuple[str, ...], cwd: str
    ) -> ProcessResult:
        """Run ``argv`` in ``cwd`` and wait for it."""
        ...


@record
class Repository:
    """A git repository that holds a workspace.

    Attributes:
        work_tree: Top directory of its work tree, canonical.
        git_dir: Its git directory (of the worktree, for a linked one).
        common_dir: The git directory that holds objects, refs and configuration.
        prefix: The workspace relative to ``work_tree``, empty for the top itself.
        commit: HEAD, None when nothing was committed yet.
        tree: Tree of HEAD, None likewise.
        config: Local configuration, keys in lower case as git prints them, in order.
        foreign: An agent may have written it, so a link in it may lead to what must not be copied.
    """

    work_tree: str
    git_dir: str
    common_dir: str
    prefix: str
    commit: str | None
    tree: str | None
    config: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    foreign: bool = False

    def setting(self, key: str) -> str | None:
        """The last value of a configuration key (lower case)."""
        return next((value for name, value in reversed(self.config) if name == key), None)


def git_path() -> str:
    """Absolute path of git.

    Raises:
        ConfigError: CONFIG_INVALID, git is not installed.
    """
    found = shutil.which("git", path=_GIT_PLACES)
    if found is None:
        raise ConfigError(f"git is not installed (looked in {_GIT_PLACES})", hint="install the package git")
    return found


def base_environment(settings: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of every git process of ours.

    Args:
        settings: Configuration for this command, over the fixed settings.
    """
    pairs = list({**_SETTINGS, **(settings or {})}.items())
    environment = {
        "PATH": "/usr/bin:/bin",
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_ATTR_NOSYSTEM": "1",
        "GIT_TERMINAL_PROMPT": "0",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_NO_LAZY_FETCH": "1",
        # Older gits do not know that variable. A repository that lacks an object may name a program as the
        # way to fetch it, and its `protocol.ext.allow` would win over our `protocol.allow`, but not over this.
        "GIT_ALLOW_PROTOCOL": "",
        "GIT_LITERAL_PATHSPECS": "1",
        "GIT_CONFIG_COUNT": str(len(pairs)),
    }
    for index, (key, value) in enumerate(pairs):
        environment[f"GIT_CONFIG_KEY_{index}"] = key
        environment[f"GIT_CONFIG_VALUE_{index}"] = value
    return environment


def plain_git(
    argv: list[str],
    *,
    environment: dict[str, str],
    writable: tuple[str, ...],  # noqa: ARG001  # the shape of RunGit; nothing confines this one
    cwd: str,
) -> ProcessResult:
    """Run git without a sandbox: before the run's agent begins.

    What an agent of an earlier run wrote may be there, so each caller says why its command runs no program
    of the tree. ``output`` is stdout alone on success, stdout and stderr on failure.
    """
    started = time.monotonic()
    try:
        done = subprocess.run(
            argv, env=environment, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, check=False
        )
        code, output = done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr
    except OSError as error:  # no process can be made, or the directory is gone
        code, output = 127, f"{argv[0]} cannot be started: {error.strerror}".encode()
    return ProcessResult(
        exit_code=code,
        signal=None,
        timed_out=False,
        cancelled=False,
        output=output,
        total_bytes=len(output),
        truncated=False,
        duration=time.monotonic() - started,
    )


def git(
    arguments: Sequence[str], *, cwd: str, environment: Mapping[str, str], settings: Mapping[str, str] | None = None
) -> ProcessResult:
    """Run one plain git command; the caller looks at the exit code."""
    return plain_git(
        [git_path(), *arguments], environment={**base_environment(settings), **environment}, writable=(), cwd=cwd
    )


def output_text(result: ProcessResult) -> str:
    """What a command printed, for a message: one line, at most 500 characters."""
    text = result.output.decode("utf-8", "backslashreplace")
    return " ".join(text.split())[:500] or f"exit code {result.exit_code}"


# --- finding a repository ----------------------------------------------------------------------


def _git_dir_of(directory: Path) -> Path | None:
    """The git directory that ``directory/.git`` is or names; None if there is none.

    Raises:
        ConfigError: CONFIG_INVALID, a ``.git`` file that leads nowhere.
    """
    entry = directory / ".git"
    try:
        if entry.is_dir():
            found = entry
        elif entry.is_file():
            head, _, target = os.fsdecode(_regular_file(entry) or b"").partition("gitdir:")
            if head.strip() or not target.strip() or "\0" in target:
                raise ConfigError(f"{entry} is no git directory and names none", hint="remove it, or repair it")
            found = directory / target.strip()
        else:
            return None
        if (found / "HEAD").is_file() and ((found / "objects").is_dir() or (found / "commondir").is_file()):
            return found.resolve()
    except OSError as error:
        raise ConfigError(f"{entry} cannot be read: {error.strerror}") from error
    if entry.is_file():
        raise ConfigError(
            f"{entry} names {found}, which is no git directory",
            hint="repair the worktree with `git worktree repair`, or remove the file",
        )
    return None


def _regular_file(path: Path, limit: int = _POINTER_LIMIT) -> bytes | None:
    """The first ``limit`` bytes of a file; None if it is no regular one (a pipe would never end)."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):  # the name may come out of the tree, with a zero byte in it
        return None
    with os.fdopen(descriptor, "rb") as file:
        return file.read(limit) if stat.S_ISREG(os.fstat(descriptor).st_mode) else None


def _common_dir(git_dir: Path) -> Path:
    """The directory that a linked worktree's git directory shares, else the git directory itself."""
    named = os.fsdecode(_regular_file(git_dir / "commondir") or b"").strip()
    # Not `Path.resolve`, which raises on a loop of links.
    return Path(os.path.realpath(git_dir / named)) if named and "\0" not in named else git_dir


def _trusted_owner(path: Path, workspace: Path) -> bool:
    """Whether a repository above the workspace belongs to us, to the workspace's owner, or to root."""
    return path.stat().st_uid in {os.geteuid(), workspace.stat().st_uid, 0}


def _candidates(workspace: Path) -> Iterator[tuple[Path, Path]]:
    for directory in (workspace, *workspace.parents):
        git_dir = _git_dir_of(directory)
        if git_dir is not None:
            if directory == workspace or _trusted_owner(directory / ".git", workspace):
                yield directory, git_dir
            return


def find_repository(workspace: str) -> Repository | None:
    """The repository that a canonical workspace path is, or is a tracked directory of.

    A directory inside a repository that HEAD does not know (an ignored build folder) is none.

    Raises:
        ConfigError: CONFIG_INVALID, a broken ``.git`` or HEAD.
    """
    for top, git_dir in _candidates(Path(workspace)):
        common = _common_dir(git_dir)
        prefix = "" if top == Path(workspace) else str(Path(workspace).relative_to(top))
        wanted = ["HEAD", "HEAD^{commit}", "HEAD^{tree}", *([f"HEAD:{prefix}"] if prefix else [])]
        # Reads refs and objects and looks at no work tree; a missing object is not fetched (`base_environment`).
        found = git(["rev-parse", "--revs-only", *wanted], cwd="/", environment={"GIT_DIR": str(git_dir)})
        lines = found.output.decode("ascii", "replace").split()
        if found.exit_code != 0 or len(lines) in (1, 2):
            raise ConfigError(
                f"the repository at {top} cannot be read: {output_text(found)}",
                hint="look at `git fsck` and `git status` there",
            )
        if prefix and len(lines) != len(wanted):
            return None
        return Repository(
            work_tree=str(top),
            git_dir=str(git_dir),
            common_dir=str(common),
            prefix=prefix,
            commit=lines[1] if lines else None,
            tree=lines[2] if lines else None,
            config=tuple(read_config(str(git_dir))),
        )
    return None


def head_commit(folder: Path, *, digits: int) -> str | None:
    """The commit that is checked out in a submodule, read from its files; git does not run.

    Args:
        folder: The submodule's work tree, which an agent may have written.
        digits: Length of an object name there.

    Returns:
        None without a ``.git`` that leads to a commit, as git sees it too.
    """
    try:
        git_dir = _git_dir_of(folder)
        if git_dir is None:
            return None
        common = _common_dir(git_dir)
    except (ConfigError, OSError):
        return None
    name = "HEAD"
    for _ in range(_MOST_REFERENCES):
        found = _regular_file(git_dir / name)
        if found is None and name != "HEAD":
            found = _regular_file(common / name)
        if found is None:
            return _packed_reference(common, name, digits)
        text = os.fsdecode(found).strip()
        if re.fullmatch(rf"[0-9a-f]{{{digits}}}", text):
            return text
        name = text.removeprefix("ref:").strip()
        if not text.startswith("ref:") or not name.startswith("refs/") or ".." in name or "\0" in name:
            return None
    return None


def _packed_reference(common: Path, name: str, digits: int) -> str | None:
    packed = _regular_file(common / "packed-refs", _PACKED_LIMIT) or b""
    found = re.search(rb"^([0-9a-f]{%d}) %b$" % (digits, re.escape(os.fsencode(name))), packed, re.MULTILINE)
    return found[1].decode("ascii") if found else None


def read_submodule(folder: Path, *, object_format: str) -> Repository | None:
    """The repository of a submodule that is checked out; None if there is none.

    It is read as files, its commit and tree are left open: what git would run for it is up to its own
    configuration, which an agent may have written.

    Raises:
        ConfigError: CONFIG_INVALID, a broken ``.git``, or a configuration that cannot be parsed.
    """
    git_dir = _git_dir_of(folder)
    if git_dir is None:
        return None
    common = _common_dir(git_dir)
    entries: list[tuple[str, str]] = []
    data = _regular_file(common / "config", _CONFIG_LIMIT)
    if data:
        # A file that is named is only parsed: no include is followed and nothing in it is acted on.
        command = ["config", "--file", str(common / "config"), "--no-includes", "--null", "--list"]
        listed = git(command, cwd="/", environment={"GIT_DIR": os.devnull})
        if listed.exit_code != 0:
            raise ConfigError(f"the configuration of {git_dir} cannot be read: {output_text(listed)}")
        entries = _entries(listed)
    # All repositories of a tree name their objects by the same algorithm.
    entries.append(("extensions.objectformat", object_format))
    return Repository(
        work_tree=str(folder),
        git_dir=str(git_dir),
        common_dir=str(common),
        prefix="",
        commit=None,
        tree=None,
        config=tuple(entries),
        foreign=True,
    )


# --- configuration -----------------------------------------------------------------------------


def read_config(git_dir: str) -> list[tuple[str, str]]:
    """Local configuration of a repository with its includes, as ``(key, value)`` in order.

    Raises:
        ConfigError: CONFIG_INVALID, the file cannot be parsed.
    """
    # Reads files, those of includes too; the only program git could start here is a pager, for a terminal.
    listed = git(["config", "--null", "--list"], cwd="/", environment={"GIT_DIR": git_dir}, settings={})
    if listed.exit_code != 0:
        raise ConfigError(f"the configuration of {git_dir} cannot be read: {output_text(listed)}")
    entries = _entries(listed)
    # The settings of our own command line come last, in their order.
    return entries[: len(entries) - len(_SETTINGS)]


def _entries(listed: ProcessResult) -> list[tuple[str, str]]:
    """What ``git config --null --list`` printed."""
    entries = []
    for entry in listed.output.decode("utf-8", "surrogateescape").split("\0"):
        if entry:
            key, _, value = entry.partition("\n")
            entries.append((key, value))
    return entries


def _secret_in(key: str, value: str) -> str | None:
    """The secret a configuration entry holds, None without one."""
    if key.startswith("http.") and key.endswith(".extraheader"):
        return value or None
    for text in (value, key):
        for match in _CREDENTIAL_URL.finditer(text):
            user, password = match["user"], match["password"]
            if password:
                return password
            if user and _TOKEN.match(user):
                return user
    return None


def config_secrets(entries: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Entries that hold a credential, as ``(key, secret)``; the key is safe to print."""
    found = []
    for key, value in entries:
        secret = _secret_in(key, value)
        if secret is not None:
            found.append((key.replace(secret, "***"), secret))
    return found


def refuse_credentials(repository: Repository) -> None:
    """Refuse a repository whose configuration an agent could read a credential from.

    Raises:
        ConfigError: CONFIG_INVALID with one problem for each entry, the values left out.
    """
    problems = [
        f"{key} of {repository.common_dir}/config, or a file it includes, holds a credential"
        for key, _ in config_secrets(repository.config)
    ]
    for path in sorted(Path(repository.common_dir, "modules").glob("**/config")):
        text = path.read_bytes()
        if re.search(rb"(?i)\bextraheader\s*=", text) or _secret_in("", text.decode("utf-8", "replace")):
            problems.append(f"{path} holds a credential")
    if problems:
        raise ConfigError(
            "the repository's configuration holds credentials that the agent could read",
            problems=problems,
            hint="with actions/checkout set `persist-credentials: false`; else remove the entries",
        )
