"""What plain policies would have found: the yardsticks that bound what a cleverer policy may lose."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from heapq import heapify, heappop, heappush

from quire.kvcache.lru2 import LastUses

_STAKE = 1 / 16
"""Hits that the cleverer policy may be behind before it is stopped, as a share of the pool's blocks."""
_CREDIT = 1.0
"""Most hits ahead that count in its favour later, as a share of the pool's blocks."""
_ALLOWANCE = 0.0025
"""Share of the yardstick's hits that may be lost in the long run: what trying again is paid from. Twice as much found
0.992 x LRU on `bursts` in a pool of 250, where this finds 1.012 x."""
_MOST_PATIENCE = 8
"""Every try that ended behind the yardstick doubles what the allowance must bring in before the next, up to this."""
_SLACK = 128


class Shadow(ABC):
    """Keeps the keys that a pool of the same size would cache under a plain policy, and a balance of hits against it.

    `trusted` turns False when the real cache has found `_STAKE` less than the plain policy would have, and True again
    when the allowance has made up for that, or for a multiple of it if it was so before. A policy that evicts like the
    plain one while it is not trusted loses, in the long run, no more than the allowance.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._stake = _STAKE * num_blocks
        self._most = _CREDIT * num_blocks
        self.balance = self._stake
        """Hits that may still be lost."""
        self.trusted = True
        self._patience = 1

    def wanted(self, key: bytes, found: bool) -> bool:
        """The prefix `key` was asked for, and the real cache had it or not; would the plain policy have had it?"""
        held = self._holds(key)
        if held:
            self.balance += _ALLOWANCE if found else _ALLOWANCE - 1.0
        elif found:
            self.balance += 1.0
        if held or found:
            self._judge()
        return held

    def _judge(self) -> None:
        if self.trusted:
            if self.balance < 0.0:
                self.trusted = False
            elif self.balance > self._most:
                self.balance = self._most
                self._patience = 1
        elif self.balance >= self._patience * self._stake:
            self.trusted = True
            self.balance = self._stake
            self._patience = min(2 * self._patience, _MOST_PATIENCE)

    @abstractmethod
    def _holds(self, key: bytes) -> bool: ...

    @abstractmethod
    def released(self, key: bytes) -> None:
        """`key` is idle from now on; the blocks of a chain are released deepest first."""


class LRUShadow(Shadow):
    """Least recently used first; O(1) per call, one key per block."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._keys: OrderedDict[bytes, None] = OrderedDict()

    def _holds(self, key: bytes) -> bool:
        if key not in self._keys:
            return False
        self._keys.move_to_end(key)
        return True

    def released(self, key: bytes) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._num_blocks:
            self._keys.popitem(last=False)


class LRU2Shadow(Shadow):
    """Second-last use longest ago first; O(log n) per call, one key per block and the last uses of some more."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._keys: dict[bytes, tuple[int, int]] = {}
        """Second-last and last use of what is idle."""
        self._in_use: dict[bytes, int] = {}
        """Last use of what is in use, before this one: it cannot be evicted meanwhile."""
        self._heap: list[tuple[int, int, bytes]] = []
        self._last_uses = LastUses(num_blocks)
        self._now = 0

    def _holds(self, key: bytes) -> bool:
        known = self._keys.pop(key, None)
        held = known is not None or key in self._in_use
        if key not in self._in_use:
            self._in_use[key] = self._last_uses.get(key) if known is None else known[1]
            self._make_room()
        return held

    def last_use(self, key: bytes) -> int:
        """When `key`, in use now, was last used before that, counted in calls of `released`; 0: not known."""
        return self._in_use.get(key, 0)

    def released(self, key: bytes) -> None:
        self._now += 1
        uses = self._keys[key] = (self._in_use.pop(key, 0), self._now)
        heappush(self._heap, (*uses, key))
        if len(self._heap) > 2 * len(self._keys) + _SLACK:
            self._heap = [(*uses, key) for key, uses in self._keys.items()]
            heapify(self._heap)

    def _make_room(self) -> None:
        while self._keys and len(self._keys) + len(self._in_use) > self._num_blocks:
            before, last, key = heappop(self._heap)
            if self._keys.get(key) == (before, last):
                del self._keys[key]
                self._last_uses.set(key, last)
