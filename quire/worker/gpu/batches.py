"""Turns a plan's entries into device inputs: padded decode batches, and batches of any shape."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

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


def drafts_as_decodes(entries: Sequence[PlanEntry]) -> list[PlanEntry]:
    """Every draft an entry of its own: one query that sees the keys before it, those of the drafts included.

    A step writes all its keys before it attends, so what a decode graph does for sequences it does for the places
    of a draft, and verification needs no kernel and no graph of its own.
    """
    found: list[PlanEntry] = []
    for entry in entries:
        if not entry.num_drafts:
            found.append(entry)
            continue
        size = len(entry.masks) // entry.num_tokens
        for place in range(entry.num_tokens):
            masks = entry.masks[place * size : (place + 1) * size]
            found.append(PlanEntry(entry.row, entry.start + place, 1, True, masks=masks))
    return found


def aligned(size: int) -> int:
    """The next multiple of 16: arrays laid out in such steps begin at addresses that kernels read fast."""
    return -(-size // 16) * 16


def end_of(entry: PlanEntry) -> int:
    """The position whose token an entry draws."""
    return entry.start + entry.num_tokens


@dataclass(slots=True)
class LogitRows:
    """Which tokens of a step need logits: those of entries that draw, then those that want candidates."""

    drawing: list[int]
    """Entries of the plan that draw a token, those that share another's logits included."""
    ranking: list[int]
    last: np.ndarray
    """int32: token of the step whose logits each of them reads."""

    @classmethod
    def of(cls, entries: Sequence[PlanEntry], batch: MixedBatch) -> LogitRows:
        ends = batch.query_start[1:]
        token = {int(row): int(end) - 1 for row, end in zip(batch.rows, ends, strict=True)}
        own = {i: int(end) - 1 for i, end in zip(batch.order, ends, strict=True)}
        drawing = [i for i in batch.order if entries[i].sample]
        drawing += [i for i, entry in enumerate(entries) if entry.shares is not None and entry.sample]
        ranking = [i for i in batch.order if entries[i].candidates]
        # Several entries may be of one row: the places of a draft.
        last = [token[shares] if (shares := entries[i].shares) is not None else own[i] for i in drawing + ranking]
        return cls(drawing, ranking, np.array(last, np.int32))


@dataclass(slots=True)
class FreshRuns:
    """Prompts of a step that are computed from their first token on, neighbours together."""

    dense: list[tuple[int, int, int]] = field(default_factory=list)
    """(first token, tokens of each, how many) of neighbours of one length."""
    ragged: list[tuple[int, int]] = field(default_factory=list)
    """[first, last) sequence of neighbours of any length."""

    def add_dense(self, first: int, count: int) -> None:
        known = self.dense
        if known and known[-1][1] == count and known[-1][0] + count * known[-1][2] == first:
            known[-1] = (known[-1][0], count, known[-1][2] + 1)
        else:
            known.append((first, count, 1))

    def add_ragged(self, sequence: int) -> None:
        if self.ragged and self.ragged[-1][1] == sequence:
            self.ragged[-1] = (self.ragged[-1][0], sequence + 1)
        else:
            self.ragged.append((sequence, sequence + 1))


def is_decode(entries: Sequence[PlanEntry]) -> bool:
    """Every sequence computes one token and draws the next: a step that a captured graph can replay."""
    return all(
        entry.num_tokens == 1
        and entry.sample
        and not entry.num_drafts
        and not entry.candidates
        and entry.prompt_logprobs_from is None
        for entry in entries
    )
