"""Verification: whether a log is what its writer wrote, and holds together.

Checks seqs, pairs, sources and surface, the seal chain, request bodies, the end of a fork's seed, the manifest
of an archive, artifacts against their digests, totals beside the log, and the subagents' logs. One pass,
bounded memory. The first broken line raises; what a log cannot prove is listed. The chain finds damage and
partial edits; only ``expect`` finds a full rewrite. No effect on the prefix cache.
"""

from __future__ import annotations

import hashlib
from collections import deque
from typing import TYPE_CHECKING, Protocol

import orjson

from runner.errors import LogError
from runner.figures import counted
from runner.record import field, mutable_record
from runner.session import codec
from runner.session.events import ArtifactWritten, LogSeal, RunEnd, SessionEndSeed, StepStart, TurnStart
from runner.session.header import CHAIN, is_chained
from runner.session.media import find_path, images_of, media_of
from runner.session.projection import message_of
from runner.session.rebuild import BodyCheck
from runner.session.store import MANIFEST_NAME, is_inside
from runner.session.structure import Structure
from runner.session.surface import Surface

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from runner.messages import ImageBlock, JsonObject
    from runner.session.events import Event
    from runner.session.rebuild import BodyDialect
    from runner.session.store import Files, Line, SessionSource

_MAX_MANIFEST = 64 * 1024 * 1024
_READ = 1024 * 1024
_OWN_RULES = frozenset((TurnStart, StepStart, SessionEndSeed, RunEnd, LogSeal, ArtifactWritten))


@mutable_record
class Verification:
    """What was verified. Counts are of this log alone, ``children`` have their own.

    ``chain``: ``sha256`` or ``none``. ``manifest``: ``ok`` or ``none``. ``state``: ``whole`` (ends as a run
    of ours ends), ``closed`` (no turn is open) or ``open``. ``digest`` is the SHA-256 of the whole lines.
    """

    session: str
    chain: str
    manifest: str = "none"
    state: str = "open"
    digest: str = ""
    lines: int = 0
    events: int = 0
    turns: int = 0
    steps: int = 0
    seals: int = 0
    last_seal_line: int | None = None
    requests_checked: int = 0
    requests_not_checked: int = 0
    artifacts_checked: list[str] = field(default_factory=list)
    artifacts_not_checked: list[str] = field(default_factory=list)
    totals_checked: list[str] = field(default_factory=list)
    totals_not_checked: list[str] = field(default_factory=list)
    dropped: str | None = None
    children: list[Verification] = field(default_factory=list)

    def as_json(self) -> JsonObject:
        """The value that ``session verify --json`` prints."""
        return {
            "session": self.session,
            "state": self.state,
            "chain": self.chain,
            "manifest": self.manifest,
            "digest": self.digest,
            "lines": self.lines,
            "events": self.events,
            "turns": self.turns,
            "steps": self.steps,
            "seals": self.seals,
            "lastSealLine": self.last_seal_line,
            "requests": {"checked": self.requests_checked, "notChecked": self.requests_not_checked},
            "artifacts": {"checked": self.artifacts_checked, "notChecked": self.artifacts_not_checked},
            "totals": {"checked": self.totals_checked, "notChecked": self.totals_not_checked},
            "dropped": self.dropped,
            "children": [child.as_json() for child in self.children],
        }


class Totals(Protocol):
    """Compares files that sum a log up with its events; see ``runner.artifacts.totals``."""

    def apply(self, event: Event) -> None:
        """Take one event into account."""
        ...

    def compare(self, result: Verification) -> None:
        """Compare, and say in ``result`` what was checked and what was not.

        Raises:
            LogError: LOG_INVALID, a file says something else than the log.
        """
        ...


def verify_session(
    source: SessionSource,
    *,
    expect: str | None = None,
    allow_open: bool = False,
    dialects: Mapping[str, BodyDialect] | None = None,
    totals: Callable[[SessionSource], Totals] | None = None,
) -> Verification:
    """Verify a session and its subagents.

    Args:
        source: The session.
        expect: Hex SHA-256 that the whole decoded log must have.
        allow_open: Accept a log of ours that does not end as a finished run does.
        dialects: Dialects by name, to rebuild request bodies; without them requests are not checked.
        totals: What compares the totals beside a log with it, made for each log; without it they are not checked.

    Raises:
        LogError: LOG_INVALID (or LOG_UNKNOWN_EVENT), with the first broken line where there is one.
    """
    sums = totals(source) if totals is not None else None
    watch = sums.apply if sums is not None else None
    reading = Reading(source, dialects or {}, watch=watch, pieces=False)
    result = reading.run()
    if is_chained(source.header) and result.state != "whole" and not allow_open:
        seal = "no seal" if result.last_seal_line is None else f"last seal at line {result.last_seal_line}"
        raise LogError(
            f"{source.name}: open, {counted(result.events, 'event')}, {seal}",
            hint="the run did not end properly; --allow-open verifies what is there",
        )
    if expect is not None and expect.lower() != result.digest:
        raise LogError(f"{source.name}: the digest is {result.digest}, expected {expect}")
    _check_manifest(source, result)
    _check_artifacts(source, reading.artifacts, result)
    _check_images(source, reading.images, result)
    if sums is not None:
        sums.compare(result)
    for name, child in source.children():
        if child.header["id"] != name:
            raise LogError(f"{child.name}: the log is of session {child.header['id']}, not {name}")
        result.children.append(verify_session(child, allow_open=allow_open, dialects=dialects, totals=totals))
    return result


class Reading:
    """One pass over the lines of a log, checking each.

    Args:
        source: The session.
        dialects: Dialects by name.
        watch: Gets every event behind its checks.
        pieces: Whether ``watch`` wants the deltas of packed rows as well.
    """

    def __init__(
        self,
        source: SessionSource,
        dialects: Mapping[str, BodyDialect],
        *,
        watch: Callable[[Event], None] | None = None,
        pieces: bool = True,
    ) -> None:
        self.artifacts: dict[str, ArtifactWritten] = {}
        self._pieces = pieces
        self._watch = watch
        self.images: dict[str, ImageBlock] = {}
        self._bodies = BodyCheck(dialects, self._image)
        self._source = source
        self._chained = is_chained(source.header)
        self._seed = source.header.get("seedLength", 0) if self._chained else 0
        self._lines = self._events = 0
        self._hash = hashlib.sha256()
        self._structure = Structure()
        self._surface = Surface()
        self._end = ""
        self._result = Verification(session=source.header["id"], chain=CHAIN if self._chained else "none")

    @property
    def seals(self) -> int:
        """Seals so far, all of which fit."""
        return self._result.seals

    @property
    def open_turn(self) -> int | None:
        """The turn that is open now."""
        return self._structure.turn

    def lines(self) -> Iterator[Line]:
        """Yield the lines, each behind its checks.

        Raises:
            LogError: As ``verify_session``.
        """
        try:
            with self._bodies:
                for line in self._source.lines():
                    self._line(line)
                    yield line
                self._check_seed()
        except LogError as error:
            raise self._source.located(error, self._lines) from None

    def _check_seed(self) -> None:
        if self._events < self._seed:
            raise LogError("the log ends inside what it took over from its parent")

    def run(self) -> Verification:
        """Check all lines; the result says nothing yet of what lies beside the log."""
        result = self._result
        deque(self.lines(), maxlen=0)
        result.lines, result.events = self._lines, self._events
        result.dropped = self._source.dropped
        result.digest = self._hash.hexdigest()
        result.turns, result.steps = self._structure.turns, self._structure.steps
        result.requests_checked, result.requests_not_checked = self._bodies.checked, self._bodies.not_checked
        result.state = self._state()
        return result

    def _line(self, line: Line) -> None:
        self._lines, data, record = line
        if self._lines > 1:
            event = codec.read_record(record, first=self._events)
            if isinstance(event, codec.ChunkRow):
                self._row(event)
            else:
                self._event(event, data)
        self._hash.update(data)
        self._hash.update(b"\n")

    def _row(self, row: codec.ChunkRow) -> None:
        self._events += row.count
        if row.seq < self._seed <= self._events:
            raise self._no_seed_end(self._seed - 1)
        self._structure.apply(row)
        self._end = ""
        if self._watch is not None and self._pieces:
            for event in row.events():
                self._watch(event)

    def _event(self, event: Event, line: bytes) -> None:
        self._events += 1
        kind = type(event)
        if self._chained:
            if kind in _OWN_RULES or self._events == self._seed:
                self._own_rules(event)
            else:
                self._end = ""
        span = self._surface.apply(event)
        self._structure.apply(event)
        if event.SURFACE:
            message = message_of(event)
            for image in images_of(message["content"] if message else None):
                path = find_path(image)
                if path is not None:
                    self.images[path] = image
        if kind in BodyCheck.KINDS:
            self._bodies.apply(event, len(line), span)
        elif isinstance(event, LogSeal):
            self._seal(event, line)
        elif isinstance(event, ArtifactWritten):
            self.artifacts[event.path] = event
        if self._watch is not None:
            self._watch(event)

    def _image(self, block: ImageBlock) -> bytes:
        with self._source.files() as files:
            return media_of(files)(block)

    def _own_rules(self, event: Event) -> None:
        """What holds in logs of ours beyond the shared vocabulary."""
        if isinstance(event, TurnStart) and event.turn != self._structure.turns + 1:
            before = counted(self._structure.turns, "turn")
            raise LogError(f"event {event.seq} (turn/start): turn {event.turn} follows {before}")
        if isinstance(event, StepStart) and event.step != self._structure.steps + 1:
            before = counted(self._structure.steps, "step")
            raise LogError(f"event {event.seq} (step/start): step {event.step} follows {before}")
        last = self._seed - 1  # a parent that is a fork itself brings an earlier session/end-seed with it
        if isinstance(event, SessionEndSeed) != (event.seq == last) and event.seq >= last:
            raise self._no_seed_end(event.seq)
        if isinstance(event, RunEnd):
            self._end = "ended"
        elif isinstance(event, LogSeal):
            self._end = "sealed" if self._end == "ended" else ""
        elif not (isinstance(event, ArtifactWritten) and self._end == "ended"):
            self._end = ""

    def _no_seed_end(self, seq: int) -> LogError:
        return LogError(f"event {seq}: the seed of {self._seed} events must end with session/end-seed")

    def _seal(self, event: LogSeal, line: bytes) -> None:
        if not self._chained:
            raise LogError("a seal stands in a log whose header has no chain")
        start = codec.seal_start(seq=event.seq, time=event.time, lines=event.lines)
        if line + b"\n" != start + event.sha256.encode() + codec.SEAL_END or event.lines != self._lines - 1:
            raise LogError("the seal is not in its form, or counts the wrong number of lines")
        sealed = self._hash.copy()
        sealed.update(start)
        if sealed.hexdigest() != event.sha256:
            since = (self._result.last_seal_line or 0) + 1
            raise LogError(f"the seal does not fit: a line from {since} to {self._lines} is not as it was written")
        self._result.seals += 1
        self._result.last_seal_line = self._lines

    def _state(self) -> str:
        if self._structure.turn is not None:
            return "open"
        if not self._chained:
            return "closed"
        header = self._source.header
        child = header.get("delegationDepth", 0) > 0 and self._result.last_seal_line == self._result.lines
        finished = self._end == "sealed" or child
        return "whole" if finished and self._result.dropped is None else "open"


# --- beside the log ----------------------------------------------------------------------------


def _check_manifest(source: SessionSource, result: Verification) -> None:
    """Compare an archive's members with its manifest; a log of ours must come with one."""
    if not source.is_export:
        return
    where = f"{source.path}: {MANIFEST_NAME}"
    with source.files() as files:
        size = files.size(MANIFEST_NAME)
        if size is None:
            if is_chained(source.header):
                raise LogError(f"{source.path}: the export has no {MANIFEST_NAME}")
            return
        if size > _MAX_MANIFEST:
            raise LogError(f"{where} is larger than {_MAX_MANIFEST // 1024 // 1024} MiB")
        listed = _read_manifest(files, where, result.session)
        for path, entry in listed.items():
            if files.size(path) is None:
                raise LogError(f"{where}: the member {path!r} is missing from the archive")
            if files.size(path) != entry[0] or digest_of(files, path) != entry[1]:
                raise LogError(f"{where}: the member {path!r} is not as it was exported")
        extra = sorted(set(files.paths()) - set(listed) - {MANIFEST_NAME})
    if extra:
        raise LogError(f"{where}: the archive's member {extra[0]!r} is not listed")
    result.manifest = "ok"


def _read_manifest(files: Files, where: str, session: str) -> dict[str, tuple[int, str]]:
    with files.open(MANIFEST_NAME) as stream:
        data = b"".join(codec.plain_chunks(stream))
    try:
        manifest = orjson.loads(data)
        listed = {entry["path"]: (entry["bytes"], entry["sha256"]) for entry in manifest["members"]}
        version, named = manifest["schemaVersion"], manifest["session"]
    except (ValueError, KeyError, TypeError) as error:
        raise LogError(f"{where} is malformed: {error!r}") from error
    if version != 1 or named != session or len(listed) != len(manifest["members"]):
        raise LogError(f"{where} is of another version or session, or lists a member twice")
    return listed


def _check_artifacts(source: SessionSource, written: Mapping[str, ArtifactWritten], result: Verification) -> None:
    with source.beside() as files:
        for path, event in sorted(written.items()):
            where = f"{source.name}: event {event.seq} (artifact/written)"
            if not is_inside(path):
                raise LogError(f"{where}: the path {path!r} leads out of the session")
            if files.size(path) is None:
                result.artifacts_not_checked.append(path)
            elif digest_of(files, path) != event.sha256 or files.size(path) != event.bytes:
                raise LogError(f"{where}: the file {path} is not as it was written")
            else:
                result.artifacts_checked.append(path)


def _check_images(source: SessionSource, images: Mapping[str, ImageBlock], result: Verification) -> None:
    """Compare the images that messages name with their digests, those that the log lists as artifacts apart."""
    with source.files() as files:
        media = media_of(files)
        for path, block in sorted(images.items()):
            if files.size(path) is None:
                if path not in result.artifacts_not_checked:
                    result.artifacts_not_checked.append(path)
            elif path not in result.artifacts_checked:
                try:
                    media(block)
                except LogError as error:
                    raise LogError(f"{source.name}: {error.message}") from None
                result.artifacts_checked.append(path)


def digest_of(files: Files, path: str) -> str:
    """Hex SHA-256 of a file of the session.

    Raises:
        LogError: LOG_INVALID, it cannot be read.
    """
    digest = hashlib.sha256()
    with files.open(path) as stream:
        while piece := stream.read(_READ):
            digest.update(piece)
    return digest.hexdigest()
