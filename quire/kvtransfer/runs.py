"""Runs of neighbouring blocks: many blocks become few copies or writes. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from quire.errors import KVTransferError

NO_BLOCK = -1
"""An entry of a block table that has left the window; the same number as the block pool's."""


@dataclass(frozen=True, slots=True)
class BlockRun:
    """Blocks source … source + count - 1 go to target … target + count - 1."""

    source: int
    target: int
    count: int


def merged_runs(sources: Sequence[int], targets: Sequence[int]) -> list[BlockRun]:
    """Pairs of blocks in their order, neighbours on both sides merged: [5,6,7,12,13] -> [2,3,4,8,9] is two runs."""
    if len(sources) != len(targets):
        raise KVTransferError(f"{len(sources)} blocks cannot be written to {len(targets)}")
    runs: list[BlockRun] = []
    for source, target in zip(sources, targets, strict=True):
        last = runs[-1] if runs else None
        if last is not None and (last.source + last.count, last.target + last.count) == (source, target):
            runs[-1] = BlockRun(last.source, last.target, last.count + 1)
        else:
            runs.append(BlockRun(source, target, 1))
    return runs


@dataclass(frozen=True, slots=True)
class TokenRun:
    """Tokens that lie in neighbouring blocks: whole blocks, or a part of a single one."""

    block: int
    count: int
    offset: int
    """Of the first token in its block; 0 where there are several blocks."""
    length: int
    """Tokens in each of the blocks."""
    at: int
    """Of the first token, counted from the start of the range."""


def token_runs(table: Sequence[int], start: int, end: int, block_size: int) -> list[TokenRun]:
    """Where tokens start … end-1 of a sequence lie. Blocks that the table does not have are an error."""
    runs: list[TokenRun] = []
    position = start
    while position < end:
        index, offset = divmod(position, block_size)
        length = min(block_size - offset, end - position)
        block = table[index] if index < len(table) else NO_BLOCK
        if block < 0:
            raise KVTransferError(f"token {position} has no block here")
        last = runs[-1] if runs else None
        if last is not None and last.length == length == block_size and last.block + last.count == block:
            runs[-1] = TokenRun(last.block, last.count + 1, 0, length, last.at)
        else:
            runs.append(TokenRun(block, 1, offset, length, position - start))
        position += length
    return runs


def merged_range(ranges: list[tuple[int, int]], start: int, end: int) -> list[tuple[int, int]]:
    """Ranges, sorted and apart from each other, with one more; they may come in any order, and twice."""
    merged: list[tuple[int, int]] = []
    for known in sorted([*ranges, (start, end)]):
        if merged and known[0] <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], known[1]))
        elif known[0] < known[1]:
            merged.append(known)
    return merged
