"""Cohere Command R: attention and MLP read the same layer norm, interleaved rotation, scaled logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.layers.spec import AttentionSpec, MlpSpec, NormSpec, RopeSpec
from quire.models.config_reader import MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.families import llama
from quire.models.family import Family
from quire.models.rope_config import reach, rope_of
from quire.models.spec import DecoderSpec, LayerSpec
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top=llama.NAMES.top,
    layer={**llama.ATTENTION, **llama.MLP, "input_layernorm": "attn_norm"},
    ignored=llama.NAMES.ignored,
)


def cohere_like(
    c: ConfigReader,
    windows: Sequence[int | None],
    turns: Callable[[int | None], bool],
    *,
    qk_norm: bool,
    positions: int,
    theta: float,
) -> DecoderSpec:
    """`windows` has one entry per layer; `turns` says of a layer's window whether that layer rotates. `theta` is
    what a config that does not say means."""
    hidden = c.size("hidden_size", most=MAX_HIDDEN)
    heads, kv_heads, dim = c.heads(hidden)
    bias = c.flag("attention_bias", False)
    norm = NormSpec("layer", c.number("layer_norm_eps", 1e-5))
    mlp = MlpSpec(c.size("intermediate_size"), c.activation("hidden_act", "silu", gated=True))
    rope: RopeSpec = rope_of(c, dim, default_theta=theta, interleaved=True)
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                heads,
                kv_heads,
                dim,
                scale=dim**-0.5,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=norm if qk_norm else None,
                qk_norm_over="each",
                rope=0 if turns(window) else None,
                window=window,
            ),
            mlp,
            norm,
            placement="parallel",
        )
        for window in windows
    )
    return DecoderSpec(
        c.architecture,
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden,
        max_positions=reach(positions, rope),
        layers=layers,
        ropes=(rope,),
        final_norm=NormSpec("layer", norm.eps, scale=c.number("logit_scale", 0.0625)),
        tied_head=c.flag("tie_word_embeddings", True),
    )


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("sliding_window")
    trained = c.size("max_position_embeddings", most=MAX_POSITIONS)
    return cohere_like(
        c,
        [None] * c.size("num_hidden_layers", most=MAX_LAYERS),
        lambda window: True,
        qk_norm=c.flag("use_qk_norm", False),
        # The first Command R says 8192 positions and was trained at the 131072 of this field.
        positions=c.size("model_max_length", trained, most=MAX_POSITIONS),
        theta=500_000.0,
    )


FAMILY = Family("CohereForCausalLM", read, NAMES)
