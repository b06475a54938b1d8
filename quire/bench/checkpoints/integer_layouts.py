"""Integer weights as AWQ, GPTQ and compressed-tensors store them, and the floats that they stand for.

The layouts were checked once against the packing code of autoawq 0.2.9, auto-gptq 0.7.1 and compressed-tensors 0.20.0.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Stored = dict[str, Tensor]
Packer = Callable[[Tensor], tuple[Stored, Tensor]]
"""A weight [N, K] to its tensors, by the last part of their names, and to the floats that they stand for."""
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LEAST_SCALE = 2.0**-24
"""The smallest that float16 has."""


def packed(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned numbers to int32 words along a dimension, the first in the lowest bits."""
    per_word = 32 // bits
    numbers = numbers.to(torch.int64).movedim(dim, -1)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % per_word))
    shifts = torch.arange(0, 32, bits, device=numbers.device)
    words = (numbers.unflatten(-1, (-1, per_word)) << shifts).sum(-1)
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32).movedim(-1, dim).contiguous()


def rounded(
    weight: Tensor, bits: int, group_of: Tensor, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [N, K], zero points and scales [N, groups] of the given type. `group_of`: the group of each column."""
    top = (1 << bits) - 1
    none = weight.new_zeros(weight.shape[0], int(group_of.max()) + 1)
    index = group_of.expand_as(weight)
    low = none.scatter_reduce(1, index, weight, "amin")
    high = none.scatter_reduce(1, index, weight, "amax")
    span = 2 * torch.maximum(-low, high) if symmetric else high - low
    scale = span.div(top).clamp(min=_LEAST_SCALE).to(dtype)
    zero = torch.full_like(low, 1 << (bits - 1)) if symmetric else (-low / scale.float()).round().clamp(0, top)
    codes = (weight / scale.float()[:, group_of] + zero[:, group_of]).round().clamp(0, top)
    return codes.to(torch.int64), zero.to(torch.int64), scale


def values(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """scale * (code - zero point), in float32."""
    return (codes - zeros[:, group_of]).float() * scales.float()[:, group_of]


def groups_of(weight: Tensor, group: int, act_order: bool = False) -> Tensor:
    """The group of each column; -1: all are one. With `act_order` columns of a group lie anywhere: which ones go
    together is drawn here, where GPTQ has an order of importance."""
    width = weight.shape[1]
    found = torch.arange(width, device="cpu") // (width if group == -1 else group)
    if act_order:
        generator = torch.Generator("cpu").manual_seed(3)
        found = found[torch.randperm(width, generator=generator, device="cpu")]
    return found.to(weight.device)


def awq(group: int = 32, dtype: torch.dtype = torch.float16) -> Packer:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        group_of = groups_of(weight, group)
        codes, zeros, scales = rounded(weight, 4, group_of, False, dtype)

        def words(numbers: Tensor) -> Tensor:
            return packed(numbers.unflatten(1, (-1, 8))[:, :, list(_AWQ_ORDER)].flatten(1), 4, 1)

        stored = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t().contiguous()}
        return stored, values(codes, zeros, scales, group_of)

    return pack


def awq_config(group: int = 32) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "version": "gemm", "zero_point": True}


def gptq(
    bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False, stored_less: int = 1
) -> Packer:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        group_of = groups_of(weight, group, act_order)
        codes, zeros, scales = rounded(weight, bits, group_of, symmetric, torch.float16)
        stored = {
            "qweight": packed(codes.t(), bits, 0),
            "qzeros": packed((zeros.t() - stored_less) & ((1 << bits) - 1), bits, 1),
            "scales": scales.t().contiguous(),
            "g_idx": group_of.to(torch.int32),
        }
        return stored, values(codes, zeros, scales, group_of)

    return pack


def gptq_config(bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": act_order}


def compressed(
    bits: int = 4, group: int = 32, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16, plain: bool = False,
    act_order: bool = False,
) -> Packer:  # fmt: skip
    """`plain`: int8 numbers, one a byte ("int-quantized"), instead of words ("pack-quantized")."""

    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        group_of = groups_of(weight, group, act_order)
        codes, zeros, scales = rounded(weight, bits, group_of, symmetric, dtype)
        middle = 1 << (bits - 1)
        stored: Stored = {"weight_scale": scales}
        if plain:
            stored["weight"] = (codes - middle).to(torch.int8)
        else:
            stored["weight_packed"] = packed(codes, bits, 1)
            stored["weight_shape"] = torch.tensor(weight.shape)
        if act_order:
            stored["weight_g_idx"] = group_of.to(torch.int32)
        if not symmetric:
            stored["weight_zero_point"] = (zeros - middle).to(torch.int8) if plain else packed(zeros, bits, 0)
        return stored, values(codes, zeros, scales, group_of)

    return pack


def compressed_config(bits: int = 4, group: int = 32, symmetric: bool = True, plain: bool = False) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "dynamic": False,
               "strategy": "channel" if group == -1 else "group", "group_size": None if group == -1 else group}
    inputs = {"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"} if plain else None
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if plain else "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs,
                                      "output_activations": None}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }
