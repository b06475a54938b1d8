"""Units in this engine's memory, for itself and for its peers."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock

from quire.kvpool.store import StoreStats, UnitStore


class MemoryStore(UnitStore):
    """At most `capacity` bytes; those not used for longest make room."""

    instant = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.stats = StoreStats()
        self._mutex = Lock()
        self._units: OrderedDict[bytes, bytes] = OrderedDict()
        self._used = 0
        self.evicted: list[bytes] = []
        """Names evicted since this list was last read."""

    def find(self, names: Sequence[bytes]) -> list[bool]:
        with self._mutex:
            return [name in self._units for name in names]

    def read(self, name: bytes) -> bytes | None:
        with self._mutex:
            unit = self._units.get(name)
            if unit is not None:
                self._units.move_to_end(name)
                self.stats.units_read += 1
                self.stats.bytes_read += len(unit)
            return unit

    def write(self, name: bytes, header: bytes, content: memoryview) -> bool:
        if len(header) + len(content) > self.capacity:
            return False
        unit = b"".join((header, content))
        with self._mutex:
            self._remove(name)
            while self._used + len(unit) > self.capacity:
                oldest = next(iter(self._units))
                self._remove(oldest)
                self.evicted.append(oldest)
                self.stats.units_evicted += 1
            self._units[name] = unit
            self._used += len(unit)
            self.stats.units_written += 1
            self.stats.bytes_written += len(unit)
        return True

    def take_evicted(self) -> list[bytes]:
        with self._mutex:
            evicted, self.evicted = self.evicted, []
            return [name for name in evicted if name not in self._units]

    def names(self) -> list[bytes]:
        with self._mutex:
            return list(self._units)

    def discard(self, name: bytes) -> None:
        with self._mutex:
            self._remove(name)

    def _remove(self, name: bytes) -> None:
        unit = self._units.pop(name, None)
        self._used -= 0 if unit is None else len(unit)

    @property
    def num_units(self) -> int:
        return len(self._units)

    @property
    def num_bytes(self) -> int:
        return self._used

    def clear(self) -> int:
        with self._mutex:
            count = len(self._units)
            self.evicted += self._units
            self._units.clear()
            self._used = 0
        return count
