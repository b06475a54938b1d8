"""Cases of `bench cpu` in one process and over ranks, on the same cores."""

from __future__ import annotations

import os
from typing import Any

from quire.bench.cpu.command import contest


def speeds(case: str, model: str, load_format: str, sizes: list[str], rounds: int, runs: int = 2
           ) -> list[dict[str, Any]]:
    """One process with a thread for every core, and each of `sizes` with the cores dealt to its ranks, in turns of so
    many runs. The best of all counts: what disturbs a run makes it slower, never faster."""
    cores = len(os.sched_getaffinity(0))
    options: dict[str, dict[str, Any]] = {"one process": {"num_threads": cores}}
    for size in sizes:
        tensor, stages = map(int, size.split("x"))
        options[size] = {"tensor_parallel_size": tensor, "pipeline_parallel_size": stages}
    found: dict[str, list[float]] = {name: [] for name in options}
    for _ in range(rounds):
        for name, more in options.items():
            done = contest("quire", case, model, runs, {"load_format": load_format, "device": "cpu", "dtype": "float32",
                                                        "skip_tokenizer_init": True, **more})
            found[name].append(min(done["seconds"]))
    base = min(found["one process"])
    return [{"bench": "parallel", "case": case, "model": model, "size": name,
             "seconds": [round(each, 3) for each in seconds],
             "speed_to_one_process": round(base / min(seconds), 3)}
            for name, seconds in found.items()]
