"""OLMoE: Llama with experts, and one norm over all query heads and one over all key heads."""

from __future__ import annotations

from quire.layers.spec import MoeSpec, RouterSpec
from quire.models.config_reader import ConfigReader
from quire.models.families import moe
from quire.models.families.llama import llama_like
from quire.models.family import Family
from quire.models.spec import DecoderSpec


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("clip_qkv")
    bias = c.flag("attention_bias", False)
    experts = MoeSpec(
        RouterSpec(
            moe.count_of_experts(c, "num_experts"),
            c.size("num_experts_per_tok"),
            renormalised=c.flag("norm_topk_prob", False),
        ),
        c.size("intermediate_size"),
        c.activation("hidden_act", "silu", gated=True),
    )
    return llama_like(
        c, qkv_bias=bias, out_bias=bias, qk_norm="all", eps=1e-5, mlp_of=lambda index: experts
    )


FAMILY = Family("OlmoeForCausalLM", read, moe.names({}), handles=("num_experts",))
