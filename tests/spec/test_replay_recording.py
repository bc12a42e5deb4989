"""What is read of a session to play it again: every answer once, in order, and nothing malformed."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.cancellation import Cancellation
from runner.errors import ConfigError, ErrorCode, LogError, ProviderError
from runner.providers.assemble import ResponseAssembler
from runner.providers.base import ModelSpec
from runner.providers.recording import read_recording
from runner.providers.registry import build_provider, dialects
from runner.providers.replay import ReplayProvider
from runner.session import events as ev
from runner.session.store import open_session
from runner.testing.sessions import SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.providers.recording import Recording

GOLDEN = Path(__file__).parents[1] / "golden" / "dsh"
DSH = [path for path in sorted(GOLDEN.iterdir()) if path.suffix != ".md"]
Lines = list[dict[str, Any]]


def recorded(folder: Path, *, turns: int = 2, steps: int = 3) -> Path:
    """A whole session of ours."""
    with SampleSession(folder / "sample") as session:
        for number in range(turns):
            session.turn(steps=steps, prompt=f"Prompt {number}.")
        session.end()
    return folder / "sample"


def lines_of(session: Path) -> Lines:
    """Its events, packed rows expanded, with the header first."""
    source = open_session(str(session))
    return [source.header, *(event.record() for event in source.events())]


def written(lines: Lines, target: Path, *, renumber: bool = False) -> Path:
    """A plain log of these lines; with ``renumber`` seqs and what refers to them follow."""
    if renumber:
        order = {line["seq"]: seq for seq, line in enumerate(lines[1:])}
        for line in lines[1:]:
            line["seq"] = order[line["seq"]]
            if "sourceEventSeqs" in line:
                line["sourceEventSeqs"] = [order[seq] for seq in line["sourceEventSeqs"] if seq in order]
    target.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return target


def read(session: Path) -> Recording:
    """The recording of a session."""
    return read_recording(open_session(str(session)))


def provider(recording: Recording) -> ReplayProvider:
    """A provider that plays it."""
    return ReplayProvider(recording, dialect=dialects()["scripted"])


def play(playing: ReplayProvider) -> ResponseAssembler:
    """The next answer."""
    assembler = ResponseAssembler()
    for chunk in playing.stream(b"", cancellation=Cancellation()):
        assembler.add(chunk)
    return assembler


def of_type(lines: Lines, name: str) -> Lines:
    """The data of all events of a type."""
    return [line["data"] for line in lines if line["type"] == name]


# --- whole recordings ----------------------------------------------------------------------------


def test_every_answer_is_played_once_with_its_content_usage_and_finish(tmp_path: Path) -> None:
    """In the recorded order, ids of calls kept."""
    session = recorded(tmp_path)
    messages = of_type(lines_of(session), "assistant/message")
    playing = provider(read(session))

    played = [play(playing) for _ in messages]

    assert [each.content() for each in played] == [data["message"]["content"] for data in messages]
    assert [each.usage for each in played] == [data["usage"] for data in messages]
    assert [each.finish for each in played] == ["tool-calls", "tool-calls", "stop"] * 2


def test_the_recorded_chunks_come_as_they_came(tmp_path: Path) -> None:
    """Each delta where it was cut."""
    session = recorded(tmp_path, turns=1, steps=1)

    chunks = list(provider(read(session)).stream(b"", cancellation=Cancellation()))

    assert chunks == [data["chunk"] for data in of_type(lines_of(session), "assistant/chunk")]


def test_what_a_recording_says_of_its_run(tmp_path: Path) -> None:
    """Prompts, counts, model, dialect and base, for whoever plays it."""
    recording = read(recorded(tmp_path))

    assert recording.prompts == ("Prompt 0.", "Prompt 1.")
    assert (len(recording.answers), recording.results, recording.steps, recording.requests) == (6, 4, 6, 6)
    assert (recording.model, recording.window, recording.max_output) == ("sample", 128_000, 32_000)
    assert recording.dialect == "scripted"
    assert recording.base is not None
    assert recording.ends is None
    assert recording.cwd == "/workspace"


def test_the_digest_is_that_of_the_decoded_log(tmp_path: Path) -> None:
    """The same for the compressed log and the plain one."""
    session = recorded(tmp_path)
    plain = tmp_path / "plain.jsonl"
    plain.write_bytes(b"".join(line + b"\n" for line in open_session(str(session)).raw_lines()))

    assert read(plain).sha256 == read(session).sha256
    plain.write_bytes(plain.read_bytes().replace(b"Prompt 1.", b"Prompt 2."))
    assert read(plain).sha256 != read(session).sha256


def test_a_log_without_chunks_is_played_from_its_messages(tmp_path: Path) -> None:
    """Content, usage and why each answer ended."""
    lines = lines_of(recorded(tmp_path))
    bare = [line for line in lines if line["type"] != "assistant/chunk"]
    playing = provider(read(written(bare, tmp_path / "bare.jsonl", renumber=True)))

    played = [play(playing) for _ in range(6)]

    messages = of_type(lines, "assistant/message")
    assert [each.content() for each in played] == [data["message"]["content"] for data in messages]
    assert [each.usage for each in played] == [data["usage"] for data in messages]
    assert [each.finish for each in played] == ["tool-calls", "tool-calls", "stop"] * 2


def test_an_answer_without_chunks_that_was_too_long_ends_as_such(tmp_path: Path) -> None:
    """The end of the turn says so."""
    with SampleSession(tmp_path / "sample") as session:
        session.turn(steps=1, kind="max-tokens")
        session.end()
    lines = [line for line in lines_of(tmp_path / "sample") if line["type"] != "assistant/chunk"]

    assert play(provider(read(written(lines, tmp_path / "a.jsonl", renumber=True)))).finish == "length"


def test_failed_attempts_are_not_played(tmp_path: Path) -> None:
    """Their chunks are left out; the answer of the attempt that worked is whole."""
    with SampleSession(tmp_path / "sample") as session:
        session.begin()
        session.start_turn()
        session.start_step("Go.")
        session.log.append_chunk(1, 1, {"type": "block-start", "index": 0, "blockType": "text"})
        session.log.append_chunk(1, 1, {"type": "text-delta", "index": 0, "text": "lost"})
        [sent] = [
            event for event in open_session(str(tmp_path / "sample")).events() if isinstance(event, ev.RequestSent)
        ]
        values = {field.attribute: getattr(sent, field.attribute) for field in sent.FIELDS}
        session.log.append(ev.RequestSent(**{**values, "attempt": 2}))
        session.answer(calls=0, text="kept")
        session.end_step()
        session.end_turn()
        session.end()
    recording = read(tmp_path / "sample")

    assert len(recording.answers) == 1
    assert play(provider(recording)).content() == [{"type": "text", "text": "kept"}]


def test_a_recording_that_is_over_fails_for_good(tmp_path: Path) -> None:
    """Not retryable, with the count of answers; nothing is held."""
    playing = provider(read(recorded(tmp_path, turns=1, steps=1)))
    play(playing)

    with pytest.raises(ProviderError, match="has 1 answer, and request 2 asks for another") as caught:
        play(playing)
    assert caught.value.code is ErrorCode.PROVIDER_FAILED
    assert caught.value.kind == "replay-exhausted"
    assert caught.value.retryable is False
    playing.close()


def test_a_cancelled_run_gets_no_more_of_an_answer(tmp_path: Path) -> None:
    """The stream ends without a finish."""
    cancellation = Cancellation()
    stream = provider(read(recorded(tmp_path))).stream(b"", cancellation=cancellation)
    next(stream)
    cancellation.cancel("SIGTERM")

    assert list(stream) == []


def test_a_run_that_goes_on_begins_behind_the_answers_it_had(tmp_path: Path) -> None:
    """As a script does."""
    session = recorded(tmp_path)
    playing = provider(read(session))
    playing.skip(5)

    assert play(playing).content() == of_type(lines_of(session), "assistant/message")[5]["message"]["content"]


def test_a_dialect_that_is_not_known_is_refused(tmp_path: Path) -> None:
    """Bodies could not be written."""
    lines = lines_of(recorded(tmp_path))
    for data in of_type(lines, "request/sent"):
        data["dialect"] = "morse"
    recording = read(written(lines, tmp_path / "a.jsonl"))

    with pytest.raises(ConfigError, match="'morse'"):
        build_provider(ModelSpec("replay", "m"), environ={}, recording=recording)


@pytest.mark.parametrize("path", DSH, ids=lambda path: path.name)
def test_every_dsh_session_with_answers_can_be_played(path: Path) -> None:
    """The others say that there is nothing to play."""
    source = open_session(str(path))
    messages = [event for event in source.events() if isinstance(event, ev.AssistantMessage) and not event.interrupted]
    if not messages:
        with pytest.raises(LogError, match="nothing to replay"):
            read_recording(source)
        return
    recording = read_recording(source)
    playing = provider(recording)
    played = [play(playing) for _ in range(len(recording.answers))]
    contents = [event.message["content"] for event in messages]
    assert [each.content() for each in played if each.content() in contents] == contents[: len(played)]


# --- recordings that end early -------------------------------------------------------------------


def edited(tmp_path: Path, edit: Callable[[Lines], Lines | None]) -> Recording:
    """A recording of an edited log."""
    tmp_path.mkdir(exist_ok=True)
    lines = lines_of(recorded(tmp_path))
    return read(written(edit(lines) or lines, tmp_path / "edited.jsonl"))


def cut_at(lines: Lines, name: str, number: int) -> Lines:
    """The lines up to and without the ``number``-th event of a type."""
    places = [index for index, line in enumerate(lines) if line["type"] == name]
    return lines[: places[number - 1]]


@pytest.mark.parametrize(
    ("name", "number", "answers", "ends"),
    [
        ("run/end", 1, 6, "the log is cut off in step 6"),
        ("turn/end", 2, 6, "the log is cut off in step 6"),
        ("step/end", 2, 2, "the log is cut off in step 2"),
        ("assistant/message", 2, 1, "the log is cut off in step 2"),
        ("step/start", 2, 1, "the log is cut off in step 1"),
    ],
)
def test_an_open_log_is_a_recording_up_to_its_end(
    tmp_path: Path, name: str, number: int, answers: int, ends: str
) -> None:
    """And says where it ends."""
    recording = edited(tmp_path, lambda lines: cut_at(lines, name, number))

    assert len(recording.answers) == answers
    assert recording.ends == ends


def interrupt(lines: Lines) -> None:
    """An answer was cut off."""
    of_type(lines, "assistant/message")[3]["interrupted"] = True


def lose_result(lines: Lines) -> None:
    """Nobody knows what became of a call."""
    of_type(lines, "tool/result")[2]["error"] = {"name": "X", "code": "TOOL_OUTCOME_UNKNOWN"}


def stop_turn(lines: Lines) -> None:
    """A signal came."""
    of_type(lines, "turn/end")[0]["reason"] = {"kind": "aborted", "reason": {"kind": "signal", "code": "SIGTERM"}}


@pytest.mark.parametrize(
    ("edit", "answers", "results", "ends"),
    [
        (interrupt, 3, 2, "an answer was cut off in step 4"),
        (lose_result, 4, 2, "a call was cut off in step 4"),
        (stop_turn, 3, 2, "the turn ended as aborted (SIGTERM) in step 3"),
    ],
)
def test_what_was_cut_off_ends_a_recording(
    tmp_path: Path, edit: Callable[[Lines], None], answers: int, results: int, ends: str
) -> None:
    """Nothing behind it follows from the answers alone."""
    recording = edited(tmp_path, edit)

    assert (len(recording.answers), recording.results, recording.ends) == (answers, results, ends)


# --- malformed logs ------------------------------------------------------------------------------


def chunk(lines: Lines, kind: str) -> dict[str, Any]:
    """The first chunk of a type."""
    found: dict[str, Any] = next(
        data["chunk"] for data in of_type(lines, "assistant/chunk") if data["chunk"]["type"] == kind
    )
    return found


def set_in(kind: str, **values: Any) -> Callable[[Lines], None]:
    """Change the first chunk of a type; None takes a key away."""

    def edit(lines: Lines) -> None:
        found = chunk(lines, kind)
        for key, value in values.items():
            if value is None:
                del found[key]
            else:
                found[key] = value

    return edit


@pytest.mark.parametrize(
    "edit",
    [
        set_in("text-delta", text=5),
        set_in("text-delta", text=None),
        set_in("text-delta", index="0"),
        set_in("text-delta", type="unknown"),
        set_in("block-start", blockType="image"),
        set_in("block-start", index=99),
        set_in("block-end", block={"type": "text", "text": "another"}),
        set_in("block-end", block="text"),
        set_in("finish", reason="stop"),
        set_in("finish", reason={"kind": "eval"}),
        set_in("finish", reason={"kind": ["stop"]}),
        set_in("usage", usage={"inputTokens": "many", "outputTokens": 1}),
        set_in("usage", usage={"inputTokens": -1, "outputTokens": 1}),
        set_in("usage", usage={"inputTokens": 10**30, "outputTokens": 1}),
        set_in("usage", usage={}),
    ],
)
def test_chunks_that_are_malformed_or_give_another_answer_are_refused(
    tmp_path: Path, edit: Callable[[Lines], None]
) -> None:
    """LOG_INVALID with file and event, before anything is played."""
    lines = lines_of(recorded(tmp_path))
    edit(lines)
    target = written(lines, tmp_path / "edited.jsonl")

    with pytest.raises(LogError) as caught:
        read(target)
    assert caught.value.code.exit_code == 13
    assert str(target) in caught.value.message


def test_what_the_end_of_a_block_holds_is_the_answer(tmp_path: Path) -> None:
    """Whatever its pieces were."""

    def edit(lines: Lines) -> None:
        chunk(lines, "text-delta")["text"] = "something else"

    session = recorded(tmp_path)
    playing = provider(edited(tmp_path / "other", edit))

    assert play(playing).content() == of_type(lines_of(session), "assistant/message")[0]["message"]["content"]


def test_an_answer_beyond_all_measure_is_refused_in_bounded_memory(tmp_path: Path) -> None:
    """40 MiB in one stream of deltas."""
    with SampleSession(tmp_path / "sample", bodies=False) as session:
        session.begin()
        session.start_turn()
        session.start_step("Go.")
        session.log.append_chunk(1, 1, {"type": "block-start", "index": 0, "blockType": "text"})
        piece = {"type": "text-delta", "index": 0, "text": "x" * 1024 * 1024}
        for _ in range(40):
            session.log.append_chunk(1, 1, piece)
        session.answer(calls=0)
        session.end_step()
        session.end_turn()
        session.end()
    tracemalloc.start()
    try:
        with pytest.raises(LogError, match="over 32 MiB"):
            read(tmp_path / "sample")
        assert tracemalloc.get_traced_memory()[1] < 120 * 1024 * 1024
    finally:
        tracemalloc.stop()


def test_what_was_recorded_is_not_held_in_memory(tmp_path: Path) -> None:
    """It goes to a temporary file."""
    with SampleSession(tmp_path / "sample", bodies=False) as session:
        session.begin()
        session.start_turn()
        for number in range(40):
            session.start_step("Go." if number == 0 else None)
            [(call_id, arguments)] = session.answer().items()
            session.result(call_id, session.call(call_id, arguments), text="y" * 500_000)
            session.end_step()
        session.end_turn()
        session.end()
    tracemalloc.start()
    try:
        recording = read(tmp_path / "sample")
        assert tracemalloc.get_traced_memory()[0] < 10 * 1024 * 1024
    finally:
        tracemalloc.stop()
    assert recording.results == 40


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_prompt_that_is_empty_is_refused(tmp_path: Path, text: str) -> None:
    """It could begin no turn."""

    def edit(lines: Lines) -> None:
        of_type(lines, "user/message")[0]["content"][0]["text"] = text

    with pytest.raises(LogError, match="the prompt is empty"):
        edited(tmp_path, edit)


def test_prompts_beyond_all_measure_are_refused(tmp_path: Path) -> None:
    """Together."""

    def edit(lines: Lines) -> None:
        for data in of_type(lines, "user/message"):
            data["content"][0]["text"] = "z" * 3_000_000

    with pytest.raises(LogError, match="too long, together with those before it"):
        edited(tmp_path, edit)


def test_a_log_without_an_answer_cannot_be_played(tmp_path: Path) -> None:
    """Said in words."""
    with pytest.raises(LogError, match="nothing to replay"):
        edited(tmp_path, lambda lines: cut_at(lines, "assistant/message", 1))


def test_facts_of_a_wrong_type_are_taken_for_unknown(tmp_path: Path) -> None:
    """Model, window, output, turns of compaction: defaults hold then."""

    def edit(lines: Lines) -> None:
        of_type(lines, "request/header")[0]["header"]["config"] = {"model": ["m"], "maxTokens": True}
        of_type(lines, "request/context")[0].update(model="", contextWindow=-5)
        of_type(lines, "run/start")[0]["config"] = {"task": {"compact_at": [True, "x"]}}

    recording = edited(tmp_path, edit)

    assert (recording.model, recording.window, recording.max_output, recording.compact_at) == (None, None, None, ())
