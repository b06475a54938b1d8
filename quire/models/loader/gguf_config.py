"""The config.json that a GGUF file's model would have, from the file's metadata: one function per architecture."""

from __future__ import annotations

from typing import Any

import numpy as np

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.loader.gguf import GgufFile, float_value, int_value, positive_value, tensor_named
from quire.models.loader.gguf_rope import rope_config, rope_scaling

Config = dict[str, Any]

MAX_LAYERS = 4_096


def shared_config(file: GgufFile, arch: str) -> Config:
    """What every architecture stores: sizes, heads, and whether the head is tied."""
    layers = positive_value(file, f"{arch}.block_count")
    hidden = positive_value(file, f"{arch}.embedding_length")
    heads = positive_value(file, f"{arch}.attention.head_count")
    kv_heads = positive_value(file, f"{arch}.attention.head_count_kv", heads)
    embedding = tensor_named(file, "token_embd.weight")
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
        "intermediate_size": positive_value(file, f"{arch}.feed_forward_length"),
        "max_position_embeddings": positive_value(file, f"{arch}.context_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }


def gated_config(file: GgufFile, arch: str, config: Config) -> None:
    """Llama-like: rotary positions, RMS norms, gated SiLU."""
    rope_config(file, arch, config)
    config["hidden_act"] = "silu"
    config["rms_norm_eps"] = float_value(file.metadata, f"{arch}.attention.layer_norm_rms_epsilon", 1e-5)


def llama_config(file: GgufFile, arch: str, config: Config) -> None:
    gated_config(file, arch, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["mlp_bias"] = "blk.0.ffn_up.bias" in file.tensors
    window = int_value(file.metadata, f"{arch}.attention.sliding_window", 0)
    if int_value(file.metadata, f"{arch}.expert_count", 0):
        experts_config(file, arch, config, "num_local_experts")
        config.update(architectures=["MixtralForCausalLM"], model_type="mixtral", sliding_window=window or None)
    elif window:
        config.update(architectures=["MistralForCausalLM"], model_type="mistral", sliding_window=window)


def mistral3_config(file: GgufFile, arch: str, config: Config) -> None:
    """Ministral 3, whose queries grow with the position; without that a Mistral Small 3, which is a Mistral."""
    llama_config(file, arch, config)
    beta = float_value(file.metadata, f"{arch}.attention.temperature_scale", 0.0)
    if not beta:
        config.update(architectures=["MistralForCausalLM"], model_type="mistral")
        config.setdefault("sliding_window", None)
        return
    scaling = config.pop("rope_scaling", None) or {}
    config.update(architectures=["Ministral3ForCausalLM"], model_type="ministral3")
    config["rope_parameters"] = {
        **scaling,
        "rope_theta": config.pop("rope_theta"),
        "mscale": 1.0,
        "mscale_all_dim": float_value(file.metadata, f"{arch}.rope.scaling.yarn_log_multiplier", 1.0),
        "llama_4_scaling_beta": beta,
    }


def qwen2_config(file: GgufFile, arch: str, config: Config) -> None:
    gated_config(file, arch, config)
    config["use_sliding_window"] = False


def qwen3_config(file: GgufFile, arch: str, config: Config) -> None:
    qwen2_config(file, arch, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors


def experts_config(file: GgufFile, arch: str, config: Config, field: str = "num_experts") -> None:
    """How many experts there are, how many a token goes to, how wide they are."""
    config[field] = positive_value(file, f"{arch}.expert_count")
    config["num_experts_per_tok"] = positive_value(file, f"{arch}.expert_used_count")
    width = f"{arch}.expert_feed_forward_length"
    if width in file.metadata:
        config["moe_intermediate_size"] = positive_value(file, width)


def qwen2moe_config(file: GgufFile, arch: str, config: Config) -> None:
    qwen2_config(file, arch, config)
    experts_config(file, arch, config)
    shared = tensor_named(file, "blk.0.ffn_up_shexp.weight")
    routed = tensor_named(file, "blk.0.ffn_up_exps.weight")
    if len(routed.shape) != 3:
        raise ModelLoadError(f"{file.path}: tensor {routed.name!r} has shape {routed.shape}, not three sizes")
    config.setdefault("moe_intermediate_size", routed.shape[-2])
    config.update(shared_expert_intermediate_size=shared.shape[0], norm_topk_prob=False)


def qwen3moe_config(file: GgufFile, arch: str, config: Config) -> None:
    qwen3_config(file, arch, config)
    experts_config(file, arch, config)
    config["norm_topk_prob"] = True  # of the architecture: the format has no key for it


def olmoe_config(file: GgufFile, arch: str, config: Config) -> None:
    gated_config(file, arch, config)
    experts_config(file, arch, config)
    config.pop("moe_intermediate_size", None)
    config["norm_topk_prob"] = False


def routed_config(file: GgufFile, arch: str, config: Config) -> None:
    """Experts after some dense layers, beside an MLP for every token (GLM-4.5, DeepSeek). Layers that guess further
    tokens are counted as blocks."""
    experts_config(file, arch, config, "n_routed_experts")
    extra = int_value(file.metadata, f"{arch}.nextn_predict_layers", 0)
    if not 0 <= extra < config["num_hidden_layers"]:
        raise ModelLoadError(f"{file.path}: GGUF metadata '{arch}.nextn_predict_layers' is {extra}")
    config.update(
        num_hidden_layers=config["num_hidden_layers"] - extra,
        num_nextn_predict_layers=extra,
        first_k_dense_replace=int_value(file.metadata, f"{arch}.leading_dense_block_count", 0),
        n_shared_experts=int_value(file.metadata, f"{arch}.expert_shared_count", 0) or None,
        norm_topk_prob=bool(file.metadata.get(f"{arch}.expert_weights_norm", False)),
        routed_scaling_factor=float_value(file.metadata, f"{arch}.expert_weights_scale", 1.0),
    )
    for key, field in (("expert_group_count", "n_group"), ("expert_group_used_count", "topk_group")):
        if f"{arch}.{key}" in file.metadata:
            config[field] = positive_value(file, f"{arch}.{key}")


def glm4moe_config(file: GgufFile, arch: str, config: Config) -> None:
    gated_config(file, arch, config)
    routed_config(file, arch, config)
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors
    config.setdefault("partial_rotary_factor", 1.0)


_SIGMOID = 2
"""Of `expert_gating_func`."""
_GROUPS = {256: (8, 4), 160: (8, 3)}
"""Groups, and chosen ones, of DeepSeek-V3 and V2 by their number of experts: the format had no keys for them when most
files were made. Kimi-K2 and V2-Lite have one group."""


def deepseek2_config(file: GgufFile, arch: str, config: Config) -> None:
    """DeepSeek-V2, or V3 and Kimi-K2, which choose by sigmoid scores. Newer files give the sizes of keys and values as
    they are in the cache, and those of the heads besides."""
    turned = positive_value(file, f"{arch}.rope.dimension_count")
    key = positive_value(file, f"{arch}.attention.key_length_mla",
                         positive_value(file, f"{arch}.attention.key_length"))  # fmt: skip
    value = positive_value(file, f"{arch}.attention.value_length_mla",
                           positive_value(file, f"{arch}.attention.value_length"))  # fmt: skip
    if key <= turned:
        raise ModelLoadError(f"{file.path}: keys of {key} values cannot have {turned} that turn")
    theta = float_value(file.metadata, f"{arch}.rope.freq_base", 10_000.0)
    config.update(
        hidden_act="silu",
        rms_norm_eps=float_value(file.metadata, f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        num_key_value_heads=config["num_attention_heads"],
        kv_lora_rank=positive_value(file, f"{arch}.attention.kv_lora_rank"),
        q_lora_rank=int_value(file.metadata, f"{arch}.attention.q_lora_rank", 0) or None,
        qk_rope_head_dim=turned,
        qk_nope_head_dim=key - turned,
        v_head_dim=value,
        rope_theta=theta,
    )
    scaling = rope_scaling(file, arch, theta, turned)
    if scaling is not None:
        # Stored as a tenth of it, for keys and queries together.
        sharper = round(10 * float_value(file.metadata, f"{arch}.rope.scaling.yarn_log_multiplier", 0.0), 6)
        config["rope_scaling"] = {**scaling, **({"mscale": sharper, "mscale_all_dim": sharper} if sharper else {})}
    routed_config(file, arch, config)
    groups, chosen = _GROUPS.get(config["n_routed_experts"], (1, 1))
    config.setdefault("n_group", groups)
    config.setdefault("topk_group", chosen if config["n_group"] == groups else config["n_group"])
    if int_value(file.metadata, f"{arch}.expert_gating_func", 1) == _SIGMOID:
        config.update(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3")
    else:
        config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def gpt_oss_config(file: GgufFile, arch: str, config: Config) -> None:
    gated_config(file, arch, config)
    experts_config(file, arch, config, "num_local_experts")
    config["intermediate_size"] = config.pop("moe_intermediate_size", config["intermediate_size"])
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    config["sliding_window"] = positive_value(file, f"{arch}.attention.sliding_window", 128)
    if "rope_scaling" in config:
        config["rope_scaling"]["truncate"] = False  # of the architecture: the format has no key for it
    else:
        config["rope_scaling"] = {"rope_type": "default"}  # a config that says nothing would mean yarn


def gemma3_config(file: GgufFile, arch: str, config: Config) -> None:
    rope_config(file, arch, config)
    window = int_value(file.metadata, f"{arch}.attention.sliding_window", 0)
    layers = config["num_hidden_layers"]
    types = layer_types(file, arch, layers, period=6) if window else ["full_attention"] * layers
    config.update(
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=float_value(file.metadata, f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        rope_local_base_freq=float_value(file.metadata, f"{arch}.rope.freq_base_swa", 10_000.0),
        sliding_window=window or None,
        layer_types=types,
        # Not stored: the 27B model (62 layers) alone scales by the width of a head in the residual stream.
        query_pre_attn_scalar=(
            config["hidden_size"] // config["num_attention_heads"] if layers == 62 else config["head_dim"]
        ),
        attention_bias=False,
        attn_logit_softcapping=None,
        final_logit_softcapping=float_value(file.metadata, f"{arch}.final_logit_softcapping", 0.0) or None,
    )


def phi3_config(file: GgufFile, arch: str, config: Config) -> None:
    gated_config(file, arch, config)
    config["sliding_window"] = int_value(file.metadata, f"{arch}.attention.sliding_window", 0) or None
    trained = f"{arch}.rope.scaling.original_context_length"
    config["original_max_position_embeddings"] = positive_value(file, trained, config["max_position_embeddings"])


def smollm3_config(file: GgufFile, arch: str, config: Config) -> None:
    llama_config(file, arch, config)
    config["no_rope_layer_interval"] = 4  # of the architecture: the format has no key for it


def granite_config(file: GgufFile, arch: str, config: Config) -> None:
    llama_config(file, arch, config)
    for key, field in (
        ("attention.scale", "attention_multiplier"),
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ):
        config[field] = float_value(file.metadata, f"{arch}.{key}", 1.0)


def olmo2_config(file: GgufFile, arch: str, config: Config) -> None:
    """OLMo 3 is stored as an OLMo 2 with a window."""
    gated_config(file, arch, config)
    config["attention_bias"] = False
    window = int_value(file.metadata, f"{arch}.attention.sliding_window", 0)
    if window:
        config.update(
            architectures=["Olmo3ForCausalLM"],
            model_type="olmo3",
            sliding_window=window,
            layer_types=layer_types(file, arch, config["num_hidden_layers"], period=4),
        )


def command_r_config(file: GgufFile, arch: str, config: Config) -> None:
    rope_config(file, arch, config)
    config.update(
        hidden_act="silu",
        layer_norm_eps=float_value(file.metadata, f"{arch}.attention.layer_norm_epsilon", 1e-5),
        logit_scale=float_value(file.metadata, f"{arch}.logit_scale", 0.0625),
        attention_bias=False,
    )
    if arch == "command-r":
        config["use_qk_norm"] = "blk.0.attn_q_norm.weight" in file.tensors


def cohere2_config(file: GgufFile, arch: str, config: Config) -> None:
    command_r_config(file, arch, config)
    config["sliding_window"] = positive_value(file, f"{arch}.attention.sliding_window")
    config["layer_types"] = layer_types(file, arch, config["num_hidden_layers"], period=4)


def glm4_config(file: GgufFile, arch: str, config: Config) -> None:
    gated_config(file, arch, config)
    config["attention_bias"] = not {"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}.isdisjoint(file.tensors)
    config.setdefault("partial_rotary_factor", 1.0)
    if int_value(file.metadata, f"{arch}.nextn_predict_layers", 0):
        raise UnsupportedModelError(f"{file.path}: layers that predict several tokens (nextn) are not supported")


def starcoder2_config(file: GgufFile, arch: str, config: Config) -> None:
    rope_config(file, arch, config)
    config.update(
        hidden_act="gelu_pytorch_tanh",
        norm_epsilon=float_value(file.metadata, f"{arch}.attention.layer_norm_epsilon", 1e-5),
        use_bias="blk.0.attn_q.bias" in file.tensors,
        sliding_window=int_value(file.metadata, f"{arch}.attention.sliding_window", 0) or None,
    )


def gemma2_config(file: GgufFile, arch: str, config: Config) -> None:
    rope_config(file, arch, config)
    layers = config["num_hidden_layers"]
    config.update(
        hidden_activation="gelu_pytorch_tanh",
        rms_norm_eps=float_value(file.metadata, f"{arch}.attention.layer_norm_rms_epsilon", 1e-6),
        sliding_window=positive_value(file, f"{arch}.attention.sliding_window", 4096),
        layer_types=layer_types(file, arch, layers, period=2),
        # Not stored: the 27B model (46 layers) alone scales by the width of a head in the residual stream.
        query_pre_attn_scalar=(
            config["hidden_size"] // config["num_attention_heads"] if layers == 46 else config["head_dim"]
        ),
        attention_bias=False,
        attn_logit_softcapping=float_value(file.metadata, f"{arch}.attn_logit_softcapping", 50.0) or None,
        final_logit_softcapping=float_value(file.metadata, f"{arch}.final_logit_softcapping", 30.0) or None,
    )


def layer_types(file: GgufFile, arch: str, layers: int, period: int) -> list[str]:
    """Which layers have the window: one flag each, or all but every `period`th."""
    key = f"{arch}.attention.sliding_window_pattern"
    stored = file.metadata.get(key)
    if isinstance(stored, np.ndarray):
        if len(stored) != layers:
            raise ModelLoadError(f"{file.path}: GGUF metadata {key!r} should have a flag for each of {layers} layers")
        windowed = [bool(flag) for flag in stored.tolist()]
    else:
        every = positive_value(file, key, period)
        windowed = [bool((layer + 1) % every) for layer in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in windowed]


def gpt2_config(file: GgufFile, arch: str, config: Config) -> None:
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
