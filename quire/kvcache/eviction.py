"""Which idle cached block gives up its place: policies behind one small interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict


class EvictionPolicy(ABC):
    """Orders the blocks that hold a cached prefix and are used by nobody.

    The pool calls `add` when a block becomes idle, `remove` when it is used again, `touch` when one in use
    gets another user, `pop` for a victim. Users of the pool release a chain deepest block first and never
    hold a child without its parent, so an order by time of `add` yields children before parents; a policy
    with another order must keep that property itself. Policies have no clock but the calls they get, and draw
    no random numbers: the same calls evict the same blocks.
    """

    @abstractmethod
    def __init__(self, num_blocks: int = 0) -> None:
        """For a pool of `num_blocks`, numbered from 0."""

    @abstractmethod
    def add(self, block: int, key: bytes, parent: int) -> None:
        """`block`, caching the prefix `key` on top of block `parent` (-1: none), is idle from now on."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """`block` is in use again, or no longer caches anything."""

    def touch(self, block: int) -> None:  # noqa: B027 (most policies need not know)
        """`block`, in use and not added, has been found by one more user."""

    @abstractmethod
    def pop(self) -> int:
        """Take out and return the block to evict next; only called when there is one."""

    @abstractmethod
    def __len__(self) -> int:
        """Idle cached blocks."""


class LRU(EvictionPolicy):
    """Least recently used first; O(1)."""

    def __init__(self, num_blocks: int = 0) -> None:
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def add(self, block: int, key: bytes, parent: int) -> None:
        self._blocks[block] = None

    def remove(self, block: int) -> None:
        del self._blocks[block]

    def pop(self) -> int:
        return self._blocks.popitem(last=False)[0]

    def __len__(self) -> int:
        return len(self._blocks)


EVICTION_POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LRU}
