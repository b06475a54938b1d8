"""GEMMs of a weight of 4-bit codes with scales of groups: W4A16, up to 256 rows.

The codes stay packed in memory, so a GEMM of few rows reads half a byte a weight. They are laid out once, at load,
for `codes_kernel`: a block of 32 x 32 words holds 128 features x 64 columns, and the eight codes of a word are one
thread's part of the tensor cores' first operand of 16 columns:

    features 8r + g + 16w (r = 0, 1) and columns 2t + p + 8h + 16j (p, h = 0, 1) of warp w, thread 4g + t, step j
    code p * 4 + h * 2 + r of the word (in units of 4 bits) is that of r, h and p

Where groups have 32 columns a block holds two halves of 32 columns, one below the other. A weight is
scale * (code - 8) + offset, both in the activations' type. With many rows the operand is that, rounded once; with few
it is code - 8, exactly, and the sums of a group's columns are scaled.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.quantized import QuantizedWeight
from quire.kernels.triton.linear_prefetch import PrefetchScratch, multiprocessors, padded

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.kernels.triton.codes_kernel import codes_kernel
except ImportError:  # another version of Triton
    codes_kernel = None

FEATURES, COLUMNS = 128, 64
"""Of a slab."""
MOST_ROWS = 256
_BLOCK = 32
_WARPS = 8
_ZERO = 8
_SHARED = 226 << 10
_SCALED_SUMS = 16
"""With up to so many rows sums are scaled, with more of them codes are."""


@dataclass(frozen=True, slots=True)
class CodesShape:
    """Stages of the ring, slabs of a turn, programs per multiprocessor (0: one for each tile)."""

    stages: int = 6
    slabs: int = 4
    programs: int = 1

    def shared(self, rows: int, run: int) -> int:
        """Bytes, if a scale is that of `run` columns."""
        slab = _BLOCK * _BLOCK * 4 + padded(rows) * COLUMNS * 2 + COLUMNS * FEATURES * 4 // run
        return self.stages * self.slabs * slab + FEATURES * min(padded(rows), 64) * 4


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """A weight [features, width] as the kernel reads it."""

    words: Tensor
    """int32 [tiles * 32, slabs * 32]."""
    scales: Tensor
    """int32 [groups, features]: a scale in the low half, an offset in the high half."""
    features: int
    width: int
    group: int
    dtype: torch.dtype
    offsets: bool = True
    """Else all of them are zero."""

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.scales.nbytes

    @property
    def depth(self) -> int:
        """Columns that share a scale in one instruction of the tensor cores."""
        return min(self.group, COLUMNS)

    def run(self, slabs: int) -> int:
        """Columns of a turn of so many slabs that share a scale and whose sums are scaled as one."""
        turn = slabs * COLUMNS
        return self.group if turn % self.group == 0 else turn if self.group % turn == 0 else self.depth


def packs(weight: QuantizedWeight) -> bool:
    """Whether the kernel has a form for it: 4 bits, whole slabs, groups of 32 columns or whole slabs."""
    group, width = weight.group, weight.shape[1]
    return weight.bits == 4 and width % COLUMNS == 0 and (group == _BLOCK or group % COLUMNS == 0)


def pack(weight: QuantizedWeight, dtype: torch.dtype) -> PackedCodes:
    """On the device that the weight lies on. Features are filled up to whole tiles with zeros."""
    features, width = weight.shape
    tiles, slabs = triton.cdiv(features, FEATURES), width // COLUMNS
    depth = min(weight.group, COLUMNS)
    codes = torch.full((tiles * FEATURES, width), _ZERO, dtype=torch.uint8, device=weight.codes.device)
    codes[:features] = weight.codes
    # tile, w, r, g, slab, part, j, h, t, p
    parts = codes.view(tiles, _WARPS, 2, 8, slabs, COLUMNS // depth, depth // 16, 2, 4, 2)
    # tile, slab, part, w, g, t, j, and of a word p, h, r
    ordered = parts.permute(0, 4, 5, 1, 3, 8, 6, 9, 7, 2).reshape(tiles, slabs, -1, 4, 2)
    words = (ordered[..., 0] | ordered[..., 1] << 4).contiguous().view(torch.int32)
    blocks = words.view(tiles, slabs, _BLOCK, _BLOCK).transpose(1, 2)
    words = blocks.reshape(tiles * _BLOCK, slabs * _BLOCK)
    offsets = weight.offsets is not None or weight.zero != _ZERO
    return PackedCodes(words, _packed_scales(weight, dtype), features, width, weight.group, dtype, offsets)


def unpacked(weight: PackedCodes) -> Tensor:
    """[features, width] in the activations' type, as the kernel makes them: for GEMMs of many rows."""
    tiles, slabs, depth = weight.words.shape[0] // _BLOCK, weight.width // COLUMNS, weight.depth
    words = weight.words.view(tiles, _BLOCK, slabs, _BLOCK).transpose(1, 2).contiguous().view(torch.uint8)
    codes = torch.stack([words & 15, words >> 4], -1)
    parts = codes.view(tiles, slabs, COLUMNS // depth, _WARPS, 8, 4, depth // 16, 2, 2, 2)
    whole = parts.permute(0, 3, 9, 4, 1, 2, 6, 8, 5, 7).reshape(-1, weight.width)[: weight.features]
    pairs = weight.scales.view(weight.dtype).view(-1, weight.features, 2).transpose(0, 1).float()
    grouped = (whole.float() - _ZERO).view(weight.features, -1, weight.group)
    return (grouped * pairs[:, :, :1] + pairs[:, :, 1:]).view(weight.features, -1).to(weight.dtype)


def _packed_scales(weight: QuantizedWeight, dtype: torch.dtype) -> Tensor:
    scales = weight.scales
    offsets = (_ZERO - weight.zero) * scales
    if weight.offsets is not None:
        offsets = offsets + weight.offsets
    pairs = torch.stack([scales.to(dtype), offsets.to(dtype)], -1).transpose(0, 1).contiguous()
    return pairs.view(torch.int32).squeeze(-1)


def fits(rows: int, weight: PackedCodes, sizes: CodesShape, scratch: PrefetchScratch) -> bool:
    """Whether the kernel can multiply so many rows: whole turns, a ring that fits, and scratch for every part."""
    tiles, programs = triton.cdiv(weight.features, FEATURES), _programs(weight, sizes)
    parts = 0 if tiles == programs else 2 * programs * FEATURES * padded(rows)
    return (
        rows <= MOST_ROWS
        and weight.width % (COLUMNS * sizes.slabs) == 0
        and sizes.shared(rows, weight.run(sizes.slabs)) <= _SHARED
        and parts <= scratch.partial.numel()
        and tiles <= scratch.arrived.numel()
        and programs * tiles * (weight.width // COLUMNS // sizes.slabs) < 1 << 31
    )


@triton.jit
def _unpack_kernel(
    words, scales, out, num_features, WIDTH: tl.constexpr, GROUP: tl.constexpr, DEPTH: tl.constexpr,
    FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of the weight in floats: each element finds its word."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    real = (feature < num_features) & (column < WIDTH)
    each: tl.constexpr = DEPTH // 16
    thread = feature % 8 * 4 + column % 8 // 2
    inside = column % 64 // DEPTH * 256 + feature % 128 // 16 * 32 + thread
    word = inside * each + column % DEPTH // 16
    height = feature.to(tl.int64) // 128 * 32 + word // 32
    packed = tl.load(words + height * (WIDTH // 2) + column // 64 * 32 + word % 32, mask=real, other=0)
    code = packed >> (column % 2 * 16 + column % 16 // 8 * 8 + feature % 16 // 8 * 4) & 15
    pair = tl.load(scales + column // GROUP * num_features + feature, mask=real, other=0)
    scale = (pair & 0xFFFF).to(tl.int16).to(out.dtype.element_ty, bitcast=True).to(tl.float32)
    offset = (pair >> 16).to(tl.int16).to(out.dtype.element_ty, bitcast=True).to(tl.float32)
    values = (code - 8).to(tl.float32) * scale + offset
    tl.store(out + feature.to(tl.int64) * WIDTH + column, values.to(out.dtype.element_ty), mask=real)


def unpack(weight: PackedCodes, out: Tensor) -> Tensor:
    """The weight in floats, [features, width], into `out`: for GEMMs of many rows."""
    features, columns = 16, min(128, triton.next_power_of_2(weight.width))
    _unpack_kernel[(triton.cdiv(weight.features, features), triton.cdiv(weight.width, columns))](
        weight.words, weight.scales, out, weight.features, weight.width, weight.group, weight.depth, features, columns,
        num_warps=4,
    )  # fmt: skip
    return out


def linear_codes(
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    sizes: CodesShape,
    scratch: PrefetchScratch,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """[rows, features] of up to `MOST_ROWS` rows: x W^T + bias + residual."""
    rows, width = x.shape
    if out is None:
        out = torch.empty(rows, weight.features, dtype=x.dtype, device=x.device)
    kind = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[x.dtype]
    pad, block = padded(rows), [_BLOCK, _BLOCK]
    box = [max(rows & -rows, 8), COLUMNS]
    words, sums, stored = _layouts(pad, weight.depth)
    codes_kernel[(_programs(weight, sizes),)](
        TensorDescriptor.from_tensor(weight.words, block, gl.NVMMASharedLayout.get_default_for(block, gl.int32)),
        TensorDescriptor.from_tensor(x, box, gl.NVMMASharedLayout.get_default_for(box, kind)),
        TensorDescriptor.from_tensor(weight.scales.view(-1), [FEATURES], _SCALES),
        out if bias is None else bias,
        out if residual is None else residual,
        out,
        scratch.partial,
        scratch.arrived,
        rows,
        weight.features,
        width // COLUMNS // sizes.slabs,
        sizes.stages,
        sizes.slabs,
        weight.depth,
        weight.run(sizes.slabs),
        weight.group,
        pad <= _SCALED_SUMS,
        weight.offsets,
        pad,
        triton.cdiv(rows, box[0]),
        bias is not None,
        residual is not None,
        pdl,
        words,
        sums,
        stored,
        num_warps=_WARPS,
        maxnreg=_registers(pad),
        **({"launch_pdl": True} if pdl else {}),
    )
    return out


def _registers(rows: int) -> int:
    """Registers per thread at launch; those that the loading warp does not need go to the multiplying ones."""
    return min(168, 72 + rows // 2 // 8 * 8)


def _programs(weight: PackedCodes, sizes: CodesShape) -> int:
    tiles = triton.cdiv(weight.features, FEATURES)
    turns = tiles * (weight.width // COLUMNS // sizes.slabs)
    return min(sizes.programs * multiprocessors(weight.words.device) if sizes.programs else tiles, turns)


_SCALES = gl.NVMMASharedLayout.get_default_for([FEATURES], gl.int32) if codes_kernel is not None else None


@lru_cache(maxsize=16)
def _layouts(rows: int, depth: int) -> tuple[Any, Any, Any]:
    """How the words of a slab, the sums of a tile [features, rows] and what is stored of them lie in registers."""
    each = depth // 16
    words = gl.BlockedLayout([1, each], [each, 32 // each], [_WARPS, 1], [1, 0])
    sums = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, rows, 16])
    return words, sums, gl.BlockedLayout([8, 1], [16, 2], [1, _WARPS], [0, 1])
