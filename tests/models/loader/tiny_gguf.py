"""Writes tiny GGUF models for tests: a random transformers model, laid out as llama.cpp's converter does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quire.bench.checkpoints.gguf_blocks import ENCODERS

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", **SMALL, "rms_norm_eps": 1e-5, "rope_theta": 50000.0},
    "qwen2": {"model_type": "qwen2", **SMALL, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e6},
    "gemma3": {
        "model_type": "gemma3_text",
        **SMALL,
        "num_hidden_layers": 7,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "tie_word_embeddings": True,
    },
    "gemma2": {
        "model_type": "gemma2",
        **SMALL,
        "num_hidden_layers": 3,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "sliding_window": 8,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 5.0,
        "tie_word_embeddings": True,
    },
    "smollm3": {"model_type": "smollm3", **SMALL, "pad_token_id": 0, "num_hidden_layers": 5, "rope_theta": 1e6},
    "phi3": {
        "model_type": "phi3",
        **SMALL,
        "sliding_window": 8,
        "original_max_position_embeddings": 64,
        "pad_token_id": 0,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.5, 1.7],
            "long_factor": [1.0, 1.5, 2.0, 4.0, 8.0, 16.0],
        },
    },
    "chatglm": {"model_type": "glm", **SMALL, "pad_token_id": 0, "partial_rotary_factor": 0.5},
    "glm4": {"model_type": "glm4", **SMALL, "pad_token_id": 0, "partial_rotary_factor": 0.5},
    "granite": {
        "model_type": "granite",
        **SMALL,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0625,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "olmo2": {"model_type": "olmo2", **SMALL, "rms_norm_eps": 1e-6, "rope_theta": 5e5},
    "command-r": {
        "model_type": "cohere",
        **SMALL,
        "use_qk_norm": True,
        "logit_scale": 0.25,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    "cohere2": {
        "model_type": "cohere2",
        **SMALL,
        "num_hidden_layers": 5,
        "sliding_window": 8,
        "rope_theta": 5e5,
        "tie_word_embeddings": True,
    },
    "mistral3": {
        "model_type": "ministral3",
        **SMALL,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 4.0,
            "original_max_position_embeddings": 8,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.25,
        },
        "pad_token_id": 0,
    },
    "starcoder2": {"model_type": "starcoder2", **SMALL, "sliding_window": 8, "tie_word_embeddings": True},
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 64,
        "n_head": 4,
        "n_layer": 2,
        "n_positions": 128,
        "vocab_size": 96,
        "n_inner": 256,
    },
}
PERMUTED = ("llama", "smollm3", "granite", "mistral3")
"""Whose converter makes the rotary pairs of q and k interleaved."""
ARCHS = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items() if name in CONFIGS}


def tiny_model(arch: str, **changes: Any) -> PreTrainedModel:
    """A random model in which a mistake shows: norms and biases are not the zeros and ones of a fresh one, and matrices
    keep the length of rows (a fresh one's are so small that attention is even, whatever the rotation)."""
    fields = {**CONFIGS[arch], **changes}
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.3 / parameter.shape[-1] ** 0.5)
            else:
                parameter.normal_(0.0 if name.endswith("bias") or arch.startswith("gemma") else 1.0, 0.2)
    return model


def permute_for_llama_cpp(weight: torch.Tensor, heads: int) -> torch.Tensor:
    return (
        weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def converted(arch: str, model: PreTrainedModel, name: str, weight: torch.Tensor) -> torch.Tensor:
    """What llama.cpp's converter does to a tensor."""
    if arch in PERMUTED and ".q_proj." in name:
        return permute_for_llama_cpp(weight, model.config.num_attention_heads)
    if arch in PERMUTED and ".k_proj." in name:
        return permute_for_llama_cpp(weight, model.config.num_key_value_heads)
    if arch in ("gemma2", "gemma3") and name.endswith("norm.weight"):
        return weight + 1
    if arch == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
        return weight.t()
    return weight


def tensors_of(arch: str, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Those of a chatglm file are as the first checkpoints of the family had them: q, k and v in one."""
    found = dict(model.state_dict())
    for name in [each for each in found if arch == "chatglm" and ".q_proj." in each]:
        parts = [found.pop(name.replace(".q_proj.", f".{part}_proj.")) for part in "qkv"]
        found[name.replace(".q_proj.", ".qkv_proj.")] = torch.cat(parts)
    return found


def _write_shape(writer: gguf.GGUFWriter, arch: str, config: Any) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_attention_heads)
    if arch == "gpt2":
        writer.add_feed_forward_length(config.n_inner)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
        return
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    if arch == "starcoder2":
        writer.add_layer_norm_eps(config.norm_epsilon)
    elif arch in ("command-r", "cohere2"):
        writer.add_layer_norm_eps(config.layer_norm_eps)
        writer.add_logit_scale(config.logit_scale)
    else:
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if arch in ("gemma2", "gemma3", "phi3", "starcoder2", "cohere2"):
        writer.add_sliding_window(config.sliding_window or 0)
    if arch == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if arch == "phi3":
        _write_longrope(writer, config)
    if arch == "mistral3":
        _write_yarn(writer, rope)


def _write_yarn(writer: gguf.GGUFWriter, rope: dict[str, Any]) -> None:
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
    writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _write_longrope(writer: gguf.GGUFWriter, config: Any) -> None:
    trained = config.original_max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(trained)
    if config.rope_parameters["rope_type"] != "longrope":
        return
    scale = config.max_position_embeddings / trained
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(trained)))
    for kind in ("short", "long"):
        factors = np.array(config.rope_parameters[f"{kind}_factor"], np.float32)
        writer.add_tensor(f"rope_factors_{kind}.weight", factors)


def write_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    letters = [chr(0x100 + i) for i in range(size - 3)]
    writer.add_token_list(["<s>", "</s>", *letters, letters[0] + letters[1]])
    writer.add_token_types([3, 3, *([1] * (size - 2))])
    writer.add_token_merges([f"{letters[0]} {letters[1]}"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def quantized(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """Rows of blocks. K-quants are not among what the gguf package writes."""
    if not kind.name.endswith("_K"):
        return gguf.quants.quantize(values, kind)
    blocks = torch.from_numpy(values).reshape(-1, gguf.GGML_QUANT_SIZES[kind][0])
    return ENCODERS[kind.name](blocks).reshape(len(values), -1).numpy()


def write_gguf(
    path: Path,
    arch: str,
    model: PreTrainedModel,
    quant: str = "F32",
    extra_tensors: dict[str, np.ndarray] | None = None,
    extra: dict[str, Any] | None = None,
    blocks: dict[str, np.ndarray] | None = None,
) -> Path:
    """`model` as a GGUF file; matrices are stored as `quant` (in these `blocks`, by their names), the rest as F32."""
    writer = gguf.GGUFWriter(path, arch)
    _write_shape(writer, arch, model.config)
    write_vocabulary(writer, model.config.vocab_size)
    for key, value in (extra or {}).items():
        add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
        add(key, value)
    names = gguf.get_tensor_name_map(ARCHS[arch], model.config.num_hidden_layers)
    kind = gguf.GGMLQuantizationType[quant]
    for name, weight in tensors_of(arch, model).items():
        if name == "lm_head.weight" and model.config.tie_word_embeddings:
            continue
        values = converted(arch, model, name, weight).float().contiguous().numpy()
        stored = values
        if values.ndim == 2:
            stored = quantized(values, kind) if blocks is None else blocks[name]
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            stored,
            raw_dtype=kind if values.ndim == 2 else None,
        )
    for name, values in (extra_tensors or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
