"""What least-recently-used eviction would have found: the yardstick that bounds what a cleverer policy may lose."""

from __future__ import annotations

from collections import OrderedDict

_STAKE = 1 / 8
"""Hits that the cleverer policy may be behind LRU before it is stopped, as a share of the pool's blocks."""
_CREDIT = 1.0
"""Most hits ahead of LRU that count in its favour later."""
_ALLOWANCE = 0.015
"""Share of LRU's hits that may be lost in the long run: what trying again is paid from."""


class LRUShadow:
    """Keeps the keys that an LRU pool of the same size would cache, and a balance of hits against it.

    `trusted` turns False when the real cache has found `_STAKE` less than LRU would have, and True again when
    the allowance has made up for that. A policy that evicts like LRU while it is not trusted loses, in the long
    run, no more than the allowance. O(1) per call; one key per block.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._keys: OrderedDict[bytes, None] = OrderedDict()
        self._stake = _STAKE * num_blocks
        self._most = _CREDIT * num_blocks
        self._balance = self._stake
        self.trusted = True

    def wanted(self, key: bytes, found: bool) -> None:
        """The prefix `key` was asked for, and the real cache had it or not."""
        if key in self._keys:
            self._keys.move_to_end(key)
            self._balance += _ALLOWANCE if found else _ALLOWANCE - 1.0
        elif found:
            self._balance += 1.0
        else:
            return
        if self._balance < 0.0:
            self.trusted = False
        elif self._balance >= self._stake:
            self.trusted = True
            if self._balance > self._most:
                self._balance = self._most

    def released(self, key: bytes) -> None:
        """Nobody uses `key` any more; of a chain the deepest is told first."""
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._num_blocks:
            self._keys.popitem(last=False)
