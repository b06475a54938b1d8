"""What the cache keeps for one sequence: block tables, hash chain, how much of it others may find."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.kvcache.connector import Lookup


@dataclass(slots=True)
class BlockTable:
    """Logical-to-physical map of one sequence in one cache group, and from where the worker's is stale."""

    blocks: list[int] = field(default_factory=list)
    first_live: int = 0
    """Entries before this one have left a sliding window: they are NO_BLOCK and hold nothing."""
    dirty_from: int = 0

    def replace(self, index: int, block: int) -> None:
        self.blocks[index] = block
        if index < self.dirty_from:
            self.dirty_from = index

    def take_dirty(self) -> tuple[int, list[int]]:
        """(start, blocks) that the worker has not been told of yet; they count as told from now on."""
        start = self.dirty_from
        self.dirty_from = len(self.blocks)
        return start, self.blocks[start:]


@dataclass(slots=True)
class PrefixMatch:
    """A cached prefix: its length in tokens, its blocks per group (NO_BLOCK where a window has passed).

    A block of another tier is written as its `outside` code.
    """

    num_tokens: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    num_outside: int = 0
    """Blocks, over all groups, that other tiers hold."""
    outside_tokens: int = 0
    """How much shorter the prefix would be without them."""
    lookups: Sequence[Lookup] = ()
    """By tier: where its blocks of other tiers were found."""
    searched: int = 0
    """Leading blocks that full attention found on the device, before windows were looked at."""
    lost: bool = False
    """A tier that was asked for one of them does not have it any more. Its lookup has forgotten it."""


@dataclass(slots=True)
class SeenPrefix:
    """What the last search for a sequence's prefix on the device found, and what the pools were like then."""

    runs: list[list[int]] = field(default_factory=list)
    """By group: the cached blocks from the start of the prefix; empty for window groups."""
    registrations: list[int] = field(default_factory=list)
    """By group: how many registrations the pool had counted then."""
    window_changes: tuple[int, ...] = ()
    """Changes that the indexes of the window groups' pools had seen then."""
    match: PrefixMatch | None = None
    lookups: list[Lookup] = field(default_factory=list)
    """What tiers were asked for while `match` was what the device had."""
    with_tiers: PrefixMatch | None = None
    """The best match of both together."""

    def found(self, match: PrefixMatch) -> PrefixMatch:
        """The device has another match than before: what tiers said is out of date, blocks may have gone there."""
        self.match, self.lookups, self.with_tiers = match, [], None
        return match


@dataclass(slots=True)
class SequenceKV:
    """A sequence's hold on the cache. `key` roots its hash chain: different keys never share blocks."""

    key: bytes = b""
    tables: list[BlockTable] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Chain over the full blocks of known tokens, extended lazily."""
    num_registered: int = 0
    """Leading blocks that have been offered to the prefix index."""
    unit_keys: list[bytes] = field(default_factory=list)
    """Keys of the pool's units over known tokens, where a tier has asked for them."""
    num_offered: int = 0
    """Leading units that have been offered to tiers of units."""
    num_copies: int = 0
    """Copies on write since the counter was last read."""
    seen: SeenPrefix = field(default_factory=SeenPrefix)
    """How many of its tokens were cached at the last match."""


_MOST_TIERS = 16


def outside(tier: int, block: int) -> int:
    """A block of the tier with that place in the list, as a code below NO_BLOCK."""
    return -2 - (block * _MOST_TIERS + tier)


def tier_and_block(code: int) -> tuple[int, int]:
    """What an `outside` code stands for."""
    block, tier = divmod(-2 - code, _MOST_TIERS)
    return tier, block
