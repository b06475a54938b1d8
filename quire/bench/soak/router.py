"""The soak of a router: servers that register themselves are killed, stopped and replaced under load.

No request may fail that had sent nothing; a stream that had begun ends with an error that says so. Afterwards nobody is
on his way any more, the KV pools of the servers that are left are whole, and the router's memory is flat.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.bench.routing.fleet import Running, new_secret, router
from quire.bench.serving.http_client import Reply, ask
from quire.bench.serving.served import serving_process

_SLOWEST = 180.0
_ALLOWED_GROWTH = 48 << 20
_STOPPED_SECONDS = 12.0
WAYS = ("kill server", "kill engine", "stop server", "close server")


@dataclass(slots=True)
class RouterFindings:
    requests: int = 0
    broken: int = 0
    """Streams that ended with an error, having begun."""
    deaths: collections.Counter[str] = field(default_factory=collections.Counter)
    retries: int = 0
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0
    memory: list[int] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        return {"bench": "soak", "what": "router", "requests": self.requests, "broken_streams": self.broken,
                "retries": self.retries, "deaths": dict(sorted(self.deaths.items())),
                "seconds": round(self.seconds, 1), "router_memory_mb": [round(each / 1e6, 1) for each in self.memory],
                "wrong": self.wrong[:20]}


class Stable:
    """Servers that register at a router, and what is done to them."""

    def __init__(self, front: str, secret: str, options: dict[str, Any]) -> None:
        self._front, self._secret, self._options = front, secret, options
        self._threads = ThreadPoolExecutor(16)
        self._contexts: dict[int, Any] = {}
        self.servers: list[Running] = []

    async def start(self) -> None:
        """One more."""
        made = serving_process(self._options, ("--register", self._front),
                               environment={"QUIRE_KV_SECRET": self._secret})
        found = Running(*await asyncio.get_running_loop().run_in_executor(self._threads, made.__enter__))
        self._contexts[found.pid] = made
        self.servers.append(found)

    async def hurt(self, way: str, victim: Running) -> None:
        """In one of `WAYS`; a server that is gone for good is replaced."""
        if way == "stop server":
            os.kill(victim.pid, signal.SIGSTOP)
            await asyncio.sleep(_STOPPED_SECONDS)
            os.kill(victim.pid, signal.SIGCONT)
        elif way == "kill engine":
            for pid in _engines_of(victim.pid):
                os.kill(pid, signal.SIGKILL)
        else:
            self.servers.remove(victim)
            os.kill(victim.pid, signal.SIGKILL if way == "kill server" else signal.SIGTERM)
            await self.start()

    async def close(self) -> None:
        def leave(made: Any) -> None:
            with contextlib.suppress(OSError):
                made.__exit__(None, None, None)

        await asyncio.gather(*(asyncio.get_running_loop().run_in_executor(self._threads, leave, made)
                               for made in self._contexts.values()))
        self._threads.shutdown()


def soak_router(requests: int, deaths: int, at_once: int, seed: int, options: dict[str, Any]) -> RouterFindings:
    """`deaths` in all of `WAYS`, spread over so many requests."""
    secret = new_secret()
    engine = {"executor": "dummy", "dummy_step_ms": 10.0, "max_num_seqs": 16, "num_kv_blocks": 2000,
              "drain_timeout": 5.0, **options}
    with router([], secret, "cache-aware", "--health-timeout", "3") as front:
        return asyncio.run(_soak(front, secret, engine, requests, deaths, at_once, random.Random(seed)))


async def _soak(front: Running, secret: str, options: dict[str, Any], requests: int, deaths: int, at_once: int,
                dice: random.Random) -> RouterFindings:
    found, stable = RouterFindings(), Stable(front.address, secret, options)
    try:
        await asyncio.gather(*(stable.start() for _ in range(4)))
        await _until_up(front.address, 4)
        began = time.perf_counter()
        half = requests // 2
        for count, hurts in ((half, deaths - deaths // 2), (requests - half, deaths // 2)):
            await _wave(front.address, stable, count, hurts, at_once, dice, found)
            await _until_up(front.address, 4)
            found.memory.append(_memory(front.pid))
        found.seconds = time.perf_counter() - began
        await _look_for_damage(front.address, stable, found)
    finally:
        await stable.close()
    if len(found.memory) == 2 and found.memory[1] - found.memory[0] > _ALLOWED_GROWTH:
        found.wrong.append(f"the router's memory grew from {found.memory[0] >> 20} to {found.memory[1] >> 20} MiB")
    return found


async def _wave(address: str, stable: Stable, count: int, deaths: int, at_once: int, dice: random.Random,
                found: RouterFindings) -> None:
    gate, left = asyncio.Semaphore(at_once), count

    async def one(number: int) -> None:
        nonlocal left
        async with gate:
            await _request(address, random.Random(f"{number}:{salt}"), found)
            left -= 1

    async def hurting() -> None:
        for turn in range(deaths):
            while left > count * (deaths - turn) // (deaths + 1):
                await asyncio.sleep(0.05)
            await _until_up(address, 3)
            way = WAYS[sum(found.deaths.values()) % len(WAYS)]
            found.deaths[way] += 1
            await stable.hurt(way, dice.choice(stable.servers))

    salt = dice.random()
    await asyncio.gather(hurting(), *[one(number) for number in range(count)])


async def _request(address: str, dice: random.Random, found: RouterFindings) -> None:
    words = dice.choice(["Hello", "x " * dice.randrange(1, 200), "The same start of a prompt. " * 12])
    body = {"prompt": f"{words}{dice.randrange(50)}", "max_tokens": dice.randrange(1, 60), "ignore_eos": True,
            "stream": dice.random() < 0.7}
    found.requests += 1
    try:
        reply = await ask(address, "/v1/completions", body, timeout=_SLOWEST)
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        found.wrong.append(f"the connection broke: {error!r}")
        return
    _judge(reply, body, found)


def _judge(reply: Reply, body: dict[str, Any], found: RouterFindings) -> None:
    if reply.status != 200:
        found.wrong.append(f"status {reply.status}: {reply.body[:200]!r}")
    elif not body["stream"]:
        if reply.json()["usage"]["completion_tokens"] != body["max_tokens"]:
            found.wrong.append(f"an answer that is not whole: {reply.body[:200]!r}")
    elif not reply.complete:
        events = reply.events()
        if len(events) < 2 or "error" not in events[-1]:
            found.wrong.append(f"a stream without an end or a beginning: {reply.body[-200:]!r}")
        found.broken += 1


async def _look_for_damage(address: str, stable: Stable, found: RouterFindings) -> None:
    view = await _view(address)
    for server in view["servers"]:
        if server["waiting"] or server["running"]:
            found.wrong.append(f"{server['url']} has {server['waiting'] + server['running']} requests of nobody")
    for server in stable.servers:
        text = (await ask(server.address, "/metrics")).body.decode()
        values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines()
                  if line.startswith("quire:kv_blocks")}
        if values["quire:kv_blocks_used"] or values["quire:kv_blocks_free"] + values["quire:kv_blocks_cached"] \
                != values["quire:kv_blocks_total"]:
            found.wrong.append(f"the KV blocks of {server.address} do not add up: {values}")
    for line in (await ask(address, "/metrics")).body.decode().splitlines():
        if line.startswith("quire:router_retries_total"):
            found.retries = int(float(line.rsplit(" ", 1)[1]))


async def _until_up(address: str, count: int) -> None:
    deadline = time.monotonic() + _SLOWEST
    while sum(server["state"] == "up" for server in (await _view(address))["servers"]) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{count} servers did not come up")
        await asyncio.sleep(0.1)


async def _view(address: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((await ask(address, "/v1/router/servers")).body)
    return found


def _engines_of(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if b"quire.engine.process.main" in Path(f"/proc/{child}/cmdline").read_bytes():
                    found.append(int(child))
    return found


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
