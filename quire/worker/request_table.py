"""One row per running sequence: its tokens, block tables and sampling state, kept where the model runs.

Plans bring diffs; the inputs of a step are gathered from the rows. There is no other copy to keep in step.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.sampling.batch import SamplingRow
from quire.scheduler.diffs import OneBlockDiffs
from quire.scheduler.plan import RowStart, StepPlan

Ints = npt.NDArray[np.int32]


def block_columns(diffs: OneBlockDiffs) -> Ints:
    """Rows, groups, places in their tables, block numbers."""
    return np.frombuffer(diffs.data, "<i4").reshape(4, -1)


class RequestTable:
    """Rows named by the scheduler. Token t of row r is tokens[r, t]; its KV is in block tables[g][r, t // size]."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        # Zero pages cost nothing until a row is used, so the table may be as wide as the longest sequence.
        self.tokens: Ints = np.zeros((num_rows, max_model_len), np.int32)
        width = -(-max_model_len // block_size)
        self.tables: list[Ints] = [np.zeros((num_rows, width), np.int32) for _ in range(num_groups)]
        self._sampling: list[SamplingRow | None] = [None] * num_rows

    def apply(self, plan: StepPlan) -> None:
        """Bring the rows to the state that the plan's entries speak of."""
        for row in plan.freed_rows:
            self._sampling[row] = None
        for start in plan.starts:
            self.tokens[start.row, : len(start.token_ids)] = start.token_ids
            self._sampling[start.row] = _sampling_row(start)
        if isinstance(plan.diffs, OneBlockDiffs):
            rows, groups, places, numbers = block_columns(plan.diffs)
            for group, table in enumerate(self.tables):
                mine = slice(None) if len(self.tables) == 1 else groups == group
                table[rows[mine], places[mine]] = numbers[mine]
            return
        for row, group, first, blocks in plan.diffs:
            self.tables[group][row, first : first + len(blocks)] = blocks

    def slots(self, group: int, rows: npt.NDArray[np.int64], places: npt.NDArray[np.int64]) -> Tensor:
        """int64: the slots of a cache group in which tokens of these rows lie."""
        blocks = self.tables[group][rows, places // self.block_size].astype(np.int64)
        return torch.from_numpy(blocks * self.block_size + places % self.block_size)

    def is_empty(self, row: int) -> bool:
        return self._sampling[row] is None

    def sampling(self, row: int) -> SamplingRow:
        state = self._sampling[row]
        if state is None:
            raise InvariantError(f"row {row} of the request table is empty")
        return state

    def append(self, row: int, position: int, token: int) -> None:
        """A token was drawn for `position`; the next step reads it from here."""
        if position < self.tokens.shape[1]:
            self.tokens[row, position] = token
        self.sampling(row).append(token)


def _sampling_row(start: RowStart) -> SamplingRow:
    return SamplingRow(start.params, start.seed, start.sequence_index, start.token_ids, start.num_prompt_tokens,
                       start.stop_ids, start.bad_words)
