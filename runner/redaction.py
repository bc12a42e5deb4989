"""Takes known secrets out of text, once, where text enters the session.

A secret is known by its value, never guessed by its looks. It is found as it is and in the forms it takes
on its way through programs: percent-encoded, JSON-escaped, in hex, and in base64 at any alignment, whole
lines of a longer one alone. Without secrets every method returns its argument untouched.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any

from runner.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

MIN_BYTES = 6
"""A shorter secret would be found in ordinary text everywhere."""

LINE_CHARACTERS = 16
"""From this length on, a line of a secret with several lines (a private key) is a secret of its own."""

Json = Any


class Redactor:
    """Replaces each form of each secret by ``[redacted NAME]``.

    Args:
        secrets: Values by the name that stands in their place.

    Raises:
        ConfigError: A value is shorter than ``MIN_BYTES`` bytes in UTF-8.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        names: dict[str, str] = {}
        for name, secret in secrets.items():
            if len(secret.encode("utf-8", "surrogatepass")) < MIN_BYTES:
                raise ConfigError(
                    f"the secret {name} is shorter than {MIN_BYTES} bytes and cannot be kept out of the log",
                    hint="use a longer value, or do not name it as a secret",
                )
            for form in _forms(secret):
                names.setdefault(form, name)
        self._names = names
        # Longest first, so that a form that begins like another one is replaced whole.
        ordered = sorted(names, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None
        self._longest = len(ordered[0]) if ordered else 0
        self._beginnings: frozenset[str] | None = None

    def text(self, text: str) -> tuple[str, int]:
        """``text`` without secrets, and how many were replaced."""
        if self._pattern is None:
            return text, 0
        return self._pattern.subn(self._mark, text)

    def holds(self, text: str) -> bool:
        """Whether ``text`` has a secret in it."""
        return self._pattern is not None and self._pattern.search(text) is not None

    def value(self, value: Json) -> tuple[Json, int]:
        """A JSON value whose strings, keys included, are without secrets; and how many were replaced."""
        if self._pattern is None:
            return value, 0
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            pairs = [(self.text(key), self.value(item)) for key, item in value.items()]
            return {key: item for (key, _), (item, _) in pairs}, sum(a + b for (_, a), (_, b) in pairs)
        if isinstance(value, list):
            items = [self.value(item) for item in value]
            return [item for item, _ in items], sum(count for _, count in items)
        return value, 0

    def stream(self) -> StreamRedactor:
        """For text that comes in pieces, which may cut a secret in two."""
        return StreamRedactor(self)

    def _mark(self, match: re.Match[str]) -> str:
        return f"[redacted {self._names[match[0]]}]"

    def _held(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a secret."""
        if self._pattern is None:
            return 0
        if self._beginnings is None:
            self._beginnings = frozenset(form[:length] for form in self._names for length in range(1, len(form)))
        for length in range(min(len(text), self._longest - 1), 0, -1):
            if text[-length:] in self._beginnings:
                return length
        return 0


class StreamRedactor:
    """Redacts one text that comes in pieces. What may be the beginning of a secret waits for what follows.

    Attributes:
        count: Secrets replaced so far.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._rest = ""
        self.count = 0

    def feed(self, piece: str) -> str:
        """The next piece; returns what can be shown now, perhaps nothing."""
        if self._redactor._pattern is None:  # noqa: SLF001  # the two classes are one thing
            return piece
        text, count = self._redactor.text(self._rest + piece)
        self.count += count
        held = self._redactor._held(text)  # noqa: SLF001  # likewise
        self._rest = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """The text is over: what still waited."""
        rest, self._rest = self._rest, ""
        return rest


def _forms(secret: str) -> Iterator[str]:
    """Every form of ``secret`` and of its long lines."""
    yield from _forms_of(secret)
    lines = [line.strip() for line in secret.splitlines()]
    if len(lines) > 1:
        for line in lines:
            if len(line) >= LINE_CHARACTERS and not line.startswith("-----"):
                yield from _forms_of(line)


def _forms_of(secret: str) -> Iterator[str]:
    import json
    from urllib.parse import quote, quote_plus

    raw = secret.encode("utf-8", "surrogatepass")
    yield secret
    for quoted in (quote(raw, safe=""), quote(raw), quote_plus(raw)):
        yield quoted
        yield re.sub("%[0-9A-F]{2}", lambda match: match[0].lower(), quoted)
    for ascii_only in (True, False):
        escaped = json.dumps(secret, ensure_ascii=ascii_only)[1:-1]
        yield escaped
        yield json.dumps(escaped, ensure_ascii=ascii_only)[1:-1]  # arguments are JSON inside JSON
    yield raw.hex()
    yield raw.hex().upper()
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + raw).decode("ascii")
        # Characters that also depend on what stands before or behind the secret are left out.
        sure = encoded[-(-8 * offset // 6) : 8 * (offset + len(raw)) // 6]
        yield sure
        yield sure.replace("+", "-").replace("/", "_")
