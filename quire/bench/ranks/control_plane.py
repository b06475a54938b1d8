"""What it costs to reach ranks: from a plan of decoding sequences to the last rank's start, and to its result."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

from quire.parallel.place import Place
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import PlanEntry, RowStart, StepPlan, TableDiff

_PAUSE_SECONDS = 0.0004
"""Between a result and the next plan: what a scheduler takes for such a step."""
_PULSES_SECONDS = 0.8
_BLOCK = 16


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
            "result_median": round(1e6 * statistics.median(answered), 1),
            "steps_per_second": round(1 / statistics.median(answered)), "cores": len(os.sched_getaffinity(0))}


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
    rows = list(range(sequences))
    return StepPlan(2 + step, diffs=diffs, entries=[PlanEntry(row, _BLOCK + step, 1, True) for row in rows],
                    decoding=(rows, [_BLOCK + step for _ in rows]))
