"""A rank's connections to the others, opened from what it was told at its start."""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from quire.ranks.secret import WrongSecret, greet, welcome
from quire.ranks.shared_memory import SharedMemory
from quire.ranks.start import MemoryAddress, RankStart

if TYPE_CHECKING:
    from quire.parallel.collectives import Collectives, Link, TensorGroup

GROUP_TIMEOUT = 3600.0
"""Seconds that ranks wait for each other. The engine notices a lost rank long before, and ends the others."""


CONNECT_SECONDS = 60.0
"""That ranks of different machines have to reach each other when they start."""


def open_memory(address: MemoryAddress) -> SharedMemory:
    """Memory of another process of this user on this machine."""
    return SharedMemory.open(os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC))


def _part(address: MemoryAddress) -> memoryview:
    memory = open_memory(address)
    memory.close()
    return memoryview(memory.map)[address.offset : address.offset + address.size]


class MadeForOthers:
    """What a rank makes before it starts, so that others can reach it: memory for ranks of its machine, and a port for
    one of another machine."""

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self.listener: socket.socket | None = None

    def make(self, wanted: dict[str, Any]) -> dict[str, Any]:
        made: dict[str, Any] = {"pid": os.getpid()}
        if wanted["bytes"]:
            self._memory = SharedMemory.create("ranks", wanted["bytes"])
            made["fd"] = self._memory.fd
        if wanted["listen"] is not None:
            self.listener = socket.create_server((wanted["listen"], 0))
            made["port"] = self.listener.getsockname()[1]
        return made


def open_collectives(start: RankStart, made: MadeForOthers) -> Collectives | None:
    """The tensor ranks of its stage, and its neighbours in the ring of stages. A rank that talks to nobody has none,
    and may live without torch."""
    if start.group is None and start.before is None and start.after is None and not start.network:
        return None
    from quire.parallel.collectives import Collectives
    from quire.parallel.shared import SharedGroup, SharedLink
    from quire.parallel.shared_head import HeadMemory

    place = start.place
    group: TensorGroup | None = None
    if start.group is not None:
        group = SharedGroup(_part(start.group), place.tensor_rank, place.tensor_size, GROUP_TIMEOUT)
    before, after = _network_links(start, made)
    if start.before is not None:
        before = SharedLink(_part(start.before), False, GROUP_TIMEOUT, start.ranks_here)
    if start.after is not None:
        after = SharedLink(_part(start.after), True, GROUP_TIMEOUT, start.ranks_here)
    head = None if start.head is None else HeadMemory(_part(start.head), start.core)
    return Collectives(group, before, after, head=head)


def _network_links(start: RankStart, made: MadeForOthers) -> tuple[Link | None, Link | None]:
    """From and to stages on other machines. Both at once: everybody connects while it waits to be connected to."""
    if not start.network:
        return None, None
    from quire.parallel.over_links import SocketLink

    secret = bytes.fromhex(start.network["secret"])
    with ThreadPoolExecutor(1) as connecting:
        to = start.network["after"]
        reached = None if to is None else connecting.submit(_reach, to, secret, start.place.index)
        before: Link | None = None
        if start.before is None and made.listener is not None:
            before = SocketLink(_accept(made.listener, secret))
        return before, None if reached is None else SocketLink(reached.result())


def _reach(address: list[Any], secret: bytes, index: int) -> socket.socket:
    sock = socket.create_connection((address[0], address[1]), CONNECT_SECONDS)
    greet(sock, secret, index)
    return sock


def _accept(listener: socket.socket, secret: bytes) -> socket.socket:
    """The one who knows the secret; others are dropped."""
    until = time.monotonic() + CONNECT_SECONDS
    while True:
        listener.settimeout(max(0.001, until - time.monotonic()))
        sock, _ = listener.accept()
        try:
            welcome(sock, secret)
        except WrongSecret:
            sock.close()
            continue
        listener.close()
        return sock
