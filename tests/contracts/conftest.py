"""What the contract tests share: every test of a sandbox runs once for each backend.

Workspaces and canaries lie in the user's home, not below ``/tmp``: a private ``/tmp`` would hide
them, and what cannot be seen proves nothing about what may be written.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from runner.testing.sandbox import Box, make_box

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture
def place() -> Iterator[Path]:
    """An empty folder in the user's home, gone after the test."""
    folder = Path(os.path.realpath(tempfile.mkdtemp(prefix=".nightshift-test-", dir=Path.home())))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(params=["bubblewrap", "landlock"])
def backend(request: pytest.FixtureRequest) -> str:
    """The backend of this run of the test. A missing one skips it, or fails the run if it is required."""
    name: str = request.param
    return name


@pytest.fixture
def box(place: Path, backend: str) -> Iterator[Box]:
    """A box confined by the backend."""
    made = make_box(place, backend)
    yield made
    made.close()


@pytest.fixture
def bare_box(place: Path) -> Iterator[Box]:
    """A box without a sandbox: the positive twin of what a backend denies."""
    made = make_box(place, "none")
    yield made
    made.close()


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of the same user outside the sandbox, as the runner is, with a secret in its environment."""
    process = subprocess.Popen(["/bin/sleep", "60"], env={"API_KEY": "top-secret-value"})
    yield process
    process.kill()
    process.wait()
