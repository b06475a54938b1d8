"""Phi-3 and Phi-4: Llama with fused projections, heads that may turn in part, and longrope scaling."""

from __future__ import annotations

from quire.models.config_reader import ConfigReader
from quire.models.families import llama
from quire.models.families.mistral import every_window
from quire.models.family import Family
from quire.models.rope_config import rope_of
from quire.models.spec import DecoderSpec
from quire.models.weight_names import WeightNames

NAMES = WeightNames(
    top=llama.NAMES.top,
    layer={
        "self_attn.qkv_proj": ("attn.q", "attn.k", "attn.v"),
        "self_attn.o_proj": "attn.out",
        "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
        "mlp.down_proj": "mlp.down",
        **llama.NORMS,
    },
    ignored=llama.NAMES.ignored,
)


def read(c: ConfigReader) -> DecoderSpec:
    for bias in ("attention_bias", "mlp_bias", "lm_head_bias"):
        c.allow(bias, False)
    return llama.llama_like(
        c,
        qkv_bias=False,
        out_bias=False,
        windows=every_window(c),
        ropes_of=lambda dim: (rope_of(c, dim, partial=1.0),),
        eps=1e-5,
    )


FAMILY = Family("Phi3ForCausalLM", read, NAMES, handles=("partial_rotary_factor",))
