"""Scripted model server for loopback benchmarks.

Speaks OpenAI Chat Completions (POST .../chat/completions), OpenAI Responses (POST .../responses) and
Anthropic Messages (POST .../messages, .../messages/count_tokens), each streamed or not. For ``--steps N``
it answers the first N "main" requests with one shell call, picked from the request's own tool table, then
with a final text (or with the peer's own submit call, where its prompt or tool table asks for one). A main
request offers a tool that looks like a shell, or asks for a fenced shell block; anything else (titles,
summaries, probes) gets a short text and counts as a side request.

Control: GET /__stats; POST /__reset?steps=N&latency=MS&output_bytes=B clears the record. Only the parsing of one
JSON body stands between a request and its answer: what is compared is compared when /__stats is read.
Arrival times are CLOCK_MONOTONIC, the same in every process.

usage: mock_model.py [--port 8399] [--steps 5] [--latency MS] [--output-bytes B] [--command TEXT]
                     [--dump FILE] [--dump-bodies DIR]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import signal
import time
import urllib.parse
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Callable

JsonObject = dict[str, Any]

SHELL_NAMES = (
    "bash",
    "Bash",
    "exec_command",
    "shell_command",
    "shell",
    "run_shell_command",
    "local_shell",
    "execute_command",
    "run_command",
    "terminal",
    "execute",
)
COMMAND_KEYS = ("command", "cmd", "commands", "script", "input", "code")
FENCED_MARK = b"COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
"""Stands in the prompt of a peer that wants fenced blocks, and ends its run when a command prints it."""

FINAL = "All steps are done. The task is complete."


@dataclass
class Script:
    """What is answered, and what was asked."""

    steps: int
    latency: float
    output_bytes: int
    command: str | None = None
    reached: int = 0
    records: list[JsonObject] = field(default_factory=list)
    bodies: list[bytes] = field(default_factory=list)
    last_main: bytes | None = None

    def reset(self) -> None:
        """Forget all requests."""
        self.reached, self.records, self.bodies, self.last_main = 0, [], [], None

    def command_of(self, step: int) -> str:
        """The shell command of one step; printf is a builtin, so the command is one process."""
        if self.command is not None:
            return self.command.replace("{k}", str(step))
        command = f"echo step-{step} >> out.txt"
        if self.output_bytes > 1:
            command += f" && printf '%0{self.output_bytes - 1}d\\n' {step}"
        return command


@dataclass(frozen=True)
class Decision:
    """What one request is answered with. ``kind``: tool, local_shell, text."""

    who: str
    kind: str
    name: str | None = None
    arguments: Any = None
    text: str = ""


@dataclass(frozen=True)
class Numbers:
    """Tokens of one answer."""

    prompt: int
    cached: int
    output: int


def dumps(value: Any) -> bytes:
    """Compact JSON."""
    return orjson.dumps(value)


# --- comparing requests ----------------------------------------------------------------------------


def shared_prefix(one: bytes, other: bytes) -> int:
    """How many bytes the two begin with alike."""
    end = min(len(one), len(other))
    if one[:end] == other[:end]:
        return end
    same, different = 0, end
    while different - same > 1:
        middle = (same + different) // 2
        if one[same:middle] == other[same:middle]:
            same = middle
        else:
            different = middle
    return same


def without_cache_marks(value: Any) -> Any:
    """The value without ``cache_control``, which moves from request to request and is no part of a prompt."""
    if isinstance(value, dict):
        return {key: without_cache_marks(item) for key, item in value.items() if key != "cache_control"}
    if isinstance(value, list):
        return [without_cache_marks(item) for item in value]
    return value


def rendered(body: bytes) -> bytes:
    """The prompt in the order in which a provider renders it: tools, system, messages."""
    try:
        request = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body
    parts: list[Any] = [request.get("tools") or [], request.get("system") or request.get("instructions") or ""]
    given = request.get("input")
    parts += list(request.get("messages") or []) or (given if isinstance(given, list) else [given])
    return b"\n".join(dumps(without_cache_marks(part)) for part in parts)


def stats(script: Script) -> JsonObject:
    """The record, main requests compared with the one before."""
    before: bytes | None = None
    before_rendered = b""
    main = []
    for record, body in zip(script.records, script.bodies, strict=True):
        if record["kind"] != "main":
            continue
        now = rendered(body)
        if before is not None:
            same, same_rendered = shared_prefix(before, body), shared_prefix(before_rendered, now)
            record["lcp_bytes"] = same
            record["lcp_frac"] = round(same / max(1, len(body)), 5)
            record["kept_frac"] = round(same / max(1, len(before)), 5)
            record["prompt_bytes"] = len(now)
            record["prompt_lcp_frac"] = round(same_rendered / max(1, len(now)), 5)
            record["prompt_kept_frac"] = round(same_rendered / max(1, len(before_rendered)), 5)
        before, before_rendered = body, now
        main.append(record)
    compared = [record for record in main if "lcp_frac" in record]

    def mean(key: str) -> float | None:
        return round(sum(record[key] for record in compared) / len(compared), 4) if compared else None

    return {
        "steps": script.steps,
        "latency_ms": script.latency,
        "output_bytes": script.output_bytes,
        "main": len(main),
        "side": sum(record["kind"] == "side" for record in script.records),
        "other": sum(record["kind"] == "other" for record in script.records),
        "first_bytes": main[0]["bytes"] if main else None,
        "last_bytes": main[-1]["bytes"] if main else None,
        "total_main_bytes": sum(record["bytes"] for record in main),
        **{key: mean(key) for key in ("lcp_frac", "kept_frac", "prompt_lcp_frac", "prompt_kept_frac")},
        "mock_ms": round(sum(record["mock_us"] for record in script.records) / 1000, 2),
        "requests": script.records,
    }


# --- what a request offers -------------------------------------------------------------------------


def tools_of(request: JsonObject) -> dict[str, tuple[str, JsonObject]]:
    """Type and schema of each tool, by name."""
    found = {}
    for tool in request.get("tools") or []:
        if not isinstance(tool, dict):
            continue
        function = tool["function"] if isinstance(tool.get("function"), dict) else tool
        name = function.get("name") or (tool.get("type") if tool.get("type") in ("local_shell", "shell") else None)
        if name:
            found[name] = (tool.get("type", ""), function.get("parameters") or function.get("input_schema") or {})
    return found


def shell_of(tools: dict[str, tuple[str, JsonObject]]) -> str | None:
    """The tool that runs commands."""
    for name in SHELL_NAMES:
        if name in tools:
            return name
    for name, (_, schema) in tools.items():
        if any(key in (schema.get("properties") or {}) for key in COMMAND_KEYS[:3]):
            return name
    return None


def _type_of(schema: JsonObject) -> str:
    kind = schema.get("type", "string")
    return str(kind if isinstance(kind, str) else kind[0])


def arguments_for(schema: JsonObject, command: str, step: int) -> JsonObject:
    """Arguments that fit ``schema`` and run ``command``."""
    properties = schema.get("properties") or {}
    arguments: JsonObject = {}
    for key in COMMAND_KEYS:
        if key in properties:
            arguments[key] = ["bash", "-lc", command] if _type_of(properties[key]) == "array" else command
            break
    for key in schema.get("required") or []:
        if key in arguments:
            continue
        wanted = properties.get(key) or {}
        filler: JsonObject = {"boolean": False, "integer": 30, "number": 30, "array": [], "object": {}}
        arguments[key] = wanted["enum"][0] if wanted.get("enum") else filler.get(_type_of(wanted), f"step {step}")
    return arguments


def decide(script: Script, request: JsonObject, body: bytes) -> Decision:
    """What to answer."""
    tools = tools_of(request)
    choice = request.get("tool_choice")
    shell = shell_of(tools)
    marked = FENCED_MARK in body
    fenced = shell is None and not tools and marked
    barred = choice == "none" or (isinstance(choice, dict) and choice.get("type") == "none")
    if barred or (shell is None and not fenced):
        return Decision("side", "text", text="ok")
    if body != script.last_main:  # the very same body is another attempt and gets the same answer
        script.reached += 1
    script.last_main = body
    done = script.reached > script.steps
    if done and not marked:
        return _last(tools, script.reached)
    command = f"echo {FENCED_MARK.decode()}" if done else script.command_of(script.reached)
    if shell is None:
        language = "mswea_bash_command" if b"mswea_bash_command" in body else "bash"
        return Decision("main", "text", text=f"THOUGHT: step {script.reached}\n\n```{language}\n{command}\n```")
    kind, schema = tools[shell]
    if kind == "local_shell":
        return Decision("main", "local_shell", shell, command)
    return Decision("main", "tool", shell, arguments_for(schema, command, script.reached))


def _last(tools: dict[str, tuple[str, JsonObject]], step: int) -> Decision:
    """The end: a text, or the submit call of a loop that ends on one."""
    if "submit" not in tools:
        return Decision("main", "text", text=FINAL)
    schema = tools["submit"][1]
    arguments = arguments_for(schema, FINAL, step)
    arguments.update({key: FINAL for key in schema.get("properties") or {} if key in ("answer", "submission")})
    return Decision("main", "tool", "submit", arguments)


# --- answers, one builder a protocol ---------------------------------------------------------------


def pieces_of(text: str, count: int = 3) -> list[str]:
    """``text`` in about ``count`` pieces."""
    width = max(1, -(-len(text) // count))
    return [text[start : start + width] for start in range(0, len(text), width)] or [""]


def sse(value: Any, name: str | None = None) -> bytes:
    """One server-sent event."""
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + dumps(value) + b"\n\n"


def chat(request: JsonObject, answer: Decision, number: str, tokens: Numbers) -> bytes | list[bytes]:
    """OpenAI Chat Completions."""
    base: JsonObject = {
        "id": f"chatcmpl-{number}",
        "created": int(time.time()),
        "model": request.get("model", "mock"),
    }
    usage = {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.prompt + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
        "prompt_cache_hit_tokens": tokens.cached,
        "prompt_cache_miss_tokens": tokens.prompt - tokens.cached,
    }
    call = answer.kind != "text"
    arguments = json.dumps(answer.arguments) if call else ""
    finish = "tool_calls" if call else "stop"
    function = {"name": answer.name, "arguments": arguments}
    if not request.get("stream"):
        message: JsonObject = {"role": "assistant", "content": None if call else answer.text}
        if call:
            message["tool_calls"] = [{"id": f"call_{number}", "type": "function", "function": function}]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return dumps({**base, "object": "chat.completion", "usage": usage, "choices": [choice]})
    base["object"] = "chat.completion.chunk"

    def event(delta: JsonObject, reason: str | None = None) -> bytes:
        return sse({**base, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})

    if call:
        first = {"index": 0, "id": f"call_{number}", "type": "function", "function": {**function, "arguments": ""}}
        events = [event({"role": "assistant", "content": None, "tool_calls": [first]})]
        events += [
            event({"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}) for piece in pieces_of(arguments)
        ]
    else:
        events = [event({"role": "assistant", "content": ""})]
        events += [event({"content": piece}) for piece in pieces_of(answer.text)]
    events.append(event({}, finish))
    if (request.get("stream_options") or {}).get("include_usage"):
        events.append(sse({**base, "choices": [], "usage": usage}))
    return [*events, b"data: [DONE]\n\n"]


def _response_item(answer: Decision, number: str, arguments: str) -> JsonObject:
    if answer.kind == "tool":
        return {
            "type": "function_call",
            "id": f"fc_{number}",
            "call_id": f"call_{number}",
            "name": answer.name,
            "arguments": arguments,
            "status": "completed",
        }
    if answer.kind == "local_shell":
        action = {"type": "exec", "command": ["bash", "-lc", answer.arguments], "env": {}}
        return {
            "type": "local_shell_call",
            "id": f"lsh_{number}",
            "call_id": f"call_{number}",
            "status": "completed",
            "action": action,
        }
    return {
        "type": "message",
        "id": f"msg_{number}",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": answer.text, "annotations": []}],
    }


def responses(request: JsonObject, answer: Decision, number: str, tokens: Numbers) -> bytes | list[bytes]:
    """OpenAI Responses."""
    base: JsonObject = {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": request.get("model", "mock"),
        "output": [],
        "parallel_tool_calls": False,
        "tool_choice": "auto",
        "tools": [],
        "error": None,
        "incomplete_details": None,
        "instructions": None,
        "metadata": {},
    }
    arguments = json.dumps(answer.arguments) if answer.kind == "tool" else ""
    item = _response_item(answer, number, arguments)
    usage = {
        "input_tokens": tokens.prompt,
        "input_tokens_details": {"cached_tokens": tokens.cached},
        "output_tokens": tokens.output,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": tokens.prompt + tokens.output,
    }
    whole = {**base, "status": "completed", "output": [item], "usage": usage}
    if not request.get("stream"):
        return dumps(whole)
    events: list[bytes] = []

    def event(kind: str, **fields: Any) -> None:
        events.append(sse({"type": kind, "sequence_number": len(events), **fields}, kind))

    event("response.created", response=base)
    event("response.in_progress", response=base)
    if answer.kind == "tool":
        event("response.output_item.added", output_index=0, item={**item, "arguments": "", "status": "in_progress"})
        for piece in pieces_of(arguments):
            event("response.function_call_arguments.delta", output_index=0, item_id=item["id"], delta=piece)
        event("response.function_call_arguments.done", output_index=0, item_id=item["id"], arguments=arguments)
    elif answer.kind == "text":
        place = {"output_index": 0, "item_id": item["id"], "content_index": 0}
        event("response.output_item.added", output_index=0, item={**item, "content": [], "status": "in_progress"})
        event("response.content_part.added", **place, part={"type": "output_text", "text": "", "annotations": []})
        for piece in pieces_of(answer.text):
            event("response.output_text.delta", **place, delta=piece)
        event("response.output_text.done", **place, text=answer.text)
        event("response.content_part.done", **place, part=item["content"][0])
    else:
        event("response.output_item.added", output_index=0, item={**item, "status": "in_progress"})
    event("response.output_item.done", output_index=0, item=item)
    event("response.completed", response=whole)
    return events


def anthropic(request: JsonObject, answer: Decision, number: str, tokens: Numbers) -> bytes | list[bytes]:
    """Anthropic Messages."""
    call = answer.kind != "text"
    stop = "tool_use" if call else "end_turn"
    usage: JsonObject = {
        "input_tokens": tokens.prompt - tokens.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": tokens.cached,
        "output_tokens": tokens.output,
        "service_tier": "standard",
    }
    base: JsonObject = {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": request.get("model", "mock"),
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": usage,
    }
    block: JsonObject = {"type": "text", "text": answer.text}
    if call:
        block = {"type": "tool_use", "id": f"toolu_{number}", "name": answer.name, "input": answer.arguments}
    if not request.get("stream"):
        return dumps({**base, "content": [block], "stop_reason": stop})

    def event(kind: str, **fields: Any) -> bytes:
        return sse({"type": kind, **fields}, kind)

    empty = {**block, "input": {}} if call else {"type": "text", "text": ""}
    events = [
        event("message_start", message={**base, "usage": {**usage, "output_tokens": 1}}),
        event("content_block_start", index=0, content_block=empty),
        event("ping"),
    ]
    for piece in pieces_of(json.dumps(answer.arguments) if call else answer.text):
        delta = {"type": "input_json_delta", "partial_json": piece} if call else {"type": "text_delta", "text": piece}
        events.append(event("content_block_delta", index=0, delta=delta))
    return [
        *events,
        event("content_block_stop", index=0),
        event("message_delta", delta={"stop_reason": stop, "stop_sequence": None}, usage=usage),
        event("message_stop"),
    ]


PROTOCOLS: tuple[tuple[str, Callable[[JsonObject, Decision, str, Numbers], bytes | list[bytes]]], ...] = (
    ("/chat/completions", chat),
    ("/responses", responses),
    ("/messages", anthropic),
)


# --- a minimal HTTP/1.1 server ---------------------------------------------------------------------


class Http(asyncio.Protocol):
    """One connection."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.buffer = bytearray()
        self.head: tuple[str, str, dict[str, str]] | None = None
        self.arrived = 0
        self.transport: Any = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Handle every request that is whole."""
        self.buffer += data
        while self._step():
            pass

    def _step(self) -> bool:
        if self.head is None and not self._read_head():
            return False
        assert self.head is not None
        method, target, headers = self.head
        body = self._read_body(headers)
        if body is None:
            return False
        self.head = None
        encoding = headers.get("content-encoding", "")
        if encoding == "gzip":
            body = gzip.decompress(body)
        elif encoding == "deflate":
            body = zlib.decompress(body)
        elif encoding == "zstd":
            import zstandard

            body = zstandard.ZstdDecompressor().decompressobj().decompress(body)
        self._handle(method, target, body)
        return True

    def _read_head(self) -> bool:
        end = self.buffer.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *rest = bytes(self.buffer[:end]).decode("latin-1").split("\r\n")
        del self.buffer[: end + 4]
        self.arrived = time.monotonic_ns()
        fields = (line.partition(":") for line in rest)
        headers = {name.strip().lower(): value.strip() for name, _, value in fields}
        method, target, *_ = first.split(" ")
        self.head = (method, target, headers)
        if headers.get("expect", "").lower() == "100-continue":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def _read_body(self, headers: dict[str, str]) -> bytes | None:
        if "chunked" in headers.get("transfer-encoding", "").lower():
            return self._read_chunks()
        length = int(headers.get("content-length") or 0)
        if len(self.buffer) < length:
            return None
        body = bytes(self.buffer[:length])
        del self.buffer[:length]
        return body

    def _read_chunks(self) -> bytes | None:
        whole, position = bytearray(), 0
        while True:
            end = self.buffer.find(b"\r\n", position)
            if end < 0:
                return None
            length = int(bytes(self.buffer[position:end]).split(b";")[0], 16)
            if len(self.buffer) < end + 2 + length + 2:
                return None
            whole += self.buffer[end + 2 : end + 2 + length]
            position = end + 2 + length + 2
            if length == 0:
                del self.buffer[:position]
                return bytes(whole)

    def _send(self, body: bytes | list[bytes], status: str = "200 OK") -> None:
        if isinstance(body, list):  # events, each a chunk of its own
            head = (
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
                b"transfer-encoding: chunked\r\n\r\n"
            )
            chunks = b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in body)
            self.transport.write(head + chunks + b"0\r\n\r\n")
            return
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n".encode()
        self.transport.write(head + body)

    def _handle(self, method: str, target: str, body: bytes) -> None:
        script = self.script
        path, _, query = target.partition("?")
        if path == "/__stats":
            self._send(dumps(stats(script)))
            return
        if path == "/__reset":
            given = dict(urllib.parse.parse_qsl(query))
            script.steps = int(given.get("steps", script.steps))
            script.latency = float(given.get("latency", script.latency))
            script.output_bytes = int(given.get("output_bytes", script.output_bytes))
            script.reset()
            self._send(b"{}")
            return
        record = {
            "kind": "other",
            "method": method,
            "path": path,
            "bytes": len(body),
            "t": self.arrived / 1e9,
            "mock_us": 0,
        }
        script.records.append(record)
        script.bodies.append(body)
        build = next((build for tail, build in PROTOCOLS if path.endswith(tail)), None)
        if method != "POST" or build is None:
            self._other(method, path, body)
            return
        try:
            request = orjson.loads(body)
        except orjson.JSONDecodeError:
            self._send(b'{"error":{"message":"bad json"}}', "400 Bad Request")
            return
        before = script.last_main
        answer = decide(script, request, body)
        record.update(kind=answer.who, tool=answer.name, stream=bool(request.get("stream")))
        prompt = max(1, len(body) // 4)
        cached = shared_prefix(before, body) // 4 // 128 * 128 if before and answer.who == "main" else 0
        built = build(request, answer, f"{len(script.records):06d}", Numbers(prompt, min(cached, prompt), 20))
        record["mock_us"] = (time.monotonic_ns() - self.arrived) // 1000
        if script.latency > 0:
            asyncio.get_running_loop().call_later(script.latency / 1000, self._send, built)
        else:
            self._send(built)

    def _other(self, method: str, path: str, body: bytes) -> None:
        """What peers ask for beside answers."""
        if method == "POST" and path.endswith("/count_tokens"):
            self._send(dumps({"input_tokens": len(body) // 4}))
        elif path.endswith("/models"):
            model = {"id": "mock", "object": "model", "owned_by": "mock"}
            self._send(dumps({"object": "list", "data": [model]}))
        elif method in ("GET", "HEAD") and path == "/":
            self._send(b"" if method == "HEAD" else b"{}")
        else:
            self._send(b'{"error":{"message":"not found","type":"not_found"}}', "404 Not Found")


async def serve(options: argparse.Namespace) -> None:
    """Serve until interrupted; the address is printed."""
    script = Script(options.steps, options.latency, options.output_bytes, options.command)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Http(script), "127.0.0.1", options.port)
    print(f"listening on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    stop = asyncio.Event()
    for name in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(name, stop.set)
    await stop.wait()
    if options.dump:
        options.dump.write_bytes(orjson.dumps(stats(script), option=orjson.OPT_INDENT_2))
    if options.dump_bodies:
        options.dump_bodies.mkdir(parents=True, exist_ok=True)
        for number, (record, body) in enumerate(zip(script.records, script.bodies, strict=True)):
            (options.dump_bodies / f"{number:04d}-{record['kind']}.json").write_bytes(body)


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="shell calls before the final answer")
    parser.add_argument("--latency", type=float, default=0, metavar="MS", help="wait before each answer")
    parser.add_argument("--output-bytes", type=int, default=0, metavar="B", help="bytes each command prints")
    parser.add_argument("--command", help="use this command instead ({k} is the number of the step)")
    parser.add_argument("--port", type=int, default=8399, help="0: any free port")
    parser.add_argument("--dump", type=Path, metavar="FILE", help="write the statistics there at the end")
    parser.add_argument("--dump-bodies", type=Path, metavar="DIR", help="and every request body here")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
