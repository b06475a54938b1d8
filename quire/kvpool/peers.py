"""Units in the memory of peers: an index says who holds what, and they are read from there, one engine from another."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event, Lock, Thread
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from quire.errors import ConfigError, KVTransferError
from quire.kvcache.secret import derived_secret
from quire.kvpool.index import HttpIndex, UnitIndex
from quire.kvpool.memory import MemoryStore
from quire.kvpool.peer_server import LENGTH, MOST_BYTES, PeerServer, connect, receive, receive_into
from quire.kvpool.store import StoreStats, UnitStore
from quire.options import parse_bytes

log = logging.getLogger("quire.kvpool")
_TIMEOUT = 5.0
_AVOIDED_SECONDS = 5.0
"""A peer that did not answer is not asked for so long."""
ALL_INTERFACES = ("0.0.0.0", "::", "[::]", "*")
_REMEMBERED = 1 << 14
"""Units whose owners are remembered between lookup and fetch."""


@dataclass(frozen=True, slots=True)
class PeerOptions:
    """redis://host:port/0?share=1GiB&listen=127.0.0.1:0&lease=10, or the same of a router's http://host:port"""

    url: str
    share: int = 1 << 30
    """Bytes of memory for units that peers may read."""
    listen: str = "127.0.0.1:0"
    lease: float = 10.0
    """Seconds after its last heartbeat until other engines stop asking this one."""

    @classmethod
    def parse(cls, url: str) -> PeerOptions:
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        try:
            lease = float(given.pop("lease", "10"))
        except ValueError:
            lease = 0.0
        if not 0.1 <= lease <= 3600.0:
            raise ConfigError("kv_pool: lease must be between 0.1 and 3600 seconds", field="kv_pool")
        share = parse_bytes(given.pop("share", "1GiB"), "kv_pool: share")
        listen = given.pop("listen", "127.0.0.1:0")
        host, _, port = listen.rpartition(":")
        if not host or not port.isdigit() or int(port) > 65535:
            raise ConfigError(f"kv_pool: listen must be an address and a port, as in 127.0.0.1:0, not {listen!r}",
                              field="kv_pool")
        if host in ALL_INTERFACES:
            raise ConfigError(f"kv_pool: listen names all interfaces ({host}), and peers are told to come there: give "
                              "the address by which they reach this engine", field="kv_pool")
        if given and not parts.scheme.startswith("redis"):
            raise ConfigError(f"kv_pool has no option {sorted(given)[0]!r}; it has share, listen and lease",
                              field="kv_pool")
        return cls(urlunsplit(parts._replace(query=urlencode(given))), share, listen, lease)

    def open_index(self, secret: bytes) -> UnitIndex:
        if self.url.startswith("redis"):
            from quire.kvpool.redis_index import RedisIndex

            return RedisIndex(self.url, derived_secret(secret, "kv-index-space").hex()[:16])
        return HttpIndex(self.url, derived_secret(secret, "kv-index"))


class PeerStore(UnitStore):
    """Writes to its own memory and tells the index; reads from there, or from the peer that has it."""

    def __init__(self, index: UnitIndex, secret: bytes, share: int, listen: str = "127.0.0.1:0",
                 lease: float = 10.0) -> None:
        self.memory = MemoryStore(share)
        self.capacity = share
        self.stats = StoreStats()
        self._index, self._lease = index, lease
        self._key = derived_secret(secret, "kv-peers")
        host, _, port = listen.rpartition(":")
        try:
            self.server = PeerServer(self.memory, self._key, host, int(port))
        except OSError as error:
            raise ConfigError(f"kv_pool: cannot listen on {listen}: {error}", field="kv_pool") from error
        self.owner = f"{self.server.address}#{secrets.token_hex(8)}"
        self._mutex = Lock()
        self._owners: OrderedDict[bytes, list[str]] = OrderedDict()
        self._connections: dict[str, socket.socket] = {}
        self._avoided: dict[str, float] = {}
        self._closing = Event()
        self._fresh: list[bytes] = []
        """Written, and not told to the index yet."""
        self._news = Event()
        self._thread = Thread(target=self._tell, name="quire-peer-lease", daemon=True)
        self._thread.start()

    # ---- reading

    def find(self, names: Sequence[bytes]) -> list[bool]:
        here = self.memory.find(names)
        missing = [name for name, known in zip(names, here, strict=True) if not known]
        found: dict[bytes, list[str]] = {}
        if missing:
            for name, owners in zip(missing, self._index.query(missing), strict=True):
                found[name] = [owner for owner in owners if owner != self.owner and not self._avoids(owner)]
        with self._mutex:
            for name, owners in found.items():
                self._owners[name] = owners
                self._owners.move_to_end(name)
            while len(self._owners) > _REMEMBERED:
                self._owners.popitem(last=False)
        return [known or bool(found[name]) for name, known in zip(names, here, strict=True)]

    def read(self, name: bytes) -> bytes | bytearray | None:
        unit: bytes | bytearray | None = self.memory.read(name)
        with self._mutex:
            owners = list(self._owners.get(name, ()))
        for owner in owners if unit is None else ():
            unit = self._read_from(owner, name)
            if unit is not None:
                break
        if unit is not None:
            self.stats.units_read += 1
            self.stats.bytes_read += len(unit)
        return unit

    def _read_from(self, owner: str, name: bytes) -> bytearray | None:
        """From one peer; one that fails is avoided for a while. Only the thread that fetches comes here."""
        try:
            connection = self._connections.get(owner)
            if connection is None:
                connection = connect(owner.partition("#")[0], self._key, _TIMEOUT)
                self._connections[owner] = connection
            connection.sendall(name)
            (length,) = LENGTH.unpack(receive(connection, LENGTH.size))
            if length > MOST_BYTES:
                raise KVTransferError(f"a unit of {length} bytes")
            return receive_into(connection, bytearray(length)) if length else None
        except (OSError, KVTransferError) as error:
            log.warning("fetching a KV unit from the peer %s failed: %s", owner, error)
            broken = self._connections.pop(owner, None)
            if broken is not None:
                broken.close()
            self._avoided[owner] = time.monotonic() + _AVOIDED_SECONDS
            return None

    def _avoids(self, owner: str) -> bool:
        return time.monotonic() < self._avoided.get(owner, 0.0)

    # ---- writing, and telling the index

    def write(self, name: bytes, header: bytes, content: memoryview) -> bool:
        kept = self.memory.write(name, header, content)
        if kept:
            self.stats.units_written += 1
            self.stats.bytes_written += len(header) + len(content)
            with self._mutex:
                self._fresh.append(name)
            self._news.set()
        return kept

    def discard(self, name: bytes) -> None:
        self.memory.discard(name)
        with self._mutex:
            self._owners.pop(name, None)

    def _tell(self) -> None:
        """Heartbeats, what is new, and what has gone; an index that has forgotten us is told everything again."""
        beat = 0.0
        while not self._closing.is_set():
            self._news.wait(self._lease / 3)
            self._news.clear()
            with self._mutex:
                fresh, self._fresh = self._fresh, []
            gone = self.memory.take_evicted()
            try:
                if time.monotonic() >= beat:
                    if not self._index.heartbeat(self.owner, self._lease):
                        fresh = self.memory.names()
                    beat = time.monotonic() + self._lease / 3
                if fresh:
                    self._index.publish(self.owner, fresh, self._lease)
                if gone:
                    self._index.withdraw(self.owner, gone)
            except Exception as error:
                # What it has not heard now it hears with the next heartbeat, since it will not know us.
                log.debug("the index of KV units could not be updated: %s", error)
                with self._mutex:
                    self._fresh = fresh + self._fresh
                self._closing.wait(min(1.0, self._lease / 3))

    @property
    def num_units(self) -> int:
        return self.memory.num_units

    @property
    def num_bytes(self) -> int:
        return self.memory.num_bytes

    def clear(self) -> int:
        count = self.memory.clear()
        self._news.set()
        return count

    def close(self) -> None:
        if self._closing.is_set():
            return
        self._closing.set()
        self._news.set()
        self._thread.join(_TIMEOUT)
        with contextlib.suppress(Exception):
            self._index.withdraw(self.owner, self.memory.names())
        self.server.close()
        for connection in self._connections.values():
            connection.close()
        self._index.close()
