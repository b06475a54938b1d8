"""From how many keys on decode attention of few sequences on a GPU is split for bandwidth and not for latency."""

from __future__ import annotations

from collections.abc import Sequence

LONG_SEQUENCES = 16
"""Up to so many sequences with many keys take pieces for one program a multiprocessor, of 128 keys at once."""


def long_keys(num_seqs: int) -> int:
    """Keys of so many sequences in all from which on bandwidth counts alone. H200, 2026-11-18, 32 heads of 8 KV heads,
    one sequence of 128,000 keys: 140 us in 16 pieces (3.75 TB/s), by the kernel of few sequences 191; of 32,000 49 and
    58. Eight of 32,000: 261 us in 16 pieces of 128 keys at once, 278 in 33 of 64."""
    return 8192 * max(2, num_seqs)


def is_long(lengths: Sequence[int]) -> bool:
    """Whether sequences of so many keys each have that many."""
    return sum(lengths) >= long_keys(len(lengths))
