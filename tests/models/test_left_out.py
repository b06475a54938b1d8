"""A field that config.json leaves out means what transformers takes it for, or is asked for by its name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.errors import ModelLoadError
from quire.models.registry import read_spec
from tests.checkpoints import FAMILY_NAMES, classes_of

WINDOWS: dict[str, Any] = {"use_sliding_window": True, "num_hidden_layers": 6, "max_window_layers": 3}
NO_ROPE: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 24}
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in FAMILY_NAMES},
    "deepseek_v2": ("deepseek_v2", {"num_experts_per_tok": 6}),
    **{f"{family} windows": (family, WINDOWS) for family in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")},
    "smollm3 windows": ("smollm3", NO_ROPE),
}
TOLD_BY_TENSORS = {"num_key_value_heads", "num_nextn_predict_layers", "architectures"}
"""Wrong, these do not fit the checkpoint's tensors."""


def _full(family: str, overrides: dict[str, Any]) -> dict[str, Any]:
    """Every field of the family's config class, most as the class has them."""
    import transformers

    config_class, model_class = classes_of(family)
    config = getattr(transformers, config_class)(**overrides)
    found: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return {**found, "architectures": [model_class]}


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_field_left_out_means_what_transformers_says(variant: str) -> None:
    family, overrides = VARIANTS[variant]
    full = _full(family, overrides)
    spec, asked_for = read_spec(full), set()
    for field in full.keys() - TOLD_BY_TENSORS - overrides.keys():
        without = {name: value for name, value in full.items() if name != field}
        try:
            assert read_spec(without) == spec, field
        except ModelLoadError as error:
            assert "is missing" in str(error) or "must be an object" in str(error)
            asked_for.add(field)
    assert not any(word in field for field in asked_for for word in ("eps", "bias", "window", "theta", "norm"))


def test_a_window_that_is_null_is_none_and_one_that_is_left_out_is_the_familys() -> None:
    full = _full("mistral", {})
    windows = {layer.attention.window for layer in read_spec({**full, "sliding_window": None}).layers}
    assert windows == {None}
    full.pop("sliding_window")
    assert {layer.attention.window for layer in read_spec(full).layers} == {4096}
