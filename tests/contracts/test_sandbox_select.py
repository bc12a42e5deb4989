"""A backend is chosen by proof: the probe finds every hole, and says why and what to do."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import ConfigError, ErrorCode, SandboxError
from runner.permission import Mode
from runner.record import replace
from runner.sandbox import probe as probing
from runner.sandbox.base import BARE, DISABLE_VARIABLE, ConfinedCommand, SandboxPolicy, SandboxSpec
from runner.sandbox.probe import build_backend, probe
from runner.sandbox.select import probe_all, select_backend
from runner.testing.sandbox import make_box

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.sandbox.base import Backend
    from runner.testing.sandbox import Box

REPOSITORY = Path(__file__).parents[2]


def policy_of(box: Box, mode: Mode = Mode.WORKSPACE_WRITE, **spec: Any) -> SandboxPolicy:
    """The policy of an ordinary command in the box."""
    return box.executor(mode, **spec)._policy


def select(box: Box, policy: SandboxPolicy, *, environ: dict[str, str] | None = None, **spec: Any) -> Backend:
    """Choose a backend as a run does."""
    return select_backend(SandboxSpec(**spec), policy, cancellation=box.cancellation, environ=environ or {})


@pytest.mark.parametrize("mode", list(Mode))
def test_a_working_backend_is_chosen_by_name(box: Box, mode: Mode) -> None:
    """In each mode; danger-full-access with ``require`` is probed as workspace-write."""
    assert select(box, policy_of(box, mode), backend=box.backend).name == box.backend


def test_the_probe_leaves_no_trace(box: Box) -> None:
    """Workspace, repository, state, outside and the system's folders hold what they held."""
    policy = policy_of(box)
    folders = [box.base, Path("/etc"), Path("/dev/shm"), Path("/")]

    def listing() -> list[str]:
        found = [str(path) for folder in folders[1:] for path in folder.iterdir()]
        return sorted(found + [str(path) for path in box.base.rglob("*")])

    before = listing()
    assert select(box, policy, backend=box.backend).name == box.backend
    assert [path for path in listing() if "nightshift-probe" in path and path not in before] == []
    assert [path for path in listing() if str(box.base) in path] == [path for path in before if str(box.base) in path]
    box.assert_untouched()


def test_the_probe_works_in_hard_places(box: Box) -> None:
    """An empty workspace, one with nothing but .git, network on, sockets on, a hidden file inside."""
    lax: list[dict[str, Any]] = [{"network": True}, {"unix_sockets": True}, {"unprotected_git": True}]
    for options in lax:
        assert select(box, policy_of(box, **options), backend=box.backend, **options).name == box.backend
    empty = box.base / "empty"
    empty.mkdir()
    assert select(box, replace(policy_of(box), workspace=str(empty)), backend=box.backend).name == box.backend
    (empty / ".git").mkdir()
    assert select(box, replace(policy_of(box), workspace=str(empty)), backend=box.backend).name == box.backend
    hidden = (str(box.workspace / "README"),)
    assert select(box, replace(policy_of(box), hidden=hidden), backend=box.backend).name == box.backend


class Leaky:
    """A backend with one hole: it confines under a laxer policy than it was given."""

    def __init__(self, real: Backend, laxer: dict[str, Any] | None) -> None:
        self.name = real.name
        self._real = real
        self._laxer = laxer

    def missing_properties(self, policy: SandboxPolicy) -> tuple[str, ...]:
        return self._real.missing_properties(policy)

    def not_enforced(self, policy: SandboxPolicy) -> tuple[str, ...]:
        return self._real.not_enforced(policy)

    def confine(self, argv: Sequence[str], policy: SandboxPolicy, *, cwd: str | None = None) -> ConfinedCommand:
        if self._laxer is None:
            return ConfinedCommand(list(argv), dict(policy.environment), cwd or policy.workspace, BARE)
        return self._real.confine(argv, replace(policy, **self._laxer), cwd=cwd)


@pytest.mark.parametrize(
    ("laxer", "reason"),
    [
        ({"network": True}, "the network is off, but"),
        ({"unix_sockets": True}, "Unix sockets"),
        ({"unprotected_git": True}, r"\.git"),
        ({"hidden": ()}, "hidden file"),
        ({"writable": "state"}, "outside the workspace"),
        ({"mode": Mode.READ_ONLY}, "nothing in the workspace can be written"),
        (None, "outside the workspace"),
    ],
)
def test_the_probe_finds_each_hole(
    box: Box, monkeypatch: pytest.MonkeyPatch, laxer: dict[str, Any] | None, reason: str
) -> None:
    """A backend that lets one thing through, or too little, does not pass, and the message says what."""
    if laxer == {"writable": "state"}:
        laxer = {"writable": (str(box.state),)}
    policy = policy_of(box)
    leaky = Leaky(build_backend(box.backend), laxer)
    monkeypatch.setattr(probing, "build_backend", lambda _name: leaky)
    report = probe(box.backend, policy, cancellation=box.cancellation, environ={})
    with pytest.raises(SandboxError, match=reason) as caught:
        select(box, policy, backend=box.backend)

    assert not report.ok
    assert report.output
    assert caught.value.code is ErrorCode.SANDBOX_UNAVAILABLE
    box.assert_untouched()
    assert not [path for path in box.base.rglob("*") if "nightshift-probe" in path.name]


def test_read_only_that_can_write_does_not_pass(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same for the other mode."""
    leaky = Leaky(build_backend(box.backend), {"mode": Mode.WORKSPACE_WRITE})
    monkeypatch.setattr(probing, "build_backend", lambda _name: leaky)
    report = probe(box.backend, policy_of(box, Mode.READ_ONLY), cancellation=box.cancellation, environ={})

    assert report.reason is not None
    assert "can write in the workspace" in report.reason


def test_a_wrapper_that_only_exists_does_not_pass(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own words reach the message, and the fix says what to do."""
    real = build_backend(box.backend)

    class Broken(Leaky):
        def confine(self, argv: Sequence[str], policy: SandboxPolicy, *, cwd: str | None = None) -> ConfinedCommand:
            command = super().confine(argv, policy, cwd=cwd)
            command.argv = ["/bin/sh", "-c", "echo bwrap: setting up uid map: Permission denied; exit 1"]
            return command

    monkeypatch.setattr(probing, "build_backend", lambda _name: Broken(real, {}))
    report = probe(box.backend, policy_of(box), cancellation=box.cancellation, environ={})

    assert report.reason == "bwrap: setting up uid map: Permission denied"
    assert report.fix


def test_required_properties_decide(box: Box) -> None:
    """A backend that lacks one does not count as working; what it keeps does not matter."""
    policy = policy_of(box)
    assert select(box, policy, backend=box.backend, require=("git_protect", "signal_scope")).name == box.backend
    for name in ("pid_isolation", "metadata", "private_shm"):
        if box.backend == "bubblewrap":
            assert select(box, policy, backend=box.backend, require=(name,)).name == box.backend
            continue
        with pytest.raises(SandboxError, match=rf"works, but .*{name}"):
            select(box, policy, backend=box.backend, require=(name,))
    with pytest.raises(SandboxError, match="git_protect"):
        select(box, policy_of(box, unprotected_git=True), backend=box.backend, require=("git_protect",))
    with pytest.raises(ConfigError, match="teleport"):
        select(box, policy, backend=box.backend, require=("teleport",))


def test_a_named_backend_is_never_replaced(box: Box) -> None:
    """Where it is unavailable the run does not start, whatever else works."""
    with pytest.raises(SandboxError, match=f"{box.backend}: switched off"):
        select(box, policy_of(box), backend=box.backend, environ={DISABLE_VARIABLE: f"seatbelt, {box.backend}"})
    with pytest.raises(SandboxError, match="macOS"):
        select(box, policy_of(box), backend="seatbelt")
    with pytest.raises(ConfigError, match="chroot"):
        select(box, policy_of(box), backend="chroot")
    with pytest.raises(ConfigError, match="no sandbox backend 'bwrap'"):
        select(box, policy_of(box), environ={DISABLE_VARIABLE: "landlock, bwrap"})


def test_auto_takes_the_next_that_works(box: Box) -> None:
    """In the fixed order; when none is left, each reason and each fix is in the error."""
    policy = policy_of(box)
    others = {"bubblewrap": "landlock", "landlock": "bubblewrap"}
    assert select(box, policy, environ={DISABLE_VARIABLE: others[box.backend]}).name == box.backend
    with pytest.raises(SandboxError) as caught:
        select(box, policy, environ={DISABLE_VARIABLE: "bubblewrap,landlock"})

    assert "bubblewrap: switched off" in caught.value.message
    assert "landlock: switched off" in caught.value.message
    assert caught.value.hint
    assert [entry["backend"] for entry in caught.value.details["backends"]] == ["bubblewrap", "landlock"]
    assert caught.value.code.exit_code == 3


def test_a_cancelled_run_does_not_get_a_backend(box: Box) -> None:
    """A raised flag ends the probe."""
    flag = Cancellation()
    flag.cancel("SIGTERM")
    with pytest.raises(SandboxError, match="cancelled"):
        select_backend(SandboxSpec(backend=box.backend), policy_of(box), cancellation=flag, environ={})
    flag.close()


def test_a_policy_nobody_can_apply_is_a_configuration_error(box: Box) -> None:
    """Not a failure of the backend: the message names the path."""
    with pytest.raises(ConfigError, match="cannot be hidden"):
        select(box, replace(policy_of(box), hidden=(str(box.workspace),)), backend=box.backend)


def test_a_search_path_cannot_bring_its_own_wrapper(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program called bwrap, prlimit, setpriv or python in the workspace is not what confines."""
    for name in ("bwrap", "prlimit", "setpriv", "python3", "python3.11", "sh"):
        fake = box.workspace / "src" / name
        fake.write_text(f'#!/bin/sh\necho fake > {box.outside}/fake\nexec "$@"\n')
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{box.workspace}/src:/usr/bin:/bin")
    environ = {"PATH": f"{box.workspace}/src:/usr/bin:/bin"}
    result = box.run("echo done", environ=environ)

    assert result.output == b"done\n"
    assert select(box, policy_of(box, environ=environ), backend=box.backend).name == box.backend
    box.assert_untouched()


INSIDE = """
import json, sys
from pathlib import Path
from runner.sandbox.select import probe_all
print(json.dumps([[report.backend, report.ok, report.reason, report.fix] for report in probe_all()]))
"""


@pytest.mark.backend("bubblewrap", "landlock")
def test_where_namespaces_are_forbidden_auto_finds_landlock(place: Path) -> None:
    """As in a default container: bubblewrap fails with the kernel's reason and a fix, Landlock works."""
    box = make_box(place, "bubblewrap")
    executor = box.executor(network=True, unix_sockets=True)
    result = executor.run(
        [sys.executable, "-c", INSIDE],
        mode=Mode.WORKSPACE_WRITE,
        timeout=50,
        cancellation=box.cancellation,
        environment={"PYTHONPATH": str(REPOSITORY)},
        readable=[str(REPOSITORY)],
    )
    bubblewrap, landlock = json.loads(result.output.splitlines()[-1])
    box.close()

    assert bubblewrap[:2] == ["bubblewrap", False]
    assert "Operation not permitted" in bubblewrap[2] or "namespace" in bubblewrap[2]
    assert "landlock" in bubblewrap[3]
    assert landlock[:2] == ["landlock", True], landlock


@pytest.mark.backend("bubblewrap", "landlock")
def test_every_backend_is_reported() -> None:
    """In the order of ``auto``, each with what it does not enforce, in a workspace of the probe's own."""
    reports = probe_all(environ={"PATH": os.environ["PATH"]})

    assert [(report.backend, report.ok) for report in reports] == [("bubblewrap", True), ("landlock", True)]
    assert "pid_isolation" in reports[1].not_enforced
    assert reports[0].missing == ()
    assert all(report.checks["workspace"] == "allowed" for report in reports)


def doctor(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``nightshift doctor``."""
    command = [str(Path(sys.executable).with_name("nightshift")), "doctor", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, env={"PATH": os.environ["PATH"], **environment}
    )


@pytest.mark.backend("bubblewrap", "landlock")
def test_doctor_says_what_works() -> None:
    """Exit 0 when at least one works; as text and as JSON, on stdout alone."""
    text = doctor()
    document = json.loads(doctor("--json").stdout)

    assert (text.returncode, text.stderr) == (0, "")
    assert "bubblewrap: works" in text.stdout
    assert "auto chooses bubblewrap" in text.stdout
    assert document["chosen"] == "bubblewrap"
    assert document["landlockAbi"] >= 3
    assert document["kernel"] == os.uname().release
    assert [entry["ok"] for entry in document["backends"]] == [True, True]
    assert document["backends"][0]["checks"]["end"] == "allowed"


@pytest.mark.backend("bubblewrap", "landlock")
def test_doctor_tries_what_a_profile_asks_for(tmp_path: Path) -> None:
    """Its settings and mode, the backend it names, and the properties it requires."""
    (tmp_path / "shared").mkdir()
    profile = tmp_path / "p.profile.yaml"

    def asked(sandbox: str, mode: str = "workspace-write") -> tuple[int, Any]:
        profile.write_text(f"version: 1\nextends: review\npermission_mode: {mode}\nsandbox: {sandbox}\n")
        done = doctor("--profile", str(profile), "--json")
        return done.returncode, json.loads(done.stdout)

    code, document = asked('{require: [pid_isolation], network: "on", writable: [shared]}', "read-only")
    assert (code, document["asked"], document["chosen"]) == (0, "auto", "bubblewrap")
    assert [(entry["ok"], entry["checks"]["workspace"][:6]) for entry in document["backends"]] == [
        (True, "denied"),
        (False, "denied"),
    ]
    assert document["backends"][0]["checks"]["tcp"] == "allowed"
    assert "sandbox.require asks for: pid_isolation" in document["backends"][1]["reason"]

    code, document = asked("{require: [pid_isolation], backend: landlock}")
    assert (code, document["asked"], document["chosen"]) == (3, "landlock", None)
    text = doctor("--profile", str(profile)).stdout
    assert "landlock: works, but does not keep what sandbox.require asks for: pid_isolation\n" in text
    assert text.endswith("sandbox.backend: landlock finds no backend\n")


def test_doctor_refuses_a_profile_that_is_none() -> None:
    """With the profile's own mistake."""
    done = doctor("--profile", "refacter")

    assert (done.returncode, done.stdout) == (2, "")
    assert "no shipped profile is called 'refacter'" in done.stderr


def test_doctor_says_what_does_not_and_why() -> None:
    """Exit 3 when none works, with reason and fix for each."""
    variables = {DISABLE_VARIABLE: "bubblewrap,landlock"}
    text, document = doctor(**variables), json.loads(doctor("--json", **variables).stdout)

    assert text.returncode == 3
    assert text.stdout.count("does not work") == 2
    assert text.stdout.count("fix: take") == 2
    assert document["chosen"] is None
    assert all(entry["reason"] and entry["fix"] for entry in document["backends"])
