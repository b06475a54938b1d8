"""Decode attention of few sequences on a GPU: of few keys it counts how soon it is done, of many how fast memory is
read. Each has a kernel and captured graphs of its own."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

LONG_SEQUENCES = 16
"""Up to so many sequences with many keys take pieces for one program a multiprocessor, of 128 keys at once."""
SHORT_SEQUENCES = 2
"""Up to so many sequences with few keys are taken by clusters of blocks (`cuda.attention_cluster`)."""
_SHORT_KEYS = 2048
"""Keys of theirs at most, on average. H200, 2026-11-19, a layer of Qwen3-0.6B with one sequence, microseconds, by
clusters and by `triton.attention_few`: 384 keys 16.3 and 17.4, 1,000 18.3 and 19.4, 2,000 20.7 and 20.7, 8,000 30.5
and 28.5."""


class Lengths(Enum):
    """How many keys the sequences of a decode step have."""

    SHORT = "short"
    MIDDLE = "middle"
    LONG = "long"


def long_keys(num_seqs: int) -> int:
    """Keys of so many sequences in all from which on bandwidth counts alone. H200, 2026-11-18, 32 heads of 8 KV heads,
    one sequence of 128,000 keys: 140 us in 16 pieces (3.75 TB/s), by the kernel of few sequences 191; of 32,000 49 and
    58. Eight of 32,000: 261 us in 16 pieces of 128 keys at once, 278 in 33 of 64."""
    return 8192 * max(2, num_seqs)


def lengths_of(lengths: Sequence[int]) -> Lengths:
    """Of sequences with so many keys each."""
    keys = sum(lengths)
    if keys <= _SHORT_KEYS * len(lengths):
        return Lengths.SHORT
    return Lengths.LONG if keys >= long_keys(len(lengths)) else Lengths.MIDDLE
