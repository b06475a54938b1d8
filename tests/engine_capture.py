"""Runs an LLM and records the bits of every row of logits it draws from, by (seed, position)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.llm import LLM
from quire.scheduler.plan import EntryResult, PlanEntry

Bits = dict[tuple[int, int], bytes]


def record_logits(llm: LLM) -> Bits:
    """A dict that fills up while the engine runs. A row drawn twice (after a preemption) must repeat its bits."""
    worker = llm._core.executor._worker  # type: ignore[attr-defined]
    runner = worker._runner
    bits: Bits = {}
    draw = runner._draw

    def recording_draw(entries: Sequence[PlanEntry], drawing: list[int], results: list[EntryResult],
                       guesses: dict[int, torch.Tensor], logits: torch.Tensor) -> None:
        rows = iter([row.numpy().tobytes() for row in logits])
        draw(entries, drawing, results, guesses, logits)
        for entry, result in ((entries[i], results[i]) for i in drawing):
            seed = runner._table.sampling(entry.row).seed
            for place in range(1 + len(entry.drafts)):
                found = next(rows)
                key = seed, entry.drawn_at + place
                # Behind a refused draft the logits are of another text.
                if place < len(result.tokens):
                    assert bits.setdefault(key, found) == found, f"two draws of {key} saw different logits"

    runner._draw = recording_draw
    return bits
