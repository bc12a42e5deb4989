"""From a validated call to the decision and the pair of events that records it.

Writes ``approval/asked`` and ``approval/decided``, one pair a call, through whoever appends them. It
caches nothing: what was approved once is asked again the next time. No effect on the prefix cache.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from runner.approvals.policy import judge
from runner.approvals.redirections import follow
from runner.record import record
from runner.session.events import ApprovalAsked, ApprovalDecided

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.approvals.policy import CallFacts, Decision, Judgement, Policy
    from runner.messages import JsonObject
    from runner.permission import Mode, Trust


@record
class Resolution:
    """The decision on one call and its events, in the order in which they are appended."""

    decision: Decision
    asked: ApprovalAsked
    decided: ApprovalDecided


def follow_links(path: str) -> str:
    """Where an absolute path leads on this machine now.

    Raises:
        OSError: That cannot be told.
        ValueError: The path can name no file.
    """
    return follow(path, os.readlink)


class Resolver:
    """Decides the calls of one run.

    Args:
        policy: The rules.
        workspace: Absolute path, links resolved.
        mode: The run's mode.
        trust: The run's trust.
        new_id: Gives approval ids.
    """

    def __init__(self, policy: Policy, *, workspace: str, mode: Mode, trust: Trust, new_id: Callable[[], str]) -> None:
        self._policy = policy
        self._digest = policy.digest
        self._workspace = workspace
        self._mode = mode
        self._trust = trust
        self._new_id = new_id

    def decide(self, facts: CallFacts) -> Decision:
        """The decision alone."""
        return self._judge(facts).decision

    def resolve(self, facts: CallFacts, *, call_id: str, justification: str | None = None) -> Resolution:
        """Decide one call.

        Args:
            facts: What the policy may look at.
            call_id: Id of the call in the log.
            justification: Why the call asks for more than the run's mode.
        """
        judgement = self._judge(facts)
        decision = judgement.decision
        approval = self._new_id()
        paths: JsonObject = {}
        if judgement.read:
            paths["read"] = list(judgement.read)
        if judgement.write:
            paths["write"] = list(judgement.write)
        escalation: JsonObject | None = None
        if facts.escalation is not None:
            escalation = {"mode": facts.escalation.value}
            if justification is not None:
                escalation["justification"] = justification
        asked = ApprovalAsked(
            id=approval,
            call_id=call_id,
            tool_name=facts.tool,
            command=facts.command,
            paths=paths or None,
            escalation=escalation,
            reason=justification,
        )
        return Resolution(
            decision, asked, self._decided(approval, "allowed-once" if decision.allowed else "rejected", decision.rule)
        )

    def _judge(self, facts: CallFacts) -> Judgement:
        # Links are followed to the end, as bash does when it opens the file of a redirection.
        return judge(
            self._policy,
            facts,
            workspace=self._workspace,
            mode=self._mode,
            trust=self._trust,
            resolve=follow_links,
        )

    def _decided(self, approval: str, outcome: str, rule: str | None) -> ApprovalDecided:
        return ApprovalDecided(id=approval, outcome=outcome, rule=rule, policy_digest=self._digest, by="policy")
