"""What happens to prefixes on the device, told to those who want to know: stored, finished, evicted.

A tier may answer with a place, and then the block is copied there beside the steps. Observers are only told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.connector import KVConnector, unless_it_breaks
from quire.kvcache.table import SequenceKV
from quire.kvcache.transfers import Move, TransferLedger


class KVObserver(Protocol):
    """Somebody who keeps an index of what an engine holds."""

    def stored(self, group: int, key: bytes, parent: bytes | None, block: int) -> None:
        """A full block can be found under `key`; `parent` is the prefix one block shorter."""
        ...

    def evicted(self, group: int, key: bytes, block: int) -> None: ...

    def finished(self, keys: Sequence[bytes]) -> None:
        """A sequence has ended whose prefixes these are, shortest first."""
        ...

    def cleared(self) -> None:
        """Many blocks were given up at once without being told of: only what the pools hold now is held."""
        ...


@dataclass(slots=True)
class OffloadStats:
    """Running totals that the metrics report."""

    blocks: int = 0
    """Blocks that a tier was given to keep."""
    bytes: int = 0


class KVEvents:
    def __init__(self, tiers: Sequence[KVConnector], transfers: TransferLedger,
                 fork: Callable[[SequenceKV, int], SequenceKV], block_bytes: Sequence[int]) -> None:
        self._tiers = [tier for tier in tiers if tier.offload]
        self._transfers = transfers
        self._fork = fork
        self._block_bytes = block_bytes
        self.observers: list[KVObserver] = []
        self.stats = OffloadStats()

    def stored(self, kv: SequenceKV, fresh: list[tuple[int, int]]) -> None:
        """Entries (group, index) of the sequence's tables were registered."""
        hashes = kv.hashes
        for observer in self.observers:
            for group, i in fresh:
                observer.stored(group, hashes[i], hashes[i - 1] if i else None, kv.tables[group].blocks[i])
        for tier in self._tiers:
            self._copy(tier, kv, [(group, i, unless_it_breaks(tier, NO_BLOCK, tier.stored, group, hashes[i]))
                                  for group, i in fresh])

    def finished(self, kv: SequenceKV) -> None:
        """A sequence ends; it still holds its blocks."""
        keys = kv.hashes[: kv.num_registered]
        for observer in self.observers:
            observer.finished(keys)
        for tier in self._tiers:
            for group, table in enumerate(kv.tables):
                first = table.first_live
                none: list[int] = []
                places = unless_it_breaks(tier, none, tier.finished, group, keys[first:])
                self._copy(tier, kv, [(group, first + i, place) for i, place in enumerate(places)])

    def _copy(self, tier: KVConnector, kv: SequenceKV, wanted: list[tuple[int, int, int]]) -> None:
        moves = [Move(group, kv.tables[group].blocks[i], place, kv.hashes[i])
                 for group, i, place in wanted if place != NO_BLOCK]
        if moves:
            # It holds the whole prefix, as sequences do: a parent must not be evicted before its child. It does not
            # hold what the sequence goes on writing, which would have to be copied first.
            self._transfers.start(tier, True, moves, chains=[self._fork(kv, kv.num_registered)], stores=True)
            self._count(moves)

    def evicted(self, group: int, block: int, key: bytes) -> bool:
        """A cached block is given up; true if a tier copies its content first."""
        for observer in self.observers:
            observer.evicted(group, key, block)
        for tier in self._tiers:
            place = unless_it_breaks(tier, NO_BLOCK, tier.evicted, group, key)
            if place != NO_BLOCK:
                move = Move(group, block, place, key)
                self._transfers.add_leaving(tier, move)
                self._count([move])
                return True
        return False

    def cleared(self) -> None:
        """Blocks were given up without `evicted`; the pools are as they will be."""
        for observer in self.observers:
            observer.cleared()

    def _count(self, moves: list[Move]) -> None:
        self.stats.blocks += len(moves)
        self.stats.bytes += sum(self._block_bytes[move.group] for move in moves)
