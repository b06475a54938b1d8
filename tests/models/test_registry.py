"""Which configs are known, and what is said of the others."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.models.refused import reason
from quire.models.registry import FAMILIES, family_of, read_spec
from tests.checkpoints import GROWING

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
GEMMA: dict[str, Any] = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "head_dim": 16}
OPT: dict[str, Any] = {"architectures": ["OPTForCausalLM"], "num_attention_heads": 12}
GPT2: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"]}
BASES = {"llama": LLAMA, "gemma3": GEMMA, "opt": OPT, "gpt2": GPT2}
_LLAMA_LIKE = (
    *("Mistral", "Ministral", "Qwen2", "Qwen3", "SmolLM3", "Phi3", "Glm", "Glm4", "Gemma2", "Granite", "Starcoder2"),
    *("Olmo2", "Olmo3", "Cohere", "Cohere2"),
)
for _family in _LLAMA_LIKE:
    BASES[_family.lower()] = {**LLAMA, "architectures": [f"{_family}ForCausalLM"]}
BASES["ministral3"] = {**LLAMA, "architectures": ["Ministral3ForCausalLM"], "rope_parameters": GROWING}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}


def test_an_unknown_architecture_is_named_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        family_of({"architectures": ["FancyForCausalLM"]})
    assert "FancyForCausalLM" in str(caught.value)
    assert all(name in str(caught.value) for name in FAMILIES)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Qwen3NextForCausalLM", "recurrent state"),
        ("Qwen3_5ForCausalLM", "recurrent state"),
        ("GraniteMoeHybridForCausalLM", "recurrent state"),
        ("Lfm2ForCausalLM", "recurrent state"),
        ("GraniteMoeForCausalLM", "mixture of experts"),
        ("DeepseekV32ForCausalLM", "latent attention"),
    ],
)
def test_a_hybrid_or_a_mixture_is_refused_with_the_reason(name: str, why: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"{name}.*{why}"):
        family_of({"architectures": [name]})


def test_no_family_is_refused_by_name() -> None:
    assert not [name for name in FAMILIES if reason(name) is not None]


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", [3], {}])
def test_a_config_without_an_architecture_is_refused(names: object) -> None:
    with pytest.raises(ModelLoadError, match="architectures"):
        family_of({"architectures": names})


@pytest.mark.parametrize("family", BASES)
def test_the_smallest_config_of_each_family_is_read(family: str) -> None:
    assert read_spec(BASES[family]).architecture == BASES[family]["architectures"][0]


IMPOSSIBLE: list[tuple[str, str, object]] = [
    ("llama", "hidden_size", 0),
    ("llama", "hidden_size", -48),
    ("llama", "hidden_size", "48"),
    ("llama", "hidden_size", 48.0),
    ("llama", "hidden_size", True),
    ("llama", "hidden_size", None),
    ("llama", "hidden_size", 10**12),
    ("llama", "num_hidden_layers", 10**9),
    ("llama", "num_attention_heads", 7),
    ("llama", "num_key_value_heads", 4),
    ("llama", "head_dim", 7),
    ("llama", "vocab_size", 0),
    ("llama", "max_position_embeddings", 2**40),
    ("llama", "intermediate_size", None),
    ("llama", "rms_norm_eps", 0),
    ("llama", "rms_norm_eps", float("nan")),
    ("llama", "rms_norm_eps", float("inf")),
    ("llama", "rope_theta", -1.0),
    ("llama", "rope_parameters", [1]),
    ("llama", "tie_word_embeddings", "yes"),
    ("llama", "attention_bias", 1),
    ("mistral", "sliding_window", 0),
    ("qwen2", "max_window_layers", -1),
    ("qwen2", "layer_types", ["full_attention"]),
    ("qwen2", "layer_types", "full_attention"),
    ("gemma3", "rope_parameters", {"rope_theta": 10000.0}),
    ("gemma3", "query_pre_attn_scalar", 0),
    ("gemma3", "final_logit_softcapping", -3),
    ("smollm3", "no_rope_layers", [1, 0]),
    ("smollm3", "no_rope_layers", [1, 0, 2]),
    ("smollm3", "no_rope_layer_interval", 0),
    ("phi3", "partial_rotary_factor", 0.4),
    ("phi3", "partial_rotary_factor", 1.5),
    ("ministral3", "rope_parameters", {"rope_type": "default"}),
    ("ministral3", "rope_parameters", None),
    ("phi3", "rope_parameters", {**LONGROPE, "short_factor": [1.0] * 3}),
    ("phi3", "rope_parameters", {**LONGROPE, "long_factor": [1.0, 1.0, 1.0, "1"]}),
    ("glm4", "partial_rotary_factor", -1),
    ("gemma2", "attn_logit_softcapping", 0),
    ("starcoder2", "norm_epsilon", 0),
    ("granite", "residual_multiplier", 0),
    ("granite", "logits_scaling", -8),
    ("cohere", "logit_scale", 0),
    ("opt", "num_attention_heads", 5),
    ("gpt2", "n_head", 5),
    ("gpt2", "n_positions", 0),
]


@pytest.mark.parametrize("family, field, value", IMPOSSIBLE)
def test_an_impossible_value_is_refused_by_the_name_of_its_field(
    family: str, field: str, value: object
) -> None:
    with pytest.raises(ModelLoadError, match=field):
        read_spec({**BASES[family], field: value})


UNSUPPORTED: list[tuple[str, str, object]] = [
    ("llama", "hidden_act", "tanh"),
    ("llama", "hidden_act", "relu"),
    ("llama", "num_local_experts", 8),
    ("llama", "sliding_window", 128),
    ("llama", "partial_rotary_factor", 0.5),
    ("llama", "residual_multiplier", 0.5),
    ("mistral", "logits_scaling", 2.0),
    ("llama", "quantization_config", {"quant_method": "awq"}),
    ("llama", "is_encoder_decoder", True),
    ("mistral", "attention_bias", True),
    ("qwen2", "layer_types", ["full_attention", "chunked_attention", "full_attention"]),
    ("gemma3", "use_bidirectional_attention", True),
    ("gpt2", "add_cross_attention", True),
    ("phi3", "attention_bias", True),
    ("phi3", "lm_head_bias", True),
    ("phi3", "rope_parameters", {**LONGROPE, "short_mscale": 1.1}),
    ("starcoder2", "norm_type", "rms_norm"),
    ("olmo2", "sliding_window", 64),
    ("cohere", "sliding_window", 64),
    ("cohere2", "rotary_pct", 0.5),
    ("cohere2", "use_parallel_block", False),
    ("cohere2", "position_embedding_type", "absolute"),
    ("gemma2", "use_bidirectional_attention", True),
]


@pytest.mark.parametrize("family, field, value", UNSUPPORTED)
def test_an_unsupported_feature_is_refused_by_its_name(family: str, field: str, value: object) -> None:
    with pytest.raises(UnsupportedModelError, match=field):
        read_spec({**BASES[family], field: value})


ROPES: list[tuple[dict[str, Any], str]] = [
    ({"rope_type": "proportional", "factor": 2.0}, "rope_type"),
    ({"rope_type": "longrope", "original_max_position_embeddings": 64}, "short_factor"),
    ({"rope_type": ["yarn"]}, "rope_type"),
    ({"rope_type": "linear"}, "factor"),
    ({"rope_type": "linear", "factor": 0}, "factor"),
    ({"rope_type": "linear", "factor": 2.0, "long_factor": [1.0]}, "long_factor"),
    ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0}, "high_freq_factor"),
    (
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
        "high_freq_factor",
    ),
    ({"rope_type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "rope_theta"),
    ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": "64"}, "original_max"),
    ({"rope_type": "yarn", "original_max_position_embeddings": 0.5}, "original_max"),
    ({**LONGROPE, "original_max_position_embeddings": 0.5}, "original_max"),
    (LONGROPE, "original_max"),
    ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 1e30}, "original_max"),
    ({"full_attention": {}, "sliding_attention": {}}, "rope_parameters"),
    ({"full_attention": 3}, "rope_parameters"),
]


@pytest.mark.parametrize("rope, named", ROPES)
@pytest.mark.parametrize("field", ["rope_parameters", "rope_scaling"])
def test_a_rotation_that_cannot_be_is_refused(rope: dict[str, Any], named: str, field: str) -> None:
    with pytest.raises(ModelLoadError, match=named):
        read_spec({**LLAMA, field: rope})


def test_longrope_by_its_first_name_is_longrope() -> None:
    kinds = ("su", "longrope")
    base = {**BASES["phi3"], "original_max_position_embeddings": 64}
    specs = [read_spec({**base, "rope_scaling": {**LONGROPE, "rope_type": kind}}) for kind in kinds]
    assert specs[0] == specs[1]
    assert specs[0].ropes[0].long_factors == (2.0,) * 4


def test_a_text_config_inside_the_config_is_read() -> None:
    inner = {key: value for key, value in GEMMA.items() if key != "architectures"}
    nested = {"architectures": GEMMA["architectures"], "text_config": inner}
    assert read_spec(nested) == read_spec(GEMMA)


WORDS = st.sampled_from(["", "yarn", "relu", "rope_theta", "full_attention", "1"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=6,
)
FIELDS = sorted(
    {field for _, field, _ in IMPOSSIBLE + UNSUPPORTED} | {"rope_scaling", "text_config", "head_dim"}
)
ROPE_FIELDS = ["rope_type", "type", "factor", "rope_theta", "beta_fast", "low_freq_factor", "full_attention"]


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    family=st.sampled_from(sorted(BASES)),
    fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=3),
    rope=st.none()
    | st.dictionaries(st.sampled_from(ROPE_FIELDS), JSON | st.sampled_from(["yarn", "llama3"])),
)
def test_no_config_raises_anything_but_our_own_error(
    family: str, fields: dict[str, Any], rope: dict[str, Any] | None
) -> None:
    config = {**BASES[family], **fields}
    with contextlib.suppress(ModelLoadError):
        read_spec(config if rope is None else {**config, "rope_parameters": rope})
