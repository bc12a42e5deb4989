"""What the model is told about the place it works in."""

from __future__ import annotations

import pytest

from runner.agent.prompt import runtime_context
from runner.agent.settings import Limits


def context(mode: str, egress: tuple[str, ...] = ()) -> str:
    """The run-time state of a session in ``mode``."""
    return runtime_context(
        mode=mode,
        workspace="/w",
        tmp="/tmp/s/tmp",
        network=False,
        egress=egress,
        not_enforced=(),
        policy_summary="",
        limits=Limits(),
    )


@pytest.mark.parametrize("mode", ["read-only", "workspace-write"])
def test_the_model_knows_that_only_its_temporary_folder_lasts(mode: str) -> None:
    """Under either backend a file elsewhere in /tmp would not be there for the next call."""
    line = next(line for line in context(mode).splitlines() if line.startswith("Temporary folder: /tmp/s/tmp "))

    assert "$TMPDIR" in line
    assert "elsewhere in /tmp is gone after the call, or refused" in line


def test_a_bare_session_has_the_machines_tmp() -> None:
    """Nothing is said about it that does not hold there."""
    assert "Temporary folder: /tmp/s/tmp\n" in context("danger-full-access")


def test_the_model_knows_what_of_the_network_it_reaches() -> None:
    """The places by name, and how programs get there."""
    text = context("workspace-write", ("pypi.org:443", "files.pythonhosted.org:443"))

    assert (
        "Network: only pypi.org:443, files.pythonhosted.org:443, "
        "through the proxy that HTTP_PROXY and HTTPS_PROXY name." in text.splitlines()
    )
    assert "Network: off." in context("workspace-write").splitlines()
