"""Host memory as a tier: room for groups that were swapped out, and for prefixes that the device evicted."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.connector import KVConnector
from quire.kvcache.eviction import LRU
from quire.kvcache.examination import count_blocks, finish, parts


@dataclass(slots=True)
class _Move:
    """A block with a copy under way. With a key it becomes (or stays) findable once the copy is done."""

    group: int
    block: int
    key: bytes | None


class HostTier(KVConnector):
    """Blocks 0 … n-1 of every cache group in host memory. Evicted prefixes make way for swapped groups."""

    name = "host"

    def __init__(self, num_blocks: int, num_groups: int = 1, offload: bool = True) -> None:
        self.num_blocks = num_blocks
        self.offload = offload
        # Evicted blocks arrive child before parent, so no chain is kept here; a match is a run of hits.
        self.pools = [BlockPool(num_blocks, LRU(num_blocks), chained=False) for _ in range(num_groups)]
        self._drafted: list[_Move] = []
        self._settling: deque[tuple[int, list[_Move]]] = deque()
        self._arriving: set[tuple[int, bytes]] = set()
        """Prefixes whose copy is under way."""

    # ---- prefixes

    def match(self, group: int, key: bytes) -> int:
        return self.pools[group].lookup(key)

    def hold(self, group: int, block: int) -> None:
        self.pools[group].acquire(block)

    def fetched(self, group: int, block: int, key: bytes | None) -> None:
        self._drafted.append(_Move(group, block, key if self.offload else None))

    def evicted(self, group: int, key: bytes) -> int:
        pool = self.pools[group]
        if not self.offload or (group, key) in self._arriving or not pool.num_available:
            return NO_BLOCK
        if pool.lookup(key) != NO_BLOCK:
            return NO_BLOCK
        block = pool.allocate()
        self._arriving.add((group, key))
        self._drafted.append(_Move(group, block, key))
        return block

    # ---- groups that are swapped out

    def room(self, group: int) -> int:
        return self.pools[group].num_available

    def allocate(self, group: int) -> int:
        return self.pools[group].allocate()

    def give_back(self, group: int, blocks: list[int]) -> None:
        self.pools[group].release(blocks)

    # ---- steps

    def submitted(self, step: int) -> None:
        if self._drafted:
            self._settling.append((step, self._drafted))
            self._drafted = []

    def settled(self, step: int, done: bool) -> None:
        while self._settling and self._settling[0][0] <= step:
            for move in self._settling.popleft()[1]:
                self._settle(move, done)

    def _settle(self, move: _Move, done: bool) -> None:
        pool = self.pools[move.group]
        if move.key is not None:
            self._arriving.discard((move.group, move.key))
            if done and pool.hash_of(move.block) is None and pool.lookup(move.key) == NO_BLOCK:
                pool.register(move.block, move.key, NO_BLOCK)
        pool.release([move.block])

    # ---- keeping house

    @property
    def num_cached(self) -> int:
        return sum(pool.num_cached for pool in self.pools)

    @property
    def num_used(self) -> int:
        return sum(pool.num_used for pool in self.pools)

    def drop_cached(self) -> int:
        return sum(pool.drop_cached() for pool in self.pools)

    def reset(self) -> None:
        self.pools = [BlockPool(self.num_blocks, LRU(self.num_blocks), chained=False) for _ in self.pools]
        self._drafted, self._arriving = [], set()
        self._settling.clear()

    def check(self, held: list[list[int]]) -> None:
        """Every invariant of every pool, and that references are those of `held` and of copies under way.

        `held`: by cache group, the blocks that swapped groups hold, once for each.
        """
        finish(self.examination(held))

    def examination(self, held: list[list[int]]) -> Iterator[None]:
        """The same in parts. It holds only while nothing changes between them."""
        moves = [move for _, batch in self._settling for move in batch] + self._drafted
        for group, pool in enumerate(self.pools):
            yield from pool.examination()
            counts = [0] * pool.num_blocks
            yield from count_blocks(counts, [held[group], [move.block for move in moves if move.group == group]])
            for part in parts(pool.num_blocks):
                for block in part:
                    if counts[block] != pool.counts[block]:
                        raise InvariantError(f"host block {block} of group {group} counts {pool.counts[block]} "
                                             f"holders and has {counts[block]}")
                yield
