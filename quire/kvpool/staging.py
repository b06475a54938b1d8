"""Units in memory on their way to a store: filled from the device's blocks, then written by a thread of their own."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from queue import SimpleQueue
from threading import Lock, Thread

from quire.kvpool.rates import StoreRate
from quire.kvpool.store import UnitStore
from quire.kvpool.unit import seal

log = logging.getLogger("quire.kvpool")
_CLOSE_SECONDS = 20.0


class Staging:
    """Buffers of units, by name. What is taken and not yet written counts against `capacity`."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._mutex = Lock()
        self._buffers: dict[bytes, bytearray] = {}
        self._used = 0

    def open(self, name: bytes, size: int) -> bool:
        """A buffer for a unit; false when there is no room, or the unit is being written already."""
        with self._mutex:
            if name in self._buffers or (self._used and self._used + size > self.capacity):
                return False
            self._used += size
            self._buffers[name] = bytearray(size)
            return True

    def buffer(self, name: bytes) -> bytearray | None:
        """To be filled, or to be read while it waits; None once it is written or given up."""
        with self._mutex:
            return self._buffers.get(name)

    def drop(self, name: bytes) -> None:
        """It is written, or will not be."""
        with self._mutex:
            buffer = self._buffers.pop(name, None)
            self._used -= 0 if buffer is None else len(buffer)

    @property
    def num_bytes(self) -> int:
        return self._used


class UnitWriter:
    """Writes staged units to a store, one after the other, beside everything else."""

    def __init__(self, store: UnitStore, staging: Staging, seed: int, rate: StoreRate,
                 failed: Callable[[], None]) -> None:
        """`failed` is told of every write that raised."""
        self._store, self._staging, self._seed, self._rate = store, staging, seed, rate
        self._failed = failed
        self._queue: SimpleQueue[bytes | None] = SimpleQueue()
        self._thread: Thread | None = None

    def put(self, name: bytes) -> None:
        """Its buffer is complete. Returns at once."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="quire-unit-writer", daemon=True)
            self._thread.start()
        self._queue.put(name)

    def _work(self) -> None:
        while (name := self._queue.get()) is not None:
            try:
                self._write(name)
            except Exception as error:
                self._store.stats.writes_failed += 1
                self._failed()
                log.warning("writing a KV unit failed: %s: %s", type(error).__name__, error)
            finally:
                self._staging.drop(name)

    def _write(self, name: bytes) -> None:
        content = self._staging.buffer(name)
        if content is None:
            return
        began = time.perf_counter()
        kept = self._store.write(name, seal(name, content, self._seed), memoryview(content))
        if kept and not self._rate.num_observed:
            # Better than nothing, until something is read.
            self._rate.observe(len(content), time.perf_counter() - began)

    def close(self) -> None:
        """Write what is complete, for a while, and stop."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_CLOSE_SECONDS)
            self._thread = None
