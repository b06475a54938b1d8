"""Turns a plan's entries into device inputs: padded decode batches, and batches of any shape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from quire.scheduler.plan import PlanEntry


def ladder(max_num_seqs: int) -> list[int]:
    """Batch sizes that decode steps are padded to: each costs a captured graph, each gap wasted rows."""
    rungs = [1, 2, 4, 8, *range(16, 257, 16), *range(288, 513, 32), *range(576, 4097, 64)]
    kept = [rung for rung in rungs if rung < max_num_seqs]
    return [*kept, max_num_seqs]


def rung_for(rungs: Sequence[int], count: int) -> int:
    return rungs[bisect_left(rungs, count)]


@dataclass(slots=True)
class MixedBatch:
    """A step of any shape as host arrays: sequences with one query first, since another kernel attends for
    them."""

    order: list[int]
    """Entry of the plan at each place of the step."""
    rows: np.ndarray
    starts: np.ndarray
    counts: np.ndarray
    num_decodes: int

    @classmethod
    def of(cls, entries: Sequence[PlanEntry]) -> MixedBatch:
        singles = [i for i, entry in enumerate(entries) if entry.num_tokens == 1]
        longer = [i for i, entry in enumerate(entries) if entry.num_tokens > 1]
        order = singles + longer
        fields = np.array([(entries[i].row, entries[i].start, entries[i].num_tokens) for i in order], np.int32)
        return cls(order, fields[:, 0], fields[:, 1], fields[:, 2], len(singles))

    @property
    def query_start(self) -> np.ndarray:
        starts = np.zeros(len(self.counts) + 1, np.int32)
        np.cumsum(self.counts, out=starts[1:])
        return starts

    def token_rows(self) -> np.ndarray:
        return np.repeat(self.rows, self.counts)

    def positions(self) -> np.ndarray:
        ends = self.query_start
        return (np.arange(ends[-1], dtype=np.int32) - np.repeat(ends[:-1] - self.starts, self.counts)).astype(np.int32)


def is_decode(entries: Sequence[PlanEntry]) -> bool:
    """Every sequence computes one token and draws the next: a step that a captured graph can replay."""
    return all(
        entry.num_tokens == 1 and entry.sample and not entry.drafts and entry.prompt_logprobs_from is None
        for entry in entries
    )
