"""Experts whose weights stay packed, for a handful of rows: bound by reading codes, so without tensor cores and without
sorting rows, as `expert_few`.

A program takes some output features of a pair (token, expert) and some blocks of columns at once. Their pieces of 32
bytes lie side by side, so that a warp reads whole lines of memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.routing import Clamp
from quire.kernels.triton import code_planes
from quire.kernels.triton.activation import KINDS
from quire.kernels.triton.code_planes import codes_of, numbers_of
from quire.kernels.triton.expert_codes import CodedExperts
from quire.kernels.triton.expert_linear import gate_and_up


@dataclass(frozen=True, slots=True)
class CodedFewShape:
    """Output features of a program, columns of the weight read at once (256 at least), warps."""

    features: int
    columns: int
    warps: int

    def blocks(self, weight: CodedExperts) -> int:
        """As many at once, but no more than there are."""
        each = code_planes.columns_of(weight.bits)
        return min(max(1, self.columns // each), triton.next_power_of_2(weight.pieces.shape[0]))


UP, DOWN = CodedFewShape(8, 512, 4), CodedFewShape(8, 1024, 4)
"""Not timed yet. Columns are unrolled, so that their loads are in flight together: of gate and up half as many."""


@triton.jit
def _times(
    acc, row, place, step, block, feature, lane, order, scales, offsets, num_features, factor, there, K: tl.constexpr,
    ORDERED: tl.constexpr, BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """acc [blocks, features, 32] + the products of one row, times a factor, and some blocks of its expert; where it is
    not `there`, with zeros."""
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    LOWS: tl.constexpr = 1 if PIECES == 1 else 4
    HALVES: tl.constexpr = 1 if BITS == 8 else 2
    # Blocks behind the last are multiplied by zeros.
    start = place + (tl.minimum(block, BLOCKS - 1) * PIECES).to(tl.int64) * step
    extra = tl.load(start + 4 * step) if PIECES > 4 else 0
    more = tl.load(start + 5 * step) if PIECES > 5 else 0
    for part in tl.static_range(LOWS):
        low = tl.load(start + part * step, eviction_policy="evict_first")
        for half in tl.static_range(HALVES):
            begin = block * BLOCK + (part + LOWS * half) * 32
            k = begin + lane
            if ORDERED:
                k = tl.load(order + k, mask=k < K, other=K)
            values = tl.load(row + k, mask=(k < K) & there, other=0.0).to(tl.float32) * factor
            code = codes_of(low, extra, more, part + LOWS * half, BITS)
            acc += values * numbers_of(code, begin, lane, feature, scales, offsets, num_features, K, ZERO, GROUP,
                                       OFFSETS, NUMBERS)
    return acc


@triton.jit
def _coded_few_up_kernel(
    x, pieces, scales, offsets, order, bias, out, chosen, limit, alpha, num_features, TOP_K: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, CLAMPED: tl.constexpr, BIASED: tl.constexpr,
    ORDERED: tl.constexpr, BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr,
    OFFSETS: tl.constexpr, BLOCK: tl.constexpr, PIECES: tl.constexpr, FEATURES: tl.constexpr, AT_ONCE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, N]: some features of one pair. Nothing is written for one without an expert."""
    TILES: tl.constexpr = (N + FEATURES - 1) // FEATURES
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    pair = tl.program_id(0) // TILES
    feature = (tl.program_id(0) % TILES) * FEATURES + tl.arange(0, FEATURES)
    real = feature < N
    lane, block = tl.arange(0, 32)[None, None, :], tl.arange(0, AT_ONCE)[:, None, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(chosen + pair)
    if expert >= 0:
        first = expert * (2 * N)
        read = (first + tl.minimum(feature, N - 1))[None, :, None]
        step = num_features.to(tl.int64) * 32
        place = pieces + read.to(tl.int64) * 32 + lane
        row = x + (pair // TOP_K).to(tl.int64) * K
        own = order + expert.to(tl.int64) * K if ORDERED else order
        gate = tl.zeros([AT_ONCE, FEATURES, 32], tl.float32)
        up = tl.zeros([AT_ONCE, FEATURES, 32], tl.float32)
        for start in tl.static_range(0, BLOCKS, AT_ONCE):
            gate = _times(gate, row, place, step, start + block, read, lane, own, scales, offsets, num_features, 1.0,
                          True, K, ORDERED, BITS, NUMBERS, ZERO, GROUP, OFFSETS, BLOCK, PIECES)
            up = _times(up, row, place + N * 32, step, start + block, read + N, lane, own, scales, offsets,
                        num_features, 1.0, True, K, ORDERED, BITS, NUMBERS, ZERO, GROUP, OFFSETS, BLOCK, PIECES)
        low = tl.sum(tl.sum(gate, axis=2), axis=0)
        high = tl.sum(tl.sum(up, axis=2), axis=0)
        if BIASED:
            low += tl.load(bias + first + feature, mask=real, other=0.0).to(tl.float32)
            high += tl.load(bias + first + N + feature, mask=real, other=0.0).to(tl.float32)
        found = gate_and_up(low, high, limit, alpha, KIND, CLAMPED)
        tl.store(out + pair.to(tl.int64) * N + feature, found.to(out.dtype.element_ty), mask=real)


@triton.jit
def _coded_few_down_kernel(
    inner, pieces, scales, offsets, order, bias, residual, out, chosen, gains, num_features, TOP_K: tl.constexpr,
    N: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, RESIDUAL: tl.constexpr, ORDERED: tl.constexpr,
    BITS: tl.constexpr, NUMBERS: tl.constexpr, ZERO: tl.constexpr, GROUP: tl.constexpr, OFFSETS: tl.constexpr,
    BLOCK: tl.constexpr, PIECES: tl.constexpr, FEATURES: tl.constexpr, AT_ONCE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N]: some features of one token, the sum of its experts in their order."""
    TILES: tl.constexpr = (N + FEATURES - 1) // FEATURES
    BLOCKS: tl.constexpr = (K + BLOCK - 1) // BLOCK
    token = tl.program_id(0) // TILES
    feature = (tl.program_id(0) % TILES) * FEATURES + tl.arange(0, FEATURES)
    real = feature < N
    lane, block = tl.arange(0, 32)[None, None, :], tl.arange(0, AT_ONCE)[:, None, None]
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    step = num_features.to(tl.int64) * 32
    acc = tl.zeros([AT_ONCE, FEATURES, 32], tl.float32)
    added = tl.zeros([FEATURES], tl.float32)
    for index in range(TOP_K):
        pair = token * TOP_K + index
        expert = tl.load(chosen + pair)
        gain = tl.load(gains + pair)
        first = tl.maximum(expert, 0) * N
        read = (first + tl.minimum(feature, N - 1))[None, :, None]
        place = pieces + read.to(tl.int64) * 32 + lane
        row = inner + pair.to(tl.int64) * K
        own = order + tl.maximum(expert, 0).to(tl.int64) * K if ORDERED else order
        for start in tl.static_range(0, BLOCKS, AT_ONCE):
            acc = _times(acc, row, place, step, start + block, read, lane, own, scales, offsets, num_features, gain,
                         expert >= 0, K, ORDERED, BITS, NUMBERS, ZERO, GROUP, OFFSETS, BLOCK, PIECES)
        if BIASED:
            added += gain * tl.load(bias + first + feature, mask=real, other=0.0).to(tl.float32)
    found = tl.sum(tl.sum(acc, axis=2), axis=0)
    if BIASED:
        found += added
    target = token.to(tl.int64) * N + feature
    if RESIDUAL:
        found += tl.load(residual + target, mask=real, other=0.0).to(tl.float32)
    tl.store(out + target, found.to(out.dtype.element_ty), mask=real)


def coded_few_up(
    x: Tensor, weight: CodedExperts, bias: Tensor | None, chosen: Tensor, kind: str, clamp: Clamp | None, *,
    sizes: CodedFewShape = UP, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """`expert_few.few_up` of experts in codes, each [2 I, K]."""
    features = weight.features // 2
    out = torch.empty(chosen.numel(), features, dtype=x.dtype, device=x.device)
    _coded_few_up_kernel[(chosen.numel() * triton.cdiv(features, sizes.features),)](
        x, weight.pieces, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        chosen if weight.order is None else weight.order, x if bias is None else bias, out, chosen,
        0.0 if clamp is None else clamp.limit, 0.0 if clamp is None else clamp.alpha, weight.pieces.shape[2],
        chosen.shape[1], features, x.shape[1], KINDS[kind], clamp is not None, bias is not None,
        *_format(weight), sizes.features, sizes.blocks(weight), pdl, num_warps=sizes.warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def coded_few_down(
    inner: Tensor, weight: CodedExperts, bias: Tensor | None, chosen: Tensor, gains: Tensor,
    residual: Tensor | None = None, *, sizes: CodedFewShape = DOWN, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """`expert_few.few_down` of experts in codes, each [N, I]."""
    out = torch.empty(chosen.shape[0], weight.features, dtype=inner.dtype, device=inner.device)
    _coded_few_down_kernel[(chosen.shape[0] * triton.cdiv(weight.features, sizes.features),)](
        inner, weight.pieces, weight.scales, weight.scales if weight.offsets is None else weight.offsets,
        chosen if weight.order is None else weight.order, inner if bias is None else bias,
        inner if residual is None else residual, out, chosen, gains, weight.pieces.shape[2], chosen.shape[1],
        weight.features, inner.shape[1], bias is not None, residual is not None, *_format(weight), sizes.features,
        sizes.blocks(weight), pdl, num_warps=sizes.warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def _format(weight: CodedExperts) -> tuple[bool | int, ...]:
    """What the kernels are compiled for."""
    return (
        weight.order is not None, weight.bits, weight.numbers, weight.zero, weight.group, weight.offsets is not None,
        code_planes.columns_of(weight.bits), weight.pieces.shape[1],
    )  # fmt: skip
