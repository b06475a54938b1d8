"""Every family against transformers: tiny checkpoints of many shapes, whole, in chunks, token by token."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.errors import ModelLoadError
from quire.models.build import build_decoder
from quire.models.decoder import Decoder
from quire.ops.cpu import CpuOps
from quire.ops.interface import Ops
from quire.ops.reference import TorchOps
from tests.checkpoints import (
    EXPERT_NAMES,
    FAMILY_NAMES,
    LONGROPE,
    config_of,
    make_model,
    oracle_greedy,
    oracle_logits,
    weights_of,
)
from tests.layers.test_rotary import VARIANTS
from tests.paged_driver import PagedDriver

TOLERANCE = 1e-4
WINDOWS = {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"], "sliding_window": 24}
QWEN_WINDOWS = {**WINDOWS, "use_sliding_window": True}

LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 0.707,
}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama mqa": ("llama", {"num_key_value_heads": 1}),
    "llama mha tied": ("llama", {"num_key_value_heads": 6, "tie_word_embeddings": True}),
    "llama odd heads": ("llama", {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 30}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama wide heads": ("llama", {"head_dim": 20}),
    "llama one layer": ("llama", {"num_hidden_layers": 1, "vocab_size": 33, "intermediate_size": 17}),
    **{f"llama rope {name}": ("llama", {"rope_parameters": VARIANTS[name]}) for name in VARIANTS},
    "falcon 3": ("llama", {"head_dim": 32, "num_attention_heads": 4, "rope_parameters": {"rope_theta": 1000042.0}}),
    "mistral": ("mistral", {}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "mistral window of one": ("mistral", {"sliding_window": 1}),
    "mistral wide heads": ("mistral", {"head_dim": 12, "num_key_value_heads": 3, "sliding_window": 17}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied mqa": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "qwen2 window": ("qwen2", QWEN_WINDOWS),
    "qwen2 yarn": ("qwen2", {"rope_parameters": VARIANTS["yarn"]}),
    "qwen3": ("qwen3", {}),
    "qwen3 biases": ("qwen3", {"attention_bias": True, "num_attention_heads": 3, "num_key_value_heads": 1}),
    "qwen3 tied window": ("qwen3", {**QWEN_WINDOWS, "tie_word_embeddings": True}),
    "gemma3": ("gemma3", {}),
    "gemma3 untied mqa": ("gemma3", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "gemma3 soft cap": ("gemma3", {"final_logit_softcapping": 1.5}),
    "gemma3 biases": ("gemma3", {"attention_bias": True, "query_pre_attn_scalar": 40}),
    "gemma3 scaled": (
        "gemma3",
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
    ),
    "gemma2": ("gemma2", {}),
    "gemma2 no caps": ("gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2 untied mqa biases": (
        "gemma2",
        {"tie_word_embeddings": False, "num_key_value_heads": 1, "attention_bias": True, "head_dim": 12},
    ),
    "ministral": ("ministral", {}),
    "ministral windows alone": ("ministral", {"sliding_window": 17, "layer_types": None, "head_dim": 12}),
    "ministral yarn": ("ministral", {"rope_parameters": VARIANTS["yarn"], "sliding_window": 17}),
    "ministral3": ("ministral3", {}),
    "ministral3 window tied": (
        "ministral3",
        {"sliding_window": 24, "tie_word_embeddings": True, "num_key_value_heads": 6},
    ),
    "smollm3": ("smollm3", {}),
    "smollm3 no rope at all": ("smollm3", {"no_rope_layers": [0, 0, 0], "tie_word_embeddings": True}),
    "smollm3 interval": ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 2, "attention_bias": True}),
    "smollm3 window": ("smollm3", {"use_sliding_window": True, "sliding_window": 24, "mlp_bias": True}),
    "phi3": ("phi3", {}),
    "phi3 past the trained length": ("phi3", {"original_max_position_embeddings": 32, "num_key_value_heads": 3}),
    "phi3 attention factor": (
        "phi3",
        {"rope_parameters": {**LONGROPE, "attention_factor": 1.3}, "tie_word_embeddings": True},
    ),
    "phi3 factor": (
        "phi3",
        {"rope_parameters": {**LONGROPE, "factor": 3.0}, "original_max_position_embeddings": 32},
    ),
    "phi3 plain": ("phi3", {"rope_parameters": None, "sliding_window": 24, "num_attention_heads": 6}),
    "glm": ("glm", {}),
    "glm whole heads": ("glm", {"partial_rotary_factor": 1.0, "attention_bias": False, "head_dim": 24}),
    "glm4": ("glm4", {}),
    "glm4 whole heads": ("glm4", {"partial_rotary_factor": 1.0, "attention_bias": False, "head_dim": 8}),
    "glm4 tied quarter": ("glm4", {"partial_rotary_factor": 0.25, "tie_word_embeddings": True, "head_dim": 24}),
    "granite": ("granite", {}),
    "granite no factors": (
        "granite",
        {"embedding_multiplier": 1.0, "residual_multiplier": 1.0, "logits_scaling": 1.0, "attention_bias": True},
    ),
    "granite tied": (
        "granite",
        {"residual_multiplier": 2.5, "logits_scaling": 8.0, "tie_word_embeddings": True, "rms_norm_eps": 1e-2},
    ),
    "olmo2": ("olmo2", {}),
    "olmo2 biases tied mqa": (
        "olmo2",
        {"attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 12},
    ),
    "olmo2 mha yarn": ("olmo2", {"num_key_value_heads": 6, "rope_parameters": VARIANTS["yarn"]}),
    "olmo3": ("olmo3", {}),
    "olmo3 scaled on full layers": (
        "olmo3",
        {
            "rope_parameters": {
                "full_attention": {**VARIANTS["yarn"], "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            }
        },
    ),
    "olmo3 five layers": ("olmo3", {"layer_types": None, "num_hidden_layers": 5, "sliding_window": 17}),
    "cohere": ("cohere", {}),
    "cohere no q and k norm": ("cohere", {"use_qk_norm": False, "attention_bias": True, "num_key_value_heads": 6}),
    "cohere odd heads": (
        "cohere",
        {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 30, "tie_word_embeddings": False},
    ),
    "cohere2": ("cohere2", {}),
    "cohere2 five layers": (
        "cohere2",
        {"layer_types": None, "num_hidden_layers": 5, "sliding_window": 17, "tie_word_embeddings": True},
    ),
    "starcoder2": ("starcoder2", {}),
    "starcoder2 no biases": ("starcoder2", {"use_bias": False, "sliding_window": None, "num_key_value_heads": 6}),
    "starcoder2 untied": ("starcoder2", {"tie_word_embeddings": False, "hidden_act": "gelu", "sliding_window": 1}),
    "mixtral": ("mixtral", {}),
    "mixtral of many experts": ("mixtral", {"num_local_experts": 17, "num_experts_per_tok": 5, "sliding_window": 24}),
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe some dense": ("qwen2_moe", {"mlp_only_layers": [1], "norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe every other": ("qwen3_moe", {"decoder_sparse_step": 2, "norm_topk_prob": True, "attention_bias": True}),
    "olmoe": ("olmoe", {}),
    "olmoe renormalised": ("olmoe", {"norm_topk_prob": True, "num_key_value_heads": 6, "num_experts": 64}),
    "gpt_oss": ("gpt_oss", {}),
    "gpt_oss narrow clamp": ("gpt_oss", {"swiglu_limit": 0.5, "num_key_value_heads": 6, "layer_types": None}),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe no groups": (
        "glm4_moe",
        {"n_group": 1, "topk_group": 1, "use_qk_norm": True, "attention_bias": True, "n_shared_experts": 2}
        | {"first_k_dense_replace": 0, "norm_topk_prob": False},
    ),
    "deepseek_v2": ("deepseek_v2", {}),
    "deepseek_v2 groups, queries from a latent": (
        "deepseek_v2",
        {"topk_method": "group_limited_greedy", "n_group": 5, "topk_group": 2, "q_lora_rank": 16}
        | {"routed_scaling_factor": 2.0, "attention_bias": True, "n_shared_experts": 3},
    ),
    "deepseek_v2 yarn": ("deepseek_v2", {"rope_parameters": LATENT_YARN, "first_k_dense_replace": 0}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3 yarn": ("deepseek_v3", {"rope_parameters": LATENT_YARN | {"mscale_all_dim": 1.0}}),
    "deepseek_v3 halves, biases, one group": (
        "deepseek_v3",
        {"rope_interleave": False, "attention_bias": True, "n_group": 1, "topk_group": 1, "q_lora_rank": None}
        | {"num_attention_heads": 3, "num_key_value_heads": 3, "kv_lora_rank": 40, "v_head_dim": 16},
    ),
    "opt": ("opt", {}),
    "opt 350m": ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 20}),
    "opt no biases": ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    "opt no final norm": ("opt", {"_remove_final_layer_norm": True, "activation_function": "gelu"}),
    "opt untied odd heads": ("opt", {"tie_word_embeddings": False, "num_attention_heads": 3}),
    "gpt2": ("gpt2", {}),
    "gpt2 scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True, "n_inner": 50}),
    "gpt2 unscaled untied": (
        "gpt2",
        {"scale_attn_weights": False, "tie_word_embeddings": False, "n_head": 3},
    ),
    "gpt2 relu": ("gpt2", {"activation_function": "relu"}),
}


def tokens_of(length: int, vocab: int, seed: int = 1) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


OPS: dict[str, Callable[[], Ops]] = {"torch": TorchOps, "cpu": CpuOps}


def decoder_of(model: Any, ops: str = "cpu") -> Decoder:
    return build_decoder(config_of(model), weights_of(model), OPS[ops]())


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_are_those_of_transformers(shape: str) -> None:
    """The kernels in every way; the reference, which they are held against elsewhere, token by token for one shape of
    a family."""
    family, overrides = SHAPES[shape]
    model = make_model(family, **overrides)
    tokens = tokens_of(48, model.config.vocab_size)
    expected = oracle_logits(model, tokens)
    for ops in OPS:
        driver = PagedDriver(decoder_of(model, ops), block_size=8, num_blocks=40)
        one_by_one = [[2] + [1] * 46] if ops == "cpu" or shape == family else []
        for chunks in ([48], [7, 1, 30, 10], *one_by_one):
            got = driver.run(0, tokens, chunks)
            assert (got - expected).abs().max() < TOLERANCE, f"{ops} in chunks {chunks}"
            driver.release(0)


@pytest.mark.parametrize("family", EXPERT_NAMES)
def test_experts_may_be_stored_in_one_tensor(family: str) -> None:
    model = make_model(family)
    tokens = tokens_of(30, 97)
    one_by_one = PagedDriver(decoder_of(model)).run(0, tokens, [30])
    merged = build_decoder(config_of(model), weights_of(model, merged=True), CpuOps())
    assert torch.equal(PagedDriver(merged).run(0, tokens, [30]), one_by_one)


@pytest.mark.parametrize("family", EXPERT_NAMES)
def test_a_checkpoint_with_other_experts_is_refused_by_the_tensors_name(family: str) -> None:
    model = make_model(family)
    stored = weights_of(model)
    router = next(name for name, _ in stored if name.endswith(("gate.weight", "router.weight")))
    wrong = [(name, tensor[:-1] if name == router else tensor) for name, tensor in stored]
    with pytest.raises(ModelLoadError, match=router):
        build_decoder(config_of(model), wrong, CpuOps())
    expert = next(name for name, _ in stored if ".experts." in name)
    with pytest.raises(ModelLoadError, match=expert):
        build_decoder(config_of(model), [item for item in stored if item[0] != expert], CpuOps())
    merged = weights_of(model, merged=True)
    name = next(name for name, tensor in merged if ".experts." in name and tensor.dim() == 3)
    fewer = [(each, tensor[:-1] if each == name else tensor) for each, tensor in merged]
    with pytest.raises(ModelLoadError, match=name):
        build_decoder(config_of(model), fewer, CpuOps())
    with pytest.raises(ModelLoadError, match=f"missing: {name};"):
        build_decoder(config_of(model), [item for item in merged if item[0] != name], CpuOps())


@pytest.mark.parametrize("shape", FAMILY_NAMES)
def test_sequences_of_one_step_do_not_see_each_other(shape: str) -> None:
    family, overrides = SHAPES[shape]
    model = make_model(family, **overrides)
    decoder = decoder_of(model)
    prompts = {seq: tokens_of(length, 97, seq) for seq, length in enumerate([40, 1, 17, 33])}
    expected = {seq: oracle_logits(model, tokens) for seq, tokens in prompts.items()}
    driver = PagedDriver(decoder, block_size=4, num_blocks=64)
    done = dict.fromkeys(prompts, 0)
    draw = random.Random(5)
    while any(done[seq] < len(prompts[seq]) for seq in prompts):
        sizes = {seq: draw.randint(0, min(12, len(prompts[seq]) - done[seq])) for seq in prompts}
        step = {seq: prompts[seq][done[seq] : done[seq] + size] for seq, size in sizes.items() if size}
        if not step:
            continue
        for seq, logits in driver.step(step).items():
            end = done[seq] + len(step[seq])
            assert (logits - expected[seq][done[seq] : end]).abs().max() < TOLERANCE
            done[seq] = end


@pytest.mark.parametrize("shape", [{"qwen2": "qwen2 window", "opt": "opt 350m"}.get(f, f) for f in FAMILY_NAMES])
def test_greedy_tokens_past_the_window_are_those_of_transformers(shape: str) -> None:
    family, overrides = SHAPES[shape]
    model = make_model(family, seed=3, **overrides)
    prompt = tokens_of(20, 97, seed=9)
    driver = PagedDriver(decoder_of(model), block_size=4)
    token = int(driver.step({0: prompt})[0][-1].argmax())
    got = [token]
    while len(got) < 30:
        token = int(driver.step({0: [token]})[0][-1].argmax())
        got.append(token)
    assert got == oracle_greedy(model, prompt, 30)


def test_dynamic_scaling_goes_on_past_the_trained_length_as_transformers_decodes() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 10_000.0}
    model = make_model("llama", seed=3, max_position_embeddings=32, rope_parameters=scaling)
    decoder = decoder_of(model)
    assert decoder.spec.max_positions == 80
    tokens = tokens_of(80, 97, seed=9)
    driver = PagedDriver(decoder, block_size=4)
    driver.step({0: tokens[:20]})
    with torch.no_grad():
        cache = model(torch.tensor([tokens[:20]]), use_cache=True).past_key_values
        for token in tokens[20:]:
            expected = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True).logits[0]
            assert (driver.step({0: [token]})[0] - expected).abs().max() < TOLERANCE


def test_gemma3_attention_soft_cap_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads this field of Gemma 3, then leaves it out of the call that would apply it."""
    from transformers.models.gemma3 import modeling_gemma3

    plain = modeling_gemma3.eager_attention_forward
    model = make_model("gemma3", attn_logit_softcapping=0.7)
    tokens = tokens_of(40, 97)
    uncapped = oracle_logits(model, tokens)
    monkeypatch.setattr(
        modeling_gemma3,
        "eager_attention_forward",
        lambda *args, **kwargs: plain(*args, softcap=0.7, **kwargs),
    )
    expected = oracle_logits(model, tokens)
    assert (expected - uncapped).abs().max() > 0.01
    assert (PagedDriver(decoder_of(model)).run(0, tokens, [40]) - expected).abs().max() < TOLERANCE


def test_weights_in_half_precision_are_computed_in_float32() -> None:
    model = make_model("llama")
    weights = [(name, tensor.to(torch.bfloat16)) for name, tensor in weights_of(model)]
    model.load_state_dict({name: tensor.float() for name, tensor in weights})
    tokens = tokens_of(30, 97)
    got = PagedDriver(build_decoder(config_of(model), weights, TorchOps())).run(0, tokens, [30])
    assert got.dtype == torch.float32
    assert (got - oracle_logits(model, tokens)).abs().max() < TOLERANCE


OLD_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 1000.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "qwen2": {
        "rope_theta": 1e6,
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        "use_sliding_window": False,
        "sliding_window": 16,
        "max_window_layers": 1,
    },
    "qwen3": {"rope_theta": 1e6, "rope_scaling": None, "use_sliding_window": True, "sliding_window": 16}
    | {"max_window_layers": 1},
    "gemma3": {
        "rope_theta": 1e6,
        "rope_local_base_freq": 500.0,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window_pattern": 2,
        "sliding_window": 16,
    },
    "gemma2": {"rope_theta": 500.0, "sliding_window": 16},
    "smollm3": {"rope_theta": 5e6, "no_rope_layers": None, "no_rope_layer_interval": 2},
    "phi3": {
        "rope_theta": 500.0,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0, 2.0, 4.0, 8.0]},
        "partial_rotary_factor": 0.5,
        "original_max_position_embeddings": 32,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "glm": {"rope_theta": 500.0, "partial_rotary_factor": 0.75},
    "glm4": {"rope_theta": 500.0, "partial_rotary_factor": 0.75},
    "granite": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "starcoder2": {"rope_theta": 500.0, "sliding_window": 16},
    "cohere": {"rope_theta": 500.0, "model_max_length": 512},
    "cohere2": {"rope_theta": 500.0, "sliding_window": 16, "sliding_window_pattern": 2},
    "olmo2": {"rope_theta": 500.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
    "olmo3": {"rope_theta": 5e5, "rope_scaling": VARIANTS["yarn"], "sliding_window": 16},
}


@pytest.mark.parametrize("family", OLD_CONFIGS)
def test_a_config_of_transformers_4_means_the_same(family: str) -> None:
    old = OLD_CONFIGS[family]
    windowed = family not in ("llama", "phi3", "glm", "glm4", "granite", "starcoder2", "olmo2", "cohere")
    overrides = {**old, "rope_parameters": None} | ({"layer_types": None} if windowed else {})
    model = make_model(family, **overrides)
    config = config_of(model)
    for field in ("rope_parameters", "layer_types", "head_dim", "_sliding_window_pattern", "dtype"):
        if not (field == "head_dim" and family in ("qwen3", "gemma2", "gemma3", "glm", "glm4")):
            config.pop(field, None)
    config = {**config, **old, "torch_dtype": "float32", "transformers_version": "4.40.0"}
    tokens = tokens_of(60, 97)
    decoder = build_decoder(config, weights_of(model), TorchOps())
    assert (PagedDriver(decoder).run(0, tokens, [60]) - oracle_logits(model, tokens)).abs().max() < TOLERANCE
