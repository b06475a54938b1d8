"""`quire bench scheduler`: how long planning a step of decoding sequences and taking in its result take."""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

from quire.executor.dummy import DummyExecutor
from quire.kvcache.manager import KVCacheManager
from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Limits, Scheduler

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256, 1024], metavar="N",
                        help="numbers of decoding sequences to measure")
    parser.add_argument("--steps", type=int, default=200, metavar="N",
                        help="steps measured of each (default: 200)")
    parser.add_argument("--host", action="store_true",
                        help="what the host pays for a token of LLM.generate: plain, with log-probabilities, with a "
                             "draft head that rests")
    parser.add_argument("--prompts", action="store_true",
                        help="what the host adds to 16 prompts of 4,096 tokens through LLM.generate, by part")
    parser.add_argument("--growth", action="store_true",
                        help="count the operations of costs that must not grow with queues, prompts and answers")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 4096, 16384], metavar="N",
                        help="queue, prompt and answer sizes for --growth (default: 1024 4096 16384)")


def run(args: argparse.Namespace) -> int:
    if args.growth:
        from quire.bench.scheduling.growth import print_table

        return 0 if print_table(sorted(args.sizes)) else 1
    from quire.machine import describe_machine

    machine = describe_machine()
    if args.host:
        from quire.bench.scheduling.host_cost import lines

        for line in lines(args.sequences, args.steps):
            print(json.dumps({**line, **machine}), flush=True)
        return 0
    if args.prompts:
        from quire.bench.scheduling import prompt_cost

        for line in prompt_cost.lines(16, 4096, args.steps):
            print(json.dumps({**line, **machine}), flush=True)
        return 0
    cases = [measure(n, args.steps) for n in sorted(args.sequences)]
    for case in cases:
        print(json.dumps({"bench": "scheduler", **case, **machine}), flush=True)
    if len(cases) > 1:
        print(json.dumps({"bench": "scheduler", **growth(cases[0], cases[-1]), **machine}), flush=True)
    return 0


def measure(num_sequences: int, num_steps: int) -> dict[str, Any]:
    """Medians of processor time over steps in which every sequence computes one token; no executor's time.

    Sequences start at different lengths, so in every step about one in `block_size` fills a block, hashes and
    publishes it and takes a new one: the mean of a real run, and no step is cheaper than another by design.
    """
    scheduler = _decoding(num_sequences, num_steps)
    executor = DummyExecutor()
    plans, updates = [], []
    gc.collect()
    gc.freeze()  # what was made before is not the scheduler's garbage to search
    try:
        for _ in range(num_steps + 10):
            began = time.thread_time_ns()
            plan = scheduler.schedule()
            planned = time.thread_time_ns()
            if plan is None:
                break
            result = executor.execute(plan)
            computed = time.thread_time_ns()
            scheduler.update(result)
            scheduler.take_updates()
            updates.append(time.thread_time_ns() - computed)
            plans.append(planned - began)
    finally:
        gc.unfreeze()
    # The first steps admit and prefill.
    plan_ms, update_ms = (statistics.median(times[10:]) / 1e6 for times in (plans, updates))
    both = sorted(p + u for p, u in zip(plans[10:], updates[10:], strict=True))
    return {
        "sequences": num_sequences,
        "steps": num_steps,
        "plan_ms": round(plan_ms, 4),
        "update_ms": round(update_ms, 4),
        "step_ms": round(statistics.median(both) / 1e6, 4),
        "step_ms_p99": round(both[len(both) * 99 // 100] / 1e6, 4),
        "us_per_sequence": round(statistics.median(both) / 1e3 / num_sequences, 3),
    }


def growth(small: dict[str, Any], large: dict[str, Any]) -> dict[str, Any]:
    """How the time of a step grows with the number of sequences; linear is times == sequences."""
    return {
        "growth_from": small["sequences"],
        "growth_to": large["sequences"],
        "sequences_times": round(large["sequences"] / small["sequences"], 2),
        "step_ms_times": round(large["step_ms"] / small["step_ms"], 2),
    }


def _decoding(num_sequences: int, num_steps: int) -> Scheduler:
    lengths = [_PROMPT_TOKENS + i % _BLOCK_SIZE for i in range(num_sequences)]
    longest = _PROMPT_TOKENS + _BLOCK_SIZE + num_steps + 16
    cache = KVCacheManager(num_sequences * (longest // _BLOCK_SIZE + 2), _BLOCK_SIZE)
    limits = Limits(num_sequences, sum(lengths), longest + 1)
    scheduler = Scheduler(limits, cache)
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    for i, length in enumerate(lengths):
        prompt = [(7919 * i + j) % 1000 for j in range(length)]
        scheduler.add(Request(f"r{i}", prompt, params, seed=i, arrival_time=0.0))
    return scheduler
