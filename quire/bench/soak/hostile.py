"""`quire bench soak --hostile`: What ordinary clients notice while others attack the server and its engine is killed.

First the ordinary load runs alone, then beside hostile clients of another key. Reported for the ordinary load: requests
that failed (but for those in a killed engine), the longest wait with and without attack, the largest lag of the
server's event loop (from /metrics), the slowest answer of /health, and the server's memory before and after. Seconds
around kills do not count for the waits; how many those were is reported, too. Exit code 1 where a request failed or
memory grew."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from quire.bench.serving.http_client import Reply, ask
from quire.bench.serving.served import serving_process
from quire.bench.soak.hostile_clients import HostileClients
from quire.bench.soak.memory_watch import resident
from quire.bench.soak.rank_processes import engines_of

_ORDINARY, _HOSTILE = "ordinary-client-key", "hostile-client-key"
_EXCUSED = ("engine_dead", "engine_restarting")
_ALLOWED_GROWTH = 64 << 20
_CLIENTS = 4
_PATIENCE = 120.0
_LAG_SECONDS = 10.0
"""Between two questions for the largest lag, which covers at least the last 30 seconds."""


@dataclass(slots=True)
class Ordinary:
    """What became of the ordinary load in one phase."""

    served: int = 0
    lost: int = 0
    """In flight when the engine was killed, or refused while it came up again."""
    failed: Counter[str] = field(default_factory=Counter)
    longest: float = 0.0
    slowest_health: float = 0.0
    largest_lag: float = 0.0
    """Of the server's event loop, as the server measured it."""


@dataclass(slots=True)
class Killings:
    """When the engine was not there."""

    count: int = 0
    spans: list[list[float]] = field(default_factory=list)

    def touch(self, begin: float, end: float) -> bool:
        return any(begin <= back and end >= killed for killed, back in self.spans)


def hostile_soak(seconds: float, kills: int, seed: int, options: dict[str, Any]) -> dict[str, Any]:
    """The report."""
    with tempfile.NamedTemporaryFile("w", suffix=".keys") as keys:
        keys.write(f"ordinary {_ORDINARY}\nhostile {_HOSTILE}\n")
        keys.flush()
        with serving_process(options, ("--api-key-file", keys.name)) as (address, pid):
            return asyncio.run(_attack(address, pid, seconds, kills, seed))


async def _attack(address: str, pid: int, seconds: float, kills: int, seed: int) -> dict[str, Any]:
    await _warm(address)
    alone, none = Ordinary(), Killings()
    await _load(address, alone, none, min(30.0, max(5.0, seconds / 5)))
    before = resident(pid)
    attacked, killings = Ordinary(), Killings()
    ends = time.monotonic() + seconds
    clients = HostileClients(address, _HOSTILE, seed)
    killing = asyncio.create_task(_kill(address, pid, kills, seconds, killings))
    await asyncio.gather(clients.run(lambda: time.monotonic() >= ends), _load(address, attacked, killings, seconds))
    await killing
    await asyncio.sleep(5.0)
    recovered = (await _health(address))[0] == 200
    return _report(alone, attacked, killings, clients.done, (before, resident(pid)), recovered)


def _report(alone: Ordinary, attacked: Ordinary, killings: Killings, done: dict[str, int], memory: tuple[int, int],
            recovered: bool) -> dict[str, Any]:
    wrong = [f"{count} × {what}" for what, count in (attacked.failed + alone.failed).items()]
    if memory[1] - memory[0] > _ALLOWED_GROWTH:
        wrong.append(f"memory grew from {memory[0] >> 20} to {memory[1] >> 20} MiB")
    if not recovered:
        wrong.append("the server was not healthy in the end")
    return {
        "bench": "hostile soak", "attacks": done, "kills": killings.count,
        "seconds_around_kills": round(sum(back - killed for killed, back in killings.spans), 1),
        "ordinary_served": [alone.served, attacked.served], "lost_in_killed_engines": attacked.lost,
        "failed": sum(attacked.failed.values()),
        "longest_wait_s": [round(alone.longest, 3), round(attacked.longest, 3)],
        "longest_wait_above_undisturbed_s": round(max(0.0, attacked.longest - alone.longest), 3),
        "largest_loop_lag_s": [round(alone.largest_lag, 3), round(attacked.largest_lag, 3)],
        "slowest_health_s": [round(alone.slowest_health, 3), round(attacked.slowest_health, 3)],
        "memory_mb": [round(each / 1e6, 1) for each in memory], "wrong": wrong[:20]}


async def _warm(address: str) -> None:
    """The processes for grammars and texts are there before anything is measured."""
    for body in ({"prompt": "x", "structured_outputs": {"choice": ["yes", "no"]}}, {"prompt": "word " * 2000}):
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            await ask(address, "/v1/completions", {**body, "max_tokens": 2}, key=_ORDINARY, timeout=_PATIENCE)


async def _load(address: str, found: Ordinary, killings: Killings, seconds: float) -> None:
    ends = time.monotonic() + seconds

    async def client(number: int) -> None:
        count = 0
        while time.monotonic() < ends:
            count += 1
            await _one(address, f"{number} {count} {seconds}", count, found, killings)

    async def probe() -> None:
        while time.monotonic() < ends:
            began = time.monotonic()
            _, took = await _health(address)
            if not killings.touch(began, time.monotonic()):
                found.slowest_health = max(found.slowest_health, took)
            await asyncio.sleep(0.02)

    async def lags() -> None:
        while time.monotonic() < ends:
            await asyncio.sleep(min(_LAG_SECONDS, max(0.0, ends - time.monotonic())))
            found.largest_lag = max(found.largest_lag, await _loop_lag(address))

    await asyncio.gather(probe(), lags(), *map(client, range(_CLIENTS)))


async def _one(address: str, text: str, kind: int, found: Ordinary, killings: Killings) -> None:
    """One ordinary request: a whole answer, a stream, a chat or a choice; while the engine is away, later again."""
    base: dict[str, Any] = {"prompt": f"Hello {text}", "max_tokens": 8}
    path, body = [("/v1/completions", base), ("/v1/completions", {**base, "stream": True}),
                  ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 8}),
                  ("/v1/completions", {**base, "structured_outputs": {"choice": ["yes", "no"]}})][kind % 4]
    began = time.monotonic()
    try:
        reply = await ask(address, path, body, key=_ORDINARY, timeout=_PATIENCE)
        problem = _problem(reply, bool(body.get("stream")))
    except (OSError, TimeoutError, asyncio.IncompleteReadError) as error:
        problem = f"{type(error).__name__}: {error}"
    took = time.monotonic() - began
    if problem is None:
        found.served += 1
        if not killings.touch(began, began + took):
            found.longest = max(found.longest, took)
    elif problem in _EXCUSED:
        found.lost += 1
        await asyncio.sleep(0.5)
    else:
        found.failed[problem] += 1


def _problem(reply: Reply, stream: bool) -> str | None:
    if reply.status == 200 and (not stream or reply.complete):
        return None
    with contextlib.suppress(ValueError, KeyError, IndexError):
        error = reply.events()[-1]["error"] if reply.status == 200 else reply.json()["error"]
        return str(error["code"] or error["message"])
    return f"status {reply.status}"


async def _health(address: str) -> tuple[int, float]:
    began = time.monotonic()
    try:
        status = (await ask(address, "/health", timeout=60.0)).status
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        status = 0
    return status, time.monotonic() - began


async def _loop_lag(address: str) -> float:
    """The largest of late, as /metrics tells it; 0 where it cannot be asked."""
    with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
        reply = await ask(address, "/metrics", key=_ORDINARY, timeout=_PATIENCE)
        for line in reply.body.decode().splitlines():
            if line.startswith("quire:event_loop_lag_max_seconds"):
                return float(line.rpartition(" ")[2])
    return 0.0


async def _kill(address: str, pid: int, kills: int, seconds: float, killings: Killings) -> None:
    """kill -9 of the engine, at even distances; each time until it is back."""
    for _ in range(kills):
        await asyncio.sleep(seconds / (kills + 1))
        span = [time.monotonic(), float("inf")]
        killings.spans.append(span)
        with contextlib.suppress(ProcessLookupError):
            for engine in engines_of(pid):
                os.kill(engine, signal.SIGKILL)
                killings.count += 1
        await asyncio.sleep(1.0)
        while (await _health(address))[0] != 200:
            await asyncio.sleep(0.1)
        await _warm(address)  # the new engine starts its processes, too
        span[1] = time.monotonic() + 2.0  # requests that came while it was away are served late


def run_hostile(seconds: float, kills: int, seed: int, options: dict[str, Any]) -> int:
    found = hostile_soak(seconds, kills, seed, options)
    print(json.dumps(found))
    return 1 if found["wrong"] else 0
