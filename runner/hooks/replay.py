"""Compares a run with the recording it plays, and ends it where it leaves the recording.

Every result of a call is compared with the recorded one, in order: its call, its error code, the SHA-256 of
its normalised text. Requests must come in the recorded order; whether their bodies are the same is counted.
Behind the first divergence no call is allowed and nothing is answered: the run ends with LOG_INVALID. Reads
``request/*``, messages, ``tool/*``; writes nothing.
Prefix cache: no effect; where it denies, the run ends.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from runner.agent.hook import Hook
from runner.errors import LogError, RunnerError
from runner.hooks.normalise import Normaliser, Places
from runner.messages import text_of
from runner.neutral import neutral_line
from runner.session import events as ev
from runner.session.projection import message_of
from runner.session.surface import Surface
from runner.tools.pipeline import Denial

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from runner.agent.hook import StepStarting, TurnOver
    from runner.messages import JsonObject, Message
    from runner.providers.recording import Recording
    from runner.tools.pipeline import PreparedCall

_BEFORE, _AFTER = 60, 140
"""Characters of an excerpt before and behind the first difference."""


class _Mark(NamedTuple):
    """Something both runs must show, in the same order: a request, or the result of a call.

    Attributes:
        turn: Its turn.
        step: Its step.
        what: ``request`` or ``result``.
        name: The purpose of the request, or the tool.
        call_id: The call, None for a request.
        arguments: What the tool was called with.
        error: Error code of the result, None without.
        text: Normalised text of the result.
        sha256: Of that text, or of the body.
        alike: Digest of the normalised request.
        spill: Digest of the whole text of a result that was cut, None if it was not.
    """

    turn: int
    step: int
    what: str
    name: str
    call_id: str | None = None
    arguments: str = ""
    error: str | None = None
    text: str = ""
    sha256: str = ""
    alike: bytes = b""
    spill: str | None = None


class _Side:
    """One of the two runs, folded event by event."""

    def __init__(self, normaliser: Normaliser, workspace: str = "") -> None:
        self._normaliser = normaliser
        self.places = Places(workspace)
        self._surface = Surface()
        self._digests: list[bytes] = []
        self._header = b""
        self._hash = hashlib.sha256()
        self._hashed: int | None = None
        self._calls: dict[str, ev.ToolCall] = {}

    def apply(self, event: ev.Event) -> _Mark | None:
        """Fold one event; returns what it shows.

        Raises:
            LogError: A message breaks a rule of the log.
            ConfigError: A declared pattern takes too long.
        """
        if isinstance(event, ev.RequestHeaderEvent):
            self._use_header(event)
        elif isinstance(event, ev.RequestSent):
            return self._request(event) if event.attempt == 1 else None
        elif isinstance(event, ev.ToolCall):
            self._calls[event.call_id] = event
        elif event.SURFACE:
            return self._message(event)
        return None

    def _use_header(self, event: ev.RequestHeaderEvent) -> None:
        header: JsonObject = {**event.header}
        config = header.get("config")
        if isinstance(config, dict):
            header["config"] = {key: value for key, value in config.items() if key != "provider"}
        self._header = _digest(header)
        self._hashed = None

    def _request(self, event: ev.RequestSent) -> _Mark:
        if self._hashed is None:
            self._hash, self._hashed = hashlib.sha256(self._header), 0
        for digest in self._digests[self._hashed :]:
            self._hash.update(digest)
        self._hashed = len(self._digests)
        return _Mark(
            event.turn, event.step, "request", event.purpose, sha256=event.sha256, alike=self._hash.copy().digest()
        )

    def _message(self, event: ev.Event) -> _Mark | None:
        message = message_of(event)
        if message is None:
            return None
        if message["source"].get("plugin") == "runtime":
            self.places.learn(text_of(message["content"]))
        content = self._normalised(message["content"])
        span = self._surface.apply(event)
        digest = _digest([message["role"], content])
        if span is None:
            self._digests.append(digest)
        else:
            self._digests[span.start : span.end] = [digest]
            self._hashed = None
        if not isinstance(event, ev.ToolResult) or span is not None:
            return None
        text = _result_text(content)
        call_id = str(event.message["source"].get("callId"))
        call = self._calls.pop(call_id, None)
        spill = (event.meta or {}).get("spill")
        return _Mark(
            event.turn,
            event.step,
            "result",
            "" if call is None else call.name,
            call_id,
            "" if call is None else self._normaliser.text(call.arguments, self.places),
            None if event.error is None else str(event.error.get("code")),
            text,
            hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest(),
            spill=spill.get("sha256") if isinstance(spill, dict) else None,
        )

    def _normalised(self, value: Any) -> Any:
        """A JSON value with every string in its comparable form."""
        if isinstance(value, str):
            return self._normaliser.text(value, self.places)
        if isinstance(value, dict):
            return {key: self._normalised(inner) for key, inner in value.items()}
        return [self._normalised(inner) for inner in value] if isinstance(value, list) else value


def _digest(value: Any) -> bytes:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).digest()


def _result_text(content: Any) -> str:
    """What a result shows the model, as one text."""
    blocks = (inner for block in content if block["type"] == "tool-result" for inner in block["content"])
    return "\n".join(block["text"] if block["type"] == "text" else orjson.dumps(block).decode() for block in blocks)


def recorded_texts(recording: Recording) -> Iterator[str]:
    """The texts of all recorded results."""
    for record in recording.events:
        if record["type"] == ev.ToolResult.TYPE:
            yield _result_text(record["data"]["message"]["content"])


class ReplayCheck(Hook):
    """Sees what a run does and holds it against a recording.

    Args:
        recording: What the run plays.
        patterns: Declared patterns of what may differ.

    Attributes:
        results: Results that were the recorded ones.
        same: Requests whose bodies were the recorded ones byte for byte.
        alike: Requests that were the same apart from ids, paths and what is declared, those of ``same`` included.
        different: Requests whose bodies were others.
        divergence: The first divergence: ``{turn, step, callId, tool, what, expected, actual, expectedError,
            actualError, expectedText, actualText}``; None as long as there is none. ``what`` is ``result``,
            ``error``, ``missing``, ``extra`` or ``request``; ``expected`` and ``actual`` are SHA-256.
    """

    def __init__(self, recording: Recording, patterns: Sequence[str] = ()) -> None:
        self.results = self.same = self.alike = self.different = 0
        self.divergence: JsonObject | None = None
        self._recording = recording
        self._normaliser = Normaliser(patterns)
        self._recorded = _Side(self._normaliser, recording.cwd)
        self._run = _Side(self._normaliser)
        self._records = iter(recording.events)
        self._fault: RunnerError | None = None
        recording.move = self._move

    def observe(self, event: ev.Event) -> None:
        """Compare what the event shows."""
        if isinstance(event, ev.RunEnd):
            self.close()  # what was started for the comparison ends with the run
        if self._fault is not None:
            return
        try:
            mark = self._run.apply(event)
            if mark is not None and (mark.what == "result" or self._recording.requests):
                self._compare(mark)
        except RunnerError as error:  # what an observer raises is lost
            self._end_with(error)

    def guard(self, call: PreparedCall) -> Denial | None:
        """Allow nothing once the run left the recording."""
        del call
        return None if self._fault is None else Denial("the run left the recording it replays")

    def before_step(self, starting: StepStarting) -> None:
        """End the run when it left the recording."""
        del starting
        self._raise()

    def after_turn(self, over: TurnOver) -> Sequence[Message]:
        """End the run when it left the recording."""
        del over
        self._raise()
        return ()

    def finish(self) -> None:
        """Take what the recording still holds as missing; for a run that came to its end."""
        if self._fault is None:
            left = self.remaining()
            if left is not None:
                self._diverge("missing", left, None)

    def remaining(self) -> _Mark | None:
        """The next thing that the recording holds and the run did not show; None when all was seen."""
        return None if self._fault is not None else self._next()

    def close(self) -> None:
        """End the process that matches declared patterns."""
        self._normaliser.close()

    def _raise(self) -> None:
        if self._fault is not None:
            self.close()
            raise self._fault

    def _move(self, text: str, in_json: bool) -> str:
        """A text of the recording, with the paths of this run."""
        return self._recorded.places.moved(text, self._run.places, in_json=in_json)

    def _next(self) -> _Mark | None:
        for record in self._records:
            mark = self._recorded.apply(ev.event_from_record(record))
            if mark is not None:
                return mark
        return None

    def _compare(self, actual: _Mark) -> None:
        expected = self._next()
        if expected is None:
            if actual.what == "result" and self._recording.ends is None:
                self._diverge("extra", None, actual)
        elif expected.what != actual.what:
            what = "missing" if expected.what == "result" else "extra"
            self._diverge(what, *((expected, None) if what == "missing" else (None, actual)))
        elif actual.what == "request":
            self._compare_requests(expected, actual)
        elif (expected.call_id, expected.name, expected.arguments) != (actual.call_id, actual.name, actual.arguments):
            self._diverge("missing", expected, actual)
        elif expected.error != actual.error:
            self._diverge("error", expected, actual)
        elif expected.sha256 != actual.sha256 and (expected.spill is None or expected.spill != actual.spill):
            self._diverge("result", expected, actual)
        else:
            self.results += 1

    def _compare_requests(self, expected: _Mark, actual: _Mark) -> None:
        if expected.name != actual.name:
            self._diverge("request", expected, actual)
            return
        same = expected.sha256 == actual.sha256
        self.same += same
        self.different += not same
        self.alike += same or expected.alike == actual.alike

    def _diverge(self, what: str, expected: _Mark | None, actual: _Mark | None) -> None:
        where = actual or expected
        if where is None:
            return
        shown = _excerpts(expected, actual)
        self.divergence = {
            "turn": where.turn,
            "step": where.step,
            "callId": where.call_id,
            "tool": where.name if where.what == "result" else None,
            "what": what,
            "expected": None if expected is None else expected.sha256,
            "actual": None if actual is None else actual.sha256,
            "expectedError": None if expected is None else expected.error,
            "actualError": None if actual is None else actual.error,
            "expectedText": shown[0],
            "actualText": shown[1],
        }
        self._end_with(divergence_error(self.divergence))

    def _end_with(self, error: RunnerError) -> None:
        self._fault = error
        self._recording.diverged = error


def _excerpts(expected: _Mark | None, actual: _Mark | None) -> tuple[str | None, str | None]:
    """Both texts around their first difference, on one line each; a request is named by its purpose."""
    marks = [mark for mark in (expected, actual) if mark is not None]
    texts = [mark.text if mark.what == "result" else f"a request of purpose {mark.name}" for mark in marks]
    start = 0
    if len(texts) == 2:
        pairs = zip(*texts, strict=False)
        start = next((at for at, (left, right) in enumerate(pairs) if left != right), min(map(len, texts)))
    begin = max(0, start - _BEFORE)
    cut = [
        ("..." if begin else "")
        + neutral_line(text[begin : start + _AFTER])
        + ("..." if len(text) > start + _AFTER else "")
        for text in texts
    ]
    shown = iter(cut)
    return (None if expected is None else next(shown), None if actual is None else next(shown))


_SAID = {
    "result": "its result is not the recorded one",
    "error": "it ended in another way than recorded",
    "missing": "the recorded one is not there",
    "extra": "the recording has none there",
    "request": "another kind of request is made than recorded",
}


def _quoted(text: str | None) -> str:
    return "nothing" if text is None else f'"{text}"'


def divergence_error(divergence: JsonObject) -> LogError:
    """The error that ends a run which left its recording."""
    call = divergence["callId"]
    what = (
        "the request" if call is None else f"call {neutral_line(call)[:80]} ({neutral_line(divergence['tool'])[:40]})"
    )
    codes = f" ({divergence['expectedError'] or 'no error'}, now {divergence['actualError'] or 'no error'})"
    return LogError(
        f"the replay leaves the recording in turn {divergence['turn']}, step {divergence['step']}, {what}: "
        f"{_SAID[divergence['what']]}{codes if divergence['what'] == 'error' else ''}",
        hint=f"recorded: {_quoted(divergence['expectedText'])}; now: {_quoted(divergence['actualText'])}; "
        "what is volatile can be declared: --normalise, or model.replay_normalise",
        details=divergence,
    )


def with_check(hooks: Sequence[Hook], recording: Recording, patterns: Sequence[str]) -> list[Hook]:
    """``hooks`` and a check of the recording, unless they have one."""
    if any(isinstance(hook, ReplayCheck) for hook in hooks):
        return list(hooks)
    return [*hooks, ReplayCheck(recording, patterns)]
