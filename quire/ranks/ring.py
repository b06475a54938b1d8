"""Messages from one process to all ranks of a machine: one write into shared memory, whatever the number of readers.

The writer appends messages to a ring of bytes and publishes how far it has come. Every reader copies each message and
notes how far it has read when it waits for the next; the writer overwrites nothing that somebody has still to read. A
message that is larger than a quarter of the ring goes in pieces.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

from quire.kernels.cpu.library import load
from quire.ranks.shared_memory import SharedMemory

RING_BYTES = 8 << 20
_LINE = 64
"""Bytes of a cache line: what different processes write lies in lines of its own."""
_SLEEPERS = 12
"""Where the number of readers that sleep is (`Signal` in `kernels/cpu/ring.c`)."""
_MORE = 1 << 31
"""Added to a length: the message goes on in the next piece."""
_LENGTH_BITS = 32
"""Of what a read returns: the lower ones are a length."""
_FULL_SECONDS = 0.0002
"""How long the writer sleeps when a reader is a whole ring behind."""


def ring_bytes(num_readers: int, capacity: int = RING_BYTES) -> int:
    """Shared memory for a ring that holds `capacity` bytes, a multiple of 64 and less than 4 GiB."""
    return _LINE * (1 + num_readers) + capacity


class _Writer(ctypes.Structure):
    """`Writer` of `kernels/cpu/ring.c`."""

    _fields_ = (("address", ctypes.c_void_p), ("num_readers", ctypes.c_int64), ("capacity", ctypes.c_uint64),
                ("offers_core", ctypes.c_int64))


class _Reader(ctypes.Structure):
    """`Reader` of `kernels/cpu/ring.c`."""

    _fields_ = (("address", ctypes.c_void_p), ("reader", ctypes.c_int64), ("num_readers", ctypes.c_int64),
                ("capacity", ctypes.c_uint64), ("seen", ctypes.c_uint64), ("written", ctypes.c_uint64),
                ("spin_ns", ctypes.c_int64), ("core", ctypes.c_int64), ("late", ctypes.c_int64),
                ("naps", ctypes.c_int64))


class RingWriter:
    def __init__(self, memory: SharedMemory, num_readers: int, offers_core: bool = False,
                 readers_spin: bool = False) -> None:
        """`offers_core`: there are as many readers as cores, so one of them waits for the writer's. `readers_spin`:
        they look for a message for a while before they sleep."""
        self.readers_spin = readers_spin
        capacity = memory.size - _LINE * (1 + num_readers)
        self._memory = memory
        self._most = capacity // 4
        self._state = _Writer(memory.address, num_readers, capacity, offers_core)
        self._side = ctypes.addressof(self._state)
        library = load()
        self._append, self._ring_bell = library.quire_ring_write, library.quire_ring_wake
        self._sleepers = memoryview(memory.map)[_SLEEPERS : _SLEEPERS + 4].cast("I")

    def announce(self) -> None:
        """A message is not far: readers that sleep get up, those who look for one go on. Any thread may call this."""
        self._ring_bell(self._memory.address)

    def wake(self) -> None:
        """A message follows: readers that sleep get up while it is made."""
        if self._sleepers[0]:
            self._ring_bell(self._memory.address)

    def write(self, message: bytes, check: Callable[[], None]) -> None:
        """Append a message. While the ring is full, `check` is called now and then; it raises to give up."""
        if len(message) > self._most or not self._append(self._side, message, len(message), False):
            self._write_slowly(message, check)

    def _write_slowly(self, message: bytes, check: Callable[[], None]) -> None:
        """What is too large for one piece, or has to wait for a reader."""
        for at in range(0, len(message) or 1, self._most):
            piece = message[at : at + self._most]
            while not self._append(self._side, piece, len(piece), at + self._most < len(message)):
                check()
                time.sleep(_FULL_SECONDS)


class RingReader:
    def __init__(self, memory: SharedMemory, reader: int, num_readers: int, spin_seconds: float,
                 core: int | None = None) -> None:
        """`spin_seconds`: how long it looks for a message before it sleeps until one comes. `core`: on which it waits,
        while others wait on theirs."""
        self._memory = memory
        capacity = memory.size - _LINE * (1 + num_readers)
        self._state = _Reader(memory.address, reader, num_readers, capacity, 0, 0, int(spin_seconds * 1e9),
                              -1 if core is None else core, 0, 0)
        self._side = ctypes.addressof(self._state)
        self._next = load().quire_ring_read
        self._pieces: list[bytes] = []

    def read(self, seconds: float) -> bytes | None:
        """The next message, or None when none has come for so long."""
        while True:
            found = self._next(self._side, int(seconds * 1e9))
            if not found:
                return None
            at, length = found >> _LENGTH_BITS, found & (1 << _LENGTH_BITS) - 1
            if length < _MORE and not self._pieces:
                return self._memory.map[at : at + length]
            self._pieces.append(self._memory.map[at : at + (length & ~_MORE)])
            if length < _MORE:
                whole, self._pieces = b"".join(self._pieces), []
                return whole
