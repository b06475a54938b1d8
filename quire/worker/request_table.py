"""One row per running sequence: its tokens, block tables and sampling state, kept where the model runs.

Plans bring diffs; inputs of a step are gathered from the rows. There is no other copy to keep in step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from quire.scheduler.plan import RowStart, TableDiff

Ints = npt.NDArray[np.int32]


class RequestTable:
    """Rows named by the scheduler. Token t of row r is tokens[r, t]; its KV is in block tables[g][r, t // size]."""

    def __init__(self, num_rows: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self.block_size = block_size
        # Zero pages cost nothing until a row is used, so the table may be as wide as the longest sequence.
        self.tokens: Ints = np.zeros((num_rows, max_model_len), np.int32)
        width = -(-max_model_len // block_size)
        self.tables: list[Ints] = [np.zeros((num_rows, width), np.int32) for _ in range(num_groups)]
        self.starts: list[RowStart | None] = [None] * num_rows
        """What each row was started with: parameters, seed, length of its prompt."""

    def apply(self, freed: Sequence[int], starts: Sequence[RowStart], diffs: Sequence[TableDiff]) -> None:
        for row in freed:
            self.starts[row] = None
        for start in starts:
            self.starts[start.row] = start
            self.tokens[start.row, : len(start.token_ids)] = start.token_ids
        for diff in diffs:
            self.tables[diff.group][diff.row, diff.start : diff.start + len(diff.blocks)] = diff.blocks

    def started(self, row: int) -> RowStart:
        start = self.starts[row]
        if start is None:
            raise KeyError(f"row {row} of the request table is empty")
        return start
