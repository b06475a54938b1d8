"""A random EAGLE head for the model of a fuzz case, as a checkpoint in a public format."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.models.heads.build import format_of, read_head
from quire.models.registry import read_spec

_ARCHITECTURES = {"eagle": "LlamaForCausalLM", "eagle3": "LlamaForCausalLMEagle3"}


def write_head(folder: Path, model: Mapping[str, Any], kind: str) -> None:
    """`kind`: eagle (versions 1 and 2) or eagle3, which guesses every second token and reads two layers."""
    vocabulary = int(model["vocab_size"])
    config: dict[str, Any] = {
        "architectures": [_ARCHITECTURES[kind]], "hidden_size": model["hidden_size"], "intermediate_size": 24,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
        "vocab_size": vocabulary, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
        "hidden_act": "silu", "tie_word_embeddings": False,
    }
    guessed = torch.arange(0, vocabulary, 2)
    if kind == "eagle3":
        config |= {"draft_vocab_size": len(guessed), "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2]}}
    generator = torch.Generator().manual_seed(11)
    form = format_of(config)
    weights = {}
    for name, shape in read_head(config, read_spec(model)).parameters().items():
        noise = torch.randn(shape, generator=generator) / shape[-1] ** 0.5
        weights[form.stored_name(name)] = noise if len(shape) == 2 else 1.0 + 0.1 * noise
    if kind == "eagle3":
        weights["d2t"] = guessed - torch.arange(len(guessed))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors")
