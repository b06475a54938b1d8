"""GLM-4.5 and 4.6: experts chosen by sigmoid scores and a bias for the choice, after some dense layers."""

from __future__ import annotations

from dataclasses import replace

from quire.layers.spec import MlpSpec, MoeSpec, RouterSpec
from quire.models.config_reader import MAX_LAYERS, ConfigReader
from quire.models.families import moe
from quire.models.families.llama import llama_like
from quire.models.family import Family
from quire.models.rope_config import rope_of
from quire.models.spec import DecoderSpec

SHARED = {
    "mlp.shared_experts.gate_proj": "mlp.shared.gate",
    "mlp.shared_experts.up_proj": "mlp.shared.up",
    "mlp.shared_experts.down_proj": "mlp.shared.down",
}
NAMES = moe.names(SHARED, alone={"mlp.gate.e_score_correction_bias": "mlp.choice.bias"})


def expert_groups(c: ConfigReader, experts: int, groups: int, chosen: int) -> tuple[int, int]:
    """How many groups the experts stand in, and from how many a token may choose; the defaults are the family's."""
    groups, chosen = c.size("n_group", groups, most=4096), c.size("topk_group", chosen, most=4096)
    if experts % groups or chosen > groups:
        c.fail("n_group", f"must divide the {experts} experts, and be at least topk_group: {groups} and {chosen}")
    return groups, chosen


def extra_layers(c: ConfigReader) -> int:
    """Layers behind the last one that guess further tokens; checkpoints hold them, and they are not read."""
    return c.size("num_nextn_predict_layers", most=MAX_LAYERS) if c.get("num_nextn_predict_layers") else 0


def deepseek_experts(c: ConfigReader, groups: int = 1, chosen_groups: int = 1, scale: float = 1.0) -> MoeSpec:
    """Sigmoid scores, a bias for the choice, groups of experts, a shared MLP as wide as so many experts. The numbers
    are what a config that does not say means."""
    activation = c.activation("hidden_act", "silu", gated=True)
    count = moe.count_of_experts(c, "n_routed_experts", "num_local_experts")
    groups, chosen = expert_groups(c, count, groups, chosen_groups)
    width = c.size("moe_intermediate_size")
    shared = None if c.get("n_shared_experts") == 0 else c.optional_size("n_shared_experts", 1, most=4096)
    router = RouterSpec(
        count, c.size("num_experts_per_tok"), "sigmoid", c.flag("norm_topk_prob", True),
        c.number("routed_scaling_factor", scale), choice_bias=True, groups=groups, chosen_groups=chosen,
        group_score="best two",
    )
    return MoeSpec(router, width, activation, shared=None if shared is None else MlpSpec(width * shared, activation))


def first_dense(c: ConfigReader, default: int) -> int:
    """How many layers at the beginning are dense."""
    count = c.get("first_k_dense_replace")
    count = default if count is None else count
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_LAYERS:
        c.fail("first_k_dense_replace", f"must be an integer from 0, not {count!r}")
    return count


def read(c: ConfigReader) -> DecoderSpec:
    dense = first_dense(c, 1)
    found = llama_like(
        c,
        qkv_bias=c.flag("attention_bias", False),
        out_bias=False,
        qk_norm="head" if c.flag("use_qk_norm", False) else None,
        head_dim=128,
        ropes_of=lambda dim: (rope_of(c, dim, partial=0.5),),
        eps=1e-5,
        mlp_of=moe.mlp_of(c, deepseek_experts(c), lambda index: index < dense),
    )
    return replace(found, extra_layers=extra_layers(c))


FAMILY = Family("Glm4MoeForCausalLM", read, NAMES, handles=("n_routed_experts", "partial_rotary_factor"))
