"""The inputs of one pass through a decoder, gathered from the rows of the request table."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.kernels.types import StepContext
from quire.scheduler.plan import PlanEntry
from quire.worker.request_table import RequestTable
from quire.worker.tree_inputs import sequences, tree_detours


def step_inputs(table: RequestTable, entries: Sequence[PlanEntry],
                groups: Sequence[int] | None = None) -> tuple[Tensor, StepContext]:
    """Token ids and step context; `groups` says which of the table's the decoder's cache groups are."""
    trees = [entry for entry in entries if entry.parents]
    parts = sequences(entries) if trees else [(entry.row, entry.start, entry.num_tokens) for entry in entries]
    rows, starts, counts = np.array(parts, np.int64).T
    for entry in entries:
        if entry.drafts or entry.given:
            values, end = entry.drafts or entry.given, entry.start + entry.num_tokens
            table.tokens[entry.row, end - len(values) : end] = values
    query_start = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(counts, out=query_start[1:])
    token_rows, places = rows, starts
    if query_start[-1] != len(rows):
        token_rows = np.repeat(rows, counts)
        places = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)
    ids = table.tokens[token_rows, places].astype(np.int64)
    lengths = (starts + counts).astype(np.int32)
    size = table.block_size
    width = -(-int(lengths.max()) // size)
    index, offset = places // size, places % size
    tables = table.tables if groups is None else [table.tables[group] for group in groups]
    positions, detours = np.ascontiguousarray(places), None
    if trees:
        lengths, detours = tree_detours(entries)
        positions = places.copy()
        single = np.flatnonzero(counts == 1)
        positions[query_start[single]] = lengths[single] - 1
    return torch.from_numpy(ids), StepContext(
        positions=torch.from_numpy(positions),
        query_start=torch.from_numpy(query_start),
        context_len=torch.from_numpy(lengths),
        block_tables=tuple(torch.from_numpy(blocks[rows, :width]) for blocks in tables),
        slots=tuple(torch.from_numpy(blocks[token_rows, index].astype(np.int64) * size + offset)
                    for blocks in tables),
        detours=None if detours is None else torch.from_numpy(detours),
    )


class SingleStep:
    """The inputs of steps of `count` tokens of one sequence, in memory that is used again: for one stream, making
    tensors would take as long as a draft."""

    def __init__(self, count: int, widths: Sequence[int]) -> None:
        """`widths`: blocks in a row of each group's table."""
        self._ids, self._positions, *self._slots = (np.zeros(count, np.int64) for _ in range(2 + len(widths)))
        self._length = np.zeros(1, np.int32)
        self._blocks = [np.zeros((1, width), np.int32) for width in widths]
        self.ids = torch.from_numpy(self._ids)
        self.ctx = StepContext(
            positions=torch.from_numpy(self._positions),
            query_start=torch.tensor([0, count], dtype=torch.int32),
            context_len=torch.from_numpy(self._length),
            block_tables=tuple(map(torch.from_numpy, self._blocks)),
            slots=tuple(map(torch.from_numpy, self._slots)),
            lasting=True,
        )

    def at(self, tokens: np.ndarray, tables: Sequence[np.ndarray], start: int, size: int, room: int = 0) -> None:
        """Tokens from `start` on, of a row of the request table; the tables of blocks reach `room` tokens further."""
        end = start + len(self._ids)
        last = -(-(end + room) // size)
        self._ids[:] = tokens[start:end]
        self._positions[:] = range(start, end)
        self._length[0] = end
        for slots, mine, blocks in zip(self._slots, self._blocks, tables, strict=True):
            slots[:] = [int(blocks[p // size]) * size + p % size for p in range(start, end)]
            mine[0, :last] = blocks[:last]


class StepInputs:
    """The inputs of a model runner's steps: of one token of one sequence, in memory that is used again."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        widths = [blocks.shape[1] for blocks in table.tables]
        # In turns: an address that a recorder takes for a constant, and a step that was checked once, hold for one of
        # two steps only, so neither is believed.
        self._next, self._after = SingleStep(1, widths), SingleStep(1, widths)

    def of(self, entries: Sequence[PlanEntry]) -> tuple[Tensor, StepContext]:
        """They hold until the next but one."""
        entry, table = entries[0], self._table
        if len(entries) > 1 or entry.num_tokens != 1 or entry.drafts or entry.given:
            return step_inputs(table, entries)
        single, self._next, self._after = self._next, self._after, self._next
        mine = [blocks[entry.row] for blocks in table.tables]
        single.at(table.tokens[entry.row], mine, entry.start, table.block_size)
        return single.ids, single.ctx
