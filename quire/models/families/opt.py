"""OPT: learned positions, layer norms before (in the 350M after) each part, plain ReLU MLP, biases."""

from __future__ import annotations

from quire.layers.spec import AttentionSpec, MlpSpec, NormSpec
from quire.models.config_reader import MAX_HIDDEN, MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.family import Family
from quire.models.spec import DecoderSpec, LayerSpec, PositionSpec
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top={
        "model.decoder.embed_tokens": "embed",
        "model.decoder.embed_positions": "positions",
        "model.decoder.project_in": "embed_in",
        "model.decoder.project_out": "embed_out",
        "model.decoder.final_layer_norm": "final_norm",
        "lm_head": "head",
    },
    layer={
        "self_attn.q_proj": "attn.q",
        "self_attn.k_proj": "attn.k",
        "self_attn.v_proj": "attn.v",
        "self_attn.out_proj": "attn.out",
        "fc1": "mlp.up",
        "fc2": "mlp.down",
        "self_attn_layer_norm": "attn_norm",
        "final_layer_norm": "mlp_norm",
    },
    layers_prefix="model.decoder.layers.",
    optional_prefix="model.",
)
POSITION_OFFSET = 2
"""The table's first two rows were the padding's."""


def read(c: ConfigReader) -> DecoderSpec:
    hidden = c.size("hidden_size", 768, most=MAX_HIDDEN)
    c.allow("num_key_value_heads", c.get("num_attention_heads"))
    heads, kv_heads, dim = c.heads(hidden)
    if dim * heads != hidden:
        c.fail("head_dim", f"times num_attention_heads must be hidden_size: {dim} x {heads} is not {hidden}")
    bias = c.flag("enable_bias", True)
    affine = c.flag("layer_norm_elementwise_affine", True)
    before = c.flag("do_layer_norm_before", True)
    norm = NormSpec("layer", 1e-5, bias=affine, affine=affine)
    layer = LayerSpec(
        AttentionSpec(heads, kv_heads, dim, scale=dim**-0.5, qkv_bias=bias, out_bias=bias, rope=None),
        MlpSpec(
            c.size("ffn_dim", 3072),
            c.activation("activation_function", "relu", False),
            gated=False,
            bias=bias,
        ),
        norm,
        placement="pre" if before else "post",
    )
    limit = c.size("max_position_embeddings", 2048, most=MAX_POSITIONS)
    return DecoderSpec(
        c.architecture,
        vocab_size=c.size("vocab_size", 50272),
        hidden_size=hidden,
        max_positions=limit,
        layers=(layer,) * c.size("num_hidden_layers", 12, most=MAX_LAYERS),
        final_norm=norm if before and not c.flag("_remove_final_layer_norm", False) else None,
        embed_dim=c.size("word_embed_proj_dim", hidden, most=MAX_HIDDEN),
        positions=PositionSpec(limit + POSITION_OFFSET, POSITION_OFFSET),
        tied_head=c.flag("tie_word_embeddings", True),
    )


FAMILY = Family("OPTForCausalLM", read, NAMES)
