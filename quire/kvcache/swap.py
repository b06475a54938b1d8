"""Moves the KV of a whole group out to the host tier and back, every shared block once."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.connector import KVConnector
from quire.kvcache.manager import KVCacheManager
from quire.kvcache.table import BlockTable, SequenceKV
from quire.kvcache.transfers import Fetch, Move, Transfer

Held = tuple[SequenceKV, int]
"""A sequence's hold on the cache, and how many of its tokens are to be kept."""
Places = dict[int, tuple[int, bool]]
"""By device block: its host block, and whether the content is there already."""


@dataclass(slots=True)
class SwapStats:
    """Running totals that the metrics report."""

    out: int = 0
    """Groups moved out."""
    back: int = 0
    blocks_out: int = 0
    blocks_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    full: int = 0
    """Times that the host tier had no room."""


@dataclass(slots=True, eq=False)
class SwappedKV:
    """A group's KV outside the device: the tables of each of its sequences, in host blocks."""

    tables: list[tuple[SequenceKV, list[BlockTable]]]
    keys: list[dict[int, bytes | None]]
    """By cache group: every host block held, with the prefix it holds if that was registered."""
    copy: Transfer | None = None
    """Takes it out; before that is done it cannot come back, and if it fails, not at all."""
    num_bytes: int = 0

    @property
    def settled(self) -> bool:
        return self.copy is None or self.copy.over or self.copy.error is not None

    @property
    def lost(self) -> bool:
        return self.copy is not None and self.copy.error is not None

    def blocks_in(self, group: int) -> int:
        return len(self.keys[group])


class Swapper:
    """Between a cache and the tier that takes swapped groups."""

    def __init__(self, cache: KVCacheManager, tier: KVConnector) -> None:
        self._cache = cache
        self._tier = tier
        self.stats = SwapStats()

    # ---- out

    def num_bytes(self, held: list[Held]) -> int:
        """What `out` would copy, one way."""
        return sum(len(self._device_blocks(held, group)) * size
                   for group, size in enumerate(self._cache.block_bytes))

    def out(self, held: list[Held]) -> SwappedKV | None:
        """Copy out what the first n tokens of each sequence occupy, and free all they hold.

        None, and no change, when the tier is full or a window has passed what those n tokens need.
        """
        if not all(self._still_there(kv, n) for kv, n in held):
            return None
        places = [self._take_host_blocks(held, group) for group in range(len(self._cache.groups))]
        if any(place is None for place in places):
            self.stats.full += 1
            self._undo([place or {} for place in places])
            return None
        return self._move_out(held, [place or {} for place in places])

    def _still_there(self, kv: SequenceKV, num_tokens: int) -> bool:
        return all(self._cache.first_needed(group, num_tokens) >= table.first_live
                   for group, table in zip(self._cache.groups, kv.tables, strict=True))

    def _device_blocks(self, held: list[Held], group: int) -> list[int]:
        found: dict[int, None] = {}
        for kv, num_tokens in held:
            table = kv.tables[group]
            found.update(dict.fromkeys(table.blocks[table.first_live : self._cache.blocks_for(num_tokens)]))
        return list(found)

    def _take_host_blocks(self, held: list[Held], group: int) -> Places | None:
        """For every device block of the group: a host block, and whether the content is there already."""
        tier, pool = self._tier, self._cache.pools[group]
        places: Places = {}
        missing = []
        for block in self._device_blocks(held, group):
            key = pool.hash_of(block)
            known = NO_BLOCK if key is None else tier.lookup([key], len(self._cache.groups)).block(group, 0)
            if known != NO_BLOCK and tier.hold(group, known, key):
                places[block] = (known, True)
            else:
                missing.append(block)
        if len(missing) > tier.room(group):
            self._undo_group(group, places)
            return None
        for block in missing:
            places[block] = (tier.allocate(group), False)
        return places

    def _undo(self, places: list[Places]) -> None:
        for group, taken in enumerate(places):
            self._undo_group(group, taken)

    def _undo_group(self, group: int, places: Places) -> None:
        for place, _ in places.values():
            self._tier.give_back(group, place)

    def _move_out(self, held: list[Held], places: list[Places]) -> SwappedKV:
        cache, stats = self._cache, self.stats
        swapped = SwappedKV([], [])
        moves: list[Move] = []
        for group, taken in enumerate(places):
            hash_of = cache.pools[group].hash_of
            swapped.keys.append({place: hash_of(block) for block, (place, _) in taken.items()})
            moved = [Move(group, block, place) for block, (place, known) in taken.items() if not known]
            moves += moved
            stats.blocks_out += len(moved)
            swapped.num_bytes += len(moved) * cache.block_bytes[group]
        for kv, num_tokens in held:
            swapped.tables.append((kv, [
                BlockTable([NO_BLOCK] * table.first_live
                           + [places[group][block][0]
                              for block in table.blocks[table.first_live : cache.blocks_for(num_tokens)]],
                           first_live=table.first_live)
                for group, table in enumerate(kv.tables)]))
        if moves:
            for move in moves:
                self._tier.hold(move.group, move.place)
            # The transfer keeps whole prefixes until it is done, as the sequences did.
            swapped.copy = cache.transfers.start(self._tier, True, moves, chains=[cache.fork(kv) for kv, _ in held])
        for kv, _ in held:
            cache.free(kv)
        stats.out += 1
        stats.bytes_out += swapped.num_bytes
        return swapped

    # ---- back

    def fits(self, swapped: SwappedKV, extra: int) -> bool:
        """Is there room for it to come back, and for `extra` blocks more?"""
        for group, pool in enumerate(self._cache.pools):
            idle = sum(pool.references(block) == 0 for block in self._still_cached(swapped, group).values())
            fetched = swapped.blocks_in(group) - len(self._still_cached(swapped, group))
            if pool.at_most(fetched + extra) > pool.num_available + pool.num_leaving - idle:
                return False
        return True

    def _still_cached(self, swapped: SwappedKV, group: int) -> dict[int, int]:
        """Host blocks whose content the device still caches, and where."""
        lookup = self._cache.pools[group].lookup
        found = {place: lookup(key) for place, key in swapped.keys[group].items() if key is not None}
        return {place: block for place, block in found.items() if block != NO_BLOCK}

    def back(self, swapped: SwappedKV, wanted: list[SequenceKV]) -> Fetch | None:
        """Give each of `wanted` its tables again and fetch what the device lacks.

        None, and no change, while blocks that it needs are on their way out.
        """
        cache, stats = self._cache, self.stats
        # First hold all that is there: making room evicts.
        targets = [self._still_cached(swapped, group) for group in range(len(cache.pools))]
        for group, found in enumerate(targets):
            for block in found.values():
                cache.pools[group].acquire(block)
        if not cache.make_room([swapped.blocks_in(group) - len(found) for group, found in enumerate(targets)]):
            self._release(swapped, targets)
            return None
        moves: list[Move] = []
        fetch = Fetch()
        for group, found in enumerate(targets):
            for place, key in swapped.keys[group].items():
                if place not in found:
                    found[place] = cache.pools[group].allocate()
                    self._tier.hold(group, place)
                    cache.pools[group].share(found[place])
                    moves.append(Move(group, found[place], place, key))
                    fetch.num_bytes += cache.block_bytes[group]
        for kv, tables in swapped.tables:
            if any(kv is other for other in wanted):
                self._restore(kv, tables, targets)
        # Every sequence has its own reference now; ours was on behalf of all.
        self._release(swapped, targets)
        self.forget(swapped)
        if moves:
            first = self._first_entries(swapped)
            moves.sort(key=lambda move: (first[move.group, move.place], move.group))
            cache.transfers.start(self._tier, False, moves, fetch=fetch)
        stats.back += 1
        stats.bytes_in += fetch.num_bytes
        stats.blocks_in += len(moves)
        return fetch

    def _first_entries(self, swapped: SwappedKV) -> dict[tuple[int, int], int]:
        """Where each host block stands in a table: what is needed first arrives first."""
        first: dict[tuple[int, int], int] = {}
        for _, tables in swapped.tables:
            for group, table in enumerate(tables):
                for i, place in enumerate(table.blocks):
                    first.setdefault((group, place), i)
        return first

    def _release(self, swapped: SwappedKV, targets: list[dict[int, int]]) -> None:
        """Deepest first, as always: of those that have ended meanwhile nobody else holds the blocks, and a parent must
        outlive its children."""
        for group, found in enumerate(targets):
            order = [found[place] for place in swapped.keys[group] if place in found]
            self._cache.pools[group].release(order[::-1])

    def _restore(self, kv: SequenceKV, tables: list[BlockTable], targets: list[dict[int, int]]) -> None:
        for group, table in enumerate(tables):
            blocks = [targets[group][place] for place in table.blocks[table.first_live :]]
            for block in blocks:
                self._cache.pools[group].share(block)
            kv.tables.append(BlockTable([NO_BLOCK] * table.first_live + blocks, first_live=table.first_live))
        kv.num_registered = 0 if not self._cache.prefix_caching else self._registered(kv)

    def _registered(self, kv: SequenceKV) -> int:
        """Leading blocks that the device's index knows; the rest is published once its copies are made."""
        count = 0
        for i in range(min(len(table.blocks) for table in kv.tables)):
            for group, table in enumerate(kv.tables):
                if table.blocks[i] != NO_BLOCK and self._cache.pools[group].hash_of(table.blocks[i]) is None:
                    return count
            count += 1
        return count

    def forget(self, swapped: SwappedKV) -> None:
        """Give up what is outside: its group ends, or computes it again."""
        # What has no copy of a whole prefix has no key; what was not copied at all may not be found under one.
        whole = swapped.settled and not swapped.lost
        for group, keys in enumerate(swapped.keys):
            for place, key in keys.items():
                self._tier.give_back(group, place, key if whole else None)
