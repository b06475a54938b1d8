"""A model small enough that a benchmark of it takes seconds: a config, and random weights made from it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 512, "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture(scope="session")
def dummy_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a model without weights: for `load_format="dummy"`."""
    folder = tmp_path_factory.mktemp("dummy-model")
    (folder / Path("config.json")).write_text(json.dumps(CONFIG))
    return str(folder)
