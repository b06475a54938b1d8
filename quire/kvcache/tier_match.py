"""The prefix that is best taken from the device and other tiers together: as long as fetching saves time."""

from __future__ import annotations

from collections.abc import Sequence

from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.connector import KVConnector, Lookup
from quire.kvcache.matching import GroupWindow, longest_match
from quire.kvcache.move_cost import MoveCost
from quire.kvcache.table import PrefixMatch, outside, tier_and_block


class TierPrefixes:
    def __init__(self, groups: Sequence[GroupWindow], pools: Sequence[BlockPool], block_size: int,
                 tiers: Sequence[KVConnector], block_bytes: Sequence[int]) -> None:
        self._groups, self._pools, self._block_size = groups, pools, block_size
        self._tiers, self._block_bytes = tiers, block_bytes

    def best(self, here: PrefixMatch, hashes: list[bytes], lookups: Sequence[Lookup],
             cost: MoveCost | None) -> PrefixMatch:
        """The match that saves most: the device's alone (`here`), or with the nearest tiers, up to any of them."""
        best, most_saved = here, 0.0
        for depth, lookup in enumerate(lookups, 1):
            if lookup.found_any:
                found = self._match_in(hashes, lookups[:depth])
                found.outside_tokens = found.num_tokens - here.num_tokens
                saved = self._seconds_saved(found, cost)
                if saved > most_saved:
                    best, most_saved = found, saved
        return best

    def _match_in(self, hashes: list[bytes], lookups: Sequence[Lookup]) -> PrefixMatch:
        """The longest prefix on the device and in the nearest tiers."""
        def find(group: int, i: int, key: bytes) -> int:
            block = self._pools[group].lookup(key)
            if block != NO_BLOCK:
                return block
            for tier, lookup in enumerate(lookups):
                block = lookup.block(group, i)
                if block != NO_BLOCK:
                    return outside(tier, block)
            return NO_BLOCK

        found = longest_match(self._groups, self._block_size, hashes, find)
        found.lookups = lookups
        return found

    def _seconds_saved(self, match: PrefixMatch, cost: MoveCost | None) -> float:
        """Computing what the device lacks, less fetching it from where it is; negative where fetching takes longer."""
        if cost is None:
            return float(match.outside_tokens)
        seconds = cost.recompute(match.outside_tokens)
        for index, tier in enumerate(self._tiers[: len(match.lookups)]):
            num_bytes = self._bytes_in(match, index)
            if num_bytes:
                measured = tier.fetch_seconds(num_bytes)
                seconds -= cost.move(num_bytes) if measured is None else measured
        return seconds

    def _bytes_in(self, match: PrefixMatch, tier: int) -> int:
        """What a match takes from one tier."""
        return sum(size * sum(b < NO_BLOCK and tier_and_block(b)[0] == tier for b in held)
                   for size, held in zip(self._block_bytes, match.blocks, strict=True))
