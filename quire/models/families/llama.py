"""Llama, and what its relatives (Mistral, Qwen) share with it."""

from __future__ import annotations

from collections.abc import Sequence

from quire.layers.spec import AttentionSpec, MlpSpec, NormSpec
from quire.models.config_reader import MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS, ConfigReader, reach
from quire.models.family import Family
from quire.models.spec import DecoderSpec, LayerSpec
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top={"model.embed_tokens": "embed", "model.norm": "final_norm", "lm_head": "head"},
    layer={
        "self_attn.q_proj": "attn.q",
        "self_attn.k_proj": "attn.k",
        "self_attn.v_proj": "attn.v",
        "self_attn.o_proj": "attn.out",
        "self_attn.q_norm": "attn.q_norm",
        "self_attn.k_norm": "attn.k_norm",
        "mlp.gate_proj": "mlp.gate",
        "mlp.up_proj": "mlp.up",
        "mlp.down_proj": "mlp.down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "mlp_norm",
    },
    ignored=("rotary_emb.inv_freq",),
)


def llama_like(
    c: ConfigReader,
    *,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    windows: Sequence[int | None] | None = None,
) -> DecoderSpec:
    """Pre-norm RMS layers, one rotation, gated MLP; `windows` has one entry per layer."""
    hidden = c.size("hidden_size", most=MAX_HIDDEN)
    heads, kv_heads, dim = c.heads(hidden, head_dim)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6))
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    mlp = MlpSpec(c.size("intermediate_size"), c.activation("hidden_act", "silu", gated=True), bias=mlp_bias)
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                heads,
                kv_heads,
                dim,
                scale=dim**-0.5,
                qkv_bias=qkv_bias,
                out_bias=out_bias,
                qk_norm=norm if qk_norm else None,
                window=window,
            ),
            mlp,
            norm,
        )
        for window in (windows or [None] * count)
    )
    rope = c.rope(dim)
    return DecoderSpec(
        c.architecture,
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden,
        max_positions=reach(c.size("max_position_embeddings", most=MAX_POSITIONS), rope),
        layers=layers,
        ropes=(rope,),
        final_norm=norm,
        tied_head=c.flag("tie_word_embeddings", False),
    )


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("sliding_window")
    bias = c.flag("attention_bias", False)
    return llama_like(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias", False))


FAMILY = Family("LlamaForCausalLM", read, NAMES)
