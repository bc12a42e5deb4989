"""An image that the agent reads: in the log by name, beside it once, in requests whole, and all of it checked."""

from __future__ import annotations

import base64
import hashlib
import json
import shutil
import struct
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import pytest

from runner.testing.model_server import ModelServer, chat_reply

if TYPE_CHECKING:
    from pathlib import Path

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask


def png(side: int = 4) -> bytes:
    """A grey square."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress((b"\0" + b"\x80" * side) * side)
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


CALLS = [
    ("c1", "read_file", json.dumps({"path": "src/one.png"})),
    ("c2", "read_file", json.dumps({"path": "src/a.txt"})),
    ("c3", "read_file", json.dumps({"path": "src/same.png"})),
]
REPLIES = [
    chat_reply("I look.", calls=CALLS),
    chat_reply("Again.", calls=[("c4", "read_file", json.dumps({"path": "src/one.png"}))]),
    chat_reply("A grey square."),
]


def run(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, **model: Any
) -> tuple[Finished, list[Any]]:
    """A run of three requests; returns it and the bodies the server got."""
    workspace = make_repo({"src/one.png": png(), "src/same.png": png(), "src/a.txt": "text\n"})
    with ModelServer(REPLIES) as server:
        settings = {"provider": "openai", "model": "some-model", "base_url": server.url, "context_window": 100_000}
        task = scripted_task([], profile={"model": {**settings, **model}})
        finished = run_nightshift("run", task, "--workspace", workspace, "--paranoid")
        bodies = [request.json() for request in server.requests]
    assert finished.exit_code == 0, finished.stderr
    return finished, bodies


def test_a_model_that_takes_images_gets_them_behind_the_results(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """Results stay together; every body begins like the one before, and can be rebuilt from log and media."""
    finished, bodies = run(run_nightshift, scripted_task, make_repo, images=True)

    data = png()
    digest = hashlib.sha256(data).hexdigest()
    block = {"type": "image", "mediaType": "image/png", "sha256": digest, "bytes": len(data)}
    results = [event["message"]["content"][0]["content"] for event in finished.data_of("tool/result")]
    assert results == [[block], [{"type": "text", "text": "text\n"}], [block], [block]]
    assert [path.name for path in (finished.artifacts / "media").iterdir()] == [f"{digest}.png"]
    assert (finished.artifacts / "media" / f"{digest}.png").read_bytes() == data

    roles = [message["role"] for message in bodies[2]["messages"]]
    start = roles.index("assistant")
    assert roles[start:] == ["assistant", "tool", "tool", "tool", "user", "assistant", "tool", "user"]
    shown = bodies[2]["messages"][start + 4]["content"]
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    assert [part.get("image_url", {}).get("url") for part in shown] == [None, url, None, url]
    assert "c1" in shown[0]["text"]
    assert "c3" in shown[2]["text"]
    assert bodies[2]["messages"][: len(bodies[1]["messages"])] == bodies[1]["messages"]

    verified = json.loads(run_nightshift("session", "verify", "--json", finished.artifacts).stdout)
    assert verified["requests"] == {"checked": 3, "notChecked": 0}
    assert f"media/{digest}.png" in verified["artifacts"]["checked"]
    for step, body in enumerate(bodies, 1):
        printed = run_nightshift("session", "request", finished.artifacts, "--step", str(step), "--json")
        assert json.loads(printed.stdout)["body"] == body
    with zipfile.ZipFile(finished.artifacts / "session.zip") as archive:
        assert archive.read(f"media/{digest}.png") == data
    assert run_nightshift("session", "verify", finished.artifacts / "session.zip").exit_code == 0


def test_a_model_that_takes_none_is_told_what_it_cannot_see(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo
) -> None:
    """That is so for every model of which nothing is known."""
    finished, bodies = run(run_nightshift, scripted_task, make_repo)

    texts = [message["content"] for message in bodies[1]["messages"] if message["role"] == "tool"]
    assert texts == [f"[image image/png of {len(png())} bytes, not shown]", "text\n", texts[0]]
    assert "base64" not in json.dumps(bodies)
    assert [event["dialect"] for event in finished.data_of("request/sent")] == ["openai-chat"] * 3


@pytest.mark.parametrize("damage", ["changed", "gone"])
def test_an_image_that_is_not_the_one_that_was_read_is_found(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path, damage: str
) -> None:
    """Other bytes are LOG_INVALID; without the file the log holds, and what could not be checked is listed."""
    finished, _ = run(run_nightshift, scripted_task, make_repo, images=True)
    copy = tmp_path / "copy"
    shutil.copytree(finished.artifacts, copy)
    (image,) = (copy / "media").iterdir()
    if damage == "changed":
        image.write_bytes(png(5))
    else:
        image.unlink()

    verified = run_nightshift("session", "verify", "--json", copy)

    if damage == "changed":
        assert verified.exit_code == 13
        assert image.name in json.loads(verified.stdout)["error"]["message"]
        assert run_nightshift("session", "request", copy, "--step", "2").exit_code == 13
        return
    value = json.loads(verified.stdout)
    assert verified.exit_code == 0
    assert value["requests"] == {"checked": 1, "notChecked": 2}
    assert f"media/{image.name}" in value["artifacts"]["notChecked"]
    missing = run_nightshift("session", "request", copy, "--step", "2")
    assert missing.exit_code == 13
    assert "is not beside the log" in missing.stderr


def test_a_fork_and_a_resumed_session_have_the_images(
    run_nightshift: Nightshift, scripted_task: ScriptedTask, make_repo: MakeRepo, tmp_path: Path
) -> None:
    """What was taken over can be sent again."""
    finished, _ = run(run_nightshift, scripted_task, make_repo, images=True)

    forked = run_nightshift("session", "fork", finished.artifacts, "--turn", "1", "--output", tmp_path / "fork")

    assert forked.exit_code == 0, forked.stderr
    (image,) = (tmp_path / "fork" / "media").iterdir()
    assert image.read_bytes() == png()
    verified = run_nightshift("session", "verify", "--json", "--allow-open", tmp_path / "fork")
    assert json.loads(verified.stdout)["requests"] == {"checked": 3, "notChecked": 0}
