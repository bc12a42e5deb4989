"""Spilled results: only this session's runner gives them, by name; they are in the export, and hold no secret."""

from __future__ import annotations

import json
import zipfile
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, chat_reply

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

DONE: dict[str, Any] = {"text": "Done."}


def shell(command: str) -> dict[str, Any]:
    """A response that runs a command."""
    return {"calls": [{"tool": "shell", "args": {"command": command}}]}


def read(path: str, **arguments: Any) -> dict[str, Any]:
    """A response that reads a file."""
    return {"calls": [{"tool": "read_file", "args": {"path": path, **arguments}}]}


def result_of(finished: Finished, number: int) -> tuple[str, bool]:
    """Text of the result of a call, and whether it is an error."""
    [block] = finished.data_of("tool/result")[number]["message"]["content"]
    return "".join(part["text"] for part in block["content"]), block["isError"]


@pytest.mark.backend("bubblewrap")
def test_no_path_into_the_session_becomes_readable(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """Neither its own folder nor that of another session, by file tool or by shell; nor another session's name."""
    workspace = make_repo()
    other = run_nightshift(
        "run", scripted_task([shell("seq 1 30000; echo of-the-other"), DONE], name="other"), "--workspace", workspace
    )
    assert (other.artifacts / "spill/call_1_0.txt").is_file()
    own = tmp_path / "own"
    paths = [
        f"{folder}/{name}" for folder in (own, other.artifacts) for name in ("spill/call_1_0.txt", "session.jsonl.zst")
    ]
    responses = [
        {"calls": [{"id": "mine", "tool": "shell", "args": {"command": "seq 1 30000"}}]},
        read("spill:mine", offset=20_000, limit=1),
        read("spill:call_1_0"),
        read("spill:../session"),
        *(read(path.replace("call_1_0", "mine") if path.startswith(str(own)) else path) for path in paths[:2]),
        shell(f"cat {own}/spill/mine.txt | head -c 100"),
        DONE,
    ]
    finished = run_nightshift("run", scripted_task(responses), "--workspace", workspace, "--artifacts", own)

    assert finished.exit_code == 0, finished.stderr
    assert "20000" in result_of(finished, 1)[0]
    for number in (2, 3):
        text, failed = result_of(finished, number)
        assert failed
        assert "this session has no result spill:" in text
    for number in (4, 5):
        text, failed = result_of(finished, number)
        assert failed, text
        assert "\n1\n2\n" not in text
    text, _ = result_of(finished, 6)
    assert "No such file" in text or "denied" in text.lower()


def test_a_spilled_result_is_in_the_export_without_secrets(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """The same bytes as in the folder, listed in the manifest, the key taken out of the middle."""
    key = "sk-a-very-secret-key-0123456789"
    workspace = make_repo({"long.txt": "x" * 79 + "\n"})
    command = f"seq 1 20000; echo 'key {key[:10]}''{key[10:]}'; seq 1 20000"
    reply = chat_reply(calls=[("call_1_0", "shell", json.dumps({"command": command}))])
    with ModelServer([reply, chat_reply("Done.")]) as server:
        model = {
            "provider": "openai",
            "model": "m",
            "base_url": server.url,
            "context_window": 50_000,
            "api_key_env": "MY_KEY",
        }
        task = scripted_task([], profile={"model": model})
        finished = run_nightshift("run", task, "--workspace", workspace, env={"MY_KEY": key})

    assert finished.exit_code == 0, finished.stderr
    kept = (finished.artifacts / "spill/call_1_0.txt").read_bytes()
    assert key.encode() not in kept
    assert b"[redacted MY_KEY]" in kept
    assert run_nightshift("session", "export", finished.artifacts, "--output", tmp_path / "s.zip").exit_code == 0
    for path in (tmp_path / "s.zip", finished.artifacts / "session.zip"):
        with zipfile.ZipFile(path) as archive:
            assert archive.read("spill/call_1_0.txt") == kept
            members = {each["path"] for each in json.loads(archive.read("manifest.json"))["members"]}
            assert "spill/call_1_0.txt" in members
            assert not any(key.encode() in archive.read(name) for name in archive.namelist())


@pytest.mark.parametrize(
    ("compaction", "spilled", "kept"),
    [
        ({}, False, 40_000),
        ({"spill_bytes": 39_999}, True, 8_000),
        ({"spill_bytes": 40_001}, False, 40_000),
        ({"spill_bytes": 30_000, "spill_head": 100, "spill_tail": 200}, True, 300),
        ({"spill_bytes": 30_000, "models": {"scripted": {"spill_bytes": 50_000}}}, False, 40_000),
        ({"spill_bytes": 60_000, "models": {"scripted": {"spill_bytes": 30_000}}}, True, 8_000),
    ],
)
def test_the_thresholds_of_the_profile_decide_what_is_spilled(
    compaction: dict[str, Any],
    spilled: bool,
    kept: int,
    run_nightshift: Nightshift,
    scripted_task: ScriptedTask,
    make_repo: MakeRepo,
) -> None:
    """Of one output of 40,000 bytes, in a window where they alone count."""
    model = {"provider": "scripted", "model": "scripted", "script": "task.script.yaml", "context_window": 1_000_000}
    command = "yes 12345678901234567890123456789012345678 2>/dev/null | head -c 40000; true"
    task = scripted_task([shell(command), DONE], profile={"model": model, "compaction": compaction})

    finished = run_nightshift("run", task, "--workspace", make_repo())

    assert finished.exit_code == 0, finished.stderr
    meta = finished.data_of("tool/result")[0]["meta"]
    assert (meta["truncated"], meta["bytes"] // 10) == (spilled, 4_000)
    text, _ = result_of(finished, 0)
    assert kept <= len(text) < kept + 300
