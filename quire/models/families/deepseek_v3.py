"""DeepSeek-V3, R1 and Kimi-K2: latent attention, and experts chosen by sigmoid scores within the best groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from quire.layers.spec import AttentionSpec, LatentSpec, MlpSpec, MoeSpec, NormSpec
from quire.models.config_reader import MAX_HEADS, MAX_HIDDEN, ConfigReader
from quire.models.families import llama, moe
from quire.models.families.glm4_moe import SHARED, deepseek_experts, extra_layers, first_dense
from quire.models.family import Family
from quire.models.rope_config import rope_of, sharpened
from quire.models.spec import DecoderSpec
from quire.models.weight_names import WeightNames

LATENT = {
    "self_attn.q_proj": "attn.q",
    "self_attn.q_a_proj": "attn.q_a",
    "self_attn.q_a_layernorm": "attn.q_a_norm",
    "self_attn.q_b_proj": "attn.q_b",
    "self_attn.kv_a_proj_with_mqa": "attn.kv_a",
    "self_attn.kv_a_layernorm": "attn.kv_a_norm",
    "self_attn.kv_b_proj": "attn.kv_b",
    "self_attn.o_proj": "attn.out",
}
NAMES = WeightNames(
    top=llama.NAMES.top,
    layer={**LATENT, **llama.NORMS, **llama.MLP, **moe.EXPERTS, **SHARED},
    ignored=llama.NAMES.ignored,
    alone={"mlp.gate.e_score_correction_bias": "mlp.choice.bias"},
    merged=moe.MERGED,
)


def latent_decoder(
    c: ConfigReader, mlp_of: Callable[[int], MlpSpec | MoeSpec], interleaved: bool, default_q_rank: int
) -> DecoderSpec:
    """Llama's frame around latent attention. Norms of latents have an epsilon of 1e-6, whatever the others have."""
    rank = c.size("kv_lora_rank", 512, most=MAX_HIDDEN)
    q_rank = c.optional_size("q_lora_rank", default_q_rank, most=MAX_HIDDEN)
    nope, turned, value = (
        c.size(field, default, most=MAX_HEADS)
        for field, default in (("qk_nope_head_dim", 128), ("qk_rope_head_dim", 64), ("v_head_dim", 128))
    )
    bias, rope = c.flag("attention_bias", False), rope_of(c, turned, interleaved=interleaved)
    frame = llama.llama_like(
        c, qkv_bias=bias, out_bias=bias, head_dim=nope + turned, ropes_of=lambda _: (rope,), mlp_of=mlp_of
    )
    attention = AttentionSpec(
        frame.layers[0].attention.num_heads,
        num_kv_heads=1,
        head_dim=nope + turned,
        scale=(nope + turned) ** -0.5 * sharpened(c, rope),
        qkv_bias=bias,
        out_bias=bias,
        latent=LatentSpec(rank, nope, turned, value, NormSpec("rms", 1e-6), q_rank),
    )
    return replace(frame, layers=tuple(replace(layer, attention=attention) for layer in frame.layers))


def read(c: ConfigReader) -> DecoderSpec:
    c.allow("scoring_func", "sigmoid")
    c.allow("topk_method", "noaux_tc")
    c.allow("moe_layer_freq", 1)
    dense = first_dense(c, 3)
    found = latent_decoder(
        c,
        moe.mlp_of(c, deepseek_experts(c, groups=8, chosen_groups=4, scale=2.5), lambda index: index < dense),
        interleaved=c.flag("rope_interleave", True),
        default_q_rank=1536,
    )
    return replace(found, extra_layers=extra_layers(c))


FAMILY = Family("DeepseekV3ForCausalLM", read, NAMES, handles=("n_routed_experts", "num_local_experts"))
