"""Addresses of model APIs and of proxies: what is wrong with one, and what to write in its place. Pure."""

from __future__ import annotations

import re

_LOCAL = re.compile(r"(localhost|127\.|10\.|192\.168\.|172\.(1[6-9]|2\d|3[01])\.|\[|[^./]*(:\d+)?(/|$))")
"""Hosts that rarely speak TLS: this machine, private networks, names without a dot."""


_LABEL = 63
"""Most characters between two dots of a host's name."""


def _labels(host: str) -> list[str]:
    return host.removesuffix(".").split(".")


def masked(address: str) -> str:
    """The address without what stands before an ``@``, which may be a password."""
    return re.sub(r"^([^/]*//)?[^/]*@", r"\1***@", address)


def address_problem(address: str, *, proxy: bool = False) -> str | None:
    """What is wrong with an address, and what to do; None if nothing is.

    Args:
        address: ``model.base_url``, or ``model.proxy``.
        proxy: Which of the two. Only a proxy may hold credentials, and only the other one a path.
    """
    if not address.isprintable() or " " in address:
        return "holds a space or a control character: take it out"
    scheme, separator, rest = address.partition("://")
    if not separator:
        bare = masked(address.lstrip("/"))
        return f"has no scheme: write {'http' if proxy or _LOCAL.match(bare) else 'https'}://{bare}"
    schemes = ("http",) if proxy else ("http", "https")
    if scheme.lower() not in schemes:
        return f"begins with {scheme}://: write {' or '.join(f'{each}://' for each in schemes)}"
    if scheme not in schemes:
        return f"has a scheme in capitals: write {scheme.lower()}://{masked(rest)}"
    host = rest.partition("/")[0]
    if "@" in host and not proxy:
        return "holds credentials: take them out, keys belong in model.api_key_env"
    if "?" in rest or "#" in rest:
        return "holds a query or a fragment: take it out"
    if proxy and rest.partition("/")[2]:
        return f"holds a path, which a proxy has not: write http://{masked(host)}"
    return _host_problem(address)


def _host_problem(address: str) -> str | None:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(address)
        if parts.port == 0:
            return "has the port 0: write the one the server listens on"
        if not parts.hostname:
            return "names no host: write for example http://127.0.0.1:8000/v1"
        if "[" not in parts.netloc and not all(0 < len(label) <= _LABEL for label in _labels(parts.hostname)):
            return "names a host that cannot be one: check dots, and what is between them"
    except ValueError as error:
        return f"is no address, {error}: write for example http://127.0.0.1:8000/v1"
    return None


def without_call(address: str, call: str) -> str | None:
    """The address of an API given with the path of a call (``/chat/completions``); None if it has none at its end."""
    bare = address.rstrip("/")
    return bare.removesuffix(call) if call and bare.endswith(call) else None


def call_hint(base_url: str, call: str) -> str | None:
    """What to do about a ``model.base_url`` that ends with the path of a call; None if it does not."""
    bare = without_call(base_url, call)
    return None if bare is None else f"model.base_url ends before {call}: set it to {bare}"
