"""Checks of bookkeeping in parts of bounded work, for whoever must not stop for long."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

PART_BLOCKS = 512
"""Blocks that one part looks at: about 0.2 ms."""


def parts(count: int) -> Iterator[range]:
    """0 … count-1, one range for each part."""
    for first in range(0, count, PART_BLOCKS):
        yield range(first, min(first + PART_BLOCKS, count))


def count_blocks(counts: list[int], holders: Iterable[Sequence[int]]) -> Iterator[None]:
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


def finish(examination: Iterator[None]) -> None:
    """All of it at once."""
    for _ in examination:
        pass
