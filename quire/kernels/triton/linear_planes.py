"""GEMMs of a weight of 5-, 6- or 8-bit codes with scales of groups: W8A16, and what GGUF stores in 5 and 6 bits.

Codes stay packed in memory. 256 columns of a feature are as many pieces of 32 bytes as a code has bits, all features of
a piece side by side: uint8 [blocks of columns, bits, features, 32]. Byte i of a piece has a part of the codes of
columns 32 s + i (s = 0 to 7), so that unpacking moves nothing from one place to another:

    8 bits   piece s: the code
    5, 6     piece s % 4: its low four bits, those of s < 4 in the low half of the byte
    5        piece 4: the fifth bit, at bit s
    6        piece 4 + s // 4: two more bits, at bits 2 (s % 4) and 2 (s % 4) + 1

A weight is scale * (code - zero) + offset in float32, rounded once to the activations' type. Up to 64 rows are
multiplied by the codes; for more the weight is unpacked to scratch memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.quantized import QuantizedWeight

BITS = (5, 6, 8)
UNIT = 32
"""Columns come in multiples of so many."""
MOST_ROWS = 64
_BLOCK, _PIECE = 256, 32


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


def pack(weight: QuantizedWeight) -> PackedPlanes:
    """On the device that the weight lies on. Columns are filled up to whole blocks."""
    features, width = weight.shape
    blocks = triton.cdiv(width, _BLOCK)
    codes = weight.codes
    if width % _BLOCK:
        codes = torch.nn.functional.pad(codes, (0, blocks * _BLOCK - width))
    parts = codes.view(features, blocks, 8, _PIECE).permute(1, 2, 0, 3)
    pieces = torch.empty(blocks, weight.bits, features, _PIECE, dtype=torch.uint8, device=codes.device)
    if weight.bits == 8:
        pieces.copy_(parts)
    else:
        for place in range(4):
            pieces[:, place] = parts[:, place] & 15 | (parts[:, place + 4] & 15) << 4
        each, extra = weight.bits - 4, pieces[:, 4:].zero_()
        for place in range(8):
            extra[:, place * each // 8] |= parts[:, place] >> 4 << place * each % 8
    offsets = None if weight.offsets is None else _narrow(weight.offsets)
    return PackedPlanes(pieces, _narrow(weight.scales), offsets, width, weight.bits, weight.zero, weight.group)


def _narrow(scales: Tensor) -> Tensor:
    """[groups, features], in half precision unless that would round away more than the last of ten bits."""
    turned = scales.t().contiguous()
    half = turned.to(torch.float16)
    lost = (half.float() - turned).abs() > turned.abs() * 2.0**-10
    return turned if bool(lost.any()) else half


@triton.jit
def _numbers(code, column, feature, real, scales, offsets, num_features, WIDTH, ZERO: tl.constexpr,
             GROUP: tl.constexpr, OFFSETS: tl.constexpr):  # fmt: skip
    """The floats that codes [features, 32] stand for, of columns [32] that begin at a multiple of 32."""
    wide = code.to(tl.int32) - ZERO
    if GROUP % 32 == 0:
        group = tl.min(column, axis=0) // GROUP
        place = group * num_features + feature
        inside = real & (group * GROUP < WIDTH)
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)[:, None]
        if OFFSETS:
            offset = tl.load(offsets + place, mask=inside, other=0.0).to(tl.float32)[:, None]
    else:
        place = (column // GROUP)[None, :] * num_features + feature[:, None]
        inside = real[:, None] & (column < WIDTH)[None, :]
        scale = tl.load(scales + place, mask=inside, other=0.0).to(tl.float32)
        if OFFSETS:
            offset = tl.load(offsets + place, mask=inside, other=0.0).to(tl.float32)
    found = wide.to(tl.float32) * scale
    if OFFSETS:
        found += offset
    return found


@triton.jit
def _codes_of(start, step, low, extra, more, S: tl.constexpr, BITS: tl.constexpr):
    """The codes of part S of a block: `low` is piece S % 4, `extra` and `more` are pieces 4 and 5; 8 bits load theirs
    from `start`, `step` bytes a piece."""
    if BITS == 8:
        return tl.load(start + S * step)
    elif BITS == 5:
        return (low >> (S // 4 * 4)) & 15 | ((extra >> S) & 1) << 4
    else:
        high = extra if S < 4 else more
        return (low >> (S // 4 * 4)) & 15 | ((high >> (S % 4 * 2)) & 3) << 4


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
                column = block * 256 + (part + 4 * half) * 32 + lane
                code = _codes_of(start, step, low, extra, more, part + 4 * half, BITS)
                w = _numbers(code, column, read, real, scales, offsets, num_features, WIDTH, ZERO, GROUP, OFFSETS)
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
        low = tl.load(start + part % 4 * step) if BITS < 8 else 0
        column = block * 256 + part * 32 + lane
        code = _codes_of(start, step, low, extra, more, part, BITS)
        w = _numbers(code, column, read, real, scales, offsets, num_features, WIDTH, ZERO, GROUP, OFFSETS)
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
    parts = weight.pieces.permute(2, 0, 1, 3)
    if weight.bits < 8:
        low = torch.cat([parts[:, :, :4] & 15, parts[:, :, :4] >> 4], 2)
        each = weight.bits - 4
        mask = (1 << each) - 1
        high = [parts[:, :, 4 + s * each // 8] >> s * each % 8 & mask for s in range(8)]
        parts = low | torch.stack(high, 2) << 4
    codes = parts.reshape(weight.features, -1)[:, : weight.width]
    grouped = (codes.float() - weight.zero).view(weight.features, -1, weight.group)
    grouped *= weight.scales.t().float()[..., None]
    if weight.offsets is not None:
        grouped += weight.offsets.t().float()[..., None]
    return grouped.view(weight.features, weight.width)


def linear_planes(
    x: Tensor, weight: PackedPlanes, bias: Tensor | None = None, residual: Tensor | None = None, *,
    sizes: PlanesShape = PlanesShape(), out: Tensor | None = None, pdl: bool = False,  # noqa: B008 (frozen)
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
