"""`quire bench pool`: replicas that share a KV pool against replicas that do not, on a trace, in simulated time.

Schedulers, prefix caches, units, the index of the pool and its decisions are the real ones; a step takes what the given
rate of prefill says, a fetch what the given network says. Prints hit rate and time to the first token.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from quire.errors import ConfigError
from quire.kvpool.benefit import LATENCIES, Network
from quire.sim.replicas import Fleet, FleetResult, read_arrivals, run_fleet

EXAMPLES = (
    "examples:\n"
    "  quire bench pool --trace conversation_trace.jsonl\n"
    "  quire bench pool --trace conversation_trace.jsonl --limit 3000 --gbits 10 --network tcp --json"
)
_SCALES = (1, 2, 4, 8)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trace", type=Path, required=True, metavar="FILE", help="trace in the Mooncake format")
    parser.add_argument("--limit", type=int, default=1000, help="first so many requests (default: 1000)")
    parser.add_argument("--scale", type=int, default=2, choices=_SCALES,
                        help="prompts are so many times shorter; 2 makes a block of the trace a unit (default: 2)")
    parser.add_argument("--speed", type=float, default=1.0, help="requests come so many times as fast (default: 1)")
    parser.add_argument("--replicas", type=int, default=4, help="engines (default: 4)")
    parser.add_argument("--device-blocks", type=int, default=2000,
                        help="blocks of the trace that an engine holds itself (default: 2000)")
    parser.add_argument("--pool-blocks", type=int, default=20000, help="those that the pool holds (default: 20000)")
    parser.add_argument("--prefill-rate", type=float, default=8000.0, metavar="TOK/S", help="(default: 8000)")
    parser.add_argument("--bytes-per-token", type=int, default=131_072, help="of KV (default: 131072, an 8B in bf16)")
    parser.add_argument("--gbits", type=float, default=100.0, help="of the network (default: 100)")
    parser.add_argument("--network", choices=sorted(LATENCIES), default="rdma", help="its latency (default: rdma)")
    parser.add_argument("--json", action="store_true", help="one JSON line per case instead of a table")


def run(args: argparse.Namespace) -> int:
    numbers = (args.limit, args.speed, args.replicas, args.device_blocks, args.pool_blocks, args.prefill_rate,
               args.bytes_per_token, args.gbits)
    if min(numbers) <= 0:
        raise ConfigError("counts, rates and sizes must be above 0")
    arrivals = read_arrivals(args.trace, args.limit, args.scale, args.speed)
    block = 512 // args.scale
    shared = Fleet(args.replicas, args.device_blocks * block, args.pool_blocks * block, args.bytes_per_token,
                   args.prefill_rate, network=Network(args.gbits, args.network))
    cases = {"no pool": dataclasses.replace(shared, pool_tokens=0), "pool": shared,
             "pool, all kept": dataclasses.replace(shared, policy="all")}
    if not args.json:
        tokens = sum(len(arrival.prompt) for arrival in arrivals)
        print(f"{len(arrivals)} requests, {tokens:,} prompt tokens, {args.replicas} replicas")
        print(f"{'':<16}{'hit rate':>9}{'of pool':>9}{'mean TTFT':>11}{'p50':>9}{'p99':>9}{'units kept':>12}"
              f"{'took':>8}")
    for name, fleet in cases.items():
        began = time.perf_counter()
        result = run_fleet(fleet, arrivals)
        _print(args, name, result, time.perf_counter() - began)
    return 0


def _print(args: argparse.Namespace, name: str, result: FleetResult, seconds: float) -> None:
    share = result.pool_tokens / result.prompt_tokens if result.prompt_tokens else 0.0
    if args.json:
        print(json.dumps({"bench": "pool", "case": name, "requests": result.requests,
                          "hit_rate": round(result.hit_rate, 4), "hit_rate_of_pool": round(share, 4),
                          "mean_ttft_s": round(result.mean_first_token, 4),
                          "p50_ttft_s": round(result.quantile(0.5), 4), "p99_ttft_s": round(result.quantile(0.99), 4),
                          "units_written": result.units_written}), flush=True)
        return
    print(f"{name:<16}{result.hit_rate:>9.3f}{share:>9.3f}{result.mean_first_token:>10.3f}s"
          f"{result.quantile(0.5):>8.3f}s{result.quantile(0.99):>8.3f}s{result.units_written:>12}{seconds:>7.0f}s",
          flush=True)
