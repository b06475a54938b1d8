"""Matrices of a head in few bits, as compressed-tensors stores them.

int8 with a scale for each row is half of bfloat16. int4 in groups of columns, with a scale and a zero point each, is
less than a third; training computes with these numbers too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from quire.kernels.quantized import UNIT

_TOP = 15
"""The largest code of 4 bits."""


def _config(format_: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "dynamic": False} | weights}
    return {"quant_method": "compressed-tensors", "format": format_, "quantization_status": "compressed",
            "config_groups": {"group_0": group}}


ROUNDED_CONFIG = _config("int-quantized", {"num_bits": 8, "symmetric": True, "strategy": "channel"})
PACKED_CONFIG = _config("pack-quantized",
                        {"num_bits": 4, "symmetric": False, "strategy": "group", "group_size": UNIT})


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint with its matrices rounded to int8."""
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


def packed(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same checkpoint with its matrices as codes of 4 bits, eight a word, the first in the lowest bits."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2:
            found[name] = tensor
            continue
        codes, zeros, scales = _coded(tensor.float().view(-1, UNIT))
        rows = tensor.shape[0]
        found[f"{name}_packed"] = _words(codes.view(rows, -1))
        found[f"{name}_scale"] = scales.view(rows, -1).half()
        found[f"{name}_zero_point"] = _words(zeros.view(rows, -1).t()).t().contiguous()
        found[f"{name}_shape"] = torch.tensor(tensor.shape)
    return found


def on_grid(flat: Tensor) -> Tensor:
    """What the codes of weights stand for, rows one after the other."""
    codes, zeros, scales = _coded(flat.view(-1, UNIT))
    return ((codes - zeros) * scales).view_as(flat)


def _coded(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, group], zero points and scales [n, 1], such that a weight is scale * (code - zero point). Zero has a
    code, and the range of a group all of them. Scales are those of half precision."""
    least, largest = groups.aminmax(dim=1, keepdim=True)
    least, largest = least.clamp(max=0.0), largest.clamp(min=0.0)
    scales = ((largest - least) / _TOP).half().float().clamp(min=2.0**-24)
    zeros = (-least / scales).round().clamp(max=_TOP)
    return ((groups / scales).round() + zeros).clamp(0, _TOP), zeros, scales


def _words(codes: Tensor) -> Tensor:
    """Along the last dimension, which is filled up to whole words."""
    filled = torch.nn.functional.pad(codes.to(torch.int64), (0, -codes.shape[-1] % 8)).unflatten(-1, (-1, 8))
    words = (filled << torch.arange(0, 32, 4)).sum(-1)
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32)
