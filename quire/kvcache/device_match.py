"""The longest prefix of a waiting sequence that the device caches, kept up to date instead of searched anew.

In a chained pool a parent is never evicted before its child. So if the deepest block found is still registered as it
was, the blocks before it are too: bringing a match up to date costs as many lookups as blocks of this prefix were
evicted or added, however long it is. Window groups are searched again when the index of their pool has changed, from
the end of the prefix; as a rule that is a window's worth of lookups.
"""

from __future__ import annotations

from collections.abc import Sequence

from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.matching import GroupWindow, valid_in_windows
from quire.kvcache.table import PrefixMatch, SeenPrefix


class DevicePrefixes:
    """Finds cached prefixes in the pools of all cache groups."""

    def __init__(self, groups: Sequence[GroupWindow], pools: Sequence[BlockPool], block_size: int) -> None:
        self._groups = groups
        self._pools = pools
        self._block_size = block_size

    def match(self, seen: SeenPrefix, hashes: Sequence[bytes], count: int) -> PrefixMatch:
        """The longest match of the first `count` of a sequence's hashes; the same object while nothing has changed."""
        if not seen.runs:
            seen.runs = [[] for _ in self._groups]
            seen.registrations = [0] * len(self._groups)
        length, changes = count, []
        for index, (group, pool) in enumerate(zip(self._groups, self._pools, strict=True)):
            if group.window is None:
                length = min(length, _follow(seen, index, pool, hashes, count))
            else:
                changes.append(pool.num_changes)
        known = seen.match
        if known is not None and known.searched == length and (not length or tuple(changes) == seen.window_changes):
            return known
        seen.window_changes = tuple(changes)
        return seen.found(self._cut(seen, hashes, length))

    def _cut(self, seen: SeenPrefix, hashes: Sequence[bytes], searched: int) -> PrefixMatch:
        """The longest prefix of at most `searched` blocks whose last window is cached in every window group."""
        groups, pools, size = self._groups, self._pools, self._block_size

        def there(group: int, i: int) -> bool:
            return pools[group].lookup(hashes[i]) != NO_BLOCK

        length = valid_in_windows(groups, size, there, searched)
        blocks = []
        for index, group in enumerate(groups):
            if group.window is None:
                blocks.append(seen.runs[index][:length])
            else:
                first = group.first_needed(length * size, size)
                blocks.append([NO_BLOCK] * first + [pools[index].lookup(hashes[i]) for i in range(first, length)])
        return PrefixMatch(length * size, blocks, searched=searched)


def _follow(seen: SeenPrefix, index: int, pool: BlockPool, hashes: Sequence[bytes], count: int) -> int:
    """Bring the run of a chained group up to date; how many of the first `count` blocks are cached."""
    run, before = seen.runs[index], len(seen.runs[index])
    while run and not pool.unchanged(run[-1], hashes[len(run) - 1], seen.registrations[index]):
        run.pop()
    if len(run) < before:
        seen.match = None  # the same length may stand for other blocks soon
    while len(run) < count:
        block = pool.lookup(hashes[len(run)])
        if block == NO_BLOCK:
            break
        run.append(block)
    seen.registrations[index] = pool.num_registrations
    return min(len(run), count)
