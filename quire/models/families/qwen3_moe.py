"""Qwen3-MoE: Qwen3 whose MLPs, or some of them, are mixtures of experts."""

from __future__ import annotations

from quire.layers.spec import MoeSpec, RouterSpec
from quire.models.config_reader import ConfigReader
from quire.models.families import moe
from quire.models.families.llama import llama_like
from quire.models.families.mistral import every_window
from quire.models.family import Family
from quire.models.spec import DecoderSpec


def read(c: ConfigReader) -> DecoderSpec:
    bias = c.flag("attention_bias", False)
    experts = MoeSpec(
        RouterSpec(
            moe.count_of_experts(c, "num_experts", "num_local_experts"),
            c.size("num_experts_per_tok"),
            renormalised=c.flag("norm_topk_prob", False),
        ),
        c.size("moe_intermediate_size"),
        c.activation("hidden_act", "silu", gated=True),
    )
    windows = every_window(c, absent=4096) if c.flag("use_sliding_window", False) else None
    return llama_like(
        c, qkv_bias=bias, out_bias=bias, qk_norm="head", head_dim=128, windows=windows,
        mlp_of=moe.mlp_of(c, experts, moe.sparse_steps(c)),
    )


FAMILY = Family("Qwen3MoeForCausalLM", read, moe.names({}), handles=("num_experts", "num_local_experts"))
