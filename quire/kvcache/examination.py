"""Consistency checks in small parts, so that the step loop can run them between requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from quire.errors import InvariantError

PART_BLOCKS = 512
"""Blocks that one part looks at: about 0.2 ms."""


def parts(count: int) -> Iterator[range]:
    """0 … count-1, one range for each part."""
    for first in range(0, count, PART_BLOCKS):
        yield range(first, min(first + PART_BLOCKS, count))


def zeros(count: int) -> memoryview:
    """One counter for each block, in memory that is touched only as it is counted: with 250,000 blocks it takes a list
    a millisecond to begin with, and a set that grows stops for several."""
    return memoryview(bytearray(4 * count)).cast("i")


def count_blocks(counts: memoryview, holders: Iterable[Sequence[int]]) -> Iterator[None]:
    """Add one for every block that a holder names; a part ends after so many blocks, whoever holds them."""
    todo = PART_BLOCKS
    for blocks in holders:
        for at in range(0, len(blocks), PART_BLOCKS):
            for block in blocks[at : at + PART_BLOCKS]:
                counts[block] += 1
            todo -= min(PART_BLOCKS, len(blocks) - at)
            if todo <= 0:
                todo = PART_BLOCKS
                yield


def compare_counts(held: memoryview, counted: Sequence[int], where: str) -> Iterator[None]:
    """InvariantError for the first block whose holders are not as many as its pool counts."""
    for part in parts(len(held)):
        for block in part:
            if held[block] != counted[block]:
                raise InvariantError(f"KV block {block} of {where} counts {counted[block]} holders and has "
                                     f"{held[block]}")
        yield


def finish(examination: Iterator[None]) -> None:
    """All of it at once."""
    for _ in examination:
        pass
