"""What the reports say of a run beside its outcome and its usage, folded from the events.

``RunFold`` joins the three folds, so that one pass over a log (or an observer on a log being
written) serves ``result.json``, ``usage.json`` and ``summary.md``. Lists are capped: a report shows
the first and says how many more there are. Reads events only; no effect on the prefix cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from runner.artifacts.findings import Finding, finding_of
from runner.artifacts.usage import INPUT_BUCKETS, SUMMED_BUCKETS, UsageFold
from runner.outcome import OutcomeFold, is_new_result, result_call_id, result_code, result_state
from runner.record import field, mutable_record, record
from runner.session import events as ev

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from runner.messages import JsonObject
    from runner.providers.base import Prices

MOST_SHOWN = 100
"""Denied calls, written paths and the like that are kept for a report."""

_TEXT_KEPT = 20_000


@record
class DeniedCall:
    """One call that was refused: ``rule`` is the policy's rule id, None when no policy decided."""

    tool: str
    what: str
    code: str
    rule: str | None
    why: str


@record
class EscalatedCall:
    """One call that ran in a wider mode than the run's, and the rule that let it."""

    tool: str
    what: str
    mode: str
    rule: str | None


@mutable_record
class Facts:
    """What a log says about its run; everything may be missing in a log of another harness."""

    session_id: str | None = None
    started_at: int | None = None
    duration_ms: int = 0
    workspace: str | None = None
    task: str | None = None
    prompt: str = ""
    prompts: int = 0
    provider: str | None = None
    model: str | None = None
    trust: str | None = None
    versions: JsonObject = field(default_factory=dict)
    base: JsonObject = field(default_factory=dict)
    sandbox: JsonObject = field(default_factory=dict)
    mode: str | None = None
    config: JsonObject = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    findings_total: int = 0
    denied: list[DeniedCall] = field(default_factory=list)
    denied_total: int = 0
    escalated: list[EscalatedCall] = field(default_factory=list)
    escalated_total: int = 0
    writes: dict[str, None] = field(default_factory=dict)
    writes_total: int = 0
    limits: list[ev.LimitReached] = field(default_factory=list)
    redactions: int = 0
    retries: int = 0
    resumes: int = 0
    output_bytes: int = 0
    tool_ms: int = 0
    silence: float | None = None
    egress: dict[tuple[str, int, str], int] = field(default_factory=dict)
    egress_more: int = 0
    artifacts: dict[str, ev.ArtifactWritten] = field(default_factory=dict)

    def limit_table(self, usage: JsonObject) -> list[JsonObject]:
        """``limits[{name, used, max}]`` of the profile's limits that are set; times in seconds.

        Those on one wait or one call have no sum: ``tool`` is not among them, ``idle`` when it ended the run.
        """
        profile = self.config.get("profile")
        limits = profile.get("limits") if isinstance(profile, dict) else None
        if not isinstance(limits, dict):
            return []
        total = usage["usage"]
        known = [total[name] for name in SUMMED_BUCKETS if total[name] is not None]
        read = [total[name] for name in INPUT_BUCKETS if total[name] is not None]
        used: dict[str, float | None] = {
            "steps": usage["steps"],
            "turns": usage["turns"],
            "cost": usage["costUsd"],
            "tokens": sum(known) if known else None,
            "input_tokens": sum(read) if read else None,
            "output_tokens": total["output"],
            "tool_time": self.tool_ms / 1000,
            "output_bytes": self.output_bytes,
            "wall": self.duration_ms / 1000,
            **({} if self.silence is None else {"idle": self.silence}),
        }
        return [
            {"name": name, "used": value, "max": limits[name]}
            for name, value in used.items()
            if isinstance(limits.get(name), (int, float))
        ]


class FactsFold:
    """Folds events one by one into ``facts``.

    Args:
        header: Header of the log.
    """

    def __init__(self, header: JsonObject | None = None) -> None:
        header = header or {}
        self.facts = Facts(session_id=header.get("id"), started_at=header.get("createdAt"), workspace=header.get("cwd"))
        self._spans = 0
        self._cut = False
        self._span_start = self.facts.started_at
        self._last: int | None = self.facts.started_at
        self._calls: dict[tuple[int, int, str], str] = {}
        self._found: dict[tuple[int, int, str], Finding] = {}
        self._asked: dict[str, ev.ApprovalAsked] = {}
        self._rules: dict[str, tuple[str | None, str]] = {}
        self._by_type: dict[type[ev.Event], Callable[..., None]] = {
            ev.RunStart: self._run_start,
            ev.RunResume: self._run_resume,
            ev.UserMessage: self._user_message,
            ev.RequestContext: self._request_context,
            ev.SandboxModeEvent: self._mode,
            ev.ToolCall: self._tool_call,
            ev.ToolResult: self._tool_result,
            ev.ApprovalAsked: self._approval_asked,
            ev.ApprovalDecided: self._approval_decided,
            ev.LimitReached: self._limit,
            ev.Redaction: self._redaction,
            ev.LlmRetryStarted: self._retry,
            ev.ArtifactWritten: self._artifact,
            ev.SandboxEgress: self._egress,
            ev.SessionEndSeed: self._end_seed,
            ev.TurnEnd: self._turn_end,
        }

    def apply(self, event: ev.Event) -> None:
        """Take one event into account."""
        if event.time >= 0:
            if isinstance(event, ev.RunResume) and self._last is not None and self._span_start is not None:
                self._spans += self._last - self._span_start
                self._span_start, self._cut = event.time, False
            if not self._cut:
                self._last = event.time
            if self._span_start is None:
                self._span_start = event.time
            self.facts.duration_ms = round(self._spans + (self._last or 0) - self._span_start)
        rule = self._by_type.get(type(event))
        if rule is not None:
            rule(event)

    def _run_start(self, event: ev.RunStart) -> None:
        facts = self.facts
        facts.config, facts.base, facts.sandbox = event.config, event.base, event.sandbox
        facts.trust, facts.versions = event.trust, event.versions
        task = event.config.get("task")
        if isinstance(task, dict) and isinstance(task.get("name"), str):
            facts.task = task["name"]

    def _turn_end(self, event: ev.TurnEnd) -> None:
        # Repair closes what a kill cut off, and what follows may have been written long after.
        self._cut = event.reason.get("kind") == "interrupted"

    def _run_resume(self, event: ev.RunResume) -> None:
        self.facts.resumes += 1
        if event.config is not None:
            self.facts.config = event.config

    def _user_message(self, event: ev.UserMessage) -> None:
        if event.source.get("kind") != "user" or isinstance(event.surface_op, dict):
            return
        self.facts.prompts += 1
        if self.facts.prompts == 1:
            self.facts.prompt = _text(event.content)[: _TEXT_KEPT + 1]

    def _request_context(self, event: ev.RequestContext) -> None:
        self.facts.provider, self.facts.model = event.provider, event.model

    def _mode(self, event: ev.SandboxModeEvent) -> None:
        self.facts.mode = event.mode

    def _tool_call(self, event: ev.ToolCall) -> None:
        self._calls[event.turn, event.step, event.call_id] = event.name
        finding = finding_of(event)
        if finding is not None:
            self._found[event.turn, event.step, event.call_id] = finding

    def _tool_result(self, event: ev.ToolResult) -> None:
        if not is_new_result(event):
            return
        call_id = result_call_id(event)
        name = self._calls.pop((event.turn, event.step, call_id), "")
        finding = self._found.pop((event.turn, event.step, call_id), None)
        if finding is not None and result_state(event) == "ok":
            self.facts.findings_total += 1
            if len(self.facts.findings) < MOST_SHOWN:
                self.facts.findings.append(finding)
        rule, what = self._rules.pop(call_id, (None, ""))
        size, milliseconds = (event.meta or {}).get("bytes"), (event.meta or {}).get("durationMs")
        self.facts.output_bytes += size if isinstance(size, int) else 0
        self.facts.tool_ms += milliseconds if isinstance(milliseconds, int) else 0
        if result_state(event) != "denied":
            return
        self.facts.denied_total += 1
        if len(self.facts.denied) < MOST_SHOWN:
            message: Mapping[str, Any] = event.message
            why = _text(message.get("content")).strip()
            self.facts.denied.append(DeniedCall(name, what, result_code(event) or "", rule, why[:500]))

    def _approval_asked(self, event: ev.ApprovalAsked) -> None:
        self._asked[event.id] = event

    def _approval_decided(self, event: ev.ApprovalDecided) -> None:
        asked = self._asked.pop(event.id, None)
        if asked is None:
            return
        writes = (asked.paths or {}).get("write")
        writes = [path for path in writes if isinstance(path, str)] if isinstance(writes, list) else []
        what = asked.command if asked.command is not None else ", ".join(writes or _paths(asked.paths))
        if event.outcome != "allowed-once":
            self._rules[asked.call_id] = (event.rule, what[:500])
            return
        if asked.escalation is not None:
            self.facts.escalated_total += 1
            if len(self.facts.escalated) < MOST_SHOWN:
                mode = str(asked.escalation.get("mode"))
                self.facts.escalated.append(EscalatedCall(asked.tool_name, what[:500], mode, event.rule))
        for path in writes:
            if path not in self.facts.writes:
                self.facts.writes_total += 1
                if len(self.facts.writes) < MOST_SHOWN:
                    self.facts.writes[path] = None

    def _limit(self, event: ev.LimitReached) -> None:
        if event.name == "idle":
            self.facts.silence = event.used
        if len(self.facts.limits) < MOST_SHOWN:
            self.facts.limits.append(event)

    def _redaction(self, event: ev.Redaction) -> None:
        self.facts.redactions += event.count

    def _retry(self, _: ev.LlmRetryStarted) -> None:
        self.facts.retries += 1

    def _artifact(self, event: ev.ArtifactWritten) -> None:
        self.facts.artifacts[event.path] = event

    def _egress(self, event: ev.SandboxEgress) -> None:
        egress, key = self.facts.egress, (event.host, event.port, event.decision)
        if key in egress or len(egress) < MOST_SHOWN:
            egress[key] = egress.get(key, 0) + 1
        else:
            self.facts.egress_more += 1

    def _end_seed(self, _: ev.SessionEndSeed) -> None:
        """What a fork's parent did is not the fork's; what it was asked, and began with, still holds."""
        facts = self.facts
        for kept in (
            facts.findings,
            facts.denied,
            facts.writes,
            facts.limits,
            facts.artifacts,
            facts.egress,
            facts.escalated,
        ):
            kept.clear()
        facts.escalated_total = 0
        facts.denied_total = facts.writes_total = facts.redactions = facts.retries = facts.resumes = 0
        facts.findings_total = 0
        facts.output_bytes = facts.tool_ms = facts.duration_ms = facts.egress_more = 0
        facts.silence = None
        self._spans, self._span_start = 0, facts.started_at


def _paths(paths: JsonObject | None) -> list[str]:
    reads = (paths or {}).get("read")
    return [path for path in reads if isinstance(path, str)] if isinstance(reads, list) else []


def _text(content: Any) -> str:
    """All text in a list of blocks, that of tool results too."""
    parts: list[str] = []
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict) and isinstance(block.get("text"), str):
            parts.append(block["text"])
        elif isinstance(block, dict) and isinstance(block.get("content"), list):
            parts.append(_text(block["content"]))
    return "\n".join(parts)


class RunFold:
    """Outcome, usage and facts in one pass; ``apply`` may be an observer of a log.

    Args:
        header: Header of the log.
        prices: As for ``UsageFold``.
    """

    def __init__(self, header: JsonObject | None = None, *, prices: Prices | None = None) -> None:
        self.outcome = OutcomeFold()
        self.usage = UsageFold(header=header, prices=prices)
        self._facts = FactsFold(header)

    @property
    def facts(self) -> Facts:
        """What was seen so far."""
        return self._facts.facts

    def apply(self, event: ev.Event) -> None:
        """Take one event into account."""
        if type(event) is ev.AssistantChunk and event.chunk.get("type") != "usage":
            return  # most events of a log, one for each piece of an answer
        self.outcome.apply(event)
        self.usage.apply(event)
        self._facts.apply(event)

    @classmethod
    def of(
        cls, events: Iterable[ev.Event], header: JsonObject | None = None, *, prices: Prices | None = None
    ) -> RunFold:
        """The fold of a whole log."""
        fold = cls(header, prices=prices)
        for event in events:
            fold.apply(event)
        return fold
