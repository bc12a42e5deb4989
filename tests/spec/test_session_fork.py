"""Fork: a new session that begins with another one up to the end of a turn."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.artifacts.usage import derive_usage
from runner.cli.main import run_cli
from runner.errors import ConfigError, ErrorCode, LogError, RunnerError, StorageError
from runner.outcome import derive_outcome
from runner.providers.registry import dialects
from runner.session import events as ev
from runner.session.export import export_zip
from runner.session.fork import Fork, fork_session
from runner.session.header import LOG_NAME
from runner.session.log import SessionLog
from runner.session.rebuild import request_body
from runner.session.store import open_session
from runner.session.verify import verify_session
from runner.testing.sessions import SAMPLE_ID, SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.messages import JsonObject

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"
SPILLED = b"a long output\n" * 1_000
IMAGE = b"\x89PNG and so on"
NOW = 1_796_000_900_000


@pytest.fixture
def parent(tmp_path: Path) -> SampleSession:
    """An open session: three ended turns, the second with a spilled result and an image, and a fourth under way."""
    session = SampleSession(tmp_path / "parent")
    session.turn(steps=3)
    session.start_turn()
    session.start_step("Look at this.")
    image = {"type": "image", "mediaType": "image/png", "sha256": sha256(IMAGE), "bytes": len(IMAGE)}
    session.log.append(ev.UserMessage(content=[image], source={"kind": "user"}, role="user", id="image"))
    write(session.directory / "media" / f"{sha256(IMAGE)}.png", IMAGE)
    [(call_id, arguments)] = session.answer().items()
    spilled(session, call_id, session.call(call_id, arguments), f"spill/{call_id}.txt")
    session.end_step()
    session.end_turn()
    session.turn(steps=2)
    session.start_turn()
    session.start_step("Go on.")
    return session


def sha256(data: bytes) -> str:
    """Hex SHA-256."""
    return hashlib.sha256(data).hexdigest()


def write(path: Path, content: bytes) -> None:
    """Write a file and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def spilled(session: SampleSession, call_id: str, call_seq: int, path: str, **changes: Any) -> None:
    """The result of a call, its whole text in a file."""
    write(session.directory / "spill" / f"{call_id}.txt", SPILLED)
    block: Any = {"type": "tool-result", "toolCallId": call_id, "content": [], "isError": False}
    session.log.append(
        ev.ToolResult(
            turn=session.turns,
            step=session.steps,
            message={"role": "user", "content": [block], "source": {"kind": "tool", "callId": call_id}, "id": call_id},
            meta={"spill": {"path": path, "bytes": len(SPILLED), "sha256": sha256(SPILLED), **changes}},
            source_event_seqs=[call_seq],
        )
    )


def fork(reference: Path | str, target: Path, turn: int = 2) -> Fork:
    """Fork with a fixed id and clock."""
    return fork_session(open_session(str(reference)), target, turn=turn, session_id="session-child", clock=lambda: NOW)


def lines_of(reference: Path) -> list[bytes]:
    """The decoded lines of a log."""
    return list(open_session(str(reference)).raw_lines())


def test_a_child_holds_the_parents_lines_and_seals_of_its_own(parent: SampleSession, tmp_path: Path) -> None:
    """Byte for byte, packed rows as they are; then session/end-seed and a seal, and nothing else."""
    made = fork(parent.directory, tmp_path / "child")

    before, after = lines_of(parent.directory), lines_of(tmp_path / "child")
    end = next(n for n, line in enumerate(before) if b'"turn/end"' in line and b'"turn":2' in line)
    assert len(after) == end + 3
    differing = [(old, new) for old, new in zip(before[1 : end + 1], after[1:-2], strict=True) if old != new]
    assert {json.loads(line)["type"] for pair in differing for line in pair} == {"log/seal"}
    assert len(differing) == sum(b'"log/seal"' in line for line in before[: end + 1]) > 4
    assert any(b'"text-chunks"' in line for line in after)
    assert [json.loads(line)["type"] for line in after[-2:]] == ["session/end-seed", "log/seal"]
    assert made.digest == sha256(b"".join(line + b"\n" for line in after))


def test_a_childs_header_names_its_parent_and_its_seed(parent: SampleSession, tmp_path: Path) -> None:
    """The seed's length counts the events taken over and the one that ends them; id and time are its own."""
    made = fork(parent.directory, tmp_path / "child")

    header = open_session(str(tmp_path / "child")).header
    events = list(open_session(str(tmp_path / "child")).events())
    assert {key: header.get(key) for key in ("id", "parentSession", "createdAt", "cwd", "delegationDepth")} == {
        "id": "session-child",
        "parentSession": SAMPLE_ID,
        "createdAt": NOW,
        "cwd": "/workspace",
        "delegationDepth": 0,
    }
    assert header["seedLength"] == made.seed_length == len(events) - 1
    assert isinstance(events[header["seedLength"] - 1], ev.SessionEndSeed)
    original = list(open_session(str(parent.directory)).events())[: made.seed_length - 1]
    assert [(event.seq, event.time) for event in events[:-2]] == [(event.seq, event.time) for event in original]


def test_a_child_verifies_and_rebuilds_every_request(
    parent: SampleSession, tmp_path: Path, decoded_frames: Callable[[Path], bytes]
) -> None:
    """It is open, as no run of its own has ended; zstd finds a whole file."""
    fork(parent.directory, tmp_path / "child")

    source = open_session(str(tmp_path / "child"))
    result = verify_session(source, dialects=dialects(), allow_open=True)
    assert (result.state, result.turns, result.steps, result.requests_checked) == ("open", 2, 4, 4)
    assert result.last_seal_line == result.lines
    for step in range(1, 5):
        ours = request_body(source.events(), step=step, attempt=None, dialects=dialects())
        theirs = request_body(
            open_session(str(parent.directory)).events(), step=step, attempt=None, dialects=dialects()
        )
        assert ours.data == theirs.data
    decoded_frames(tmp_path / "child" / LOG_NAME)
    with pytest.raises(LogError, match=": open, "):
        verify_session(source)


def test_what_the_parent_used_does_not_count_in_a_child(parent: SampleSession, tmp_path: Path) -> None:
    """Neither tokens nor steps nor calls."""
    fork(parent.directory, tmp_path / "child")
    source = open_session(str(tmp_path / "child"))

    usage = derive_usage(source.events(), header=source.header)

    assert (usage["steps"], usage["turns"], usage["requests"], usage["perStep"], usage["tools"]) == (0, 0, 0, [], [])
    counted = derive_outcome(source.events())
    assert (counted.turns, counted.steps) == (0, 0)


def test_files_that_the_seed_names_come_along(parent: SampleSession, tmp_path: Path) -> None:
    """Spilled results and images up to that turn, with their bytes; private to the user."""
    made = fork(parent.directory, tmp_path / "child")

    assert sorted(made.files) == [f"media/{sha256(IMAGE)}.png", "spill/call_4_1.txt"]
    assert made.missing == ()
    assert (tmp_path / "child" / "spill" / "call_4_1.txt").read_bytes() == SPILLED
    assert (tmp_path / "child" / "media" / f"{sha256(IMAGE)}.png").read_bytes() == IMAGE
    modes = {path: path.stat().st_mode & 0o777 for path in [tmp_path / "child", *(tmp_path / "child").rglob("*")]}
    assert set(modes.values()) == {0o600, 0o700}
    assert all(mode == (0o700 if path.is_dir() else 0o600) for path, mode in modes.items())

    assert fork(parent.directory, tmp_path / "first", turn=1).files == ()


def test_a_parent_may_be_a_log_or_a_zip(parent: SampleSession, tmp_path: Path) -> None:
    """All give the same lines; a log alone has no files beside it, which is said."""
    from_directory = fork(parent.directory, tmp_path / "a")
    (tmp_path / "plain.jsonl").write_bytes(b"".join(line + b"\n" for line in lines_of(parent.directory)))
    export_zip(parent.directory, tmp_path / "parent.zip")

    from_log = fork(parent.directory / LOG_NAME, tmp_path / "b")
    from_plain = fork(tmp_path / "plain.jsonl", tmp_path / "c")
    from_zip = fork(tmp_path / "parent.zip", tmp_path / "d")

    assert from_directory.digest == from_log.digest == from_plain.digest == from_zip.digest
    assert from_zip.files == from_directory.files
    assert from_log.files == from_plain.files == ()
    assert sorted(from_log.missing) == [f"media/{sha256(IMAGE)}", "spill/call_4_1.txt"]


@pytest.mark.parametrize("end", ["finished", "killed in the seal behind the turn"])
def test_a_parent_may_be_sealed_or_cut(end: str, tmp_path: Path) -> None:
    """What counts is that the turn has its end."""
    with SampleSession(tmp_path / "parent") as session:
        session.turn(steps=2)
        if end == "finished":
            session.end()
    if end != "finished":
        lines = lines_of(tmp_path / "parent")
        assert b'"turn/end"' in lines[-2]
        (tmp_path / "parent" / LOG_NAME).write_bytes(b"".join(line + b"\n" for line in lines)[:-30])

    made = fork(tmp_path / "parent", tmp_path / "child", turn=1)

    assert verify_session(open_session(str(tmp_path / "child")), allow_open=True).events == made.seed_length + 1


def test_only_behind_an_ended_turn(parent: SampleSession, tmp_path: Path) -> None:
    """The message says which of them there are, and nothing is made."""
    for turn, why in ((4, "turn 4 is still open"), (5, "turn 5 does not exist")):
        with pytest.raises(ConfigError, match=why) as caught:
            fork(parent.directory, tmp_path / "child", turn=turn)
        assert caught.value.hint == "turns that have ended: 1, 2, 3"
    assert not (tmp_path / "child").exists()

    with SampleSession(tmp_path / "begun") as begun:
        begun.begin()
        begun.start_turn()
    with pytest.raises(ConfigError) as caught:
        fork(tmp_path / "begun", tmp_path / "child", turn=1)
    assert caught.value.hint == "turns that have ended: none"


def test_a_log_of_another_harness_is_refused(tmp_path: Path) -> None:
    """It has nothing that a child of ours could go on from."""
    with pytest.raises(ConfigError, match="only a log of nightshift can be forked"):
        fork(GOLDEN / "three-steps.jsonl", tmp_path / "child", turn=1)
    assert not (tmp_path / "child").exists()


def test_a_child_can_be_forked_again(parent: SampleSession, tmp_path: Path) -> None:
    """Its first session/end-seed stays where it is; the seed of the grandchild ends with its own."""
    fork(parent.directory, tmp_path / "child")
    events: list[ev.Event] = []
    log, _ = SessionLog.reopen(tmp_path / "child", clock=lambda: NOW + 5, fold=events.append)
    with log:
        log.append_many([ev.TurnStart(turn=3), ev.StepStart(turn=3, step=5), ev.StepEnd(turn=3, step=5)])
        log.append(ev.TurnEnd(turn=3, reason={"kind": "completed"}))
        log.seal()

    made = fork(tmp_path / "child", tmp_path / "grandchild", turn=3)
    early = fork(tmp_path / "child", tmp_path / "early", turn=1)

    grandchild = open_session(str(tmp_path / "grandchild"))
    ends = [event.seq for event in grandchild.events() if isinstance(event, ev.SessionEndSeed)]
    assert ends == [len(events) - 2, made.seed_length - 1]
    assert verify_session(grandchild, allow_open=True).turns == 3
    counted = derive_outcome(grandchild.events())
    assert (counted.turns, counted.steps) == (0, 0)
    assert verify_session(open_session(str(tmp_path / "early")), allow_open=True).turns == 1
    assert [event.seq for event in open_session(str(tmp_path / "early")).events() if event.TYPE.endswith("seed")] == [
        early.seed_length - 1
    ]


@pytest.mark.parametrize("shift", [-3, -1, 1, 50])
def test_a_seed_that_does_not_end_where_the_header_says_is_damage(
    shift: int, parent: SampleSession, tmp_path: Path
) -> None:
    """Or readers would count what the parent used, or leave out what the child did; new seals do not hide it."""
    made = fork(parent.directory, tmp_path / "child")
    length = made.seed_length
    lines = lines_of(tmp_path / "child")
    lines[0] = lines[0].replace(b'"seedLength":%d' % length, b'"seedLength":%d' % (length + shift))
    with SessionLog.create(tmp_path / "wrong", header=own_fields(lines[0]), clock=lambda: NOW) as log:
        log.copy(lines[1:])

    with pytest.raises(LogError, match=r"session/end-seed|inside what it took over"):
        verify_session(open_session(str(tmp_path / "wrong")), allow_open=True)


def test_a_seed_cut_short_is_damage(parent: SampleSession, tmp_path: Path) -> None:
    """No run leaves such a log; even with --allow-open it is not one."""
    fork(parent.directory, tmp_path / "child")
    lines = lines_of(tmp_path / "child")
    (tmp_path / "cut.jsonl").write_bytes(b"".join(line + b"\n" for line in lines[:-2]))

    with pytest.raises(LogError, match="inside what it took over from its parent"):
        verify_session(open_session(str(tmp_path / "cut.jsonl")), allow_open=True)


def own_fields(line: bytes) -> JsonObject:
    """The fields of a header line that are not the same in all logs of ours."""
    record = json.loads(line)
    return {key: value for key, value in record.items() if key not in ("type", "version", "writer")}


# --- the command -------------------------------------------------------------------------------


def test_the_command_makes_a_session(parent: SampleSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, or the facts as JSON; each child has an id of its own."""
    assert run_cli(["session", "fork", str(parent.directory), "--turn", "2", "--output", str(tmp_path / "a")]) == 0
    text = capsys.readouterr()
    assert run_cli(["session", "fork", str(parent.directory / LOG_NAME), "--turn=1", f"--output={tmp_path / 'b'}"]) == 0
    assert capsys.readouterr().err == ""
    arguments = ["session", "fork", str(parent.directory / LOG_NAME), "--turn", "2", "--output", str(tmp_path / "c")]
    assert run_cli([*arguments, "--json"]) == 0
    as_json = capsys.readouterr()

    ids = [open_session(str(tmp_path / name)).header["id"] for name in "abc"]
    assert len(set(ids)) == 3
    assert text.err == ""
    assert text.out.startswith(f"{tmp_path / 'a'}: {ids[0]}, ")
    assert f"of {SAMPLE_ID} up to turn 2, 2 files" in text.out
    made = json.loads(as_json.out)
    assert (made["session"], made["parentSession"], made["turn"]) == (ids[2], SAMPLE_ID, 2)
    assert made["seedLength"] == open_session(str(tmp_path / "c")).header["seedLength"]
    assert made["digest"] == verify_session(open_session(str(tmp_path / "c")), allow_open=True).digest
    assert "spill/call_4_1.txt" in made["missing"]
    assert "not taken over" in as_json.err


def test_the_command_refuses_what_it_cannot_do(
    parent: SampleSession, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Code 2, one message with what there is instead; nothing is made."""
    for arguments, message in (
        (["--turn", "4"], "turns that have ended: 1, 2, 3"),
        (["--turn", "0"], "--turn"),
        ([], "--turn"),
    ):
        command = ["session", "fork", str(parent.directory), *arguments, "--output", str(tmp_path / "a")]
        assert run_cli(command) == 2
        assert message in capsys.readouterr().err
    assert run_cli(["session", "fork", str(parent.directory), "--turn", "1"]) == 2
    assert not (tmp_path / "a").exists()


# --- what is refused ---------------------------------------------------------------------------


def test_a_directory_that_holds_something_is_refused(parent: SampleSession, tmp_path: Path) -> None:
    """Nothing is overwritten; a link, a file and the parent itself are refused too; an empty one is taken."""
    target = tmp_path / "child"
    write(target / "mine.txt", b"mine")
    link, file = tmp_path / "link", tmp_path / "file"
    (tmp_path / "empty").mkdir(mode=0o755)
    link.symlink_to(tmp_path / "empty")
    file.write_bytes(b"")

    for where, why in (
        (target, "is not empty"),
        (link, "is a link"),
        (file, "is no directory"),
        (parent.directory, "lies in the session"),
        (parent.directory / "subagents" / "child", "lies in the session"),
    ):
        with pytest.raises(ConfigError, match=why):
            fork(parent.directory, where)
    assert [path.name for path in target.iterdir()] == ["mine.txt"]
    fork(parent.directory, tmp_path / "empty")
    assert (tmp_path / "empty").stat().st_mode & 0o777 == 0o700


def test_a_place_that_cannot_be_written_is_storage_failed(parent: SampleSession, tmp_path: Path) -> None:
    """Code 15, and nothing is left."""
    (tmp_path / "file").write_bytes(b"")

    with pytest.raises(StorageError):
        fork(parent.directory, tmp_path / "file" / "child")


def test_subagents_stay_with_the_parent(tmp_path: Path) -> None:
    """What they used is the parent's, and what the model saw of them stands in the log that the child takes over."""
    with SampleSession(tmp_path / "parent") as session:
        session.turn(steps=2)
    header = {"parentSession": SAMPLE_ID, "delegationDepth": 1, "origin": "subagent"}
    with SampleSession(tmp_path / "parent" / "subagents" / "child-1", session_id="child-1", header=header) as subagent:
        subagent.turn(steps=1)
    parent = open_session(str(tmp_path / "parent"))
    assert [name for name, _ in parent.children()] == ["child-1"]

    made = fork(tmp_path / "parent", tmp_path / "child", turn=1)

    child = open_session(str(tmp_path / "child"))
    assert (list(child.children()), made.missing) == ([], ())
    result = verify_session(child, allow_open=True, dialects=dialects())
    assert (result.requests_checked, result.requests_not_checked) == (2, 0)


STOPPED = """
import os, sys
from runner.cli.main import run_cli
from runner.session.log import SessionLog

def stop(log, lines):
    next(iter(lines))
    os.kill(os.getpid(), int(sys.argv[1]))

SessionLog.copy = stop
run_cli(["session", "fork", sys.argv[2], "--turn", "2", "--output", sys.argv[3]])
"""
"""Forks, and gets a signal while the log is written."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_a_fork_that_is_killed_leaves_no_session(number: signal.Signals, parent: SampleSession, tmp_path: Path) -> None:
    """What can be caught leaves nothing; else there is no log, and the next fork takes the place."""
    parent.log.barrier()
    child = tmp_path / "child"

    ended = subprocess.run(
        [sys.executable, "-c", STOPPED, str(int(number)), parent.directory, child], capture_output=True, check=False
    )

    assert (ended.returncode, ended.stdout) == (-number, b"")
    if number is signal.SIGKILL:
        assert sorted(path.name for path in child.iterdir()) == [".fork", "media", "spill"]
        with pytest.raises(LogError, match="holds no session log"):
            open_session(str(child))
        (child / "spill" / "call_0_0.txt").write_bytes(b"of the fork that was killed")
    else:
        assert not child.exists()
    made = fork(parent.directory, child)
    assert verify_session(open_session(str(child)), allow_open=True).digest == made.digest
    files = sorted(path.relative_to(child).as_posix() for path in child.rglob("*") if path.is_file())
    assert files == sorted([*made.files, LOG_NAME])


def test_what_lies_beside_a_killed_fork_is_not_removed(parent: SampleSession, tmp_path: Path) -> None:
    """Only what a fork makes is taken away, and only where no log is in its place."""
    for name in ("mine.txt", LOG_NAME):
        write(tmp_path / name / ".fork" / LOG_NAME, b"")
        write(tmp_path / name / name, b"mine")
        with pytest.raises(ConfigError, match="is not empty"):
            fork(parent.directory, tmp_path / name)
        assert (tmp_path / name / name).read_bytes() == b"mine"


def test_two_forks_at_once_do_not_meet(parent: SampleSession, tmp_path: Path) -> None:
    """The second is refused, and takes nothing from the first."""

    def clock() -> int:
        with pytest.raises(ConfigError, match="another fork is being made there"):
            fork(parent.directory, tmp_path / "child")
        return NOW

    fork_session(open_session(str(parent.directory)), tmp_path / "child", turn=2, session_id="first", clock=clock)

    assert verify_session(open_session(str(tmp_path / "child")), allow_open=True).session == "first"


def changed_file(session: SampleSession) -> None:
    """Another text of the same length."""
    (session.directory / "spill" / "call_4_1.txt").write_bytes(SPILLED.replace(b"long", b"good"))


def longer_file(session: SampleSession) -> None:
    """More than was written."""
    (session.directory / "spill" / "call_4_1.txt").write_bytes(SPILLED + b"more")


def linked_file(session: SampleSession) -> None:
    """A link to a file of the right content."""
    path = session.directory / "spill" / "call_4_1.txt"
    path.rename(session.directory / "moved.txt")
    path.symlink_to(session.directory / "moved.txt")


def linked_folder(session: SampleSession) -> None:
    """A link to a folder of files of the right content."""
    (session.directory / "spill").rename(session.directory / "moved")
    (session.directory / "spill").symlink_to(session.directory / "moved")


def changed_image(session: SampleSession) -> None:
    """Another image under the old name."""
    next((session.directory / "media").iterdir()).write_bytes(b"another")


def pipe(session: SampleSession) -> None:
    """Something that never ends."""
    path = session.directory / "spill" / "call_4_1.txt"
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    "damage",
    [changed_file, longer_file, linked_file, linked_folder, changed_image, pipe],
    ids=lambda each: each.__name__,
)
def test_a_file_that_is_not_as_it_was_written_is_refused(
    damage: Callable[[SampleSession], None], parent: SampleSession, tmp_path: Path
) -> None:
    """Code 13 with its name, links are not followed, and nothing is left of the child."""
    damage(parent)

    with pytest.raises(LogError) as caught:
        fork(parent.directory, tmp_path / "child")

    assert caught.value.code is ErrorCode.LOG_INVALID
    assert ("media/" if damage is changed_image else "spill/") in caught.value.message
    assert not (tmp_path / "child").exists()


@pytest.mark.parametrize("path", ["../outside.txt", "/etc/passwd", "session.jsonl.zst", "spill/../../x", "media/x", ""])
def test_a_log_names_no_file_outside_its_session(path: str, tmp_path: Path) -> None:
    """Whatever a hostile log says, only its own spill folder is read."""
    with SampleSession(tmp_path / "parent") as session:
        session.begin()
        session.start_turn()
        session.start_step("Go.")
        [(call_id, arguments)] = session.answer().items()
        spilled(session, call_id, session.call(call_id, arguments), path)
        session.end_step()
        session.end_turn()

    with pytest.raises(LogError, match="its spill names no file of the session"):
        fork(tmp_path / "parent", tmp_path / "child", turn=1)
    assert not (tmp_path / "child").exists()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("digest", ["../../etc/passwd", "0" * 63, "A" * 64, 7, None])
def test_an_image_is_named_by_its_digest_alone(digest: object, tmp_path: Path, *, nested: bool) -> None:
    """In a message or in a tool's result; anything else names no file."""
    image = {"type": "image", "mediaType": "image/png", "sha256": digest, "bytes": 3}
    with SampleSession(tmp_path / "parent") as session:
        session.begin()
        session.start_turn()
        session.start_step("Look.")
        if nested:
            [(call_id, arguments)] = session.answer().items()
            block: Any = {"type": "tool-result", "toolCallId": call_id, "content": [image], "isError": False}
            source = session.call(call_id, arguments)
            session.log.append(
                ev.ToolResult(
                    turn=1,
                    step=1,
                    message={"role": "user", "content": [block], "source": {"kind": "tool"}, "id": "r"},
                    source_event_seqs=[source],
                )
            )
        else:
            session.log.append(ev.UserMessage(content=[image], source={"kind": "user"}, role="user", id="image"))
        session.end_step()
        session.end_turn()

    with pytest.raises(LogError, match="an image has no digest"):
        fork(tmp_path / "parent", tmp_path / "child", turn=1)


def test_many_turns_are_listed_in_short(tmp_path: Path) -> None:
    """The first, the last, and how many."""
    with SampleSession(tmp_path / "parent", bodies=False) as session:
        for _ in range(25):
            session.turn(steps=1)

    with pytest.raises(ConfigError) as caught:
        fork(tmp_path / "parent", tmp_path / "child", turn=26)
    assert caught.value.hint == "turns that have ended: 1 to 25, 25 in all"


def test_a_full_disk_while_files_are_copied_leaves_nothing(
    parent: SampleSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """STORAGE_FAILED with the reason."""

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runner.session.fork.os.fsync", full)
    with pytest.raises(StorageError, match="No space left on device"):
        fork(parent.directory, tmp_path / "child")
    assert not (tmp_path / "child").exists()


def test_two_contents_under_one_name_are_refused(tmp_path: Path) -> None:
    """Only one of them can be beside the child."""
    with SampleSession(tmp_path / "parent") as session:
        session.begin()
        session.start_turn()
        session.start_step("Go.")
        calls = session.answer(calls=2)
        for number, (call_id, arguments) in enumerate(calls.items()):
            seq = session.call(call_id, arguments)
            spilled(session, call_id, seq, "spill/same.txt", sha256=sha256(SPILLED + bytes(number)))
        session.end_step()
        session.end_turn()

    with pytest.raises(LogError, match=r"two contents for spill/same\.txt"):
        fork(tmp_path / "parent", tmp_path / "child", turn=1)


@pytest.mark.parametrize("behind", [False, True])
def test_a_parent_damaged_before_the_seal_behind_the_turn_is_refused(tmp_path: Path, *, behind: bool) -> None:
    """A changed byte in the seed itself, and in the events between the turn and its seal."""
    with SampleSession(tmp_path / "parent") as session:
        session.turn(steps=2)
    lines = lines_of(tmp_path / "parent")
    assert b'"turn/end"' in lines[-2]
    at = len(lines) - 2 if behind else next(n for n, line in enumerate(lines) if b'"tool/call"' in line)
    lines[at] = lines[at].replace(b'"time":17', b'"time":18')
    (tmp_path / "parent" / LOG_NAME).write_bytes(b"".join(line + b"\n" for line in lines))

    with pytest.raises(LogError, match="the seal does not fit"):
        fork(tmp_path / "parent", tmp_path / "child", turn=1)
    assert not (tmp_path / "child").exists()


def test_a_parent_damaged_far_behind_the_turn_can_be_forked(parent: SampleSession, tmp_path: Path) -> None:
    """What is taken over is whole, so it can be saved."""
    lines = lines_of(parent.directory)
    lines[-4] = lines[-4].replace(b'"time":17', b'"time":18')
    (tmp_path / "damaged.jsonl").write_bytes(b"".join(line + b"\n" for line in [*lines, b"garbage"]))

    fork(tmp_path / "damaged.jsonl", tmp_path / "child", turn=1)

    assert verify_session(open_session(str(tmp_path / "child")), allow_open=True).turns == 1


def test_what_stops_a_fork_leaves_nothing(
    parent: SampleSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk: STORAGE_FAILED, the empty directory that was there stays, and is empty."""
    (tmp_path / "child").mkdir()

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("runner.session.log.os.write", full)
    with pytest.raises(RunnerError) as caught:
        fork(parent.directory, tmp_path / "child")

    assert caught.value.code is ErrorCode.STORAGE_FAILED
    assert list((tmp_path / "child").iterdir()) == []
