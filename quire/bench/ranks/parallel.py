"""`quire bench parallel`: What it costs to reach ranks, and how fast one model is over several of them.

The first part has no model: from handing in a plan of decoding sequences to the moment at which the last rank begins
with it. The second runs cases of `bench cpu` in one process and over ranks, in turns, on the same cores."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

from quire.bench.cpu.cases import CASES
from quire.bench.cpu.command import contest
from quire.bench.ranks.exchange import exchange_times
from quire.bench.ranks.layer_times import layer_times
from quire.bench.ranks.rank_memory import rank_memory
from quire.cli.options import integer
from quire.machine import describe_machine
from quire.parallel.place import Place
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import PlanEntry, RowStart, StepPlan, TableDiff

EXAMPLES = ("examples:\n  quire bench parallel --cases\n"
            "  quire bench parallel --ranks --cases A B C --sizes 2x1 1x2\n"
            "  quire bench parallel --ranks --model ./qwen3-0.6b --load-format dummy")
_PAUSE_SECONDS = 0.0004
"""Between a result and the next plan: what a scheduler takes for such a step."""
_PULSES_SECONDS = 0.8
_BLOCK = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=integer, nargs="*", default=[1, 2, 4, 8], metavar="N",
                        help="numbers of ranks to reach (default: 1 2 4 8; none: leave that part out)")
    parser.add_argument("--sequences", type=integer, default=256, metavar="N",
                        help="that decode in each of those plans (default: %(default)s)")
    parser.add_argument("--steps", type=integer, default=400, metavar="N", help="plans (default: %(default)s)")
    parser.add_argument("--ray", action="store_true",
                        help="also: a plan to another node through our socket, against a call of a Ray actor")
    parser.add_argument("--cases", nargs="*", default=["A", "B", "C"], choices=CASES,
                        help="cases of `bench cpu` (default: A B C; none: leave that part out)")
    parser.add_argument("--sizes", nargs="+", default=["2x1", "1x2"], metavar="TxP",
                        help="tensor ranks x stages to compare with one process (default: 2x1 1x2)")
    parser.add_argument("--memory", nargs="+", default=[], metavar="TxP",
                        help="also measure what each rank of such a size takes at most while it loads")
    parser.add_argument("--layer-times", type=integer, nargs="+", default=[], metavar="ROWS",
                        help="also measure what layers and head take in steps of so many sequences")
    parser.add_argument("--model", default="smollm2-135m", help="model of the cases (default: %(default)s)")
    parser.add_argument("--load-format", default="auto", help="dummy: the model's shapes with random weights")
    parser.add_argument("--repeat", type=integer, default=3, metavar="N",
                        help="rounds, in each of which every size has its turn (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    machine = describe_machine()
    for count in args.ranks:
        print(json.dumps({**control_plane(count, args.sequences, args.steps), **machine}), flush=True)
        if count > 1:
            print(json.dumps({**exchange_times(count), **machine}), flush=True)
    if args.ray:
        for sequences in (1, args.sequences):
            print(json.dumps({**ray_against_socket(sequences, args.steps), **machine}), flush=True)
    for size in args.memory:
        tensor, stages = map(int, size.split("x"))
        for line in rank_memory(args.model, tensor, stages, args.load_format):
            print(json.dumps({**line, **machine}), flush=True)
    for rows in args.layer_times:
        print(json.dumps({**layer_times(args.model, args.load_format, rows), **machine}), flush=True)
    for case in args.cases:
        for line in speeds(case, args.model, args.load_format, args.sizes, args.repeat):
            print(json.dumps({**line, **machine}), flush=True)
    return 0


# ---- reaching ranks


def control_plane(num_ranks: int, sequences: int, steps: int) -> dict[str, Any]:
    """Microseconds from `submit` to the last rank's start, and to the result, with a worker that does nothing."""
    from quire.ranks.local import start_local

    executor, _ = start_local(Place.all(num_ranks, 1), {"kind": "dummy", "vocab_size": 1000})
    handed_in: list[float] = []
    answered: list[float] = []
    try:
        executor.submit(_prompts(sequences)).result()
        for step in range(steps):
            plan = _decoding(step, sequences)
            until = time.monotonic() + _PAUSE_SECONDS
            while time.monotonic() < until:  # as a scheduler would: computing, not asleep
                pass
            began = time.monotonic()
            executor.submit(plan).result()
            handed_in.append(began)
            answered.append(time.monotonic() - began)
        time.sleep(_PULSES_SECONDS)
        # The first step was the prompts'.
        begins = [{number: begin for number, begin, _ in state.times} for state in executor.ranks.states]
    finally:
        executor.close()
    known = [step for step in range(steps) if all(step + 2 in each for each in begins)]
    last = sorted(max(each[step + 2] for each in begins) - handed_in[step] for step in known)
    return {"bench": "parallel", "case": "control plane", "ranks": num_ranks, "sequences": sequences,
            "steps": len(known), "unit": "us from submit to the last rank's start",
            "best": round(1e6 * last[0], 1), "median": round(1e6 * statistics.median(last), 1),
            "p90": round(1e6 * last[int(0.9 * len(last))], 1),
            "result_median": round(1e6 * statistics.median(answered), 1), "cores": len(os.sched_getaffinity(0))}


def ray_against_socket(sequences: int, steps: int) -> dict[str, Any]:
    """Microseconds from a plan to its result: through a socket with its seal, and as bytes through a Ray actor, which
    does not even look at them."""
    import ray

    from quire.ranks.local import same_for_all
    from quire.ranks.plan_codec import PlanEncoder
    from quire.ranks.ray_launch import start_ray
    from quire.ranks.ray_rank import RayRank

    ray.init(address="local", num_cpus=2, include_dashboard=False)
    executor, _ = start_ray(Place.all(1, 1), {"kind": "dummy", "vocab_size": 1000}, same_for_all, None, 1,
                            use_ring=False)
    actor: Any = ray.remote(RayRank).remote("echo")
    encoder = PlanEncoder()
    data = bytes(encoder.encode(_decoding(0, sequences)))
    found: dict[str, list[float]] = {"socket": [], "ray": []}
    try:
        executor.submit(_prompts(sequences)).result()
        ray.get(actor.echo.remote(data))
        for step in range(steps):
            began = time.monotonic()
            executor.submit(_decoding(step, sequences)).result()
            between = time.monotonic()
            ray.get(actor.echo.remote(data))
            found["socket"].append(between - began)
            found["ray"].append(time.monotonic() - between)
    finally:
        executor.close()
        ray.shutdown()
    figures = {name: {"best": round(1e6 * min(times), 1), "median": round(1e6 * statistics.median(times), 1)}
               for name, times in found.items()}
    return {"bench": "parallel", "case": "between nodes", "sequences": sequences,
            "unit": "us from a plan to its result", **figures}


def _prompts(sequences: int) -> StepPlan:
    return StepPlan(
        1, starts=[RowStart(row, [1] * _BLOCK, _BLOCK, SamplingParams(), row, 0) for row in range(sequences)],
        diffs=[TableDiff(row, 0, 0, [row]) for row in range(sequences)],
        entries=[PlanEntry(row, 0, _BLOCK, True) for row in range(sequences)])


def _decoding(step: int, sequences: int) -> StepPlan:
    """One token more for everybody; every sixteenth gets a block."""
    diffs = [TableDiff(row, 0, 1 + step // _BLOCK, [row]) for row in range(step % _BLOCK, sequences, _BLOCK)]
    return StepPlan(2 + step, diffs=diffs,
                    entries=[PlanEntry(row, _BLOCK + step, 1, True) for row in range(sequences)])


# ---- speed


def speeds(case: str, model: str, load_format: str, sizes: list[str], rounds: int) -> list[dict[str, Any]]:
    """One process with a thread for every core, and each of `sizes` with the cores dealt to its ranks, in turns."""
    cores = len(os.sched_getaffinity(0))
    options: dict[str, dict[str, Any]] = {"one process": {"num_threads": cores}}
    for size in sizes:
        tensor, stages = map(int, size.split("x"))
        options[size] = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    found: dict[str, list[float]] = {name: [] for name in options}
    for _ in range(rounds):
        for name, more in options.items():
            done = contest("quire", case, model, 2, {"load_format": load_format, "device": "cpu", **more})
            found[name].append(min(done["seconds"]))
    base = statistics.median(found["one process"])
    return [{"bench": "parallel", "case": case, "model": model, "size": name,
             "seconds": [round(each, 3) for each in seconds],
             "speed_to_one_process": round(base / statistics.median(seconds), 3)}
            for name, seconds in found.items()]
