"""MXFP4 weights of a safetensors checkpoint (gpt-oss experts): blocks and scales make one weight.

32 numbers share a power of two (`Mxfp4Weight` says what a code is). Two tensors make a weight: `NAME_blocks` uint8
[..., rows, groups, 16], the low half of a byte first, and `NAME_scales` uint8 [..., rows, groups].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, TypeVar

from quire.errors import ModelLoadError
from quire.kernels.quantized import Mxfp4Weight, StoredWeight
from quire.kernels.unread import UnreadRows, rows_of

if TYPE_CHECKING:
    import torch

Held = TypeVar("Held")
BLOCKS, SCALES = "_blocks", "_scales"


def stem(name: str) -> str:
    """The name of the weight that a tensor is a part of."""
    return name.removesuffix(BLOCKS).removesuffix(SCALES)


def is_part(name: str) -> bool:
    """Whether a tensor is the blocks, or the scales, of a weight."""
    return name.endswith((BLOCKS, SCALES))


def coded(blocks: torch.Tensor, scales: torch.Tensor, name: str) -> Mxfp4Weight:
    """[rows of all experts, 32 groups]."""
    import torch

    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or blocks.shape[-1:] != (16,) or (
            blocks.shape[:-1] != scales.shape or scales.dim() < 2):
        shapes = f"{tuple(blocks.shape)} and {tuple(scales.shape)}"
        raise ModelLoadError(f"{name}: MXFP4 blocks and scales of shapes {shapes} do not match")
    flat = scales.reshape(-1, scales.shape[-1])
    return Mxfp4Weight(blocks.reshape(flat.shape[0], -1), flat)


def dequantized(blocks: torch.Tensor, scales: torch.Tensor, name: str) -> torch.Tensor:
    """float32 [..., rows, 32 groups]."""
    return coded(blocks, scales, name).dequantized().view(*scales.shape[:-1], -1)


def joined(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors; each pair of blocks and scales as the one weight that they make, [..., columns, rows] as
    gpt-oss keeps it in floats."""
    for name, tensor, scales in _pairs(weights):
        yield name, tensor if scales is None else dequantized(tensor, scales, name).transpose(-1, -2)


def joined_codes(weights: Iterable[tuple[str, torch.Tensor | UnreadRows]]) -> Iterator[tuple[str, StoredWeight]]:
    """The same in the file's own bits: the rows of all experts one below the other. A weight whose blocks, or scales,
    are still in their file is there, too."""
    import torch

    for name, tensor, scales in _pairs(weights):
        if scales is None:
            yield name, tensor
        elif isinstance(tensor, torch.Tensor) and isinstance(scales, torch.Tensor):
            yield name, coded(tensor, scales, name)
        else:
            yield name, _unread(tensor, scales, name)


def _unread(blocks: torch.Tensor | UnreadRows, scales: torch.Tensor | UnreadRows, name: str) -> UnreadRows:
    """Of all experts of a layer: blocks [experts, rows, groups, 16], scales [experts, rows, groups]."""
    import torch

    codes, exponents = (each.reshape(-1, math.prod(each.shape[2:])) if isinstance(each, torch.Tensor) else each
                        for each in (blocks, scales))
    if codes.shape != (exponents.shape[0], 16 * exponents.shape[1]) or any(
            rows_of(each, 0, 0).dtype is not torch.uint8 for each in (codes, exponents)):
        shapes = f"{tuple(codes.shape)} and {tuple(exponents.shape)}"
        raise ModelLoadError(f"{name}: MXFP4 blocks and scales of shapes {shapes} do not match")

    def some(start: int, stop: int) -> Mxfp4Weight:
        return Mxfp4Weight(rows_of(codes, start, stop), rows_of(exponents, start, stop))

    return UnreadRows(0, (codes.shape[0], 2 * codes.shape[1]), some, coded=True)


def _pairs(weights: Iterable[tuple[str, Held]]) -> Iterator[tuple[str, Held, Held | None]]:
    """Other tensors, and the blocks and scales of each weight, under its name."""
    waiting: dict[str, Held] = {}
    for name, tensor in weights:
        ending = next((each for each in (BLOCKS, SCALES) if name.endswith(each)), None)
        if ending is None:
            yield name, tensor, None
            continue
        own = stem(name)
        other = waiting.pop(own + (SCALES if ending == BLOCKS else BLOCKS), None)
        if other is None:
            waiting[name] = tensor
        elif ending == BLOCKS:
            yield own, tensor, other
        else:
            yield own, other, tensor
    if waiting:
        raise ModelLoadError(f"tensor {min(waiting)!r} of an MXFP4 checkpoint has no counterpart: blocks or scales are "
                             "missing")
