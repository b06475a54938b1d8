"""Which idle cached block gives up its place: the policies to choose from."""

from __future__ import annotations

from collections import OrderedDict

from quire.kvcache.eviction_policy import EvictionPolicy
from quire.kvcache.lru2 import LRU2
from quire.kvcache.reuse_rate import ReuseRate

__all__ = ["EVICTION_POLICIES", "LRU", "LRU2", "EvictionPolicy", "ReuseRate"]


class LRU(EvictionPolicy):
    """Least recently used first; O(1)."""

    def __init__(self, num_blocks: int = 0) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)


EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {"reuse-rate": ReuseRate, "lru": LRU, "lru-2": LRU2}
