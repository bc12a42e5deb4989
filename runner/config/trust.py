"""Who started a run, and which version of its files may be believed.

A run without an event file was started by whoever wrote the command line and is trusted. With one,
the event must show that whoever caused it may write to the repository, else it is untrusted, and the
files that define the run come from the base revision or from outside the checkout under test: the
version under test is not read. Nothing here executes what a checkout holds; git runs with its hooks,
monitors and foreign configuration off.
"""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from runner.config.load import MAX_BYTES, near_miss, parse_yaml, read_file
from runner.config.shape import shipped_directory
from runner.errors import ConfigError
from runner.permission import Trust
from runner.record import field, mutable_record

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.config.load import Document

MAX_EVENT_BYTES: Final = 25_000_000
"""Largest event file that is read; GitHub's own limit for a payload."""

WRITERS: Final = frozenset({"OWNER", "MEMBER", "COLLABORATOR"})
"""Author associations that go with the right to write to the repository."""

_OPEN_TO_ALL: Final = ("issue", "comment", "review", "discussion")
"""Parts of an event that anybody may have written, each with its ``author_association``."""

_POLICY: Final = ".policy.yaml"

_REVISION: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")


class Trigger(NamedTuple):
    """Who started the run.

    Attributes:
        trust: Whether they may be trusted with the run's authority.
        reason: Why, in a few words.
        base: Commit whose files may be believed, where the event names one.
    """

    trust: Trust
    reason: str
    base: str | None = None


def derive_trigger(event: str | None, trust: str | None, environ: Mapping[str, str], cwd: Path) -> Trigger:
    """Find out who started the run.

    Args:
        event: ``--event``, else ``$GITHUB_EVENT_PATH`` counts.
        trust: ``--trust``; only ``untrusted`` is allowed, which lowers what was found.
        environ: Environment of the runner.
        cwd: Where a relative ``event`` starts.

    Raises:
        ConfigError: ``event`` names no readable JSON file, or ``trust`` would raise.
    """
    if trust not in {None, Trust.UNTRUSTED}:
        raise ConfigError(
            f"--trust {trust}: trust can only be lowered", hint="write --trust untrusted, or leave it out"
        )
    found = _from_event(event, environ, cwd)
    if trust is not None and found.trust is Trust.TRUSTED:
        return Trigger(Trust.UNTRUSTED, "--trust untrusted", found.base)
    return found


def _from_event(event: str | None, environ: Mapping[str, str], cwd: Path) -> Trigger:
    if event:
        return judge_event(_load_event(cwd / event, f"--event {event}"), environ)
    variable = environ.get("GITHUB_EVENT_PATH")
    if not variable:
        return Trigger(Trust.TRUSTED, "no event file: started from the command line")
    try:
        payload = _load_event(Path(variable), "GITHUB_EVENT_PATH")
    except ConfigError as error:
        return Trigger(Trust.UNTRUSTED, error.message)
    return judge_event(payload, environ)


def _load_event(path: Path, name: str) -> Any:
    try:
        data = path.read_bytes() if stat.S_ISREG(path.stat().st_mode) else None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{name}: the event file cannot be read: {reason}", hint="check the path") from None
    if data is None or len(data) > MAX_EVENT_BYTES:
        raise ConfigError(f"{name}: the event file is no regular file of at most 25 MB", hint="check the path")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ConfigError(f"{name}: the event file is not JSON", hint="it is the webhook's payload") from None


def judge_event(payload: Any, environ: Mapping[str, str]) -> Trigger:
    """Judge a GitHub webhook payload. Total: what is not understood is untrusted.

    Args:
        payload: The JSON value of the event file.
        environ: For ``GITHUB_SHA``, the default branch's commit in events about issues.
    """
    if not isinstance(payload, dict):
        return Trigger(Trust.UNTRUSTED, "the event is no JSON object")
    pull = payload.get("pull_request")
    if pull is not None:
        return _judge_pull_request(payload, pull)
    base = _commit(environ.get("GITHUB_SHA"))
    run = payload.get("workflow_run")
    if run is not None:
        return _judge_workflow_run(payload, run, base)
    authored = [name for name in _OPEN_TO_ALL if name in payload]
    if authored:
        if isinstance(payload.get("issue"), dict) and payload["issue"].get("pull_request") is not None:
            return Trigger(Trust.UNTRUSTED, "a comment on a pull request does not say whose code is checked out", base)
        return _judge_authors(payload, authored, base)
    if "pusher" in payload and "ref" in payload:
        return Trigger(Trust.TRUSTED, "a push needs write access")
    if isinstance(payload.get("schedule"), str):
        return Trigger(Trust.TRUSTED, "a schedule is set in the default branch")
    if "inputs" in payload and "workflow" in payload and "ref" in payload:
        return Trigger(Trust.TRUSTED, "starting a workflow by hand needs write access")
    if "client_payload" in payload:
        return Trigger(Trust.TRUSTED, "a repository dispatch needs write access")
    return Trigger(Trust.UNTRUSTED, "the event is none whose sender is known to have write access")


def _judge_pull_request(payload: dict[str, Any], pull: Any) -> Trigger:
    base = _commit(_get(pull, "base", "sha"))
    head, target = _get(pull, "head", "repo", "full_name"), _get(pull, "base", "repo", "full_name")
    fork = _get(pull, "head", "repo", "fork")
    # A repository that is itself a fork marks its own branches with `fork`, too: names decide where both are known.
    if fork is not False if head is None or target is None else head != target:
        return Trigger(Trust.UNTRUSTED, "the pull request does not come from a branch of the repository", base)
    authors = ["pull_request", *(name for name in _OPEN_TO_ALL if name in payload)]
    return _judge_authors(payload, authors, base)


def _judge_authors(payload: dict[str, Any], authored: Sequence[str], base: str | None) -> Trigger:
    for name in authored:
        association = _get(payload, name, "author_association")
        if association not in WRITERS:
            shown = association if isinstance(association, str) else "unknown"
            what = name.replace("_", " ")
            return Trigger(Trust.UNTRUSTED, f"the {what}'s author may not write here (association {shown})", base)
    what = authored[-1].replace("_", " ")
    return Trigger(Trust.TRUSTED, f"the author of the {what} may write to the repository", base)


def _judge_workflow_run(payload: dict[str, Any], run: Any, base: str | None) -> Trigger:
    head, here = _get(run, "head_repository", "full_name"), _get(payload, "repository", "full_name")
    if head is not None and head == here and _get(run, "event") in {"push", "schedule", "workflow_dispatch"}:
        return Trigger(Trust.TRUSTED, f"follows a workflow that a {_get(run, 'event')} started")
    return Trigger(Trust.UNTRUSTED, "follows a workflow whose trigger is not known to be trusted", base)


def _get(value: Any, *path: str) -> Any:
    for part in path:
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _commit(value: Any) -> str | None:
    return value if isinstance(value, str) and _REVISION.fullmatch(value) else None


def checkout_of(directory: Path) -> Path | None:
    """The top of the git checkout that ``directory`` lies in; None outside of any."""
    for candidate in (directory, *directory.parents):
        if os.path.lexists(candidate / ".git"):
            return candidate
    return None


def is_inside(path: str | Path, directory: str | Path) -> bool:
    """Whether ``path`` is ``directory`` or lies below it. Both absolute; links are not looked at."""
    return Path(path).is_relative_to(directory)


def read_blob(top: Path, revision: str, path: str) -> bytes | None:
    """The content of a regular file in a commit; None when the commit has none of that path.

    Args:
        top: Top of the checkout.
        revision: A commit.
        path: Relative to ``top``.

    Raises:
        ConfigError: git does not know the revision, or the path is a link or too large.
    """
    listed = _git(top, "ls-tree", "-z", "-l", "--full-tree", revision, "--", path)
    if listed is None:
        raise ConfigError(
            f"the base revision {revision} is not in {top}",
            hint="fetch it (actions/checkout: `fetch-depth: 0`), or keep the run's files outside the workspace",
        )
    entries = [entry.partition(b"\t") for entry in listed.split(b"\0") if entry]
    found = [attributes.split() for attributes, _, name in entries if name == os.fsencode(path)]
    if not found:
        return None
    mode, kind, sha, size = found[0]
    if kind != b"blob" or mode == b"120000":
        raise ConfigError(f"{path} is no regular file in {revision}", hint="links and folders are not followed there")
    if int(size) > MAX_BYTES:
        raise ConfigError(f"{path} is over 1 MiB in {revision}", hint="is this the right file?")
    return _git(top, "cat-file", "blob", sha.decode())


def _git(top: Path, *arguments: str) -> bytes | None:
    """The output of a git command that only reads objects; None when it failed."""
    import subprocess

    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "LC_ALL": "C",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_NO_LAZY_FETCH": "1",
        "GIT_NO_REPLACE_OBJECTS": "1",
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_TERMINAL_PROMPT": "0",
    }
    settings = [f"safe.directory={top}", "core.fsmonitor=false", f"core.hooksPath={os.devnull}", "protocol.allow=never"]
    options = [part for setting in settings for part in ("-c", setting)]
    try:
        done = subprocess.run(
            ["git", "-C", str(top), *options, "--literal-pathspecs", *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"git cannot be run to read the base revision: {error}", hint="install git") from None
    return done.stdout if done.returncode == 0 else None


class Content(NamedTuple):
    """What was read of a file: its bytes, the name to show, and where relative paths in it start."""

    data: bytes
    name: str
    directory: str


@mutable_record
class Reader:
    """Reads run-defining files in the version that may be believed, and remembers which.

    Attributes:
        cwd: Where relative paths of the command line start; shown paths are relative to it.
        trust: Trust of the trigger.
        base: Commit to read from when the trigger is untrusted.
        tested: Directories whose files are the version under test.
        files: Absolute paths read so far.
    """

    cwd: Path
    trust: Trust = Trust.TRUSTED
    base: str | None = None
    tested: list[Path] = field(default_factory=list)
    files: list[str] = field(default_factory=list)

    def load(self, path: Path) -> Document:
        """Load a YAML file.

        Raises:
            ConfigError: As ``load_yaml``; or the believable version cannot be had.
        """
        content = self.read(path)
        return parse_yaml(content.data, source=content.name, directory=content.directory)

    def read(self, path: Path) -> Content:
        """Read a file.

        Raises:
            ConfigError: It cannot be read; or the trigger is untrusted, the file is part of what is
                under test, and there is no base revision that has it.
        """
        path = Path(os.path.normpath(self.cwd / path))
        if str(path) not in self.files:
            self.files.append(str(path))
        top = self.under_test(path)
        if top is None:
            name = self.shown(path)
            return Content(read_file(path, name=name), name, str(path.parent))
        inside = path if is_inside(path, top) else Path(os.path.realpath(path))
        relative = str(inside.relative_to(top))
        if self.base is None:
            raise ConfigError(
                f"{self.shown(path)}: is part of the untrusted checkout, and no base revision is known to read it from",
                hint="name the checkout with --workspace and keep the run's files outside of it, "
                "or pass the event file of the pull request",
            )
        data = read_blob(top, self.base, relative)
        name = f"{self.base[:12]}:{relative}"
        if data is None:
            raise ConfigError(
                f"{name}: no such file in the base revision",
                hint="an untrusted trigger uses the base's version, so the file must be there first",
            )
        return Content(data, name, str(inside.parent))

    def under_test(self, path: Path) -> Path | None:
        """The untrusted checkout that an absolute path is part of, the innermost one; None when there is none."""
        if self.trust is Trust.TRUSTED:
            return None
        # A link may lead out of the checkout or into it; either way the checkout decides what it holds.
        real = os.path.realpath(path)
        if is_inside(real, shipped_directory()):
            # What came with the running code is believed like the code, also from an environment inside the checkout.
            return None
        holders = [top for top in self.tested if is_inside(path, top) or is_inside(real, top)]
        return max(holders, key=lambda top: len(top.parts), default=None)

    def shown(self, path: Path) -> str:
        """A path as it is shown: relative to the current directory where it lies below it."""
        return str(path.relative_to(self.cwd)) if is_inside(path, self.cwd) and path != self.cwd else str(path)


def shipped_policy_hint(reference: str) -> str | None:
    """What to do about a policy file that is not there and has the name of a shipped one; None for other names."""
    name = os.path.basename(reference).removesuffix(_POLICY)  # noqa: PTH119  # a text
    path = shipped_directory() / "policies" / f"{name}{_POLICY}"
    if not name or not path.is_file():
        return None
    return f"the policy of the shipped profile comes with `extends: {name}`; as a file it is {path}"


def find_profile(reference: str, directory: str | Path) -> Path:
    """The file a profile reference means.

    Args:
        reference: A name (no ``/``, no ``.yaml``) is a shipped profile; anything else is a file.
        directory: Where a relative file starts.

    Raises:
        ConfigError: No shipped profile has that name.
    """
    if "/" in reference or reference.endswith((".yaml", ".yml")):
        return Path(os.path.normpath(Path(directory) / reference))
    folder = shipped_directory() / "profiles"
    suffix = ".profile.yaml"
    known = sorted(path.name.removesuffix(suffix) for path in folder.glob(f"*{suffix}"))
    if reference not in known:
        near = near_miss(reference, known)
        meant = f"did you mean {near!r}? " if near else ""
        raise ConfigError(
            f"no shipped profile is called {reference!r}",
            hint=f"{meant}shipped: {', '.join(known)}; a file of your own needs a `/` or ends in .yaml",
        )
    return folder / f"{reference}{suffix}"
