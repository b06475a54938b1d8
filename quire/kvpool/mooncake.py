"""Mooncake Store as a place for units: objects in the memory of many machines, found through its master.

Every engine may lend the store a segment of its memory, and machines without an engine can lend theirs with
`mooncake_client`. The master may be away, hang, or come back empty at any time.
"""

from __future__ import annotations

import importlib
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Event, Thread
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from quire.errors import ConfigError, KVTransferError
from quire.kvpool.mooncake_probe import master_answers
from quire.kvpool.store import StoreStats, UnitStore
from quire.options import parse_bytes

_NO_SPACE = -200
_NOT_FOUND = -704
_RETRY_SECONDS = 2.0
_CLOSE_SECONDS = 2.0
_PROBE_SECONDS = 30.0
_START_SECONDS = 15.0
"""That the start of an engine waits for a master that takes connections and does not answer."""
_OPTIONS = ("segment", "buffer", "protocol", "device", "host")


@dataclass(frozen=True, slots=True)
class MooncakeAddress:
    """mooncake://master:port?segment=1GiB&buffer=256MiB&protocol=tcp&device=&host=127.0.0.1"""

    master: str
    segment: int = 1 << 30
    """Bytes of this engine's memory that the store may use for everybody's units."""
    buffer: int = 256 << 20
    """Bytes for units that are being read."""
    protocol: str = "tcp"
    device: str = ""
    host: str = "127.0.0.1"
    """By which other engines reach the segment."""

    @classmethod
    def parse(cls, url: str) -> MooncakeAddress:
        parts = urlsplit(url)
        try:
            master = f"{parts.hostname}:{parts.port}" if parts.hostname and parts.port else ""
        except ValueError:
            master = ""
        if not master:
            raise ConfigError(f"kv_pool must name the master, as in mooncake://127.0.0.1:50051, not {url!r}",
                              field="kv_pool")
        given = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = set(given) - set(_OPTIONS)
        if unknown:
            raise ConfigError(f"kv_pool has no option {sorted(unknown)[0]!r}; it has {', '.join(_OPTIONS)}",
                              field="kv_pool")
        sizes = {name: 0 if given[name] == "0" else parse_bytes(given[name], f"kv_pool: {name}")
                 for name in ("segment", "buffer") if name in given}
        texts = {name: given[name] for name in ("protocol", "device", "host") if name in given}
        return cls(master, **sizes, **texts)  # type: ignore[arg-type]


class MooncakeStore(UnitStore):
    """Connects beside everything else, and again when that failed: an engine starts without its pool."""

    def __init__(self, address: MooncakeAddress) -> None:
        self.address = address
        self.stats = StoreStats()
        self._client: Any = None
        self._closing = Event()
        self._tried = Event()
        try:
            self._make = importlib.import_module("mooncake.store").MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(f"kv_pool mooncake:// needs the package mooncake-transfer-engine-non-cuda and Debian's "
                              f"libibverbs1, libnuma1 and librdmacm1: pip install 'quire[mooncake]' ({error})",
                              field="kv_pool") from error
        Thread(target=self._connect, name="quire-mooncake-connect", daemon=True).start()
        # A master that is there is there in a second; the first prompt shall find it.
        self._tried.wait(_START_SECONDS)

    def _connect(self) -> None:
        address = self.address
        while not self._closing.is_set():
            if _listens(address.master) and master_answers(address.host, address.master, address.protocol,
                                                           address.device, _PROBE_SECONDS):
                client = self._make()
                if not client.setup(address.host, "P2PHANDSHAKE", address.segment, address.buffer, address.protocol,
                                    address.device, address.master):
                    self._client = client
            self._tried.set()
            if self._client is not None:
                return
            self._closing.wait(_RETRY_SECONDS)

    @property
    def connected(self) -> bool:
        return self._client is not None

    def _connected(self) -> Any:
        """The client; KVTransferError while there is none."""
        if self._client is None:
            raise KVTransferError(f"the Mooncake master {self.address.master} is not there")
        return self._client

    def find(self, names: Sequence[bytes]) -> list[bool]:
        found = self._connected().batch_is_exist([_key(name) for name in names])
        broken = next((code for code in found if code < 0), None)
        if broken is not None:
            raise KVTransferError(f"Mooncake does not answer (code {broken})")
        return [code == 1 for code in found]

    def read(self, name: bytes) -> memoryview | None:
        # A handle on the client's own buffer: a copy as bytes would be made under the interpreter's lock.
        handle = self._connected().get_buffer(_key(name))
        if handle is None:
            return None
        unit = memoryview(handle).cast("B")
        self.stats.units_read += 1
        self.stats.bytes_read += len(unit)
        return unit

    def write(self, name: bytes, header: bytes, content: memoryview) -> bool:
        code = self._connected().put_parts(_key(name), header, content)
        if code == _NO_SPACE:
            return False
        if code:
            raise KVTransferError(f"Mooncake did not take a unit (code {code})")
        self.stats.units_written += 1
        self.stats.bytes_written += len(header) + len(content)
        return True

    def discard(self, name: bytes) -> None:
        code = self._connected().remove(_key(name), True)
        if code not in (0, _NOT_FOUND):
            raise KVTransferError(f"Mooncake did not remove a bad unit (code {code})")

    def close(self) -> None:
        self._closing.set()
        client, self._client = self._client, None
        if client is None:
            return
        # Its goodbye waits for the master and lets no other thread run meanwhile: only to one that answers.
        answered = Event()
        Thread(target=lambda: _ask(client, answered), name="quire-mooncake-close", daemon=True).start()
        if answered.wait(_CLOSE_SECONDS):
            client.close()
        else:
            _left_open.append(client)


_left_open: list[Any] = []
"""Clients whose master hangs: they end with the process."""


def _ask(client: Any, answered: Event) -> None:
    if client.is_exist("quire") >= 0:
        answered.set()


def _listens(master: str) -> bool:
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host, int(port)), _CLOSE_SECONDS).close()
    except OSError:
        return False
    return True


def _key(name: bytes) -> str:
    return f"quire-{name.hex()}"
