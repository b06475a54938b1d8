"""Tiny checkpoints with fp8 weights, in the layouts of `quire.bench.checkpoints`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.bench.checkpoints.fp8_layouts import BLOCKS, MODELOPT, compressed_fp8, fp8
from quire.bench.checkpoints.integer_layouts import Packer, Stored

__all__ = ["BLOCKS", "KINDS", "MODELOPT", "compressed_fp8", "fp8", "static"]


def static(pack: Packer) -> Packer:
    """The same with an input_scale beside each weight."""

    def packed(weight: Tensor) -> tuple[Stored, Tensor]:
        stored, values = pack(weight)
        return {**stored, "input_scale": torch.tensor(0.02 + 0.001 * (weight.shape[0] % 7))}, values

    return packed


KINDS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "blocks": (fp8("block", "weight_scale_inv"), BLOCKS),
    "compressed, a scale a row": (fp8(), compressed_fp8()),
    "compressed, one scale": (fp8("tensor"), compressed_fp8("tensor")),
    "compressed, static": (static(fp8("tensor")), compressed_fp8("tensor", True)),
    "compressed, blocks": (fp8("block"), compressed_fp8("block")),
    "modelopt": (static(fp8("tensor")), MODELOPT),
}
