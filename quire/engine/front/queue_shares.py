"""What a bounded queue counts, in O(1) or O(log n): tenants' shares, the largest of them, how fast requests leave."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

_FEW = 16
"""Outdated entries that a heap keeps in any case."""


@dataclass(slots=True)
class Share:
    """What one tenant has in the queue."""

    sizes: dict[int, int] = field(default_factory=dict)
    """Prompt tokens of its requests by handle, the oldest first."""
    tokens: int = 0


class Heaviest:
    """The tenant with the largest number of something; of several the one that has had as many for longest."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str | None]] = []
        """Minus the number, a serial number, the tenant. Entries whose serial is not the tenant's last are outdated."""
        self._last: dict[str | None, tuple[int, int]] = {}
        """Of each tenant: its number and the serial of its entry."""
        self._serial = 0

    def set(self, tenant: str | None, number: int) -> None:
        """0 forgets the tenant."""
        self._last.pop(tenant, None)
        if number:
            self._serial += 1
            self._last[tenant] = (number, self._serial)
            heapq.heappush(self._heap, (-number, self._serial, tenant))
        if len(self._heap) > 2 * len(self._last) + _FEW:
            self._heap = [(-number, serial, name) for name, (number, serial) in self._last.items()]
            heapq.heapify(self._heap)

    def top(self, default: str | None) -> str | None:
        while self._heap:
            _, serial, tenant = self._heap[0]
            if self._last.get(tenant, (0, 0))[1] == serial:
                return tenant
            heapq.heappop(self._heap)
        return default


class Departures:
    """Requests that left the queue within the last `seconds`."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._left: deque[tuple[float, int]] = deque()
        self.tokens = 0
        """Their prompt tokens."""

    def __len__(self) -> int:
        return len(self._left)

    @property
    def first(self) -> float:
        """When the oldest of them left."""
        return self._left[0][0]

    def add(self, now: float, tokens: int) -> None:
        self._left.append((now, tokens))
        self.tokens += tokens
        self.expire(now)

    def expire(self, now: float) -> None:
        """Forget what is too long ago."""
        while self._left and self._left[0][0] < now - self._seconds:
            self.tokens -= self._left.popleft()[1]
