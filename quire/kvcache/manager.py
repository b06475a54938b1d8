"""Slots for sequences: find a cached prefix, grow, copy on write, publish full blocks, give back.

Works on block numbers only. Every group of layers with its own kind of KV has its own pool and every sequence
one table per group; one group is the ordinary case.
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

    Contract: a sequence holds a reference on every block of its tables. Blocks given back while submitted
    plans may still name them wait in limbo until those plans are done (`steps_submitted`, `steps_done`).
    Copies on write are collected for the plan being drafted (`take_copies`); they are made in their order and before
    its forward pass. Blocks that move between tiers are held by their transfer until it has reported (`transfers`).
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
        """`group_blocks`: where groups with a window have fewer blocks than `num_blocks`, which the others have."""
        self.num_blocks = num_blocks
        self._group_blocks = group_blocks or (num_blocks,) * len(groups)
        self.block_size = block_size
        self.groups = groups
        self.prefix_caching = prefix_caching
        self.has_windows = any(group.window is not None for group in groups)
        self.tiers = list(tiers)
        """Besides the device, the nearest first."""
        self.cost = cost
        """None: what a tier holds is always worth fetching."""
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
        """One more, farther than those that are there; before the first request."""
        self.tiers.append(tier)
        self.events.add_tier(tier)

    @property
    def swap_tier(self) -> KVConnector | None:
        """Where the KV of preempted groups can go."""
        return next((tier for tier in self.tiers if tier.swaps), None)

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the pool holds when it has it to itself."""
        return self.num_blocks * self.block_size

    @property
    def num_evicted(self) -> int:
        """Cached blocks that gave up their place, over all groups."""
        return sum(pool.num_evicted for pool in self.pools)

    # ---- admission

    def name_prompt(self, kv: SequenceKV, tokens: list[int]) -> None:
        """Hash a prompt when its request comes, so that planning steps does not."""
        if self.prefix_caching:
            self.chain.extend(kv, tokens, len(tokens))

    def match(self, kv: SequenceKV, tokens: list[int], lookups: Sequence[Lookup] = (),
              num_tokens: int | None = None) -> PrefixMatch:
        """The longest cached prefix valid in every group; never all of the first `num_tokens`: one is computed.

        What tiers have found (`ask`, by tier) extends it where fetching is cheaper than computing; each block comes
        from the nearest tier that has it.
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
        """Ask every tier, in their order, what it has of the first `num_tokens`; [] if the device has all that can be
        used. What they have answered stands while the device has the same of them."""
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
        """What the device has of these tokens, and how many blocks of them could be used."""
        usable = (len(tokens) if num_tokens is None else num_tokens) - 1
        full = usable // self.block_size
        return self._prefixes.match(kv.seen, self.chain.extend(kv, tokens, usable), full), full

    def no_match(self) -> PrefixMatch:
        return PrefixMatch(0, [[] for _ in self.groups])

    def open(self, kv: SequenceKV, match: PrefixMatch, num_new: int = 0) -> Fetch | None:
        """Give a sequence without tables the matched prefix, and see that there is room for `num_new` tokens after it.

        Blocks of other tiers are fetched: what the sequence then waits for is the `Fetch`. None, and no change, when
        blocks are on their way out that it needs, or a tier has lost what it had found (`match.lost`).
        """
        if kv.tables:
            raise InvariantError("a sequence that already holds KV was opened again")
        # First hold all that is there: making room evicts.
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
        # What is fetched counts as registered only when it is known to be there.
        kv.num_registered = registered
        self._start_fetch(kv, fetch, moves)
        self.stats.tier_hits += match.num_outside
        self.stats.tier_hit_tokens += match.outside_tokens
        return fetch

    def _start_fetch(self, kv: SequenceKV, fetch: Fetch, moves: dict[int, list[Move]]) -> None:
        """One transfer for each tier; its moves in the order of the tokens, so that it arrives from the front."""
        places = {(group, block): i for group, table in enumerate(kv.tables) for i, block in enumerate(table.blocks)}
        for tier, mine in sorted(moves.items()):
            mine.sort(key=lambda move: (places[move.group, move.device], move.group))
            for move in mine:
                self.pools[move.group].share(move.device)
                self.stats.bytes_fetched += self.block_bytes[move.group]
            self.transfers.start(self.tiers[tier], False, mine, fetch=fetch)

    def _hold(self, kv: SequenceKV, match: PrefixMatch) -> list[tuple[int, int]] | None:
        """Hold the device's blocks and those of tiers, of which the holds are returned; None if one has gone."""
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
        """Are so many blocks of each group free now? Evicts what is cached; what a tier keeps is free a bit later."""
        return all([pool.make_room(need) for pool, need in zip(self.pools, needs, strict=True)])

    def begin_draft(self, num_running: int) -> None:
        """A step is planned anew. Where evicted blocks are copied to a tier first, some are copied ahead of need: one
        for each running sequence, so that nobody who decodes waits for it, but no more than an eighth of the pool."""
        for pool in self.pools:
            pool.num_promised = 0
        if any(tier.offload for tier in self.tiers):
            for pool in self.pools:
                if not pool.make_room(min(num_running, pool.num_blocks // 8)):
                    pool.num_promised = 0

    def cut(self, kv: SequenceKV, num_blocks: int) -> int:
        """Keep no more than the first `num_blocks` of a sequence's tables, and of those only what is a prefix in every
        group; the tokens that are left."""
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
        """Copies of the plan being drafted, in the order in which they must be made."""
        copies, self.copies = self.copies, []
        return copies

    # ---- writers from outside

    def reserve(self, kv: SequenceKV, match: PrefixMatch, num_tokens: int, deadline: float,
                position: int | None = None) -> Reservation | None:
        """Blocks for tokens up to `num_tokens`, of which those after the device's `match` are written from outside.

        The sequence goes on at `position`, by default where the written tokens end: window groups get blocks only for
        what a token there can see. The sequence shares them with the reservation. None, and no change, when there is no
        room for that now.
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
        """The same match without what the windows of a token at `position` have passed, up to there at least."""
        blocks = []
        for group, held in zip(self.groups, match.blocks, strict=True):
            first = self.first_needed(group, position)
            blocks.append([NO_BLOCK] * first + held[first:])
        return PrefixMatch(match.num_tokens, blocks)

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
        """Idle blocks of a match: taking them leaves as many fewer for others."""
        held = match.blocks[group]
        if pool.chained and not match.num_outside:
            return pool.num_idle_of(held)
        # The front of a window's entries is NO_BLOCK; tiers' blocks may stand anywhere.
        first = 0 if match.num_outside else self.first_needed(self.groups[group], match.num_tokens)
        return sum(1 for b in islice(held, first, None) if b > NO_BLOCK and pool.references(b) == 0)

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
        needs = []
        for pool, table in zip(self.pools, kv.tables, strict=True):
            # The table may be longer than is wanted now: it has had room for drafts that were refused.
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

    def publish(self, kv: SequenceKV, tokens: list[int], num_confirmed: int, awaited: bool = False) -> None:
        """Register the full blocks among the first `num_confirmed` tokens, whose KV is known to be written.

        Where another block already caches the same prefix the sequence changes over to that one and gives its
        own back: memory is saved, and whoever holds a cached block holds its registered parent too. `awaited`: a
        reservation holds the same blocks, so none may be exchanged; what follows such a block is published later.
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
        """One more holder of the block that caches a prefix in a group of windows; NO_BLOCK if there is none."""
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
        """A second sequence over the same blocks, or the first `num_blocks`; whoever writes a shared one first gets a
        copy."""
        tables = []
        for pool, table in zip(self.pools, kv.tables, strict=True):
            for block in table.blocks[table.first_live : num_blocks]:
                pool.share(block)
            tables.append(BlockTable(table.blocks[:num_blocks], first_live=table.first_live))
        # The two may differ from the first token that is not computed yet: hashes beyond it are not shared.
        return SequenceKV(kv.key, tables, kv.hashes[: kv.num_registered], kv.num_registered,
                          kv.unit_keys[: kv.num_offered], kv.num_offered)

    # ---- giving back

    def free(self, kv: SequenceKV) -> None:
        """Give back all that a sequence holds, deepest block first."""
        tables, kv.tables, kv.num_registered = kv.tables, [], 0
        for index, table in enumerate(tables):
            self._give_back(index, table.blocks[table.first_live :][::-1])

    def _left(self, group: int, block: int) -> None:
        """An evicted block has been copied out to a tier. It was idle, so no plan in flight names it."""
        self.pools[group].left(block)

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
    def room_is_coming(self) -> bool:
        """Blocks will come free by themselves: when plans in flight are done, copies to a tier are made, or somebody
        outside has let go of them."""
        return bool(self._limbo) or self.transfers.frees_blocks or self.held_outside

    def expire(self, now: float) -> None:
        """Stop waiting for what is late: transfers, writers of reservations, those who were granted leases."""
        self.transfers.expire(now)
        self.reservations.expire(now)
        self.leases.expire(now)

    @property
    def next_end(self) -> float | None:
        """When `expire` will have something to do."""
        ends = [self.reservations.next_end, self.leases.next_end, *self.transfers.deadlines]
        return min((end for end in ends if end is not None), default=None)

    @property
    def held_outside(self) -> bool:
        """Blocks will come free once another engine reports that it has finished reading or writing them."""
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
        """No other engine and no transfer may still write into a block."""
        return not (self.transfers.under_way or self.transfers.drafted or len(self.reservations))

    def reset(self) -> None:
        """Start afresh with every block free: for an engine at rest whose bookkeeping broke."""
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
        """Every invariant of every pool, and that references are exactly those of `holders`, limbo, transfers, leases
        and reservations."""
        finish(self.examination(holders))

    def examination(self, holders: list[SequenceKV]) -> Iterator[None]:
        """The same in parts. It holds only while nothing changes between them."""
        holders = [*holders, *self.leases.holders, *self.reservations.holders]
        for index, pool in enumerate(self.pools):
            yield from pool.examination()
            counts = zeros(pool.num_blocks)
            held = (table.blocks[table.first_live :] for kv in holders for table in kv.tables[index : index + 1])
            yield from count_blocks(counts, held)
            yield from count_blocks(counts, (blocks for _, group, blocks in self._limbo if group == index))
            yield from count_blocks(counts, [list(self.transfers.held_on_device(index))])
            yield from compare_counts(counts, pool.counts, f"group {index}")
