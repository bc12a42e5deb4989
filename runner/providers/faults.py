"""What the status and the headers of a failed request mean, alike for every API. Pure."""

from __future__ import annotations

import contextlib
import math
from typing import TYPE_CHECKING

from runner.errors import ErrorCode, ProviderError
from runner.providers.address import call_hint, without_call

if TYPE_CHECKING:
    from collections.abc import Mapping


def retry_after(headers: Mapping[str, str], *, now: float) -> float | None:
    """Seconds the server asked to wait: ``retry-after-ms``, else ``retry-after`` in seconds or as a date.

    Args:
        headers: By lower-case name.
        now: Seconds since the epoch, for a date.
    """
    with contextlib.suppress(KeyError, ValueError):
        return _positive(float(headers["retry-after-ms"]) / 1000)
    value = headers.get("retry-after", "").strip()
    with contextlib.suppress(ValueError):
        return _positive(float(value))
    if value:
        from email.utils import parsedate_to_datetime

        with contextlib.suppress(ValueError, TypeError):
            return max(0.0, parsedate_to_datetime(value).timestamp() - now)
    return None


def _positive(value: float) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(value)
    return value


_NEVER = (400, 404, 413, 422)
"""The request itself is wrong, whatever the server says about another attempt."""

_TARGET_CHARACTERS = 200

_QUOTA_HINT = "the account has no balance or quota left"


def failure(
    status: int | None,
    message: str,
    *,
    kind: str,
    headers: Mapping[str, str],
    now: float,
    quota: bool = False,
    context: bool = False,
    credential: str = "model.api_key_env",
    base_url: str = "",
    call: str = "",
) -> ProviderError:
    """The error for an answer that is not a success, alike for every API.

    Args:
        status: HTTP status, or the one an error inside a stream stands for; None when it names none.
        message: What the server said.
        kind: The server's own code for it.
        headers: By lower-case name.
        now: Seconds since the epoch.
        quota: The account is out of money or quota: never retried.
        context: The request is too long for the model.
        credential: The setting that names the key, for hints.
        base_url: The setting of that name, for hints.
        call: The path that was added to it.
    """
    said = f"the model API {'reported an error' if status is None else f'answered {status}'}: {message}"
    if context:
        return ProviderError(said, code=ErrorCode.CONTEXT_EXHAUSTED, status=status, kind=kind)
    if quota or status == 402:
        return ProviderError(said, code=ErrorCode.PROVIDER_QUOTA, status=status, kind=kind, hint=_QUOTA_HINT)
    if status in (401, 403):
        return ProviderError(
            said, code=ErrorCode.PROVIDER_AUTH, status=status, kind=kind, hint=f"check the key in {credential}"
        )
    wished = headers.get("x-should-retry", "").strip().lower()
    if status in _NEVER:
        wished = "false"
    again = wished == "true" if wished in ("true", "false") else _passes(status)
    wait = retry_after(headers, now=now)
    if status == 429:
        return ProviderError(
            said, code=ErrorCode.PROVIDER_QUOTA, status=status, kind=kind, retryable=again, retry_after=wait
        )
    hint = None if status is None else _hint(status, headers, base_url, call)
    return ProviderError(said, status=status, kind=kind, retryable=again, retry_after=wait, hint=hint)


def _passes(status: int | None) -> bool:
    """Whether the same request may succeed later. An error without a status is the server's own."""
    return status is None or status in (408, 409, 429) or status >= 500


def _hint(status: int, headers: Mapping[str, str], base_url: str, call: str) -> str | None:
    if 300 <= status < 400 or status in (404, 405):
        hint = call_hint(base_url, call)
        if hint is not None:
            return hint
    if 300 <= status < 400:
        return f"redirects are not followed: set model.base_url to the final address{_target(headers, call)}"
    return {
        404: "check model.base_url and model.model",
        405: "check model.base_url",
        413: "the request is larger than the server takes",
    }.get(status)


def _target(headers: Mapping[str, str], call: str) -> str:
    """Where a redirect leads, without the call's path; and without credentials and query, which may repeat the key."""
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(headers.get("location", ""))
    except ValueError:
        return ""
    address = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    address = without_call(address, call) or address
    return f" ({address})" if parts.scheme and parts.netloc and len(address) <= _TARGET_CHARACTERS else ""
