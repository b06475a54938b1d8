"""KV between processes of one machine: through shared memory, announced on a Unix socket.

The memory is an anonymous file that the receiver makes for each writer and hands over with the socket, and the socket
has an abstract name. Neither has a place in a file system, so both are gone with the last process that has them open,
however that ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import Final

from quire.kvtransfer.transport.arena import ArenaConnection, ArenaReceiver, ArenaWriter
from quire.kvtransfer.transport.base import Address, Delivery, Greet, OpenTransfers, PeerLostError, Transport
from quire.kvtransfer.transport.session import DELIVER, WELCOME, Session, open_session, wait_readable
from quire.kvtransfer.transport.stream import Connection, introduce

ARENA_BYTES: Final = 32 << 20
"""Of each writer, and so of a delivery. Pages that were never written cost nothing."""
_F_SEAL_SEAL, _F_SEAL_SHRINK, _F_SEAL_GROW = 1, 2, 4


class ShmReceiver(ArenaReceiver):
    most_bytes = ARENA_BYTES

    def __init__(self, transfers: OpenTransfers, secret: bytes, greet: Greet) -> None:
        self._name = f"quire-kv-{secrets.token_hex(16)}"
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind("\0" + self._name)
        listener.listen(64)
        super().__init__(listener, transfers, secret, greet)

    @property
    def address(self) -> Address:
        return {"socket": self._name, "machine": machine_id()}

    def connected(self, session: Session, peer: object, welcome: bytes) -> Connection:
        file = os.memfd_create("quire-kv", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(file, ARENA_BYTES)
            # A writer that made it shorter would kill the receiver with a bus error.
            fcntl.fcntl(file, fcntl.F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_GROW | _F_SEAL_SEAL)
            arena = memoryview(mmap.mmap(file, ARENA_BYTES))
            session.send(WELCOME, welcome)
            socket.send_fds(session.socket, [b"\0"], [file])
        finally:
            os.close(file)
        return ArenaConnection(session, peer, arena)


class ShmWriter(ArenaWriter):
    def send(self, session: Session, delivery: Delivery, announcement: bytes, deadline: float) -> None:
        self.fill(delivery)
        session.send(DELIVER, announcement, deadline)


class ShmTransport(Transport):
    name = "shm"

    def missing(self) -> str | None:
        return None if sys.platform == "linux" else "shared memory between engines needs Linux (memfd_create)"

    def listen(self, transfers: OpenTransfers, secret: bytes, greet: Greet, host: str = "127.0.0.1") -> ShmReceiver:
        return ShmReceiver(transfers, secret, greet)

    def connect(self, address: Address, secret: bytes, hello: bytes, timeout: float) -> ShmWriter:
        if address.get("machine") != machine_id():
            raise PeerLostError("the KV receiver is on another machine")
        deadline = time.monotonic() + timeout
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            sock.connect("\0" + str(address.get("socket")))
            sock.settimeout(None)
            session = open_session(sock, secret, deadline)
            welcome = introduce(session, hello, deadline)
            return ShmWriter(session, welcome, _shared_arena(sock, deadline))
        except OSError as error:
            sock.close()
            raise PeerLostError(f"no KV receiver answers on this machine: {error}") from error
        except BaseException:
            sock.close()
            raise


def _shared_arena(sock: socket.socket, deadline: float) -> memoryview:
    wait_readable(sock, deadline)
    _, files, _, _ = socket.recv_fds(sock, 1, 1)
    if len(files) != 1:
        raise PeerLostError("the KV receiver handed over no memory")
    try:
        return memoryview(mmap.mmap(files[0], ARENA_BYTES))
    finally:
        os.close(files[0])


def machine_id() -> str:
    """The same for processes that can share memory: one kernel, since its start, and one name space of the network."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}-{os.stat('/proc/self/ns/net').st_ino}"
    except OSError:
        return socket.gethostname()
