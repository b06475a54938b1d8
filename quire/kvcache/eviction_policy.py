"""What the block pool asks of an eviction policy."""

from __future__ import annotations

from abc import ABC, abstractmethod


class EvictionPolicy(ABC):
    """Orders the idle blocks: those that cache a prefix and that no sequence uses.

    The pool calls `register` when a block in use begins to cache a prefix, `add` when nobody uses it any
    more, `remove` when it is used again, `touch` when one in use gets another user, `pop` for a victim. Users
    of the pool release a chain deepest block first and never hold a child without its parent, so an order by
    time of `add` yields children before parents; a policy with another order must keep that property itself.
    Policies have no clock but the calls they get, and draw no random numbers: the same calls evict the same
    blocks.
    """

    @abstractmethod
    def __init__(self, num_blocks: int = 0) -> None:
        """For a pool of `num_blocks`, numbered from 0."""

    def register(self, block: int, key: bytes, parent: int) -> None:  # noqa: B027 (most need not know)
        """`block`, in use, caches the prefix `key` from now on, on top of block `parent` (-1: none)."""

    @abstractmethod
    def add(self, block: int) -> None:
        """`block` caches a prefix and is idle from now on."""

    @abstractmethod
    def remove(self, block: int) -> None:
        """`block` is in use again, or no longer caches anything."""

    def touch(self, block: int) -> None:  # noqa: B027 (most need not know)
        """`block`, in use and not added, has been found by one more user."""

    @abstractmethod
    def pop(self) -> int:
        """Take out and return the block to evict next; only called when there is one."""

    @abstractmethod
    def __len__(self) -> int:
        """Idle cached blocks."""
