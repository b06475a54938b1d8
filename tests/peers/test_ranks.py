"""Prefill here, decode there, where either engine is several ranks: tokens and log-probabilities of one engine."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams, StructuredOutputs
from tests.checkpoints import make_checkpoint
from tests.peers.engine_process import eventually
from tests.peers.pairs import SECRET, answers, pair
from tests.peers.test_exact import OPTIONS, PARAMS, PROMPTS
from tests.ranks.processes import ranks_of, until_gone
from tests.structured.tiny import make_model


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, tuple[str, list[Any]]] = {}

    def model(family: str) -> tuple[str, list[Any]]:
        """Its folder, and what one engine of one rank answers."""
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            make_checkpoint(folder, family)
            with LLM(str(folder), **OPTIONS) as llm:
                made[family] = str(folder), answers(llm, PROMPTS, PARAMS)
        return made[family]

    return model


def ranks(tensor: int, stages: int = 1, backend: str = "threads", **options: Any) -> dict[str, Any]:
    return {**OPTIONS, "tensor_parallel_size": tensor, "pipeline_parallel_size": stages, "num_threads": 1,
            "distributed_executor_backend": backend, **options}


SIDES = {
    "2 ranks to one": ("llama", ranks(2), {**OPTIONS, "block_size": 8}),
    "one to 2 x 2": ("gemma3", {**OPTIONS, "block_size": 3}, ranks(2, 2)),
    "3 ranks, 2 kv heads, to 2 stages": ("llama", ranks(3, max_num_batched_tokens=21), ranks(1, 2, block_size=8)),
    "2 stages to 3 ranks, windows": ("mistral", ranks(1, 2, block_size=8, max_num_batched_tokens=21), ranks(3)),
    "equal ranks, experts": ("qwen3_moe", ranks(2), ranks(2)),
    "no windows and as many kv heads as heads": ("gpt2", ranks(2, block_size=32), ranks(1, 3)),
    "windows, sinks, experts": ("gpt_oss", ranks(1, 3), ranks(2)),
    "latents that every rank has": ("deepseek_v2", ranks(2), ranks(1, 2)),
    "through shared memory": ("olmo2", ranks(2, kv_transfer={"transports": "shm"}),
                              ranks(3, kv_transfer={"transports": "shm"})),
    "2 x 2 to one, preempted": ("gemma3", ranks(2, 2, num_kv_blocks=9, swap_space=0.01, preemption_mode="swap"),
                                {**OPTIONS, "num_kv_blocks": 17, "swap_space": 0.01, "preemption_mode": "swap"}),
}


@pytest.mark.parametrize("kind", SIDES)
def test_the_bits_of_one_engine(models: Any, kind: str) -> None:
    family, prefill, decode = SIDES[kind]
    model, expected = models(family)
    with pair(model, {**prefill}, {**decode}) as (_, llm):
        assert answers(llm, PROMPTS, PARAMS) == expected
        found = llm.metrics()
        assert found["kv_prompts_arrived"] >= 4 and found["kv_prompts_failed"] == 0


@pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="grammars need xgrammar")
def test_a_grammar_shapes_what_follows_a_prompt_that_came(tmp_path: Path) -> None:
    """The other side computes all but the last token of the prompt; the first one must fit the grammar too."""
    model = str(make_model(tmp_path))
    plain: dict[str, Any] = {"load_format": "dummy", "num_kv_blocks": 64, "num_threads": 1}
    prompts = ["The quick brown fox", "Once there was a fox that " * 3, "A code such as 12-abc is"]
    params = [SamplingParams(temperature=1.0, seed=seed, max_tokens=40, logprobs=1, n=1 + seed % 2,
                             structured_outputs=StructuredOutputs(regex="[0-9]{2}-[a-z]{3,5}")) for seed in range(3)]

    def said(llm: LLM) -> list[Any]:
        return [[(one.text, one.token_ids, one.logprobs) for one in output.outputs]
                for output in llm.generate(prompts, params, use_tqdm=False)]

    with LLM(model, **plain) as llm:
        expected = said(llm)
    assert all(re.fullmatch("[0-9]{2}-[a-z]{3,5}", text) for output in expected for text, *_ in output)
    two = {**plain, "tensor_parallel_size": 2, "distributed_executor_backend": "threads"}
    with pair(model, two, {**plain, "block_size": 4}) as (_, llm):
        assert said(llm) == expected
        assert llm.metrics()["kv_prompts_arrived"] == 3


# ---- a rank that is lost


PROMPT = random.Random(7).choices(range(3, 97), k=120)
SHORT = [5, *PROMPT[:20]]


def begin(llm: LLM, prompt: list[int] = PROMPT) -> None:
    llm.add_request("r", prompt, SamplingParams(seed=3, max_tokens=6, temperature=1.0, logprobs=1, ignore_eos=True))


def finish(llm: LLM) -> Any:
    while True:
        for output in llm.step():
            if output.finished:
                return output


def some_came(llm: LLM, before: int = 0) -> bool:
    llm.step()
    return llm.metrics()["kv_tokens_received"] > before


def test_a_rank_of_the_prefill_side_that_dies_costs_a_pause(models: Any) -> None:
    """The engine behind it is dead, and says so; the other one goes on with what has come, and asks no more."""
    model, _ = models("llama")
    with LLM(model, **OPTIONS) as llm:
        begin(llm)
        expected = finish(llm).outputs
        begin(llm, SHORT)
        expected_of_short = finish(llm).outputs
    slowly = ranks(2, backend="mp", max_num_batched_tokens=1)
    with pair(model, slowly, {**OPTIONS, "enable_prefix_caching": False}) as (other, llm):
        begin(llm, SHORT)
        assert finish(llm).outputs == expected_of_short and llm.metrics()["kv_tokens_received"] == len(SHORT)
        begin(llm)
        eventually(lambda: some_came(llm, len(SHORT)), "nothing came")
        victim = ranks_of(os.getpid())[1]
        os.kill(victim, signal.SIGKILL)
        answer = finish(llm)
        assert answer.error is None and answer.outputs == expected
        found = llm.metrics()
        assert found["kv_prompts_computed_here"] == 1
        assert len(SHORT) < found["kv_tokens_received"] < len(SHORT) + len(PROMPT)
        eventually(lambda: other.llm._core.executor.failure is not None, "nobody noticed")
        until_gone([victim])


def test_a_rank_of_the_decode_side_that_dies_leaves_no_block_behind(models: Any) -> None:
    """The request ends with an error that names the rank, and the prefill side holds and computes nothing more."""
    model, _ = models("llama")
    with LLM(model, **OPTIONS) as llm:
        expected = answers(llm, PROMPTS[1:2], PARAMS[:1])
    with pair(model, {**OPTIONS, "max_num_batched_tokens": 1}, ranks(2, backend="mp")) as (other, llm):
        assert answers(llm, PROMPTS[1:2], PARAMS[:1]) == expected
        before = llm.metrics()["kv_tokens_received"]
        begin(llm)
        eventually(lambda: some_came(llm, before), "nothing came")
        victim = ranks_of(os.getpid())[1]
        os.kill(victim, signal.SIGKILL)
        answer = finish(llm)
        assert answer.error is not None and "rank 1 of 2" in answer.error
        stats = other.llm._engine.peers.stats  # type: ignore[union-attr]
        eventually(lambda: stats.prefills_cancelled + stats.prefills_failed > 0, "it computes on for the dead")
        assert llm.metrics()["kv_links"] == 0
        until_gone([victim])
