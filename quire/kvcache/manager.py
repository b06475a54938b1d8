"""KV slots for sequences: find a cached prefix, grow, copy on write, publish full blocks, give back.

Works on block numbers only. Each cache group (layers with the same window) has its own pool, and each sequence one
block table per group. Most models have one group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice

from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.connector import KVConnector, Lookup, unless_it_breaks
from quire.kvcache.device_match import DevicePrefixes
from quire.kvcache.events import KVEvents
from quire.kvcache.eviction import EVICTION_POLICIES
from quire.kvcache.examination import compare_counts, count_blocks, finish, zeros
from quire.kvcache.leases import Leases
from quire.kvcache.matching import GroupWindow as GroupWindow
from quire.kvcache.matching import valid_in_windows
from quire.kvcache.move_cost import MoveCost
from quire.kvcache.prefix import HashChain
from quire.kvcache.reservations import Reservation, Reservations
from quire.kvcache.stats import CacheStats
from quire.kvcache.table import BlockTable, PrefixMatch, SeenPrefix, SequenceKV, tier_and_block
from quire.kvcache.tier_match import TierPrefixes
from quire.kvcache.token_prefix import TokenPrefix
from quire.kvcache.transfers import Fetch, Move, TransferLedger

Copy = tuple[int, int, int]
"""Group, source block, target block."""


class KVCacheManager:
    """The scheduler's view of KV memory.

    Contract: a sequence holds a reference on every block of its tables. Blocks given back while a submitted
    plan may still name them wait in limbo until that plan is done (`steps_submitted`, `steps_done`).
    Copies on write are collected for the plan being drafted (`take_copies`) and made in order, before its forward
    pass. A transfer between tiers holds its blocks until it has reported (`transfers`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        groups: tuple[GroupWindow, ...] = (GroupWindow(),),
        prefix_caching: bool = True,
        eviction_policy: str = "lru",
        secret: bytes | None = None,
        tiers: Sequence[KVConnector] = (),
        cost: MoveCost | None = None,
        block_bytes: tuple[int, ...] = (),
        group_blocks: tuple[int, ...] = (),
    ) -> None:
        """`group_blocks`: blocks of each group, if window groups have fewer than the `num_blocks` of the others."""
        self.num_blocks = num_blocks
        self._group_blocks = group_blocks or (num_blocks,) * len(groups)
        self.block_size = block_size
        self.groups = groups
        self.prefix_caching = prefix_caching
        self.has_windows = any(group.window is not None for group in groups)
        self.tiers = list(tiers)
        """Tiers other than the device, the nearest first."""
        self.cost = cost
        """Decides whether fetching pays; None: what a tier holds is always fetched."""
        self.block_bytes = block_bytes or (0,) * len(groups)
        """Bytes of one block, by group."""
        self.copies: list[Copy] = []
        self._policy = EVICTION_POLICIES[eviction_policy]
        self.transfers = TransferLedger(self._give_back, self._left, self.free)
        self.leases = Leases(self.free)
        self.reservations = Reservations(self.free)
        self.events = KVEvents(self.tiers, self.transfers, self.fork, self._take_cached, self.block_bytes)
        self.pools = self._empty_pools()
        self._prefixes = DevicePrefixes(groups, self.pools, block_size)
        self._tier_prefixes = TierPrefixes(groups, self.pools, block_size, self.tiers, self.block_bytes)
        self.chain = HashChain(block_size, secret)
        self.stats = CacheStats()
        self._limbo: deque[tuple[int, int, list[int]]] = deque()
        self._newest_submitted = 0
        self._newest_done = 0

    def _empty_pools(self) -> list[BlockPool]:
        pools = [BlockPool(size, self._policy(size), chained=group.window is None)
                 for group, size in zip(self.groups, self._group_blocks, strict=True)]
        for index, pool in enumerate(pools):
            pool.on_evict = partial(self.events.evicted, index)
        return pools

    def add_tier(self, tier: KVConnector) -> None:
        """Add a tier, farther away than the existing ones; before the first request."""
        self.tiers.append(tier)
        self.events.add_tier(tier)

    @property
    def swap_tier(self) -> KVConnector | None:
        """The tier that KV of preempted groups can be swapped to."""
        return next((tier for tier in self.tiers if tier.swaps), None)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that fits if it has the pool to itself."""
        return self.num_blocks * self.block_size

    @property
    def num_evicted(self) -> int:
        """Cached blocks evicted, over all groups."""
        return sum(pool.num_evicted for pool in self.pools)

    # ---- admission

    def name_prompt(self, kv: SequenceKV, tokens: list[int]) -> None:
        """Hash a prompt when its request arrives, so that planning a step need not."""
        if self.prefix_caching:
            self.chain.extend(kv, tokens, len(tokens))

    def match(self, kv: SequenceKV, tokens: list[int], lookups: Sequence[Lookup] = (),
              num_tokens: int | None = None) -> PrefixMatch:
        """The longest cached prefix valid in every group. Never all of the first `num_tokens`: one must be computed.

        Blocks that tiers found (`lookups`, from `ask`) extend it if fetching is cheaper than computing; each block
        comes from the nearest tier that has it.
        """
        if not self.prefix_caching:
            return self.no_match()
        here, full = self._match_here(kv, tokens, num_tokens)
        if not lookups or here.num_tokens == full * self.block_size:
            return here
        known = kv.seen.with_tiers
        if known is None or known.lost or kv.seen.lookups is not lookups:
            known = self._tier_prefixes.best(here, kv.hashes[:full], lookups, self.cost)
            if kv.seen.lookups is lookups and all(lookup.settled for lookup in lookups):
                kv.seen.with_tiers = known
        return known

    def ask(self, kv: SequenceKV, tokens: list[int], num_tokens: int | None = None) -> list[Lookup]:
        """Ask every tier, in order, what it has of the first `num_tokens`; [] if the device has all that can be used.
        The answers remain valid as long as the device's own match stays the same."""
        if not self.prefix_caching or not any(tier.offload for tier in self.tiers):
            return []
        here, full = self._match_here(kv, tokens, num_tokens)
        if here.num_tokens == full * self.block_size:
            return []
        known = kv.seen.lookups
        if known and all(lookup.settled for lookup in known):
            return known
        hashes, tokens = kv.hashes[:full], tokens[:num_tokens]
        found = []
        prefix = TokenPrefix(kv.key, tokens, len(tokens), kv.unit_keys)
        for tier in self.tiers:
            asked = hashes if tier.offload else [], len(self.groups)
            found.append(unless_it_breaks(tier, Lookup.failed(*asked), tier.lookup, *asked, prefix))
        kv.seen.lookups = found
        return found

    def _match_here(self, kv: SequenceKV, tokens: list[int], num_tokens: int | None) -> tuple[PrefixMatch, int]:
        """The device's match for these tokens, and how many blocks of them could be used at most."""
        usable = (len(tokens) if num_tokens is None else num_tokens) - 1
        full = usable // self.block_size
        return self._prefixes.match(kv.seen, self.chain.extend(kv, tokens, usable), full), full

    def no_match(self) -> PrefixMatch:
        return PrefixMatch(0, [[] for _ in self.groups])

    def open(self, kv: SequenceKV, match: PrefixMatch, num_new: int = 0) -> Fetch | None:
        """Give a sequence without tables the matched prefix, and make room for `num_new` tokens after it.

        Starts fetching the blocks of other tiers; the sequence then waits for the returned `Fetch`. None, and no
        change, if blocks it needs are still being copied out, or if a tier lost what it had found (`match.lost`).
        """
        if kv.tables:
            raise InvariantError("a sequence that already holds KV was opened again")
        # Hold the matched blocks first: making room evicts.
        held = self._hold(kv, match)
        if held is None:
            return None
        wanted = 0 if match.num_outside else self.blocks_for(match.num_tokens + num_new)
        needs = [sum(b < NO_BLOCK for b in blocks) + max(0, wanted - len(blocks)) for blocks in match.blocks]
        if not self.make_room(needs):
            self._let_go(match, held)
            return None
        fetch = Fetch()
        registered = match.num_tokens // self.block_size
        moves: dict[int, list[Move]] = {}
        for index, (group, blocks) in enumerate(zip(self.groups, match.blocks, strict=True)):
            table = BlockTable(list(blocks), first_live=group.first_needed(match.num_tokens, self.block_size))
            for i, code in enumerate(blocks):
                if code < NO_BLOCK:
                    tier, place = tier_and_block(code)
                    table.blocks[i] = self.pools[index].allocate()
                    moves.setdefault(tier, []).append(Move(index, table.blocks[i], place, kv.hashes[i]))
                    registered = min(registered, i)
            kv.tables.append(table)
        kv.seen = SeenPrefix()
        # Fetched blocks are registered only when they have arrived.
        kv.num_registered = registered
        self._start_fetch(kv, fetch, moves)
        self.stats.tier_hits += match.num_outside
        self.stats.tier_hit_tokens += match.outside_tokens
        return fetch

    def _start_fetch(self, kv: SequenceKV, fetch: Fetch, moves: dict[int, list[Move]]) -> None:
        """One transfer per tier, its moves in token order, so that the prefix arrives from the front."""
        places = {(group, block): i for group, table in enumerate(kv.tables) for i, block in enumerate(table.blocks)}
        for tier, mine in sorted(moves.items()):
            mine.sort(key=lambda move: (places[move.group, move.device], move.group))
            for move in mine:
                self.pools[move.group].share(move.device)
                self.stats.bytes_fetched += self.block_bytes[move.group]
            self.transfers.start(self.tiers[tier], False, mine, fetch=fetch)

    def _hold(self, kv: SequenceKV, match: PrefixMatch) -> list[tuple[int, int]] | None:
        """Hold the match's blocks on the device and in tiers; returns those in tiers, or None if one has gone."""
        held: list[tuple[int, int]] = []
        for index, blocks in enumerate(match.blocks):
            for i, code in enumerate(blocks):
                if code < NO_BLOCK:
                    tier, place = tier_and_block(code)
                    found = self.tiers[tier]
                    if not unless_it_breaks(found, False, found.hold, index, place, kv.hashes[i]):
                        match.lookups[tier].forget_from(index, i)
                        match.lost = True
                        for group, known in held:
                            tier, place = tier_and_block(known)
                            self.tiers[tier].give_back(group, place)
                        return None
                    held.append((index, code))
        for index, blocks in enumerate(match.blocks):
            for block in blocks:
                if block > NO_BLOCK:
                    self.pools[index].acquire(block)
        return held

    def _let_go(self, match: PrefixMatch, held: list[tuple[int, int]]) -> None:
        for index, code in held:
            tier, place = tier_and_block(code)
            self.tiers[tier].give_back(index, place)
        for index, blocks in enumerate(match.blocks):
            self.pools[index].release([block for block in reversed(blocks) if block > NO_BLOCK])

    def make_room(self, needs: Sequence[int]) -> bool:
        """Are so many blocks of each group free now? Evicts cached ones; those copied to a tier become free later."""
        return all([pool.make_room(need) for pool, need in zip(self.pools, needs, strict=True)])

    def begin_draft(self, num_running: int) -> None:
        """A new step is being planned. If evicted blocks are copied to a tier first, evict some ahead of need, so that
        no decoding sequence waits for a copy: one per running sequence, at most an eighth of the pool."""
        for pool in self.pools:
            pool.num_promised = 0
        if any(tier.offload for tier in self.tiers):
            for pool in self.pools:
                if not pool.make_room(min(num_running, pool.num_blocks // 8)):
                    pool.num_promised = 0

    def cut(self, kv: SequenceKV, num_blocks: int) -> int:
        """Keep at most the first `num_blocks` of a sequence's tables, and of those only what is a valid prefix in every
        group; returns the number of tokens kept."""
        tables = kv.tables
        kept = valid_in_windows(
            self.groups, self.block_size,
            lambda group, i: i >= tables[group].first_live and tables[group].blocks[i] != NO_BLOCK,
            min((min(num_blocks, len(table.blocks)) for table in tables), default=0))
        for index, table in enumerate(kv.tables):
            self._give_back(index, table.blocks[max(kept, table.first_live) :][::-1])
            del table.blocks[kept:]
            table.first_live = min(table.first_live, kept)
            table.dirty_from = min(table.dirty_from, kept)
        kv.num_registered = min(kv.num_registered, kept)
        return kept * self.block_size

    def take_copies(self) -> list[Copy]:
        """Take the copies of the plan being drafted, in the order in which they must be made."""
        copies, self.copies = self.copies, []
        return copies

    # ---- blocks written by other engines

    def reserve(self, kv: SequenceKV, match: PrefixMatch, num_tokens: int, deadline: float,
                position: int | None = None) -> Reservation | None:
        """Reserve blocks for tokens up to `num_tokens`; those after the device's `match` are written by another engine.

        The sequence continues at `position`, by default where the written tokens end: window groups get blocks only
        for what a token there can see. The sequence shares the blocks with the reservation. None, and no change, if
        there is no room now.
        """
        if match.num_outside:
            raise InvariantError("what is reserved for a writer is not fetched from a tier")
        seen = self._seen_from(match, num_tokens if position is None else position)
        wanted = self.blocks_for(num_tokens)
        for pool, blocks in zip(self.pools, seen.blocks, strict=True):
            idle = sum(1 for b in blocks if b > NO_BLOCK and pool.references(b) == 0)
            if wanted - len(blocks) > pool.num_available + pool.num_leaving - idle:
                return None
        if self.open(kv, seen, num_tokens - match.num_tokens) is None:
            return None
        for group, table in zip(self.groups, kv.tables, strict=True):
            table.first_live = self.first_needed(group, num_tokens if position is None else position)
        if not self._grow(kv, wanted, wanted):
            raise InvariantError("the cache promised room for a reservation and then had none")
        own = self.fork(kv)
        return self.reservations.open(own, match.num_tokens, num_tokens, self.block_size, deadline)

    def _seen_from(self, match: PrefixMatch, position: int) -> PrefixMatch:
        """The same match without blocks that the windows of a token at `position` have passed."""
        blocks = []
        for group, held in zip(self.groups, match.blocks, strict=True):
            first = self.first_needed(group, position)
            blocks.append([NO_BLOCK] * first + held[first:])
        return PrefixMatch(match.num_tokens, blocks)

    def count_query(self, num_tokens: int, match: PrefixMatch) -> None:
        """Count one request's prefix query, once, when it is admitted."""
        self.stats.prefix_queries += 1
        self.stats.prefix_query_tokens += num_tokens
        self.stats.prefix_hit_tokens += match.num_tokens

    def fits(self, num_tokens: int, match: PrefixMatch, first_chunk: int, extra: int = 0) -> bool:
        """Could a new sequence of `num_tokens` get its blocks now, beyond those in `match`, and `extra` more?

        Its first step computes `first_chunk` tokens, which need blocks even if a window passes them later.
        """
        for index, (pool, group) in enumerate(zip(self.pools, self.groups, strict=True)):
            held = match.blocks[index]
            here = len(held) if not match.num_outside else sum(block >= NO_BLOCK for block in held)
            need = self.blocks_for(num_tokens) - here
            at_once = 0
            if group.window is not None:
                at_once = self.blocks_for(match.num_tokens + first_chunk) - here
                need = max(at_once, min(need, self._window_blocks(group.window)))
            wanted = max(at_once, pool.at_most(need + extra))
            if wanted > pool.num_available + pool.num_leaving - self._idle(pool, match, index):
                return False
        return True

    def _idle(self, pool: BlockPool, match: PrefixMatch, group: int) -> int:
        """Unreferenced blocks of a match: available now, but not any more once the match is held."""
        held = match.blocks[group]
        if pool.chained and not match.num_outside:
            return pool.num_idle_of(held)
        # A window group's first entries are NO_BLOCK; blocks of tiers may be anywhere.
        first = 0 if match.num_outside else self.first_needed(self.groups[group], match.num_tokens)
        return sum(1 for b in islice(held, first, None) if b > NO_BLOCK and pool.references(b) == 0)

    # ---- growth

    def extend(self, kv: SequenceKV, num_tokens: int, write_from: int) -> bool:
        """Provide slots for tokens up to `num_tokens`; those from `write_from` on are about to be written.

        False, and no change, if there are not enough blocks.
        """
        first_written = write_from // self.block_size
        last_written = (num_tokens - 1) // self.block_size
        # A decoding sequence nearly always writes into a last block that only it holds: nothing to do.
        if first_written == last_written:
            for group, table in enumerate(kv.tables):
                blocks = table.blocks
                if len(blocks) != last_written + 1 or self.pools[group].counts[blocks[last_written]] != 1:
                    break
            else:
                return True
        return self._grow(kv, last_written + 1, first_written)

    def _grow(self, kv: SequenceKV, wanted: int, first_written: int) -> bool:
        needs = []
        for pool, table in zip(self.pools, kv.tables, strict=True):
            # The table may be longer than wanted: it had room for drafts that were rejected.
            shared = sum(pool.references(b) > 1 for b in table.blocks[first_written:wanted])
            needs.append(max(0, wanted - len(table.blocks)) + shared)
            if needs[-1] > pool.num_available + pool.num_leaving:
                return False
        if not self.make_room(needs):
            return False
        for index, (pool, table) in enumerate(zip(self.pools, kv.tables, strict=True)):
            for i in range(first_written, min(wanted, len(table.blocks))):
                holders = pool.references(table.blocks[i])
                if holders > 1:
                    self._copy_on_write(index, kv, i)
                elif holders < 1:
                    raise InvariantError(f"KV block {table.blocks[i]} is in a table but counts no holder")
            pool.allocate_into(table.blocks, wanted - len(table.blocks))
        return True

    def _copy_on_write(self, index: int, kv: SequenceKV, i: int) -> None:
        """Replace a shared block by a fresh copy. Others keep the block; its last holder writes it without copying."""
        table, pool = kv.tables[index], self.pools[index]
        source, target = table.blocks[i], pool.allocate()
        table.replace(i, target)
        pool.release([source])
        self.copies.append((index, source, target))
        kv.num_copies += 1
        self.stats.copies_on_write += 1

    def leave_window(self, kv: SequenceKV, position: int) -> None:
        """Give back blocks that no token from `position` on can see; unpublished ones only after they are published."""
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

    def publish(self, kv: SequenceKV, tokens: list[int], num_confirmed: int, awaited: bool = False) -> None:
        """Register the full blocks among the first `num_confirmed` tokens, whose KV is known to be written.

        If another block already caches the same prefix, the sequence switches to that one and gives its own back.
        This saves memory, and a holder of a cached block then always holds its registered parent too. `awaited`: a
        reservation holds the same blocks, so none may be replaced; publishing stops before the first such block.
        """
        full = num_confirmed // self.block_size
        if not self.prefix_caching or full <= kv.num_registered:
            return
        hashes = self.chain.extend(kv, tokens, num_confirmed)
        fresh: list[tuple[int, int]] = []
        for i in range(kv.num_registered, full):
            if awaited and self._cached_elsewhere(kv, i, hashes[i]):
                full = i
                break
            for index, (pool, table) in enumerate(zip(self.pools, kv.tables, strict=True)):
                block = table.blocks[i]
                if block == NO_BLOCK:
                    continue
                other = pool.lookup(hashes[i])
                if other == NO_BLOCK:
                    parent = table.blocks[i - 1] if i and pool.chained else NO_BLOCK
                    pool.register(block, hashes[i], parent)
                    fresh.append((index, i))
                elif other != block:
                    pool.acquire(other)
                    table.replace(i, other)
                    self._give_back(index, [block])
                    self.stats.blocks_deduplicated += 1
        kv.num_registered = full
        if fresh:
            self.events.stored(kv, fresh)
        self.events.grown(kv, tokens, full * self.block_size)

    def _take_cached(self, group: int, key: bytes) -> int:
        """Acquire the block that caches a prefix in a window group; NO_BLOCK if there is none."""
        pool = self.pools[group]
        block = NO_BLOCK if pool.chained else pool.lookup(key)
        if block != NO_BLOCK:
            pool.acquire(block)
        return block

    def _cached_elsewhere(self, kv: SequenceKV, i: int, key: bytes) -> bool:
        """Does another block than the sequence's own cache the prefix that ends with entry `i`?"""
        return any(table.blocks[i] != NO_BLOCK and pool.lookup(key) not in (NO_BLOCK, table.blocks[i])
                   for pool, table in zip(self.pools, kv.tables, strict=True))

    def fork(self, kv: SequenceKV, num_blocks: int | None = None) -> SequenceKV:
        """A second sequence over the same blocks, or over the first `num_blocks`. Whichever writes into a shared block
        first gets a copy."""
        tables = []
        for pool, table in zip(self.pools, kv.tables, strict=True):
            for block in table.blocks[table.first_live : num_blocks]:
                pool.share(block)
            tables.append(BlockTable(table.blocks[:num_blocks], first_live=table.first_live))
        # The two may differ from the first token not computed yet: hashes beyond registered blocks are not shared.
        return SequenceKV(kv.key, tables, kv.hashes[: kv.num_registered], kv.num_registered,
                          kv.unit_keys[: kv.num_offered], kv.num_offered)

    # ---- giving back

    def free(self, kv: SequenceKV) -> None:
        """Give back all blocks of a sequence, deepest first."""
        tables, kv.tables, kv.num_registered = kv.tables, [], 0
        for index, table in enumerate(tables):
            self._give_back(index, table.blocks[table.first_live :][::-1])

    def _left(self, group: int, block: int) -> None:
        """An evicted block has been copied to a tier: free it. It was unreferenced, so no plan in flight names it."""
        self.pools[group].left(block)

    def _give_back(self, group: int, blocks: list[int]) -> None:
        if self._newest_submitted > self._newest_done:
            self._limbo.append((self._newest_submitted, group, blocks))
        else:
            self.pools[group].release(blocks)

    def steps_submitted(self, step: int) -> None:
        """Plans up to `step` are in flight and may name any block held so far."""
        self._newest_submitted = step

    def steps_done(self, step: int) -> None:
        """Plans up to `step` are done: blocks given back while they were the newest in flight are reusable now."""
        self._newest_done = step
        while self._limbo and self._limbo[0][0] <= step:
            _, group, blocks = self._limbo.popleft()
            self.pools[group].release(blocks)

    @property
    def room_is_coming(self) -> bool:
        """Whether blocks will become free without preemption: when plans in flight are done, copies to a tier are done,
        or another engine lets go of them."""
        return bool(self._limbo) or self.transfers.frees_blocks or self.held_outside

    def expire(self, now: float) -> None:
        """Give up what is overdue: transfers, reservations that were not written, leases."""
        self.transfers.expire(now)
        self.reservations.expire(now)
        self.leases.expire(now)

    @property
    def next_end(self) -> float | None:
        """The next time at which `expire` has something to do."""
        ends = [self.reservations.next_end, self.leases.next_end, *self.transfers.deadlines]
        return min((end for end in ends if end is not None), default=None)

    @property
    def held_outside(self) -> bool:
        """Whether blocks will become free once another engine reports that it has read or written them."""
        return self.leases.num_read > 0 or self.reservations.num_quarantined > 0

    def close(self) -> None:
        """The engine ends."""
        for tier in self.tiers:
            tier.close()

    def drop_cached(self) -> int:
        """Evict every cached prefix that no sequence uses."""
        dropped = sum(tier.drop_cached() for tier in self.tiers) + sum(pool.drop_cached() for pool in self.pools)
        self.events.cleared()
        return dropped

    @property
    def resettable(self) -> bool:
        """Whether no other engine and no transfer can still write into a block."""
        return not (self.transfers.under_way or self.transfers.drafted or len(self.reservations))

    def reset(self) -> None:
        """Reset to all blocks free: for an engine at rest whose bookkeeping was found wrong."""
        if not self.resettable:
            raise InvariantError("the cache was to start afresh while blocks are still being written")
        before = list(self.pools)
        self.pools[:] = self._empty_pools()
        for pool, old in zip(self.pools, before, strict=True):
            pool.succeed(old)
        self._limbo.clear()
        self.copies = []
        self.leases.clear()
        for tier in self.tiers:
            tier.reset()
        self.events.cleared()

    # ---- arithmetic

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _window_blocks(self, window: int) -> int:
        return self.blocks_for(window) + 1

    def first_needed(self, group: GroupWindow, position: int) -> int:
        """First table entry that a token at `position` can still see."""
        return group.first_needed(position, self.block_size)

    # ---- self-examination

    def check(self, holders: list[SequenceKV]) -> None:
        """Check every invariant of every pool, and that the references are exactly those of `holders`, limbo,
        transfers, leases and reservations."""
        finish(self.examination(holders))

    def examination(self, holders: list[SequenceKV]) -> Iterator[None]:
        """`check` in parts; valid only if nothing changes between the parts."""
        holders = [*holders, *self.leases.holders, *self.reservations.holders]
        for index, pool in enumerate(self.pools):
            yield from pool.examination()
            counts = zeros(pool.num_blocks)
            held = (table.blocks[table.first_live :] for kv in holders for table in kv.tables[index : index + 1])
            yield from count_blocks(counts, held)
            yield from count_blocks(counts, (blocks for _, group, blocks in self._limbo if group == index))
            yield from count_blocks(counts, [list(self.transfers.held_on_device(index))])
            yield from compare_counts(counts, pool.counts, f"group {index}")
