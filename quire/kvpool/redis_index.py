"""The index of peers in Redis: a set of owners for each unit, and a key that ends with its lease for each owner."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from quire.errors import ConfigError
from quire.kvpool.index import UnitIndex

_FORGOTTEN_SECONDS = 6 * 3600
"""Seconds after which a unit that was not published again is forgotten."""
_AT_ONCE = 1024


class RedisIndex(UnitIndex):
    """Works on any Redis from 5 on. Names are under `space`, which is made from the secret: tenants do not meet."""

    def __init__(self, url: str, space: str, timeout: float = 5.0) -> None:
        try:
            redis = importlib.import_module("redis")
        except ImportError as error:
            raise ConfigError(f"kv_pool redis:// needs the package redis: pip install 'quire[redis]' ({error})",
                              field="kv_pool") from error
        try:
            self._redis: Any = redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout)
            pool = self._redis.connection_pool
            pool.connection_class(**pool.connection_kwargs)  # not connected: an option that there is not shows here
        except (TypeError, ValueError) as error:
            raise ConfigError(f"kv_pool {url!r} is no address of a Redis: {error}", field="kv_pool") from error
        self._space = space

    def _unit(self, name: bytes) -> bytes:
        return f"quire:{self._space}:unit:".encode() + name

    def _owner(self, owner: str) -> str:
        return f"quire:{self._space}:owner:{owner}"

    def publish(self, owner: str, names: Sequence[bytes], lease: float) -> None:
        for start in range(0, len(names), _AT_ONCE):
            with self._redis.pipeline(transaction=False) as pipe:
                for name in names[start : start + _AT_ONCE]:
                    pipe.sadd(self._unit(name), owner)
                    pipe.expire(self._unit(name), _FORGOTTEN_SECONDS)
                pipe.set(self._owner(owner), b"1", px=int(lease * 1e3))
                pipe.execute()

    def withdraw(self, owner: str, names: Sequence[bytes]) -> None:
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.srem(self._unit(name), owner)
            pipe.execute()

    def heartbeat(self, owner: str, lease: float) -> bool:
        known = bool(self._redis.exists(self._owner(owner)))
        self._redis.set(self._owner(owner), b"1", px=int(lease * 1e3))
        return known

    def query(self, names: Sequence[bytes]) -> list[list[str]]:
        with self._redis.pipeline(transaction=False) as pipe:
            for name in names:
                pipe.smembers(self._unit(name))
            found = [sorted(owner.decode() for owner in owners) for owners in pipe.execute()]
        owners = sorted({owner for each in found for owner in each})
        if not owners:
            return found
        alive = dict(zip(owners, self._redis.mget([self._owner(owner) for owner in owners]), strict=True))
        return [[owner for owner in each if alive[owner] is not None] for each in found]

    def close(self) -> None:
        self._redis.close()
