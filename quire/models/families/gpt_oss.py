"""gpt-oss: experts with biases and a clamped SwiGLU, attention sinks, a window on every other layer."""

from __future__ import annotations

from quire.layers.spec import Clamp, MoeSpec, RouterSpec
from quire.models.config_reader import MAX_LAYERS, MAX_POSITIONS, ConfigReader
from quire.models.families import llama, moe
from quire.models.family import Family
from quire.models.rope_config import rope_of
from quire.models.spec import DecoderSpec
from quire.models.weight_names import Merged, WeightNames

_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""The rotation of a config that says nothing of it."""
_GATE_UP = ("mlp.experts.{}.gate", "mlp.experts.{}.up")
_DOWN = ("mlp.experts.{}.down",)
NAMES = WeightNames(
    top=llama.NAMES.top,
    layer={**llama.ATTENTION, **llama.NORMS, "mlp.router": "mlp.router"},
    ignored=llama.NAMES.ignored,
    alone={"self_attn.sinks": "attn.sinks.weight"},
    merged={
        "mlp.experts.gate_up_proj": Merged(_GATE_UP, transposed=True, interleaved=True),
        "mlp.experts.gate_up_proj_bias": Merged(_GATE_UP, kind="bias", interleaved=True),
        "mlp.experts.down_proj": Merged(_DOWN, transposed=True),
        "mlp.experts.down_proj_bias": Merged(_DOWN, kind="bias"),
        **{f"mlp.experts.{part}_proj.{kind}": Merged((f"mlp.experts.{{}}.{part}",), kind=kind)
           for part in ("gate", "up", "down") for kind in ("weight", "bias")},  # as GGUF has them
    },
)


def read(c: ConfigReader) -> DecoderSpec:
    stored = c.get("quantization_config")
    if stored is not None and (not isinstance(stored, dict) or stored.get("quant_method") != "mxfp4"):
        c.refuse("quantization_config", stored, "; known: mxfp4")
    count = c.size("num_hidden_layers", most=MAX_LAYERS)
    window = c.size("sliding_window", 128, most=MAX_POSITIONS)
    bias = c.flag("attention_bias", True)
    count_of = moe.count_of_experts(c, "num_local_experts", "num_experts")
    experts = MoeSpec(
        RouterSpec(count_of, c.size("num_experts_per_tok"), bias=True),
        c.size("intermediate_size"),
        c.activation("hidden_act", "silu", gated=True),
        bias=True,
        clamp=Clamp(c.number("swiglu_limit", 7.0), c.number("swiglu_alpha", 1.702)),
    )
    return llama.llama_like(
        c, qkv_bias=bias, out_bias=bias, head_dim=64, sinks=True, eps=1e-5, mlp_of=lambda index: experts,
        ropes_of=lambda dim: (rope_of(c, dim, default_theta=150_000.0, unless_said=_YARN),),
        windows=c.layer_windows(count, window, [index % 2 == 0 for index in range(count)]),
    )


FAMILY = Family("GptOssForCausalLM", read, NAMES, handles=("num_local_experts", "num_experts", "quantization_config"))
