"""Chooses the backend of a run: by trying, in a fixed order, and never by hope.

Invariants: a backend that is named is used or the run does not start; one that lacks a required
property does not count as working; the reasons of all that failed reach the user.
Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

from runner.errors import ConfigError, SandboxError
from runner.permission import Mode
from runner.record import replace
from runner.sandbox.base import PROPERTIES, SandboxPolicy, SandboxSpec, platform_backends
from runner.sandbox.probe import ProbeReport, build_backend, probe

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from runner.cancellation import Cancellation
    from runner.sandbox.base import Backend

__all__ = ["ProbeReport", "probe_all", "select_backend"]


Attempt = tuple[str, str | None]
"""A backend's name and why it cannot be used, None if it can."""


def _lacks(report: ProbeReport, required: Sequence[str]) -> list[str]:
    return [name for name in required if name in report.missing]


def failure(report: ProbeReport, required: Sequence[str]) -> str | None:
    """Why a backend cannot be used where ``required`` properties are asked for, None if it can."""
    if not report.ok:
        return report.reason
    lacks = _lacks(report, required)
    return f"works, but does not keep what sandbox.require asks for: {', '.join(lacks)}" if lacks else None


def candidates(spec: SandboxSpec) -> tuple[str, ...]:
    """The backends that may be used, in the order in which they are tried."""
    return platform_backends(sys.platform) if spec.backend == "auto" else (spec.backend,)


def select_backend(
    spec: SandboxSpec,
    policy: SandboxPolicy,
    *,
    cancellation: Cancellation,
    environ: Mapping[str, str] | None = None,
    tried: list[Attempt] | None = None,
) -> Backend:
    """Return the first backend that passes its probe under ``policy`` and keeps what ``spec`` requires.

    Args:
        spec: The profile's sandbox section: the backend's name or ``auto``, required properties.
        policy: The policy of an ordinary command of the run. For danger-full-access, where a
            backend is asked for only by ``require``, the probe uses workspace-write.
        cancellation: Ends a probe early.
        environ: The runner's environment; its own if None.
        tried: Gets what each probe came to, in their order, also where none passed.

    Raises:
        ConfigError: CONFIG_INVALID, unknown backend or property, or a policy nobody can apply.
        SandboxError: SANDBOX_UNAVAILABLE, none passed; the message says why each failed.
    """
    unknown = [name for name in spec.require if name not in PROPERTIES]
    if unknown:
        raise ConfigError(
            f"sandbox.require names what no backend promises: {', '.join(unknown)}",
            hint=f"use {', '.join(PROPERTIES)}",
        )
    if policy.mode is Mode.DANGER_FULL_ACCESS:
        policy = replace(policy, mode=Mode.WORKSPACE_WRITE)
    names = candidates(spec)
    failed = []
    for name in names:
        report = probe(name, policy, cancellation=cancellation, environ=os.environ if environ is None else environ)
        reason = failure(report, spec.require)
        if tried is not None:
            tried.append((name, reason))
        if reason is None:
            return build_backend(name)
        failed.append((report, reason))
        if cancellation.cancelled:
            break
    raise _unavailable(spec, failed)


def _unavailable(spec: SandboxSpec, failed: Sequence[tuple[ProbeReport, str]]) -> SandboxError:
    asked = "no sandbox backend works here" if spec.backend == "auto" else "the sandbox backend asked for does not work"
    lines = [asked, *(f"  {report.backend}: {reason}" for report, reason in failed)]
    fixes = [f"{report.backend}: {report.fix}" for report, _ in failed if report.fix]
    return SandboxError(
        "\n".join(lines),
        hint="; ".join(fixes) or "choose another backend, or require less",
        details={
            "backends": [
                {"backend": report.backend, "reason": reason, "fix": report.fix, "output": report.output}
                for report, reason in failed
            ]
        },
    )


def probe_all(
    spec: SandboxSpec | None = None,
    *,
    mode: Mode = Mode.WORKSPACE_WRITE,
    cancellation: Cancellation | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[ProbeReport]:
    """Try every backend, in the order of ``auto``, in a workspace of its own with a ``.git``.

    Args:
        spec: What to try it with; the default settings if None.
        mode: The permission mode of a command; danger-full-access, which confines nothing, is tried as workspace-write.
        cancellation: Ends the probes early.
        environ: The runner's environment; its own if None.

    Raises:
        ConfigError: CONFIG_INVALID, nobody could confine with these settings.
    """
    from runner.cancellation import Cancellation as NewCancellation

    environment = os.environ if environ is None else environ
    own = NewCancellation() if cancellation is None else None
    heeded = cancellation or own
    assert heeded is not None
    try:
        import tempfile

        with tempfile.TemporaryDirectory(prefix="nightshift-probe-") as folder:
            sample = _sample_policy(os.path.realpath(folder), environment, spec or SandboxSpec(), mode)
            return [
                probe(name, sample, cancellation=heeded, environ=environment)
                for name in platform_backends(sys.platform)
            ]
    finally:
        if own is not None:
            own.close()


def _sample_policy(folder: str, environ: Mapping[str, str], spec: SandboxSpec, mode: Mode) -> SandboxPolicy:
    from runner.sandbox.environment import child_environment, hidden_paths
    from runner.sandbox.executor import session_policy

    workspace, state = os.path.join(folder, "workspace"), os.path.join(folder, "state")
    for path in (f"{workspace}/.git", f"{workspace}/source", state):
        os.makedirs(path, mode=0o700)
    return session_policy(
        spec,
        mode=Mode.WORKSPACE_WRITE if mode is Mode.DANGER_FULL_ACCESS else mode,
        workspace=workspace,
        state=state,
        hidden=hidden_paths(environ, hidden=spec.hidden),
        environment=child_environment(
            environ, spec, home=os.path.join(state, "home"), tmp=os.path.join(state, "tmp"), secrets={}
        ),
    )
