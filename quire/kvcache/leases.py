"""Leases: a finished sequence keeps its blocks until another engine has fetched them, or the lease expires."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.kvcache.table import SequenceKV


@dataclass(slots=True, eq=False)
class Lease:
    number: int
    kv: SequenceKV
    """The block tables, as they were when the sequence ended."""
    num_tokens: int
    """Tokens whose KV is known to be in them."""
    until: float
    readers: int = 0
    """Threads that read the blocks right now. While there are any, the blocks stay, whatever the time."""


class Leases:
    """Who grants, renews and ends them goes by the engine's clock, which is handed in with every call."""

    def __init__(self, free: Callable[[SequenceKV], None]) -> None:
        self._free = free
        self._leases: dict[int, Lease] = {}
        self._number = 0
        self.num_expired = 0
        """Leases that expired without being released, over the cache's life."""

    def __len__(self) -> int:
        return len(self._leases)

    def grant(self, kv: SequenceKV, num_tokens: int, until: float) -> Lease:
        """Take a sequence's blocks over; the sequence holds nothing from now on."""
        self._number += 1
        kept = SequenceKV(kv.key, kv.tables, list(kv.hashes), kv.num_registered)
        kv.tables, kv.num_registered = [], 0
        lease = self._leases[self._number] = Lease(self._number, kept, num_tokens, until)
        return lease

    def get(self, number: int) -> Lease | None:
        return self._leases.get(number)

    def renew(self, number: int, until: float) -> bool:
        """False if the lease has ended: its blocks may hold something else by now."""
        lease = self._leases.get(number)
        if lease is not None:
            lease.until = max(lease.until, until)
        return lease is not None

    def hold(self, number: int) -> None:
        """A thread begins to read the blocks; who reads them releases the lease."""
        self._leases[number].readers += 1

    def release(self, number: int) -> bool:
        """The blocks were fetched, or are not wanted; false if the lease had ended already."""
        lease = self._leases.pop(number, None)
        if lease is not None:
            self._free(lease.kv)
        return lease is not None

    def expire(self, now: float) -> None:
        for lease in [lease for lease in self._leases.values() if now >= lease.until and not lease.readers]:
            self.num_expired += 1
            self.release(lease.number)

    @property
    def next_end(self) -> float | None:
        return min((lease.until for lease in self._leases.values() if not lease.readers), default=None)

    @property
    def num_read(self) -> int:
        """Leases whose blocks are being read."""
        return sum(lease.readers > 0 for lease in self._leases.values())

    @property
    def holders(self) -> list[SequenceKV]:
        return [lease.kv for lease in self._leases.values()]

    def clear(self) -> None:
        self._leases.clear()
