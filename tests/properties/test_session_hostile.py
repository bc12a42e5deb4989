"""Whatever values a log holds, readers answer or refuse it; none of them breaks."""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import given, settings
from hypothesis import strategies as st

from runner.artifacts.totals import TotalsCheck
from runner.cli.main import run_cli
from runner.errors import ConfigError, RunnerError
from runner.providers.registry import dialects
from runner.session import codec
from runner.session.export import export_session
from runner.session.fork import fork_session
from runner.session.header import LOG_NAME
from runner.session.projection import derive_messages
from runner.session.repair import closing_events
from runner.session.store import open_session
from runner.session.transcript import transcript
from runner.session.verify import verify_session
from runner.testing.sessions import SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"
OURS = GOLDEN.parent / "ours"
VALUES: list[Any] = [None, True, 0, -1, 3.5, "x", "", [], {}, [1], [None], {"a": 1}, [[]], ["x"], [{"type": "text"}]]


@functools.cache
def logs() -> list[list[dict[str, Any]]]:
    """The lines of every golden log, and of one of ours."""
    with tempfile.TemporaryDirectory() as folder:
        with SampleSession(Path(folder)) as session:
            session.turn(steps=2)
            session.end()
        sources = [open_session(str(path)) for path in sorted(GOLDEN.iterdir()) if path.suffix != ".md"]
        return [[record for _, _, record in source.lines()] for source in [*sources, open_session(folder)]]


def spoiled(seed: int) -> bytes:
    """A log with one or two values replaced or taken out, anywhere in it."""
    return b"".join(codec.encode_line(record) for record in spoil(random.Random(seed).choice(logs()), seed))


def spoil(sound: list[dict[str, Any]], seed: int) -> list[dict[str, Any]]:
    """The same records with one or two values replaced or taken out."""
    rand = random.Random(seed)
    records = copy.deepcopy(sound)
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
            holder[key] = copy.deepcopy(rand.choice(VALUES))  # a value in itself would be no JSON
    return records


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


def sealed(records: list[dict[str, Any]]) -> bytes:
    """The log of these records with every seal as it must be."""
    data = b""
    for number, record in enumerate(records):
        if record.get("type") == "log/seal" and type(record.get("seq")) is int and type(record.get("time")) is int:
            start = codec.seal_start(seq=record["seq"], time=record["time"], lines=number)
            data += start + hashlib.sha256(data + start).hexdigest().encode() + codec.SEAL_END
        else:
            data += codec.encode_line(record)
    return data


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["turns", "compaction", "openai", "cancelled", "resumed"]))
def test_no_spoiled_log_breaks_the_comparison_of_totals(seed: int, name: str) -> None:
    """Under seals that fit, beside the real reports: an answer or LOG_INVALID; a fork of it likewise."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Path(folder) / "artifacts"
        shutil.copytree(OURS / name, artifacts)
        (artifacts / LOG_NAME).write_bytes(sealed(spoil(list(records_of(name)), seed)))

        for read in (
            lambda: verify_session(open_session(str(artifacts)), totals=TotalsCheck, dialects=dialects()),
            lambda: fork_session(
                open_session(str(artifacts)), Path(folder) / "child", turn=1, session_id="child", clock=int
            ),
        ):
            refusal = refusal_of(read)
            assert refusal is None or refusal.code.exit_code == 13 or isinstance(refusal, ConfigError)
            assert refusal is None or "\n" not in refusal.message


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10**9), st.sampled_from(["usage.json", "result.json"]))
def test_no_spoiled_report_breaks_verification(seed: int, name: str) -> None:
    """Whatever the reports beside a sound log hold."""
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Path(folder) / "artifacts"
        shutil.copytree(OURS / "openai", artifacts)
        spoiled_report = spoil([json.loads((artifacts / name).read_text())], seed)[0]
        (artifacts / name).write_text(json.dumps(spoiled_report))

        refusal = refusal_of(lambda: verify_session(open_session(str(artifacts)), totals=TotalsCheck))

    assert refusal is None or refusal.code.exit_code == 13
    assert refusal is None or "\n" not in refusal.message


def refusal_of(read: Callable[[], object]) -> RunnerError | None:
    """What a reader says of a log, None if it takes it."""
    try:
        read()
    except RunnerError as error:
        return error
    return None


@functools.cache
def records_of(name: str) -> list[dict[str, Any]]:
    """The lines of a golden log of ours."""
    return [record for _, _, record in open_session(str(OURS / name)).lines()]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**9))
def test_no_command_breaks_on_a_spoiled_log(seed: int) -> None:
    """``stats`` counts it or refuses it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "spoiled.jsonl"
        path.write_bytes(spoiled(seed))

        assert run_cli(["session", "stats", str(path), "--json"]) in (0, 13)
