"""Layers with a sliding window get the blocks that windows need and the others the rest; the tokens are the same."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.config import EngineConfig
from quire.models.registry import read_spec
from quire.worker.memory import PoolSize, size_pool, step_tokens_of
from tests.checkpoints import make_checkpoint

GEMMA_1B: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 262144, "hidden_size": 1152,
    "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4, "num_key_value_heads": 1,
    "head_dim": 256, "sliding_window": 512, "sliding_window_pattern": 6, "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
    "hidden_activation": "gelu_pytorch_tanh",
}


def pool_of(max_num_seqs: int = 16, **options: Any) -> PoolSize:
    config = EngineConfig.create(model="gemma", kv_cache_memory="4GiB", **options)
    return size_pool(read_spec(GEMMA_1B), config.cache, None, max_num_seqs, free=16 << 30,
                     step_tokens=step_tokens_of(config))


def test_more_than_twice_the_tokens_fit_into_the_same_memory() -> None:
    equal, sized = pool_of(enable_chunked_prefill=False), pool_of()
    assert equal.window_blocks is None and sized.window_blocks is not None
    assert sized.num_bytes <= 4 << 30
    assert sized.num_bytes > 0.99 * equal.num_bytes
    assert sized.num_blocks > 2.4 * equal.num_blocks
    assert sized.window_blocks >= 16 * (512 // 16 + 2) + 512 // 16
    assert sized.window_blocks >= sized.num_blocks // 4


def test_where_many_run_windows_get_what_all_of_them_need() -> None:
    crowded = pool_of(max_num_seqs=256)
    assert crowded.window_blocks is None or crowded.window_blocks >= 256 * 34


@pytest.mark.parametrize("options", [{"num_kv_blocks": 100}, {"enable_chunked_prefill": False}])
def test_groups_are_equal_where_blocks_were_asked_for_or_steps_hold_whole_prompts(options: dict[str, Any]) -> None:
    if "num_kv_blocks" in options:
        config = EngineConfig.create(model="gemma", **options)
        pool = size_pool(read_spec(GEMMA_1B), config.cache, None, 4, free=16 << 30, step_tokens=512)
        assert pool.num_blocks == 100
    else:
        pool = pool_of(**options)
    assert pool.window_blocks is None
    assert pool.num_bytes == pool.num_blocks * pool.bytes_per_block


def test_the_same_tokens_come_from_groups_of_unequal_size_also_under_pressure(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gemma3")
    dice = random.Random(5)
    prompts = [[dice.randrange(3, 97) for _ in range(dice.randrange(20, 150))] for _ in range(10)]
    prompts += [prompts[0] + [7], prompts[1][:60]]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=30, ignore_eos=True, n=2 if i % 5 == 4 else 1)
              for i in range(len(prompts))]
    found = []
    for memory in ({"num_kv_blocks": 800}, {"kv_cache_memory": "220KiB"}):
        with LLM(str(tmp_path), skip_tokenizer_init=True, block_size=4, max_num_seqs=4, max_num_batched_tokens=16,
                 max_model_len=190, **memory) as llm:
            found.append([[each.token_ids for each in output.outputs] for output in llm.generate(prompts, params)])
            llm.check()
            pools = llm._core.scheduler.cache.pools
    assert pools[1].num_blocks < pools[0].num_blocks
    assert found[0] == found[1]
