"""KV through Mooncake's transfer engine: RDMA where there is any, else its TCP.

The engine's writes are one-sided: they land without the receiver knowing. So each writer has an arena of its own on the
receiver's side, into which the engine writes; a frame on a TCP session of ours says that a delivery is complete and
carries a digest of it, and then it is copied on like any other. When a writer is gone its arena is taken out of the
engine and its addresses are never used again in this process, so a write that is still on its way hits nothing.
"""

from __future__ import annotations

import importlib.util
import json
import mmap
import os
import time
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any, Final

import xxhash

from quire.errors import ConfigError, KVTransferError
from quire.kvtransfer.transport.arena import ArenaConnection, ArenaReceiver, ArenaWriter, address_of, copy_bytes
from quire.kvtransfer.transport.base import (
    ALL_INTERFACES,
    Address,
    Delivery,
    Greet,
    OpenTransfers,
    PeerLostError,
    Transport,
)
from quire.kvtransfer.transport.session import DELIVER, DIGEST, WELCOME, Announced, FrameError, Session, open_session
from quire.kvtransfer.transport.stream import Connection, dial, introduce, listening_socket
from quire.machine import rdma_devices

ARENA_BYTES: Final = 32 << 20
_POLL_SECONDS: Final = (0.00005, 0.002)
"""Between two looks at a write: at first, and at most."""


class _Engine:
    """Mooncake's engine, once for each address of this process."""

    def __init__(self, host: str) -> None:
        os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
        from mooncake.engine import TransferEngine

        for protocol in ("rdma", "tcp") if rdma_devices() else ("tcp",):
            self._engine = TransferEngine()
            self.protocol = protocol
            if self._engine.initialize(host, "P2PHANDSHAKE", protocol, "") == 0:
                break
        else:
            raise KVTransferError(f"Mooncake's transfer engine did not start at {host}")
        self.session = f"{host}:{self._engine.get_rpc_port()}"
        self._retired: list[mmap.mmap] = []

    def arena(self) -> mmap.mmap:
        """Memory that the engine may read and write."""
        memory = mmap.mmap(-1, ARENA_BYTES)
        if self._engine.register_memory(address_of(memoryview(memory)), ARENA_BYTES) != 0:
            raise KVTransferError("Mooncake's transfer engine did not take the memory of a connection")
        return memory

    def retire(self, memory: mmap.mmap) -> None:
        """Take memory out of the engine. It stays mapped, without its pages: what comes late has nowhere else to go."""
        self._engine.unregister_memory(address_of(memoryview(memory)))
        memory.madvise(mmap.MADV_DONTNEED)
        self._retired.append(memory)

    def write(self, session: str, source: int, target: int, nbytes: int, given_up: Callable[[], bool]) -> None:
        """Until it is there; PeerLostError if it fails or is given up."""
        if nbytes == 0:
            return
        batch = self._engine.transfer_submit_write(session, source, target, nbytes)
        if batch in (0, -1):
            raise PeerLostError(f"Mooncake cannot write to {session}")
        pause = _POLL_SECONDS[0]
        while (status := self._engine.transfer_check_status(batch)) == 0:
            if given_up():
                raise PeerLostError(f"Mooncake's write to {session} was given up")
            time.sleep(pause)
            pause = min(_POLL_SECONDS[1], pause * 1.5)
        if status != 1:
            raise PeerLostError(f"Mooncake's write to {session} failed ({status})")


_engines_lock = Lock()


@cache
def _make_engine(host: str) -> _Engine:
    return _Engine(host)


def _engine_at(host: str) -> _Engine:
    with _engines_lock:
        return _make_engine(host)


class _MooncakeConnection(ArenaConnection):
    def __init__(self, session: Session, peer: object, memory: mmap.mmap) -> None:
        super().__init__(session, peer, memoryview(memory))
        self.memory = memory


class MooncakeReceiver(ArenaReceiver):
    most_bytes = ARENA_BYTES

    def __init__(self, transfers: OpenTransfers, secret: bytes, greet: Greet, host: str) -> None:
        if host in ALL_INTERFACES:
            raise ConfigError("Mooncake must be given the address of one interface, not all of them", "kv_listen")
        self._host, self._engine = host, _engine_at(host)
        listener = listening_socket(host)
        self._port = int(listener.getsockname()[1])
        super().__init__(listener, transfers, secret, greet)

    @property
    def address(self) -> Address:
        return {"host": self._host, "port": self._port, "protocol": self._engine.protocol}

    def connected(self, session: Session, peer: object, welcome: bytes) -> Connection:
        memory = self._engine.arena()
        where = {"session": self._engine.session, "address": address_of(memoryview(memory))}
        session.send(WELCOME, json.dumps(where).encode() + b"\n" + welcome)
        return _MooncakeConnection(session, peer, memory)

    def received(self, connection: ArenaConnection, delivery: Announced) -> memoryview:
        """A copy, and the copy is checked: every process that reaches the engine's port can write into the arena."""
        kind, sent = connection.session.receive()
        data = memoryview(bytearray(delivery.nbytes))
        copy_bytes(data, connection.arena[: delivery.nbytes])
        if kind != DIGEST or sent != xxhash.xxh3_128_digest(data):
            raise FrameError("the bytes of a delivery were changed on their way")
        return data

    def disconnected(self, connection: Connection) -> None:
        assert isinstance(connection, _MooncakeConnection)
        self._engine.retire(connection.memory)


class MooncakeWriter(ArenaWriter):
    def __init__(self, session: Session, welcome: bytes, engine: _Engine, memory: mmap.mmap) -> None:
        where, _, rest = welcome.partition(b"\n")
        super().__init__(session, rest, memoryview(memory))
        self._engine = engine
        self._memory: mmap.mmap | None = memory
        try:
            told: dict[str, Any] = json.loads(where)
            self._session_name, self._target = str(told["session"]), int(told["address"])
        except (ValueError, KeyError, TypeError) as error:
            raise FrameError("a Mooncake receiver did not say where it takes bytes") from error

    def warm_up(self, deadline: float) -> None:
        """The engine's first write opens a connection of its own, and waits a minute for a receiver that stands still:
        better now, when it has just answered."""
        self.write_bytes(1, deadline)

    def write_bytes(self, nbytes: int, deadline: float) -> None:
        """From the beginning of our arena to that of the receiver's."""
        self._engine.write(self._session_name, address_of(self.arena), self._target, nbytes,
                           lambda: self.broken or time.monotonic() > deadline)

    def send(self, session: Session, delivery: Delivery, announcement: bytes, deadline: float) -> None:
        nbytes = self.fill(delivery)
        digest = xxhash.xxh3_128_digest(self.arena[:nbytes])
        self.write_bytes(nbytes, deadline)
        session.send(DELIVER, announcement, deadline)
        session.send(DIGEST, digest, deadline)

    def close(self) -> None:
        super().close()
        memory, self._memory = self._memory, None
        if memory is not None:
            self._engine.retire(memory)


class MooncakeTransport(Transport):
    name = "mooncake"

    def missing(self) -> str | None:
        return mooncake_missing()

    def listen(self, transfers: OpenTransfers, secret: bytes, greet: Greet,
               host: str = "127.0.0.1") -> MooncakeReceiver:
        return MooncakeReceiver(transfers, secret, greet, host)

    def connect(self, address: Address, secret: bytes, hello: bytes, timeout: float) -> MooncakeWriter:
        deadline = time.monotonic() + timeout
        sock = dial(address, timeout)
        try:
            engine = _engine_at(sock.getsockname()[0])
            if engine.protocol != address.get("protocol"):
                raise KVTransferError(f"Mooncake speaks {engine.protocol} here and {address.get('protocol')} there")
            session = open_session(sock, secret, deadline)
            writer = MooncakeWriter(session, introduce(session, hello, deadline), engine, engine.arena())
        except BaseException:
            sock.close()
            raise
        try:
            writer.warm_up(deadline)
        except BaseException:
            writer.close()
            raise
        return writer


@cache
def mooncake_missing() -> str | None:
    """Why Mooncake's transfer engine cannot be used here; None if it can."""
    if importlib.util.find_spec("mooncake") is None:
        return "the package is not installed: pip install 'quire[mooncake]'"
    try:
        import mooncake.engine  # noqa: F401
    except ImportError as error:
        return (f"Mooncake's library cannot be loaded ({error}); on Debian it needs: "
                "apt-get install libibverbs1 libnuma1 librdmacm1")
    return None
