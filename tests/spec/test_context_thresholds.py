"""Thresholds of the context are keys of the profile: each can be changed, by model too; none may contradict another."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from runner.agent.settings import CompactionSpec, compaction_for
from runner.config.resolve import load_run
from runner.errors import ConfigError
from runner.record import fields

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Nightshift

    from runner.config.spec import RunSpec

OTHER: dict[str, Any] = {
    "spill_bytes": 40_000,
    "spill_head": 5_000,
    "spill_tail": 1_000,
    "prune_over": 9_000,
    "prune_head": 4_000,
    "prune_tail": 1_000,
    "summary_at": 0.7,
    "keep": 0.2,
    "summary_max_tokens": 4_096,
    "summary_model": "other",
    "min_output": 1_000,
}
"""A value of each key that is not its default."""


def load(folder: Path, compaction: dict[str, Any], **profile: Any) -> RunSpec:
    """Load a scripted task whose profile has this section."""
    model = {"provider": "scripted", "script": "s.yaml", "model": "m"}
    whole = {"version": 1, "model": model, "compaction": compaction, **profile}
    (folder / "s.yaml").write_text("version: 1\nresponses: [{text: done}]\n")
    (folder / "p.profile.yaml").write_text(json.dumps(whole))
    (folder / "t.task.yaml").write_text("version: 1\nprompt: x\nprofile: ./p.profile.yaml\n")
    (folder / "ws").mkdir(exist_ok=True)
    environ = {"OPENAI_API_KEY": "k"}
    return load_run(task=folder / "t.task.yaml", prompt=None, profile=None, workspace="ws", environ=environ, cwd=folder)


def refused(folder: Path, compaction: dict[str, Any], **profile: Any) -> str:
    """The problem that the profile is refused with; there is one."""
    with pytest.raises(ConfigError) as caught:
        load(folder, compaction, **profile)
    [problem] = caught.value.problems
    return problem


def test_the_table_has_every_key() -> None:
    """A key that is added to the settings is to be tested here."""
    assert set(OTHER) == {each.name for each in fields(CompactionSpec())}


@pytest.mark.parametrize("key", OTHER)
def test_each_threshold_is_a_key_of_the_profile_and_of_each_model_in_it(tmp_path: Path, key: str) -> None:
    """The value of another model changes nothing; the model's own goes before the general one."""
    default, other = getattr(CompactionSpec(), key), OTHER[key]
    for section, expected in (
        ({}, default),
        ({key: other}, other),
        ({"models": {"m": {key: other}}}, other),
        ({"models": {"n": {key: other}}}, default),
        ({key: other, "models": {"m": {key: default}}}, other if default is None else default),
    ):
        profile = load(tmp_path, section).profile
        found = compaction_for(profile.compaction, profile.compaction_models, profile.model.model)
        assert getattr(found, key) == expected, section


@pytest.mark.parametrize("key", OTHER)
def test_plan_shows_each_threshold_with_its_origin(tmp_path: Path, run_nightshift: Nightshift, key: str) -> None:
    """The default, the profile's, and a model's."""
    load(tmp_path, {key: OTHER[key], "models": {"m": {key: OTHER[key]}}})

    planned = run_nightshift("plan", tmp_path / "t.task.yaml", "--workspace", tmp_path / "ws", "--json")

    assert planned.exit_code == 0, planned.stderr
    values = json.loads(planned.stdout)["values"]
    for name in (f"profile.compaction.{key}", f"profile.compaction.models.m.{key}"):
        assert values[name]["value"] == OTHER[key]
        assert values[name]["origin"].endswith("p.profile.yaml:1")
    defaults = {f"profile.compaction.{name}" for name in OTHER if name != key}
    assert all(values[name]["origin"] == "default" for name in defaults)


@pytest.mark.parametrize(
    ("section", "numbers"),
    [
        ({"keep": 0.8}, ("0.8", "summary_at")),
        ({"keep": 0.5, "summary_at": 0.4}, ("0.5", "0.4")),
        ({"spill_head": 30_000, "spill_tail": 20_000}, ("50000", "spill_bytes")),
        ({"prune_head": 8_000, "prune_tail": 192}, ("8192", "prune_over")),
        ({"models": {"m": {"keep": 0.9}}}, ("compaction.models.m", "0.9", "0.8")),
        ({"models": {"n": {"spill_bytes": 8_000}}}, ("compaction.models.n", "8000")),
        ({"min_output": 127_900}, ("128000", "127900", "system prompt")),
        ({"summary_at": 0.001, "keep": 0.0001}, ("0.001", "is 128 of 128000", "system prompt")),
    ],
)
def test_thresholds_that_contradict_each_other_are_refused_with_the_numbers(
    tmp_path: Path, section: dict[str, Any], numbers: tuple[str, ...]
) -> None:
    """One problem, which says what is against what."""
    problem = refused(tmp_path, section)

    assert all(number in problem for number in numbers), problem


@pytest.mark.parametrize(
    "section",
    [
        {"keep": 0.79},
        {"spill_head": 29_999, "spill_tail": 20_000},
        {"prune_head": 8_000, "prune_tail": 191},
        {"min_output": 100_000},
        {"summary_at": 0.01, "keep": 0.001},
        # What holds for all contradicts nothing once the model has its own.
        {"keep": 0.5, "models": {"m": {"summary_at": 0.51}}},
    ],
)
def test_thresholds_that_just_agree_are_accepted(tmp_path: Path, section: dict[str, Any]) -> None:
    """The next value beside each that is refused."""
    load(tmp_path, section)


def test_a_window_below_the_system_prompt_is_refused(tmp_path: Path) -> None:
    """With its size and what would have to fit."""
    model = {"provider": "openai", "model": "gpt-5", "context_window": 200}

    problem = refused(tmp_path, {"min_output": 100}, model=model)

    assert "window of 200 tokens does not hold the system prompt, about 1" in problem
    assert "min_output, 100" in problem


@pytest.mark.parametrize(("name", "known"), [("gpt-5-mini", True), ("nobody-knows", False)])
def test_a_summary_model_needs_a_price_under_a_cost_cap(tmp_path: Path, name: str, known: bool) -> None:
    """What is not known cannot be counted; without a cap nobody asks."""
    model = {"provider": "openai", "model": "gpt-5"}
    assert load(tmp_path, {"summary_model": name}, model=model).profile.summary_prices is not None
    if known:
        prices = load(tmp_path, {"summary_model": name}, model=model, limits={"cost": 1}).profile.summary_prices
        assert prices is not None
        assert (prices.input, prices.cache_read, prices.output) == (0.25, 0.025, 2.0)
    else:
        problem = refused(tmp_path, {"summary_model": name}, model=model, limits={"cost": 1})
        assert "the price of 'nobody-knows' is not known" in problem
