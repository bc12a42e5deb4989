"""One page by HTTP, from inside the sandbox: what the network is to commands it is to this as well.

Where the profile has an allowlist, the variables name the runner's proxy, and a redirect is one more request to it.
Standard library only.
"""

from __future__ import annotations

import urllib.error
import urllib.request

from .places import Refusal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from http.client import HTTPResponse
    from typing import Any

_AGENT = "nightshift"
_TEXTS = ("text/", "application/json", "application/xml", "application/javascript")


_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPErrorProcessor,
    urllib.request.UnknownHandler,
    urllib.request.HTTPRedirectHandler,
)
"""All that takes part: neither files nor FTP, by a redirect either."""


def fetch(arguments: dict[str, Any]) -> dict[str, Any]:
    """``{status, reason, url, type, bytes, text, cut}``; ``text`` is null for what is none.

    Args:
        arguments: ``url``, ``limit`` (bytes that are read at most), ``seconds`` of silence.
    """
    headers = {"User-Agent": _AGENT, "Accept-Encoding": "identity"}
    request = urllib.request.Request(arguments["url"], headers=headers)  # noqa: S310  # handlers of the web only
    opener = urllib.request.OpenerDirector()
    for handler in _HANDLERS:
        opener.add_handler(handler())
    try:
        with opener.open(request, timeout=arguments["seconds"]) as response:
            return _page(response, arguments["limit"])
    except urllib.error.HTTPError as error:
        with error:
            decision = error.headers.get("Proxy-Status", "")
            if decision.startswith("nightshift;"):
                raise Refusal("DENIED", error.read(2_000).decode("utf-8", "replace").strip()) from error
            if error.code < 400:
                raise Refusal("IO", f"{arguments['url']}: {' '.join(error.reason.split())}") from error
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
