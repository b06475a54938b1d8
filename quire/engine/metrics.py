"""The engine's counters and gauges as one flat dict."""

from __future__ import annotations

from quire.scheduler.scheduler import Scheduler
from quire.worker.memory import PoolSize


def flat_metrics(scheduler: Scheduler, pool: PoolSize) -> dict[str, int | float]:
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
        "requests_running": len(scheduler.running),
        "requests_waiting": len(scheduler.waiting),
        "requests_finished": stats.requests_finished,
        "requests_aborted": stats.requests_aborted,
        "requests_failed": stats.requests_failed,
        "prefix_queries": cache.stats.prefix_queries,
        "prefix_query_tokens": looked_up,
        "prefix_hit_tokens": cache.stats.prefix_hit_tokens,
        "prefix_hit_rate": cache.stats.prefix_hit_tokens / looked_up if looked_up else 0.0,
        "kv_blocks_total": total,
        "kv_blocks_used": used,
        "kv_blocks_cached": cached,
        "kv_blocks_free": total - used - cached,
        "kv_blocks_evicted": sum(p.num_evicted for p in cache.pools),
        "kv_blocks_deduplicated": cache.stats.blocks_deduplicated,
        "copies_on_write": cache.stats.copies_on_write,
        "kv_pool_bytes": pool.num_blocks * pool.bytes_per_block,
    }
