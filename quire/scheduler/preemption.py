"""How a request gives its memory up: moved to the host, or computed again later."""

from __future__ import annotations

import enum

from quire.kvcache.manager import KVCacheManager
from quire.kvcache.move_cost import MoveCost
from quire.kvcache.swap import Held, SwappedKV, Swapper
from quire.scheduler.request import Request
from quire.scheduler.stats import SchedulerStats


class PreemptionMode(enum.StrEnum):
    AUTO = "auto"
    """Whichever is cheaper by the cost model; recompute without one."""
    RECOMPUTE = "recompute"
    SWAP = "swap"
    """Always, while the host tier has room."""


class PreemptionReason(enum.StrEnum):
    MEMORY = "memory"
    """A running sequence needed a block and there was none."""
    PRIORITY = "priority"
    """A waiting request of higher priority needed room."""
    LOST = "lost"
    """The step that was to bring its KV back was lost."""


class Preemption:
    """Decides between moving and recomputing, and does the moving."""

    def __init__(self, cache: KVCacheManager, mode: PreemptionMode = PreemptionMode.AUTO,
                 cost: MoveCost | None = None) -> None:
        self.swapper = None if cache.swap_tier is None else Swapper(cache, cache.swap_tier)
        self._mode = mode
        self._cost = cost

    def move_out(self, request: Request) -> SwappedKV | None:
        """The request's KV on its way to the host tier; None if it is to be computed again."""
        if self.swapper is None or self._mode is PreemptionMode.RECOMPUTE:
            return None
        held = [(seq.kv, seq.num_keepable) for seq in request.live if seq.row >= 0]
        if not held or not all(num_tokens > 0 for _, num_tokens in held):
            return None
        if self._mode is PreemptionMode.AUTO and not self._moving_is_cheaper(request, self.swapper, held):
            return None
        return self.swapper.out(held)

    def _moving_is_cheaper(self, request: Request, swapper: Swapper, held: list[Held]) -> bool:
        if self._cost is None:
            return False
        # The prompt is computed once for all of them.
        again = sum(max(0, num_tokens - request.num_prompt_tokens) for _, num_tokens in held)
        again += min(request.num_prompt_tokens, max(num_tokens for _, num_tokens in held))
        return self._cost.move(2 * swapper.num_bytes(held)) < self._cost.recompute(again)

    def count(self, request: Request, stats: SchedulerStats, reason: PreemptionReason) -> None:
        request.num_preemptions += 1
        stats.preemptions += 1
        if reason is PreemptionReason.PRIORITY:
            stats.preemptions_for_priority += 1
            request.counts.preemptions_for_priority += 1
        elif reason is PreemptionReason.LOST:
            stats.preemptions_for_loss += 1
            request.counts.preemptions_for_loss += 1
        else:
            stats.preemptions_for_memory += 1
            request.counts.preemptions_for_memory += 1
        if request.swapped is None:
            stats.preemptions_by_recompute += 1
        else:
            stats.preemptions_by_swap += 1
            request.counts.swaps_out += 1
            request.counts.swap_bytes += request.swapped.num_bytes
