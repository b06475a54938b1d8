"""Several engines of one thread each against one with as many threads: case B of `quire bench cpu`, in turns."""

from __future__ import annotations

import asyncio
import statistics
import time
from typing import Any

from quire.async_llm import AsyncLLM
from quire.bench.cpu.cases import Workload, workload
from quire.errors import QuireError
from quire.router.engines import ReplicatedLLM
from quire.sampling.params import SamplingParams


def data_parallel(size: int, options: dict[str, Any], rounds: int) -> dict[str, Any]:
    """Output tokens per second of both, and the median of each round's ratio."""
    found = asyncio.run(_in_turns(size, options, rounds))
    return {"size": size, "one_engine_tok_s": round(statistics.median(one for one, _ in found), 1),
            "engines_tok_s": round(statistics.median(many for _, many in found), 1),
            "ratio": round(statistics.median(many / one for one, many in found), 3),
            "ratios": [round(many / one, 3) for one, many in found], "rounds": rounds}


async def _in_turns(size: int, options: dict[str, Any], rounds: int) -> list[tuple[float, float]]:
    """Both are there all the time; the other one rests."""
    without_cache = {"enable_prefix_caching": False, **options}
    one = await AsyncLLM.start(**without_cache, num_threads=size)
    many = await ReplicatedLLM.start(size, **without_cache, num_threads=1)
    try:
        work = workload("B", one.vocab_size)
        found = []
        for turn in range(-1, rounds):
            speeds = {}
            for llm in (one, many) if turn % 2 else (many, one):
                speeds[id(llm)] = await _speed(llm, work, turn)
            if turn >= 0:  # the first one warms up
                found.append((speeds[id(one)], speeds[id(many)]))
        return found
    finally:
        await asyncio.gather(one.shutdown(), many.shutdown())


async def _speed(llm: AsyncLLM | ReplicatedLLM, work: Workload, turn: int) -> float:
    async def run(number: int, prompt: list[int], tokens: int) -> None:
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id=f"{turn}-{number}",
                                         output_kind="final"):
            if output.outputs[0].finish_reason != "length":
                raise QuireError(f"a request ended with {output.outputs[0].finish_reason!r}")

    began = time.perf_counter()
    pairs = zip(work.prompts, work.outputs, strict=True)
    await asyncio.gather(*[run(number, prompt, tokens) for number, (prompt, tokens) in enumerate(pairs)])
    return work.num_output_tokens / (time.perf_counter() - began)
