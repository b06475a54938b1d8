"""Matrices of a head as int8 with a scale for each row, as compressed-tensors stores them: half of bfloat16."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

ROUNDED_CONFIG = {
    "quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}}},
}


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint with its matrices rounded."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            found[name] = tensor
            continue
        wide = tensor.float()
        scale = (wide.abs().amax(1, keepdim=True) / 127.0).clamp(min=1e-12)
        found[name] = (wide / scale).round().clamp(-127, 127).to(torch.int8)
        found[f"{name}_scale"] = scale
    return found
