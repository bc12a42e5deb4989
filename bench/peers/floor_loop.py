"""The least a Python agent loop can do: http.client, one ``sh -c`` a step, one synced JSON line an event.

Nothing but the standard library, no streaming, the whole history serialised anew for each request.

usage: floor_loop.py BASE_URL PROMPT LOG
"""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
from typing import Any
from urllib.parse import urlsplit

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a shell command",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def main(base: str, prompt: str, log: str) -> None:
    """Run one task to its end."""
    address = urlsplit(base)
    connection = http.client.HTTPConnection(str(address.hostname), address.port)
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def record(event: dict[str, Any]) -> None:
        os.write(descriptor, json.dumps(event, separators=(",", ":")).encode() + b"\n")
        os.fsync(descriptor)

    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You run tasks."},
        {"role": "user", "content": prompt},
    ]
    for message in messages:
        record(message)
    while True:
        body = json.dumps({"model": "mock", "tools": TOOLS, "messages": messages}, separators=(",", ":"))
        connection.request("POST", address.path + "/chat/completions", body, {"content-type": "application/json"})
        answer = json.load(connection.getresponse())["choices"][0]["message"]
        messages.append(answer)
        record(answer)
        if not answer.get("tool_calls"):
            print(answer["content"])
            return
        for call in answer["tool_calls"]:
            done = subprocess.run(
                ["sh", "-c", json.loads(call["function"]["arguments"])["command"]],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                check=False,
            )
            result = {"role": "tool", "tool_call_id": call["id"], "content": done.stdout.decode("utf-8", "replace")}
            messages.append(result)
            record(result)


if __name__ == "__main__":
    main(*sys.argv[1:4])
