"""Gemma 3 text: window and full layers, each kind with its own rotation; norms around every part."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.layers.spec import AttentionSpec, MlpSpec, NormSpec, RopeSpec
from quire.models.config_reader import MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.families import llama
from quire.models.family import Family
from quire.models.rope_config import full_and_window_ropes, reach
from quire.models.spec import DecoderSpec, LayerSpec
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top=llama.NAMES.top,
    layer={
        **llama.NAMES.layer,
        "post_attention_layernorm": "attn_post_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_post_norm",
    },
    ignored=llama.NAMES.ignored,
)


def gemma_like(
    c: ConfigReader,
    ropes_of: Callable[[int], tuple[RopeSpec, ...]],
    *,
    windowed: Sequence[bool],
    qk_norm: bool,
    vocab: int,
    positions: int,
    attention_cap: float | None = None,
    logit_cap: float | None = None,
) -> DecoderSpec:
    """Norms around every part, scaled embeddings, gated GELU, windows on some layers.

    `ropes_of` a head size gives the full layers' rotation and, where it differs, the window layers'. The numbers
    are what a config that does not say means; `windowed` has one entry per layer.
    """
    hidden = c.size("hidden_size", 2304, most=MAX_HIDDEN)
    heads, kv_heads, dim = c.heads(hidden, 256)
    norm = NormSpec("rms", c.number("rms_norm_eps", 1e-6), weight_offset=1.0)
    bias = c.flag("attention_bias", False)
    act = c.activation(
        "hidden_act" if c.get("hidden_activation") is None else "hidden_activation",
        "gelu_pytorch_tanh",
        gated=True,
    )
    mlp = MlpSpec(c.size("intermediate_size", 9216), act)
    ropes = ropes_of(dim)
    windows = c.layer_windows(len(windowed), c.size("sliding_window", 4096, most=MAX_POSITIONS), windowed)
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                heads,
                kv_heads,
                dim,
                scale=c.number("query_pre_attn_scalar", 256) ** -0.5,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=norm if qk_norm else None,
                rope=0 if window is None else len(ropes) - 1,
                window=window,
                softcap=c.optional_number("attn_logit_softcapping", attention_cap),
            ),
            mlp,
            norm,
            placement="sandwich",
        )
        for window in windows
    )
    return DecoderSpec(
        c.architecture,
        vocab_size=c.size("vocab_size", vocab),
        hidden_size=hidden,
        max_positions=reach(c.size("max_position_embeddings", positions, most=MAX_POSITIONS), ropes[0]),
        layers=layers,
        ropes=ropes,
        final_norm=norm,
        embed_scale=hidden**0.5,
        tied_head=c.flag("tie_word_embeddings", True),
        logit_softcap=c.optional_number("final_logit_softcapping", logit_cap),
    )


def read(c: ConfigReader) -> DecoderSpec:
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    every = c.size("sliding_window_pattern", 6)
    return gemma_like(
        c,
        lambda dim: full_and_window_ropes(c, dim, 1_000_000.0, c.number("rope_local_base_freq", 10_000.0)),
        windowed=[bool((index + 1) % every) for index in range(count)],
        qk_norm=True,
        vocab=262_208,
        positions=131_072,
    )


FAMILY = Family("Gemma3ForCausalLM", read, NAMES)
