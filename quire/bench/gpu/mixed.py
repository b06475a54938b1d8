"""Small mixed steps, where launching kernels one by one costs most: a short prompt beside a few decoding sequences.

How much it costs is the share of such a step in which the GPU has nothing to do: the time of its kernels (from a
profile) against the time of the step (without one). Measured as launched one by one and as padded and replayed.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Iterator
from typing import Any

from quire.bench.gpu.cases import MAX_MODEL_LEN, MODELS
from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request

LENGTHS = (16, 100, 256, 512)
DECODES = 8
_STEPS = 40
_PROFILED = 10


def measure(model: str, **options: Any) -> Iterator[dict[str, Any]]:
    """One line for each length of prompt, and one (length 0) for the decoding sequences alone."""
    from quire.bench.gpu.engine import build_core, build_worker
    from quire.worker.gpu.options import DeviceOptions

    settings = DeviceOptions(max_num_seqs=16, max_num_batched_tokens=2048, max_model_len=MAX_MODEL_LEN, **options)
    began = time.perf_counter()
    worker = build_worker(MODELS[model], settings, num_kv_blocks=4000)
    built = round(time.perf_counter() - began, 2)
    core = build_core(worker, settings)
    try:
        load = Load(core)
        for length in (0, *LENGTHS):
            load.steps(length, 5)
            yield {"bench": "gpu", "case": "mixed", "model": model, "prompt": length, "decodes": DECODES,
                   **load.measured(length), "built_s": built, "options": options}
    finally:
        worker.close()


class Load:
    """Sequences that decode all the time; beside them, a prompt in every step."""

    def __init__(self, core: Any, decodes: int = DECODES, context: int = 200, answer: int = 2000) -> None:
        self._core = core
        self._names = itertools.count()
        for _ in range(decodes):
            core.add(self._request(context, answer))
        for _ in range(decodes + 4):
            core.step()

    def _request(self, length: int, answer: int) -> Request:
        name = next(self._names)
        prompt = [(7 * name + 3 * place) % 100 for place in range(length)]
        params = SamplingParams(temperature=0.0, max_tokens=answer, ignore_eos=True)
        return Request(f"m{name}", prompt, params, seed=name, arrival_time=0.0)

    def steps(self, length: int, count: int) -> list[float]:
        """Seconds of each step."""
        times = []
        for _ in range(count):
            if length:
                self._core.add(self._request(length, 1))
            began = time.perf_counter()
            self._core.step()
            times.append(time.perf_counter() - began)
        return times

    def measured(self, length: int) -> dict[str, Any]:
        import torch
        from torch.profiler import ProfilerActivity, profile

        self._core.waited = 0.0
        began = time.perf_counter()
        times = self.steps(length, _STEPS)
        total, waited = time.perf_counter() - began, self._core.waited
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            self.steps(length, _PROFILED)
            torch.cuda.synchronize()
        kernels = sum(
            event.device_time_total for event in found.events() if str(event.device_type).endswith("CUDA")
        ) / 1e6 / _PROFILED  # fmt: skip
        step = statistics.median(times)
        return {
            "step_ms": round(1e3 * step, 3), "kernel_ms": round(1e3 * kernels, 3),
            "host_ms": round(1e3 * (total - waited) / _STEPS, 3), "gpu_busy_share": round(kernels / step, 3),
        }  # fmt: skip


def text(line: dict[str, Any]) -> str:
    what = f"a prompt of {line['prompt']} beside {line['decodes']}" if line["prompt"] else f"{line['decodes']}"
    how = "padded" if line.get("options", {}).get("pad_mixed") else "as it comes"
    return (f"mixed {line['model']:>4}, {how}: {what} decoding: {line['step_ms']:.2f} ms a step, kernels "
            f"{line['kernel_ms']:.2f} ({line['gpu_busy_share']:.0%} busy), host {line['host_ms']:.2f}")
