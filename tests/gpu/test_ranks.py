"""Ranks that share a model on GPUs. Where there are fewer GPUs than ranks, processes share one.

Without a GPU the same engines run on the CPU: that the tests themselves are sound.
"""

from __future__ import annotations

import json
import os
import random
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from quire import LLM, BeamSearchParams, SamplingParams
from quire.errors import ConfigError, QuireError
from tests.gpu.models import config_of, weights_of

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
on_gpu = pytest.mark.skipif(not GPU, reason="needs a GPU")
NINE_HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144, "head_dim": 16}
SMALL = {"block_size": 8, "num_kv_blocks": 64, "max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 200}
PROMPTS = [[random.Random(i).randrange(3, 97) for _ in range(3 + 17 * i % 61)] for i in range(9)]
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.0, "prompt_logprobs": 2},
    {"temperature": 0.8, "logprobs": 3},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "n": 2},
    {"temperature": 0.5, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "logit_bias": {5: 3.0}},
    {"temperature": 0.0, "logprobs": 1},
]


def checkpoint(folder: Path, family: str, **changes: Any) -> Path:
    config = {**config_of(family), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: weight.contiguous() for name, weight in weights_of(config)}, folder / "model.safetensors")
    return folder


def engine(folder: Path, **options: Any) -> LLM:
    if not GPU:
        options = {name: value for name, value in options.items() if name not in ("dtype", "deterministic")}
    return LLM(str(folder), skip_tokenizer_init=True, device=DEVICE, **{**SMALL, **options})


def answers(llm: LLM) -> list[Any]:
    """Everything that requests of several kinds are answered with."""
    params = [SamplingParams(seed=50 + i, max_tokens=12, ignore_eos=True, **KINDS[i % len(KINDS)])
              for i in range(len(PROMPTS))]
    found = llm.generate(PROMPTS, params, use_tqdm=False)
    beams = llm.beam_search(PROMPTS[:2], BeamSearchParams(beam_width=3, max_tokens=5))
    return [(one.prompt_logprobs, [(each.token_ids, each.logprobs, each.cumulative_logprob) for each in one.outputs])
            for one in (*found, *beams)]


CASES = [
    ("llama", {}, {"dtype": "bfloat16"}, [(2, 1), (1, 2)]),
    ("qwen3", {}, {"dtype": "float32", "enforce_eager": True}, [(2, 1)]),
    ("gemma3", {}, {"dtype": "bfloat16"}, [(2, 2)]),
    ("gpt2", {}, {"dtype": "float32"}, [(3, 1)]),
    ("llama", NINE_HEADS, {"dtype": "bfloat16"}, [(2, 1)]),
    ("olmo2", {}, {"dtype": "bfloat16"}, [(2, 1)]),
    ("qwen3_moe", {}, {"dtype": "bfloat16"}, [(2, 1)]),
]


@pytest.mark.parametrize(("family", "changes", "options", "sizes"), CASES if GPU else CASES[:1])
def test_deterministic_mode_gives_the_bits_of_one_rank(
    tmp_path: Path, family: str, changes: dict[str, Any], options: dict[str, Any], sizes: list[tuple[int, int]]
) -> None:
    checkpoint(tmp_path, family, **changes)
    with engine(tmp_path, deterministic=True, **options) as llm:
        want = answers(llm)
    for tensor, stages in sizes:
        with engine(tmp_path, deterministic=True, tensor_parallel_size=tensor, pipeline_parallel_size=stages,
                    **options) as llm:
            assert answers(llm) == want, (tensor, stages)


@on_gpu
@pytest.mark.parametrize("sizes", [(2, 1), (2, 2)])
def test_the_fast_mode_draws_what_one_rank_draws_unless_two_were_as_likely(
    tmp_path: Path, sizes: tuple[int, int]
) -> None:
    checkpoint(tmp_path, "llama")
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=2)
    found = []
    for tensor, stages in ((1, 1), sizes):
        with engine(tmp_path, dtype="float32", tensor_parallel_size=tensor, pipeline_parallel_size=stages) as llm:
            found.append([one.outputs[0] for one in llm.generate(PROMPTS, greedy, use_tqdm=False)])
    for want, got in zip(*found, strict=True):
        for place, (mine, other) in enumerate(zip(got.token_ids, want.token_ids, strict=True)):
            if mine != other:
                best, second = sorted((each.logprob for each in want.logprobs[place].values()), reverse=True)[:2]
                assert best - second < 1e-3
                break


@on_gpu
@torch.inference_mode()
def test_nccl_sums_inside_a_captured_graph() -> None:
    """A group of one, which is all that NCCL forms on one GPU."""
    from quire.parallel.nccl import NcclSum

    add = NcclSum(0, 1, torch.cuda.nccl.unique_id())
    part = torch.ones(1 << 20, device="cuda", dtype=torch.bfloat16)
    add(part)
    torch.cuda.synchronize()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        part.mul_(2)
        add(part)
        graph.capture_end()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    assert bool((part == 8).all())


@on_gpu
def test_n_gram_drafts_and_steps_in_flight(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    prompts = [prompt * 3 for prompt in PROMPTS[:5]]
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    said = {"method": "ngram", "num_speculative_tokens": 3, "adaptive": False}
    found = []
    for sizes in ({}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        with engine(tmp_path, dtype="bfloat16", deterministic=True, speculative_config=said, **sizes) as llm:
            found.append([one.outputs[0].token_ids for one in llm.generate(prompts, greedy, use_tqdm=False)])
    assert found[1] == found[0] == found[2]


@on_gpu
def test_ranks_on_one_gpu_share_its_memory(tmp_path: Path) -> None:
    """The pool is sized from what is left for all of them; the engine starts and answers."""
    checkpoint(tmp_path, "llama")
    sizes = {**SMALL, "num_kv_blocks": None, "gpu_memory_utilization": 0.4}
    with engine(tmp_path, dtype="bfloat16", tensor_parallel_size=2, **sizes) as llm:
        free, total = torch.cuda.mem_get_info()
        assert 0.3 * total < total - free < 0.45 * total
        assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True), use_tqdm=False)


@on_gpu
def test_a_killed_rank_ends_the_engine_with_its_name(tmp_path: Path) -> None:
    checkpoint(tmp_path, "llama")
    llm = engine(tmp_path, dtype="bfloat16", tensor_parallel_size=2)
    try:
        executor = llm._core.executor
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=2), use_tqdm=False)
        os.kill(executor.ranks.handles[1].pid, signal.SIGKILL)  # type: ignore[attr-defined]
        with suppress(QuireError):
            while executor.failure is None:
                llm.generate(PROMPTS[:1], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)
        assert "rank 1 of 2" in str(executor.failure)
    finally:
        llm.close()


@on_gpu
@pytest.mark.parametrize(("options", "field"), [
    ({"distributed_executor_backend": "threads"}, "distributed_executor_backend"),
    ({"speculative_config": {"method": "skip_layers", "num_speculative_tokens": 2}}, "speculative_config"),
    ({"tensor_parallel_size": 7}, "tensor_parallel_size"),
    ({"rank_exchange": "nccl", "deterministic": True}, "rank_exchange"),
])
def test_what_ranks_on_gpus_cannot_do_is_refused(tmp_path: Path, options: dict[str, Any], field: str) -> None:
    checkpoint(tmp_path, "llama")
    with pytest.raises(ConfigError) as refused:
        engine(tmp_path, **{"tensor_parallel_size": 2, **options})
    assert refused.value.field == field
