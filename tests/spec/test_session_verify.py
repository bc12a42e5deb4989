"""Verification: what a whole log proves, what damage is found, what cannot be proved is said."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.errors import ErrorCode, LogError
from runner.providers.registry import dialects
from runner.session import codec
from runner.session import events as ev
from runner.session.export import export_zip
from runner.session.store import open_session
from runner.session.verify import verify_session
from runner.testing.sessions import SAMPLE_ID, SampleSession

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.messages import JsonObject

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "dsh"


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """An artifacts directory with a finished session of three turns, one compaction and one artifact."""
    with SampleSession(tmp_path / "artifacts") as session:
        session.turn(steps=3)
        session.turn(steps=2)
        nodes = [event.seq for event in open_session(str(session.directory)).events() if event.SURFACE]
        session.start_turn()
        session.compact(nodes[1], nodes[4])
        session.step(calls=2)
        session.end_turn("aborted")
        session.end()
    return tmp_path / "artifacts"


def lines_of(directory: Path) -> list[bytes]:
    """The lines of a log, with their newlines."""
    return [line + b"\n" for line in open_session(str(directory)).raw_lines()]


def write(tmp_path: Path, lines: list[bytes]) -> str:
    """Write lines as a plain log; returns its path."""
    path = tmp_path / "changed.jsonl"
    path.write_bytes(b"".join(lines))
    return str(path)


def reseal(lines: list[bytes]) -> list[bytes]:
    """The same lines with every seal computed anew, as somebody who rewrites a log would."""
    whole = hashlib.sha256()
    sealed = []
    for number, original in enumerate(lines):
        line = original
        record = json.loads(original)
        if record["type"] == "log/seal":
            start = codec.seal_start(seq=record["seq"], time=record["time"], lines=number)
            digest = whole.copy()
            digest.update(start)
            line = start + digest.hexdigest().encode() + codec.SEAL_END
        whole.update(line)
        sealed.append(line)
    return sealed


def refused(reference: str | Path, **options: Any) -> LogError:
    """What verification says of a broken session."""
    with pytest.raises(LogError) as caught:
        verify_session(open_session(str(reference)), **options)
    assert caught.value.code.exit_code == 13
    return caught.value


def test_a_whole_log_verifies(artifacts: Path) -> None:
    """Chain, requests, artifacts and counts."""
    result = verify_session(open_session(str(artifacts)), dialects=dialects())

    assert (result.state, result.chain, result.manifest) == ("whole", "sha256", "none")
    assert (result.session, result.turns, result.steps) == (SAMPLE_ID, 3, 6)
    assert (result.requests_checked, result.requests_not_checked) == (6, 0)
    assert (result.artifacts_checked, result.artifacts_not_checked) == (["summary.md"], [])
    assert result.last_seal_line == result.lines == len(lines_of(artifacts))
    assert result.seals == 10
    assert result.digest == hashlib.sha256(b"".join(lines_of(artifacts))).hexdigest()


def test_the_digest_can_be_demanded(artifacts: Path) -> None:
    """Only this finds a full rewrite: the rewritten log is whole in itself."""
    digest = verify_session(open_session(str(artifacts))).digest
    assert verify_session(open_session(str(artifacts)), expect=digest.upper()).digest == digest

    assert "the digest is" in refused(artifacts, expect="0" * 64).message


def test_a_rewritten_log_is_whole_in_itself_and_has_another_digest(artifacts: Path, tmp_path: Path) -> None:
    """The chain does not pretend to prove who wrote it."""
    digest = verify_session(open_session(str(artifacts))).digest
    lines = [line.replace(b"summary.md", b"forged.md_") for line in lines_of(artifacts)]
    forged = write(tmp_path, reseal(lines))

    assert verify_session(open_session(forged)).state == "whole"
    refused(forged, expect=digest)


@pytest.mark.parametrize("left", ["run/end", "the middle of a turn", "the last seal", "everything but the header"])
def test_an_open_log_fails_unless_that_is_allowed(artifacts: Path, tmp_path: Path, left: str) -> None:
    """It says that it is open, how many events there are, and where the last seal stands."""
    lines = lines_of(artifacts)
    cut = {
        "run/end": next(n for n, line in enumerate(lines) if b'"run/end"' in line),
        "the middle of a turn": 30,
        "the last seal": len(lines) - 1,
        "everything but the header": 1,
    }[left]
    path = write(tmp_path, lines[:cut])

    error = refused(path)

    assert ": open, " in error.message
    seals = [n for n, line in enumerate(lines[:cut], 1) if b'"log/seal"' in line]
    assert error.message.endswith(f"last seal at line {seals[-1]}" if seals else "no seal")
    assert "--allow-open" in (error.hint or "")
    result = verify_session(open_session(path), allow_open=True)
    assert result.state == "open"
    assert result.lines == cut


def test_a_torn_end_makes_a_log_open(artifacts: Path, tmp_path: Path) -> None:
    """Even when everything but the last newline is there."""
    lines = lines_of(artifacts)
    lines[-1] = lines[-1][:-1]
    path = write(tmp_path, lines)

    refused(path)
    assert "torn" in (verify_session(open_session(path), allow_open=True).dropped or "")


def test_a_log_that_goes_on_behind_its_end_is_open(artifacts: Path) -> None:
    """A resumed run ends with its own run/end and seal."""
    log, _ = SampleSessionReopened.of(artifacts)
    with log:
        log.append(ev.RunResume(changes=[]))
        log.seal()

    assert ": open, " in refused(artifacts).message


class SampleSessionReopened:
    """A log taken up again."""

    @staticmethod
    def of(directory: Path) -> Any:
        """Reopen the log of ``directory``."""
        from runner.session.log import SessionLog

        return SessionLog.reopen(directory, clock=lambda: 1_796_000_900_000, fold=lambda _event: None)


def test_the_first_bad_line_is_named(artifacts: Path, tmp_path: Path) -> None:
    """A changed byte is found at the next seal, which says from where the damage may be."""
    lines = lines_of(artifacts)
    seals = [number for number, line in enumerate(lines, 1) if b'"log/seal"' in line]
    changed = seals[1] + 3
    at = lines[changed - 1].index(b'"time":') + 10
    lines[changed - 1] = lines[changed - 1][:at] + b"7" + lines[changed - 1][at + 1 :]

    error = refused(write(tmp_path, lines), allow_open=True)

    assert f"line {seals[2]}: the seal does not fit: a line from {seals[1] + 1} to {seals[2]}" in error.message
    assert error.details["line"] == seals[2]


SEAL_CHANGES: dict[str, Callable[[bytes], bytes]] = {
    "spaces": lambda line: line.replace(b'"lines":', b'"lines": '),
    "another order": lambda line: line.replace(b'"ignorable":true,', b"").replace(b"}}\n", b'},"ignorable":true}\n'),
    "a further field": lambda line: line.replace(b'"}}', b'","x":1}}'),
    "upper case": lambda line: line[:-67] + line[-67:-3].upper() + line[-3:],
    "another count": lambda line: line.replace(b'"lines":', b'"lines":1'),
    "another time": lambda line: line.replace(b'"time":1', b'"time":2'),
}


@pytest.mark.parametrize("change", sorted(SEAL_CHANGES))
def test_a_seal_has_exactly_one_form(artifacts: Path, tmp_path: Path, change: str) -> None:
    """Bytes are compared, nothing is serialised again."""
    lines = lines_of(artifacts)
    lines[-1] = SEAL_CHANGES[change](lines[-1])

    assert f"line {len(lines)}: " in refused(write(tmp_path, lines), allow_open=True).message


def test_a_seal_in_a_log_without_a_chain_is_damage(artifacts: Path, tmp_path: Path) -> None:
    """Taking the chain out of the header does not turn our log into one that needs none."""
    lines = lines_of(artifacts)
    lines[0] = lines[0].replace(b'"writer"', b'"wsiter"')

    assert "no chain" in refused(write(tmp_path, lines)).message


STRUCTURE: dict[str, tuple[str, str, str]] = {
    "a step of another turn": ('"type":"step/end"', '"turn":1', '"turn":2'),
    "a skipped step": ('"type":"step/start"', '"step":1', '"step":2'),
    "a call without a result": ('"type":"tool/call"', '"callId":"call_1_1"', '"callId":"call_9_9"'),
    "a decision of another question": ('"type":"approval/decided"', '"id":"', '"id":"x'),
    "a source that is not earlier": ('"type":"tool/result"', '"sourceEventSeqs":[', '"sourceEventSeqs":[999,'),
    "a replace of a node that is not there": ('"op":"replace"', '"start":', '"start":9'),
    "a prune without its result": ('"type":"todo/write"', "", ""),
}


@pytest.mark.parametrize("case", sorted(set(STRUCTURE) - {"a prune without its result"}))
def test_broken_structure_is_found_even_under_new_seals(artifacts: Path, tmp_path: Path, case: str) -> None:
    """Seqs, pairs, sources and surface are checked for themselves, with the line."""
    kind, old, new = STRUCTURE[case]
    lines = lines_of(artifacts)
    at = next(n for n, line in enumerate(lines) if kind.encode() in line and old.encode() in line)
    lines[at] = lines[at].replace(old.encode(), new.encode(), 1)

    error = refused(write(tmp_path, reseal(lines)))

    assert error.details["line"] >= at + 1


def test_steps_and_turns_of_ours_count_up_by_one(artifacts: Path, tmp_path: Path) -> None:
    """Over the whole session, so that reports can count ends."""
    for kind, count in ((b'"turn/start"', b'"turn":'), (b'"step/start"', b'"step":')):
        lines = lines_of(artifacts)
        at = [n for n, line in enumerate(lines) if kind in line][1]
        head, tail = lines[at].split(count)
        lines[at] = head + count + b"7" + tail[1:]

        assert f"line {at + 1}: " in refused(write(tmp_path, reseal(lines))).message


def test_a_request_that_is_not_what_the_log_says_is_found(artifacts: Path, tmp_path: Path) -> None:
    """A message changed under new seals does not fit the digest of the request that followed."""
    lines = lines_of(artifacts)
    at = next(n for n, line in enumerate(lines) if b"Make the tests pass." in line)
    lines[at] = lines[at].replace(b"Make the tests pass.", b"Make the tests fail.")
    path = write(tmp_path, reseal(lines))

    assert verify_session(open_session(path)).requests_not_checked == 6
    error = refused(path, dialects=dialects())
    assert "the body rebuilt from the log is not the one that was sent" in error.message
    assert b'"request/sent"' in lines[error.details["line"] - 1]


def test_a_request_that_cannot_be_rebuilt_is_found(artifacts: Path, tmp_path: Path) -> None:
    """A header without what the dialect needs, and a request without a header."""
    lines = lines_of(artifacts)
    at = next(n for n, line in enumerate(lines) if b'"request/header"' in line)
    broken = [*lines]
    broken[at] = broken[at].replace(b'"system"', b'"sustem"')
    assert "cannot be rebuilt" in refused(write(tmp_path, reseal(broken)), dialects=dialects()).message

    broken[at] = lines[at].replace(b'"request/header"', b'"session/title"').replace(b'"data":{', b'"data":{"title":"",')
    assert "no request/header" in refused(write(tmp_path, reseal(broken)), dialects=dialects()).message


def test_requests_of_unknown_dialects_are_said_and_not_failed(artifacts: Path) -> None:
    """What cannot be checked here is counted."""
    result = verify_session(open_session(str(artifacts)), dialects={})

    assert (result.requests_checked, result.requests_not_checked) == (0, 6)


def test_a_changed_artifact_is_found(artifacts: Path) -> None:
    """Files are compared with ``artifact/written``."""
    (artifacts / "summary.md").write_text("# Another summary\n")

    assert "summary.md is not as it was written" in refused(artifacts).message


def test_an_artifact_that_is_not_there_is_listed(artifacts: Path) -> None:
    """A missing file, and a log without its directory, are not checked and do not fail."""
    assert verify_session(open_session(str(artifacts / "session.jsonl.zst"))).artifacts_not_checked == ["summary.md"]
    (artifacts / "summary.md").unlink()
    assert verify_session(open_session(str(artifacts))).artifacts_not_checked == ["summary.md"]


def test_an_artifact_that_became_a_link_or_leads_out_is_refused(artifacts: Path, tmp_path: Path) -> None:
    """A log names no file outside its directory, whatever it says."""
    outside = tmp_path / "outside.md"
    outside.write_bytes((artifacts / "summary.md").read_bytes())
    (artifacts / "summary.md").unlink()
    (artifacts / "summary.md").symlink_to(outside)
    assert "cannot be read" in refused(artifacts).message

    lines = [line.replace(b'"path":"summary.md"', b'"path":"../outside.md"') for line in lines_of(artifacts)]
    assert "leads out of the session" in refused(write(tmp_path, reseal(lines))).message


# --- exports and children ----------------------------------------------------------------------


@pytest.fixture
def family(artifacts: Path) -> Path:
    """The session with spilled output and one subagent."""
    for path, content in (("spill/call_1_1.txt", b"long output"), ("media/ab.png", b"\x89PNG")):
        (artifacts / path).parent.mkdir()
        (artifacts / path).write_bytes(content)
    child = {"parentSession": SAMPLE_ID, "origin": "subagent", "delegationDepth": 1}
    with SampleSession(artifacts / "subagents" / "child-1", session_id="child-1", seed=2, header=child) as session:
        session.turn(steps=2)
    return artifacts


def test_subagents_are_verified_too(family: Path) -> None:
    """Each with its own result; a damaged one fails the whole."""
    result = verify_session(open_session(str(family)), dialects=dialects())
    assert [(child.session, child.state, child.requests_checked) for child in result.children] == [
        ("child-1", "whole", 2)
    ]

    log = family / "subagents" / "child-1" / "session.jsonl.zst"
    log.write_bytes(log.read_bytes()[:-20])
    assert "child-1" in refused(family).message
    log.parent.rename(log.parent.with_name("child-2"))
    assert "not child-2" in refused(family, allow_open=True).message


def test_an_export_verifies_against_its_manifest(family: Path, tmp_path: Path) -> None:
    """Every member, the subagents' logs included."""
    export_zip(family, tmp_path / "x.zip")

    result = verify_session(open_session(str(tmp_path / "x.zip")), dialects=dialects())

    assert (result.manifest, result.state, result.requests_checked) == ("ok", "whole", 6)
    assert [child.state for child in result.children] == ["whole"]


def changed_zip(source: Path, target: Path, change: Callable[[dict[str, bytes]], object]) -> Path:
    """A copy of an archive whose members ``change`` altered."""
    with zipfile.ZipFile(source) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    change(members)
    with zipfile.ZipFile(target, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return target


def edit(members: dict[str, bytes], change: Callable[[JsonObject], object]) -> None:
    """Change the manifest among ``members``."""
    manifest = json.loads(members["manifest.json"])
    change(manifest)
    members["manifest.json"] = json.dumps(manifest).encode()


ZIP_CHANGES: dict[str, tuple[Callable[[dict[str, bytes]], object], str]] = {
    "a changed member": (lambda m: m.update({"media/ab.png": b"\x88PNG"}), "is not as it was exported"),
    "a longer member": (lambda m: m.update({"media/ab.png": b"\x89PNGx"}), "is not as it was exported"),
    "a missing member": (lambda m: m.pop("spill/call_1_1.txt"), "is missing from the archive"),
    "a further member": (lambda m: m.update({"media/cd.png": b"x"}), "is not listed"),
    "no manifest": (lambda m: m.pop("manifest.json"), "has no manifest.json"),
    "a manifest that is no json": (lambda m: m.update({"manifest.json": b"{"}), "malformed"),
    "a manifest without members": (lambda m: m.update({"manifest.json": b"{}"}), "malformed"),
    "a manifest of a list": (lambda m: m.update({"manifest.json": b"[]"}), "malformed"),
    "another session": (lambda m: edit(m, lambda x: x.update(session="other")), "of another version or session"),
    "another version": (lambda m: edit(m, lambda x: x.update(schemaVersion=2)), "of another version or session"),
    "a member listed twice": (lambda m: edit(m, lambda x: x["members"].append(x["members"][0])), "twice"),
    "a child that is damaged": (
        lambda m: m.update({"subagents/child-1/session.jsonl": b"x"}),
        "is not as it was exported",
    ),
}


@pytest.mark.parametrize("case", sorted(ZIP_CHANGES))
def test_a_changed_export_is_found(family: Path, tmp_path: Path, case: str) -> None:
    """Members and manifest must agree in both directions."""
    change, message = ZIP_CHANGES[case]
    export_zip(family, tmp_path / "x.zip")

    assert message in refused(changed_zip(tmp_path / "x.zip", tmp_path / "y.zip", change)).message


def test_a_manifest_too_large_to_hold_is_refused(family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is read as a whole, so its size is bounded."""
    export_zip(family, tmp_path / "x.zip")
    monkeypatch.setattr("runner.session.verify._MAX_MANIFEST", 10)

    assert "is larger than" in refused(tmp_path / "x.zip").message


# --- logs of dsh -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(path.name for path in GOLDEN.iterdir() if path.suffix != ".md"))
def test_a_log_without_a_chain_verifies_by_its_structure(name: str) -> None:
    """No chain and no manifest are said, an open turn too, and none of it fails."""
    result = verify_session(open_session(str(GOLDEN / name)), dialects=dialects())

    assert (result.chain, result.manifest, result.seals) == ("none", "none", 0)
    assert result.state == ("open" if name == "killed-open-turn.zip" else "closed")
    assert [child.state for child in result.children] == (["closed"] * 2 if name == "rich.zip" else [])


def test_broken_structure_of_a_foreign_log_is_found(tmp_path: Path) -> None:
    """A dropped line leaves a gap; an event of an unknown type has its own code."""
    lines = (GOLDEN / "compaction.jsonl").read_bytes().splitlines(keepends=True)
    assert refused(write(tmp_path, lines[:20] + lines[21:])).details["line"] == 21
    prune = next(n for n, line in enumerate(lines) if b"compaction/prune" in line)
    swapped = [*lines[:prune], lines[prune + 1], lines[prune], *lines[prune + 2 :]]
    assert refused(write(tmp_path, swapped)).details["line"] == prune + 1
    unknown = [*lines[:5], lines[5].replace(b"turn/start", b"turn/stars"), *lines[6:]]
    assert refused(write(tmp_path, unknown)).code is ErrorCode.LOG_UNKNOWN_EVENT
