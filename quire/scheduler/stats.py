"""The scheduler's running totals, which the metrics report."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    steps: int = 0
    prompt_tokens: int = 0
    """Prompt tokens computed (not found in the cache), recomputation included."""
    output_tokens: int = 0
    """Tokens drawn, and tokens of beams returned."""
    preemptions: int = 0
    preemptions_for_memory: int = 0
    preemptions_for_priority: int = 0
    preemptions_for_loss: int = 0
    """The step that was to seat a request was lost, so it computes its KV again."""
    preemptions_by_recompute: int = 0
    preemptions_by_swap: int = 0
    recomputed_tokens: int = 0
    requests_finished: int = 0
    requests_aborted: int = 0
    requests_failed: int = 0
    fetches: int = 0
    """Times that a request waited for KV from another tier."""
    fetches_failed: int = 0
    """Those of which some, or all, did not come, so that the request computed it."""
    forks: int = 0
    """Sequences that began on the blocks of another."""
    invariant_errors: int = 0
    """Times that the bookkeeping contradicted itself; anything but 0 is a bug of ours."""
