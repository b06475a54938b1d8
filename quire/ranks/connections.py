"""A rank's connections to the others, opened from what it was told at its start."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from quire.ranks.shared_memory import SharedMemory
from quire.ranks.start import MemoryAddress, RankStart

if TYPE_CHECKING:
    from quire.parallel.collectives import Collectives, Link, TensorGroup

GROUP_TIMEOUT = 3600.0
"""Seconds that ranks wait for each other. The engine notices a lost rank long before, and ends the others."""


def open_memory(address: MemoryAddress) -> SharedMemory:
    """Memory of another process of this user on this machine."""
    return SharedMemory.open(os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC))


def _part(address: MemoryAddress) -> memoryview:
    memory = open_memory(address)
    memory.close()
    return memoryview(memory.map)[address.offset : address.offset + address.size]


def open_collectives(start: RankStart) -> Collectives | None:
    """The tensor ranks of its stage, and its neighbours in the ring of stages. A rank that talks to nobody has none,
    and may live without torch."""
    if start.group is None and start.before is None:
        return None
    from quire.parallel.collectives import Collectives

    place = start.place
    group: TensorGroup | None = None
    before: Link | None = None
    after: Link | None = None
    if start.group is not None:
        from quire.parallel.shared import SharedGroup

        group = SharedGroup(_part(start.group), place.tensor_rank, place.tensor_size, GROUP_TIMEOUT)
    if start.before is not None and start.after is not None:
        from quire.parallel.shared import SharedLink

        before = SharedLink(_part(start.before), False, GROUP_TIMEOUT, start.ranks_here)
        after = SharedLink(_part(start.after), True, GROUP_TIMEOUT, start.ranks_here)
    return Collectives(group, before, after)
