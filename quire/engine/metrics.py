"""The engine's counters and gauges as one flat dict."""

from __future__ import annotations

from collections.abc import Sequence

from quire.executor.base import RankFacts
from quire.kernels.routing import LayerLoad
from quire.kvcache.swap import SwapStats
from quire.scheduler.scheduler import Scheduler
from quire.worker.memory import PoolSize


def flat_metrics(
    scheduler: Scheduler, pool: PoolSize, experts: Sequence[LayerLoad] = (), ranks: Sequence[RankFacts] = ()
) -> dict[str, int | float]:
    stats, cache = scheduler.stats, scheduler.cache
    used = sum(p.num_used for p in cache.pools)
    cached = sum(p.num_cached for p in cache.pools)
    total = sum(p.num_blocks for p in cache.pools)
    looked_up = cache.stats.prefix_query_tokens
    return {
        "steps": stats.steps,
        "prompt_tokens": stats.prompt_tokens,
        "output_tokens": stats.output_tokens,
        "recomputed_tokens": stats.recomputed_tokens,
        "preemptions": stats.preemptions,
        "preemptions_for_memory": stats.preemptions_for_memory,
        "preemptions_for_priority": stats.preemptions_for_priority,
        "preemptions_for_loss": stats.preemptions_for_loss,
        "preemptions_by_recompute": stats.preemptions_by_recompute,
        "preemptions_by_swap": stats.preemptions_by_swap,
        "forks": stats.forks,
        "requests_running": len(scheduler.running),
        "requests_waiting": len(scheduler.waiting),
        "requests_arriving": len(scheduler.arriving),
        "requests_compiling": len(scheduler.compiling),
        "requests_swapped": sum(request.swapped is not None for request in scheduler.waiting),
        "requests_finished": stats.requests_finished,
        "requests_aborted": stats.requests_aborted,
        "requests_failed": stats.requests_failed,
        "invariant_errors": stats.invariant_errors,
        "prefix_queries": cache.stats.prefix_queries,
        "prefix_query_tokens": looked_up,
        "prefix_hit_tokens": cache.stats.prefix_hit_tokens,
        "prefix_hit_rate": cache.stats.prefix_hit_tokens / looked_up if looked_up else 0.0,
        "kv_blocks_total": total,
        "kv_blocks_used": used,
        "kv_blocks_cached": cached,
        "kv_blocks_free": total - used - cached,
        "kv_blocks_evicted": cache.num_evicted,
        "kv_blocks_deduplicated": cache.stats.blocks_deduplicated,
        "copies_on_write": cache.stats.copies_on_write,
        "kv_pool_bytes": pool.num_bytes,
        **_tier_metrics(scheduler, pool),
        **{name: value for tier in cache.tiers for name, value in tier.metrics().items()},
        **({} if scheduler.speculator is None else scheduler.speculator.stats.flat()),
        **({} if scheduler.peer_metrics is None else scheduler.peer_metrics()),
        **_expert_metrics(experts),
        **{name: value for rank in ranks for name, value in _rank_metrics(rank).items()},
    }


def _rank_metrics(rank: RankFacts) -> dict[str, int | float]:
    """One of several: as it said with its last pulse."""
    return {
        f"rank_memory_bytes_{rank.index}": rank.memory,
        f"rank_steps_{rank.index}": rank.steps,
        f"rank_busy_seconds_{rank.index}": rank.busy_seconds,
        f"rank_waited_seconds_{rank.index}": rank.waited_seconds,
    }


def _expert_metrics(experts: Sequence[LayerLoad]) -> dict[str, int | float]:
    """Rows that went through each expert, all layers together; and how unevenly the layers' experts were used."""
    if not experts:
        return {}
    most = max(len(load.rows) for load in experts)
    busiest = [max(load.rows) * len(load.rows) / sum(load.rows) for load in experts if sum(load.rows)]
    return {
        "expert_imbalance": sum(busiest) / len(busiest) if busiest else 1.0,
        **{f"expert_rows_{expert}": sum(load.rows[expert] for load in experts if expert < len(load.rows))
           for expert in range(most)},
    }  # fmt: skip


def _tier_metrics(scheduler: Scheduler, pool: PoolSize) -> dict[str, int | float]:
    """Of the host tier; all 0 where there is none."""
    cache, swapper = scheduler.cache, scheduler.preemption.swapper
    swaps = SwapStats() if swapper is None else swapper.stats
    tier = cache.swap_tier
    return {
        "swaps_out": swaps.out,
        "swaps_in": swaps.back,
        "swap_blocks_out": swaps.blocks_out,
        "swap_blocks_in": swaps.blocks_in,
        "swap_bytes_out": swaps.bytes_out,
        "swap_bytes_in": swaps.bytes_in,
        "swap_space_full": swaps.full,
        "tier_hits": cache.stats.tier_hits,
        "tier_hit_tokens": cache.stats.tier_hit_tokens,
        "offloaded_blocks": cache.events.stats.blocks,
        "offload_bytes_out": cache.events.stats.bytes,
        "offload_bytes_in": cache.stats.bytes_fetched,
        "host_blocks_total": 0 if tier is None else tier.num_blocks * len(cache.groups),
        "host_blocks_used": 0 if tier is None else tier.num_used,
        "host_blocks_cached": 0 if tier is None else tier.num_cached,
        "fetches": scheduler.stats.fetches,
        "fetches_failed": scheduler.stats.fetches_failed,
        "transfers_under_way": len(cache.transfers.under_way),
        "transfers_failed": cache.transfers.stats.failed,
        "transfers_timed_out": cache.transfers.stats.timed_out,
        "kv_blocks_moving": cache.transfers.num_blocks,
        "kv_leases": len(cache.leases),
        "kv_leases_expired": cache.leases.num_expired,
        "kv_reservations": len(cache.reservations),
        "kv_reservations_quarantined": cache.reservations.num_quarantined,
        "swap_space_bytes": pool.num_host_blocks * pool.bytes_per_block,
    }
