"""Qwen2-MoE: Qwen2 with experts, and one more MLP for every token, weighed by a gate of its own."""

from __future__ import annotations

from quire.layers.spec import MlpSpec, MoeSpec, RouterSpec
from quire.models.config_reader import ConfigReader
from quire.models.families import moe
from quire.models.families.llama import llama_like
from quire.models.families.qwen2 import some_windows
from quire.models.family import Family
from quire.models.spec import DecoderSpec

NAMES = moe.names({
    "mlp.shared_expert.gate_proj": "mlp.shared.gate",
    "mlp.shared_expert.up_proj": "mlp.shared.up",
    "mlp.shared_expert.down_proj": "mlp.shared.down",
    "mlp.shared_expert_gate": "mlp.shared_gate",
})


def _lower_even(index: int, first: int) -> bool:
    """Which layers have the window where no `layer_types` says so: every other one before max_window_layers."""
    return index % 2 == 0 and index < first


def read(c: ConfigReader) -> DecoderSpec:
    activation = c.activation("hidden_act", "silu", gated=True)
    experts = MoeSpec(
        RouterSpec(
            moe.count_of_experts(c, "num_experts"),
            c.size("num_experts_per_tok"),
            renormalised=c.flag("norm_topk_prob", False),
        ),
        c.size("moe_intermediate_size"),
        activation,
        shared=MlpSpec(c.size("shared_expert_intermediate_size"), activation),
        shared_gate=True,
    )
    return llama_like(
        c, qkv_bias=c.flag("qkv_bias", True), out_bias=False, windows=some_windows(c, _lower_even),
        mlp_of=moe.mlp_of(c, experts, moe.sparse_steps(c)),
    )


FAMILY = Family("Qwen2MoeForCausalLM", read, NAMES, handles=("num_experts",))
