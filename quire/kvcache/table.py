"""What the cache keeps for one sequence: block tables, hash chain, and how much of it is registered."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.kvcache.connector import Lookup


@dataclass(slots=True)
class BlockTable:
    """Block table of one sequence in one cache group, and from which entry on the worker's copy is out of date."""

    blocks: list[int] = field(default_factory=list)
    first_live: int = 0
    """Entries before this one have left the sliding window: they are NO_BLOCK."""
    dirty_from: int = 0

    def replace(self, index: int, block: int) -> None:
        self.blocks[index] = block
        if index < self.dirty_from:
            self.dirty_from = index

    def take_dirty(self) -> tuple[int, list[int]]:
        """(start, blocks) that the worker does not know yet; marks them as sent."""
        start = self.dirty_from
        self.dirty_from = len(self.blocks)
        return start, self.blocks[start:]


@dataclass(slots=True)
class PrefixMatch:
    """A cached prefix: its length in tokens and its blocks per group (NO_BLOCK where a window has passed).

    A block that another tier holds is given by its `outside` code.
    """

    num_tokens: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    num_outside: int = 0
    """Number of blocks, over all groups, that must come from other tiers."""
    outside_tokens: int = 0
    """How much shorter the prefix would be without them."""
    lookups: Sequence[Lookup] = ()
    """By tier: the lookup that found its blocks there."""
    searched: int = 0
    """Leading blocks that full-attention groups have on the device, before windows were checked."""
    lost: bool = False
    """A tier no longer has one of the blocks; its lookup was updated."""


@dataclass(slots=True)
class SeenPrefix:
    """Result of the last prefix search for a sequence on the device, and the pools' counters at that time."""

    runs: list[list[int]] = field(default_factory=list)
    """By group: the cached blocks from the start of the prefix; empty for window groups."""
    registrations: list[int] = field(default_factory=list)
    """By group: the pool's `num_registrations` then."""
    window_changes: tuple[int, ...] = ()
    """`num_changes` of the window groups' pools then."""
    match: PrefixMatch | None = None
    lookups: list[Lookup] = field(default_factory=list)
    """Lookups in tiers made for this `match`."""
    with_tiers: PrefixMatch | None = None
    """The best match of device and tiers together."""

    def found(self, match: PrefixMatch) -> PrefixMatch:
        """Store a new match on the device. The tiers' answers are then outdated: blocks may have moved to them."""
        self.match, self.lookups, self.with_tiers = match, [], None
        return match


@dataclass(slots=True)
class SequenceKV:
    """The blocks a sequence holds. `key` is the root of its hash chain: different keys never share blocks."""

    key: bytes = b""
    tables: list[BlockTable] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    """Hash chain over the full blocks of known tokens, extended lazily."""
    num_registered: int = 0
    """Leading blocks that have been offered to the prefix index."""
    unit_keys: list[bytes] = field(default_factory=list)
    """Keys of KV pool units over known tokens, computed when a tier asks for them."""
    num_offered: int = 0
    """Leading units that have been offered to such tiers."""
    num_copies: int = 0
    """Copies on write since the counter was last read."""
    seen: SeenPrefix = field(default_factory=SeenPrefix)
    """Result of the last prefix search."""


_MOST_TIERS = 16


def outside(tier: int, block: int) -> int:
    """Code (below NO_BLOCK) for `block` of the tier with index `tier`."""
    return -2 - (block * _MOST_TIERS + tier)


def tier_and_block(code: int) -> tuple[int, int]:
    """(tier, block) of an `outside` code."""
    block, tier = divmod(-2 - code, _MOST_TIERS)
    return tier, block
