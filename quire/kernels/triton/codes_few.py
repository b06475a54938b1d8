"""Few rows times a small weight of 4-bit codes, or one in groups of 32 columns: bound by latency, not by reading it.

Codes lie as `linear_codes` packs them. A program takes a strip of 16 features of one row: four lines of words, in which
a thread finds codes of two features and four columns side by side. It multiplies them as floats, without tensor cores
and without a ring, so it needs no Hopper; norm, gate, bias and residual are fused. Every row reads the weight again,
from the L2 cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.triton.activation import KINDS, activate
from quire.kernels.triton.linear_codes import COLUMNS, PackedCodes

MOST_ROWS = 8
STRIP = 16
"""Features of a program."""
_AT_ONCE = 16
"""Slabs of 64 columns whose words a program loads together."""
_UNROLLED = 4
"""Times that it does so without a loop."""
_WARPS = 8


@triton.jit
def _halves(pair, like):
    """The two 16-bit floats of a word, in float32."""
    low = (pair & 0xFFFF).to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)
    high = (pair >> 16).to(tl.int16).to(like.dtype.element_ty, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _number(word, SHIFT: tl.constexpr):
    """A code less 8. Put into the last bits of 2 ** 23, which is cheaper than a conversion."""
    return (((word >> SHIFT) & 15) | 0x4B000000).to(tl.float32, bitcast=True) - 8388616.0


@triton.jit
def _words(words, strip, begin, SLABS: tl.constexpr, DEPTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """[lines, AT_ONCE * 32] of strips, one for each line, from slab `begin` on."""
    line, place = tl.arange(0, strip.shape[0])[:, None] % 4, tl.arange(0, AT_ONCE * 32)[None, :]
    if DEPTH == 64:
        height = strip // 8 * 32 + strip % 8 * 4 + line
    else:
        height = strip // 8 * 32 + line // 2 * 16 + strip % 8 * 2 + line % 2
    start = words + height.to(tl.int64) * (SLABS * 32) + place
    return tl.load(start + begin * 32, mask=begin + place // 32 < SLABS, other=0)


@triton.jit
def _times(
    first, second, word, strip, begin, x, x_pairs, gain, scales, num_features, SLABS: tl.constexpr,
    GROUP: tl.constexpr, DEPTH: tl.constexpr, OFFSETS: tl.constexpr, NORM: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """`first` and `second` [lines, AT_ONCE * 32] + the products of the two features whose codes each word has."""
    line, place = tl.arange(0, strip.shape[0])[:, None] % 4, tl.arange(0, AT_ONCE * 32)[None, :]
    lane = place % 32
    if DEPTH == 64:
        member = line * 2 + lane // 16
        column = lane % 4 * 16 + lane // 4 % 4 * 2
    else:
        member = line % 2 * 4 + lane // 8
        column = line // 2 * 32 + lane % 2 * 16 + lane // 2 % 4 * 2
    column = (begin + place // 32) * 64 + column
    inside = column < SLABS * 64
    a, b = _halves(tl.load(x_pairs + column // 2, mask=inside, other=0), x)
    c, d = _halves(tl.load(x_pairs + column // 2 + 4, mask=inside, other=0), x)
    if NORM:
        a *= tl.load(gain + column, mask=inside, other=0.0).to(tl.float32)
        b *= tl.load(gain + column + 1, mask=inside, other=0.0).to(tl.float32)
        c *= tl.load(gain + column + 8, mask=inside, other=0.0).to(tl.float32)
        d *= tl.load(gain + column + 9, mask=inside, other=0.0).to(tl.float32)
    low = _number(word, 0) * a + _number(word, 16) * b + _number(word, 8) * c + _number(word, 24) * d
    high = _number(word, 4) * a + _number(word, 20) * b + _number(word, 12) * c + _number(word, 28) * d
    feature = strip * 16 + member
    of_group = scales + column // GROUP * num_features + feature
    scale_low, offset_low = _halves(tl.load(of_group, mask=inside & (feature < num_features), other=0), x)
    scale_high, offset_high = _halves(tl.load(of_group + 8, mask=inside & (feature + 8 < num_features), other=0), x)
    first += scale_low * low
    second += scale_high * high
    if OFFSETS:
        total = a + b + c + d
        first += offset_low * total
        second += offset_high * total
    return first, second


@triton.jit
def _summed(parts, DEPTH: tl.constexpr, AT_ONCE: tl.constexpr):
    """[strips, 8] features of what the threads have."""
    STRIPS: tl.constexpr = parts.shape[0] // 4
    if DEPTH == 64:
        found = tl.sum(tl.reshape(parts, [STRIPS * 4, AT_ONCE, 2, 16]), axis=3)
        return tl.reshape(tl.sum(found, axis=1), [STRIPS, 8])
    else:
        found = tl.sum(tl.reshape(parts, [STRIPS, 2, 2 * AT_ONCE * 4, 8]), axis=3)
        found = tl.reshape(tl.sum(found, axis=1), [STRIPS, 2, AT_ONCE, 4])
        return tl.reshape(tl.sum(found, axis=2), [STRIPS, 8])


@triton.jit
def _codes_few_kernel(
    x, x_pairs, words, scales, bias, residual, gain, out, eps, num_features, SLABS: tl.constexpr, GROUP: tl.constexpr,
    DEPTH: tl.constexpr, OFFSETS: tl.constexpr, PADDED: tl.constexpr, AT_ONCE: tl.constexpr, UNROLLED: tl.constexpr,
    BIAS: tl.constexpr, RESIDUAL: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, KIND: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """16 outputs of one row, of `num_features`; with a gate the weight has twice as many features, and a program takes
    a strip of each half."""
    STRIPS: tl.constexpr = 2 if GATED else 1
    row = tl.program_id(0).to(tl.int64)
    strip = tl.program_id(1) + tl.arange(0, 4 * STRIPS)[:, None] // 4 * (num_features // 16)
    stored = STRIPS * num_features
    word = _words(words, strip, 0, SLABS, DEPTH, AT_ONCE)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    pairs = x_pairs + row * (SLABS * 32)
    first = tl.zeros([4 * STRIPS, AT_ONCE * 32], tl.float32)
    first, second = _times(first, first, word, strip, 0, x, pairs, gain, scales, stored, SLABS, GROUP, DEPTH, OFFSETS,
                           NORM, AT_ONCE)
    if UNROLLED:
        for begin in tl.static_range(AT_ONCE, SLABS, AT_ONCE):
            word = _words(words, strip, begin, SLABS, DEPTH, AT_ONCE)
            first, second = _times(first, second, word, strip, begin, x, pairs, gain, scales, stored, SLABS, GROUP,
                                   DEPTH, OFFSETS, NORM, AT_ONCE)
    else:
        for begin in range(AT_ONCE, SLABS, AT_ONCE):
            word = _words(words, strip, begin, SLABS, DEPTH, AT_ONCE)
            first, second = _times(first, second, word, strip, begin, x, pairs, gain, scales, stored, SLABS, GROUP,
                                   DEPTH, OFFSETS, NORM, AT_ONCE)
    found = tl.join(_summed(first, DEPTH, AT_ONCE), _summed(second, DEPTH, AT_ONCE))
    if NORM:
        column = tl.arange(0, PADDED)
        values = tl.load(x + row * (SLABS * 64) + column, mask=column < SLABS * 64, other=0.0).to(tl.float32)
        found *= tl.rsqrt(tl.sum(values * values, axis=0) / (SLABS * 64) + eps)
    feature = tl.program_id(1) * 16 + tl.arange(0, 8)[:, None] + 8 * tl.arange(0, 2)[None, :]
    real = feature < num_features
    if BIAS:
        half = num_features * tl.arange(0, STRIPS)[:, None, None]
        found += tl.load(bias + half + feature[None, :, :], mask=real[None, :, :], other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.permute(found, [1, 2, 0]))
        result = activate(gate, KIND) * up
    else:
        result = tl.reshape(found, [8, 2])
    target = row * num_features + feature
    if RESIDUAL:
        result += tl.load(residual + target, mask=real, other=0.0).to(tl.float32)
    tl.store(out + target, result.to(out.dtype.element_ty), mask=real)


def fits(rows: int, weight: PackedCodes, gated: bool = False) -> bool:
    """Whether the kernel can multiply it: of a gate and what it is for, whole strips."""
    return rows <= MOST_ROWS and (not gated or weight.features % (2 * STRIP) == 0)


def linear_codes_few(
    x: Tensor,
    weight: PackedCodes,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    norm: Tensor | None = None,
    eps: float = 0.0,
    gated: str | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
) -> Tensor:
    """[rows, features]: norm(x) W^T + bias, or act(first half) * second half of it, + residual. Its reference is
    `linear_few.linear_reference` of `linear_codes.unpacked`."""
    rows, slabs = x.shape[0], weight.width // COLUMNS
    features = weight.features // (2 if gated else 1)
    at_once = min(_AT_ONCE, triton.next_power_of_2(slabs))
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    _codes_few_kernel[(rows, triton.cdiv(features, STRIP))](  # rows that share a strip, beside one another
        x,
        x.view(torch.int32),
        weight.words,
        weight.scales,
        x if bias is None else bias,
        x if residual is None else residual,
        x if norm is None else norm,
        out,
        eps,
        features,
        slabs,
        weight.group,
        weight.depth,
        weight.offsets,
        triton.next_power_of_2(weight.width),
        at_once,
        slabs <= _UNROLLED * at_once,
        bias is not None,
        residual is not None,
        norm is not None,
        gated is not None,
        KINDS[gated or "silu"],
        pdl,
        num_warps=_WARPS,
        **({"launch_pdl": True} if pdl else {}),
    )
    return out
