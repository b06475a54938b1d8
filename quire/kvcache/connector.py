"""Where KV blocks can be besides the device's pool: one interface for host memory, disks and remote pools.

This is the half that plans: it says what a tier holds and names its blocks, and never touches their content.
The half that moves it is `worker/transfer.py`; they meet in the block copies of a plan and in whether its step
came back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator


class KVConnector(ABC):
    """A tier of blocks, numbered per cache group.

    Contract: what is stored can be found only after its plan is reported done, and what is fetched stays
    where it is until then. A lost plan stores nothing.
    """

    name: str
    """The tier's name in block copies."""
    offload: bool
    """It keeps prefixes that the device evicts; if not, it is there for swapped groups only."""
    num_blocks: int
    """Of every cache group."""

    # ---- prefixes

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

    # ---- groups that are swapped out

    @abstractmethod
    def room(self, group: int) -> int:
        """Blocks that `allocate` could give now; 0 for ever where a tier takes prefixes only."""

    @abstractmethod
    def allocate(self, group: int) -> int:
        """A block that is the caller's until `give_back`, or until its `fetched` is settled."""

    @abstractmethod
    def give_back(self, group: int, blocks: list[int]) -> None:
        """Let go of blocks that were held or allocated."""

    # ---- steps

    @abstractmethod
    def submitted(self, step: int) -> None:
        """The plan being drafted is under way as `step`."""

    @abstractmethod
    def settled(self, step: int, done: bool) -> None:
        """Plans up to `step` are complete, or (`done` false) lost."""

    # ---- keeping house

    @property
    @abstractmethod
    def num_used(self) -> int:
        """Blocks that somebody holds."""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """Blocks that hold a prefix for whoever asks, and nobody holds."""

    @abstractmethod
    def drop_cached(self) -> int:
        """Forget prefixes that nobody holds; how many blocks."""

    @abstractmethod
    def reset(self) -> None:
        """Start afresh: the engine's bookkeeping broke."""

    @abstractmethod
    def check(self, held: list[list[int]]) -> None:
        """Raise InvariantError unless holders are `held` (by cache group, once for each) and copies under way."""

    def examination(self, held: list[list[int]]) -> Iterator[None]:
        """`check` in parts of at most a fraction of a millisecond; a tier whose check takes longer says how."""
        self.check(held)
        yield
