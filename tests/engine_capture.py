"""Runs an LLM and records the bits of every row of logits it draws from, by (seed, position)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quire.llm import LLM
from quire.scheduler.plan import EntryResult, PlanEntry

Bits = dict[tuple[int, int], bytes]


def record_logits(llm: LLM) -> Bits:
    """A dict that fills up while the engine runs. A row drawn twice (after a preemption) must repeat its bits."""
    worker = llm._core.executor._worker  # type: ignore[attr-defined]
    runner = worker._runner
    bits: Bits = {}
    draw, logits = runner._draw, runner._decoder.logits
    seen: list[torch.Tensor] = []

    def recording_logits(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        seen.append(logits(hidden, *args))
        return seen[-1]

    def recording_draw(entries: Sequence[PlanEntry], ends: list[int], hidden: torch.Tensor,
                       results: list[EntryResult], guesses: dict[int, torch.Tensor]) -> None:
        seeds = [runner._table.sampling(entry.row).seed if entry.sample else 0 for entry in entries]
        seen.clear()
        draw(entries, ends, hidden, results, guesses)
        rows = iter(seen[0] if seen else [])
        for entry, seed, result in zip(entries, seeds, results, strict=True):
            for place in range(1 + len(entry.drafts) if entry.sample else 0):
                found = next(rows).numpy().tobytes()
                key = seed, entry.start + entry.num_tokens - len(entry.drafts) + place
                # Behind a refused draft the logits are of another text.
                if place < len(result.tokens):
                    assert bits.setdefault(key, found) == found, f"two draws of {key} saw different logits"

    runner._decoder.logits = recording_logits
    runner._draw = recording_draw
    return bits
