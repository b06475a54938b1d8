"""Experts that a step reads are counted, not computed."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from quire import LLM
from quire.bench.gpu import experts
from quire.bench.gpu.cases import distinct_experts
from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from tests.checkpoints import make_checkpoint


def requests(count: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    return [Request(f"{count}-{i}", [3 + i, 5, 7 * i + 1], params, seed=i, arrival_time=0.0) for i in range(count)]


def test_rows_and_experts_of_every_step_are_counted(tmp_path: Path) -> None:
    config = make_checkpoint(tmp_path, "qwen3_moe").config
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, max_model_len=64)
    core, load = llm._core, llm._core.executor._worker._expert_load
    top_k, total = config.num_experts_per_tok, 0
    for count in (1, 4):
        found = {each.rows: each for each in experts.spread(core, load, requests(count), top_k)}
        assert (found[3 * count].steps, found[count].steps) == (1, 4)
        assert found[1].distinct == top_k if count == 1 else top_k < found[4].distinct <= config.num_experts
        assert found[count].expected == pytest.approx(distinct_experts(config.num_experts, top_k, count))
        total += top_k * 7 * count * len(load.layers)
        assert int(load.counts.sum()) == total
    line = experts.line_of("b", "tiny", list(found.values()))
    assert line["steps"] == 5 and "if tokens spread evenly" in experts.text(line)


def test_tokens_of_a_prompt_spread_evenly_over_the_experts_of_random_weights(tmp_path: Path) -> None:
    """With embeddings as small as other weights, 96 tokens of a prompt went to 27 of 64 experts."""
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 512,
              "hidden_size": 128, "num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2,
              "head_dim": 32, "intermediate_size": 64, "moe_intermediate_size": 32, "num_experts": 64,
              "num_experts_per_tok": 4, "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
              "max_position_embeddings": 256, "tie_word_embeddings": False,
              "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), load_format="dummy", skip_tokenizer_init=True, max_model_len=128, num_kv_blocks=16)
    rng = random.Random(0)
    asked = Request("one", [rng.randrange(512) for _ in range(96)],
                    SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True), seed=0, arrival_time=0.0)
    (found,) = experts.spread(llm._core, llm._core.executor._worker._expert_load, [asked], 4)
    assert found.rows == 96 and found.distinct >= 0.97 * found.expected
