"""A store of units as a tier of the KV cache: which blocks of a prompt it holds, and what to copy there.

The half that plans. `worker/unit_transfer.py` moves the content.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Protocol

from quire.errors import ConfigError, InvariantError
from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.connector import KVConnector, Lookup
from quire.kvcache.token_prefix import BlockRange, TokenPrefix
from quire.kvpool.breaker import CircuitBreaker
from quire.kvpool.keys import UnitKeys, unit_name
from quire.kvpool.names import UnitNumbers
from quire.kvpool.rates import StoreRate
from quire.kvpool.staging import Staging, UnitWriter
from quire.kvpool.store import UnitStore

_MOST_QUESTIONS = 64
"""Lookups that may wait for a store that is slow; more are answered with nothing."""
_MOST_NOTED = 1 << 16
_LEAST_PATIENCE = 0.5
_PATIENCE = 8.0
"""A fetch may take so many times what was expected, and half a second more."""


class Publisher(Protocol):
    """Who decides which units are worth keeping."""

    def wanted(self, key: bytes, num_bytes: int, rate: StoreRate, full: bool = False) -> bool:
        """A sequence holds the unit on the device; is it likely to be requested again? `full`: another unit
        would have to make room."""
        ...


class UnitTier(KVConnector):
    """Units of 256 tokens in one store. It copies a unit out when its last token's KV is there, and never blocks."""

    offload = True
    num_blocks = 0

    def __init__(self, name: str, store: UnitStore, keys: UnitKeys, block_size: int, unit_bytes: Sequence[int],
                 staging: Staging, publisher: Publisher, lookup_timeout: float = 0.005, rate: StoreRate | None = None,
                 always: bool = False, clock: Callable[[], float] = time.monotonic,
                 writer: UnitWriter | None = None, decides_by: Sequence[int] | None = None) -> None:
        """`unit_bytes`: content of a unit, by cache group; `decides_by` where units only pretend to weigh that.
        `always`: what is there is fetched, whatever it costs."""
        self.unit_tokens: int = keys.unit_tokens
        if self.unit_tokens % block_size:
            raise ConfigError(f"a KV pool has units of {self.unit_tokens} tokens: block_size must divide that, and "
                              f"{block_size} does not", field="block_size")
        self.name, self.store, self.lookup_timeout = name, store, lookup_timeout
        self.unit_bytes = list(unit_bytes)
        self._decides_by = decides_by
        self.numbers = UnitNumbers(self.unit_tokens // block_size)
        self.staging = staging
        self.rate = StoreRate() if rate is None else rate
        self.breaker = CircuitBreaker(clock)
        self._keys, self._publisher, self._always, self._clock = keys, publisher, always, clock
        self._writer = writer or UnitWriter(store, staging, keys.check_seed, self.rate, self.breaker.failed)
        self._storing: dict[bytes, list[bool]] = {}
        """Units being copied: what became of their blocks so far."""
        self._questions: SimpleQueue[tuple[Lookup, list[bytes]] | None] = SimpleQueue()
        self._asker: Thread | None = None
        self._asking_since: float | None = None
        self._there: OrderedDict[bytes, None] = OrderedDict()
        """Names that a store which does not answer at once had when it was last asked: they are not written again."""
        self._mutex = Lock()
        self.num_refused = 0
        """Units that were worth keeping and found no room in the staging memory."""

    # ---- what is there

    def lookup(self, keys: Sequence[bytes], num_groups: int, prefix: TokenPrefix | None = None) -> Lookup:
        asked = Lookup(keys, num_groups, self.wake)
        units = [] if prefix is None else self._keys.extend(prefix)[: prefix.num_tokens // self.unit_tokens]
        names = [unit_name(unit, group) for group in range(num_groups) for unit in units]
        if not names or not self.may_ask():
            asked.fail()
        elif self.store.instant:
            asked.answer(self._blocks(asked, names, self.store.find(names)))
        else:
            if self._asker is None:
                self._asker = Thread(target=self._ask, name=f"quire-{self.name}-lookup", daemon=True)
                self._asker.start()
            self._questions.put((asked, names))
        return asked

    def may_ask(self) -> bool:
        """Not if the store has failed often, hangs, or has too many questions to answer already."""
        since = self._asking_since
        hangs = since is not None and self._clock() > since + self.lookup_timeout
        if hangs or self._questions.qsize() >= _MOST_QUESTIONS:
            self.store.stats.lookups_failed += 1
            self.breaker.failed()
            return False
        if not self.breaker.may_ask():
            self.store.stats.lookups_failed += 1
            return False
        return True

    def _ask(self) -> None:
        while (question := self._questions.get()) is not None:
            asked, names = question
            began = self._asking_since = self._clock()
            try:
                found = self.store.find(names)
                self._note(names, found)
                took = self._clock() - began
                self.rate.observe_latency(took)
                asked.answer(self._blocks(asked, names, found))
                if took > self.lookup_timeout:
                    self._failed()
                else:
                    self.breaker.succeeded()
            except Exception:
                self._failed()
                asked.fail()
            finally:
                self._asking_since = None

    def _note(self, names: Sequence[bytes], found: Sequence[bool]) -> None:
        with self._mutex:
            for name, there in zip(names, found, strict=True):
                self._there.pop(name, None)
                if there:
                    self._there[name] = None
            while len(self._there) > _MOST_NOTED:
                self._there.popitem(last=False)

    def _has(self, name: bytes) -> bool:
        return self.store.find([name])[0] if self.store.instant else name in self._there

    def _failed(self) -> None:
        self.store.stats.lookups_failed += 1
        self.breaker.failed()

    def _blocks(self, asked: Lookup, names: list[bytes], found: list[bool]) -> list[list[int]]:
        """By group: the places of all blocks whose unit is there."""
        per_unit = self.numbers.blocks_per_unit
        units = len(names) // asked.num_groups
        blocks = []
        for group in range(asked.num_groups):
            mine: list[int] = []
            for unit in range(units):
                at = group * units + unit
                mine += self.numbers.places(names[at]) if found[at] else [NO_BLOCK] * per_unit
            blocks.append(mine[: len(asked.keys)])
        return blocks

    def hold(self, group: int, block: int, key: bytes | None = None) -> bool:
        name = self.numbers.name(block)
        if name is None or (self.store.instant and not self.store.find([name])[0]):
            return False
        self.numbers.hold(block)
        return True

    def give_back(self, group: int, block: int, key: bytes | None = None) -> None:
        self.numbers.let_go(block)

    # ---- what happens on the device

    def grown(self, prefix: TokenPrefix, first: int) -> list[BlockRange]:
        """Units from number `first` on are complete on the device: which of them to copy."""
        wanted: list[BlockRange] = []
        keys = self._keys.extend(prefix)
        for unit in range(first, prefix.num_tokens // self.unit_tokens):
            key, size = keys[unit], sum(self._decides_by or self.unit_bytes)
            full = self.store.stats.units_evicted > 0
            if self.breaker.open or not self._publisher.wanted(key, size, self.rate, full):
                continue
            for group, group_bytes in enumerate(self.unit_bytes):
                name = unit_name(key, group)
                if name in self._storing or self._has(name):
                    continue
                if not self.staging.open(name, group_bytes):
                    self.num_refused += 1
                    continue
                self._storing[name] = []
                places = list(self.numbers.places(name))
                for place in places:
                    self.numbers.hold(place)
                wanted.append(BlockRange(group, unit * self.numbers.blocks_per_unit, places))
        return wanted

    def evicted(self, group: int, key: bytes) -> int:
        return NO_BLOCK

    def settled(self, group: int, block: int, key: bytes, stored: bool) -> None:
        """The unit is written once all its blocks are copied; if one is not, none of it is."""
        name = self.numbers.name(block)
        self.numbers.let_go(block)
        if name is None or name not in self._storing:
            return
        made = self._storing[name]
        made.append(stored)
        if len(made) < self.numbers.blocks_per_unit:
            return
        del self._storing[name]
        if all(made):
            self._note([name], [True])
            self._writer.put(name)
        else:
            self.staging.drop(name)

    # ---- what it costs

    def fetch_seconds(self, num_bytes: int) -> float | None:
        return 0.0 if self._always else self.rate.seconds(num_bytes)

    def patience(self, num_bytes: int) -> float | None:
        return _LEAST_PATIENCE + _PATIENCE * self.rate.seconds(num_bytes)

    def late(self) -> None:
        self.breaker.failed()

    # ---- keeping house

    def metrics(self) -> dict[str, int | float]:
        stats = self.store.stats
        found = {"connected": int(self.store.connected), "units": self.store.num_units,
                 "bytes_held": self.store.num_bytes, "units_written": stats.units_written,
                 "units_read": stats.units_read, "units_bad": stats.units_bad, "units_evicted": stats.units_evicted,
                 "bytes_written": stats.bytes_written, "bytes_read": stats.bytes_read,
                 "writes_failed": stats.writes_failed, "lookups_failed": stats.lookups_failed,
                 "units_refused": self.num_refused, "circuit_opened": self.breaker.num_opened,
                 "bandwidth": self.rate.bytes_per_second}
        return {f"kv_{self.name}_{key}": value for key, value in found.items()}

    @property
    def num_used(self) -> int:
        return len(self.numbers.holders)

    @property
    def num_cached(self) -> int:
        return self.store.num_units * self.numbers.blocks_per_unit

    def drop_cached(self) -> int:
        return self.store.clear() * self.numbers.blocks_per_unit

    def reset(self) -> None:
        for name in self._storing:
            self.staging.drop(name)
        self._storing = {}
        self.numbers.clear()

    def check(self, held: list[list[int]]) -> None:
        counts = Counter(place for places in held for place in places)
        if counts != self.numbers.holders:
            raise InvariantError(f"the KV tier {self.name!r} counts {sum(self.numbers.holders.values())} holders of "
                                 f"its units and has {sum(counts.values())}, or others")

    def close(self) -> None:
        while self._asker is not None:
            try:
                question = self._questions.get_nowait()
            except Empty:
                break
            if question is not None:
                question[0].fail()
        self._questions.put(None)
        self._writer.close()
        self.store.close()
