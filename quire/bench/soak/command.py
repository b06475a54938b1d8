"""`quire bench soak`: Mixed requests by the thousand, clients that hang up, bad input, killed engines; then damage.

Whatever happens, each request gets an answer in time, and of a kind that fits it. Afterwards the block pool must be
whole, no task may be left over, and the server's memory must be flat. Exit code 1 where anything of that is not so."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

from quire.bench.serving.http_client import ask
from quire.bench.soak.mixed_load import SLOWEST, Findings, mixed_request
from quire.bench.soak.rank_processes import alive, ranks_of
from quire.cli.options import add_engine_options, engine_options, integer
from quire.errors import QuireError

EXAMPLES = ("examples:\n  quire bench soak --executor dummy\n"
            "  quire bench soak --requests 200 --kills 1 --num-threads 1\n"
            "  quire bench soak --executor dummy --tensor-parallel-size 2 --kill-ranks --kills 50\n"
            "  quire bench soak --hostile --seconds 600 --executor dummy\n"
            "  quire bench soak --memory --seconds 3600 --executor dummy\n"
            "  quire bench soak --router --requests 20000 --kills 200")
_ALLOWED_GROWTH = 48 << 20
"""Bytes by which the server's memory may differ between the first half and the end: allocators keep some."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=integer, default=2000, metavar="N", help="how many (default: %(default)s)")
    parser.add_argument("--kills", type=integer, default=3, metavar="N",
                        help="times the engine is killed (default: %(default)s)")
    parser.add_argument("--kill-ranks", action="store_true",
                        help="kill or stop one of the engine's ranks instead of the engine (which has some with "
                             "--tensor-parallel-size or --pipeline-parallel-size)")
    parser.add_argument("--at-once", type=integer, default=48, metavar="N",
                        help="requests in flight (default: %(default)s)")
    parser.add_argument("--hostile", action="store_true",
                        help="ordinary load beside clients that attack the server, for --seconds")
    parser.add_argument("--memory", action="store_true",
                        help="full load for --seconds, with the memory of server and engine sampled: it may grow by "
                             "less than 1%% after the first quarter")
    parser.add_argument("--router", action="store_true",
                        help="a router with four servers, which are killed, stopped, closed and replaced --kills times")
    parser.add_argument("--seconds", type=integer, default=60, metavar="N",
                        help="with --hostile or --memory: how long (default: %(default)s)")
    parser.add_argument("--disaggregated", action="store_true",
                        help="engines that compute prompts for others and engines that continue them, of both of which "
                             "some are killed or stopped (--kills 200 takes half an hour)")
    parser.add_argument("--soak-seed", type=integer, default=0, metavar="N", help="another seed, another mix")
    add_engine_options(parser)


def run(args: argparse.Namespace) -> int:
    if args.hostile:
        from quire.bench.soak.hostile import run_hostile

        return run_hostile(args.seconds, args.kills, args.soak_seed, engine_options(args))
    if args.memory:
        from quire.bench.soak.memory import run_memory

        return run_memory(args.seconds, args.at_once, args.soak_seed, engine_options(args))
    if args.router:
        from quire.bench.soak.router import soak_router

        hurt = soak_router(args.requests, args.kills, args.at_once, args.soak_seed, engine_options(args))
        print(json.dumps(hurt.summary()))
        return 1 if hurt.wrong else 0
    if args.disaggregated:
        from quire.bench.soak.pairs import run_disaggregated

        return run_disaggregated(args.requests, args.kills, args.soak_seed, engine_options(args))
    found = asyncio.run(soak(args.requests, args.kills, args.at_once, args.soak_seed, engine_options(args),
                             args.kill_ranks))
    print(json.dumps({
        "bench": "soak", "requests": args.requests, "seconds": round(found.seconds, 1), "hung_up": found.hung_up,
        "retries": found.retries,
        "kills": found.kills, "statuses": dict(sorted(found.statuses.items())),
        "memory_mb": [round(found.memory_half / 1e6, 1), round(found.memory_end / 1e6, 1)],
        "wrong": found.wrong[:20]}))
    return 1 if found.wrong else 0


async def soak(requests: int, kills: int, at_once: int, seed: int, options: dict[str, Any],
               kill_ranks: bool = False) -> Findings:
    from quire.bench.serving.served import served

    found = Findings(kill_ranks=kill_ranks)
    dice = random.Random(seed)
    before = len(asyncio.all_tasks())
    async with served({"request_timeout": 60.0, "drain_timeout": 5.0}, options) as (address, app, engine):
        await ask(address, "/v1/completions", {"prompt": "warm", "max_tokens": 2})
        settled = len(asyncio.all_tasks())
        started = time.perf_counter()
        half = requests // 2
        killings = [sorted(dice.sample(range(20, half), kills - kills // 2)) if kills else [],
                    sorted(dice.sample(range(20, requests - half), kills // 2)) if kills // 2 else []]
        await _wave(address, engine, half, at_once, dice, killings[0], found)
        await _rest(address, engine)
        found.memory_half = _memory()
        await _wave(address, engine, requests - half, at_once, dice, killings[1], found)
        await _rest(address, engine)
        found.seconds = time.perf_counter() - started
        found.memory_end = _memory()
        await _look_for_damage(app, engine, settled, found)
    await asyncio.sleep(0.1)
    if len(asyncio.all_tasks()) > before:
        found.wrong.append(f"{len(asyncio.all_tasks()) - before} tasks outlive the server")
    return found


async def _wave(address: str, engine: Any, count: int, at_once: int, dice: random.Random, killings: list[int],
                found: Findings) -> None:
    gate = asyncio.Semaphore(at_once)

    async def one(number: int) -> None:
        async with gate:
            if number in killings:
                await _kill(engine, found)
            await mixed_request(address, random.Random(f"{number}:{dice_seed}"), found)

    dice_seed = dice.random()
    await asyncio.gather(*[one(number) for number in range(count)])


async def _kill(engine: Any, found: Findings) -> None:
    """kill -9, while requests are in flight; one that is down from the last time is let come up first."""
    deadline = time.monotonic() + SLOWEST
    while time.monotonic() < deadline:
        await asyncio.sleep(0.2)
        with contextlib.suppress(QuireError, ProcessLookupError):
            await engine.check_health()
            ranks = ranks_of(engine.engine_pid)
            victim, number = engine.engine_pid, signal.SIGKILL
            if found.kill_ranks and not ranks:
                continue  # it is just losing them
            if found.kill_ranks:
                victim = ranks[found.kills % len(ranks)]
                number = signal.SIGSTOP if found.kills % 3 == 2 else signal.SIGKILL
            os.kill(victim, number)
            found.killed |= {engine.engine_pid, *ranks}
            found.kills += 1
            return


async def _rest(address: str, engine: Any) -> None:
    """Until the engine is up and has nothing to do."""
    deadline = time.monotonic() + SLOWEST
    while time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            await engine.check_health()
            metrics = await engine.metrics(refresh=True)
            if not metrics["requests_running"] + metrics["requests_waiting"] + metrics["requests_in_flight"]:
                return
        await asyncio.sleep(0.1)
    raise TimeoutError("the engine did not come to rest")


async def _look_for_damage(app: Any, engine: Any, settled: int, found: Findings) -> None:
    await engine.check()
    metrics = await engine.metrics(refresh=True)
    if metrics["kv_blocks_used"]:
        found.wrong.append(f"{metrics['kv_blocks_used']} KV blocks are in use by nobody")
    if metrics["kv_blocks_free"] + metrics["kv_blocks_cached"] != metrics["kv_blocks_total"]:
        found.wrong.append("the KV blocks do not add up")
    if metrics.get("invariant_errors"):
        found.wrong.append(f"{metrics['invariant_errors']} invariants were broken")
    if app.service.active:
        found.wrong.append(f"{len(app.service.active)} requests are active without a client")
    await asyncio.sleep(0.2)
    for pid in found.killed:
        if alive(pid):
            found.wrong.append(f"process {pid} of an engine that died is still there")
    left = len(asyncio.all_tasks()) - settled
    if left > 2:  # the server's own: uvicorn's tick and what it is asked
        found.wrong.append(f"{left} tasks are left over: {[task.get_name() for task in asyncio.all_tasks()][:5]}")
    if found.memory_end - found.memory_half > _ALLOWED_GROWTH:
        found.wrong.append(f"memory grew from {found.memory_half >> 20} to {found.memory_end >> 20} MiB")


def _memory() -> int:
    """Resident bytes of this process, which holds server and clients."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
