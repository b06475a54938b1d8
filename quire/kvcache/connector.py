"""Where KV blocks can be besides the device's pool: one interface for host memory, disks and remote pools.

This is the half that plans: it says what a tier holds and names its blocks, and never touches their content.
The half that moves it belongs to the worker; they meet in the block copies of a plan and in whether its step
came back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class KVConnector(ABC):
    """A tier of blocks, numbered per cache group.

    Contract: what is stored can be found only after its plan is reported done, and what is fetched stays
    where it is until then. A lost plan stores nothing.
    """

    name: str
    """The tier's name in block copies."""

    @abstractmethod
    def match(self, group: int, key: bytes) -> int:
        """The block that holds the prefix `key`, or NO_BLOCK. Takes no hold on it."""

    @abstractmethod
    def hold(self, group: int, block: int) -> None:
        """Keep a matched block until `fetched` or `give_back`."""

    @abstractmethod
    def fetched(self, group: int, block: int, key: bytes | None) -> None:
        """The plan being drafted copies a held block to the device: let go of it once that is done."""

    @abstractmethod
    def evicted(self, group: int, key: bytes) -> int:
        """The device gives up the block of prefix `key`: where to copy it first, or NO_BLOCK."""

    @abstractmethod
    def submitted(self, step: int) -> None:
        """The plan being drafted is under way as `step`."""

    @abstractmethod
    def settled(self, step: int, done: bool) -> None:
        """Plans up to `step` are complete, or (`done` false) lost."""
