"""Mixtral: Mistral whose MLPs are mixtures of experts."""

from __future__ import annotations

from quire.layers.spec import MoeSpec, RouterSpec
from quire.models.config_reader import ConfigReader
from quire.models.families import llama, moe
from quire.models.families.mistral import every_window
from quire.models.family import Family
from quire.models.rope_config import rope_of
from quire.models.spec import DecoderSpec

NAMES = moe.names({
    "block_sparse_moe.gate": "mlp.router",
    "block_sparse_moe.experts.{}.w1": "mlp.experts.{}.gate",
    "block_sparse_moe.experts.{}.w2": "mlp.experts.{}.down",
    "block_sparse_moe.experts.{}.w3": "mlp.experts.{}.up",
})


def read(c: ConfigReader) -> DecoderSpec:
    router = RouterSpec(moe.count_of_experts(c, "num_local_experts", "num_experts"), c.size("num_experts_per_tok"))
    experts = MoeSpec(router, c.size("intermediate_size"), c.activation("hidden_act", "silu", gated=True))
    return llama.llama_like(
        c, qkv_bias=False, out_bias=False, windows=every_window(c), eps=1e-5, mlp_of=lambda index: experts,
        ropes_of=lambda dim: (rope_of(c, dim, default_theta=1_000_000.0),),
    )


FAMILY = Family("MixtralForCausalLM", read, NAMES, handles=("num_local_experts", "num_experts"))
