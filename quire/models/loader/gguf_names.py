"""What a GGUF file calls things, and what Hugging Face calls them: tensor names, layouts and the config."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.loader.gguf import GgufFile, GgufTensor, float_value, int_value, str_value
from quire.models.refused import reason

if TYPE_CHECKING:  # naming a model's parts must not cost the import of torch
    import torch

Config = dict[str, Any]

MAX_LAYERS = 4_096
# Holds llama3 rope scaling as one divisor per frequency; goes into the config, not into the weights.
ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One architecture of the format: its names, how to undo the converter's changes, its own config keys."""

    hf_architecture: str
    model_type: str
    top: Mapping[str, str]
    block: Mapping[str, str]
    block_prefix: str
    undo: Callable[[str, torch.Tensor, Config], torch.Tensor]
    config: Callable[[GgufFile, str, Config], None]


def _keep(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return tensor


def _undo_llama(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """Back from interleaved rotary pairs to the two halves that Hugging Face checkpoints use."""
    if ".q_proj." in name:
        heads = config["num_attention_heads"]
    elif ".k_proj." in name:
        heads = config["num_key_value_heads"]
    else:
        return tensor
    if tensor.shape[0] % (2 * heads):
        raise ModelLoadError(f"{name} has {tensor.shape[0]} rows, which {heads} heads cannot share")
    pairs = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _undo_gemma(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """The converter stores norm weights as 1 + w; Hugging Face models add the 1 themselves."""
    return tensor.sub_(1.0) if name.endswith("norm.weight") else tensor


def _undo_gpt2(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """GPT-2's Conv1D layers keep [in, out]; the converter transposes them."""
    return tensor.t() if re.search(r"\.c_(attn|proj|fc)\.weight$", name) else tensor


_LLAMA_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LLAMA_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_GEMMA_BLOCK = _LLAMA_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_GPT2_TOP = {
    "token_embd.weight": "transformer.wte.weight",
    "position_embd.weight": "transformer.wpe.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
_GPT2_BLOCK = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}


def _positive(file: GgufFile, key: str, default: int | None = None) -> int:
    if default is None and key not in file.metadata:
        raise ModelLoadError(f"{file.path}: GGUF metadata lacks {key!r}, the file cannot be used as a model")
    value = int_value(file.metadata, key, default or 0)
    if not 0 < value < 1 << 31:
        raise ModelLoadError(f"{file.path}: GGUF metadata {key!r} is {value}")
    return value


def _tensor(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise ModelLoadError(f"{file.path}: the tensor {name!r} is missing; is this a vocabulary-only file?")
    return file.tensors[name]


def _shared_config(file: GgufFile, arch: str) -> Config:
    """What every architecture stores: sizes, heads, and whether the head is tied."""
    layers = _positive(file, f"{arch}.block_count")
    hidden = _positive(file, f"{arch}.embedding_length")
    heads = _positive(file, f"{arch}.attention.head_count")
    kv_heads = _positive(file, f"{arch}.attention.head_count_kv", heads)
    embedding = _tensor(file, "token_embd.weight")
    if layers > MAX_LAYERS or heads % kv_heads:
        raise ModelLoadError(f"{file.path}: {layers} layers, {heads} heads, {kv_heads} key heads cannot be")
    if len(embedding.shape) != 2 or embedding.shape[1] != hidden:
        raise ModelLoadError(
            f"{file.path}: the embedding is {embedding.shape}, its rows should have {hidden} values"
        )
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": _positive(file, f"{arch}.feed_forward_length"),
        "max_position_embeddings": _positive(file, f"{arch}.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def _rope(file: GgufFile, arch: str, config: Config) -> None:
    """Rotary settings, and the dimensions of a head."""
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if hidden % heads and f"{arch}.attention.key_length" not in file.metadata:
        raise ModelLoadError(f"{file.path}: {heads} heads cannot share {hidden} values")
    head_dim = _positive(file, f"{arch}.attention.key_length", hidden // heads)
    if _positive(file, f"{arch}.attention.value_length", head_dim) != head_dim:
        raise UnsupportedModelError(f"{file.path}: keys and values of different sizes are not supported")
    rotary = _positive(file, f"{arch}.rope.dimension_count", head_dim)
    if rotary > head_dim or rotary % 2:
        raise ModelLoadError(f"{file.path}: {rotary} rotary dimensions in heads of {head_dim}")
    config["head_dim"] = head_dim
    if rotary != head_dim:
        config["partial_rotary_factor"] = rotary / head_dim
    config["rope_theta"] = float_value(file.metadata, f"{arch}.rope.freq_base", 10_000.0)
    scaling = _rope_scaling(file, arch, config["rope_theta"], rotary)
    if scaling is not None:
        config["rope_scaling"] = scaling


def _rope_scaling(file: GgufFile, arch: str, theta: float, rotary: int) -> Config | None:
    if ROPE_FACTORS in file.tensors:
        factors = np.empty(math.prod(_tensor(file, ROPE_FACTORS).shape), np.float32)
        file.read(file.tensors[ROPE_FACTORS], factors)
        return llama3_scaling(factors, theta, rotary)
    key = f"{arch}.rope.scaling"
    kind = str_value(file.metadata, f"{key}.type", "none")
    factor = float_value(
        file.metadata, f"{key}.factor", float_value(file.metadata, f"{arch}.rope.scale_linear", 1.0)
    )
    if kind in ("none", "linear"):
        return {"rope_type": "linear", "factor": factor} if factor not in (0.0, 1.0) else None
    if kind != "yarn":
        raise UnsupportedModelError(
            f"{file.path}: rope scaling of type {kind!r}; Quire knows linear, llama3 and yarn"
        )
    scaling: Config = {"rope_type": "yarn", "factor": factor}
    if f"{key}.original_context_length" in file.metadata:
        scaling["original_max_position_embeddings"] = _positive(file, f"{key}.original_context_length")
    for name in ("beta_fast", "beta_slow"):
        if f"{key}.yarn_{name}" in file.metadata:
            scaling[name] = float_value(file.metadata, f"{key}.yarn_{name}", 0.0)
    return scaling


def llama3_scaling(factors: np.ndarray, theta: float, rotary: int) -> Config:
    """The llama3 settings that give these per-frequency divisors.

    Fast frequencies keep divisor 1, slow ones have `factor`; between, 1/divisor is linear in 1/wavelength.
    Only the ratios of the three other settings matter, so `low_freq_factor` is taken as 1.
    """
    rates = theta ** (-2.0 * np.arange(rotary // 2) / rotary) / (2 * math.pi)  # 1 / wavelength
    if factors.shape != rates.shape or not np.isfinite(factors).all() or (factors <= 0).any():
        raise ModelLoadError(f"{ROPE_FACTORS} does not fit heads with {rotary} rotary dimensions")
    factor = float(factors.max())
    if factor <= 1.0 + 1e-6:
        return {"rope_type": "default"}
    share = (1.0 / factors.astype(np.float64) - 1.0 / factor) / (1.0 - 1.0 / factor)
    between = np.flatnonzero((share > 1e-4) & (share < 1 - 1e-4))
    if len(between) >= 2:
        slope, offset = np.polyfit(rates[between], share[between], 1)
        high = round(1.0 - 1.0 / offset, 2) if offset else 0.0
        scaling = _llama3(round(factor, 4), high, round(slope * (high - 1.0)))
        if np.allclose(_llama3_divisors(scaling, rates), factors, rtol=1e-4):
            return scaling
    standard = _llama3(round(factor, 4), 4.0, 8192)
    if np.allclose(_llama3_divisors(standard, rates), factors, rtol=1e-4):
        return standard
    raise UnsupportedModelError(
        f"{ROPE_FACTORS} holds frequency factors that are not those of llama3 rope scaling"
    )


def _llama3(factor: float, high: float, original: int) -> Config:
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama3_divisors(scaling: Config, rates: np.ndarray) -> np.ndarray:
    high, factor = scaling["high_freq_factor"], scaling["factor"]
    if high <= 1.0 or scaling["original_max_position_embeddings"] <= 0:
        return np.zeros_like(rates)
    share = np.clip((scaling["original_max_position_embeddings"] * rates - 1.0) / (high - 1.0), 0.0, 1.0)
    return np.asarray(1.0 / ((1.0 - share) / factor + share))


def _gated_config(file: GgufFile, arch: str, config: Config) -> None:
    """Llama-like: rotary positions, RMS norms, gated SiLU."""
    _rope(file, arch, config)
    config["hidden_act"] = "silu"
    config["rms_norm_eps"] = float_value(file.metadata, f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)


def _llama_config(file: GgufFile, arch: str, config: Config) -> None:
    _gated_config(file, arch, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    if int_value(file.metadata, f"{arch}.expert_count", 0):
        raise UnsupportedModelError(f"{file.path}: mixture-of-experts models are not supported")
    window = int_value(file.metadata, f"{arch}.attention.sliding_window", 0)
    if window:
        config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window)


def _qwen2_config(file: GgufFile, arch: str, config: Config) -> None:
    _gated_config(file, arch, config)
    config["use_sliding_window"] = False


def _qwen3_config(file: GgufFile, arch: str, config: Config) -> None:
    _qwen2_config(file, arch, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def _gemma3_config(file: GgufFile, arch: str, config: Config) -> None:
    _rope(file, arch, config)
    window = int_value(file.metadata, f"{arch}.attention.sliding_window", 0)
    period = _positive(file, f"{arch}.attention.sliding_window_pattern", 6)
    layers = config["num_hidden_layers"]
    config.update(
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=float_value(file.metadata, f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        rope_local_base_freq=float_value(file.metadata, f"{arch}.rope.freq_base_swa", 10_000.0),
        sliding_window=window or None,
        sliding_window_pattern=period,
        layer_types=[
            "sliding_attention" if window and (layer + 1) % period else "full_attention"
            for layer in range(layers)
        ],
        # Not stored: the 27B model (62 layers) alone scales by the width of a head in the residual stream.
        query_pre_attn_scalar=(
            config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
        ),
        attention_bias=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=float_value(file.metadata, f"{arch}.final_logit_softcapping", 0.0) or None,
    )


def _gpt2_config(file: GgufFile, arch: str, config: Config) -> None:
    config.update(
        n_layer=config.pop("num_hidden_layers"),
        n_embd=config.pop("hidden_size"),
        n_head=config.pop("num_attention_heads"),
        n_inner=config.pop("intermediate_size"),
        n_positions=config.pop("max_position_embeddings"),
        layer_norm_epsilon=float_value(file.metadata, f"{arch}.attention.layer_norm_epsilon", 1e-5),
        activation_function="gelu_new",
    )
    config["n_ctx"] = config["n_positions"]
    del config["num_key_value_heads"]


ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": GgufArchitecture(
        "LlamaForCausalLM", "llama", _LLAMA_TOP, _LLAMA_BLOCK, "model.layers", _undo_llama, _llama_config
    ),
    "qwen2": GgufArchitecture(
        "Qwen2ForCausalLM", "qwen2", _LLAMA_TOP, _LLAMA_BLOCK, "model.layers", _keep, _qwen2_config
    ),
    "qwen3": GgufArchitecture(
        "Qwen3ForCausalLM", "qwen3", _LLAMA_TOP, _LLAMA_BLOCK, "model.layers", _keep, _qwen3_config
    ),
    "gemma3": GgufArchitecture(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _LLAMA_TOP,
        _GEMMA_BLOCK,
        "model.layers",
        _undo_gemma,
        _gemma3_config,
    ),
    "gpt2": GgufArchitecture(
        "GPT2LMHeadModel", "gpt2", _GPT2_TOP, _GPT2_BLOCK, "transformer.h", _undo_gpt2, _gpt2_config
    ),
}

_BLOCK_NAME = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")


def architecture_of(file: GgufFile) -> tuple[str, GgufArchitecture]:
    arch = str_value(file.metadata, "general.architecture", "")
    known = ARCHITECTURES.get(arch)
    why = reason(arch)
    if why is not None:
        raise UnsupportedModelError(f"{file.path}: GGUF architecture {arch!r} is not supported: {why}")
    if known is None:
        raise UnsupportedModelError(
            f"{file.path}: GGUF architecture {arch!r} is not supported; known: {', '.join(ARCHITECTURES)}"
        )
    return arch, known


def hf_config(file: GgufFile) -> Config:
    """The config.json that this file's model would have."""
    arch, known = architecture_of(file)
    config = _shared_config(file, arch)
    config.update(architectures=[known.hf_architecture], model_type=known.model_type)
    known.config(file, arch, config)
    config["torch_dtype"] = "float32"
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        key = f"tokenizer.ggml.{theirs}_token_id"
        config[ours] = int_value(file.metadata, key, 0) if key in file.metadata else None
    return config


def hf_name(gguf_name: str, known: GgufArchitecture, layers: int) -> str:
    """The Hugging Face name of a GGUF tensor; a tensor that the model has no place for is an error."""
    if gguf_name in known.top:
        return known.top[gguf_name]
    match = _BLOCK_NAME.fullmatch(gguf_name)
    if match and match[2] in known.block and int(match[1]) < layers:
        return f"{known.block_prefix}.{match[1]}.{known.block[match[2]]}.{match[3]}"
    raise UnsupportedModelError(
        f"the GGUF tensor {gguf_name!r} has no place in a {known.hf_architecture} of {layers} layers"
    )
