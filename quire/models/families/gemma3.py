"""Gemma 3 text: window and full layers, each kind with its own rotation; norms around every part."""

from __future__ import annotations

from collections.abc import Mapping

from quire.layers.spec import AttentionSpec, MlpSpec, NormSpec, RopeSpec
from quire.models.config_reader import (
    MAX_HIDDEN,
    MAX_LAYERS,
    MAX_POSITIONS,
    ConfigReader,
    positive,
    reach,
    read_rope,
)
from quire.models.families import llama
from quire.models.family import Family
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
FULL_ROPE, WINDOW_ROPE = 0, 1


def _ropes(c: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The full layers' rotation and the window layers', which transformers 4 never scales."""
    fields = c.get("rope_parameters")
    if fields is None:
        scaling = c.get("rope_scaling") or {}
        if not isinstance(scaling, Mapping):
            c.fail("rope_scaling", f"must be an object, not {scaling!r}")
        full = read_rope(c, scaling, c.number("rope_theta", 1_000_000.0), head_dim)
        return full, RopeSpec(c.number("rope_local_base_freq", 10_000.0), head_dim)
    if not isinstance(fields, Mapping) or not {"full_attention", "sliding_attention"} & fields.keys():
        c.fail("rope_parameters", "must hold full_attention and sliding_attention")
    window = fields.get("sliding_attention") or {}
    theta = window.get("rope_theta") if isinstance(window, Mapping) else None
    theta = positive(c, "rope_theta", theta, c.number("rope_local_base_freq", 10_000.0))
    return c.rope(head_dim, "full_attention", 1_000_000.0), read_rope(c, window, theta, head_dim)


def _windows(c: ConfigReader) -> list[int | None]:
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    every = c.size("sliding_window_pattern", 6)
    return c.layer_windows(
        count,
        c.size("sliding_window", 4096, most=MAX_POSITIONS),
        [bool((i + 1) % every) for i in range(count)],
    )


def read(c: ConfigReader) -> DecoderSpec:
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
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                heads,
                kv_heads,
                dim,
                scale=c.number("query_pre_attn_scalar", 256) ** -0.5,
                qkv_bias=bias,
                out_bias=bias,
                qk_norm=norm,
                rope=FULL_ROPE if window is None else WINDOW_ROPE,
                window=window,
                softcap=c.optional_number("attn_logit_softcapping"),
            ),
            mlp,
            norm,
            placement="sandwich",
        )
        for window in _windows(c)
    )
    ropes = _ropes(c, dim)
    return DecoderSpec(
        c.architecture,
        vocab_size=c.size("vocab_size", 262_208),
        hidden_size=hidden,
        max_positions=reach(
            c.size("max_position_embeddings", 131_072, most=MAX_POSITIONS), ropes[FULL_ROPE]
        ),
        layers=layers,
        ropes=ropes,
        final_norm=norm,
        embed_scale=hidden**0.5,
        tied_head=c.flag("tie_word_embeddings", True),
        logit_softcap=c.optional_number("final_logit_softcapping"),
    )


FAMILY = Family("Gemma3ForCausalLM", read, NAMES)
