"""Totals beside a log: usage.json and result.json say what the events say, or verification names the field."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from runner.artifacts.totals import TotalsCheck
from runner.cli.main import run_cli
from runner.errors import LogError
from runner.session.events import RunResume
from runner.session.header import LOG_NAME
from runner.session.log import SessionLog
from runner.session.store import open_session
from runner.session.verify import Verification, verify_session

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.messages import JsonObject

OURS = Path(__file__).resolve().parents[1] / "golden" / "ours"
DSH = OURS.parent / "dsh"


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """The artifacts of a real run."""
    return Path(shutil.copytree(OURS / "openai", tmp_path / "artifacts"))


def verify(reference: Path, **options: Any) -> Verification:
    """Verify with totals."""
    return verify_session(open_session(str(reference)), totals=TotalsCheck, **options)


def refused(reference: Path, **options: Any) -> str:
    """What verification says."""
    with pytest.raises(LogError) as caught:
        verify(reference, **options)
    assert caught.value.code.exit_code == 13
    assert "\n" not in caught.value.message
    return caught.value.message


def change(path: Path, *keys: str | int, value: Any) -> None:
    """Set one field of a JSON file; ``...`` takes it out."""
    document = json.loads(path.read_text())
    holder = document
    for key in keys[:-1]:
        holder = holder[key]
    if value is ...:
        del holder[keys[-1]]
    else:
        holder[keys[-1]] = value
    path.write_text(json.dumps(document))


def log_again(artifacts: Path, edit: Callable[[JsonObject], object]) -> None:
    """Write the log anew, all seals too, each record as ``edit`` changed it; result.json gets the new digest."""
    lines = list(open_session(str(artifacts)).raw_lines())
    header = {key: value for key, value in json.loads(lines[0]).items() if key not in ("type", "version", "writer")}
    (artifacts / LOG_NAME).unlink()
    with SessionLog.create(artifacts, header=header, clock=int) as log:
        for line in lines[1:]:
            record = json.loads(line)
            edit(record)
            log.copy([json.dumps(record, separators=(",", ":"), ensure_ascii=False).encode()])
    change(artifacts / "result.json", "logDigest", value=log.digest)
    listed = json.loads((artifacts / "result.json").read_text())["artifacts"]
    at = next(number for number, entry in enumerate(listed) if entry["path"] == LOG_NAME)
    data = (artifacts / LOG_NAME).read_bytes()
    change(artifacts / "result.json", "artifacts", at, "sha256", value=hashlib.sha256(data).hexdigest())
    change(artifacts / "result.json", "artifacts", at, "bytes", value=len(data))


def logged_again(artifacts: Path, name: str) -> None:
    """Make the log say that a changed file was written like this, as a forger would."""
    data = (artifacts / name).read_bytes()
    facts = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    def edit(record: JsonObject) -> None:
        if record["type"] == "artifact/written" and record["data"]["path"] == name:
            record["data"].update(facts)

    listed = json.loads((artifacts / "result.json").read_text())["artifacts"]
    for number, entry in enumerate(listed):
        if entry["path"] == name:
            change(artifacts / "result.json", "artifacts", number, value={**entry, **facts})
    log_again(artifacts, edit)


def test_the_totals_of_a_real_run_are_those_of_its_events(artifacts: Path) -> None:
    """All is compared, and nothing is left over."""
    result = verify(artifacts)

    assert result.totals_checked == ["usage.json", "result.json"]
    assert result.totals_not_checked == []
    assert sorted(result.artifacts_checked) == sorted(
        path.name for path in artifacts.iterdir() if path.name != "result.json"
    )
    log_again(artifacts, lambda _record: None)
    assert verify(artifacts).totals_checked == ["usage.json", "result.json"]


def test_a_directory_that_has_its_log_only_in_the_export_has_its_totals_compared(artifacts: Path) -> None:
    """result.json and the artifacts lie beside session.zip, so they are checked; what is not there is listed."""
    (artifacts / LOG_NAME).unlink()
    (artifacts / "summary.md").unlink()

    result = verify(artifacts)

    assert (result.manifest, result.state) == ("ok", "whole")
    assert (result.totals_checked, result.totals_not_checked) == (["usage.json", "result.json"], [])
    assert sorted(result.artifacts_not_checked) == [LOG_NAME, "summary.md"]
    change(artifacts / "result.json", "steps", value=5)
    assert "result.json: steps is 5, the log says 4" in refused(artifacts)
    (artifacts / "changes.patch").write_text("forged")
    assert "the file changes.patch is not as it was written" in refused(artifacts)


RESULT_CHANGES: list[tuple[tuple[str | int, ...], Any, str]] = [
    (("outcome",), "failed", 'outcome is "failed", the log says "completed"'),
    (("code",), "TASK_FAILED", 'code is "TASK_FAILED", the log says "COMPLETED"'),
    (("failureClass",), "task", 'failureClass is "task", the log says null'),
    (("exitCode",), 1, "exitCode is 1, the log says 0"),
    (("exitCode",), False, "exitCode is false, the log says 0"),
    (("sessionId",), "another", 'sessionId is "another", the log says "session-'),
    (("task",), "other", 'task is "other", the log says "openai"'),
    (("startedAt",), 1, "startedAt is 1, the log says 17"),
    (("durationMs",), 1, "durationMs is 1, the log says "),
    (("finalMessage",), "No.", 'finalMessage is "No.", the log says "Yes."'),
    (("turns",), 3, "turns is 3, the log says 2"),
    (("steps",), 5, "steps is 5, the log says 4"),
    (("steps",), ..., "steps is missing, the log says 4"),
    (("usage", "output"), 161, "usage.output is 161, the log says 160"),
    (("usage", "cacheHitRate"), None, "usage.cacheHitRate is null, the log says 0."),
    (("costUsd",), 0, "costUsd is 0, the log says 0.00"),
    (("toolCalls", "total"), 4, "toolCalls.total is 4, the log says 3"),
    (("toolCalls", "denied"), 1, "toolCalls.denied is 1, the log says 0"),
    (("approvals", "allowed"), 2, "approvals.allowed is 2, the log says 3"),
    (("checks",), [{"name": "x"}], 'checks[0] is {"name":"x"}, the log says nothing'),
    (("sandbox", "mode"), "read-only", 'sandbox.mode is "read-only", the log says "workspace-write"'),
    (("sandbox", "notEnforced"), ["all"], "sandbox.notEnforced[0] is"),
    (("limits", 0, "used"), 9, "limits[0].used is 9, the log says 4"),
    (("limits",), [], "limits[0] is missing, the log says"),
    (("base", "tree"), "0" * 40, "base.tree is"),
    (("logDigest",), "0" * 64, "logDigest is"),
    (("error",), {"code": "X", "message": "x", "hint": None}, "error is"),
    (("extra",), 1, "extra is 1, the log says nothing"),
    (("schemaVersion",), 2, "schemaVersion is 2, this version reads 1"),
    (("artifacts", 0, "sha256"), "0" * 64, "artifacts[changes.patch].sha256 is"),
    (("artifacts", 0, "bytes"), 1, "artifacts[changes.patch].bytes is 1, the log says"),
    (("artifacts", 0), ..., "artifacts[changes.patch] is missing, the log says"),
    (("artifacts", 3, "sha256"), "0" * 64, "artifacts[session.jsonl.zst].sha256 is"),
    (("artifacts", 4, "bytes"), 1, "artifacts[session.zip].bytes is 1, the file says"),
    (("artifacts", 0, "path"), "../x", "artifacts[0] is no entry of a file"),
    (("artifacts",), None, "artifacts[0] is no entry of a file"),
]


@pytest.mark.parametrize(("keys", "value", "message"), RESULT_CHANGES)
def test_a_changed_field_of_the_result_is_named(
    keys: tuple[str | int, ...], value: Any, message: str, artifacts: Path
) -> None:
    """The first field that differs, with both values."""
    change(artifacts / "result.json", *keys, value=value)

    assert f": result.json: {message}" in refused(artifacts)


def test_every_field_that_the_log_says_is_compared(artifacts: Path) -> None:
    """Only what the log does not say may differ; each other field is found when it is gone."""
    not_in_the_log = {"secondary", "structuredOutput", "patch"}
    fields = list(json.loads((artifacts / "result.json").read_text()))

    for name in fields:
        shutil.copy(OURS / "openai" / "result.json", artifacts / "result.json")
        change(artifacts / "result.json", name, value=...)
        if name in not_in_the_log:
            verify(artifacts)
        else:
            assert "result.json: " in refused(artifacts)


@pytest.mark.parametrize(
    ("keys", "value", "message"),
    [
        (("steps",), 5, "steps is 5, the log says 4"),
        (("perStep", 1, "attempts"), 1, "perStep[1].attempts is 1, the log says 2"),
        (("perStep",), [], "perStep[0] is missing"),
        (("tools", 0, "calls"), 3, "tools[0].calls is 3, the log says 2"),
        (("context", "window"), 1, "context.window is 1, the log says 50000"),
        (("costUsd",), 1, "costUsd is 1, the log says 0.00"),
        (("subagents",), [{}], "subagents[0] is {}, the log says nothing"),
        (("extra",), None, "extra is null, the log says nothing"),
    ],
)
def test_a_changed_field_of_the_usage_is_named_even_under_new_digests(
    keys: tuple[str | int, ...], value: Any, message: str, artifacts: Path
) -> None:
    """The digest finds the change first; who also forges the log is found by the totals."""
    change(artifacts / "usage.json", *keys, value=value)
    assert "usage.json is not as it was written" in refused(artifacts)

    logged_again(artifacts, "usage.json")

    assert f": usage.json: {message}" in refused(artifacts)


def test_a_run_end_that_the_events_do_not_bear_out_is_found(tmp_path: Path) -> None:
    """A cancelled run that calls itself completed, in the log and in the result."""
    artifacts = Path(shutil.copytree(OURS / "cancelled", tmp_path / "artifacts"))
    told = {"outcome": "completed", "code": "COMPLETED", "failureClass": None, "exitCode": 0}

    def edit(record: JsonObject) -> None:
        if record["type"] == "run/end":
            record["data"].update(told)
            del record["data"]["error"]

    for name, value in {**told, "error": None}.items():
        change(artifacts / "result.json", name, value=value)
    log_again(artifacts, edit)

    assert 'result.json: outcome is "completed", the log says "cancelled"' in refused(artifacts)


def test_what_is_not_beside_the_log_is_listed(artifacts: Path, tmp_path: Path) -> None:
    """A bare log, an export and a folder without them are not checked and do not fail."""
    both = ["usage.json", "result.json"]
    assert verify(artifacts / LOG_NAME).totals_not_checked == both
    assert verify(artifacts / "session.zip").totals_not_checked == both
    (artifacts / "usage.json").unlink()
    result = verify(artifacts)
    assert (result.totals_checked, result.totals_not_checked) == (["result.json"], ["usage.json"])
    assert "usage.json" in result.artifacts_not_checked
    (artifacts / "session.zip").unlink()
    assert "session.zip" in verify(artifacts).artifacts_not_checked
    (tmp_path / "dsh").mkdir()
    shutil.copy(DSH / "three-steps.jsonl", tmp_path / "dsh" / "session.jsonl")
    (tmp_path / "dsh" / "usage.json").write_text("{}")
    assert verify(tmp_path / "dsh").totals_not_checked == both


def test_totals_in_an_archive_without_a_manifest_of_ours_are_not_trusted(artifacts: Path, tmp_path: Path) -> None:
    """A member that the manifest does not list is damage, whatever it says."""
    shutil.copy(artifacts / "session.zip", tmp_path / "x.zip")
    with zipfile.ZipFile(tmp_path / "x.zip", "a") as archive:
        archive.writestr("result.json", "{}")

    assert "'result.json' is not listed" in refused(tmp_path / "x.zip")


def test_totals_of_a_log_that_goes_on_are_not_compared(artifacts: Path) -> None:
    """They are those of the run before; with --allow-open that is no damage."""
    log, _ = SessionLog.reopen(artifacts, clock=lambda: 1_796_000_900_000, fold=lambda _event: None)
    with log:
        log.append(RunResume(changes=[]))
        log.seal()

    result = verify(artifacts, allow_open=True)

    assert (result.totals_checked, result.totals_not_checked) == ([], ["usage.json", "result.json"])


def test_totals_of_subagents_are_compared_too(artifacts: Path) -> None:
    """Each child's folder like the main one."""
    child = artifacts / "subagents" / "child"
    shutil.copytree(OURS / "turns", child)
    identifier = open_session(str(child)).header["id"]
    child.rename(child.with_name(identifier))
    assert verify(artifacts).children[0].totals_checked == ["usage.json", "result.json"]

    change(child.with_name(identifier) / "result.json", "steps", value=1)

    message = refused(artifacts)
    assert identifier in message
    assert "result.json: steps is 1, the log says 8" in message


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no valid JSON"),
        (b"{", "is no valid JSON"),
        (b"\xff\xfe\x00", "is no valid JSON"),
        (b"[" * 5_000, "is no valid JSON"),
        (b"[]", "is no JSON object"),
        (b"{}", "schemaVersion is null"),
    ],
)
def test_a_file_that_is_no_report_is_refused(content: bytes, message: str, artifacts: Path) -> None:
    """One message, for either of them."""
    (artifacts / "result.json").write_bytes(content)
    assert f"result.json{':' if content == b'{}' else ''} {message}" in refused(artifacts)

    shutil.copy(OURS / "openai" / "result.json", artifacts / "result.json")
    (artifacts / "usage.json").write_bytes(content)
    logged_again(artifacts, "usage.json")
    assert f"usage.json{':' if content == b'{}' else ''} {message}" in refused(artifacts)


def test_a_report_that_is_a_link_or_a_pipe_is_not_read(artifacts: Path) -> None:
    """Neither followed nor waited for."""
    (artifacts / "result.json").unlink()
    (artifacts / "result.json").symlink_to(OURS / "openai" / "result.json")
    assert "result.json cannot be read" in refused(artifacts)
    (artifacts / "result.json").unlink()
    os.mkfifo(artifacts / "result.json")
    assert "result.json is no regular file" in refused(artifacts)


def test_a_report_too_large_to_hold_is_refused(artifacts: Path) -> None:
    """A sparse file of gigabytes costs nothing to make."""
    with (artifacts / "result.json").open("r+b") as file:
        file.truncate(5 << 30)

    assert "result.json is larger than 64 MiB" in refused(artifacts)


def test_the_command_says_what_it_compared(artifacts: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As text and as JSON; a difference is code 13 and one message."""
    assert run_cli(["session", "verify", str(artifacts)]) == 0
    assert "totals equal to those of the events: usage.json, result.json" in capsys.readouterr().out
    assert run_cli(["session", "verify", str(artifacts / LOG_NAME)]) == 0
    assert "totals not checked, not beside the log: usage.json, result.json" in capsys.readouterr().out
    assert run_cli(["session", "verify", str(artifacts), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["totals"]["checked"] == ["usage.json", "result.json"]

    change(artifacts / "result.json", "steps", value=5)
    assert run_cli(["session", "verify", str(artifacts)]) == 13
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "result.json: steps is 5, the log says 4" in printed.err


@pytest.mark.parametrize(
    ("kind", "change_data"),
    [
        ("assistant/message", {"usage": {"inputTokens": "many", "outputTokens": 1}}),
        (
            "run/start",
            {"config": {"profile": {"limits": {"steps": 5}, "model": {"model": [], "prices": {"input": 1}}}}},
        ),
        ("run/start", {"sandbox": {"notEnforced": 7}}),
    ],
)
def test_events_that_cannot_be_counted_are_damage(kind: str, change_data: JsonObject, artifacts: Path) -> None:
    """Values that no run writes, under new seals: one message, never a traceback."""

    def edit(record: JsonObject) -> None:
        if record["type"] == kind:
            record["data"].update(change_data)

    log_again(artifacts, edit)

    message = refused(artifacts)
    assert "cannot be counted" in message or "the log says" in message


def test_a_result_that_tells_of_an_error_that_was_not_is_found(artifacts: Path) -> None:
    """And one that leaves the hint out is not, since hints stand in no log."""
    cancelled = artifacts.parent / "cancelled"
    shutil.copytree(OURS / "cancelled", cancelled)
    change(cancelled / "result.json", "error", "hint", value="another")
    verify(cancelled)
    change(cancelled / "result.json", "error", "message", value="nothing happened")
    assert 'error.message is "nothing happened", the log says "cancelled by SIGTERM"' in refused(cancelled)
    change(cancelled / "result.json", "error", value=None)
    assert 'error is null, the log says {"code":"CANCELLED"' in refused(cancelled)
