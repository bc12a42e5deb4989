"""The spike behind decision record 0001: an asyncio loop against a synchronous one with threads.

Both do the same work for a step: serialise the history, stream one answer through httpx, parse its
events, run one ``sh -c``, append one line and ``fdatasync`` it. Measured in child processes, in turn:

- start: exec to the end of a run of one step, wall and CPU;
- CPU per step: the slope between a short and a long run (tool processes included);
- cancellation: SIGTERM while a read of a stream blocks, until the loop has noticed;
- sessions: many at once in one process against a model that takes its time.

usage: spike_loop.py [--rounds N] [--short N] [--long N] [--sessions N]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

HERE = Path(__file__).resolve().parent
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "shell",
            "description": "Run a shell command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]
PROMPT = [{"role": "system", "content": "You run tasks."}, {"role": "user", "content": "Do the steps."}]


# --- what both variants share --------------------------------------------------------------------


class Answer:
    """Folds the events of one streamed answer."""

    def __init__(self) -> None:
        self.text = ""
        self.calls: list[dict[str, Any]] = []
        self._rest = b""

    def feed(self, data: bytes) -> None:
        """Take raw bytes of the body."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                self._event(json.loads(line[6:]))

    def _event(self, event: dict[str, Any]) -> None:
        for choice in event["choices"]:
            delta = choice["delta"]
            self.text += delta.get("content") or ""
            for part in delta.get("tool_calls") or ():
                if part["index"] == len(self.calls):
                    self.calls.append({"id": part["id"], "name": part["function"]["name"], "arguments": ""})
                self.calls[part["index"]]["arguments"] += part["function"].get("arguments") or ""

    def message(self) -> dict[str, Any]:
        """The answer as it goes back into the history."""
        calls = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in self.calls
        ]
        return {"role": "assistant", "content": self.text or None, **({"tool_calls": calls} if calls else {})}


def body_of(messages: list[dict[str, Any]]) -> bytes:
    """One request body."""
    return json.dumps({"model": "mock", "stream": True, "tools": TOOLS, "messages": messages}).encode()


def append_line(descriptor: int, record: dict[str, Any]) -> None:
    """One durable line."""
    os.write(descriptor, json.dumps(record).encode() + b"\n")
    os.fdatasync(descriptor)


def result_of(call: dict[str, Any], output: bytes) -> dict[str, Any]:
    """A tool message."""
    return {"role": "tool", "tool_call_id": call["id"], "content": output.decode("utf-8", "replace")}


def block_command_line() -> None:
    """Keep httpx from importing its own command line, which costs as much as the rest of it."""
    sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]  # None is how an import is barred


# --- synchronous, threads ------------------------------------------------------------------------


def sync_session(context: ssl.SSLContext, url: str, log: Path, steps: int) -> None:
    """One session: at most ``steps`` model requests, each with its tool calls; a client of its own."""
    import httpx

    with httpx.Client(trust_env=False, timeout=60, verify=context) as client:
        sync_steps(client, url, log, steps)


def sync_steps(client: Any, url: str, log: Path, steps: int) -> None:
    """The steps of one session."""
    messages: list[dict[str, Any]] = list(PROMPT)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in range(steps):
        answer = Answer()
        with client.stream("POST", url, content=body_of(messages)) as response:
            for data in response.iter_raw():
                answer.feed(data)
        messages.append(answer.message())
        for call in answer.calls:
            done = subprocess.run(
                ["sh", "-c", json.loads(call["arguments"])["command"]],
                cwd=log.parent,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            messages.append(result_of(call, done.stdout))
        append_line(descriptor, messages[-1])
    os.close(descriptor)


def run_sync(url: str, steps: int, sessions: int, folder: Path) -> None:
    """All sessions, each in a thread when there is more than one."""
    block_command_line()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if sessions == 1:
        sync_session(context, url, folder / "0.jsonl", steps)
        return
    threads = [
        threading.Thread(target=sync_session, args=(context, url, folder / f"{n}.jsonl", steps))
        for n in range(sessions)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def cancel_sync(url: str) -> None:
    """Read a stream that never ends; SIGTERM shuts the socket down. Prints the time of the end."""
    block_command_line()
    import httpx

    with (
        httpx.Client(trust_env=False, timeout=60) as client,
        client.stream("POST", url, content=b"{}") as response,
    ):
        sock = response.extensions["network_stream"].get_extra_info("socket")
        signal.signal(signal.SIGTERM, lambda *_: sock.shutdown(socket.SHUT_RDWR))
        for data in response.iter_raw():
            if data:
                print("reading", flush=True)
        print(time.monotonic_ns(), flush=True)


# --- asyncio -------------------------------------------------------------------------------------


async def async_session(context: ssl.SSLContext, url: str, log: Path, steps: int) -> None:
    """The same session as a coroutine."""
    import httpx

    async with httpx.AsyncClient(trust_env=False, timeout=60, verify=context) as client:
        await async_steps(client, url, log, steps)


async def async_steps(client: Any, url: str, log: Path, steps: int) -> None:
    """The steps of one session; what blocks on the disk goes to a thread."""
    import asyncio

    messages: list[dict[str, Any]] = list(PROMPT)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for _ in range(steps):
        answer = Answer()
        async with client.stream("POST", url, content=body_of(messages)) as response:
            async for data in response.aiter_raw():
                answer.feed(data)
        messages.append(answer.message())
        for call in answer.calls:
            process = await asyncio.create_subprocess_exec(
                "sh",
                "-c",
                json.loads(call["arguments"])["command"],
                cwd=log.parent,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await process.communicate()
            messages.append(result_of(call, output))
        await asyncio.to_thread(append_line, descriptor, messages[-1])
    os.close(descriptor)


def run_async(url: str, steps: int, sessions: int, folder: Path) -> None:
    """All sessions as tasks of one loop."""
    block_command_line()
    import asyncio

    async def everything() -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        await asyncio.gather(*(async_session(context, url, folder / f"{n}.jsonl", steps) for n in range(sessions)))

    asyncio.run(everything())


def cancel_async(url: str) -> None:
    """Read a stream that never ends; SIGTERM cancels the task. Prints the time of the end."""
    block_command_line()
    import asyncio

    import httpx

    async def read() -> None:
        async with (
            httpx.AsyncClient(trust_env=False, timeout=60) as client,
            client.stream("POST", url, content=b"{}") as response,
        ):
            async for data in response.aiter_raw():
                if data:
                    print("reading", flush=True)

    async def everything() -> None:
        task = asyncio.ensure_future(read())
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        try:
            await task
        except asyncio.CancelledError:
            print(time.monotonic_ns(), flush=True)

    asyncio.run(everything())


# --- measuring -----------------------------------------------------------------------------------


def child(*arguments: str) -> dict[str, float]:
    """Run this file with ``arguments``; wall and CPU in ms, largest RSS in MB."""
    started = time.monotonic()
    process = subprocess.Popen([sys.executable, "-I", __file__, *arguments])
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{arguments} failed with {process.returncode}")
    return {
        "wall": (time.monotonic() - started) * 1e3,
        "cpu": (used.ru_utime + used.ru_stime) * 1e3,
        "rss": used.ru_maxrss / 1024,
    }


def serve_endless(listener: socket.socket) -> None:
    """Answer each connection with the head of a stream and one event, then nothing."""
    held = []
    while True:
        connection, _ = listener.accept()
        connection.recv(65536)
        connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: {}\n\n")
        held.append(connection)


def cancel_time(kind: str, url: str) -> float:
    """Milliseconds from SIGTERM to the end of the blocked read."""
    with subprocess.Popen(
        [sys.executable, "-I", __file__, f"cancel-{kind}", url], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.05)
        sent = time.monotonic_ns()
        process.send_signal(signal.SIGTERM)
        return (int(process.stdout.readline()) - sent) / 1e6


def measure(options: argparse.Namespace, reset: Callable[[int, float], None], url: str, endless: str) -> None:
    """Run everything in turn and print one Markdown table."""
    kinds = ("sync", "async")
    rows: dict[str, dict[str, list[float]]] = {kind: {} for kind in kinds}

    def note(kind: str, name: str, value: float) -> None:
        rows[kind].setdefault(name, []).append(value)

    def one(kind: str, steps: int, sessions: int = 1, latency: float = 0) -> dict[str, float]:
        reset(steps * sessions, latency)
        with tempfile.TemporaryDirectory() as folder:
            return child(f"run-{kind}", url, str(steps), str(sessions), folder)

    for _ in range(options.rounds):
        for kind in kinds:
            start, short, long = (one(kind, n) for n in (1, options.short, options.long))
            note(kind, "start, wall ms", start["wall"])
            note(kind, "start, CPU ms", start["cpu"])
            note(kind, "CPU per step, ms", (long["cpu"] - short["cpu"]) / (options.long - options.short))
            note(kind, "one session, RSS MB", long["rss"])
            for _ in range(5):
                note(kind, "cancellation, ms", cancel_time(kind, endless))
            many = one(kind, 10, options.sessions, latency=50)
            note(kind, f"{options.sessions} sessions of 10 steps, wall ms", many["wall"])
            note(kind, f"{options.sessions} sessions of 10 steps, CPU ms", many["cpu"])
            note(kind, f"{options.sessions} sessions of 10 steps, RSS MB", many["rss"])
    print("| | " + " | ".join(kinds) + " |\n|---|" + "---|" * len(kinds))
    for name in rows["sync"]:
        cells = [
            f"{statistics.median(rows[kind][name]):.1f} ({min(rows[kind][name]):.1f} to {max(rows[kind][name]):.1f})"
            for kind in kinds
        ]
        print(f"| {name} | " + " | ".join(cells) + " |")


def main() -> None:
    """Measure, or be the measured child."""
    children: dict[str, Callable[..., None]] = {"run-sync": run_sync, "run-async": run_async}
    if len(sys.argv) > 1 and sys.argv[1] in children:
        children[sys.argv[1]](sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5]))
        return
    if len(sys.argv) > 1 and sys.argv[1].startswith("cancel-"):
        {"cancel-sync": cancel_sync, "cancel-async": cancel_async}[sys.argv[1]](sys.argv[2])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--short", type=int, default=5)
    parser.add_argument("--long", type=int, default=100)
    parser.add_argument("--sessions", type=int, default=64)
    options = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve_endless, args=(listener,), daemon=True).start()
    mock = subprocess.Popen(
        [sys.executable, str(HERE / "peers" / "mock_model.py"), "--port", "0"], stdout=subprocess.PIPE, text=True
    )
    try:
        assert mock.stdout is not None
        found = re.search(r"http://\S+", mock.stdout.readline())
        assert found is not None
        base = found.group(0)

        def reset(steps: int, latency: float) -> None:
            request = urllib.request.Request(f"{base}/__reset?steps={steps}&latency={latency}", method="POST")
            urllib.request.urlopen(request, timeout=10).close()

        measure(
            options,
            reset,
            f"{base}/v1/chat/completions",
            f"http://127.0.0.1:{listener.getsockname()[1]}/",
        )
    finally:
        mock.terminate()
        mock.wait()


if __name__ == "__main__":
    main()
