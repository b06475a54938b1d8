"""GPT-2: learned positions, layer norms, plain GELU MLP; weights stored transposed, q, k and v in one."""

from __future__ import annotations

from quire.layers.spec import AttentionSpec, MlpSpec, NormSpec
from quire.models.config_reader import MAX_HEADS, MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.family import Family
from quire.models.spec import DecoderSpec, LayerSpec, PositionSpec
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top={
        "transformer.wte": "embed",
        "transformer.wpe": "positions",
        "transformer.ln_f": "final_norm",
        "lm_head": "head",
    },
    layer={
        "attn.c_attn": ("attn.q", "attn.k", "attn.v"),
        "attn.c_proj": "attn.out",
        "mlp.c_fc": "mlp.up",
        "mlp.c_proj": "mlp.down",
        "ln_1": "attn_norm",
        "ln_2": "mlp_norm",
    },
    layers_prefix="transformer.h.",
    optional_prefix="transformer.",
    transposed=frozenset({"attn.q", "attn.k", "attn.v", "attn.out", "mlp.up", "mlp.down"}),
    ignored=(".attn.bias", ".attn.masked_bias"),
)


def read(c: ConfigReader) -> DecoderSpec:
    hidden = c.size("n_embd", 768, most=MAX_HIDDEN)
    heads = c.size("n_head", 12, most=MAX_HEADS)
    if hidden % heads:
        c.fail("n_head", f"must divide n_embd: {heads} does not divide {hidden}")
    dim = hidden // heads
    scale = dim**-0.5 if c.flag("scale_attn_weights", True) else 1.0
    by_layer = c.flag("scale_attn_by_inverse_layer_idx", False)
    norm = NormSpec("layer", c.number("layer_norm_epsilon", 1e-5), bias=True)
    act = c.activation("activation_function", "gelu_new", gated=False)
    mlp = MlpSpec(c.size("n_inner", 4 * hidden), act, gated=False, bias=True)
    limit = c.size("n_positions", 1024, most=MAX_POSITIONS)
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                heads,
                heads,
                dim,
                scale=scale / (index + 1) if by_layer else scale,
                qkv_bias=True,
                out_bias=True,
                rope=None,
            ),
            mlp,
            norm,
        )
        for index in range(c.size("n_layer", 12, most=MAX_LAYERS))
    )
    return DecoderSpec(
        c.architecture,
        vocab_size=c.size("vocab_size", 50257),
        hidden_size=hidden,
        max_positions=limit,
        layers=layers,
        final_norm=norm,
        positions=PositionSpec(limit),
        tied_head=c.flag("tie_word_embeddings", True),
    )


FAMILY = Family("GPT2LMHeadModel", read, NAMES)
