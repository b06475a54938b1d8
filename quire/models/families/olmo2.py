"""OLMo 2: Llama with a norm after each part instead of before it, and one over all query and all key heads."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families import llama
from quire.models.family import Family
from quire.models.spec import DecoderSpec
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top=llama.NAMES.top,
    layer={
        **llama.ATTENTION,
        **llama.MLP,
        "post_attention_layernorm": "attn_norm",
        "post_feedforward_layernorm": "mlp_norm",
    },
    ignored=llama.NAMES.ignored,
)


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("sliding_window")
    bias = c.flag("attention_bias", False)
    return llama.llama_like(c, qkv_bias=bias, out_bias=bias, qk_norm="all", eps=1e-5, placement="output")


FAMILY = Family("Olmo2ForCausalLM", read, NAMES)
