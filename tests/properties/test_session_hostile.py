"""Whatever values a log holds, readers answer or refuse it; none of them breaks."""

from __future__ import annotations

import copy
import functools
import random
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.cli.main import run_cli
from runner.errors import RunnerError
from runner.providers.registry import dialects
from runner.session import codec
from runner.session.export import export_session
from runner.session.projection import derive_messages
from runner.session.repair import closing_events
from runner.session.store import open_session
from runner.session.transcript import transcript
from runner.session.verify import verify_session
from runner.testing.sessions import SampleSession

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"
VALUES: list[Any] = [None, True, 0, -1, 3.5, "x", "", [], {}, [1], [None], {"a": 1}, [[]], ["x"], [{"type": "text"}]]


@functools.cache
def logs() -> list[list[dict[str, Any]]]:
    """The lines of every golden log, and of one of ours."""
    with tempfile.TemporaryDirectory() as folder:
        with SampleSession(Path(folder)) as session:
            session.turn(steps=2)
            session.end()
        sources = [open_session(str(path)) for path in sorted(GOLDEN.iterdir()) if path.suffix != ".md"]
        return [[line.record for line in source.lines()] for source in [*sources, open_session(folder)]]


def spoiled(seed: int) -> bytes:
    """A log with one or two values replaced or taken out, anywhere in it."""
    rand = random.Random(seed)
    records = copy.deepcopy(rand.choice(logs()))
    for _ in range(rand.choice([1, 1, 2])):
        places: list[tuple[Any, Any]] = []
        waiting: list[Any] = [rand.choice(records)]
        while waiting:
            value = waiting.pop()
            keys = list(value) if isinstance(value, dict) else range(len(value))
            places += [(value, key) for key in keys]
            waiting += [value[key] for key in keys if isinstance(value[key], (dict, list))]
        holder, key = rand.choice(places)
        if isinstance(holder, dict) and rand.random() < 0.2:
            del holder[key]
        else:
            holder[key] = rand.choice(VALUES)
    return b"".join(codec.encode_line(record) for record in records)


@settings(max_examples=120, deadline=None)
@given(st.integers(0, 10**9))
def test_no_reader_breaks_on_a_spoiled_log(seed: int) -> None:
    """Each reader gives an answer or a RunnerError with exit code 13."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spoiled.jsonl"
        path.write_bytes(spoiled(seed))
        readers = (
            lambda: verify_session(open_session(str(path)), dialects=dialects(), allow_open=True),
            lambda: export_session(open_session(str(path)), path.with_suffix(".zip")),
            lambda: closing_events(open_session(str(path)).events()),
            lambda: derive_messages(open_session(str(path)).events()),
            lambda: list(transcript(open_session(str(path)).header, open_session(str(path)).events())),
        )
        refusals: list[RunnerError] = []
        for read in readers:
            try:
                read()
            except RunnerError as error:
                refusals.append(error)

    assert {error.code.exit_code for error in refusals} <= {13}
    assert not [error.message for error in refusals if "\n" in error.message]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_no_command_breaks_on_a_spoiled_log(seed: int) -> None:
    """``stats`` counts it or refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spoiled.jsonl"
        path.write_bytes(spoiled(seed))

        assert run_cli(["session", "stats", str(path), "--json"]) in (0, 13)
