"""fp8 weights as compressed-tensors, ModelOpt and block-scaled models store them, and the floats they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from quire.bench.checkpoints.integer_layouts import Packer, Stored

FP8 = torch.float8_e4m3fn
LARGEST = 448
"""Number of e4m3."""
_BLOCK = 128
_LEAST_SCALE = 1e-12


def fp8(strategy: str = "channel", scale: str = "weight_scale") -> Packer:
    """`strategy`: a scale for each tensor, channel (row) or block of 128 x 128; `scale`: what the scales are called."""

    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = weight.shape
        if strategy == "block":
            tall, wide = -(-rows // _BLOCK), -(-columns // _BLOCK)
            filled = torch.nn.functional.pad(weight, (0, wide * _BLOCK - columns, 0, tall * _BLOCK - rows))
            scales = (filled.view(tall, _BLOCK, wide, _BLOCK).abs().amax((1, 3)) / LARGEST).clamp(min=_LEAST_SCALE)
            full = scales.repeat_interleave(_BLOCK, 0)[:rows].repeat_interleave(_BLOCK, 1)[:, :columns]
        else:
            largest = weight.abs().amax(1, keepdim=True) if strategy == "channel" else weight.abs().max()
            scales = (largest / LARGEST).clamp(min=_LEAST_SCALE)
            full = scales.expand(rows, columns)
        codes = (weight / full).to(FP8)
        return {"weight": codes, scale: scales}, codes.float() * full

    return pack


def compressed_fp8(strategy: str = "channel", static: bool = False) -> dict[str, Any]:
    weights: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
                               "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [_BLOCK, _BLOCK]
    dynamic = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    inputs = dynamic | {"dynamic": False, "strategy": "tensor"} if static else dynamic
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs,
                                      "output_activations": None}},
        "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


BLOCKS: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                          "weight_block_size": [_BLOCK, _BLOCK]}  # fmt: skip
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
