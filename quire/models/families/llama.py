"""Llama (also Falcon 3, SmolLM2, ...), and `llama_like` for its relatives (Mistral, Qwen, ...)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from quire.layers.spec import AttentionSpec, MlpSpec, MoeSpec, NormSpec, RopeSpec
from quire.models.config_reader import MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.family import Family
from quire.models.rope_config import reach, rope_of
from quire.models.spec import DecoderSpec, LayerSpec, NormPlacement
from quire.models.weight_names import WeightNames

ATTENTION = {
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.out",
    "self_attn.q_norm": "attn.q_norm",
    "self_attn.k_norm": "attn.k_norm",
}
MLP = {"mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
NAMES = WeightNames(
    top={"model.embed_tokens": "embed", "model.norm": "final_norm", "lm_head": "head"},
    layer={**ATTENTION, **MLP, **NORMS},
    ignored=("rotary_emb.inv_freq",),
)


def llama_like(
    c: ConfigReader,
    *,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool = False,
    qk_norm: Literal["head", "all"] | None = None,
    head_dim: int | None = None,
    windows: Sequence[int | None] | None = None,
    rotated: Sequence[bool] | None = None,
    ropes_of: Callable[[int], tuple[RopeSpec, ...]] | None = None,
    sinks: bool = False,
    eps: float = 1e-6,
    tied: bool = False,
    placement: NormPlacement = "pre",
    mlp_of: Callable[[int], MlpSpec | MoeSpec] | None = None,
) -> DecoderSpec:
    """A decoder with RMS norms and gated MLPs, or the MLP or experts that `mlp_of(layer index)` returns.

    `windows` and `rotated` have one entry per layer. `qk_norm`: norm q and k per head or over all heads. `ropes_of(head
    size)` returns one rope, or two: for full and for window layers. `head_dim`, `eps`, `tied` are config defaults.
    """
    hidden = c.size("hidden_size", most=MAX_HIDDEN)
    heads, kv_heads, dim = c.heads(hidden, head_dim)
    norm = NormSpec("rms", c.number("rms_norm_eps", eps))
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    if mlp_of is None:
        dense = MlpSpec(c.size("intermediate_size"), c.activation("hidden_act", "silu", gated=True), bias=mlp_bias)
    mlps = [dense if mlp_of is None else mlp_of(index) for index in range(count)]
    ropes = (rope_of(c, dim),) if ropes_of is None else ropes_of(dim)
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
                qk_norm_over=qk_norm or "head",
                rope=None if not turns else 0 if window is None else len(ropes) - 1,
                window=window,
                sinks=sinks,
            ),
            mlp,
            norm,
            placement,
        )
        for window, turns, mlp in zip(windows or [None] * count, rotated or [True] * count, mlps, strict=True)
    )
    return DecoderSpec(
        c.architecture,
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden,
        max_positions=reach(c.size("max_position_embeddings", most=MAX_POSITIONS), ropes[0]),
        layers=layers,
        ropes=ropes,
        final_norm=norm,
        tied_head=c.flag("tie_word_embeddings", tied),
    )


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("sliding_window")
    bias = c.flag("attention_bias", False)
    return llama_like(c, qkv_bias=bias, out_bias=bias, mlp_bias=c.flag("mlp_bias", False))


FAMILY = Family("LlamaForCausalLM", read, NAMES)
