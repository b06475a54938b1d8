"""DeepSeek-V2 and V2-Lite: latent attention, and experts chosen by softmax scores, beside an MLP for every token."""

from __future__ import annotations

from quire.layers.spec import MlpSpec, MoeSpec, RouterSpec
from quire.models.config_reader import ConfigReader
from quire.models.families import moe
from quire.models.families.deepseek_v3 import NAMES, latent_decoder
from quire.models.families.glm4_moe import expert_groups, first_dense
from quire.models.family import Family
from quire.models.spec import DecoderSpec


def experts(c: ConfigReader) -> MoeSpec:
    """Softmax scores, not renormalised; a group counts its best expert."""
    activation = c.activation("hidden_act", "silu", gated=True)
    count = moe.count_of_experts(c, "n_routed_experts", "num_experts")
    method = c.get("topk_method") or "greedy"
    if method not in ("greedy", "group_limited_greedy"):
        c.refuse("topk_method", method, "; known: greedy, group_limited_greedy")
    groups, chosen = expert_groups(c, count, 1, 1) if method == "group_limited_greedy" else (1, 1)
    router = RouterSpec(
        count, c.size("num_experts_per_tok"), "softmax", renormalised=False,
        scale=c.number("routed_scaling_factor", 1.0), groups=groups, chosen_groups=chosen,
    )
    width, shared = c.size("moe_intermediate_size", 1407), c.size("n_shared_experts", 2, most=4096)
    return MoeSpec(router, width, activation, shared=MlpSpec(width * shared, activation))


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("scoring_func", "softmax")
    c.allow("norm_topk_prob", False)
    c.allow("moe_layer_freq", 1)
    c.allow("mlp_bias", False)
    dense = first_dense(c, 0)
    mlps = moe.mlp_of(c, experts(c), lambda index: index < dense)
    return latent_decoder(c, mlps, interleaved=True, default_q_rank=1536)


FAMILY = Family("DeepseekV2ForCausalLM", read, NAMES, handles=("n_routed_experts", "num_experts"))
