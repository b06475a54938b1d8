"""The fixed places that captured decode steps read and write, and how a step's numbers are staged into them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.scheduler.plan import PlanEntry
from quire.worker.gpu.batches import aligned
from quire.worker.gpu.staging import Stage

_HEAD = 16
"""Entries before the rows: the ring's slot, padded to an aligned address."""
_DIFFS = 1 << 16
"""Entries for the table's diffs behind the head, which most steps send in the same copy."""


@dataclass(slots=True)
class DecodeBuffers:
    """A rung uses the first entries of each."""

    stage: Tensor
    rows: Tensor
    positions: Tensor
    ring: Tensor
    ids: Tensor
    wide_positions: Tensor
    lengths: Tensor
    query_start: Tensor
    slots: tuple[Tensor, ...]
    logits: Tensor

    @classmethod
    def allocate(
        cls, size: int, num_groups: int, vocab_size: int, logits_type: torch.dtype, device: torch.device
    ) -> DecodeBuffers:
        def ints(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=device)

        # Row -1 is padding: before the first step the whole batch is.
        stage = torch.full((_DIFFS + 2 * size + 64,), -1, dtype=torch.int32, device=device)
        stage[:_HEAD] = 0
        behind = _HEAD + aligned(size)
        stage[behind:] = 0
        return cls(
            stage=stage,
            rows=stage[_HEAD : _HEAD + size],
            positions=stage[behind : behind + size],
            ring=stage[:1],
            ids=ints(size, torch.int64),
            wide_positions=ints(size, torch.int64),
            lengths=ints(size, torch.int32),
            query_start=torch.arange(size + 1, dtype=torch.int32, device=device),
            slots=tuple(ints(size, torch.int64) for _ in range(num_groups)),
            logits=torch.empty(size, vocab_size, dtype=logits_type, device=device),
        )

    def staged(self, entries: Sequence[PlanEntry], slot: int) -> Stage:
        """A decode step's head: the ring's slot, rows and positions, at the places above."""
        count, size = len(entries), self.rows.shape[0]
        head = np.full(_HEAD + 2 * aligned(size), -1, np.int32)
        head[0] = slot
        head[_HEAD : _HEAD + count] = [entry.row for entry in entries]
        positions = head[_HEAD + aligned(size) :]
        positions[:count] = [entry.start for entry in entries]
        positions[count:] = 0
        stage = Stage()
        stage.add("head", head)
        return stage

    @staticmethod
    def hold(num_diffs: int) -> bool:
        """Whether so many diffs of the table fit behind the head."""
        return num_diffs <= _DIFFS // 2 - 32
