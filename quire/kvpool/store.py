"""Where units are kept, as tiers see it: a disk, a store on the network, the memory of a peer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class StoreStats:
    """Running totals that the metrics report."""

    units_written: int = 0
    units_read: int = 0
    units_bad: int = 0
    """Came back torn, changed or foreign: misses."""
    units_evicted: int = 0
    bytes_written: int = 0
    bytes_read: int = 0
    writes_failed: int = 0
    lookups_failed: int = 0
    """Not answered: broken, late, or not asked because the circuit was open."""


class UnitStore(ABC):
    """Sealed units by name. May be called from several threads. A store that does not work raises; what it does not
    have is None or False, and nothing else is."""

    instant: bool = False
    """`find` answers from memory, so it may be asked on the thread that plans steps."""
    capacity: int = 0
    """Bytes that it holds at most; 0: not ours to know."""
    stats: StoreStats

    @abstractmethod
    def find(self, names: Sequence[bytes]) -> list[bool]:
        """Which of these it holds, as far as it knows. Neither reads nor checks content."""

    @abstractmethod
    def read(self, name: bytes) -> bytes | bytearray | memoryview | None:
        """A sealed unit, unchecked; None if it is not there."""

    @abstractmethod
    def write(self, name: bytes, header: bytes, content: memoryview) -> bool:
        """Keep a unit; false if there is no room for it."""

    @abstractmethod
    def discard(self, name: bytes) -> None:
        """It came back bad: it is not there any more."""

    @property
    def connected(self) -> bool:
        """Whether the store can be reached."""
        return True

    @property
    def num_units(self) -> int:
        """That it knows of."""
        return 0

    @property
    def num_bytes(self) -> int:
        return 0

    def clear(self) -> int:
        """Forget what is ours to forget; how many units."""
        return 0

    def close(self) -> None:  # noqa: B027 (some have nothing to let go of)
        """Let go of files and connections. Idempotent."""
