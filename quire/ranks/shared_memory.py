"""Memory that processes share and that has no name: it goes with the last process that maps it."""

from __future__ import annotations

import ctypes
import mmap
import os


class SharedMemory:
    """A piece of memory, all zero at first, behind a file descriptor that other processes may get."""

    def __init__(self, fd: int, size: int) -> None:
        self.fd, self.size = fd, size
        self.map = mmap.mmap(fd, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    @classmethod
    def create(cls, purpose: str, size: int) -> SharedMemory:
        fd = os.memfd_create(f"quire-{purpose}", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        return cls(fd, size)

    @classmethod
    def open(cls, fd: int) -> SharedMemory:
        """What another process made."""
        return cls(fd, os.fstat(fd).st_size)

    def close(self) -> None:
        """Let go of the descriptor; the mapping stays until nobody uses it. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
