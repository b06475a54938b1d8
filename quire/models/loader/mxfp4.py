"""MXFP4 weights of a safetensors checkpoint (gpt-oss experts), turned into floats as they are read.

32 numbers share a power of two. A number is four bits: a sign, and one of eight magnitudes. Two tensors make a weight:
`NAME_blocks` uint8 [..., rows, groups, 16], the low half of a byte first, and `NAME_scales` uint8 [..., rows, groups].
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from quire.errors import ModelLoadError

if TYPE_CHECKING:
    import torch

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_BIAS = 127
BLOCKS, SCALES = "_blocks", "_scales"


def dequantized(blocks: torch.Tensor, scales: torch.Tensor, name: str) -> torch.Tensor:
    """float32 [..., rows, 32 groups]."""
    import torch

    if blocks.dtype is not torch.uint8 or scales.dtype is not torch.uint8 or blocks.shape[-1:] != (16,) or (
            blocks.shape[:-1] != scales.shape):
        shapes = f"{tuple(blocks.shape)} and {tuple(scales.shape)}"
        raise ModelLoadError(f"{name}: MXFP4 blocks and scales of shapes {shapes} do not match")
    table = torch.tensor([*_MAGNITUDES, *(-value for value in _MAGNITUDES)])
    halves = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2).to(torch.int32)
    values = table[halves] * torch.exp2(scales.to(torch.float32) - _BIAS).unsqueeze(-1)
    return values.flatten(-2)


def joined(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same tensors; each pair of blocks and scales as the one weight that they make, [..., columns, rows] as
    gpt-oss keeps it in floats."""
    waiting: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        ending = next((each for each in (BLOCKS, SCALES) if name.endswith(each)), None)
        if ending is None:
            yield name, tensor
            continue
        stem = name.removesuffix(ending)
        other = waiting.pop(stem + (SCALES if ending == BLOCKS else BLOCKS), None)
        if other is None:
            waiting[name] = tensor
            continue
        blocks, scales = (tensor, other) if ending == BLOCKS else (other, tensor)
        yield stem, dequantized(blocks, scales, stem).transpose(-1, -2)
    if waiting:
        raise ModelLoadError(f"tensor {min(waiting)!r} of an MXFP4 checkpoint has no counterpart: blocks or scales are "
                             "missing")
