"""Takes known secrets out of text, once, where text enters the session, and finds them in files.

A secret is known by its value, never guessed by its looks. It is found as it is and in the forms it takes
on its way through programs: percent-encoded, JSON-escaped, in hex, and in base64 at any alignment, the last
two also cut into lines; whole lines of a longer one alone. Without secrets every method returns its argument
untouched; with some, a search for fixed bytes decides whether the text is looked at closely.
"""

from __future__ import annotations

import base64
import re
from typing import TYPE_CHECKING, Any, NamedTuple

from runner.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

MIN_BYTES = 6
"""A shorter secret would be found in ordinary text everywhere."""

LINE_CHARACTERS = 16
"""From this length on, a line of a secret with several lines (a private key) is a secret of its own."""

_BREAK = re.compile(r"(?:\\r|\r)?(?:\\n|\n)")
"""An end of a line, as it is or inside of JSON."""

_LONGEST_BREAK = 4
_ESCAPED = re.compile(r"%[0-9A-Fa-f]{2}|\\u[0-9A-Fa-f]{4}")
_MANY = 64

Json = Any


class _Form(NamedTuple):
    """One form of a secret.

    Attributes:
        name: Name of the secret.
        text: The form, without line ends; with small hex digits if those may be of either case.
        wrapped: Whether line ends may stand between any two characters.
        folded: Whether hex digits may be of either case.
        data: ``text`` in UTF-8, capital letters small if hex digits may be of either case.
    """

    name: str
    text: str
    wrapped: bool
    folded: bool
    data: bytes

    def pattern(self) -> str:
        """Source of the expression that finds it."""
        if self.wrapped:
            characters = (f"[{each}{each.upper()}]" if self.folded else re.escape(each) for each in self.text)
            return f"(?:{_BREAK.pattern})?".join(characters)
        if not self.folded:
            return re.escape(self.text)
        parts, at = [], 0
        for found in _ESCAPED.finditer(self.text):
            parts.append(re.escape(self.text[at : found.start()]))
            parts.append(f"{re.escape(found[0][: -_digits(found[0])])}(?i:{found[0][-_digits(found[0]) :]})")
            at = found.end()
        return "".join([*parts, re.escape(self.text[at:])])


def _digits(escape: str) -> int:
    return 2 if escape[0] == "%" else 4


class _Kind(NamedTuple):
    """The forms of one kind, each with its place among all forms.

    Attributes:
        wrapped: As in ``_Form``.
        folded: As in ``_Form``.
        forms: Places and bytes.
        doubtful: Those that begin with n or r, which may stand behind a backslash that has nothing to do with it.
    """

    wrapped: bool
    folded: bool
    forms: list[tuple[int, bytes]]
    doubtful: list[tuple[int, bytes]]

    def found(self, data: bytes) -> list[int]:
        """Places of the forms that may be in ``data``; one that is left out is certainly not there."""
        view = data
        broken = self.wrapped and (b"\n" in data or b"\\n" in data)
        if broken:
            view = data.translate(None, b"\r\n").replace(b"\\r", b"").replace(b"\\n", b"")
        if self.folded:
            view = view.lower()
        found = [place for place, form in self.forms if form in view]
        if broken:
            found += [place for place, form in self.doubtful if form in data and place not in found]
        return found


def _kinds(forms: Sequence[_Form]) -> list[_Kind]:
    kinds: dict[tuple[bool, bool], _Kind] = {}
    for place, form in enumerate(forms):
        kind = kinds.setdefault((form.wrapped, form.folded), _Kind(form.wrapped, form.folded, [], []))
        kind.forms.append((place, form.data))
        if form.wrapped and form.text[0] in "nr":
            kind.doubtful.append((place, form.data))
    return list(kinds.values())


class Redactor:
    """Replaces each form of each secret by ``[redacted NAME]``.

    Args:
        secrets: Values by the name that stands in their place.

    Raises:
        ConfigError: A value is shorter than ``MIN_BYTES`` bytes in UTF-8.
    """

    def __init__(self, secrets: Mapping[str, str]) -> None:
        forms: dict[tuple[str, bool, bool], _Form] = {}
        for name, secret in secrets.items():
            if len(secret.encode("utf-8", "surrogatepass")) < MIN_BYTES:
                raise ConfigError(
                    f"the secret {name} is shorter than {MIN_BYTES} bytes and cannot be kept out of the log",
                    hint="use a longer value, or do not name it as a secret",
                )
            for text, wrapped, folded in _forms(secret):
                data = text.encode("utf-8", "surrogatepass")
                form = _Form(name, text, wrapped, folded, data.lower() if folded else data)
                forms.setdefault((text, wrapped, folded), form)
        # Longest first, so that a form that begins like another one is replaced whole.
        self._forms = sorted(forms.values(), key=lambda form: len(form.text), reverse=True)
        self._kinds = _kinds(self._forms)
        self._shortest = min((len(form.text) for form in self._forms), default=0)
        self._patterns: dict[tuple[int, ...], re.Pattern[str]] = {}
        # Most characters that a secret takes, an end of a line behind each of them.
        self._reach = max(
            (len(form.text) * (1 + _LONGEST_BREAK if form.wrapped else 1) for form in self._forms), default=0
        )

    def text(self, text: str) -> tuple[str, int]:
        """``text`` without secrets, and how many were replaced."""
        search = self._search(text)
        if search is None:
            return text, 0
        pattern, mark = search
        return pattern.subn(mark, text)

    def holds(self, text: str) -> bool:
        """Whether ``text`` has a secret in it."""
        search = self._search(text)
        return search is not None and search[0].search(text) is not None

    def value(self, value: Json) -> tuple[Json, int]:
        """A JSON value whose strings, keys included, are without secrets; and how many were replaced."""
        if not self._forms:
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

    def scan(self, *, patch: bool = False) -> SecretScan:
        """For bytes that come in pieces and are only to be searched; ``patch`` ignores the marks of its lines."""
        return SecretScan(self, patch=patch)

    def _search(self, text: str) -> tuple[re.Pattern[str], Callable[[re.Match[str]], str]] | None:
        """What finds and what replaces the forms that may be in ``text``, None if there are none."""
        if not self._forms or len(text) < self._shortest:
            return None
        found = self._present(text.encode("utf-8", "surrogatepass"))
        return self._pattern(found) if found else None

    def _present(self, data: bytes) -> list[int]:
        """Places of the forms that may be in ``data``, in the order of the forms."""
        return sorted(place for kind in self._kinds for place in kind.found(data))

    def _pattern(self, found: Sequence[int]) -> tuple[re.Pattern[str], Callable[[re.Match[str]], str]]:
        key = tuple(found)
        pattern = self._patterns.get(key)
        if pattern is None:
            if len(self._patterns) >= _MANY:
                self._patterns.clear()
            pattern = self._patterns[key] = re.compile("|".join(f"({self._forms[index].pattern()})" for index in found))

        def mark(match: re.Match[str]) -> str:
            return f"[redacted {self._forms[key[(match.lastindex or 1) - 1]].name}]"

        return pattern, mark

    def _held(self, text: str) -> int:
        """How many characters at the end of ``text`` may be the beginning of a secret."""
        if not self._forms:
            return 0
        tail = text[-self._reach :]
        flat, starts = _unbroken(tail)
        views = {
            (False, False): tail,
            (False, True): _lower(tail),
            (True, False): flat,
            (True, True): _lower(flat),
        }
        held = 0
        for form in self._forms:
            beginning = _lower(form.text) if form.folded else form.text
            at = _beginning(views[False, form.folded], beginning)
            if at is not None:
                held = max(held, len(tail) - at)
            at = _beginning(views[True, form.folded], beginning) if form.wrapped else None
            if at is not None:
                held = max(held, len(tail) - starts(at))
        return held


def _lower(text: str) -> str:
    """ASCII letters only, so that no character changes its length."""
    return text.lower() if text.isascii() else _CAPITALS.sub(lambda found: found[0].lower(), text)


_CAPITALS = re.compile("[A-Z]+")


def _beginning(text: str, form: str) -> int | None:
    """Where ``text`` goes on to its end as ``form`` begins, at the earliest; the whole form does not count."""
    at = text.find(form[0], max(0, len(text) - len(form) + 1))
    while at >= 0:
        if form.startswith(text[at:]):
            return at
        at = text.find(form[0], at + 1)
    return None


def _unbroken(text: str) -> tuple[str, Callable[[int], int]]:
    """``text`` without line ends, not even the beginning of one at its end; and what maps its places back."""
    end = len(text)
    for half in ("\\r\\", "\\r", "\r", "\\"):
        if text.endswith(half):
            end -= len(half)
            break
    pieces: list[tuple[int, int]] = []  # where each piece begins in the flat text and in this one
    parts: list[str] = []
    at = size = 0
    for found in _BREAK.finditer(text, 0, end):
        pieces.append((size, at))
        parts.append(text[at : found.start()])
        size += found.start() - at
        at = found.end()
    pieces.append((size, at))
    parts.append(text[at:end])

    def place(flat: int) -> int:
        first, begins = next(piece for piece in reversed(pieces) if piece[0] <= flat)
        return begins + flat - first

    return "".join(parts), place


class StreamRedactor:
    """Redacts one text that comes in pieces. What may be the beginning of a secret waits for what follows.

    So does a secret that may turn out to be the beginning of a longer one, as a line of a private key is.

    Attributes:
        count: Secrets replaced so far.
    """

    def __init__(self, redactor: Redactor) -> None:
        self._redactor = redactor
        self._rest = ""
        self.count = 0

    def feed(self, piece: str) -> str:
        """The next piece; returns what can be shown now, perhaps nothing."""
        text = self._rest + piece
        held = len(text) - self._redactor._held(text)  # noqa: SLF001  # the two classes are one thing
        shown: list[str] = []
        at = 0
        search = self._redactor._search(text)  # noqa: SLF001  # likewise
        if search is not None:
            pattern, mark = search
            for found in pattern.finditer(text):
                if found.start() >= held:
                    if at > held:
                        held = self._sure(text, at)
                    if found.start() >= held:
                        break
                shown += (text[at : found.start()], mark(found))
                self.count += 1
                at = found.end()
            if at > held:
                held = self._sure(text, at)
        shown.append(text[at:held])
        self._rest = text[held:]
        return "".join(shown)

    def _sure(self, text: str, at: int) -> int:
        """Up to where ``text`` is sure when what was taken out up to ``at`` reached into what waited."""
        return len(text) - self._redactor._held(text[at:])  # noqa: SLF001  # likewise

    def finish(self) -> str:
        """The text is over: what still waited."""
        rest, count = self._redactor.text(self._rest)
        self._rest = ""
        self.count += count
        return rest


class SecretScan:
    """Looks for secrets in bytes that come in pieces; keeps no more than the longest secret of them.

    Attributes:
        found: Name of the first secret found, None so far.
    """

    def __init__(self, redactor: Redactor, *, patch: bool) -> None:
        self._redactor = redactor
        self._patch = patch
        self._rest = b""
        self.found: str | None = None
        # A character has up to four bytes, and each line of a patch a mark before it.
        self._reach = 5 * redactor._reach  # noqa: SLF001  # the two classes are one thing

    def feed(self, piece: bytes) -> str | None:
        """The next piece; returns ``found``."""
        if self._reach and self.found is None:
            data = self._rest + piece
            self.found = self._find(data)
            if self.found is None and self._patch:
                self.found = self._find(_LINE_MARK.sub(b"\n", data))
            self._rest = data[-self._reach :]
        return self.found

    def _find(self, data: bytes) -> str | None:
        redactor = self._redactor
        for place in redactor._present(data):  # noqa: SLF001  # likewise
            pattern, _ = redactor._pattern([place])  # noqa: SLF001  # likewise
            if pattern.search(data.decode("utf-8", "surrogateescape")):
                return redactor._forms[place].name  # noqa: SLF001  # likewise
        return None


_LINE_MARK = re.compile(rb"\n[-+ ]")


def _forms(secret: str) -> Iterator[tuple[str, bool, bool]]:
    """Every form of ``secret`` and of its long lines: text, whether it may be cut into lines, whether case is open."""
    yield from _forms_of(secret)
    lines = [line.strip() for line in secret.splitlines()]
    if len(lines) > 1:
        for line in lines:
            if len(line) >= LINE_CHARACTERS and not line.startswith("-----"):
                yield from _forms_of(line)


def _forms_of(secret: str) -> Iterator[tuple[str, bool, bool]]:
    import json
    from urllib.parse import quote, quote_plus

    raw = secret.encode("utf-8", "surrogatepass")
    texts = [secret, quote(raw, safe=""), quote(raw), quote_plus(raw)]
    for ascii_only in (True, False):
        escaped = json.dumps(secret, ensure_ascii=ascii_only)[1:-1]
        texts += (escaped, json.dumps(escaped, ensure_ascii=ascii_only)[1:-1])  # arguments are JSON inside JSON
    for text in texts:
        # The secret itself stays as it is, whatever in it looks like an escape.
        yield text, False, text != secret and _ESCAPED.search(text) is not None
    yield raw.hex(), True, True
    for offset in range(3):
        encoded = base64.b64encode(bytes(offset) + raw).decode("ascii")
        # Characters that also depend on what stands before or behind the secret are left out.
        sure = encoded[-(-8 * offset // 6) : 8 * (offset + len(raw)) // 6]
        yield sure, True, False
        yield sure.replace("+", "-").replace("/", "_"), True, False
