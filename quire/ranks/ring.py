"""Messages from one process to all ranks of a machine: one write into shared memory, whatever the number of readers.

The writer appends messages to a ring of bytes and publishes how far it has come. Every reader copies each message and
notes how far it has read when it waits for the next; the writer overwrites nothing that somebody has still to read. A
message that is larger than a quarter of the ring goes in pieces.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable

from quire.kernels.cpu.library import load
from quire.ranks.shared_memory import SharedMemory

RING_BYTES = 8 << 20
_LINE = 64
"""Bytes of a cache line: what different processes write lies in lines of its own."""
_SLEEPERS = 12
"""Where the number of readers that sleep is (`Signal` in `kernels/cpu/ring.c`)."""
_LENGTH = struct.Struct("=I")
_SKIP = 0xFFFFFFFF
"""Stands in place of a length where the rest of the ring is too short for the next piece."""
_MORE = 1 << 31
"""Added to a length: the message goes on in the next piece."""
_FULL_SECONDS = 0.0002
"""How long the writer sleeps when a reader is a whole ring behind."""


def ring_bytes(num_readers: int, capacity: int = RING_BYTES) -> int:
    """Shared memory for a ring that holds `capacity` bytes, a multiple of 64."""
    return _LINE * (1 + num_readers) + capacity


class RingWriter:
    def __init__(self, memory: SharedMemory, num_readers: int, offers_core: bool = False) -> None:
        """`offers_core`: there are as many readers as cores, so one of them waits for the writer's."""
        self._memory, self._num_readers = memory, num_readers
        self._offers_core = offers_core
        self._capacity = memory.size - _LINE * (1 + num_readers)
        self._written = 0
        self._library = load()
        self._append = self._library.quire_ring_write
        self._sleepers = memoryview(memory.map)[_SLEEPERS : _SLEEPERS + 4].cast("I")

    def wake(self) -> None:
        """A message follows: readers that sleep get up while it is made."""
        if self._sleepers[0]:
            self._library.quire_ring_wake(self._memory.address)

    def write(self, message: bytes | bytearray, check: Callable[[], None]) -> None:
        """Append a message. While the ring is full, `check` is called now and then; it raises to give up."""
        most = self._capacity // 4
        if len(message) <= most:
            self._put(bytes(message), False, check)
            return
        view = memoryview(message)
        for at in range(0, len(message), most):
            self._put(bytes(view[at : at + most]), at + most < len(message), check)

    def _put(self, piece: bytes, more: bool, check: Callable[[], None]) -> None:
        while True:
            written = self._append(self._memory.address, self._num_readers, self._capacity, piece, len(piece), more)
            if written != self._written:
                self._written = written
                break
            check()
            time.sleep(_FULL_SECONDS)
        if self._offers_core:
            self._library.quire_ring_yield()


class RingReader:
    def __init__(self, memory: SharedMemory, reader: int, num_readers: int, spin_seconds: float,
                 core: int | None = None) -> None:
        """`spin_seconds`: how long it looks for a message before it sleeps until one comes. `core`: on which it waits,
        while others wait on theirs."""
        self._memory = memory
        self._mine = memory.address + _LINE * (1 + reader)
        self._first = _LINE * (1 + num_readers)
        self._capacity = memory.size - self._first
        self._seen = self._written = 0
        self._spin_ns = int(spin_seconds * 1e9)
        self._core = -1 if core is None else core
        self._wait = load().quire_ring_wait
        self._pieces: list[bytes] = []

    def read(self, seconds: float) -> bytes | None:
        """The next message, or None when none has come for so long."""
        while True:
            if self._written == self._seen:
                self._written = self._wait(self._memory.address, self._mine, self._seen, self._spin_ns,
                                           int(seconds * 1e9), self._core)
                if self._written == self._seen:
                    return None
            piece, more = self._take()
            if piece is None:
                continue
            if not more and not self._pieces:
                return piece
            self._pieces.append(piece)
            if not more:
                whole, self._pieces = b"".join(self._pieces), []
                return whole

    def _take(self) -> tuple[bytes | None, bool]:
        position = self._seen % self._capacity
        at = self._first + position
        (length,) = _LENGTH.unpack_from(self._memory.map, at)
        if length == _SKIP:
            self._seen += self._capacity - position
            return None, False
        size = length & ~_MORE
        piece = self._memory.map[at + _LENGTH.size : at + _LENGTH.size + size]
        self._seen += -(-(_LENGTH.size + size) // 8) * 8
        return piece, bool(length & _MORE)
