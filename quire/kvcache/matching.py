"""The longest prefix that is valid in every cache group, given where each block of it can be found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.table import PrefixMatch

Find = Callable[[int, int, bytes], int]
"""Group, place in the chain and hash of a block: where it is, NO_BLOCK if nowhere."""
There = Callable[[int, int], bool]
"""Is the block of a group at a place in the chain there?"""


@dataclass(frozen=True, slots=True)
class GroupWindow:
    """Layers that share block tables: all full attention (`window` None), or all of one sliding window."""

    window: int | None = None

    def first_needed(self, position: int, block_size: int) -> int:
        """First table entry that a token at `position` can still see."""
        return 0 if self.window is None else max(0, position - self.window + 1) // block_size


def longest_match(groups: Sequence[GroupWindow], block_size: int, hashes: list[bytes], find: Find) -> PrefixMatch:
    """From the start for full attention, the last window for the others."""
    length = len(hashes)
    found: list[list[int]] = [[] for _ in groups]
    for index, group in enumerate(groups):
        if group.window is None:
            found[index] = _leading(index, hashes[:length], find)
            length = len(found[index])
    for index, group in enumerate(groups):
        if group.window is not None:
            found[index] = [find(index, i, key) for i, key in enumerate(hashes[:length])]
    length = valid_in_windows(groups, block_size, lambda group, i: found[group][i] != NO_BLOCK, length)
    blocks = []
    for index, group in enumerate(groups):
        first = group.first_needed(length * block_size, block_size)
        blocks.append([NO_BLOCK] * first + found[index][first:length])
    num_outside = sum(block < NO_BLOCK for held in blocks for block in held)
    return PrefixMatch(length * block_size, blocks, num_outside)


def valid_in_windows(groups: Sequence[GroupWindow], block_size: int, there: There, length: int) -> int:
    """The longest prefix, at most `length` blocks, whose last window is there in every window group."""
    gap = length
    while gap >= 0:
        length, gap = gap, -1
        for index, group in enumerate(groups):
            if group.window is not None:
                first = group.first_needed(length * block_size, block_size)
                # Every prefix that ends behind a gap and inside its window has that gap too.
                gap = max(gap, _last_gap(index, there, first, length))
    return length


def _leading(index: int, hashes: list[bytes], find: Find) -> list[int]:
    """Blocks before the first miss."""
    blocks: list[int] = []
    for i, key in enumerate(hashes):
        block = find(index, i, key)
        if block == NO_BLOCK:
            break
        blocks.append(block)
    return blocks


def _last_gap(group: int, there: There, first: int, end: int) -> int:
    """Index of the last block of [first, end) that is not there, or -1."""
    for i in range(end - 1, first - 1, -1):
        if not there(group, i):
            return i
    return -1
