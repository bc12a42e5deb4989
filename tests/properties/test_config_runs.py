"""Whatever task, profile and options say, loading a run ends in a ``RunSpec`` or in a ConfigError."""

from __future__ import annotations

import copy
import json
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from runner.config.resolve import load_run
from runner.config.spec import RunSpec
from runner.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path

TASK: dict[str, Any] = {
    "version": 1,
    "name": "t",
    "prompt": "Do ${inputs.a}.",
    "inputs": {"a": {"value": 1, "trust": "untrusted"}},
    "profile": "./p.profile.yaml",
    "workspace": {"path": "ws", "isolation": "copy"},
    "context": ["f.md"],
    "outputs": {"files": ["a"], "patch": {"required": True}},
    "checks": [{"name": "c", "run": "true", "timeout": "5m", "retries": 1}],
    "limits": {"steps": 5, "wall": "5m"},
    "turns": ["And ${inputs.a}?"],
    "compact_at": [2],
}
PROFILE: dict[str, Any] = {
    "version": 1,
    "extends": "./base.profile.yaml",
    "model": {"prices": {"input": 1, "output": 2.5}, "max_output_tokens": "16k"},
    "permission_mode": "workspace-write",
    "sandbox": {
        "network": "on",
        "writable": ["cache"],
        "hidden": ["~/x"],
        "env": {"allow": ["A"], "set": {"B": "c"}},
        "limits": {"memory": "4g"},
    },
    "tools": {"allow": ["shell", "glob"], "deny": ["glob"], "parallel": 2},
    "approvals": {"version": 1, "default": "deny", "rules": [{"id": "r", "tool": "glob", "decision": "allow"}]},
    "compaction": {"keep": 0.1, "models": {"m.1": {"keep": 0.2}}},
    "limits": {"steps": 30, "cost": 1, "tokens": "5M"},
    "retry": {"attempts": 1, "seconds": 0},
    "overridable": ["model", "limits.steps"],
}
BASE = 'version: 1\nmodel: {provider: scripted, script: s.yaml}\nsandbox: {env: {set: {C: "1"}}}\n'

ODD: list[Any] = [
    None, True, 0, 1, -1, 1.5, 10**17, "", "x", "90s", "0s", "4g", "on", "../x", "/", "~", "${inputs.b}",
    "a\u0000b", "\udcff", [], {}, ["x"], [None], [[1]], {"x": "y"}, {"x": None}, {"version": 1}, [{}],
    "base.profile.yaml", "./p.profile.yaml",
]  # fmt: skip
SETS = [
    "limits.steps=2", "limits.steps=", "limits.steps=[1]", "limits.wall=x", "limits={}", "limits={steps: {a: 1}}",
    "limits=3", "model.model=m.1", "model=", "model={}", "model=3", "model.prices.input=0", "compaction.keep=0.1",
    "compaction=", "compaction=[1]", "compaction.models.x.keep=", "compaction.models.x=", "tools.deny=[[1]]",
    "tools.deny=[shell, glob]", "tools.allow={a: 1}", "tools.allow=[]", "tools.parallel=x", "sandbox.env.set.A=1",
    "version=2", "a=b", "=", "model.model=\udcff",
]  # fmt: skip
KEYS = ["version", "extends", "x", "steps", "models", "rules", "prompt_file", "unknown_window", "env", "file", "script"]


def _places(node: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return [at, *(place for key, inner in items for place in _places(inner, (*at, key)))]


@st.composite
def changed(draw: st.DrawFn, value: dict[str, Any]) -> dict[str, Any]:
    """``value`` with a few things put in, replaced or taken out."""
    value = copy.deepcopy(value)
    for _ in range(draw(st.sampled_from([0, 0, 1, 1, 2]))):
        place = draw(st.sampled_from(_places(value)[1:] or [()]))
        holder: Any = value
        for part in place[:-1]:
            holder = holder[part]
        odd = copy.deepcopy(draw(st.sampled_from(ODD)))
        if not place or (isinstance(holder, dict) and draw(st.booleans())):
            holder[draw(st.sampled_from(KEYS))] = odd
        elif draw(st.integers(0, 3)) == 0:
            del holder[place[-1]]
        else:
            holder[place[-1]] = odd
    return value


@given(
    task=changed(TASK),
    profile=changed(PROFILE),
    sets=st.just([]) | st.lists(st.sampled_from(SETS), max_size=2),
    inputs=st.just([]) | st.lists(st.sampled_from(["a=1", "a=", "b=1", "a", "=1", "a=\udcff"]), max_size=1),
    trust=st.sampled_from([None] * 8 + ["untrusted", "trusted"]),
    home=st.sampled_from(["/home/x"] * 4 + [None, "", "/"]),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_run_is_loaded_or_refused(
    tmp_path: Path,
    task: dict[str, Any],
    profile: dict[str, Any],
    sets: list[str],
    inputs: list[str],
    trust: str | None,
    home: str | None,
) -> None:
    """Never another exception; what is loaded has an origin for every value, and values that JSON can hold."""
    for name in ("ws", "cache"):
        (tmp_path / name).mkdir(exist_ok=True)
    for name, content in (
        ("ws/f.md", "x"),
        ("s.yaml", "version: 1\nresponses: []\n"),
        ("base.profile.yaml", BASE),
        ("t.task.yaml", json.dumps(task)),
        ("p.profile.yaml", json.dumps(profile)),
    ):
        (tmp_path / name).write_text(content, encoding="utf-8")

    try:
        run = load_run(
            task=tmp_path / "t.task.yaml",
            prompt=None,
            profile=None,
            workspace=None,
            sets=sets,
            inputs=inputs,
            trust=trust,
            environ={} if home is None else {"HOME": home},
            cwd=tmp_path,
        )
    except ConfigError:
        event("refused")
        return
    event("loaded")
    assert isinstance(run, RunSpec)
    assert run.values.keys() == run.origins.keys()
    json.dumps([run.config, dict(run.values)], allow_nan=False)
