"""`quire bench gpu --sampling`: what sampling settings cost, through `LLM.generate`, against temperature alone.

256 sequences of 128 in, 128 out, and one stream of the same length. Settings take turns, so that a machine that slows
down meanwhile slows all of them.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterator
from typing import Any, Final

from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request

SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "temperature alone": {},
    "greedy": {"temperature": 0.0},
    "top_p 0.95": {"top_p": 0.95},
    "top_p 0.95, top_k 20": {"top_p": 0.95, "top_k": 20},
    "min_p 0.05": {"min_p": 0.05},
    "presence 0.5, repetition 1.1": {"presence_penalty": 0.5, "repetition_penalty": 1.1},
    "all of these": {"top_p": 0.95, "top_k": 20, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "logit_bias of 20 tokens": {"logit_bias": dict.fromkeys(range(20), 1.0)},
    "logprobs 5": {"logprobs": 5},
}
TARGETS: Final = {"top_p 0.95": 0.93, "top_p 0.95, top_k 20": 0.93, "presence 0.5, repetition 1.1": 0.90,
                  "logprobs 5": 0.80}
"""Least share of temperature alone at 256 sequences."""
STREAM_LIMIT: Final = 1.1
"""Most times the plain time that a token of one stream may take."""
_TOKENS = 128
_BATCHES = (256, 1)


def requests_of(name: str, count: int, round_: int, max_tokens: int = _TOKENS) -> list[Request]:
    rng = random.Random(7)
    chosen = {"temperature": 0.6, **SETTINGS[name]}
    return [Request(f"{name}{round_}-{i}", [rng.randint(0, 10000) for _ in range(_TOKENS)],
                    SamplingParams(max_tokens=max_tokens, ignore_eos=True, **chosen), seed=i, arrival_time=0.0)
            for i in range(count)]


def measure(model: str, repeat: int, deterministic: bool = False, enforce_eager: bool = False
            ) -> Iterator[dict[str, Any]]:
    """A line for every batch size and setting: tokens a second (or ms a token), and the share of temperature alone."""
    from quire.bench.gpu.cases import MODELS
    from quire.bench.gpu.engine import GpuClock, Run, build_core, build_worker, front_door, generate
    from quire.worker.gpu.options import DeviceOptions

    options = DeviceOptions(max_num_seqs=max(_BATCHES), max_num_batched_tokens=16384, max_model_len=4112,
                            deterministic=deterministic, enforce_eager=enforce_eager)
    worker = build_worker(MODELS[model], options)
    try:
        core = build_core(worker, options)
        llm = front_door(core, worker)
        for count in _BATCHES:
            runs: dict[str, list[Run]] = {name: [] for name in SETTINGS}
            for name in SETTINGS:
                generate(llm, core, requests_of(name, count, -1, max_tokens=4))
            for round_ in range(repeat):
                for name, found in runs.items():
                    found.append(generate(llm, core, requests_of(name, count, round_)))
            times = {}
            for name in SETTINGS:
                with GpuClock(worker) as clock:
                    run = generate(llm, core, requests_of(name, count, repeat))
                times[name] = _step_times(run, clock)
            yield from lines_of(model, count, {name: [_figure(count, run) for run in found]
                                               for name, found in runs.items()}, times)
    finally:
        worker.close()


def _figure(count: int, run: Any) -> float:
    """Tokens a second; of one stream milliseconds a token."""
    if count == 1:
        return float(1e3 * (run.seconds - run.first_token) / max(1, run.output_tokens - 1))
    return float(run.output_tokens / run.seconds)


def _step_times(run: Any, clock: Any) -> dict[str, float]:
    """Milliseconds of a step, prefill included: the GPU's, the host's, and how long before the GPU came to it the host
    had launched it (less than 0: the GPU waited)."""
    gpu = 1e3 * clock.seconds() / max(1, run.steps)
    lead = statistics.median(span.gpu_begin - span.host_end for span in clock.spans())
    return {"gpu_ms_per_step": round(gpu, 3), "host_ms_per_step": round(1e3 * run.plan_seconds / max(1, run.steps), 3),
            "lead_ms": round(lead, 3)}


def lines_of(model: str, count: int, figures: dict[str, list[float]], times: dict[str, dict[str, float]]
             ) -> Iterator[dict[str, Any]]:
    plain = statistics.median(figures["temperature alone"])
    for name, found in figures.items():
        middle = statistics.median(found)
        target = STREAM_LIMIT if count == 1 else TARGETS.get(name)
        share = middle / plain
        met = None if target is None else share <= target if count == 1 else share >= target
        yield {"bench": "gpu", "case": "sampling", "model": model, "sequences": count, "setting": name,
               "unit": "ms/token" if count == 1 else "tok/s", "median": round(middle, 3), "low": round(min(found), 3),
               "high": round(max(found), 3), "of_plain": round(share, 3), "target": target, "met": met,
               **times[name]}


def text(line: dict[str, Any]) -> str:
    wanted = "" if line["target"] is None else f"  ({'met' if line['met'] else 'missed'}: {line['target']:g})"
    return (f"{line['model']} x {line['sequences']:<4d}{line['setting']:<30s}{line['median']:>10.2f} {line['unit']} "
            f"({line['low']:g} to {line['high']:g})  {line['of_plain']:.2f} of plain, GPU "
            f"{line['gpu_ms_per_step']:.2f} ms a step, host {line['host_ms_per_step']:.2f}, launched "
            f"{line['lead_ms']:.2f} ahead{wanted}")
