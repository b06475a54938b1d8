"""Running totals of the KV cache, for the metrics."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Running totals that the metrics report."""

    prefix_queries: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    copies_on_write: int = 0
    blocks_deduplicated: int = 0
    tier_hits: int = 0
    """Blocks of admitted requests that another tier was asked to bring back."""
    tier_hit_tokens: int = 0
    bytes_fetched: int = 0
