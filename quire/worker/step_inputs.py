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
