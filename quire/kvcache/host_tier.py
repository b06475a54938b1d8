"""Host memory as a tier: room for groups that were swapped out, and for prefixes that the device evicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.connector import KVConnector, Lookup
from quire.kvcache.eviction import LRU
from quire.kvcache.examination import count_blocks, finish, parts, zeros
from quire.kvcache.token_prefix import TokenPrefix


class HostTier(KVConnector):
    """Blocks 0 … n-1 of every cache group in host memory. Evicted prefixes make way for swapped groups."""

    name = "host"
    swaps = True

    def __init__(self, num_blocks: int, num_groups: int = 1, offload: bool = True) -> None:
        self.num_blocks = num_blocks
        self.offload = offload
        # Evicted blocks arrive child before parent, so no chain is kept here; a match is a run of hits.
        self.pools = [BlockPool(num_blocks, LRU(num_blocks), chained=False) for _ in range(num_groups)]
        self._storing: set[tuple[int, bytes]] = set()
        """Prefixes whose copy is under way."""

    # ---- prefixes

    def lookup(self, keys: Sequence[bytes], num_groups: int, prefix: TokenPrefix | None = None) -> Lookup:
        found = Lookup(keys, num_groups)
        found.answer([[pool.lookup(key) for key in keys] for pool in self.pools])
        return found

    def hold(self, group: int, block: int, key: bytes | None = None) -> bool:
        pool = self.pools[group]
        if key is not None and pool.hash_of(block) != key:
            return False
        pool.acquire(block)
        return True

    def give_back(self, group: int, block: int, key: bytes | None = None) -> None:
        pool = self.pools[group]
        if self.offload and key is not None and pool.hash_of(block) is None and pool.lookup(key) == NO_BLOCK:
            pool.register(block, key, NO_BLOCK)
        pool.release([block])

    def evicted(self, group: int, key: bytes) -> int:
        pool = self.pools[group]
        if not self.offload or (group, key) in self._storing or not pool.num_available:
            return NO_BLOCK
        if pool.lookup(key) != NO_BLOCK:
            return NO_BLOCK
        self._storing.add((group, key))
        return pool.allocate()

    def settled(self, group: int, block: int, key: bytes, stored: bool) -> None:
        self._storing.discard((group, key))
        self.give_back(group, block, key if stored else None)

    # ---- groups that are swapped out

    def room(self, group: int) -> int:
        return self.pools[group].num_available

    def allocate(self, group: int) -> int:
        return self.pools[group].allocate()

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
        self._storing = set()

    def check(self, held: list[list[int]]) -> None:
        """Every invariant of every pool, and that references are those of `held`."""
        finish(self.examination(held))

    def examination(self, held: list[list[int]]) -> Iterator[None]:
        """The same in parts. It holds only while nothing changes between them."""
        for group, pool in enumerate(self.pools):
            yield from pool.examination()
            counts = zeros(pool.num_blocks)
            yield from count_blocks(counts, [held[group]])
            for part in parts(pool.num_blocks):
                for block in part:
                    if counts[block] != pool.counts[block]:
                        raise InvariantError(f"host block {block} of group {group} counts {pool.counts[block]} "
                                             f"holders and has {counts[block]}")
                yield
