"""What happens to prefixes on the device, told to those who want to know: stored, finished, evicted.

A tier may answer with a place, and then the block is copied there beside the steps. Observers are only told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.connector import KVConnector, unless_it_breaks
from quire.kvcache.table import BlockTable, SequenceKV
from quire.kvcache.token_prefix import BlockRange, TokenPrefix
from quire.kvcache.transfers import Move, TransferLedger


class KVObserver(Protocol):
    """A listener that keeps an index of the blocks an engine holds."""

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
                 fork: Callable[[SequenceKV, int], SequenceKV], take_cached: Callable[[int, bytes], int],
                 block_bytes: Sequence[int]) -> None:
        """`fork` holds the first blocks of a sequence once more, `take_cached` a block that the prefix cache has."""
        self._tiers: list[KVConnector] = []
        self._unit_tokens: int | None = None
        for tier in tiers:
            self.add_tier(tier)
        self._transfers = transfers
        self._fork = fork
        self._take_cached = take_cached
        self._block_bytes = block_bytes
        self.observers: list[KVObserver] = []
        self.stats = OffloadStats()

    def add_tier(self, tier: KVConnector) -> None:
        """One that keeps prefixes is told from now on."""
        if tier.offload:
            self._tiers.append(tier)
            self._unit_tokens = self._unit_tokens or tier.unit_tokens

    def stored(self, kv: SequenceKV, fresh: list[tuple[int, int]]) -> None:
        """Entries (group, index) of the sequence's tables were registered."""
        hashes = kv.hashes
        for observer in self.observers:
            for group, i in fresh:
                observer.stored(group, hashes[i], hashes[i - 1] if i else None, kv.tables[group].blocks[i])
        for tier in self._tiers:
            self._copy(tier, kv, [(group, i, unless_it_breaks(tier, NO_BLOCK, tier.stored, group, hashes[i]))
                                  for group, i in fresh])

    def grown(self, kv: SequenceKV, tokens: Sequence[int], num_tokens: int) -> None:
        """The first `num_tokens` of a sequence are registered: tiers of units are offered those that are complete."""
        if self._unit_tokens is None or num_tokens // self._unit_tokens <= kv.num_offered:
            return
        first, kv.num_offered = kv.num_offered, num_tokens // self._unit_tokens
        prefix = TokenPrefix(kv.key, tokens, num_tokens, kv.unit_keys)
        for tier in self._tiers:
            if tier.unit_tokens is not None:
                none: list[BlockRange] = []
                self._copy_ranges(tier, kv, unless_it_breaks(tier, none, tier.grown, prefix, first))

    def _copy_ranges(self, tier: KVConnector, kv: SequenceKV, ranges: list[BlockRange]) -> None:
        """Blocks that have left a window are taken from the prefix cache, if it still has them."""
        moves: list[Move] = []
        extra = SequenceKV(tables=[BlockTable() for _ in kv.tables])
        for wanted in ranges:
            table, taken = kv.tables[wanted.group], extra.tables[wanted.group].blocks
            mine: list[Move] = []
            for i, place in enumerate(wanted.places, wanted.first):
                block = table.blocks[i] if i >= table.first_live else NO_BLOCK
                if block == NO_BLOCK:
                    block = self._take_cached(wanted.group, kv.hashes[i])
                    if block == NO_BLOCK:
                        break
                    taken.append(block)
                mine.append(Move(wanted.group, block, place, kv.hashes[i]))
            if len(mine) == len(wanted.places):
                moves += mine
            else:
                for i, place in enumerate(wanted.places, wanted.first):
                    tier.settled(wanted.group, place, kv.hashes[i], False)
        if moves or any(table.blocks for table in extra.tables):
            chains = [self._fork(kv, kv.num_registered), extra]
            self._transfers.start(tier, True, moves, chains=chains, stores=True)
            self._count(moves)

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
