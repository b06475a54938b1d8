"""GLM-4 of 0414: norms around every part, fused gate and up, half of each head turns, in interleaved pairs."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families import llama
from quire.models.families.glm import glm_like
from quire.models.family import Family
from quire.models.spec import DecoderSpec
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top=llama.NAMES.top,
    layer={
        **llama.ATTENTION,
        **llama.NORMS,
        "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        "mlp.down_proj": "mlp.down",
        "post_self_attn_layernorm": "attn_post_norm",
        "post_mlp_layernorm": "mlp_post_norm",
    },
    ignored=llama.NAMES.ignored,
)


def read(c: ConfigReader) -> DecoderSpec:
    return glm_like(c, "sandwich")


FAMILY = Family("Glm4ForCausalLM", read, NAMES, handles=("partial_rotary_factor",))
