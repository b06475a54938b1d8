"""Engines that share a pool, for the tests of the stores: tiny models, long lookups, a wait for what is written."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

from quire import LLM, SamplingParams

SECRET = "a secret of the replicas of one tenant"
PROMPT = random.Random(3).choices(range(3, 97), k=700)
PARAMS = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, logprobs=2)

TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "distributed_executor_backend": "threads", "num_threads": 1}


def open_engine(model: Path, pool: str | None, block_size: int = 16, **options: Any) -> LLM:
    if pool is not None:
        options = {"kv_pool": pool, "kv_pool_policy": "all", "kv_lookup_timeout": 20_000.0} | options
    return LLM(str(model), skip_tokenizer_init=True, block_size=block_size, num_kv_blocks=4096 // block_size, **options)


def ask(llm: LLM, prompt: list[int] = PROMPT) -> Any:
    answer = llm.generate([prompt], PARAMS, use_tqdm=False)[0]
    assert answer.error is None
    llm.check()
    return answer


def said(answer: Any) -> list[Any]:
    return [(output.token_ids, output.logprobs) for output in answer.outputs]


def wait_for(llm: LLM, name: str, least: int, seconds: float = 180.0) -> None:
    """Until a counter has come so far."""
    until = time.monotonic() + seconds
    while llm.metrics()[name] < least:
        assert time.monotonic() < until, f"{name} is {llm.metrics()[name]}, not {least}"
        time.sleep(0.01)
