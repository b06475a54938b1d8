"""Ranks in processes of their own give the tokens and log-probabilities of one process, in every way to ask."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError
from quire.sampling.params import BeamSearchParams
from quire.structured.spec import StructuredOutputs

PROMPTS = [[3 + (7 * i + 5 * j) % 90 for j in range(5 + 11 * i % 40)] for i in range(12)]
SHARED = [11, 12, 13, 14, 15, 16, 17, 18]


def everything(folder: Path, **options: Any) -> list[Any]:
    """A crowd in a small pool: chunks, preemption by swap, prefixes, groups and beams."""
    settings: dict[str, Any] = {"block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 24, "swap_space": 0.001,
                                "preemption_mode": "swap", "num_threads": 1, "device": "cpu", **options}
    params = [SamplingParams(max_tokens=10, seed=i, temperature=[0.0, 1.0, 0.8][i % 3], logprobs=2, n=1 + (i % 4 == 3),
                             ignore_eos=True, prompt_logprobs=1 if i == 5 else None,
                             repetition_penalty=1.2 if i % 5 == 4 else 1.0) for i in range(len(PROMPTS))]
    with LLM(str(folder), skip_tokenizer_init=True, **settings) as llm:
        found = llm.generate([SHARED + prompt for prompt in PROMPTS], params, use_tqdm=False)
        found += llm.beam_search([PROMPTS[0]], BeamSearchParams(beam_width=3, max_tokens=6))
        llm.check()
        preempted = llm.metrics()["preemptions"]
    assert preempted > 0
    return [(output.error, output.prompt_logprobs, [(one.token_ids, one.logprobs, one.cumulative_logprob, one.score)
                                                    for one in output.outputs]) for output in found]


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> list[Any]:
    return everything(tiny_llama)


@pytest.mark.parametrize(("tensor_size", "num_stages", "backend"),
                         [(2, 2, "mp"), (2, 1, "threads"), (3, 1, "threads"), (1, 3, "threads")])
def test_ranks_give_the_bits_of_one(tiny_llama: Path, plain: list[Any], tensor_size: int, num_stages: int,
                                    backend: str) -> None:
    found = everything(tiny_llama, tensor_parallel_size=tensor_size, pipeline_parallel_size=num_stages,
                       distributed_executor_backend=backend)
    assert all(error is None for error, _, _ in found)
    assert found == plain


@pytest.mark.parametrize(("method", "tensor_size", "num_stages"),
                         [("ngram", 2, 1), ("skip_layers", 1, 3), ("skip_layers", 2, 2)])
def test_draft_trees_on_ranks(tiny_llama: Path, plain: list[Any], method: str, tensor_size: int,
                              num_stages: int) -> None:
    """Every rank moves its share of a branch that was kept; stages compute other steps meanwhile."""
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 4, "adaptive": False,
                                   "tree": {"width": 3}}
    if method == "skip_layers":
        speculation["skipped_layers"] = [1]
    found = everything(tiny_llama, speculative_config=speculation, num_kv_blocks=32, tensor_parallel_size=tensor_size,
                       pipeline_parallel_size=num_stages, distributed_executor_backend="threads")
    assert found == plain


def test_kept_branches_on_stages_do_not_leave_the_engine(tiny_llama: Path, tmp_path: Path) -> None:
    """Earlier stages move them with the next plan, and KV for others does not wait for that."""
    with pytest.raises(ConfigError, match="kv_disk does not go with speculative_config tree and pipeline"):
        LLM(str(tiny_llama), skip_tokenizer_init=True, kv_disk=str(tmp_path), pipeline_parallel_size=2,
            speculative_config={"method": "ngram", "tree": {}})


@pytest.mark.parametrize("method", ["ngram", "draft_model", "skip_layers"])
def test_speculation_on_ranks(tiny_llama: Path, plain: list[Any], method: str) -> None:
    speculation: dict[str, Any] = {"method": method, "num_speculative_tokens": 3, "adaptive": False}
    if method == "draft_model":
        speculation |= {"model": str(tiny_llama), "load_format": "dummy"}
    elif method == "skip_layers":
        speculation["skipped_layers"] = [1]
    found = everything(tiny_llama, tensor_parallel_size=2, pipeline_parallel_size=2, swap_space=0.002,
                       distributed_executor_backend="threads", speculative_config=speculation)
    assert found == plain


@pytest.mark.skipif(importlib.util.find_spec("xgrammar") is None, reason="grammars need xgrammar")
def test_structured_outputs_on_ranks(smollm2: str) -> None:
    def answer(**options: Any) -> list[int]:
        with LLM(smollm2, max_model_len=128, num_kv_blocks=16, device="cpu", num_threads=1, **options) as llm:
            params = SamplingParams(temperature=0.0, max_tokens=12,
                                    structured_outputs=StructuredOutputs(regex="[0-9]{2}-[a-z]{3,5}"))
            return list(llm.generate(["A code such as 12-abc:"], params, use_tqdm=False)[0].outputs[0].token_ids)

    assert answer(pipeline_parallel_size=2, distributed_executor_backend="threads") == answer()
