"""The recording of a run with ``provider: replay``: where it is, what it holds, what must hold to play it.

A session is data: the run that plays it has the profile's policy and tools, no network, and is confined.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from runner.config.load import Document, Mark, config_error
from runner.config.merge import overlay
from runner.errors import ConfigError
from runner.permission import Mode

if TYPE_CHECKING:
    from runner.approvals.policy import Policy
    from runner.config.effective import Effective
    from runner.config.load import Location
    from runner.config.trust import Reader
    from runner.providers.recording import Recording

NO_NETWORK: Final = "replay: a session is data"
"""Origin of the settings that a replay never has otherwise."""

_OF_A_MODEL: Final = ("base_url", "api_key_env", "api_key_file", "proxy", "script", "prices")
"""Keys of ``model`` that are about asking a real one."""


class Played(NamedTuple):
    """A recording that is played in place of the profile's model.

    Attributes:
        recording: It.
        normalise: Declared patterns beside the profile's own.
    """

    recording: Recording
    normalise: tuple[str, ...] = ()


def play(profile: Document, played: Played, cwd: Path) -> None:
    """Put a recording in the place of the model of a merged profile, which is changed."""
    model = profile.value.get("model") or {}
    value: dict[str, object] = {key: None for key in _OF_A_MODEL if key in model}
    value |= {"provider": "replay", "replay": played.recording.path}
    if played.normalise:
        value["replay_normalise"] = [*(model.get("replay_normalise") or []), *played.normalise]
    overlay(profile, Document("--normalise", {"model": value}, {(): Mark("--normalise", 0, 0, str(cwd))}))


def read_replay(profile: Effective, reader: Reader, played: Played | None = None) -> Recording | None:
    """What the ``replay`` provider plays; None for another provider.

    Raises:
        ConfigError: The session is not named, is part of an untrusted checkout or is not there; a declared
            pattern is wrong or takes too long.
        LogError: It is no session that can be played.
    """
    if profile.raw("model", "provider") != "replay":
        return None
    from runner.hooks.normalise import MAX_PATTERNS, check_patterns, pattern_problem
    from runner.hooks.replay import recorded_texts

    patterns = profile.raw("model", "replay_normalise") or []
    problems = [
        profile.document.problem(("model", "replay_normalise", index), f"{text[:200]!r} {wrong}")
        for index, text in enumerate(patterns)
        if (wrong := pattern_problem(text)) is not None
    ]
    if len(patterns) > MAX_PATTERNS:
        problems.append(
            profile.document.problem(("model", "replay_normalise"), f"has more than {MAX_PATTERNS}: join some")
        )
    if problems:
        raise config_error(profile.document.source, problems)
    recording = _read(profile, reader) if played is None else played.recording
    if recording.path not in reader.files:
        reader.files.append(recording.path)
    check_patterns(patterns, recorded_texts(recording))
    return recording


def _read(profile: Effective, reader: Reader) -> Recording:
    from runner.providers.recording import read_recording
    from runner.session.store import open_session

    location: Location = ("model", "replay")
    text = profile.raw(*location)
    document = profile.document
    if text is None:
        problem = document.problem(
            ("model",), "replay is missing: the provider replay takes its answers from a session"
        )
        raise config_error(document.source, [problem], hint="add model.replay")
    path = Path(os.path.normpath(Path(document.mark(location).directory) / text))
    wrong = None
    if not os.path.lexists(path):
        wrong = f"{reader.shown(path)} is not there: name an artifacts directory, a log or an exported ZIP"
    elif reader.under_test(path) is not None:
        wrong = "is part of the untrusted checkout: keep sessions that are replayed outside of it"
    if wrong is not None:
        raise config_error(document.source, [document.problem(location, wrong)])
    return read_recording(open_session(str(path)))


def check_confined(profile: Effective, mode: Mode, policy: Policy) -> None:
    """Note what would let a recording do what no sandbox bounds."""
    widest = Mode.DANGER_FULL_ACCESS
    if mode is widest:
        text = f"a session is data, and is not replayed in {widest.value}: use workspace-write"
        profile.problem(("permission_mode",), text)
    for rule in policy.rules:
        if rule.allow and widest in rule.escalate:
            text = (
                f"the rule {rule.id} lets calls ask for {widest.value}, and a session is data: take it out of escalate"
            )
            profile.problem(("approvals",), text)


def parse_patterns(texts: tuple[str, ...]) -> tuple[str, ...]:
    """The patterns of ``--normalise``.

    Raises:
        ConfigError: CONFIG_INVALID, one of them is wrong.
    """
    from runner.hooks.normalise import pattern_problem

    for text in texts:
        wrong = pattern_problem(text)
        if wrong is not None:
            raise ConfigError(
                f"--normalise {text[:200]!r}: {wrong}", hint="write a regular expression, as Python reads it"
            )
    return texts
