"""`quire bench soak --memory`: The memory of server and engine under full load, which may not grow after warm-up.

Server, engine and clients have a process each, so that what the clients keep is not taken for the server's."""

from __future__ import annotations

import asyncio
import json
import os
import random
import time
from typing import Any

from quire.bench.serving.http_client import ask
from quire.bench.serving.served import serving_process
from quire.bench.soak.memory_watch import MemoryCurve, watch_memory
from quire.bench.soak.mixed_load import SLOWEST, Findings, mixed_request
from quire.bench.soak.rank_processes import engines_of

_WARM_UP, _MOST_GROWTH, _SAMPLES = 0.25, 0.01, 200
"""The share of the time that is warming up, the growth that is allowed after it, how often to look."""


def run_memory(seconds: float, at_once: int, seed: int, options: dict[str, Any]) -> int:
    found, curves = soak_memory(seconds, at_once, seed, options)
    for name in ("server", "engine"):
        share = curves.get(name, MemoryCurve()).growth(_WARM_UP)
        if share is None or share > _MOST_GROWTH:
            found.wrong.append(f"too few samples of the {name}" if share is None else
                               f"the memory of the {name} grew by {share:.2%} after warm-up")
    print(json.dumps({"bench": "soak-memory", "seconds": round(found.seconds, 1),
                      "requests": sum(found.statuses.values()) + found.hung_up,
                      "statuses": dict(sorted(found.statuses.items())),
                      **{name: curve.summary(_WARM_UP) for name, curve in curves.items()}, "wrong": found.wrong[:20]}))
    return 1 if found.wrong else 0


def soak_memory(seconds: float, at_once: int, seed: int,
                options: dict[str, Any]) -> tuple[Findings, dict[str, MemoryCurve]]:
    """Mixed requests, `at_once` at any time, for so long; memory is sampled two hundred times."""
    flags = ("--request-timeout", "60", "--drain-timeout", "5")
    with serving_process(options, flags) as (address, pid):
        return asyncio.run(_load(address, pid, seconds, at_once, seed))


async def _load(address: str, pid: int, seconds: float, at_once: int,
                seed: int) -> tuple[Findings, dict[str, MemoryCurve]]:
    found, curves = Findings(), dict[str, MemoryCurve]()
    await ask(address, "/v1/completions", {"prompt": "warm", "max_tokens": 2})
    started = time.perf_counter()

    def engine() -> int | None:
        return next(iter(engines_of(pid)), None)

    watch = asyncio.create_task(watch_memory(
        {"server": lambda: pid, "engine": engine, "clients": os.getpid}, curves, seconds / _SAMPLES))

    async def client(number: int) -> None:
        dice = random.Random(f"{seed}:{number}")
        while time.perf_counter() - started < seconds:
            await mixed_request(address, dice, found)

    await asyncio.gather(*[client(number) for number in range(at_once)])
    watch.cancel()
    found.seconds = time.perf_counter() - started
    found.wrong += await _left_over(address)
    return found, curves


async def _left_over(address: str) -> list[str]:
    """What an engine still has once nobody asks it for anything: nothing."""
    deadline, left = time.monotonic() + SLOWEST, ["the engine did not come to rest"]
    while left and time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        gauges = _gauges((await ask(address, "/metrics")).body.decode())
        names = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
        left = [f"{name} is {gauges.get(name)} in the end" for name in names if gauges.get(name) != 0]
    return left


def _gauges(text: str) -> dict[str, float]:
    """The values of /metrics by name, of those that have one."""
    found = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name.partition("{")[0].removeprefix("quire:")] = float(value)
    return found
