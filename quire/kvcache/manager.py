"""Slots for sequences: find a cached prefix, grow, copy on write, publish full blocks, give back.

Works on block numbers only. Every group of layers with its own kind of KV has its own pool and every sequence
one table per group; one group is the ordinary case.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.connector import KVConnector
from quire.kvcache.eviction import EVICTION_POLICIES
from quire.kvcache.examination import count_blocks, finish, parts
from quire.kvcache.move_cost import MoveCost
from quire.kvcache.prefix import HashChain
from quire.kvcache.table import BlockTable, PrefixMatch, SequenceKV, outside


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
    copies_on_write: int = 0
    blocks_deduplicated: int = 0
    tier_hits: int = 0
    """Blocks of admitted requests that another tier brought back."""
    tier_hit_tokens: int = 0
    blocks_offloaded: int = 0
    """Evicted blocks whose content a tier kept."""
    bytes_offloaded: int = 0
    bytes_fetched: int = 0


Copy = tuple[int, int, int] | tuple[int, int, int, str, str]
"""Group, source block, target block; their tiers if not both are the device."""
DEVICE = "device"


class KVCacheManager:
    """The scheduler's view of KV memory.

    Contract: a sequence holds a reference on every block of its tables. Blocks given back while submitted
    plans may still name them wait in limbo until those plans are done (`steps_submitted`, `steps_done`).
    Copies that become necessary are collected for the plan being drafted (`take_copies`). They are made in
    their order and before its forward pass, so a block may be given away in the draft that copies it.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[CacheGroup, ...] = (CacheGroup(),),
        prefix_caching: bool = True,
        eviction_policy: str = "lru",
        secret: bytes | None = None,
        tier: KVConnector | None = None,
        cost: MoveCost | None = None,
        block_bytes: tuple[int, ...] = (),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.groups = groups
        self.prefix_caching = prefix_caching
        self.has_windows = any(group.window is not None for group in groups)
        self.tier = tier
        self.cost = cost
        """None: what a tier holds is always worth fetching."""
        self.block_bytes = block_bytes or (0,) * len(groups)
        """Bytes of one block, by group."""
        self.copies: list[Copy] = []
        self._policy = EVICTION_POLICIES[eviction_policy]
        self.pools = self._empty_pools()
        self.chain = HashChain(block_size, secret)
        self.stats = CacheStats()
        self._limbo: deque[tuple[int, int, list[int]]] = deque()
        self._newest_submitted = 0
        self._newest_done = 0

    def _empty_pools(self) -> list[BlockPool]:
        size = self.num_blocks
        pools = [BlockPool(size, self._policy(size), chained=group.window is None) for group in self.groups]
        if self.tier is not None and self.tier.offload:
            for index, pool in enumerate(pools):
                pool.on_evict = partial(self._offload, index)
        return pools

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the pool holds when it has it to itself."""
        return self.num_blocks * self.block_size

    @property
    def num_evicted(self) -> int:
        """Cached blocks that gave up their place, over all groups."""
        return sum(pool.num_evicted for pool in self.pools)

    # ---- admission

    def match(self, kv: SequenceKV, tokens: list[int]) -> PrefixMatch:
        """The longest cached prefix valid in every group; never all of `tokens`: one is computed.

        A tier's blocks extend it where fetching them is cheaper than computing.
        """
        if not self.prefix_caching:
            return self.no_match()
        hashes = self.chain.extend(kv, tokens, len(tokens) - 1)[: (len(tokens) - 1) // self.block_size]
        here = self._match(hashes, lambda index, key: self.pools[index].lookup(key))
        if self.tier is None or not self.tier.offload or here.num_tokens == len(hashes) * self.block_size:
            return here
        found = self._match(hashes, self._find_anywhere)
        found.outside_tokens = found.num_tokens - here.num_tokens
        return found if self._worth_fetching(found) else here

    def _match(self, hashes: list[bytes], find: Callable[[int, bytes], int]) -> PrefixMatch:
        length = len(hashes)
        found: list[list[int]] = [[] for _ in self.groups]
        for index, group in enumerate(self.groups):
            if group.window is None:
                found[index] = _leading(index, hashes[:length], find)
                length = len(found[index])
        for index, group in enumerate(self.groups):
            if group.window is not None:
                found[index] = [find(index, key) for key in hashes[:length]]
        length = self._valid_in_windows(found, length)
        blocks = []
        for index, group in enumerate(self.groups):
            first = self.first_needed(group, length * self.block_size)
            blocks.append([NO_BLOCK] * first + found[index][first:length])
        num_outside = sum(block < NO_BLOCK for held in blocks for block in held)
        return PrefixMatch(length * self.block_size, blocks, num_outside)

    def _find_anywhere(self, index: int, key: bytes) -> int:
        block = self.pools[index].lookup(key)
        if block == NO_BLOCK and self.tier is not None:
            block = self.tier.match(index, key)
            return block if block == NO_BLOCK else outside(block)
        return block

    def _worth_fetching(self, match: PrefixMatch) -> bool:
        if self.cost is None or not match.num_outside:
            return match.outside_tokens > 0
        return self.cost.move(self._outside_bytes(match)) < self.cost.recompute(match.outside_tokens)

    def _outside_bytes(self, match: PrefixMatch) -> int:
        return sum(size * sum(b < NO_BLOCK for b in held)
                   for size, held in zip(self.block_bytes, match.blocks, strict=True))

    def no_match(self) -> PrefixMatch:
        return PrefixMatch(0, [[] for _ in self.groups])

    def _valid_in_windows(self, found: list[list[int]], length: int) -> int:
        """The longest prefix, at most `length` blocks, whose last window is cached in every window group."""
        gap = length
        while gap >= 0:
            length, gap = gap, -1
            for group, blocks in zip(self.groups, found, strict=True):
                if group.window is not None:
                    first = self.first_needed(group, length * self.block_size)
                    # Every prefix that ends behind a gap and inside its window has that gap too.
                    gap = max(gap, _last_gap(blocks, first, length))
        return length

    def open(self, kv: SequenceKV, match: PrefixMatch) -> None:
        """Give a sequence without tables the matched prefix; the caller knows that it fits."""
        if kv.tables:
            raise InvariantError("a sequence that already holds KV was opened again")
        hold = self.tier.hold if self.tier is not None else None
        for index, blocks in enumerate(match.blocks):
            # First hold all that is there: allocating may evict.
            for block in blocks:
                if block > NO_BLOCK:
                    self.pools[index].acquire(block)
                elif block < NO_BLOCK and hold is not None:
                    hold(index, outside(block))
        registered = match.num_tokens // self.block_size
        for index, (group, blocks) in enumerate(zip(self.groups, match.blocks, strict=True)):
            table = BlockTable(list(blocks), first_live=self.first_needed(group, match.num_tokens))
            for i, block in enumerate(blocks):
                if block < NO_BLOCK:
                    table.blocks[i] = self._fetch(index, outside(block), kv.hashes[i])
                    registered = min(registered, i)
            kv.tables.append(table)
        # What was fetched counts as registered only when its copy is known to be made.
        kv.num_registered = registered
        self.stats.tier_hits += match.num_outside
        self.stats.tier_hit_tokens += match.outside_tokens

    def _fetch(self, index: int, source: int, key: bytes | None) -> int:
        """A block of the device that gets the content of a held block of the tier."""
        if self.tier is None:
            raise InvariantError("a block was to be fetched from a tier that is not there")
        target = self.pools[index].allocate()
        self.copies.append((index, source, target, self.tier.name, DEVICE))
        self.tier.fetched(index, source, key)
        self.stats.bytes_fetched += self.block_bytes[index]
        return target

    def _offload(self, index: int, block: int, key: bytes) -> None:
        """A block is being evicted: let the tier keep what it holds."""
        target = NO_BLOCK if self.tier is None else self.tier.evicted(index, key)
        if self.tier is not None and target != NO_BLOCK:
            self.copies.append((index, block, target, DEVICE, self.tier.name))
            self.stats.blocks_offloaded += 1
            self.stats.bytes_offloaded += self.block_bytes[index]

    def take_copies(self) -> list[Copy]:
        """Copies of the plan being drafted, in the order in which they must be made."""
        copies, self.copies = self.copies, []
        return copies

    def count_query(self, num_tokens: int, match: PrefixMatch) -> None:
        """Record one request's look-up, once, when it is admitted."""
        self.stats.prefix_queries += 1
        self.stats.prefix_query_tokens += num_tokens
        self.stats.prefix_hit_tokens += match.num_tokens

    def fits(self, num_tokens: int, match: PrefixMatch, first_chunk: int, extra: int = 0) -> bool:
        """Could a new sequence of `num_tokens` hold its blocks now, on top of `match`, and `extra` more?

        Its first step computes `first_chunk` tokens, and they need blocks even where a window will pass them.
        """
        for index, (pool, group) in enumerate(zip(self.pools, self.groups, strict=True)):
            held = match.blocks[index]
            here = sum(block >= NO_BLOCK for block in held)
            need = self.blocks_for(num_tokens) - here
            if group.window is not None:
                at_once = self.blocks_for(match.num_tokens + first_chunk) - here
                need = max(at_once, min(need, self._window_blocks(group.window)))
            idle = sum(1 for b in held if b > NO_BLOCK and pool.references(b) == 0)
            if need + extra > pool.num_available - idle:
                return False
        return True

    # ---- growth

    def extend(self, kv: SequenceKV, num_tokens: int, write_from: int) -> bool:
        """Slots for tokens up to `num_tokens`, where those from `write_from` on are about to be written.

        False, and no change, when blocks are short.
        """
        first_written = write_from // self.block_size
        last_written = (num_tokens - 1) // self.block_size
        # A decoding sequence nearly always writes into a last block that is its own: nothing to do.
        if first_written == last_written:
            for group, table in enumerate(kv.tables):
                blocks = table.blocks
                if len(blocks) != last_written + 1 or self.pools[group].counts[blocks[last_written]] != 1:
                    break
            else:
                return True
        return self._grow(kv, last_written + 1, first_written)

    def _grow(self, kv: SequenceKV, wanted: int, first_written: int) -> bool:
        for pool, table in zip(self.pools, kv.tables, strict=True):
            shared = sum(pool.references(b) > 1 for b in table.blocks[first_written:])
            if wanted - len(table.blocks) + shared > pool.num_available:
                return False
        for index, (pool, table) in enumerate(zip(self.pools, kv.tables, strict=True)):
            for i in range(first_written, len(table.blocks)):
                holders = pool.references(table.blocks[i])
                if holders > 1:
                    self._copy_on_write(index, kv, i)
                elif holders < 1:
                    raise InvariantError(f"KV block {table.blocks[i]} is in a table but counts no holder")
            while len(table.blocks) < wanted:
                table.blocks.append(pool.allocate())
        return True

    def _copy_on_write(self, index: int, kv: SequenceKV, i: int) -> None:
        """Others go on with the block; the last of them writes it without copying."""
        table, pool = kv.tables[index], self.pools[index]
        source, target = table.blocks[i], pool.allocate()
        table.replace(i, target)
        pool.release([source])
        self.copies.append((index, source, target))
        kv.num_copies += 1
        self.stats.copies_on_write += 1

    def leave_window(self, kv: SequenceKV, position: int) -> None:
        """Give back blocks that no token from `position` on can see. Unpublished ones wait until they are."""
        for index, (group, table) in enumerate(zip(self.groups, kv.tables, strict=True)):
            if group.window is None:
                continue
            end = self.first_needed(group, position)
            if self.prefix_caching:
                end = min(end, kv.num_registered)
            if end <= table.first_live:
                continue
            self._give_back(index, table.blocks[table.first_live : end])
            table.blocks[table.first_live : end] = [NO_BLOCK] * (end - table.first_live)
            table.first_live = end

    def publish(self, kv: SequenceKV, tokens: list[int], num_confirmed: int) -> None:
        """Register the full blocks among the first `num_confirmed` tokens, whose KV is known to be written.

        Where another block already caches the same prefix the sequence changes over to that one and gives its
        own back: memory is saved, and whoever holds a cached block holds its registered parent too.
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
                pool.share(block)
            tables.append(BlockTable(list(table.blocks), first_live=table.first_live))
        # The two may differ from the first token that is not computed yet: hashes beyond it are not shared.
        return SequenceKV(kv.key, tables, kv.hashes[: kv.num_registered], kv.num_registered)

    # ---- giving back

    def free(self, kv: SequenceKV) -> None:
        """Give back all that a sequence holds, deepest block first."""
        tables, kv.tables, kv.num_registered = kv.tables, [], 0
        for index, table in enumerate(tables):
            self._give_back(index, table.blocks[table.first_live :][::-1])

    def _give_back(self, group: int, blocks: list[int]) -> None:
        if self._newest_submitted > self._newest_done:
            self._limbo.append((self._newest_submitted, group, blocks))
        else:
            self.pools[group].release(blocks)

    def steps_submitted(self, step: int) -> None:
        """Plans up to `step` are under way and may name any block held so far."""
        self._newest_submitted = step
        if self.tier is not None:
            self.tier.submitted(step)

    def steps_done(self, step: int, lost: bool = False) -> None:
        """Plans up to `step` are complete: what was given back before them is reusable now."""
        self._newest_done = step
        if self.tier is not None:
            self.tier.settled(step, not lost)
        while self._limbo and self._limbo[0][0] <= step:
            _, group, blocks = self._limbo.popleft()
            self.pools[group].release(blocks)

    @property
    def waits_for_limbo(self) -> bool:
        """Blocks will come free by themselves once the plans in flight are done."""
        return bool(self._limbo)

    def drop_cached(self) -> int:
        """Forget every prefix that nobody uses."""
        dropped = 0 if self.tier is None else self.tier.drop_cached()
        return dropped + sum(pool.drop_cached() for pool in self.pools)

    def reset(self) -> None:
        """Start afresh with every block free: for an engine at rest whose bookkeeping broke."""
        evicted = [pool.num_evicted for pool in self.pools]
        self.pools = self._empty_pools()
        for pool, count in zip(self.pools, evicted, strict=True):
            pool.num_evicted = count
        self._limbo.clear()
        self.copies = []
        if self.tier is not None:
            self.tier.reset()

    # ---- arithmetic

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _window_blocks(self, window: int) -> int:
        return self.blocks_for(window) + 1

    def first_needed(self, group: CacheGroup, position: int) -> int:
        """First table entry that a token at `position` can still see."""
        return 0 if group.window is None else max(0, position - group.window + 1) // self.block_size

    # ---- self-examination

    def check(self, holders: list[SequenceKV]) -> None:
        """Every invariant of every pool, and that references are exactly those of `holders` and limbo."""
        finish(self.examination(holders))

    def examination(self, holders: list[SequenceKV]) -> Iterator[None]:
        """The same in parts. It holds only while nothing changes between them."""
        for index, pool in enumerate(self.pools):
            yield from pool.examination()
            counts = [0] * pool.num_blocks
            held = (table.blocks[table.first_live :] for kv in holders for table in kv.tables[index : index + 1])
            yield from count_blocks(counts, held)
            yield from count_blocks(counts, (blocks for _, group, blocks in self._limbo if group == index))
            for part in parts(pool.num_blocks):
                for block in part:
                    if counts[block] != pool.counts[block]:
                        raise InvariantError(f"KV block {block} of group {index} counts {pool.counts[block]} "
                                             f"holders and has {counts[block]}")
                yield


def _leading(index: int, hashes: list[bytes], find: Callable[[int, bytes], int]) -> list[int]:
    """Blocks before the first miss."""
    blocks: list[int] = []
    for key in hashes:
        block = find(index, key)
        if block == NO_BLOCK:
            break
        blocks.append(block)
    return blocks


def _last_gap(blocks: list[int], first: int, end: int) -> int:
    """Index of the last missing block in blocks[first:end], or -1."""
    for i in range(end - 1, first - 1, -1):
        if blocks[i] == NO_BLOCK:
            return i
    return -1
