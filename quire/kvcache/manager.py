"""Slots for sequences: find a cached prefix, grow, copy on write, publish full blocks, give back.

Works on block numbers only. Every group of layers with its own kind of KV has its own pool and every sequence one
table per group; one group is the ordinary case.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.eviction import EVICTION_POLICIES
from quire.kvcache.prefix import HashChain
from quire.kvcache.table import BlockTable, PrefixMatch, SequenceKV


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Layers that share block tables: all full attention (`window` None), or all of one sliding window."""

    window: int | None = None


@dataclass(slots=True)
class CacheStats:
    """Running totals that the metrics report."""

    prefix_queries: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    blocks_evicted: int = 0
    copies_on_write: int = 0
    blocks_deduplicated: int = 0


class KVCacheManager:
    """The scheduler's view of KV memory.

    Contract: a sequence holds a reference on every block of its tables. Blocks given back while submitted plans may
    still name them wait in limbo until those plans are done (`steps_submitted`, `steps_done`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[CacheGroup, ...] = (CacheGroup(),),
        prefix_caching: bool = True,
        eviction_policy: str = "lru",
        secret: bytes | None = None,
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self.prefix_caching = prefix_caching
        policy = EVICTION_POLICIES[eviction_policy]
        self.pools = [BlockPool(num_blocks, policy(), chained=group.window is None) for group in groups]
        self.chain = HashChain(block_size, secret)
        self.stats = CacheStats()
        self._limbo: deque[tuple[int, int, list[int]]] = deque()
        self._newest_submitted = 0
        self._newest_done = 0

    # ---- admission

    def match(self, kv: SequenceKV, tokens: list[int]) -> PrefixMatch:
        """The longest cached prefix valid in every group; never all of `tokens`, whose last must be computed."""
        if not self.prefix_caching:
            return PrefixMatch(0, [[] for _ in self.groups])
        hashes = self.chain.extend(kv, tokens, len(tokens) - 1)
        found = [[pool.lookup(key) for key in hashes] for pool in self.pools]
        length = len(hashes)
        for group, blocks in zip(self.groups, found, strict=True):
            if group.window is None:
                length = min(length, _leading(blocks))
        while length and not all(self._window_held(g, b, length) for g, b in zip(self.groups, found, strict=True)):
            length -= 1
        return PrefixMatch(length * self.block_size, [
            [NO_BLOCK] * self._first_needed(group, length * self.block_size)
            + blocks[self._first_needed(group, length * self.block_size) : length]
            for group, blocks in zip(self.groups, found, strict=True)
        ])

    def open(self, kv: SequenceKV, match: PrefixMatch) -> None:
        """Give a sequence without tables the matched prefix."""
        if kv.tables:
            raise InvariantError("a sequence that already holds KV was opened again")
        for pool, group, blocks in zip(self.pools, self.groups, match.blocks, strict=True):
            first = self._first_needed(group, match.num_tokens)
            for block in blocks[first:]:
                pool.acquire(block)
            kv.tables.append(BlockTable(list(blocks), first_live=first))
        kv.num_registered = match.num_tokens // self.block_size

    def count_query(self, num_tokens: int, num_hit: int) -> None:
        """Record one request's look-up, once, when it is admitted."""
        self.stats.prefix_queries += 1
        self.stats.prefix_query_tokens += num_tokens
        self.stats.prefix_hit_tokens += num_hit

    def fits(self, num_tokens: int, match: PrefixMatch | None = None) -> bool:
        """Could a new sequence of `num_tokens` hold all its blocks now, on top of `match`?"""
        for index, (pool, group) in enumerate(zip(self.pools, self.groups, strict=True)):
            held = match.blocks[index] if match else []
            need = self.blocks_for(num_tokens) - len(held)
            if group.window is not None:
                need = min(need, self._window_blocks(group.window))
            idle = sum(1 for b in held if b != NO_BLOCK and pool.references(b) == 0)
            if need > pool.num_available - idle:
                return False
        return True

    # ---- growth

    def extend(self, kv: SequenceKV, num_tokens: int, write_from: int) -> list[tuple[int, int, int]] | None:
        """Slots for tokens up to `num_tokens`, where those from `write_from` on are about to be written.

        Returns copies (group, source, target) to make first, or None (and no change) when blocks are short.
        """
        wanted = self.blocks_for(num_tokens)
        first_written = write_from // self.block_size
        for pool, table in zip(self.pools, kv.tables, strict=True):
            shared = sum(pool.references(b) > 1 for b in table.blocks[first_written:])
            if wanted - len(table.blocks) + shared > pool.num_available:
                return None
        copies: list[tuple[int, int, int]] = []
        for index, (pool, table) in enumerate(zip(self.pools, kv.tables, strict=True)):
            for i in range(first_written, len(table.blocks)):
                if pool.references(table.blocks[i]) > 1:
                    copies.append((index, table.blocks[i], self._copy_on_write(index, table, i)))
            while len(table.blocks) < wanted:
                table.blocks.append(pool.allocate())
        return copies

    def _copy_on_write(self, index: int, table: BlockTable, i: int) -> int:
        target = self.pools[index].allocate()
        self._give_back(index, [table.blocks[i]])
        table.replace(i, target)
        self.stats.copies_on_write += 1
        return target

    def leave_window(self, kv: SequenceKV, position: int) -> None:
        """Give back blocks that no token from `position` on can see. Unpublished ones wait until they are."""
        for index, (group, table) in enumerate(zip(self.groups, kv.tables, strict=True)):
            if group.window is None:
                continue
            end = self._first_needed(group, position)
            if self.prefix_caching:
                end = min(end, kv.num_registered)
            if end <= table.first_live:
                continue
            self._give_back(index, table.blocks[table.first_live : end])
            table.blocks[table.first_live : end] = [NO_BLOCK] * (end - table.first_live)
            table.first_live = end

    def publish(self, kv: SequenceKV, tokens: list[int], num_confirmed: int) -> None:
        """Register the full blocks among the first `num_confirmed` tokens, whose KV is known to be written.

        Where another block already caches the same prefix the sequence changes over to that one and gives its own
        back: memory is saved, and whoever holds a cached block holds its registered parent too.
        """
        full = num_confirmed // self.block_size
        if not self.prefix_caching or full <= kv.num_registered:
            return
        hashes = self.chain.extend(kv, tokens, num_confirmed)
        for i in range(kv.num_registered, full):
            for index, (pool, table) in enumerate(zip(self.pools, kv.tables, strict=True)):
                block = table.blocks[i]
                if block == NO_BLOCK:
                    continue
                other = pool.lookup(hashes[i])
                if other == NO_BLOCK:
                    parent = table.blocks[i - 1] if i and pool.chained else NO_BLOCK
                    pool.register(block, hashes[i], parent)
                elif other != block:
                    pool.acquire(other)
                    table.replace(i, other)
                    self._give_back(index, [block])
                    self.stats.blocks_deduplicated += 1
        kv.num_registered = full

    def fork(self, kv: SequenceKV) -> SequenceKV:
        """A second sequence over the same blocks; whoever writes a shared one first gets a copy."""
        tables = []
        for pool, table in zip(self.pools, kv.tables, strict=True):
            for block in table.blocks[table.first_live :]:
                pool.acquire(block)
            tables.append(BlockTable(list(table.blocks), first_live=table.first_live))
        return SequenceKV(kv.key, tables, list(kv.hashes), kv.num_registered)

    # ---- giving back

    def free(self, kv: SequenceKV) -> None:
        """Give back all that a sequence holds, deepest block first."""
        for index, table in enumerate(kv.tables):
            self._give_back(index, table.blocks[: table.first_live - 1 if table.first_live else None : -1])
        kv.tables = []
        kv.num_registered = 0

    def _give_back(self, group: int, blocks: list[int]) -> None:
        if self._newest_submitted > self._newest_done:
            self._limbo.append((self._newest_submitted, group, blocks))
        else:
            self.pools[group].release(blocks)

    def steps_submitted(self, step: int) -> None:
        """Plans up to `step` are under way and may name any block held so far."""
        self._newest_submitted = step

    def steps_done(self, step: int) -> None:
        """Plans up to `step` are complete: what was given back before them is reusable now."""
        self._newest_done = step
        while self._limbo and self._limbo[0][0] <= step:
            _, group, blocks = self._limbo.popleft()
            self.pools[group].release(blocks)

    @property
    def waits_for_limbo(self) -> bool:
        """Blocks will come free by themselves once the plans in flight are done."""
        return bool(self._limbo)

    def drop_cached(self) -> int:
        """Forget every prefix that nobody uses."""
        return sum(pool.drop_cached() for pool in self.pools)

    # ---- arithmetic

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _window_blocks(self, window: int) -> int:
        return self.blocks_for(window) + 1

    def _first_needed(self, group: CacheGroup, position: int) -> int:
        """First table entry that a token at `position` can still see."""
        return 0 if group.window is None else max(0, position - group.window + 1) // self.block_size

    def _window_held(self, group: CacheGroup, blocks: list[int], length: int) -> bool:
        first = self._first_needed(group, length * self.block_size)
        return group.window is None or NO_BLOCK not in blocks[first:length]

    # ---- self-examination

    def check(self, holders: list[SequenceKV]) -> None:
        """Every invariant of every pool, and that references are exactly those of `holders` and limbo."""
        for index, pool in enumerate(self.pools):
            pool.check()
            counts = [0] * pool.num_blocks
            for kv in holders:
                for table in kv.tables[index : index + 1]:
                    for block in table.blocks[table.first_live :]:
                        counts[block] += 1
            for _, group, blocks in self._limbo:
                for block in blocks if group == index else ():
                    counts[block] += 1
            for block, count in enumerate(counts):
                if count != pool.references(block):
                    raise InvariantError(
                        f"KV block {block} of group {index} counts {pool.references(block)} references, {count} exist")


def _leading(blocks: list[int]) -> int:
    """How many entries come before the first miss."""
    return blocks.index(NO_BLOCK) if NO_BLOCK in blocks else len(blocks)
