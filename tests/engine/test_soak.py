"""Hundreds of mixed requests with aborts, time-outs, bad input and a killed engine: nothing hangs, nothing is left."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
from collections import Counter
from pathlib import Path
from typing import Any

from quire import AsyncLLM, BeamSearchParams, SamplingParams
from quire.errors import EngineDeadError, InvalidRequestError, QueueFullError, RequestTimeoutError
from tests.async_engines import run, until

REQUESTS, AT_ONCE, KILLS = 600, 60, 3


def mixed(dice: random.Random) -> tuple[Any, Any]:
    """A prompt and parameters; one in ten is wrong."""
    prompt: Any = dice.choice([[dice.randrange(100)] * dice.randrange(1, 300), "word " * dice.randrange(1, 300)])
    if dice.random() < 0.1:
        return dice.choice([(prompt, SamplingParams(stop_token_ids=[10**6])), ([10**6], None), ([1] * 9000, None),
                            ([], None), ({"prompt": "a", "b": 1}, None)])
    if dice.random() < 0.1:
        return prompt, BeamSearchParams(beam_width=dice.randrange(1, 4), max_tokens=dice.randrange(1, 40))
    return prompt, SamplingParams(max_tokens=dice.randrange(1, 150), n=dice.choice([1, 1, 1, 2, 4]), ignore_eos=True,
                                  stop=dice.choice([None, "a", ["the", "of "]]), logprobs=dice.choice([None, None, 2]))


async def one(llm: AsyncLLM, dice: random.Random) -> str:
    prompt, params = mixed(dice)
    patience = dice.choice([None, None, None, 0.2])
    stream = llm.generate(prompt, params, timeout=patience, output_kind=dice.choice(["cumulative", "delta", "final"]))
    leave_after = dice.choice([10**6, 10**6, 10**6, 1, 5])
    try:
        seen = []
        async for output in stream:
            seen.append(output)
            if dice.random() < 0.05:
                await asyncio.sleep(0.02)
            if len(seen) == leave_after:
                await stream.aclose()
                return "left"
        assert seen[-1].finished and seen[-1].error is None
        return "done"
    except (EngineDeadError, InvalidRequestError, QueueFullError, RequestTimeoutError) as error:
        if isinstance(error, EngineDeadError):
            await until(lambda: llm.state == "ready")
        return type(error).__name__


async def soak(llm: AsyncLLM) -> Counter[str]:
    dice, seen = random.Random(1), Counter[str]()
    todo = iter(range(REQUESTS))

    async def worker() -> None:
        for _ in todo:
            async with asyncio.timeout(60):  # nobody hangs
                seen[await one(llm, dice)] += 1

    async def killer() -> None:
        for kill in range(1, KILLS + 1):
            await until(lambda kill=kill: seen.total() >= kill * REQUESTS // (KILLS + 1) and llm.state == "ready")
            assert llm.engine_pid is not None
            os.kill(llm.engine_pid, signal.SIGKILL)

    await asyncio.gather(killer(), *[worker() for _ in range(AT_ONCE)])
    return seen


def test_a_soak_with_kills_leaves_nothing_behind(smollm2: str) -> None:
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    async def job(llm: AsyncLLM) -> None:
        tasks, files = len(asyncio.all_tasks()), descriptors()
        seen = await soak(llm)
        await until(lambda: llm.state == "ready")
        assert seen.total() == REQUESTS and seen["done"] > REQUESTS // 4, seen
        assert {"left", "InvalidRequestError", "EngineDeadError", "RequestTimeoutError"} <= set(seen), seen
        gc.collect()
        await until(lambda: llm.num_in_flight == 0 and not llm._desk._names)
        metrics = await llm.metrics(refresh=True)
        assert metrics["kv_blocks_used"] == 0 and metrics["requests_running"] == metrics["requests_waiting"] == 0
        assert metrics["engine_restarts"] == KILLS and metrics["requests_queued"] == metrics["invariant_errors"] == 0
        await llm.check()
        assert len(asyncio.all_tasks()) == tasks and descriptors() <= files
        assert not llm._desk._calls and not llm._desk._touched

    run(job, smollm2, executor="dummy", dummy_step_ms=1.0, num_kv_blocks=600, max_num_seqs=32)
