"""Case e: one prompt of 128,000 tokens, and eight of 32,000: how fast they are read, then how long a token takes."""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from quire.bench.gpu.cases import MODELS, least_seconds
from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request

if TYPE_CHECKING:
    from quire.bench.gpu.engine import Run
    from quire.worker.gpu.options import DeviceOptions

WORKLOADS = ((1, 128_000), (8, 32_000))
"""Prompts, and tokens of each."""
TOKENS = 256
"""Of an output. Prompts are read one after another, so the first have some tokens when the last is read: a small part
of so many."""
STEP_TOKENS = 8448
"""Of a step: chunks of so many tokens are 16 tiles of attention for each of an H200's 132 multiprocessors."""
MAX_SEQS = max(count for count, _ in WORKLOADS)
MAX_MODEL_LEN = max(length for _, length in WORKLOADS) + TOKENS


def config_of(model: str) -> dict[str, Any]:
    """A model of the other cases, with positions for the prompts."""
    return {**MODELS[model], "max_position_embeddings": 1 << 17}


def requests_of(count: int, length: int, round_: int = 0, max_tokens: int = TOKENS) -> list[Request]:
    rng = random.Random(length)
    prompts = [[rng.randint(0, 10000) for _ in range(length)] for _ in range(count)]
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [Request(f"e{length}-{round_}-{i}", prompt, params, seed=i, arrival_time=0.0)
            for i, prompt in enumerate(prompts)]  # fmt: skip


def figures(run: Run) -> tuple[float, float]:
    """Prompt tokens a second until the last request had its first token; then milliseconds a step."""
    return run.prompt_tokens / run.first_token, 1e3 * (run.seconds - run.first_token) / (TOKENS - 1)


def limits(
    model: str, count: int, length: int, element: int = 2, quantization: str | None = None
) -> tuple[float, float]:
    """The same where the hardware is used whole."""
    requests = [requests_of(count, length, max_tokens=tokens) for tokens in (1, TOKENS)]
    read, whole = (least_seconds("e", MODELS[model], each, element, quantization) for each in requests)
    return count * length / read, 1e3 * (whole - read) / (TOKENS - 1)


def measure(
    model: str, options: DeviceOptions, *, block_size: int, depth: int, repeat: int, quantization: str | None
) -> Iterator[dict[str, Any]]:
    """A line for each workload."""
    from quire.bench.gpu.engine import build_core, build_worker, front_door, generate

    worker = build_worker(config_of(model), options, block_size)
    element = 4 if options.dtype == "float32" else 2
    try:
        for count, length in WORKLOADS:
            few = dataclasses.replace(options, max_num_seqs=count)
            core = build_core(worker, few, block_size=block_size, depth=depth)
            llm = front_door(core, worker)
            generate(llm, core, requests_of(count, length, -1, max_tokens=3))
            found = [figures(generate(llm, core, requests_of(count, length, round_))) for round_ in range(repeat)]
            rates, times = zip(*found, strict=True)
            rate, time = limits(model, count, length, element, quantization)
            yield {"bench": "gpu", "case": "e", "model": model, "prompts": count, "tokens": length, "runs": repeat,
                   "prompt_tok_s": round(statistics.median(rates), 1),
                   "ms_per_token": round(statistics.median(times), 3),
                   "limit_prompt_tok_s": round(rate, 1), "limit_ms_per_token": round(time, 3),
                   "prompt_tok_s_runs": [round(each, 1) for each in rates],
                   "ms_per_token_runs": [round(each, 3) for each in times]}  # fmt: skip
    finally:
        worker.close()


def text(line: dict[str, Any]) -> str:
    return (f"e {line['model']:>4}: {line['prompts']} of {line['tokens']:,}: {line['prompt_tok_s']:,.0f} prompt tok/s "
            f"(limit {line['limit_prompt_tok_s']:,.0f}), then {line['ms_per_token']:g} ms a token (limit "
            f"{line['limit_ms_per_token']:g}); median of {line['runs']}")  # fmt: skip
