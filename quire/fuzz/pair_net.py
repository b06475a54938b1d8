"""Slots of `BlockStore`s that travel between engines of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from quire.executor.kv_hash import BlockStore
from quire.peers.memory import Landing, MemoryMover, Slots
from quire.peers.mover import Tables


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
