"""Lets peers read the units that this engine holds in memory, if they prove that they have the secret.

A connection begins with a proof in both directions (HMAC over fresh random numbers). After it, each request is the name
of a unit, and each answer a length, 0 for "not here", and so many bytes.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from threading import BoundedSemaphore, Thread

from quire.errors import KVTransferError
from quire.kvpool.keys import KEY_BYTES
from quire.kvpool.memory import MemoryStore
from quire.listening import accepted

NAME_BYTES = KEY_BYTES + 2
LENGTH = struct.Struct("<Q")
_NONCE_BYTES = 32
_MOST_CONNECTIONS = 64
_IDLE_SECONDS = 300.0
_PROOF_SECONDS = 5.0
MOST_BYTES = 1 << 32
"""Of a unit."""


class PeerServer:
    """One thread for each connection; more than 64 wait to be accepted."""

    def __init__(self, store: MemoryStore, key: bytes, host: str = "127.0.0.1", port: int = 0) -> None:
        self._store, self._key = store, key
        self._listener = socket.create_server((host, port), backlog=_MOST_CONNECTIONS)
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self._places = BoundedSemaphore(_MOST_CONNECTIONS)
        self._closed = False
        self.num_refused = 0
        """Connections refused because they lack the secret."""
        self._thread = Thread(target=self._accept, name="quire-peer-accept", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        self._places.acquire()
        for connection, _ in accepted(self._listener):
            Thread(target=self._serve, args=(connection,), name="quire-peer", daemon=True).start()
            self._places.acquire()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                connection.settimeout(_PROOF_SECONDS)
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if not self._prove(connection):
                    self.num_refused += 1
                    return
                connection.settimeout(_IDLE_SECONDS)
                while not self._closed:
                    unit = self._store.read(receive(connection, NAME_BYTES))
                    connection.sendall(LENGTH.pack(0 if unit is None else len(unit)))
                    if unit is not None:
                        connection.sendall(unit)
        except (OSError, KVTransferError):
            pass  # the peer has gone, or is too slow
        finally:
            self._places.release()

    def _prove(self, connection: socket.socket) -> bool:
        mine = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(mine)
        theirs = receive(connection, _NONCE_BYTES)
        proof = receive(connection, hashlib.sha256().digest_size)
        if not hmac.compare_digest(proof, _proof(self._key, b"reader", mine, theirs)):
            return False
        connection.sendall(_proof(self._key, b"holder", mine, theirs))
        return True

    def close(self) -> None:
        self._closed = True
        self._listener.close()


def connect(address: str, key: bytes, timeout: float) -> socket.socket:
    """A connection to a peer's server that has proved to have the secret; KVTransferError or OSError if not."""
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise KVTransferError(f"{address!r} is no address of a peer")
    connection = socket.create_connection((host, int(port)), timeout)
    try:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        theirs = receive(connection, _NONCE_BYTES)
        mine = secrets.token_bytes(_NONCE_BYTES)
        connection.sendall(mine + _proof(key, b"reader", theirs, mine))
        if not hmac.compare_digest(receive(connection, hashlib.sha256().digest_size),
                                   _proof(key, b"holder", theirs, mine)):
            raise KVTransferError(f"the peer {address} does not have the secret")
    except BaseException:
        connection.close()
        raise
    return connection


def receive(connection: socket.socket, count: int) -> bytes:
    return bytes(receive_into(connection, bytearray(count)))


def receive_into(connection: socket.socket, buffer: bytearray) -> bytearray:
    """As many bytes as the buffer has; KVTransferError if the other side ends before."""
    view, done = memoryview(buffer), 0
    while done < len(buffer):
        count = connection.recv_into(view[done:])
        if count == 0:
            raise KVTransferError("the other side hung up")
        done += count
    view.release()
    return buffer


def _proof(key: bytes, role: bytes, server: bytes, client: bytes) -> bytes:
    return hmac.new(key, role + server + client, hashlib.sha256).digest()
