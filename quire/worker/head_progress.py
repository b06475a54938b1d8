"""Which tokens a draft head has computed, and which it never can, since their hidden states were not stored."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.scheduler.plan import BlockCopy, PlanEntry, TransferStart
from quire.worker.block_flags import BlockFlags
from quire.worker.draft_models import DraftProgress


class HeadProgress(DraftProgress):
    """Progress of a head that rests: while drafts do not pay, steps of the target may store no hidden states for it.

    Such a hole cannot be filled later, so a sequence with one gets no more drafts. Holes are kept by block, since other
    sequences may get the block from the prefix cache."""

    _marks_text = True

    def __init__(self, table: np.ndarray, block_size: int, group: int, num_blocks: int, num_host_blocks: int) -> None:
        super().__init__(table, block_size, group, num_blocks, num_host_blocks)
        self._holes = BlockFlags(group, num_blocks, num_host_blocks)
        """Blocks that lack the hidden state of some token."""
        self._any = False
        """Some step has left out states: until then there is nothing to track."""
        self._resting: list[int] = []
        """Rows of the last step, if it left out states."""
        self._until_block = 0
        """Steps of the same rows until one of them begins a block."""

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        super().copied(copies)
        self._holes.copied(copies)
        self._until_block = 0

    def moved(self, transfers: Sequence[TransferStart]) -> None:
        super().moved(transfers)
        self._holes.moved(transfers)
        self._until_block = 0

    def restart(self, row: int) -> None:
        super().restart(row)
        self._until_block = 0

    def marked(self, decoding: tuple[list[int], list[int]] | None) -> bool:
        if not self._until_block or decoding is None or decoding[0] != self._resting:
            return False
        self._until_block -= 1
        return True

    def written(self, entries: Sequence[PlanEntry], left_out: bool = False) -> None:
        super().written(entries)
        self._until_block = 0
        if left_out:
            self._any = True
            self._resting = [entry.row for entry in entries]
            self._until_block = min(self._block_size - 1 - entry.start % self._block_size for entry in entries)
        if not self._any:
            return
        size, table, few = self._block_size, self._table, self._holes.few
        for entry in entries:
            end = entry.start + entry.num_tokens
            if left_out:
                few[table.item(entry.row, entry.start // size)] = True  # a decode step: one token
            elif end - entry.start > 1:
                # Blocks that these tokens begin. In a block that was begun before, a hole stays.
                self._holes.device[table[entry.row, -(-entry.start // size) : -(-end // size)]] = False
            elif entry.num_tokens and not entry.start % size:
                few[table.item(entry.row, entry.start // size)] = False

    def refuses(self, entry: PlanEntry) -> bool:
        """Looks at all blocks, also those that the head has computed: another block of the same text, with a hole, may
        have replaced one."""
        blocks = -(-entry.start // self._block_size)
        return self._any and bool(self._holes.device[self._table[entry.row, :blocks]].any())
