"""GLM-4-9B (2024): as GLM-4 of 0414, but with norms before every part only."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families import llama
from quire.models.family import Family
from quire.models.rope_config import rope_of
from quire.models.spec import DecoderSpec, NormPlacement
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top=llama.NAMES.top,
    layer={
        **llama.ATTENTION,
        **llama.NORMS,
        "self_attn.qkv_proj": ("attn.q", "attn.k", "attn.v"),  # in GGUF
        "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        "mlp.down_proj": "mlp.down",
    },
    ignored=llama.NAMES.ignored,
)


def glm_like(c: ConfigReader, placement: NormPlacement) -> DecoderSpec:
    return llama.llama_like(
        c,
        qkv_bias=c.flag("attention_bias", True),
        out_bias=False,
        head_dim=128,
        ropes_of=lambda dim: (rope_of(c, dim, partial=0.5, interleaved=True),),
        eps=1.5625e-7,
        placement=placement,
    )


def read(c: ConfigReader) -> DecoderSpec:
    return glm_like(c, "pre")


FAMILY = Family("GlmForCausalLM", read, NAMES, handles=("partial_rotary_factor",))
