"""Moves the KV of a whole group out to the host tier and back, every shared block once."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.connector import KVConnector
from quire.kvcache.manager import DEVICE, KVCacheManager
from quire.kvcache.table import BlockTable, SequenceKV

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
    step: int = 0
    """The plan that copies it out; before that one is done, it cannot come back."""
    num_bytes: int = 0

    def blocks_in(self, group: int) -> int:
        return len(self.keys[group])


class Swapper:
    """Between a cache and its host tier. Copies go into the plan being drafted."""

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
            known = NO_BLOCK if key is None else tier.match(group, key)
            if known == NO_BLOCK:
                missing.append(block)
            else:
                tier.hold(group, known)
                places[block] = (known, True)
        if len(missing) > tier.room(group):
            tier.give_back(group, [place for place, _ in places.values()])
            return None
        for block in missing:
            places[block] = (tier.allocate(group), False)
        return places

    def _undo(self, places: list[Places]) -> None:
        for group, taken in enumerate(places):
            self._tier.give_back(group, [place for place, _ in taken.values()])

    def _move_out(self, held: list[Held], places: list[Places]) -> SwappedKV:
        cache, stats = self._cache, self.stats
        swapped = SwappedKV([], [])
        for group, taken in enumerate(places):
            hash_of = cache.pools[group].hash_of
            swapped.keys.append({place: hash_of(block) for block, (place, _) in taken.items()})
            moved = [(block, place) for block, (place, known) in taken.items() if not known]
            cache.copies.extend((group, block, place, DEVICE, self._tier.name) for block, place in moved)
            stats.blocks_out += len(moved)
            swapped.num_bytes += len(moved) * cache.block_bytes[group]
        for kv, num_tokens in held:
            swapped.tables.append((kv, [
                BlockTable([NO_BLOCK] * table.first_live
                           + [places[group][block][0]
                              for block in table.blocks[table.first_live : cache.blocks_for(num_tokens)]],
                           first_live=table.first_live)
                for group, table in enumerate(kv.tables)]))
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
            if fetched + extra > pool.num_available - idle:
                return False
        return True

    def _still_cached(self, swapped: SwappedKV, group: int) -> dict[int, int]:
        """Host blocks whose content the device still caches, and where."""
        lookup = self._cache.pools[group].lookup
        found = {place: lookup(key) for place, key in swapped.keys[group].items() if key is not None}
        return {place: block for place, block in found.items() if block != NO_BLOCK}

    def back(self, swapped: SwappedKV, wanted: list[SequenceKV]) -> int:
        """Give each of `wanted` its tables again and copy in what the device lacks; bytes copied."""
        cache, stats = self._cache, self.stats
        targets: list[dict[int, int]] = []
        moved = 0
        for group, pool in enumerate(cache.pools):
            found = self._still_cached(swapped, group)
            for block in found.values():
                pool.acquire(block)
            kept = [place for place in swapped.keys[group] if place in found]
            for place, key in swapped.keys[group].items():
                if place not in found:
                    found[place] = pool.allocate()
                    cache.copies.append((group, place, found[place], self._tier.name, DEVICE))
                    self._tier.fetched(group, place, key)
                    stats.blocks_in += 1
                    moved += cache.block_bytes[group]
            self._tier.give_back(group, kept)
            targets.append(found)
        for kv, tables in swapped.tables:
            if any(kv is other for other in wanted):
                self._restore(kv, tables, targets)
        # Every sequence has its own reference now; ours was on behalf of all. Deepest first, as always: of those that
        # have ended meanwhile nobody else holds the blocks, and a parent must outlive its children.
        for group, found in enumerate(targets):
            order = [found[place] for place in swapped.keys[group]]
            cache.pools[group].release(order[::-1])
        stats.back += 1
        stats.bytes_in += moved
        return moved

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
        for group, keys in enumerate(swapped.keys):
            self._tier.give_back(group, list(keys))
