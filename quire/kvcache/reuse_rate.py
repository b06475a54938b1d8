"""Eviction by learned rate of reuse: the default policy."""

from __future__ import annotations

from collections import OrderedDict
from heapq import heapify, heappop, heappush

from quire.errors import InvariantError
from quire.kvcache.eviction_policy import EvictionPolicy
from quire.kvcache.lru2 import LRU2
from quire.kvcache.lru_shadow import LRU2Shadow, LRUShadow
from quire.kvcache.reuse_statistics import Interval, ReuseStatistics

_REMEMBERED = 2
"""Uses of evicted prefixes are remembered in two generations of this many times the pool's size."""
_TICKS = 16
"""Ages and indices are brought up to date so often while as many blocks as the pool has become idle."""
_LEAST_TICK = 128
_CLEAR_LEAD, _LEAD_MEMORY = 1 / 16, 1
"""LRU-2 is followed once it leads LRU by this many hits, as a share of the pool's blocks. After as many hits as
`_LEAD_MEMORY` pools have blocks most of a lead is forgotten (not lookups: where reuse is rare a lead grows slowly)."""
_CLEAR_SHARE = 0.5
"""Or once its lead is this share of the recent hits of both: where hits are few, that is evidence enough."""

# Kinds of blocks, told apart by how often the prefix was used, as far as remembered: tails used once, others
# used once, twice, 3 or 4 times, more often. A prompt's last block has its own kind while it is new: chats
# grow, so prompts that end in the same place are rare, and it must not spoil what is known about the rest.
# Finer kinds, and kinds by depth or by time between uses, were tried: they learn more slowly and win nothing.
_TAIL = 0
_KINDS = (1, 1, 2, 3, 3, 4)
_NUM_KINDS = 5
_MANY = len(_KINDS) - 1


class ReuseRate(EvictionPolicy):
    """Evicts the leaf block that promises the fewest reuses per time it would stay.

    What a block promises depends on its kind and its age, as `ReuseStatistics` has learned from this very
    workload; with nothing learned yet the order is that of last use. Only blocks without an idle child are
    candidates, so a parent outlives its children whatever their indices say. Candidates of one kind and age
    wait in one heap, oldest first; `_waiting` has a bit for every heap that is not empty, lowest index first.
    O(log n) per block.

    Should all this find less than LRU or LRU-2 would have, that one it is until the loss is made good (`Shadow`).
    """

    def __init__(self, num_blocks: int = 0) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        """Idle blocks, least recently used first."""
        self._since = [0] * num_blocks
        """When each block became idle, by `_now`; 0 while it is in use or free."""
        self._uses = [0] * num_blocks
        self._kind = [0] * num_blocks
        self._key = [b""] * num_blocks
        self._parent = [-1] * num_blocks
        self._children = [0] * num_blocks
        """Idle blocks on top of each."""
        self._interval: list[Interval | None] = [None] * num_blocks
        self._remembered: dict[bytes, int] = {}
        self._remembered_before: dict[bytes, int] = {}
        self._num_remembered = max(1, _REMEMBERED * num_blocks)
        self._now = 0
        self._tick = max(_LEAST_TICK, num_blocks // _TICKS)
        self._next_tick = self._tick
        self._lru, self._lru2 = LRUShadow(num_blocks), LRU2Shadow(num_blocks)
        self._second_last = LRU2(num_blocks)
        """The same blocks in the order of LRU-2."""
        self._lead = 0.0
        """Hits by which LRU-2 is ahead of LRU, those of long ago counting less."""
        self._recent_hits = 0.0
        """Hits of either, those of long ago counting less."""
        self._clear_lead, self._fade = _CLEAR_LEAD * num_blocks, 1.0 / max(1, _LEAD_MEMORY * num_blocks)
        self._statistics = ReuseStatistics(num_blocks, _NUM_KINDS)
        cells = _NUM_KINDS * self._statistics.num_buckets
        self._age_first = [-(cell % self._statistics.num_buckets) for cell in range(cells)]
        self._heaps: list[list[tuple[int, int]]] = [[] for _ in range(cells)]
        self._bit = [0] * cells
        self._cell_of_bit = [0] * cells
        self._waiting = 0
        self._rank()

    def __len__(self) -> int:
        return len(self._order)

    # ---- what the pool tells

    def register(self, block: int, key: bytes, parent: int) -> None:
        self._wanted(key, found=False)
        self._second_last.register(block, key, parent)
        self._second_last.set_last_use(block, self._lru2.last_use(key))
        self._key[block] = key
        self._parent[block] = parent
        self._uses[block] = 1 + (self._remembered.get(key) or self._remembered_before.get(key, 0))

    def add(self, block: int) -> None:
        now = self._now = self._now + 1
        self._since[block] = now
        self._order[block] = None
        parent = self._parent[block]
        if parent >= 0:
            self._children[parent] += 1
        uses = self._uses[block]
        kind = _KINDS[uses if uses < _MANY else _MANY]
        if not self._children[block]:
            if uses == 1:
                kind = _TAIL
            cell = kind * self._statistics.num_buckets
            heappush(self._heaps[cell], (now, block))
            self._waiting |= self._bit[cell]
        self._kind[block] = kind
        key = self._key[block]
        self._lru.released(key)
        self._lru2.released(key)
        self._second_last.add(block)
        self._interval[block] = self._statistics.begin(key, kind, now)
        if now >= self._next_tick:
            self._bring_up_to_date()

    def remove(self, block: int) -> None:
        self._wanted(self._key[block], found=True)
        self._second_last.remove(block)
        self._uses[block] += 1
        interval = self._interval[block]
        if interval is not None:
            self._statistics.reused(interval, self._now)
        self._leave(block)

    def touch(self, block: int) -> None:
        self._uses[block] += 1

    def pop(self) -> int:
        block = self._victim()
        self._second_last.evicted(block)
        self._leave(block)
        self._remembered[self._key[block]] = self._uses[block]
        if len(self._remembered) >= self._num_remembered:
            self._remembered_before, self._remembered = self._remembered, {}
        return block

    def _wanted(self, key: bytes, found: bool) -> None:
        by_lru, by_lru2 = self._lru.wanted(key, found), self._lru2.wanted(key, found)
        if by_lru or by_lru2:
            self._lead += by_lru2 - by_lru - self._lead * self._fade
            self._recent_hits += 1.0 - self._recent_hits * self._fade

    def _victim(self) -> int:
        second = self._lead > self._clear_lead or self._lead > _CLEAR_SHARE * self._recent_hits
        if self._lru.trusted and (self._lru2.trusted or not second):
            return self._least_promising()
        return self._second_last.peek() if second else next(iter(self._order))

    # ---- bookkeeping

    def _least_promising(self) -> int:
        while self._waiting:
            lowest = self._waiting & -self._waiting
            heap = self._heaps[self._cell_of_bit[lowest.bit_length() - 1]]
            since, block = heappop(heap)
            if not heap:
                self._waiting ^= lowest
            if self._since[block] == since and not self._children[block]:
                return block
        raise InvariantError("no KV block can be evicted: idle blocks hold one another up")

    def _leave(self, block: int) -> None:
        self._since[block] = 0
        del self._order[block]
        parent = self._parent[block]
        if parent >= 0:
            children = self._children[parent] = self._children[parent] - 1
            since = self._since[parent]
            if since and not children:
                statistics = self._statistics
                cell = self._kind[parent] * statistics.num_buckets + statistics.bucket(self._now - since)
                heappush(self._heaps[cell], (since, parent))
                self._waiting |= self._bit[cell]

    def _waits(self, entry: tuple[int, int]) -> bool:
        """False for what has left its heap unseen: used again, evicted, or covered by a child."""
        since, block = entry
        return self._since[block] == since and not self._children[block]

    def _bring_up_to_date(self) -> None:
        self._next_tick = self._now + self._tick
        self._statistics.advance(self._now)
        size = self._statistics.num_buckets
        for bucket, edge in enumerate(self._statistics.edges):
            due = self._now - edge
            for cell in range(bucket, len(self._heaps), size):
                heap = self._heaps[cell]
                while heap and heap[0][0] <= due:
                    entry = heappop(heap)
                    if self._waits(entry):
                        heappush(self._heaps[cell + 1], entry)
        for cell in range(size - 1, len(self._heaps), size):
            # Nothing ages out of the last bucket, so what has left it unseen is swept out now and then.
            if len(self._heaps[cell]) > 2 * len(self._order) + _LEAST_TICK:
                self._heaps[cell] = [entry for entry in self._heaps[cell] if self._waits(entry)]
                heapify(self._heaps[cell])
        self._rank()

    def _rank(self) -> None:
        """Order the heaps by what they promise, equals by age."""
        order = sorted(zip(self._statistics.grades(), self._age_first, range(len(self._heaps))))
        self._waiting = 0
        for bit, (_, _, cell) in enumerate(order):
            self._cell_of_bit[bit] = cell
            self._bit[cell] = 1 << bit
            if self._heaps[cell]:
                self._waiting |= 1 << bit
