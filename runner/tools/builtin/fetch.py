"""``fetch_url``: one page of the web, fetched inside the sandbox.

What the profile's network lets commands reach, this reaches, and nothing else; with an allowlist through the
same proxy, which logs each decision. Offered only where ``tools.allow`` names it. Writes no events of its own.
Prefix cache: nothing beyond the fixed place in the tool table; results are appended.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from runner.approvals.policy import CallFacts
from runner.errors import ErrorCode, RunnerError
from runner.figures import counted
from runner.tools.builtin.files import WorkerTool, text_outcome

if TYPE_CHECKING:
    from runner.messages import JsonObject, ToolSchema
    from runner.tools.base import Invocation, ToolOutcome

BYTES = 2_000_000
"""Most bytes of a page that are read."""

SILENCE = 30.0
"""Seconds without a byte after which a server has failed."""

URL_CHARS = 4_000
"""Most characters of an address."""

FETCH_URL: ToolSchema = {
    "name": "fetch_url",
    "description": "Fetch a text page by HTTP GET. Reaches what the run's network allows.",
    "parameters": {
        "type": "object",
        "properties": {"url": {"type": "string"}},
        "required": ["url"],
        "additionalProperties": False,
    },
}


def _problem(url: str) -> str:
    """What is wrong with an address, nothing if it is one of the web."""
    wrong = "url: write http:// or https:// and a host, spaces and other characters percent-encoded"
    if len(url) > URL_CHARS or not url.isascii() or any(each <= " " for each in url):
        return wrong
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return wrong
    if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
        return wrong
    return "url: holds a user name or a password: leave it out" if "@" in parts.netloc else ""


class FetchUrl(WorkerTool):
    """Fetches pages.

    Args:
        executor: Where the worker runs.
    """

    schema: ToolSchema = FETCH_URL
    idempotent = True

    def is_concurrency_safe(self, arguments: JsonObject) -> bool:  # noqa: ARG002  # the same for all arguments
        """Pages may be fetched side by side."""
        return True

    def facts(self, arguments: JsonObject) -> CallFacts:
        """No path and no command; the address must be one.

        Raises:
            RunnerError: INVALID_ARGS, it is no address of the web.
        """
        problem = _problem(arguments["url"])
        if problem:
            raise RunnerError(problem, code=ErrorCode.INVALID_ARGS)
        return CallFacts("fetch_url")

    def execute(self, invocation: Invocation) -> ToolOutcome:
        """Fetch the page; a status that is no success is a failed call with the page."""
        url = invocation.arguments["url"]
        value = self.ask(invocation, "fetch", {"url": url, "path": url, "limit": BYTES, "seconds": SILENCE})
        if not isinstance(value, dict):
            return value
        head = f"{value['status']} {value['reason']}, {value['type']}, {counted(value['bytes'], 'byte')}"
        if value["url"] != url:
            head += f", redirected to {value['url']}"
        if value["cut"]:
            head += f"; only the first {BYTES:,} bytes are shown, the rest cannot be had by this tool"
        text = "(no text: fetch it with a command)" if value["text"] is None else value["text"]
        failed = ErrorCode.TOOL_FAILED if value["status"] >= 400 else None
        return text_outcome(f"{head}\n\n{text}", failed)
