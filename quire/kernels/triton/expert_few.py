"""Experts for a handful of rows: bound by reading the weights, so without tensor cores and without sorting rows.

As in `linear_row` a program takes some output features and loads their weights in pieces of 16 bytes a thread. Gate and
up of a pair (token, expert) are one launch; down is another, in which a program goes through all experts of its token,
so that their sum, and the residual, need no kernel of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.routing import Clamp
from quire.kernels.triton.activation import KINDS
from quire.kernels.triton.expert_linear import gate_and_up

FEW_PAIRS = 32
"""Up to so many, most experts have one row: sorting would cost more than reading an expert twice."""


@dataclass(frozen=True, slots=True)
class FewShape:
    """Output features of a program, columns of the weight read at once, warps."""

    features: int
    columns: int
    warps: int


UP, DOWN = FewShape(2, 1024, 4), FewShape(2, 256, 1)
"""H200, 2026-11-16, one token of Qwen3-30B-A3B (`python -m quire.bench.gpu.tune_experts`): 14.0 and 8.5 us, 84% and 69%
of the bandwidth."""


@triton.jit
def _few_up_kernel(
    x, weight, bias, out, chosen, limit, alpha, TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    KIND: tl.constexpr, CLAMPED: tl.constexpr, BIASED: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [pairs, N]: some features of one pair. Nothing is written for one without an expert."""
    TILES: tl.constexpr = (N + FEATURES - 1) // FEATURES
    pair = tl.program_id(0) // TILES
    feature = (tl.program_id(0) % TILES) * FEATURES + tl.arange(0, FEATURES)
    real = feature < N
    column = tl.arange(0, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.load(chosen + pair)
    if expert >= 0:
        first = expert.to(tl.int64) * (2 * N)
        place = weight + (first + feature)[:, None] * K
        row = x + (pair // TOP_K).to(tl.int64) * K
        gate = tl.zeros([FEATURES, COLUMNS], tl.float32)
        up = tl.zeros([FEATURES, COLUMNS], tl.float32)
        for start in tl.static_range(0, K, COLUMNS):
            k = start + column[None, :]
            loads = real[:, None] & (k < K)
            a = tl.load(place + k, mask=loads, other=0.0, eviction_policy="evict_first")
            b = tl.load(place + N * K + k, mask=loads, other=0.0, eviction_policy="evict_first")
            values = tl.load(row + k, mask=k < K, other=0.0).to(tl.float32)
            gate += values * a.to(tl.float32)
            up += values * b.to(tl.float32)
        low = tl.sum(gate, axis=1)
        high = tl.sum(up, axis=1)
        if BIASED:
            low += tl.load(bias + first + feature, mask=real, other=0.0).to(tl.float32)
            high += tl.load(bias + first + N + feature, mask=real, other=0.0).to(tl.float32)
        found = gate_and_up(low, high, limit, alpha, KIND, CLAMPED)
        tl.store(out + pair.to(tl.int64) * N + feature, found.to(out.dtype.element_ty), mask=real)


@triton.jit
def _few_down_kernel(
    inner, weight, bias, residual, out, chosen, gains, TOP_K: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    BIASED: tl.constexpr, RESIDUAL: tl.constexpr, FEATURES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [T, N]: some features of one token, the sum of its experts in their order."""
    TILES: tl.constexpr = (N + FEATURES - 1) // FEATURES
    token = tl.program_id(0) // TILES
    feature = (tl.program_id(0) % TILES) * FEATURES + tl.arange(0, FEATURES)
    real = feature < N
    column = tl.arange(0, COLUMNS)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    acc = tl.zeros([FEATURES, COLUMNS], tl.float32)
    added = tl.zeros([FEATURES], tl.float32)
    for index in tl.static_range(TOP_K):
        pair = token * TOP_K + index
        expert = tl.load(chosen + pair)
        gain = tl.load(gains + pair)
        first = tl.maximum(expert, 0).to(tl.int64) * N
        place = weight + (first + feature)[:, None] * K
        row = inner + pair.to(tl.int64) * K
        for start in tl.static_range(0, K, COLUMNS):
            k = start + column[None, :]
            loads = (k < K) & (expert >= 0)
            w = tl.load(place + k, mask=real[:, None] & loads, other=0.0, eviction_policy="evict_first")
            values = tl.load(row + k, mask=loads, other=0.0).to(tl.float32) * gain
            acc += values * w.to(tl.float32)
        if BIASED:
            added += gain * tl.load(bias + first + feature, mask=real, other=0.0).to(tl.float32)
    found = tl.sum(acc, axis=1)
    if BIASED:
        found += added
    place = token.to(tl.int64) * N + feature
    if RESIDUAL:
        found += tl.load(residual + place, mask=real, other=0.0).to(tl.float32)
    tl.store(out + place, found.to(out.dtype.element_ty), mask=real)


def few_up(
    x: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, kind: str, clamp: Clamp | None, *,
    sizes: FewShape = UP, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """[pairs, I]: the gated activation of x [T, K] through weight [experts, 2 I, K], for each pair of int32 `chosen`
    [T, top_k]."""
    width, features = x.shape[1], weight.shape[1] // 2
    out = torch.empty(chosen.numel(), features, dtype=x.dtype, device=x.device)
    _few_up_kernel[(chosen.numel() * triton.cdiv(features, sizes.features),)](
        x, weight, x if bias is None else bias, out, chosen, 0.0 if clamp is None else clamp.limit,
        0.0 if clamp is None else clamp.alpha, chosen.shape[1], features, width, KINDS[kind], clamp is not None,
        bias is not None, sizes.features, min(sizes.columns, triton.next_power_of_2(width)), pdl,
        num_warps=sizes.warps, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


def few_down(
    inner: Tensor, weight: Tensor, bias: Tensor | None, chosen: Tensor, gains: Tensor, residual: Tensor | None = None,
    *, sizes: FewShape = DOWN, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """[T, N]: the sum over a token's pairs of inner [pairs, I] through weight [experts, N, I], times float32 `gains`
    [T, top_k]; and the residual [T, N]."""
    width, features = inner.shape[1], weight.shape[1]
    out = torch.empty(chosen.shape[0], features, dtype=inner.dtype, device=inner.device)
    _few_down_kernel[(chosen.shape[0] * triton.cdiv(features, sizes.features),)](
        inner, weight, inner if bias is None else bias, inner if residual is None else residual, out, chosen, gains,
        chosen.shape[1], features, width, bias is not None, residual is not None, sizes.features,
        min(sizes.columns, triton.next_power_of_2(width)), pdl, num_warps=sizes.warps,
        **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out
