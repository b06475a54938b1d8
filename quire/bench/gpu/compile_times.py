"""How long the kernels of a first start take to compile, one after another and without a GPU:
`python -m quire.bench.gpu.compile_times --model 8b [--quantization int4] [--deterministic]`.

Asks for what `worker.gpu.compile_ahead` asks for, into a cache of its own, and prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from quire.bench.gpu.cases import MODELS
from quire.config import EngineConfig
from quire.machine import describe_machine
from quire.worker.gpu.compile_ahead.request import Chip
from quire.worker.gpu.options import DeviceOptions

H200 = Chip((9, 0), 132, 227 << 10)


class _Later:
    """Keeps what is to be compiled until all is asked for."""

    def __init__(self) -> None:
        self.jobs: list[Callable[[], Any]] = []

    def submit(self, job: Callable[[], Any]) -> None:
        self.jobs.append(job)


def measure(model: str, options: DeviceOptions) -> dict[str, Any]:
    """Seconds; those of a kernel are of all its specialisations together."""
    from triton import knobs

    from quire.worker.gpu.compile_ahead.no_chip import Work, pretend
    from quire.worker.gpu.compile_ahead.steps import launch_steps

    kernels: dict[str, list[float]] = defaultdict(list)
    in_python: list[float] = []

    def listen(*, src: Any, times: Any, **_: Any) -> None:
        kernels[src.name].append(times.total / 1e6)
        in_python.append(times.ir_initialization / 1e6)

    later, launchers = _Later(), set[tuple[Any, ...]]()
    knobs.compilation.listener = listen
    work = Work(later, 0, 1, lambda kernel: launchers.add(tuple(kernel.src.signature.values())))  # type: ignore[arg-type]
    pretend(H200, work)
    began = time.perf_counter()
    with work:
        launch_steps(MODELS[model], options, 16)
    asked, used = time.perf_counter(), _processor_seconds()
    for job in later.jobs:
        job()
    slowest = sorted(kernels.items(), key=lambda each: -sum(each[1]))[:8]
    return {
        "asking": asked - began, "compiling": time.perf_counter() - asked, "processor": _processor_seconds() - used,
        "in_python": sum(in_python), "longest": max(map(max, kernels.values())), "kernels": len(in_python),
        "cuda": len(later.jobs) - len(in_python), "launchers": len(launchers),
        "slowest": {name: [len(times), round(sum(times), 2)] for name, times in slowest},
    }  # fmt: skip


def _processor_seconds() -> float:
    """Of this process and the compilers that it has run."""
    return sum(each.ru_utime + each.ru_stime for each in map(resource.getrusage, (resource.RUSAGE_SELF,
                                                                                  resource.RUSAGE_CHILDREN)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--quantization", choices=("int8", "int4", "fp8"))
    parser.add_argument("--deterministic", action="store_true")
    args = parser.parse_args()
    config = EngineConfig.create(model=args.model, device="cuda", quantization=args.quantization)
    options = DeviceOptions(max_model_len=4112, deterministic=args.deterministic, rounding=config.model.rounding)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        found = measure(args.model, options)
    shown = {name: round(value, 2) if isinstance(value, float) else value for name, value in found.items()}
    print(json.dumps({"bench": "compile_times", **vars(args), **shown, **describe_machine()}))


if __name__ == "__main__":
    main()
