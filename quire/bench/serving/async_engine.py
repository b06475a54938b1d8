"""`quire bench async`: what the engine's own process costs: streamed tokens per second, and against `LLM.generate`.

Two cases, one JSON line each. `instant`: the dummy executor, so that all time is spent around a model; processor time
of the front door per token is what a server adds on top of its own. `model`: the same requests through `LLM.generate`
and through `AsyncLLM`, taking turns in one run; the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from typing import Any

from quire.async_llm import AsyncLLM
from quire.engine.process.messages import StepStats
from quire.llm import LLM
from quire.sampling.params import SamplingParams

EXAMPLES = (
    "examples:\n"
    "  quire bench async                          both cases\n"
    "  quire bench async --cases instant --streams 64 --tokens 512"
)
_PROMPT_TOKENS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", metavar="NAME", help="model (default: smollm2-135m)")
    parser.add_argument("--cases", nargs="+", default=["instant", "model"], choices=["instant", "model"],
                        help="which to measure (default: both)")
    parser.add_argument("--streams", type=int, default=None, metavar="N",
                        help="concurrent streams (default: 128 for instant, 16 for model)")
    parser.add_argument("--tokens", type=int, default=None, metavar="N",
                        help="tokens of each (default: 256 for instant, 64 for model)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="repetitions (default: 3)")
    parser.add_argument("--threads", type=int, default=None, metavar="N", help="threads of the CPU kernels")


def run(args: argparse.Namespace) -> int:
    from quire.machine import describe_machine

    machine = describe_machine()
    for case in args.cases:
        measure = _instant if case == "instant" else _model
        streams = args.streams or (128 if case == "instant" else 16)
        tokens = args.tokens or (256 if case == "instant" else 64)
        figures = asyncio.run(measure(args, streams, tokens))
        print(json.dumps({"bench": "async", "case": case, "streams": streams, "tokens": tokens, **figures, **machine}),
              flush=True)
    return 0


async def _stream_all(llm: AsyncLLM, prompts: list[list[int]], params: SamplingParams) -> int:
    """All at once, each read as it comes; how many outputs were read."""

    async def one(prompt: list[int]) -> int:
        return sum([1 async for _ in llm.generate(prompt, params, output_kind="delta")])

    return sum(await asyncio.gather(*map(one, prompts)))


def _workload(streams: int, tokens: int) -> tuple[list[list[int]], SamplingParams]:
    prompts = [[100 + i] * _PROMPT_TOKENS for i in range(streams)]
    return prompts, SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.8, seed=1)


async def _instant(args: argparse.Namespace, streams: int, tokens: int) -> dict[str, Any]:
    prompts, params = _workload(streams, tokens)
    steps: list[StepStats] = []
    rounds = []
    async with await AsyncLLM.start(args.model, executor="dummy", max_waiting_requests=streams,
                                    max_num_seqs=max(128, streams)) as llm:
        llm.on_step_stats = steps.append
        for _ in range(1 + args.rounds):
            steps.clear()
            began, cpu = time.perf_counter(), time.process_time()
            outputs = await _stream_all(llm, prompts, params)
            seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
            total = streams * tokens
            rounds.append((total / seconds, 1e6 * cpu / total, 1e6 * sum(s.seconds for s in steps) / total,
                           total / outputs))
    rate, front, core, merged = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
    return {"tokens_per_s": round(rate), "front_cpu_us_per_token": round(front, 2),
            "core_us_per_token": round(core, 2), "tokens_per_output": round(merged, 2)}


async def _model(args: argparse.Namespace, streams: int, tokens: int) -> dict[str, Any]:
    prompts, params = _workload(streams, tokens)
    options: dict[str, Any] = {} if args.threads is None else {"num_threads": args.threads}
    pairs = []
    with LLM(args.model, **options) as offline:
        async with await AsyncLLM.start(args.model, **options) as llm:
            for _ in range(1 + args.rounds):
                offline.clear_prefix_cache()
                await llm.clear_prefix_cache()
                began = time.perf_counter()
                offline.generate(prompts, params, use_tqdm=False)
                middle = time.perf_counter()
                await _stream_all(llm, prompts, params)
                pairs.append((middle - began, time.perf_counter() - middle))
    total = streams * tokens
    return {
        "offline_tokens_per_s": round(statistics.median(total / offline for offline, _ in pairs[1:]), 1),
        "async_tokens_per_s": round(statistics.median(total / ours for _, ours in pairs[1:]), 1),
        "ratio": round(statistics.median(offline / ours for offline, ours in pairs[1:]), 3),
    }
