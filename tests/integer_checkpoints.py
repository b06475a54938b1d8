"""Writes tiny checkpoints with integer weights as AWQ, GPTQ and compressed-tensors store them, and says what they hold.

The layouts were checked once against the packing code of autoawq 0.2.9, auto-gptq 0.7.1 and compressed-tensors 0.20.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.checkpoints import config_of, make_model, weights_of

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_hidden_layers": 2}
Stored = dict[str, Tensor]
Packer = Callable[[Tensor], tuple[Stored, Tensor]]
"""A weight [N, K] to its tensors, by the last part of their names, and to the floats that they stand for."""


def packed(numbers: Tensor, bits: int, dim: int) -> Tensor:
    """Unsigned numbers to int32 words along a dimension, the first in the lowest bits."""
    per_word = 32 // bits
    numbers = numbers.to(torch.int64).movedim(dim, -1)
    numbers = torch.nn.functional.pad(numbers, (0, -numbers.shape[-1] % per_word))
    words = (numbers.unflatten(-1, (-1, per_word)) << torch.arange(0, 32, bits)).sum(-1)
    return words.where(words < 1 << 31, words - (1 << 32)).to(torch.int32).movedim(-1, dim).contiguous()


def rounded(weight: Tensor, bits: int, group_of: Tensor, symmetric: bool, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Codes [N, K], zero points and scales [N, groups] of the given type: any will do, as the reader must take them."""
    top = (1 << bits) - 1
    scales, zeros = [], []
    for number in range(int(group_of.max()) + 1):
        part = weight[:, group_of == number]
        low, high = part.amin(1).clamp(max=0), part.amax(1).clamp(min=0)
        low[::7] = 0  # so that there are zero points of 0
        scale = (2 * part.abs().amax(1) if symmetric else high - low).div(top).to(dtype)
        scales.append(scale)
        middle = torch.full_like(scale, 1 << (bits - 1), dtype=torch.float32)
        zeros.append(middle if symmetric else (-low / scale.float()).round().clamp(0, top))
    scale, zero = torch.stack(scales, 1), torch.stack(zeros, 1)
    codes = (weight / scale.float()[:, group_of] + zero[:, group_of]).round().clamp(0, top)
    return codes.to(torch.int64), zero.to(torch.int64), scale


def values(codes: Tensor, zeros: Tensor, scales: Tensor, group_of: Tensor) -> Tensor:
    """scale * (code - zero point), in float32."""
    return (codes - zeros[:, group_of]).float() * scales.float()[:, group_of]


def usual_groups(width: int, group: int) -> Tensor:
    return torch.arange(width) // (width if group == -1 else group)


AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True}
"""The `quantization_config` of what `awq()` writes."""


def awq(group: int = 32, dtype: torch.dtype = torch.float16) -> Packer:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        group_of = usual_groups(weight.shape[1], group)
        codes, zeros, scales = rounded(weight, 4, group_of, False, dtype)
        order = torch.tensor([0, 2, 4, 6, 1, 3, 5, 7])

        def words(numbers: Tensor) -> Tensor:
            return packed(numbers.unflatten(1, (-1, 8))[:, :, order].flatten(1), 4, 1)

        stored = {"qweight": words(codes.t()), "qzeros": words(zeros.t()), "scales": scales.t().contiguous()}
        return stored, values(codes, zeros, scales, group_of)

    return pack


def gptq(
    bits: int = 4, group: int = 32, symmetric: bool = True, act_order: bool = False, stored_less: int = 1
) -> Packer:
    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        group_of = usual_groups(weight.shape[1], group)
        if act_order:
            group_of = group_of[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))]
        codes, zeros, scales = rounded(weight, bits, group_of, symmetric, torch.float16)
        stored = {
            "qweight": packed(codes.t(), bits, 0),
            "qzeros": packed((zeros.t() - stored_less) & ((1 << bits) - 1), bits, 1),
            "scales": scales.t().contiguous(),
            "g_idx": group_of.to(torch.int32),
        }
        return stored, values(codes, zeros, scales, group_of)

    return pack


def compressed(
    bits: int = 4, group: int = 32, symmetric: bool = True, dtype: torch.dtype = torch.bfloat16, plain: bool = False,
    act_order: bool = False,
) -> Packer:
    """`plain`: int8 numbers, one a byte ("int-quantized"), instead of words ("pack-quantized")."""

    def pack(weight: Tensor) -> tuple[Stored, Tensor]:
        group_of = usual_groups(weight.shape[1], group)
        if act_order:
            group_of = group_of[torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(3))]
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
            tensors, expected[name] = pack(tensor)
            stored.update({f"{name.removesuffix('.weight')}.{member}": each for member, each in tensors.items()})
        else:
            stored[name] = expected[name] = tensor
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return expected
