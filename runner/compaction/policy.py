"""When the context is compacted: before a request, cheapest layer first.

Results are cut if that alone makes room; if not, the prefix stays as it is for the summary request, which the
provider then has cached. A summary that cannot be had leaves the oldest results with their first line. Writes
the events of ``prune`` and ``summary``.
Prefix cache: the only hook that moves the prefix. Each time it frees ``MARGIN`` more than it must, or
the next step would move it again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from runner import diagnostics
from runner.agent.hook import Hook
from runner.compaction.prune import apply_cut, cut_text, fewest, first_line, possible_cuts
from runner.compaction.summary import Summariser

if TYPE_CHECKING:
    from collections.abc import Callable

    from runner.agent.hook import RequestAccess
    from runner.agent.settings import CompactionSpec
    from runner.compaction.summary import Compacted

RECENT_STEPS = 2
"""Results of the last two steps are never pruned."""

MARGIN = 32
"""The part of the window, as its divisor, that is freed beyond what is needed: about what a few steps add."""


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
        """Compact when the occupancy asks for it, the task does, or the provider did."""
        generation = access.projection.generation
        if access.first_of_turn and access.turn in self._compact_at and not overflow:
            self.summarise(access)
        occupancy, threshold = access.occupancy(), self._spec.threshold(access.window)
        if overflow:
            # It was more than we took it for: all that should be free above the threshold has to be made free.
            self._make_room(access, max(occupancy, access.window) - threshold, summary_first=True)
        elif occupancy >= threshold:
            self._make_room(access, occupancy - threshold + 1, summary_first=False)
        return access.projection.generation != generation

    def summarise(self, access: RequestAccess) -> Compacted:
        """Replace the older part by a summary whatever the occupancy, and say what came of it."""
        done = self._summariser.compact(access)
        _say(done)
        return done

    def _make_room(self, access: RequestAccess, needed: int, *, summary_first: bool) -> None:
        if not summary_first and self._prune(access, needed):
            return
        done = self._summariser.compact(
            access,
            least=1 if summary_first else access.window // MARGIN,
            make_room=lambda: self._prune(access, access.window, enough=False),
        )
        _say(done)
        if not done.folded:
            self._cut(access, first_line, over=0, needed=needed, oldest=True)

    def _prune(self, access: RequestAccess, needed: int, *, enough: bool = True) -> bool:
        spec = self._spec
        return self._cut(
            access,
            lambda text: cut_text(text, spec.prune_head, spec.prune_tail),
            over=spec.prune_over,
            needed=needed,
            enough=enough,
        )

    def _cut(
        self,
        access: RequestAccess,
        cut: Callable[[str], str],
        *,
        over: int,
        needed: int,
        oldest: bool = False,
        enough: bool = False,
    ) -> bool:
        """Cut older results to free ``needed`` tokens and the margin; returns whether any was.

        Args:
            access: The loop.
            cut: Makes the cut form of a text.
            over: Code points of the shortest result that is left alone.
            needed: Tokens.
            oldest: Take the oldest results; without, the fewest.
            enough: Do nothing if that would not free ``needed``.
        """
        cuts = list(possible_cuts(access.projection.nodes, cut, over=over, before_step=access.step - RECENT_STEPS))
        if enough and sum(each.saved for each in cuts) < needed:
            return False
        wanted = needed + access.window // MARGIN
        taken = [] if oldest else fewest(cuts, wanted)
        for each in cuts if oldest else ():
            if wanted <= 0:
                break
            taken.append(each)
            wanted -= each.saved
        for each in taken:
            apply_cut(each, access.append)
        return bool(taken)


def _say(done: Compacted) -> None:
    if done.failure is not None:
        diagnostics.warning("no summary could be made", error=done.failure)
    elif done.folded:
        diagnostics.info("messages folded into a summary", messages=done.folded, before=done.before, after=done.after)
    else:
        diagnostics.info("nothing to compact", occupancy=done.before)
