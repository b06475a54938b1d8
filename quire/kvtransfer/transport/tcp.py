"""KV over TCP, with nothing but the standard library: the default between machines.

The bytes of a delivery follow its frame and are read from the socket straight into the receiver's blocks, some at a
time, the transfer's epoch checked before each. A sealed digest of all bytes ends the delivery; until it is right the
delivery does not count.
"""

from __future__ import annotations

import time
from typing import Final

import xxhash

from quire.errors import KVTransferError
from quire.kvtransfer.transport.base import Address, Delivery, Greet, OpenTransfers, PeerLostError, Transport
from quire.kvtransfer.transport.session import (
    DELIVER,
    DIGEST,
    WELCOME,
    Announced,
    FrameError,
    Session,
    open_session,
    receive_some,
    wait_readable,
)
from quire.kvtransfer.transport.stream import (
    Connection,
    StreamReceiver,
    StreamWriter,
    dial,
    introduce,
    listening_socket,
)

MOST_BYTES: Final = 256 << 20
_AT_ONCE: Final = 1 << 20
"""Bytes of a payload read by one call."""
_PLACES_AT_ONCE: Final = 256
"""Places filled by one call, with what has come already: what closing a transfer may have to wait for."""


class TcpReceiver(StreamReceiver):
    most_bytes = MOST_BYTES

    def __init__(self, transfers: OpenTransfers, secret: bytes, greet: Greet, host: str) -> None:
        listener = listening_socket(host)
        self._host, self._port = host, int(listener.getsockname()[1])
        super().__init__(listener, transfers, secret, greet)

    @property
    def address(self) -> Address:
        return {"host": self._host, "port": self._port}

    def connected(self, session: Session, peer: object, welcome: bytes) -> Connection:
        session.send(WELCOME, welcome)
        return _TcpConnection(session, peer)

    def take(self, connection: Connection, delivery: Announced) -> None:
        assert isinstance(connection, _TcpConnection)
        digest = xxhash.xxh3_128()
        problem = self._straight(connection, delivery, digest)
        payload = connection.payload(delivery.payload)
        connection.read(payload, digest)
        kind, sent = connection.session.receive()
        if kind != DIGEST or (problem is None and sent != digest.digest()):
            raise FrameError("the bytes of a delivery were changed on their way")
        if problem is not None:
            raise problem
        with self.transfers.entered(delivery.transfer, delivery.epoch) as landing:
            landing.arrived(connection.peer, delivery.note, payload)

    def _straight(self, connection: _TcpConnection, delivery: Announced,
                  digest: xxhash.xxh3_128) -> KVTransferError | None:
        """Read the writes into their places. Where they may not go there (any more), their bytes are dropped."""
        sock, left = connection.session.socket, sum(write[2] for write in delivery.writes)
        try:
            with self.transfers.entered(delivery.transfer, delivery.epoch) as landing:
                places = [landing.place(*write) for write in delivery.writes]
            first = 0
            while left:
                with self.transfers.entered(delivery.transfer, delivery.epoch):
                    count = receive_some(sock, places[first : first + _PLACES_AT_ONCE])
                    left -= count
                    while count:
                        got = places[first][:count]
                        digest.update(got)
                        places[first], count = places[first][got.nbytes :], count - got.nbytes
                        first += not places[first].nbytes
                if left:
                    wait_readable(sock, None)
        except PeerLostError:
            raise
        except KVTransferError as error:
            connection.drain(left)
            return error
        return None


class _TcpConnection(Connection):
    def __init__(self, session: Session, peer: object) -> None:
        super().__init__(session, peer)
        self._payload = bytearray()
        self._scratch = memoryview(bytearray(_AT_ONCE))

    def payload(self, nbytes: int) -> memoryview:
        if len(self._payload) < nbytes:
            self._payload = bytearray(nbytes)
        return memoryview(self._payload)[:nbytes]

    def read(self, into: memoryview, digest: xxhash.xxh3_128) -> None:
        while into.nbytes:
            wait_readable(self.session.socket, None)
            count = receive_some(self.session.socket, [into[:_AT_ONCE]])
            digest.update(into[:count])
            into = into[count:]

    def drain(self, nbytes: int) -> None:
        """Read bytes that go nowhere."""
        while nbytes:
            wait_readable(self.session.socket, None)
            nbytes -= receive_some(self.session.socket, [self._scratch[:nbytes]])


class TcpWriter(StreamWriter):
    most_bytes = MOST_BYTES

    def __init__(self, session: Session, welcome: bytes) -> None:
        super().__init__(session, welcome)
        self._buffer = bytearray()

    def buffer(self, nbytes: int) -> memoryview:
        if len(self._buffer) < nbytes:
            self._buffer = bytearray(nbytes)
        return memoryview(self._buffer)[:nbytes]

    def send(self, session: Session, delivery: Delivery, announcement: bytes, deadline: float) -> None:
        data = [write.data.cast("B") for write in delivery.writes if write.data.nbytes]
        if delivery.payload is not None:
            data.append(delivery.payload.cast("B"))
        digest = xxhash.xxh3_128()
        session.send(DELIVER, announcement, deadline, data)
        for each in data:
            digest.update(each)
        session.send(DIGEST, digest.digest(), deadline)


class TcpTransport(Transport):
    name = "tcp"

    def missing(self) -> str | None:
        return None

    def listen(self, transfers: OpenTransfers, secret: bytes, greet: Greet, host: str = "127.0.0.1") -> TcpReceiver:
        return TcpReceiver(transfers, secret, greet, host)

    def connect(self, address: Address, secret: bytes, hello: bytes, timeout: float) -> TcpWriter:
        deadline = time.monotonic() + timeout
        sock = dial(address, timeout)
        try:
            session = open_session(sock, secret, deadline)
            return TcpWriter(session, introduce(session, hello, deadline))
        except BaseException:
            sock.close()
            raise
