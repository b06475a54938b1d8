"""Writes tiny checkpoints with fp8 weights as compressed-tensors, ModelOpt and block-scaled models store them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.integer_checkpoints import Packer, Stored

FP8 = torch.float8_e4m3fn


def fp8(strategy: str = "channel", static: bool = False, scale: str = "weight_scale") -> Packer:
    """`strategy`: a scale for each tensor, channel (row) or block of 128 x 128; static: an input_scale beside it."""

    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        rows, columns = weight.shape
        if strategy == "block":
            tall, wide = -(-rows // 128), -(-columns // 128)
            padded = torch.zeros(tall * 128, wide * 128)
            padded[:rows, :columns] = weight
            scales = padded.view(tall, 128, wide, 128).abs().amax((1, 3)) / 448
            full = scales.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        else:
            scales = weight.abs().amax(1, keepdim=True) / 448 if strategy == "channel" else weight.abs().max() / 448
            full = scales.expand(rows, columns)
        codes = (weight / full).to(FP8)
        stored = {"weight": codes, scale: scales}
        if static:
            stored["input_scale"] = torch.tensor(0.02 + 0.001 * (rows % 7))
        return stored, codes.float() * full

    return pack


def compressed_fp8(strategy: str = "channel", static: bool = False) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": strategy}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    dynamic = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": True, "strategy": "token"}
    inputs = dynamic | {"dynamic": False, "strategy": "tensor"} if static else dynamic
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs,
                                      "output_activations": None}},
        "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


BLOCKS: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                          "weight_block_size": [128, 128]}  # fmt: skip
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}
KINDS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "blocks": (fp8("block", scale="weight_scale_inv"), BLOCKS),
    "compressed, a scale a row": (fp8(), compressed_fp8()),
    "compressed, one scale": (fp8("tensor"), compressed_fp8("tensor")),
    "compressed, static": (fp8("tensor", True), compressed_fp8("tensor", True)),
    "compressed, blocks": (fp8("block"), compressed_fp8("block")),
    "modelopt": (fp8("tensor", True), MODELOPT),
}
