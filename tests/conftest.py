"""What all tests share: sandbox facts, the network guard, repositories, tasks, the installed command.

Sandbox backends are probed once a run. Tests name the backend they need with the marker ``backend``
or by a parameter whose value is the backend's name. A backend that is missing skips them, unless
``--require-backend`` names it: then the run fails. The end of the run lists what was exercised.
"""

from __future__ import annotations

import functools
import io
import ipaddress
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest
import zstandard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from _pytest.terminal import TerminalReporter

REPOSITORY = Path(__file__).resolve().parent.parent
BACKENDS = ("bubblewrap", "landlock")

JsonObject = dict[str, Any]


# --- sandbox backends ----------------------------------------------------------------------------


@functools.cache
def backend_failures() -> dict[str, str | None]:
    """Backend name → why its probe failed, None if it passed. Probes once a run."""
    from runner.sandbox.select import probe_all

    failures: dict[str, str | None] = dict.fromkeys(BACKENDS, "not probed on this platform")
    for report in probe_all():
        failures[report.backend] = None if report.ok else report.reason
    return failures


def needed_backends(item: pytest.Item) -> set[str]:
    """The backends a test exercises: those its markers name, and parameters that are a backend's name."""
    named = {name for marker in item.iter_markers("backend") for name in marker.args}
    callspec = getattr(item, "callspec", None)
    values = callspec.params.values() if callspec is not None else ()
    return named | {value for value in values if isinstance(value, str) and value in BACKENDS}


EXERCISED: Counter[str] = Counter()
"""Passed tests by backend."""

SKIPPED: Counter[str] = Counter()
"""Skipped tests by reason, those of a missing backend left out."""

NOT_HERE = ("only x86-64 ", "only root ", "only cgroup v2 ")
"""How the reasons of skips begin that are about the machine's kind or the user, not about something missing."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--require-backend``."""
    parser.addoption(
        "--require-backend",
        default="",
        metavar="NAMES",
        help="comma-separated sandbox backends that must work here; a missing one fails the run",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    """Fail before any test when a required backend does not work."""
    # Ignored under nohup or in the background of a script, and then in every command that tests start.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    required = [name for name in session.config.getoption("--require-backend").split(",") if name]
    unknown = sorted(set(required) - set(BACKENDS))
    if unknown:
        raise pytest.UsageError(f"--require-backend: no backend {', '.join(unknown)}; there are {', '.join(BACKENDS)}")
    missing = [f"{name}: {backend_failures()[name]}" for name in required if backend_failures()[name] is not None]
    if missing:
        pytest.exit("a required sandbox backend does not work here\n" + "\n".join(missing), returncode=1)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose backend does not work on this machine."""
    for name in sorted(needed_backends(item)):
        reason = backend_failures()[name]
        if reason is not None:
            pytest.skip(f"the sandbox backend {name} does not work here: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Count passed tests by backend and skipped ones by reason; where all parts are demanded no part may be missing."""
    report: pytest.TestReport = yield  # type: ignore[assignment]  # the hook yields the report
    if report.when == "call" and report.passed:
        EXERCISED.update(needed_backends(item))
    if report.skipped and isinstance(report.longrepr, tuple):
        reason = report.longrepr[2].removeprefix("Skipped: ")
        if reason.startswith("the sandbox backend "):  # one that is demanded has ended the run before
            return report  # type: ignore[return-value]  # the wrapped hook's result
        SKIPPED[reason] += 1
        if item.config.getoption("--require-backend") and not reason.startswith(NOT_HERE):
            report.outcome = "failed"
            report.longrepr = f"a part is missing, and this run demands all of them: {reason}"
    return report  # type: ignore[return-value]  # the wrapped hook's result


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Say which sandbox backends were exercised and which were not, and what else could not be."""
    terminalreporter.section("sandbox backends")
    for name in BACKENDS:
        if EXERCISED[name]:
            terminalreporter.line(f"{name}: exercised, {EXERCISED[name]} passed")
        else:
            cached = backend_failures()[name] if backend_failures.cache_info().currsize else "no test asked for it"
            terminalreporter.line(f"{name}: NOT exercised ({cached or 'no test asked for it'})")
    for reason, count in sorted(SKIPPED.items()):
        terminalreporter.line(f"NOT exercised, {count} tests: {reason}")


# --- network -------------------------------------------------------------------------------------


class NetworkBlockedError(RuntimeError):
    """A test tried to reach something other than this machine."""


def _is_loopback(host: str) -> bool:
    if host in ("localhost", ""):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_address(address: object) -> None:
    if isinstance(address, tuple) and not _is_loopback(str(address[0])):
        raise NetworkBlockedError(f"tests talk to this machine only, not to {address[0]}")


@pytest.fixture(autouse=True, scope="session")
def _loopback_only() -> Iterator[None]:
    """Block connections of the test process itself that leave this machine."""
    real = {name: getattr(socket.socket, name) for name in ("connect", "connect_ex")}

    def guard(name: str) -> Callable[[socket.socket, object], object]:
        def connect(self: socket.socket, address: object) -> object:
            _check_address(address)
            return real[name](self, address)

        return connect

    with pytest.MonkeyPatch.context() as patch:
        for name in real:
            patch.setattr(socket.socket, name, guard(name), raising=True)
        yield


# --- repositories --------------------------------------------------------------------------------

_GIT_SETTINGS = {"user.name": "test", "user.email": "test@example.invalid", "init.defaultBranch": "main"}


def run_git(directory: Path, *arguments: str) -> str:
    """Run git in ``directory`` without any configuration of this machine; returns its stdout."""
    options = [part for key, value in _GIT_SETTINGS.items() for part in ("-c", f"{key}={value}")]
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(directory),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    return subprocess.run(
        ["git", *options, *arguments],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=True,
        capture_output=True,
        text=True,
    ).stdout


@pytest.fixture
def git() -> Callable[..., str]:
    """A function that runs git: ``git(directory, "status", "--short")`` returns its stdout."""
    return run_git


class MakeRepo(Protocol):
    """Makes a repository with one commit. See the fixture ``make_repo``."""

    def __call__(self, files: Mapping[str, str | bytes] | None = None, *, name: str = "workspace") -> Path:
        """Write ``files`` (path → content) into a new repository and commit them."""
        ...


@pytest.fixture
def make_repo(tmp_path: Path) -> MakeRepo:
    """A function that makes git repositories below the test's own folder."""

    def make(files: Mapping[str, str | bytes] | None = None, *, name: str = "workspace") -> Path:
        directory = tmp_path / name
        directory.mkdir(parents=True)
        for path, content in ({"README.md": "# A repository\n"} if files is None else files).items():
            target = directory / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content.encode() if isinstance(content, str) else content)
        run_git(directory, "init", "--quiet")
        run_git(directory, "add", "--all")
        run_git(directory, "commit", "--quiet", "--allow-empty", "--message", "The state to start from")
        return directory

    return make


# --- the installed command -----------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A finished ``nightshift`` process and what it left."""

    exit_code: int
    stdout: str
    stderr: str
    artifacts: Path

    @functools.cached_property
    def result(self) -> JsonObject:
        """The parsed ``result.json``."""
        path = self.artifacts / "result.json"
        assert path.exists(), f"no result.json; exit code {self.exit_code}\n{self.stderr}"
        parsed: JsonObject = json.loads(path.read_text(encoding="utf-8"))
        return parsed

    @functools.cached_property
    def lines(self) -> list[JsonObject]:
        """Every line of the session log as it stands on disk, the header first."""
        return read_log(self.artifacts / "session.jsonl.zst")

    @property
    def events(self) -> list[JsonObject]:
        """The lines behind the header; packed chunk rows stay packed."""
        return self.lines[1:]

    def events_of(self, *types: str) -> list[JsonObject]:
        """The events of these types, in order."""
        return [event for event in self.events if event["type"] in types]

    def data_of(self, event_type: str) -> list[JsonObject]:
        """The ``data`` of each event of one type, in order."""
        return [event["data"] for event in self.events_of(event_type)]


def read_log(path: Path) -> list[JsonObject]:
    """Decode a session log with nothing of the product: all frames, one JSON object a line."""
    decoded = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(path.read_bytes()), read_across_frames=True).read()
    return [json.loads(line) for line in decoded.decode("utf-8").splitlines()]


@pytest.fixture
def decoded_frames() -> Callable[[Path], bytes]:
    """Decodes a file whose frames must all be whole: by the command ``zstd`` where there is one."""

    def decode(path: Path) -> bytes:
        if shutil.which("zstd"):
            return subprocess.run(["zstd", "-dc", path], check=True, capture_output=True).stdout
        rest, found = path.read_bytes(), []
        while rest:
            frame = zstandard.ZstdDecompressor().decompressobj()
            found.append(frame.decompress(rest))
            assert frame.eof, f"{path} ends inside a frame"
            rest = frame.unused_data
        return b"".join(found)

    return decode


@pytest.fixture
def session_log_reader() -> Callable[[Path], list[JsonObject]]:
    """A function that decodes a session log with nothing of the product."""
    return read_log


@dataclass
class Running:
    """A started ``nightshift`` process."""

    process: subprocess.Popen[str]
    artifacts: Path

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the process alone, as a CI system does."""
        self.process.send_signal(number)

    def finish(self, timeout: float = 60) -> Finished:
        """Wait for its end; after ``timeout`` seconds it is killed and the test fails."""
        try:
            stdout, stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            stdout, stderr = self.process.communicate()
            pytest.fail(f"nightshift did not end within {timeout} s\nstdout: {stdout}\nstderr: {stderr}")
        return Finished(self.process.returncode, stdout, stderr, self.artifacts)


@dataclass
class Nightshift:
    """Runs the installed command in an environment that holds nothing of this machine but PATH."""

    directory: Path
    started: list[Running] = field(default_factory=list)

    def environment(self) -> dict[str, str]:
        """What each process gets: PATH with the command first, a private HOME and state folder."""
        home = self.directory / "home"
        home.mkdir(exist_ok=True)
        own = {
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), "/usr/local/bin", "/usr/bin", "/bin"]),
            "HOME": str(home),
            "XDG_STATE_HOME": str(home / "state"),
            "LANG": "C.UTF-8",
        }
        coverage = {key: value for key, value in os.environ.items() if key.startswith(("COVERAGE_", "COV_"))}
        return own | coverage

    def start(
        self,
        *arguments: str | Path,
        cwd: Path | None = None,
        env: Mapping[str, str | None] | None = None,
        artifacts: Path | None = None,
        stdin: int = subprocess.DEVNULL,
        measured: bool = True,
    ) -> Running:
        """Start ``nightshift ARGUMENTS``.

        Args:
            arguments: The command line. ``run`` gets ``--artifacts`` when it lacks one.
            cwd: Working directory; an empty folder if not given.
            env: Variables to add; None takes one away.
            artifacts: Where the artifacts go; a fresh folder if not given.
            stdin: As for ``subprocess.Popen``.
            measured: Whether the process takes part in a coverage measurement, which writes files of its own.
        """
        command = [str(argument) for argument in arguments]
        if "--artifacts" in command:
            artifacts = Path(command[command.index("--artifacts") + 1])
        elif artifacts is None:
            artifacts = self.directory / f"artifacts-{len(self.started)}"
        if command[:1] == ["run"] and "--artifacts" not in command:
            command += ["--artifacts", str(artifacts)]
        environment = self.environment()
        if not measured:
            environment = {key: value for key, value in environment.items() if not key.startswith("COV")}
        for key, value in (env or {}).items():
            if value is None:
                environment.pop(key, None)
            else:
                environment[key] = value
        empty = self.directory / "cwd"
        empty.mkdir(exist_ok=True)
        process = subprocess.Popen(
            [Path(sys.executable).with_name("nightshift"), *command],
            cwd=cwd or empty,
            env=environment,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.started.append(Running(process, artifacts))
        return self.started[-1]

    def __call__(self, *arguments: str | Path, timeout: float = 60, **options: Any) -> Finished:
        """Run ``nightshift ARGUMENTS`` to its end; options as for ``start``."""
        return self.start(*arguments, **options).finish(timeout)


@pytest.fixture
def run_nightshift(tmp_path: Path) -> Iterator[Nightshift]:
    """The installed command: call it to run it to its end, or ``.start(...)`` it."""
    nightshift = Nightshift(tmp_path / "nightshift")
    nightshift.directory.mkdir()
    yield nightshift
    for running in nightshift.started:
        if running.process.poll() is None:
            os.killpg(running.process.pid, signal.SIGKILL)
            running.process.communicate()


# --- tasks ---------------------------------------------------------------------------------------

ALLOW_ALL: list[JsonObject] = [{"id": "all", "tool": "*", "command": "any", "decision": "allow"}]
"""Policy rules for tests that are not about the policy."""


class ScriptedTask(Protocol):
    """Writes a task and what belongs to it. See the fixture ``scripted_task``."""

    def __call__(
        self,
        responses: Sequence[JsonObject],
        *,
        prompt: str = "Do the work.",
        task: Mapping[str, Any] | None = None,
        profile: Mapping[str, Any] | None = None,
        rules: Sequence[Mapping[str, Any]] | None = None,
        name: str = "task",
    ) -> Path:
        """Write the files into a folder of their own; returns the path of the task file.

        Args:
            responses: ``responses`` of the script, one a model request.
            prompt: The task's prompt.
            task: Keys that replace those of the task.
            profile: Keys that replace those of the profile.
            rules: Rules of the policy; all calls are allowed if not given.
            name: Name of the task and of its folder.
        """
        ...


@pytest.fixture
def scripted_task(tmp_path: Path) -> ScriptedTask:
    """A function that writes a task with profile, policy and script. JSON is YAML, so that is what it writes."""

    def write(
        responses: Sequence[JsonObject],
        *,
        prompt: str = "Do the work.",
        task: Mapping[str, Any] | None = None,
        profile: Mapping[str, Any] | None = None,
        rules: Sequence[Mapping[str, Any]] | None = None,
        name: str = "task",
    ) -> Path:
        folder = tmp_path / "tasks" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        files: dict[str, Mapping[str, Any]] = {
            "script": {"version": 1, "responses": list(responses)},
            "policy": {"version": 1, "default": "deny", "rules": list(ALLOW_ALL if rules is None else rules)},
            "profile": {
                "version": 1,
                "model": {"provider": "scripted", "model": "scripted", "script": f"{name}.script.yaml"},
                "permission_mode": "workspace-write",
                "approvals": f"{name}.policy.yaml",
                **(profile or {}),
            },
            "task": {
                "version": 1,
                "name": name,
                "prompt": prompt,
                "profile": f"{name}.profile.yaml",
                **(task or {}),
            },
        }
        for kind, content in files.items():
            (folder / f"{name}.{kind}.yaml").write_text(json.dumps(content, indent=2), encoding="utf-8")
        return folder / f"{name}.task.yaml"

    return write
