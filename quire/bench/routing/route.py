"""`quire bench route`: What a router finds and what it costs: prefixes on a trace, delay of a token, throughput.

Cases: `trace` plays a trace of conversations on servers whose steps take time, once for each policy, and counts the
prefix tokens they find; `simulated` does the same in simulated time, exactly and in seconds; `delay` measures how much
later each token comes through the router; `dummies` and `model` compare the throughput of streams to the servers
themselves with that through the router, in turns: with models that write 2,000 tokens a second in all, and with
SmolLM2; `engines` runs case B of `quire bench cpu` on two engines of one thread and on one of two."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from quire.cli.options import integer, number

EXAMPLES = ("examples:\n  quire bench route --case trace --trace conversation_trace.jsonl\n"
            "  quire bench route --case trace --trace conversation_trace.jsonl --requests 1500 --rate 20\n"
            "  quire bench route --case delay --case dummies\n"
            "  quire bench route --case model --rounds 5")
CASES = ("simulated", "trace", "delay", "dummies", "model", "engines")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--case", choices=CASES, action="append",
                        help="may be given several times (default: all; trace and simulated only with --trace)")
    parser.add_argument("--trace", metavar="FILE", help="JSON lines with timestamp, hash_ids and output_length")
    parser.add_argument("--policy", action="append", metavar="NAME",
                        help="of trace (default: round-robin and cache-aware)")
    parser.add_argument("--replicas", type=integer, default=8, metavar="N", help="of trace (default: %(default)s)")
    parser.add_argument("--blocks", type=integer, default=2000, metavar="N",
                        help="trace blocks that a replica holds (default: %(default)s)")
    parser.add_argument("--requests", type=integer, default=12031, metavar="N",
                        help="of the trace, from its start (default: %(default)s, all of them)")
    parser.add_argument("--rate", type=number, default=40.0, metavar="X",
                        help="requests per second that the trace is played at (default: %(default)s)")
    parser.add_argument("--step-ms", type=number, default=10.0, metavar="X",
                        help="milliseconds of a step of trace's servers (default: %(default)s)")
    parser.add_argument("--step-tokens", type=integer, default=64, metavar="N",
                        help="tokens that one of their steps computes at most (default: %(default)s)")
    parser.add_argument("--streams", type=integer, default=40, metavar="N",
                        help="streams at once of delay and dummies (default: %(default)s)")
    parser.add_argument("--rounds", type=integer, default=5, metavar="N", help="of turns (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    from quire.errors import ConfigError
    from quire.machine import describe_machine

    if args.trace is None and {"trace", "simulated"} & set(args.case or ()):
        raise ConfigError("the cases trace and simulated need a trace: give --trace FILE", field="trace")
    machine = describe_machine()
    for case in args.case or CASES:
        if case not in ("trace", "simulated") or args.trace is not None:
            for found in _run(case, args):
                print(json.dumps({"bench": "route", "case": case, **found, **machine}), flush=True)
    return 0


def _run(case: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    from quire.bench.routing import route_cost

    if case in ("trace", "simulated"):
        return _trace(args, case == "simulated")
    if case == "delay":
        return [route_cost.delay(args.streams, 2000.0, 100, args.rounds)]
    if case == "dummies":
        # 40 streams of 50 tokens a second each are 2,000 in all.
        options = {"executor": "dummy", "dummy_step_ms": 20.0, "max_num_seqs": 128}
        return [route_cost.throughput(2, options, args.streams, 150, args.rounds)]
    if case == "engines":
        from quire.bench.routing.route_engines import data_parallel

        return [data_parallel(2, {"model": "smollm2-135m"}, args.rounds)]
    return [route_cost.throughput(2, {"model": "smollm2-135m", "num_threads": 1}, 8, 256, args.rounds)]


def _trace(args: argparse.Namespace, simulated: bool) -> list[dict[str, Any]]:
    from quire.bench.routing.route_trace import TraceLoad, imagine, play, read_trace

    load = TraceLoad(args.replicas, args.blocks, args.requests, args.rate, args.step_ms, args.step_tokens)
    trace = read_trace(Path(args.trace), args.requests)
    found: list[dict[str, Any]] = []
    for policy in args.policy or ("round-robin", "cache-aware"):
        found.append({"policy": policy, "replicas": load.replicas, "blocks": load.blocks, "requests": len(trace),
                      "rate": load.rate, **(imagine if simulated else play)(policy, trace, load).summary()})
    if len(found) == 2:
        first, second = found
        found.append({"compared": f"{second['policy']} / {first['policy']}",
                      "prefix_tokens": round(second["prefix_tokens"] / max(1, first["prefix_tokens"]), 3),
                      "ttft_p99": round(second["ttft_ms"]["p99"] / first["ttft_ms"]["p99"], 3)})
    return found
