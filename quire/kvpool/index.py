"""Who holds which units: publish, query, withdraw; an owner's entries count only while it sends heartbeats.

An owner is an address and the number of its start, "127.0.0.1:5000#4f2a…": one that was restarted holds nothing of
what it held before. `MemoryIndex` is the index itself, for the router and for tests; `HttpIndex` speaks to one that a
router has mounted; `redis_index.py` keeps it in Redis.
"""

from __future__ import annotations

import hashlib
import hmac
import http.client
import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from threading import Lock
from urllib.parse import urlsplit

from quire.errors import ConfigError, KVTransferError

SIGNATURE = "X-Quire-Signature"
ROUTES = ("/kv-index/publish", "/kv-index/withdraw", "/kv-index/query", "/kv-index/heartbeat")
_MOST_NAMES = 1 << 16
_MOST_OWNERS = 1 << 12
_LONGEST_LEASE = 3600.0


class UnitIndex(ABC):
    """May be slow, and may raise. Answers are hints: every unit is checked when it is read."""

    @abstractmethod
    def publish(self, owner: str, names: Sequence[bytes], lease: float) -> None:
        """The owner holds these, for as long as its lease is renewed."""

    @abstractmethod
    def withdraw(self, owner: str, names: Sequence[bytes]) -> None: ...

    @abstractmethod
    def heartbeat(self, owner: str, lease: float) -> bool:
        """Renew the lease; false if the index does not know the owner (any more): then it publishes all again."""

    @abstractmethod
    def query(self, names: Sequence[bytes]) -> list[list[str]]:
        """Owners of each whose lease has not ended."""

    def close(self) -> None:  # noqa: B027 (some have nothing to let go of)
        """Idempotent."""


class MemoryIndex(UnitIndex):
    """In this process. Forgets an owner and all its entries when its lease ends, and the oldest owner when there are
    too many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._mutex = Lock()
        self._leases: dict[str, float] = {}
        self._held: dict[str, set[bytes]] = {}
        self._owners: dict[bytes, set[str]] = {}

    def publish(self, owner: str, names: Sequence[bytes], lease: float) -> None:
        with self._mutex:
            self._renew(owner, lease)
            for name in names:
                self._held[owner].add(name)
                self._owners.setdefault(name, set()).add(owner)

    def withdraw(self, owner: str, names: Sequence[bytes]) -> None:
        with self._mutex:
            for name in names:
                self._remove(owner, name)
                self._held.get(owner, set()).discard(name)

    def heartbeat(self, owner: str, lease: float) -> bool:
        with self._mutex:
            self._expire()
            known = owner in self._leases
            self._renew(owner, lease)
            return known

    def query(self, names: Sequence[bytes]) -> list[list[str]]:
        with self._mutex:
            self._expire()
            return [sorted(self._owners.get(name, ())) for name in names]

    def _renew(self, owner: str, lease: float) -> None:
        if owner not in self._leases and len(self._leases) >= _MOST_OWNERS:
            self._forget(min(self._leases, key=self._leases.__getitem__))
        self._leases[owner] = self._clock() + lease
        self._held.setdefault(owner, set())

    def _expire(self) -> None:
        now = self._clock()
        for owner in [owner for owner, end in self._leases.items() if end <= now]:
            self._forget(owner)

    def _forget(self, owner: str) -> None:
        del self._leases[owner]
        for name in self._held.pop(owner):
            self._remove(owner, name)

    def _remove(self, owner: str, name: bytes) -> None:
        owners = self._owners.get(name)
        if owners is not None:
            owners.discard(owner)
            if not owners:
                del self._owners[name]

    @property
    def num_units(self) -> int:
        return len(self._owners)

    @property
    def owners(self) -> dict[str, int]:
        """Units of each, for display."""
        with self._mutex:
            return {owner: len(held) for owner, held in self._held.items()}


# ---- over HTTP


def sign(key: bytes, path: str, body: bytes) -> str:
    return hmac.new(key, path.encode() + b"\n" + body, hashlib.sha256).hexdigest()


class IndexRoutes:
    """The routes of an index, for any HTTP server: POST, JSON bodies, signed with derived_secret(…, "kv-index")."""

    def __init__(self, index: UnitIndex, key: bytes) -> None:
        self._index, self._key = index, key

    def handle(self, path: str, body: bytes, signature: str | None) -> tuple[int, bytes]:
        """Status and JSON body of the answer."""
        if path not in ROUTES:
            return 404, b'{"error": "no such route"}'
        if not hmac.compare_digest(sign(self._key, path, body), signature or ""):
            return 403, b'{"error": "the signature was not made with this secret"}'
        try:
            data = json.loads(body)
            names = [bytes.fromhex(name) for name in data.get("names", [])]
            owner, lease = str(data.get("owner", "")), float(data.get("lease", 0.0))
            if len(names) > _MOST_NAMES or len(owner) > 256 or not 0.0 <= lease <= _LONGEST_LEASE:
                raise ValueError("too much")
        except (ValueError, TypeError, AttributeError) as error:
            return 400, json.dumps({"error": f"not a question for the index: {error}"}).encode()
        return 200, json.dumps(self._answer(path, owner, names, lease)).encode()

    def _answer(self, path: str, owner: str, names: list[bytes], lease: float) -> object:
        if path == "/kv-index/publish":
            self._index.publish(owner, names, lease)
        elif path == "/kv-index/withdraw":
            self._index.withdraw(owner, names)
        elif path == "/kv-index/heartbeat":
            return {"known": self._index.heartbeat(owner, lease)}
        else:
            return {"owners": self._index.query(names)}
        return {}


class HttpIndex(UnitIndex):
    """An index behind a router's routes; one connection, kept open."""

    def __init__(self, url: str, key: bytes, timeout: float = 5.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"kv_pool must be the address of a router, as in http://127.0.0.1:9000, not {url!r}",
                              field="kv_pool")
        self._parts, self._key, self._timeout = parts, key, timeout
        self._mutex = Lock()
        self._open: http.client.HTTPConnection | None = None

    def publish(self, owner: str, names: Sequence[bytes], lease: float) -> None:
        self._post("publish", owner=owner, names=[name.hex() for name in names], lease=lease)

    def withdraw(self, owner: str, names: Sequence[bytes]) -> None:
        self._post("withdraw", owner=owner, names=[name.hex() for name in names])

    def heartbeat(self, owner: str, lease: float) -> bool:
        return bool(self._post("heartbeat", owner=owner, lease=lease).get("known"))

    def query(self, names: Sequence[bytes]) -> list[list[str]]:
        owners = self._post("query", names=[name.hex() for name in names]).get("owners")
        if not isinstance(owners, list) or len(owners) != len(names):
            raise KVTransferError("the index did not answer what it was asked")
        return [[str(owner) for owner in each] if isinstance(each, list) else [] for each in owners]

    def _post(self, what: str, **data: object) -> dict[str, object]:
        path, body = f"/kv-index/{what}", json.dumps(data).encode()
        headers = {"Content-Type": "application/json", SIGNATURE: sign(self._key, path, body)}
        with self._mutex:
            for last in (False, True):
                try:
                    connection = self._connection()
                    connection.request("POST", path, body, headers)
                    answer = connection.getresponse()
                    content = answer.read()
                    break
                except (OSError, http.client.HTTPException):
                    self._drop()  # it may have been closed while idle
                    if last:
                        raise
        if answer.status != 200:
            raise KVTransferError(f"the index refused a question ({answer.status}): {content[:200]!r}")
        found = json.loads(content)
        return found if isinstance(found, dict) else {}

    def _connection(self) -> http.client.HTTPConnection:
        if self._open is None:
            kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
            self._open = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        return self._open

    def _drop(self) -> None:
        if self._open is not None:
            self._open.close()
            self._open = None

    def close(self) -> None:
        with self._mutex:
            self._drop()
