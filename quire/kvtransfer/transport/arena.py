"""Deliveries through memory of the connection: the writer puts bytes there, the receiver checks and copies them on.

The arena is staging memory, not part of any cache. So a late or cancelled writer can do no harm there.
"""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from quire.kvtransfer.transport.base import Delivery
from quire.kvtransfer.transport.session import Announced, Session
from quire.kvtransfer.transport.stream import Connection, StreamReceiver, StreamWriter

_LITTLE = 64 << 10


class ArenaConnection(Connection):
    """A writer and the memory that it writes into."""

    def __init__(self, session: Session, peer: object, arena: memoryview) -> None:
        super().__init__(session, peer)
        self.arena = arena


class ArenaReceiver(StreamReceiver):
    """Takes what lies at the beginning of the arena: the bytes of all writes one after the other, then the payload."""

    def take(self, connection: Connection, delivery: Announced) -> None:
        assert isinstance(connection, ArenaConnection)
        data, at = self.received(connection, delivery), 0
        with self.transfers.entered(delivery.transfer, delivery.epoch) as landing:
            for region, offset, nbytes in delivery.writes:
                copy_bytes(landing.place(region, offset, nbytes), data[at : at + nbytes])
                at += nbytes
            landing.arrived(connection.peer, delivery.note, data[at : at + delivery.payload])

    def received(self, connection: ArenaConnection, delivery: Announced) -> memoryview:
        """The bytes of a delivery, as they were sent: between processes that share them, as they lie there."""
        return connection.arena


class ArenaWriter(StreamWriter):
    """Puts a delivery together in memory of its own process or of both; `arena` is where `buffer` is."""

    def __init__(self, session: Session, welcome: bytes, arena: memoryview) -> None:
        super().__init__(session, welcome)
        self.arena = arena
        self.most_bytes = arena.nbytes

    def buffer(self, nbytes: int) -> memoryview:
        return self.arena[:nbytes] if nbytes <= self.most_bytes else memoryview(bytearray(nbytes))

    def fill(self, delivery: Delivery) -> int:
        """Put the bytes of a delivery at the beginning of the arena; how many there are."""
        at = 0
        for write in delivery.writes:
            copy_bytes(self.arena[at : at + write.data.nbytes], write.data)
            at += write.data.nbytes
        payload = delivery.payload
        if payload is not None:
            target = self.arena[at : at + payload.nbytes]
            if address_of(target) != address_of(payload):
                copy_bytes(target, payload)
            at += payload.nbytes
        return at

    @abstractmethod
    def send(self, session: Session, delivery: Delivery, announcement: bytes, deadline: float) -> None: ...


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """As fast as memory allows; much of it without the GIL, a little without asking for it back. They may be the same
    memory."""
    if target.nbytes <= _LITTLE:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8), np.frombuffer(source, np.uint8))


def address_of(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data) if memory.nbytes else 0
