"""One page by HTTP, from inside the sandbox: what the network is to commands it is to this as well.

Where the profile has an allowlist, the variables name the runner's proxy, and a redirect is one more request to it.
Standard library only.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from urllib.parse import urlsplit

from .places import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from http.client import HTTPResponse
    from typing import Any

_AGENT = "nightshift"
_TEXTS = ("text/", "application/json", "application/xml", "application/javascript")


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects to http and https only, and says so."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        """The next request."""
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise Refusal("IO", f"the server redirects to {newurl[:200]!r}, which is no address of the web")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def fetch(arguments: dict[str, Any]) -> dict[str, Any]:
    """``{status, reason, url, type, bytes, text, cut}``; ``text`` is null for what is none.

    Args:
        arguments: ``url``, ``limit`` (bytes that are read at most), ``seconds`` of silence.
    """
    opener = urllib.request.build_opener(_Redirects())
    request = urllib.request.Request(arguments["url"], headers={"User-Agent": _AGENT, "Accept-Encoding": "identity"})
    try:
        with opener.open(request, timeout=arguments["seconds"]) as response:
            return _page(response, arguments["limit"])
    except urllib.error.HTTPError as error:
        with error:
            decision = error.headers.get("Proxy-Status", "")
            if decision.startswith("nightshift;"):
                raise Refusal("DENIED", error.read(2_000).decode("utf-8", "replace").strip()) from error
            return _page(error, arguments["limit"])  # type: ignore[arg-type]  # it is a response as well
    except urllib.error.URLError as error:
        reason = error.reason
        if isinstance(reason, OSError) and "Tunnel connection failed: 403" in str(reason):
            raise Refusal("DENIED", f"{arguments['url']} is not in sandbox.network.allow") from error
        raise Refusal("IO", f"{arguments['url']} cannot be read: {reason}") from error
    except (OSError, ValueError) as error:
        raise Refusal("IO", f"{arguments['url']} cannot be read: {error}") from error


def _page(response: HTTPResponse, limit: int) -> dict[str, Any]:
    kind = response.headers.get_content_type()
    data = response.read(limit + 1)
    text = None
    if kind.startswith(_TEXTS) or kind.endswith(("+json", "+xml")):
        encoding = response.headers.get_content_charset("utf-8")
        try:
            text = data[:limit].decode(encoding, "replace")
        except LookupError:
            text = data[:limit].decode("utf-8", "replace")
    return {
        "status": response.status,
        "reason": response.reason,
        "url": response.url,
        "type": kind,
        "bytes": min(len(data), limit),
        "text": text,
        "cut": len(data) > limit,
    }
