"""When the context is compacted: before a request, cheapest layer first.

The only hook that moves the cached prefix. Pruning comes first and does just enough; a summary
follows when that is not enough; at last the oldest results shrink to their first line.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runner.agent.hook import Hook
from runner.compaction.prune import cut_text, first_line, prune_candidates, prune_result
from runner.compaction.summary import Summariser

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.agent.hook import RequestAccess
    from runner.agent.settings import CompactionSpec

RECENT_STEPS = 2
"""Results of the last two steps are never pruned."""


class CompactionHook(Hook):
    """Keeps occupancy under the threshold.

    Args:
        spec: Thresholds for the run's model.
        provider: Provider name, for the log.
        model: Model name, for the log.
        compact_at: Turns before whose first request the history is summarised in any case.
        new_id: Gives message and compaction ids.
    """

    def __init__(
        self,
        spec: CompactionSpec,
        *,
        provider: str,
        model: str,
        compact_at: tuple[int, ...],
        new_id: Callable[[], str],
    ) -> None:
        self._spec = spec
        self._compact_at = frozenset(compact_at)
        self._summariser = Summariser(spec, provider=provider, model=model, new_id=new_id)

    def before_request(self, access: RequestAccess, *, overflow: bool) -> bool:
        """Prune, then summarise, when the occupancy asks for it, the task does, or the provider did."""
        generation = access.projection.generation
        threshold = math.floor(self._spec.summary_at * access.window)
        manual = access.first_of_turn and access.turn in self._compact_at and not overflow
        if manual:
            self._summariser.compact(access)
        elif overflow or access.occupancy() >= threshold:
            self._prune(access, threshold, enough=not overflow)
            if (overflow or access.occupancy() >= threshold) and not self._summariser.compact(access):
                self._shrink(access, threshold)
        return access.projection.generation != generation

    def _prune(self, access: RequestAccess, threshold: int, *, enough: bool) -> None:
        spec = self._spec
        before = access.step - RECENT_STEPS
        for event in list(prune_candidates(access.projection.nodes, over=spec.prune_over, before_step=before)):
            if enough and access.occupancy() < threshold:
                return
            prune_result(event, lambda text: cut_text(text, spec.prune_head, spec.prune_tail), access.append)

    def _shrink(self, access: RequestAccess, threshold: int) -> None:
        """The last resort: the oldest results keep only their first line."""
        before = access.step - RECENT_STEPS
        for event in list(prune_candidates(access.projection.nodes, over=0, before_step=before)):
            if access.occupancy() < threshold:
                return
            prune_result(event, first_line, access.append)
