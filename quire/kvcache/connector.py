"""Where KV can be besides the device's pool: one interface for host memory, disks and remote pools.

This is the half that plans: it says what a tier holds and names its blocks, and never touches their content. The half
that moves it is `worker/transfer.py`; they meet in the transfers of a plan and in the reports of those.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from quire.errors import InvariantError
from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.token_prefix import BlockRange, TokenPrefix

log = logging.getLogger("quire.kvcache")
Answer = TypeVar("Answer")


class Lookup:
    """One question to a tier: which of these prefixes does it hold? Answered at once, or later from any thread.

    A tier that answers later rings `wake` by answering. Who asked stops waiting after the tier's `lookup_timeout`; an
    answer that comes after that is not read.
    """

    def __init__(self, keys: Sequence[bytes], num_groups: int, wake: Callable[[], None] | None = None) -> None:
        self.keys = list(keys)
        """A chain: each prefix is one block longer than the one before."""
        self.num_groups = num_groups
        self.deadline: float | None = None
        """The scheduler's: when it stops waiting."""
        self._wake = wake
        self._blocks: list[list[int]] | None = None

    @property
    def settled(self) -> bool:
        return self._blocks is not None

    def answer(self, blocks: list[list[int]]) -> None:
        """By cache group and in the order of the keys: the tier's block, or NO_BLOCK."""
        self._blocks = blocks
        if self._wake is not None:
            self._wake()

    def fail(self) -> None:
        """The tier cannot say: it has nothing."""
        self.answer([[] for _ in range(self.num_groups)])

    @classmethod
    def failed(cls, keys: Sequence[bytes], num_groups: int) -> Lookup:
        found = cls(keys, num_groups)
        found.fail()
        return found

    def block(self, group: int, index: int) -> int:
        """Of key `index`; NO_BLOCK also while there is no answer."""
        if self._blocks is None or index >= len(self._blocks[group]):
            return NO_BLOCK
        return self._blocks[group][index]

    @property
    def found_any(self) -> bool:
        return any(block != NO_BLOCK for blocks in self._blocks or () for block in blocks)

    def forget_from(self, group: int, index: int) -> None:
        """The tier does not have key `index` any more: neither that nor what follows it counts as found."""
        if self._blocks is not None:
            self._blocks = [blocks[:index] if each == group else blocks for each, blocks in enumerate(self._blocks)]


class KVConnector(ABC):
    """A tier of blocks, numbered per cache group.

    Contract: a block does not change while it is held. Every copy to the tier that `stored`, `finished` or
    `evicted` asked for ends with one `settled`; what is stored can be found only after that. `lookup`, `hold` of a
    prefix, `stored`, `finished` and `evicted` may raise: that is logged, and counts as "nothing here" or "no copy".
    `give_back` and `settled` may not.
    """

    name: str
    """The tier's name in transfers."""
    offload: bool
    """It keeps prefixes; if not, it is there for swapped groups only."""
    swaps: bool = False
    """It takes swapped groups."""
    num_blocks: int
    """Of every cache group."""
    unit_tokens: int | None = None
    """It keeps units of so many tokens, and is told by `grown` when one is complete on the device."""
    lookup_timeout: float = 0.005
    """Seconds that a request waits for an answer which does not come at once."""
    wake: Callable[[], None] | None = None
    """Wakes the engine; the core fills it in. To be called when a lookup is answered (`Lookup` does so)."""

    # ---- prefixes: what is there

    @abstractmethod
    def lookup(self, keys: Sequence[bytes], num_groups: int, prefix: TokenPrefix | None = None) -> Lookup:
        """Which of these prefixes are here. Must return at once; the answer may come later. Takes no hold.

        `prefix` has the tokens that the keys stand for, and at most a block's worth more; a tier that names KV by the
        engine's own keys needs none.
        """

    @abstractmethod
    def hold(self, group: int, block: int, key: bytes | None = None) -> bool:
        """Keep a block until `give_back`. With a key: false if the block does not hold that prefix any more."""

    @abstractmethod
    def give_back(self, group: int, block: int, key: bytes | None = None) -> None:
        """One holder less. With a key the block holds that prefix, and the tier may keep it."""

    # ---- prefixes: what happens on the device

    def stored(self, group: int, key: bytes) -> int:
        """A block of the device is full and holds prefix `key` from now on: where to copy it, or NO_BLOCK."""
        return NO_BLOCK

    def finished(self, group: int, keys: Sequence[bytes]) -> list[int]:
        """A sequence has ended that holds these prefixes: where to copy each, or NO_BLOCK; [] for none."""
        return []

    def grown(self, prefix: TokenPrefix, first: int) -> list[BlockRange]:
        """Units from number `first` on are complete on the device (only where `unit_tokens`): which blocks to copy.

        Each range is copied whole; where the device lacks one of its blocks, all of it is settled as not made."""
        return []

    @abstractmethod
    def evicted(self, group: int, key: bytes) -> int:
        """The device gives up the block of prefix `key`: where to copy it first, or NO_BLOCK."""

    @abstractmethod
    def settled(self, group: int, block: int, key: bytes, stored: bool) -> None:
        """The copy of a prefix to `block` is over: made, or not. The hold that came with it ends."""

    # ---- groups that are swapped out

    def room(self, group: int) -> int:
        """Blocks that `allocate` could give now; 0 for ever where a tier takes prefixes only."""
        return 0

    def allocate(self, group: int) -> int:
        """A block that is the caller's until `give_back`."""
        raise NotImplementedError(f"the tier {self.name!r} takes no swapped groups")

    # ---- what it costs

    def fetch_seconds(self, num_bytes: int) -> float | None:
        """What fetching so much takes, as measured; None: as long as a copy between device and host."""
        return None

    def patience(self, num_bytes: int) -> float | None:
        """Seconds after which a transfer of so much counts as late; None: the engine's `kv_fetch_timeout`."""
        return None

    def late(self) -> None:  # noqa: B027 (most need not know)
        """A fetch was not made in time."""

    # ---- keeping house

    @property
    @abstractmethod
    def num_used(self) -> int:
        """Blocks with a reference."""

    @property
    @abstractmethod
    def num_cached(self) -> int:
        """Cached blocks without a reference."""

    @abstractmethod
    def drop_cached(self) -> int:
        """Evict cached blocks without a reference; returns how many."""

    @abstractmethod
    def reset(self) -> None:
        """Start afresh: the engine's bookkeeping broke, and no transfer is under way."""

    @abstractmethod
    def check(self, held: list[list[int]]) -> None:
        """Raise InvariantError unless the holders are `held` (by cache group, once for each)."""

    def metrics(self) -> dict[str, int | float]:
        """Counters and gauges of its own, by name."""
        return {}

    def close(self) -> None:  # noqa: B027 (some have nothing to let go of)
        """The engine ends. Idempotent."""

    def examination(self, held: list[list[int]]) -> Iterator[None]:
        """`check` in parts of at most a fraction of a millisecond; a tier whose check takes longer says how."""
        self.check(held)
        yield


def unless_it_breaks(tier: KVConnector, otherwise: Answer, call: Callable[..., Answer], *arguments: object) -> Answer:
    """Call a tier. If it raises, the hit or the copy is lost; the request goes on."""
    try:
        return call(*arguments)
    except InvariantError:
        raise
    except Exception as error:
        log.warning("the KV tier %r failed: %s: %s", tier.name, type(error).__name__, error)
        return otherwise
