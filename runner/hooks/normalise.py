"""Makes texts of two runs comparable: what is known to differ, or declared volatile, becomes a placeholder.

Known are the paths of workspace, temporary folder and private home, ids of sessions and of background
processes. Declared patterns are matched in a process of their own that can be ended, so that a pattern which
takes too long is an error and stops nothing. Writes no events; no effect on the prefix cache.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
import warnings
from typing import TYPE_CHECKING

from runner.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

MAX_PATTERNS = 50
MAX_PATTERN = 1_000
"""Most declared patterns, and most characters of one."""

MAX_TEXT = 1_000_000
"""Characters of a text that declared patterns are looked for in; the rest stays as it is."""

SECONDS = 3.0
"""Time that all declared patterns may take on one text."""

VOLATILE = "<volatile>"
"""What stands for a match of a declared pattern."""

# Gets the patterns and what stands for a match, then texts. `-I` keeps environment and user packages out.
_MATCHER = """
import json, re, sys, warnings
warnings.simplefilter("ignore")
patterns, volatile = json.loads(sys.stdin.readline())
patterns = [re.compile(text) for text in patterns]
for line in sys.stdin:
    text = json.loads(line)
    for pattern in patterns:
        text = pattern.sub(lambda _: volatile, text)
    sys.stdout.write(json.dumps(text) + "\\n")
    sys.stdout.flush()
"""

_SESSION = r"session-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
_BACKGROUND = r"(?<=Started in the background as process )\d+(?=\.)"
# A path that only ends alike, or begins alike, is another one. Colours and escapes of JSON may stand before it.
_PATH_START = r"(?:(?<![\w.-])|(?<=[\d\[;]m)|(?<=\\[ntr]))"
_PATH_END = r"(?![\w-])(?!\.\w)"
_LONGEST_PATH = 4_096


def pattern_problem(text: str) -> str | None:
    """What is wrong with a declared pattern, None if nothing is."""
    if len(text) > MAX_PATTERN:
        return f"is longer than {MAX_PATTERN:,} characters: shorten it"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        return f"is no regular expression: {error}"
    if pattern.fullmatch("") is not None:
        return "matches the empty text, and so everywhere: let it match something"
    return None


def check_patterns(patterns: Sequence[str], texts: Iterable[str]) -> None:
    """Try declared patterns on recorded texts.

    Raises:
        ConfigError: CONFIG_INVALID, they take too long on one of them.
    """
    if not patterns:
        return
    with contextlib.closing(Normaliser(patterns)) as normaliser:
        for text in texts:
            normaliser.text(text, Places())


class Places:
    """Paths of one run that another run has elsewhere, with the placeholders that stand for them.

    They are learned from what a run is told about itself. ``current`` has the last path by its placeholder.
    """

    def __init__(self, workspace: str = "") -> None:
        self._names: dict[str, str] = {}
        self.current: dict[str, str] = {}
        self._pattern: re.Pattern[str] | None = None
        self._add({workspace: "<workspace>"})

    def learn(self, text: str) -> None:
        """Take the paths out of a run-time context, the text that ``agent.prompt.runtime_context`` makes."""
        found: dict[str, str] = {}
        for line in text.split("\n", 8)[:8]:
            if line.startswith("Workspace: "):
                found[line.removeprefix("Workspace: ")] = "<workspace>"
            elif line.startswith("Temporary folder: "):
                tmp = line.removeprefix("Temporary folder: ").partition(" ($TMPDIR)")[0]
                found |= {tmp: "<tmp>", f"{os.path.dirname(tmp)}/home": "<home>"}  # noqa: PTH120  # a text, not a path of ours
        self._add(found)

    def _add(self, found: dict[str, str]) -> None:
        usable = {path: name for path, name in found.items() if path.startswith("/") and 1 < len(path) < _LONGEST_PATH}
        self.current |= {name: path for path, name in usable.items()}
        if usable.keys() <= self._names.keys():
            return
        self._names |= usable
        longest_first = sorted(self._names, key=len, reverse=True)[:100]
        self._pattern = re.compile(_PATH_START + f"(?:{'|'.join(map(re.escape, longest_first))})" + _PATH_END)

    def replace(self, text: str) -> str:
        """``text`` with the placeholders."""
        if self._pattern is None:
            return text
        return self._pattern.sub(lambda match: self._names[match[0]], text)

    def moved(self, text: str, to: Places, *, in_json: bool = False) -> str:
        """``text`` with the paths that another run has in place of those of this one.

        Args:
            text: A text of this run.
            to: Places of the other one; what it does not have stays.
            in_json: The text is JSON, and paths stand in its strings.
        """
        if self._pattern is None:
            return text

        def moved(match: re.Match[str]) -> str:
            path = to.current.get(self._names[match[0]], match[0])
            return json.dumps(path, ensure_ascii=False)[1:-1] if in_json else path

        return self._pattern.sub(moved, text)


class Normaliser:
    """Replaces what is known to differ and what ``patterns`` match.

    Args:
        patterns: Regular expressions, as ``pattern_problem`` lets them pass.
        clock: Monotonic seconds.
    """

    def __init__(self, patterns: Sequence[str] = (), *, clock: Callable[[], float] = time.monotonic) -> None:
        self._patterns = list(patterns)
        self._clock = clock
        self._matcher: subprocess.Popen[bytes] | None = None

    def text(self, text: str, places: Places) -> str:
        """The comparable form of a text.

        Raises:
            ConfigError: CONFIG_INVALID, the declared patterns took too long on it.
        """
        text = re.sub(_BACKGROUND, "<process>", re.sub(_SESSION, "<session>", places.replace(text)))
        if not self._patterns or not text:
            return text
        return self._matched(text[:MAX_TEXT]) + text[MAX_TEXT:]

    def close(self) -> None:
        """End the process; may be called more than once."""
        matcher, self._matcher = self._matcher, None
        if matcher is not None:
            matcher.kill()
            for stream in (matcher.stdin, matcher.stdout):
                if stream is not None:
                    with contextlib.suppress(OSError):
                        stream.close()
            matcher.wait()

    def _matched(self, text: str) -> str:
        matcher = self._matcher or self._start()
        self._send(matcher, text)
        answer: str = json.loads(b"".join(self._answer(matcher)))
        return answer

    def _start(self) -> subprocess.Popen[bytes]:
        self._matcher = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _MATCHER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            start_new_session=True,  # a signal to the run's group is not for it
        )
        self._send(self._matcher, [self._patterns, VOLATILE])
        return self._matcher

    def _send(self, matcher: subprocess.Popen[bytes], value: object) -> None:
        if matcher.stdin is None:
            raise self._failed()
        try:
            matcher.stdin.write(json.dumps(value).encode() + b"\n")
            matcher.stdin.flush()
        except OSError as error:
            raise self._failed() from error

    def _answer(self, matcher: subprocess.Popen[bytes]) -> Iterator[bytes]:
        """The pieces of the next line."""
        import select

        if matcher.stdout is None:
            raise self._failed()
        descriptor, until = matcher.stdout.fileno(), self._clock() + SECONDS
        piece = b""
        while not piece.endswith(b"\n"):
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            left = until - self._clock()
            if left <= 0 or not poll.poll(left * 1000):
                raise self._failed(f"take over {SECONDS:g} s on one text")
            piece = os.read(descriptor, 1 << 16)
            if not piece:
                raise self._failed()
            yield piece

    def _failed(self, what: str = "could not be matched") -> ConfigError:
        self.close()
        return ConfigError(
            f"the patterns of normalisation {what}: {', '.join(map(repr, self._patterns))[:500]}",
            hint="make them simpler: no repetition of what repeats itself, and as few `.*` as possible",
        )
