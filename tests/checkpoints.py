"""Tiny random checkpoints of every family, made with transformers, which is also their oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""A config that every Llama-like family takes; GQA with three query heads to a key head."""

_SMALL_GPT2: dict[str, Any] = {
    "vocab_size": 97,
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_OPT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "ffn_dim": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 48,
}
_ALTERNATING: dict[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 24,
}
_FACTORS: dict[str, Any] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.22,
    "logits_scaling": 2.0,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
}
"""For heads of 16, of which 12 features turn."""
GROWING: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16,
    "max_position_embeddings": 256,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}
_EXPERTS: dict[str, Any] = {"num_experts_per_tok": 3, "moe_intermediate_size": 32}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 10,
}
_BASE: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", SMALL),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**SMALL, "sliding_window": 24}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SMALL),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**SMALL, "head_dim": 16}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **SMALL,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "tie_word_embeddings": True,
        }
        | _ALTERNATING,
    ),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**SMALL, "head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16, "tie_word_embeddings": True}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "ministral": ("MinistralConfig", "MinistralForCausalLM", {**SMALL, **_ALTERNATING, "head_dim": 16}),
    "ministral3": (
        "Ministral3Config",
        "Ministral3ForCausalLM",
        {**SMALL, "head_dim": 16, "rope_parameters": GROWING},
    ),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**SMALL, "no_rope_layers": [1, 0, 1]}),
    "phi3": (
        "Phi3Config",
        "Phi3ForCausalLM",
        {**SMALL, "num_attention_heads": 3, "num_key_value_heads": 1, "rope_parameters": LONGROPE}
        | {"original_max_position_embeddings": 256},
    ),
    "glm": ("GlmConfig", "GlmForCausalLM", {**SMALL, "head_dim": 16}),
    "glm4": ("Glm4Config", "Glm4ForCausalLM", {**SMALL, "head_dim": 16}),
    "granite": ("GraniteConfig", "GraniteForCausalLM", {**SMALL, **_FACTORS}),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", SMALL),
    "olmo3": ("Olmo3Config", "Olmo3ForCausalLM", {**SMALL, **_ALTERNATING}),
    "cohere": (
        "CohereConfig",
        "CohereForCausalLM",
        {**SMALL, "use_qk_norm": True, "logit_scale": 0.5, "tie_word_embeddings": True},
    ),
    "cohere2": ("Cohere2Config", "Cohere2ForCausalLM", {**SMALL, **_ALTERNATING, "logit_scale": 0.5}),
    "starcoder2": (
        "Starcoder2Config",
        "Starcoder2ForCausalLM",
        {**SMALL, "sliding_window": 24, "tie_word_embeddings": True},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        "Qwen2MoeForCausalLM",
        {**SMALL, **_EXPERTS, "num_experts": 10, "shared_expert_intermediate_size": 96},
    ),
    "qwen3_moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**SMALL, **_EXPERTS, "num_experts": 12, "head_dim": 16}),
    "olmoe": ("OlmoeConfig", "OlmoeForCausalLM", {**SMALL, "num_experts": 9, "num_experts_per_tok": 3}),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**SMALL, **_ALTERNATING, "num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 16},
    ),
    "glm4_moe": (
        "Glm4MoeConfig",
        "Glm4MoeForCausalLM",
        {**SMALL, **_EXPERTS, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "head_dim": 16}
        | {"first_k_dense_replace": 1, "routed_scaling_factor": 1.5, "n_shared_experts": 3},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**SMALL, **_EXPERTS, **_LATENT, "n_routed_experts": 10, "first_k_dense_replace": 1, "q_lora_rank": None}
        | {"n_shared_experts": 3},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**SMALL, **_EXPERTS, **_LATENT, "n_routed_experts": 12, "n_group": 4, "topk_group": 2, "q_lora_rank": 20}
        | {"first_k_dense_replace": 1, "num_mtp_layers": 0, "n_shared_experts": 3},
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", _SMALL_OPT),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _SMALL_GPT2),
}
FAMILY_NAMES = tuple(_BASE)
EXPERT_NAMES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3")


def classes_of(family: str) -> tuple[str, str]:
    """What transformers calls the family's config and its model."""
    config_class, model_class, _ = _BASE[family]
    return config_class, model_class


def make_model(family: str, seed: int = 0, **overrides: Any) -> Any:
    """A tiny random transformers model of a family, in fp32 with eager attention, ready to be an oracle.

    Norms and biases are random too: as transformers initialises them, half the mistakes would not show.
    """
    import transformers

    config_class, model_class, base = _BASE[family]
    config = getattr(transformers, config_class)(**{**base, **overrides})
    config._attn_implementation = "eager"
    model = getattr(transformers, model_class)(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 3:  # experts; gpt-oss stores [experts, in, out]
                fan_in = weight.shape[1 if family == "gpt_oss" else 2]
                weight.normal_(0.0, 1.3 / fan_in**0.5, generator=generator)
            elif weight.dim() == 2 and not name.endswith("bias"):
                weight.normal_(0.0, 1.3 / weight.shape[1] ** 0.5, generator=generator)
            elif name.endswith(("bias", "sinks")) or family.startswith("gemma"):
                weight.normal_(0.0, 0.3, generator=generator)
            else:
                weight.normal_(1.0, 0.3, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3, generator=generator)
    return model


def make_checkpoint(
    folder: Path, family: str = "llama", *, seed: int = 0, shards: int = 1, **overrides: Any
) -> Any:
    """Save such a model as config.json and one or several safetensors files; returns the model."""
    model = make_model(family, seed, **overrides)
    total = sum(weight.numel() * 4 for weight in model.parameters())
    model.save_pretrained(folder, max_shard_size=total if shards == 1 else -(-total // shards))
    return model


def config_of(model: Any) -> dict[str, Any]:
    """The config.json that transformers would write for a model."""
    config: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    config["architectures"] = [type(model).__name__]
    return config


def weights_of(model: Any, merged: bool = False) -> list[tuple[str, torch.Tensor]]:
    """The tensors that a checkpoint of the model holds, a tied one once; experts one by one, or `merged`."""
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    found = [(name, tensor.detach()) for name, tensor in model.state_dict().items() if name not in tied]
    if merged or type(model).__name__ == "GptOssForCausalLM":  # which are stored merged
        return found
    return [part for name, tensor in found for part in _by_expert(name, tensor, type(model).__name__)]


def _by_expert(name: str, tensor: torch.Tensor, architecture: str) -> list[tuple[str, torch.Tensor]]:
    mixtral = architecture == "MixtralForCausalLM"
    if mixtral:
        name = name.replace(".mlp.", ".block_sparse_moe.")
    if ".experts." not in name or tensor.dim() != 3:
        return [(name, tensor)]
    stem, _, part = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if part == "gate_up_proj" else ("down_proj",)
    spelled = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"} if mixtral else {}
    return [
        (f"{stem}.{number}.{spelled.get(each, each)}.weight", piece)
        for number, expert in enumerate(tensor)
        for each, piece in zip(parts, expert.chunk(len(parts)), strict=True)
    ]


def oracle_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    """[n, vocab] of one whole pass."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def oracle_greedy(model: Any, prompt: list[int], count: int) -> list[int]:
    """The next tokens by argmax, each from a whole pass over all before it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(oracle_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]
