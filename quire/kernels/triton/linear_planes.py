"""GEMMs of a weight of 5-, 6- or 8-bit codes with scales of groups: W8A16, and what GGUF stores in 5 and 6 bits.

Codes stay packed in memory, in planes of bytes (`code_planes` says how they lie, and what number a code stands for),
here in blocks of 256 columns for all of them. A weight is scale * (code - zero) + offset in float32, rounded once to
the activations' type. Up to 64 rows are multiplied by the codes; for more the weight is unpacked to scratch memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.quantized import QuantizedWeight
from quire.kernels.triton.code_planes import INTEGERS, PIECE, codes_in, codes_of, numbers_of, planes

BITS = (5, 6, 8)
UNIT = 32
"""Columns come in multiples of so many."""
MOST_ROWS = 64
_BLOCK = 256
_INTEGERS = tl.constexpr(INTEGERS)


@dataclass(frozen=True, slots=True)
class PlanesShape:
    """Features of a program, warps, stages."""

    features: int = 32
    warps: int = 4
    stages: int = 3


@dataclass(frozen=True, slots=True)
class PackedPlanes:
    """A weight [features, width] as the kernel reads it."""

    pieces: Tensor
    """uint8 [blocks, bits, features, 32]."""
    scales: Tensor
    """float16, or float32 where that would lose more than a bit of ten, [groups, features]."""
    offsets: Tensor | None
    width: int
    bits: int
    zero: int
    group: int

    @property
    def features(self) -> int:
        return self.pieces.shape[2]

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.pieces, self.scales, self.offsets) if each is not None)


def packs(weight: QuantizedWeight) -> bool:
    """Whether the kernel has a form for it."""
    return weight.bits in BITS and weight.shape[1] % UNIT == 0


def pack(weight: QuantizedWeight, exact: bool = False) -> PackedPlanes:
    """On the device that the weight lies on. Columns are filled up to whole blocks. `exact`: no scale is rounded, so
    that a part of a weight is the same numbers as in the whole."""
    features, width = weight.shape
    blocks = triton.cdiv(width, _BLOCK)
    codes = weight.codes
    if width % _BLOCK:
        codes = torch.nn.functional.pad(codes, (0, blocks * _BLOCK - width))
    pieces = planes(codes, weight.bits).view(blocks, weight.bits, features, PIECE)
    offsets = None if weight.offsets is None else narrow(weight.offsets, exact)
    return PackedPlanes(pieces, narrow(weight.scales, exact), offsets, width, weight.bits, weight.zero, weight.group)


def narrow(scales: Tensor, exact: bool = False) -> Tensor:
    """[groups, features], in half precision unless that would round away more than the last of ten bits, or anything
    where it shall be `exact`."""
    turned = scales.t().contiguous()
    half = turned.to(torch.float16)
    lost = (half.float() - turned).abs() > turned.abs() * (0.0 if exact else 2.0**-10)
    return turned if bool(lost.any()) else half


@triton.jit(do_not_specialize=["num_rows"])
def _planes_kernel(
    x, pieces, scales, offsets, bias, residual, out, num_rows, num_features, WIDTH: tl.constexpr, BITS: tl.constexpr,
    ZERO: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr, ROWS: tl.constexpr, FEATURES: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    real, used = feature < num_features, row < num_rows
    # Features past the end read the last one, and are not stored: loads of codes need no mask.
    read = tl.minimum(feature, num_features - 1)
    lane = tl.arange(0, 32)
    place = pieces + read.to(tl.int64)[:, None] * 32 + lane[None, :]
    step = num_features.to(tl.int64) * 32
    x_row = x + row.to(tl.int64)[:, None] * WIDTH
    acc = tl.zeros([ROWS, FEATURES], tl.float32)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    for block in range(0, (WIDTH + 255) // 256):
        start = place + block * BITS * step
        extra = tl.load(start + 4 * step) if BITS < 8 else 0
        more = tl.load(start + 5 * step) if BITS == 6 else 0
        for part in tl.static_range(4):
            low = tl.load(start + part * step) if BITS < 8 else 0
            for half in tl.static_range(2):
                first = block * 256 + (part + 4 * half) * 32
                column = first + lane
                if BITS == 8:
                    low = tl.load(start + (part + 4 * half) * step)
                code = codes_of(low, extra, more, part + 4 * half, BITS)
                w = numbers_of(code, first, lane[None, :], read[:, None], scales, offsets, num_features, WIDTH, ZERO,
                               GROUP, OFFSETS, _INTEGERS)
                values = tl.load(
                    x_row + column[None, :], mask=used[:, None] & (column < WIDTH)[None, :], other=0.0)
                acc = tl.dot(values, tl.trans(w.to(values.dtype)), acc)
    if BIAS:
        acc += tl.load(bias + feature, mask=real, other=0.0).to(tl.float32)[None, :]
    target = row.to(tl.int64)[:, None] * num_features + feature[None, :]
    stores = used[:, None] & real[None, :]
    if RESIDUAL:
        acc += tl.load(residual + target, mask=stores, other=0.0).to(tl.float32)
    tl.store(out + target, acc.to(out.dtype.element_ty), mask=stores)


@triton.jit
def _unpack_kernel(
    pieces, scales, offsets, out, num_features, WIDTH: tl.constexpr, BITS: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, OFFSETS: tl.constexpr, FEATURES: tl.constexpr,
):  # fmt: skip
    """A block of 256 columns of some features in floats."""
    feature = tl.program_id(0) * FEATURES + tl.arange(0, FEATURES)
    real = feature < num_features
    read = tl.minimum(feature, num_features - 1)
    lane = tl.arange(0, 32)
    step = num_features.to(tl.int64) * 32
    block = tl.program_id(1)
    start = pieces + read.to(tl.int64)[:, None] * 32 + lane[None, :] + block * BITS * step
    extra = tl.load(start + 4 * step) if BITS < 8 else 0
    more = tl.load(start + 5 * step) if BITS == 6 else 0
    for part in tl.static_range(8):
        low = tl.load(start + (part if BITS == 8 else part % 4) * step)
        first = block * 256 + part * 32
        column = first + lane
        code = codes_of(low, extra, more, part, BITS)
        w = numbers_of(code, first, lane[None, :], read[:, None], scales, offsets, num_features, WIDTH, ZERO, GROUP,
                       OFFSETS, _INTEGERS)
        target = out + feature.to(tl.int64)[:, None] * WIDTH + column[None, :]
        tl.store(target, w.to(out.dtype.element_ty), mask=real[:, None] & (column < WIDTH)[None, :])


def unpack(weight: PackedPlanes, out: Tensor) -> Tensor:
    """The weight in floats, [features, width], into `out`: for GEMMs of many rows."""
    features = 16
    _unpack_kernel[(triton.cdiv(weight.features, features), weight.pieces.shape[0])](
        weight.pieces, weight.scales, weight.scales if weight.offsets is None else weight.offsets, out,
        weight.features, weight.width, weight.bits, weight.zero, weight.group, weight.offsets is not None, features,
        num_warps=4,
    )  # fmt: skip
    return out


def unpacked(weight: PackedPlanes) -> Tensor:
    """float32 [features, width]: what `unpack` writes, before its rounding."""
    pieces = weight.pieces.view(-1, 1, weight.features, PIECE) if weight.bits == 8 else weight.pieces
    codes = codes_in(pieces, weight.bits)[:, : weight.width]
    grouped = (codes.float() - weight.zero).view(weight.features, -1, weight.group)
    grouped *= weight.scales.t().float()[..., None]
    if weight.offsets is not None:
        grouped += weight.offsets.t().float()[..., None]
    return grouped.view(weight.features, weight.width)


def linear_planes(
    x: Tensor, weight: PackedPlanes, bias: Tensor | None = None, residual: Tensor | None = None, *,
    sizes: PlanesShape = PlanesShape(), out: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """[rows, features] of up to `MOST_ROWS` rows: x W^T + bias + residual."""
    rows = x.shape[0]
    if out is None:
        out = torch.empty(rows, weight.features, dtype=x.dtype, device=x.device)
    height = max(16, triton.next_power_of_2(rows))
    _planes_kernel[(triton.cdiv(weight.features, sizes.features), triton.cdiv(rows, height))](
        x, weight.pieces, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        out if bias is None else bias, out if residual is None else residual, out, rows, weight.features,
        weight.width, weight.bits, weight.zero, weight.group, weight.offsets is not None, height, sizes.features,
        bias is not None, residual is not None, pdl, num_warps=sizes.warps, num_stages=sizes.stages,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
