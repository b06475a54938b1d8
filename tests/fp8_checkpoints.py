"""Tiny checkpoints with fp8 weights, in the layouts of `quire.bench.checkpoints`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.bench.checkpoints.fp8_layouts import BLOCKS, MODELOPT, compressed_fp8, fp8
from quire.bench.checkpoints.integer_layouts import Packer, Stored

__all__ = ["BLOCKS", "KINDS", "MODELOPT", "TRANSFORMERS", "compressed_fp8", "fp8", "static"]
TRANSFORMERS: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None}
"""As it writes Ministral's and Devstral's files: one scale for a weight, one for its activations."""


def static(pack: Packer, inputs: str = "input_scale") -> Packer:
    """The same with a scale of activations, of this name, beside each weight."""

    def packed(weight: Tensor) -> tuple[Stored, Tensor]:
        stored, values = pack(weight)
        return {**stored, inputs: torch.tensor(0.02 + 0.001 * (weight.shape[0] % 7))}, values

    return packed


KINDS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "blocks": (fp8("block", "weight_scale_inv"), BLOCKS),
    "compressed, a scale a row": (fp8(), compressed_fp8()),
    "compressed, one scale": (fp8("tensor"), compressed_fp8("tensor")),
    "compressed, static": (static(fp8("tensor")), compressed_fp8("tensor", True)),
    "compressed, blocks": (fp8("block"), compressed_fp8("block")),
    "transformers, static": (static(fp8("tensor", "weight_scale_inv"), "activation_scale"), TRANSFORMERS),
    "transformers, one scale": (fp8("tensor", "weight_scale_inv"), TRANSFORMERS | {"activation_scheme": "dynamic"}),
    "modelopt": (static(fp8("tensor")), MODELOPT),
}
