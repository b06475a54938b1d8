"""Slots that travel between engines of numbers: out of the `BlockStore`s of one worker, or those of several ranks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.executor.kv_hash import BlockStore, part_of, total
from quire.kvtransfer.layout import Span
from quire.peers.memory import Landing, MemoryMover, Slots
from quire.peers.mover import Tables
from quire.ranks.shared_kv import SharedKV


class NumberMover(MemoryMover):
    def __init__(self, engine: int, stores: list[BlockStore], block_size: int) -> None:
        super().__init__(engine)
        self.stores, self.block_size = stores, block_size

    def read(self, tables: Tables, starts: Sequence[int], start: int, end: int) -> Slots:
        return [{position: store.read(table[position // self.block_size])[position % self.block_size]
                 for position in range(max(start, first), end)}
                for store, table, first in zip(self.stores, tables, starts, strict=True)]

    def write(self, landing: Landing, slots: Slots, share: float) -> None:
        for store, table, values in zip(self.stores, landing.tables, slots, strict=True):
            for position in list(values)[: int(share * len(values))]:
                store.write(table[position // self.block_size], position % self.block_size, values[position])


class RankMover(MemoryMover):
    """The same for an engine whose ranks hold a part of every slot: read as the sum of all, written to each its own."""

    def __init__(self, engine: int, kv: SharedKV, num_ranks: int) -> None:
        super().__init__(engine)
        self._kv, self._num_ranks = kv, num_ranks

    def read(self, tables: Tables, starts: Sequence[int], start: int, end: int) -> Slots:
        slots: Slots = []
        for group, first in enumerate(starts):
            span, pieces = self._span(max(start, first), end, len(starts)), self._kv.layout.pieces(group)
            wire = bytearray(span.nbytes(pieces, self._kv.layout.element_size))
            self._kv.gather(tables, span, pieces, memoryview(wire))
            numbers = np.frombuffer(wire, np.int64).reshape(-1, self._num_ranks).tolist()
            slots.append(dict(zip(range(span.start, end), map(total, numbers), strict=True)))
        return slots

    def write(self, landing: Landing, slots: Slots, share: float) -> None:
        for group, values in enumerate(slots):
            positions = list(values)[: int(share * len(values))]
            if positions:
                parts = [part_of(values[position], rank, self._num_ranks)
                         for position in positions for rank in range(self._num_ranks)]
                span = self._span(positions[0], positions[-1] + 1, len(slots))
                self._kv.scatter(landing.tables, span, self._kv.layout.pieces(group),
                                 memoryview(np.array(parts, np.int64).tobytes()))

    def _span(self, start: int, end: int, num_groups: int) -> Span:
        return Span(min(start, end), end, (0,) * num_groups)
