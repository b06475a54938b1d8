"""Specs: cache groups, cache sizes and the list of parameters."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from quire.models.registry import read_spec
from tests.checkpoints import FAMILY_NAMES, config_of, make_model


def test_full_and_window_layers_are_two_groups_full_first() -> None:
    model = make_model("gemma3", num_hidden_layers=5, layer_types=None, sliding_window_pattern=2)
    groups = read_spec(config_of(model)).cache_groups()
    assert [(g.kind, g.window, g.layers) for g in groups] == [
        ("full", None, (1, 3)),
        ("window", 24, (0, 2, 4)),
    ]
    assert [g.bytes_per_token for g in groups] == [2 * 256, 3 * 256]


@pytest.mark.parametrize("family, kind", [("llama", "full"), ("mistral", "window"), ("gpt2", "full")])
def test_layers_of_one_kind_are_one_group(family: str, kind: str) -> None:
    spec = read_spec(config_of(make_model(family)))
    assert [(g.kind, g.layers) for g in spec.cache_groups()] == [(kind, (0, 1, 2))]
    assert spec.group_of_layer() == (0, 0, 0)


@pytest.mark.parametrize(("window", "kind"), [(255, "window"), (256, "full"), (262_144, "full")])
def test_a_window_that_no_sequence_can_leave_is_none(window: int, kind: str) -> None:
    spec = read_spec(config_of(make_model("phi3", sliding_window=window)))
    assert spec.max_positions == 256
    assert [g.kind for g in spec.cache_groups()] == [kind]


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 256),
        ({"rope_type": "dynamic", "factor": 2.5}, 640),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, 256),
        ({"rope_type": "dynamic", "factor": 1e12}, 2**26),
        ({"rope_type": "yarn", "factor": 1e308}, 2**26),
    ],
)
def test_a_scaled_rotation_reaches_as_far_as_it_is_scaled(rope: dict[str, Any], positions: int) -> None:
    config = {**config_of(make_model("llama")), "rope_parameters": {**rope, "rope_theta": 10_000.0}}
    assert read_spec(config).max_positions == positions


def test_kv_bytes_count_keys_and_values_of_every_layer() -> None:
    spec = read_spec(config_of(make_model("llama")))
    assert spec.kv_bytes_per_token == 3 * 2 * (2 * 8) * 4


@pytest.mark.parametrize("family", FAMILY_NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_parameters_are_counted_as_transformers_counts_them(family: str, tied: bool) -> None:
    model = make_model(family, tie_word_embeddings=tied)
    biases = sum(b.numel() for name, b in model.named_buffers() if name.endswith("e_score_correction_bias"))
    assert read_spec(config_of(model)).num_parameters == model.num_parameters() + biases


def test_a_spec_cannot_be_changed() -> None:
    spec = read_spec(config_of(make_model("llama")))
    with pytest.raises(FrozenInstanceError):
        spec.vocab_size = 3  # type: ignore[misc]


def test_reading_a_spec_does_not_import_torch() -> None:
    code = "import sys, quire.models.registry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
