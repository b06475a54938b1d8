"""Servers and a router in processes of their own, for benchmarks: started side by side, stopped together."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from quire.bench.serving.served import serving_process


@dataclass(frozen=True, slots=True)
class Running:
    """One of them."""

    address: str
    pid: int


@contextlib.contextmanager
def replicas(count: int, options: dict[str, Any], secret: str | None = None) -> Iterator[list[Running]]:
    """Servers with one secret, so that a router knows what they hold."""
    environment = {"QUIRE_KV_SECRET": new_secret() if secret is None else secret}
    making = [serving_process(options, environment=environment)
              for _ in range(count)]
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(count) as threads:
        found = []
        for one, started in [(one, threads.submit(one.__enter__)) for one in making]:
            stack.push(one)
            found.append(Running(*started.result()))
        yield found


@contextlib.contextmanager
def router(servers: list[Running], secret: str, policy: str, *words: str) -> Iterator[Running]:
    """`quire route` in front of them."""
    listed = ["--replicas", *(server.address for server in servers)] if servers else []
    flags = ["--policy", policy, *words, *listed]
    with serving_process({}, flags, command="route", environment={"QUIRE_KV_SECRET": secret}) as (address, pid):
        yield Running(address, pid)


def new_secret() -> str:
    return secrets.token_hex(32)
