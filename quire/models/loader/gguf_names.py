"""What a GGUF file calls things, and what Hugging Face calls them: tensor names, layouts and the config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.loader import gguf_config as configs
from quire.models.loader.gguf import GgufFile, int_value, str_value
from quire.models.refused import reason

if TYPE_CHECKING:  # naming a model's parts must not cost the import of torch
    import torch

Config = dict[str, Any]


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
    alone: Mapping[str, str] = field(default_factory=dict)
    """Tensors of a block, by their whole name in it, whose Hugging Face names end in neither `.weight` nor `.bias`."""
    transposed: str = ""
    """Pattern of the end of tensors (by their Hugging Face names) that the converter has transposed."""

    def is_transposed(self, name: str) -> bool:
        return bool(self.transposed) and re.search(self.transposed, name) is not None


def _keep(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    return tensor


def _undo_llama(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """Back from interleaved rotary pairs to the two halves that Hugging Face checkpoints use; of any run of heads."""
    if ".q_proj." not in name and ".k_proj." not in name:
        return tensor
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    if dim % 2 or tensor.shape[0] % dim:
        raise ModelLoadError(f"{name} has {tensor.shape[0]} rows, which heads of {dim} cannot share")
    pairs = tensor.reshape(-1, dim // 2, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _undo_shared_gate(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """The converter stores the projection to one number as a vector."""
    return tensor.reshape(1, -1) if name.endswith("shared_expert_gate.weight") else tensor


def _undo_gemma(name: str, tensor: torch.Tensor, config: Config) -> torch.Tensor:
    """The converter stores norm weights as 1 + w; Hugging Face models add the 1 themselves."""
    return tensor.sub_(1.0) if name.endswith("norm.weight") else tensor


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
_EXPERTS_BLOCK = _LLAMA_BLOCK | {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_up_exps": "mlp.experts.gate_up_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SHARED_EXPERTS = {f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")}
_GLM4MOE_BLOCK = {name: hf for name, hf in _EXPERTS_BLOCK.items() if name != "ffn_norm"} | _SHARED_EXPERTS | {
    "post_attention_norm": "post_attention_layernorm",
}
_DEEPSEEK2_BLOCK = _EXPERTS_BLOCK | _SHARED_EXPERTS | {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",
    "attn_v_b": "self_attn.v_b_proj",
}
_CHOICE_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_GPT_OSS_BLOCK = {name: hf for name, hf in _EXPERTS_BLOCK.items() if name[:5] == "attn_"} | {
    **{f"ffn_{part}_exps": f"mlp.experts.{part}_proj" for part in ("gate", "up", "down")},
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
}
_GEMMA_BLOCK = _LLAMA_BLOCK | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OLMO2_BLOCK = {name: hf for name, hf in _LLAMA_BLOCK.items() if not name.endswith(("attn_norm", "ffn_norm"))} | {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_COHERE_BLOCK = {name: hf for name, hf in _LLAMA_BLOCK.items() if name != "ffn_norm"}
_PHI3_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_GLM4_BLOCK = {name: hf for name, hf in _LLAMA_BLOCK.items() if name != "ffn_gate"} | {
    "post_attention_norm": "post_self_attn_layernorm",
    "ffn_up": "mlp.gate_up_proj",
    "post_ffw_norm": "post_mlp_layernorm",
}
_CHATGLM_BLOCK = _PHI3_BLOCK | {name: hf for name, hf in _LLAMA_BLOCK.items() if name.startswith("attn_")}
_LAYER_NORM_TOP = _LLAMA_TOP | {"output_norm.bias": "model.norm.bias"}
_STARCODER2_BLOCK = {name: hf for name, hf in _LLAMA_BLOCK.items() if name != "ffn_gate"} | {
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
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


def _like_llama(
    architecture: str,
    model_type: str,
    config: Callable[[GgufFile, str, Config], None],
    block: Mapping[str, str] = _LLAMA_BLOCK,
    undo: Callable[[str, torch.Tensor, Config], torch.Tensor] = _keep,
    top: Mapping[str, str] = _LLAMA_TOP,
    alone: Mapping[str, str] | None = None,
) -> GgufArchitecture:
    return GgufArchitecture(architecture, model_type, top, block, "model.layers", undo, config, alone or {})


ARCHITECTURES: dict[str, GgufArchitecture] = {
    "llama": _like_llama("LlamaForCausalLM", "llama", configs.llama_config, _EXPERTS_BLOCK, undo=_undo_llama),
    "mistral3": _like_llama("Ministral3ForCausalLM", "ministral3", configs.mistral3_config, undo=_undo_llama),
    "qwen2": _like_llama("Qwen2ForCausalLM", "qwen2", configs.qwen2_config),
    "qwen3": _like_llama("Qwen3ForCausalLM", "qwen3", configs.qwen3_config),
    "qwen2moe": _like_llama(
        "Qwen2MoeForCausalLM", "qwen2_moe", configs.qwen2moe_config, _EXPERTS_BLOCK, _undo_shared_gate
    ),
    "qwen3moe": _like_llama("Qwen3MoeForCausalLM", "qwen3_moe", configs.qwen3moe_config, _EXPERTS_BLOCK),
    "olmoe": _like_llama("OlmoeForCausalLM", "olmoe", configs.olmoe_config, _EXPERTS_BLOCK),
    "glm4moe": _like_llama(
        "Glm4MoeForCausalLM", "glm4_moe", configs.glm4moe_config, _GLM4MOE_BLOCK, alone=_CHOICE_BIAS
    ),
    "deepseek2": _like_llama(
        "DeepseekV2ForCausalLM", "deepseek_v2", configs.deepseek2_config, _DEEPSEEK2_BLOCK, alone=_CHOICE_BIAS
    ),
    "gpt-oss": _like_llama(
        "GptOssForCausalLM", "gpt_oss", configs.gpt_oss_config, _GPT_OSS_BLOCK,
        alone={"attn_sinks.weight": "self_attn.sinks"},
    ),
    "smollm3": _like_llama("SmolLM3ForCausalLM", "smollm3", configs.smollm3_config, undo=_undo_llama),
    "granite": _like_llama("GraniteForCausalLM", "granite", configs.granite_config, undo=_undo_llama),
    "olmo2": _like_llama("Olmo2ForCausalLM", "olmo2", configs.olmo2_config, _OLMO2_BLOCK),
    "command-r": _like_llama("CohereForCausalLM", "cohere", configs.command_r_config, _COHERE_BLOCK),
    "cohere2": _like_llama("Cohere2ForCausalLM", "cohere2", configs.cohere2_config, _COHERE_BLOCK),
    "phi3": _like_llama("Phi3ForCausalLM", "phi3", configs.phi3_config, _PHI3_BLOCK),
    "chatglm": _like_llama("GlmForCausalLM", "glm", configs.glm4_config, _CHATGLM_BLOCK),
    "glm4": _like_llama("Glm4ForCausalLM", "glm4", configs.glm4_config, _GLM4_BLOCK),
    "starcoder2": _like_llama(
        "Starcoder2ForCausalLM", "starcoder2", configs.starcoder2_config, _STARCODER2_BLOCK, top=_LAYER_NORM_TOP
    ),
    "gemma2": _like_llama("Gemma2ForCausalLM", "gemma2", configs.gemma2_config, _GEMMA_BLOCK, _undo_gemma),
    "gemma3": _like_llama("Gemma3ForCausalLM", "gemma3_text", configs.gemma3_config, _GEMMA_BLOCK, _undo_gemma),
    "gpt2": GgufArchitecture(
        "GPT2LMHeadModel", "gpt2", _GPT2_TOP, _GPT2_BLOCK, "transformer.h", _keep, configs.gpt2_config,
        transposed=r"\.c_(attn|proj|fc)\.weight$",  # GPT-2's Conv1D layers keep [in, out]
    ),
}

ARCHITECTURE = "gguf_architecture"
"""The field of a config that was made of GGUF metadata."""
_BLOCK_NUMBER = re.compile(r"blk\.(\d{1,4})\.")
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
    config = configs.shared_config(file, arch)
    config.update(architectures=[known.hf_architecture], model_type=known.model_type)
    known.config(file, arch, config)
    config.update({"torch_dtype": "float32", ARCHITECTURE: arch})
    for ours, theirs in (("bos_token_id", "bos"), ("eos_token_id", "eos"), ("pad_token_id", "padding")):
        key = f"tokenizer.ggml.{theirs}_token_id"
        config[ours] = int_value(file.metadata, key, 0) if key in file.metadata else None
    return config


def hf_name(gguf_name: str, known: GgufArchitecture, layers: int) -> str:
    """The Hugging Face name of a GGUF tensor; a tensor that the model has no place for is an error."""
    if gguf_name in known.top:
        return known.top[gguf_name]
    match = _BLOCK_NAME.fullmatch(gguf_name)
    if match and f"{match[2]}.{match[3]}" in known.alone and int(match[1]) < layers:
        return f"{known.block_prefix}.{match[1]}.{known.alone[f'{match[2]}.{match[3]}']}"
    if match and match[2] in known.block and int(match[1]) < layers:
        return f"{known.block_prefix}.{match[1]}.{known.block[match[2]]}.{match[3]}"
    raise UnsupportedModelError(
        f"the GGUF tensor {gguf_name!r} has no place in a {known.hf_architecture} of {layers} layers"
    )


def gguf_name(name: str, arch: str) -> str | None:
    """The GGUF tensor that has this Hugging Face name; None where the architecture has none."""
    known = ARCHITECTURES[arch]
    for gguf, hf in known.top.items():
        if name == hf:
            return gguf
    match = re.fullmatch(rf"{re.escape(known.block_prefix)}\.(\d+)\.(.+)", name)
    if match is None:
        return None
    for gguf, hf in known.alone.items():
        if match[2] == hf:
            return f"blk.{match[1]}.{gguf}"
    module, _, kind = match[2].rpartition(".")
    for gguf, hf in known.block.items():
        if module == hf:
            return f"blk.{match[1]}.{gguf}.{kind}"
        if match[2] == hf:  # merged experts, whose names need not end so
            return f"blk.{match[1]}.{gguf}.weight"
    return None


def is_extra(gguf_name: str, config: Config) -> bool:
    """Whether a tensor belongs to a block behind the last layer, which guesses further tokens and is not read."""
    match = _BLOCK_NUMBER.match(gguf_name)
    layers, more = config.get("num_hidden_layers", 0), config.get("num_nextn_predict_layers") or 0
    return match is not None and layers <= int(match[1]) < layers + more
