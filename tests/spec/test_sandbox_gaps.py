"""Each name that can stand in ``notEnforced`` is explained where readers look for it."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from runner.sandbox import layout
from runner.sandbox.base import PROPERTIES
from runner.sandbox.bubblewrap import Bubblewrap
from runner.sandbox.executor import NOTHING_ENFORCED
from runner.sandbox.landlock import Landlock
from runner.sandbox.seatbelt import Seatbelt

PAGE = Path(__file__).parents[2] / "docs" / "explanation" / "sandbox.md"
OF_BARE_RUNS = {"writes", "hidden_files", "network", "unix_sockets", "limits"}
"""Names of runs without a sandbox, which the page explains together."""


def said() -> set[str]:
    """The names in the code that makes the lists."""
    makers = (Bubblewrap._gaps, Landlock._gaps, Seatbelt.not_enforced, layout.Layout.closed_to_new_files)
    return {name for maker in makers for name in re.findall(r'"([a-z]+(?:_[a-z]+)*)"', inspect.getsource(maker))}


def test_every_name_has_its_row() -> None:
    """And every row has its name, so that nothing is explained that cannot come."""
    section = PAGE.read_text(encoding="utf-8").split("## What they do not keep alike")[1].split("\n## ")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    explained = {name for cell in cells for name in re.findall(r"`([a-z_]+)`", cell)}

    assert {"pid_isolation", "priority", "new_top_level_files", "process_limit"} <= said()
    assert explained == said() | set(PROPERTIES)
    assert set(NOTHING_ENFORCED) - explained == OF_BARE_RUNS
