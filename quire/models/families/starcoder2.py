"""StarCoder2: Llama with layer norms, biases, a plain GELU MLP and a window on every layer."""

from __future__ import annotations

from quire.layers.spec import AttentionSpec, MlpSpec, NormSpec
from quire.models.config_reader import MAX_HIDDEN, MAX_POSITIONS, ConfigReader
from quire.models.families import llama
from quire.models.families.mistral import every_window
from quire.models.family import Family
from quire.models.rope_config import reach, rope_of
from quire.models.spec import DecoderSpec, LayerSpec
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top=llama.NAMES.top,
    layer={**llama.ATTENTION, **llama.NORMS, "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"},
    ignored=llama.NAMES.ignored,
)


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("norm_type", "layer_norm")
    c.allow("mlp_type", "default")
    hidden = c.size("hidden_size", most=MAX_HIDDEN)
    heads, kv_heads, dim = c.heads(hidden)
    bias = c.flag("use_bias", True)
    norm = NormSpec("layer", c.number("norm_epsilon", 1e-5), bias=True)
    act = c.activation("hidden_act", "gelu_pytorch_tanh", gated=False)
    mlp = MlpSpec(c.size("intermediate_size"), act, gated=False, bias=bias)
    layers = tuple(
        LayerSpec(
            AttentionSpec(
                heads, kv_heads, dim, scale=dim**-0.5, qkv_bias=bias, out_bias=bias, window=window
            ),
            mlp,
            norm,
        )
        for window in every_window(c)
    )
    rope = rope_of(c, dim)
    return DecoderSpec(
        c.architecture,
        vocab_size=c.size("vocab_size"),
        hidden_size=hidden,
        max_positions=reach(c.size("max_position_embeddings", most=MAX_POSITIONS), rope),
        layers=layers,
        ropes=(rope,),
        final_norm=norm,
        tied_head=c.flag("tie_word_embeddings", True),
    )


FAMILY = Family("Starcoder2ForCausalLM", read, NAMES)
