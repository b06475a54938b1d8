"""Runs an LLM and records the bits of every row of logits it draws from, by (seed, position)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.llm import LLM
from quire.scheduler.plan import EntryResult, PlanEntry
from quire.speculation.tree import path_along

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
            mine = [next(rows) for _ in range(1 + len(entry.drafts))]
            # Behind a refused draft, and on the other branches of a tree, the logits are of another text.
            for place, node in enumerate([-1, *path_along(entry.drafts, entry.parents, result.tokens)]):
                key = seed, entry.drawn_at + place
                assert bits.setdefault(key, mine[1 + node]) == mine[1 + node], f"two draws of {key} saw other logits"

    runner._draw = recording_draw
    return bits
