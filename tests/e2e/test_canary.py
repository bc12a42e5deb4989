"""A random key in the runner's environment comes out of a run in no file and on no stream, whatever prints it."""

from __future__ import annotations

import base64
import io
import json
import os
import re
import urllib.parse
import zipfile
from typing import TYPE_CHECKING, Any

import pytest
import zstandard

from runner.testing.model_server import ModelServer, chat_events, json_reply, stream_reply

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from conftest import Finished, MakeRepo, Nightshift, ScriptedTask

NAME = "CANARY_KEY"
BACKENDS = ("bubblewrap", "landlock")


def new_key() -> str:
    """A key that looks different in every form: what URLs, JSON and base64 do to it shows."""
    return f'sk-{os.urandom(9).hex()}/+"\\{os.urandom(9).hex()}?>~='


def base64_forms(key: bytes, encode: Any) -> Iterator[str]:
    """The characters that depend on the key alone, at each of the three alignments."""
    for before in range(3):
        text = encode(b"\0" * before + key).decode()
        yield text[-(-before * 8 // 6) : (before + len(key)) * 8 // 6]


def forms(key: str) -> dict[str, str]:
    """Every form of a key that must not come out, worked out here from what the forms are."""
    data = key.encode()
    found = {
        "plain": key,
        "URL": urllib.parse.quote(key, safe=""),
        "URL form": urllib.parse.quote_plus(key),
        "JSON": json.dumps(key)[1:-1],
        "hex": data.hex(),
        "HEX": data.hex().upper(),
    }
    for name, encode in (("standard", base64.b64encode), ("URL-safe", base64.urlsafe_b64encode)):
        found |= {f"base64 {name} {at}": form for at, form in enumerate(base64_forms(data, encode))}
    return found


def opened(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """A file, and what is packed into it."""
    yield name, data
    if name.endswith(".zst"):
        stream = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data), read_across_frames=True)
        yield from opened(name.removesuffix(".zst"), stream.read())
    elif name.endswith(".zip"):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                yield from opened(f"{name}/{member}", archive.read(member))


def left_behind(finished: Finished, *folders: Path) -> dict[str, bytes]:
    """All that a run left: streams, artifacts, state folder; packed files also unpacked, JSON lines also decoded."""
    found = {"stdout": finished.stdout.encode(), "stderr": finished.stderr.encode()}
    for folder in (finished.artifacts, *folders):
        for path in folder.rglob("*"):
            if path.is_file():
                found |= opened(str(path), path.read_bytes())
    return found


def places(found: dict[str, bytes], key: str) -> list[tuple[str, str]]:
    """Form and file of each occurrence; a form counts behind a level of JSON as well."""
    hits = []
    for name, form in forms(key).items():
        for text in {form, json.dumps(form)[1:-1]}:
            flags = re.IGNORECASE if name.lower() == "hex" else 0
            pattern = re.compile(re.escape(text.encode()), flags)
            hits += [(name, file) for file, data in found.items() if pattern.search(data)]
    return hits


def shattered(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same answer in pieces of three characters."""
    result = []
    for event in events:
        (choice,) = event["choices"]
        delta = choice["delta"]
        functions = [call["function"] for call in delta.get("tool_calls", [])]
        holder, field = (functions[0], "arguments") if functions else (delta, "content")
        if "reasoning_content" in delta:
            field = "reasoning_content"
        text = holder.get(field) or ""
        for start in range(0, max(1, len(text)), 3):
            if text:
                holder[field] = text[start : start + 3]
            result.append(json.loads(json.dumps(event)))
    return result


PRINT = """
import base64, json, sys, time, urllib.parse
key = open("canary.txt").read()
data = key.encode()
for before in range(3):
    for encode in (base64.b64encode, base64.urlsafe_b64encode):
        print(encode(b"x" * before + data + b"yy").decode())
print(urllib.parse.quote(key, safe=""), urllib.parse.quote_plus(key), json.dumps(key), json.dumps(json.dumps(key)))
print(data.hex(), data.hex().upper())
print(base64.encodebytes(data * 3).decode())
for stream in (sys.stdout, sys.stderr):
    for character in key:
        stream.write(character)
        stream.flush()
        time.sleep(0.002)
"""

COMMANDS = (
    "cat canary.txt; echo; cat canary.txt >&2",
    "python3 print.py",
    "base64 < canary.txt; for before in '' x xy; do (printf %s $before; cat canary.txt) | base64 -w0; echo; done",
    "od -An -tx1 -v canary.txt | tr -d ' \\n'; (od -An -tx1 -v canary.txt | tr -d ' \\n') | tr a-f A-F",
    "head -c 20 canary.txt; sleep 0.3; tail -c +21 canary.txt",
    "seq 1 100000; cat canary.txt; seq 1 100000; cat canary.txt",
    "cat canary.txt; exit 7",
    "env; printenv | base64 -w0; cat /proc/self/environ /proc/[0-9]*/environ 2> /dev/null | base64 -w0",
)


def answers(key: str, where: str) -> Iterator[Any]:
    """The model's answers: its own words hold the key too, and it hands it to tools."""
    calls: list[tuple[str, dict[str, Any]]] = [
        *(("shell", {"command": command}) for command in COMMANDS),
        ("read_file", {"path": "canary.txt"}),
        ("grep", {"pattern": "sk-", "path": "."}),
        ("glob", {"pattern": "*.txt"}),
        ("shell", {"command": f"echo '{key}'"}),
        ("write_file", {"path": f"src/{key[:20]}", "content": key}),
        ("edit_file", {"path": "canary.txt", "edits": [{"old": key, "new": "x"}]}),
        ("todo", {"todos": [{"content": f"tell {key}", "status": "pending"}]}),
        ("read_file", {"path": f"{where}/no/{urllib.parse.quote(key)}"}),
    ]
    for number, (name, arguments) in enumerate(calls):
        text, thought = f"Now {key} and {urllib.parse.quote(key)}.", f"I know {key.encode().hex()}."
        call = (f"call_{number}", name, json.dumps(arguments))
        yield stream_reply(shattered(chat_events(text, reasoning=thought, calls=[call])))
    yield stream_reply(shattered(chat_events(f"The key is {key}, or {base64.b64encode(key.encode()).decode()}.")))


def run_with(
    key: str,
    run_nightshift: Nightshift,
    task: Path,
    workspace: Path,
    *options: str,
) -> Finished:
    """One run whose model is asked with the key."""
    return run_nightshift(
        "run", task, "--workspace", workspace, *options, env={NAME: key, "ALSO": f"x{key}x", "RUST_LOG": key}
    )


@pytest.fixture
def canary_task(scripted_task: ScriptedTask) -> Any:
    """A function that writes the task for one backend and one server; its check prints the key as well."""

    def write(backend: str, url: str) -> Path:
        model = {"provider": "openai", "model": "m", "base_url": url, "api_key_env": NAME, "context_window": 200_000}
        task: Path = scripted_task(
            [],
            profile={"model": model, "sandbox": {"backend": backend}},
            task={"checks": [{"name": "prints", "run": "python3 print.py; cat canary.txt | base64", "retries": 0}]},
        )
        return task

    return write


@pytest.mark.parametrize(("backend", "form"), [("bubblewrap", "text"), ("landlock", "stream-json")])
def test_the_key_comes_out_nowhere(
    backend: str, form: str, run_nightshift: Nightshift, canary_task: Any, make_repo: MakeRepo
) -> None:
    """Printed by tools in every form and in pieces, said and used by the model, printed by a check."""
    key = new_key()
    workspace = make_repo({"canary.txt": key, "print.py": PRINT, "src/x": ""})
    with ModelServer(list(answers(key, str(workspace)))) as server:
        finished = run_with(
            key,
            run_nightshift,
            canary_task(backend, server.url),
            workspace,
            *("--output-format", form, "--log-level", "debug", "--log-format", "json"),
        )
        sent = server.requests[0].headers["authorization"]

    found = left_behind(finished, run_nightshift.directory / "home")
    assert finished.exit_code == 0, finished.stderr
    assert places(found, key) == []
    assert sent == f"Bearer {key}"
    assert f"{NAME}=" not in json.dumps(finished.lines)
    results = finished.data_of("tool/result")
    assert len(results) == len(list(answers(key, ""))) - 1
    for number in (*range(7), len(COMMANDS)):
        assert f"redacted {NAME}" in json.dumps(results[number]), results[number]
    check = finished.data_of("check/end")[-1]
    assert check["exitCode"] == 0
    assert (workspace / "canary.txt").read_text() == key


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_other_value_comes_out_in_the_same_ways(
    backend: str, run_nightshift: Nightshift, canary_task: Any, make_repo: MakeRepo
) -> None:
    """The positive twin: the same run with a value that is no secret leaves each of its forms behind."""
    key, other = new_key(), new_key()
    workspace = make_repo({"canary.txt": other, "print.py": PRINT, "src/x": ""})
    with ModelServer(list(answers(other, str(workspace)))) as server:
        finished = run_with(key, run_nightshift, canary_task(backend, server.url), workspace)

    found = left_behind(finished)
    assert finished.exit_code == 0, finished.stderr
    assert {form for form, _ in places(found, other)} == set(forms(other))
    assert places(found, key) == []


@pytest.mark.parametrize("status", [400, 401, 429, 500])
def test_an_error_that_quotes_the_key_tells_nobody(
    status: int, run_nightshift: Nightshift, canary_task: Any, make_repo: MakeRepo
) -> None:
    """The endpoint repeats it in every form: error, hint, diagnostics and reports do not."""
    key = new_key()
    message = " ".join(forms(key).values())
    body = {"error": {"message": message, "type": key, "code": key, "param": key}}
    with ModelServer([json_reply(status, body, {"x-request-id": "r", "retry-after": "0"})] * 12) as server:
        finished = run_with(
            key,
            run_nightshift,
            canary_task("auto", server.url),
            make_repo({"canary.txt": key, "print.py": PRINT}),
            *("--log-level", "debug"),
        )

    assert finished.exit_code not in (0, 70), finished.stderr
    assert places(left_behind(finished, run_nightshift.directory / "home"), key) == []
