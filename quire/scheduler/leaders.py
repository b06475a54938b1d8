"""Who is computing a prefix that a waiting request begins with: that one had better wait and find it cached."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from quire.scheduler.request import Request, Sequence

_WORTH_WAITING = 0.5
"""Share of what a request would compute that must be under way already: below it, a step lost costs more."""


class PrefixLeaders:
    """Sequences in prefill, by the hash of the first block that is not in the prefix cache yet."""

    def __init__(self, running: Iterable[Request], block_size: int) -> None:
        self._block_size = block_size
        self._by_hash: dict[bytes, Sequence] = {}
        for request in running:
            self.add(request.sequences[0])

    def add(self, seq: Sequence) -> None:
        kv = seq.kv
        if kv.tables and kv.num_registered < len(kv.hashes):
            self._by_hash.setdefault(kv.hashes[kv.num_registered], seq)

    def has_one_for(self, seq: Sequence, num_matched: int, num_known: int) -> bool:
        """Is another sequence computing most of the prefix that `seq` lacks?"""
        ours = seq.kv.hashes
        first, end = num_matched // self._block_size, min(num_known // self._block_size, len(ours))
        leader = self._by_hash.get(ours[first]) if first < end else None
        if leader is None:
            return False
        theirs, start = leader.kv.hashes, leader.kv.num_registered
        # A hash stands for all tokens up to its block, so those before two equal ones are equal.
        shared = bisect_left(range(min(end - first, len(theirs) - start)), True,
                             key=lambda i: ours[first + i] != theirs[start + i])
        return shared * self._block_size >= _WORTH_WAITING * (num_known - num_matched)
