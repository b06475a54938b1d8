"""What changes in the block tables of a worker: entries of a row, and many rows of one entry as they cross to ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from struct import unpack
from typing import NamedTuple, overload


class TableDiff(NamedTuple):
    """Entries of one row's block table from `start` on; the worker's copy is overwritten from there."""

    row: int
    group: int
    start: int
    blocks: list[int]


Diff = tuple[int, int, int, list[int]]
"""A `TableDiff`, or a plain tuple of the same."""


class OneBlockDiffs(Sequence[Diff]):
    """Diffs of one block each, as the bytes in which they reached a rank: what a step of decoding sequences has, for
    every few of them. To make objects of them takes longer than all else that a rank does before it starts, and tables
    take them as columns."""

    __slots__ = ("data",)
    __hash__ = None  # type: ignore[assignment]
    SIZE = 16
    """Bytes of one."""

    def __init__(self, data: bytes) -> None:
        """`data`: int32, first the row of each, then the group of each, then starts, then blocks."""
        self.data = data

    def __len__(self) -> int:
        return len(self.data) // self.SIZE

    def __iter__(self) -> Iterator[Diff]:
        count = len(self)
        numbers = unpack(f"<{4 * count}i", self.data)
        blocks = [[block] for block in numbers[3 * count :]]
        return zip(numbers[:count], numbers[count : 2 * count], numbers[2 * count : 3 * count], blocks, strict=True)

    @overload
    def __getitem__(self, index: int) -> Diff: ...

    @overload
    def __getitem__(self, index: slice) -> list[Diff]: ...

    def __getitem__(self, index: int | slice) -> Diff | list[Diff]:
        return list(self)[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)
