"""`python -m quire.bench.gpu.tune_sampling`: the sampling kernels by themselves, without a model.

A step's launches in a captured graph, by what its rows ask for, over flat logits (as of random weights) and over steep
ones (as of a language model); of each kernel, the microseconds that the profiler saw. A JSON line for each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from typing import Any, Final

from quire.bench.gpu.sampling import SETTINGS
from quire.bench.gpu.tune import graph_seconds
from quire.sampling.params import SamplingParams

MORE: Final[dict[str, dict[str, Any]]] = {"top_p 0.5": {"top_p": 0.5}, "top_k 1000": {"top_k": 1000}}
_TEXT = 128
_LAUNCHES = 128
"""Of one setting, at most: each draws the next position."""
_PROFILED = 20


def measure(counts: list[int], vocab: int, names: list[str]) -> Iterator[dict[str, Any]]:
    from quire.kernels.triton.sample import sample_rows

    for count in counts:
        for kind in ("flat", "steep"):
            for name in names:
                step, wants, scratch = step_of(count, vocab, kind, {**SETTINGS, **MORE}[name], "cuda")
                launch = partial(sample_rows, step, count, wants, scratch)
                yield {"bench": "gpu", "case": "sampling kernels", "rows": count, "vocabulary": vocab, "logits": kind,
                       "setting": name, "us": round(1e6 * graph_seconds([launch] * 8), 1), "kernels": _profile(launch)}


def step_of(count: int, vocab: int, kind: str, chosen: dict[str, Any], device: str) -> tuple[Any, Any, Any]:
    """(What the launches of a step read and write, what its rows want, scratch.)"""
    import numpy as np
    import torch

    from quire.kernels import sampled_row
    from quire.kernels.sampled_row import Wants
    from quire.kernels.triton.sample import SampledStep, SampleScratch
    from quire.scheduler.plan import RowStart
    from quire.worker.gpu.sampled_stage import RowSettings, SampledRows, SampledStage

    text = [token % vocab for token in range(_TEXT)]
    params = SamplingParams(**{"temperature": 0.6, **chosen})
    settings = [RowSettings.of(RowStart(row, text, _TEXT // 2, params, row, 0), vocab) for row in range(count)]
    numbers = np.arange(count, dtype=np.int32)
    rows = SampledRows(numbers, numbers, np.full(count, _TEXT, np.int32))
    if params.penalised:
        rows.slots, rows.counted = numbers, np.full(count, _TEXT - 1, np.int32)
    stage = SampledStage(rows, settings, vocab)
    words = torch.from_numpy(stage.words(count, 0)).to(device)
    wants = stage.wants if stage.wants & ~Wants.LOGPROBS else stage.wants | Wants.DRAW
    ints = partial(torch.zeros, dtype=torch.int32, device=device)
    step = SampledStep(
        words, logits_of(count, vocab, kind).to(device, torch.bfloat16), ints(count, _TEXT + _LAUNCHES),
        ints(1, count, 2), ints(1, count, sampled_row.REPORT_WORDS),
        torch.empty(count if wants.edits else 0, vocab, device=device),
        ints(count if wants & Wants.PENALTIES else 0, vocab))  # fmt: skip
    return step, wants, SampleScratch.allocate(count, vocab, device)


def logits_of(count: int, vocab: int, kind: str) -> Any:
    import torch

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(count, vocab, generator=generator)
    if kind == "steep":
        logits *= 2.5
        logits[:, : min(40, vocab)] += torch.rand(count, min(40, vocab), generator=generator) * 20
    return logits


def _profile(launch: Any) -> dict[str, float]:
    """Microseconds of a launch of each kernel."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    launch()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(_PROFILED):
            launch()
        torch.cuda.synchronize()
    return {event.key: round(event.device_time_total / _PROFILED, 1) for event in profiler.key_averages()
            if event.device_time_total > 0}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", nargs="+", type=int, default=[256, 1])
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--settings", nargs="+", default=[*SETTINGS, *MORE], choices=[*SETTINGS, *MORE])
    args = parser.parse_args()
    for line in measure(args.rows, args.vocabulary, args.settings):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
