"""LRU-2: evicts the block whose second-last use is longest ago. For workloads in which reuse is regular."""

from __future__ import annotations

from heapq import heapify, heappop, heappush

from quire.errors import InvariantError
from quire.kvcache.eviction_policy import EvictionPolicy

_REMEMBERED = 2
"""Last uses of evicted prefixes are remembered in two generations of this many times the pool's size."""
_SLACK = 128
"""Outdated entries that a heap may have besides as many as there are valid ones."""


class LastUses:
    """When evicted prefixes were last used; bounded, the newest are kept."""

    def __init__(self, num_blocks: int) -> None:
        self._most = max(1, _REMEMBERED * num_blocks)
        self._young: dict[bytes, int] = {}
        self._old: dict[bytes, int] = {}

    def get(self, key: bytes) -> int:
        """0: never, as far as remembered."""
        return self._young.get(key) or self._old.get(key, 0)

    def set(self, key: bytes, when: int) -> None:
        self._young[key] = when
        if len(self._young) >= self._most:
            self._old, self._young = self._young, {}


class LRU2(EvictionPolicy):
    """Blocks used once go first, the least recently used of them first; O(log n).

    Only blocks without an idle child are candidates, so a parent outlives its children.
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self._idle: set[int] = set()
        self._key = [b""] * num_blocks
        self._parent = [-1] * num_blocks
        self._children = [0] * num_blocks
        """Idle blocks on top of each."""
        self._last = [0] * num_blocks
        """When each block was last given back; while in use, when it was before that."""
        self._before = [0] * num_blocks
        self._last_uses = LastUses(num_blocks)
        self._heap: list[tuple[int, int, int]] = []
        self._now = 0

    def __len__(self) -> int:
        return len(self._idle)

    def register(self, block: int, key: bytes, parent: int) -> None:
        self._key[block] = key
        self._parent[block] = parent
        self._last[block] = self._last_uses.get(key)

    def set_last_use(self, block: int, when: int) -> None:
        """For a block just registered, if the caller remembers its last use longer; `when` counts calls of `add`."""
        self._last[block] = max(when, self._last[block])

    def add(self, block: int) -> None:
        self._now += 1
        self._before[block], self._last[block] = self._last[block], self._now
        self._idle.add(block)
        parent = self._parent[block]
        if parent >= 0:
            self._children[parent] += 1
        if not self._children[block]:
            self._offer(block)

    def remove(self, block: int) -> None:
        self._idle.remove(block)
        parent = self._parent[block]
        if parent >= 0:
            self._children[parent] -= 1
            if not self._children[parent] and parent in self._idle:
                self._offer(parent)

    def pop(self) -> int:
        block = self.peek()
        self.evicted(block)
        return block

    def peek(self) -> int:
        """The block to evict next."""
        while self._heap:
            _, last, block = self._heap[0]
            if self._waits(last, block):
                return block
            heappop(self._heap)
        raise InvariantError("no KV block can be evicted: idle blocks hold one another up")

    def evicted(self, block: int) -> None:
        """An idle block gives up its place; its last use is remembered."""
        self.remove(block)
        self._last_uses.set(self._key[block], self._last[block])

    def _waits(self, last: int, block: int) -> bool:
        return block in self._idle and self._last[block] == last and not self._children[block]

    def _offer(self, block: int) -> None:
        heappush(self._heap, (self._before[block], self._last[block], block))
        if len(self._heap) > 2 * len(self._idle) + _SLACK:
            self._heap = [entry for entry in self._heap if self._waits(entry[1], entry[2])]
            heapify(self._heap)
