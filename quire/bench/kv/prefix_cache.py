"""`quire bench prefix-cache`: what share of prompts' blocks each eviction policy finds in cache.

Replays a trace, or a made-up workload, one prompt after another over the engine's own block pool. The last
column is what a cache that knows the future would find: no policy can do better.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.bench.figures.drawing import check_drawable
from quire.errors import ConfigError
from quire.kvcache.eviction import EVICTION_POLICIES
from quire.sim.prefix_cache import CLAIRVOYANT, Prompt, ReplayResult, block_keys, read_trace, replay
from quire.sim.prefix_workloads import PREFIX_WORKLOADS, make_workload

EXAMPLES = (
    "examples:\n"
    "  quire bench prefix-cache --trace conversation_trace.jsonl --capacity 2000 5000 --plot rates.png\n"
    "  quire bench prefix-cache --workload agents --capacity 250 500 1000 --json"
)
_WORKLOAD_REQUESTS = 6000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--trace", type=Path, metavar="FILE",
                      help='trace in the Mooncake format: JSON lines with "hash_ids", chained block hashes')
    what.add_argument("--workload", choices=sorted(PREFIX_WORKLOADS), help="a made-up workload instead")
    parser.add_argument("--capacity", type=int, nargs="+", required=True, metavar="N",
                        help="sizes of the cache, in blocks of the trace")
    parser.add_argument("--policies", nargs="+", choices=[*EVICTION_POLICIES, CLAIRVOYANT], metavar="NAME",
                        default=["lru", *(name for name in EVICTION_POLICIES if name != "lru"), CLAIRVOYANT],
                        help=f"some of {', '.join(EVICTION_POLICIES)}, {CLAIRVOYANT} (default: all)")
    parser.add_argument("--limit", type=int, metavar="N",
                        help=f"only the first N requests (default: all; of a workload {_WORKLOAD_REQUESTS})")
    parser.add_argument("--seed", type=int, default=0, help="of a made-up workload (default: 0)")
    parser.add_argument("--json", action="store_true", help="one JSON line per case instead of a table")
    parser.add_argument("--plot", metavar="FILE", help="draw the rates: .png or .svg")


def run(args: argparse.Namespace) -> int:
    if min(args.capacity) < 1:
        raise ConfigError("--capacity counts blocks: give numbers from 1", "capacity")
    if args.limit is not None and args.limit < 1:
        raise ConfigError("--limit counts requests: give a number from 1", "limit")
    check_drawable(args.plot)
    prompts = _prompts(args)
    policies = list(dict.fromkeys(args.policies))
    results: list[ReplayResult] = []
    if not args.json:
        _print_heading(prompts, policies)
    for capacity in sorted(set(args.capacity)):
        row = [replay(prompts, policy, capacity) for policy in policies]
        results += row
        if args.json:
            _print_json(args, row)
        else:
            cells = [f"{capacity:>10,}", *(f"{result.hit_rate:>12.4f}" for result in row)]
            print("  ".join([*cells, _advantage(row)]).rstrip(), flush=True)
    if args.plot:
        from quire.bench.kv.hit_rate_plot import draw_hit_rates

        title = f"Blocks found in cache: {args.workload or args.trace.name}"
        path = draw_hit_rates(results, title).save(args.plot)
        if not args.json:
            print(f"\ndrawn to {path}")
    return 0


def _prompts(args: argparse.Namespace) -> list[Prompt]:
    if args.trace is not None:
        return list(read_trace(args.trace, args.limit))
    requests = make_workload(args.workload, args.limit or _WORKLOAD_REQUESTS, args.seed)
    return [block_keys(request) for request in requests]


def _print_heading(prompts: list[Prompt], policies: list[str]) -> None:
    total = sum(map(len, prompts))
    distinct = len({key for prompt in prompts for key in prompt})
    print(f"{len(prompts):,} requests, {total:,} blocks, {distinct:,} of them different: "
          f"an endless cache finds {1 - distinct / max(total, 1):.4f}\n")
    print("  ".join([f"{'capacity':>10}", *(f"{name:>12}" for name in policies)]))


def _advantage(row: list[ReplayResult]) -> str:
    """How the first policy other than LRU compares with it."""
    lru = next((result for result in row if result.policy == "lru"), None)
    other = next((result for result in row if result.policy not in ("lru", CLAIRVOYANT)), None)
    if lru is None or other is None or not lru.hits:
        return ""
    return f"  {other.policy} {other.hits / lru.hits:.2f} x lru"


def _print_json(args: argparse.Namespace, row: list[ReplayResult]) -> None:
    from quire.machine import describe_machine

    workload = args.workload or args.trace.name
    for result in row:
        case: dict[str, Any] = {
            "bench": "prefix-cache", "workload": workload, "limit": args.limit, "policy": result.policy,
            "capacity": result.capacity, "blocks": result.blocks, "hits": result.hits,
            "hit_rate": round(result.hit_rate, 6),
        }
        print(json.dumps({**case, **describe_machine()}), flush=True)
