"""The spike behind decision record 0002: CPU per event of two parsers of server-sent events.

The same chunks, cut as a server flushes them (one event a chunk) and as one burst, go through
httpx-sse and through a small parser that works on bytes. No network.

usage: spike_sse.py [--events N] [--rounds N]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import httpx
import httpx_sse
import orjson

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

EVENT = (
    b'data: {"id":"chatcmpl-7Wc984ZXgt9O4IMEdGY8tJBsvGAT5hLZ","created":1796050116,"model":"some-model","object":'
    b'"chat.completion.chunk","choices":[{"index":0,"delta":{"content":" capital"},"finish_reason":null}]}\n\n'
)


class Chunks(httpx.SyncByteStream):
    """A response body made of given pieces."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.pieces)


class EventParser:
    """The least a parser of this format does."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of each event that ``piece`` completes."""
        text = self._rest + piece
        if b"\r" in text:
            held = text.endswith(b"\r")
            *lines, self._rest = text[: -1 if held else None].replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
            self._rest += b"\r" if held else b""
        else:
            *lines, self._rest = text.split(b"\n")
        events = []
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line.startswith(b"data: ") else line[5:])
            elif not line and self._data:
                events.append(b"\n".join(self._data))
                self._data = []
        return events


def by_library(pieces: list[bytes]) -> int:
    """Parse with httpx-sse, events decoded to values."""
    response = httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Chunks(pieces))
    return sum(1 for event in httpx_sse.EventSource(response).iter_sse() if orjson.loads(event.data))


def by_us(pieces: list[bytes]) -> int:
    """Parse with our parser, events decoded to values."""
    parser = EventParser()
    return sum(1 for piece in pieces for data in parser.feed(piece) if orjson.loads(data))


def import_cost(module: str) -> float:
    """CPU milliseconds of importing ``module`` after httpx, in a fresh interpreter."""
    code = f"import httpx, time; t = time.process_time(); import {module}; print((time.process_time() - t) * 1e3)"
    return float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


def main() -> None:
    """Print one Markdown table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--events", type=int, default=2000)
    options.add_argument("--rounds", type=int, default=15)
    given = options.parse_args()
    stream = EVENT * given.events
    shapes = {
        "one event a chunk": [EVENT] * given.events,
        "64 KiB chunks": [stream[n : n + 65536] for n in range(0, len(stream), 65536)],
    }
    parsers: dict[str, Callable[[list[bytes]], int]] = {"httpx-sse": by_library, "own": by_us}
    print("| µs CPU per event | " + " | ".join(parsers) + " |\n|---|---|---|")
    for name, pieces in shapes.items():
        cells = []
        for parse in parsers.values():
            taken = []
            for _ in range(given.rounds):
                begun = time.process_time()
                assert parse(pieces) == given.events
                taken.append((time.process_time() - begun) / given.events * 1e6)
            cells.append(f"{statistics.median(taken):.1f} ({min(taken):.1f} to {max(taken):.1f})")
        print(f"| {name} | " + " | ".join(cells) + " |")
    cost = statistics.median(import_cost("httpx_sse") for _ in range(given.rounds))
    print(f"| import after httpx, ms | {cost:.1f} | 0 |")


if __name__ == "__main__":
    main()
