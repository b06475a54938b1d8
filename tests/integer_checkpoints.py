"""Writes tiny checkpoints with integer weights in the layouts of `quire.bench.checkpoints`, and says what they hold."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from quire.bench.checkpoints.integer_layouts import (
    Packer,
    Stored,
    awq,
    awq_config,
    compressed,
    compressed_config,
    gptq,
    gptq_config,
)
from tests.checkpoints import config_of, make_model, weights_of

__all__ = [
    "AWQ",
    "GPTQ",
    "Packer",
    "Stored",
    "awq",
    "compressed",
    "compressed_config",
    "gptq",
    "gptq_config",
    "store_checkpoint",
    "write_checkpoint",
]
SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
AWQ = awq_config()
GPTQ = gptq_config()


@cache
def _model(family: str, overrides: tuple[tuple[str, Any], ...]) -> Any:
    return make_model(family, **dict(overrides))


def write_checkpoint(
    folder: Path, pack: Packer, config: dict[str, Any], family: str = "llama", **overrides: Any
) -> dict[str, Tensor]:
    """A tiny model whose layers' projections are packed; returns the floats that its checkpoint stands for."""
    model = _model(family, tuple({**SIZES, **overrides}.items()))
    return store_checkpoint(folder, pack, config_of(model) | {"quantization_config": config}, weights_of(model))


def store_checkpoint(
    folder: Path, pack: Packer, config: dict[str, Any], weights: Iterable[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """The same of any weights and their config, which says how they are quantized."""
    stored: Stored = {}
    expected: dict[str, Tensor] = {}
    for name, tensor in weights:
        if name.endswith(("_proj.weight", "_proj_with_mqa.weight")):
            some = tensor.clone()
            some[::7] = some[::7].abs()  # so that there are zero points of 0
            tensors, expected[name] = pack(some)
            stored.update({f"{name.removesuffix('.weight')}.{member}": each for member, each in tensors.items()})
        else:
            stored[name] = expected[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return expected
